"""What a user can get wrong: one message with culprit and remedy, nothing written."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml
from click.testing import Result
from conftest import make_recipe, run_command
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.merge_methods.api import merge_state_dicts
from mergekit.options import MergeOptions
from mergekit.scripts.merge_raw_pytorch import SimpleLoaderCache
from mergekit.scripts.merge_raw_pytorch import main as mergekit_pytorch
from mergekit.scripts.multimerge import main as mergekit_multi
from mergekit.scripts.run_yaml import main as mergekit_yaml
from safetensors.torch import load_file, save_file

Recipe = dict[str, Any]


def snapshot(folder: Path) -> dict[str, bytes] | None:
    """Read all that lies in a folder; None where there is none."""
    if not folder.exists():
        return None
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def assert_refused(result: Result, *words: str) -> None:
    """Assert that a command ended with one message that holds all the words."""
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1
    assert result.output.count("Error:") == 1, result.output
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output


def run_yaml(folder: Path, recipe: Mapping[str, Any], out: str) -> Result:
    path = folder / "recipe.yml"
    path.write_text(yaml.safe_dump(dict(recipe)), encoding="utf-8")
    return run_command(mergekit_yaml, str(path), out, "--quiet")


@pytest.fixture(params=["new folder", "existing folder"])
def out(request, tmp_path) -> Path:
    folder = tmp_path / "merged"
    if request.param == "existing folder":
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"an earlier merge")
    return folder


def with_parameters(zoo: Path, **parameters: Any) -> Recipe:
    recipe = make_recipe(zoo, "a", "b")
    recipe["models"][1]["parameters"] = parameters
    return recipe


def without_base(zoo: Path) -> Recipe:
    recipe = make_recipe(zoo, "a", "b")
    del recipe["base_model"]
    return recipe


def with_slices(zoo: Path, **ranges: tuple[int, int]) -> Recipe:
    recipe = make_recipe(zoo)
    del recipe["models"]
    sources = [
        {"model": str(zoo / name), "layer_range": list(layers)}
        for name, layers in ranges.items()
    ]
    return {**recipe, "slices": [{"sources": sources}]}


BAD_RECIPES = {
    "unknown parameter": (
        lambda zoo: with_parameters(zoo, densty=0.5),
        ("unknown parameter 'densty'", "models[1] '{zoo}/b'", "mean 'density'?"),
    ),
    "misspelled key": (
        lambda zoo: make_recipe(zoo, "a", paramters={"density": 0.5}),
        ("unknown key 'paramters'", "top of the recipe", "mean 'parameters'?"),
    ),
    "parameter beside the model": (
        lambda zoo: make_recipe(
            zoo, models=[{"model": str(zoo / "a"), "density": 0.5}]
        ),
        ("'density'", "models[0] '{zoo}/a'", "move it under 'parameters:'"),
    ),
    "percent": (
        lambda zoo: with_parameters(zoo, density=50),
        (
            "density must be in [0, 1], got 50 (models[1] '{zoo}/b')",
            "50 percent is 0.5",
        ),
    ),
    "NaN as a weight": (
        lambda zoo: with_parameters(zoo, weight=float("nan")),
        ("weight must be a finite number, got nan (models[1] '{zoo}/b')",),
    ),
    "no base": (
        without_base,
        ("must have a base model, got none", "add 'base_model:'"),
    ),
    "missing base": (
        lambda zoo: make_recipe(zoo, "a", base_model=str(zoo / "bse")),
        ("base model '{zoo}/bse' does not exist",),
    ),
    "missing model": (
        lambda zoo: make_recipe(zoo, "a", "bb"),
        ("model '{zoo}/bb' does not exist",),
    ),
    "folder without a model": (
        lambda zoo: make_recipe(zoo, "a", ""),
        ("model '{zoo}' cannot be loaded",),
    ),
    "missing adapter": (
        lambda zoo: make_recipe(zoo, "a", "base+/no/such/lora"),
        ("adapter '/no/such/lora' of model '{zoo}/base+/no/such/lora' does not exist",),
    ),
    "base alone": (
        lambda zoo: make_recipe(zoo, "base"),
        ("must have a model besides the base", "list the tuned models under 'models:'"),
    ),
    "a model twice": (
        lambda zoo: make_recipe(zoo, "a", "b", "a"),
        ("got '{zoo}/a' twice (models[0] and models[2])", "remove one"),
    ),
    "a model twice, spelled in two ways": (
        lambda zoo: make_recipe(zoo, "a", "b", "b/../a"),
        ("got '{zoo}/b/../a' twice (models[0] and models[2])", "remove one"),
    ),
    "a deeper model": (
        lambda zoo: make_recipe(zoo, "a", "deep"),
        ("same number of layers", "'{zoo}/deep' 5", "'{zoo}/base' 3", "'slices:'"),
    ),
    "a longer range": (
        lambda zoo: with_slices(zoo, base=(0, 3), a=(0, 3), deep=(0, 5)),
        ("same number of layers", "'{zoo}/deep' 5", "'{zoo}/a' 3", "slices[0]"),
    ),
    "a slice without the base": (
        lambda zoo: with_slices(zoo, a=(0, 3), b=(0, 3)),
        ("base model '{zoo}/base'", "slices[0]", "add it there"),
    ),
    "a recipe of another method": (
        lambda zoo: make_recipe(zoo, "a", "b", parameters={"int8_mask": True}),
        ("unknown parameter 'int8_mask'", "is not needed here"),
    ),
    "an analysis": (
        lambda zoo: with_parameters(zoo, calibration="zh.jsonl"),
        ("every model must have 'calibration' or none", "['{zoo}/a']", "name a file"),
    ),
}


@pytest.mark.parametrize(
    ("make", "words"), BAD_RECIPES.values(), ids=BAD_RECIPES.keys()
)
def test_bad_recipe_is_refused_and_nothing_written(zoo, tmp_path, out, make, words):
    before = snapshot(out)
    result = run_yaml(tmp_path, make(zoo), str(out))
    assert_refused(result, *(word.format(zoo=zoo) for word in words))
    assert snapshot(out) == before


def test_recipe_of_another_method_works_once_mended(zoo, merge):
    """What `int8_mask` is told off for is all that is wrong with such a recipe."""
    parameters = {"density": 0.5, "weight": 0.5, "normalize": True}
    merge(make_recipe(zoo, "a", "b", parameters=parameters))


@pytest.fixture(scope="module")
def broken(zoo, tmp_path_factory) -> Path:
    """A copy of expert `b` with one NaN, in a middle layer."""
    folder = tmp_path_factory.mktemp("broken") / "b"
    shutil.copytree(zoo / "b", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_broken(zoo: Path, broken: Path, **parameters: Any) -> Recipe:
    recipe = make_recipe(zoo, "a", parameters={"density": 0.5, **parameters})
    recipe["models"].append({"model": str(broken)})
    return recipe


@pytest.mark.parametrize("scope", ["tensor", "layer", "model"])
def test_nan_in_a_model_names_model_and_tensor(zoo, broken, tmp_path, out, scope):
    before = snapshot(out)
    result = run_yaml(tmp_path, with_broken(zoo, broken, scope=scope), str(out))
    assert_refused(
        result,
        f"delta of '{broken}' must be finite, got NaN or infinity "
        "(tensor 'model.layers.1.mlp.up_proj.weight')",
    )
    assert (snapshot(out) or None) == before


def test_nan_in_a_model_leaves_no_empty_folder(zoo, broken, tmp_path):
    result = run_yaml(tmp_path, with_broken(zoo, broken), str(tmp_path / "merged"))
    assert result.exit_code == 1
    assert snapshot(tmp_path / "merged") is None


INPUTS = {
    "expert": ("a", "{here}/a"),
    "base": ("a", "{here}/base"),
    "adapter": ("base+{here}/lora", "{here}/lora"),
    "base of an adapter": ("base+{here}/lora", "{here}/base"),
    "trailing slash": ("a", "{here}/a/"),
    "symlink": ("a", "{here}/link"),
    "symlink to the adapter": ("base+{here}/lora", "{here}/lora-link"),
    "relative": ("a", "a"),
    "relative with dots": ("a", "./base/../a/."),
    "relative to the adapter": ("base+{here}/lora", "lora/"),
}


@pytest.mark.parametrize(("model", "target"), INPUTS.values(), ids=INPUTS.keys())
def test_output_over_an_input_is_refused(zoo, tmp_path, monkeypatch, model, target):
    for name in ("base", "a"):
        shutil.copytree(zoo / name, tmp_path / name)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "lora-link").symlink_to("lora")
    (tmp_path / "recipe.yml").touch()
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    target = target.format(here=tmp_path)
    recipe = make_recipe(tmp_path, model.format(here=tmp_path))
    result = run_yaml(tmp_path, recipe, target)
    assert_refused(
        result,
        f"the output folder must not be an input, got '{target}'",
        f"('{tmp_path}/",
        "write the merge somewhere else",
    )
    (tmp_path / "recipe.yml").write_bytes(b"")
    assert snapshot(tmp_path) == before


def test_link_in_place_of_a_model_is_an_input_too(zoo, tmp_path):
    shutil.copytree(zoo / "a", tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    recipe = make_recipe(zoo, models=[{"model": str(tmp_path / "link")}])
    result = run_yaml(tmp_path, recipe, str(tmp_path / "a"))
    assert_refused(result, f"got '{tmp_path}/a' ('{tmp_path}/link')")


def run_multi(folder: Path, *documents: Mapping[str, Any]) -> Result:
    path = folder / "recipes.yml"
    path.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    return run_command(
        mergekit_multi,
        *(str(path), "--out-path", str(folder / "merged"), "--quiet"),
        *("--intermediate-dir", str(folder / "steps")),
    )


def make_documents(zoo: Path, **changes: Any) -> tuple[Recipe, Recipe]:
    """Make a chain of two merges; the changes go to the second."""
    first = {"name": "first", **make_recipe(zoo, "a", "b")}
    second = make_recipe(zoo, models=[{"model": "first"}, {"model": str(zoo / "c")}])
    return first, {**second, **changes}


def test_chain_of_merges_works(zoo, tmp_path):
    result = run_multi(tmp_path, *make_documents(zoo))
    assert result.exit_code == 0, result.output
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    by_name = {
        name: load_file(zoo / name / "model.safetensors")["model.norm.weight"]
        for name in ("base", "a", "b", "c")
    }
    deltas = {name: tensor - by_name["base"] for name, tensor in by_name.items()}
    torch.testing.assert_close(
        merged["model.norm.weight"],
        by_name["base"] + deltas["a"] / 4 + deltas["b"] / 4 + deltas["c"] / 2,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"paramters": {"density": 0.5}},
            ("unknown key 'paramters' (top of the recipe)", "mean 'parameters'?"),
        ),
        (
            {"parameters": {"densty": 0.5}},
            ("unknown parameter 'densty' (parameters)", "mean 'density'?"),
        ),
        (
            {"parameters": {"density": 50}},
            ("density must be in [0, 1], got 50 (parameters)", "50 percent is 0.5"),
        ),
    ],
)
def test_typo_in_the_second_document_stops_the_first(zoo, tmp_path, changes, words):
    result = run_multi(tmp_path, *make_documents(zoo, **changes))
    assert_refused(result, *words)
    # MergeKit makes the folder for the steps before it reads the recipes.
    assert snapshot(tmp_path / "steps") == {}
    assert snapshot(tmp_path / "merged") is None


@pytest.fixture
def run_pytorch(zoo, tmp_path):
    """Run `mergekit-pytorch` on the zoo's weight files."""
    SimpleLoaderCache().loaders.clear()

    def run(method: str = "hi_merging", **parameters: Any) -> Result:
        of_model = parameters.pop("of_model", None)
        recipe = {
            "merge_method": method,
            "base_model": str(zoo / "base" / "model.safetensors"),
            "models": [
                {"model": str(zoo / name / "model.safetensors")} for name in "ab"
            ],
            "parameters": parameters,
        }
        if of_model is not None:
            recipe["models"][1]["parameters"] = of_model
        path = tmp_path / f"{method}.yml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return run_command(mergekit_pytorch, str(path), str(tmp_path / method))

    return run


WHOLE_MERGE = {
    "plan": ({"plan": "plan.json"}, "'plan: plan.json' spans the whole merge"),
    "scope": ({"scope": "layer"}, "'scope: layer' spans the whole merge"),
    "calibration": (
        {"calibration": "zh.jsonl"},
        "'calibration: zh.jsonl' spans the whole merge",
    ),
}
REMEDY = "run the recipe with 'mergekit-yaml' or 'mergekit-multi'"


@pytest.mark.parametrize(
    ("parameters", "problem"), WHOLE_MERGE.values(), ids=WHOLE_MERGE.keys()
)
@pytest.mark.parametrize("under_model", [False, True])
def test_mergekit_pytorch_refuses_what_spans_the_merge(
    run_pytorch, tmp_path, parameters, problem, under_model
):
    result = run_pytorch(**({"of_model": parameters} if under_model else parameters))
    assert_refused(result, problem, REMEDY)
    assert snapshot(tmp_path / "hi_merging") is None


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"densty": 0.5}, ("unknown parameter 'densty' (parameters)", "'density'?")),
        ({"int8_mask": True}, ("unknown parameter 'int8_mask'", "not needed")),
        (
            {"of_model": {"density": 50}},
            ("density must be in [0, 1], got 50 (models[1] '{zoo}/b/model.safe",),
        ),
    ],
)
def test_mergekit_pytorch_checks_its_recipe(
    zoo, run_pytorch, tmp_path, parameters, words
):
    result = run_pytorch(**parameters)
    assert_refused(result, *(word.format(zoo=zoo) for word in words))
    assert snapshot(tmp_path / "hi_merging") is None


def test_mergekit_pytorch_does_the_model_wise_step(zoo, run_pytorch, tmp_path):
    merged = {}
    for method in ("hi_merging", "task_arithmetic"):
        result = run_pytorch(method, weight=0.3)
        assert result.exit_code == 0, result.output
        merged[method] = load_file(tmp_path / method / "model.safetensors")
    assert merged["hi_merging"].keys() == merged["task_arithmetic"].keys()
    for name, tensor in merged["hi_merging"].items():
        assert torch.equal(tensor, merged["task_arithmetic"][name]), name


def test_mergekit_pytorch_checks_a_recipe_that_was_good_before(run_pytorch, tmp_path):
    assert run_pytorch(weight=0.3).exit_code == 0
    shutil.rmtree(tmp_path / "hi_merging")
    assert_refused(run_pytorch(densty=0.3), "unknown parameter 'densty'")


@pytest.fixture(scope="module")
def state_dicts(zoo) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: load_file(zoo / name / "model.safetensors") for name in ("base", "a", "b")
    }


@pytest.mark.parametrize(
    ("parameters", "problem"), WHOLE_MERGE.values(), ids=WHOLE_MERGE.keys()
)
def test_merge_state_dicts_refuses_what_spans_the_merge(
    state_dicts, parameters, problem
):
    message = re.escape(problem) + ".*" + re.escape(REMEDY)
    with pytest.raises(click.ClickException, match=message):
        merge_state_dicts(state_dicts, "hi_merging", base="base", parameters=parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"density": 50}, r"density must be in \[0, 1\], got 50; .* 50 percent is 0.5"),
        ({"density": {"a": 1, "b": 50}}, r"got 50; .*\(model 'b'\)"),
        ({"weight": [1, float("nan")]}, r"finite number, got nan \(model 1\)"),
        ({"consensus": "total"}, "consensus must be one of none, sum, count"),
        ({"scope": "block"}, "scope must be one of tensor, layer, model, got 'block'"),
    ],
)
def test_merge_state_dicts_refuses_bad_values(state_dicts, parameters, message):
    with pytest.raises(click.ClickException, match=message):
        merge_state_dicts(state_dicts, "hi_merging", base="base", parameters=parameters)


def test_merge_state_dicts_refuses_a_nan(state_dicts, broken):
    models = {**state_dicts, "b": load_file(broken / "model.safetensors")}
    message = (
        r"delta of 'b' must be finite, got NaN or infinity "
        r"\(tensor 'model\.layers\.1\.mlp\.up_proj\.weight'\)"
    )
    with pytest.raises(click.ClickException, match=message):
        merge_state_dicts(models, "hi_merging", base="base")


def test_merge_state_dicts_needs_a_base(state_dicts):
    with pytest.raises(click.ClickException, match="must have a base model, got none"):
        merge_state_dicts(state_dicts, "hi_merging")


def test_merge_state_dicts_does_the_model_wise_step(state_dicts):
    ours, theirs = (
        merge_state_dicts(state_dicts, method, base="base", parameters={"weight": 0.3})
        for method in ("hi_merging", "task_arithmetic")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


PYTHON_CASES = {
    name: BAD_RECIPES[name]
    for name in (
        *("unknown parameter", "percent", "NaN as a weight", "no base", "missing base"),
        *("missing model", "missing adapter", "base alone", "a model twice"),
        *("a deeper model", "a longer range"),
    )
}


@pytest.mark.parametrize(
    ("make", "words"), PYTHON_CASES.values(), ids=PYTHON_CASES.keys()
)
def test_run_merge_from_python_refuses_a_bad_recipe(zoo, out, make, words):
    before = snapshot(out)
    config = MergeConfiguration.model_validate(make(zoo))
    with pytest.raises(click.ClickException) as caught:
        run_merge(config, str(out), options=MergeOptions(quiet=True))
    for word in words:
        assert word.format(zoo=zoo) in str(caught.value)
    assert snapshot(out) == before


def test_run_merge_from_python_checks_the_text_it_is_given(zoo, tmp_path):
    recipe = make_recipe(zoo, "a", paramters={"density": 0.5})
    config = MergeConfiguration.model_validate(recipe)
    with pytest.raises(click.ClickException, match="unknown key 'paramters'"):
        run_merge(
            config,
            str(tmp_path / "merged"),
            options=MergeOptions(quiet=True),
            config_source=yaml.safe_dump(recipe),
        )


def test_run_merge_from_python_refuses_an_input_as_output(zoo):
    before = snapshot(zoo / "a")
    config = MergeConfiguration.model_validate(make_recipe(zoo, "a", "b"))
    with pytest.raises(click.ClickException, match="must not be an input"):
        run_merge(config, os.path.relpath(zoo / "a"), options=MergeOptions(quiet=True))
    assert snapshot(zoo / "a") == before
