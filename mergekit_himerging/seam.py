"""MergeKit's non-public names, all in one place.

`SEAM` lists the functions that the plug-in wraps or calls; a name that has moved stops
`hi_merging` recipes with one line and nothing else.
"""

import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from mergekit_himerging.parameters import RecipeError

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
        "_model_out_config": ("config", "arch_info", "trust_remote_code"),
        "_set_chat_template": ("tokenizer", "merge_config", "trust_remote_code"),
        "_update_config_vocab": (
            *("config", "arch_info", "tokenizer", "pad_to_multiple_of"),
        ),
    },
}
"""Module -> function -> names of its parameters, as in MergeKit 0.1.5."""

PLANNER_FIELDS = frozenset(
    {
        *("config", "options", "arch_info", "out_model_config"),
        *("_tensors", "_current_module_layers", "_tokenizer_task"),
    }
)

ONLY_CALLED = frozenset(
    {
        "MergePlanner.normalize_config",
        *("_model_out_config", "_set_chat_template", "_update_config_vocab"),
    }
)
"""Functions of `SEAM` that are not wrapped."""

MARK = "is_himerging"
"""Attribute of wrapped functions; `functools.wraps` hands it on to later wrappers."""


class SeamError(RuntimeError):
    """MergeKit no longer has a name that the plug-in relies on."""


def find_moved() -> Iterator[str]:
    """Name what the hooks have not reached, of the modules that are in use."""
    for name, functions in SEAM.items():
        module = sys.modules.get(name)
        if module is None:
            if name == "mergekit.plan" and "mergekit.merge" in sys.modules:
                yield f"{name} has moved"
            continue
        try:
            check_seam(module)
        except SeamError as error:
            yield str(error)
            continue
        for path in functions:
            function = functools.reduce(getattr, path.split("."), module)
            if path not in ONLY_CALLED and not getattr(function, MARK, False):
                yield f"{name}.{path} is not hooked"


def check_seam(module: ModuleType) -> None:
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


def mark(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as wrapped."""
    setattr(function, MARK, True)
    return function


def name_cached(reference: Any) -> str:
    """Name the folder that MergeKit keeps a model with its adapter merged in."""
    return "_".join(part._unique_id() for part in (reference.model, reference.lora))


def forget_loaders() -> None:
    """Let MergeKit open models anew, which it keeps, by path, for a whole process."""
    from mergekit.io.tasks import LoaderCache

    LoaderCache().loaders.clear()


def make_planner(config: Any, options: Any) -> Any:
    """Make a planner for a recipe, as `run_merge` does."""
    from mergekit import merge
    from mergekit.architecture import get_architecture_info
    from mergekit.io.tasks import LoaderCache
    from mergekit.plan import MergePlanner

    architecture = get_architecture_info(config, options)
    LoaderCache().setup(options=options)
    model_config = merge._model_out_config(
        config, architecture, trust_remote_code=options.trust_remote_code
    )
    for model in config.referenced_models():
        LoaderCache().get(model)
    return MergePlanner(
        config, architecture, options=options, out_model_config=model_config
    )


def plan_tensors(planner: Any) -> None:
    """Let a planner plan, without tasks that write."""
    planner._plan()


def get_tensors(planner: Any) -> list[tuple[Any, Any]]:
    """Return what is planned, each output tensor with its task."""
    return list(planner._tensors)


def put_tensors(planner: Any, tensors: list[tuple[Any, Any]]) -> None:
    """Put other tasks in the place of the planned ones."""
    planner._tensors[:] = tensors


def get_layer(planner: Any) -> int:
    """Return the 0-based output layer that is planned next."""
    return int(planner._current_module_layers)


def sort_models(planner: Any) -> None:
    """Make the outcome independent of the models' order and of PYTHONHASHSEED."""
    for module in planner.config.modules.values():
        for output_slice in module.slices:
            output_slice.sources.sort(key=lambda source: str(source.model))
    task = planner._tokenizer_task
    if task is not None:
        from mergekit_himerging.union import BuildOrderedTokenizer

        fields = {name: getattr(task, name) for name in type(task).model_fields}
        fields["referenced_models"] = tuple(sorted(task.referenced_models, key=str))
        planner._tokenizer_task = BuildOrderedTokenizer.model_construct(**fields)


def load_output_model(planner: Any) -> tuple[Any, Any]:
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
