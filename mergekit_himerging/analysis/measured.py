"""Treatments chosen by measurement: steps up the slopes, each proved before taken.

Invariant: a step is taken only where the merge that it leads to, scored exactly, is
better on the choosing samples by more than its standard error; layers without a slope
stay where they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mergekit_himerging.analysis.contribution import FloatArray
from mergekit_himerging.analysis.objective import Objective
from mergekit_himerging.analysis.slopes import FORWARDS, Slopes
from mergekit_himerging.scores import StepReport

BUDGET = 25
"""Forward passes over the choosing samples that a choice may take."""

MAX_FACTOR = 2.0
"""Largest factor on a delta; the least is 0, which drops it."""

FIRST_RADIUS, LEAST_RADIUS = 0.5, 0.05
"""Largest change of a factor in the first step, and where it ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Factors that were found.

    Attributes:
        factors: ``[layers, models]``, on each model's weight in each layer.
        slopes: ``[tasks, layers, models]``, at the plain merge.
        scores: by task, ``[samples]``, of the merge with these factors.
        steps: what was tried, in order.
    """

    factors: FloatArray
    slopes: FloatArray
    scores: Sequence[FloatArray]
    steps: tuple[StepReport, ...]


def choose_factors(
    objective: Objective,
    measure: Callable[[FloatArray], Slopes],
    score: Callable[[FloatArray], list[FloatArray]],
    *,
    n_layers: int,
    n_models: int,
) -> Choice:
    """Climb from the plain merge.

    The direction is the objective's slope, as long as the radius in its largest entry.
    A step that does not improve the objective by more than its standard error is not
    taken, and the radius is halved; one that does lets it grow.

    Args:
        objective: what is raised.
        measure: factors ``[layers, models]`` -> scores and slopes there; counted as
            ``FORWARDS`` forward passes.
        score: factors -> scores; counted as one.
        n_layers, n_models: of the merge.

    Returns:
        The best factors found, within ``BUDGET`` forward passes.
    """
    factors = np.ones((n_layers, n_models))
    here = first = measure(factors)
    scores = list(here.scores)
    cost, radius, steps = FORWARDS, FIRST_RADIUS, []
    while cost < BUDGET and radius >= LEAST_RADIUS:
        weights = objective.weigh_tasks(scores)
        direction = np.tensordot(weights, here.slopes, axes=1)
        blocked = ((factors <= 0) & (direction < 0)) | (
            (factors >= MAX_FACTOR) & (direction > 0)
        )
        direction = np.where(blocked, 0.0, direction)
        if not np.abs(direction).max() > 0:
            break
        proposed = factors + radius * direction / np.abs(direction).max()
        # As they will stand in the plan.
        proposed = np.clip(proposed, 0.0, MAX_FACTOR).round(4)
        found = score(proposed)
        cost += 1
        better = objective.value(found) - objective.value(scores)
        error = objective.difference_se(found, scores)
        is_taken = better > error
        steps.append(
            StepReport(
                objective=objective.value(found),
                improvement=better,
                improvement_se=error,
                radius=radius,
                taken=is_taken,
                forwards=cost,
            )
        )
        if not is_taken:
            radius /= 2
            continue
        factors, scores = proposed, found
        radius = min(1.0, 1.5 * radius)
        if cost + FORWARDS >= BUDGET:
            break
        here = measure(factors)
        cost += FORWARDS
    return Choice(factors, first.slopes, scores, tuple(steps))
