"""A recipe as MergeKit plans it, for what measures, merges or exports it.

Invariant: one record for every command, so that what `mergekit-yaml` merges is what the
other commands see.
"""

import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import transformers
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_himerging import seam
from mergekit_himerging.parameters import METHOD_NAME, RecipeError
from mergekit_himerging.plan import Plan, read_plan
from mergekit_himerging.preflight import check_models, check_recipe, recipe_folders
from mergekit_himerging.recipe import TaskSettings, read_settings, read_tasks
from mergekit_himerging.tasks import (
    PlannedTensor,
    apply_plan,
    apply_scope,
    list_idle,
    warn_of_rounding,
)

LOG = logging.getLogger(__name__)

Resolve = Callable[[Plan | None], Sequence[PlannedTensor]]
"""A plan, or None for the plain merge -> tensors with their final values."""


@dataclass(frozen=True, slots=True)
class PlannedMerge:
    """One planned merge.

    Attributes:
        config: the recipe as MergeKit read it.
        options: MergeKit's.
        tensors: as planned, before any plan.
        resolve: puts a plan into them.
        settings: whole-merge parameters by name; empty for other methods.
        tasks: one per model, or none.
        load_output: loads tokenizer, with its chat template, and configuration of the
            output model.
        folders: where relative paths are looked for, in order.
    """

    config: MergeConfiguration
    options: MergeOptions
    tensors: Sequence[PlannedTensor]
    resolve: Resolve
    settings: Mapping[str, Any]
    tasks: Sequence[TaskSettings]
    load_output: Callable[
        [], tuple[transformers.PreTrainedTokenizerBase, transformers.PretrainedConfig]
    ]
    folders: Sequence[Path]

    def say(self, text: str) -> None:
        """Print a line, unless the options ask for quiet."""
        if not self.options.quiet:
            click.echo(f"hi_merging: {text}")

    def read_plan(self) -> Plan | None:
        """Read the plan that the recipe names, if it names one.

        Raises:
            RecipeError: it cannot be read, or does not fit the recipe.
        """
        name = self.settings.get("plan")
        if not name:
            return None
        if self.tasks:
            self.say("'plan' is given, so calibration data is not used")
        tried = [folder / name for folder in self.folders]
        try:
            path = next((path for path in tried if path.exists()), None)
        except OSError as error:  # as of a name that is too long
            raise RecipeError(f"cannot read plan '{name}': {error.strerror}") from error
        if path is None:
            places = " or ".join(f"'{path}'" for path in dict.fromkeys(tried))
            raise RecipeError(f"plan must be a file, found none at {places}")
        try:
            plan = read_plan(path)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        idle = list_idle(self.tensors, plan)
        if idle:
            LOG.warning(
                "hi_merging: plan '%s' treats %d pairs of layer and model that the "
                "recipe does not merge, the first layer %d of '%s': these treatments "
                "do nothing; name the model in that slice, or remove them",
                *(path, len(idle), *idle[0]),
            )
        return plan


def plan_recipe(
    config: MergeConfiguration, options: MergeOptions, folders: Sequence[Path] = ()
) -> PlannedMerge:
    """Plan a recipe of any method, without reading a tensor.

    Args:
        config: the recipe; not changed.
        options: MergeKit's.
        folders: where relative paths of its data are looked for before the working
            directory.

    Raises:
        RecipeError: a `hi_merging` recipe is wrong, or a model is missing.
    """
    if config.merge_method == METHOD_NAME:
        check_recipe(config, None)
    seam.forget_loaders()
    check_models(config, options)
    copy = config.model_copy(deep=True)
    planner = seam.make_planner(copy, options)
    planner.himerging_plans_only = True
    seam.plan_tensors(planner)
    return describe_planner(planner, config, folders)


def describe_planner(
    planner: Any, config: MergeConfiguration, folders: Sequence[Path] = ()
) -> PlannedMerge:
    """Describe what a planner has planned; ``config`` is its recipe as it was given."""
    planned = seam.get_tensors(planner)
    is_ours = config.merge_method == METHOD_NAME
    places = planner.himerging_places if is_ours else [("", None)] * len(planned)
    tensors = [
        PlannedTensor(weight, task, module, layer)
        for (weight, task), (module, layer) in zip(planned, places, strict=True)
    ]
    settings = read_settings(config) if is_ours else {}
    options = planner.options
    if is_ours:
        warn_of_rounding(tensors, config.dtype, options)
    cuts: dict[Hashable, Mapping[tuple[str, str], float]] = {}

    def resolve(plan: Plan | None) -> Sequence[PlannedTensor]:
        if not is_ours:
            return tensors
        treated = apply_plan(tensors, plan)
        return apply_scope(treated, settings["scope"], options, cuts)

    return PlannedMerge(
        config=config,
        options=options,
        tensors=tensors,
        resolve=resolve,
        settings=settings,
        tasks=read_tasks(config) if is_ours else (),
        load_output=functools.cache(lambda: seam.load_output_model(planner)),
        folders=[*folders, *recipe_folders(), Path.cwd()],
    )
