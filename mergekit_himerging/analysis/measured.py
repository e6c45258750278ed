"""Treatments chosen by measurement: steps up the slopes, each proved before taken.

Invariant: a step is taken only where the merge that it leads to, scored exactly, is
better on all samples by more than its standard error, is no worse on those that gave no
slopes or mends a floor, and misses no floor that was kept. Whole models come first,
then their layers: a layer without a slope stays as it is.
"""

import logging
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
from mergekit_himerging.analysis.proof import Proof, SideScores
from mergekit_himerging.analysis.replay import Replay
from mergekit_himerging.analysis.slopes import (
    FORWARDS,
    Slopes,
    measure_slopes,
    split_tasks,
)
from mergekit_himerging.analysis.streams import Progress
from mergekit_himerging.scores import Moves, StepReport
from mergekit_himerging.tasks import PlannedTensor

LOG = logging.getLogger(__name__)

BUDGET = 25
"""Forward passes over the choosing samples that a choice by gradients may take."""

EXACT_MEASUREMENTS, TRIES = 2, 4
"""Exact measurements that a choice may take, and steps for each of them."""

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
        budget: forward passes over them that a whole choice may take; two measurements
            and their steps at least.
    """

    measure: MeasureSlopes
    forwards: int
    budget: int

    def count_most(self, n_choosing: int, n_accepting: int) -> tuple[int, int]:
        """Count the measurements and steps of the choice that costs most.

        Args:
            n_choosing, n_accepting: what a pass over the samples of either side costs;
                a measurement runs the choosing ones alone, a step both.
        """

        def cost(course: tuple[int, int]) -> int:
            n_measurements, n_steps = course
            per_step = n_choosing + n_accepting
            return n_measurements * self.forwards * n_choosing + n_steps * per_step

        return max(list_courses(self.forwards, self.budget), key=cost)


def list_courses(forwards: int, budget: int) -> set[tuple[int, int]]:
    """List how many measurements and steps a choice may take, see ``choose_factors``.

    Args:
        forwards: that a measurement counts as.
        budget: of the choice.

    Returns:
        Measurements and steps of every course that proofs may lead it on.
    """
    courses: set[tuple[int, int]] = set()
    seen = set()
    todo = [(0, FIRST_RADIUS, 1, 0)]  # level, radius, measurements, steps
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        level, radius, n_measurements, n_steps = state
        left = budget - n_measurements * forwards - n_steps
        if level == len(LEVELS) or left <= 0:
            courses.add((n_measurements, n_steps))
            continue
        moves, least_radius = LEVELS[level]
        following = (level + 1, FIRST_RADIUS)
        todo.append((*following, n_measurements, n_steps))  # too short, or flat
        if radius < least_radius:
            continue
        todo.append((level, radius / 2, n_measurements, n_steps + 1))
        if left - 1 <= forwards:
            courses.add((n_measurements, n_steps + 1))
            continue
        grown = following if moves == "models" else (level, _grow(radius))
        todo.append((*grown, n_measurements + 1, n_steps + 1))
    return courses


def _grow(radius: float) -> float:
    """Return the radius after a step that was taken."""
    return min(1.0, 1.5 * radius)


def pick_way(
    measure: Measure, tasks: Sequence[TaskData], replay: Replay, memory: int
) -> Way:
    """Pick a way to measure a merge.

    Args:
        measure: which.
        tasks: one for each model.
        replay: the model to run.
        memory: bytes that hidden states may take; where the samples do not fit
            together, a pass back takes a forward pass more.
    """
    if measure == "first_order":
        in_turns = len(split_tasks(tasks, replay, memory)) > 1
        return Way(measure_slopes, FORWARDS + in_turns, BUDGET)
    forwards = count_forwards(len(replay.blocks), len(tasks))
    return Way(measure_differences, forwards, EXACT_MEASUREMENTS * (forwards + TRIES))


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Factors that were found.

    Attributes:
        factors: ``[layers, models]``, on each model's weight in each layer.
        slopes: ``[tasks, layers, models]``, at the plain merge.
        scores: of the merge with these factors.
        steps: what was tried, in order.
        forwards: forward passes over the choosing samples that it took.
    """

    factors: FloatArray
    slopes: FloatArray
    scores: SideScores
    steps: tuple[StepReport, ...]
    forwards: int


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

    Steps of whole models go along the slopes' mean over the layers: few numbers, which
    few samples tell. Along each layer's own slope the same way would take many steps,
    since the steepest layer alone sets their length. Layers follow once one is taken or
    the next too short; more of them would leave the layers too little of the budget.

    Args:
        proof: what is raised, and what takes a step.
        measure: factors ``[layers, models]`` -> scores and slopes there.
        score: factors -> scores; counted as one forward pass. A merge whose scores are
            not finite is no step.
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
                # Where nothing of a model is merged, no task has a slope.
                is_flat = (slopes == 0).all(0)
                slopes = np.where(is_flat, 0.0, slopes.mean(1, keepdims=True))
            reserve = bend * radius**2
            step = _find_step(proof, factors, scores, slopes, radius, reserve)
            # As they will stand in the plan.
            proposed = np.clip(factors + step, 0.0, MAX_FACTOR).round(4)
            if (proposed == factors).all():
                break
            found = score(proposed)
            cost += 1
            if not found.are_finite():
                LOG.warning(
                    "hi_merging: a step by at most %g leads to scores that are not "
                    "finite, so it is not taken and a shorter one is tried",
                    radius,
                )
                radius /= 2
                continue
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
            radius = _grow(radius)
            if cost + forwards >= budget:
                return Choice(factors, first.slopes, scores, tuple(steps), cost)
            here = measure(factors)
            cost += forwards
            if moves == "models":
                break
    return Choice(factors, first.slopes, scores, tuple(steps), cost)


def _find_step(
    proof: Proof,
    factors: FloatArray,
    scores: SideScores,
    slopes: FloatArray,
    radius: float,
    reserve: FloatArray,
) -> FloatArray:
    """Find a step up the slopes, ``[layers, models]``, no entry beyond the radius.

    Floors pull where they are missed on all samples, as steps are proved on these.
    """
    objective = proof.choosing
    weights = objective.weigh_tasks(scores.choosing)
    weights = weights + proof.together.weigh_floors(scores.together())
    direction = np.tensordot(weights, slopes, axes=1)
    blocked = ((factors <= 0) & (direction < 0)) | (
        (factors >= MAX_FACTOR) & (direction > 0)
    )
    direction = np.where(blocked, 0.0, direction)
    if not np.abs(direction).max() > 0:
        return np.zeros_like(direction)
    step = radius * direction / np.abs(direction).max()
    free = np.where(blocked, 0.0, slopes)
    step = objective.bend_step(step, free, proof.room(scores) - reserve)
    bent: FloatArray = step * min(1.0, radius / max(np.abs(step).max(), radius))
    return bent
