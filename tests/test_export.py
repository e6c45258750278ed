"""Exported recipes, merged by MergeKit alone, against the merge by the plan."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import make_llama, make_recipe, save_model, tune
from hypothesis import given, settings
from hypothesis import strategies as st
from mergekit.config import ConditionalParameter, MergeConfiguration, evaluate_setting
from mergekit.options import MergeOptions
from safetensors.torch import load_file

from mergekit_himerging.export.filters import write_setting
from mergekit_himerging.export.recipe import Exported, _to_plain, export_recipe
from mergekit_himerging.plan import Plan
from mergekit_himerging.planning import plan_recipe
from mergekit_himerging.tasks import apply_plan

OPTIONS = MergeOptions(quiet=True)

STOCK = """
from pathlib import Path
from mergekit.merge_methods import registered_methods
from mergekit.scripts.run_yaml import main
assert "hi_merging" not in {method.spec.name for method in registered_methods()}
for recipe in Path(input()).glob("*.yml"):
    main([str(recipe), str(recipe.with_suffix("")), "--quiet"], standalone_mode=False)
"""
"""Merges every recipe of a folder by MergeKit alone."""


def make_plan(recipe: Mapping[str, Any], n_layers: int, *rows: Any) -> Plan:
    """Make a plan; a row is layer, model, action and its factors."""
    base = recipe["base_model"]
    folder = Path(base).parent
    members = recipe.get("models") or recipe["slices"][0]["sources"]
    return Plan.model_validate(
        {
            "schema": 1,
            "base": base,
            "models": [m["model"] for m in members if m["model"] != base],
            "n_layers": n_layers,
            "treatments": [
                {"layer": layer, "model": str(folder / model), "action": action}
                | {f"{name}_factor": factor for name, factor in factors.items()}
                for layer, model, action, factors in rows
            ],
        }
    )


def export(recipe: Mapping[str, Any], plan: Plan | None, to: Any) -> Exported:
    config = MergeConfiguration.model_validate(recipe)
    tensors = plan_recipe(config, OPTIONS).resolve(plan)
    before = config.model_copy(deep=True)
    exported = export_recipe(config, tensors, to=to, options=OPTIONS)
    assert config == before
    return exported


def slice_of(zoo: Path, first: int, last: int, **parameters: Any) -> dict[str, Any]:
    """A slice of `base`, `b` and `a`; `parameters` are those of `b`."""
    return {
        "sources": [
            {"model": str(zoo / name), "layer_range": [first, last]}
            | ({"parameters": parameters} if name == "b" else {})
            for name in ("base", "b", "a")
        ]
    }


@dataclass(frozen=True)
class Case:
    recipe: dict[str, Any]
    plan: Plan


def make_cases(zoo: Path, deep: Path, rounded: Path) -> dict[str, Case]:
    cases = {}
    recipe = make_recipe(deep, "b", "a", parameters={"weight": 0.4, "scale": 0.7})
    mlp = {"filter": "mlp.", "value": 0.8}
    recipe["models"][0]["parameters"] = {"density": [mlp, {"value": [0.2, 1.0]}]}
    recipe["models"][1]["parameters"] = {"density": 0.5}
    plan = make_plan(
        *(recipe, 12),
        (1, "a", "drop", {}),
        (11, "a", "shrink", {"density": 0.5, "scale": 1e-5}),
        (10, "b", "set", {"density": 0.3, "scale": 1.25, "weight": -1.5}),
    )
    cases["twelve layers, a filter and a gradient"] = Case(recipe, plan)

    recipe = make_recipe(zoo, "c", "b", "base", "a", parameters={"lambda": [0.5, 1.5]})
    recipe["models"][0]["parameters"] = {"density": 0.3}
    plan = make_plan(
        *(recipe, 3),
        (0, "c", "shrink", {"density": 0.5, "scale": 0.3}),
        (2, "b", "drop", {}),
    )
    cases["three models, open weights"] = Case(recipe, plan)

    for scope in ("layer", "model"):
        shared = {"scope": scope, "density": 0.2, "weight": 0.3}
        recipe = make_recipe(zoo, "a", "b", parameters=shared)
        plan = make_plan(recipe, 3, (1, "a", "shrink", {"density": 0.5}))
        cases[f"scope {scope}"] = Case(recipe, plan)

    recipe = make_recipe(zoo, parameters={"weight": 0.3})
    del recipe["models"]
    recipe["slices"] = [
        slice_of(zoo, 1, 3, density=[0.2, 0.6], weight=0.9),
        slice_of(zoo, 0, 2, density=0.3),
    ]
    plan = make_plan(
        *(recipe, 4), (2, "b", "drop", {}), (3, "a", "shrink", {"density": 0.4})
    )
    cases["slices"] = Case(recipe, plan)

    shared = {"normalize": True, "density": 0.5}
    recipe = make_recipe(zoo, "a", "b", "c", parameters=shared)
    for member, weight in zip(recipe["models"], (3, 1, 0.7), strict=True):
        member["parameters"] = {"weight": weight}
    plan = make_plan(
        *(recipe, 3), (1, "a", "drop", {}), (2, "b", "shrink", {"density": 0.4})
    )
    cases["normalize"] = Case(recipe, plan)

    recipe = make_recipe(rounded, "a", "b", parameters={"density": 0.3, "weight": 0.6})
    del recipe["dtype"]
    plan = make_plan(recipe, 3, (1, "a", "shrink", {"density": 0.5, "scale": 0.5}))
    cases["ties in bfloat16"] = Case(recipe, plan)
    return cases


NAMES = (
    *("twelve layers, a filter and a gradient", "three models, open weights"),
    *("scope layer", "scope model", "slices", "normalize", "ties in bfloat16"),
)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Llamas with 12 layers: `base`, `a`, `b`."""
    folder = tmp_path_factory.mktemp("deep")
    base = make_llama(seed=0, n_layers=12)
    for seed, name in enumerate("ab", start=1):
        save_model(tune(base, seed=seed), folder / name)
    save_model(base, folder / "base")
    return folder


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Llamas in bfloat16, with many equal deltas."""
    folder = tmp_path_factory.mktemp("舍入 models")
    base = make_llama(seed=0)
    for seed, name in enumerate("ab", start=1):
        tuned = tune(base, seed=seed)
        save_model(tuned, folder / name, dtype=torch.bfloat16)
    save_model(base, folder / "base", dtype=torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def cases(zoo, deep, rounded) -> dict[str, Case]:
    return make_cases(zoo, deep, rounded)


@pytest.fixture(scope="module")
def exported(cases) -> dict[str, Exported]:
    """The cases' `breadcrumbs` recipes."""
    return {
        name: export(case.recipe, case.plan, "breadcrumbs")
        for name, case in cases.items()
    }


@pytest.fixture(scope="module", autouse=True)
def mergekit_alone() -> Iterator[subprocess.Popen[str]]:
    """MergeKit without the plug-in; it loads for long, so beside the other tests."""
    with subprocess.Popen(
        [sys.executable, "-c", STOCK],
        env={**os.environ, "MERGEKIT_HIMERGING_DISABLE": "1", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def stock(exported, mergekit_alone, tmp_path_factory) -> Path:
    """A folder of the `breadcrumbs` recipes, merged without the plug-in."""
    folder = tmp_path_factory.mktemp("stock")
    for name, recipe in exported.items():
        (folder / f"{name}.yml").write_text(recipe.text, encoding="utf-8")
    mergekit_alone.communicate(str(folder))
    assert mergekit_alone.returncode == 0
    return folder


def test_recipe_has_layers_that_differ_and_nothing_to_measure(zoo):
    recipe = make_recipe(
        zoo,
        *("b", "a"),
        out_dtype="bfloat16",
        tokenizer={"source": "base", "tokens": {"<龙>": {"source": str(zoo / "a")}}},
        chat_template="chatml",
        parameters={"seed": 3, "gradients": True, "guard": "report", "weight": 0.5},
    )
    for member in recipe["models"]:
        member["parameters"] = {"calibration": "数据.jsonl", "samples": 8}
    plan = make_plan(recipe, 3, (1, "b", "shrink", {"density": 0.25, "scale": 1e-5}))
    text = export(recipe, plan, "hi_merging").text
    assert (
        text
        == f"""\
# A Hi-Merging plan as explicit values, exported by mergekit-himerging.
# Base: {zoo}/base
# Model: {zoo}/a
# Model: {zoo}/b
# Needs mergekit-himerging and no calibration data:
#   mergekit-yaml RECIPE OUT
merge_method: hi_merging
base_model: {zoo}/base
models:
- model: {zoo}/a
  parameters: {{weight: 0.5, density: 1.0, scale: 1.0}}
- model: {zoo}/b
  parameters:
    weight: 0.5
    density:
    - {{filter: model.layers.1., value: 0.25}}
    - {{value: 1.0}}
    scale:
    - {{filter: model.layers.1., value: 1.0e-05}}
    - {{value: 1.0}}
dtype: float32
tokenizer:
  source: base
  tokens:
    <龙>: {{source: {zoo}/a}}
chat_template: chatml
out_dtype: bfloat16
parameters: {{scope: tensor, consensus: none, normalize: false, lambda: 1.0}}
"""
    )


def test_lora_and_other_architecture_are_spelled_as_mergekit_reads_them(zoo):
    config = MergeConfiguration.model_validate(
        {
            "merge_method": "hi_merging",
            "base_model": "/models/a b@main",
            "models": [
                {"model": "org/base+/tmp/适配器"},
                {"model": {"model": "org/x", "override_architecture": "Foo"}},
            ],
        }
    )
    text = yaml.safe_dump(_to_plain(config), allow_unicode=True)
    assert "org/base+/tmp/适配器" in text
    assert MergeConfiguration.model_validate(yaml.safe_load(text)) == config


def test_models_of_a_module_get_the_values(zoo):
    recipe = make_recipe(zoo, "a")
    recipe["modules"] = {"default": {"models": recipe.pop("models")}}
    config = MergeConfiguration.model_validate(recipe)
    exported = export_recipe(
        *(config, plan_recipe(config, OPTIONS).resolve(None)),
        to="breadcrumbs",
        options=OPTIONS,
    )
    assert yaml.safe_load(exported.text)["modules"] == {
        "default": {
            "models": [
                {
                    "model": str(zoo / "a"),
                    "parameters": {"weight": 1.0, "density": 1.0, "gamma": 0.0},
                }
            ]
        }
    }


# Filters


def assert_resolves(values: Mapping[str, float]) -> int:
    """Let MergeKit resolve every name; return how many entries the setting has."""
    setting: Any = yaml.safe_load(yaml.safe_dump(write_setting(values)))
    rows = setting if isinstance(setting, list) else [{"value": setting}]
    read = [ConditionalParameter.model_validate(row) for row in rows]
    found = {name: evaluate_setting(name, read, validate=float) for name in values}
    assert found == values
    return len(rows)


def layer_names(n_layers: int, *kinds: str) -> list[str]:
    return [f"model.layers.{i}.{kind}" for i in range(n_layers) for kind in kinds]


def test_one_value_is_a_scalar():
    assert write_setting({"model.layers.0.a": 0.1, "lm_head.weight": 0.1}) == 0.1


def test_layer_1_is_not_taken_for_layer_11():
    names = layer_names(12, "q.weight", "k.weight")
    values = {name: 0.25 if ".layers.1." in name else 1.0 for name in names}
    assert write_setting(values) == [
        {"filter": "model.layers.1.", "value": 0.25},
        {"value": 1.0},
    ]


def test_name_inside_another_does_not_catch_it():
    names = ("norm.weight", "model.norm.weight", "model.layers.0.norm.weight", "z")
    assert assert_resolves(dict(zip(names, (0.1, 0.2, 0.3, 0.3), strict=True))) == 4


def test_kind_that_is_the_same_in_all_layers_needs_one_filter():
    names = layer_names(12, "q.weight", "k.weight", "mlp.up.weight")
    values = {
        name: 0.8 if "mlp." in name else float(name.split(".")[2]) for name in names
    }
    assert assert_resolves(values) == 1 + 11 + 1


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                *layer_names(12, "a", "b", "norm.a", "layers.1.a"),
                *("a", "norm.a", "model.norm.a", "layers.1.a", "head.a", "0.a"),
            ]
        ),
        st.sampled_from([0.0, 1e-5, 0.1, 1 / 3, 1e16]),
        min_size=1,
        max_size=20,
    )
)
def test_any_table_of_values_is_read_back(values):
    assert_resolves(values)


# Notes


def count_ties(folder: Path, plan_density: Any) -> tuple[int, int]:
    """Count deltas and entries that ties move, by Python's sort."""
    base = load_file(folder / "base" / "model.safetensors")
    tensors, entries = 0, 0
    for model in "ab":
        tuned = load_file(folder / model / "model.safetensors")
        for name, tensor in base.items():
            delta = (tuned[name].float() - tensor.float()).abs().flatten().tolist()
            wanted = int(plan_density(name, model) * len(delta))
            ranked = sorted(delta, reverse=True)
            cut = ranked[wanted - 1]
            above = sum(value > cut for value in ranked)
            tied = sum(value == cut for value in ranked)
            kept = above + tied if above + tied - wanted <= wanted - above else above
            if cut > 0 and kept != wanted:
                tensors += 1
                entries += abs(kept - wanted)
    return tensors, entries


def test_ties_are_counted(exported, rounded):
    def density(name: str, model: str) -> float:
        return 0.3 * 0.5 if model == "a" and ".layers.1." in name else 0.3

    tensors, entries = count_ties(rounded, density)
    assert 0 < tensors < entries
    assert exported["ties in bfloat16"].notes[0] == (
        f"entries tied at the cut stay together as planned: {tensors} deltas have a "
        f"density of their own, for {entries} entries more or less than the plan's "
        "share"
    )


def test_dtype_is_noted_and_the_output_keeps_its_own(exported):
    found = exported["ties in bfloat16"]
    assert found.notes[1:] == (
        "dtype is float32, since breadcrumbs computes in the dtype that it reads; "
        "the plan's merge has bfloat16, the file has bfloat16",
    )
    recipe = yaml.safe_load(found.text)
    assert (recipe["dtype"], recipe["out_dtype"]) == ("float32", "bfloat16")
    assert f"# Note: {found.notes[1]}.\n" in found.text


def find_differences(
    left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]
) -> str:
    pairs = [(tensor, right[name]) for name, tensor in left.items()]
    unequal = [(a, b) for a, b in pairs if not torch.equal(a, b)]
    entries = sum(
        x != y
        for a, b in unequal
        for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)
    )
    largest = max(float((a.double() - b.double()).abs().max()) for a, b in unequal)
    return (
        f"{len(unequal)} tensors differ from the plan's merge in {entries} entries by "
        f"up to {largest:.2g}: "
    )


COPY = "a lone undiluted model is copied by hi_merging, its delta is added here"
ORDER = "MergeKit reads in float32 and sums five models or more in another order"
DIVISOR = "the divisor of 'normalize' is folded into the weights"


@pytest.mark.parametrize(
    ("shared", "weights", "why"),
    [
        ({}, (1, 0), COPY),
        ({"normalize": True}, (0.7, 0), COPY),
        ({"normalize": True, "density": 0.5, "scale": 0.3}, (0.7, 0.8), DIVISOR),
        ({"lambda": 0.7}, (0.1, 0.2, 0.3, 0.4, 0.5), ORDER),
    ],
)
def test_what_differs_is_measured(merge, tmp_path, shared, weights, why):
    # torch sums the last entries of such a width in another order.
    save_model(make_llama(seed=0, n_layers=1, hidden_size=40), tmp_path / "base")
    recipe = make_recipe(tmp_path, parameters=shared)
    for seed, weight in enumerate(weights, start=1):
        model = make_llama(seed=seed, n_layers=1, hidden_size=40)
        folder = save_model(model, tmp_path / str(seed))
        parameters = {"weight": weight}
        recipe["models"].append({"model": str(folder), "parameters": parameters})
    exported = export(recipe, None, "breadcrumbs")
    theirs = merge(exported.text, out=tmp_path / "theirs")
    ours = merge(recipe, out=tmp_path / "ours")
    assert exported.notes == (find_differences(ours, theirs) + why,)


def test_union_of_tokenizers_is_noted(zoo):
    recipe = make_recipe(zoo, "a", "b", tokenizer={"source": "union"})
    assert export(recipe, None, "breadcrumbs").notes == (
        "a union of tokenizers is in another order in every run of a stock MergeKit, "
        "and tensors over the vocabulary are not compared",
    )


# Refusals


def test_consensus_is_refused_for_breadcrumbs(zoo):
    recipe = make_recipe(zoo, "a", "b", parameters={"consensus": "sum"})
    with pytest.raises(
        ValueError,
        match=r"consensus must be none in breadcrumbs, got sum \(tensor 'model.embed",
    ):
        export(recipe, None, "breadcrumbs")


def test_what_hides_paths_or_spares_the_smoke_test_is_kept(zoo):
    wanted = {"hide_paths": True, "smoke_test": False}
    recipe = make_recipe(zoo, "a", "b", parameters=wanted)
    exported = yaml.safe_load(export(recipe, None, "hi_merging").text)
    assert wanted.items() <= exported["parameters"].items()
    plain = yaml.safe_load(export(make_recipe(zoo, "a"), None, "hi_merging").text)
    assert not wanted.keys() & plain["parameters"].keys()


def test_scale_above_1_is_refused_for_hi_merging(zoo):
    recipe = make_recipe(zoo, "a", "b")
    plan = make_plan(recipe, 3, (1, "a", "set", {"scale": 2}))
    with pytest.raises(ValueError, match=r"scale must be in \[0, 1\], got 2"):
        export(recipe, plan, "hi_merging")


def test_scale_above_1_becomes_weight_in_breadcrumbs(zoo):
    recipe = make_recipe(zoo, "a", "b")
    plan = make_plan(recipe, 3, (1, "a", "set", {"scale": 3}))
    exported = export(recipe, plan, "breadcrumbs")
    assert exported.notes == ()
    model, _ = yaml.safe_load(exported.text)["models"]
    assert model["parameters"]["weight"] == [
        {"filter": "model.layers.1.", "value": 1.5},
        {"value": 0.5},
    ]


def test_values_that_mergekit_reads_differently_are_refused(zoo):
    recipe = make_recipe(zoo, "a", parameters={"scope": "model", "density": 0.5})
    config = MergeConfiguration.model_validate(recipe)
    tensors = apply_plan(plan_recipe(config, OPTIONS).tensors, None)
    with pytest.raises(
        ValueError, match=r"cut must be None in the exported recipe, got 0\.0"
    ):
        export_recipe(config, tensors, to="hi_merging", options=OPTIONS)


def test_tensors_of_another_recipe_are_refused(zoo):
    recipe = make_recipe(zoo, "a", "b")
    config = MergeConfiguration.model_validate(recipe)
    tensors: Sequence[Any] = plan_recipe(config, OPTIONS).resolve(None)
    with pytest.raises(
        ValueError, match="must make the 29 planned tensors, got 30, or other names"
    ):
        export_recipe(config, tensors[:-1], to="hi_merging", options=OPTIONS)


# Merges, last: MergeKit alone has loaded by now


def merge_by_plan(merge, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "plan.json"
    path.write_text(case.plan.to_json(), encoding="utf-8")
    parameters = {**case.recipe["parameters"], "plan": str(path)}
    return merge({**case.recipe, "parameters": parameters}, out=folder / "planned")


def assert_equal(
    left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]
) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("name", NAMES)
def test_exported_recipe_gives_the_weights_of_the_plan_bit_for_bit(
    cases, stock, merge, tmp_path, name
):
    case = cases[name]
    planned = merge_by_plan(merge, case, tmp_path)
    assert_equal(load_file(stock / name / "model.safetensors"), planned)
    again = export(case.recipe, case.plan, "hi_merging")
    assert again.notes == ()
    assert_equal(merge(again.text, out=tmp_path / "again"), planned)
