"""Planned MergeKit tasks -> the weights of one layer, as the streams want them.

Invariant: what MergeKit loads is what is measured (adapters, shards, permuted
vocabularies, slices), and it is merged by the kernel that will write it. One layer of
base and models is in memory at a time, one small Executor for each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from mergekit.graph import Executor, Task

from mergekit_himerging.analysis.jobs import Front, Variants
from mergekit_himerging.kernel import Part, find_cuts, merge_tensor
from mergekit_himerging.method import CUT
from mergekit_himerging.parameters import RecipeError, add_place
from mergekit_himerging.tasks import PlannedTensor

Reference = Literal["full", "same_weight"]
"""What the merge is compared with: the whole single model, or at its merge weight."""

FRONTS: tuple[Front, ...] = get_args(Front)


Cuts = dict[tuple[str, str, float], float]
"""Cut of each (tensor, model, density) that has been ranked."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """One tensor of all models, in one dtype on the math device, each ``[*weight]``.

    Attributes:
        base: the base's.
        tuned: the other models', by name and in their order.
    """

    base: torch.Tensor
    tuned: Mapping[str, torch.Tensor]


def load_inputs(
    tensors: Sequence[PlannedTensor], device: torch.device
) -> Iterator[tuple[PlannedTensor, Inputs]]:
    """Load the inputs of some planned tensors; those that the base lacks are left out.

    Raises:
        RecipeError: what is done with a pair fails; the message names the tensor.
    """
    members = {
        cast(Task[Any], tensor.task.gather_tensors): tensor for tensor in tensors
    }
    for gather, loaded in Executor(list(members)).run(quiet=True):
        tensor = members[gather]
        base_model = tensor.task.base_model
        base = loaded.get(base_model) if base_model is not None else None
        if base is None:
            continue
        dtype = base.dtype
        for value in loaded.values():
            dtype = torch.promote_types(dtype, value.dtype)
        base = base.to(device, dtype)
        tuned = {
            str(model): loaded[model].to(base)
            for model in sorted(tensor.experts, key=str)
            if model in loaded and base.is_floating_point()
        }
        yield tensor, Inputs(base, tuned)


def merge_inputs(tensor: PlannedTensor, inputs: Inputs, cuts: Cuts) -> torch.Tensor:
    """Merge one tensor as the merge itself will, ``[*weight]``.

    Raises:
        RecipeError: it cannot be merged; the message names it.
    """
    shared = tensor.task.parameters
    parts = make_parts(tensor, inputs, cuts)
    try:
        return merge_tensor(
            inputs.base,
            parts,
            consensus=shared["consensus"],
            normalize=shared["normalize"],
            strength=shared["lambda"],
        )
    except ValueError as error:
        raise _name_tensor(error, tensor) from error


def make_parts(tensor: PlannedTensor, inputs: Inputs, cuts: Cuts) -> list[Part]:
    """Make the models' shares of a tensor, in order, with their cuts found and noted.

    Raises:
        RecipeError: a delta cannot be ranked; the message names the tensor.
    """
    parts = []
    by_name = {str(model): model for model in tensor.experts}
    for name, tuned in inputs.tuned.items():
        model = by_name[name]
        density = tensor.value(model, "density")
        cut = tensor.value(model, CUT)
        if cut is None:
            cut = cuts.get((tensor.weight.name, name, density))
        parts.append(
            Part(
                name=name,
                tuned=tuned,
                weight=tensor.value(model, "weight"),
                density=density,
                scale=tensor.value(model, "scale"),
                cut=cut,
            )
        )
    try:
        parts = find_cuts(inputs.base, parts)
    except ValueError as error:
        raise _name_tensor(error, tensor) from error
    for part in parts:
        if part.cut is not None:
            cuts[tensor.weight.name, part.name, part.density] = part.cut
    return parts


def _name_tensor(error: ValueError, tensor: PlannedTensor) -> RecipeError:
    return RecipeError(add_place(error, f"tensor '{tensor.weight.name}'"))


class PlannedWeights:
    """Loads and merges one layer of a planned merge.

    Args:
        plain: all planned tensors, as the single models are made from them.
        treated: the same with the values that the merge is made with.
        device: where deltas are pruned and merged.
        reference: what the single models are.
        cuts: those found in one pass serve the next.
        only_merged: leave the base and the single models out.
    """

    def __init__(
        self,
        plain: Sequence[PlannedTensor],
        treated: Sequence[PlannedTensor],
        *,
        device: torch.device,
        reference: Reference,
        cuts: Cuts | None = None,
        only_merged: bool = False,
    ) -> None:
        self._device = device
        self._reference = reference
        self._cuts = {} if cuts is None else cuts
        self._only_merged = only_merged
        self._by_layer: dict[int | None, list[PlannedTensor]] = {}
        for tensor in treated:
            self._by_layer.setdefault(tensor.layer, []).append(tensor)
        self._plain = {tensor.weight.name: tensor for tensor in plain}
        self._models = {str(model) for t in treated for model in t.experts}

    def load(self, layer: int) -> Variants:
        """Load one block.

        Raises:
            RecipeError: a tensor cannot be merged; the message names it.
        """
        if self._only_merged:
            return self._load(layer, {"merged"}, set())
        return self._load(layer, set(FRONTS), self._models)

    def load_outer(self, front: Front, model: str) -> dict[str, torch.Tensor]:
        """Load what lies outside the blocks, of one front.

        Raises:
            RecipeError: a tensor cannot be merged; the message names it.
        """
        return self.load_front(front, model, None)

    def load_front(
        self, front: Front, model: str, layer: int | None
    ) -> dict[str, torch.Tensor]:
        """Load one block, or with None what lies outside, of one front alone.

        Raises:
            RecipeError: a tensor cannot be merged; the message names it.
        """
        found = self._load(layer, {front}, {model})
        if front == "single":
            return found.singles[model]
        return found.base if front == "base" else found.merged

    def _load(
        self, layer: int | None, fronts: set[Front], models: set[str]
    ) -> Variants:
        found = Variants(base={}, singles={m: {} for m in models}, merged={})
        members = self._by_layer.get(layer, [])
        for tensor, inputs in load_inputs(members, self._device):
            name = tensor.weight.name
            if "base" in fronts:
                found.base[name] = inputs.base
            if "merged" in fronts:
                found.merged[name] = merge_inputs(tensor, inputs, self._cuts)
            if "single" in fronts:
                self._add_singles(self._plain[name], inputs, found.singles)
        return found

    def _add_singles(
        self,
        tensor: PlannedTensor,
        inputs: Inputs,
        singles: Mapping[str, dict[str, torch.Tensor]],
    ) -> None:
        parts = {p.name: p for p in make_parts(tensor, inputs, self._cuts)}
        shared = tensor.task.parameters
        divisor = 1.0
        if shared["normalize"]:
            divisor = sum(part.weight for part in parts.values())
        for model, weights in singles.items():
            part = parts.get(model)
            if part is None:
                weights[tensor.weight.name] = inputs.base
                continue
            weight = 1.0
            if self._reference == "same_weight":
                weight = part.weight * shared["lambda"] / divisor if part.weight else 0
            weights[tensor.weight.name] = merge_tensor(
                inputs.base, [replace(part, weight=weight)]
            )
