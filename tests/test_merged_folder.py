"""What a merged folder carries, what it hides, and what it must not keep."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from click.testing import Result
from conftest import make_llama, make_recipe, run_command, save_model, tune
from mergekit.config import MergeConfiguration
from mergekit.scripts.run_yaml import main as mergekit_yaml
from safetensors.torch import load_file
from test_analysis import ROWS, assert_same, make_analysis, save_school

from mergekit_himerging.merged_folder import CARD_FILE, PLOT_FILE, RECIPE_FILE
from mergekit_himerging.names import is_short_for
from mergekit_himerging.plan import PLAN_FILE, read_plan
from mergekit_himerging.preflight import Finding
from mergekit_himerging.views.markdown import BEGIN, END, REPORT_FILE

OURS = {PLAN_FILE, REPORT_FILE, PLOT_FILE}


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_school(tmp_path_factory.mktemp("私人"))


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    """Keep plans of earlier runs apart from the user's, and find them again here."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("cache"))
        patch.setenv("MERGEKIT_HIMERGING_CACHE", folder)
        yield


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """Keep what is loaded out of the collections that merges ask for."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_plots(request, monkeypatch):
    """Leave plots to the tests that ask for them: each takes a second."""
    if "plots" not in request.fixturenames:
        monkeypatch.setattr(
            "mergekit_himerging.merged_folder.draw_plan",
            lambda plan, path: path.write_text("<svg/>", encoding="utf-8"),
        )


def make_measured(school: Path, folder: Path, **parameters: Any) -> dict[str, Any]:
    changes = {"guard": "report", "density": 0.5, **parameters}
    recipe = make_analysis(school, school, "a", "b", **changes)
    recipe["parameters"]["plan_out"] = str(folder / "plan.json")
    return recipe


def run(
    recipe: dict[str, Any], out: Path, *options: str, escaped: bool = False
) -> Result:
    """Run `mergekit-yaml` with what it says."""
    path = out.parent / "recipe.yml"
    text = yaml.safe_dump(recipe, allow_unicode=not escaped)
    path.write_text(text, encoding="utf-8")
    result = run_command(mergekit_yaml, str(path), str(out), *options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def list_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def read_texts(folder: Path) -> dict[str, str]:
    """Read all text files of a folder."""
    return {
        path.name: path.read_text(encoding="utf-8")
        for path in folder.iterdir()
        if path.suffix in (".md", ".json", ".yml", ".svg", ".jinja", ".txt")
    }


def cut_section(card: str) -> str:
    """Return our section of a model card."""
    assert card.count(BEGIN) == card.count(END) == 1
    return card[card.index(BEGIN) : card.index(END)]


# What is there


@pytest.mark.usefixtures("plots")
def test_measured_merge_leaves_plan_report_plot_and_card_section(school, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "合并"
    said = run(make_measured(school, tmp_path), out)
    assert list_names(out) >= OURS | {CARD_FILE, RECIPE_FILE}
    assert f"report written to {out / REPORT_FILE}" in said.output
    assert (out / PLOT_FILE).read_bytes().startswith(b"<?xml")
    card = (out / CARD_FILE).read_text(encoding="utf-8")
    report = (out / REPORT_FILE).read_text(encoding="utf-8")
    assert "# 合并\n" in card
    assert f"]({PLOT_FILE})" in report
    plan = read_plan(out / PLAN_FILE)
    for layer in {t.layer for t in plan.treatments if t.action == "drop"}:
        assert f"| {layer} | " in cut_section(card)
    merged_by = yaml.safe_load(report.rpartition("```yaml\n")[2].partition("```")[0])
    assert merged_by["parameters"]["density"] == 0.5
    assert [model["model"] for model in merged_by["models"]] == ["a", "b"]


@pytest.fixture
def plots() -> None:
    """Draw plots in this test."""


@pytest.mark.usefixtures("plots")
def test_missing_matplotlib_is_said_in_a_line_and_the_merge_succeeds(
    school, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "merged"
    said = run(make_measured(school, tmp_path), out)
    (line,) = [line for line in said.output.splitlines() if "no plot" in line]
    assert "pip install 'mergekit-himerging[plots]'" in line
    assert list_names(out) >= {PLAN_FILE, REPORT_FILE}
    assert PLOT_FILE not in list_names(out)
    assert PLOT_FILE not in (out / REPORT_FILE).read_text(encoding="utf-8")


def test_quiet_merge_says_nothing_and_leaves_the_same(school, tmp_path):
    recipe = make_measured(school, tmp_path)
    assert run(recipe, tmp_path / "quiet", "--quiet").output.strip() == ""
    assert list_names(tmp_path / "quiet") >= OURS


def test_report_shows_the_recipe_that_was_merged(school, tmp_path):
    run(make_measured(school, tmp_path), tmp_path / "first")
    parameters = {"plan": str(tmp_path / "plan.json"), "density": 0.25}
    recipe = make_recipe(school, "a", "b", parameters=parameters)
    run(recipe, tmp_path / "second")
    report = (tmp_path / "second" / REPORT_FILE).read_text(encoding="utf-8")
    merged_by = yaml.safe_load(report.rpartition("```yaml\n")[2].partition("```")[0])
    assert merged_by["parameters"] == {"plan": "plan.json", "density": 0.25}


# What must not be there


@pytest.mark.parametrize("by", ["measuring", "plan"])
def test_report_and_card_section_tell_no_folder_and_no_sample(by, school, tmp_path):
    recipe = make_measured(school, tmp_path)
    run(recipe, tmp_path / "measured")
    out = tmp_path / "measured"
    if by == "plan":
        parameters = {"plan": str(tmp_path / "plan.json"), "density": 0.5}
        run(make_recipe(school, "a", "b", parameters=parameters), tmp_path / "planned")
        out = tmp_path / "planned"
    texts = read_texts(out)
    for text in (texts[REPORT_FILE], cut_section(texts[CARD_FILE])):
        assert str(school) not in text
        assert str(tmp_path) not in text
        assert school.name not in text
        assert "a.jsonl" in text or text is not texts[REPORT_FILE]
        for rows in ROWS.values():
            for prompt, completion in rows:
                if len(prompt) > 3:
                    assert prompt not in text
                if len(completion) > 3:
                    assert completion not in text


@pytest.mark.parametrize("card", ["--write-model-card", "--no-write-model-card"])
def test_merge_without_a_plan_leaves_nothing_of_an_earlier_one(card, school, tmp_path):
    out = tmp_path / "merged"
    run(make_measured(school, tmp_path), out)
    assert list_names(out) >= OURS
    run(make_recipe(school, "a", "b"), out, card)
    assert not list_names(out) & OURS
    text = (out / CARD_FILE).read_text(encoding="utf-8")
    assert BEGIN not in text
    assert "# merged\n" in text


@pytest.mark.parametrize("card", ["--write-model-card", "--no-write-model-card"])
def test_merge_by_another_method_leaves_nothing_of_an_earlier_one(
    card, school, tmp_path, caplog
):
    out = tmp_path / "merged"
    run(make_measured(school, tmp_path), out)
    ties = make_recipe(school, "a", "b", merge_method="ties", parameters={"weight": 1})
    run(ties, out, card)
    assert not list_names(out) & OURS
    text = (out / CARD_FILE).read_text(encoding="utf-8")
    assert BEGIN not in text
    assert END not in text
    assert "# merged\n" in text
    (said,) = (m for m in caplog.messages if "has replaced an earlier merge" in m)
    assert f"'ties' has replaced an earlier merge in '{out}'" in said
    assert all(name in said for name in OURS)
    assert f"the section of {CARD_FILE}" in said or card == "--write-model-card"
    caplog.clear()
    run(ties, out)
    assert not [m for m in caplog.messages if "hi_merging" in m]


def test_merge_by_another_method_that_fails_leaves_the_earlier_one(school, tmp_path):
    out = tmp_path / "merged"
    run(make_measured(school, tmp_path), out)
    before = read_texts(out)
    recipe = make_recipe(school, "a", "b", merge_method="ties")  # without weights
    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert run_command(mergekit_yaml, str(path), str(out)).exit_code != 0
    assert read_texts(out) == before


def test_merge_by_another_plan_renews_the_section_of_a_card_that_stays(
    school, tmp_path
):
    out = tmp_path / "merged"
    run(make_measured(school, tmp_path), out)
    before = (out / CARD_FILE).read_text(encoding="utf-8")
    mine = before.replace("# merged\n", "# My own words\n")
    (out / CARD_FILE).write_text(mine, encoding="utf-8")
    run(make_measured(school, tmp_path, max_layers=0), out, "--no-write-model-card")
    after = (out / CARD_FILE).read_text(encoding="utf-8")
    assert "# My own words\n" in after
    assert "beyond max_layers 0" not in before
    assert "All 3 layers are merged as the recipe says" in cut_section(after)


def test_card_that_never_had_a_section_stays_as_it_is(school, tmp_path):
    out = tmp_path / "merged"
    out.mkdir()
    (out / CARD_FILE).write_text("# Mine\n", encoding="utf-8")
    run(make_measured(school, tmp_path), out, "--no-write-model-card")
    assert (out / CARD_FILE).read_text(encoding="utf-8") == "# Mine\n"


def test_plot_of_an_earlier_merge_goes_where_none_is_drawn(
    school, tmp_path, monkeypatch
):
    out = tmp_path / "merged"
    run(make_measured(school, tmp_path), out)
    assert PLOT_FILE in list_names(out)

    def fail(*_: Any) -> None:
        raise ValueError("plots need matplotlib")

    monkeypatch.setattr("mergekit_himerging.merged_folder.draw_plan", fail)
    run(make_measured(school, tmp_path), out)
    assert PLOT_FILE not in list_names(out)


# Hidden folders


def assert_hidden(out: Path, *folders: Path) -> None:
    """Assert that no text file of a folder tells where something lay."""
    for name, text in read_texts(out).items():
        for folder in folders:
            assert str(folder) not in text, name
            assert json.dumps(str(folder))[1:-1] not in text, name


@pytest.mark.parametrize("escaped", [False, True], ids=["plain", "escaped"])
def test_hidden_folders_are_in_no_file_and_the_plan_still_fits(
    escaped, school, tmp_path
):
    recipe = make_measured(school, tmp_path)
    run(recipe, tmp_path / "open")
    recipe["parameters"]["hide_paths"] = True
    out = tmp_path / "hidden"
    run(recipe, out, escaped=escaped)
    assert_hidden(out, school, tmp_path)
    merged = load_file(out / "model.safetensors")
    assert_same(merged, load_file(tmp_path / "open" / "model.safetensors"))

    seen, hidden = (read_plan(tmp_path / n / PLAN_FILE) for n in ("open", "hidden"))
    assert (hidden.base, hidden.models) == ("base", ("a", "b"))
    assert [task.calibration for task in hidden.tasks] == ["a.jsonl", "b.jsonl"]
    assert [(t.layer, t.action, t.factors) for t in hidden.treatments] == [
        (t.layer, t.action, t.factors) for t in seen.treatments
    ]
    written = yaml.safe_load((out / RECIPE_FILE).read_text(encoding="utf-8"))
    MergeConfiguration.model_validate(written)
    assert written["base_model"] == "base"
    assert [model["model"] for model in written["models"]] == ["a", "b"]
    card = (out / CARD_FILE).read_text(encoding="utf-8")
    assert "merge method using base as a base" in card
    # The copy beside `plan_out` is the user's own.
    assert str(school / "a") in (tmp_path / "plan.json").read_text(encoding="utf-8")

    parameters = {"plan": str(out / PLAN_FILE), "density": 0.5}
    run(make_recipe(school, "a", "b", parameters=parameters), tmp_path / "again")
    assert_same(load_file(tmp_path / "again" / "model.safetensors"), merged)


def test_folders_are_hidden_without_a_plan_too(school, tmp_path):
    out = tmp_path / "merged"
    run(make_recipe(school, "a", "b", parameters={"hide_paths": True}), out)
    assert_hidden(out, school)
    run(make_recipe(school, "a", parameters={"hide_paths": False}), out)
    assert str(school) in (out / RECIPE_FILE).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "places",
    [
        ("one/checkpoint", "two/checkpoint", "three/checkpoint"),
        ("m", "m-a", "m-a-b"),
    ],
    ids=["same last names", "one name begins another"],
)
def test_hidden_names_that_are_alike_still_fit(places, school, tmp_path):
    real = [tmp_path / "models" / name for name in places]
    for name, folder in zip(("base", "a", "b"), real, strict=True):
        copy_model(school / name, folder)
    recipe = make_measured(school, tmp_path, hide_paths=True)
    recipe["base_model"] = str(real[0])
    for model, folder in zip(recipe["models"], real[1:], strict=True):
        model["model"] = str(folder)
    out = tmp_path / "hidden"
    run(recipe, out)
    assert_hidden(out, tmp_path)
    parameters = {"plan": str(out / PLAN_FILE), "density": 0.5}
    again = {**recipe, "parameters": parameters}
    run(again, tmp_path / "again")
    assert_same(
        load_file(tmp_path / "again" / "model.safetensors"),
        load_file(out / "model.safetensors"),
    )


def copy_model(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)


def test_hidden_adapters_still_fit(school, tmp_path):
    base = make_llama(seed=0)
    save_model(base, tmp_path / "base")
    names = {}
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        adapted = peft.get_peft_model(tune(base, seed=seed, by=0.0), config)
        adapted.save_pretrained(tmp_path / "adapters" / name)
        names[name] = f"{tmp_path}/base+{tmp_path}/adapters/{name}"
    recipe = make_measured(school, tmp_path, hide_paths=True, compare="raw")
    recipe["base_model"] = str(tmp_path / "base")
    for model, name in zip(recipe["models"], "ab", strict=True):
        model["model"] = names[name]
    lora = ("--lora-merge-cache", str(tmp_path / "cache"))
    lora += ("--lora-merge-dtype", "float32")
    out = tmp_path / "hidden"
    run(recipe, out, *lora)
    assert_hidden(out, tmp_path, school)
    plan = read_plan(out / PLAN_FILE)
    assert plan.models == ("base+a", "base+b")
    parameters = {"plan": str(out / PLAN_FILE), "density": 0.5}
    run({**recipe, "parameters": parameters}, tmp_path / "again", *lora)
    assert_same(
        load_file(tmp_path / "again" / "model.safetensors"),
        load_file(out / "model.safetensors"),
    )


@pytest.mark.parametrize(
    ("label", "name", "fits"),
    [
        ("m", "/x/m", True),
        ("x/m", "/a/x/m", True),
        ("m", "/x/other-m", False),
        ("y/m", "/x/m", False),
        ("base+lora", "/x/base+../lora", True),
        ("base", "/x/base+/y/lora", False),
        ("m", "org/m", False),  # a hub id is nobody's short name
    ],
)
def test_label_fits_the_end_of_a_local_name(label, name, fits):
    assert is_short_for(label, name) == fits


def test_warnings_of_every_check_are_kept_in_plan_and_report(
    school, tmp_path, monkeypatch
):
    for name, text in (("inspect_recipe", "before | it"), ("inspect_planned", "after")):
        found = [Finding("warning", text)]
        monkeypatch.setattr(f"mergekit_himerging.plugin.{name}", lambda *_, f=found: f)
    out = tmp_path / "merged"
    run(make_measured(school, tmp_path), out)
    assert read_plan(out / PLAN_FILE).warnings == ("after", "before | it")
    report = (out / REPORT_FILE).read_text(encoding="utf-8")
    assert "## Warnings" in report
    assert "- after" in report
    assert "before" in report
