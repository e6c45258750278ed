"""The plan: what is done with every (layer, model), readable and editable by hand.

Invariant: a plan is applied exactly as written or refused; nothing in it is ignored.
Its factors stand on the values that the recipe resolves for each tensor, since filters
and gradients may give several densities inside one layer.
"""

import json
import re
import reprlib
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from mergekit_himerging.files import STRICT_JSON, check_writable
from mergekit_himerging.names import is_short_for
from mergekit_himerging.recipe import resolve_model
from mergekit_himerging.scores import (
    GuardReport,
    Name,
    Record,
    StepReport,
    TaskReport,
)

PLAN_FILE = "hi_merging_plan.json"
"""Name of the plan in a merged folder."""

MAX_PLAN_BYTES = 64 * 2**20
"""Far above any real plan: 126 layers of 16 models take 4 MB with all gradients."""

MAX_MODELS = 100

Number = Annotated[FiniteFloat, Field(strict=True)]

Factor = Annotated[Number, Field(ge=0)]


class Treatment(Record):
    """What is done with one model's delta in one layer.

    Attributes:
        layer: 0-based decoder block of the output model.
        model: the model, as the recipe spells it.
        action: ``keep`` leaves it, ``shrink`` prunes and scales it further, ``drop``
            takes it out, ``set`` applies the factors as they are.
        density_factor: on the recipe's ``density``, at least 0.
        scale_factor: on the recipe's ``scale``, at least 0.
        weight_factor: on the recipe's ``weight``, any sign.
        reason: for the reader.
    """

    layer: Annotated[int, Field(ge=0, strict=True)]
    model: str
    action: Literal["keep", "shrink", "drop", "set"]
    density_factor: Factor = 1.0
    scale_factor: Factor = 1.0
    weight_factor: Number = 1.0
    reason: str = ""

    @model_validator(mode="after")
    def _action_says_what_factors_do(self) -> Self:
        factors = (self.density_factor, self.scale_factor, self.weight_factor)
        rules = {
            "keep": (factors == (1, 1, 1), "all factors at 1"),
            "drop": (
                factors in ((1, 1, 0), (1, 1, 1)),
                "weight_factor 0 or none, and no other factor",
            ),
            "shrink": (
                factors[0] <= 1 and factors[1] <= 1 and factors[2] == 1,
                "density_factor and scale_factor up to 1, and no weight_factor",
            ),
            "set": (True, ""),
        }
        holds, rule = rules[self.action]
        if not holds:
            raise ValueError(
                f"action '{self.action}' must have {rule}, got density_factor "
                f"{factors[0]:g}, scale_factor {factors[1]:g}, weight_factor "
                f"{factors[2]:g}; use action 'set' for free factors"
            )
        return self

    @property
    def factors(self) -> "Factors":
        """The factors that the action stands for."""
        return Factors(
            density=self.density_factor,
            scale=self.scale_factor,
            weight=0.0 if self.action == "drop" else self.weight_factor,
        )


class Factors(Record):
    """Factors on the values that a recipe resolves for one tensor of one model."""

    density: float = 1.0
    scale: float = 1.0
    weight: float = 1.0


class Plan(Record):
    """All treatments of one merge.

    Attributes:
        version: of this format; ``schema`` in the file.
        base: the base model, as the recipe spells it.
        models: the other models.
        n_layers: decoder blocks of the output model.
        settings: the settings that the plan was made under, for the reader.
        treatments: at most one per (layer, model); a pair without one is kept.
        order: layers by summed conflict, the largest first.
        tasks: what was measured; as all below, for the reader, and absent from a plan
            that was written by hand.
        steps: how treatments that are chosen by measurement were found.
        choice_forwards: forward passes over the choosing samples that measuring slopes
            and trying steps took; 0 in plans that hold them in their steps alone.
        gradient_forwards: those that the tasks' gradients took, besides.
        guard: whether the treated merge held on other samples.
        recipe: what was planned, as MergeKit read it, without what only says where to
            write.
        warnings: what was found before the merge and did not stop it.
        versions: of the packages that measured.
        inputs: what the models' files were, by model.
    """

    version: Literal[1] = Field(alias="schema")
    base: Name
    models: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_MODELS)]
    n_layers: Annotated[int, Field(ge=1, strict=True)]
    settings: dict[str, bool | int | FiniteFloat | str | None] = Field({})
    treatments: tuple[Treatment, ...] = ()
    order: tuple[int, ...] = ()
    tasks: Annotated[tuple[TaskReport, ...], Field(max_length=MAX_MODELS)] = ()
    steps: tuple[StepReport, ...] = ()
    choice_forwards: Annotated[int, Field(ge=0)] = 0
    gradient_forwards: Annotated[int, Field(ge=0)] = 0
    guard: GuardReport | None = None
    recipe: dict[str, Any] = Field({})
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = Field({})
    inputs: Annotated[dict[Name, str], Field(max_length=MAX_MODELS + 1)] = Field({})

    @property
    def n_choice_forwards(self) -> int | None:
        """What choosing by measurement took; None where nothing was so chosen."""
        last = self.steps[-1].forwards if self.steps else None
        return self.choice_forwards or last

    @model_validator(mode="after")
    def _treatments_fit(self) -> Self:
        if len(set(self.models)) != len(self.models):
            raise ValueError(f"models must be distinct, got {list(self.models)}")
        seen: set[tuple[int, str]] = set()
        for treatment in self.treatments:
            pair = (treatment.layer, treatment.model)
            if treatment.model not in self.models:
                raise ValueError(
                    f"treatment of layer {treatment.layer} must name one of the plan's "
                    f"models {list(self.models)}, got '{treatment.model}'"
                )
            if treatment.layer >= self.n_layers:
                raise ValueError(
                    f"layer must be below n_layers {self.n_layers}, "
                    f"got {treatment.layer} ('{treatment.model}')"
                )
            if pair in seen:
                raise ValueError(
                    f"layer {treatment.layer} of '{treatment.model}' must have one "
                    "treatment, got two; remove one"
                )
            seen.add(pair)
        return self

    def factors_for(self, models: Sequence[str]) -> Mapping[tuple[int, str], Factors]:
        """Look up the factors by (layer, model), under the recipe's spelling of models.

        Args:
            models: the recipe's non-base models; they must fit, see ``check_fit``.

        Returns:
            Factors by (layer, model) for every treatment.
        """
        spelled = _match_names(self.models, models)
        return {
            (treatment.layer, spelled[treatment.model]): treatment.factors
            for treatment in self.treatments
        }

    def check_fit(self, *, base: str, models: Sequence[str], n_layers: int) -> None:
        """Check that the plan was made for this recipe.

        Two spellings of a model are the same where they are the same text, lead to the
        same folder on this machine, or the plan's is the end of the recipe's local
        path, as in plans that are published.

        Args:
            base: the recipe's base model.
            models: its other models, in any order.
            n_layers: decoder blocks of its output model.

        Raises:
            ValueError: the base, the models or the number of layers differ.
        """
        if not _match_names([self.base], [base]):
            raise ValueError(f"plan is for base '{self.base}', the recipe has '{base}'")
        spelled = _match_names(self.models, models)
        if not len(set(spelled.values())) == len(self.models) == len(models):
            raise ValueError(
                f"plan is for the models {sorted(self.models)}, "
                f"the recipe has {sorted(models)}"
            )
        if self.n_layers != n_layers:
            raise ValueError(
                f"plan is for {self.n_layers} layers, the recipe makes {n_layers}"
            )

    def to_json(self) -> str:
        """Write the plan as JSON text, a treatment or layer a line, with a newline."""
        fields = self.model_dump(mode="json", by_alias=True)
        # What is edited by hand comes last, after what explains it.
        fields["treatments"] = fields.pop("treatments")
        return _format_json(fields) + "\n"


def _match_names(names: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    """Find a plan's names among a recipe's models; those not found are left out."""
    folders = {resolve_model(model): model for model in models}
    found = {}
    for name in names:
        model = folders.get(resolve_model(name))
        if model is None:
            fitting = [other for other in models if is_short_for(name, other)]
            model = fitting[0] if len(fitting) == 1 else None
        if model is not None:
            found[name] = model
    return found


def read_plan(path: Path) -> Plan:
    """Read a plan file.

    Args:
        path: a UTF-8 JSON file, with or without a byte-order mark.

    Returns:
        The plan, checked in itself; ``check_fit`` holds it against a recipe.

    Raises:
        ValueError: the file is missing, too large, not JSON, or not a plan; the message
            names the file and the field.
    """
    try:
        status = path.stat()
        size = status.st_size
        if not (stat.S_ISREG(status.st_mode) or path.is_dir()):
            raise ValueError("must be a file, got a device or pipe")
        if size > MAX_PLAN_BYTES:
            raise ValueError(
                f"must be under {MAX_PLAN_BYTES >> 20} MiB, got {size >> 20} MiB"
            )
        text = path.read_text(encoding="utf-8-sig")
        content = STRICT_JSON.decode(text)
        plan = Plan.model_validate(content)
        check_writable(content)
        return plan
    except OSError as error:
        raise ValueError(f"cannot read plan '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"plan '{path}' must be UTF-8, got {error.reason} at byte {error.start}"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"plan '{path}' line {error.lineno} must be JSON: {error.msg}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"plan '{path}' must be a flat JSON object") from error
    except ValidationError as error:
        raise ValueError(_first_problem(path, error)) from error
    except ValueError as error:
        raise ValueError(f"plan '{path}' {error}") from error


def _format_json(value: object, indent: str = "") -> str:
    """Format JSON with a line for every field, and for every flat row of a list."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        fields = ",\n".join(
            f"{inner}{json.dumps(key, ensure_ascii=False)}: {_format_json(item, inner)}"
            for key, item in value.items()
        )
        return f"{{\n{fields}\n{indent}}}"
    if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        rows = ",\n".join(
            inner
            + (
                _format_json(item, inner)
                if any(isinstance(field, dict | list) for field in item.values())
                else json.dumps(item, ensure_ascii=False)
            )
            for item in value
        )
        return f"[\n{rows}\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def _first_problem(path: Path, error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    place = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in problem["loc"]
    ).lstrip(".")
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = "unknown field; remove it or mend its name"
    elif problem["type"] == "missing":
        message = "field missing; add it"
    elif problem["type"] != "value_error":
        for words, ours in (
            ("a valid tuple", "a list"),
            ("a valid dictionary.*", "an object"),
        ):
            message = re.sub(words, ours, message)
        message = re.sub("^(Input|Tuple|String|Dictionary) should", "must", message)
        message += f", got {reprlib.repr(problem['input'])}"
    more = error.error_count() - 1
    return f"plan '{path}'{f', {place}' if place else ''}: {message}" + (
        f" (and {more} more)" if more else ""
    )
