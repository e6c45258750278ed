"""Four tasks built from ICD and HPO terms: rows and their splits.

The rows are questions made from code lists, not exams. Splits are by group (code or
parent term), so that siblings never lie on both sides, and stable over runs and
machines. A prompt and its answer are joined as they are: the space between them, where
the language has one, belongs to the answer.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sources import read_diseases, read_phenotypes, read_procedures

Split = Literal["train", "calibration", "test"]
SPLITS: tuple[Split, ...] = ("train", "calibration", "test")
LETTERS = "ABCD"

# ICD-10 chapters with diseases in them: symptoms (18), causes (20), contacts (21) and
# special codes (22) are left out.
_CHAPTERS = {
    1: "Infectious diseases",
    2: "Neoplasms",
    3: "Blood and immune disorders",
    4: "Endocrine and metabolic diseases",
    5: "Mental disorders",
    6: "Nervous system diseases",
    7: "Eye diseases",
    8: "Ear diseases",
    9: "Circulatory diseases",
    10: "Respiratory diseases",
    11: "Digestive diseases",
    12: "Skin diseases",
    13: "Musculoskeletal diseases",
    14: "Genitourinary diseases",
    15: "Pregnancy and childbirth",
    16: "Perinatal conditions",
    17: "Congenital malformations",
    19: "Injury and poisoning",
}

# ICD-9-CM volume 3: first section, last section, body system. Short labels keep four
# options near 30 tokens; this tokenizer spends about two on a Chinese character.
_BODY_SYSTEMS = (
    (1, 5, "神经"),
    (6, 7, "内分泌"),
    (8, 16, "眼"),
    (18, 20, "耳"),
    (21, 29, "鼻口咽"),
    (30, 34, "呼吸"),
    (35, 39, "心血管"),
    (40, 41, "血液淋巴"),
    (42, 54, "消化"),
    (55, 59, "泌尿"),
    (60, 64, "男性生殖"),
    (65, 71, "女性生殖"),
    (72, 75, "产科"),
    (76, 84, "骨骼肌肉"),
    (85, 86, "皮肤乳房"),
)

# Most characters of a term or definition; longer ones are left out.
_MAX_ENGLISH_NAME = 80
_MAX_CHINESE_NAME = 24
_MAX_DEFINITION = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One question with its right answer.

    Attributes:
        prompt: question, options where there are any, and the cue for the answer.
        target: the right answer, to be appended to ``prompt`` as it is.
        choices: all answers to choose from, ``target`` among them; empty for free text.
        group: what is split on, such as a code's first three characters.
    """

    prompt: str
    target: str
    group: str
    choices: tuple[str, ...] = ()

    def to_json(self) -> dict[str, str | list[str]]:
        """Return the row in a shape that calibration files have."""
        if not self.choices:
            return {"prompt": self.prompt, "completion": self.target}
        letter = LETTERS[self.choices.index(self.target)]
        return {"prompt": self.prompt, "choices": list(self.choices), "answer": letter}


@dataclass(frozen=True, slots=True)
class Task:
    """A way to make rows, and how many of one answer each split may hold.

    Attributes:
        read_rows: makes all rows from the folder with the wheels.
        max_per_answer: rows with the same answer that each split keeps; None for all.
            Guessing the commonest class would score 0.39 (English) or 0.49 (Chinese)
            on the natural mix.
    """

    read_rows: Callable[[Path], Iterator[Row]]
    max_per_answer: dict[Split, int] | None = None


def build_splits(task: str, wheels: Path) -> dict[Split, list[Row]]:
    """Make a task's rows, shuffled inside each split.

    Args:
        task: one of ``TASKS``.
        wheels: folder that holds the wheels.

    Raises:
        ValueError: a wheel is missing, or a question lies in two splits.
    """
    splits: dict[Split, list[Row]] = {name: [] for name in SPLITS}
    for row in TASKS[task].read_rows(wheels):
        splits[choose_split(row.group)].append(row)
    limits = TASKS[task].max_per_answer
    for name, rows in splits.items():
        random.Random(1).shuffle(rows)
        if limits is not None:
            splits[name] = _keep_per_answer(rows, limits[name])
    check_disjoint(splits)
    return splits


def choose_split(group: str) -> Split:
    """Send a group to train, calibration or test: 70, 10 and 20 percent of groups."""
    tenth = int(hashlib.sha1(group.encode()).hexdigest(), 16) % 10
    if tenth < 7:
        return "train"
    return "calibration" if tenth < 8 else "test"


def check_disjoint(splits: dict[Split, list[Row]]) -> None:
    """Check that no question, the prompt's first line, lies in two splits.

    Raises:
        ValueError: one does.
    """
    home: dict[str, Split] = {}
    for name, rows in splits.items():
        for row in rows:
            question = row.prompt.split("\n", 1)[0]
            if home.setdefault(question, name) != name:
                raise ValueError(
                    f"a question must lie in one split, got {question!r} in "
                    f"{home[question]} and {name}; use the pinned wheels"
                )


def _keep_per_answer(rows: Iterable[Row], limit: int) -> list[Row]:
    """Keep the first ``limit`` rows of each answer, in order."""
    seen: Counter[str] = Counter()
    kept = []
    for row in rows:
        seen[row.target] += 1
        if seen[row.target] <= limit:
            kept.append(row)
    return kept


def _choice_row(
    question: str,
    cue: str,
    target: str,
    pool: Iterable[str],
    group: str,
    *,
    lists_options: bool = True,
) -> Row:
    """Put the target among three others of the pool, in an order the question fixes.

    Options that the prompt does not list are ranked all the same.
    """
    generator = random.Random(question)
    choices = [*generator.sample([c for c in pool if c != target], 3), target]
    generator.shuffle(choices)
    options = [
        f"{letter}. {c.strip()}" for letter, c in zip(LETTERS, choices, strict=True)
    ]
    prompt = "\n".join([question, *(options if lists_options else ()), cue])
    return Row(prompt, target, group, tuple(choices))


def _english_choice_rows(wheels: Path) -> Iterator[Row]:
    """English disease name -> ICD-10 chapter, among four; group: category code."""
    labels = {chapter: f" {label}" for chapter, label in _CHAPTERS.items()}
    seen: set[str] = set()
    for disease in read_diseases(wheels):
        name = disease.english
        if name in seen or len(name) > _MAX_ENGLISH_NAME:
            continue
        seen.add(name)
        if disease.chapter in labels:
            question = f'Which group does "{name}" belong to?'
            target = labels[disease.chapter]
            group = disease.code[:3]
            yield _choice_row(question, "Answer:", target, labels.values(), group)


def _chinese_choice_rows(wheels: Path) -> Iterator[Row]:
    """Chinese procedure name -> body system, among four; group: three-digit code."""
    labels = [label for _, _, label in _BODY_SYSTEMS]
    seen: set[str] = set()
    for procedure in read_procedures(wheels):
        name = procedure.chinese
        section = int(procedure.code[:2])
        target = next(
            (t for low, high, t in _BODY_SYSTEMS if low <= section <= high), ""
        )
        if not target or not name or name in seen or len(name) > _MAX_CHINESE_NAME:
            continue
        seen.add(name)
        question = f"“{name}”属于哪类手术？"
        # Listed options double the prompt, and this base does not learn to read them.
        yield _choice_row(
            question,
            "答案：",
            target,
            labels,
            procedure.code[:4],
            lists_options=False,
        )


def _english_answer_rows(wheels: Path) -> Iterator[Row]:
    """Phenotype term -> its definition; group: the term's first parent."""
    for phenotype in read_phenotypes(wheels):
        if len(phenotype.definition) > _MAX_DEFINITION:
            continue
        name = phenotype.name
        if not name[:2].isupper():
            name = name[0].lower() + name[1:]
        prompt = f"What is {name}?\nAnswer:"
        yield Row(prompt, f" {phenotype.definition}", phenotype.parent)


def _chinese_answer_rows(wheels: Path) -> Iterator[Row]:
    """Chinese disease name -> title of its ICD-10 block; group: category code."""
    seen: set[str] = set()
    for disease in read_diseases(wheels):
        name = disease.chinese
        if not name or name in seen:
            continue
        seen.add(name)
        if disease.chapter in _CHAPTERS and len(name) <= _MAX_CHINESE_NAME:
            prompt = f"“{name}”属于哪一类疾病？\n答案："
            yield Row(prompt, disease.chinese_block, disease.code[:3])


TASKS = {
    "en-mcqa": Task(_english_choice_rows, {"train": 120, "calibration": 8, "test": 22}),
    "zh-mcqa": Task(_chinese_choice_rows, {"train": 120, "calibration": 8, "test": 25}),
    "en-qa": Task(_english_answer_rows),
    "zh-qa": Task(_chinese_answer_rows),
}
