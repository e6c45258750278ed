"""How a merge is analysed, as a recipe's parameters say."""

from dataclasses import dataclass
from typing import Literal

from mergekit_himerging.analysis.contribution import Rules
from mergekit_himerging.analysis.graph import Reference
from mergekit_himerging.analysis.measured import Measure
from mergekit_himerging.analysis.objective import Kind


@dataclass(frozen=True, slots=True)
class AnalysisSettings:
    """How a merge is analysed.

    Attributes:
        rules: how conflicts are resolved.
        rounds: how often the merge is analysed and treated, at most.
        reference: what the single models are.
        resolve: how treatments are chosen.
        measure: how slopes are measured where they are.
        objective: what is raised then.
        gradients: whether every weight matrix's gradient is measured too.
        guard: whether the plain merge may be put back.
        memory: bytes that hidden states may take.
    """

    rules: Rules
    rounds: int
    reference: Reference
    guard: Literal["keep_better", "report"]
    memory: int
    resolve: Literal["rules", "measured"] = "rules"
    measure: Measure = "first_order"
    objective: Kind = "mean"
    gradients: bool = False
