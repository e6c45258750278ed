"""Files written whole or not at all, and JSON read strictly."""

import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file whole or not at all, making its folder where needed."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, making its folder where needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"must have finite numbers, got {name}")


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"must have each field once, got {repeated} twice")
    return content


STRICT_JSON = json.JSONDecoder(
    parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeats
)
"""Raises ValueError, with the bare fact, for NaN, infinities and repeated fields."""

MAX_DEPTH = 64
"""Nesting of a file that is written by hand; no plan or recipe comes near."""


def check_writable(value: object, depth: int = 0) -> None:
    """Check that what was read from JSON can be written as JSON in UTF-8.

    Raises:
        ValueError: it is nested too deep, a number is beyond floats, or a text has half
            of a surrogate pair; the bare fact.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"must be nested at most {MAX_DEPTH} deep, got more")
    if isinstance(value, dict):
        for key, item in value.items():
            check_writable(key, depth)
            check_writable(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_writable(item, depth + 1)
    elif isinstance(value, str) and has_surrogates(value):
        raise ValueError(f"must have Unicode text, got {value!a:.60}")
    elif isinstance(value, float) and not math.isfinite(value):
        _refuse_constant(str(value))


def has_surrogates(text: str) -> bool:
    """Tell whether a text has half of a surrogate pair, which UTF-8 cannot hold."""
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)
