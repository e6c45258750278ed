"""The options of a question, scored with its prompt computed once.

Invariant: an option's log-probabilities are those of its full sequence. Prompts are
padded on the left and options on the right, so that tokens keep their distances and
sliding windows see what they should; a batch holds a prompt once, then its keys and
values once for each option.
"""

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from mergekit_himerging.analysis.calibration import (
    Batch,
    Sample,
    TokenSequence,
)
from mergekit_himerging.evaluation.forward import find_cache_name, score_targets, takes


def count_shared(sample: Sample) -> int:
    """Count the tokens that begin all options and predict no target.

    The last of the prompt is not among them: its state predicts the first target.
    """
    longest = min(option.n_prompt for option in sample.options) - 1
    columns = zip(*(option.ids[:longest] for option in sample.options), strict=True)
    return next((n for n, ids in enumerate(columns) if len(set(ids)) > 1), longest)


def score_options(
    model: PreTrainedModel, samples: Sequence[Sample], *, max_tokens: int, pad_id: int
) -> Iterator[tuple[TokenSequence, torch.Tensor]]:
    """Score all options, the longest prompts first.

    Args:
        model: in evaluation mode, with a cache.
        samples: questions that share at least one token, see ``count_shared``.
        max_tokens: most cells of a batch, padding included; the options of one question
            are in one batch all the same.
        pad_id: any token id that the model has; it is masked.

    Yields:
        An option and the log-probabilities of its targets, ``[targets]``, float64.
    """
    for batch in _pack(samples, max_tokens):
        yield from _score_batch(model, batch, pad_id)


def _pack(samples: Sequence[Sample], max_tokens: int) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    width = n_options = 0
    for sample in sorted(samples, key=count_shared, reverse=True):
        rows = n_options + len(sample.options)
        length = max(width, max(len(option.ids) for option in sample.options))
        if batch and rows * length > max_tokens:
            yield batch
            batch, rows = [], len(sample.options)
            length = max(len(option.ids) for option in sample.options)
        batch.append(sample)
        width, n_options = length, rows
    if batch:
        yield batch


def _score_batch(
    model: PreTrainedModel, samples: Sequence[Sample], pad_id: int
) -> Iterator[tuple[TokenSequence, torch.Tensor]]:
    shared = torch.tensor([count_shared(sample) for sample in samples])
    options = [option for sample in samples for option in sample.options]
    owners = torch.repeat_interleave(
        torch.arange(len(samples)), torch.tensor([len(s.options) for s in samples])
    )
    prompts = _left_pad(
        [s.options[0].ids[:n] for s, n in zip(samples, shared.tolist(), strict=True)],
        pad_id,
    )
    endings = _right_pad(options, shared[owners], pad_id)
    cache_name = find_cache_name(model) or ""

    where = prompts.attention_mask.cumsum(1) - 1
    _, outputs = score_targets(
        model, prompts, use_cache=True, **_positions(model, where.clamp(min=0))
    )
    cache = outputs[cache_name]
    cache.batch_select_indices(owners.to(model.device))

    mask = endings.attention_mask
    where = shared[owners][:, None] + torch.arange(mask.shape[1])
    both = torch.cat([prompts.attention_mask[owners], mask], dim=1)
    log_probabilities, _ = score_targets(
        model,
        endings,
        use_cache=True,
        **{cache_name: cache, "attention_mask": both.to(model.device)},
        # Padding may lie beyond the last position that the model has.
        **_positions(model, where * mask),
    )
    lengths = [option.n_targets for option in options]
    yield from zip(options, torch.split(log_probabilities, lengths), strict=True)


def _positions(model: PreTrainedModel, where: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions for a model that takes them; others read them off the mask."""
    if not takes(model, "position_ids"):
        return {}
    return {"position_ids": where.to(model.device)}


def _left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> Batch:
    """Pad prompts on the left into a batch without targets."""
    width = max(map(len, prompts))
    ids = [[*[pad_id] * (width - len(prompt)), *prompt] for prompt in prompts]
    lengths = torch.tensor([[len(prompt)] for prompt in prompts])
    is_token = torch.arange(width) >= width - lengths  # [prompts, tokens]
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        input_ids=torch.tensor(ids, dtype=torch.int64),
        attention_mask=is_token.to(torch.int64),
        target_rows=none,
        target_positions=none,
        target_ids=none,
        target_sequence=none,
    )


def _right_pad(
    options: Sequence[TokenSequence], shared: torch.Tensor, pad_id: int
) -> Batch:
    """Pad what comes after each option's shared tokens, ``[options]`` of them."""
    starts = shared.tolist()
    endings = [option.ids[n:] for option, n in zip(options, starts, strict=True)]
    width = max(map(len, endings))
    ids = [[*ending, *[pad_id] * (width - len(ending))] for ending in endings]
    input_ids = torch.tensor(ids, dtype=torch.int64)
    lengths = torch.tensor([[len(ending)] for ending in endings])
    n_prompts = torch.tensor([[option.n_prompt] for option in options])
    columns = torch.arange(width)
    is_token = columns < lengths  # [options, tokens]
    is_target = is_token & (columns >= n_prompts - shared[:, None])
    target_rows, positions = is_target.nonzero(as_tuple=True)
    return Batch(
        input_ids=input_ids,
        attention_mask=is_token.to(torch.int64),
        target_rows=target_rows,
        target_positions=positions - 1,
        target_ids=input_ids[is_target],
        target_sequence=target_rows,
    )
