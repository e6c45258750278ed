"""The package from Python: the same steps as its commands.

Invariant: a recipe may be a file, a mapping or MergeKit's own record, and none of them
is changed.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from pydantic import ValidationError
from safetensors import SafetensorError

from mergekit_himerging.analysis.contribution import (
    Contribution,
    Rules,
    resolve_conflicts,
)
from mergekit_himerging.analysis.data import read_task_rows
from mergekit_himerging.analysis.run import treat_decisions
from mergekit_himerging.analysis.session import make_plan as measure_plan
from mergekit_himerging.analysis.session import pick_device, read_data
from mergekit_himerging.estimate import Cost, check_space, estimate_cost, read_sizes
from mergekit_himerging.evaluation import run
from mergekit_himerging.evaluation.data import read_task, refuse_overlap
from mergekit_himerging.evaluation.models import (
    find_plan,
    make_merge_candidate,
    make_model_candidate,
    match_tasks,
)
from mergekit_himerging.evaluation.records import Evaluation, Role, Settings
from mergekit_himerging.evaluation.run import Candidate, Progress
from mergekit_himerging.export.recipe import Exported, export_recipe
from mergekit_himerging.names import shorten_names
from mergekit_himerging.parameters import METHOD_NAME, SELF, RecipeError, add_place
from mergekit_himerging.plan import PLAN_FILE, Plan, read_plan
from mergekit_himerging.planning import PlannedMerge, plan_recipe
from mergekit_himerging.preflight import (
    check_models,
    check_output,
    check_recipe,
    inspect_planned,
    inspect_recipe,
    raise_errors,
)
from mergekit_himerging.recipe import check_size, read_tasks, resolve_model
from mergekit_himerging.scores import TaskReport, WholeScores
from mergekit_himerging.seam import forget_loaders
from mergekit_himerging.search import SearchResult, SearchSettings, search_merge
from mergekit_himerging.tasks import apply_plan

LOG = logging.getLogger(__name__)

Recipe = str | Path | Mapping[str, Any] | MergeConfiguration
"""A recipe's file, its content, or what MergeKit made of it."""


def plan(recipe: Recipe, options: MergeOptions | None = None) -> PlannedMerge:
    """Plan a recipe of any method, without reading a tensor.

    Raises:
        RecipeError: the recipe is wrong, or a model is missing; all that is found.
    """
    read = _read_recipe(recipe)
    read.check()
    return _plan(read, options)


def _plan(read: "_Read", options: MergeOptions | None) -> PlannedMerge:
    try:
        return plan_recipe(
            read.config, options or MergeOptions(quiet=True), read.folders
        )
    except RuntimeError as error:  # MergeKit's word for what a recipe cannot ask for
        raise RecipeError(str(error)) from error
    except SafetensorError:
        _check_files(read.config)
        raise


def plan_ours(recipe: Recipe, options: MergeOptions | None) -> PlannedMerge:
    """Plan a recipe that must be of this package's method.

    Raises:
        RecipeError: it is of another, or wrong, or a model is missing.
    """
    read = _read_recipe(recipe)
    _check_method(read.config)
    read.check()
    return _plan(read, options)


def _check_method(config: MergeConfiguration) -> None:
    if config.merge_method != METHOD_NAME:
        raise RecipeError(
            f"merge_method must be {METHOD_NAME}, got '{config.merge_method}'; only "
            "'evaluate' takes recipes of other methods"
        )


def analyze(recipe: Recipe, options: MergeOptions | None = None) -> Plan:
    """Measure a recipe's layers and decide what to do with them.

    Args:
        recipe: with ``merge_method: hi_merging`` and calibration data.
        options: MergeKit's; quiet where None.

    Returns:
        The plan, with all scores.

    Raises:
        RecipeError: recipe, data or models cannot be used; one sentence a problem.
    """
    merge = plan_ours(recipe, options)
    if not merge.tasks:
        raise RecipeError(
            "an analysis must have calibration data, got none; name a file as "
            "'calibration' under the 'parameters' of each model"
        )
    return measure_plan(merge)


def make_plan(analysis: Plan, **rules: Any) -> Plan:
    """Decide anew from an analysis' scores, without measuring again.

    Args:
        analysis: a plan with scores.
        rules: any of ``mixed``, ``layer_density``, ``layer_scale``, ``max_layers``,
            ``confidence``, ``compare``; others stay as in the analysis.

    Returns:
        The plan with other treatments. No guard has judged it, and no merge by it has
        been scored.

    Raises:
        ValueError: there are no scores, or a rule is unknown or out of range.
    """
    if not analysis.tasks:
        raise ValueError(
            "a plan must have scores to decide from, got none; make it with analyze"
        )
    known = {field.name for field in dataclasses.fields(Rules)}
    unknown = sorted(set(rules) - known)
    if unknown:
        raise ValueError(f"rules must be among {sorted(known)}, got {unknown}")
    values = {
        name: analysis.settings[name] for name in known if name in analysis.settings
    }
    resolution = resolve_conflicts(
        [_to_contribution(task) for task in analysis.tasks],
        Rules(**{**values, **rules}),
    )
    unscored = {"score_treated": None, "recovered_treated": None}
    return analysis.model_copy(
        update={
            "settings": {**analysis.settings, **rules},
            "treatments": treat_decisions(resolution, {}),
            "order": resolution.order,
            "guard": None,
            "tasks": tuple(
                task.model_copy(
                    update={
                        **unscored,
                        "accepted_on": task.accepted_on.model_copy(update=unscored),
                    }
                )
                for task in analysis.tasks
            ),
        }
    )


def _to_contribution(task: TaskReport) -> Contribution:
    names = (
        *("removal_single", "addition_single", "removal_merged", "addition_merged"),
        *("contribution_single", "contribution_merged", "conflict", "conflict_se"),
    )
    scores: WholeScores = task
    if scores.score_single is None or scores.score_base is None:
        raise ValueError(f"'{task.model}' must have scores, got none; analyse again")
    if not task.layers:
        raise ValueError(
            f"'{task.model}' must have contributions of layers, got a plan of "
            "'resolve: measured'; analyse with 'resolve: rules'"
        )
    return Contribution(
        model=task.model,
        gain=scores.score_single - scores.score_base,
        n_samples=task.n_samples,
        **{
            name: np.array([getattr(layer, name) for layer in task.layers])
            for name in names
        },
    )


def search(
    recipe: Recipe | PlannedMerge,
    options: MergeOptions | None = None,
    *,
    settings: SearchSettings | None = None,
    progress: Callable[[int, str], None] = lambda calls, label: None,
) -> SearchResult:
    """Choose density and scale of every model on a recipe's calibration data.

    Args:
        recipe: with ``merge_method: hi_merging`` and calibration data.
        options: MergeKit's; quiet where None.
        settings: what is tried; the defaults where None.
        progress: told of block forwards done.

    Raises:
        RecipeError: recipe, data or models cannot be used.
    """
    merge = recipe
    if not isinstance(merge, PlannedMerge):
        merge = plan_ours(merge, options)
    return search_merge(merge, settings or SearchSettings(), progress)


def export(
    treated: Plan,
    to: Literal["hi_merging", "breadcrumbs"],
    options: MergeOptions | None = None,
    *,
    recipe: Recipe | None = None,
) -> Exported:
    """Write a recipe with a plan's values for every layer.

    Args:
        treated: the plan.
        to: the method of the recipe.
        options: MergeKit's; quiet where None.
        recipe: what the plan is for; the one that it carries where None.

    Raises:
        ValueError: there is no recipe, it does not fit, or the method cannot express
            it.
    """
    if recipe is None:
        if not treated.recipe:
            raise ValueError(
                "the plan must carry its recipe, got none; name the recipe file"
            )
        recipe = treated.recipe
    options = options or MergeOptions(quiet=True)
    merge = plan_ours(recipe, options)
    tensors = merge.resolve(treated)
    return export_recipe(merge.config, tensors, to=to, options=options)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What can be known of a recipe before the heavy work.

    Attributes:
        problems: one sentence each; none where the merge can start.
        warnings: what the merge can live with, one sentence each.
        cost: of analysis and merge; None with problems, or without an analysis.
    """

    problems: tuple[str, ...]
    cost: Cost | None
    warnings: tuple[str, ...] = ()


def check(
    recipe: Recipe, options: MergeOptions | None = None, *, out: Path | None = None
) -> CheckReport:
    """Find all problems of a `hi_merging` recipe, then estimate what it costs.

    Args:
        recipe: to check.
        options: MergeKit's; quiet where None.
        out: where the merge will be written.
    """
    problems: list[str] = []

    def collect(call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            found = call(*arguments)
            return True if found is None else found
        except (ValueError, OSError) as error:
            text = error.message if isinstance(error, RecipeError) else str(error)
            problems.extend(line for line in text.split("\n") if line)
            return None

    warnings: list[str] = []
    cost = _check(recipe, options or MergeOptions(quiet=True), out, collect, warnings)
    return CheckReport(
        tuple(dict.fromkeys(problems)),
        None if problems else cost,
        tuple(dict.fromkeys(warnings)),
    )


def _check(
    recipe: Recipe,
    options: MergeOptions,
    out: Path | None,
    collect: Callable[..., Any],
    warnings: list[str],
) -> Cost | None:
    """Check one thing after the other.

    ``collect`` returns what a check found, True for nothing, and None with a problem,
    which it keeps.
    """
    read: _Read | None = collect(_read_recipe, recipe)
    if read is None:
        return None
    config = read.config
    if config.merge_method != METHOD_NAME:
        collect(_check_method, config)
        return None
    collect(read.check)
    has_models = collect(check_models, config, options)
    if has_models:
        forget_loaders()
        LoaderCache().setup(options=options)
        has_models = collect(
            lambda: warnings.extend(
                raise_errors(inspect_recipe(config, options, out, read.folders))
            )
        )
    if out is not None:
        collect(check_output, config, str(out))
    for task in collect(read_tasks, config) or ():
        if task.calibration != SELF:
            collect(read_task_rows, task, [*read.folders, Path.cwd()])
    merge: PlannedMerge | None = None
    if has_models:
        merge = collect(_plan, read, options)
    if merge is None:
        return None
    planned = merge
    if not collect(lambda: warnings.extend(raise_errors(inspect_planned(planned)))):
        return None
    if out is not None:
        collect(check_space, merge, out)
    if merge.settings["plan"]:
        treated = collect(merge.read_plan)
        if treated is not None:
            collect(apply_plan, merge.tensors, treated)
        return None
    device, share = pick_device(options), merge.settings["accept_share"]
    data = [
        collect(
            functools.partial(read_data, may_draw=False),
            dataclasses.replace(merge, tasks=[task]),
            device,
            share,
        )
        for task in merge.tasks
    ]
    if not data or not all(data):
        return None
    cost: Cost | None = collect(estimate_cost, merge)
    return cost


def _check_files(config: MergeConfiguration) -> None:
    """Refuse models whose files are not whole."""
    problems = []
    for model in sorted(config.referenced_models(), key=str):
        try:
            read_sizes(model)
        except (ValueError, OSError, RuntimeError) as error:
            problems.append(add_place(error, f"'{model}'"))
    if problems:
        raise RecipeError("\n".join(problems))


def evaluate(
    models: Sequence[str | Path],
    data: Sequence[str | Path] | Mapping[str, str | Path],
    options: MergeOptions | None = None,
    *,
    base: str | None = None,
    experts: Mapping[str, str] | None = None,
    rows: int | None = None,
    settings: Settings | None = None,
    allow_overlap: bool = False,
    keep_in: Path | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Score models and merges on held-out data, side by side.

    A recipe brings its base, its experts and the merge itself, made in memory; nothing
    is written. Calibration data of its plan, and of plans in merged folders, must not
    be among the held-out rows.

    Args:
        models: recipe files (``.yml``, ``.yaml``), model folders or hub ids, with
            adapters as in recipes.
        data: held-out files or hub datasets; by name of the task, or named after the
            file.
        options: MergeKit's; quiet where None.
        base: what the others were tuned from, unless a recipe says so.
        experts: model by name of the task that it was tuned for; a recipe's experts
            are matched by the names of calibration and held-out file up to the first
            dot.
        rows: of each task at most, a seeded choice.
        settings: how; the defaults where None.
        allow_overlap: also score rows that calibrated.
        keep_in: a folder that keeps what is done, for a later call to go on from.
        progress: told of every model and task that is done.

    Raises:
        ValueError: data overlaps, or a model or file cannot be used.
    """
    options = options or MergeOptions(quiet=True)
    named = data if isinstance(data, Mapping) else {Path(p).stem: p for p in data}
    if len(named) != len(data):
        raise ValueError(
            f"data must have names of their own, got {list(map(str, data))}"
        )
    tasks = [
        read_task(str(path), folders=[Path.cwd()], name=name, n_rows=rows)
        for name, path in named.items()
    ]
    names = [task.name for task in tasks]
    unknown = sorted(set(experts or {}) - set(names))
    if unknown:
        raise ValueError(f"experts must be of the tasks {names}, got {unknown}")
    recipes = [str(m) for m in models if str(m).endswith((".yml", ".yaml"))]
    folders = [str(m) for m in models if str(m) not in recipes]
    merges = {name: plan(name, options) for name in dict.fromkeys(recipes)}
    base = _find_base(base, merges)
    _check_experts(experts or {}, base)
    if not allow_overlap:
        others = [*folders, *(experts or {}).values(), *([base] if base else [])]
        used = {row for name in others for row in _rows_of(_folder_plan(Path(name)))}
        used |= {row for merge in merges.values() for row in _calibration_rows(merge)}
        for held_out in tasks:
            refuse_overlap(held_out, used)
    candidates: dict[tuple[str, ...] | str, Candidate] = {}

    def add_model(name: str, role: Role, task: str | None = None) -> Candidate:
        reference = ModelReference.parse(name)
        others = [ModelReference.parse(base)] if base else []
        key = resolve_model(str(reference))
        known = candidates.get(key)
        if known is None or (known.task is None and task is not None):
            candidates[key] = make_model_candidate(
                reference, options, role=role, task=task, others=others
            )
        return candidates[key]

    if base is not None:
        add_model(base, "base")
    for task_name, expert in (experts or {}).items():
        add_model(expert, "expert", task_name)
    for merge in merges.values():
        calibration = {task.model: task.calibration for task in merge.tasks}
        of_recipe = {
            str(model): calibration.get(str(model), "")
            for model in merge.config.referenced_models()
            if base is None or resolve_model(str(model)) != resolve_model(base)
        }
        for model, task_of in match_tasks(of_recipe, names).items():
            if add_model(model, "expert", task_of).task is None:
                LOG.warning(
                    "hi_merging: no held-out data is known to be of the task of '%s', "
                    "so no recovered gain is told of it; name its task with --expert "
                    "TASK=MODEL, or its file like its calibration data up to the first "
                    "dot",
                    model,
                )
    for name in folders:
        add_model(name, "merge")
    labels = shorten_names(merges, all_names=True)
    for name, merge in merges.items():
        label = labels[name]
        candidates[label] = make_merge_candidate(label, merge, find_plan(merge))
    return run.evaluate(
        list(candidates.values()), tasks, settings, keep_in=keep_in, progress=progress
    )


def _check_experts(experts: Mapping[str, str], base: str | None) -> None:
    """Check that every task has an expert of its own.

    Raises:
        ValueError: one is the base, or of two tasks.
    """
    tasks: dict[tuple[str, ...], str] = {}
    for task, name in experts.items():
        model = resolve_model(str(ModelReference.parse(name)))
        if base is not None and model == resolve_model(base):
            raise ValueError(
                f"expert of '{task}' must be another model than the base, got "
                f"'{name}'; leave it out"
            )
        if model in tasks:
            raise ValueError(
                f"'{name}' must be the expert of one task, got '{tasks[model]}' and "
                f"'{task}'; put their rows into one file, or evaluate one after the "
                "other"
            )
        tasks[model] = task


def _find_base(given: str | None, merges: Mapping[str, PlannedMerge]) -> str | None:
    """Return the base that is given, or the one of all recipes.

    Raises:
        ValueError: the recipes have several.
    """
    if given is not None:
        return str(ModelReference.parse(given))
    bases = {str(b) for merge in merges.values() if (b := merge.config.base_model)}
    if len(bases) > 1:
        raise ValueError(
            f"recipes must share a base to be compared, got {sorted(bases)}; name one "
            "with base"
        )
    return next(iter(bases), None)


def _calibration_rows(merge: PlannedMerge) -> set[str]:
    """Return the hashes of what calibrates a merge, before anything is measured."""
    named = merge.read_plan()
    if named is not None:
        return _rows_of(named)
    share = merge.settings.get("accept_share", 0.0)
    tasks = read_data(merge, pick_device(merge.options), share) if merge.tasks else []
    return {row for task in tasks for row in task.row_hashes}


def _rows_of(plan_: Plan | None) -> set[str]:
    tasks = plan_.tasks if plan_ is not None else ()
    return {row for task in tasks for row in task.calibration_rows}


def _folder_plan(folder: Path) -> Plan | None:
    path = folder / PLAN_FILE
    return read_plan(path) if path.is_file() else None


@dataclass(frozen=True, slots=True)
class _Read:
    """A recipe that was read.

    Attributes:
        config: what MergeKit made of it.
        folders: where its data may lie, before the working directory.
        text: of its file; None where it came without one.
    """

    config: MergeConfiguration
    folders: Sequence[Path] = ()
    text: str | None = None

    def check(self) -> None:
        """Check names, places and values of a `hi_merging` recipe.

        Raises:
            RecipeError: something is wrong; all that is found.
        """
        if self.config.merge_method == METHOD_NAME:
            check_recipe(self.config, self.text)


def _read_recipe(recipe: Recipe) -> _Read:
    """Read a recipe.

    Raises:
        RecipeError: it cannot be read.
    """
    if isinstance(recipe, MergeConfiguration):
        return _Read(recipe)
    if isinstance(recipe, Mapping):
        return _Read(_to_config(recipe, "the recipe"))
    path = Path(recipe)
    try:
        text = path.read_text(encoding="utf-8-sig")
        document = yaml.safe_load(text)
    except OSError as error:
        raise RecipeError(f"cannot read recipe '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"recipe '{path}' must be UTF-8, got {error.reason} at byte {error.start}"
        ) from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"recipe '{path}' must be YAML: {reason}") from error
    except Exception as error:  # of a value that is not what its tag says
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise RecipeError(f"recipe '{path}' must be YAML, got {reason}") from error
    if not isinstance(document, Mapping):
        raise RecipeError(
            f"recipe '{path}' must be a mapping of keys, got {type(document).__name__}"
        )
    config = _to_config(document, f"recipe '{path}'")
    return _Read(config, [path.absolute().parent], text)


def _to_config(document: Mapping[str, Any], what: str) -> MergeConfiguration:
    try:
        check_size(document)
    except ValueError as error:
        raise RecipeError(f"{what} {error}") from error
    try:
        return MergeConfiguration.model_validate(dict(document))
    except (ValidationError, RuntimeError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            reason = f"{place}: {first['msg']}"
        raise RecipeError(f"{what} must be a MergeKit recipe: {reason}") from error
