"""What the streams measure: the records between probes, weights and scores."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from mergekit_himerging.analysis.calibration import Batch

Depth = Literal["layers", "fronts", "merged"]
"""What is measured of a job: every layer, the three whole models, the merge alone."""


Front = Literal["base", "single", "merged"]
"""Which whole model: F, M_m or G."""


@dataclass(frozen=True, slots=True)
class Variants:
    """Weights of one block, by MergeKit's names.

    Attributes:
        base: of F.
        singles: of each M_m, by model; empty where only the merge is measured.
        merged: of G.
    """

    base: dict[str, torch.Tensor]
    singles: dict[str, dict[str, torch.Tensor]]
    merged: dict[str, torch.Tensor]


class WeightSource(Protocol):
    """Where weights come from, one layer at a time."""

    def load(self, layer: int) -> Variants:
        """Load one block in every way."""
        ...

    def load_outer(self, front: Front, model: str) -> dict[str, torch.Tensor]:
        """Load what lies outside the blocks, of one front; M_m's is of ``model``."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One batch of one task.

    Attributes:
        model: the task's own model, M_m.
        batch: its probes.
        depth: what is measured.
    """

    model: str
    batch: Batch
    depth: Depth

    @property
    def fronts(self) -> tuple[tuple[Front, str], ...]:
        """The whole models that it runs, each with the model whose M_m it is."""
        if self.depth == "merged":
            return (("merged", ""),)
        return (("base", ""), ("single", self.model), ("merged", ""))

    def n_streams(self, n_layers: int) -> int:
        """How many hidden states the job holds after the last layer."""
        return {"layers": 4 * n_layers + 3, "fronts": 3, "merged": 1}[self.depth]

    def n_bytes(self, n_layers: int, width: int, item_size: int) -> int:
        """Bytes of the hidden states after the last layer."""
        cells = self.batch.input_ids.numel()
        return self.n_streams(n_layers) * cells * width * item_size

    def n_block_calls(self, layer: int) -> int:
        """How many block forwards the job takes at one layer."""
        return {"layers": 4 * layer + 7, "fronts": 3, "merged": 1}[self.depth]


@dataclass(frozen=True, slots=True)
class Measured:
    """Log-probabilities of a job's targets under every variant, float64, in nats.

    Of a batch with a teacher, minus the divergences from it.

    Attributes:
        merged: under G, ``[targets]``.
        base, single: under F and M_m, ``[targets]``; None for depth ``merged``.
        removed_single, added_single: under M_m without layer l's delta, and under F
            plus it, ``[layers, targets]``; None unless depth is ``layers``.
        removed_merged, added_merged: the same for G.
    """

    merged: torch.Tensor
    base: torch.Tensor | None = None
    single: torch.Tensor | None = None
    removed_single: torch.Tensor | None = None
    added_single: torch.Tensor | None = None
    removed_merged: torch.Tensor | None = None
    added_merged: torch.Tensor | None = None
