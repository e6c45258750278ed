"""The one door to calibration data: files -> rows -> samples -> batches -> scores.

Invariant: every target token is scored once, from the hidden state that predicts it;
padding never is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mergekit_himerging.analysis.row_files import read_rows
from mergekit_himerging.analysis.rows import Row, choose_rows, hash_rows
from mergekit_himerging.analysis.samples import (
    Metric,
    Sample,
    Tokenized,
    TokenSequence,
    pick_pad,
    tokenize_rows,
)

__all__ = [
    "Batch",
    "Metric",
    "NotANumberError",
    "Row",
    "Sample",
    "Teacher",
    "TokenSequence",
    "Tokenized",
    "choose_rows",
    "hash_rows",
    "make_batches",
    "pick_pad",
    "read_rows",
    "score_samples",
    "tokenize_rows",
]


FAIR_SHARE = 8
"""A batch of this part of the most cells may end for the sake of padding."""

LEAST_FILL = 0.8
"""Share of the longest sequence that the others of a batch have at least."""


class NotANumberError(ValueError):
    """A model gives NaN, as where its weights or states overflow their dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """What metric ``agreement`` holds a batch against: the expert as it was given.

    Its distributions are made anew wherever they are needed: as hidden states they take
    a small part of the memory that logits would.

    Attributes:
        hidden: ``[targets, width]``, its outputs of the last block where the batch's
            targets are predicted, on CPU.
        load_outer: loads its weights outside the blocks.
    """

    hidden: torch.Tensor
    load_outer: Callable[[], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Right-padded sequences and where their targets are predicted; all int64, on CPU.

    Attributes:
        input_ids: ``[rows, tokens]``.
        attention_mask: ``[rows, tokens]``, 1 for tokens and 0 for padding.
        target_rows: ``[targets]``, row of the hidden state that predicts each target.
        target_positions: ``[targets]``, its position: one before the target's own.
        target_ids: ``[targets]``, the token to be predicted.
        target_sequence: ``[targets]``, number of the (sample, option) that the target
            belongs to, counted over all samples of the task.
        teacher: for metric ``agreement`` alone.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    target_rows: torch.Tensor
    target_positions: torch.Tensor
    target_ids: torch.Tensor
    target_sequence: torch.Tensor
    teacher: Teacher | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.attention_mask.sum())

    @property
    def n_targets(self) -> int:
        """Tokens that are scored."""
        return len(self.target_ids)

    def keep_rows(self, n_rows: int) -> "Batch":
        """Return the batch of the first rows; their targets are the first too."""
        n_targets = int((self.target_rows < n_rows).sum())
        teacher = self.teacher
        if teacher is not None:
            teacher = replace(teacher, hidden=teacher.hidden[:n_targets])
        return Batch(
            input_ids=self.input_ids[:n_rows],
            attention_mask=self.attention_mask[:n_rows],
            target_rows=self.target_rows[:n_targets],
            target_positions=self.target_positions[:n_targets],
            target_ids=self.target_ids[:n_targets],
            target_sequence=self.target_sequence[:n_targets],
            teacher=teacher,
        )


def make_batches(
    samples: Iterable[Sample], *, max_tokens: int, pad_id: int
) -> tuple[Batch, ...]:
    """Pack all sequences of a task into batches, the longest first.

    A batch of a fair size ends where sequences become much shorter than its first, so
    that padding stays a small part of the work.

    Args:
        samples: the task's; their options are numbered in this order.
        max_tokens: most cells of a batch, padding included; a longer sequence is a
            batch of its own.
        pad_id: any token id that the model has; it is masked.

    Returns:
        Batches in which every target stands once.
    """
    sequences = [option for sample in samples for option in sample.options]
    by_length = sorted(range(len(sequences)), key=lambda n: -len(sequences[n].ids))
    batches: list[Batch] = []
    start = 0
    while start < len(by_length):
        longest = len(sequences[by_length[start]].ids)
        most = start + max(1, max_tokens // longest)
        fair = start + max(1, max_tokens // FAIR_SHARE // longest)
        stop = fair
        while stop < min(most, len(by_length)):
            if len(sequences[by_length[stop]].ids) < LEAST_FILL * longest:
                break
            stop += 1
        batches.append(_pad(sequences, by_length[start:stop], pad_id))
        start = stop
    return tuple(batches)


def score_samples(
    samples: Sequence[Sample],
    log_probabilities: torch.Tensor,
    batches: Iterable[Batch],
    *,
    metric: Metric,
) -> torch.Tensor:
    """Score each sample; higher is better.

    Args:
        samples: as given to ``make_batches``.
        log_probabilities: ``[targets]``, natural logarithm, of all batches' targets in
            order; for ``agreement`` minus the divergence there, in nats; any float
            dtype and device; read only.
        batches: as made from the samples.
        metric: ``loss`` gives the mean log-probability of the right option's target
            tokens (nats per token, at most 0), ``agreement`` that of minus the
            divergence; ``accuracy`` gives 1 where the right
            option has the largest such mean of all, alone, else 0.

    Returns:
        ``[samples]``, float64, on CPU.

    Raises:
        NotANumberError: a log-probability is none.
        ValueError: the number of log-probabilities is not that of the targets, or the
            batches are not those of the samples.
    """
    owners = [batch.target_sequence for batch in batches]
    sequence = torch.cat(owners) if owners else torch.zeros(0, dtype=torch.int64)
    values = log_probabilities.detach().to("cpu").to(torch.float64)
    if values.shape != sequence.shape:
        raise ValueError(
            f"log_probabilities must have one value for each of {len(sequence)} "
            f"targets, got shape {list(values.shape)}"
        )
    n_nan = int(values.isnan().sum())
    if n_nan:
        raise NotANumberError(
            f"log_probabilities must be numbers, got NaN for {n_nan} of "
            f"{len(values)} targets"
        )
    n_options = torch.tensor([len(s.options) for s in samples], dtype=torch.int64)
    n_targets = torch.tensor(
        [option.n_targets for sample in samples for option in sample.options],
        dtype=torch.int64,
    )
    counts = torch.bincount(sequence, minlength=len(n_targets))
    if not torch.equal(counts, n_targets):
        raise ValueError(
            f"batches must hold the {int(n_targets.sum())} targets of the samples, "
            f"got {len(sequence)} targets of other sequences"
        )
    means = torch.zeros(len(n_targets), dtype=torch.float64)
    means.index_add_(0, sequence, values)
    means /= n_targets
    answers = torch.tensor([sample.answer for sample in samples], dtype=torch.int64)
    right = n_options.cumsum(0) - n_options + answers
    scores = means[right]
    if metric != "accuracy":
        return scores
    others = means.clone()
    others[right] = -torch.inf
    best = torch.full((len(samples),), -torch.inf, dtype=torch.float64)
    sample_of = torch.repeat_interleave(torch.arange(len(samples)), n_options)
    best.scatter_reduce_(0, sample_of, others, "amax")
    return (scores > best).to(torch.float64)


def _pad(
    sequences: Sequence[TokenSequence], numbers: Sequence[int], pad_id: int
) -> Batch:
    chosen = [sequences[number] for number in numbers]
    width = max(len(sequence.ids) for sequence in chosen)
    input_ids = torch.tensor(
        [[*s.ids, *[pad_id] * (width - len(s.ids))] for s in chosen], dtype=torch.int64
    )
    lengths = torch.tensor([[len(s.ids)] for s in chosen])  # [rows, 1]
    n_prompts = torch.tensor([[s.n_prompt] for s in chosen])
    columns = torch.arange(width)
    is_token = columns < lengths  # [rows, tokens]
    is_target = is_token & (columns >= n_prompts)
    target_rows, positions = is_target.nonzero(as_tuple=True)
    return Batch(
        input_ids=input_ids,
        attention_mask=is_token.to(torch.int64),
        target_rows=target_rows,
        target_positions=positions - 1,
        target_ids=input_ids[is_target],
        target_sequence=torch.tensor(numbers, dtype=torch.int64)[target_rows],
    )
