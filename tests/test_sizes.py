"""The smallest and the largest that a merge can meet: it works or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from conftest import (
    VOCABULARY,
    make_llama,
    make_recipe,
    make_tokenizer,
    run_command,
    save_model,
    tune,
)
from mergekit.scripts.run_yaml import main as mergekit_yaml
from safetensors.torch import load_file
from test_analysis import write_rows

from mergekit_himerging.analysis.calibration import choose_rows, read_rows
from mergekit_himerging.plan import PLAN_FILE, Plan, read_plan
from mergekit_himerging.views.markdown import write_report

TINY = {
    **{"hidden_size": 8, "intermediate_size": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(tmp_path / "cache"))


def save_pair(folder: Path, *names: str, **config: Any) -> Path:
    """Save a base and models that differ from it by noise."""
    base = make_llama(seed=0, **{**TINY, **config})
    for seed, name in enumerate(names, start=1):
        save_model(tune(base, seed=seed), folder / name)
    save_model(base, folder / "base")
    return folder


def make_measured(
    folder: Path, *names: str, n_rows: int = 4, samples: int = 64, **parameters: str
) -> dict[str, Any]:
    """Make a recipe whose models are measured, whatever they are worth."""
    recipe = make_recipe(folder, *names, parameters={"compare": "raw", **parameters})
    for seed, model in enumerate(recipe["models"]):
        rows = [
            {"prompt": "abc", "completion": f"{seed} {number}"}
            for number in range(n_rows)
        ]
        data = write_rows(folder, f"rows{seed}", rows)
        model["parameters"] = {"calibration": data, "samples": samples}
    return recipe


def run(recipe: dict[str, Any], folder: Path) -> Result:
    path = folder / "recipe.yml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return run_command(mergekit_yaml, str(path), str(folder / "merged"))


def test_single_layer_is_measured(tmp_path):
    save_pair(tmp_path, "a", "b", n_layers=1)
    by_rules = {"resolve": "rules", "reference": "same_weight"}
    said = run(make_measured(tmp_path, "a", "b", n_rows=2, **by_rules), tmp_path)
    assert said.exit_code == 0, said.output
    plan = read_plan(tmp_path / "merged" / PLAN_FILE)
    assert [s.layer for task in plan.tasks for s in task.layers] == [0, 0]


def test_slopes_of_a_single_layer_are_measured(tmp_path):
    save_pair(tmp_path, "a", "b", n_layers=1)
    said = run(make_measured(tmp_path, "a", "b", n_rows=2), tmp_path)
    assert said.exit_code == 0, said.output
    plan = read_plan(tmp_path / "merged" / PLAN_FILE)
    assert [s.layer for task in plan.tasks for s in task.slopes] == [0, 0, 0, 0]


def test_as_many_layers_as_the_largest_models_have_are_treated(tmp_path):
    save_pair(tmp_path, "a", n_layers=126)
    row = {"model": str(tmp_path / "a"), "action": "set"}
    plan = {
        **{"schema": 1, "base": str(tmp_path / "base"), "n_layers": 126},
        "models": [str(tmp_path / "a")],
        "treatments": [
            {"layer": n, "weight_factor": n / 126, **row} for n in range(126)
        ],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    parameters = {"plan": str(tmp_path / "plan.json")}
    said = run(make_recipe(tmp_path, "a", parameters=parameters), tmp_path)
    assert said.exit_code == 0, said.output
    merged, base, tuned = (
        load_file(tmp_path / name / "model.safetensors")
        for name in ("merged", "base", "a")
    )
    for layer in (0, 63, 125):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        delta = layer / 126 * (tuned[name] - base[name])
        torch.testing.assert_close(merged[name], base[name] + delta)


def test_a_thousand_tensors_are_merged(tmp_path):
    save_pair(tmp_path, "a", "b", n_layers=120)
    said = run(make_recipe(tmp_path, "a", "b"), tmp_path)
    assert said.exit_code == 0, said.output
    merged, base, a, b = (
        load_file(tmp_path / name / "model.safetensors")
        for name in ("merged", "base", "a", "b")
    )
    assert len(merged) == len(base) > 1000
    for name in (n for n in merged if ".119." in n or ".0." in n):
        expected = base[name] + (a[name] - base[name]) / 2 + (b[name] - base[name]) / 2
        torch.testing.assert_close(merged[name], expected)


def test_vocabulary_of_one_has_nothing_to_measure_and_merges(tmp_path):
    save_pair(tmp_path, "a", "b", vocab_size=1, eos_token_id=0)
    said = run(make_measured(tmp_path, "a", "b"), tmp_path)
    assert said.exit_code == 1
    assert said.output.count("Error:") == 1
    assert "vocabulary" in said.output
    said = run(make_recipe(tmp_path, "a", "b"), tmp_path)
    assert said.exit_code == 0, said.output


def test_single_sample_chooses_and_none_judges(tmp_path):
    save_pair(tmp_path, "a", "b")
    said = run(make_measured(tmp_path, "a", "b", n_rows=1), tmp_path)
    assert said.exit_code == 1
    assert "must have two samples or more for a standard error, got 1" in said.output
    said = run(make_measured(tmp_path, "a", "b", n_rows=1, resolve="rules"), tmp_path)
    assert said.exit_code == 0, said.output
    plan = read_plan(tmp_path / "merged" / PLAN_FILE)
    assert [task.n_samples for task in plan.tasks] == [1, 1]
    assert [task.accepted_on.n_samples for task in plan.tasks] == [0, 0]
    assert plan.guard is not None
    assert not plan.guard.acted


def test_ten_thousand_rows_are_read_and_some_are_chosen(tmp_path):
    rows = [{"prompt": f"p{n}", "completion": f"c{n % 7}"} for n in range(10_000)]
    write_rows(tmp_path, "rows", rows)
    read = read_rows("rows.jsonl", [tmp_path])
    assert [row.prompt for row in read] == [f"p{n}" for n in range(10_000)]
    chosen = choose_rows(read, samples=64, seed=0)
    assert len({row.prompt for row in chosen}) == 64
    backwards = choose_rows(read[::-1], samples=64, seed=0)
    assert [row.prompt for row in backwards] == [row.prompt for row in chosen]


def test_all_of_ten_thousand_rows_can_be_asked_for(tmp_path):
    """10,000 short samples through one layer; the tokens are counted in the plan."""
    save_pair(tmp_path, "a", n_layers=1)
    recipe = make_measured(tmp_path, "a", n_rows=10_000, samples=10_000)
    said = run(recipe, tmp_path)
    assert said.exit_code == 0, said.output
    (task,) = read_plan(tmp_path / "merged" / PLAN_FILE).tasks
    assert task.n_samples + task.accepted_on.n_samples == 10_000
    tokens = sum(len(f"abc0 {number}") for number in range(10_000))
    assert task.n_tokens == tokens


def test_long_folder_names_reach_plan_report_and_card(tmp_path):
    folder = tmp_path.joinpath(*["名" * 60] * 4, "x" * 200)
    folder.mkdir(parents=True)
    save_pair(folder, "a" * 250, "b" * 250)
    recipe = make_measured(folder, "a" * 250, "b" * 250)
    path = tmp_path / "recipe.yml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    said = run_command(mergekit_yaml, str(path), str(tmp_path / "merged"))
    assert said.exit_code == 0, said.output
    plan = read_plan(tmp_path / "merged" / PLAN_FILE)
    assert set(plan.models) == {str(folder / ("a" * 250)), str(folder / ("b" * 250))}
    card = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    assert f"- model: {'a' * 250} (layers:" in card


@pytest.mark.parametrize(
    "name", ["x" * 300, "/" + "x" * 300, "/x" * 3000, "x" * 20_000]
)
@pytest.mark.parametrize("role", ["model", "base", "calibration", "plan", "plan_out"])
def test_name_that_no_file_can_have_is_one_sentence(zoo, tmp_path, name, role):
    recipe = make_recipe(zoo, "a")
    rows = write_rows(tmp_path, "rows", [{"text": "abc"}])
    recipe["models"][0]["parameters"] = {"calibration": rows}
    if role == "model":
        recipe["models"][0]["model"] = name
    elif role == "base":
        recipe["base_model"] = name
    elif role == "calibration":
        recipe["models"][0]["parameters"] = {"calibration": f"{name}.jsonl"}
    else:
        recipe["parameters"] = {role: f"{name}.json"}
    said = run(recipe, tmp_path)
    assert said.exit_code == 1
    assert isinstance(said.exception, SystemExit), repr(said.exception)
    assert said.output.count("Error:") == 1, said.output
    assert not (tmp_path / "merged").exists()


def test_names_of_many_folders_are_told_apart_in_time():
    names = [f"/{end}{'/x' * 4000}" for end in "ab"]
    plan = Plan.model_validate(
        {"schema": 1, "base": "/base", "models": names, "n_layers": 1}
    )
    report = write_report(plan, recipe=None, plot=None)
    assert report.count("/x" * 4000) == 2


def test_characters_of_every_plane_are_tokenised_or_refused(tmp_path):
    save_pair(tmp_path, "a")
    tokenizer = make_tokenizer()
    assert len(tokenizer) == len(VOCABULARY)
    recipe = make_measured(tmp_path, "a")
    rows = [{"prompt": "\U0001f600\u202e\u0000 名", "completion": "\U00020000"}] * 2
    rows.append({"prompt": "a", "completion": "b"})
    recipe["models"][0]["parameters"]["calibration"] = write_rows(tmp_path, "odd", rows)
    said = run(recipe, tmp_path)
    assert said.exit_code == 0, said.output
