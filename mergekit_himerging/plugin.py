"""Where the package meets MergeKit: registration, hooks, the plan put into a merge."""

import functools
import logging
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from mergekit_himerging import seam
from mergekit_himerging.files import write_text
from mergekit_himerging.method import HiMerging
from mergekit_himerging.names import clean_text
from mergekit_himerging.parameters import METHOD_NAME, RecipeError
from mergekit_himerging.plan import PLAN_FILE, Plan, read_plan
from mergekit_himerging.preflight import (
    check_flat_recipe,
    check_layers,
    check_models,
    check_output,
    check_recipe,
    inspect_planned,
    inspect_recipe,
    raise_errors,
)
from mergekit_himerging.seam import (
    MARK,
    SeamError,
    check_seam,
    find_moved,
    forget_loaders,
    mark,
)
from mergekit_himerging.staging import find_target, stage_folder

LOG = logging.getLogger(__name__)


def register_method(module: ModuleType) -> None:
    """Register the method with `mergekit.merge_methods`, once.

    Raises:
        SeamError: the registry's functions are gone.
    """
    for name in ("register", "registered_methods"):
        # Python's own words for a module that is being loaded blame a circular import.
        if not hasattr(module, name):
            raise SeamError(f"{module.__name__}.{name} is gone")
    if METHOD_NAME not in {method.spec.name for method in module.registered_methods()}:
        module.register(HiMerging(check_use))


def wrap_planner(module: ModuleType) -> None:
    """Let our code see the whole plan of `mergekit.plan`, before a tensor is read."""
    check_seam(module)
    planner = module.MergePlanner
    for name, wrap in (
        ("plan_layer", _wrap_plan_layer),
        ("plan_module", _wrap_plan_module),
        ("plan_to_disk", _wrap_plan_to_disk),
        ("_plan", _wrap_plan),
    ):
        original = getattr(planner, name)
        if not getattr(original, MARK, False):
            setattr(planner, name, mark(wrap(original)))


def wrap_merge(module: ModuleType) -> None:
    """Check recipes before `mergekit.merge` loads anything, wherever it is bound."""
    check_seam(module)
    original = module.run_merge
    if getattr(original, MARK, False):
        return
    wrapped = mark(_wrap_run_merge(original))
    for holder in list(sys.modules.values()):
        if getattr(holder, "__dict__", {}).get("run_merge") is original:
            holder.__dict__["run_merge"] = wrapped


def check_use() -> None:
    """Refuse to merge where our checks would be bypassed.

    Raises:
        RecipeError: MergeKit's seam has moved, or `mergekit-pytorch` is asked for more
            than it can do.
    """
    moved = list(find_moved())
    if moved:
        raise RecipeError(
            f"{METHOD_NAME} does not fit the installed mergekit: {'; '.join(moved)}; "
            "install a mergekit that mergekit-himerging supports"
        )
    context = click.get_current_context(silent=True)
    recipe = context.params.get("config_path") if context is not None else None
    if recipe is not None and "mergekit.scripts.merge_raw_pytorch" in sys.modules:
        check_flat_recipe(str(recipe), os.stat(recipe).st_mtime_ns)


def _is_ours(config: Any) -> bool:
    return bool(config.merge_method == METHOD_NAME)


def _wrap_run_merge(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def run_merge(
        merge_config: Any,
        out_path: str,
        options: Any,
        config_source: str | None = None,
    ) -> None:
        if _is_ours(merge_config):
            check_use()
            check_recipe(merge_config, config_source)
            forget_loaders()
            check_models(merge_config, options)
            check_output(merge_config, out_path)
            out = Path(out_path)
            warnings = raise_errors(inspect_recipe(merge_config, options, out))
            for text in warnings:
                LOG.warning("hi_merging: %s", text)
            run = _Run(warnings)
            _merge(original, merge_config, out, options, config_source, run)
        else:
            original(merge_config, out_path, options, config_source)
            _forget_merge(Path(out_path), merge_config.merge_method)

    return run_merge


@dataclass(slots=True)
class _Run:
    """What `run_merge` and the planner that it makes tell each other.

    Attributes:
        warnings: printed before planning.
        merge: what was planned, once it is.
        tensors: the same with their final values.
    """

    warnings: list[str] = field(default_factory=list)
    merge: Any = None
    tensors: Any = ()


_RUN: ContextVar[_Run] = ContextVar("_RUN")
"""The merge of this context; none for a planner that someone else has made."""


def _merge(
    original: Callable[..., None],
    config: Any,
    out: Path,
    options: Any,
    source: str | None,
    run: _Run,
) -> None:
    """Merge beside the target, check what was written, and move it there."""
    from mergekit_himerging.merged_folder import OUR_FILES, finish_folder
    from mergekit_himerging.smoke import try_merge
    from mergekit_himerging.verify import verify_folder

    is_new = not out.exists()
    given = config.model_copy(deep=True)
    token = _RUN.set(run)
    try:
        with stage_folder(out, replaced=OUR_FILES) as staged:
            original(config, str(staged), options, source)
            verify_folder(
                staged, run.tensors, out_dtype=given.out_dtype, device=options.device
            )
            settings, lines = run.merge.settings, {}
            if settings["smoke_test"]:
                lines = try_merge(staged, run.tensors[0].task.base_model, options)
                for who, text in lines.items():
                    run.merge.say(f"smoke test, {who}: {clean_text(text)}")
            finish_folder(
                staged,
                given,
                hides_paths=settings["hide_paths"],
                lines=lines,
                say=run.merge.say,
            )
    except BaseException:
        if is_new:
            _remove_empty(str(out))
        raise
    finally:
        _RUN.reset(token)


def _forget_merge(out: Path, method: str) -> None:
    """Take away what an earlier merge of ours left where another method has written."""
    from mergekit_himerging.merged_folder import forget_merge

    try:
        gone = forget_merge(out)
    except (OSError, ValueError) as error:
        LOG.warning("hi_merging: '%s' keeps what an earlier merge left: %s", out, error)
        return
    if gone:
        LOG.warning(
            "hi_merging: '%s' has replaced an earlier merge in '%s', so what told of "
            "it is removed: %s",
            *(method, out, ", ".join(gone)),
        )


def _wrap_plan_to_disk(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def plan_to_disk(self: Any, out_path: str) -> Any:
        if _is_ours(self.config):
            check_output(self.config, str(find_target(Path(out_path))))
            self.himerging_out_path = out_path
        return original(self, out_path)

    return plan_to_disk


def _wrap_plan(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _plan(self: Any) -> None:
        if not _is_ours(self.config):
            original(self)
            return
        check_recipe(self.config, None)
        given = self.config.model_copy(deep=True)
        self.normalize_config()
        check_layers(self.config)
        seam.sort_models(self)
        self.himerging_places = []
        original(self)
        if not getattr(self, "himerging_plans_only", False):
            _treat(self, given)

    return _plan


def _wrap_plan_module(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def plan_module(self: Any, module_name: str, definition: Any) -> None:
        original(self, module_name, definition)
        if _is_ours(self.config):
            _note_places(self, module_name, None)

    return plan_module


def _wrap_plan_layer(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def plan_layer(
        self: Any,
        sources: Any,
        layer_offset: int,
        t: float,
        cfg_reader: Any,
        module_name: str,
    ) -> None:
        if not _is_ours(self.config):
            original(self, sources, layer_offset, t, cfg_reader, module_name)
            return
        _note_places(self, module_name, None)
        layer = seam.get_layer(self)
        original(self, sources, layer_offset, t, cfg_reader, module_name)
        _note_places(self, module_name, layer)

    return plan_layer


def _note_places(planner: Any, module: str, layer: int | None) -> None:
    """Note module and layer of the tensors planned since the last note."""
    new = len(seam.get_tensors(planner)) - len(planner.himerging_places)
    planner.himerging_places += [(module, layer)] * new


def _treat(planner: Any, config: Any) -> None:
    """Find the plan, by analysis or by name, and put it into the planned tasks."""
    from mergekit_himerging import planning  # loads MergeKit's graph, which loads us
    from mergekit_himerging.analysis.session import make_plan
    from mergekit_himerging.estimate import check_space
    from mergekit_himerging.views.table import make_console, render_plan

    merge = planning.describe_planner(planner, config)
    run = _RUN.get(_Run())
    warnings = raise_errors(inspect_planned(merge))
    for text in sorted(set(warnings) - set(run.warnings)):
        LOG.warning("hi_merging: %s", text)
    warnings = sorted({*warnings, *run.warnings})
    out_path = getattr(planner, "himerging_out_path", None)
    if out_path is not None:
        check_space(merge, find_target(Path(out_path)))
    plan_files = _plan_files(out_path, merge.settings["plan_out"])
    plan = merge.read_plan()
    if plan is None and merge.tasks:
        plan = make_plan(merge)
        if not merge.options.quiet:
            make_console().print(render_plan(plan))
    elif plan is None:
        merge.say("no calibration data, so the merge is model-wise only")
    treated = merge.resolve(plan)
    if plan is not None:
        plan = plan.model_copy(update={"warnings": tuple(warnings)})
    _write_plan(plan, plan_files, merge)
    run.merge, run.tensors = merge, treated
    seam.put_tensors(planner, [(tensor.weight, tensor.task) for tensor in treated])


def _plan_files(out_path: str | None, plan_out: str) -> list[Path]:
    """List where the plan will be written, and refuse what is no place for it.

    Raises:
        RecipeError: `plan_out` is a folder, or a file that is no plan.
    """
    files = [] if out_path is None else [Path(out_path) / PLAN_FILE]
    if plan_out:
        path = Path(plan_out)
        try:
            if path.exists():
                read_plan(path)
        except (OSError, ValueError) as error:
            raise RecipeError(
                f"plan_out '{plan_out}' must be a new file or an earlier plan, got "
                f"something else ({error}); name another file"
            ) from error
        files.append(path)
    return files


def _write_plan(plan: Plan | None, files: list[Path], merge: Any) -> None:
    """Write the plan that is merged; a folder keeps none of an earlier merge."""
    for path in files:
        if plan is None:
            path.unlink(missing_ok=path.name == PLAN_FILE or not path.exists())
            continue
        shown = find_target(path.parent) / path.name
        try:
            write_text(path, plan.to_json())
        except OSError as error:
            raise RecipeError(
                f"cannot write the plan to '{shown}': {error.strerror}"
            ) from error
        merge.say(f"plan written to {shown}")


def _remove_empty(folder: str) -> None:
    """Remove the folder that a failed merge has made, where nothing was written."""
    try:
        os.rmdir(folder)
    except OSError:
        LOG.debug("'%s' is kept", folder)
