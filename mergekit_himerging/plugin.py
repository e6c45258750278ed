"""Where the package meets MergeKit: registration, planner seam, early checks.

The only file that touches MergeKit's non-public names; `SEAM` lists what it relies on,
and a name that has moved stops `hi_merging` recipes with one line and nothing else.
"""

import copy
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import yaml

from mergekit_himerging.method import HiMerging, refuse_whole_merge
from mergekit_himerging.parameters import METHOD_NAME, PARAMETERS, RecipeError
from mergekit_himerging.plan import PLAN_FILE, Plan, read_plan, write_text
from mergekit_himerging.recipe import (
    TaskSettings,
    check_config,
    check_document,
    find_repeated_keys,
    read_settings,
    read_tasks,
)

LOG = logging.getLogger(__name__)

SEAM: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mergekit.plan": {
        "MergePlanner.plan_layer": (
            *("self", "sources", "layer_offset", "t", "cfg_reader", "module_name"),
        ),
        "MergePlanner.plan_module": ("self", "module_name", "definition"),
        "MergePlanner.plan_to_disk": ("self", "out_path"),
        "MergePlanner.normalize_config": ("self",),
        "MergePlanner._plan": ("self",),
    },
    "mergekit.merge": {
        "run_merge": ("merge_config", "out_path", "options", "config_source"),
    },
}
"""Module -> function -> names of its parameters, as in MergeKit 0.1.5."""

PLANNER_FIELDS = frozenset(
    {"config", "options", "_tensors", "_current_module_layers", "_tokenizer_task"}
)


ONLY_CALLED = frozenset({"MergePlanner.normalize_config"})
"""Functions of `SEAM` that are not wrapped."""

MARK = "is_himerging"
"""Attribute of wrapped functions; `functools.wraps` hands it on to later wrappers."""


class SeamError(RuntimeError):
    """MergeKit no longer has a name that the plug-in relies on."""


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
    _check_seam(module)
    planner = module.MergePlanner
    for name, wrap in (
        ("plan_layer", _wrap_plan_layer),
        ("plan_module", _wrap_plan_module),
        ("plan_to_disk", _wrap_plan_to_disk),
        ("_plan", _wrap_plan),
    ):
        original = getattr(planner, name)
        if not getattr(original, MARK, False):
            setattr(planner, name, _mark(wrap(original)))


def wrap_merge(module: ModuleType) -> None:
    """Check recipes before `mergekit.merge` loads anything, wherever it is bound."""
    _check_seam(module)
    original = module.run_merge
    if getattr(original, MARK, False):
        return
    wrapped = _mark(_wrap_run_merge(original))
    for holder in list(sys.modules.values()):
        if getattr(holder, "__dict__", {}).get("run_merge") is original:
            holder.__dict__["run_merge"] = wrapped


def check_use() -> None:
    """Refuse to merge where our checks would be bypassed.

    Raises:
        RecipeError: MergeKit's seam has moved, or `mergekit-pytorch` is asked for more
            than it can do.
    """
    moved = list(_find_moved())
    if moved:
        raise RecipeError(
            f"{METHOD_NAME} does not fit the installed mergekit: {'; '.join(moved)}; "
            "install a mergekit that mergekit-himerging supports"
        )
    context = click.get_current_context(silent=True)
    recipe = context.params.get("config_path") if context is not None else None
    if recipe is not None and "mergekit.scripts.merge_raw_pytorch" in sys.modules:
        _check_flat_recipe(str(recipe), os.stat(recipe).st_mtime_ns)


def _find_moved() -> Iterator[str]:
    """Name what the hooks have not reached, of the modules that are in use."""
    for name, functions in SEAM.items():
        module = sys.modules.get(name)
        if module is None:
            if name == "mergekit.plan" and "mergekit.merge" in sys.modules:
                yield f"{name} has moved"
            continue
        try:
            _check_seam(module)
        except SeamError as error:
            yield str(error)
            continue
        for path in functions:
            function = functools.reduce(getattr, path.split("."), module)
            if path not in ONLY_CALLED and not getattr(function, MARK, False):
                yield f"{name}.{path} is not hooked"


def _check_seam(module: ModuleType) -> None:
    """Compare one module of MergeKit with what `SEAM` says.

    Raises:
        SeamError: a function is gone or takes other parameters.
    """
    for path, expected in SEAM[module.__name__].items():
        try:
            function = functools.reduce(getattr, path.split("."), module)
            found = tuple(inspect.signature(function).parameters)  # type: ignore[arg-type]
        except (AttributeError, TypeError, ValueError) as error:
            raise SeamError(f"{module.__name__}.{path} is gone") from error
        if found != expected:
            raise SeamError(f"{module.__name__}.{path} takes {', '.join(found)}")
    if module.__name__ == "mergekit.plan":
        known = set(inspect.get_annotations(module.MergePlanner))
        if not known >= PLANNER_FIELDS:
            missing = ", ".join(sorted(PLANNER_FIELDS - known))
            raise SeamError(f"{module.__name__}.MergePlanner has no {missing}")


def _mark(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, MARK, True)
    return function


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
            _check_recipe(merge_config, config_source)
            _check_models(merge_config, options)
            _check_output(merge_config, out_path)
        is_new = not os.path.exists(out_path)
        try:
            original(merge_config, out_path, options, config_source)
        except BaseException:
            if is_new and _is_ours(merge_config):
                _remove_empty(out_path)
            raise

    return run_merge


def _wrap_plan_to_disk(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def plan_to_disk(self: Any, out_path: str) -> Any:
        if _is_ours(self.config):
            _check_output(self.config, out_path)
            self.himerging_out_path = out_path
        return original(self, out_path)

    return plan_to_disk


def _wrap_plan(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _plan(self: Any) -> None:
        if not _is_ours(self.config):
            original(self)
            return
        _check_recipe(self.config, None)
        self.normalize_config()
        _check_layers(self.config)
        _sort_models(self)
        self.himerging_places = []
        original(self)
        _treat(self)

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
        layer = self._current_module_layers
        original(self, sources, layer_offset, t, cfg_reader, module_name)
        _note_places(self, module_name, layer)

    return plan_layer


def _note_places(planner: Any, module: str, layer: int | None) -> None:
    """Note module and layer of the tensors planned since the last note."""
    new = len(planner._tensors) - len(planner.himerging_places)
    planner.himerging_places += [(module, layer)] * new


def _treat(planner: Any) -> None:
    """Find the plan, by analysis or by name, and put it into the planned tasks."""
    from mergekit_himerging import tasks  # loads MergeKit's graph, which loads us

    places = zip(planner._tensors, planner.himerging_places, strict=True)
    tensors = [
        tasks.PlannedTensor(weight, task, module, layer)
        for (weight, task), (module, layer) in places
    ]
    config, options = planner.config, planner.options
    settings, task_settings = read_settings(config), read_tasks(config)
    tasks.warn_of_rounding(tensors, config.dtype, options)

    resolved: dict[Any, list[tasks.PlannedTensor]] = {}

    def resolve(plan: Plan | None) -> list[tasks.PlannedTensor]:
        changes = [t for t in plan.treatments if t.action != "keep"] if plan else []
        key = tuple(changes)
        if key not in resolved:  # a wide scope reads every tensor twice
            treated = tasks.apply_plan(tensors, plan)
            resolved[key] = tasks.apply_scope(treated, settings["scope"], options)
        return resolved[key]

    plan_files = _plan_files(planner, settings["plan_out"])
    plan = None
    if settings["plan"]:
        plan = _read_plan(settings["plan"])
        if task_settings:
            _say(options, "'plan' is given, so calibration data is not used")
    elif task_settings:
        plan = _analyse(planner, tensors, resolve, settings, task_settings)
    else:
        _say(options, "no calibration data, so the merge is model-wise only")
    treated = resolve(plan)
    _write_plan(plan, plan_files, options)
    planner._tensors[:] = [(tensor.weight, tensor.task) for tensor in treated]


def _plan_files(planner: Any, plan_out: str) -> list[Path]:
    """List where the plan will be written, and refuse what is no place for it.

    Raises:
        RecipeError: `plan_out` is a folder, or a file that is no plan.
    """
    out_path = getattr(planner, "himerging_out_path", None)
    files = [] if out_path is None else [Path(out_path) / PLAN_FILE]
    if plan_out:
        path = Path(plan_out)
        try:
            if path.exists():
                read_plan(path)
        except ValueError as error:
            raise RecipeError(
                f"plan_out '{plan_out}' must be a new file or an earlier plan, got "
                f"something else ({error}); name another file"
            ) from error
        files.append(path)
    return files


def _write_plan(plan: Plan | None, files: list[Path], options: Any) -> None:
    """Write the plan that is merged; a folder keeps none of an earlier merge."""
    for path in files:
        if plan is None:
            path.unlink(missing_ok=path.name == PLAN_FILE or not path.exists())
            continue
        try:
            write_text(path, plan.to_json())
        except OSError as error:
            raise RecipeError(f"cannot write the plan to '{path}': {error}") from error
        _say(options, f"plan written to {path}")


def _analyse(
    planner: Any,
    tensors: Any,
    resolve: Any,
    settings: dict[str, Any],
    task_settings: list[TaskSettings],
) -> Plan:
    """Make a plan by measuring, and say what is in it."""
    from mergekit_himerging.analysis import session
    from mergekit_himerging.report import summarize

    tokenizer, model_config = _load_output_model(planner)
    config = planner.config
    plan = session.make_plan(
        session.Session(
            tensors=tensors,
            resolve=resolve,
            settings=settings,
            tasks=task_settings,
            tokenizer=tokenizer,
            model_config=model_config,
            options=planner.options,
            dtype=config.dtype,
            vocabulary=repr((config.tokenizer, config.tokenizer_source)),
            folders=[*_recipe_folders(), Path.cwd()],
        )
    )
    if not planner.options.quiet:
        click.echo(summarize(plan))
    return plan


def _load_output_model(planner: Any) -> tuple[Any, Any]:
    """Load the tokenizer that the merge will have, and its configuration.

    Raises:
        RecipeError: no model has a tokenizer, or the chat template is none.
    """
    from mergekit import merge
    from mergekit.graph import Executor

    config = planner.config
    model_config = copy.deepcopy(planner.out_model_config)
    models = sorted(config.referenced_models(), key=str)
    models.sort(key=lambda model: model != config.base_model)
    if planner._tokenizer_task is not None:
        ((_, built),) = Executor([planner._tokenizer_task]).run(quiet=True)
        tokenizer = built.tokenizer
        pad = config.tokenizer.pad_to_multiple_of if config.tokenizer else None
        merge._update_config_vocab(
            model_config, planner.arch_info, tokenizer, pad_to_multiple_of=pad
        )
    else:
        found = ((m, t) for m in models if (t := _load_tokenizer(planner, m)))
        first, tokenizer = next(found, (None, None))
        if tokenizer is None:
            raise RecipeError(
                f"no model has a tokenizer; add one to the folder of '{models[0]}'"
            )
        if first != config.base_model:
            LOG.warning("hi_merging: the tokenizer of '%s' is used", first)
    if config.chat_template == "auto":
        # MergeKit counts votes in the order of a set; here a tie is no matter of luck.
        votes = [_template_of(_load_tokenizer(planner, model)) for model in models]
        given = [vote for vote in votes if vote]
        config.chat_template = max(given, key=given.count) if given else None
    try:
        merge._set_chat_template(tokenizer, config, planner.options.trust_remote_code)
    except RuntimeError as error:
        raise RecipeError(
            f"{error}; name a template of MergeKit's, or write one in Jinja"
        ) from error
    if not tokenizer.chat_template:
        for model in models:
            template = _template_of(_load_tokenizer(planner, model))
            if template:
                tokenizer.chat_template = template
                if model != config.base_model:
                    LOG.warning("hi_merging: the chat template of '%s' is used", model)
                break
    return tokenizer, model_config


def _load_tokenizer(planner: Any, model: Any) -> Any:
    """Load a model's tokenizer; None where it has none."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(
            model.model.path,
            revision=model.model.revision,
            trust_remote_code=planner.options.trust_remote_code,
        )
    except (OSError, ValueError, ImportError) as error:
        LOG.warning("hi_merging: no tokenizer in '%s': %s", model, error)
        return None


def _template_of(tokenizer: Any) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template.strip() if template else None


def _remove_empty(folder: str) -> None:
    """Remove the folder that a failed merge has made, where nothing was written."""
    try:
        os.rmdir(folder)
    except OSError:
        LOG.debug("'%s' is kept", folder)


def _say(options: Any, text: str) -> None:
    if not options.quiet:
        click.echo(f"hi_merging: {text}")


def _read_plan(name: str) -> Plan:
    tried = [folder / name for folder in (*_recipe_folders(), Path.cwd())]
    path = next((path for path in tried if path.exists()), None)
    if path is None:
        places = " or ".join(f"'{path}'" for path in dict.fromkeys(tried))
        raise RecipeError(f"plan must be a file, found none at {places}")
    try:
        return read_plan(path)
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _recipe_file() -> Path | None:
    """Return the recipe that a command of MergeKit was started with."""
    context = click.get_current_context(silent=True)
    name = context.params.get("config_file") if context is not None else None
    return Path(name) if isinstance(name, str | os.PathLike) else None


def _recipe_folders() -> list[Path]:
    recipe = _recipe_file()
    return [] if recipe is None else [recipe.absolute().parent]


def _check_recipe(config: Any, source: str | None) -> None:
    """Check keys on the raw text, where there is one, and parameters on the config."""
    problems = []
    recipe = _recipe_file()
    if source is None and recipe is not None and recipe.is_file():
        source = recipe.read_text(encoding="utf-8")
    if source is not None:
        problems += find_repeated_keys(source)
        for document in yaml.safe_load_all(source):
            if (
                isinstance(document, dict)
                and document.get("merge_method") == METHOD_NAME
            ):
                # `name` belongs to the documents of mergekit-multi.
                named = {k: v for k, v in document.items() if k != "name"}
                problems += check_document(named, type(config))
                problems += check_config(type(config).model_validate(named))
    _raise(problems or check_config(config))


@functools.lru_cache(maxsize=1)
def _check_flat_recipe(path: str, changed: int) -> None:
    """Check the recipe of `mergekit-pytorch`, which never meets the planner."""
    from mergekit.scripts.merge_raw_pytorch import RawPyTorchMergeConfig

    text = Path(path).read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    config = RawPyTorchMergeConfig.model_validate(document)
    mappings = [config.parameters or {}, *(m.parameters or {} for m in config.models)]
    for mapping in mappings:
        for name, value in mapping.items():
            if name in PARAMETERS:
                refuse_whole_merge(name, value)
    _raise(
        find_repeated_keys(text)
        + check_document(document, RawPyTorchMergeConfig)
        + check_config(config)
    )


def _check_models(config: Any, options: Any) -> None:
    """Check that every model can be found, before adapters are merged."""
    problems = []
    for model in sorted(config.referenced_models(), key=str):
        role = "base model" if model == config.base_model else "model"
        adapter = model.lora.path if model.lora is not None else ""
        if _looks_local(adapter) and not os.path.exists(adapter):
            problems.append(
                f"adapter '{adapter}' of {role} '{model}' does not exist; "
                "mend the path, which is relative to the working directory"
            )
        if _looks_local(model.model.path) and not os.path.exists(model.model.path):
            problems.append(
                f"{role} '{model.model.path}' does not exist; "
                "mend the path, which is relative to the working directory"
            )
            continue
        try:
            model.config(trust_remote_code=options.trust_remote_code)
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            problems.append(
                f"{role} '{model.model}' cannot be loaded: {reason}"
                if os.path.exists(model.model.path)
                else f"{role} '{model.model}' is no folder in the working directory "
                f"and cannot be loaded from a hub either: {reason}"
            )
    _raise(problems)


def _looks_local(path: str) -> bool:
    return path.startswith(("/", "~", ".")) or path.count("/") > 1


def _check_output(config: Any, out_path: str) -> None:
    """Refuse to write over a model that the merge reads."""
    target = os.path.realpath(out_path)
    for model in sorted(config.referenced_models(), key=str):
        for path in filter(None, (model.model, model.lora)):
            if os.path.exists(path.path) and os.path.realpath(path.path) == target:
                raise RecipeError(
                    f"the output folder must not be an input, got '{out_path}' "
                    f"('{model}'); write the merge somewhere else"
                )


def _check_layers(config: Any) -> None:
    """Check that the models of each slice are equally deep."""
    for name, module in config.modules.items():
        for index, output_slice in enumerate(module.slices):
            depths = {
                str(source.model): source.layer_range[1] - source.layer_range[0]
                for source in output_slice.sources
            }
            if len(set(depths.values())) > 1:
                counts = ", ".join(f"'{model}' {n}" for model, n in depths.items())
                raise RecipeError(
                    "models must have the same number of layers "
                    f"({name}.slices[{index}]), got {counts}; "
                    "take equal ranges of them with 'slices:'"
                )


def _sort_models(planner: Any) -> None:
    """Make the outcome independent of the models' order and of PYTHONHASHSEED."""
    for module in planner.config.modules.values():
        for output_slice in module.slices:
            output_slice.sources.sort(key=lambda source: str(source.model))
    task = planner._tokenizer_task
    if task is not None:
        models = tuple(sorted(task.referenced_models, key=str))
        planner._tokenizer_task = task.model_copy(update={"referenced_models": models})


def _raise(problems: list[str]) -> None:
    if problems:
        raise RecipeError("\n".join(dict.fromkeys(problems)))
