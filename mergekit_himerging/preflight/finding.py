"""What a check has found: one sentence, and whether the merge may start."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mergekit_himerging.parameters import RecipeError

Level = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One thing that is wrong, or may be.

    Attributes:
        level: an ``error`` stops the merge; a ``warning`` is printed and reported.
        text: one sentence: culprit, what is wrong, remedy.
    """

    level: Level
    text: str


def sort_findings(found: Iterable[Finding]) -> list[Finding]:
    """Put errors first, each level in the order of its text, nothing twice."""
    return sorted(set(found))  # "error" sorts before "warning"


def raise_errors(found: Iterable[Finding]) -> list[str]:
    """Stop at errors, all at once, and return the warnings.

    Raises:
        RecipeError: there are errors; one sentence a line.
    """
    every = sort_findings(found)
    errors = [finding.text for finding in every if finding.level == "error"]
    if errors:
        raise RecipeError("\n".join(errors))
    return [finding.text for finding in every]


def list_names(names: Iterable[str], most: int = 3) -> str:
    """Name the first few of many, quoted, and count the rest."""
    every = list(names)
    shown = ", ".join(f"'{name}'" for name in every[:most])
    rest = len(every) - most
    return f"{shown} and {rest} more" if rest > 0 else shown
