"""What a step of treatments chosen by measurement is proved by.

Invariant: slopes fit the samples that they are taken from by chance too, so no step is
taken that samples apart from them speak against, unless it mends a floor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mergekit_himerging.analysis.contribution import FloatArray
from mergekit_himerging.analysis.objective import Objective
from mergekit_himerging.scores import Moves, StepReport


@dataclass(frozen=True, slots=True, eq=False)
class SideScores:
    """Scores of one merge, by task, each ``[samples]``.

    Attributes:
        choosing: on the samples that give the slopes.
        accepting: on those apart; all empty where every sample chooses.
    """

    choosing: Sequence[FloatArray]
    accepting: Sequence[FloatArray]

    def together(self) -> list[FloatArray]:
        """Return the scores on all samples of a task."""
        pairs = zip(self.choosing, self.accepting, strict=True)
        return [np.concatenate(pair) for pair in pairs]

    def are_finite(self) -> bool:
        """Whether all scores are finite numbers."""
        return all(bool(np.isfinite(scores).all()) for scores in self.together())


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """What steps are proved by: the objective on each side's samples, and on all.

    Attributes:
        choosing, together: the objective on the choosing, and on all samples.
        accepting: the same on the accepting samples; None where every sample chooses,
            so that nothing is held against what the slopes fit by chance.
    """

    choosing: Objective
    together: Objective
    accepting: Objective | None

    def room(self, scores: SideScores) -> FloatArray:
        """Return what each task may lose before a side misses its floor, ``[tasks]``.

        In recovered gain, infinite without a floor. 0 where a side misses it: it may
        get no worse there.
        """
        room = self.choosing.room(scores.choosing)
        if self.accepting is not None:
            room = np.minimum(room, self.accepting.room(scores.accepting))
        return np.maximum(0.0, room)

    def mends(self, found: SideScores, before: SideScores) -> bool:
        """Whether a merge lacks less of the floors than another, on all samples."""
        lacks, lacked = (
            float(self.together.shortfalls(scores.together()).sum())
            for scores in (found, before)
        )
        return lacks < lacked

    def report_step(
        self,
        found: SideScores,
        before: SideScores,
        *,
        moves: Moves,
        radius: float,
        forwards: int,
    ) -> StepReport:
        """Compare a proposed merge with the one before, and say whether to take it.

        A step that mends a floor may be worse apart: it is paid for with the objective.
        """
        after, earlier = found.together(), before.together()
        better = self.together.merit(after) - self.together.merit(earlier)
        error = self.together.difference_se(after, earlier)
        breaks_floor = self.choosing.breaks_floor(found.choosing, before.choosing)
        shortfall = float(self.together.shortfalls(after).sum())
        mends_floor = self.mends(found, before)
        apart = None
        is_taken = better > error
        if self.accepting is not None:
            one, other = found.accepting, before.accepting
            breaks_floor |= self.accepting.breaks_floor(one, other)
            apart = self.accepting.merit(one) - self.accepting.merit(other)
            is_taken &= apart >= 0 or mends_floor
        return StepReport(
            moves=moves,
            objective=self.together.value(after),
            improvement=better,
            improvement_se=error,
            improvement_apart=apart,
            radius=radius,
            taken=is_taken and not breaks_floor,
            forwards=forwards,
            shortfall=shortfall,
            breaks_floor=breaks_floor,
            mends_floor=mends_floor,
        )
