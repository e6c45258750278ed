"""Sampled deltas: is the base the parent, does an update survive, is a value finite."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from mergekit.common import ModelReference, dtype_from_name

from mergekit_himerging.preflight.finding import Finding
from mergekit_himerging.preflight.models import Model
from mergekit_himerging.preflight.planned import (
    Planned,
    find_stored,
    is_aligned,
    list_inputs,
)
from mergekit_himerging.preflight.samples import pick_evenly, read_samples
from mergekit_himerging.tasks import PlannedTensor

UNRELATED = 1.2
"""Size of a delta against the base's weights. Independent weights of equal size differ
by the square root of 2; fine-tuning changes them by a few percent."""

LOST = 0.5
"""Share of the sampled updates that may be rounded away without a word."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one tensor.

    Attributes:
        tensor: the output tensor.
        base: ``[n]``, float64, as stored.
        dtype: that the base is stored in.
        tuned: by model, ``[n]``, float64, as stored.
    """

    tensor: PlannedTensor
    base: torch.Tensor
    dtype: torch.dtype
    tuned: Mapping[ModelReference, torch.Tensor]


def check_deltas(merge: Planned, models: Sequence[Model]) -> Iterator[Finding]:
    """Sample all models at the same places and compare them with the base.

    Args:
        merge: as planned.
        models: with their weights at hand.
    """
    by_reference = {model.reference: model for model in models}
    try:
        samples = _read(merge, by_reference)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        yield Finding(
            "warning",
            f"models must be readable to be sampled, got: {reason}; deltas are not "
            "checked before the merge",
        )
        return
    findings = list(_check_finite(samples))
    yield from findings
    if findings:
        return
    for model in models:
        if not model.is_base:
            yield from _check_parent(model.reference, samples)
    experts = [m.reference for m in models if not m.is_base]
    yield from _check_twins(experts, samples)
    yield from _check_rounding(merge, experts, samples)


def _read(merge: Planned, models: Mapping[ModelReference, Model]) -> list[Sample]:
    aligned = {t.weight.name: t for t in merge.tensors if is_aligned(t)}
    picked = [aligned[name] for name in pick_evenly(list(aligned))]
    wanted: dict[ModelReference, dict[str, str]] = {}
    for tensor in picked:
        for reference, weight in list_inputs(tensor):
            name = find_stored(models[reference], weight)
            if name is not None:
                wanted.setdefault(reference, {})[tensor.weight.name] = name
    values = {
        reference: read_samples(models[reference].stored, set(names.values()))
        for reference, names in wanted.items()
    }

    def get(tensor: PlannedTensor, model: ModelReference) -> torch.Tensor | None:
        name = wanted.get(model, {}).get(tensor.weight.name)
        found = values[model][name] if name is not None else None
        return found if found is not None and found.is_floating_point() else None

    samples = []
    for tensor in picked:
        base_model = tensor.task.base_model
        base = get(tensor, base_model) if base_model is not None else None
        if base is None:
            continue
        tuned = {
            model: found.double()
            for model in tensor.experts
            if (found := get(tensor, model)) is not None and found.shape == base.shape
        }
        samples.append(Sample(tensor, base.double(), base.dtype, tuned))
    return samples


def _check_finite(samples: Sequence[Sample]) -> Iterator[Finding]:
    broken: dict[ModelReference, list[str]] = {}
    for sample in samples:
        base = sample.tensor.task.base_model
        found = [*sample.tuned.items(), *([(base, sample.base)] if base else [])]
        for model, values in found:
            if not bool(torch.isfinite(values).all()):
                broken.setdefault(model, []).append(sample.tensor.weight.name)
    for model, names in broken.items():
        yield Finding(
            "error",
            f"'{model}' must have finite values, got NaN or infinity in {len(names)} "
            f"of {len(samples)} sampled tensors (the first: '{names[0]}'); use a whole "
            "copy or an earlier checkpoint of it",
        )


def _check_parent(
    model: ModelReference, samples: Sequence[Sample]
) -> Iterator[Finding]:
    """Compare one model with the base by the size of its deltas."""
    of_model = [s for s in samples if model in s.tuned]
    if not of_model:
        return
    if all(torch.equal(s.tuned[model], s.base) for s in of_model):
        yield Finding(
            "warning",
            f"'{model}' must differ from the base, got equal values in all "
            f"{len(of_model)} sampled tensors; it adds nothing to the merge, so check "
            "its path",
        )
        return
    ratios = []
    for sample in of_model:
        size = float(sample.base.norm())
        is_matrix = sample.tensor.layer is not None and _is_matrix(sample)
        if is_matrix and size > 0:
            ratios.append(float((sample.tuned[model] - sample.base).norm()) / size)
    ratios.sort()
    if ratios and ratios[len(ratios) // 2] > UNRELATED:
        yield Finding(
            "warning",
            f"'{model}' must be tuned from the base, got deltas "
            f"{ratios[len(ratios) // 2]:.2f} times as large as the base's weights "
            f"(median of {len(ratios)} tensors; unrelated models: 1.41); name the "
            "model that it was tuned from as 'base_model:'",
        )
    zeros = [
        sample.tensor.weight.name
        for sample in of_model
        if not sample.tuned[model].any() and sample.base.any()
    ]
    if zeros:
        yield Finding(
            "warning",
            f"'{model}' must hold values, got zeros alone in {len(zeros)} of "
            f"{len(of_model)} sampled tensors (the first: '{zeros[0]}'); its download "
            "or its saving may have been cut off",
        )


def _is_matrix(sample: Sample) -> bool:
    return not sample.tensor.weight.name.endswith((".bias", "norm.weight"))


def _check_twins(
    experts: Sequence[ModelReference], samples: Sequence[Sample]
) -> Iterator[Finding]:
    for one, other in itertools.combinations(experts, 2):
        shared = [s for s in samples if one in s.tuned and other in s.tuned]
        differs = any(not torch.equal(s.tuned[one], s.base) for s in shared)
        if differs and all(torch.equal(s.tuned[one], s.tuned[other]) for s in shared):
            yield Finding(
                "warning",
                f"models must differ, got equal values in all {len(shared)} sampled "
                f"tensors of '{one}' and '{other}'; remove one, and raise the other's "
                "weight if it is meant to count twice",
            )


def _check_rounding(
    merge: Planned, experts: Sequence[ModelReference], samples: Sequence[Sample]
) -> Iterator[Finding]:
    """Round the sampled sums as the merge will, and count what is lost."""
    read = dtype_from_name(merge.config.dtype)
    written = dtype_from_name(merge.config.out_dtype)
    changed = dict.fromkeys(experts, 0)
    lost = dict.fromkeys(experts, 0)
    overflowing: list[str] = []
    types: set[str] = set()
    for sample in samples:
        forced = dtype_from_name(sample.tensor.weight.force_dtype)
        kept = forced or read or sample.dtype
        out = forced or written or kept
        types.add(str(out).removeprefix("torch."))
        base = sample.base.to(kept).double()
        before = base.to(out)
        total = base.clone()
        for model, tuned in sample.tuned.items():
            values = sample.tensor
            factor = values.value(model, "weight") * values.value(model, "scale")
            if factor == 0 or values.value(model, "density") == 0:
                continue
            update = factor * (tuned.to(kept).double() - base)
            total += update
            moves = tuned != sample.base
            changed[model] += int(moves.sum())
            lost[model] += int((moves & ((base + update).to(out) == before)).sum())
        if not bool(torch.isfinite(total.to(out)).all()):
            overflowing.append(sample.tensor.weight.name)
    kinds = " or ".join(sorted(types))
    if overflowing:
        yield Finding(
            "error",
            f"merged values must fit {kinds}, got larger ones in {len(overflowing)} "
            f"sampled tensors (the first: '{overflowing[0]}'); write 'bfloat16' or "
            "'float32' as 'dtype:' and 'out_dtype:'",
        )
    for model in experts:
        if changed[model] and lost[model] > LOST * changed[model]:
            share = 100 * lost[model] / changed[model]
            yield Finding(
                "warning",
                f"updates of '{model}' must survive in {kinds}, got {share:.0f} % of "
                f"{changed[model]} sampled ones rounded away at its weight; write "
                "'float32' as 'dtype:' and a wider 'out_dtype:'",
            )
