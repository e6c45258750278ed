"""Numerics of one tensor: delta -> pruned -> scaled -> combined.

Invariants: inputs are borrowed and never written to; deltas are float32 (float64 only
where the inputs are); parts are summed in the order given and the base is added last,
so that a caller who sorts the parts gets the same bits in any order of models.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

Consensus = Literal["none", "sum", "count"]

KEEP_ALL = -1.0
"""The cut that no magnitude falls under."""

KEEP_NONE = math.inf
"""The cut that no magnitude exceeds."""

CHUNK = 1 << 20
"""Entries merged at once on a CPU, so that what is in between stays in its cache."""

THREADED = 1 << 16
"""Entries of a tensor on a CPU from which models are ranked in threads of their own."""

HIGH_BINS = 1 << 15
LOW_BINS = 1 << 16


@dataclass(frozen=True, slots=True)
class Part:
    """One model's share in a merged tensor.

    Attributes:
        name: the model, for messages.
        tuned: its tensor, ``[*weight]``, shape and dtype of the base; read only.
        weight: mixing coefficient, dimensionless, any sign.
        density: share of the delta's entries kept, in [0, 1].
        scale: factor on the kept entries, dimensionless.
        cut: entries of larger magnitude are kept; None ranks inside this tensor.
    """

    name: str
    tuned: torch.Tensor
    weight: float
    density: float = 1.0
    scale: float = 1.0
    cut: float | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether no entry of the delta is dropped."""
        return self.density >= 1 if self.cut is None else self.cut < 0

    @property
    def counts(self) -> bool:
        """Whether any entry of the delta can reach the merge."""
        if self.weight == 0 or self.scale == 0:
            return False
        if self.cut is not None:
            return self.cut != KEEP_NONE
        return int(self.density * self.tuned.numel()) > 0


def merge_tensor(
    base: torch.Tensor,
    parts: Sequence[Part],
    *,
    consensus: Consensus = "none",
    normalize: bool = False,
    strength: float = 1.0,
) -> torch.Tensor:
    """Merge the pruned and scaled deltas of several models into the base.

    ``base + strength * sum_m weight_m * scale_m * top(tuned_m - base, density_m)``,
    the model-wise step and the merge of Hi-Merging (arXiv:2506.12379, section 3). At
    scale 1 it equals MergeKit's ``task_arithmetic`` (density 1) and ``breadcrumbs``
    (gamma 0), and its ``ties`` with ``consensus="sum"``.

    Args:
        base: the common ancestor's tensor, ``[*weight]``; read only.
        parts: the models' shares, in the order of summation.
        consensus: sign election between the weighted deltas, entry by entry: ``sum``
            keeps the sign of their sum, ``count`` that of the majority.
        normalize: divide by the sum of the weights, with a sign election by the sum of
            the weights of the entries that agree; ``scale`` never enters the divisor.
        strength: factor on the merged delta, dimensionless (a recipe's ``lambda``).

    Returns:
        ``[*weight]``, dtype and device of ``base``. It may be ``base`` itself, where no
        part counts, or a lone part's ``tuned``, where nothing dilutes it: ``base +
        (tuned - base)`` is not exact.

    Raises:
        ValueError: a density lies outside [0, 1], shapes differ, a delta is not finite,
            or the weights sum to zero with ``normalize``.
    """
    for part in parts:
        _check_density(part.density)
    active = [part for part in parts if part.counts]
    if not active or strength == 0:
        return base
    # In float32, as MergeKit sums it.
    divisor = float(torch.tensor([part.weight for part in parts]).sum())
    if normalize and consensus == "none" and abs(divisor) < 1e-8:
        raise ValueError(
            "weights must not sum to zero with normalize, "
            f"got {[part.weight for part in parts]}"
        )
    if len(active) == 1 and strength == 1:
        (lone,) = active
        others_weigh = any(part.weight != 0 for part in parts if part is not lone)
        undiluted = not others_weigh if normalize else lone.weight == 1
        if undiluted and lone.scale == 1 and lone.keeps_all:
            find_cuts(base, [lone])  # checks it
            return lone.tuned

    active = [part for part in find_cuts(base, active) if part.counts]
    if not active:
        return base
    merged = torch.empty_like(base, memory_format=torch.contiguous_format)
    tuned = [part.tuned for part in active]
    for merged_row, base_row, *rows in _chunks(merged, base, *tuned):
        wide_base = widen(base_row)
        deltas = [
            _weighted_delta(part, row, wide_base)
            for part, row in zip(active, rows, strict=True)
        ]
        if consensus == "none":
            total, *others = deltas
            for delta in others:
                total += delta
            if normalize:
                total /= divisor
        else:
            total = _elect_signs(
                [part.weight for part in active],
                deltas,
                consensus=consensus,
                normalize=normalize,
            )
        if strength != 1:
            total *= strength
        total += wide_base
        merged_row.copy_(total)
    return merged


def find_cuts(base: torch.Tensor, parts: Sequence[Part]) -> list[Part]:
    """Find the cuts of the parts that have none, several parts at once.

    Args:
        base: as in ``merge_tensor``; read only.
        parts: the models' shares; read only.

    Returns:
        The parts, in their order, each with a cut: ``KEEP_NONE`` where the model left
        the tensor as it was, as adapters do with most, so that the base keeps its bits.

    Raises:
        ValueError: shapes differ, a delta is not finite, or a density lies outside
            [0, 1].
    """

    def find(part: Part) -> Part:
        known = part.cut is not None
        return part if known else replace(part, cut=_find_cut_of(part, base))

    is_large = base.numel() >= THREADED and base.device.type == "cpu"
    return list((_make_pool().map if is_large else map)(find, parts))


@functools.cache
def _make_pool() -> ThreadPoolExecutor:
    """Make the threads that select: torch spreads its own loops, numpy does not."""
    return ThreadPoolExecutor(torch.get_num_threads(), "himerging-select")


def _find_cut_of(part: Part, base: torch.Tensor) -> float:
    (cut,) = find_cuts_at(part.name, part.tuned, base, [part.density])
    return cut


def find_cuts_at(
    name: str, tuned: torch.Tensor, base: torch.Tensor, densities: Sequence[float]
) -> list[float]:
    """Find one tensor's cuts for several densities, in one selection.

    Args:
        name: the tuned model, for messages.
        tuned, base: ``[*weight]``; read only.
        densities: shares of entries kept, in [0, 1].

    Returns:
        A cut for each density, as ``find_cut`` finds it; all ``KEEP_NONE`` where the
        model left the tensor as it was.

    Raises:
        ValueError: as ``find_cuts``.
    """
    for density in densities:
        _check_density(density)
    if tuned.shape != base.shape:
        raise ValueError(
            f"models must agree in shape, got {list(base.shape)} in the base and "
            f"{list(tuned.shape)} in '{name}'"
        )
    if any(density < 1 for density in densities):
        delta = compute_delta(name, tuned, widen(base))
        if delta.any():
            return _select(delta, densities, spend=True)
        return [KEEP_NONE] * len(densities)
    # Every chunk is looked at: the last may hold a NaN.
    changes = [
        bool(compute_delta(name, tuned_row, widen(row)).any())
        for row, tuned_row in _chunks(base, tuned)
    ]
    return [KEEP_ALL if any(changes) else KEEP_NONE] * len(densities)


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Walk tensors of one shape side by side, ``[entries]`` each; whole on a GPU."""
    size = CHUNK if tensors[0].device.type == "cpu" else max(1, tensors[0].numel())
    rows = (torch.split(tensor.reshape(-1), size) for tensor in tensors)
    return zip(*rows, strict=True)


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the dtype that deltas are computed in, float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def compute_delta(
    name: str, tuned: torch.Tensor, wide_base: torch.Tensor
) -> torch.Tensor:
    """Compute ``tuned - base`` for one tensor.

    Args:
        name: the tuned model, for messages.
        tuned: ``[*weight]``, any floating dtype; read only.
        wide_base: ``[*weight]``, as ``widen`` returns it; read only.

    Returns:
        ``[*weight]``, dtype of ``wide_base``.

    Raises:
        ValueError: an entry of the delta is NaN or infinite.
    """
    delta = tuned.to(wide_base.dtype) - wide_base
    if not _is_finite(delta):
        raise ValueError(
            f"delta of '{name}' must be finite, got NaN or infinity; "
            "get the checkpoint again, or leave the model out"
        )
    return delta


def weigh_delta(part: Part, base: torch.Tensor) -> torch.Tensor:
    """Return ``weight * scale * top(tuned - base)``, what a part adds to a merge.

    Args:
        part: with its cut, as ``find_cuts`` returns it.
        base: ``[*weight]``; read only.

    Returns:
        ``[*weight]``, float32 at least.
    """
    return _weighted_delta(part, part.tuned, widen(base))


def _weighted_delta(
    part: Part, tuned: torch.Tensor, wide_base: torch.Tensor
) -> torch.Tensor:
    """Return ``weight * scale * top(tuned - base)`` of some entries, as an own tensor.

    The part's cut must be known.
    """
    delta = tuned.to(wide_base.dtype) - wide_base
    if part.cut is not None and part.cut >= 0:
        torch.hardshrink(delta, part.cut, out=delta)
    factor = part.weight * part.scale
    return delta if factor == 1 else delta.mul_(factor)


def find_cut(delta: torch.Tensor, density: float) -> float:
    """Find the magnitude that the kept share of a delta's entries exceeds.

    Exact selection in linear time. Of ``n`` entries ``int(density * n)`` are wanted;
    entries tied at the cut go in or out together, whichever lands nearer to that
    count, and in where both are as near.

    Args:
        delta: ``[*weight]``, floating point, finite; read only.
        density: share of entries kept, in [0, 1].

    Returns:
        The cut: entries with ``abs(delta) > cut`` are kept. ``KEEP_ALL`` at density 1,
        ``KEEP_NONE`` where no entry is wanted.

    Raises:
        ValueError: ``density`` lies outside [0, 1].
    """
    _check_density(density)
    (cut,) = _select(delta.detach(), [density], spend=False)
    return cut


def _select(
    delta: torch.Tensor, densities: Sequence[float], *, spend: bool
) -> list[float]:
    """Find cuts; a delta that may be spent is written to, and needs no copy."""
    count = delta.numel()
    wanted = [int(density * count) for density in densities]
    ranked = sorted({n for n in wanted if 0 < n < count})
    found = {count: KEEP_ALL, 0: KEEP_NONE}
    if ranked and delta.device.type != "cpu":
        high = count_high_bits(delta)
        for n in ranked:
            bin_, _ = find_bin(high, n)
            found[n] = find_cut_in_counts(high, count_low_bits(delta, bin_), n)
    elif ranked:
        # numpy's introselect is several times faster than torch.kthvalue on a CPU.
        magnitudes = (delta.abs_() if spend else delta.abs()).flatten().numpy()
        magnitudes.partition([count - n for n in ranked])
        for n in ranked:
            threshold = magnitudes[count - n]
            above = int(np.count_nonzero(magnitudes[count - n :] > threshold))
            tied = int(np.count_nonzero(magnitudes[: count - n] == threshold))
            found[n] = _cut_at(threshold, above=above, at_least=n + tied, wanted=n)
    return [
        KEEP_ALL if density == 1 else found[n]
        for density, n in zip(densities, wanted, strict=True)
    ]


def count_high_bits(delta: torch.Tensor) -> torch.Tensor:
    """Count magnitudes by the upper half of their float32 bits.

    Counts of several tensors may be added: with ``count_low_bits`` of the one bin that
    a rank falls into they give the exact cut over all of them, in two reads.

    Args:
        delta: ``[*weight]``, finite; read only.

    Returns:
        ``[HIGH_BINS]``, int64, by rising magnitude.
    """
    return torch.bincount(_magnitude_bits(delta) >> 16, minlength=HIGH_BINS)


def count_low_bits(delta: torch.Tensor, high_bin: int) -> torch.Tensor:
    """Count the magnitudes in one bin of the upper bits by their lower bits.

    Args:
        delta: ``[*weight]``, finite; read only.
        high_bin: index into what ``count_high_bits`` returns.

    Returns:
        ``[LOW_BINS]``, int64, by rising magnitude.
    """
    bits = _magnitude_bits(delta)
    inside = bits[(bits >> 16) == high_bin] & (LOW_BINS - 1)
    return torch.bincount(inside, minlength=LOW_BINS)


def find_bin(counts: torch.Tensor, wanted: int) -> tuple[int, int]:
    """Find the bin that holds the ``wanted``-th largest value.

    Args:
        counts: ``[bins]``, int64, by rising value.
        wanted: rank from the top, 1 to ``counts.sum()``.

    Returns:
        The bin's index and how many values lie in bins above it.
    """
    from_top = counts.flip(0).cumsum(0)
    position = int(torch.searchsorted(from_top, wanted))
    index = counts.numel() - 1 - position
    return index, int(from_top[position] - counts[index])


def find_cut_in_counts(high: torch.Tensor, low: torch.Tensor, wanted: int) -> float:
    """Find the cut from counted magnitudes, by the rule of ``find_cut``.

    Args:
        high: ``[HIGH_BINS]``, counts by the upper bits.
        low: ``[LOW_BINS]``, counts inside the bin that ``find_bin`` names for ``high``.
        wanted: how many entries to keep, 1 to ``high.sum()``.

    Returns:
        The cut, as ``find_cut`` returns it.
    """
    high_bin, above_bin = find_bin(high, wanted)
    low_bin, above_low = find_bin(low, wanted - above_bin)
    above = above_bin + above_low
    bits = np.array([(high_bin << 16) | low_bin], dtype=np.uint32)
    return _cut_at(
        bits.view(np.float32)[0],
        above=above,
        at_least=above + int(low[low_bin]),
        wanted=wanted,
    )


def _cut_at(threshold: np.floating, *, above: int, at_least: int, wanted: int) -> float:
    """Put the cut just under or at ``threshold``: its ties are kept or dropped."""
    if threshold == 0:
        return 0.0
    if at_least - wanted <= wanted - above:
        return float(np.nextafter(threshold, threshold.dtype.type(0)))
    return float(threshold)


def _magnitude_bits(delta: torch.Tensor) -> torch.Tensor:
    return delta.detach().float().abs().flatten().view(torch.int32)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all entries are finite, in one pass and without a mask."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor.detach())
    return math.isfinite(low) and math.isfinite(high)


def _check_density(density: float) -> None:
    if not 0 <= density <= 1:
        raise ValueError(f"density must be in [0, 1], got {density:g}")


def _elect_signs(
    weights: Sequence[float],
    deltas: Sequence[torch.Tensor],
    *,
    consensus: Consensus,
    normalize: bool,
) -> torch.Tensor:
    """Sum the entries that have the elected sign (TIES, arXiv:2306.01708, section 3).

    Args:
        weights: the models', for the divisor.
        deltas: their weighted deltas, each ``[*weight]``; read only.
        consensus: ``sum`` or ``count``; a sum of zero elects plus.
        normalize: divide each entry by the weights that agree there.

    Returns:
        ``[*weight]``.
    """
    votes = deltas[0].clone() if consensus == "sum" else deltas[0].sign()
    for delta in deltas[1:]:
        votes += delta if consensus == "sum" else delta.sign()
    elects_plus = votes >= 0
    divisor = torch.zeros_like(votes) if normalize else None
    total = torch.zeros_like(votes)
    for weight, delta in zip(weights, deltas, strict=True):
        agrees = torch.where(elects_plus, delta > 0, delta < 0)
        total += delta * agrees
        if divisor is not None:
            divisor += agrees * weight
    if divisor is not None:
        divisor[divisor == 0] = 1
        total /= divisor
    return total
