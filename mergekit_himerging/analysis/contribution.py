"""Scores -> impacts, contributions and conflicts -> what is done with each layer.

Invariant: plain arithmetic on arrays of numbers, the same for any order of tasks; no
file, model or recipe is known here. Hi-Merging, arXiv:2506.12379, section 3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Action = Literal["keep", "shrink", "drop"]
Compare = Literal["gain", "raw"]
Mixed = Literal["degraded", "interfering"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TaskScores:
    """Scores of every variant on one task's own calibration samples.

    F is the base, M the task's single model, G the initial merged model. All arrays are
    float64, finite, in the metric's unit, higher is better; borrowed, read only. Column
    i is the same sample in all of them.

    Attributes:
        model: the task's model, for messages and decisions.
        base: scores of F, ``[samples]``.
        single: of M, ``[samples]``.
        merged: of G, ``[samples]``.
        removed_single: of M without layer l's delta, ``[layers, samples]``.
        added_single: of F plus layer l's delta of M, ``[layers, samples]``.
        removed_merged: of G without layer l's delta, ``[layers, samples]``.
        added_merged: of F plus layer l's delta of G, ``[layers, samples]``.

    Raises:
        ValueError: an array is not float64, or empty, or not finite, or the shapes
            disagree.
    """

    model: str
    base: FloatArray
    single: FloatArray
    merged: FloatArray
    removed_single: FloatArray
    added_single: FloatArray
    removed_merged: FloatArray
    added_merged: FloatArray

    def __post_init__(self) -> None:
        samples = self.base.shape[:1] or (1,)
        layers = self.removed_single.shape[:1] or (1,)
        for field in fields(self):
            if field.name in ("base", "single", "merged"):
                _check_array(self, field.name, samples)
            elif field.name != "model":
                _check_array(self, field.name, (*layers, *samples))


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """What each layer does for one task, in the single model and in the merge.

    Means over the task's samples, in the metric's unit; arrays are ``[layers]``,
    float64, finite.

    Attributes:
        model: the task's model.
        gain: P(M) - P(F), what fine-tuning won on the task's own samples.
        removal_single: alpha(M, l), what M loses without layer l's delta.
        addition_single: beta(M, l), what F wins by layer l's delta of M.
        removal_merged: alpha(G, l).
        addition_merged: beta(G, l).
        contribution_single: c(M, l) = alpha + beta.
        contribution_merged: c(G, l).
        conflict: gamma(l) = c(M, l) - c(G, l); positive where merging weakened the
            task.
        conflict_se: standard error of ``conflict`` over the paired samples; 0 with one
            sample, where it is unknown.
        n_samples: how many samples the means run over.

    Raises:
        ValueError: an array is not float64, or empty, or not finite, or the shapes
            disagree, ``gain`` is not finite, ``conflict_se`` is negative, or
            ``n_samples`` is below 1.
    """

    model: str
    gain: float
    removal_single: FloatArray
    addition_single: FloatArray
    removal_merged: FloatArray
    addition_merged: FloatArray
    contribution_single: FloatArray
    contribution_merged: FloatArray
    conflict: FloatArray
    conflict_se: FloatArray
    n_samples: int

    def __post_init__(self) -> None:
        if not math.isfinite(self.gain):
            raise ValueError(f"gain must be finite, got {self.gain} ('{self.model}')")
        if self.n_samples < 1:
            raise ValueError(
                f"n_samples must be at least 1, got {self.n_samples} ('{self.model}')"
            )
        for field in fields(self):
            if field.name not in ("model", "gain", "n_samples"):
                _check_array(self, field.name, self.conflict.shape[:1] or (1,))
        if (self.conflict_se < 0).any():
            raise ValueError(
                "conflict_se must be at least 0, "
                f"got {self.conflict_se.min():g} ('{self.model}')"
            )

    @property
    def n_layers(self) -> int:
        """Number of layers measured."""
        return len(self.conflict)


@dataclass(frozen=True, slots=True)
class Rules:
    """How conflicts are resolved, where the paper leaves it open.

    Attributes:
        mixed: where some tasks lose in a layer and others do not, ``degraded`` shrinks
            the deltas of those that lose, ``interfering`` those of the others.
        layer_density: factor on the density of a shrunk delta, in [0, 1].
        layer_scale: factor on the scale of a shrunk delta, in [0, 1].
        max_layers: how many layers are treated, from the largest summed conflict down;
            None for all.
        confidence: standard errors that a conflict must exceed to count, at least 0.
        compare: ``gain`` divides each task's contributions and conflicts by the task's
            own gain before tasks are compared or summed; ``raw`` takes them as they
            are.

    Raises:
        ValueError: a value lies outside its range.
    """

    mixed: Mixed = "degraded"
    layer_density: float = 0.5
    layer_scale: float = 0.5
    max_layers: int | None = None
    confidence: float = 0.0
    compare: Compare = "gain"

    def __post_init__(self) -> None:
        _check_choice("mixed", self.mixed, get_args(Mixed))
        _check_choice("compare", self.compare, get_args(Compare))
        _check_share("layer_density", self.layer_density)
        _check_share("layer_scale", self.layer_scale)
        if self.max_layers is not None and self.max_layers < 0:
            raise ValueError(f"max_layers must be at least 0, got {self.max_layers}")
        if not 0 <= self.confidence < math.inf:
            raise ValueError(
                "confidence must be a finite number of standard errors, at least 0, "
                f"got {self.confidence:g}"
            )


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done with one model's delta in one layer.

    Attributes:
        layer: 0-based decoder block of the output model.
        model: the model.
        action: ``keep`` leaves the delta, ``shrink`` prunes and scales it further,
            ``drop`` takes it out.
        density_factor: on the model-wise density, in [0, 1]; 1 unless shrunk.
        scale_factor: on the model-wise scale, in [0, 1]; 1 unless shrunk.
        reason: one sentence with the numbers that decided, tasks in the order of their
            models.

    Raises:
        ValueError: a value lies outside its range or does not fit the action.
    """

    layer: int
    model: str
    action: Action
    density_factor: float = 1.0
    scale_factor: float = 1.0
    reason: str = ""

    def __post_init__(self) -> None:
        if self.layer < 0:
            raise ValueError(f"layer must be at least 0, got {self.layer}")
        _check_choice("action", self.action, get_args(Action))
        _check_share("density_factor", self.density_factor)
        _check_share("scale_factor", self.scale_factor)
        factors = (self.density_factor, self.scale_factor)
        if self.action != "shrink" and factors != (1, 1):
            raise ValueError(
                f"action '{self.action}' must have all factors at 1, "
                f"got density_factor {factors[0]:g}, scale_factor {factors[1]:g}"
            )


@dataclass(frozen=True, slots=True)
class Resolution:
    """All decisions of one merge.

    Attributes:
        order: every layer once, by summed conflict Gamma(l) from the largest down, ties
            by layer number.
        decisions: one for every (layer, model), sorted by layer, then model.

    Raises:
        ValueError: ``order`` or ``decisions`` miss or repeat an entry, or ``decisions``
            are not sorted.
    """

    order: tuple[int, ...]
    decisions: tuple[Decision, ...]

    def __post_init__(self) -> None:
        layers = range(len(self.order))
        if sorted(self.order) != list(layers):
            raise ValueError(
                f"order must name each of {len(layers)} layers once, "
                f"got {list(self.order)}"
            )
        models = sorted({decision.model for decision in self.decisions})
        pairs = [(decision.layer, decision.model) for decision in self.decisions]
        if pairs != [(layer, model) for layer in layers for model in models]:
            raise ValueError(
                f"decisions must name each of {len(layers)} layers with each of the "
                f"models {models} once, in order, got {pairs}"
            )


@dataclass(frozen=True, slots=True)
class _Stand:
    """How one task stands in one layer, in the unit that tasks are compared in."""

    model: str
    contribution: float
    conflict: float
    conflict_se: float
    is_weakened: bool


def measure_layers(scores: TaskScores) -> Contribution:
    """Measure what each layer's delta does for one task, alone and in the merge.

    With P the mean score (arXiv:2506.12379, section 3):
    ``alpha(M, l) = P(M) - P(M without l)``, ``beta(M, l) = P(F with l of M) - P(F)``,
    ``c(M, l) = alpha + beta`` and ``gamma(l) = c(M, l) - c(G, l)``. All differences are
    taken sample by sample before the mean, so that whole-number scores (accuracy) give
    exact zeros and ties, and the standard error is that of paired samples.

    Args:
        scores: the task's scores, ``[samples]`` and ``[layers, samples]``; read only.

    Returns:
        Means over samples, ``[layers]``, in the metric's unit.
    """
    # [layers, samples] each
    removal_single = scores.single - scores.removed_single
    addition_single = scores.added_single - scores.base
    removal_merged = scores.merged - scores.removed_merged
    addition_merged = scores.added_merged - scores.base
    contribution_single = removal_single + addition_single
    contribution_merged = removal_merged + addition_merged
    conflict = contribution_single - contribution_merged
    n_samples = len(scores.base)
    if n_samples > 1:
        conflict_se = conflict.std(axis=1, ddof=1) / math.sqrt(n_samples)
    else:
        conflict_se = np.zeros(len(conflict))
    return Contribution(
        model=scores.model,
        gain=float((scores.single - scores.base).mean()),
        removal_single=removal_single.mean(axis=1),
        addition_single=addition_single.mean(axis=1),
        removal_merged=removal_merged.mean(axis=1),
        addition_merged=addition_merged.mean(axis=1),
        contribution_single=contribution_single.mean(axis=1),
        contribution_merged=contribution_merged.mean(axis=1),
        conflict=conflict.mean(axis=1),
        conflict_se=conflict_se,
        n_samples=n_samples,
    )


def resolve_conflicts(
    contributions: Sequence[Contribution], rules: Rules
) -> Resolution:
    """Decide for each (layer, model) whether its delta is kept, shrunk or dropped.

    Conflict resolution of Hi-Merging (arXiv:2506.12379, section 3). A task is weakened
    in a layer where its ``gamma(l) > confidence * standard error``. In each layer:

    - every task is weakened: the model with the largest ``c(M, l)`` is kept, of equals
      the one that sorts first; the others are dropped. One model alone is thus kept.
    - some are: those are shrunk (``mixed="degraded"``), or the others are
      (``"interfering"``).
    - none is: all are kept.

    The order of layers, ``Gamma(l) = sum_m gamma_m(l)`` from the largest down, takes
    the conflicts as they are, whatever the confidence.

    Args:
        contributions: one per task, any order; read only.
        rules: the options.

    Returns:
        The order of layers and one decision for every (layer, model).

    Raises:
        ValueError: there is no task, two tasks have the same model, the numbers of
            layers differ, a task has no positive gain with ``compare="gain"``, or a
            task has one sample with a positive ``confidence``.
    """
    tasks = sorted(contributions, key=lambda task: task.model)
    _check_tasks(tasks, rules)
    n_layers = tasks[0].n_layers
    stands = [
        [_stand_in_layer(task, layer, rules) for task in tasks]
        for layer in range(n_layers)
    ]
    totals = [math.fsum(stand.conflict for stand in in_layer) for in_layer in stands]
    order = sorted(range(n_layers), key=lambda layer: (-totals[layer], layer))
    n_treated = n_layers if rules.max_layers is None else rules.max_layers
    decisions: list[Decision] = []
    for layer, in_layer in enumerate(stands):
        rank = order.index(layer)
        if rank < n_treated:
            decisions += _resolve_layer(layer, in_layer, rules)
            continue
        unit = " of the gains" if rules.compare == "gain" else ""
        reason = (
            f"ranks {rank + 1} of {n_layers} by summed conflict "
            f"({_show(totals[layer])}{unit}), beyond max_layers {n_treated}"
        )
        decisions += [
            Decision(layer, stand.model, "keep", reason=reason) for stand in in_layer
        ]
    return Resolution(order=tuple(order), decisions=tuple(decisions))


def recovered_gain(
    score_merged: float, score_base: float, score_single: float
) -> float | None:
    """Compute the share of a single model's gain that a merge recovers.

    ``(P(G) - P(F)) / (P(M) - P(F))``: 1 as good as the single model, 0 no better than
    the base, negative worse than the base.

    Args:
        score_merged: P(G), mean score of the merge, higher is better.
        score_base: P(F), of the base, same samples and unit.
        score_single: P(M), of the task's single model, same samples and unit.

    Returns:
        The share, dimensionless; None where the single model does not beat the base.

    Raises:
        ValueError: a score is not finite.
    """
    scores = (score_merged, score_base, score_single)
    if not all(map(math.isfinite, scores)):
        raise ValueError(
            f"scores must be finite, got merged {score_merged:g}, base {score_base:g}, "
            f"single {score_single:g}"
        )
    gain = score_single - score_base
    return (score_merged - score_base) / gain if gain > 0 else None


def _stand_in_layer(task: Contribution, layer: int, rules: Rules) -> _Stand:
    unit = task.gain if rules.compare == "gain" else 1.0
    conflict = float(task.conflict[layer])
    conflict_se = float(task.conflict_se[layer])
    return _Stand(
        model=task.model,
        contribution=float(task.contribution_single[layer]) / unit,
        conflict=conflict / unit,
        conflict_se=conflict_se / unit,
        is_weakened=conflict > rules.confidence * conflict_se,
    )


def _resolve_layer(layer: int, stands: list[_Stand], rules: Rules) -> list[Decision]:
    """Decide for every task of one layer; ``stands`` are sorted by model."""
    n_weakened = sum(stand.is_weakened for stand in stands)
    conflicts = _describe_conflicts(stands, n_weakened, rules)
    # Of equals, max takes the first: the model that sorts first.
    best = max(stands, key=lambda stand: stand.contribution)
    decisions = []
    for stand in stands:
        action: Action = "keep"
        if n_weakened == 0:
            reason = conflicts
        elif n_weakened < len(stands):
            does = "does" if stand.is_weakened else "does not"
            reason = f"{conflicts}; its own {does} ({_show(stand.conflict)})"
            if stand.is_weakened == (rules.mixed == "degraded"):
                action = "shrink"
        elif stand is best:
            reason = f"{conflicts}; contributes most ({_show(best.contribution)})"
        else:
            action = "drop"
            is_less = stand.contribution < best.contribution
            reason = (
                f"{conflicts}; contributes {'less than' if is_less else 'as much as'} "
                f"'{best.model}' ({_show(stand.contribution)} against "
                f"{_show(best.contribution)}){'' if is_less else ', which sorts first'}"
            )
        decisions.append(
            Decision(
                layer=layer,
                model=stand.model,
                action=action,
                density_factor=rules.layer_density if action == "shrink" else 1.0,
                scale_factor=rules.layer_scale if action == "shrink" else 1.0,
                reason=reason,
            )
        )
    return decisions


def _describe_conflicts(stands: list[_Stand], n_weakened: int, rules: Rules) -> str:
    """Say how many tasks lose in a layer, with every task's conflict."""
    n_tasks = len(stands)
    if n_weakened == 0:
        who = "no task loses"
    elif n_weakened < n_tasks:
        verb = "loses" if n_weakened == 1 else "lose"
        who = f"{n_weakened} of {n_tasks} tasks {verb}"
    elif n_tasks == 1:
        who = "the only task loses"
    else:
        who = f"{'both' if n_tasks == 2 else f'all {n_tasks}'} tasks lose"
    numbers = [_show(stand.conflict) for stand in stands]
    beyond = ""
    if rules.confidence > 0:
        beyond = f" by more than {rules.confidence:g} standard errors"
        numbers = [
            f"{number} ± {_show(stand.conflict_se)}"
            for number, stand in zip(numbers, stands, strict=True)
        ]
    *head, last = numbers
    listed = f"{', '.join(head)} and {last}" if head else last
    unit = " of the gain" if rules.compare == "gain" else ""
    return f"{who} here{beyond} (conflict {listed}{unit})"


def _show(value: float) -> str:
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{value + 0.0:.3g}"


def _check_tasks(tasks: list[Contribution], rules: Rules) -> None:
    """Check that tasks, sorted by model, can be compared under the rules."""
    if not tasks:
        raise ValueError("contributions must have at least one task, got none")
    first = tasks[0]
    models = [task.model for task in tasks]
    if len(set(models)) != len(models):
        raise ValueError(f"contributions must have distinct models, got {models}")
    for task in tasks:
        if task.n_layers != first.n_layers:
            raise ValueError(
                "contributions must have the same number of layers, "
                f"got {first.n_layers} ('{first.model}') and {task.n_layers} "
                f"('{task.model}')"
            )
        if rules.compare == "gain" and task.gain <= 0:
            raise ValueError(
                f"model '{task.model}' must beat the base on its own calibration data "
                f"to compare gains, got gain {_show(task.gain)}; mend its calibration "
                "data or set compare: raw"
            )
        if rules.confidence > 0 and task.n_samples == 1:
            raise ValueError(
                f"model '{task.model}' must have at least two calibration samples with "
                f"confidence {rules.confidence:g}, got 1; add samples or set "
                "confidence: 0"
            )


def _check_array(
    record: TaskScores | Contribution, name: str, shape: tuple[int, ...]
) -> None:
    array: FloatArray = getattr(record, name)
    where = f"('{record.model}')"
    if array.dtype != np.float64:
        raise ValueError(f"{name} must be float64, got {array.dtype} {where}")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape} {where}")
    if array.size == 0:
        raise ValueError(f"{name} must not be empty, got shape {shape} {where}")
    wrong = np.argwhere(~np.isfinite(array)).tolist()
    if wrong:
        value = array[tuple(wrong[0])]
        raise ValueError(f"{name} must be finite, got {value} at {wrong[0]} {where}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(f"'{choice}'" for choice in choices)
        raise ValueError(f"{name} must be one of {listed}, got '{value}'")


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value:g}")
