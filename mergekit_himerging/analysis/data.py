"""Each model's calibration setting -> the probes of its task, in two parts.

Invariant: the samples that choose treatments and those that accept them are apart, and
which ones they are depends on content and seed alone.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mergekit_himerging.analysis.calibration import (
    Batch,
    Row,
    Sample,
    Tokenized,
    TokenSequence,
    choose_rows,
    hash_rows,
    make_batches,
    pick_pad,
    read_rows,
    tokenize_rows,
)
from mergekit_himerging.analysis.overlap import hash_row
from mergekit_himerging.recipe import TaskSettings


@dataclass(frozen=True, slots=True, eq=False)
class Probes:
    """Samples and the batches that hold them."""

    samples: tuple[Sample, ...]
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TaskData:
    """One task, ready to be measured.

    Attributes:
        settings: what the recipe says.
        rows_sha256: of the rows used.
        row_hashes: of each of them, sorted.
        choosing: decide the treatments.
        accepting: judge them; may be empty.
        tokenized: counts over both.
        n_to_draw: rows that the expert must still draw from itself; the samples then
            stand for them, and are as long as they may be.
    """

    settings: TaskSettings
    rows_sha256: str
    row_hashes: tuple[str, ...]
    choosing: Probes
    accepting: Probes
    tokenized: Tokenized
    n_to_draw: int = 0

    @property
    def tokens_sha256(self) -> str:
        """Hash of all token ids, so of rows, tokenizer and template."""
        digest = hashlib.sha256()
        for sample in (*self.choosing.samples, *self.accepting.samples):
            digest.update(repr((sample.answer, sample.options)).encode())
        return digest.hexdigest()


def read_task_rows(settings: TaskSettings, folders: Sequence[Path]) -> tuple[Row, ...]:
    """Read all rows of one task's data.

    Raises:
        ValueError: the data cannot be used; the message names file and line.
    """
    needs_answer = settings.metric != "agreement"
    return read_rows(settings.calibration, folders, needs_answer=needs_answer)


def read_task(
    settings: TaskSettings,
    rows: Sequence[Row],
    *,
    tokenizer: PreTrainedTokenizerBase,
    accept_share: float,
    seed: int,
    max_length: int,
    vocab_size: int,
    max_tokens: int,
) -> TaskData:
    """Choose, tokenise and batch one task's calibration data.

    Args:
        settings: what the recipe says.
        rows: all of them.
        tokenizer: the output model's.
        accept_share: share of the rows that accept, in [0, 1); one row always chooses.
        seed: of the choice of rows.
        max_length: tokens that the model takes.
        vocab_size: token ids that it has.
        max_tokens: cells of a batch.

    Raises:
        ValueError: the data cannot be used; the message names file and line.
    """
    rows = choose_rows(rows, samples=settings.samples, seed=seed)
    n_accepting = _count_accepting(len(rows), accept_share)
    parts = (rows[n_accepting:], rows[:n_accepting])

    def tokenize(part: Sequence[Row]) -> Tokenized:
        return tokenize_rows(
            part,
            tokenizer,
            metric=settings.metric,
            max_length=max_length,
            vocab_size=vocab_size,
        )

    choosing, accepting = (tokenize(part) for part in parts)
    pad = pick_pad(tokenizer, vocab_size)
    return TaskData(
        settings=settings,
        rows_sha256=hash_rows(rows),
        row_hashes=tuple(sorted(map(hash_row, rows))),
        choosing=_make_probes(choosing.samples, max_tokens, pad),
        accepting=_make_probes(accepting.samples, max_tokens, pad),
        tokenized=Tokenized(
            samples=choosing.samples + accepting.samples,
            n_truncated=choosing.n_truncated + accepting.n_truncated,
            n_tokens=choosing.n_tokens + accepting.n_tokens,
            n_targets=choosing.n_targets + accepting.n_targets,
        ),
    )


def bound_task(
    settings: TaskSettings,
    *,
    n_prompt: int,
    n_answer: int,
    accept_share: float,
    max_tokens: int,
) -> TaskData:
    """Stand in for a task whose rows are still to be drawn.

    Args:
        settings: what the recipe says.
        n_prompt, n_answer: most tokens of a prompt and of an answer, at least 1 each.
        accept_share: share of the rows that accept, in [0, 1).
        max_tokens: cells of a batch.
    """
    ids = (0,) * (n_prompt + n_answer)
    samples = (Sample((TokenSequence(ids, n_prompt),), 0),) * settings.samples
    n_accepting = _count_accepting(len(samples), accept_share)
    return TaskData(
        settings=settings,
        rows_sha256="",
        row_hashes=(),
        choosing=_make_probes(samples[n_accepting:], max_tokens, 0),
        accepting=_make_probes(samples[:n_accepting], max_tokens, 0),
        tokenized=Tokenized(
            samples=samples,
            n_truncated=0,
            n_tokens=len(ids) * len(samples),
            n_targets=n_answer * len(samples),
        ),
        n_to_draw=settings.samples,
    )


def _count_accepting(n_rows: int, accept_share: float) -> int:
    return min(int(accept_share * n_rows), n_rows - 1)


def _make_probes(samples: tuple[Sample, ...], max_tokens: int, pad_id: int) -> Probes:
    return Probes(samples, make_batches(samples, max_tokens=max_tokens, pad_id=pad_id))
