"""Recipes, plans and data that someone means ill with: one sentence, in little time."""

import contextlib
import os
import random
import threading
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from conftest import make_recipe, run_command
from hostile import (
    LONGEST,
    assert_sentence,
    make_plan_text,
    make_recipe_text,
    make_rows,
    try_plan,
    try_recipe,
    try_rows,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mergekit.scripts.run_yaml import main as mergekit_yaml

from mergekit_himerging import api
from mergekit_himerging.analysis import row_files
from mergekit_himerging.analysis.calibration import read_rows
from mergekit_himerging.plan import read_plan

LIGHT = settings(
    max_examples=40, deadline=None, suppress_health_check=list(HealthCheck)
)
CHANCE = st.randoms(use_true_random=False)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The working directory, which no case may write to."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@settings(LIGHT, max_examples=15)
@given(chance=CHANCE)
def test_any_recipe_works_or_is_refused(zoo, tmp_path, here, chance):
    path = tmp_path / "recipe.yml"
    text = make_recipe_text(chance, zoo)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try_recipe(path)
    assert not list(here.iterdir())


@LIGHT
@given(chance=CHANCE)
def test_any_plan_works_or_is_refused(tmp_path, chance):
    path = tmp_path / "plan.json"
    path.write_bytes(make_plan_text(chance).encode("utf-8", "surrogatepass"))
    try_plan(path)


@LIGHT
@given(chance=CHANCE)
def test_any_data_work_or_are_refused(tmp_path, chance):
    suffix, data = make_rows(chance)
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(data)
    try_rows(path)


def test_cases_of_chance_are_good_and_bad(zoo, tmp_path):
    """Else the tests above would see one side only."""
    for kind, make in (("plan", make_plan_text), ("recipe", None), ("rows", None)):
        found = set()
        for seed in range(60):
            chance = random.Random(seed)
            if kind == "rows":
                suffix, data = make_rows(chance)
                (tmp_path / f"rows{suffix}").write_bytes(data)
                found.add(try_rows(tmp_path / f"rows{suffix}"))
            else:
                text = make(chance) if make else make_recipe_text(chance, zoo)
                path = tmp_path / f"{kind}.txt"
                path.write_bytes(text.encode("utf-8", "surrogatepass"))
                found.add(try_plan(path) if make else try_recipe(path))
            if found == {True, False}:
                break
        assert found == {True, False}, kind


def laugh(levels: int) -> str:
    """Write lists of lists of aliases, nine times as many at each level."""
    lines = ["l0: &l0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    for level in range(1, levels):
        aliases = ", ".join([f"*l{level - 1}"] * 9)
        lines.append(f"l{level}: &l{level} [{aliases}]")
    return "\n".join(lines)


RECIPE = "merge_method: hi_merging\nbase_model: b\nmodels: [{model: a}]\n"
HOSTILE_RECIPES = {
    "billion laughs": (RECIPE + laugh(12), "must have at most 1,000,000 values"),
    "alias to itself": (RECIPE + "x: &a [*a]", "must be nested at most 64 deep"),
    "deep nesting": (RECIPE + "x: " + "[" * 9000, "must be YAML"),
    "deep but whole": (RECIPE + "x: " + "[" * 90 + "]" * 90, "at most 64 deep"),
    "object": (
        RECIPE + "x: !!python/object/apply:os.system ['touch PWNED']",
        "could not determine a constructor",
    ),
    "wrong tags": (RECIPE + "x: !!timestamp x", "must be YAML, got AttributeError"),
    "long number": (RECIPE + f"x: {'1' * 5000}", "must be YAML, got ValueError"),
    "no such day": (RECIPE + "x: 2020-99-99", "month must be in 1..12"),
    "large seed": (
        RECIPE + f"parameters: {{seed: 0x{'f' * 200}}}",
        "seed must be below 2**63, got more",
    ),
    "large samples": (
        RECIPE.replace("a}", f"a, parameters: {{samples: {10**400}}}}}"),
        "samples must be below 2**63, got more",
    ),
    "endless memory": (
        RECIPE + f"parameters: {{analysis_memory: '{'9' * 400}TB'}}",
        "analysis_memory must be an amount above zero",
    ),
    "long text": (
        RECIPE + f"parameters: {{scope: {'x' * 10**6}}}",
        "scope must be one of tensor, layer, model, got 'xxx",
    ),
}


@pytest.mark.parametrize(
    ("text", "problem"), HOSTILE_RECIPES.values(), ids=HOSTILE_RECIPES.keys()
)
def test_hostile_recipe_is_refused_in_a_sentence(here, tmp_path, text, problem):
    path = tmp_path / "recipe.yml"
    path.write_text(text, encoding="utf-8")
    problems = api.check(path).problems
    assert any(problem in found for found in problems), problems
    assert all(len(found) <= LONGEST for found in problems)
    assert not list(here.iterdir())


def test_aliases_that_stay_small_are_allowed(tmp_path):
    path = tmp_path / "recipe.yml"
    path.write_text(
        RECIPE.replace(
            "a}", "a, parameters: &p {weight: 1}}, {model: c, parameters: *p}"
        )
    )
    assert len(api._read_recipe(path).config.models) == 2


PLAN = '{"schema": 1, "base": "b", "models": ["a"], "n_layers": 1, %s}'
HOSTILE_PLANS = {
    "nested recipe": (
        PLAN % f'"recipe": {{"a": {"[" * 200}{"]" * 200}}}',
        "must be nested at most 64 deep",
    ),
    "half a character": (PLAN % r'"recipe": {"a": "\ud800"}', "must have Unicode text"),
    "half a character in a key": (
        PLAN % r'"settings": {"\udfff": 1}',
        "must have Unicode text",
    ),
    "number beyond floats": (
        PLAN % '"recipe": {"a": 1e999}',
        "must have finite numbers, got inf",
    ),
    "many models": (
        PLAN.replace('["a"]', str([f"m{n}" for n in range(101)]).replace("'", '"'))
        % '"order": []',
        "models: must have at most 100 items",
    ),
    "long name": (
        PLAN.replace('"b"', '"' + "/x" * 50_000 + '"') % '"order": []',
        "base: must have at most 10000 characters",
    ),
}


@pytest.mark.parametrize(
    ("text", "problem"), HOSTILE_PLANS.values(), ids=HOSTILE_PLANS.keys()
)
def test_hostile_plan_is_refused_in_a_sentence(tmp_path, text, problem):
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="plan") as caught:
        read_plan(path)
    assert problem in str(caught.value)
    assert_sentence(caught.value)


def test_list_of_rows_and_scalars_in_a_plan_is_written_again(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(PLAN % '"recipe": {"a": [{"b": 1}, 2, []], "c": []}')
    path.write_text(read_plan(path).to_json())
    assert read_plan(path).recipe == {"a": [{"b": 1}, 2, []], "c": []}


def test_device_in_place_of_a_plan_is_not_read(tmp_path):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)

    def read(path: Path) -> None:
        with contextlib.suppress(ValueError):
            read_plan(path)

    for path in (pipe, Path("/dev/zero")):
        reader = threading.Thread(target=read, args=(path,), daemon=True)
        reader.start()
        reader.join(10)
        assert not reader.is_alive(), path
        with pytest.raises(ValueError, match="must be a file, got a device or pipe"):
            read_plan(path)


def test_parquet_that_unfolds_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "MAX_FILE_BYTES", 2**20)
    text = pyarrow.array(["x" * 10_000] * 2000)
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path)
    assert path.stat().st_size < 2**16
    with pytest.raises(ValueError, match="must hold at most 1 MiB of text, got more"):
        read_rows("rows.parquet", [tmp_path])


def test_row_of_many_keys_is_named_in_short(tmp_path):
    keys = ", ".join(f'"k{n}": 1' for n in range(50_000))
    (tmp_path / "rows.jsonl").write_text(f"{{{keys}}}\n")
    with pytest.raises(ValueError, match="got keys \\['k0', 'k1'") as caught:
        read_rows("rows.jsonl", [tmp_path])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("place", ["plan.sh", "a\0.json", "x.json/", ".bashrc"])
def test_plan_goes_to_json_files_alone(zoo, tmp_path, here, place):
    """So that a stranger's recipe cannot write what a shell or Python would run."""
    (tmp_path / "rows.jsonl").write_text('{"text": "abc"}\n')
    recipe = make_recipe(zoo, "a", parameters={"plan_out": place})
    recipe["models"][0]["parameters"] = {"calibration": "rows.jsonl"}
    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    said = run_command(mergekit_yaml, str(path), str(tmp_path / "merged"))
    assert said.exit_code == 1
    assert "plan_out must be a path that ends in .json, got '" in said.output
    assert not list(here.iterdir())
