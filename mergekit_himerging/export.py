"""A planned merge -> a recipe that says every value and needs no measuring.

Invariant: MergeKit's own planner reads the recipe back to the same values for every
tensor, bit for bit, or there is no recipe.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import yaml
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor, Task
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from pydantic import BaseModel

from mergekit_himerging.kernel import find_cut
from mergekit_himerging.method import CUT
from mergekit_himerging.parameters import METHOD_NAME
from mergekit_himerging.planning import plan_recipe
from mergekit_himerging.recipe import read_settings
from mergekit_himerging.tasks import PlannedTensor, read_deltas

Scalar = float | bool | str
Target = Literal["hi_merging", "breadcrumbs"]

SHARED = ("consensus", "normalize", "lambda")
PER_MODEL = ("weight", "density", "scale")

COPIED = "a lone undiluted model is copied by hi_merging, its delta is added here"
FOLDED = "the divisor of 'normalize' is folded into the weights"
OTHER = "MergeKit reads in float32 and sums five models or more in another order"


@dataclass(frozen=True, slots=True)
class Exported:
    """A recipe.

    Attributes:
        text: YAML, with comments on top.
        notes: where a merge by it differs from the plan's, a sentence each.
    """

    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Values:
    """What the recipe must resolve to in one tensor."""

    shared: Mapping[str, Scalar]
    per_model: Mapping[ModelReference, Mapping[str, Scalar]]
    inexact: str = OTHER
    """Why the merged tensor may differ from the plan's."""


@dataclass(slots=True)
class _Count:
    """Entries that are not as planned."""

    tensors: int = 0
    entries: int = 0
    largest: float = 0.0


def export_recipe(
    config: MergeConfiguration,
    tensors: Sequence[PlannedTensor],
    *,
    to: Target,
    options: MergeOptions,
) -> Exported:
    """Write a planned merge as a recipe with explicit values, by filters.

    Args:
        config: the hi_merging recipe, as MergeKit read it; not changed.
        tensors: all its tensors in planned order, with their final values and cuts.
        to: ``hi_merging`` keeps every parameter. ``breadcrumbs`` runs on a stock
            MergeKit: every tensor is read twice, to count what is kept and to compare
            the two merges. Zeros of either sign are equal there.
        options: MergeKit's, for paths and the device.

    Returns:
        The recipe and its notes.

    Raises:
        ValueError: a value has no place in such a recipe (``consensus`` in
            ``breadcrumbs``, a ``scale`` above 1 in ``hi_merging``), or MergeKit reads
            the recipe to other values.
    """
    notes: list[str] = []
    parameters: dict[str, Scalar] = {}
    if to == METHOD_NAME:
        values = [_keep_values(tensor) for tensor in tensors]
        parameters["scope"] = str(read_settings(config)["scope"])
    else:
        values, tied = _fold_values(tensors, options)
        if tied.tensors:
            notes.append(
                f"entries tied at the cut stay together as planned: {tied.tensors} "
                f"deltas have a density of their own, for {tied.entries} entries more "
                "or less than the plan's share"
            )
    plain = _to_plain(config) | {"merge_method": to}
    document = {
        n: plain[n] for n in ("merge_method", "base_model", *plain) if n in plain
    }
    _put_values(config, document, tensors, values)
    document["parameters"] = parameters | document["parameters"]
    if to == "breadcrumbs":
        document["dtype"] = "float32"
    planned = _plan(_dump(document), options)
    _check_values(tensors, values, planned)
    if to == "breadcrumbs":
        notes += _compare(config, document, tensors, values, planned, options)
    return Exported(
        _describe(config, to, notes, options) + _dump(document), tuple(notes)
    )


def write_setting(values: Mapping[str, Scalar]) -> Scalar | list[dict[str, Scalar]]:
    """Write one parameter of one model as MergeKit resolves it by tensor name.

    MergeKit takes the first filter that the name contains, so full names come before
    the layer that they are in, and longer names before their parts.

    Args:
        values: by input tensor name, at least one.

    Returns:
        The value where all are equal, else filters: for layers, for what deviates
        inside them (by kind where a kind is the same in all layers), and an entry for
        the rest.
    """
    layers, kinds = _group(values)
    modes: dict[str, list[Scalar]] = {}
    for layer, names in layers.items():
        counts = Counter(values[name] for name in names)
        modes[layer] = [v for v, n in counts.items() if n == max(counts.values())]
    # A layer needs no filter of its own where the default is among its commonest.
    votes = Counter(value for found in modes.values() for value in found)
    totals = Counter(values.values())
    default = max(votes, key=lambda value: (votes[value], totals[value]))
    if len(totals) == 1:
        return default
    chosen = {
        layer: default if default in found or layer in values else found[0]
        for layer, found in modes.items()
    }
    by_layer = {layer: mode for layer, mode in chosen.items() if mode != default}
    by_name: dict[str, Scalar] = {}
    for kind, by in kinds.items():
        odd = [name for layer, name in by.items() if values[name] != chosen[layer]]
        is_uniform = len({values[name] for name in by.values()}) == 1
        keys = [kind] if is_uniform and len(odd) > 1 else odd
        by_name |= {key: values[name] for key, name in zip(keys, odd, strict=False)}
    while True:
        by_name = dict(sorted(by_name.items(), key=lambda row: -len(row[0])))
        rows = [*by_name.items(), *by_layer.items()]
        caught = {
            name: value
            for name, value in values.items()
            if next((v for part, v in rows if part in name), default) != value
        }
        if not caught:
            break
        by_name |= caught
    return [*({"filter": part, "value": v} for part, v in rows), {"value": default}]


def _group(
    names: Iterable[str],
) -> tuple[dict[str, list[str]], dict[str, dict[str, str]]]:
    """Group names by layer, and by kind and layer; others are layers of their own."""
    layers: dict[str, list[str]] = {}
    kinds: dict[str, dict[str, str]] = {}
    for name in names:
        match = re.match(r"(.*?\.\d+\.)(.+)", name)
        layer, kind = match.groups() if match else (name, name)
        layers.setdefault(layer, []).append(name)
        kinds.setdefault(kind, {})[layer] = name
    return layers, kinds


def _keep_values(tensor: PlannedTensor) -> _Values:
    shared = {name: tensor.task.parameters[name] for name in SHARED}
    return _Values(
        shared,
        {m: {n: tensor.value(m, n) for n in PER_MODEL} for m in tensor.experts},
    )


def _fold_values(
    tensors: Sequence[PlannedTensor], options: MergeOptions
) -> tuple[list[_Values], _Count]:
    """Find the values of `breadcrumbs`, and count where ties move a density."""
    tied = _Count()
    values = []
    for tensor in tensors:
        consensus, normalize, strength = (tensor.task.parameters[n] for n in SHARED)
        if consensus != "none":
            raise ValueError(
                f"consensus must be none in breadcrumbs, got {consensus} (tensor "
                f"'{tensor.weight.name}'); export to {METHOD_NAME} instead"
            )
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
        densities = _count_densities(tensor, weights, options, tied)
        lone = [m for m in weights if weights[m] != 0 and densities[m] > 0]
        if len(lone) == 1 and (normalize or weights[lone[0]] == 1):
            inexact = COPIED
        values.append(
            _Values(
                {"normalize": normalize, "lambda": strength},
                {
                    m: {"weight": weights[m], "density": densities[m], "gamma": 0.0}
                    for m in tensor.experts
                },
                inexact,
            )
        )
    return values, tied


def _count_densities(
    tensor: PlannedTensor,
    weights: Mapping[ModelReference, float],
    options: MergeOptions,
    tied: _Count,
) -> dict[ModelReference, float]:
    """Find densities at which MergeKit keeps what the kernel keeps.

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


def _to_plain(value: Any) -> Any:
    """Turn a part of a recipe into what YAML writes, as given but for parameters."""
    if isinstance(value, ModelReference):
        if value.override_architecture is None:
            return str(value)
        fields = {"model": str(value.model), "lora": value.lora and str(value.lora)}
        fields["override_architecture"] = value.override_architecture
        return {name: item for name, item in fields.items() if item is not None}
    if isinstance(value, BaseModel):
        return {
            name: _to_plain(getattr(value, name))
            for name in type(value).model_fields
            if name in value.model_fields_set - {"parameters"}
            and getattr(value, name) is not None
        }
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return value


def _put_values(
    config: MergeConfiguration,
    document: dict[str, Any],
    tensors: Sequence[PlannedTensor],
    values: Sequence[_Values],
) -> None:
    """Put the values under the models of a plain recipe, sorted as the kernel sums."""
    shared: dict[str, dict[str, Scalar]] = {}
    per_model: dict[tuple[str, int, str], dict[str, dict[str, Scalar]]] = {}
    for (module, index), tensor, wanted in zip(
        _find_places(config, tensors), tensors, values, strict=True
    ):
        for name, value in wanted.shared.items():
            shared.setdefault(name, {})[tensor.weight.name] = value
        for model, settings in wanted.per_model.items():
            place = per_model.setdefault((module, index, str(model)), {})
            for name, value in settings.items():
                place.setdefault(name, {})[tensor.sources[str(model)]] = value
    for module, index, given, plain in _find_items(config, document):
        pairs = sorted(zip(given, plain, strict=True), key=lambda p: str(p[0].model))
        plain[:] = [item for _, item in pairs]
        for source, item in pairs:
            found = per_model.get((module, index, str(source.model)))
            if found:
                item["parameters"] = {n: write_setting(v) for n, v in found.items()}
    document["parameters"] = {n: write_setting(v) for n, v in shared.items()}


def _find_items(
    config: MergeConfiguration, document: Mapping[str, Any]
) -> Iterator[tuple[str, int, Sequence[Any], list[dict[str, Any]]]]:
    """Yield the lists of models with module, slice, and their plain twins."""
    modules: Mapping[str, Any] = config.modules or {"": config}
    for module, holder in modules.items():
        plain = document["modules"][module] if config.modules else document
        if holder.models:
            yield module, 0, holder.models, plain["models"]
        for index, output_slice in enumerate(holder.slices or ()):
            sources = plain["slices"][index]["sources"]
            yield module, index, output_slice.sources, sources


def _find_places(
    config: MergeConfiguration, tensors: Sequence[PlannedTensor]
) -> Iterator[tuple[str, int]]:
    """Yield the module and the slice whose sources make each tensor."""
    begun: set[str] = set()
    for tensor in tensors:
        module = tensor.module if config.modules else ""
        slices = (config.modules[module] if config.modules else config).slices or ()
        depths = [s.sources[0].layer_range for s in slices]
        ends = [sum(b - a for a, b in depths[: i + 1]) for i in range(len(depths))]
        if tensor.layer is not None:
            begun.add(tensor.module)
            yield module, sum(end <= tensor.layer for end in ends)
        else:
            yield module, max(len(ends) - 1, 0) if tensor.module in begun else 0


def _dump(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(
        dict(document),
        allow_unicode=True,
        default_flow_style=None,
        sort_keys=False,
        width=10_000,
    )


def _plan(text: str, options: MergeOptions) -> Sequence[PlannedTensor]:
    config = MergeConfiguration.model_validate(yaml.safe_load(text))
    return plan_recipe(config, options).resolve(None)


def _check_values(
    tensors: Sequence[PlannedTensor],
    values: Sequence[_Values],
    planned: Sequence[PlannedTensor],
) -> None:
    """Hold what MergeKit reads against what was meant."""
    names = [[tensor.weight.name for tensor in side] for side in (tensors, planned)]
    if names[0] != names[1]:
        raise ValueError(
            f"exported recipe must make the {len(names[0])} planned tensors, got "
            f"{len(names[1])}, or other names; hand over the tensors of this recipe"
        )
    for tensor, wanted, found in zip(tensors, values, planned, strict=True):
        pairs = [(found.task.parameters[n], v, n) for n, v in wanted.shared.items()]
        for model, settings in wanted.per_model.items():
            pairs += [(found.value(model, n), v, n) for n, v in settings.items()]
            if found.task.method_name == METHOD_NAME:
                cuts = found.value(model, CUT), tensor.value(model, CUT)
                pairs.append((*cuts, "cut"))
        for got, value, name in pairs:
            if got != value:
                raise ValueError(
                    f"{name} must be {value} in the exported recipe, got {got} "
                    f"(tensor '{tensor.weight.name}')"
                )


def _compare(
    config: MergeConfiguration,
    document: dict[str, Any],
    tensors: Sequence[PlannedTensor],
    values: Sequence[_Values],
    planned: Sequence[PlannedTensor],
    options: MergeOptions,
) -> Iterator[str]:
    """Merge every tensor both ways, set the output's dtype, and say what differs."""
    tokenizer = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    if tokenizer == "union":
        yield (
            "a union of tokenizers is in another order in every run of a stock "
            "MergeKit, and tensors over the vocabulary are not compared"
        )
    dtypes: set[torch.dtype] = set()
    differences: dict[str, _Count] = {}
    for tensor, wanted, found in zip(tensors, values, planned, strict=True):
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
    if config.dtype not in (None, "float32") or dtypes - {torch.float32}:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        if len(names) == 1:
            document.setdefault("out_dtype", names[0])
        yield (
            "dtype is float32, since breadcrumbs computes in the dtype that it reads; "
            f"the plan's merge has {' and '.join(names)}, the file has "
            f"{document.get('out_dtype', 'float32')}"
        )
    for why, count in differences.items():
        yield (
            f"{count.tensors} tensors differ from the plan's merge in {count.entries} "
            f"entries by up to {count.largest:.2g}: {why}"
        )


def _merge_both(
    ours: ExecuteMergeMethodTask, theirs: ExecuteMergeMethodTask, options: MergeOptions
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Merge one tensor by both tasks; inputs that they share are read once."""
    device = torch.device(options.device or "cpu")
    executor = Executor([cast(Task[Any], ours), cast(Task[Any], theirs)], device)
    merged = dict(executor.run(quiet=True))
    return merged[ours], merged[theirs]


def _describe(
    config: MergeConfiguration, to: Target, notes: Sequence[str], options: MergeOptions
) -> str:
    """Write the comments on top."""
    models = sorted(str(m) for m in config.referenced_models())
    flags = ""
    if any(model.lora is not None for model in config.referenced_models()):
        dtype = options.lora_merge_dtype
        flags = " --lora-merge-cache CACHE"
        flags += f" --lora-merge-dtype {dtype}" if dtype else ""
    needs = "MergeKit alone" if to == "breadcrumbs" else "mergekit-himerging"
    lines = [
        "A Hi-Merging plan as explicit values, exported by mergekit-himerging.",
        f"Base: {config.base_model}",
        *(f"Model: {model}" for model in models if model != str(config.base_model)),
        f"Needs {needs} and no calibration data:",
        f"  mergekit-yaml RECIPE OUT{flags}",
        *(f"Note: {note}." for note in notes),
    ]
    return "".join(f"# {line}\n" for line in lines)
