"""One model on one task: a loss for every row, an accuracy for rows with choices.

Invariant: both are the analysis's own (``score_samples``), whatever the batch size and
whether options share the computation of their prompt.
"""

import hashlib
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mergekit_himerging.analysis.calibration import (
    Batch,
    Metric,
    Row,
    Sample,
    Tokenized,
    TokenSequence,
    make_batches,
    pick_pad,
    score_samples,
    tokenize_rows,
)
from mergekit_himerging.analysis.continuation import measure_lengths, tolerance_of
from mergekit_himerging.evaluation.forward import find_cache_name, score_targets
from mergekit_himerging.evaluation.options import count_shared, score_options

LOG = logging.getLogger(__name__)

LogProbabilities = dict[TokenSequence, torch.Tensor]
"""Of each sequence's targets: ``[targets]``, float64, natural logarithm."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """One model's scores of rows, in their order.

    Attributes:
        loss: nats per target token, lower is better.
        accuracy: 1 or 0; None for rows without choices.
        n_tokens, n_targets: tokens scored on, and scored ones: of the target, and
            where there are choices of all of them besides.
        n_truncated: rows that lost tokens.
        tokens_sha256: of the token ids scored on, and of where targets begin.
    """

    loss: tuple[float, ...]
    accuracy: tuple[float | None, ...]
    n_tokens: int
    n_targets: int
    n_truncated: int
    tokens_sha256: str


class Scorer:
    """Scores rows under one model.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        max_length: most tokens of a sequence, beside the model's own bound.
        max_tokens: most cells of a batch, padding included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        max_tokens: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_length, self._vocab_size = measure_lengths(
            model, tokenizer, max_length=max_length
        )
        self._max_tokens = max_tokens
        self._pad_id = pick_pad(tokenizer, self._vocab_size)
        self._shares_prompts = True

    def score(self, rows: Sequence[Row]) -> RowScores:
        """Score rows of any shapes.

        The prompt of a question is computed once for all its options. Where a model
        has no cache that allows it, or one that gives other numbers on the longest and
        the shortest question, every option is run whole, after a warning.

        Raises:
            ValueError: a row cannot be tokenised for this model, or its loss is not
                finite; the message names its place.
        """
        asked = [row for row in rows if row.shape == "choices"]
        others = [row for row in rows if row.shape != "choices"]
        every = self._tokenize(asked, "accuracy")
        right = self._tokenize(asked, "loss")
        free = self._tokenize(others, "loss")
        known = self._score_questions(every.samples)
        targets = [sample.options[0] for sample in (*right.samples, *free.samples)]
        known |= self._score_whole([t for t in targets if t not in known])
        shares = iter(self._summarize(every.samples, known, "accuracy"))
        of_asked = iter(self._summarize(right.samples, known, "loss"))
        of_others = iter(self._summarize(free.samples, known, "loss"))
        losses, accuracies = [], []
        for row in rows:
            is_asked = row.shape == "choices"
            losses.append(-next(of_asked if is_asked else of_others))
            accuracies.append(next(shares) if is_asked else None)
            if not math.isfinite(losses[-1]):
                raise ValueError(
                    f"{row.place} must have a finite loss, got {losses[-1]}; load the "
                    "model in a wider dtype or merge it anew"
                )
        parts = (every, right, free)
        return RowScores(
            loss=tuple(losses),
            accuracy=tuple(accuracies),
            n_tokens=sum(part.n_tokens for part in parts),
            n_targets=sum(part.n_targets for part in parts),
            # A question's options together are cut wherever the right one alone is.
            n_truncated=every.n_truncated + free.n_truncated,
            tokens_sha256=_hash_tokens(every.samples, free.samples),
        )

    def _tokenize(self, rows: Sequence[Row], metric: Metric) -> Tokenized:
        return tokenize_rows(
            rows,
            self._tokenizer,
            metric=metric,
            max_length=self._max_length,
            vocab_size=self._vocab_size,
        )

    def _score_questions(self, samples: Sequence[Sample]) -> LogProbabilities:
        sharing = [sample for sample in samples if count_shared(sample)]
        if not sharing or not self._can_share(sharing):
            sharing = []
        shared = dict(
            score_options(
                self._model,
                sharing,
                max_tokens=self._max_tokens,
                pad_id=self._pad_id,
            )
        )
        every = (option for sample in samples for option in sample.options)
        return shared | self._score_whole([o for o in every if o not in shared])

    def _can_share(self, samples: Sequence[Sample]) -> bool:
        """Check on the longest and the shortest prompt that sharing changes nothing."""
        if not self._shares_prompts:
            return False
        ordered = sorted(samples, key=count_shared)
        reason = self._find_fault([ordered[0], ordered[-1]])
        if reason:
            self._shares_prompts = False
            LOG.warning(
                "%s cannot compute a question's prompt once for all its options (%s): "
                "every option is run whole, which takes longer",
                type(self._model).__name__,
                reason,
            )
        return self._shares_prompts

    def _find_fault(self, samples: Sequence[Sample]) -> str:
        if find_cache_name(self._model) is None:
            return "it has no cache"
        try:
            cells = 2**62  # both in one batch, so that one is padded
            shared = dict(
                score_options(
                    self._model, samples, max_tokens=cells, pad_id=self._pad_id
                )
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any architecture's cache
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        whole = self._score_whole(list(shared))
        worst = max(
            abs(float((part - whole[option]).mean())) for option, part in shared.items()
        )
        if worst <= tolerance_of(self._model):
            return ""
        return f"its cache changes log-probabilities by {worst:.2g} nats"

    def _score_whole(self, sequences: Sequence[TokenSequence]) -> LogProbabilities:
        distinct = list(dict.fromkeys(sequences))
        found: LogProbabilities = {}
        for batch in make_batches(
            [Sample((sequence,), 0) for sequence in distinct],
            max_tokens=self._max_tokens,
            pad_id=self._pad_id,
        ):
            log_probabilities, _ = score_targets(self._model, batch)
            lengths = batch.target_rows.bincount().tolist()
            parts = torch.split(log_probabilities, lengths)
            for number, part in zip(_sequences_in(batch), parts, strict=True):
                found[distinct[number]] = part
        return found

    def _summarize(
        self, samples: Sequence[Sample], known: LogProbabilities, metric: Metric
    ) -> Iterable[float]:
        """Score samples by the analysis's definition, ``[samples]``."""
        if not samples:
            return []
        batches = make_batches(
            samples, max_tokens=self._max_tokens, pad_id=self._pad_id
        )
        options = [option for sample in samples for option in sample.options]
        parts = [
            known[options[number]]
            for batch in batches
            for number in _sequences_in(batch)
        ]
        scores: list[float] = score_samples(
            samples, torch.cat(parts), batches, metric=metric
        ).tolist()
        return scores


def _hash_tokens(*parts: Sequence[Sample]) -> str:
    sequences = [
        (option.n_prompt, option.ids)
        for samples in parts
        for sample in samples
        for option in sample.options
    ]
    return hashlib.sha256(repr(sequences).encode()).hexdigest()


def _sequences_in(batch: Batch) -> list[int]:
    """Return the sequences of a batch, in the order of its targets."""
    return list(dict.fromkeys(batch.target_sequence.tolist()))
