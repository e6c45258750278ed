"""Recipes, paths and depths checked as a command of MergeKit hands them over.

Invariant: problems come all at once, each with its place and its remedy.
"""

import functools
import os
from pathlib import Path
from typing import Any

import click
import yaml

from mergekit_himerging.method import refuse_whole_merge
from mergekit_himerging.parameters import METHOD_NAME, PARAMETERS, RecipeError
from mergekit_himerging.recipe import check_config, check_document, find_repeated_keys


def find_recipe() -> Path | None:
    """Return the recipe that a command of MergeKit was started with."""
    context = click.get_current_context(silent=True)
    name = context.params.get("config_file") if context is not None else None
    return Path(name) if isinstance(name, str | os.PathLike) else None


def recipe_folders() -> list[Path]:
    """Return the folder of the recipe, where a command was started with one."""
    recipe = find_recipe()
    return [] if recipe is None else [recipe.absolute().parent]


def check_recipe(config: Any, source: str | None) -> None:
    """Check keys on the raw text, where there is one, and parameters on the config."""
    problems = []
    recipe = find_recipe()
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
def check_flat_recipe(path: str, changed: int) -> None:
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


def check_models(config: Any, options: Any) -> None:
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


def check_output(config: Any, out_path: str) -> None:
    """Refuse to write over a model that the merge reads."""
    target = os.path.realpath(out_path)
    for model in sorted(config.referenced_models(), key=str):
        for path in filter(None, (model.model, model.lora)):
            if os.path.exists(path.path) and os.path.realpath(path.path) == target:
                raise RecipeError(
                    f"the output folder must not be an input, got '{out_path}' "
                    f"('{model}'); write the merge somewhere else"
                )


def check_layers(config: Any) -> None:
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


def _raise(problems: list[str]) -> None:
    if problems:
        raise RecipeError("\n".join(dict.fromkeys(problems)))
