"""What a merge is chosen by: the tasks' scores as one number, and how sure it is.

Invariant: tasks are compared in shares of their own gain, or as they are where the
recipe says so; differences are paired over the samples of a task, and tasks are
independent of each other.
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


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """The mean, or the worst, of the tasks' recovered gains.

    Attributes:
        kind: which.
        base: each task's scores of the base, ``[samples]``.
        gains: what each task's scores are divided by, above 0.
    """

    kind: Kind
    base: Sequence[FloatArray]
    gains: Sequence[float]

    def shares(self, scores: Sequence[FloatArray]) -> list[FloatArray]:
        """Return each task's recovered gain by sample, ``[samples]``."""
        units = zip(scores, self.base, self.gains, strict=True)
        return [(score - base) / gain for score, base, gain in units]

    def value(self, scores: Sequence[FloatArray]) -> float:
        """Return the objective, higher is better."""
        means = [float(share.mean()) for share in self.shares(scores)]
        return min(means) if self.kind == "worst" else float(np.mean(means))

    def weigh_tasks(self, scores: Sequence[FloatArray]) -> FloatArray:
        """Return the objective's derivative by each task's mean score, ``[tasks]``.

        The worst task's is smoothed, so that the next worst is not made worse than it.
        """
        means = np.array([float(share.mean()) for share in self.shares(scores)])
        weights = np.full(len(means), 1 / len(means))
        if self.kind == "worst":
            weights = np.exp(-SHARPNESS * (means - means.min()))
            weights /= weights.sum()
        scaled: FloatArray = weights / np.array(self.gains)
        return scaled

    def difference_se(
        self, one: Sequence[FloatArray], other: Sequence[FloatArray]
    ) -> float:
        """Return the standard error of the difference of two merges' objectives."""
        mine, theirs = self.shares(one), self.shares(other)
        if self.kind == "mean":
            parts = [(a - b) / len(mine) for a, b in zip(mine, theirs, strict=True)]
        else:
            worst, their_worst = (
                min(range(len(shares)), key=lambda t: shares[t].mean())
                for shares in (mine, theirs)
            )
            parts = [mine[worst], theirs[their_worst]]
            if worst == their_worst:
                parts = [mine[worst] - theirs[worst]]
        variances = [part.var(ddof=1) / len(part) for part in parts if len(part) > 1]
        return math.sqrt(math.fsum(variances))
