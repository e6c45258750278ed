"""A planned merge -> the values at which MergeKit's `breadcrumbs` gives the same.

Invariant: MergeKit alone keeps the entries that the kernel keeps, and what it then sums
to other bits is counted, not assumed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor, Task
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions

from mergekit_himerging.export.filters import Scalar
from mergekit_himerging.kernel import find_cut
from mergekit_himerging.method import CUT
from mergekit_himerging.parameters import METHOD_NAME
from mergekit_himerging.tasks import PlannedTensor, read_deltas

COPIED = "a lone undiluted model is copied by hi_merging, its delta is added here"
FOLDED = "the divisor of 'normalize' is folded into the weights"
OTHER = "MergeKit reads in float32 and sums five models or more in another order"


@dataclass(frozen=True, slots=True)
class Values:
    """What an exported recipe must resolve to in one tensor.

    Attributes:
        shared: parameters of all models, by name.
        per_model: parameters of each model but the base, by name.
        inexact: why the merged tensor may differ from the plan's.
    """

    shared: Mapping[str, Scalar]
    per_model: Mapping[ModelReference, Mapping[str, Scalar]]
    inexact: str = OTHER


@dataclass(slots=True)
class _Count:
    """Entries that are not as planned."""

    tensors: int = 0
    entries: int = 0
    largest: float = 0.0


def fold_values(
    tensors: Sequence[PlannedTensor], options: MergeOptions
) -> tuple[list[Values], list[str]]:
    """Find the values of `breadcrumbs`; pruned tensors are read to count what is kept.

    A scale is folded into its weight, above 1 too.

    Args:
        tensors: planned tensors with their final values and cuts.
        options: MergeKit's, for the device.

    Returns:
        Values by tensor, and a note where ties move densities.

    Raises:
        ValueError: a tensor's ``consensus`` is not ``none``.
    """
    tied = _Count()
    values = []
    for tensor in tensors:
        shared = tensor.task.parameters
        if shared["consensus"] != "none":
            raise ValueError(
                f"consensus must be none in breadcrumbs, got {shared['consensus']} "
                f"(tensor '{tensor.weight.name}'); export to {METHOD_NAME} instead"
            )
        normalize = shared["normalize"]
        plain = {m: float(tensor.value(m, "weight")) for m in tensor.experts}
        weights = {m: plain[m] * tensor.value(m, "scale") for m in plain}
        inexact = OTHER
        if normalize:
            # In float32, as the kernel and MergeKit sum it.
            divisor = float(torch.tensor(list(plain.values())).sum())
            if divisor == 1:
                normalize = False
            elif weights != plain and abs(divisor) >= 1e-8:  # else the kernel refuses
                weights = {m: weight / divisor for m, weight in weights.items()}
                normalize, inexact = False, FOLDED
        densities = _find_densities(tensor, weights, options, tied)
        lone = [m for m in weights if weights[m] != 0 and densities[m] > 0]
        if len(lone) == 1 and (normalize or weights[lone[0]] == 1):
            inexact = COPIED
        values.append(
            Values(
                {"normalize": normalize, "lambda": shared["lambda"]},
                {
                    m: {"weight": weights[m], "density": densities[m], "gamma": 0.0}
                    for m in tensor.experts
                },
                inexact,
            )
        )
    if not tied.tensors:
        return values, []
    note = (
        f"entries tied at the cut stay together as planned: {tied.tensors} deltas have "
        f"a density of their own, for {tied.entries} entries more or less than the "
        "plan's share"
    )
    return values, [note]


def _find_densities(
    tensor: PlannedTensor,
    weights: Mapping[ModelReference, float],
    options: MergeOptions,
    tied: _Count,
) -> dict[ModelReference, float]:
    """Find densities at which MergeKit keeps what the kernel keeps, and count ties.

    The planned one does where ``int(density * n)`` entries are kept, or where all that
    are more than zero are; else it is in the middle between two counts.
    """
    densities = {m: float(tensor.value(m, "density")) for m in tensor.experts}
    cuts = {m: tensor.value(m, CUT) for m in tensor.experts}
    open_models = [
        m
        for m in tensor.experts
        if weights[m] != 0 and (cuts[m] is not None or 0 < densities[m] < 1)
    ]
    deltas = read_deltas(tensor, options) if open_models else {}
    for model in open_models:
        delta = deltas.get(str(model))
        if delta is None:
            continue
        cut = cuts[model]
        if cut is None:
            cut = find_cut(delta, densities[model])
        magnitudes = delta.abs()
        kept = int((magnitudes > cut).sum())
        changed = int((magnitudes > 0).sum())
        wanted = int(densities[model] * delta.numel())
        if kept == wanted or (kept == changed and wanted >= changed):
            continue
        densities[model] = (kept + 0.5) / delta.numel()
        if cuts[model] is None:
            tied.tensors += 1
            tied.entries += abs(kept - wanted)
    return densities


def compare_merges(
    config: MergeConfiguration,
    tensors: Sequence[PlannedTensor],
    values: Sequence[Values],
    exported: Sequence[PlannedTensor],
    options: MergeOptions,
) -> tuple[list[str], str | None]:
    """Merge every tensor both ways and say what differs.

    Args:
        config: the hi_merging recipe; not changed.
        tensors: as it plans them.
        values: of each tensor in the exported recipe.
        exported: the same tensors as the exported recipe plans them.
        options: MergeKit's, for the device.

    Returns:
        Notes, and the ``out_dtype`` of the exported recipe: where float32 is only
        computed in, the one that the plan's merge has.
    """
    notes = []
    tokenizer = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    if tokenizer == "union":
        notes.append(
            "a union of tokenizers is in another order in every run of a stock "
            "MergeKit, and tensors over the vocabulary are not compared"
        )
    dtypes: set[torch.dtype] = set()
    differences: dict[str, _Count] = {}
    for tensor, wanted, found in zip(tensors, values, exported, strict=True):
        if tokenizer == "union" and tensor.weight.vocabulary_axis is not None:
            continue
        ours, theirs = _merge_both(tensor.task, found.task, options)
        if ours is None or theirs is None or not ours.is_floating_point():
            continue
        forced = tensor.weight.force_dtype
        if forced is None:
            dtypes.add(ours.dtype)
        stored = dtype_from_name(forced or config.out_dtype) or ours.dtype
        ours, theirs = ours.to(stored), theirs.to(stored)
        unequal = ours != theirs
        if unequal.any():
            count = differences.setdefault(wanted.inexact, _Count())
            count.tensors += 1
            count.entries += int(unequal.sum())
            largest = float((ours.double() - theirs.double()).abs().max())
            count.largest = max(count.largest, largest)
    out_dtype = config.out_dtype
    if config.dtype not in (None, "float32") or dtypes - {torch.float32}:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        if len(names) == 1:
            out_dtype = out_dtype or names[0]
        notes.append(
            "dtype is float32, since breadcrumbs computes in the dtype that it reads; "
            f"the plan's merge has {' and '.join(names)}, the file has "
            f"{out_dtype or 'float32'}"
        )
    notes += [
        f"{count.tensors} tensors differ from the plan's merge in {count.entries} "
        f"entries by up to {count.largest:.2g}: {why}"
        for why, count in differences.items()
    ]
    return notes, out_dtype


def _merge_both(
    ours: ExecuteMergeMethodTask, theirs: ExecuteMergeMethodTask, options: MergeOptions
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Merge one tensor by both tasks; inputs that they share are read once."""
    device = torch.device(options.device or "cpu")
    executor = Executor([cast(Task[Any], ours), cast(Task[Any], theirs)], device)
    merged = dict(executor.run(quiet=True))
    return merged[ours], merged[theirs]
