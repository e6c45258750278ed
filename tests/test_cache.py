"""Plans of earlier analyses: found again by all that they depend on, and by no less."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import run_command
from mergekit.scripts.run_yaml import main as mergekit_yaml
from safetensors.torch import load_file, save_file
from test_analysis import ROWS, make_analysis, save_school, write_rows

from mergekit_himerging.analysis.cache import (
    find_plan,
    hash_code,
    hash_model,
    keep_plan,
    make_fingerprint,
    write_text,
)
from mergekit_himerging.plan import Plan

REUSED = (
    "recipe, models and data are those of an earlier run, so its analysis is reused"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data, recipe, plan, and the cache of one analysis."""
    folder = tmp_path_factory.mktemp("analysed")
    save_school(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERGEKIT_HIMERGING_CACHE", str(folder / "cache"))
        assert REUSED not in run(folder, make_recipe(folder))
    assert len(list((folder / "cache").iterdir())) == 1
    return folder


def make_recipe(folder: Path) -> dict[str, Any]:
    return make_analysis(folder, folder, "a", "b", density=0.5, guard="report")


def run(folder: Path, recipe: dict[str, Any], out: str = "merged") -> str:
    path = folder / "recipe.yml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    result = run_command(mergekit_yaml, str(path), str(folder / out))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def rerun(analysed, cache, monkeypatch) -> Callable[..., str]:
    """Run a recipe on what `analysed` has left, with its cache copied."""
    shutil.copytree(analysed / "cache", cache)
    return lambda recipe, out="again": run(analysed, recipe, out)


def test_same_run_again_reuses_the_analysis(analysed, rerun, cache):
    written = (analysed / "plan.json").read_bytes()
    merged = load_file(analysed / "merged" / "model.safetensors")
    (analysed / "plan.json").unlink()
    output = rerun(make_recipe(analysed), out="renamed")
    assert REUSED in output
    assert "analysing" not in output
    assert (analysed / "plan.json").read_bytes() == written
    again = load_file(analysed / "renamed" / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in merged.items())
    assert len(list(cache.iterdir())) == 1


def test_order_of_models_does_not_matter(analysed, rerun):
    recipe = make_recipe(analysed)
    recipe["models"].reverse()
    assert REUSED in rerun(recipe)


def test_place_of_the_plan_does_not_matter(analysed, rerun):
    recipe = make_recipe(analysed)
    recipe["parameters"]["plan_out"] = str(analysed / "other.json")
    assert REUSED in rerun(recipe)
    assert (analysed / "other.json").read_bytes() == (
        analysed / "plan.json"
    ).read_bytes()


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "seed": lambda recipe: recipe["parameters"].update(seed=1),
    "confidence": lambda recipe: recipe["parameters"].update(confidence=0.5),
    "weight": lambda recipe: recipe["models"][0]["parameters"].update(weight=0.4),
    "density of one tensor": lambda recipe: recipe["models"][1]["parameters"].update(
        density=[{"filter": "layers.2.mlp.up_proj", "value": 0.4}, {"value": 0.5}]
    ),
    "consensus": lambda recipe: recipe["parameters"].update(consensus="sum"),
    "one row": lambda recipe: write_rows(
        Path(recipe["base_model"]).parent,
        "a",
        [{"prompt": p, "completion": c} for p, c in [*ROWS["a"][:3], ("q", "rst")]],
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_changes_the_outcome_is_analysed_again(
    analysed, rerun, monkeypatch, change
):
    recipe = make_recipe(analysed)
    change(recipe)
    with pytest.raises(AnalysedAgainError):
        stop_at_analysis(rerun, recipe, monkeypatch)


class AnalysedAgainError(Exception):
    pass


def stop_at_analysis(
    rerun: Callable[..., str], recipe: dict[str, Any], monkeypatch: Any
) -> None:
    """Run a recipe, but not the analysis: that it begins is what counts."""

    def begin(*_: Any) -> None:
        raise AnalysedAgainError

    monkeypatch.setattr("mergekit_himerging.analysis.session.analyse_merge", begin)
    path = Path(recipe["base_model"]).parent / "recipe.yml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    out = path.parent / "stopped"
    result = run_command(mergekit_yaml, str(path), str(out), "--quiet")
    if result.exception is not None:
        raise result.exception


def test_unchanged_run_does_not_begin_an_analysis(analysed, rerun, monkeypatch):
    """What the tests of changes rest on."""
    stop_at_analysis(rerun, make_recipe(analysed), monkeypatch)


@pytest.mark.parametrize("model", ["base", "b"])
def test_changed_model_is_analysed_again(analysed, rerun, monkeypatch, model):
    path = analysed / model / "model.safetensors"
    tensors, stat = load_file(path), path.stat()
    backup = path.read_bytes()
    tensors["model.norm.weight"] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    assert path.stat().st_size == stat.st_size
    try:
        with pytest.raises(AnalysedAgainError):
            stop_at_analysis(rerun, make_recipe(analysed), monkeypatch)
    finally:
        path.write_bytes(backup)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_changed_code_of_one_version_analyses_again(analysed, rerun, monkeypatch):
    monkeypatch.setattr("mergekit_himerging.analysis.session.hash_code", lambda: "new")
    with pytest.raises(AnalysedAgainError):
        stop_at_analysis(rerun, make_recipe(analysed), monkeypatch)


def test_hash_of_code_tells_names_and_contents(tmp_path):
    def hash_of(number: int, **files: str) -> str:
        for name, text in files.items():
            path = tmp_path / str(number) / name / "code.py"
            path.parent.mkdir(parents=True)
            path.write_text(text, encoding="utf-8")
        return hash_code(tmp_path / str(number))

    first = hash_of(0, a="x = 1", b="")
    assert hash_of(1, a="x = 1", b="") == first
    others = [hash_of(2, a="x = 2", b=""), hash_of(3, b="x = 1", a="")]
    others += [hash_of(4, a="x = 1"), hash_of(5, a="x = 1", c="")]
    assert len({first, *others}) == 5
    assert hash_code() != hash_code(tmp_path / "0")


def test_damaged_plan_is_measured_again(analysed, rerun, cache, monkeypatch):
    (plan,) = cache.iterdir()
    plan.write_text(plan.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    with pytest.raises(AnalysedAgainError):
        stop_at_analysis(rerun, make_recipe(analysed), monkeypatch)


def make_plan() -> Plan:
    return Plan(version=1, base="base", models=("方案",), n_layers=2)


def test_kept_plan_is_found_by_its_fingerprint_alone(cache):
    fingerprint = make_fingerprint({"a": 1, "b": [0.1, "x"]})
    assert find_plan(fingerprint) is None
    path = keep_plan(fingerprint, make_plan())
    assert path.parent == cache
    assert find_plan(fingerprint) == make_plan()
    assert find_plan(make_fingerprint({"a": 2, "b": [0.1, "x"]})) is None
    assert make_fingerprint({"b": [0.1, "x"], "a": 1}) == fingerprint


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CACHE_HOME": "{here}/xdg"}, "{here}/xdg/mergekit-himerging"),
        ({"HOME": "{here}/home"}, "{here}/home/.cache/mergekit-himerging"),
    ],
)
def test_plans_are_kept_in_the_users_cache(tmp_path, monkeypatch, variables, folder):
    for name in ("MERGEKIT_HIMERGING_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(here=tmp_path))
    assert keep_plan("f", make_plan()).parent == Path(folder.format(here=tmp_path))


def test_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "plan.json"
    write_text(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "second \ud800")
    assert path.read_text(encoding="utf-8") == "first"
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


@pytest.fixture
def model_folder(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.zeros(3)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("words")
    return folder


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (lambda f: (f / "config.json").write_text('{"a": 1}'), True),
        (lambda f: (f / "tokenizer.json").write_text("{}"), True),
        (lambda f: (f / "chat_template.jinja").write_text("x"), True),
        (lambda f: os.utime(f / "model.safetensors", ns=(1, 1)), True),
        (lambda f: (f / "more.safetensors").symlink_to("model.safetensors"), True),
        (lambda f: (f / "pytorch_model.bin").write_bytes(b"x"), True),
        (lambda f: (f / "modeling_own.py").write_text("x = 1"), True),
        (lambda f: (f / "README.md").write_text("other words"), False),
        (lambda f: (f / "folder").mkdir(), False),
    ],
    ids=lambda value: None,
)
def test_hash_of_a_model_follows_what_a_merge_reads(model_folder, change, counts):
    before = hash_model([model_folder])
    change(model_folder)
    assert (hash_model([model_folder]) != before) == counts


def test_hash_of_a_model_does_not_know_where_it_lies(model_folder, tmp_path):
    before = hash_model([model_folder])
    assert hash_model([model_folder.rename(tmp_path / "moved")]) == before


def test_header_of_a_safetensors_file_counts_where_size_and_time_do_not(model_folder):
    path = model_folder / "model.safetensors"
    before, stat = hash_model([model_folder]), path.stat()
    save_file({"v": torch.zeros(3)}, path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert hash_model([model_folder]) != before
