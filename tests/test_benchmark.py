"""The benchmark of the medical experts, on tiny models in their places."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import make_llama, make_tokenizer, save_model
from safetensors.torch import load_file
from test_analysis import ROWS, completions, encode, log_probability, save_school
from transformers import AutoModelForCausalLM

from mergekit_himerging.analysis.calibration import Row
from mergekit_himerging.evaluation.data import read_task
from mergekit_himerging.plan import read_plan
from mergekit_himerging.recipe import check_config

SCRIPTS = Path(__file__).parent.parent / "recipes" / "smollm2-medical"
sys.path.insert(0, str(SCRIPTS))

import benchmark  # noqa: E402
import compare  # noqa: E402
import methods  # noqa: E402
import page  # noqa: E402
import settings  # noqa: E402
from mergekit.config import MergeConfiguration  # noqa: E402
from results import (  # noqa: E402
    Budget,
    MethodResult,
    Scored,
    SettingResult,
    Trial,
    read_result,
    write_result,
)
from schedule import BATCH_ROWS, draw_batches, mix_batches  # noqa: E402
from scoring import Example  # noqa: E402

BUDGET = Budget(
    name="tiny", test_rows=3, trials=2, tuning_rows=2, samples=4, generated_rows=2
)
ROW_NAMES = (
    *("task arithmetic", "dare_linear", methods.PLAIN, "paper", "rules"),
    *("rules, confidence 2", "measured"),
)


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder laid out as the repository is, with tiny experts."""
    root = tmp_path_factory.mktemp("root")
    here = root / benchmark.HERE
    school = save_school(tmp_path_factory.mktemp("school"))
    (here / "experts").mkdir(parents=True)
    (school / "base").rename(here / "base")
    for name, task in (("a", "en-mcqa"), ("b", "en-qa")):
        (school / name).rename(here / "experts" / task)
        for size in ("", "-large"):
            path = here / "data" / f"{task}.calibration{size}.jsonl"
            write_rows(path, completions(name))
        # Near to what the expert knows, but not the same.
        tests = [{**row, "prompt": row["prompt"] + "."} for row in completions(name)]
        write_rows(here / "data" / f"{task}.test.jsonl", tests)
    write_rows(here / "data" / "general.test.jsonl", [{"text": "no, not so"}])
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(autouse=True)
def at_root(place, cache, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(cache))


@pytest.fixture(scope="module")
def done(place, cache):
    """The setting's file after one run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("MERGEKIT_HIMERGING_CACHE", str(cache))
        benchmark.run_setting("english", BUDGET, ROW_NAMES, "a command")
    found = read_result(place / benchmark.HERE / "results" / "tiny" / "english.json")
    assert found is not None
    return found


def test_every_row_is_tuned_alike_and_tested_once_a_seed(done):
    assert list(done.rows) == list(ROW_NAMES)
    for name, row in done.rows.items():
        method = methods.METHODS[name]
        tunes = method.start is None and not method.has_weights
        assert len(row.trials) == (BUDGET.trials if tunes else 0)
        assert [test.seed for test in row.tests] == list(range(method.seeds))
        assert {t: len(s["loss"]) for t, s in row.tests[0].samples.items()} == {
            "en-mcqa": 3,
            "en-qa": 3,
            "general": 1,
        }
    drawn = [t.samples["en-qa"]["loss"] for t in done.rows["dare_linear"].tests]
    assert drawn[0] != drawn[1] != drawn[2]


def test_test_losses_are_those_of_the_chosen_merge_by_hand(done, place):
    row = done.rows["task arithmetic"]
    here = place / benchmark.HERE
    base = load_file(here / "base" / "model.safetensors")
    merged = dict(base)
    for task in ("en-mcqa", "en-qa"):
        expert = load_file(here / "experts" / task / "model.safetensors")
        weight = row.values[f"weight {task}"]
        for name in merged:
            merged[name] = merged[name] + weight * (expert[name] - base[name])
    model = make_llama(seed=0).eval()
    model.load_state_dict(merged)
    texts = [encode(make_tokenizer(), p + ".", c) for p, c in ROWS["b"]]
    with torch.no_grad():
        losses = [-float(log_probability(model, text)) for text in texts]
    for loss in row.tests[0].samples["en-qa"]["loss"]:
        assert min(abs(loss - known) for known in losses) < 2e-5


def test_best_trial_is_what_is_tested(done):
    for name in ("task arithmetic", "paper", methods.PLAIN):
        row = done.rows[name]
        best = max(row.trials, key=lambda trial: trial.objective)
        assert row.values == best.values
        for trial in row.trials:
            mean = sum(trial.gains.values()) / len(trial.gains)
            assert trial.objective == pytest.approx(mean)


def test_rows_that_start_from_another_take_its_values(done):
    for name in ("rules", "rules, confidence 2"):
        assert done.rows[name].values == done.rows[methods.PLAIN].values
        model = done.rows[name].recipe["models"][0]["parameters"]
        assert model["density"] == done.rows[methods.PLAIN].values["density"]
    assert "density" not in done.rows["measured"].values


def test_plans_say_what_was_measured_and_what_was_decided_anew(done, place):
    plans = place / benchmark.HERE / "results" / "tiny" / "plans" / "english"
    rules = read_plan(plans / "rules.json")
    strict = read_plan(plans / "rules-confidence-2.json")
    assert rules.settings["guard"] == "report"
    assert strict.settings["confidence"] == 2
    assert strict.tasks[0].layers == rules.tasks[0].layers
    assert done.rows["rules, confidence 2"].analysis.decided_anew
    assert read_plan(plans / "paper.json").settings["reference"] == "full"
    measured = done.rows["measured"].analysis
    assert measured.forwards == read_plan(plans / "measured.json").steps[-1].forwards


def test_answers_are_generated_to_the_first_rows(done, place):
    for scored in (*done.references.values(), *done.rows["measured"].tests):
        assert set(scored.generated) == {"en-mcqa", "en-qa"}  # none has options here
        for metrics in scored.generated.values():
            assert {len(values) for values in metrics.values()} == {2}
    assert set(done.copying["en-qa"]) == {"exact_match", "rougeL"}

    path = place / benchmark.HERE / "data" / "en-qa.test.jsonl"
    rows = read_task(str(path), folders=[Path()], n_rows=BUDGET.test_rows).rows[:2]
    folder = place / benchmark.HERE / "experts" / "en-qa"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = make_tokenizer()
    answers = []
    for row in rows:
        ids = tokenizer(row.prompt)["input_ids"]
        start = len(ids)
        for _ in range(benchmark.MAX_NEW_TOKENS):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        answers.append(tokenizer.decode(ids[start:], skip_special_tokens=True).strip())
    assert done.references["en-qa"].generated["en-qa"] == benchmark.compare_answers(
        [answer.split("\n")[0] for answer in answers], rows
    )


def test_missing_answers_are_added_and_nothing_is_scored_again(
    done, place, monkeypatch
):
    path = place / benchmark.HERE / "results" / "tiny" / "english.json"
    cut = done.model_copy(deep=True)
    for scored in (cut.references["base"], cut.rows["dare_linear"].tests[1]):
        scored.generated = {}
    write_result(path, cut)
    monkeypatch.setattr(benchmark, "evaluate", None)
    benchmark.run_setting("english", BUDGET, ROW_NAMES, "a command")
    again = read_result(path)
    for name in ("references", "rows"):
        kept, new = getattr(done, name), getattr(again, name)
        assert list(new) == list(kept)
    for old, new in zip(
        done.rows["dare_linear"].tests, again.rows["dare_linear"].tests, strict=True
    ):
        assert (new.seed, new.samples, new.generated) == (
            old.seed,
            old.samples,
            old.generated,
        )
    assert again.references["base"].generated == done.references["base"].generated
    write_result(path, done)


def test_question_as_answer_is_scored_by_its_first_line():
    def row(prompt, answer):
        return Row("", "completion", answer, prompt=prompt)

    rows = [row("What is a cyst?\nAnswer:", " what is a cyst"), row("a b", "b a c c")]
    found = benchmark.compare_with_questions(rows)
    assert found["exact_match"] == 0.5
    # longest common subsequence 1 of 2 and of 4 words: F1 = 2 / 6
    assert found["rougeL"] == pytest.approx((100 + 100 / 3) / 2, abs=1e-3)


def test_quick_and_brief_runs_do_the_core_rows():
    english, full = settings.SETTINGS["english"], settings.SETTINGS["english-full"]
    leading, core = list(methods.LEADING), list(methods.CORE)
    assert methods.list_rows(english, is_quick=True) == leading
    assert methods.list_rows(full, is_quick=True) == leading
    assert methods.list_rows(full, is_quick=False) == core
    assert methods.list_rows(english, is_quick=False) == list(methods.METHODS)


def test_whole_runs_do_every_other_method_and_the_paper_in_every_setting():
    everywhere = {m.name for m in methods.METHODS.values() if m.family == "other"}
    everywhere |= {"model-wise", "paper", "layer-wise", "rules", "measured"}
    everywhere |= {"measured, agreement"}
    for name in ("choice", "english", "bilingual", "four"):
        rows = methods.list_rows(settings.SETTINGS[name], is_quick=False)
        assert everywhere <= set(rows), name
    bilingual = methods.list_rows(settings.SETTINGS["bilingual"], is_quick=False)
    assert "rules, confidence 2" in bilingual
    assert "measured, 128 samples" not in bilingual


def test_results_name_no_folder_of_this_machine(done, place):
    folder = place / benchmark.HERE / "results"
    for path in folder.rglob("*.json"):
        assert str(place) not in path.read_text(encoding="utf-8"), path


def test_a_second_run_merges_nothing(done, monkeypatch):
    monkeypatch.setattr(benchmark, "load_merge", None)
    monkeypatch.setattr(benchmark, "make_model_candidate", None)
    benchmark.run_setting("english", BUDGET, ROW_NAMES, "a command")


def test_a_stopped_run_goes_on_with_the_same_trials(done, place, monkeypatch):
    path = place / benchmark.HERE / "results" / "tiny" / "english.json"
    row = done.rows["task arithmetic"]
    cut = done.model_copy(deep=True)
    cut.rows = {
        row.name: MethodResult(name=row.name, trials=[row.trials[0]]),
        **{name: r for name, r in done.rows.items() if name != row.name},
    }
    write_result(path, cut)
    benchmark.run_setting("english", BUDGET, ROW_NAMES, "a command")
    again = read_result(path).rows["task arithmetic"]
    assert [t.values for t in again.trials] == [t.values for t in row.trials]
    assert again.tests[0].samples == row.tests[0].samples
    write_result(path, done)


def test_results_of_other_inputs_are_not_gone_on_with(done, place):
    expert = place / benchmark.HERE / "experts" / "en-qa"
    kept = (expert / "model.safetensors").read_bytes()
    save_model(make_llama(seed=9), expert, dtype=torch.float32)
    try:
        with pytest.raises(ValueError, match="must be of the same inputs, got"):
            benchmark.run_setting("english", BUDGET, ROW_NAMES, "a command")
    finally:
        (expert / "model.safetensors").write_bytes(kept)


def test_test_rows_that_calibrate_are_refused(done, place):
    path = place / benchmark.HERE / "data" / "en-qa.test.jsonl"
    kept = path.read_bytes()
    write_rows(path, completions("b"))
    try:
        with pytest.raises(ValueError, match="held-out rows must not be calibration"):
            benchmark.run_setting("english", BUDGET, ROW_NAMES, "a command")
    finally:
        path.write_bytes(kept)


def test_page_shows_every_row_and_leads_with_the_verdict(done, place):
    folder = place / benchmark.HERE / "results" / "tiny"
    readme = place / "README.md"
    readme.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n", "utf-8")
    page.write_page(folder, place / "RESULTS.md", readme=readme)
    text = (place / "RESULTS.md").read_text(encoding="utf-8")
    first = text.split("\n\n")[1]
    assert "English, two tasks" in first
    assert "The paper's rules, against the best other method" in first
    assert ", of 2)" in first  # task arithmetic and dare_linear
    for name in ROW_NAMES:
        assert f"\n| {name}" in text or f"\n| **{name}**" in text
    assert "Not run yet: bilingual choice; " in text
    assert "Not run yet in this setting: linear; ties; " in text
    assert (folder / "english.svg").read_text(encoding="utf-8").startswith("<?xml")
    standing = compare.compare(done).methods[0]
    assert f"\n| {standing.name} | **{standing.mean.value:.3f}** |" in text
    measured = next(s for s in compare.compare(done).methods if s.name == "measured")
    assert measured.behind is not None
    assert f"| {measured.mean.value:.3f} | {measured.behind.value:+.3f} [" in text
    assert f"{standing.mean.value:.3f} [{standing.mean.low:.3f}" in text
    summary = readme.read_text(encoding="utf-8")
    assert summary.startswith("before\n")
    assert summary.endswith("\nafter\n")
    assert "old" not in summary
    assert "| English, two tasks | " in summary


def test_quick_page_says_so_and_leaves_the_whole_one_alone(done, place):
    folder = place / benchmark.HERE / "results" / "quick"
    shutil.copytree(folder.parent / "tiny", folder)
    budget = BUDGET.model_copy(update={"name": "quick"})
    write_result(folder / "english.json", done.model_copy(update={"budget": budget}))
    wholes = place / "README.md", place / benchmark.HERE / "RESULTS.md"
    for path in wholes:
        path.write_text("as it was", encoding="utf-8")
    result = CliRunner().invoke(benchmark.main, ["--quick", "--page"])
    assert result.exit_code == 0, result.output
    assert "**Quick run**" in (folder / "RESULTS.md").read_text(encoding="utf-8")
    assert {path.read_text(encoding="utf-8") for path in wholes} == {"as it was"}


def test_page_without_results_says_what_to_run(tmp_path):
    with pytest.raises(ValueError, match="must hold a tested method, got none; run"):
        page.read_comparisons(tmp_path)


@pytest.mark.skipif(
    not (SCRIPTS / "RESULTS.md").exists(), reason="no benchmark has been run"
)
def test_page_and_readme_are_those_of_the_files(monkeypatch, tmp_path):
    root = SCRIPTS.parent.parent
    monkeypatch.chdir(root)
    readme = tmp_path / "README.md"
    readme.write_bytes((root / "README.md").read_bytes())
    kept = (SCRIPTS / "RESULTS.md").read_text(encoding="utf-8")
    folder = tmp_path / "results" / "full"
    shutil.copytree(SCRIPTS / "results" / "full", folder)
    page.write_page(folder, tmp_path / "RESULTS.md", readme=readme)
    assert (tmp_path / "RESULTS.md").read_text(encoding="utf-8") == kept
    assert readme.read_bytes() == (root / "README.md").read_bytes()


# What is computed from rows


def make_result(**losses: list[list[float]]) -> SettingResult:
    """Make a setting of two tasks from losses by model: task "x", then task "y"."""

    def scored(values: list[list[float]], seed: int = 0) -> Scored:
        x, y = values
        samples = {
            "x": {"loss": x, "accuracy": [float(v < 1.5) for v in x]},
            "y": {"loss": y},
            "general": {"loss": [sum(x), sum(y)]},
        }
        return Scored(seed=seed, samples=samples, seconds=1.0)

    references = {name: scored(losses.pop(name)) for name in ("base", "x", "y")}
    rows = {
        name: MethodResult(name=name, tests=[scored(values)])
        for name, values in losses.items()
    }
    return SettingResult(
        setting="english",
        budget=BUDGET,
        tasks=["x", "y"],
        inputs={},
        versions={},
        machine="",
        command="",
        references=references,
        rows=rows,
    )


@pytest.fixture
def made() -> compare.Comparison:
    return compare.compare(
        make_result(
            base=[[2.0, 4.0], [3.0, 3.0]],
            x=[[1.0, 1.0], [3.0, 3.0]],
            y=[[2.0, 4.0], [1.0, 2.0]],
            linear=[[1.0, 3.0], [2.0, 2.0]],
            ties=[[1.0, 2.0], [1.0, 3.0]],
            rules=[[1.0, 1.0], [1.0, 2.0]],
        )
    )


def test_recovered_gain_is_the_share_of_the_experts_gain(made):
    standings = {s.name: s for s in made.methods}
    # x: base 3, expert 1; y: base 3, expert 1.5
    assert standings["linear"].recovered["x"].value == pytest.approx((3 - 2) / 2)
    assert standings["linear"].recovered["y"].value == pytest.approx((3 - 2) / 1.5)
    assert standings["linear"].mean.value == pytest.approx((1 / 2 + 1 / 1.5) / 2)
    assert standings["rules"].mean.value == pytest.approx(1)
    assert made.methods[0].name == "rules"


def test_interval_is_that_of_the_four_draws_of_two_rows(made):
    linear = next(s for s in made.methods if s.name == "linear")
    # x: rows (1, 3) against base (2, 4) and expert (1, 1)
    shares = [(2 - 1) / (2 - 1), (3 - 2) / (3 - 1), (4 - 3) / (4 - 1)]
    assert linear.recovered["x"].low == pytest.approx(min(shares))
    assert linear.recovered["x"].high == pytest.approx(max(shares))


def test_ours_is_held_against_the_best_of_the_others_row_by_row(made):
    assert made.best_other is not None
    assert made.best_other.name == "ties"
    rules = made.methods[0]
    assert rules.behind is not None
    assert rules.behind.value == pytest.approx(
        rules.mean.value - made.best_other.mean.value
    )
    assert made.best_other.behind is None


def test_ranks_and_improvements_follow_the_headline_metrics(made):
    standings = {s.name: s for s in made.methods}
    assert made.headline == {"x": "accuracy", "y": "loss"}
    # x accuracy: rules 1, the others 0.5; y loss: rules 1.5, the others 2
    assert standings["rules"].rank == 1
    assert standings["linear"].rank == standings["ties"].rank == 2.5
    # The base has no right answer, so nothing is relative to it.
    assert standings["linear"].improvement is None
    assert standings["linear"].forgotten.value == pytest.approx(((4 + 4) - (6 + 6)) / 2)


def test_improvement_is_relative_to_the_base():
    comparison = compare.compare(
        make_result(
            base=[[1.0, 4.0], [3.0, 3.0]],
            x=[[1.0, 1.0], [3.0, 3.0]],
            y=[[2.0, 4.0], [1.0, 2.0]],
            linear=[[1.0, 1.0], [2.0, 2.0]],
        )
    )
    # accuracy 0.5 -> 1, loss 3 -> 2
    assert comparison.methods[0].improvement == pytest.approx((1 + 1 / 3) / 2)


def test_seeds_count_with_their_mean_row_by_row():
    result = make_result(
        base=[[2.0, 4.0], [3.0, 3.0]],
        x=[[1.0, 1.0], [3.0, 3.0]],
        y=[[2.0, 4.0], [1.0, 2.0]],
        linear=[[1.0, 3.0], [2.0, 2.0]],
    )
    row = result.rows["linear"]
    other = row.tests[0].model_copy(deep=True, update={"seed": 1})
    other.samples["x"]["loss"] = [2.0, 2.0]
    row.tests.append(other)
    (linear,) = compare.compare(result).methods
    assert linear.n_seeds == 2
    assert linear.recovered["x"].value == pytest.approx((3 - 2) / 2)
    shares = [(2 - 1.5) / (2 - 1), (3 - 2) / (3 - 1), (4 - 2.5) / (4 - 1)]
    assert linear.recovered["x"].low == pytest.approx(min(shares))
    assert linear.recovered["x"].high == pytest.approx(max(shares))


# Recipes and proposals


@pytest.mark.parametrize("method", methods.METHODS.values(), ids=lambda m: m.name)
def test_every_method_makes_a_recipe_that_mergekit_reads(method):
    tasks = ("en-mcqa", "en-qa")
    ranges = methods.list_ranges(method, tasks)
    values = {name: (low + high) / 2 for name, (low, high) in ranges.items()}
    for calibration in (None, dict.fromkeys(tasks, "data.jsonl")):
        if calibration is not None and not method.calibrates:
            continue
        recipe = methods.make_recipe(
            method,
            "some/base",
            {task: f"some/{task}" for task in tasks},
            values,
            calibration=calibration,
            samples=None if calibration is None else 4,
        )
        config = MergeConfiguration.model_validate(recipe)
        assert config.merge_method == method.merge_method
        if method.family == "ours":
            assert check_config(config) == []
        for task, model in zip(tasks, recipe["models"], strict=True):
            if method.weight is not None:
                assert model["parameters"]["weight"] == values[f"weight {task}"]


def test_first_proposal_is_the_middle_and_others_follow_what_was_seen():
    ranges = {"u": (0.0, 1.0), "v": (2.0, 4.0)}
    assert benchmark.suggest(ranges, []) == {"u": 0.5, "v": 3.0}
    trials: list[Trial] = []
    for _ in range(10):
        values = benchmark.suggest(ranges, trials)
        assert values == benchmark.suggest(ranges, trials)
        value = -((values["u"] - 0.8) ** 2) - (values["v"] - 2.4) ** 2
        trials.append(
            Trial(
                values=values,
                gains={},
                objective=value,
                merge_seconds=0,
                score_seconds=0,
            )
        )
    best = max(trials, key=lambda t: t.objective).values
    assert np.hypot(best["u"] - 0.8, best["v"] - 2.4) < 0.1


def test_guess_is_the_commonest_of_the_options_that_are_asked():
    def row(answer, *choices):
        return Row("", "choices", answer, choices=choices, answer=choices.index(answer))

    known = [row("a", "a", "b"), row("b", "a", "b"), row("b", "b", "c")]
    asked = [row("a", "a", "b"), row("b", "a", "b"), row("a", "a", "c")]
    assert benchmark.guess_commonest(known, asked) == pytest.approx(2 / 3)


def test_numbers_of_a_list_stand_in_one_line(tmp_path):
    result = make_result(
        base=[[2.0, 4.5], [3.0, 3.0]],
        x=[[1.0, 1e-05], [3.0, 3.0]],
        y=[[2.0, 4.0], [1.0, 2.0]],
    )
    result.references["x"].samples["x"]["accuracy"] = [None, 1.0]
    path = tmp_path / "x.json"
    write_result(path, result)
    text = path.read_text(encoding="utf-8")
    assert "[ 2.0, 4.5 ]" in text
    assert "[ null, 1.0 ]" in text
    assert read_result(path) == result


def make_examples(task: int, n_rows: int) -> list[Example]:
    """Rows of rising length whose first token names the task."""
    return [Example(ids=(task, *range(n)), n_answer=1) for n in range(1, n_rows + 1)]


def test_mixed_adapter_sees_what_each_expert_saw_and_no_task_comes_last():
    """One that had its turns at the end would be remembered best."""
    tasks = [make_examples(task, 40) for task in range(3)]
    steps = (4, 12, 4)
    mixed = list(mix_batches(tasks, steps, seed=1))
    order = [batch[0].ids[0] for batch in mixed]
    for task, n_steps in enumerate(steps):
        alone = list(draw_batches(tasks[task], 1, n_steps))
        assert [batch for batch in mixed if batch[0].ids[0] == task] == alone
        for quarter in range(4):
            part = order[5 * quarter : 5 * quarter + 5]
            assert part.count(task) == n_steps // 4
    assert {len(batch) for batch in mixed} == {BATCH_ROWS}


def test_tasks_with_equal_steps_take_turns():
    tasks = [make_examples(task, 20) for task in range(2)]
    order = [batch[0].ids[0] for batch in mix_batches(tasks, (3, 3), seed=0)]
    assert order == [0, 1, 0, 1, 0, 1]
