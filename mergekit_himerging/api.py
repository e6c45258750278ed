"""The package from Python: the same steps as its commands.

Invariant: a recipe may be a file, a mapping or MergeKit's own record, and none of them
is changed.
"""

import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from pydantic import ValidationError

from mergekit_himerging.analysis.calibration import read_rows
from mergekit_himerging.analysis.contribution import (
    Contribution,
    Rules,
    resolve_conflicts,
)
from mergekit_himerging.analysis.run import treat_decisions
from mergekit_himerging.analysis.session import make_plan as measure_plan
from mergekit_himerging.analysis.session import pick_device, read_data
from mergekit_himerging.estimate import Cost, estimate_cost
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
from mergekit_himerging.parameters import METHOD_NAME, RecipeError
from mergekit_himerging.plan import PLAN_FILE, Plan, read_plan
from mergekit_himerging.planning import PlannedMerge, plan_recipe
from mergekit_himerging.preflight import check_models, check_output, check_recipe
from mergekit_himerging.recipe import read_tasks
from mergekit_himerging.scores import TaskReport, WholeScores
from mergekit_himerging.search import SearchResult, SearchSettings, search_merge
from mergekit_himerging.tasks import stored_itemsize

Recipe = str | Path | Mapping[str, Any] | MergeConfiguration
"""A recipe's file, its content, or what MergeKit made of it."""


def plan(recipe: Recipe, options: MergeOptions | None = None) -> PlannedMerge:
    """Plan a recipe of any method, without reading a tensor.

    Raises:
        RecipeError: the recipe is wrong, or a model is missing; all that is found.
    """
    config, folders = _read_recipe(recipe)
    return plan_recipe(config, options or MergeOptions(quiet=True), folders)


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
    merge = plan(recipe, options)
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
    merge = recipe if isinstance(recipe, PlannedMerge) else plan(recipe, options)
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
    merge = plan(recipe, options)
    tensors = merge.resolve(treated)
    return export_recipe(merge.config, tensors, to=to, options=options)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What can be known of a recipe before the heavy work.

    Attributes:
        problems: one sentence each; none where the merge can start.
        cost: of analysis and merge; None with problems, or without calibration data.
    """

    problems: tuple[str, ...]
    cost: Cost | None


def check(
    recipe: Recipe, options: MergeOptions | None = None, *, out: Path | None = None
) -> CheckReport:
    """Find all problems of a `hi_merging` recipe, then estimate what it costs.

    Args:
        recipe: to check.
        options: MergeKit's; quiet where None.
        out: where the merge will be written.
    """
    options = options or MergeOptions(quiet=True)
    problems: list[str] = []

    def collect(call: Callable[[], object]) -> bool:
        try:
            call()
        except (ValueError, OSError) as error:
            text = error.message if isinstance(error, RecipeError) else str(error)
            problems.extend(line for line in text.split("\n") if line)
            return False
        return True

    read: list[tuple[MergeConfiguration, list[Path]]] = []
    if not collect(lambda: read.append(_read_recipe(recipe))):
        return CheckReport(tuple(problems), None)
    ((config, folders),) = read
    if config.merge_method != METHOD_NAME:
        problems.append(
            f"merge_method must be {METHOD_NAME}, got '{config.merge_method}'"
        )
        return CheckReport(tuple(problems), None)
    is_clean = collect(lambda: check_recipe(config, None))
    has_models = collect(lambda: check_models(config, options))
    if out is not None:
        collect(lambda: check_output(config, str(out)))
    if not is_clean:
        return CheckReport(tuple(problems), None)
    for task in read_tasks(config):
        collect(functools.partial(read_rows, task.calibration, [*folders, Path.cwd()]))
    if problems or not has_models:
        return CheckReport(tuple(problems), None)
    merges: list[PlannedMerge] = []
    if not collect(lambda: merges.append(plan_recipe(config, options, folders))):
        return CheckReport(tuple(problems), None)
    (merge,) = merges
    share = merge.settings["accept_share"]
    for task in merge.tasks:
        one = dataclasses.replace(merge, tasks=[task])
        collect(functools.partial(read_data, one, pick_device(options), share))
    collect(lambda: _check_space(merge, out))
    if problems or not merge.tasks:
        return CheckReport(tuple(problems), None)
    costs: list[Cost] = []
    collect(lambda: costs.append(estimate_cost(merge)))
    return CheckReport(tuple(problems), costs[0] if costs else None)


def _check_space(merge: PlannedMerge, out: Path | None) -> None:
    """Refuse a disk on which the merge does not fit."""
    if out is None:
        return
    here = out.absolute()
    folder = next(path for path in (here, *here.parents) if path.exists())
    base = merge.config.base_model or merge.config.referenced_models()[0]
    index = LoaderCache().get(base).index
    files = {Path(index.base_path) / name for name in index.tensor_paths.values()}
    needed = sum(file.stat().st_size for file in files)
    stored = stored_itemsize(base)
    dtype = dtype_from_name(merge.config.out_dtype or merge.config.dtype)
    if stored is not None and dtype is not None:
        needed = needed * dtype.itemsize // stored
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"the disk of '{folder}' must have {needed / 2**30:.2f} GiB for the merge, "
            f"got {free / 2**30:.2f} GiB; free some, or write elsewhere"
        )


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
            are matched by the names of calibration and held-out file.
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
    candidates: dict[str, Candidate] = {}
    calibrated: set[str] = set()

    def add_model(name: str, role: Role, task: str | None = None) -> None:
        reference = ModelReference.parse(name)
        others = [ModelReference.parse(base)] if base else []
        known = candidates.get(str(reference))
        if known is None or (known.task is None and task is not None):
            candidates[str(reference)] = make_model_candidate(
                reference, options, role=role, task=task, others=others
            )

    for task_name, expert in (experts or {}).items():
        add_model(expert, "expert", task_name)
    merges: list[tuple[str, PlannedMerge, Plan | None]] = []
    for item in map(str, models):
        if not item.endswith((".yml", ".yaml")):
            continue
        merge = plan(item, options)
        found = find_plan(merge)
        merges.append((Path(item).stem, merge, found))
        base = base or (
            str(merge.config.base_model) if merge.config.base_model else None
        )
        settings_of = {task.model: task.calibration for task in merge.tasks}
        of_recipe = {
            str(m): settings_of.get(str(m), "")
            for m in merge.config.referenced_models()
            if m != merge.config.base_model
        }
        for model, task_of in match_tasks(of_recipe, names).items():
            add_model(model, "expert", task_of)
        calibrated |= _calibration_rows(found)
    if base is not None:
        candidates.pop(str(ModelReference.parse(base)), None)
        add_model(base, "base")
    for item in map(str, models):
        if not item.endswith((".yml", ".yaml")):
            add_model(item, "merge")
            calibrated |= _calibration_rows(_folder_plan(Path(item)))
    for name, merge, found in merges:
        label = name if name not in candidates else f"{name} (recipe)"
        candidates[label] = make_merge_candidate(label, merge, found)
    if not allow_overlap:
        for held_out in tasks:
            refuse_overlap(held_out, calibrated)
    return run.evaluate(
        list(candidates.values()), tasks, settings, keep_in=keep_in, progress=progress
    )


def _calibration_rows(plan_: Plan | None) -> set[str]:
    tasks = plan_.tasks if plan_ is not None else ()
    return {row for task in tasks for row in task.calibration_rows}


def _folder_plan(folder: Path) -> Plan | None:
    path = folder / PLAN_FILE
    return read_plan(path) if path.is_file() else None


def _read_recipe(recipe: Recipe) -> tuple[MergeConfiguration, list[Path]]:
    """Read a recipe, and say beside which folder its data may lie.

    Raises:
        RecipeError: it cannot be read; one sentence a problem.
    """
    if isinstance(recipe, MergeConfiguration):
        return recipe, []
    if isinstance(recipe, Mapping):
        return _to_config(recipe, "the recipe"), []
    path = Path(recipe)
    try:
        text = path.read_text(encoding="utf-8-sig")
        document = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RecipeError(f"cannot read recipe '{path}': {reason}") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"recipe '{path}' must be YAML: {reason}") from error
    if not isinstance(document, Mapping):
        raise RecipeError(
            f"recipe '{path}' must be a mapping of keys, got {type(document).__name__}"
        )
    config = _to_config(document, f"recipe '{path}'")
    if config.merge_method == METHOD_NAME:
        check_recipe(config, text)
    return config, [path.absolute().parent]


def _to_config(document: Mapping[str, Any], what: str) -> MergeConfiguration:
    try:
        return MergeConfiguration.model_validate(dict(document))
    except (ValidationError, RuntimeError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            reason = f"{place}: {first['msg']}"
        raise RecipeError(f"{what} must be a MergeKit recipe: {reason}") from error
