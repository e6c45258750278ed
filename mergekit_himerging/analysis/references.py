"""Whole models by reference, as MergeKit loads them: a folder, a hub id, an adapter."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.options import MergeOptions
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load_reference(
    reference: ModelReference,
    options: MergeOptions,
    others: Sequence[ModelReference],
    *,
    device: torch.device,
) -> Loaded:
    """Load a model, with its adapter merged as MergeKit does.

    Args:
        reference: a folder, a hub id, or one with an adapter.
        options: MergeKit's.
        others: models whose tokenizer is used where it has none.
        device: where it will run.

    Raises:
        ValueError: none of them has a tokenizer.
    """
    merged = reference.merged(
        cache_dir=options.lora_merge_cache,
        trust_remote_code=options.trust_remote_code,
        lora_merge_dtype=options.lora_merge_dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        merged.model.path,
        revision=merged.model.revision,
        dtype=pick_dtype(device, None),
        trust_remote_code=options.trust_remote_code,
    )
    problem: Exception | None = None
    for candidate in (reference, *others):
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                candidate.model.path,
                revision=candidate.model.revision,
                trust_remote_code=options.trust_remote_code,
            )
        except (OSError, ValueError) as error:
            problem = problem or error
            continue
        return make_ready(model, device), tokenizer
    raise ValueError(
        f"'{reference}' must have a tokenizer, got none; add one to its folder"
    ) from problem


def make_ready(model: Any, device: torch.device) -> PreTrainedModel:
    """Put a model on its device, in evaluation mode."""
    model.eval().to(device)
    return cast(PreTrainedModel, model)


def pick_dtype(device: torch.device, dtype: str | None) -> torch.dtype | str:
    """Pick what a model runs in: float32 on a CPU, its own dtype elsewhere."""
    if device.type == "cpu":
        return torch.float32
    return dtype_from_name(dtype) or "auto"
