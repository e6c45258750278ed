"""The methods that are compared: what is tuned in each, and the recipe it makes.

Invariant: every method is tuned by the same driver with the same number of merges; a
weight is tuned for every expert in all methods that take one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from settings import Setting

Range = tuple[float, float]

WEIGHT: Range = (0.3, 1.2)
"""Mixing coefficients of task vectors: an average of two has 0.5, a sum 1."""


UNTUNED_WEIGHT = 0.75
"""Every weight where none is tuned, the middle of ``WEIGHT``."""


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the tables.

    Attributes:
        name: of the row.
        merge_method: MergeKit's.
        weight: range of every expert's mixing coefficient; None where there is none.
        tuned: ranges of parameters with one value for all experts.
        of_models: names among ``tuned`` that stand under each model.
        fixed: shared parameters.
        of_tasks: parameters of every task, where layers are measured.
        seeds: how many random seeds are tested, where the method draws.
        start: another row whose tuned values this one takes over, untuned.
        has_weights: every weight is ``UNTUNED_WEIGHT``.
        needs_base: whether the recipe has a ``base_model``.
        calibrates: whether layers are measured.
        rules: decided anew from the measured scores of row ``start``.
        samples: calibration rows of each task where layers are measured; the budget's
            where None.
        settings: the only ones that it is run in; all where None.
        note: a few words for the table.
    """

    name: str
    merge_method: str
    weight: Range | None = None
    tuned: Mapping[str, Range] = field(default_factory=dict)
    of_models: tuple[str, ...] = ("density", "scale", "gamma", "epsilon")
    fixed: Mapping[str, Any] = field(default_factory=dict)
    of_tasks: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1
    start: str | None = None
    has_weights: bool = False
    needs_base: bool = True
    calibrates: bool = False
    rules: Mapping[str, Any] | None = None
    samples: int | None = None
    settings: tuple[str, ...] | None = None
    note: str = ""

    @property
    def family(self) -> Literal["ours", "other"]:
        """Whether it is Hi-Merging."""
        return "ours" if self.merge_method == "hi_merging" else "other"


DENSITY: Range = (0.1, 1.0)

PLAIN = "model-wise"
"""The row that other Hi-Merging rows start from."""


ABLATIONS = ("english", "bilingual")
"""The settings in which our options are compared with each other: two, since a default
is changed only for what two support; in all five they would take most of the time."""


def _layers(
    name: str,
    note: str,
    *,
    start: str = PLAIN,
    settings: tuple[str, ...] | None = None,
    **fixed: Any,
) -> Method:
    return Method(
        name,
        "hi_merging",
        start=start,
        fixed={"guard": "report", "resolve": "rules", **fixed},
        calibrates=True,
        settings=settings,
        note=note,
    )


def _again(name: str, start: str, **rules: Any) -> Method:
    return Method(name, "hi_merging", start=start, rules=rules, settings=ABLATIONS)


def _measured(
    name: str,
    of_tasks: Mapping[str, Any] | None = None,
    *,
    samples: int | None = None,
    settings: tuple[str, ...] | None = None,
    **fixed: Any,
) -> Method:
    return Method(
        name,
        "hi_merging",
        fixed={"guard": "report", "resolve": "measured", **fixed},
        of_tasks=of_tasks or {},
        calibrates=True,
        has_weights=True,
        samples=samples,
        settings=settings,
        note=f"from weights {UNTUNED_WEIGHT}, untuned",
    )


METHODS = {
    method.name: method
    for method in (
        Method("linear", "linear", weight=(0.1, 1.0), needs_base=False),
        Method("task arithmetic", "task_arithmetic", weight=WEIGHT),
        Method("ties", "ties", weight=WEIGHT, tuned={"density": DENSITY}),
        Method(
            "ties, summed",
            "ties",
            weight=WEIGHT,
            tuned={"density": DENSITY},
            fixed={"normalize": False},
            note="`normalize: false`",
        ),
        Method(
            "dare_linear",
            "dare_linear",
            weight=WEIGHT,
            tuned={"density": DENSITY},
            seeds=3,
        ),
        Method(
            "dare_ties",
            "dare_ties",
            weight=WEIGHT,
            tuned={"density": DENSITY},
            fixed={"normalize": False},
            seeds=3,
            note="`normalize: false`",
        ),
        Method(
            "della",
            "della",
            weight=WEIGHT,
            tuned={"density": (0.35, 0.65), "epsilon": (0.05, 0.3)},
            fixed={"normalize": False},
            seeds=3,
            note="`normalize: false`",
        ),
        Method(
            "breadcrumbs",
            "breadcrumbs",
            weight=WEIGHT,
            tuned={"density": (0.1, 0.9), "gamma": (0.0, 0.05)},
        ),
        Method("model_stock", "model_stock"),
        Method("sce", "sce", tuned={"select_topk": DENSITY}),
        Method("karcher", "karcher", needs_base=False),
        Method(
            PLAIN,
            "hi_merging",
            weight=WEIGHT,
            tuned={"density": DENSITY},
            note="no layer is measured",
        ),
        Method(
            "paper",
            "hi_merging",
            tuned={"density": DENSITY, "scale": (0.1, 1.0)},
            fixed={"preset": "paper"},
            calibrates=True,
            note="weights 1 / n, density and scale tuned",
        ),
        _layers(
            "layer-wise", "rules, nothing pruned model-wise", start="task arithmetic"
        ),
        _layers("rules", "the paper's, by gain"),
        _again("rules, confidence 2", "rules", confidence=2.0),
        _again("rules, interfering", "rules", mixed="interfering"),
        _layers("rules, same weight", "", settings=ABLATIONS, reference="same_weight"),
        _again(
            "rules, same weight, interfering",
            "rules, same weight",
            mixed="interfering",
        ),
        _layers("rules, two rounds", "", settings=ABLATIONS, rounds=2),
        _layers("rules, scope model", "", settings=ABLATIONS, scope="model"),
        _measured("measured", objective="mean"),
        _measured("measured, worst", objective="worst", settings=("english", "four")),
        _measured("measured, exact", measure="exact", settings=("english",)),
        _measured("measured, agreement", {"metric": "agreement"}),
        _measured("measured, self", {"calibration": "self"}, settings=ABLATIONS),
        _layers(
            "measured, tuned start",
            "those merges besides",
            start="task arithmetic",
            settings=ABLATIONS,
            resolve="measured",
        ),
        _measured("measured, 64 samples", samples=64),
        _measured(
            "measured, agreement, 64 samples",
            {"metric": "agreement"},
            samples=64,
            settings=ABLATIONS,
        ),
        _measured("measured, 128 samples", samples=128, settings=("english",)),
    )
}

LEADING = ("task arithmetic", "ties", PLAIN, "measured")
"""The rows of a quick run: the hardest others to beat, and ours."""

CORE = (*LEADING, "rules")
"""The rows of a brief setting."""


def list_rows(setting: Setting, *, is_quick: bool) -> list[str]:
    """List the rows that are run in a setting, in order."""
    whole = CORE if setting.is_brief else tuple(METHODS)
    names = LEADING if is_quick else whole
    return [
        name
        for name in names
        if setting.name in (METHODS[name].settings or (setting.name,))
    ]


def make_recipe(
    method: Method,
    base: str,
    experts: Mapping[str, str],
    values: Mapping[str, float],
    *,
    calibration: Mapping[str, str] | None = None,
    samples: int | None = None,
) -> dict[str, Any]:
    """Write a row's recipe.

    Args:
        method: the row.
        base: the base model.
        experts: model by task.
        values: ``weight <task>`` and the tuned parameters by name.
        calibration: file by task, where layers are measured.
        samples: of each task, with ``calibration``.
    """
    models = []
    for task, model in experts.items():
        parameters: dict[str, Any] = {
            name: value for name, value in values.items() if name in method.of_models
        }
        if f"weight {task}" in values:
            parameters["weight"] = values[f"weight {task}"]
        if calibration is not None:
            parameters |= {"calibration": calibration[task], "samples": samples}
            parameters |= method.of_tasks
        models.append({"model": model, "parameters": parameters})
    shared = {
        name: value
        for name, value in values.items()
        if name not in method.of_models and not name.startswith("weight ")
    }
    fixed = dict(method.fixed)
    if calibration is None:
        fixed = {name: v for name, v in fixed.items() if name in ("normalize", "scope")}
    recipe: dict[str, Any] = {
        "merge_method": method.merge_method,
        "models": models,
        "parameters": {**shared, **fixed},
        "dtype": "float32",
    }
    if method.needs_base:
        recipe["base_model"] = base
    return recipe


def list_ranges(method: Method, tasks: Sequence[str]) -> dict[str, Range]:
    """List what is tuned, by name as in ``make_recipe``."""
    ranges = dict(method.tuned)
    if method.weight is not None:
        ranges = {f"weight {task}": method.weight for task in tasks} | ranges
    return ranges
