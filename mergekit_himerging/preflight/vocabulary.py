"""Tokenizers: the same ids for the same tokens, chat templates, ends of a turn."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mergekit.config import MergeConfiguration

from mergekit_himerging.preflight.finding import Finding, list_names
from mergekit_himerging.preflight.headers import (
    describe_content,
    describe_error,
    read_json,
)
from mergekit_himerging.preflight.models import Model

MOVED = 0.01
"""Share of the base's tokens that may have other ids before a vocabulary is another."""

RENAMED = 0.1
"""Share of the ids that may stand for new tokens: reserved ones are often renamed."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

ALIGN = "align the vocabularies with 'tokenizer: {source: union}'"


def check_vocabularies(
    config: MergeConfiguration, models: Sequence[Model]
) -> Iterator[Finding]:
    """Compare the tokenizers of all models with the one that the merge will have.

    Args:
        config: the recipe.
        models: the base first; those without a folder at hand are left out.
    """
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    tokens: dict[Model, Mapping[str, int]] = {}
    digests: dict[Model, str] = {}
    for model in models:
        if model.folder is None:
            continue
        try:
            tokens[model], digests[model] = _read_tokens(model.folder)
        except (ValueError, OSError) as error:
            # The merge gets the files of the base.
            yield Finding(
                "error" if model.is_base else "warning", describe_error(error)
            )
        else:
            yield from _check_rows(model, tokens[model])
    base = next((model for model in tokens if model.is_base), None)
    if base is None:
        return
    if not digests[base] and source is None:
        yield Finding(
            "warning",
            f"{base.name} must have a tokenizer for the merge, got none in "
            f"'{base.folder}'; add one, or name another with 'tokenizer:'",
        )
    for model in tokens:
        if model is base or model.folder == base.folder or not digests[model]:
            continue
        if source in (None, "base") and tokens[base] and tokens[model]:
            is_aligned = source is not None
            yield from _compare(model, tokens[model], tokens[base], is_aligned)
        elif source is None and digests[base] not in ("", digests[model]):
            yield Finding(
                "warning",
                f"'{model.reference}' must have the base's tokenizer, got another file "
                f"whose tokens cannot be compared; {ALIGN} if they differ",
            )
    yield from _check_templates(config, models, source)
    yield from _check_ends(models, source)


def _read_tokens(folder: Path) -> tuple[Mapping[str, int], str]:
    """Read token -> id, and a digest of the file; both empty without a tokenizer.

    Raises:
        ValueError: a file is not what its name says.
        OSError: it cannot be read.
    """
    path = next((p for n in TOKENIZER_FILES if (p := folder / n).exists()), None)
    tokens: dict[str, int] = {}
    if path is None:
        return tokens, ""
    found = describe_content(path)
    if found is not None:
        raise ValueError(f"'{path}' must be a tokenizer, got {found}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if path.name == "tokenizer.model":
        return tokens, digest
    content = read_json(path)
    if path.name == "vocab.json":
        tokens |= content
        added = folder / "added_tokens.json"
        tokens |= read_json(added) if added.exists() else {}
    else:
        vocabulary = content.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, Mapping):
            tokens |= vocabulary
        else:
            tokens |= {entry[0]: index for index, entry in enumerate(vocabulary)}
        for entry in content.get("added_tokens") or ():
            tokens[entry["content"]] = entry["id"]
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        decoder = read_json(settings).get("added_tokens_decoder") or {}
        tokens |= {entry["content"]: int(index) for index, entry in decoder.items()}
    return tokens, digest


def _check_rows(model: Model, tokens: Mapping[str, int]) -> Iterator[Finding]:
    rows = getattr(model.text_config, "vocab_size", None)
    beyond = sorted(t for t, i in tokens.items() if rows is not None and i >= rows)
    if beyond:
        yield Finding(
            "warning",
            f"{model.name} must have a row of its embedding for every token, got "
            f"vocab_size {rows} and {len(beyond)} tokens beyond it "
            f"({list_names(beyond)}); take its tokenizer from where it was trained",
        )


def _compare(
    model: Model,
    tokens: Mapping[str, int],
    of_base: Mapping[str, int],
    is_aligned: bool,
) -> Iterator[Finding]:
    extra = sorted(set(tokens) - set(of_base))
    moved = sorted(t for t, index in tokens.items() if of_base.get(t, index) != index)
    taken = set(of_base.values())
    renamed = [token for token in extra if tokens[token] in taken]
    if is_aligned:
        if extra:
            yield Finding(
                "warning",
                f"'{model.reference}' must have no tokens that the base lacks, got "
                f"{len(extra)} ({list_names(extra)}), which the merge drops; keep them "
                "with 'tokenizer: {source: union}'",
            )
        return
    if len(moved) > MOVED * len(of_base) or len(renamed) > RENAMED * len(of_base):
        other = sorted({*moved, *renamed})
        yield Finding(
            "error",
            f"'{model.reference}' must give tokens the base's ids, got other ids for "
            f"{len(other)} of {len(tokens)} tokens ({list_names(other)}); {ALIGN}",
        )
    elif moved or extra:
        other = sorted({*moved, *extra})
        yield Finding(
            "warning",
            f"'{model.reference}' must have the base's tokens, got {len(other)} others "
            f"({list_names(other)}), which the merge's tokenizer does not know; "
            f"{ALIGN}",
        )


def read_template(folder: Path) -> str | None:
    """Read the chat template that transformers would use; None where there is none.

    Raises:
        ValueError: a file is not what its name says.
        OSError: it cannot be read.
    """
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        try:
            return jinja.read_text(encoding="utf-8").strip() or None
        except UnicodeDecodeError as error:
            raise ValueError(
                f"'{jinja}' must be UTF-8, got {error.reason} at byte {error.start}; "
                "save it anew"
            ) from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        template = read_json(path).get("chat_template") if path.exists() else None
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default")
        if template:
            return str(template).strip()
    return None


def _check_templates(
    config: MergeConfiguration, models: Sequence[Model], source: Any
) -> Iterator[Finding]:
    if config.chat_template:
        return
    templates: dict[str, str | None] = {}
    base_template: str | None = None
    for model in models:
        folders = [model.folder] if model.folder is not None else []
        if model.reference.lora is not None:
            folders.insert(0, Path(model.reference.lora.path))
        found = None
        for folder in folders:
            try:
                found = found or read_template(folder)
            except (ValueError, OSError) as error:
                yield Finding("warning", describe_error(error))
        if model.is_base:
            base_template = found
        elif str(model.reference) != str(source):
            templates[str(model.reference)] = found
    if source not in (None, "base", "union"):
        return
    others = [name for name, found in templates.items() if found != base_template]
    others = [name for name in others if templates[name]]
    if not others:
        return
    if base_template is None:
        yield Finding(
            "warning",
            f"the base must have the chat template of {list_names(others)}, got none, "
            "so that the merge will have none; add 'chat_template: auto' to the recipe",
        )
    else:
        yield Finding(
            "warning",
            f"models must share a chat template, got another in {list_names(others)}, "
            "and the merge has the base's; choose one with 'chat_template:'",
        )


def _check_ends(models: Sequence[Model], source: Any) -> Iterator[Finding]:
    """Compare what ends a text: the merge has the base's."""
    ends: dict[Model, set[int]] = {}
    for model in models:
        if model.folder is None:
            continue
        path = model.folder / "generation_config.json"
        try:
            settings = read_json(path) if path.exists() else {}
        except (ValueError, OSError) as error:
            yield Finding("warning", describe_error(error))
            continue
        said = getattr(model.text_config, "eos_token_id", None)
        end = settings.get("eos_token_id", said)
        given = end if isinstance(end, list) else [end]
        ends[model] = {index for index in given if isinstance(index, int)}
    base = next((model for model in ends if model.is_base), None)
    for model, ids in ends.items():
        if base is not None and source is None and not ids <= ends[base]:
            yield Finding(
                "warning",
                f"'{model.reference}' must end its texts as the base does, got "
                f"eos_token_id {sorted(ids)} and {sorted(ends[base])} in the base; "
                "the merge has the base's and may run on, so set the ids in its "
                "generation_config.json",
            )
