"""Values by tensor name -> one parameter of a recipe, by filters.

Invariant: MergeKit resolves the parameter to the same value for every name.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

Scalar = float | bool | str


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
    totals = Counter(values.values())
    if len(totals) == 1:
        return next(iter(totals))
    layers, kinds = _group(values)
    modes: dict[str, list[Scalar]] = {}
    for layer, names in layers.items():
        counts = Counter(values[name] for name in names)
        modes[layer] = [v for v, n in counts.items() if n == max(counts.values())]
    # A layer needs no filter of its own where the default is among its commonest.
    votes = Counter(value for found in modes.values() for value in found)
    default = max(votes, key=lambda value: (votes[value], totals[value]))
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
        longest_first = sorted(by_name.items(), key=lambda row: -len(row[0]))
        rows = [*longest_first, *by_layer.items()]
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
