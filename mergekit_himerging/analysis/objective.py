"""What a merge is chosen by: the tasks' scores as one number, and how sure it is.

Invariant: tasks are compared in shares of their own gain, or as they are where the
recipe says so; differences are paired over the samples of a task, and tasks are
independent of each other. A floor that is missed counts more than any objective.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mergekit_himerging.analysis.contribution import FloatArray

Kind = Literal["mean", "worst"]

SHARPNESS = 20.0
"""How much more a worse task counts in the slope of the worst task's gain."""

PENALTY = 100.0
"""What a recovered gain that a floor lacks costs: more than it could win elsewhere."""

SWEEPS = 20
"""How often a step is bent for every floor in turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """The weighted mean, or the worst, of the tasks' recovered gains, under floors.

    Attributes:
        kind: which.
        base: each task's scores of the base, ``[samples]``.
        gains: what each task's scores are divided by, above 0.
        weights: of each task, at least 0 and not all 0; none means the same for all.
            The worst is that of the tasks whose weight is above 0.
        least: each task's mean score below which its floor is missed, None without a
            floor; none means no floors.
    """

    kind: Kind
    base: Sequence[FloatArray]
    gains: Sequence[float]
    weights: Sequence[float] = ()
    least: Sequence[float | None] = ()

    def shares(self, scores: Sequence[FloatArray]) -> list[FloatArray]:
        """Return each task's recovered gain by sample, ``[samples]``."""
        units = zip(scores, self.base, self.gains, strict=True)
        return [(score - base) / gain for score, base, gain in units]

    def means(self, scores: Sequence[FloatArray]) -> FloatArray:
        """Return each task's recovered gain, ``[tasks]``."""
        return np.array([float(share.mean()) for share in self.shares(scores)])

    def value(self, scores: Sequence[FloatArray]) -> float:
        """Return the objective without its floors, higher is better."""
        means = self.means(scores)
        return float(np.dot(self._counts(means, sharpness=math.inf), means))

    def shortfalls(self, scores: Sequence[FloatArray]) -> FloatArray:
        """Return what each task lacks of its floor, in its gain, ``[tasks]``."""
        return np.maximum(0.0, -self.room(scores))

    def merit(self, scores: Sequence[FloatArray]) -> float:
        """Return the objective less what missed floors cost: merges are ranked by it.

        The penalty is exact: it is linear in the shortfall, so that no floor is given
        up for the objective by a little.
        """
        return self.value(scores) - PENALTY * float(self.shortfalls(scores).sum())

    def breaks_floor(
        self, found: Sequence[FloatArray], before: Sequence[FloatArray]
    ) -> bool:
        """Whether a merge misses a floor that was kept, or one by more than before."""
        return bool((self.shortfalls(found) > self.shortfalls(before)).any())

    def weigh_tasks(self, scores: Sequence[FloatArray]) -> FloatArray:
        """Return the objective's derivative by each task's mean score, ``[tasks]``.

        The worst task's is smoothed, so that the next worst is not made worse than it.
        Floors are left out.
        """
        counts = self._counts(self.means(scores), sharpness=SHARPNESS)
        scaled: FloatArray = counts / np.array(self.gains)
        return scaled

    def weigh_floors(self, scores: Sequence[FloatArray]) -> FloatArray:
        """Return the derivative of what missed floors cost, negated, ``[tasks]``."""
        weights: FloatArray = (
            PENALTY * (self.shortfalls(scores) > 0) / np.array(self.gains)
        )
        return weights

    def foresee(
        self, scores: Sequence[FloatArray], slopes: FloatArray, step: FloatArray
    ) -> FloatArray:
        """Return the tasks' recovered gains after a step along the slopes, ``[tasks]``.

        Args:
            scores: of the merge where the step begins.
            slopes: ``[tasks, layers, models]``, of each task's mean score there.
            step: of the factors, ``[layers, models]``.
        """
        rises: FloatArray = np.tensordot(slopes, step, axes=2) / np.array(self.gains)
        return self.means(scores) + rises

    def room(self, scores: Sequence[FloatArray]) -> FloatArray:
        """Return how far each task is above its floor, in its gain, ``[tasks]``.

        Below 0 where the floor is missed, infinite without one.
        """
        floors = self.least or [None] * len(self.gains)
        return np.array(
            [
                math.inf if least is None else (float(score.mean()) - least) / gain
                for score, least, gain in zip(scores, floors, self.gains, strict=True)
            ]
        )

    def bend_step(
        self, step: FloatArray, slopes: FloatArray, room: FloatArray
    ) -> FloatArray:
        """Bend a step so that it leads past no floor, as far as the slopes tell.

        Each floor allows the steps under which its task loses no more than its room.
        The step is moved to the nearest allowed one, for one floor after the other.

        Args:
            step: of the factors, ``[layers, models]``.
            slopes: ``[tasks, layers, models]``, of each task's mean score by the
                factor; 0 where a factor may not move.
            room: ``[tasks]``, recovered gain that a task may lose; below 0 what it has
                to win, infinite without a floor.
        """
        rises = slopes / np.array(self.gains)[:, None, None]
        floors = [
            (rise, float(most))
            for rise, most in zip(rises, room, strict=True)
            if math.isfinite(most) and np.abs(rise).max() > 0
        ]
        bent = step
        for _ in range(SWEEPS):
            for rise, most in floors:
                lacking = -most - float((rise * bent).sum())
                if lacking > 0:
                    bent = bent + rise * lacking / float((rise**2).sum())
        return bent

    def difference_se(
        self, one: Sequence[FloatArray], other: Sequence[FloatArray]
    ) -> float:
        """Return the standard error of the difference of two merges' merits.

        What a missed floor costs enters as much as it changes with the task's recovered
        gain between the two: in full where both miss it, and where one does, by the
        part of the way that lies below it.
        """
        mine, theirs = self.shares(one), self.shares(other)
        my_counts, their_counts = (
            self._counts(self.means(scores), sharpness=math.inf)
            for scores in (one, other)
        )
        lacks = self.shortfalls(one), self.shortfalls(other)
        variances = []
        for task, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            mended = float(lacks[1][task] - lacks[0][task])
            way = float(a.mean() - b.mean())
            below = mended / way if way else float(lacks[0][task] > 0)
            penalty = PENALTY * min(1.0, max(0.0, below))
            part = (my_counts[task] + penalty) * a - (their_counts[task] + penalty) * b
            if len(part) > 1:
                variances.append(part.var(ddof=1) / len(part))
        return math.sqrt(math.fsum(variances))

    def _counts(self, means: FloatArray, *, sharpness: float) -> FloatArray:
        """How much each task's recovered gain counts, ``[tasks]``, 1 in sum."""
        weights = np.array(self.weights or [1.0] * len(means))
        if self.kind == "worst":
            aimed = np.where(weights > 0, means, np.inf)
            if math.isinf(sharpness):
                weights = np.arange(len(means)) == aimed.argmin()
            else:
                weights = np.exp(-sharpness * (aimed - aimed.min()))
        counts: FloatArray = weights / weights.sum()
        return counts
