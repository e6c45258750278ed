"""Slopes by exact differences: against gradients, and whole merges of transformers."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_analysis import ROWS, Bench, encode, make_analysis, save_school, write_rows
from test_analysis import make_tokenizer as make_letters
from test_measured import plan_of

from mergekit_himerging.analysis.differences import (
    STEP,
    count_forwards,
    measure_differences,
    plan_turns,
)
from mergekit_himerging.analysis.measured import (
    FIRST_RADIUS,
    list_courses,
    pick_way,
)
from mergekit_himerging.analysis.session import make_plan, make_replay, read_data
from mergekit_himerging.analysis.slopes import measure_slopes
from mergekit_himerging.estimate import estimate_cost
from mergekit_himerging.plan import Plan, Treatment, read_plan
from mergekit_himerging.views.factors import describe_way

CPU = torch.device("cpu")

POINT = {(0, "a"): 0.7, (1, "b"): 1.4, (2, "a"): 0.0}
"""Factors off the plain merge; one of them drops a delta."""


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    return save_school(tmp_path_factory.mktemp("school"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(tmp_path / "cache"))


def measure(way, recipe, school, *, memory=2**30, **more):
    """Measure slopes at `POINT`."""
    merge = plan_of(recipe)
    plan = Plan(
        version=1,
        base=str(school / "base"),
        models=tuple(task.model for task in merge.tasks),
        n_layers=3,
        treatments=tuple(
            Treatment(layer=layer, model=str(school / e), action="set", weight_factor=f)
            for (layer, e), f in POINT.items()
        ),
    )
    return way(
        merge.resolve(None),
        merge.resolve(plan),
        read_data(merge, CPU, accept_share=0.0),
        make_replay(merge, CPU),
        device=CPU,
        memory=memory,
        cuts={},
        **more,
    )


def make_losses(school, folder, experts):
    recipe = make_analysis(school, folder, *experts, of_model={"density": 0.5})
    recipe["parameters"] = {"lambda": 1.2}
    texts = {
        name: [[encode(make_letters(), *row)] for row in ROWS[name]] for name in experts
    }
    return recipe, texts, 1.2 / len(experts)


def make_choices(school, folder, experts):
    of_model = {"metric": "accuracy", "density": 0.5}
    recipe = make_analysis(school, folder, *experts, of_model=of_model)
    recipe["parameters"] = {}
    texts = {}
    for item, name in zip(recipe["models"], experts, strict=True):
        others = [c for n in "abc" if n != name for _, c in ROWS[n]][:2]
        rows = [
            {"prompt": p + "?", "choices": [*others, c], "answer": "C"}
            for p, c in ROWS[name]
        ]
        item["parameters"]["calibration"] = write_rows(folder, name, rows)
        texts[name] = [
            [encode(make_letters(), row["prompt"], " " + o) for o in row["choices"]]
            for row in rows
        ]
    return recipe, texts, 1 / len(experts)


def brute_force(bench, texts, experts, step):
    """Whole merges with one factor up and down; the right option is the last."""

    def score(factors, expert):
        state = bench.merged({k: (1.0, 1.0, f) for k, f in factors.items()})
        values = []
        for options in texts[expert]:
            bench.texts = {expert: [[option] for option in options]}
            each = bench.score(state, expert)
            rest = np.log(np.exp(each).sum()) if len(each) > 1 else 0.0
            values.append(each[-1] - rest)
        return float(np.mean(values))

    found = np.zeros((len(experts), bench.n_layers, len(experts)))
    for (task, layer, model), _ in np.ndenumerate(found):
        key = (layer, experts[model])
        up, down = (
            score({**POINT, key: POINT.get(key, 1.0) + by}, experts[task])
            for by in (step, -step)
        )
        found[task, layer, model] = (up - down) / (2 * step)
    return found


@pytest.mark.parametrize("make", [make_losses, make_choices])
@pytest.mark.parametrize("experts", ["ab", "abc"])
def test_gradients_small_steps_and_whole_merges_agree(school, tmp_path, experts, make):
    recipe, texts, weight = make(school, tmp_path, experts)
    by_gradient = measure(measure_slopes, recipe, school)
    exact = measure(measure_differences, recipe, school, step=0.05)
    bench = Bench.of(school, *experts, density=0.5, weight=weight)
    whole = brute_force(bench, texts, list(experts), 0.05)
    assert np.abs(whole).max() > 0.05
    assert np.allclose(exact.slopes, whole, atol=1e-5)
    assert np.allclose(exact.slopes, by_gradient.slopes, atol=2e-4)
    for ours, theirs in zip(exact.scores, by_gradient.scores, strict=True):
        assert np.allclose(ours, theirs, atol=1e-6)


def test_error_against_gradients_falls_with_the_square_of_the_step(school, tmp_path):
    recipe, _, _ = make_losses(school, tmp_path, "ab")
    slopes = measure(measure_slopes, recipe, school).slopes
    errors = [
        np.abs(measure(measure_differences, recipe, school, step=h).slopes - slopes)
        for h in (0.4, 0.2, 0.1)
    ]
    for coarse, fine in pairwise(error.max() for error in errors):
        assert coarse / fine == pytest.approx(4, rel=0.1)
    # What the default step costs in exactness, of slopes up to 0.08.
    default = measure(measure_differences, recipe, school).slopes
    assert np.abs(default - slopes).max() < 0.01 * np.abs(slopes).max()


def test_little_memory_gives_the_same_slopes_in_turns(school, tmp_path):
    recipe, _, _ = make_losses(school, tmp_path, "ab")
    tasks = read_data(plan_of(recipe), CPU, accept_share=0.0)
    batches = [batch for task in tasks for batch in task.choosing.batches]
    cells = sum(batch.input_ids.numel() for batch in batches)
    one = cells * 32 * 4  # all samples under one merge, 32 float32 wide
    labels: list[str] = []
    calls: list[int] = []

    def note(count, label):
        calls.append(count)
        labels.append(label)

    whole = measure(measure_differences, recipe, school)
    turns = measure(measure_differences, recipe, school, memory=9 * one, progress=note)
    assert np.array_equal(whole.slopes, turns.slopes)
    for ours, theirs in zip(whole.scores, turns.scores, strict=True):
        assert np.array_equal(ours, theirs)
    # Two layers of four streams and the merge's own fit; the last layer is read twice.
    assert [label.removeprefix("exact slopes ") for label in labels] == [
        *(f"from layer 1, layer {layer}/3" for layer in (1, 2, 3)),
        "from layer 3, layer 3/3",
    ]
    assert sum(calls) == count_forwards(3, 2) * 3 * len(batches)
    with pytest.raises(ValueError, match=r"at least 1MiB to measure one layer's fact"):
        measure(measure_differences, recipe, school, memory=5 * one - 1)


@pytest.mark.parametrize(("n_layers", "n_models"), [(1, 1), (3, 2), (30, 3)])
def test_forwards_are_all_block_calls_over_the_layers(n_layers, n_models):
    # By hand: the merge runs every layer; streams of layer l run l and all after it.
    calls = n_layers
    for layer in range(n_layers):
        calls += 2 * n_models * len(range(layer, n_layers))
    assert count_forwards(n_layers, n_models) * n_layers == calls


@pytest.mark.parametrize(
    ("memory", "turns"),
    [
        (50, [[0], [1], [2], [3], [4]]),
        (89, [[0], [1], [2], [3], [4]]),
        (90, [[0, 1], [2, 3], [4]]),
        (10_000, [[0, 1, 2, 3, 4]]),
    ],
)
def test_turns_hold_as_many_layers_as_fit(memory, turns):
    # Streams of 10 bytes: one of the merge, four of each layer.
    found = plan_turns(10, memory, n_layers=5, n_models=2)
    assert [list(turn) for turn in found] == turns


def test_two_measurements_and_their_steps_fit_the_budget():
    replay = SimpleNamespace(blocks=[None] * 30)
    way = pick_way("exact", [None] * 2, replay, memory=0)
    assert way.measure is measure_differences
    assert way.forwards == 63
    assert way.budget == 63 + 4 + 63 + 4
    # Never more than two. Six steps until one is taken after all: two of whole models
    # and four of layers, down to a sixteenth; it grows to 0.09, which allows one more.
    courses = list_courses(way.forwards, way.budget)
    assert {n for n, _ in courses} == {1, 2}
    assert max(steps for n, steps in courses if n == 2) == 7
    assert 0 < STEP <= FIRST_RADIUS


def test_exact_way_is_merged_shown_and_within_its_budget(school, merge, tmp_path):
    recipe = make_analysis(
        school,
        tmp_path,
        "a",
        "b",
        of_model={"weight": 0.3},
        resolve="measured",
        measure="exact",
        accept_share=0,
        guard="report",
    )
    merged = merge(recipe)
    plan = read_plan(tmp_path / "plan.json")
    assert plan.settings["measure"] == "exact"
    assert plan.steps[0].taken
    assert plan.steps[0].forwards == 9 + 1
    assert plan.steps[-1].forwards <= 2 * (9 + 4)
    assert describe_way(plan) == "slopes measured by every factor up and down (exact)"
    bench = Bench.of(school, "a", "b", weight=0.3)
    names = {str(school / name): name for name in "ab"}
    for task in plan.tasks:
        score = float(bench.score(merged, names[task.model]).mean())
        assert task.score_treated == pytest.approx(score, abs=1e-5)
        assert task.recovered_treated > task.recovered_merged


def test_another_way_is_measured_anew(school, tmp_path):
    recipe = make_analysis(school, tmp_path, "a", "b", resolve="measured")
    del recipe["parameters"]["plan_out"]
    first = make_plan(plan_of(recipe))
    recipe["parameters"]["measure"] = "exact"
    assert make_plan(plan_of(recipe)).steps[0].forwards == 10
    assert first.steps[0].forwards == 5


def test_estimate_counts_the_forwards_of_exact_measurements(school, tmp_path):
    recipe = make_analysis(
        school, tmp_path, "a", "b", resolve="measured", measure="exact"
    )
    merge = plan_of(recipe)
    tasks = read_data(merge, CPU, accept_share=0.5)
    choosing = sum(len(task.choosing.batches) for task in tasks)
    accepting = sum(len(task.accepting.batches) for task in tasks)
    cost = estimate_cost(merge)
    whole_models, n_steps = 3, 7  # base, single and merge
    expected = 2 * 9 * choosing + (n_steps + whole_models) * (choosing + accepting)
    assert cost.n_block_calls == 3 * expected
    # Whole models, two measurements, seven steps, the merge itself.
    assert cost.n_passes == 1 + 2 + n_steps + 1
