"""Planned MergeKit tasks -> the weights of one layer, as the streams want them.

Invariant: what MergeKit loads is what is measured (adapters, shards, permuted
vocabularies, slices), and it is merged by the kernel that will write it. One layer of
base and models is in memory at a time, one small Executor for each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import torch
from mergekit.common import ModelReference
from mergekit.graph import Executor, Task

from mergekit_himerging.analysis.jobs import Front, Variants
from mergekit_himerging.kernel import Part, find_cuts, merge_tensor
from mergekit_himerging.method import CUT
from mergekit_himerging.parameters import RecipeError, add_place
from mergekit_himerging.tasks import PlannedTensor

Reference = Literal["full", "same_weight"]
"""What the merge is compared with: the whole single model, or at its merge weight."""

FRONTS: tuple[Front, ...] = get_args(Front)


class PlannedWeights:
    """Loads and merges one layer of a planned merge.

    Args:
        plain: all planned tensors, as the single models are made from them.
        treated: the same with the values that the merge is made with.
        device: where deltas are pruned and merged.
        reference: what the single models are.
        cuts: by (tensor, model, density); those found in one pass serve the next.
        only_merged: leave the base and the single models out.
    """

    def __init__(
        self,
        plain: Sequence[PlannedTensor],
        treated: Sequence[PlannedTensor],
        *,
        device: torch.device,
        reference: Reference,
        cuts: dict[tuple[str, str, float], float] | None = None,
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
        found = Variants(base={}, singles={m: {} for m in self._models}, merged={})
        if self._only_merged:
            found.singles.clear()
        self._load(
            layer, found, fronts={"merged"} if self._only_merged else set(FRONTS)
        )
        return found

    def load_outer(self, front: Front, model: str) -> dict[str, torch.Tensor]:
        """Load what lies outside the blocks, of one front.

        Raises:
            RecipeError: a tensor cannot be merged; the message names it.
        """
        found = Variants(base={}, singles={model: {}}, merged={})
        self._load(None, found, fronts={front})
        if front == "single":
            return found.singles[model]
        return found.base if front == "base" else found.merged

    def _load(self, layer: int | None, found: Variants, fronts: set[Front]) -> None:
        members = {
            cast(Task[Any], tensor.task.gather_tensors): tensor
            for tensor in self._by_layer.get(layer, ())
        }
        for gather, loaded in Executor(list(members)).run(quiet=True):
            tensor = members[gather]
            try:
                self._add(tensor, loaded, found, fronts)
            except ValueError as error:
                place = f"tensor '{tensor.weight.name}'"
                raise RecipeError(add_place(error, place)) from error

    def _add(
        self,
        tensor: PlannedTensor,
        loaded: Mapping[ModelReference, torch.Tensor],
        found: Variants,
        fronts: set[Front],
    ) -> None:
        """Merge one tensor in every way and put the results where they belong."""
        name = tensor.weight.name
        base_model = tensor.task.base_model
        base = loaded.get(base_model) if base_model is not None else None
        if base is None:
            return
        dtype = base.dtype
        for value in loaded.values():
            dtype = torch.promote_types(dtype, value.dtype)
        base = base.to(self._device, dtype)
        shared = tensor.task.parameters
        normalize, strength = shared["normalize"], shared["lambda"]
        if "base" in fronts:
            found.base[name] = base
        if "merged" in fronts:
            found.merged[name] = merge_tensor(
                base,
                list(self._parts(tensor, loaded, base).values()),
                consensus=shared["consensus"],
                normalize=normalize,
                strength=strength,
            )
        if "single" not in fronts:
            return
        parts = self._parts(self._plain[name], loaded, base)
        divisor = sum(part.weight for part in parts.values()) if normalize else 1.0
        for model, weights in found.singles.items():
            part = parts.get(model)
            if part is None:
                weights[name] = base
                continue
            weight = 1.0
            if self._reference == "same_weight":
                weight = part.weight * strength / divisor if part.weight else 0.0
            weights[name] = merge_tensor(base, [replace(part, weight=weight)])

    def _parts(
        self,
        tensor: PlannedTensor,
        loaded: Mapping[ModelReference, torch.Tensor],
        base: torch.Tensor,
    ) -> dict[str, Part]:
        if not base.is_floating_point():
            return {}
        parts = [
            Part(
                name=str(model),
                tuned=loaded[model].to(base),
                weight=tensor.value(model, "weight"),
                density=tensor.value(model, "density"),
                scale=tensor.value(model, "scale"),
                cut=self._known_cut(tensor, model),
            )
            for model in sorted(tensor.experts, key=str)
            if model in loaded
        ]
        parts = find_cuts(base, parts)
        for part in parts:
            if part.cut is not None:
                self._cuts[tensor.weight.name, part.name, part.density] = part.cut
        return {part.name: part for part in parts}

    def _known_cut(self, tensor: PlannedTensor, model: ModelReference) -> float | None:
        density = tensor.value(model, "density")
        found = self._cuts.get((tensor.weight.name, str(model), density))
        cut: float | None = tensor.value(model, CUT)
        return found if cut is None else cut
