"""Cuts ranked over a layer or the whole model, in two streamed reads.

Invariant: one tensor of the models is in memory at a time; a cut is exact and follows
the kernel's rule for ties, over the whole scope instead of one tensor.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mergekit_himerging.kernel import (
    HIGH_BINS,
    KEEP_ALL,
    KEEP_NONE,
    LOW_BINS,
    count_high_bits,
    count_low_bits,
    find_bin,
    find_cut_in_counts,
)


@dataclass(frozen=True, slots=True)
class Request:
    """One output tensor whose deltas are ranked together with others.

    Attributes:
        tensor: the output tensor's name.
        scope: tensors of the same scope are ranked together, each model on its own.
        densities: share kept by model, in [0, 1]; the cut is where that share of the
            whole scope is kept, also where densities differ inside the scope.
    """

    tensor: str
    scope: Hashable
    densities: Mapping[str, float]


ReadDeltas = Callable[[str], Mapping[str, torch.Tensor]]
"""Output tensor name -> finite deltas by model, each ``[*weight]``."""


@dataclass(slots=True)
class _Ranking:
    """The magnitudes of one model over one scope, as counts."""

    high: torch.Tensor = field(
        default_factory=lambda: torch.zeros(HIGH_BINS, dtype=torch.int64)
    )
    low: dict[int, torch.Tensor] = field(default_factory=dict)

    def wanted(self, density: float) -> int:
        return int(density * int(self.high.sum()))

    def open_bin(self, density: float) -> None:
        """Ask for the lower bits of the bin that the cut falls into."""
        wanted = self.wanted(density)
        if density < 1 and wanted > 0:
            bin_, _ = find_bin(self.high, wanted)
            self.low[bin_] = torch.zeros(LOW_BINS, dtype=torch.int64)

    def cut(self, density: float) -> float:
        if density == 1:
            return KEEP_ALL
        wanted = self.wanted(density)
        if wanted == 0:
            return KEEP_NONE
        bin_, _ = find_bin(self.high, wanted)
        return find_cut_in_counts(self.high, self.low[bin_], wanted)


def find_scope_cuts(
    requests: Sequence[Request], read_deltas: ReadDeltas
) -> dict[tuple[str, str], float]:
    """Find the cut of every requested tensor and model.

    Args:
        requests: all tensors of each scope.
        read_deltas: reads one tensor of all its models; called twice a tensor.

    Returns:
        Cuts by (tensor, model), as ``kernel.find_cuts`` finds them.
    """
    rankings: dict[tuple[Hashable, str], _Ranking] = {}
    for request in requests:
        for model, delta in read_deltas(request.tensor).items():
            ranking = rankings.setdefault((request.scope, model), _Ranking())
            ranking.high += count_high_bits(delta).cpu()
    for request in requests:
        for model, density in request.densities.items():
            if (request.scope, model) in rankings:
                rankings[request.scope, model].open_bin(density)
    unchanged = set()
    for request in requests:
        for model, delta in read_deltas(request.tensor).items():
            if not delta.any():
                unchanged.add((request.tensor, model))
            for bin_, counts in rankings[request.scope, model].low.items():
                counts += count_low_bits(delta, bin_).cpu()
    return {
        (request.tensor, model): KEEP_NONE
        if (request.tensor, model) in unchanged
        else rankings[request.scope, model].cut(density)
        for request in requests
        for model, density in request.densities.items()
        if (request.scope, model) in rankings
    }
