"""Contributions and decisions against hand-computed cases and plain Python."""

import dataclasses
import math
import re
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mergekit_himerging.analysis.contribution import (
    Contribution,
    Decision,
    Resolution,
    Rules,
    TaskScores,
    measure_layers,
    recovered_gain,
    resolve_conflicts,
)

LIGHT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

WHOLE = [field.name for field in dataclasses.fields(TaskScores)][1:4]
LAYERED = [field.name for field in dataclasses.fields(TaskScores)][4:]
MEASURED = [
    field.name
    for field in dataclasses.fields(Contribution)
    if field.name not in ("model", "n_samples")
]


def make_scores(**changed) -> TaskScores:
    """Make the scores of two layers and two samples, worked out by hand below."""
    values = {
        "base": [1, 2],
        "single": [5, 6],
        "merged": [3, 5],
        "removed_single": [[4, 4], [5, 6]],
        "added_single": [[2, 4], [1, 1]],
        "removed_merged": [[3, 4], [1, 5]],
        "added_merged": [[1, 3], [2, 2]],
    }
    arrays = {
        name: np.array(value, dtype=np.float64)
        for name, value in (values | changed).items()
    }
    return TaskScores(model="a", **arrays)


def make_contribution(
    model: str, *, contribution, conflict, gain=1.0, conflict_se=None, n_samples=4
) -> Contribution:
    """Make a task from what the rules look at, ``[layers]`` each."""
    single = np.array(contribution, dtype=np.float64)
    gamma = np.array(conflict, dtype=np.float64)
    errors = np.zeros(len(gamma)) if conflict_se is None else np.array(conflict_se)
    return Contribution(
        model=model,
        gain=gain,
        removal_single=single / 2,
        addition_single=single / 2,
        removal_merged=(single - gamma) / 2,
        addition_merged=(single - gamma) / 2,
        contribution_single=single,
        contribution_merged=single - gamma,
        conflict=gamma,
        conflict_se=errors.astype(np.float64),
        n_samples=n_samples,
    )


def actions(resolution: Resolution) -> dict[tuple[int, str], str]:
    return {(d.layer, d.model): d.action for d in resolution.decisions}


def reasons(resolution: Resolution) -> list[str]:
    return [decision.reason for decision in resolution.decisions]


@st.composite
def whole_scores(draw, model="a", n_layers=None, positive_gain=False) -> TaskScores:
    """Whole-number scores of a power of two of samples: every mean is exact."""
    n_samples = draw(st.sampled_from([2, 4, 8] if positive_gain else [1, 2, 4, 8]))
    n_layers = n_layers or draw(st.integers(1, 4))
    # Numbers from a seed: drawing each is slow.
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    width = draw(st.integers(0, 3))

    def numbers(*shape):
        return random.integers(-width, width, shape, endpoint=True).astype(float)

    arrays = {name: numbers(n_samples) for name in WHOLE}
    arrays |= {name: numbers(n_layers, n_samples) for name in LAYERED}
    if positive_gain:
        arrays["single"] = arrays["base"] + random.integers(1, 4, n_samples)
    return TaskScores(model=model, **arrays)


def map_scores(scores: TaskScores, change) -> TaskScores:
    arrays = {name: change(getattr(scores, name)) for name in WHOLE + LAYERED}
    return dataclasses.replace(scores, **arrays)


# Measuring


def test_impacts_are_paired_means_by_hand():
    scores = make_scores()
    before = map_scores(scores, np.copy)
    measured = measure_layers(scores)
    assert measured.gain == 4  # (5-1, 6-2)
    # Layer 0: single - removed = (1, 2); added - base = (1, 2).
    # Layer 1: (0, 0); (0, -1).
    assert measured.removal_single.tolist() == [1.5, 0]
    assert measured.addition_single.tolist() == [1.5, -0.5]
    assert measured.contribution_single.tolist() == [3, -0.5]
    # Layer 0: merged - removed = (0, 1); added - base = (0, 1).
    # Layer 1: (2, 0); (1, 0).
    assert measured.removal_merged.tolist() == [0.5, 1]
    assert measured.addition_merged.tolist() == [0.5, 0.5]
    assert measured.contribution_merged.tolist() == [1, 1.5]
    # Per sample, layer 0: (2, 4) - (0, 2) = (2, 2). Layer 1: (0, -1) - (3, 0) =
    # (-3, -1), of standard deviation sqrt(2) and standard error 1. Unpaired, layer 0
    # would have a standard error too.
    assert measured.conflict.tolist() == [2, -2]
    assert measured.conflict_se == pytest.approx([0, 1], abs=1e-15)
    assert (measured.model, measured.n_samples, measured.n_layers) == ("a", 2, 2)
    for name in WHOLE + LAYERED:
        assert np.array_equal(getattr(scores, name), getattr(before, name))


def test_one_sample_has_standard_error_zero():
    scores = map_scores(make_scores(), lambda array: array[..., :1])
    measured = measure_layers(scores)
    assert measured.conflict.tolist() == [2, -3]
    assert measured.conflict_se.tolist() == [0, 0]


def measure_plainly(scores: TaskScores, number=float) -> dict[str, list]:
    """Measure sample by sample, by the formulas, in plain Python numbers."""
    base, single, merged = (
        [number(v) for v in getattr(scores, name).tolist()] for name in WHOLE
    )
    measured = {name: [] for name in MEASURED}
    measured["gain"] = statistics.mean(single) - statistics.mean(base)
    for layer in range(len(scores.removed_single)):
        removed_s, added_s, removed_m, added_m = (
            [number(v) for v in getattr(scores, name)[layer].tolist()]
            for name in LAYERED
        )
        alpha_s = statistics.mean(single) - statistics.mean(removed_s)
        beta_s = statistics.mean(added_s) - statistics.mean(base)
        alpha_m = statistics.mean(merged) - statistics.mean(removed_m)
        beta_m = statistics.mean(added_m) - statistics.mean(base)
        paired = [
            (single[i] - removed_s[i] + added_s[i] - base[i])
            - (merged[i] - removed_m[i] + added_m[i] - base[i])
            for i in range(len(base))
        ]
        spread = statistics.stdev(paired) if len(base) > 1 else 0
        row = {
            "removal_single": alpha_s,
            "addition_single": beta_s,
            "removal_merged": alpha_m,
            "addition_merged": beta_m,
            "contribution_single": alpha_s + beta_s,
            "contribution_merged": alpha_m + beta_m,
            "conflict": alpha_s + beta_s - alpha_m - beta_m,
            "conflict_se": float(spread) / math.sqrt(len(base)),
        }
        for name, value in row.items():
            measured[name].append(value)
    return measured


@LIGHT
@given(
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0, 1e-3, 1, 1e3]),
    n_layers=st.integers(1, 4),
    n_samples=st.integers(1, 7),
)
def test_measuring_equals_plain_python(seed, spread, n_layers, n_samples):
    random = np.random.default_rng(seed)
    shapes = dict.fromkeys(WHOLE, n_samples)
    shapes |= dict.fromkeys(LAYERED, (n_layers, n_samples))
    scores = TaskScores(
        model="a",
        **{name: random.normal(0, spread, shape) for name, shape in shapes.items()},
    )
    measured = measure_layers(scores)
    for name, expected in measure_plainly(scores).items():
        assert getattr(measured, name) == pytest.approx(expected, abs=1e-12 * spread), (
            name
        )


@LIGHT
@given(scores=whole_scores())
def test_a_merge_that_equals_the_single_model_has_no_conflict(scores):
    same = dataclasses.replace(
        scores,
        merged=scores.single,
        removed_merged=scores.removed_single,
        added_merged=scores.added_single,
    )
    measured = measure_layers(same)
    assert not measured.conflict.any()
    assert not measured.conflict_se.any()
    decisions = resolve_conflicts([measured], Rules(compare="raw")).decisions
    assert {decision.action for decision in decisions} == {"keep"}


@LIGHT
@given(scores=whole_scores(), shift=st.integers(-1000, 1000))
def test_shifting_all_scores_changes_nothing(scores, shift):
    measured = measure_layers(scores)
    shifted = measure_layers(map_scores(scores, lambda array: array + shift))
    for name in MEASURED:
        assert np.array_equal(getattr(shifted, name), getattr(measured, name)), name


def test_layers_that_cancel_in_whole_numbers_have_a_conflict_of_exactly_zero():
    # (1 - 2/3 + 1/3) - (2/3 - 1/3 + 1/3): differences of rounded means would leave
    # 1e-16 and count as a conflict.
    scores = TaskScores(
        model="a",
        base=np.array([0.0, 0, 0]),
        single=np.array([1.0, 1, 1]),
        merged=np.array([1.0, 1, 0]),
        removed_single=np.array([[1.0, 1, 0]]),
        added_single=np.array([[1.0, 0, 0]]),
        removed_merged=np.array([[1.0, 0, 0]]),
        added_merged=np.array([[1.0, 0, 0]]),
    )
    assert measure_layers(scores).conflict.tolist() == [0]


# Resolving, two tasks


def two_tasks(**options) -> list[Contribution]:
    """Make one layer of each case; in units of gain ``b`` is half of what it shows.

    ====== =================== ===================== ============= ==================
    layer  conflict a, b       contribution a, b     sum raw       sum in gains
    ====== =================== ===================== ============= ==================
    0      -0.5, -0.25         0.5, 1                -0.75         -0.625
    1      0.25, -0.5          0.5, 1                -0.25         0
    2      0.125, 0.5          0.75, 1               0.625         0.375
    ====== =================== ===================== ============= ==================
    """
    a = {"contribution": [0.5, 0.5, 0.75], "conflict": [-0.5, 0.25, 0.125]}
    b = {"contribution": [1, 1, 1], "conflict": [-0.25, -0.5, 0.5]}
    return [
        make_contribution("a", **a, gain=1.0, **options),
        make_contribution("b", **b, gain=2.0, **options),
    ]


def test_each_case_of_two_tasks_in_units_of_gain():
    resolution = resolve_conflicts(two_tasks(), Rules())
    assert resolution.order == (2, 1, 0)
    assert [
        (d.layer, d.model, d.action, d.density_factor, d.scale_factor)
        for d in resolution.decisions
    ] == [
        (0, "a", "keep", 1, 1),
        (0, "b", "keep", 1, 1),
        (1, "a", "shrink", 0.5, 0.5),
        (1, "b", "keep", 1, 1),
        (2, "a", "keep", 1, 1),  # 0.75 of its gain against 1/2 of b's
        (2, "b", "drop", 1, 1),
    ]
    assert reasons(resolution) == [
        "no task loses here (conflict -0.5 and -0.125 of the gain)",
        "no task loses here (conflict -0.5 and -0.125 of the gain)",
        "1 of 2 tasks loses here (conflict 0.25 and -0.25 of the gain); its own does "
        "(0.25)",
        "1 of 2 tasks loses here (conflict 0.25 and -0.25 of the gain); its own does "
        "not (-0.25)",
        "both tasks lose here (conflict 0.125 and 0.25 of the gain); contributes most "
        "(0.75)",
        "both tasks lose here (conflict 0.125 and 0.25 of the gain); contributes less "
        "than 'a' (0.5 against 0.75)",
    ]


def test_raw_comparison_takes_contributions_as_they_are():
    resolution = resolve_conflicts(two_tasks(), Rules(compare="raw"))
    assert actions(resolution)[2, "a"] == "drop"  # 0.75 against 1
    assert actions(resolution)[2, "b"] == "keep"
    assert reasons(resolution)[4] == (
        "both tasks lose here (conflict 0.125 and 0.5); contributes less than 'b' "
        "(0.75 against 1)"
    )


def test_raw_comparison_orders_layers_by_raw_sums():
    # Raw: 1.5 and 2.5; by gains 1 and 4: 1.125 and 1.
    tasks = [
        make_contribution("a", contribution=[1, 1], conflict=[1, 0.5], gain=1.0),
        make_contribution("b", contribution=[1, 1], conflict=[0.5, 2], gain=4.0),
    ]
    assert resolve_conflicts(tasks, Rules(compare="raw")).order == (1, 0)
    assert resolve_conflicts(tasks, Rules(compare="gain")).order == (0, 1)


def test_raw_comparison_needs_no_gain():
    task = make_contribution("a", contribution=[1], conflict=[1], gain=-1.0)
    resolve_conflicts([task], Rules(compare="raw"))


def test_interfering_shrinks_the_task_that_is_not_weakened():
    rules = Rules(mixed="interfering", layer_density=0.25, layer_scale=0.75)
    resolution = resolve_conflicts(two_tasks(), rules)
    assert [
        (d.model, d.action, d.density_factor, d.scale_factor)
        for d in resolution.decisions
        if d.layer == 1
    ] == [("a", "keep", 1, 1), ("b", "shrink", 0.25, 0.75)]
    others = {key: a for key, a in actions(resolution).items() if key[0] != 1}
    degraded = actions(resolve_conflicts(two_tasks(), Rules()))
    assert others == {key: a for key, a in degraded.items() if key[0] != 1}


@pytest.mark.parametrize(
    ("max_layers", "treated"), [(0, []), (1, [2]), (2, [1, 2]), (9, [1, 2])]
)
def test_only_the_first_layers_of_the_order_are_treated(max_layers, treated):
    resolution = resolve_conflicts(two_tasks(), Rules(max_layers=max_layers))
    assert resolution.order == (2, 1, 0)
    changed = {key[0] for key, a in actions(resolution).items() if a != "keep"}
    assert sorted(changed) == treated


def test_a_layer_beyond_max_layers_says_so():
    resolution = resolve_conflicts(two_tasks(), Rules(max_layers=2))
    assert reasons(resolution)[0] == (
        "ranks 3 of 3 by summed conflict (-0.625 of the gains), beyond max_layers 2"
    )
    raw = resolve_conflicts(two_tasks(), Rules(max_layers=2, compare="raw"))
    assert reasons(raw)[0] == (
        "ranks 3 of 3 by summed conflict (-0.75), beyond max_layers 2"
    )


def test_confidence_counts_conflicts_above_so_many_standard_errors():
    # Standard error 0.125: layer 1 has a at 0.25, layer 2 a at 0.125 and b at 0.5.
    tasks = two_tasks(conflict_se=[0.125] * 3)

    def changed(confidence):
        resolution = resolve_conflicts(tasks, Rules(confidence=confidence))
        assert resolution.order == (2, 1, 0)  # the plain sums, whatever the confidence
        return {key: a for key, a in actions(resolution).items() if a != "keep"}

    assert changed(0.5) == {(1, "a"): "shrink", (2, "b"): "drop"}
    # At exactly one standard error a conflict does not count.
    assert changed(1.0) == {(1, "a"): "shrink", (2, "b"): "shrink"}
    assert changed(2.0) == {(2, "b"): "shrink"}
    assert changed(4.0) == {}


def test_reasons_under_confidence_show_the_standard_errors():
    tasks = two_tasks(conflict_se=[0.125] * 3)
    resolution = resolve_conflicts(tasks, Rules(confidence=1.0))
    assert reasons(resolution)[5] == (
        "1 of 2 tasks loses here by more than 1 standard errors "
        "(conflict 0.125 ± 0.125 and 0.25 ± 0.0625 of the gain); its own does (0.25)"
    )


def test_of_equal_contributions_the_model_that_sorts_first_stays():
    tasks = [
        make_contribution(model, contribution=[1], conflict=[0.5])
        for model in ("c", "b", "a")
    ]
    resolution = resolve_conflicts(tasks, Rules())
    assert actions(resolution) == {(0, "a"): "keep", (0, "b"): "drop", (0, "c"): "drop"}
    assert reasons(resolution)[1].endswith(
        "; contributes as much as 'a' (1 against 1), which sorts first"
    )


def test_layers_of_equal_summed_conflict_keep_their_order():
    tasks = [
        make_contribution("a", contribution=[0] * 4, conflict=[0, 1, 0.5, 0.25]),
        make_contribution("b", contribution=[0] * 4, conflict=[1, 0, 0.5, 1]),
    ]
    assert resolve_conflicts(tasks, Rules()).order == (3, 0, 1, 2)


def test_one_model_is_kept_wherever_it_stands():
    task = make_contribution("a", contribution=[1, -1, 0], conflict=[1, 2, -1])
    resolution = resolve_conflicts([task], Rules())
    assert resolution.order == (1, 0, 2)
    assert set(actions(resolution).values()) == {"keep"}
    assert reasons(resolution) == [
        "the only task loses here (conflict 1 of the gain); contributes most (1)",
        "the only task loses here (conflict 2 of the gain); contributes most (-1)",
        "no task loses here (conflict -1 of the gain)",
    ]


# Resolving, three tasks


def three_tasks() -> list[Contribution]:
    """Three layers: all lose, two lose, none loses (zero is no loss); gains of 1."""
    return [
        make_contribution("a", contribution=[1, 1, 1], conflict=[0.5, 0.5, 0]),
        make_contribution("b", contribution=[3, 1, 1], conflict=[0.5, -1, -1]),
        make_contribution("c", contribution=[2, 1, 1], conflict=[0.5, 0.25, -0.0]),
    ]


@pytest.mark.parametrize(
    ("mixed", "in_layer_1"),
    [
        ("degraded", ["shrink", "keep", "shrink"]),
        ("interfering", ["keep", "shrink", "keep"]),
    ],
)
def test_each_case_of_three_tasks(mixed, in_layer_1):
    resolution = resolve_conflicts(three_tasks(), Rules(mixed=mixed))
    assert resolution.order == (0, 1, 2)  # 1.5, -0.25, -1
    assert [d.action for d in resolution.decisions] == [
        *["drop", "keep", "drop"],
        *in_layer_1,
        *["keep", "keep", "keep"],
    ]


def test_reasons_of_three_tasks_name_all_of_them():
    told = reasons(resolve_conflicts(three_tasks(), Rules()))
    assert told[2] == (
        "all 3 tasks lose here (conflict 0.5, 0.5 and 0.5 of the gain); contributes "
        "less than 'b' (2 against 3)"
    )
    assert told[4] == (
        "2 of 3 tasks lose here (conflict 0.5, -1 and 0.25 of the gain); its own does "
        "not (-1)"
    )
    assert told[8] == "no task loses here (conflict 0, -1 and 0 of the gain)"


# Resolving, any tasks


def resolve_plainly(tasks: list[dict], rules: Rules) -> tuple[list[int], dict]:
    """Resolve in exact fractions, layer by layer; tasks in any order."""
    n_layers = len(tasks[0]["conflict"])
    divisor = {
        task["model"]: Fraction(task["gain"]) if rules.compare == "gain" else 1
        for task in tasks
    }
    remaining = list(range(n_layers))
    order = []
    while remaining:
        first = remaining[0]
        for layer in remaining:
            totals = [
                sum(Fraction(t["conflict"][k]) / divisor[t["model"]] for t in tasks)
                for k in (layer, first)
            ]
            if totals[0] > totals[1]:
                first = layer
        remaining.remove(first)
        order.append(first)
    changed = {}
    for layer in order[: rules.max_layers]:
        losers = {
            task["model"]
            for task in tasks
            if task["conflict"][layer] > rules.confidence * task["conflict_se"][layer]
        }
        everyone = {task["model"] for task in tasks}
        if losers == everyone:
            worth = {
                t["model"]: Fraction(t["contribution_single"][layer])
                / divisor[t["model"]]
                for t in tasks
            }
            top = min(m for m in worth if worth[m] == max(worth.values()))
            changed |= {(layer, m): ("drop", 1, 1) for m in everyone - {top}}
        elif losers:
            treated = losers if rules.mixed == "degraded" else everyone - losers
            factors = (rules.layer_density, rules.layer_scale)
            changed |= {(layer, m): ("shrink", *factors) for m in treated}
    return order, changed


def changed_by(resolution: Resolution) -> dict:
    return {
        (d.layer, d.model): (d.action, d.density_factor, d.scale_factor)
        for d in resolution.decisions
        if d.action != "keep"
    }


@st.composite
def any_rules(draw, **fixed) -> Rules:
    options = {
        "mixed": st.sampled_from(["degraded", "interfering"]),
        "layer_density": st.sampled_from([0.0, 0.25, 0.5]),
        "layer_scale": st.sampled_from([0.0, 0.5, 1.0]),
        "max_layers": st.none() | st.integers(0, 5),
        "confidence": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "compare": st.sampled_from(["gain", "raw"]),
    }
    return Rules(**{name: draw(v) for name, v in options.items()} | fixed)


@st.composite
def any_tasks(draw) -> list[Contribution]:
    """One to four tasks of few different numbers, all exact: ties are common."""
    n_layers = draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))

    def quarters(low, high):
        return random.integers(low, high, n_layers, endpoint=True) / 4

    models = draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True))
    return [
        make_contribution(
            model,
            gain=draw(st.sampled_from([0.5, 1.0, 2.0, 4.0])),
            contribution=quarters(-3, 3),
            conflict=quarters(-2, 6),
            conflict_se=quarters(0, 2),
        )
        for model in models
    ]


@LIGHT
@given(tasks=any_tasks(), rules=any_rules())
def test_resolving_equals_plain_python(tasks, rules):
    resolution = resolve_conflicts(tasks, rules)
    plain = [
        {
            "model": task.model,
            "gain": task.gain,
            "contribution_single": task.contribution_single.tolist(),
            "conflict": task.conflict.tolist(),
            "conflict_se": task.conflict_se.tolist(),
        }
        for task in tasks
    ]
    order, changed = resolve_plainly(plain, rules)
    assert list(resolution.order) == order
    assert changed_by(resolution) == changed


@LIGHT
@given(data=st.data(), n_tasks=st.integers(1, 3), n_layers=st.integers(1, 4))
def test_scores_to_decisions_equals_plain_python(data, n_tasks, n_layers):
    rules = data.draw(any_rules(compare="raw", confidence=0.0))
    tasks = [data.draw(whole_scores(m, n_layers)) for m in "abc"[:n_tasks]]
    resolution = resolve_conflicts([measure_layers(task) for task in tasks], rules)
    plain = [measure_plainly(task, Fraction) | {"model": task.model} for task in tasks]
    order, changed = resolve_plainly(plain, rules)
    assert list(resolution.order) == order
    assert changed_by(resolution) == changed


@LIGHT
@given(tasks=any_tasks(), rules=any_rules(), data=st.data())
def test_the_order_of_tasks_does_not_matter(tasks, rules, data):
    shuffled = data.draw(st.permutations(tasks))
    assert resolve_conflicts(shuffled, rules) == resolve_conflicts(tasks, rules)


@LIGHT
@given(data=st.data(), n_layers=st.integers(1, 4), power=st.integers(-20, 20))
def test_scaling_the_scores_of_one_task_changes_no_decision(data, n_layers, power):
    # A power of two, so that rounding cannot part ties.
    rules = data.draw(any_rules(compare="gain"))
    a, b = (data.draw(whole_scores(m, n_layers, positive_gain=True)) for m in "ab")
    scaled = map_scores(a, lambda array: array * 2.0**power)
    tasks = [measure_layers(a), measure_layers(b)]
    scaled_tasks = [measure_layers(scaled), measure_layers(b)]
    assert resolve_conflicts(scaled_tasks, rules) == resolve_conflicts(tasks, rules)


# Recovered gain


@pytest.mark.parametrize(
    ("merged", "base", "single", "recovered"),
    [
        (2.0, 1.0, 3.0, 0.5),
        (3.0, 1.0, 3.0, 1.0),
        (1.0, 1.0, 3.0, 0.0),
        (0.0, 1.0, 3.0, -0.5),
        (-2.5, -4.0, -2.0, 0.75),  # losses, negated
        (2.0, 1.0, 1.0, None),
        (2.0, 1.0, 0.5, None),
    ],
)
def test_recovered_gain_is_the_share_of_the_single_models_gain(
    merged, base, single, recovered
):
    assert recovered_gain(merged, base, single) == recovered


def test_recovered_gain_refuses_scores_that_are_not_finite():
    with pytest.raises(
        ValueError, match=r"^scores must be finite, got merged 1, base nan, single 2$"
    ):
        recovered_gain(1.0, math.nan, 2.0)


# What records refuse


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"single": [1, 2, 3]}, "single must have shape (2,), got (3,) ('a')"),
        ({"base": 1}, "base must have shape (1,), got () ('a')"),
        ({"base": [[1, 2]]}, "base must have shape (1,), got (1, 2) ('a')"),
        (
            {"removed_single": [1, 2]},
            "removed_single must have shape (2, 2), got (2,) ('a')",
        ),
        (
            {"added_merged": [[1, 2]]},
            "added_merged must have shape (2, 2), got (1, 2) ('a')",
        ),
        (
            {"removed_merged": [[1, 2, 3], [1, 2, 3]]},
            "removed_merged must have shape (2, 2), got (2, 3) ('a')",
        ),
        ({"base": []}, "base must not be empty, got shape (0,) ('a')"),
        (
            {"removed_single": np.zeros((0, 2))},
            "removed_single must not be empty, got shape (0, 2) ('a')",
        ),
        ({"merged": [0, math.inf]}, "merged must be finite, got inf at [1] ('a')"),
        (
            {"added_single": [[1, 2], [math.nan, 1]]},
            "added_single must be finite, got nan at [1, 0] ('a')",
        ),
    ],
)
def test_scores_must_agree_in_shape_and_be_finite(changed, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_scores(**changed)


def test_scores_must_be_float64():
    with pytest.raises(
        ValueError, match=r"^base must be float64, got float32 \('a'\)$"
    ):
        map_scores(make_scores(), lambda array: array.astype(np.float32))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gain": math.nan}, "gain must be finite, got nan ('a')"),
        ({"n_samples": 0}, "n_samples must be at least 1, got 0 ('a')"),
        (
            {"conflict_se": np.array([-1.0])},
            "conflict_se must be at least 0, got -1 ('a')",
        ),
        (
            {"removal_single": np.array([1.0, 2.0])},
            "removal_single must have shape (1,), got (2,) ('a')",
        ),
        (
            {"conflict": np.array([math.inf])},
            "conflict must be finite, got inf at [0] ('a')",
        ),
    ],
)
def test_contributions_must_be_whole(changed, message):
    task = make_contribution("a", contribution=[1], conflict=[1])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dataclasses.replace(task, **changed)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"mixed": "both"},
            "mixed must be one of 'degraded', 'interfering', got 'both'",
        ),
        ({"compare": "z"}, "compare must be one of 'gain', 'raw', got 'z'"),
        ({"layer_density": 50.0}, "layer_density must be in [0, 1], got 50"),
        ({"layer_scale": math.nan}, "layer_scale must be in [0, 1], got nan"),
        ({"max_layers": -1}, "max_layers must be at least 0, got -1"),
        (
            {"confidence": -0.5},
            "confidence must be a finite number of standard errors, at least 0, "
            "got -0.5",
        ),
        (
            {"confidence": math.inf},
            "confidence must be a finite number of standard errors, at least 0, "
            "got inf",
        ),
    ],
)
def test_rules_must_lie_in_range(option, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Rules(**option)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer": -1}, "layer must be at least 0, got -1"),
        (
            {"action": "cut"},
            "action must be one of 'keep', 'shrink', 'drop', got 'cut'",
        ),
        (
            {"action": "drop", "density_factor": 0.0},
            "action 'drop' must have all factors at 1, got density_factor 0, "
            "scale_factor 1",
        ),
        (
            {"action": "shrink", "scale_factor": 2.0},
            "scale_factor must be in [0, 1], got 2",
        ),
    ],
)
def test_decisions_must_fit_their_action(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Decision(**{"layer": 0, "model": "a", "action": "keep"} | fields)


def test_a_resolution_names_every_layer_and_model_once():
    a, b = Decision(0, "a", "keep"), Decision(0, "b", "keep")
    with pytest.raises(
        ValueError, match=r"^order must name each of 1 layers once, got \[1\]$"
    ):
        Resolution(order=(1,), decisions=(a, b))
    for wrong in [(b, a), (a, a), (a, Decision(1, "a", "keep"))]:
        with pytest.raises(
            ValueError, match=r"^decisions must name each of 1 layers with each of the"
        ):
            Resolution(order=(0,), decisions=wrong)


# What resolving refuses


@pytest.mark.parametrize(
    ("tasks", "rules", "message"),
    [
        ([], Rules(), "contributions must have at least one task, got none"),
        (
            [make_contribution("a", contribution=[1], conflict=[1])] * 2,
            Rules(),
            "contributions must have distinct models, got ['a', 'a']",
        ),
        (
            [
                make_contribution("b", contribution=[1], conflict=[1]),
                make_contribution("a", contribution=[1, 2], conflict=[1, 2]),
            ],
            Rules(),
            "contributions must have the same number of layers, got 2 ('a') and 1 "
            "('b')",
        ),
        (
            [make_contribution("x", contribution=[1], conflict=[1], gain=-0.01)],
            Rules(),
            "model 'x' must beat the base on its own calibration data to compare "
            "gains, got gain -0.01; mend its calibration data or set compare: raw",
        ),
        (
            [make_contribution("x", contribution=[1], conflict=[1], gain=0.0)],
            Rules(),
            "model 'x' must beat the base on its own calibration data to compare "
            "gains, got gain 0; mend its calibration data or set compare: raw",
        ),
        (
            [make_contribution("x", contribution=[1], conflict=[1], n_samples=1)],
            Rules(confidence=1.5),
            "model 'x' must have at least two calibration samples with confidence "
            "1.5, got 1; add samples or set confidence: 0",
        ),
    ],
)
def test_tasks_that_cannot_be_compared_are_refused(tasks, rules, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        resolve_conflicts(tasks, rules)
