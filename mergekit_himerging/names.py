"""Names of models and data without the folders that they lie in."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

_IS_LOCAL = re.compile(r"[/\\~]|\.\.|[A-Za-z]:[\\/]|file:")


def shorten_names(names: Iterable[str], *, all_names: bool = False) -> dict[str, str]:
    """Name models and data without the folders that they lie in.

    Each local part of a ``base+adapter`` reference becomes its last component, or as
    many as tell it from the others. Local is what starts with ``/``, ``~``, ``..``, a
    drive or ``file:``; hub ids and other relative names stay as they are. Names that
    only differ in what is not shown are numbered.

    Args:
        names: as a plan or recipe spells them.
        all_names: shorten hub ids and other relative names too.

    Returns:
        Labels by name, all different, without control characters.
    """
    parts = {
        name: [_split(part, all_names) for part in clean_text(name).split("+")]
        for name in sorted(set(names))
    }
    depths = dict.fromkeys(parts, 1)
    while True:
        labels = {
            name: "+".join("/".join(part[-depths[name] :]) for part in parts[name])
            for name in parts
        }
        uses = Counter(labels.values())
        growing = [
            name
            for name, label in labels.items()
            if uses[label] > 1 and depths[name] < max(map(len, parts[name]))
        ]
        if not growing:
            return dict(_number(labels))
        for name in growing:
            depths[name] += 1


def is_short_for(label: str, name: str) -> bool:
    """Whether a label is the end of a local name, part by part of a reference."""
    shorts, fulls = label.split("+"), name.split("+")
    if len(shorts) != len(fulls) or not is_local(name):
        return False
    for short, full in zip(shorts, fulls, strict=True):
        steps = _split(full, True)
        ending = _split(short, True)
        if steps[-len(ending) :] != ending:
            return False
    return True


def is_local(name: str) -> bool:
    """Whether a name, or a part of a ``base+adapter`` reference, is a local path."""
    return any(_IS_LOCAL.match(part) for part in name.split("+"))


def clean_text(text: str) -> str:
    """Replace each control, format or line-breaking character by a space."""
    return "".join(
        " "
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        or character in "\ufffe\uffff"
        else character
        for character in text
    )


def _split(part: str, all_names: bool) -> list[str]:
    if all_names or _IS_LOCAL.match(part):
        return [step for step in re.split(r"[/\\]+", part) if step] or [part]
    return [part]


def _number(labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Number equal labels, those last that are not a name of their own."""
    taken = set()
    for name, label in sorted(labels.items(), key=lambda item: item[0] != item[1]):
        unique, number = label, 1
        while unique in taken:
            number += 1
            unique = f"{label} ({number})"
        taken.add(unique)
        yield name, unique
