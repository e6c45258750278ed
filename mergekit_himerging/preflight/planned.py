"""What a planner has planned, and where each input tensor lies."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from mergekit.architecture import WeightInfo
from mergekit.architecture.conversion import can_convert_checkpoint_keys
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_himerging.preflight.models import Model, names_of
from mergekit_himerging.tasks import PlannedTensor


class Planned(Protocol):
    """The part of a planned merge that is checked."""

    @property
    def config(self) -> MergeConfiguration:
        """The recipe."""

    @property
    def options(self) -> MergeOptions:
        """MergeKit's."""

    @property
    def tensors(self) -> Sequence[PlannedTensor]:
        """As planned, before any plan."""


def list_inputs(
    tensor: PlannedTensor,
) -> Iterator[tuple[ModelReference, WeightInfo]]:
    """Yield the input tensor of each model."""
    inputs: Any = tensor.task.gather_tensors
    yield from getattr(inputs, "gather_tensors", inputs).weight_info.items()


def is_aligned(tensor: PlannedTensor) -> bool:
    """Whether rows are merged as they are stored, not brought to one vocabulary."""
    return not hasattr(tensor.task.gather_tensors, "gather_tensors")


def find_stored(model: Model, weight: WeightInfo) -> str | None:
    """Name the stored tensor that MergeKit takes; None where there is none."""
    names = (*names_of(weight), *(weight.tied_names or ()))
    return next((name for name in names if name in model.stored), None)


def is_convertible(model: Model, weight: WeightInfo) -> bool:
    """Whether transformers makes the tensor from others that are stored."""
    model_type = getattr(model.config, "model_type", None)
    keys = set(model.stored)
    return any(
        can_convert_checkpoint_keys(model_type, keys, name) for name in names_of(weight)
    )
