"""Plans through MergeKit's own command, against merges written out by hand."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_recipe
from safetensors.torch import load_file

PartOf = Callable[[str, str], tuple[float, float, float]]
"""(output tensor, expert) -> weight, density, scale."""


def layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else None


def merge_by_hand(
    zoo: Path,
    experts: Sequence[str],
    part_of: PartOf,
    *,
    layers: Sequence[int] = (0, 1, 2),
    normalize: bool = False,
) -> dict[str, torch.Tensor]:
    """Merge state dicts in float64 by sorting: no cuts, no graph, none of our code.

    Args:
        zoo: where the models lie.
        experts: what is merged into the base.
        part_of: weight, density and scale of an expert in an output tensor.
        layers: the input layer of each output layer.
        normalize: divide by the sum of the weights.
    """
    base = load_file(zoo / "base" / "model.safetensors")
    tuned = {name: load_file(zoo / name / "model.safetensors") for name in experts}
    sources = {name: name for name in base if layer_of(name) is None}
    for new, old in enumerate(layers):
        for name in base:
            if layer_of(name) == old:
                sources[name.replace(f".{old}.", f".{new}.", 1)] = name
    merged = {}
    for output, source in sources.items():
        total = torch.zeros(base[source].numel(), dtype=torch.float64)
        for expert in experts:
            weight, density, scale = part_of(output, expert)
            delta = (tuned[expert][source] - base[source]).flatten().double()
            kept = sorted(range(len(delta)), key=lambda i: -abs(float(delta[i])))
            kept = kept[: int(density * len(delta))]
            total[kept] += weight * scale * delta[kept]
        if normalize:
            total /= sum(part_of(output, expert)[0] for expert in experts)
        merged[output] = (base[source].double() + total.view_as(base[source])).float()
    return merged


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(
            tensor, right[name], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def write_plan(
    path: Path,
    zoo: Path,
    *rows: dict[str, Any],
    experts: str = "ab",
    base: str = "base",
    n_layers: int = 3,
) -> str:
    """Write a plan for models of the zoo; rows name the models by their folder."""
    plan = {
        "schema": 1,
        "base": str(zoo / base),
        "models": [str(zoo / name) for name in experts],
        "n_layers": n_layers,
        "treatments": [{**row, "model": str(zoo / row["model"])} for row in rows],
    }
    path.write_text(json.dumps(plan), encoding="utf-8")
    return str(path)


def test_factors_apply_to_every_density_inside_a_layer(zoo, merge, tmp_path):
    plan = write_plan(
        tmp_path / "plan.json",
        zoo,
        {"layer": 0, "model": "a", "action": "shrink", "density_factor": 0.5,
         "scale_factor": 0.25},
        {"layer": 0, "model": "b", "action": "keep"},
        {"layer": 1, "model": "a", "action": "drop"},
        {"layer": 2, "model": "b", "action": "set", "density_factor": 2,
         "scale_factor": 0.5, "weight_factor": -3},
    )  # fmt: skip
    recipe = make_recipe(zoo, "a", "b", parameters={"plan": plan, "weight": 0.4})
    mlp_then_gradient = [
        {"filter": "mlp.", "value": 0.8},
        {"value": [0.2, 1.0]},
    ]
    recipe["models"][0]["parameters"] = {"density": mlp_then_gradient}
    recipe["models"][1]["parameters"] = {"density": 0.5, "scale": [1, 0.5], "weight": 1}

    def part_of(tensor: str, expert: str) -> tuple[float, float, float]:
        layer = layer_of(tensor)
        if expert == "a":
            density = 0.8 if "mlp." in tensor else {1: 0.6, 2: 1.0}.get(layer, 0.2)
            if layer == 0:
                return 0.4, 0.5 * density, 0.25
            return (0.0 if layer == 1 else 0.4), density, 1.0
        if layer == 2:
            return -3.0, 1.0, 0.25
        return 1.0, 0.5, (0.75 if layer == 1 else 1.0)

    assert_close(merge(recipe), merge_by_hand(zoo, "ab", part_of))


def test_dropping_everything_leaves_the_base_in_blocks_only(zoo, merge, tmp_path):
    rows = [
        {"layer": layer, "model": model, "action": "drop"}
        for layer in range(3)
        for model in "ab"
    ]
    plan = write_plan(tmp_path / "plan.json", zoo, *rows)
    parameters = {"density": 0.5, "weight": 0.7}
    treated = merge(make_recipe(zoo, "a", "b", parameters={**parameters, "plan": plan}))
    plain = merge(make_recipe(zoo, "a", "b", parameters=parameters))
    base = load_file(zoo / "base" / "model.safetensors")
    outside = {name for name in base if layer_of(name) is None}
    assert outside == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    for name, tensor in treated.items():
        assert torch.equal(tensor, (plain if name in outside else base)[name]), name
        assert not torch.equal(plain[name], base[name]), name


def test_plan_without_treatments_changes_no_bit(zoo, merge, tmp_path):
    plan = write_plan(tmp_path / "plan.json", zoo)
    parameters = {"density": 0.5, "weight": 0.7}
    treated = merge(make_recipe(zoo, "a", "b", parameters={**parameters, "plan": plan}))
    plain = merge(make_recipe(zoo, "a", "b", parameters=parameters))
    assert all(torch.equal(treated[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("ranges", "layers", "dropped"),
    [
        ([[1, 3]], [1, 2], 0),
        ([[1, 3]], [1, 2], 1),
        ([[0, 2], [1, 3]], [0, 1, 1, 2], 2),
        ([[2, 3], [0, 1]], [2, 0], 0),
    ],
    ids=["first", "last", "a layer taken twice", "layers in another order"],
)
def test_layers_of_slices_are_those_of_the_output(
    zoo, merge, tmp_path, ranges, layers, dropped
):
    plan = write_plan(
        tmp_path / "plan.json",
        zoo,
        {"layer": dropped, "model": "a", "action": "drop"},
        n_layers=len(layers),
    )
    recipe = make_recipe(zoo, parameters={"plan": plan, "density": 0.5})
    del recipe["models"]
    recipe["slices"] = [
        {
            "sources": [
                {"model": str(zoo / name), "layer_range": layer_range}
                for name in ("base", "a", "b")
            ]
        }
        for layer_range in ranges
    ]

    def part_of(tensor: str, expert: str) -> tuple[float, float, float]:
        is_dropped = expert == "a" and layer_of(tensor) == dropped
        return (0.0 if is_dropped else 0.5), 0.5, 1.0

    assert_close(merge(recipe), merge_by_hand(zoo, "ab", part_of, layers=layers))


def test_weight_left_open_is_the_share_of_all_models_under_a_plan(zoo, merge, tmp_path):
    plan = write_plan(
        tmp_path / "plan.json",
        zoo,
        {"layer": 0, "model": "a", "action": "set", "weight_factor": 2},
        {"layer": 1, "model": "b", "action": "drop"},
        experts="abc",
    )

    def part_of(tensor: str, expert: str) -> tuple[float, float, float]:
        factor = {(0, "a"): 2, (1, "b"): 0}.get((layer_of(tensor), expert), 1)
        return factor / 3, 1.0, 1.0

    recipe = make_recipe(zoo, "c", "b", "a", parameters={"plan": plan})
    assert_close(merge(recipe), merge_by_hand(zoo, "abc", part_of))


def test_dropped_model_leaves_the_divisor_of_normalize(zoo, merge, tmp_path):
    plan = write_plan(
        tmp_path / "plan.json", zoo, {"layer": 1, "model": "a", "action": "drop"}
    )
    recipe = make_recipe(zoo, "a", "b", parameters={"plan": plan, "normalize": True})
    recipe["models"][0]["parameters"] = {"weight": 3}
    recipe["models"][1]["parameters"] = {"weight": 1, "density": 0.5}
    merged = merge(recipe)

    def part_of(tensor: str, expert: str) -> tuple[float, float, float]:
        weight = {"a": 0 if layer_of(tensor) == 1 else 3, "b": 1}[expert]
        return weight, {"a": 1.0, "b": 0.5}[expert], 1.0

    by_hand = merge_by_hand(zoo, "ab", part_of, normalize=True)
    assert_close(merged, by_hand)
    # In words: what is left of the layer is all of the other model's delta.
    alone = merge_by_hand(zoo, "b", lambda *_: (1.0, 0.5, 1.0))
    name = "model.layers.1.mlp.up_proj.weight"
    torch.testing.assert_close(merged[name], alone[name])


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A working directory that is not the recipe's."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


DROP = {"layer": 1, "model": "a", "action": "drop"}
QUERY = "model.layers.1.self_attn.q_proj.weight"


def dropped_query(zoo: Path) -> torch.Tensor:
    merged = merge_by_hand(
        zoo, "ab", lambda tensor, expert: (0.5 * (expert == "b"), 1.0, 1.0)
    )
    return merged[QUERY]


@pytest.mark.parametrize("name", ["plan.json", "plans/方案.json"])
@pytest.mark.parametrize("place", ["recipe", "working directory"])
def test_relative_plan_is_found(zoo, merge, tmp_path, elsewhere, name, place):
    path = {"recipe": tmp_path, "working directory": elsewhere}[place] / name
    path.parent.mkdir(exist_ok=True)
    write_plan(path, zoo, DROP)
    merged = merge(make_recipe(zoo, "a", "b", parameters={"plan": name}))
    torch.testing.assert_close(merged[QUERY], dropped_query(zoo))


def test_plan_beside_the_recipe_comes_first(zoo, merge, tmp_path, elsewhere):
    write_plan(tmp_path / "plan.json", zoo, DROP)
    write_plan(elsewhere / "plan.json", zoo)
    merged = merge(make_recipe(zoo, "a", "b", parameters={"plan": "plan.json"}))
    torch.testing.assert_close(merged[QUERY], dropped_query(zoo))


def test_missing_plan_names_both_places(zoo, run_recipe, tmp_path, elsewhere):
    result = run_recipe(make_recipe(zoo, "a", parameters={"plan": "none.json"}))
    assert result.exit_code == 1
    assert result.output == (
        f"Error: plan must be a file, found none at '{tmp_path}/none.json' "
        f"or '{elsewhere}/none.json'\n"
    )


def test_plan_follows_models_spelled_relative_to_the_working_directory(
    zoo, merge, tmp_path, monkeypatch
):
    plan = write_plan(tmp_path / "plan.json", zoo, DROP)
    monkeypatch.chdir(zoo)
    recipe = make_recipe(zoo, parameters={"plan": plan})
    recipe |= {"base_model": "./base", "models": [{"model": "./a"}, {"model": "./b/"}]}
    torch.testing.assert_close(merge(recipe)[QUERY], dropped_query(zoo))


@pytest.mark.parametrize(
    ("made_for", "problem"),
    [
        (
            {"experts": "ac"},
            "plan is for the models ['{zoo}/a', '{zoo}/c'], "
            "the recipe has ['{zoo}/a', '{zoo}/b']",
        ),
        (
            {"experts": "a"},
            "plan is for the models ['{zoo}/a'], the recipe has ['{zoo}/a', '{zoo}/b']",
        ),
        (
            {"base": "c"},
            "plan is for base '{zoo}/c', the recipe has '{zoo}/base'",
        ),
        ({"n_layers": 5}, "plan is for 5 layers, the recipe makes 3"),
    ],
)
def test_plan_for_another_recipe_is_refused(
    zoo, run_recipe, tmp_path, made_for, problem
):
    plan = write_plan(tmp_path / "plan.json", zoo, **made_for)
    result = run_recipe(make_recipe(zoo, "a", "b", parameters={"plan": plan}))
    assert result.exit_code == 1
    assert result.output == (
        f"Error: {problem.format(zoo=zoo)}; make a plan for this recipe\n"
    )
    assert not (tmp_path / "merged").exists()


def test_factor_that_leads_above_density_1_is_refused(zoo, run_recipe, tmp_path):
    plan = write_plan(
        tmp_path / "plan.json",
        zoo,
        {"layer": 1, "model": "b", "action": "set", "density_factor": 1.5},
    )
    parameters = {"plan": plan, "density": 0.8}
    result = run_recipe(make_recipe(zoo, "a", "b", parameters=parameters))
    assert result.exit_code == 1
    assert result.output == (
        f"Error: density must be in [0, 1], got 1.2 (plan, layer 1, '{zoo}/b': "
        "recipe 0.8 times density_factor 1.5); lower the density_factor\n"
    )
    assert not (tmp_path / "merged").exists()


def test_broken_plan_is_named_with_its_field(zoo, run_recipe, tmp_path):
    plan = write_plan(tmp_path / "plan.json", zoo, {**DROP, "density_factor": 0.5})
    result = run_recipe(make_recipe(zoo, "a", "b", parameters={"plan": plan}))
    assert result.exit_code == 1
    assert result.output == (
        f"Error: plan '{plan}', treatments[0]: action 'drop' must have weight_factor 0 "
        "or none, and no other factor, got density_factor 0.5, scale_factor 1, "
        "weight_factor 1; use action 'set' for free factors\n"
    )
