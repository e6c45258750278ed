"""A row's content as one short hash, to find held-out rows that calibrated a merge.

Invariant: rows that put the same text before a model and expect the same text from it
have the same hash, whichever keys they came with.
"""

import hashlib
import unicodedata
from collections.abc import Collection
from dataclasses import replace

from mergekit_himerging.analysis.rows import Row


def hash_row(row: Row) -> str:
    """Hash what a row asks and its right answer.

    The prompt (the instruction and its input, all turns but the system's) and the
    target (the right option, the last turn, the output) are joined, in Unicode's form
    NFKC and without white space. Roles, wrong options and the line play no part.

    Returns:
        The first 16 hex digits of a sha256.
    """
    turns = [content for role, content in row.turns if role != "system"]
    parts = [row.prompt, row.context, *turns, row.completion]
    text = "".join(unicodedata.normalize("NFKC", "".join(parts)).split())
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def has_calibrated(row: Row, calibration_hashes: Collection[str]) -> bool:
    """Return whether a row, or its prompt alone, is among those calibrated on.

    Args:
        row: held out.
        calibration_hashes: of calibration rows, as ``hash_row`` makes them.
    """
    hashes = {hash_row(row)}
    if row.shape != "text":
        hashes.add(hash_row(replace(row, completion="")))
    return not hashes.isdisjoint(calibration_hashes)
