"""Test rows of all methods -> recovered gains, differences and ranks, with intervals.

Invariant: one draw of rows serves all models of a task, so that differences are paired;
a method that was tested with several seeds counts with its mean over them, row by row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from methods import METHODS
from results import Samples, Scored, SettingResult
from scipy.stats import rankdata

from mergekit_himerging.evaluation.intervals import (
    percentile_interval,
    resample_means,
)

FloatArray = npt.NDArray[np.float64]
N_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval over test rows."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Standing:
    """How one model does in one setting.

    Attributes:
        name: of the row, or of the reference.
        scores: by task, then metric, the mean; of ``loss`` in nats per token.
        generated: by task with free answers, then metric, the mean over the rows that
            were answered.
        recovered: by task, share of the expert's gain in loss.
        mean: of the recovered gains over the tasks.
        behind: ``mean`` minus that of the best method that is not Hi-Merging; None for
            that one and for references.
        improvement: mean over the tasks of the headline metric's relative change
            against the base, above 0 where it is better; None where the base has 0.
        rank: mean over the tasks of the rank among the methods by headline metric; None
            for references.
        forgotten: loss on general text minus the base's.
        n_seeds: that it was tested with.
    """

    name: str
    scores: Mapping[str, Mapping[str, float]]
    generated: Mapping[str, Mapping[str, float]]
    recovered: Mapping[str, Estimate]
    mean: Estimate
    behind: Estimate | None
    improvement: float | None
    rank: float | None
    forgotten: Estimate
    n_seeds: int

    @property
    def is_ours(self) -> bool:
        """Whether it is Hi-Merging."""
        return self.name in METHODS and METHODS[self.name].family == "ours"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All models of one setting.

    Attributes:
        result: where it is from.
        references: base, experts and the mixed adapter.
        methods: the tested rows, the best mean recovered gain first.
        best_other: the first of them that is not Hi-Merging; None where there is none.
        headline: by task, the metric that the tables lead with.
    """

    result: SettingResult
    references: Sequence[Standing]
    methods: Sequence[Standing]
    best_other: Standing | None
    headline: Mapping[str, str]


def compare(result: SettingResult) -> Comparison:
    """Compare everything that has been tested in a setting."""
    tests = {name: [test] for name, test in result.references.items()}
    tests |= {name: row.tests for name, row in result.rows.items() if row.tests}
    names = list(tests)
    draws, means = _recover(result, tests)
    drawn_mean = {
        n: np.mean([draws[n, t] for t in result.tasks], axis=0) for n in names
    }
    mean = {n: float(np.mean([means[n, t] for t in result.tasks])) for n in names}
    methods = [n for n in names if n in result.rows]
    others = [n for n in methods if METHODS[n].family == "other"]
    best = max(others, key=lambda n: mean[n]) if others else None
    headline = {
        task: "accuracy"
        if "accuracy" in result.references["base"].samples[task]
        else "loss"
        for task in result.tasks
    }
    scores = {n: _average([test.samples for test in tests[n]]) for n in names}
    ranks = _rank(scores, methods, headline)
    general = _general(tests)

    def estimate(value: float, drawn: FloatArray) -> Estimate:
        return Estimate(value, *percentile_interval(drawn))

    standings = {
        n: Standing(
            name=n,
            scores=scores[n],
            generated=_average([test.generated for test in tests[n]]),
            recovered={t: estimate(means[n, t], draws[n, t]) for t in result.tasks},
            mean=estimate(mean[n], drawn_mean[n]),
            behind=None
            if best is None or n == best or n not in methods
            else estimate(mean[n] - mean[best], drawn_mean[n] - drawn_mean[best]),
            improvement=_improve(scores["base"], scores[n], headline),
            rank=ranks.get(n),
            forgotten=estimate(*general[n]),
            n_seeds=len(tests[n]),
        )
        for n in names
    }
    return Comparison(
        result=result,
        references=[standings[n] for n in names if n in result.references],
        methods=sorted(
            (standings[n] for n in methods), key=lambda s: s.mean.value, reverse=True
        ),
        best_other=None if best is None else standings[best],
        headline=headline,
    )


def _losses(tests: Sequence[Scored], task: str) -> FloatArray:
    """Return the mean loss over seeds of every row, ``[rows]``."""
    return np.mean([test.samples[task]["loss"] for test in tests], axis=0)


def _draw(
    tests: Mapping[str, Sequence[Scored]], task: str
) -> tuple[FloatArray, FloatArray]:
    """Return mean scores, ``[models]``, and of every draw, ``[models, draws]``."""
    scores = -np.stack([_losses(some, task) for some in tests.values()])
    drawn = resample_means(scores, n_resamples=N_RESAMPLES, seed=0)
    return scores.mean(axis=1), drawn


def _recover(
    result: SettingResult, tests: Mapping[str, Sequence[Scored]]
) -> tuple[dict[tuple[str, str], FloatArray], dict[tuple[str, str], float]]:
    """Return recovered gains by (model, task): of every draw, and of all rows.

    Draws of rows on which an expert does not beat the base are left out: there is no
    gain to recover on them.
    """
    names = list(tests)
    base = names.index("base")
    found = {task: _draw(tests, task) for task in result.tasks}
    gains = {
        task: drawn[names.index(task)] - drawn[base]
        for task, (_, drawn) in found.items()
    }
    has_gain = np.all([gain > 0 for gain in gains.values()], axis=0)
    draws, means = {}, {}
    for task, (all_rows, drawn) in found.items():
        gain = all_rows[names.index(task)] - all_rows[base]
        over_base = (drawn - drawn[base])[:, has_gain] / gains[task][has_gain]
        for number, name in enumerate(names):
            draws[name, task] = over_base[number]
            means[name, task] = float((all_rows[number] - all_rows[base]) / gain)
    return draws, means


def _general(
    tests: Mapping[str, Sequence[Scored]],
) -> dict[str, tuple[float, FloatArray]]:
    """Return by how much the loss on general text is above the base's."""
    base = list(tests).index("base")
    all_rows, drawn = _draw(tests, "general")
    return {
        name: (float(all_rows[base] - all_rows[n]), drawn[base] - drawn[n])
        for n, name in enumerate(tests)
    }


def _average(tests: Sequence[Samples]) -> dict[str, dict[str, float]]:
    """Return means by task and metric, over rows that have the metric, and seeds."""

    def average(task: str, metric: str) -> float:
        lists = [samples[task][metric] for samples in tests]
        known = [[v for v in values if v is not None] for values in lists]
        return float(np.mean([np.mean(values) for values in known]))

    return {
        task: {metric: average(task, metric) for metric in metrics}
        for task, metrics in tests[0].items()
        if all(task in samples for samples in tests)
    }


def _rank(
    scores: Mapping[str, Mapping[str, Mapping[str, float]]],
    methods: Sequence[str],
    headline: Mapping[str, str],
) -> dict[str, float]:
    """Return each method's rank, 1 the best, as a mean over the tasks."""
    ranks = []
    for task, metric in headline.items():
        sign = 1 if metric == "loss" else -1
        ranks.append(rankdata([sign * scores[name][task][metric] for name in methods]))
    means = np.mean(ranks, axis=0)
    return dict(zip(methods, map(float, means), strict=True))


def _improve(
    base: Mapping[str, Mapping[str, float]],
    ours: Mapping[str, Mapping[str, float]],
    headline: Mapping[str, str],
) -> float | None:
    """Return the mean relative change, above 0 where it is better."""
    changes = []
    for task, metric in headline.items():
        before = base[task][metric]
        if before == 0:
            return None
        change = (ours[task][metric] - before) / before
        changes.append(-change if metric == "loss" else change)
    return float(np.mean(changes))
