"""What a recipe asks for that would come out otherwise: types, slices, weights."""

from typing import Any

import pytest
import torch
import transformers
from conftest import make_llama, make_recipe, save_model, tune
from preflight_cases import (
    Case,
    copy_model,
    edit_json,
    edit_tensors,
    inspect,
    recipe_of,
)


def in_types(base: torch.dtype, tuned: torch.dtype, by: float = 0.02, **changes: Any):
    """Make a recipe without a dtype, for models stored in these."""

    def make(zoo, here):
        model = make_llama(seed=0)
        save_model(tune(model, seed=1, by=by), here / "a", dtype=tuned)
        save_model(model, here / "base", dtype=base)
        return make_recipe(here, "a", **{"dtype": None, **changes})

    return make


def with_large_values(zoo, here):
    folder = copy_model(zoo, here, "a")

    def change(tensors):
        tensors["model.norm.weight"][:] = 2e5

    edit_tensors(folder, change)
    return recipe_of(zoo, folder, out_dtype="float16")


def with_other_type_in_config(zoo, here):
    folder = copy_model(zoo, here, "base")
    edit_json(folder / "config.json", dtype="bfloat16")
    return make_recipe(zoo, "a", base_model=str(folder), dtype=None)


BF16, F32 = torch.bfloat16, torch.float32
TYPES = {
    "whole numbers": Case(
        lambda zoo, here: make_recipe(zoo, "a", out_dtype="int64"),
        "error",
        ("out_dtype must be one of float32, bfloat16, float16, float64, got 'int64'",),
    ),
    "no type at all": Case(
        lambda zoo, here: make_recipe(zoo, "a", dtype="bf16"),
        "error",
        ("dtype must be one of float32, bfloat16, float16, float64, got 'bf16'",),
    ),
    "an expert in another type": Case(
        in_types(BF16, F32),
        "warning",
        ("got F32 in '{here}/a' and BF16 in the base", "'dtype: float32'"),
    ),
    "another type in the configuration": Case(
        with_other_type_in_config,
        "warning",
        ("base model '{here}/base' must have the dtype", "got bfloat16 there and F32"),
    ),
    "values beyond float16": Case(
        with_large_values,
        "error",
        ("merged values must fit float16, got larger ones in 1 sampled tensors",),
    ),
    "values beyond float16 as read": Case(
        lambda zoo, here: with_large_values(zoo, here) | {"dtype": "float16"},
        "error",
        ("merged values must fit float16",),
    ),
    "updates too small for the output": Case(
        in_types(F32, F32, by=1e-5, out_dtype="bfloat16"),
        "warning",
        ("updates of '{here}/a' must survive in bfloat16, got 80 %", "rounded"),
    ),
    "updates too small for the input": Case(
        in_types(F32, F32, by=1e-5, dtype="bfloat16"),
        "warning",
        ("updates of '{here}/a' must survive in bfloat16, got 80 %",),
    ),
}


@pytest.mark.parametrize("case", TYPES.values(), ids=TYPES.keys())
def test_type_that_cannot_hold_the_merge_is_named(zoo, tmp_path, case):
    case.check(zoo, tmp_path)


def test_updates_that_survive_are_no_finding(zoo, tmp_path):
    make = in_types(F32, F32, by=0.005, dtype="float32", out_dtype="bfloat16")
    assert inspect(make(zoo, tmp_path)) == []


def sliced(*slices: dict[str, tuple[int, int]], **changes: Any):
    """Make a recipe of slices, each a mapping of the zoo's models to layers."""

    def make(zoo, here):
        recipe = make_recipe(zoo, **changes)
        del recipe["models"]
        recipe["slices"] = [
            {
                "sources": [
                    {"model": str(zoo / name), "layer_range": list(layers)}
                    for name, layers in ranges.items()
                ]
            }
            for ranges in slices
        ]
        return recipe

    return make


def with_kinds(*ranges: tuple[int, int]):
    """Make a Qwen of two full and two sliding layers, and slices of it."""

    def make(zoo, here):
        config = transformers.Qwen2Config(
            **{"vocab_size": 42, "hidden_size": 32, "intermediate_size": 48},
            **{"num_hidden_layers": 4, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "use_sliding_window": True},
            **{"max_window_layers": 2, "sliding_window": 8, "eos_token_id": 1},
            layer_types=[*["full_attention"] * 2, *["sliding_attention"] * 2],
        )
        torch.manual_seed(0)
        base = transformers.Qwen2ForCausalLM(config)
        save_model(tune(base, seed=1), here / "a")
        save_model(base, here / "base")
        recipe = make_recipe(here)
        del recipe["models"]
        recipe["slices"] = [
            {
                "sources": [
                    {"model": str(here / name), "layer_range": list(layers)}
                    for name in ("base", "a")
                ]
            }
            for layers in ranges
        ]
        return recipe

    return make


def both(start: int, end: int) -> dict[str, tuple[int, int]]:
    return {"base": (start, end), "a": (start, end)}


SLICES = {
    "dropped": Case(
        sliced(both(0, 1), both(2, 3)),
        "warning",
        ("got some that leave out layer 1 of 3", "'layer_range:'"),
    ),
    "repeated": Case(
        sliced(both(0, 2), both(1, 3)),
        "warning",
        ("got some that repeat layer 1 of 3",),
    ),
    "misaligned": Case(
        sliced({"base": (0, 3), "deep": (1, 4)}),
        "warning",
        ("'{zoo}/deep' must give the layers", "got [1, 4] and [0, 3]", "slices[0]"),
    ),
    "a model in one slice": Case(
        sliced({**both(0, 1), "b": (0, 1)}, both(1, 3)),
        "warning",
        ("'{zoo}/b' must stand in every slice", "none of it in 'slices[1]'"),
    ),
    "a model in the last slice, lost behind the layers": Case(
        sliced(both(0, 1), {**both(1, 3), "b": (1, 3)}),
        "error",
        ("the first slice must have as many sources as the last, got 2 and 3",),
    ),
    "backwards": Case(
        sliced(both(0, 3), both(3, 1)),
        "error",
        ("layer_range of '{zoo}/a' must lie in 0 to 3", "[3, 1] (slices[1].sources"),
    ),
    "beyond the end": Case(
        sliced(both(0, 4)),
        "error",
        ("layer_range of '{zoo}/a' must lie in 0 to 3", "got [0, 4]"),
    ),
    "empty": Case(
        sliced(both(0, 3), both(2, 2)),
        "error",
        ("layer_range of '{zoo}/base' must lie in", "got [2, 2]"),
    ),
    "another kind": Case(
        with_kinds((2, 4), (0, 2)),
        "error",
        ("layer 2 of the base, 'sliding_attention', as output layer 0, 'full",),
    ),
    "fewer than the configuration lists": Case(
        with_kinds((0, 3)),
        "error",
        ("slices must keep the 4 layers that layer_types", "got 3"),
    ),
}


@pytest.mark.parametrize("case", SLICES.values(), ids=SLICES.keys())
def test_slices_that_change_the_model_are_named(zoo, tmp_path, case):
    case.check(zoo, tmp_path)


def test_slices_that_only_part_the_layers_are_no_finding(zoo, tmp_path):
    assert inspect(sliced(both(0, 2), both(2, 3))(zoo, tmp_path)) == []


def weighted(*weights: Any, **parameters: Any):
    """Make a recipe with these weights for experts `a`, `b`, ..."""

    def make(zoo, here):
        recipe = make_recipe(zoo, parameters=parameters)
        recipe["models"] = [
            {"model": str(zoo / name), "parameters": {"weight": weight}}
            for name, weight in zip("abc", weights, strict=False)
        ]
        return recipe

    return make


PART = {"filter": "self_atn", "value": 1.0}
HIDDEN = [{"value": 1.0}, {"filter": "mlp", "value": 0.5}]
SIGNED = [{"filter": "mlp.up_proj", "value": -0.5}, {"value": 0.5}]
WEIGHTS = {
    "cancel": Case(
        weighted(1.0, -0.99, normalize=True),
        "error",
        ("weights must not nearly cancel", "got [1.0, -0.99] with sum 0.01"),
    ),
    "cancel in part": Case(
        weighted(SIGNED, 0.5, normalize=True),
        "error",
        ("weights must not nearly cancel", "'model.layers.0.mlp.up_proj.weight', 3"),
    ),
    "negative": Case(
        weighted(1.0, -0.5),
        "warning",
        ("weight of '{zoo}/b' must be at least 0", "got less in 30 tensors"),
    ),
    "negative in part": Case(
        weighted(SIGNED),
        "warning",
        ("weight of '{zoo}/a'", "got less in 3 tensors", "layers.0.mlp.up_proj"),
    ),
    "zero": Case(
        weighted(1.0, 0),
        "warning",
        ("'{zoo}/b' must have weight, density and scale above 0", "all 30 tensors"),
    ),
    "zero density": Case(
        weighted(1.0, density=0),
        "warning",
        ("'{zoo}/a' must have weight, density and scale above 0",),
    ),
    "zero lambda": Case(
        weighted(1.0, **{"lambda": 0}), "warning", ("lambda must differ from 0",)
    ),
    "a filter without a match": Case(
        weighted([PART, {"value": 0.5}]),
        "warning",
        ("filter 'self_atn' of weight must match a tensor", "none has it (models[0]"),
    ),
    "a filter behind one for all": Case(
        weighted(HIDDEN),
        "warning",
        ("filter 'mlp' of weight must match", "earlier filters take them all"),
    ),
}


@pytest.mark.parametrize("case", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_weights_that_do_not_add_are_named(zoo, tmp_path, case):
    case.check(zoo, tmp_path)


def test_gradient_and_filters_that_match_are_no_finding(zoo, tmp_path):
    mixed = [{"filter": "mlp", "value": [0.2, 0.8]}, {"value": 0.5}]
    assert inspect(weighted(mixed, 0.5, normalize=True)(zoo, tmp_path)) == []
