"""Log-probabilities of a task's probes -> scores of its samples."""

from collections.abc import Sequence

import numpy as np
import torch

from mergekit_himerging.analysis.calibration import Sample, score_samples
from mergekit_himerging.analysis.contribution import FloatArray
from mergekit_himerging.analysis.data import Probes, TaskData
from mergekit_himerging.analysis.jobs import Measured


def score_probes(
    task: TaskData, probes: Probes, measured: Sequence[Measured], field: str
) -> FloatArray:
    """Turn one field's log-probabilities into scores, ``[n]`` or ``[layers, n]``."""
    if not measured:
        return np.zeros(0)
    if task.settings.metric == "agreement" and any(
        batch.teacher is None for batch in probes.batches
    ):
        raise ValueError("batches scored by agreement must have a teacher, got none")
    values = torch.cat([getattr(m, field) for m in measured], dim=-1)
    rows = values if values.dim() == 2 else values[None]
    scores = [
        score_samples(
            probes.samples, row, probes.batches, metric=task.settings.metric
        ).numpy()
        for row in rows
    ]
    return np.stack(scores) if values.dim() == 2 else scores[0]


def score_smoothly(
    samples: Sequence[Sample], values: torch.Tensor, sequence: torch.Tensor
) -> torch.Tensor:
    """Score each sample by what has a slope, also where the metric counts.

    The score of a sample with several options is the log-probability of the right one
    among them, each taken at its mean over tokens; of one option, that mean.

    Args:
        samples: in the order that their options are numbered in.
        values: ``[streams, targets]``, log-probabilities, float64, in nats; read only.
        sequence: ``[targets]``, the option that each target belongs to.

    Returns:
        ``[streams, samples]``, float64, higher is better.
    """
    counts = torch.tensor([o.n_targets for s in samples for o in s.options])
    means = values.new_zeros((len(values), len(counts)))  # [streams, options]
    means.index_add_(1, sequence, values)
    means /= counts
    scores, start = [], 0
    for sample in samples:
        options = means[:, start : start + len(sample.options)]
        start += len(sample.options)
        if len(sample.options) > 1:
            options = options.log_softmax(1)
        scores.append(options[:, sample.answer])
    return torch.stack(scores, dim=1)


def find_unit(task: TaskData, measured: Sequence[Measured]) -> float:
    """Find what a slope of ``score_smoothly`` is of the metric, by the task's gains.

    Args:
        task: whose choosing samples were measured.
        measured: of them, base and single model.

    Returns:
        The gain in accuracy over that in the smooth score; 1 where the metric has
        slopes itself, or one of the two gains is none.
    """
    if task.settings.metric != "accuracy":
        return 1.0
    sequence = torch.cat([batch.target_sequence for batch in task.choosing.batches])
    values = [torch.cat([getattr(m, f) for m in measured]) for f in ("base", "single")]
    smooth = score_smoothly(task.choosing.samples, torch.stack(values), sequence)
    smooth_gain = float((smooth[1] - smooth[0]).mean())
    base, single = (
        score_probes(task, task.choosing, measured, f) for f in ("base", "single")
    )
    gain = float(np.mean(single - base))
    return gain / smooth_gain if gain > 0 and smooth_gain > 0 else 1.0
