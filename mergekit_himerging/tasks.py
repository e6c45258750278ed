"""Planned merge tasks -> the same tasks with a plan and scope-wide cuts in them.

Invariant: a task's inputs and output stay as MergeKit planned them; only the values of
its parameters change.
"""

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import immutables
import safetensors
import torch
from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference, dtype_from_name
from mergekit.graph import Executor, Task
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions

from mergekit_himerging.kernel import compute_delta, widen
from mergekit_himerging.method import CUT
from mergekit_himerging.parameters import PARAMETERS, RecipeError, add_place
from mergekit_himerging.plan import Factors, Plan
from mergekit_himerging.scope import Request, find_scope_cuts

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One output tensor as MergeKit planned it.

    Attributes:
        weight: the output tensor.
        task: merges it.
        module: the part of the model it belongs to.
        layer: 0-based decoder block of the output model; None outside the blocks.
    """

    weight: WeightInfo
    task: ExecuteMergeMethodTask
    module: str
    layer: int | None

    @property
    def experts(self) -> tuple[ModelReference, ...]:
        """The models that are merged into the base here."""
        return tuple(m for m in self.task.model_order if m != self.task.base_model)

    @property
    def sources(self) -> dict[str, str]:
        """Name of the input tensor by model, and how its vocabulary is aligned."""
        inputs: Any = self.task.gather_tensors
        gather = getattr(inputs, "gather_tensors", inputs)
        names = {str(m): info.name for m, info in gather.weight_info.items()}
        return {"task": type(inputs).__name__, **dict(sorted(names.items()))}

    def value(self, model: ModelReference, name: str) -> Any:
        """Look up a per-model parameter; a weight left open is 1 / number of models."""
        value = self.task.input_parameters[model][name]
        if name == "weight" and value is None:
            return 1 / len(self.experts)
        return value

    def with_values(
        self, changes: Mapping[ModelReference, Mapping[str, Any]]
    ) -> "PlannedTensor":
        """Return the tensor with per-model values set and whole-merge ones consumed."""
        consumed = [p for p in PARAMETERS.values() if p.whole_merge]
        shared = dict(self.task.parameters.items())
        shared |= {p.name: p.default for p in consumed if not p.per_model}
        spent = {p.name: p.default for p in consumed if p.per_model}
        per_model = {
            model: immutables.Map(
                {**dict(values.items()), **spent, **changes.get(model, {})}
                if model != self.task.base_model
                else dict(values.items())
            )
            for model, values in self.task.input_parameters.items()
        }
        task = self.task.model_copy(
            update={
                "parameters": immutables.Map(shared),
                "input_parameters": immutables.Map(per_model),
            }
        )
        return replace(self, task=task)

    def with_shared(self, **changes: Any) -> "PlannedTensor":
        """Return the tensor with values of the whole merge set."""
        shared = immutables.Map({**dict(self.task.parameters.items()), **changes})
        task = self.task.model_copy(update={"parameters": shared})
        return replace(self, task=task)


def apply_plan(
    tensors: Sequence[PlannedTensor], plan: Plan | None
) -> list[PlannedTensor]:
    """Multiply the plan's factors onto the values that the recipe resolved.

    Args:
        tensors: all planned tensors of the merge.
        plan: None merges by the model-wise step only.

    Returns:
        The tensors with their final weight, density and scale.

    Raises:
        RecipeError: the plan does not fit the recipe, or leads to a density outside
            [0, 1].
    """
    factors: Mapping[tuple[int, str], Factors] = {}
    if plan is not None:
        factors = _fit_plan(tensors, plan)
    treated = []
    for tensor in tensors:
        changes = {}
        for model in tensor.experts:
            factor = Factors()
            if tensor.layer is not None:
                factor = factors.get((tensor.layer, str(model)), factor)
            density = tensor.value(model, "density") * factor.density
            if not 0 <= density <= 1:
                raise RecipeError(
                    f"density must be in [0, 1], got {density:g} (plan, layer "
                    f"{tensor.layer}, '{model}': recipe "
                    f"{tensor.value(model, 'density'):g} times density_factor "
                    f"{factor.density:g}); lower the density_factor"
                )
            changes[model] = {
                "density": density,
                "scale": tensor.value(model, "scale") * factor.scale,
                "weight": tensor.value(model, "weight") * factor.weight,
            }
        treated.append(tensor.with_values(changes))
    return treated


def apply_scope(
    tensors: Sequence[PlannedTensor],
    scope: str,
    options: MergeOptions,
    known: dict[Hashable, Mapping[tuple[str, str], float]],
) -> list[PlannedTensor]:
    """Rank the deltas over a layer or the whole model, where the recipe asks for it.

    Args:
        tensors: all planned tensors, with their final densities.
        scope: ``tensor`` leaves the ranking to the kernel; ``layer`` ranks each block
            as a whole, and the tensors outside the blocks each on its own; ``model``
            ranks everything together.
        options: MergeKit's, for the device.
        known: cuts that were found before, by densities; extended. To find them, every
            tensor is read twice.

    Returns:
        The tensors with their cuts.
    """
    groups: dict[Hashable, list[PlannedTensor]] = {}
    for tensor in tensors:
        if scope == "model" or (scope == "layer" and tensor.layer is not None):
            key = (tensor.module, tensor.layer) if scope == "layer" else scope
            groups.setdefault(key, []).append(tensor)
    by_name = {
        tensor.weight.name: tensor
        for members in groups.values()
        if any(0 < density < 1 for t in members for density in _densities(t).values())
        for tensor in members
    }
    if not by_name:
        return list(tensors)
    requests = [
        Request(
            tensor=name,
            scope=(tensor.module, tensor.layer) if scope == "layer" else scope,
            densities=_densities(tensor),
        )
        for name, tensor in by_name.items()
    ]
    asked = tuple((r.tensor, r.scope, *r.densities.items()) for r in requests)
    if asked not in known:
        LOG.info("ranking %d tensors by %s, in two reads", len(by_name), scope)
        known[asked] = find_scope_cuts(
            requests, lambda name: read_deltas(by_name[name], options)
        )
    cuts = known[asked]
    return [
        tensor.with_values(
            {
                model: {CUT: cuts.get((tensor.weight.name, str(model)))}
                for model in tensor.experts
            }
        )
        for tensor in tensors
    ]


def read_deltas(
    tensor: PlannedTensor, options: MergeOptions
) -> dict[str, torch.Tensor]:
    """Load one tensor as the merge will and subtract the base.

    Args:
        tensor: what to load; tokenizer permutation, LoRA and dtype as planned.
        options: MergeKit's, for the device.

    Returns:
        Deltas by model, each ``[*weight]``, float32 at least, on the math device; none
        where the base lacks the tensor or it is not floating point.

    Raises:
        RecipeError: shapes differ or a delta is not finite.
    """
    device = torch.device(options.device or "cpu")
    executor = Executor([cast(Task[Any], tensor.task.gather_tensors)])
    ((_, loaded),) = executor.run(quiet=True)
    base = loaded.get(tensor.task.base_model)
    if base is None or not base.is_floating_point():
        return {}
    wide_base = widen(base.to(device))
    deltas = {}
    for model in tensor.experts:
        tuned = loaded.get(model)
        if tuned is None:
            continue
        if tuned.shape != base.shape:
            raise RecipeError(
                f"models must agree in shape, got {list(base.shape)} in the base and "
                f"{list(tuned.shape)} in '{model}' (tensor '{tensor.weight.name}'); "
                "align vocabularies with 'tokenizer:'"
            )
        try:
            deltas[str(model)] = compute_delta(str(model), tuned.to(device), wide_base)
        except ValueError as error:
            place = f"tensor '{tensor.weight.name}'"
            raise RecipeError(add_place(error, place)) from error
    return deltas


def warn_of_rounding(
    tensors: Sequence[PlannedTensor], dtype: str | None, options: MergeOptions
) -> None:
    """Say where small deltas are rounded away before the merge sees them."""
    wanted = dtype_from_name(dtype)
    models = list(dict.fromkeys(m for t in tensors for m in t.task.model_order))
    for model in models:
        stored = stored_itemsize(model)
        if wanted is not None and stored is not None and wanted.itemsize < stored:
            LOG.warning(
                "hi_merging: dtype %s rounds '%s', stored in %d bytes a value, before "
                "its delta is taken; use 'dtype: float32' and 'out_dtype: %s'",
                *(dtype, model, stored, dtype),
            )
        if model.lora is not None and options.lora_merge_dtype != "float32":
            LOG.warning(
                "hi_merging: adapter '%s' is merged in the base's dtype, where small "
                "updates vanish; add '--lora-merge-dtype float32'",
                model.lora,
            )


def stored_itemsize(model: ModelReference) -> int | None:
    """Read how many bytes a value of a model's first safetensors tensor takes.

    None where that cannot be had cheaply.
    """
    index = LoaderCache().get(model).index
    for name, file in index.tensor_paths.items():
        if not index.is_safetensors:
            return None
        with safetensors.safe_open(Path(index.base_path) / file, framework="pt") as st:
            return {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}.get(
                st.get_slice(name).get_dtype()
            )
    return None


def _densities(tensor: PlannedTensor) -> dict[str, float]:
    return {str(model): tensor.value(model, "density") for model in tensor.experts}


def describe_merge(tensors: Sequence[PlannedTensor]) -> tuple[str, list[str], int]:
    """Name the base and the models of a merge, and count its layers.

    Raises:
        RecipeError: there are several bases, or several stacks of layers.
    """
    bases = {str(tensor.task.base_model) for tensor in tensors}
    depths = {
        tensor.module: 1
        + max(t.layer or 0 for t in tensors if t.module == tensor.module)
        for tensor in tensors
        if tensor.layer is not None
    }
    if len(bases) != 1 or len(depths) != 1:
        raise RecipeError(
            "a plan must meet one base and one stack of layers, got bases "
            f"{sorted(bases)} and layers {depths}; merge without plan and calibration"
        )
    models = sorted({str(model) for tensor in tensors for model in tensor.experts})
    (base,), (n_layers,) = bases, depths.values()
    return base, models, n_layers


def list_merged(tensors: Sequence[PlannedTensor]) -> set[tuple[int, str]]:
    """List the (layer, model) pairs that are merged; slices may leave some out."""
    return {
        (tensor.layer, str(model))
        for tensor in tensors
        if tensor.layer is not None
        for model in tensor.experts
    }


def list_idle(tensors: Sequence[PlannedTensor], plan: Plan) -> list[tuple[int, str]]:
    """List the (layer, model) pairs whose treatment has nothing to act on.

    A drop is no such one: where nothing of a model is merged, it is dropped.

    Raises:
        RecipeError: the plan does not fit the recipe.
    """
    merged = list_merged(tensors)
    return sorted(
        pair
        for pair, factors in _fit_plan(tensors, plan).items()
        if pair not in merged and factors.weight != 0 and factors != Factors()
    )


def _fit_plan(
    tensors: Sequence[PlannedTensor], plan: Plan
) -> Mapping[tuple[int, str], Factors]:
    """Check that the plan was made for these tensors and look up its factors."""
    base, models, n_layers = describe_merge(tensors)
    try:
        plan.check_fit(base=base, models=models, n_layers=n_layers)
    except ValueError as error:
        raise RecipeError(f"{error}; make a plan for this recipe") from error
    return plan.factors_for(models)
