"""What is decided from scores: rounds, the guard, and what is reported of both."""

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from conftest import make_recipe
from test_analysis import (
    Bench,
    actions_of,
    assert_close,
    assert_same,
    factors_of,
    make_analysis,
    read_merged,
    run_loud,
    save_school,
)

from mergekit_himerging.analysis import judging
from mergekit_himerging.analysis.contribution import Decision, Resolution, Rules
from mergekit_himerging.analysis.judging import Whole, describe_whole, mean_score
from mergekit_himerging.analysis.proof import SideScores
from mergekit_himerging.analysis.run import _put_back, treat_decisions
from mergekit_himerging.analysis.settings import AnalysisSettings
from mergekit_himerging.plan import Treatment, read_plan
from mergekit_himerging.recipe import TaskSettings


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_school(tmp_path_factory.mktemp("school"))


def make_settings(
    *,
    compare: Literal["gain", "raw"] = "gain",
    guard: Literal["keep_better", "report"] = "keep_better",
) -> AnalysisSettings:
    return AnalysisSettings(
        rules=Rules(compare=compare),
        rounds=1,
        reference="full",
        guard=guard,
        memory=1,
    )


def whole(base: list[float], single: list[float], merged: list[float]) -> Whole:
    return Whole(*(np.array(scores) for scores in (base, single, merged)))


# Task `a` gains 4 and stands at 3 of them; `b` gains 0.5 and stands at 0.25.
WHOLES = {
    "a": whole([-6.0, -4.0], [-1.0, -1.0], [-2.0, -2.0]),
    "b": whole([0.25, 0.25], [0.75, 0.75], [0.5, 0.5]),
}


AIMS = {model: TaskSettings(model, "data.jsonl", "loss", 2) for model in "ab"}


def judge(wholes, treated, settings, *, aims=AIMS, choosing=None):
    """Judge as if samples like these had chosen, or others that the merge leaves."""
    first = choosing or wholes
    proof = judging.make_proof(first, wholes, settings, aims)
    plain = [[w.merged for w in side.values()] for side in (first, wholes)]
    after = [treated[model] for model in wholes]
    return judging.judge(
        proof,
        SideScores(*plain),
        SideScores(plain[0] if choosing else after, after),
        list(wholes),
        settings,
    )


def test_guard_weighs_tasks_by_their_gains():
    treated = {"a": np.array([-4.0, -2.0]), "b": np.array([0.75, 0.75])}
    report = judge(WHOLES, treated, make_settings())
    # `a` loses 1 of 4, `b` wins 0.25 of 0.5: (-0.25 + 0.5) / 2.
    assert report.difference == pytest.approx(0.125)
    assert (report.acted, report.unit) == (False, "gain")
    assert report.reason == (
        "the treated merge is better by 0.125 of the gain on samples that did not "
        "choose, so the treated merge is kept"
    )
    report = judge(WHOLES, treated, make_settings(compare="raw"))
    # -1 + 0.25, halved: in raw scores the same treatment is worse.
    assert report.difference == pytest.approx(-0.375)
    assert (report.acted, report.unit) == (True, "raw")
    assert report.reason == (
        "the treated merge is worse by 0.375 in score on samples that did not "
        "choose, so the plain merge is put back"
    )


def test_guard_that_reports_keeps_what_is_worse():
    treated = {"a": np.array([-3.0, -3.0]), "b": np.array([0.5, 0.5])}
    report = judge(WHOLES, treated, make_settings(guard="report"))
    assert report.difference == pytest.approx(-0.125)
    assert (report.acted, report.setting) == (False, "report")
    assert report.reason.endswith(
        "worse by 0.125 of the gain on samples that did not "
        "choose, so the treated merge is kept"
    )


def test_guard_does_not_act_without_a_difference():
    treated = {model: w.merged for model, w in WHOLES.items()}
    report = judge(WHOLES, treated, make_settings())
    assert (report.acted, report.difference) == (False, 0.0)


def test_guard_does_not_call_equal_merges_better():
    treated = {model: w.merged for model, w in WHOLES.items()}
    assert "better" not in judge(WHOLES, treated, make_settings()).reason


def test_guard_without_samples_says_so():
    none = whole([], [], [])
    report = judge(
        {**WHOLES, "b": none},
        {"a": np.array([-9.0, -9.0]), "b": np.array([])},
        make_settings(),
        choosing=WHOLES,
    )
    assert (report.acted, report.difference) == (False, None)
    assert report.reason == (
        "no samples were left to judge on: raise samples or accept_share"
    )


@pytest.mark.parametrize(("single", "gain"), [(0.25, 0.25), (-1.0, 0.5)])
def test_guard_divides_by_the_gains_on_all_samples(single, gain):
    """On few samples a gain may vanish; where it does on all, those that chose tell."""
    wholes = {**WHOLES, "b": whole([0.5], [single], [0.25])}
    treated = {"a": np.array([-2.0, -1.0]), "b": np.array([0.0])}
    report = judge(wholes, treated, make_settings(), choosing=WHOLES)
    assert report.difference == pytest.approx((0.5 / 4.0 - 0.25 / gain) / 2)
    assert report.unit == "gain"


def test_guard_says_so_where_its_samples_proved_the_steps():
    treated = {"a": np.array([-4.0, -2.0]), "b": np.array([0.75, 0.75])}
    settings = dataclasses.replace(make_settings(), resolve="measured")
    assert judge(WHOLES, treated, settings).reason == (
        "the treated merge is better by 0.125 of the gain on samples that gave no "
        "slopes, though they proved the steps, so the treated merge is kept"
    )


def test_gain_of_one_is_a_gain():
    """As when the base has no answer right and the expert every one."""
    wholes = {"a": whole([0.0], [1.0], [0.5])}
    report = judge(wholes, {"a": np.array([0.25])}, make_settings())
    assert report.difference == pytest.approx(-0.25)
    assert report.unit == "gain"


@pytest.mark.parametrize(
    ("compare", "expected"),
    [("gain", (-2 / 3.25 + 0.6 / 0.5) / 2), ("raw", (-2 + 0.6) / 2)],
)
def test_mean_score_is_in_the_unit_that_tasks_are_compared_in(compare, expected):
    wholes = {"a": whole([-4.25], [-1.0], [-2.0]), "b": WHOLES["b"]}
    treated = {"a": np.array([-2.0]), "b": np.array([0.5, 0.7])}
    score = mean_score(wholes, treated, make_settings(compare=compare))
    assert score == pytest.approx(expected)


@pytest.mark.parametrize(
    ("single", "recovered"),
    [([-1.0, -1.0], (0.75, 0.5)), ([-6.0, -4.0], (None, None)), ([-9, 0], (6, 4))],
)
def test_recovered_gain_is_a_share_of_the_single_models(single, recovered):
    scores = describe_whole(
        whole([-6.0, -4.0], single, [-2.0, -2.0]), np.array([-4.0, -2.0])
    )
    assert (scores.n_samples, scores.score_merged, scores.score_treated) == (2, -2, -3)
    assert (scores.recovered_merged, scores.recovered_treated) == recovered


def test_no_samples_leave_no_scores():
    scores = describe_whole(whole([], [], []), np.array([]))
    assert scores.model_dump(exclude_none=True) == {"n_samples": 0}


def decide(**actions: str) -> Resolution:
    return Resolution(
        order=(0,),
        decisions=tuple(
            Decision(
                0,
                model,
                action,  # type: ignore[arg-type]
                *((0.5, 0.25) if action == "shrink" else (1, 1)),
                reason="new",
            )
            for model, action in sorted(actions.items())
        ),
    )


@pytest.mark.parametrize("before", ["keep", "shrink", "drop"])
@pytest.mark.parametrize("after", ["keep", "shrink", "drop"])
def test_later_round_strengthens_a_treatment_or_leaves_it(before, after):
    first = treat_decisions(decide(a=before, b="keep"), {})
    earlier = {(t.layer, t.model): t for t in first}
    treatment, other = treat_decisions(
        decide(a=after, b="keep"), earlier, "in round 2 "
    )
    order = ["keep", "shrink", "drop"]
    assert treatment.action == max(before, after, key=order.index)
    assert other == first[1]
    is_stronger = order.index(after) > order.index(before)
    assert is_stronger or treatment == first[0]
    assert treatment.reason.startswith("in round 2 ") == is_stronger
    assert treatment.factors.weight == (0 if treatment.action == "drop" else 1)


def test_what_is_put_back_says_what_was_proposed():
    keep = Treatment(layer=0, model="a", action="keep", reason="no task loses here")
    drop = Treatment(
        layer=0, model="b", action="drop", weight_factor=0.0, reason="both tasks lose"
    )
    kept, back = _put_back([keep, drop])
    assert kept == keep
    assert (back.action, back.weight_factor) == ("keep", 1.0)
    assert back.reason == (
        "guard put the plain merge back; proposed was drop: both tasks lose"
    )


# The guard, from files to the merge

# With these, what one task needs is taken out for the other one's sake.
HARMFUL = {"mixed": "degraded", "layer_scale": 0, "layer_density": 0}


@pytest.fixture(scope="module")
def plain(school, tmp_path_factory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("plain")
    assert run_loud(folder, make_recipe(school, "a", "b")).exit_code == 0
    return read_merged(folder)


def test_guard_puts_the_plain_merge_back_bit_for_bit(school, plain, tmp_path):
    result = run_loud(tmp_path, make_analysis(school, tmp_path, "a", "b", **HARMFUL))
    assert result.exit_code == 0, result.output
    plan = read_plan(tmp_path / "plan.json")
    assert plan.guard.acted
    assert plan.guard.difference < 0
    assert "so the plain merge is put back" in result.output
    assert_same(read_merged(tmp_path), plain)
    assert set(actions_of(plan).values()) == {"keep"}
    words = "guard put the plain merge back; proposed was drop: both tasks lose here"
    assert any(t.reason.startswith(words) for t in plan.treatments)
    for task in plan.tasks:
        assert task.accepted_on.score_treated != task.accepted_on.score_merged


def test_guard_that_reports_merges_what_it_warns_of(school, plain, tmp_path):
    recipe = make_analysis(school, tmp_path, "a", "b", **HARMFUL, guard="report")
    result = run_loud(tmp_path, recipe)
    plan = read_plan(tmp_path / "plan.json")
    assert plan.guard.difference < 0
    assert not plan.guard.acted
    assert "so the treated merge is kept" in result.output
    bench = Bench.of(school, "a", "b")
    treated = bench.merged(factors_of(actions_of(plan), shrink=(0, 0, 1)))
    assert_close(read_merged(tmp_path), treated)
    assert not all(torch.equal(treated[name], plain[name]) for name in plain)


def test_guard_without_accepting_samples_keeps_the_treatments(school, tmp_path):
    recipe = make_analysis(school, tmp_path, "a", "b", **HARMFUL, accept_share=0)
    result = run_loud(tmp_path, recipe)
    assert "no samples were left to judge on" in result.output
    assert "4 samples choose, 0 accept" in result.output
    plan = read_plan(tmp_path / "plan.json")
    assert (plan.guard.acted, plan.guard.difference) == (False, None)
    assert "drop" in actions_of(plan).values()
    assert [task.accepted_on.n_samples for task in plan.tasks] == [0, 0]


# Rounds, from files to the plan


def rounds_by_hand(
    bench: Bench, n_rounds: int, shrink: tuple[float, float, float], **rules: bool
) -> list[dict[tuple[int, str], str]]:
    """Analyse the treated merge again while the mean score rises.

    Returns:
        The actions after each round that was accepted.
    """
    order = ["keep", "shrink", "drop"]
    experts = list(bench.tuned)

    def mean_score(actions: dict[tuple[int, str], str]) -> float:
        merged = bench.merged(factors_of(actions, shrink))
        return float(np.mean([bench.score(merged, e).mean() for e in experts]))

    done = [bench.resolve({e: bench.measure(e) for e in experts}, **rules)]
    for _ in range(1, n_rounds):
        factors = factors_of(done[-1], shrink)
        again = bench.resolve({e: bench.measure(e, factors) for e in experts}, **rules)
        more = {p: max(a, again[p], key=order.index) for p, a in done[-1].items()}
        if more == done[-1] or mean_score(more) <= mean_score(done[-1]):
            break
        done.append(more)
    return done


SCALE_ONLY = {"mixed": "interfering", "layer_density": 1}
ROUNDS = {
    "the second is better": (
        "ab",
        {"weight": 0.8, "reference": "same_weight", "layer_scale": 0.6},
        {"weight": 0.8, "same_weight": True},
        True,
    ),
    "the second is better, and would weaken others": (
        "abc",
        {"weight": 1.3, "layer_scale": 0.8},
        {"weight": 1.3},
        True,
    ),
    "the second is worse": (
        "abc",
        {"weight": 1.0, "layer_scale": 0.8},
        {"weight": 1.0},
        False,
    ),
    "the second is worse than single models that stay as they are": (
        "abc",
        {"weight": 0.8, "reference": "same_weight", "layer_scale": 0.6},
        {"weight": 0.8, "same_weight": True},
        False,
    ),
}


@pytest.mark.parametrize(
    ("experts", "parameters", "of_bench", "goes_on"),
    ROUNDS.values(),
    ids=ROUNDS.keys(),
)
def test_rounds_go_on_while_the_mean_score_rises(
    school, tmp_path, experts, parameters, of_bench, goes_on
):
    recipe = make_analysis(
        school,
        tmp_path,
        *experts,
        **{"accept_share": 0, "compare": "raw", "rounds": 2},
        **SCALE_ONLY,
        **parameters,
    )
    result = run_loud(tmp_path, recipe, "--quiet")
    assert result.exit_code == 0, result.output
    bench = Bench.of(school, *experts, **of_bench)
    shrink = (1.0, parameters["layer_scale"], 1.0)
    by_hand = rounds_by_hand(bench, 2, shrink, raw=True, interfering=True)
    assert (len(by_hand) > 1) == goes_on
    assert actions_of(read_plan(tmp_path / "plan.json")) == by_hand[-1]
