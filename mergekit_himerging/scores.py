"""What was measured, as it stands in a plan file; units are those of the task's metric.

Scores are means over samples, higher is better: nats per target token (metric `loss`)
a share of right answers (`accuracy`), or minus the divergence from the task's expert in
nats per token (`agreement`).
"""

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

Name = Annotated[str, Field(max_length=10_000)]
"""Of a model or data: two paths and more."""


class Record(BaseModel):
    """A part of a plan file: unknown fields are errors, values stay as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class LayerScores(Record):
    """What one layer does for one task (arXiv:2506.12379, section 3).

    Attributes:
        layer: 0-based decoder block of the output model.
        removal_single, removal_merged: the score lost without the layer's delta, in the
            single model and in the merge.
        addition_single, addition_merged: the score won by the base with it alone.
        contribution_single, contribution_merged: removal plus addition.
        conflict: contribution_single minus contribution_merged; above 0 the merge
            weakens the task in this layer.
        conflict_se: standard error of the conflict over the samples, paired.
    """

    layer: int
    removal_single: FiniteFloat
    addition_single: FiniteFloat
    removal_merged: FiniteFloat
    addition_merged: FiniteFloat
    contribution_single: FiniteFloat
    contribution_merged: FiniteFloat
    conflict: FiniteFloat
    conflict_se: FiniteFloat


class Slope(Record):
    """How a task's score changes with the weight of one model's delta in one layer.

    Attributes:
        layer, model: whose delta.
        slope: of the mean score by the factor on the delta's weight, at the plain
            merge; below 0 the delta harms the task there. Of ``accuracy`` that of the
            log-probability of the right option, times the task's gain in accuracy over
            its gain in that.
    """

    layer: int
    model: str
    slope: FiniteFloat


Norm = Annotated[FiniteFloat, Field(ge=0)]


class MatrixGradients(Record):
    """Gradients of a task's mean score by one weight matrix of every layer.

    Norms are in nats per token by unit of weight, on the choosing samples; of
    ``accuracy`` the score is the log-probability of the right option among all.

    Attributes:
        matrix: its name in a block, as short as tells it apart, such as ``q_proj``.
        layers: 0-based decoder blocks that have it, from the lowest up.
        frobenius_base, nuclear_base: root of the squared entries' sum, and sum of the
            singular values, of its gradient at the base; one for each of ``layers``.
        frobenius_single, nuclear_single: the same at the task's own model.
    """

    matrix: str
    layers: Annotated[tuple[int, ...], Field(min_length=1)]
    frobenius_base: tuple[Norm, ...]
    nuclear_base: tuple[Norm, ...]
    frobenius_single: tuple[Norm, ...]
    nuclear_single: tuple[Norm, ...]

    @model_validator(mode="after")
    def _a_norm_for_each_layer(self) -> Self:
        for kind, place in product(("frobenius", "nuclear"), ("base", "single")):
            norms = getattr(self, f"{kind}_{place}")
            if len(norms) != len(self.layers):
                raise ValueError(
                    f"{kind}_{place} must have a number for each of "
                    f"{len(self.layers)} layers, got {len(norms)} "
                    f"(matrix '{self.matrix}')"
                )
        return self

    @property
    def difference_base(self) -> float | None:
        """Mean absolute difference of the nuclear norms of neighbouring layers.

        As in arXiv:2410.23743, at the base; None where one layer has the matrix.
        """
        return _mean_difference(self.nuclear_base)

    @property
    def difference_single(self) -> float | None:
        """The same at the task's own model."""
        return _mean_difference(self.nuclear_single)


def _mean_difference(norms: Sequence[float]) -> float | None:
    differences = [abs(after - before) for before, after in pairwise(norms)]
    return sum(differences) / len(differences) if differences else None


Moves = Literal["models", "layers"]
"""What a step moves: every model's factor alike in all layers, or each by itself."""


class StepReport(Record):
    """One step of treatments chosen by measurement.

    Attributes:
        moves: whole models or single layers.
        objective: of the proposed merge, on all samples.
        improvement, improvement_se: over the merge before, less a hundred times what
            is lacking of floors in both, and its standard error; on all samples.
        improvement_apart: the same on the samples that gave no slopes; None where
            every sample chooses.
        radius: largest change of a factor.
        taken: whether it improved by more than the error, got no worse apart or mends a
            floor, and breaks none.
        forwards: forward passes over the choosing samples so far.
        shortfall: what the proposed merge lacks of floors, in recovered gain, summed.
        breaks_floor: whether it misses a floor that was kept, or one by more than
            before.
        mends_floor: whether it lacks less of the floors than before, on all samples.
    """

    moves: Moves = "layers"
    objective: FiniteFloat
    improvement: FiniteFloat
    improvement_se: FiniteFloat
    improvement_apart: FiniteFloat | None = None
    radius: FiniteFloat
    taken: bool
    forwards: int
    shortfall: FiniteFloat = 0.0
    breaks_floor: bool = False
    mends_floor: bool = False


class WholeScores(Record):
    """Scores of whole models on one set of samples.

    Attributes:
        n_samples: how many; 0 leaves all scores None.
        score_base, score_single, score_merged, score_treated: of the base, the task's
            own model, the plain merge and the merge under the plan.
        recovered_merged, recovered_treated: share of the single model's gain over the
            base that the merge has; None where there is no gain.
        change_se: standard error of ``score_treated - score_merged``, paired over the
            samples; None for fewer than two.
        floor_kept: whether the merge by the plan keeps the task's floor; None without
            one, and where there is no gain.
    """

    n_samples: int
    score_base: FiniteFloat | None = None
    score_single: FiniteFloat | None = None
    score_merged: FiniteFloat | None = None
    score_treated: FiniteFloat | None = None
    recovered_merged: FiniteFloat | None = None
    recovered_treated: FiniteFloat | None = None
    change_se: FiniteFloat | None = None
    floor_kept: bool | None = None

    @property
    def fall(self) -> float:
        """By how much the treated merge is worse; 0 within two standard errors."""
        scores = (self.score_merged, self.score_treated, self.change_se)
        merged, treated, error = (score or 0.0 for score in scores)
        is_sure = self.change_se is not None and merged - treated > 2 * error
        return merged - treated if is_sure else 0.0


class TaskReport(WholeScores):
    """One task: its calibration data, and what was measured on the choosing samples.

    Attributes:
        model: the task's own model, as the recipe spells it.
        metric: what a score is.
        calibration: the data, as the recipe spells it.
        calibration_sha256: of the rows that were used, in any order.
        calibration_rows: a hash of each row's content, sorted, to find them elsewhere.
        n_tokens, n_targets, n_truncated: tokens, scored tokens, shortened texts.
        accepted_on: the same scores on the samples that did not choose.
        layers: every layer's; none where treatments are chosen by measurement.
        slopes: every (layer, model)'s, where they are.
        task_weight: how much the task counts in what is raised; 0 is not at all.
        floor: recovered gain that it was not to fall below; None without one.
        gradients: every weight matrix's, where the recipe asks for them.
    """

    model: Name
    metric: Literal["loss", "accuracy", "agreement"]
    calibration: Name
    calibration_sha256: str = ""
    calibration_rows: tuple[str, ...] = ()
    n_tokens: int = 0
    n_targets: int = 0
    n_truncated: int = 0
    accepted_on: WholeScores = WholeScores(n_samples=0)
    layers: tuple[LayerScores, ...] = ()
    slopes: tuple[Slope, ...] = ()
    task_weight: FiniteFloat = 1.0
    floor: FiniteFloat | None = None
    gradients: tuple[MatrixGradients, ...] = ()


class GuardReport(Record):
    """Whether the treated merge held on the samples apart, the judging ones.

    Attributes:
        setting: ``keep_better`` may put the plain merge back, ``report`` may not.
        acted: whether the plain merge was put back.
        unit: of the difference: ``gain`` is in shares of each task's gain.
        difference: treated minus plain, of what was raised, floors left out: the
            weighted mean over the tasks or the worst; None without samples.
        reason: one sentence.
    """

    setting: Literal["keep_better", "report"]
    acted: bool
    unit: Literal["gain", "raw"]
    difference: FiniteFloat | None
    reason: str
