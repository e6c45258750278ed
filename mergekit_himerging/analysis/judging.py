"""Whole models on one set of samples: what merges are ranked by, the guard, reports.

Invariant: differences are in shares of the gains on all samples, or in scores where the
recipe says so; the guard compares by the objective that chose, in the same shares as a
step is proved by.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mergekit_himerging.analysis.contribution import FloatArray, recovered_gain
from mergekit_himerging.analysis.objective import Objective
from mergekit_himerging.analysis.proof import Proof, SideScores
from mergekit_himerging.analysis.settings import AnalysisSettings
from mergekit_himerging.recipe import TaskSettings
from mergekit_himerging.scores import GuardReport, WholeScores


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """Per-sample scores of whole models on one set of samples, each ``[n]``."""

    base: FloatArray
    single: FloatArray
    merged: FloatArray


def check_gains(
    choosing: Mapping[str, Whole],
    aims: Mapping[str, TaskSettings],
    settings: AnalysisSettings,
) -> None:
    """Check that every task that counts has a gain to take shares of.

    Args:
        choosing: by model, on the choosing samples.
        aims: each model's task.
        settings: how the merge is analysed.

    Raises:
        ValueError: an expert is no better than the base on its own task.
    """
    remedy = "set compare: raw"
    if settings.resolve == "measured":
        remedy = "exclude its task with task_weight: 0"
    for model, whole in sorted(choosing.items()):
        gain = float(np.mean(whole.single - whole.base))
        if gain > 0:
            continue
        if aims[model].task_weight > 0:
            raise ValueError(
                f"model '{model}' must beat the base on its own calibration data to "
                f"compare gains, got gain {gain:.3g}; mend its calibration data or "
                + remedy
            )
        if aims[model].floor is not None:
            raise ValueError(
                f"model '{model}' must beat the base on its own calibration data to "
                f"have a floor, got gain {gain:.3g} and floor "
                f"{aims[model].floor:g}; mend its calibration data or remove the floor"
            )


def find_gains(
    wholes: Mapping[str, Whole], settings: AnalysisSettings
) -> dict[str, float]:
    """Return what a task's scores are divided by: its gain, or 1 where raw.

    A task without a gain is one that does not count, so any number serves.
    """
    gains = {m: float(np.mean(w.single - w.base)) for m, w in wholes.items()}
    is_raw = settings.rules.compare == "raw"
    return {m: 1.0 if is_raw or gain <= 0 else gain for m, gain in gains.items()}


def make_objective(
    wholes: Mapping[str, Whole],
    gains: Mapping[str, float],
    settings: AnalysisSettings,
    aims: Mapping[str, TaskSettings],
) -> Objective:
    """Make what merges are compared by, on one set of samples; tasks as in ``wholes``.

    A floor is a score on these very samples, whatever the gains are taken from.
    """
    is_raw = settings.rules.compare == "raw"
    return Objective(
        settings.objective,
        [np.zeros_like(w.base) if is_raw else w.base for w in wholes.values()],
        [gains[model] for model in wholes],
        [aims[model].task_weight for model in wholes],
        [_find_least(whole, aims[model].floor) for model, whole in wholes.items()],
    )


def make_proof(
    choosing: Mapping[str, Whole],
    accepting: Mapping[str, Whole],
    settings: AnalysisSettings,
    aims: Mapping[str, TaskSettings],
) -> Proof:
    """Make what merges are proved by: on either side's samples, and on all of them.

    Shares are of the gains on all samples, so that the objective is the recovered gain
    on these; where they vanish, of those on the choosing samples, which are known to be
    positive, as the objective on these always is.
    """
    together = {
        model: Whole(
            *(
                np.concatenate([getattr(w[model], name) for w in (choosing, accepting)])
                for name in ("base", "single", "merged")
            )
        )
        for model in choosing
    }
    is_apart = all(len(whole.merged) > 0 for whole in accepting.values())
    first = find_gains(choosing, settings)
    gains = {
        model: gain
        if np.mean(together[model].single - together[model].base) > 0
        else first[model]
        for model, gain in find_gains(together, settings).items()
    }
    return Proof(
        choosing=make_objective(choosing, first, settings, aims),
        together=make_objective(together, gains, settings, aims),
        accepting=make_objective(accepting, gains, settings, aims)
        if is_apart
        else None,
    )


def _find_least(whole: Whole, floor: float | None) -> float | None:
    """Find the mean score that a floor stands for; None without a gain to share."""
    gain = float(np.mean(whole.single - whole.base)) if len(whole.base) else 0.0
    if floor is None or gain <= 0:
        return None
    return float(np.mean(whole.base)) + floor * gain


def mean_score(
    choosing: Mapping[str, Whole],
    treated: Mapping[str, FloatArray],
    settings: AnalysisSettings,
) -> float:
    """Return the mean over the tasks of a treated merge's score, each by its gain."""
    gains = find_gains(choosing, settings)
    return float(np.mean([np.mean(treated[m]) / gains[m] for m in choosing]))


def judge(
    proof: Proof,
    plain: SideScores,
    treated: SideScores,
    models: Sequence[str],
    settings: AnalysisSettings,
) -> GuardReport:
    """Compare the treated merge with the plain one on the accepting samples.

    By the objective that chose: floors first, then weighted tasks. A merge that mends a
    floor, as all samples together tell, may be worse on these.

    Args:
        proof: what merges are compared by.
        plain, treated: scores of the two merges.
        models: whose task is which.
        settings: how the merge is analysed.
    """
    objective = proof.accepting
    if objective is None:
        return GuardReport(
            setting=settings.guard,
            acted=False,
            unit=settings.rules.compare,
            difference=None,
            reason="no samples were left to judge on: raise samples or accept_share",
        )
    before, after = plain.accepting, treated.accepting
    difference = objective.value(after) - objective.value(before)
    missed = objective.shortfalls(after) - objective.shortfalls(before)
    is_worse = objective.merit(after) < objective.merit(before)
    is_mended = is_worse and proof.mends(treated, plain)
    acted = is_worse and not is_mended and settings.guard == "keep_better"
    unit = "of the gain" if settings.rules.compare == "gain" else "in score"
    outcome = "plain merge is put back" if acted else "treated merge is kept"
    facts = [
        f"misses the floor of '{model}' by {abs(more):.3g} "
        f"{'more' if more > 0 else 'less'} than the plain one"
        for model, more in zip(models, missed, strict=True)
        if more
    ]
    if difference == 0:
        facts.append("is as good as the plain one")
    else:
        better = "better" if difference > 0 else "worse"
        facts.append(f"is {better} by {abs(difference):.3g} {unit}")
    samples = "samples that did not choose"
    if settings.resolve == "measured":
        samples = "samples that gave no slopes, though they proved the steps"
    if is_mended:
        samples += ", but mends a floor on all samples"
    return GuardReport(
        setting=settings.guard,
        acted=acted,
        unit=settings.rules.compare,
        difference=difference,
        reason=f"the treated merge {' and '.join(facts)} on {samples}, so the "
        f"{outcome}",
    )


def describe_whole(
    whole: Whole,
    treated: FloatArray,
    floor: float | None = None,
    *,
    is_plain: bool = False,
) -> WholeScores:
    """Describe whole models on one set of samples; the plain merge may be the last."""
    if len(treated) == 0:
        return WholeScores(n_samples=0)
    base, single = float(whole.base.mean()), float(whole.single.mean())
    merged, after = float(whole.merged.mean()), float(treated.mean())
    changes = treated - whole.merged
    n_samples = len(changes)
    error = changes.std(ddof=1) / math.sqrt(n_samples) if n_samples > 1 else None
    least = _find_least(whole, floor)
    return WholeScores(
        n_samples=n_samples,
        score_base=base,
        score_single=single,
        score_merged=merged,
        score_treated=after,
        recovered_merged=recovered_gain(merged, base, single),
        recovered_treated=recovered_gain(after, base, single),
        change_se=None if error is None else float(error),
        floor_kept=None if least is None else (merged if is_plain else after) >= least,
    )
