"""The checks as a whole: silent on good recipes, sorted, and never in the way."""

from pathlib import Path

import pytest
import torch
from conftest import make_recipe
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from preflight_cases import copy_model, edit_json, edit_tensors, inspect, recipe_of

from mergekit_himerging.planning import plan_recipe
from mergekit_himerging.preflight import Finding, inspect_planned, inspect_recipe
from mergekit_himerging.preflight import inspect as inspect_module
from mergekit_himerging.preflight.finding import list_names, sort_findings

UP = "model.layers.1.mlp.up_proj.weight"


def test_good_recipe_has_no_findings(zoo, tmp_path):
    recipe = make_recipe(zoo, "a", "b", "c", out_dtype="bfloat16")
    assert inspect(recipe, out=tmp_path / "out") == []


def test_all_findings_come_at_once_errors_first(zoo, tmp_path):
    folder = copy_model(zoo, tmp_path, "a")
    edit_json(folder / "config.json", rms_norm_eps=1e-5, num_attention_heads=8)
    edit_tensors(folder, lambda held: held.pop("lm_head.weight"))
    found = inspect(recipe_of(zoo, folder, out_dtype="int64"))
    assert [finding.level for finding in found] == ["error"] * 3 + ["warning"]
    assert found == sorted(found, key=lambda f: (f.level, f.text))


def test_findings_are_sorted_and_stand_once():
    one, two = Finding("warning", "a"), Finding("error", "z")
    assert sort_findings([one, two, one]) == [two, one]


def test_long_lists_of_names_are_counted():
    assert list_names(["a", "b"]) == "'a', 'b'"
    assert list_names("abcde") == "'a', 'b', 'c' and 2 more"


def test_no_order_of_models_changes_the_findings(zoo, tmp_path):
    other = copy_model(zoo, tmp_path, "a")
    models = [zoo / "a", other, zoo / "b"]
    assert inspect(recipe_of(zoo, *models)) == inspect(recipe_of(zoo, *models[::-1]))


def test_check_that_fails_itself_is_a_warning(zoo, monkeypatch):
    def fail(*_: object) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(inspect_module, "check_heads", fail)
    (found,) = inspect_recipe(
        MergeConfiguration.model_validate(make_recipe(zoo, "a")), MergeOptions(), None
    )
    assert found == Finding(
        "warning",
        "the check of heads must run, got KeyError: 'odd'; look at what it names "
        "yourself",
    )


def test_unreadable_vocabulary_of_another_kind_is_a_warning(zoo, tmp_path):
    folder = copy_model(zoo, tmp_path, "a")
    edit_json(folder / "tokenizer.json", model={"vocab": [1, 2]})
    found = inspect(recipe_of(zoo, folder))
    assert [finding.level for finding in found] == ["warning"]
    assert "the check of vocabularies must run, got TypeError" in found[0].text


def test_model_of_a_hub_is_checked_once_it_is_at_hand(zoo, tmp_path, monkeypatch):
    folder = copy_model(zoo, tmp_path, "a")

    def quantise(held: dict[str, torch.Tensor]) -> None:
        held[UP] = held[UP].to(torch.float8_e4m3fn)

    edit_tensors(folder, quantise)
    local = ModelReference.parse(str(folder))
    read_config, find_path = ModelReference.config, ModelReference.local_path

    def here(model: ModelReference) -> ModelReference:
        return local if model.model.path == "org/a" else model

    monkeypatch.setattr(
        ModelReference, "config", lambda self, *args, **kw: read_config(here(self))
    )
    monkeypatch.setattr(
        ModelReference, "local_path", lambda self, *args, **kw: find_path(here(self))
    )
    recipe = make_recipe(zoo, models=[{"model": "org/a"}])
    config = MergeConfiguration.model_validate(recipe)
    options = MergeOptions(quiet=True)
    assert inspect_recipe(config, options, tmp_path / "out") == []
    LoaderCache.loaders.clear()
    found = inspect_planned(plan_recipe(config, options))
    assert [finding.level for finding in found] == ["error"]
    assert (
        f"model 'org/a' must have weights in floating point, got F8_E4M3 ('{UP}')"
        in (found[0].text)
    )


def test_checks_write_nothing(zoo, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in zoo.rglob("*")}
    inspect(make_recipe(zoo, "a"), out=tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in zoo.rglob("*")} == before
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        *("check_recipe", "check_models", "check_output", "check_layers"),
        *("check_flat_recipe", "recipe_folders", "find_recipe"),
    ],
)
def test_checks_of_the_commands_stay_importable(name):
    from mergekit_himerging import preflight

    assert callable(getattr(preflight, name))
