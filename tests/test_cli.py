"""The command: what it prints, writes and leaves, and how it fails."""

import csv
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from test_analysis import ROWS, assert_same, make_analysis, save_school, write_rows

from mergekit_himerging import api
from mergekit_himerging.cli import main
from mergekit_himerging.plan import PLAN_FILE, Plan, read_plan

COMMANDS = ("analyze", "check", "evaluate", "export", "plot", "search", "show")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data, a recipe and its plan, all with Chinese names."""
    folder = tmp_path_factory.mktemp("书桌")
    save_school(folder)
    recipe = make_analysis(folder, folder, "a", "b", guard="report", density=0.5)
    del recipe["parameters"]["plan_out"]
    write_recipe(folder / "配方.yml", recipe)
    for name in "ab":
        rows = [{"prompt": f"x{p}", "completion": c} for p, c in ROWS[name]]
        write_rows(folder, f"{name}.考试", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERGEKIT_HIMERGING_CACHE", str(folder / "cache"))
        plan = api.analyze(recipe)
    (folder / "计划.json").write_text(plan.to_json(), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _cache(desk, monkeypatch):
    """Let all tests find the analysis of the one recipe."""
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(desk / "cache"))


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """Keep what is loaded out of the collections that evaluations ask for."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def write_recipe(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    return path


def read_recipe(desk: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(
        (desk / "配方.yml").read_text(encoding="utf-8")
    )
    return content


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments: object) -> str:
    """Return the sentence on standard error of a command that must fail."""
    result = run(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


# Help


def test_help_lists_the_commands_without_loading_torch():
    code = (
        "import sys\n"
        "from mergekit_himerging.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "assert not {'torch', 'mergekit', 'transformers'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_begins_with_an_example_and_its_own_options(name):
    text = succeed(name, "--help")
    head, _, rest = text.partition("\nOptions:\n")
    assert f"\n  mergekit-himerging {name} " in head
    assert max(map(len, text.splitlines())) <= 80
    assert all(option in rest for option in ("--help", ""))
    if name not in ("show", "plot"):
        own, _, others = rest.partition("\nOptions of mergekit-yaml:\n")
        assert "--cuda" in others
        assert "--lora-merge-cache" in others
        assert "--cuda" not in own
        assert "--out-shard-size" not in text  # taken, but only writing needs it


def test_options_of_mergekit_that_only_write_are_taken(desk):
    succeed("check", desk / "配方.yml", "--out-shard-size", "1B", "--async-write")


def test_wrong_option_ends_with_code_2():
    result = run("show", "--wrong")
    assert result.exit_code == 2
    assert "No such option" in result.stderr


# Check


def test_check_of_a_good_recipe_prints_its_cost(desk):
    cost = api.check(desk / "配方.yml").cost
    assert cost is not None
    text = succeed("check", desk / "配方.yml", "--out", desk / "新")
    assert text.endswith("no problems found\n")
    for name, value in (
        ("block forwards", f"{cost.n_block_calls}"),
        ("calibration tokens", f"{cost.n_tokens}"),
        ("reads of the models", f"4 ({cost.bytes_read / 2**20:.3g} MiB)"),
        ("time of the analysis", "about 0 min"),
        ("peak memory", "about "),
    ):
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        assert line.removeprefix(name).strip().startswith(value)
    assert not (desk / "新").exists()


def test_check_lists_all_problems_on_standard_error(desk, tmp_path):
    recipe = read_recipe(desk)
    recipe["parameters"] |= {"density": 50, "wieght": 1}
    recipe["models"][0]["parameters"]["calibration"] = "缺.jsonl"
    text = fail("check", write_recipe(tmp_path / "坏.yml", recipe))
    lines = text.splitlines()
    assert [line.split(":")[0] for line in lines] == [*["error"] * 3, "Error"]
    assert "缺.jsonl" in text
    assert lines[-1] == f"Error: 3 problems in '{tmp_path / '坏.yml'}'"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"merge_method: [", "must be YAML"),
        (b"- 1", "must be a mapping of keys, got list"),
        ("合并".encode("gb18030"), "must be UTF-8"),
        (b"merge_method: tise\nmodels: []", "must be a MergeKit recipe"),
        (b"merge_method: ties\nbase_model: x\nmodels: [{model: y}]", "hi_merging"),
        (None, "cannot read recipe"),
    ],
)
def test_recipe_that_cannot_be_read_is_one_problem(content, words, tmp_path):
    path = tmp_path / "坏.yml"
    if content is not None:
        path.write_bytes(content)
    text = fail("check", path)
    assert words in text
    assert len(text.splitlines()) == 2
    text = fail("analyze", path, "--out", tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


# Plans


def test_analyze_writes_the_plan_that_show_reads(desk, tmp_path):
    out = tmp_path / "新" / "计划.json"
    text = succeed("analyze", desk / "配方.yml", "--out", out, "--quiet")
    assert text == f"plan written to {out}\n"
    assert out.read_bytes() == (desk / "计划.json").read_bytes()
    assert str(desk).encode() in out.read_bytes()  # 书桌, not \u4e66


def test_show_tells_what_was_done(desk):
    plan = read_plan(desk / "计划.json")
    text = succeed("show", desk / "计划.json")
    assert "\x1b" not in text
    assert str(desk / "base") in text
    for word in {t.action for t in plan.treatments}:
        assert word in text


def test_show_prints_json_for_machines(desk):
    found = json.loads(succeed("show", desk / "计划.json", "--json"))
    assert Plan.model_validate(found["plan"]) == read_plan(desk / "计划.json")
    assert found["summary"]["treated_layers"]


def test_show_takes_a_merged_folder(desk, tmp_path):
    assert "must hold hi_merging_plan.json, found none" in fail("show", tmp_path)
    content = (desk / "计划.json").read_bytes()
    (tmp_path / PLAN_FILE).write_bytes(content)
    assert succeed("show", tmp_path) == succeed("show", desk / "计划.json")


@pytest.mark.parametrize("content", [None, "{", '{"schema": 1}'])
def test_show_of_no_plan_is_one_sentence(content, tmp_path):
    path = tmp_path / "坏.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    text = fail("show", path)
    assert str(path) in text
    assert len(text.splitlines()) == 1


def start_show(desk: Path, *options: str, **changes: str) -> subprocess.Popen[bytes]:
    code = "from mergekit_himerging.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "show", str(desk / "计划.json"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **changes},
    )


@pytest.mark.parametrize("option", [(), ("--json",)], ids=["table", "json"])
def test_closed_pipe_leaves_no_traceback(option, desk):
    shown = start_show(desk, *option)
    assert shown.stdout is not None
    assert shown.stderr is not None
    shown.stdout.close()
    errors = shown.stderr.read()
    shown.stderr.close()
    shown.wait(timeout=60)
    assert errors == b""


def test_output_that_cannot_hold_chinese_escapes_it(desk):
    out, errors = start_show(desk, PYTHONIOENCODING="ascii").communicate(timeout=60)
    assert errors == b""
    assert rb"\u4e66\u684c" in out


def test_plot_writes_an_image(desk, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "图.svg"
    text = succeed("plot", desk / "计划.json", "--out", out)
    assert text == f"plot written to {out}\n"
    assert b"<svg" in out.read_bytes()
    text = fail("plot", desk / "计划.json", "--out", tmp_path / "图.gif")
    assert "must end in .png or .svg, got '.gif'" in text


def test_exported_recipe_is_the_treated_merge(desk, merge, tmp_path):
    recipe = read_recipe(desk) | {
        "parameters": {"plan": str(desk / "计划.json"), "density": 0.5}
    }
    expected = merge(recipe, out=tmp_path / "planned")
    for method in ("hi_merging", "breadcrumbs"):
        out = tmp_path / f"{method}.yml"
        succeed("export", desk / "计划.json", "--to", method, "--out", out)
        written = yaml.safe_load(out.read_text(encoding="utf-8"))
        assert written["merge_method"] == method
        assert_same(merge(written, out=tmp_path / method), expected)


def test_export_of_a_plan_without_recipe_takes_a_file(desk, tmp_path):
    plan = read_plan(desk / "计划.json").model_copy(update={"recipe": {}})
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    call = ("export", path, "--to", "hi_merging", "--out", tmp_path / "out.yml")
    assert "must carry its recipe, got none" in fail(*call)
    succeed(*call, "--recipe", desk / "配方.yml")
    assert yaml.safe_load((tmp_path / "out.yml").read_text(encoding="utf-8"))


# Search


def test_search_writes_a_recipe_and_a_table_beside_it(desk, tmp_path):
    out = tmp_path / "调.yml"
    call = ("search", desk / "配方.yml", "--out", out, "--grid", 2, "--evaluations", 4)
    text = succeed(*call)
    assert f"recipe written to {out}, all trials to {tmp_path / '调.csv'}" in text
    with (tmp_path / "调.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    result = api.search(
        desk / "配方.yml", settings=api.SearchSettings(grid=2, evaluations=4)
    )
    assert len(rows) == len(result.trials)
    tuned = yaml.safe_load(out.read_text(encoding="utf-8"))
    for model in tuned["models"]:
        values = result.best.choice.get(model["model"])
        if values is not None:
            assert model["parameters"]["density"] == values.density
    assert api.check(out).problems == ()


def test_search_keeps_its_hands_off_the_recipe(desk, tmp_path):
    text = fail("search", desk / "配方.yml", "--out", desk / "配方.yml")
    assert "must be a new file" in text
    text = fail("search", desk / "配方.yml", "--out", tmp_path / "out.csv")
    assert "must be a new file" in text
    # The table beside the tuned recipe would be the data.
    data = tmp_path / "题.csv"
    data.write_text("prompt,completion\nq,a\nr,b\n", encoding="utf-8")
    recipe = yaml.safe_load((desk / "配方.yml").read_text(encoding="utf-8"))
    recipe["models"][0]["parameters"]["calibration"] = data.name
    write_recipe(tmp_path / "配方.yml", recipe)
    before = data.read_bytes()
    text = fail("search", tmp_path / "配方.yml", "--out", tmp_path / "题.yml")
    assert f"'{data}' must be a new file" in text
    assert data.read_bytes() == before
    text = fail("search", desk / "配方.yml", "--out", tmp_path, "--weights", "0.5")
    assert "must be a file to write, got a folder" in text
    text = fail(
        "search", desk / "配方.yml", "--out", tmp_path / "o.yml", "--weights", "x"
    )
    assert "weights must be numbers with commas between, got 'x'" in text


def test_verbose_errors_keep_their_traceback(desk, tmp_path):
    call = ("search", desk / "配方.yml", "--out", tmp_path / "o.yml", "--grid", 1)
    assert "grid must be in [2, 100], got 1" in fail(*call)
    assert isinstance(run(*call, "-v").exception, ValueError)


# Evaluate


def test_evaluate_prints_a_table_and_writes_json(desk, tmp_path):
    out = tmp_path / "分.json"
    text = succeed(
        *("evaluate", desk / "配方.yml", "--no-generate", "--quiet", "--json", out),
        *("--data", desk / "a.考试.jsonl", "--data", f"乙={desk / 'b.考试.jsonl'}"),
    )
    found = json.loads(out.read_text(encoding="utf-8"))
    assert "考试" in out.read_text(encoding="utf-8")
    assert [task["name"] for task in found["tasks"]] == ["a.考试", "乙"]
    roles = [model["role"] for model in found["models"]]
    assert roles == ["base", "expert", "expert", "merge"]
    assert "\x1b" not in text
    for task in ("a.考试", "乙"):
        assert task in text
    loss = found["results"][0]["estimates"]["loss"]["value"]
    assert f"{loss:.3f}" in text
    assert text.endswith(f"scores written to {out}\n")


@pytest.mark.parametrize("pair", ["{}", "letters={}"])
def test_evaluate_does_not_write_over_its_data(desk, tmp_path, pair):
    data = tmp_path / "held-out.jsonl"
    data.write_bytes((desk / "a.考试.jsonl").read_bytes())
    text = fail("evaluate", desk / "a", "--data", pair.format(data), "--json", data)
    assert "must be a new file" in text
    assert data.read_bytes() == (desk / "a.考试.jsonl").read_bytes()


def test_evaluate_refuses_calibration_data(desk):
    call = ("evaluate", desk / "配方.yml", "--no-generate", "--quiet")
    text = fail(*call, "--data", desk / "a.jsonl")
    assert "held-out rows must not be calibration rows, got 4 of 4" in text
    succeed(*call, "--data", desk / "a.jsonl", "--allow-overlap")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data", "x/t.jsonl", "--data", "y/t.jsonl"), "got 't' twice"),
        (("--data", "t.jsonl", "--expert", "m"), "expert must be TASK=MODEL, got 'm'"),
        (("--data", "缺.jsonl"), "缺.jsonl"),
    ],
)
def test_evaluate_refuses_wrong_pairs(arguments, words, desk):
    assert words in fail("evaluate", desk / "a", *arguments)


def test_evaluate_takes_a_file_with_an_equals_sign(desk, tmp_path):
    path = tmp_path / "v=2.jsonl"
    path.write_bytes((desk / "a.考试.jsonl").read_bytes())
    out = tmp_path / "分.json"
    succeed(
        *("evaluate", desk / "a", "--data", path, "--no-generate", "--json", out),
    )
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [task["name"] for task in found["tasks"]] == ["v=2"]


# Ctrl-C


WRITERS = {
    "analyze": ("api.measure_plan", ["--out", "{out}"]),
    "search": ("api.search_merge", ["--out", "{out}"]),
    "export": ("api.export_recipe", ["--to", "hi_merging", "--out", "{out}"]),
    "plot": ("views.plot.draw_plan", ["--out", "{out}"]),
    "evaluate": (
        "api.run.evaluate",
        ["--json", "{out}", "--data", "{data}", "--no-generate"],
    ),
}


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["at work", "while writing"])
@pytest.mark.parametrize("name", WRITERS)
def test_interrupt_leaves_what_was_there(name, when, desk, tmp_path, monkeypatch):
    function, options = WRITERS[name]
    if name == "plot":
        pytest.importorskip("matplotlib")
    out = tmp_path / ("old.svg" if name == "plot" else "old.yml")
    out.write_text("earlier", encoding="utf-8")
    if when == "at work":
        monkeypatch.setattr(f"mergekit_himerging.{function}", interrupt)
    else:
        monkeypatch.setattr("mergekit_himerging.files.Path.replace", interrupt)
    source = desk / ("计划.json" if name in ("export", "plot") else "配方.yml")
    places = {"out": out, "data": desk / "a.考试.jsonl"}
    extra = ["--grid", "2", "--evaluations", "4"] if name == "search" else []
    result = run(name, source, *(o.format(**places) for o in options), *extra)
    assert result.exit_code == 1
    assert result.stderr.endswith("Aborted!\n")
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert out.read_text(encoding="utf-8") == "earlier"
