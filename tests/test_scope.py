"""Cuts over several tensors against a sort of everything at once."""

import pytest
import torch

from mergekit_himerging.kernel import KEEP_ALL, KEEP_NONE
from mergekit_himerging.scope import Request, find_scope_cuts

SHAPES = {"q": (5, 7), "k": (3,), "up": (11, 4)}


def make_deltas(model: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(model))
    return {
        name: torch.randn(shape, generator=generator) * (i + 1)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


DELTAS = {model: make_deltas(model) for model in ("a", "bb")}


def read_deltas(tensor: str) -> dict[str, torch.Tensor]:
    return {model: deltas[tensor] for model, deltas in DELTAS.items()}


@pytest.mark.parametrize("density", [0.02, 0.2, 0.5, 0.97])
def test_cut_keeps_the_share_of_the_whole_scope(density):
    cuts = find_scope_cuts(
        [Request(name, "all", {"a": density, "bb": density}) for name in SHAPES],
        read_deltas,
    )
    for model, deltas in DELTAS.items():
        everything = sorted(
            (abs(v) for d in deltas.values() for v in d.flatten().tolist()),
            reverse=True,
        )
        kept = [
            abs(v)
            for name, delta in deltas.items()
            for v in delta.flatten().tolist()
            if abs(v) > cuts[name, model]
        ]
        wanted = int(density * len(everything))
        assert sorted(kept, reverse=True) == everything[:wanted]


def test_scopes_are_ranked_apart():
    requests = [Request("q", 0, {"a": 0.2}), Request("up", 1, {"a": 0.2})]
    cuts = find_scope_cuts(requests, read_deltas)
    for name in ("q", "up"):
        delta = DELTAS["a"][name].abs()
        assert int((delta > cuts[name, "a"]).sum()) == int(0.2 * delta.numel())


def test_densities_may_differ_inside_a_scope():
    densities = {"q": 0.1, "k": 0.6, "up": 1.0}
    cuts = find_scope_cuts(
        [Request(name, "all", {"a": density}) for name, density in densities.items()],
        read_deltas,
    )
    everything = torch.cat([d.flatten().abs() for d in DELTAS["a"].values()])
    assert int((everything > cuts["q", "a"]).sum()) == int(0.1 * len(everything))
    assert int((everything > cuts["k", "a"]).sum()) == int(0.6 * len(everything))
    assert cuts["up", "a"] == KEEP_ALL


def test_share_of_less_than_one_entry_keeps_none():
    (cut,) = find_scope_cuts([Request("k", 0, {"a": 0.3})], read_deltas).values()
    assert cut == KEEP_NONE


def test_model_without_the_tensor_gets_no_cut():
    requests = [Request("q", 0, {"a": 0.5, "bb": 0.5})]
    cuts = find_scope_cuts(requests, lambda name: {"a": DELTAS["a"][name]})
    assert list(cuts) == [("q", "a")]
