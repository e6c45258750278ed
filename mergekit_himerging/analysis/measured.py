"""Treatments chosen by measurement: steps up the slopes, each proved before taken.

Invariant: a step is taken only where the merge that it leads to, scored exactly, is
better on all samples by more than its standard error, is no worse on those that gave no
slopes, and misses no floor that was kept. Whole models come first, then their layers: a
layer without a slope stays where its model is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from mergekit_himerging.analysis.contribution import FloatArray
from mergekit_himerging.analysis.data import TaskData
from mergekit_himerging.analysis.differences import (
    count_forwards,
    measure_differences,
)
from mergekit_himerging.analysis.graph import Cuts
from mergekit_himerging.analysis.objective import Objective
from mergekit_himerging.analysis.proof import Proof, SideScores
from mergekit_himerging.analysis.replay import Replay
from mergekit_himerging.analysis.slopes import FORWARDS, Slopes, measure_slopes
from mergekit_himerging.analysis.streams import Progress
from mergekit_himerging.scores import Moves, StepReport
from mergekit_himerging.tasks import PlannedTensor

BUDGET = 25
"""Forward passes over the choosing samples that a choice by gradients may take."""

EXACT_MEASUREMENTS, TRIES = 2, 4
"""Exact measurements that a choice may take, and the steps that one may lead to: from
the first radius to the least."""

MAX_FACTOR = 2.0
"""Largest factor on a delta; the least is 0, which drops it."""

FIRST_RADIUS = 0.5
"""Largest change of a factor in the first step of a level."""

LEVELS: tuple[tuple[Moves, float], ...] = (("models", 0.2), ("layers", 0.05))
"""What is moved, in turn, each until the radius is below a least one."""


Measure = Literal["first_order", "exact"]
"""How slopes are measured: one pass back, or every factor up and down."""


class MeasureSlopes(Protocol):
    """What every way of measuring takes and returns, see ``measure_slopes``."""

    def __call__(
        self,
        plain: Sequence[PlannedTensor],
        merged: Sequence[PlannedTensor],
        tasks: Sequence[TaskData],
        replay: Replay,
        *,
        device: torch.device,
        memory: int,
        cuts: Cuts,
        progress: Progress,
    ) -> Slopes:
        """Measure scores and slopes at a merge, on the choosing samples."""
        ...


@dataclass(frozen=True, slots=True)
class Way:
    """One way to measure, and what it costs.

    Attributes:
        measure: measures the slopes at a merge.
        forwards: forward passes over the choosing samples that one measurement counts
            as: block forwards over layers, and twice that for a pass back.
        budget: forward passes that a whole choice may take; two measurements and their
            steps at least.
        n_steps: steps that the budget allows where it is used up by measurements, each
            with its steps.
    """

    measure: MeasureSlopes
    forwards: int
    budget: int
    n_steps: int


def pick_way(
    measure: Measure, *, n_layers: int, n_models: int, in_turns: bool = False
) -> Way:
    """Pick a way to measure a merge of so many layers and models.

    Args:
        measure: which.
        n_layers, n_models: of the merge.
        in_turns: whether the samples do not fit into memory together.
    """
    if measure == "first_order":
        forwards = FORWARDS + in_turns
        return Way(measure_slopes, forwards, BUDGET, BUDGET // (forwards + 1))
    forwards = count_forwards(n_layers, n_models)
    budget = EXACT_MEASUREMENTS * (forwards + TRIES)
    return Way(measure_differences, forwards, budget, EXACT_MEASUREMENTS * TRIES)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Factors that were found.

    Attributes:
        factors: ``[layers, models]``, on each model's weight in each layer.
        slopes: ``[tasks, layers, models]``, at the plain merge.
        scores: of the merge with these factors.
        steps: what was tried, in order.
    """

    factors: FloatArray
    slopes: FloatArray
    scores: SideScores
    steps: tuple[StepReport, ...]


def choose_factors(
    proof: Proof,
    measure: Callable[[FloatArray], Slopes],
    score: Callable[[FloatArray], SideScores],
    *,
    plain: Sequence[FloatArray],
    n_layers: int,
    n_models: int,
    forwards: int,
    budget: int,
) -> Choice:
    """Climb from the plain merge, by whole models, then by their layers.

    The direction is the slope of the objective on the choosing samples, less what
    missed floors cost, as long as the radius in its largest entry. It is bent where it
    would lead past a floor, by the slopes and by what earlier steps fell short of them.
    A step that is not proved, or leads past a floor after all, is not taken, and the
    radius is halved; one that is taken lets it grow.

    The first step moves whole models along the slopes' mean over the layers: few
    numbers, which few samples tell. Along each layer's own slope the same way would
    take many steps, since the steepest layer alone sets their length. Layers follow
    once it is taken or too short; more steps of whole models would leave them too
    little of the budget.

    Args:
        proof: what is raised, and what takes a step.
        measure: factors ``[layers, models]`` -> scores and slopes there.
        score: factors -> scores; counted as one forward pass.
        plain: the plain merge's scores on the accepting samples, by task.
        n_layers, n_models: of the merge.
        forwards: forward passes that ``measure`` counts as.
        budget: forward passes to be taken at most.

    Returns:
        The best factors found.
    """
    objective = proof.choosing
    factors = np.ones((n_layers, n_models))
    here = first = measure(factors)
    scores = SideScores(here.scores, plain)
    cost, steps = forwards, []
    for moves, least_radius in LEVELS:
        radius = FIRST_RADIUS
        # By task: how much less was recovered than slopes foresaw, over the square of
        # the radius, as it grows where slopes change along the step.
        bend = np.zeros(len(plain))
        while cost < budget and radius >= least_radius:
            slopes = here.slopes
            if moves == "models":
                slopes = np.broadcast_to(slopes.mean(1, keepdims=True), slopes.shape)
            reserve = bend * radius**2
            step = _find_step(
                objective, factors, scores.choosing, slopes, radius, reserve
            )
            # As they will stand in the plan.
            proposed = np.clip(factors + step, 0.0, MAX_FACTOR).round(4)
            if (proposed == factors).all():
                break
            found = score(proposed)
            cost += 1
            foreseen = objective.foresee(scores.choosing, slopes, proposed - factors)
            missing = foreseen - objective.means(found.choosing)
            bend = np.maximum(bend, missing / radius**2)
            report = proof.report_step(
                found, scores, moves=moves, radius=radius, forwards=cost
            )
            steps.append(report)
            if not report.taken:
                radius /= 2
                continue
            factors, scores = proposed, found
            radius = min(1.0, 1.5 * radius)
            if cost + forwards >= budget:
                return Choice(factors, first.slopes, scores, tuple(steps))
            here = measure(factors)
            cost += forwards
            if moves == "models":
                break
    return Choice(factors, first.slopes, scores, tuple(steps))


def _find_step(
    objective: Objective,
    factors: FloatArray,
    scores: Sequence[FloatArray],
    slopes: FloatArray,
    radius: float,
    reserve: FloatArray,
) -> FloatArray:
    """Find a step up the slopes, ``[layers, models]``, no entry beyond the radius."""
    weights = objective.weigh_tasks(scores) + objective.weigh_floors(scores)
    direction = np.tensordot(weights, slopes, axes=1)
    blocked = ((factors <= 0) & (direction < 0)) | (
        (factors >= MAX_FACTOR) & (direction > 0)
    )
    direction = np.where(blocked, 0.0, direction)
    if not np.abs(direction).max() > 0:
        return np.zeros_like(direction)
    step = radius * direction / np.abs(direction).max()
    free = np.where(blocked, 0.0, slopes)
    step = objective.bend_step(step, free, scores, reserve)
    bent: FloatArray = step * min(1.0, radius / max(np.abs(step).max(), radius))
    return bent
