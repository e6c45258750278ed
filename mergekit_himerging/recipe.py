"""What a recipe may say: names, places and values, found wrong before a tensor is read.

MergeKit drops keys that it does not know and ignores parameters that the method does
not have; here each of them is a problem with a remedy. The only file that knows how a
recipe is spelled. Functions return all problems that they see, as sentences.
"""

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ValidationError

from mergekit_himerging.files import MAX_DEPTH
from mergekit_himerging.parameters import (
    FOREIGN,
    MEASURED_ONLY,
    METHOD_NAME,
    PAPER,
    PARAMETERS,
    RULES_ONLY,
    SELF,
    Parameter,
    add_place,
    check_value,
)

TASK_VALUES = ("metric", "samples", "task_weight", "floor")
"""Parameters of a model's task, besides its data."""

MAX_VALUES = 1_000_000
"""Of a recipe; a gradient for each tensor of a large model has some thousands."""

Level = Literal["recipe", "group", "model"]
"""Where ``parameters`` stand: at the top, in a slice or module, in a model."""


def check_document(raw: object, model: type[BaseModel]) -> list[str]:
    """Find keys of a raw recipe that MergeKit would drop in silence.

    Args:
        raw: one YAML document, as loaded.
        model: the pydantic model that MergeKit reads it into.

    Returns:
        One sentence per key.
    """
    if not isinstance(raw, Mapping):
        return [f"a recipe must be a mapping of keys, got {type(raw).__name__}"]
    try:
        read = model.model_validate(raw)
    except (ValidationError, RuntimeError):  # MergeKit refuses it too, and says why
        return []
    return [_unknown_key(key, where) for key, where in _dropped_keys(raw, read, "")]


def check_size(document: object) -> None:
    """Refuse a document that grows without bound where its aliases are written out.

    Raises:
        ValueError: it is nested too deep, or has too many values; the bare fact.
    """
    counts: dict[int, int] = {}  # an alias leads to the same object again

    def count(value: object, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise ValueError(f"must be nested at most {MAX_DEPTH} deep, got more")
        if not isinstance(value, Mapping | list | tuple | set):
            return 1
        if id(value) not in counts:
            items = [*value, *value.values()] if isinstance(value, Mapping) else value
            counts[id(value)] = 1 + sum(count(item, depth + 1) for item in items)
        return counts[id(value)]

    if count(document, 0) > MAX_VALUES:
        raise ValueError(f"must have at most {MAX_VALUES:,} values, got more")


def find_repeated_keys(text: str) -> list[str]:
    """Find keys that stand twice in one mapping of a YAML text: one of them is lost."""
    problems: list[str] = []
    visited: set[int] = set()  # an alias leads to the same node again

    def visit(node: yaml.Node) -> None:
        if id(node) in visited:
            return
        visited.add(id(node))
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        problems.append(
                            f"key '{key.value}' stands twice in one mapping "
                            f"(line {key.start_mark.line + 1}); "
                            "YAML keeps the last one only, so remove one"
                        )
                    seen.add(key.value)
                visit(value)
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                visit(value)

    # A list keeps all nodes alive, so that no two of them share an id.
    for document in list(yaml.compose_all(text, Loader=yaml.SafeLoader)):
        if document is not None:
            visit(document)
    return problems


def check_config(config: Any) -> list[str]:
    """Check names, places and values of all parameters of a recipe.

    Args:
        config: a ``mergekit.config.MergeConfiguration`` or the flat recipe of
            ``mergekit-pytorch``.

    Returns:
        One sentence per problem.
    """
    problems: list[str] = []
    groups = list(_groups(config))
    if not any(base is not None for base, _ in groups):
        problems.append(
            f"{METHOD_NAME} must have a base model, got none; "
            "add 'base_model:' with the model that the others were tuned from"
        )
    experts = [m for base, members in groups for _, m in members if m != base]
    if not experts and not problems:
        problems.append(
            f"{METHOD_NAME} must have a model besides the base, got the base alone; "
            "list the tuned models under 'models:'"
        )
    for base, members in groups:
        problems += _check_members(base, members)
    problems += _find_baseless_slices(config)
    for level, where, is_base, settings in _parameter_mappings(config):
        for name, setting in settings.items():
            problem = _check_name(name, level, where, is_base=is_base)
            if problem is None:
                problem = _check_setting(PARAMETERS[name], setting, where)
            if problem is not None:
                problems.append(problem)
    return problems or list(_check_analysis(config))


def resolve_model(model: str) -> tuple[str, ...]:
    """Spell the local folders of a model or ``base+adapter`` reference in one way."""
    return tuple(
        os.path.realpath(part) if os.path.exists(part) else part
        for part in model.split("+")
    )


def to_document(value: Any) -> Any:
    """Turn a recipe as MergeKit read it into plain mappings, lists and scalars.

    MergeKit's own way out of it fails on some references of models.

    Returns:
        What MergeKit reads as the same recipe; settings left open are left out.
    """
    from mergekit.common import ModelReference

    if isinstance(value, ModelReference):
        text = str(value)
        try:
            if ModelReference.model_validate(text) == value:
                return text
        except (ValueError, RuntimeError):
            pass  # a path that cannot be told from a reference stays in parts
    if isinstance(value, BaseModel):
        fields = ((name, getattr(value, name)) for name in type(value).model_fields)
        return {name: to_document(item) for name, item in fields if item is not None}
    if isinstance(value, Mapping):
        return {str(key): to_document(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_document(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """What a recipe says of one model's task.

    Attributes:
        model: the model, as the recipe spells it.
        calibration: a file, a hub dataset or ``self``.
        metric: ``loss``, ``accuracy`` or ``agreement``.
        samples: how many rows are used at most.
        task_weight: how much it counts in what is raised; 0 leaves it out.
        floor: recovered gain that it is not to fall below; None without one.
    """

    model: str
    calibration: str
    metric: Literal["loss", "accuracy", "agreement"]
    samples: int
    task_weight: float = 1.0
    floor: float | None = None


def read_settings(config: Any) -> dict[str, Any]:
    """Read the parameters that hold for the whole merge.

    Args:
        config: a ``MergeConfiguration`` that passed ``check_config``.

    Returns:
        Value by name, defaults and ``preset`` applied; per-model ones are left out.
    """
    given = config.parameters or {}
    settings: dict[str, Any] = {}
    for name, parameter in PARAMETERS.items():
        if parameter.whole_merge and not parameter.per_model:
            value = _read_value(name, given)
            settings[name] = None if value is None else check_value(parameter, value)
    return settings


def read_tasks(config: Any) -> list[TaskSettings]:
    """Read each model's task.

    Args:
        config: a ``MergeConfiguration`` that passed ``check_config``.

    Returns:
        One per model with calibration data, sorted by model.
    """
    shared = config.parameters or {}
    tasks = {}
    for model, settings in _model_settings(config):
        if settings.get("calibration"):
            values = {
                name: check_value(
                    PARAMETERS[name],
                    settings.get(name, shared.get(name, PARAMETERS[name].default)),
                )
                for name in ("calibration", *TASK_VALUES)
            }
            tasks[model] = TaskSettings(model, **values)  # type: ignore[arg-type]
    return [tasks[model] for model in sorted(tasks)]


def _read_value(name: str, given: Mapping[str, Any]) -> Any:
    """Read one of the recipe's own parameters, or what its preset or default says."""
    preset = PAPER if given.get("preset") == "paper" else {}
    return {name: PARAMETERS[name].default, **preset, **given}[name]


def _check_analysis(config: Any) -> Iterator[str]:
    """Check that the parameters of the contribution analysis go together."""
    tasks: dict[str, set[str]] = {}
    values: dict[tuple[str, str], set[str]] = {}
    for model, settings in _model_settings(config):
        files = tasks.setdefault(model, set())
        files |= (
            {str(settings["calibration"])} if settings.get("calibration") else set()
        )
        for name in TASK_VALUES:
            if name in settings:
                values.setdefault((name, model), set()).add(str(settings[name]))
    without = sorted(model for model, files in tasks.items() if not files)
    if without and len(without) < len(tasks):
        yield (
            f"every model must have 'calibration' or none, got none for {without}; "
            "name a file under the 'parameters' of each model"
        )
    for model, files in sorted(tasks.items()):
        if len(files) > 1:
            yield f"'calibration' of '{model}' must be one file, got {sorted(files)}"
    for task in read_tasks(config) if not without else ():
        if task.calibration == SELF and task.metric == "accuracy":
            yield (
                f"'calibration' of '{task.model}' must have choices for metric "
                "'accuracy', got 'self', whose rows have none; use metric 'loss' or "
                "'agreement'"
            )
    for (name, model), found in sorted(values.items()):
        if len(found) > 1:
            yield f"'{name}' of '{model}' must be one value, got {sorted(found)}"
    given = config.parameters or {}
    mappings = [given, *(settings for _, settings in _model_settings(config))]
    idle = sorted(
        {name for mapping in mappings for name in mapping if PARAMETERS[name].analysis}
    )
    if idle and len(without) == len(tasks) and "plan" not in given:
        yield (
            f"{idle} must come with calibration data, got none; name a file as "
            "'calibration' under the 'parameters' of each model, or remove them"
        )
    resolve = _read_value("resolve", given)
    is_analysed = len(without) < len(tasks) and "plan" not in given
    if resolve == "measured" and (is_analysed or "resolve" in given):
        yield from _check_measured(config, given)
        yield from _check_aims(config, given)
    elif resolve == "rules" and is_analysed:
        idle = sorted({n for mapping in mappings for n in mapping} & {*MEASURED_ONLY})
        if idle:
            yield (
                f"{idle} must come with 'resolve: measured', got 'resolve: rules', "
                "which has no use for it; remove one of the two"
            )
    if given.get("preset") == "paper":
        for level, where, _, mapping in _parameter_mappings(config):
            place = "" if level == "recipe" else f" ({where})"
            for name, value in PAPER.items():
                if name in mapping and mapping[name] != value:
                    yield (
                        f"'preset: paper' must keep {name} at {value}, got "
                        f"{mapping[name]}{place}; remove one of the two"
                    )


def _check_measured(config: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """Check what does not go with treatments chosen by measurement."""
    got, remedy = "'resolve: measured'", "remove one of the two"
    if "resolve" not in given:
        got, remedy = f"none, so {got}", "add 'resolve: rules', or remove it"
    idle = sorted(set(RULES_ONLY) & set(given))
    if idle:
        yield (
            f"{idle} must come with 'resolve: rules', got {got}, which has no use for "
            f"it; {remedy}"
        )
    for _, where, _, mapping in _parameter_mappings(config):
        for name, kept in (("consensus", "none"), ("normalize", False)):
            if mapping.get(name, kept) != kept:
                yield (
                    f"'resolve: measured' must keep {name} at {kept}, got "
                    f"{mapping[name]} ({where}); {remedy}"
                )


def _check_aims(config: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """Check that weights and floors of the tasks go together with the rest."""
    weights: dict[str, float] = {}
    floors: dict[str, float] = {}
    for model, settings in _model_settings(config):
        both = {**given, **settings}
        weights[model] = float(both.get("task_weight", 1))
        floor = both.get("floor")
        if floor is not None:
            floors[model] = float(floor)
        idle = [n for n in ("weight", "density", "scale") if both.get(n) == 0]
        if floors.get(model, 0) > 0 and idle:
            yield (
                f"floor of '{model}' must come with a delta that is merged, got "
                f"{idle[0]} 0; remove one of the two"
            )
    if weights and not any(weights.values()):
        yield (
            "task_weight must be above 0 for one model, got 0 for all; raise that of "
            "the tasks to aim at"
        )
    if given.get("objective") == "worst":
        for model, weight in sorted(weights.items()):
            if weight not in (0, 1):
                yield (
                    "task_weight must be 0 or 1 with 'objective: worst', which takes "
                    f"the worst of all tasks but those of 0, got {weight:g} "
                    f"('{model}'); remove one of the two"
                )
    if floors and given.get("compare") == "raw":
        yield (
            f"floor must come with 'compare: gain', got 'compare: raw' and a floor of "
            f"{sorted(floors)}; it is a recovered gain, so remove one of the two"
        )


def _model_settings(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each model but the base with its own ``parameters``, slice by slice."""
    for _, item in _direct_models(config):
        if item.model != config.base_model:
            yield str(item.model), item.parameters or {}
    for _, output_slice in _slices(config):
        for source in output_slice.sources:
            if source.model != (output_slice.base_model or config.base_model):
                yield str(source.model), source.parameters or {}


def _check_name(name: str, level: Level, where: str, *, is_base: bool) -> str | None:
    parameter = PARAMETERS.get(name)
    if parameter is None:
        remedy = FOREIGN.get(name) or _suggest(name, PARAMETERS)
        return f"unknown parameter '{name}' ({where}); {remedy}"
    if parameter.per_model and is_base:
        return (
            f"'{name}' has no effect on the base model ({where}); "
            "remove it there, or set it on the models that are merged into the base"
        )
    if not parameter.per_model and level == "model":
        return (
            f"'{name}' is shared by all models and ignored under one ({where}); "
            "move it to the 'parameters' at the top of the recipe"
        )
    if name == "calibration" and level != "model":
        return (
            f"'calibration' must be one file per model, got one for all ({where}); "
            "move it under the 'parameters' of each model"
        )
    if parameter.whole_merge and level == "group":
        return (
            f"'{name}' holds for the whole merge ({where}); "
            "move it to the 'parameters' at the top of the recipe"
        )
    return None


def _check_setting(parameter: Parameter, setting: Any, where: str) -> str | None:
    scalars = list(_scalars(setting))
    if parameter.whole_merge and (len(scalars) != 1 or setting is not scalars[0]):
        return (
            f"'{parameter.name}' must be one value, got a list or filter ({where}); "
            "write a single value"
        )
    if not scalars:
        return f"'{parameter.name}' has an empty list ({where}); write a value"
    for value in scalars:
        try:
            check_value(parameter, value)
        except ValueError as error:
            return add_place(error, where)
    return None


def _scalars(setting: Any) -> Iterator[Any]:
    """Yield the values in a scalar, a gradient, a filter or a list of filters."""
    if isinstance(setting, list):
        for item in setting:
            yield from _scalars(item)
    elif hasattr(setting, "value"):
        yield from _scalars(setting.value)
    else:
        yield setting


def _groups(config: Any) -> Iterator[tuple[Any, list[tuple[str, Any]]]]:
    """Yield the models that are merged with each other: their base, places and names.

    The base may be missing among the models where MergeKit adds it.
    """
    modules = (getattr(config, "modules", None) or {}).items()
    holders = [
        ("", config),
        *((f"modules.{name}.", module) for name, module in modules),
    ]
    for prefix, holder in holders:
        if holder.models:
            yield (
                config.base_model,
                [
                    (f"{prefix}models[{i}]", m.model)
                    for i, m in enumerate(holder.models)
                ],
            )
    for where, output_slice in _slices(config):
        yield (
            output_slice.base_model or config.base_model,
            [
                (f"{where}.sources[{index}]", source.model)
                for index, source in enumerate(output_slice.sources)
            ],
        )


def _check_members(base: Any, members: list[tuple[str, Any]]) -> Iterator[str]:
    """Find models that would count twice, also under two spellings of a folder."""
    seen: dict[tuple[str, ...], str] = {}
    for where, model in members:
        resolved = resolve_model(str(model))
        if resolved in seen:
            yield (
                f"models must be distinct, got '{model}' twice "
                f"({seen[resolved]} and {where}); remove one, or raise its weight"
            )
        elif base not in (None, model) and resolved == resolve_model(str(base)):
            yield (
                f"the base model must be spelled in one way, got '{model}' ({where}) "
                f"and '{base}'; write it as in 'base_model:'"
            )
        seen.setdefault(resolved, where)


def _find_baseless_slices(config: Any) -> Iterator[str]:
    for where, output_slice in _slices(config):
        base = output_slice.base_model or config.base_model
        models = [source.model for source in output_slice.sources]
        if base is not None and base not in models:
            yield (
                f"a slice must have its base model '{base}' among its sources, "
                f"got {[str(model) for model in models]} ({where}); "
                "add it there with its 'layer_range:'"
            )


def _direct_models(config: Any) -> Iterator[tuple[str, Any]]:
    for index, item in enumerate(config.models or ()):
        yield f"models[{index}]", item
    for name, module in (getattr(config, "modules", None) or {}).items():
        for index, item in enumerate(module.models or ()):
            yield f"modules.{name}.models[{index}]", item


def _slices(config: Any) -> Iterator[tuple[str, Any]]:
    for index, item in enumerate(getattr(config, "slices", None) or ()):
        yield f"slices[{index}]", item
    for name, module in (getattr(config, "modules", None) or {}).items():
        for index, item in enumerate(module.slices or ()):
            yield f"modules.{name}.slices[{index}]", item


def _parameter_mappings(
    config: Any,
) -> Iterator[tuple[Level, str, bool, Mapping[str, Any]]]:
    """Yield level, place, whether under the base, and content of ``parameters``."""
    yield "recipe", "parameters", False, config.parameters or {}
    for name, module in (getattr(config, "modules", None) or {}).items():
        yield "group", f"modules.{name}", False, module.parameters or {}
    for where, item in _direct_models(config):
        is_base = item.model == config.base_model
        yield "model", f"{where} '{item.model}'", is_base, item.parameters or {}
    for where, output_slice in _slices(config):
        yield "group", where, False, output_slice.parameters or {}
        base = output_slice.base_model or config.base_model
        for index, source in enumerate(output_slice.sources):
            place = f"{where}.sources[{index}] '{source.model}'"
            yield "model", place, source.model == base, source.parameters or {}


def _unknown_key(key: str, where: str) -> str:
    if key in PARAMETERS or key in FOREIGN:
        return (
            f"'{key}' is a parameter and dropped by MergeKit there ({where}); "
            "move it under 'parameters:'"
        )
    if key in RECIPE_KEYS:
        return f"'{key}' has no effect there ({where}); move it or remove it"
    remedy = _suggest(key, (*RECIPE_KEYS, *PARAMETERS))
    if any(f"'{name}'" in remedy for name in PARAMETERS):
        remedy = remedy.removesuffix("?") + " under 'parameters:'?"
    return f"unknown key '{key}' ({where}); {remedy}"


RECIPE_KEYS = (
    *("models", "slices", "modules", "merge_method", "base_model", "dtype"),
    *("out_dtype", "tokenizer", "tokenizer_source", "chat_template", "parameters"),
    *("model", "sources", "layer_range", "value", "filter", "source", "tokens"),
    *("pad_to_multiple_of", "force", "kind", "token", "token_id", "path", "revision"),
)
"""Keys that MergeKit knows somewhere in a recipe; used for suggestions only."""


def _suggest(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean '{close[0]}'?" if close else "remove it"


def _dropped_keys(raw: object, read: object, where: str) -> Iterator[tuple[str, str]]:
    """Yield the raw keys, and their places, that ``read`` has no field for."""
    if isinstance(raw, Mapping) and isinstance(read, BaseModel):
        model = getattr(read, "model", None)
        place = f"{where} '{model}'" if model is not None else where
        for key, value in raw.items():
            if key in type(read).model_fields:
                yield from _dropped_keys(value, getattr(read, key), f"{where}.{key}")
            else:
                yield str(key), place.lstrip(".") or "top of the recipe"
    elif isinstance(raw, Mapping) and isinstance(read, Mapping):
        for key, value in raw.items():
            yield from _dropped_keys(value, read[key], f"{where}.{key}")
    elif isinstance(raw, list) and isinstance(read, list):
        for index, (value, item) in enumerate(zip(raw, read, strict=True)):
            yield from _dropped_keys(value, item, f"{where}[{index}]")
