"""One forward of a causal language model, with its head at the target positions alone.

Invariant: the log-probabilities are those of the plain forward; a head costs more than
many blocks, so it is not run where nothing is scored.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from mergekit_himerging.analysis.calibration import Batch

CACHE_NAMES = ("cache", "past_key_values")
"""What transformers calls the keys and values of earlier tokens, newest name first."""

ROWS = 256
"""Positions whose logits are widened to float32 at a time."""


def find_cache_name(model: PreTrainedModel) -> str | None:
    """Return the name of the model's cache, as argument and output; None without."""
    return next((name for name in CACHE_NAMES if takes(model, name)), None)


def takes(model: PreTrainedModel, name: str) -> bool:
    """Return whether the model's forward has a parameter of this name."""
    return name in inspect.signature(model.forward).parameters


def score_targets(
    model: PreTrainedModel, batch: Batch, **inputs: Any
) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """Run a batch and return the log-probabilities of its targets.

    Args:
        model: in evaluation mode.
        batch: its token ids, mask and targets.
        inputs: further arguments of the forward; they go before the batch's own.

    Returns:
        ``[targets]``, float64, on CPU, natural logarithm; and all that the forward
        returned.
    """
    device = model.device
    arguments: dict[str, Any] = {
        "input_ids": batch.input_ids.to(device),
        "attention_mask": batch.attention_mask.to(device),
        **inputs,
    }
    if takes(model, "use_cache"):
        arguments.setdefault("use_cache", False)
    rows, positions = batch.target_rows, batch.target_positions
    with torch.inference_mode(), _head_at(model, batch) as picked:
        outputs = model(**arguments)
        # [1, targets, vocabulary] or [rows, tokens, vocabulary]
        logits = outputs["logits"]
        at_targets = logits[0] if picked else logits[rows, positions]
        return _log_probabilities(at_targets, batch.target_ids), outputs


@contextmanager
def _head_at(model: PreTrainedModel, batch: Batch) -> Iterator[list[bool]]:
    """Hand the head the targets' hidden states alone; the list is empty if it cannot.

    What a model does with its logits (caps, factors) acts on each position by itself.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    picked: list[bool] = []

    def pick(_: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = arguments[0] if arguments else None
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
            return None
        if hidden.shape[:2] != batch.input_ids.shape:
            return None
        picked.append(True)
        return (hidden[batch.target_rows, batch.target_positions][None], *arguments[1:])

    if not isinstance(head, torch.nn.Module):
        yield picked
        return
    handle = head.register_forward_pre_hook(pick)
    try:
        yield picked
    finally:
        handle.remove()


def _log_probabilities(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[targets, vocabulary]`` and ``[targets]`` -> ``[targets]``, float64, on CPU."""
    parts = [torch.zeros(0, dtype=torch.float64)]
    chunks = zip(
        torch.split(logits, ROWS), torch.split(ids.to(logits.device), ROWS), strict=True
    )
    for some, wanted in chunks:
        wide = some.float()
        chosen = wide.gather(-1, wanted[:, None])[:, 0]
        parts.append((chosen - wide.logsumexp(-1)).cpu().double())
    return torch.cat(parts)
