"""Treatments chosen by measurement: slopes against differences, steps against proof."""

import io
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from rich.console import Console
from test_analysis import ROWS, Bench, encode, make_analysis, save_school, write_rows
from test_analysis import make_tokenizer as make_letters
from test_recipe import WITH_DATA, problems_of

from mergekit_himerging import tasks as planned_tasks
from mergekit_himerging.analysis import measured, run, session
from mergekit_himerging.analysis.calibration import NotANumberError
from mergekit_himerging.analysis.measured import (
    BUDGET,
    MAX_FACTOR,
    Way,
    choose_factors,
    list_courses,
)
from mergekit_himerging.analysis.objective import Objective
from mergekit_himerging.analysis.proof import Proof, SideScores
from mergekit_himerging.analysis.session import make_plan, make_replay, read_data
from mergekit_himerging.analysis.slopes import (
    FORWARDS,
    Slopes,
    measure_slopes,
    split_tasks,
    split_turns,
)
from mergekit_himerging.estimate import estimate_cost
from mergekit_himerging.plan import read_plan
from mergekit_himerging.planning import plan_recipe
from mergekit_himerging.scope import find_scope_cuts
from mergekit_himerging.views.markdown import write_report
from mergekit_himerging.views.plot import draw_plan
from mergekit_himerging.views.table import plan_as_json, render_plan

EPSILON = 0.02


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    return save_school(tmp_path_factory.mktemp("school"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(tmp_path / "cache"))


def plan_of(recipe):
    config = MergeConfiguration.model_validate(recipe)
    return plan_recipe(config, MergeOptions(quiet=True))


def slopes_of(recipe, plan=None, memory=2**30, **more):
    merge = plan_of(recipe)
    cpu = torch.device("cpu")
    return measure_slopes(
        merge.resolve(None),
        merge.resolve(plan),
        read_data(merge, cpu, accept_share=0.0),
        make_replay(merge, cpu),
        device=cpu,
        memory=memory,
        cuts={},
        **more,
    )


def differences(bench, score):
    """Slopes by brute force: whole merges with one factor up and down."""
    experts = sorted(bench.tuned)
    found = np.zeros((len(experts), bench.n_layers, len(experts)))
    for task, own in enumerate(experts):
        for layer in range(bench.n_layers):
            for number, expert in enumerate(experts):
                up, down = (
                    score(bench.merged({(layer, expert): (1.0, 1.0, 1 + by)}), own)
                    for by in (EPSILON, -EPSILON)
                )
                found[task, layer, number] = (up - down) / (2 * EPSILON)
    return found


@pytest.mark.parametrize("experts", ["ab", "abc"])
def test_slopes_equal_differences_of_whole_merges(school, tmp_path, experts):
    recipe = make_analysis(school, tmp_path, *experts, of_model={"density": 0.5})
    recipe["parameters"] = {"lambda": 1.2}
    found = slopes_of(recipe)
    weight = 1.2 / len(experts)
    bench = Bench.of(school, *experts, density=0.5, weight=weight)
    expected = differences(bench, lambda state, e: float(bench.score(state, e).mean()))
    assert np.abs(expected).max() > 0.05
    assert np.allclose(found.slopes, expected, atol=2e-3)
    for scores, expert in zip(found.scores, sorted(experts), strict=True):
        brute = bench.score(bench.merged(), expert)
        assert sorted(scores) == pytest.approx(sorted(brute), abs=1e-5)


def make_choices(school, tmp_path):
    """Make a recipe of two choice tasks, and what scores them smoothly."""
    recipe = make_analysis(school, tmp_path, "a", "b", of_model={"metric": "accuracy"})
    texts = {}
    for item, name in zip(recipe["models"], "ab", strict=True):
        others = [completion for _, completion in ROWS["b"]]
        rows = [
            {
                "prompt": p,
                "choices": [c, *[other for other in others if other != c][:2]],
                "answer": 0,
            }
            for p, c in ROWS[name]
        ]
        item["parameters"]["calibration"] = write_rows(tmp_path, name, rows)
        texts[name] = [
            [encode(make_letters(), row["prompt"], " " + o) for o in row["choices"]]
            for row in rows
        ]
    bench = Bench.of(school, "a", "b")

    def score(state, expert):
        values = []
        for options in texts[expert]:
            bench.texts = {expert: [[option] for option in options]}
            means = bench.score(state, expert)
            values.append(means[0] - np.log(np.exp(means).sum()))
        return float(np.mean(values))

    return recipe, bench, score


def test_slopes_of_accuracy_are_those_of_the_right_option_among_all(school, tmp_path):
    recipe, bench, score = make_choices(school, tmp_path)
    recipe["parameters"] = {}
    found = slopes_of(recipe)
    assert np.allclose(found.slopes, differences(bench, score), atol=2e-3)
    assert all(set(scores) <= {0.0, 1.0} for scores in found.scores)


@pytest.mark.parametrize("measure", ["first_order", "exact"])
def test_slopes_of_accuracy_are_chosen_by_in_its_own_unit(school, tmp_path, measure):
    """Beside a task scored by loss, a nat of one is no share of right answers."""
    recipe, bench, score = make_choices(school, tmp_path)
    recipe["parameters"] = {"resolve": "measured", "accept_share": 0}
    recipe["parameters"]["measure"] = measure
    plan = make_plan(plan_of(recipe))
    slopes = differences(bench, score)
    for number, task in enumerate(plan.tasks):
        name = "ab"[number]
        gain = task.score_single - task.score_base
        smooth_gain = score(bench.tuned[name], name) - score(bench.base, name)
        assert gain > 0.2
        assert abs(gain / smooth_gain - 1) > 0.2
        found = np.array([slope.slope for slope in task.slopes]).reshape(-1, 2)
        expected = slopes[number] * gain / smooth_gain
        atol = 2e-3 if measure == "first_order" else 0.05
        assert np.allclose(found, expected, atol=atol)


@pytest.mark.parametrize("accept_share", [0, 0.5])
def test_measured_merge_is_better_and_exactly_what_the_plan_says(
    school, merge, tmp_path, accept_share
):
    recipe = make_analysis(
        school,
        tmp_path,
        "a",
        "b",
        of_model={"weight": 0.3},  # so that there is something to be won
        resolve="measured",
        accept_share=accept_share,
        guard="report",
    )
    merged = merge(recipe)
    plan = read_plan(tmp_path / "plan.json")
    assert plan.steps[0].taken
    assert plan.steps[-1].forwards <= BUDGET
    bench = Bench.of(school, "a", "b", weight=0.3)
    names = {str(school / name): name for name in "ab"}
    factors = {
        (t.layer, names[t.model]): (1.0, 1.0, t.weight_factor) for t in plan.treatments
    }
    expected = bench.merged(factors)
    assert all(torch.allclose(merged[n], expected[n], atol=1e-6) for n in expected)
    gained, apart, recovered = [], [], []
    for task in plan.tasks:
        name = names[task.model]
        assert task.layers == ()
        assert len(task.slopes) == 2 * plan.n_layers
        sides = [side for side in (task, task.accepted_on) if side.n_samples]
        counts = [side.n_samples for side in sides]
        scores = bench.score(merged, name)
        changes = [float(s) for s in scores - bench.score(bench.merged(), name)]
        assert sum(counts) == len(changes)
        treated = np.average([side.score_treated for side in sides], weights=counts)
        assert treated == pytest.approx(float(scores.mean()), abs=1e-5)
        if not accept_share:
            error = statistics.stdev(changes) / len(changes) ** 0.5
            assert task.change_se == pytest.approx(error, abs=1e-5)
        # Everything is a share of the gain on all samples.
        gains = [side.score_single - side.score_base for side in sides]
        gain = np.average(gains, weights=counts)
        gained.append(float(np.mean(changes)) / gain)
        low = np.average([side.score_base for side in sides], weights=counts)
        recovered.append((treated - low) / gain)
        apart.append((sides[-1].score_treated - sides[-1].score_merged) / gain)
    assert np.mean(gained) > 0.02
    taken = [step for step in plan.steps if step.taken]
    assert np.mean(gained) == pytest.approx(sum(s.improvement for s in taken), abs=1e-4)
    assert taken[-1].objective == pytest.approx(np.mean(recovered), abs=1e-4)
    if accept_share:
        won = sum(step.improvement_apart for step in taken)
        assert np.mean(apart) == pytest.approx(won, abs=1e-4)
    else:
        assert {step.improvement_apart for step in plan.steps} == {None}
    again = dict(recipe, parameters={"plan": str(tmp_path / "plan.json")})
    same = merge(again, out=tmp_path / "again")
    assert all(torch.equal(merged[n], same[n]) for n in merged)


def test_measured_plan_is_shown_in_every_view(school, tmp_path):
    recipe = make_analysis(
        school, tmp_path, "a", "b", of_model={"weight": 0.3}, resolve="measured"
    )
    del recipe["parameters"]["plan_out"]
    plan = make_plan(plan_of(recipe))
    out = io.StringIO()
    Console(file=out, width=240).print(render_plan(plan))
    text = out.getvalue()
    changed = [t for t in plan.treatments if t.action == "set"]
    assert plan.steps
    report = write_report(plan, recipe=yaml.safe_dump(recipe), plot=None)
    cost = f"in {plan.steps[-1].forwards} forward passes over the choosing samples"
    assert changed
    for view in (text, report):
        assert all(f" {t.weight_factor:g} " in view for t in changed)
        assert cost in view
        for step in plan.steps:
            better = f"{step.improvement:+.4f} ± {step.improvement_se:.4f}"
            assert better in view
    draw_plan(plan, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").stat().st_size > 1000
    assert plan_as_json(plan)


class Hill:
    """Scores of one task that fall off around a peak; samples may disagree.

    Those apart may have a peak of their own.
    """

    def __init__(self, peak, noise=0.0, apart=None):
        self.peak = np.array(peak)
        self.apart = self.peak if apart is None else np.array(apart)
        self.noise = noise
        self.cost = 0

    def around(self, peak, factors):
        top = -float(((factors - peak) ** 2).sum())
        spread = self.noise * float(np.abs(factors - 1).sum())
        return [np.array([top - spread, top, top + spread])]

    def score(self, factors):
        self.cost += 1
        sides = (self.around(peak, factors) for peak in (self.peak, self.apart))
        return SideScores(*sides)

    def measure(self, factors):
        self.cost += FORWARDS
        scores = self.around(self.peak, factors)
        return Slopes(scores, -2 * (factors - self.peak)[None])


def climb(hill, least=()):
    objective = Objective("mean", [np.zeros(3)], [1.0], least=least)
    together = Objective("mean", [np.zeros(6)], [1.0], least=least)
    n_layers, n_models = hill.peak.shape
    return choose_factors(
        Proof(objective, together, objective),
        hill.measure,
        hill.score,
        plain=hill.around(hill.apart, np.ones_like(hill.peak)),
        n_layers=n_layers,
        n_models=n_models,
        forwards=FORWARDS,
        budget=BUDGET,
    )


def test_step_that_samples_apart_speak_against_is_not_taken():
    # By much better where slopes are taken, so better on all samples together.
    choice = climb(Hill([[4.0, 1.0]], apart=[[0.9, 1.0]]))
    first = choice.steps[0]
    assert first.improvement > first.improvement_se
    assert first.improvement_apart < 0
    assert not any(step.taken for step in choice.steps)
    assert (choice.factors == 1).all()


def test_step_is_taken_as_far_as_samples_apart_go_along():
    choice = climb(Hill([[2.0, 1.0]], apart=[[1.3, 1.0]]))
    assert 1.3 < choice.factors[0, 0] < 1.6  # 1.6 is as good there as 1
    for step in choice.steps:
        assert step.taken == (step.improvement_apart >= 0)


def test_step_that_mends_a_floor_may_be_worse_apart():
    # The choosing samples miss a floor of -0.1, so do all together; those apart not.
    hill = Hill([[1.5, 1.0]], apart=[[0.9, 1.0]])
    assert not any(step.taken for step in climb(hill).steps)
    choice = climb(Hill([[1.5, 1.0]], apart=[[0.9, 1.0]]), least=[-0.1])
    taken = [step for step in choice.steps if step.taken]
    assert taken[0].improvement_apart < 0
    assert not any(step.breaks_floor for step in taken)
    shortfalls = [0.03, *(step.shortfall for step in taken)]  # the plain merge's first
    assert shortfalls == sorted(shortfalls, reverse=True)
    assert len(set(shortfalls)) == len(shortfalls)


class Pair:
    """Two tasks over two factors: the first rises with both, the second falls with one.

    The second stands at 0 where the factors are 1, on either side's samples a little
    off that.
    """

    def __init__(self, choosing, accepting):
        self.offsets = (choosing, accepting)

    def sides(self, factors):
        first, second = factors[0]
        return [
            [np.full(3, first + second - 2), np.full(3, 1 - first + offset)]
            for offset in self.offsets
        ]

    def score(self, factors):
        return SideScores(*self.sides(factors))

    def measure(self, factors):
        slopes = np.array([[[1.0, 1.0]], [[-1.0, 0.0]]])
        return Slopes(self.sides(factors)[0], slopes)

    def climb(self, floor):
        """Climb with the first task three times as heavy and a floor of the second."""
        more = ([1.0, 1.0], [3.0, 1.0], [None, floor])
        side = Objective("mean", [np.zeros(3)] * 2, *more)
        return choose_factors(
            Proof(side, Objective("mean", [np.zeros(6)] * 2, *more), side),
            self.measure,
            self.score,
            plain=self.sides(np.ones((1, 2)))[1],
            n_layers=1,
            n_models=2,
            forwards=FORWARDS,
            budget=BUDGET,
        )


def test_floor_that_the_choosing_samples_alone_miss_stops_no_step():
    """Mending it there wins nothing on all samples, by which steps are proved."""
    choice = Pair(choosing=-0.01, accepting=0.05).climb(floor=0.0)
    assert choice.steps[0].taken
    # It gets no worse there, and the other factor rises.
    assert choice.factors.tolist() == [[1.0, 2.0]]


def test_floor_that_all_samples_together_miss_is_mended():
    """Though the samples that give the slopes keep it."""
    choice = Pair(choosing=0.01, accepting=-0.3).climb(floor=0.0)
    first = choice.steps[0]
    assert (first.taken, first.mends_floor) == (True, True)
    assert first.objective < -0.05  # paid for by the first task
    assert choice.factors[0, 0] < 0.8


def test_floor_that_is_missed_by_less_than_the_noise_stops_no_step():
    """It makes a step's error no larger than what the step mends of it."""
    hill = Hill([[1.6, 1.0]], noise=0.15)
    assert climb(hill).steps[0].taken
    choice = climb(hill, least=[-0.3599])  # the plain merge has -0.36
    first = choice.steps[0]
    assert (first.taken, first.mends_floor) == (True, True)
    assert first.improvement == pytest.approx(climb(hill).steps[0].improvement + 0.01)


def test_merge_whose_scores_are_not_finite_is_no_step(caplog):
    class Overflow(Hill):
        def score(self, factors):
            found = super().score(factors)
            if np.abs(factors - 1).max() > 0.3:
                found.choosing[0][1] = -np.inf
            return found

    hill = Overflow([[1.6, 1.0]])
    choice = climb(hill)
    assert choice.steps[0].radius == 0.25
    assert choice.steps[0].taken
    assert choice.steps[-1].forwards < choice.forwards == hill.cost <= BUDGET
    assert "scores that are not finite, so it is not taken" in caplog.text
    # The later steps lead there too: the nearest that does not is kept.
    assert choice.factors[0, 0] == 1.25


def walk(taken, forwards, budget):
    """Count measurements and steps of a climb that is told which steps to take."""
    counts = [0, 0]

    class Told(Proof):
        def report_step(self, *scores, **facts):
            n = counts[1] - 1
            report = Proof.report_step(self, *scores, **facts)
            return report.model_copy(update={"taken": n in taken})

    def measure(factors):
        counts[0] += 1
        return Slopes([np.zeros(2)], (1.01 - factors)[None])  # never flat

    def score(factors):
        counts[1] += 1
        return SideScores([np.zeros(2)], [np.zeros(2)])

    side = Objective("mean", [np.zeros(2)], [1.0])
    choose_factors(
        Told(side, Objective("mean", [np.zeros(4)], [1.0]), side),
        measure,
        score,
        plain=[np.zeros(2)],
        n_layers=1,
        n_models=2,
        forwards=forwards,
        budget=budget,
    )
    return tuple(counts)


def walk_all(forwards, budget):
    """Walk every climb there is."""
    walked, todo = set(), [()]
    while todo:  # every set of steps, by the last that is taken
        taken = todo.pop()
        counts = walk(taken, forwards, budget)
        walked.add(counts)
        todo += [(*taken, n) for n in range(max(taken, default=-1) + 1, counts[1])]
    return walked


@pytest.mark.parametrize(
    ("forwards", "budget"), [(FORWARDS, BUDGET), (FORWARDS + 1, BUDGET), (9, 26)]
)
def test_courses_are_all_that_proofs_may_lead_a_climb_on(forwards, budget):
    walked = walk_all(forwards, budget)
    assert len(walked) > 3
    assert walked <= list_courses(forwards, budget)
    way = Way(measure_slopes, forwards, budget)
    for sides in ((3, 3), (1, 0), (2, 40)):
        costs = {m * forwards * sides[0] + n * sum(sides): (m, n) for m, n in walked}
        found = way.count_most(*sides)
        assert costs[max(costs)] == found


def test_whole_models_are_moved_before_their_layers():
    choice = climb(Hill([[1.7, 0.8], [1.5, 0.6], [1.6, 0.7]]))
    moves = [step.moves for step in choice.steps]
    assert moves[0] == "models"
    assert choice.steps[0].taken
    assert set(moves[1:]) == {"layers"}
    assert np.abs(choice.factors - [1.6, 0.7]).max() < 0.15
    # One that is not proved is tried once more, half as long.
    choice = climb(Hill([[1.1, 1.0], [1.0, 1.0]], noise=50.0))
    tries = [(step.moves, step.radius) for step in choice.steps]
    assert tries[:3] == [("models", 0.5), ("models", 0.25), ("layers", 0.5)]


def test_steps_go_up_within_the_budget_and_leave_flat_layers_alone():
    hill = Hill([[1.6, 1.0], [0.4, 1.0], [1.0, 1.0]])  # whole models stand well
    choice = climb(hill)
    assert hill.cost <= BUDGET
    assert (choice.factors[:, 1] == 1).all()
    assert choice.factors[2, 0] == 1
    assert np.abs(choice.factors - hill.peak).max() < 0.2
    values = [step.objective for step in choice.steps if step.taken]
    assert values == sorted(values)
    assert choice.steps[-1].forwards == choice.forwards == hill.cost


def test_step_of_a_whole_model_leaves_layers_alone_that_have_nothing_of_it():
    choice = climb(Hill([[1.7, 0.8], [1.0, 0.6], [1.6, 0.7]]))
    assert (choice.steps[0].moves, choice.steps[0].taken) == ("models", True)
    assert choice.factors[1, 0] == 1
    assert (np.delete(choice.factors[:, 0], 1) > 1.2).all()


@pytest.mark.parametrize("measure", ["first_order", "exact"])
def test_layers_that_lack_a_model_have_no_factor_for_it(
    school, merge, tmp_path, caplog, measure
):
    recipe = make_analysis(
        school,
        tmp_path,
        "a",
        "b",
        of_model={"weight": 0.3},
        resolve="measured",
        measure=measure,
        guard="report",
    )
    base, a, b = {"model": str(school / "base")}, *recipe.pop("models")
    recipe["slices"] = [
        {"sources": [{**source, "layer_range": layers} for source in sources]}
        for sources, layers in (((base, a, b), [0, 2]), ((base, a), [2, 3]))
    ]
    merged = merge(recipe)
    plan = read_plan(tmp_path / "plan.json")
    by_pair = {(t.layer, t.model): t for t in plan.treatments}
    lacking = by_pair[2, b["model"]]
    assert (lacking.action, lacking.weight_factor) == ("keep", 1)
    assert by_pair[0, b["model"]].action == by_pair[2, a["model"]].action == "set"

    named = {**recipe, "parameters": {"plan": str(tmp_path / "plan.json")}}
    same = merge(named, out=tmp_path / "same")
    assert all(torch.equal(merged[n], same[n]) for n in merged)
    assert "do nothing" not in caplog.text
    # One that is edited so that it asks for the impossible.
    asked = lacking.model_copy(update={"action": "set", "weight_factor": 1.5})
    others = [t for t in plan.treatments if t is not lacking]
    edited = plan.model_copy(update={"treatments": (*others, asked)})
    (tmp_path / "plan.json").write_text(edited.to_json(), encoding="utf-8")
    same = merge(named, out=tmp_path / "edited")
    assert all(torch.equal(merged[n], same[n]) for n in merged)
    assert "treats 1 pairs of layer and model that the recipe does not" in caplog.text
    assert f"the first layer 2 of '{b['model']}': these treatments" in caplog.text


def test_factors_keep_within_their_bounds():
    choice = climb(Hill([[9.0, -9.0]]))
    assert choice.factors.tolist() == [[MAX_FACTOR, 0.0]]


def test_step_within_its_error_is_not_taken():
    choice = climb(Hill([[1.1, 0.9]], noise=50.0))
    assert (choice.factors == 1).all()
    assert not any(step.taken for step in choice.steps)
    assert choice.steps[0].radius == 2 * choice.steps[1].radius


def test_flat_merge_stays_as_it_is():
    choice = climb(Hill([[1.0, 1.0]]))
    assert (choice.factors == 1).all()
    assert choice.steps == ()


def test_worst_task_pulls_most():
    base = [np.zeros(2), np.zeros(2)]
    scores = [np.array([0.2, 0.2]), np.array([1.8, 1.8])]
    weights = Objective("worst", base, [1.0, 2.0]).weigh_tasks(scores)
    # Recovered 0.2 and 0.9; weights by each task's mean score, so over its gain.
    share = np.exp(-20 * 0.7)
    assert weights == pytest.approx([1 / (1 + share), share / (1 + share) / 2])
    even = Objective("mean", base, [1.0, 2.0]).weigh_tasks(scores)
    assert even == pytest.approx([0.5, 0.25])


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        (
            "resolve: measured, rounds: 2, mixed: degraded",
            "['mixed', 'rounds'] must come with 'resolve: rules', got 'resolve: "
            "measured', which has no use for it; remove one of the two",
        ),
        (
            "confidence: 2",
            "['confidence'] must come with 'resolve: rules', got none, so 'resolve: "
            "measured', which has no use for it; add 'resolve: rules', or remove it",
        ),
        (
            "normalize: true",
            "'resolve: measured' must keep normalize at False, got True (parameters); "
            "add 'resolve: rules', or remove it",
        ),
        (
            "resolve: measured, consensus: sum",
            "'resolve: measured' must keep consensus at none, got sum (parameters); "
            "remove one of the two",
        ),
        (
            "resolve: measured, normalize: true",
            "'resolve: measured' must keep normalize at False, got True (parameters); "
            "remove one of the two",
        ),
        (
            "preset: paper, resolve: measured",
            "'preset: paper' must keep resolve at rules, got measured; "
            "remove one of the two",
        ),
    ],
)
def test_what_does_not_go_with_measuring_is_named(setting, problem):
    assert problems_of(WITH_DATA % setting) == [problem]


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_slopes_are_the_same_where_batches_go_back_in_turns(
    school, tmp_path, monkeypatch, metric
):
    monkeypatch.setitem(session.BATCH_CELLS, "cpu", 24)
    recipe = make_analysis(school, tmp_path, "a", "b", of_model={"metric": metric})
    recipe["parameters"] = {}
    if metric == "accuracy":  # options of one question lie in different batches
        for item, name in zip(recipe["models"], "ab", strict=True):
            rows = [
                {"prompt": p, "choices": [c, "or", "not so at all"], "answer": 0}
                for p, c in ROWS[name]
            ]
            item["parameters"]["calibration"] = write_rows(tmp_path, name, rows)
    merge = plan_of(recipe)
    tasks = read_data(merge, torch.device("cpu"), accept_share=0.0)
    replay = make_replay(merge, torch.device("cpu"))
    cells = [b.input_ids.numel() for task in tasks for b in task.choosing.batches]
    cell_bytes = 4 * replay.width
    least = (3 * sum(cells) + 3 * max(cells)) * cell_bytes
    turns = split_tasks(tasks, replay, least)
    assert len(cells) >= len(turns) > 2
    told = []
    found = slopes_of(recipe, memory=least, progress=lambda n, label: told.append(n))
    whole = slopes_of(recipe)
    assert np.allclose(found.slopes, whole.slopes, atol=1e-6)
    assert np.abs(whole.slopes).max() > 0.01
    for some, others in zip(found.scores, whole.scores, strict=True):
        assert np.allclose(some, others, atol=1e-6)
    # There, again but for the last of 3 blocks, and back.
    assert sum(told) == (3 + 2 + 3 * 3) * len(cells)
    with pytest.raises(ValueError, match="analysis_memory must be at least"):
        slopes_of(recipe, memory=least - 1)


@pytest.mark.parametrize(
    ("memory", "turns"),
    [
        (12 * 70, [range(4)]),  # (10 + 2) times all 70 cells
        (12 * 70 - 1, [range(3), range(3, 4)]),  # 629 besides 210, for 600 at most
        (210 + 300, [range(2), range(2, 3), range(3, 4)]),
        (210 + 299, None),
    ],
)
def test_turns_take_as_many_batches_as_fit(memory, turns):
    batches = [
        SimpleNamespace(input_ids=torch.zeros(1, n, dtype=torch.long))
        for n in (10, 20, 30, 10)
    ]
    shared = {"n_layers": 10, "cell_bytes": 4, "memory": 4 * memory}
    if turns is None:
        with pytest.raises(ValueError, match="must be at least 1MiB"):
            split_turns(batches, **shared)
    else:
        assert split_turns(batches, **shared) == turns


def test_turns_are_counted_in_the_cost_of_every_step(school, tmp_path, monkeypatch):
    monkeypatch.setitem(session.BATCH_CELLS, "cpu", 24)
    recipe = make_analysis(
        school, tmp_path, "a", "b", resolve="measured", of_model={"weight": 0.3}
    )
    del recipe["parameters"]["plan_out"]
    merge = plan_of(recipe)
    at_once = make_plan(merge)
    replay = make_replay(merge, torch.device("cpu"))
    tasks = read_data(merge, torch.device("cpu"), accept_share=0.5)
    cells = [b.input_ids.numel() for task in tasks for b in task.choosing.batches]
    memory = 5 * sum(cells) * 4 * replay.width
    monkeypatch.setitem(recipe["parameters"], "analysis_memory", memory - 1)
    merge = plan_of(recipe)
    tasks = read_data(merge, torch.device("cpu"), accept_share=0.5)
    cost = estimate_cost(merge)
    plan = make_plan(merge)
    assert [step.forwards for step in at_once.steps][:2] == [5, 10]
    assert [step.forwards for step in plan.steps][:2] == [6, 12]
    assert plan.steps[0].objective == pytest.approx(at_once.steps[0].objective)
    assert plan.steps[-1].forwards <= BUDGET
    n_apart = sum(len(task.accepting.batches) for task in tasks)
    # The costliest climb, and three whole models; of 3 blocks.
    walked = walk_all(FORWARDS + 1, BUDGET)
    most = max((m * 5 + n) * len(cells) + n * n_apart for m, n in walked)
    assert cost.n_block_calls == 3 * (most + 3 * (len(cells) + n_apart))


def test_too_little_memory_says_how_much_is_needed(school, tmp_path):
    recipe = make_analysis(school, tmp_path, "a", "b")
    merge = plan_of(recipe)
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"must be at least 1MiB .*got 0\.0\d+MiB"):
        measure_slopes(
            merge.resolve(None),
            merge.resolve(None),
            read_data(merge, cpu, accept_share=0.0),
            make_replay(merge, cpu),
            device=cpu,
            memory=20_000,
            cuts={},
        )


def test_estimate_counts_the_forwards_that_measuring_may_take(school, tmp_path):
    recipe = make_analysis(school, tmp_path, "a", "b", resolve="measured")
    merge = plan_of(recipe)
    tasks = read_data(merge, torch.device("cpu"), accept_share=0.5)
    choosing = sum(len(task.choosing.batches) for task in tasks)
    accepting = sum(len(task.accepting.batches) for task in tasks)
    cost = estimate_cost(merge)
    whole_models = 3  # base, single and merge
    walked = walk_all(FORWARDS, BUDGET)
    most = max((m * FORWARDS + n) * choosing + n * accepting for m, n in walked)
    expected = most + whole_models * (choosing + accepting)
    assert cost.n_block_calls == 3 * expected


def test_wide_scope_reads_the_tensors_once_for_all_factors(
    school, tmp_path, monkeypatch
):
    asked = []

    def find(*arguments):
        asked.append(arguments)
        return find_scope_cuts(*arguments)

    monkeypatch.setattr(planned_tasks, "find_scope_cuts", find)
    recipe = make_analysis(
        school,
        tmp_path,
        "a",
        "b",
        of_model={"weight": 0.3, "density": 0.5},
        resolve="measured",
        scope="layer",
    )
    del recipe["parameters"]["plan_out"]
    merge = plan_of(recipe)
    plan = make_plan(merge)
    assert any(step.taken for step in plan.steps)
    merge.resolve(plan)
    assert len(asked) == 1
    treatment = plan.treatments[0].model_copy(update={"density_factor": 0.5})
    merge.resolve(plan.model_copy(update={"treatments": (treatment,)}))
    assert len(asked) == 2


def test_slopes_that_are_not_finite_name_the_task(school, tmp_path, monkeypatch):
    def overflow(*arguments, **more):
        found = measure_slopes(*arguments, **more)
        found.slopes[1, 0, 0] = np.inf
        return found

    monkeypatch.setattr(measured, "measure_slopes", overflow)
    recipe = make_analysis(school, tmp_path, "a", "b", resolve="measured")
    del recipe["parameters"]["plan_out"]
    with pytest.raises(
        ValueError, match=r"slopes of '.*/b' must be finite, got 1 that"
    ):
        make_plan(plan_of(recipe))


def test_merge_that_gives_nan_is_tried_shorter(school, tmp_path, monkeypatch, caplog):
    tried = []

    def overflow(*arguments):
        tried.append(arguments)
        if len(tried) == 1:
            raise NotANumberError("NaN")
        return score_treated(*arguments)

    score_treated = run._score_treated
    monkeypatch.setattr(run, "_score_treated", overflow)
    recipe = make_analysis(
        school, tmp_path, "a", "b", resolve="measured", of_model={"weight": 0.3}
    )
    del recipe["parameters"]["plan_out"]
    plan = make_plan(plan_of(recipe))
    assert plan.steps[0].radius == 0.25
    assert plan.steps[0].forwards == FORWARDS + 2
    assert plan.choice_forwards <= BUDGET
    assert "scores that are not finite" in caplog.text
