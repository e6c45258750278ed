"""A few values of stored tensors, read without the rest of their files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch

from mergekit_himerging.preflight.headers import Stored, load_pickle

N_VALUES = 1024
"""Values read of one tensor."""

N_TENSORS = 256
"""Tensors sampled of one model, so that a sample stays under 1 MiB in float32."""


def read_samples(
    stored: Mapping[str, Stored], names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Read the values in the middle of tensors.

    Args:
        stored: where the tensors are.
        names: of ``stored``.

    Returns:
        Values by name, each ``[n]`` with n up to ``N_VALUES``, in the stored type; the
        same places of equal shapes.
    """
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(stored[name].path, []).append(name)
    values: dict[str, torch.Tensor] = {}
    for path, wanted in by_file.items():
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="pt") as file:
                for name in wanted:
                    shape = stored[name].shape
                    part: Any = file.get_slice(name) if shape else None
                    found = part[_middle(shape)] if shape else file.get_tensor(name)
                    values[name] = found.flatten()[:N_VALUES]
        else:
            content = load_pickle(path)
            for name in wanted:
                part = content[name]
                found = part[_middle(part.shape)] if part.dim() else part
                values[name] = found.flatten()[:N_VALUES].clone()
    return values


def _middle(shape: Sequence[int]) -> tuple[slice, ...]:
    """Cut a block of some ``N_VALUES`` values out of the middle of a tensor."""
    slices = []
    left = N_VALUES
    for size in reversed(shape):
        count = max(1, min(size, left))
        start = (size - count) // 2
        slices.append(slice(start, start + count))
        left //= count
    return tuple(reversed(slices))


def pick_evenly(names: Sequence[str], most: int = N_TENSORS) -> list[str]:
    """Pick the first, the last and evenly spaced names between them."""
    if len(names) <= most:
        return list(names)
    step = (len(names) - 1) / (most - 1)
    return [names[round(index * step)] for index in range(most)]
