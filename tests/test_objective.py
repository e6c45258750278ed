"""What merges are compared by: weights, floors, and steps that keep to them."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergekit_himerging.analysis.measured import BUDGET, choose_factors
from mergekit_himerging.analysis.objective import PENALTY, Objective
from mergekit_himerging.analysis.proof import Proof, SideScores
from mergekit_himerging.analysis.slopes import FORWARDS, Slopes

ZEROS = [np.zeros(2), np.zeros(2)]


def at(*means):
    """Scores of two samples each, around these means."""
    return [np.array([mean - 0.1, mean + 0.1]) for mean in means]


def test_mean_is_weighted():
    objective = Objective("mean", ZEROS, [1.0, 2.0], [3.0, 1.0])
    # Recovered 0.5 and 0.9, three to one.
    assert objective.value(at(0.5, 1.8)) == pytest.approx(0.6)
    assert objective.weigh_tasks(at(0.5, 1.8)) == pytest.approx([0.75, 0.125])


@pytest.mark.parametrize(("kind", "value"), [("mean", 0.6), ("worst", 0.5)])
def test_task_of_weight_0_does_not_count_where_it_is_worst(kind, value):
    objective = Objective(kind, [np.zeros(2)] * 3, [1.0] * 3, [1.0, 0.0, 1.0])
    scores = at(0.5, -50.0, 0.7)
    assert objective.value(scores) == pytest.approx(value)
    assert objective.weigh_tasks(scores)[1] == 0
    louder = [*at(0.5), np.array([-900.0, 900.0]), *at(0.7)]
    plain = at(0.4, 0.4, 0.4)
    quiet_se = objective.difference_se(scores, plain)
    assert objective.difference_se(louder, plain) == pytest.approx(quiet_se)


def test_floor_that_is_missed_costs_more_than_all_else_wins():
    objective = Objective("mean", ZEROS, [1.0, 2.0], least=[0.8, None])
    missed, kept = at(0.79, 10.0), at(0.8, 0.0)
    assert objective.shortfalls(missed) == pytest.approx([0.01, 0.0])
    assert objective.shortfalls(kept).tolist() == [0.0, 0.0]
    assert objective.value(missed) > objective.value(kept)
    # A floor counts in shares of the gain, also of a task that is not aimed at.
    excluded = Objective("mean", ZEROS, [1.0, 2.0], [1.0, 0.0], [None, 1.8])
    assert excluded.merit(at(0.5, 1.4)) == pytest.approx(0.5 - PENALTY * 0.2)


@pytest.mark.parametrize(
    ("before", "after", "breaks"),
    [(0.9, 0.8, False), (0.9, 0.79, True), (0.7, 0.69, True), (0.7, 0.75, False)],
)
def test_floor_is_broken_by_falling_below_it_or_further(before, after, breaks):
    objective = Objective("mean", ZEROS, [1.0, 1.0], least=[0.8, None])
    assert objective.breaks_floor(at(after, 5.0), at(before, 0.0)) == breaks


@pytest.mark.parametrize("first", [0.6, 0.9])
def test_weights_are_the_derivative_of_the_merit(first):
    objective = Objective("mean", ZEROS, [1.0, 2.0], [3.0, 1.0], [0.8, 1.0])
    scores = at(first, 0.9)
    weights = objective.weigh_tasks(scores) + objective.weigh_floors(scores)
    for task in range(2):
        up, down = (
            objective.merit([s + by if t == task else s for t, s in enumerate(scores)])
            for by in (1e-6, -1e-6)
        )
        assert weights[task] == pytest.approx((up - down) / 2e-6, rel=1e-4)


def test_standard_error_is_that_of_weighted_paired_differences():
    one = [np.array([1.0, 2.0, 4.0]), np.array([0.0, 1.0])]
    other = [np.array([0.5, 1.0, 2.0]), np.array([0.5, 0.0])]
    base = [np.zeros(3), np.zeros(2)]
    objective = Objective("mean", base, [1.0, 2.0], [3.0, 1.0])
    # The differences by hand, weighed three to one, the second over its gain of 2.
    first = statistics.variance([0.75 * d for d in (0.5, 1.0, 2.0)]) / 3
    second = statistics.variance([0.25 * d / 2 for d in (-0.5, 1.0)]) / 2
    expected = math.sqrt(first + second)
    assert objective.difference_se(one, other) == pytest.approx(expected)
    # With a floor between the two, 7/6 and 7/3, or above or below both, noise counts
    # with the part of the way that lies below it: half of it, all, none.
    for least, below in ((1.75, 0.5), (2.5, 1.0), (1.0, 0.0)):
        floored = Objective("mean", base, [1.0, 2.0], [3.0, 1.0], [least, None])
        counts = 0.75 + PENALTY * below
        first = statistics.variance([counts * d for d in (0.5, 1.0, 2.0)]) / 3
        expected = math.sqrt(first + second)
        assert floored.difference_se(one, other) == pytest.approx(expected)
        assert floored.difference_se(other, one) == pytest.approx(expected)


def test_step_is_bent_to_the_nearest_that_keeps_a_floor():
    objective = Objective("mean", ZEROS, [2.0, 1.0], least=[0.8, None])
    slopes = np.array([[[2.0, 0.0]], [[-9.0, 9.0]]])
    step = np.array([[-0.5, 0.5]])
    # Recovered gain rises by the first factor, and 0.1 above the floor may be lost.
    room = objective.room(at(1.0, 0.0))
    assert room == pytest.approx([0.1, math.inf])
    bent = objective.bend_step(step, slopes, room)
    assert bent == pytest.approx(np.array([[-0.1, 0.5]]))
    # Of which 0.04 is to be left.
    bent = objective.bend_step(step, slopes, room - np.array([0.04, 9.0]))
    assert bent == pytest.approx(np.array([[-0.06, 0.5]]))
    # No room: it must not get worse; less than none: it must get better.
    bent = objective.bend_step(step, slopes, np.array([0.0, math.inf]))
    assert bent == pytest.approx(np.array([[0.0, 0.5]]))
    bent = objective.bend_step(step, slopes, np.array([-0.2, math.inf]))
    assert bent == pytest.approx(np.array([[0.2, 0.5]]))
    allowed = np.array([[-0.05, -0.5]])
    assert (objective.bend_step(allowed, slopes, room) == allowed).all()


NUMBERS = st.lists(st.floats(-1, 1), min_size=6, max_size=6)


@settings(max_examples=50, deadline=None)
@given(NUMBERS, NUMBERS, NUMBERS, st.floats(0, 0.2), st.floats(-0.2, 0.2))
def test_bent_step_keeps_two_floors_as_far_as_slopes_tell(one, other, step, a, b):
    objective = Objective("mean", ZEROS, [1.0, 1.0], least=[1.0, 1.0])
    # Steep enough to be met: slopes that hardly turn from each other need many sweeps.
    slopes = np.array([one, other]).reshape(2, 3, 2)
    slopes[0, 0, 0], slopes[1, 0, 0] = 2.0, 2.0
    step = np.array(step).reshape(3, 2)
    bent = objective.bend_step(step, slopes, np.array([a, max(0.0, b)]))
    for rise, room in zip(slopes, (a, max(0.0, b)), strict=True):
        assert room + float((rise * bent).sum()) > -1e-3


class Slope:
    """Two tasks over two factors: the first wants the first factor up, the second
    wants it down and the second factor up."""

    peaks = (np.array([[1.8, 1.0]]), np.array([[0.8, 1.3]]))

    def means(self, factors):
        return [1.0 - float(((factors - peak) ** 2).sum()) for peak in self.peaks]

    def score(self, factors):
        return [np.array([mean, mean]) for mean in self.means(factors)]

    def measure(self, factors):
        slopes = np.array([-2 * (factors - peak) for peak in self.peaks])
        return Slopes(self.score(factors), slopes)


def climb(objective, slope=None):
    """Climb with no samples apart."""
    slope = slope or Slope()
    nothing = [np.zeros(0), np.zeros(0)]
    return choose_factors(
        Proof(objective, objective, None),
        slope.measure,
        lambda factors: SideScores(slope.score(factors), nothing),
        plain=nothing,
        n_layers=1,
        n_models=2,
        forwards=FORWARDS,
        budget=BUDGET,
    )


def best_on_a_grid(least):
    """The best weighted mean over all factors that keep the second task's floor."""
    found = []
    for first in np.arange(0, 2.001, 0.01):
        for second in np.arange(0, 2.001, 0.01):
            one, two = Slope().means(np.array([[first, second]]))
            if two >= least:
                found.append(0.75 * one + 0.25 * two)
    return max(found)


def test_climb_keeps_a_floor_that_held_and_comes_close_to_the_best():
    free = climb(Objective("mean", ZEROS, [1.0, 1.0], [3.0, 1.0]))
    assert Slope().means(free.factors)[1] < 0.8
    least = 0.85  # the plain merge has 0.87
    choice = climb(Objective("mean", ZEROS, [1.0, 1.0], [3.0, 1.0], [None, least]))
    one, two = Slope().means(choice.factors)
    assert two >= least
    start = np.dot([0.75, 0.25], Slope().means(np.ones((1, 2))))
    best = best_on_a_grid(least)
    assert 0.75 * one + 0.25 * two > start + 0.8 * (best - start)
    assert all(step.shortfall == 0 for step in choice.steps if step.taken)


def test_climb_mends_a_missed_floor_at_the_cost_of_the_objective():
    objective = Objective("mean", ZEROS, [1.0, 1.0], [3.0, 1.0], [None, 0.97])
    choice = climb(objective)
    assert Slope().means(choice.factors)[1] >= 0.97
    first = choice.steps[0]
    assert first.taken
    assert first.objective < objective.value(Slope().score(np.ones((1, 2))))
    assert choice.steps[-1].shortfall == 0


def test_step_past_a_floor_is_not_taken_however_much_it_wins():
    class Cliff(Slope):
        def means(self, factors):
            one, two = super().means(factors)
            return [one, two if (factors == 1).all() else 0.0]  # slopes do not tell

    objective = Objective("mean", ZEROS, [1.0, 1.0], [300.0, 1.0], [None, 0.5])
    choice = climb(objective, Cliff())
    assert (choice.factors == 1).all()
    assert choice.steps
    assert all(step.breaks_floor and not step.taken for step in choice.steps)
