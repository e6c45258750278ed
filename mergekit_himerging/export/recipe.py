"""A planned merge -> a recipe that says every value and needs no measuring.

Invariant: MergeKit's own planner reads the recipe back to the same values for every
tensor, bit for bit, or there is no recipe.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import yaml
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from pydantic import BaseModel

from mergekit_himerging.export.breadcrumbs import Values, compare_merges, fold_values
from mergekit_himerging.export.filters import Scalar, write_setting
from mergekit_himerging.method import CUT
from mergekit_himerging.parameters import METHOD_NAME
from mergekit_himerging.planning import plan_recipe
from mergekit_himerging.recipe import read_settings
from mergekit_himerging.tasks import PlannedTensor

Target = Literal["hi_merging", "breadcrumbs"]

SHARED = ("consensus", "normalize", "lambda")
PER_MODEL = ("weight", "density", "scale")


@dataclass(frozen=True, slots=True)
class Exported:
    """A recipe.

    Attributes:
        text: YAML, with comments on top.
        notes: where a merge by it differs from the plan's, a sentence each.
    """

    text: str
    notes: tuple[str, ...]


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
    plain = _to_plain(config) | {"merge_method": to}
    document: dict[str, Any] = {
        n: plain[n] for n in ("merge_method", "base_model", *plain) if n in plain
    }
    if to == "breadcrumbs":
        values, notes = fold_values(tensors, options)
        _put_values(config, document, tensors, values)
        document["dtype"] = "float32"
    else:
        values, notes = [_keep_values(tensor) for tensor in tensors], []
        _put_values(config, document, tensors, values)
        settings = read_settings(config)
        document["parameters"] = {
            "scope": settings["scope"],
            **({"hide_paths": True} if settings["hide_paths"] else {}),
            **({} if settings["smoke_test"] else {"smoke_test": False}),
        } | document["parameters"]
    planned = _plan(document, options)
    _check_values(tensors, values, planned)
    if to == "breadcrumbs":
        found, out_dtype = compare_merges(config, tensors, values, planned, options)
        notes += found
        if out_dtype is not None:
            document["out_dtype"] = out_dtype
    return Exported(
        _describe(config, to, notes, options) + _dump(document), tuple(notes)
    )


def _keep_values(tensor: PlannedTensor) -> Values:
    return Values(
        {name: tensor.task.parameters[name] for name in SHARED},
        {m: {n: tensor.value(m, n) for n in PER_MODEL} for m in tensor.experts},
    )


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
    values: Sequence[Values],
) -> None:
    """Put the values under the models of a plain recipe, sorted as the kernel sums."""
    shared: dict[str, dict[str, Scalar]] = {}
    per_model: dict[tuple[str, int, str], dict[str, dict[str, Scalar]]] = {}
    for (module, index), tensor, wanted in zip(
        _find_places(config, tensors), tensors, values, strict=True
    ):
        sources = tensor.sources
        for name, value in wanted.shared.items():
            shared.setdefault(name, {})[tensor.weight.name] = value
        for model, settings in wanted.per_model.items():
            place = per_model.setdefault((module, index, str(model)), {})
            for name, value in settings.items():
                place.setdefault(name, {})[sources[str(model)]] = value
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
    for module, holder in _get_holders(config).items():
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
    ends: dict[str, list[int]] = {}
    for name, holder in _get_holders(config).items():
        ranges = [item.sources[0].layer_range for item in holder.slices or ()]
        ends[name] = list(accumulate(end - start for start, end in ranges))
    begun: set[str] = set()
    for tensor in tensors:
        module = tensor.module if config.modules else ""
        if tensor.layer is not None:
            begun.add(tensor.module)
            yield module, sum(end <= tensor.layer for end in ends[module])
        else:
            last = max(len(ends[module]) - 1, 0)
            yield module, last if tensor.module in begun else 0


def _get_holders(config: MergeConfiguration) -> Mapping[str, Any]:
    """Return what lists models or slices, by module; one without a name otherwise."""
    return config.modules or {"": config}


def _dump(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(
        dict(document),
        allow_unicode=True,
        default_flow_style=None,
        sort_keys=False,
        width=10_000,
    )


def _plan(
    document: Mapping[str, Any], options: MergeOptions
) -> Sequence[PlannedTensor]:
    """Plan the recipe from its text, as a command will."""
    config = MergeConfiguration.model_validate(yaml.safe_load(_dump(document)))
    return plan_recipe(config, options).resolve(None)


def _check_values(
    tensors: Sequence[PlannedTensor],
    values: Sequence[Values],
    planned: Sequence[PlannedTensor],
) -> None:
    """Hold what MergeKit reads against what was meant."""
    if [t.weight.name for t in tensors] != [t.weight.name for t in planned]:
        raise ValueError(
            f"exported recipe must make the {len(tensors)} planned tensors, got "
            f"{len(planned)}, or other names; hand over the tensors of this recipe"
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
