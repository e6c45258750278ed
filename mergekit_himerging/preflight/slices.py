"""Slices: layers dropped, repeated, moved to a place of another kind, or misaligned."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration

from mergekit_himerging.preflight.finding import Finding, list_names
from mergekit_himerging.preflight.models import Model, find_base, list_slices


def check_slices(
    config: MergeConfiguration, models: Sequence[Model]
) -> Iterator[Finding]:
    """Compare the layers that slices take with those that the models have.

    Args:
        config: the recipe, as it was given.
        models: of the recipe.
    """
    depths = {model.reference: model.n_layers for model in models}
    groups: dict[str, list[tuple[str, Any]]] = {}
    for where, output_slice in list_slices(config):
        groups.setdefault(where.rpartition(".")[0], []).append((where, output_slice))
    for slices in groups.values():
        bad = list(_check_ranges(slices, depths if len(groups) == 1 else {}))
        yield from bad
        if not bad and len(groups) == 1:
            yield from _check_order(config, slices, models)
        yield from _check_sources(config, slices)


def _check_ranges(
    slices: Sequence[tuple[str, Any]], depths: Mapping[ModelReference, int | None]
) -> Iterator[Finding]:
    for where, output_slice in slices:
        for index, source in enumerate(output_slice.sources):
            start, end = source.layer_range
            depth = depths.get(source.model)
            if not 0 <= start < end or (depth is not None and end > depth):
                rule = f"0 to {depth}" if depth is not None else "ascending numbers"
                yield Finding(
                    "error",
                    f"layer_range of '{source.model}' must lie in {rule} and hold a "
                    f"layer, got [{start}, {end}] ({where}.sources[{index}]); the end "
                    "is not included",
                )


def _check_order(
    config: MergeConfiguration,
    slices: Sequence[tuple[str, Any]],
    models: Sequence[Model],
) -> Iterator[Finding]:
    base = find_base(config)
    model = next((m for m in models if m.reference == base), None)
    depth = model.n_layers if model is not None else None
    if model is None or depth is None:
        return
    taken: list[int] = []
    for _, output_slice in slices:
        ranges = {s.model: s.layer_range for s in output_slice.sources}
        given = ranges.get(output_slice.base_model or base)
        if given is None:
            return
        taken += range(*given)
    dropped = [layer for layer in range(depth) if layer not in taken]
    repeated = sorted({layer for layer in taken if taken.count(layer) > 1})
    for layers, what in ((dropped, "leave out"), (repeated, "repeat")):
        if layers:
            yield Finding(
                "warning",
                f"slices must take every layer of the base once to keep its depth, got "
                f"some that {what} {_list_layers(layers)} of {depth}; check each "
                "'layer_range:', whose end is not included",
            )
    yield from _check_kinds(model, taken, depth)


def _check_kinds(model: Model, taken: Sequence[int], depth: int) -> Iterator[Finding]:
    """Compare each output layer's kind in the configuration with its source's."""
    for name, kinds in sorted(model.text_config.to_dict().items()):
        if not isinstance(kinds, list | tuple) or len(kinds) != depth:
            continue
        if not all(isinstance(kind, str | int | bool) for kind in kinds):
            continue
        moved = [
            (place, layer)
            for place, layer in enumerate(taken)
            if place >= depth or kinds[place] != kinds[layer]
        ]
        if moved:
            place, layer = moved[0]
            will_be = f"'{kinds[place]}'" if place < depth else "nothing"
            yield Finding(
                "error",
                f"slices must put each layer where the configuration has its kind, got "
                f"layer {layer} of the base, '{kinds[layer]}', as output layer "
                f"{place}, {will_be} in {name} ({len(moved)} such layers); move the "
                "slices by whole periods of the pattern",
            )
        elif len(taken) != depth and name == "layer_types":
            yield Finding(
                "error",
                f"slices must keep the {depth} layers that {name} of the base's "
                f"configuration lists, got {len(taken)}; MergeKit cannot write a "
                "shorter or longer list, so take as many layers",
            )


def _check_sources(
    config: MergeConfiguration, slices: Sequence[tuple[str, Any]]
) -> Iterator[Finding]:
    base = find_base(config)
    everywhere: list[ModelReference] = []
    for where, output_slice in slices:
        ranges = {s.model: tuple(s.layer_range) for s in output_slice.sources}
        everywhere += [model for model in ranges if model not in everywhere]
        of_base = ranges.get(output_slice.base_model or base)
        for model, layers in ranges.items():
            same_length = of_base and layers[1] - layers[0] == of_base[1] - of_base[0]
            if of_base and same_length and layers != of_base:
                yield Finding(
                    "warning",
                    f"'{model}' must give the layers that it is compared with, got "
                    f"{list(layers)} and {list(of_base)} of the base ({where}); its "
                    "delta is taken between different layers, so mend one "
                    "'layer_range:'",
                )
    for model in everywhere:
        without = [w for w, s in slices if model not in {x.model for x in s.sources}]
        if without:
            yield Finding(
                "warning",
                f"'{model}' must stand in every slice to be merged into every layer, "
                f"got none of it in {list_names(without)}; what lies before the layers "
                "takes the models of the first slice, what lies behind them those of "
                "the last",
            )
    counts = [len(s.sources) for _, s in slices]
    if counts and counts[0] < counts[-1]:
        yield Finding(
            "error",
            f"the first slice must have as many sources as the last, got {counts[0]} "
            f"and {counts[-1]} ({slices[-1][0]}); MergeKit drops the others from norm "
            "and head without a word, so add them to the first with 'weight: 0'",
        )


def _list_layers(layers: Sequence[int]) -> str:
    shown = ", ".join(map(str, layers[:8]))
    rest = f" and {len(layers) - 8} more" if len(layers) > 8 else ""
    return f"layer{'s' if len(layers) > 1 else ''} {shown}{rest}"
