"""How sure a score is: 95 % intervals over samples, and paired differences.

Invariant: the same seed and number of samples give the same resamples, so that values
of several models on the same samples stay paired, in whichever order they are asked.
"""

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from mergekit_himerging.analysis.contribution import recovered_gain

FloatArray = npt.NDArray[np.float64]
Interval = tuple[float, float] | None
"""Low and high end; None where the samples do not bound the value."""

CONFIDENCE = 0.95
CELLS = 1 << 20
"""Samples drawn at a time; bounds memory and nothing else."""


def resample_means(values: FloatArray, *, n_resamples: int, seed: int) -> FloatArray:
    """Draw samples with replacement and take the mean of every series over them.

    Args:
        values: ``[series, samples]``, read only; a draw takes the same samples of all
            series.
        n_resamples: how many draws of as many samples as there are.
        seed: at least 0.

    Returns:
        ``[series, n_resamples]``.
    """
    n_samples = values.shape[1]
    generator = np.random.default_rng(seed)
    rows = max(1, CELLS // n_samples)
    blocks = []
    for start in range(0, n_resamples, rows):
        shape = (min(rows, n_resamples - start), n_samples)
        drawn = generator.integers(n_samples, size=shape)
        # [series, draws, samples] -> [series, draws]
        blocks.append(values[:, drawn].mean(axis=2))
    return np.concatenate(blocks, axis=1)


def percentile_interval(draws: FloatArray) -> tuple[float, float]:
    """Return the central 95 % of draws, ``[n_resamples]``."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)


def bootstrap_mean(values: FloatArray, *, n_resamples: int, seed: int) -> Interval:
    """Bound a mean, by the percentiles of bootstrapped ones.

    Args:
        values: ``[samples]``, one or more.
        n_resamples: how many draws.
        seed: of the draws.

    Returns:
        The interval; None with one sample.
    """
    if len(values) < 2:
        return None
    draws = resample_means(values[None], n_resamples=n_resamples, seed=seed)
    return percentile_interval(draws[0])


def wilson_interval(n_right: int, n_samples: int) -> tuple[float, float]:
    """Bound a proportion by Wilson's score interval.

    Args:
        n_right: in [0, ``n_samples``].
        n_samples: at least 1.

    Returns:
        The interval, inside [0, 1].
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share = n_right / n_samples
    scale = 1 + z * z / n_samples
    middle = (share + z * z / (2 * n_samples)) / scale
    half = z * math.sqrt(
        share * (1 - share) / n_samples + z * z / (4 * n_samples * n_samples)
    )
    # At 0 and 1 the ends are exact but for rounding.
    low = 0.0 if n_right == 0 else middle - half / scale
    high = 1.0 if n_right == n_samples else middle + half / scale
    return low, high


def paired_difference(
    ours: FloatArray, theirs: FloatArray, *, n_resamples: int, seed: int
) -> tuple[float, Interval, float | None]:
    """Compare two models on the same samples by the paired bootstrap.

    Args:
        ours: ``[samples]``, read only.
        theirs: ``[samples]``, of the same samples.
        n_resamples: how many draws.
        seed: of the draws.

    Returns:
        The mean of ``ours - theirs``, its interval, and the two-sided p-value: twice
        the share of draws on the rarer side of 0, at most 1, with one draw added so
        that it is never 0. Interval and p-value are None with one sample.
    """
    differences = ours - theirs
    mean = float(differences.mean())
    if len(differences) < 2:
        return mean, None, None
    draws = resample_means(differences[None], n_resamples=n_resamples, seed=seed)[0]
    rarer = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    p_value = min(1.0, 2 * (rarer + 1) / (n_resamples + 1))
    return mean, percentile_interval(draws), p_value


def bootstrap_recovered(
    merged: FloatArray,
    base: FloatArray,
    single: FloatArray,
    *,
    n_resamples: int,
    seed: int,
) -> tuple[float, Interval] | None:
    """Bound the share of a single model's gain that a merge recovers.

    Args:
        merged: ``[samples]``, higher is better, read only; as both below, of the same
            samples.
        base: of the base.
        single: of the single model.
        n_resamples: how many draws.
        seed: of the draws.

    Returns:
        The share, see ``recovered_gain``, and its interval: None with one sample, or
        where the single model does not beat the base in so many draws that an end of
        the interval lies among them. None altogether where it does not over all
        samples.
    """
    values = np.stack([merged, base, single])
    share = recovered_gain(*map(float, values.mean(axis=1)))
    if share is None:
        return None
    if values.shape[1] < 2:
        return share, None
    draws = resample_means(values, n_resamples=n_resamples, seed=seed)
    gains = draws[2] - draws[1]
    if (gains <= 0).mean() > (1 - CONFIDENCE) / 2:
        return share, None
    beats = gains > 0
    shares = (draws[0, beats] - draws[1, beats]) / gains[beats]
    return share, percentile_interval(shares)
