"""Held-out rows of one file, and the check that none of them calibrated a merge."""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergekit_himerging.analysis.calibration import Row, choose_rows, read_rows
from mergekit_himerging.analysis.overlap import has_calibrated


@dataclass(frozen=True, slots=True)
class Task:
    """Held-out rows of one task.

    Attributes:
        name: for tables.
        source: where the rows come from, as given.
        rows: what models are scored on, at least one.
    """

    name: str
    source: str
    rows: tuple[Row, ...]

    @property
    def sha256(self) -> str:
        """Hash of the rows' content, in their order."""
        lines = "\n".join(row.content for row in self.rows)
        return hashlib.sha256(lines.encode("utf-8")).hexdigest()


def read_task(
    source: str,
    *,
    folders: Sequence[Path],
    name: str | None = None,
    n_rows: int | None = None,
    seed: int = 0,
) -> Task:
    """Read a task's held-out rows.

    Args:
        source: a path to .jsonl, .json, .csv or .parquet, or a hub dataset's id.
        folders: where a relative path is looked for, in this order.
        name: of the task; the file's name without its ending where None.
        n_rows: how many to use at most, a choice by content and seed, at least 1; all
            of them in the file's order where None.
        seed: of the choice.

    Raises:
        ValueError: the data cannot be used, or ``n_rows`` is below 1; the message names
            file and line.
    """
    rows = read_rows(source, folders)
    if n_rows is not None:
        rows = choose_rows(rows, samples=n_rows, seed=seed)
    return Task(name=name or Path(source).stem, source=source, rows=rows)


def find_overlap(
    rows: Iterable[Row], calibration_hashes: Collection[str]
) -> tuple[str, ...]:
    """Find rows that were calibrated on, with their answers or as prompts alone.

    Args:
        rows: held out.
        calibration_hashes: of calibration rows, as ``hash_row`` makes them.

    Returns:
        The places of the rows found, as ``file.jsonl line 12``, in their order.
    """
    return tuple(row.place for row in rows if has_calibrated(row, calibration_hashes))


def refuse_overlap(task: Task, calibration_hashes: Collection[str]) -> None:
    """Refuse a task with rows that were calibrated on.

    Raises:
        ValueError: there is one; the message names the first and their number.
    """
    places = find_overlap(task.rows, calibration_hashes)
    if places:
        raise ValueError(
            f"held-out rows must not be calibration rows, got {len(places)} of "
            f"{len(task.rows)} that are (the first: {places[0]}); take them out of one "
            "of the files"
        )
