"""Scores of rows -> estimates, differences, recovered gains, forgetting.

Invariant: models are compared on the same rows, row by row; plain arithmetic, no model.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import get_args

import numpy as np

from mergekit_himerging.evaluation.data import Task
from mergekit_himerging.evaluation.intervals import (
    FloatArray,
    Interval,
    bootstrap_mean,
    bootstrap_recovered,
    paired_difference,
    percentile_interval,
    resample_means,
    wilson_interval,
)
from mergekit_himerging.evaluation.metrics import corpus_bleu, score_answers
from mergekit_himerging.evaluation.records import (
    UNITS,
    Difference,
    Estimate,
    Measured,
    Metric,
    ModelInfo,
    Recovered,
    Result,
    Settings,
    orientation,
)

SHARES = ("accuracy", "exact_match")
"""Metrics of 0 and 1, whose intervals are Wilson's."""

Results = Mapping[tuple[str, str], Result]
"""By (model, task)."""


def summarize(model: str, task: Task, measured: Measured, settings: Settings) -> Result:
    """Turn what one model did on one task into scores with intervals.

    Args:
        model: its name.
        task: its rows.
        measured: a value for each of them.
        settings: of the bootstrap.

    Raises:
        ValueError: there are answers, and rouge-score or sacrebleu is not installed.
    """
    samples: dict[Metric, tuple[float | None, ...]] = {"loss": measured.loss}
    if any(value is not None for value in measured.accuracy):
        samples["accuracy"] = measured.accuracy
    estimates: dict[Metric, Estimate] = {}
    free = [n for n, answer in enumerate(measured.answers) if answer is not None]
    if free:
        scores, counts = score_answers(
            [measured.answers[n] or "" for n in free],
            [task.rows[n].completion for n in free],
        )
        for name, values in scores.items():
            by_row = dict(zip(free, values.tolist(), strict=True))
            samples[name] = tuple(by_row.get(n) for n in range(len(task.rows)))
        estimates["corpus_bleu"] = _estimate_corpus_bleu(counts, settings)
    for metric, cells in samples.items():
        present = np.array([cell for cell in cells if cell is not None])
        estimates[metric] = _estimate_mean(metric, present, settings)
    return Result(
        model=model,
        task=task.name,
        estimates={name: estimates[name] for name in _ordered(estimates)},
        samples={name: samples[name] for name in _ordered(samples)},
        measured=measured,
    )


def compare_models(
    models: Sequence[ModelInfo], results: Results, settings: Settings
) -> tuple[Difference, ...]:
    """Compare every merge with the base, with the experts and with other merges."""
    merges = [model.name for model in models if model.role == "merge"]
    others = [
        *(model.name for model in models if model.role == "base"),
        *(model.name for model in models if model.role == "expert"),
    ]
    pairs = [(merge, other) for merge in merges for other in others]
    pairs += combinations(merges, 2)
    return tuple(
        difference
        for task in _tasks(results)
        for model, other in pairs
        for difference in _compare(results, model, other, task, settings)
    )


def measure_forgetting(
    models: Sequence[ModelInfo], results: Results, settings: Settings
) -> tuple[Difference, ...]:
    """Compare experts and merges with the base on tasks that are not their own."""
    base = _find_base(models)
    tuned_for = {model.task for model in models if model.role == "expert"}
    if base is None:
        return ()
    return tuple(
        difference
        for task in _tasks(results)
        for model in models
        if model.role != "base"
        and task not in (tuned_for if model.role == "merge" else {model.task})
        for difference in _compare(results, model.name, base, task, settings)
    )


def measure_recovery(
    models: Sequence[ModelInfo], results: Results, settings: Settings
) -> tuple[Recovered, ...]:
    """Compute the share of each expert's gain on its task that every merge has."""
    base = _find_base(models)
    if base is None:
        return ()
    return tuple(
        Recovered(
            model=merge.name,
            expert=expert.name,
            task=expert.task,
            metric=metric,
            share=_estimate_share(
                [
                    _pick(results[name, expert.task], metric)
                    for name in (merge.name, base, expert.name)
                ],
                settings,
            ),
        )
        for expert in models
        if expert.role == "expert" and expert.task is not None
        for merge in models
        if merge.role == "merge"
        for metric in results[base, expert.task].samples
    )


def _compare(
    results: Results, model: str, other: str, task: str, settings: Settings
) -> list[Difference]:
    found = []
    for metric in results[model, task].samples:
        ours = _pick(results[model, task], metric)
        theirs = _pick(results[other, task], metric)
        gain, interval, p_value = paired_difference(
            ours, theirs, n_resamples=settings.n_resamples, seed=settings.seed
        )
        found.append(
            Difference(
                model=model,
                other=other,
                task=task,
                metric=metric,
                gain=_estimate(gain, interval, len(ours), UNITS[metric]),
                p_value=p_value,
            )
        )
    return found


def _estimate_mean(metric: Metric, values: FloatArray, settings: Settings) -> Estimate:
    if metric in SHARES:
        interval: Interval = wilson_interval(int(values.sum()), len(values))
    else:
        interval = bootstrap_mean(
            values, n_resamples=settings.n_resamples, seed=settings.seed
        )
    return _estimate(float(values.mean()), interval, len(values), UNITS[metric])


def _estimate_corpus_bleu(counts: FloatArray, settings: Settings) -> Estimate:
    n_answers = counts.shape[1]
    value = float(corpus_bleu(counts.sum(axis=1, keepdims=True))[0])
    interval = None
    if n_answers > 1:
        means = resample_means(
            counts, n_resamples=settings.n_resamples, seed=settings.seed
        )
        interval = percentile_interval(corpus_bleu(means * n_answers))
    return _estimate(value, interval, n_answers, UNITS["corpus_bleu"])


def _estimate_share(
    scores: Sequence[FloatArray], settings: Settings
) -> Estimate | None:
    merged, base, single = scores
    found = bootstrap_recovered(
        merged, base, single, n_resamples=settings.n_resamples, seed=settings.seed
    )
    if found is None:
        return None
    return _estimate(*found, len(merged), "share of the expert's gain")


def _estimate(value: float, interval: Interval, n: int, unit: str) -> Estimate:
    low, high = interval if interval is not None else (None, None)
    return Estimate(value=value, low=low, high=high, n=n, unit=unit)


def _pick(result: Result, metric: Metric) -> FloatArray:
    """Return the rows' values, higher is better, ``[samples]``."""
    cells = [cell for cell in result.samples[metric] if cell is not None]
    return orientation(metric) * np.array(cells, dtype=np.float64)


def _find_base(models: Sequence[ModelInfo]) -> str | None:
    return next((model.name for model in models if model.role == "base"), None)


def _tasks(results: Results) -> list[str]:
    return list(dict.fromkeys(task for _, task in results))


def _ordered(found: Mapping[Metric, object]) -> list[Metric]:
    return [metric for metric in get_args(Metric) if metric in found]
