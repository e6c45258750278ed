"""The parameters of the method: one table, and what a single value may be.

Invariant: a parameter exists for MergeKit, for the checks and for the README because it
stands in `PARAMETERS`, and nowhere else.
"""

import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import click
from pydantic import TypeAdapter, ValidationError

METHOD_NAME = "hi_merging"

SELF = "self"
"""As calibration: rows that the expert draws from itself. A file is './self'."""


class RecipeError(click.ClickException, ValueError):
    """Something that the user can mend: one line and exit code 1 from a command."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the method.

    Attributes:
        name: as written in a recipe.
        type: what MergeKit validates a value against.
        default: what an absent value means.
        per_model: bound to each model but the base, else shared by all.
        low, high: bounds of a number, inclusive.
        choices: the allowed words.
        whole_merge: needs MergeKit's planner; one value for the recipe, or per model.
        analysis: has no meaning without calibration data.
        hint: what a value out of bounds most likely meant.
    """

    name: str
    type: Any
    default: float | bool | str | int | None
    per_model: bool = False
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    whole_merge: bool = False
    analysis: bool = False
    hint: str = ""


MAX_WHOLE = 2**63
"""Beyond any count, and beyond what floats and formats take."""

LAYER_HINT = "it is a factor on the model-wise value"


def _analysis(
    name: str,
    default: float | str | None,
    *,
    type: Any = None,
    choices: tuple[str, ...] = (),
    **bounds: Any,
) -> Parameter:
    """Make a parameter of the contribution analysis."""
    return Parameter(
        name,
        type or (Literal[choices] if choices else float),
        default,
        choices=choices,
        whole_merge=True,
        analysis=True,
        **bounds,
    )


PARAMETERS: Mapping[str, Parameter] = {
    parameter.name: parameter
    for parameter in (
        Parameter("weight", float | None, None, per_model=True),
        Parameter(
            "density",
            float,
            1.0,
            per_model=True,
            low=0,
            high=1,
            hint="it is the share of entries kept",
        ),
        Parameter(
            "scale",
            float,
            1.0,
            per_model=True,
            low=0,
            high=1,
            hint="it is the factor on the kept entries",
        ),
        Parameter(
            "consensus",
            Literal["none", "sum", "count"],
            "none",
            choices=("none", "sum", "count"),
        ),
        Parameter("normalize", bool, False),
        Parameter("lambda", float, 1.0),
        Parameter(
            "scope",
            Literal["tensor", "layer", "model"],
            "tensor",
            choices=("tensor", "layer", "model"),
            whole_merge=True,
        ),
        Parameter("plan", str, "", whole_merge=True),
        Parameter("hide_paths", bool, False, whole_merge=True),
        Parameter("smoke_test", bool, True, whole_merge=True),
        # The contribution analysis, per model.
        Parameter("calibration", str, "", per_model=True, whole_merge=True),
        _analysis(
            "metric",
            "loss",
            choices=("loss", "accuracy", "agreement"),
            per_model=True,
        ),
        _analysis("samples", 64, type=int, low=1, per_model=True),
        _analysis("task_weight", 1.0, low=0, per_model=True),
        _analysis(
            "floor",
            None,
            type=float | None,
            low=0,
            high=1.5,
            hint="it is a share of the expert's gain over the base",
            per_model=True,
        ),
        # The contribution analysis, shared.
        _analysis("preset", "", choices=("", "paper")),
        _analysis("resolve", "measured", choices=("measured", "rules")),
        _analysis("measure", "first_order", choices=("first_order", "exact")),
        _analysis("objective", "mean", choices=("mean", "worst")),
        _analysis("gradients", False, type=bool),
        _analysis("mixed", "degraded", choices=("degraded", "interfering")),
        _analysis("layer_density", 0.5, low=0, high=1, hint=LAYER_HINT),
        _analysis("layer_scale", 0.5, low=0, high=1, hint=LAYER_HINT),
        _analysis("max_layers", None, type=int | None, low=0),
        _analysis("confidence", 0.0, low=0),
        _analysis("rounds", 1, type=int, low=1),
        _analysis("reference", "full", choices=("full", "same_weight")),
        _analysis("compare", "gain", choices=("gain", "raw")),
        _analysis("guard", "keep_better", choices=("keep_better", "report")),
        _analysis("accept_share", 0.5, low=0, high=0.9, hint="the rest chooses"),
        _analysis("seed", 0, type=int, low=0),
        _analysis("analysis_memory", "4GB", type=int | float | str),
        _analysis("plan_out", "", type=str),
    )
}

PAPER: Mapping[str, float | str | None] = {
    **{"mixed": "degraded", "layer_density": 0.5, "layer_scale": 0.5},
    **{"max_layers": None, "confidence": 0.0, "rounds": 1, "scope": "tensor"},
    **{"consensus": "none", "reference": "full", "compare": "raw", "guard": "report"},
    "resolve": "rules",
}
"""What `preset: paper` sets: the paper's reading of every open point."""


RULES_ONLY = (
    *("mixed", "layer_density", "layer_scale", "max_layers", "confidence", "rounds"),
    "reference",
)
"""What only the paper's rules read, and `resolve: measured` does not."""

MEASURED_ONLY = ("measure", "objective", "gradients", "task_weight", "floor")
"""What only `resolve: measured` reads."""

FOREIGN = {
    "int8_mask": "it saves memory in MergeKit's own methods and is not needed here",
    "rescale": "set 'scale' per model instead",
    "gamma": "it drops the largest entries in 'breadcrumbs'; hi_merging keeps them",
    "epsilon": "it belongs to 'della'",
    "t": "it belongs to 'slerp'",
    "select_topk": "it belongs to 'sce'",
}
"""Parameters of MergeKit's other methods, as they stand in recipes that are adapted."""


def add_place(fact: object, place: str) -> str:
    """Put the place of a problem into its sentence, before the remedy."""
    problem, _, remedy = str(fact).partition("; ")
    return f"{problem} ({place})" + (f"; {remedy}" if remedy else "")


def check_value(parameter: Parameter, value: object) -> object:
    """Validate one scalar of a recipe.

    Returns:
        The value in the parameter's type.

    Raises:
        ValueError: it has another type or is out of bounds; the bare fact.
    """
    if parameter.choices:
        if value not in parameter.choices:
            allowed = ", ".join(parameter.choices)
            raise ValueError(
                f"{parameter.name} must be one of {allowed}, got {reprlib.repr(value)}"
            )
        return value
    is_number = parameter.type in (float, float | None, int, int | None)
    if is_number and isinstance(value, bool):
        raise ValueError(f"{parameter.name} must be a number, got {value}")
    try:
        checked = TypeAdapter(parameter.type).validate_python(value)
    except ValidationError as error:
        words = {bool: "true or false", str: "a text"}
        whole = dict.fromkeys((int, int | None), "a whole number")
        wanted = (words | whole).get(parameter.type, "a number")
        got = reprlib.repr(value)
        raise ValueError(f"{parameter.name} must be {wanted}, got {got}") from error
    if is_number and checked is not None:
        _check_bounds(parameter, checked)
    if parameter.name == "analysis_memory":
        parse_bytes(str(checked))
    if parameter.name == "plan_out" and value and not _is_json_path(str(value)):
        raise ValueError(
            f"plan_out must be a path that ends in .json, got {reprlib.repr(value)}"
        )
    return checked


def _is_json_path(text: str) -> bool:
    """Tell whether a path may be written to by a recipe that someone else has made."""
    return text.endswith(".json") and "\0" not in text


def parse_bytes(text: str) -> int:
    """Read an amount of memory.

    Args:
        text: a number of bytes, or one with a unit: ``512MB``, ``4GiB``, ``1.5 GB``.

    Raises:
        ValueError: it is no amount above zero.
    """
    units = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    match = re.fullmatch(r"([0-9.]+) *([kmgt]?)(?:i?b)?", text.strip().lower())
    try:
        amount = int(float(match[1]) * units[match[2]]) if match else 0
    except (ValueError, OverflowError):
        amount = 0
    if amount <= 0:
        raise ValueError(
            f"analysis_memory must be an amount above zero, got '{text:.40}'; "
            "write it as 4GB or 512MB"
        )
    return amount


def _check_bounds(parameter: Parameter, value: float) -> None:
    if abs(value) >= MAX_WHOLE and isinstance(value, int):
        raise ValueError(f"{parameter.name} must be below 2**63, got more")
    if parameter.low <= value <= parameter.high and math.isfinite(value):
        return
    if math.isinf(parameter.low):
        raise ValueError(f"{parameter.name} must be a finite number, got {value:g}")
    if math.isinf(parameter.high):
        raise ValueError(
            f"{parameter.name} must be at least {parameter.low:g}, got {value:g}"
        )
    fact = f"{parameter.name} must be in [{parameter.low:g}, {parameter.high:g}]"
    remedy = parameter.hint
    if 2 <= value <= 100:
        remedy += f", so {value:g} percent is {value / 100:g}"
    raise ValueError(f"{fact}, got {value:g}" + (f"; {remedy}" if remedy else ""))
