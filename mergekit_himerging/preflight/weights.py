"""Weights that do something else than their reader expects, as resolved by tensor."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mergekit.config import ConditionalParameter, MergeConfiguration

from mergekit_himerging.preflight.finding import Finding
from mergekit_himerging.preflight.models import list_slices
from mergekit_himerging.preflight.planned import Planned

NEAR_ZERO = 0.05
"""Of a sum of weights against the sum of their magnitudes: a factor of 20 on deltas."""


def check_weights(merge: Planned) -> Iterator[Finding]:
    """Find weights that cancel, subtract or vanish, and filters that match nothing."""
    negative: dict[str, list[str]] = {}
    idle: dict[str, int] = {}
    planned: dict[str, int] = {}
    cancelled: list[tuple[str, float, list[float]]] = []
    for tensor in merge.tensors:
        experts = tensor.experts
        weights = {str(m): float(tensor.value(m, "weight")) for m in experts}
        for model in experts:
            name = str(model)
            planned[name] = planned.get(name, 0) + 1
            if weights[name] < 0:
                negative.setdefault(name, []).append(tensor.weight.name)
            factors = (weights[name], *(_value(tensor, model, n) for n in FACTORS))
            idle[name] = idle.get(name, 0) + (0 in factors)
        total, size = sum(weights.values()), sum(map(abs, weights.values()))
        if tensor.task.parameters["normalize"] and abs(total) < NEAR_ZERO * size:
            cancelled.append((tensor.weight.name, total, list(weights.values())))
    if cancelled:
        name, total, values = cancelled[0]
        yield Finding(
            "error",
            f"weights must not nearly cancel with 'normalize: true', got {values} with "
            f"sum {total:.3g} ('{name}', {len(cancelled)} tensors); deltas are divided "
            "by the sum, so remove 'normalize' or mend the signs",
        )
    for name, tensors in sorted(negative.items()):
        yield Finding(
            "warning",
            f"weight of '{name}' must be at least 0 to add its task, got less in "
            f"{len(tensors)} tensors (the first: '{tensors[0]}'); its delta is "
            "subtracted, so remove the sign unless it is meant",
        )
    yield from _check_idle(merge, idle, planned)
    yield from _check_filters(merge)


FACTORS = ("density", "scale")


def _value(tensor: Any, model: Any, name: str) -> float:
    return float(tensor.value(model, name))


def _check_idle(
    merge: Planned, idle: Mapping[str, int], planned: Mapping[str, int]
) -> Iterator[Finding]:
    parameters = [tensor.task.parameters for tensor in merge.tensors]
    if parameters and all(values["lambda"] == 0 for values in parameters):
        yield Finding(
            "warning",
            "lambda must differ from 0 for a merge, got 0; the base alone is written, "
            "so remove it",
        )
        return
    for name, count in sorted(idle.items()):
        if count == planned[name]:
            yield Finding(
                "warning",
                f"'{name}' must have weight, density and scale above 0 somewhere, got "
                f"0 in all {count} tensors; it adds nothing, so mend them or remove it",
            )


def _check_filters(merge: Planned) -> Iterator[Finding]:
    names = [tensor.weight.name for tensor in merge.tensors]
    for where, mapping in _list_parameters(merge.config):
        for parameter, setting in mapping.items():
            conditions = setting if isinstance(setting, list) else [setting]
            rules = [c for c in conditions if isinstance(c, ConditionalParameter)]
            left: Sequence[str] = names
            for rule in rules:
                text = rule.filter
                catches_all = text is None or text == "*"
                matched = [n for n in left if catches_all or str(text) in n]
                if not matched:
                    ever = any(str(text) in name for name in names)
                    why = "earlier filters take them all" if ever else "none has it"
                    yield Finding(
                        "warning",
                        f"filter '{text if text is not None else '*'}' of {parameter} "
                        f"must match a tensor, got no match, as {why} ({where}); mend "
                        f"it, for example to a part of '{names[-1]}'",
                    )
                left = [n for n in left if not catches_all and str(text) not in n]


def _list_parameters(
    config: MergeConfiguration,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "parameters", config.parameters or {}
    for index, item in enumerate(config.models or ()):
        yield f"models[{index}] '{item.model}'", item.parameters or {}
    for name, module in (config.modules or {}).items():
        yield f"modules.{name}", module.parameters or {}
        for index, item in enumerate(module.models or ()):
            yield f"modules.{name}.models[{index}]", item.parameters or {}
    for where, output_slice in list_slices(config):
        yield where, output_slice.parameters or {}
        for index, source in enumerate(output_slice.sources):
            yield f"{where}.sources[{index}] '{source.model}'", source.parameters or {}
