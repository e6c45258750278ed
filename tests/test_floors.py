"""Weights and floors of tasks, from the recipe to the plan, the guard and the views."""

import dataclasses
import io
import json

import numpy as np
import pytest
import yaml
from mergekit.options import MergeOptions
from rich.console import Console
from test_analysis import (
    ROWS,
    Bench,
    encode,
    make_analysis,
    make_tokenizer,
    save_school,
)
from test_measured import plan_of
from test_recipe import problems_of
from test_run import AIMS, WHOLES, make_settings, whole
from test_run import judge as judge_wholes

from mergekit_himerging.analysis.judging import describe_whole, judge, make_proof
from mergekit_himerging.analysis.measured import BUDGET
from mergekit_himerging.analysis.proof import SideScores
from mergekit_himerging.analysis.session import _find_protection, make_plan
from mergekit_himerging.api import export
from mergekit_himerging.parameters import RecipeError
from mergekit_himerging.plan import read_plan
from mergekit_himerging.scores import WholeScores
from mergekit_himerging.search import SearchSettings, search_merge
from mergekit_himerging.views.markdown import write_card_section, write_report
from mergekit_himerging.views.table import plan_as_json, render_plan
from mergekit_himerging.views.words import describe_aim


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    return save_school(tmp_path_factory.mktemp("school"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(tmp_path / "cache"))


def make_recipe(school, folder, *, of_a=None, of_b=None, **parameters):
    recipe = make_analysis(
        school,
        folder,
        "a",
        "b",
        of_model={"weight": 0.3},
        resolve="measured",
        **parameters,
    )
    del recipe["parameters"]["plan_out"]
    for item, more in zip(recipe["models"], (of_a, of_b), strict=True):
        item["parameters"] |= more or {}
    return recipe


# What a recipe may say

BOTH = (
    "models: [{model: org/en, parameters: {calibration: en.jsonl, %s}}, "
    "{model: org/zh, parameters: {calibration: zh.jsonl, %s}}], parameters: {%s}"
)
MEASURED = "resolve: measured"


@pytest.mark.parametrize(
    ("of_en", "of_zh", "at_top"),
    [
        ("task_weight: 2, floor: 0.95", "task_weight: 0", MEASURED),
        ("floor: 0.9", "task_weight: 0, floor: 0", MEASURED),
        ("task_weight: 0", "samples: 1", MEASURED),
        ("floor: 1", "floor: 1.5", MEASURED + ", objective: worst, measure: exact"),
        ("samples: 2", "samples: 2", MEASURED + ", floor: 0.5, task_weight: 3"),
    ],
)
def test_weights_and_floors_that_fit_are_taken(of_en, of_zh, at_top):
    assert problems_of(BOTH % (of_en, of_zh, at_top)) == []


@pytest.mark.parametrize(
    ("of_en", "of_zh", "at_top", "problem"),
    [
        (
            "floor: 0.9",
            "task_weight: 2",
            "resolve: rules, measure: exact",
            "['floor', 'measure', 'task_weight'] must come with 'resolve: measured', "
            "got 'resolve: rules', which has no use for it; remove one of the two",
        ),
        (
            "samples: 1",
            "samples: 1",
            "preset: paper, objective: worst",
            "['objective'] must come with 'resolve: measured', got 'resolve: rules', "
            "which has no use for it; remove one of the two",
        ),
        (
            "floor: 0.9",
            "samples: 1",
            MEASURED + ", compare: raw",
            "floor must come with 'compare: gain', got 'compare: raw' and a floor of "
            "['org/en']; it is a recovered gain, so remove one of the two",
        ),
        (
            "task_weight: 0",
            "task_weight: 0",
            MEASURED,
            "task_weight must be above 0 for one model, got 0 for all; raise that of "
            "the tasks to aim at",
        ),
        (
            "samples: 1",
            "samples: 1",
            MEASURED + ", task_weight: 0",
            "task_weight must be above 0 for one model, got 0 for all; raise that of "
            "the tasks to aim at",
        ),
        (
            "task_weight: 2",
            "task_weight: 0",
            MEASURED + ", objective: worst",
            "task_weight must be 0 or 1 with 'objective: worst', which takes the worst "
            "of all tasks but those of 0, got 2 ('org/en'); remove one of the two",
        ),
        (
            "floor: 0.5, weight: 0",
            "floor: 0, weight: 0",
            MEASURED,
            "floor of 'org/en' must come with a delta that is merged, got weight 0; "
            "remove one of the two",
        ),
        (
            "floor: 95",
            "samples: 1",
            MEASURED,
            "floor must be in [0, 1.5], got 95 (models[0] 'org/en'); it is a share of "
            "the expert's gain over the base, so 95 percent is 0.95",
        ),
        (
            "floor: .inf",
            "samples: 1",
            MEASURED,
            "floor must be in [0, 1.5], got inf (models[0] 'org/en'); it is a share of "
            "the expert's gain over the base",
        ),
        (
            "floor: high",
            "samples: 1",
            MEASURED,
            "floor must be a number, got 'high' (models[0] 'org/en')",
        ),
        (
            "task_weight: -1",
            "samples: 1",
            MEASURED,
            "task_weight must be at least 0, got -1 (models[0] 'org/en')",
        ),
        (
            "task_weight: .nan",
            "samples: 1",
            MEASURED,
            "task_weight must be at least 0, got nan (models[0] 'org/en')",
        ),
        (
            "samples: 1",
            "samples: 1",
            MEASURED + ", measure: both",
            "measure must be one of first_order, exact, got 'both' (parameters)",
        ),
    ],
)
def test_what_contradicts_weights_and_floors_is_named(of_en, of_zh, at_top, problem):
    assert problems_of(BOTH % (of_en, of_zh, at_top)) == [problem]


def test_floors_of_one_model_in_two_slices_must_agree():
    source = "{model: org/zh, layer_range: [%s], parameters: {calibration: z, %s}}"
    slices = ", ".join(
        f"{{sources: [{{model: org/base, layer_range: [{r}]}}, {source % (r, f)}]}}"
        for r, f in (("0, 2", "floor: 0.5"), ("2, 4", "floor: 0.6"))
    )
    assert problems_of(f"slices: [{slices}], parameters: {{{MEASURED}}}") == [
        "'floor' of 'org/zh' must be one value, got ['0.5', '0.6']"
    ]


def test_search_refuses_what_it_would_leave_out(school, tmp_path):
    merge = plan_of(make_recipe(school, tmp_path, of_b={"floor": 0.5}))
    with pytest.raises(RecipeError, match=r"got task_weight 1 and floor 0\.5 for '.*b"):
        search_merge(merge, SearchSettings())


# Tasks that do not count


def use_foreign_rows(recipe, tmp_path):
    """Give `b` the rows of `a`, on which it is worse than the base."""
    rows = [{"prompt": p, "completion": c} for p, c in ROWS["a"]]
    path = tmp_path / "foreign.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe["models"][1]["parameters"]["calibration"] = str(path)
    return recipe


def test_expert_that_does_not_beat_the_base_is_refused_with_the_remedy(
    school, tmp_path
):
    recipe = use_foreign_rows(make_recipe(school, tmp_path), tmp_path)
    with pytest.raises(RecipeError) as caught:
        make_plan(plan_of(recipe))
    assert f"model '{school / 'b'}' must beat the base" in str(caught.value)
    assert str(caught.value).endswith(
        "mend its calibration data or exclude its task with task_weight: 0"
    )
    recipe["models"][1]["parameters"] |= {"task_weight": 0, "floor": 0.5}
    words = r"to have a floor, got gain -.* and floor 0\.5"
    with pytest.raises(RecipeError, match=words):
        make_plan(plan_of(recipe))


@pytest.mark.parametrize("objective", ["mean", "worst"])
def test_excluded_task_is_reported_and_not_aimed_at(school, tmp_path, objective):
    recipe = make_recipe(school, tmp_path, of_b={"task_weight": 0}, objective=objective)
    plan = make_plan(plan_of(use_foreign_rows(recipe, tmp_path)))
    aimed, excluded = plan.tasks
    assert excluded.score_treated is not None
    assert excluded.score_single < excluded.score_base
    assert excluded.recovered_merged is None
    assert excluded.recovered_treated is None
    assert excluded.task_weight == 0
    # With one task to aim at, its recovered gain on all samples is the objective.
    taken = [step for step in plan.steps if step.taken]
    assert taken
    sides = (aimed, aimed.accepted_on)
    won = sum(s.n_samples * (s.score_treated - s.score_base) for s in sides)
    gain = sum(s.n_samples * (s.score_single - s.score_base) for s in sides)
    assert taken[-1].objective == pytest.approx(won / gain, abs=1e-6)
    assert describe_aim(excluded) == "not aimed at (task_weight 0)"


def test_weight_of_a_task_decides_who_wins(school, tmp_path):
    def recovered(weight):
        recipe = make_recipe(
            school, tmp_path, of_a={"task_weight": weight}, guard="report"
        )
        return [task.recovered_treated for task in make_plan(plan_of(recipe)).tasks]

    little, much = recovered(0.05), recovered(20)
    assert much[0] > little[0]
    assert much[1] < little[1]


# Floors


def recover(school, plan):
    """Recovered gains of a plan's merge by whole transformers models, all rows."""
    bench = Bench.of(school, "a", "b", weight=0.3)
    names = {str(school / name): name for name in "ab"}
    factors = {
        (t.layer, names[t.model]): (1.0, 1.0, t.weight_factor) for t in plan.treatments
    }
    found = {}
    for name in "ab":
        bench.texts = {name: [[encode(make_tokenizer(), *row)] for row in ROWS[name]]}
        base = bench.score(bench.base, name).mean()
        single = bench.score(bench.tuned[name], name).mean()
        merged = bench.score(bench.merged(factors), name).mean()
        found[name] = (merged - base) / (single - base)
    return found


def test_floor_is_kept_where_the_objective_would_give_it_up(school, tmp_path):
    shared = {"accept_share": 0, "guard": "report"}
    of_a = {"task_weight": 20}
    free = make_plan(plan_of(make_recipe(school, tmp_path, of_a=of_a, **shared)))
    floor = round(free.tasks[1].recovered_treated + 0.1, 3)
    of_b = {"floor": floor}
    recipe = make_recipe(school, tmp_path, of_a=of_a, of_b=of_b, **shared)
    plan = make_plan(plan_of(recipe))
    found = recover(school, plan)
    assert found["b"] >= floor > recover(school, free)["b"]
    assert found["a"] < free.tasks[0].recovered_treated
    assert plan.tasks[1].floor_kept is True
    assert plan.tasks[0].floor_kept is None
    assert plan.tasks[1].recovered_treated == pytest.approx(found["b"], abs=1e-4)
    assert plan.steps[-1].forwards <= BUDGET


@pytest.mark.parametrize(
    ("treated", "error", "fall"),
    [(-1.5, 0.2, 0.5), (-1.5, 0.26, 0), (-0.5, 0.1, 0), (-1.5, None, 0)],
)
def test_fall_is_what_exceeds_two_standard_errors(treated, error, fall):
    scores = WholeScores(
        n_samples=4, score_merged=-1.0, score_treated=treated, change_se=error
    )
    assert scores.fall == fall


@pytest.mark.parametrize(
    ("resolve", "objective", "remedy"),
    [
        ("rules", "mean", "'resolve: measured' with a 'floor' or 'objective: worst'"),
        ("measured", "mean", "a 'floor' or 'objective: worst'"),
        ("measured", "worst", "a 'floor'"),
    ],
)
def test_remedy_for_a_task_that_pays_is_one_that_is_not_set(resolve, objective, remedy):
    settings = {"resolve": resolve, "objective": objective}
    assert _find_protection(settings) == remedy


def test_task_that_pays_for_the_others_is_named(school, tmp_path, caplog):
    shared = {"accept_share": 0, "guard": "report"}
    recipe = make_recipe(school, tmp_path, of_a={"task_weight": 20}, **shared)
    plan = make_plan(plan_of(recipe))
    falls = {task.model: task.fall for task in plan.tasks}
    for model, fall in falls.items():
        said = f"the tasks together cost '{model}' {fall:.3g} in score on the choosing"
        assert (said in caplog.text) == bool(fall)
    assert falls[str(school / "a")] == 0 < falls[str(school / "b")]
    shares = plan.tasks[1].recovered_merged, plan.tasks[1].recovered_treated
    said = "(recovered gain {:.1%} before and {:.1%} after); a 'floor' or 'objective"
    assert said.format(*shares) in caplog.text
    caplog.clear()
    again = make_recipe(school, tmp_path, of_a={"task_weight": 20}, **shared)
    make_plan(plan_of(again))  # from the cache
    assert "the tasks together cost" in caplog.text


def test_floor_out_of_reach_is_said_loudly_and_kept_in_the_plan(
    school, tmp_path, caplog
):
    recipe = make_recipe(school, tmp_path, of_b={"floor": 1.5}, measure="exact")
    plan = make_plan(plan_of(recipe))
    assert plan.tasks[1].floor_kept is False
    assert plan.tasks[1].accepted_on.floor_kept is False
    model = str(school / "b")
    for role in ("choosing", "judging"):
        said = f"the floor of '{model}' is not kept on the {role} samples"
        assert said in caplog.text
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    assert read_plan(path) == plan
    words = "floor 1.5, NOT KEPT on the choosing samples, NOT KEPT on the judging"
    out = io.StringIO()
    Console(file=out, width=240).print(render_plan(plan))
    assert words in out.getvalue()
    assert "every factor up and down (exact)" in out.getvalue()
    text = yaml.safe_dump(recipe)
    assert words in write_report(plan, recipe=text, plot=None)
    assert words in write_card_section(plan, recipe=text)
    kept = json.loads(plan_as_json(plan))["summary"]["floor_kept"]
    assert kept == {model: {"choosing": False, "judging": False}}
    caplog.clear()
    assert make_plan(plan_of(recipe)) == plan  # reused
    assert "is not kept" in caplog.text


def test_changed_floor_or_weight_is_analysed_anew(school, tmp_path):
    plans = [
        make_plan(plan_of(make_recipe(school, tmp_path, of_b=of_b)))
        for of_b in ({}, {"floor": 0.1}, {"task_weight": 2})
    ]
    assert [(p.tasks[1].task_weight, p.tasks[1].floor) for p in plans] == [
        (1, None),
        (1, 0.1),
        (2, None),
    ]


def test_export_holds_the_weights_and_asks_for_no_floor(school, tmp_path):
    recipe = make_recipe(school, tmp_path, of_b={"floor": 0.1}, guard="report")
    plan = make_plan(plan_of(recipe))
    exported = export(plan, "hi_merging", MergeOptions(quiet=True), recipe=recipe)
    assert "floor" not in exported.text
    merge = plan_of(yaml.safe_load(exported.text))
    factors = {(t.layer, t.model): t.weight_factor for t in plan.treatments}
    for tensor in merge.resolve(None):
        for model in tensor.experts:
            expected = 0.3 * factors.get((tensor.layer, str(model)), 1.0)
            assert tensor.value(model, "weight") == pytest.approx(expected)


# The guard


def judge_means(treated, **aims):
    """Judge merges of tasks that gain 4 and 0.5, see `WHOLES`."""
    aims = {m: dataclasses.replace(AIMS[m], **aims.get(m, {})) for m in AIMS}
    after = {m: np.full(2, mean) for m, mean in treated.items()}
    return judge_wholes(WHOLES, after, make_settings(), aims=aims)


def test_guard_puts_back_what_breaks_a_floor_however_much_it_wins():
    treated = {"a": -1.0, "b": 0.45}
    assert not judge_means(treated).acted
    # `b` stands at 0.5 of its gain, and falls to 0.4.
    report = judge_means(treated, b={"floor": 0.5})
    assert report.acted
    assert report.difference == pytest.approx((1 / 4 - 0.05 / 0.5) / 2)
    assert report.reason == (
        "the treated merge misses the floor of 'b' by 0.1 more than the plain one and "
        "is better by 0.075 of the gain on samples that did not choose, so the plain "
        "merge is put back"
    )
    assert not judge_means(treated, b={"floor": 0.4}).acted


def test_guard_keeps_what_mends_a_floor_though_it_is_worse():
    treated = {"a": -4.0, "b": 0.6}
    assert judge_means(treated).acted
    report = judge_means(treated, b={"floor": 0.7})
    assert not report.acted
    assert "misses the floor of 'b' by 0.2 less than the plain one" in report.reason


def test_guard_keeps_what_mends_a_floor_on_all_samples_though_these_kept_it():
    """As the climb does: else what the recipe asks for would be undone."""
    aims = {**AIMS, "b": dataclasses.replace(AIMS["b"], floor=0.4)}
    missed = {"a": WHOLES["a"], "b": whole([0.25] * 2, [0.75] * 2, [0.3] * 2)}
    kept = {"a": WHOLES["a"], "b": whole([0.25] * 2, [0.75] * 2, [0.5] * 2)}
    settings = dataclasses.replace(make_settings(), resolve="measured")
    proof = make_proof(missed, kept, settings, aims)
    plain = SideScores(*([side[m].merged for m in "ab"] for side in (missed, kept)))
    # The first task pays: -0.25 of its gain for 0.2 more of the other's.
    side = [np.full(2, -3.0), np.full(2, 0.6)]
    report = judge(proof, plain, SideScores(side, side), ["a", "b"], settings)
    assert report.difference == pytest.approx((-0.25 + 0.2) / 2)
    assert not report.acted
    assert report.reason.endswith(
        "though they proved the steps, but mends a floor on all samples, so the "
        "treated merge is kept"
    )
    # Without the floor it is put back.
    proof = make_proof(missed, kept, settings, AIMS)
    assert judge(proof, plain, SideScores(side, side), ["a", "b"], settings).acted


def test_guard_weighs_tasks_as_the_choice_does():
    treated = {"a": -3.0, "b": 0.6}  # -0.25 and +0.2 of the gains
    assert judge_means(treated).acted
    report = judge_means(treated, b={"task_weight": 3.0})
    assert report.difference == pytest.approx((-0.25 + 3 * 0.2) / 4)
    assert not report.acted
    assert judge_means(treated, b={"task_weight": 0.0}).difference == pytest.approx(
        -0.25
    )


def test_guard_judges_by_the_worst_task_where_that_was_raised():
    settings = dataclasses.replace(make_settings(), objective="worst")
    treated = {"a": np.full(2, -2.5), "b": np.full(2, 0.6)}
    report = judge_wholes(WHOLES, treated, settings)
    # Recovered 0.75 and 0.5 before, 0.625 and 0.7 after.
    assert report.difference == pytest.approx(0.125)


def test_floor_is_judged_by_the_gain_on_the_very_samples():
    """A merge at 0.6 of a small gain keeps its floor, whatever other samples gain."""
    small = whole([0.0, 0.0], [0.1, 0.1], [0.06, 0.06])
    scores = describe_whole(small, np.full(2, 0.04), 0.5)
    assert scores.floor_kept is False
    assert (
        describe_whole(small, np.full(2, 0.04), 0.5, is_plain=True).floor_kept is True
    )
    assert describe_whole(small, np.full(2, 0.04)).floor_kept is None
    no_gain = whole([0.2, 0.2], [0.1, 0.1], [0.3, 0.3])
    assert describe_whole(no_gain, np.full(2, 0.3), 0.5).floor_kept is None
