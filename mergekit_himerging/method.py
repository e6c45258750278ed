"""`hi_merging` as MergeKit sees it: the parameters of one tensor -> the kernel."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from mergekit.merge_methods.base import (
    BasePolicy,
    BatchOptions,
    GroupMergeMethod,
    InputContract,
    MergeMethodSpec,
    ParameterScope,
    ParameterSpec,
    PerGroupValues,
    TensorEntry,
    TensorGroup,
)

from mergekit_himerging.kernel import Part, merge_tensor
from mergekit_himerging.parameters import (
    METHOD_NAME,
    PARAMETERS,
    RecipeError,
    add_place,
    check_value,
)

CUT = "_cut"
"""Per model, set by the planner seam only: a cut ranked over more than one tensor."""

NEEDS_PLANNER = (
    "which only MergeKit's planner can do; "
    "run the recipe with 'mergekit-yaml' or 'mergekit-multi'"
)


class HiMerging(GroupMergeMethod):
    """The model-wise step and the merge of Hi-Merging (arXiv:2506.12379, section 3).

    The layer-wise step reaches it as per-tensor parameters: whatever a plan does with a
    layer is a factor on that layer's density, scale and weight.

    Args:
        check_use: called before any tensor is read, whoever calls the method; raises
            where the method must not run.
    """

    def __init__(self, check_use: Callable[[], None] = lambda: None) -> None:
        self._check_use = check_use
        shared = ParameterScope.SHARED
        self.spec = MergeMethodSpec(
            name=METHOD_NAME,
            pretty_name="Hi-Merging",
            reference_url="https://arxiv.org/abs/2506.12379",
            contract=InputContract(base=BasePolicy.REQUIRED),
            parameters=(
                *(
                    ParameterSpec(
                        parameter.name,
                        parameter.type,
                        ParameterScope.NON_BASE if parameter.per_model else shared,
                        default=parameter.default,
                    )
                    for parameter in PARAMETERS.values()
                ),
                ParameterSpec(CUT, float | None, ParameterScope.NON_BASE, default=None),
            ),
        )

    def validate_inputs(
        self,
        input_ids: Sequence[Hashable],
        base_id: Hashable | None = None,
        *,
        group_name: str | None = None,
    ) -> None:
        """Check the set of models of one group.

        Raises:
            RecipeError: there is no base, or a model stands twice.
        """
        self._check_use()
        if base_id is None:
            raise RecipeError(
                f"{METHOD_NAME} must have a base model, got none; name the model that "
                "the others were tuned from (base_model in a recipe, base in a call)"
            )
        try:
            super().validate_inputs(input_ids, base_id, group_name=group_name)
        except ValueError as error:
            names = [str(model) for model in input_ids]
            raise RecipeError(f"{error} (models {names}, base '{base_id}')") from error

    def __call__(
        self,
        groups: Sequence[TensorGroup],
        /,
        *,
        parameters: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        batch_options: BatchOptions | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Merge tensors in memory, by the model-wise step only.

        Raises:
            RecipeError: the call asks for what needs the whole model, or a value is out
                of bounds.
        """
        for name, value in (parameters or {}).items():
            if name not in PARAMETERS:
                continue  # MergeKit's own message names it
            for where, scalar in _values(value):
                try:
                    check_value(PARAMETERS[name], scalar)
                except ValueError as error:
                    raise RecipeError(f"{error}{where}") from error
                refuse_whole_merge(name, scalar)
        return super().__call__(
            groups,
            parameters=parameters,
            dtype=dtype,
            out_dtype=out_dtype,
            batch_options=batch_options,
        )

    def merge_group(self, group: TensorGroup, /, **parameters: Any) -> torch.Tensor:
        """Merge one output tensor.

        Raises:
            RecipeError: a parameter that needs the planner has not met it, or the
                tensor cannot be merged; the message names tensor and model.
        """
        for name, parameter in PARAMETERS.items():
            if parameter.whole_merge:
                for _, value in _values(parameters[name]):
                    refuse_whole_merge(name, value)
        base = group.base
        if base is None or not group.non_base:
            return group.entries[0].tensor
        # In the order of the names, so that the order in the recipe changes no bit.
        experts = sorted(group.non_base, key=lambda entry: str(entry.id))
        try:
            return merge_tensor(
                base.tensor,
                [_part(entry, parameters, n_models=len(experts)) for entry in experts],
                consensus=parameters["consensus"],
                normalize=parameters["normalize"],
                strength=parameters["lambda"],
            )
        except ValueError as error:
            place = f"tensor '{group.metadata.name}'"
            raise RecipeError(add_place(error, place)) from error


def refuse_whole_merge(name: str, value: object) -> None:
    """Refuse a parameter whose value needs every tensor of the merge in view.

    Raises:
        RecipeError: ``value`` is not what a merge of single tensors does anyway.
    """
    parameter = PARAMETERS[name]
    if parameter.whole_merge and value != parameter.default:
        raise RecipeError(f"'{name}: {value}' spans the whole merge, {NEEDS_PLANNER}")


def _part(entry: TensorEntry, parameters: Mapping[str, Any], *, n_models: int) -> Part:
    weight = parameters["weight"][entry.id]
    return Part(
        name=str(entry.id),
        tuned=entry.tensor,
        weight=1 / n_models if weight is None else weight,
        density=parameters["density"][entry.id],
        scale=parameters["scale"][entry.id],
        cut=parameters[CUT][entry.id],
    )


def _values(value: Any) -> list[tuple[str, Any]]:
    """List the scalars of a call's parameter, each with words for its place."""
    if isinstance(value, PerGroupValues):
        return [pair for item in value.values for pair in _values(item)]
    if isinstance(value, Mapping):
        return [(f" (model {key!r})", item) for key, item in value.items()]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [(f" (model {index})", item) for index, item in enumerate(value)]
    return [("", value)]
