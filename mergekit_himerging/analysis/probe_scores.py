"""Log-probabilities of a task's probes -> scores of its samples."""

from collections.abc import Sequence

import numpy as np
import torch

from mergekit_himerging.analysis.calibration import score_samples
from mergekit_himerging.analysis.contribution import FloatArray
from mergekit_himerging.analysis.data import Probes, TaskData
from mergekit_himerging.analysis.jobs import Measured


def score_probes(
    task: TaskData, probes: Probes, measured: Sequence[Measured], field: str
) -> FloatArray:
    """Turn one field's log-probabilities into scores, ``[n]`` or ``[layers, n]``."""
    if not measured:
        return np.zeros(0)
    values = torch.cat([getattr(m, field) for m in measured], dim=-1)
    rows = values if values.dim() == 2 else values[None]
    scores = [
        score_samples(
            probes.samples, row, probes.batches, metric=task.settings.metric
        ).numpy()
        for row in rows
    ]
    return np.stack(scores) if values.dim() == 2 else scores[0]
