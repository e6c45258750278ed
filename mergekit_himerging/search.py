"""Density, scale and weight of every model, chosen on the calibration data.

One model at a time, the others held: a coarse grid, then the neighbours of its best.
Every round is one streamed pass over the layers for all its merges. Invariant: each
number in the table is the score of the merge that the tuned recipe would give before an
analysis of it treats any layer.
"""

import csv
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mergekit_himerging.analysis.candidates import score_merges
from mergekit_himerging.analysis.contribution import FloatArray
from mergekit_himerging.analysis.graph import Cuts
from mergekit_himerging.analysis.objective import Kind, Objective
from mergekit_himerging.analysis.session import make_replay, pick_device, read_data
from mergekit_himerging.analysis.teachers import add_teachers
from mergekit_himerging.parameters import SELF, RecipeError, parse_bytes
from mergekit_himerging.planning import PlannedMerge
from mergekit_himerging.recipe import to_document
from mergekit_himerging.tasks import PlannedTensor


@dataclass(frozen=True, slots=True)
class Values:
    """What one model's delta is merged with; None leaves what the recipe says.

    Attributes:
        density: share of entries kept, in (0, 1].
        scale: factor on them, in (0, 1].
        weight: mixing coefficient.
    """

    density: float | None = None
    scale: float | None = None
    weight: float | None = None


Choice = Mapping[str, Values]
"""Values by model."""


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """What is tried.

    Attributes:
        grid: values of density and of scale each, evenly from 1 / grid to 1.
        evaluations: merges tried for each model at most, the recipe's own besides.
        weights: mixing coefficients tried for each model after that.
        objective: the ``mean`` of the tasks' recovered gains, or the ``worst`` of them;
            the recipe's own where None.

    Raises:
        ValueError: a value lies outside its range.
    """

    grid: int = 10
    evaluations: int = 25
    weights: tuple[float, ...] = ()
    objective: Kind | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.grid <= 100:
            raise ValueError(f"grid must be in [2, 100], got {self.grid}")
        if self.evaluations < 4:
            raise ValueError(f"evaluations must be at least 4, got {self.evaluations}")


@dataclass(frozen=True, slots=True)
class Trial:
    """One merge that was scored.

    Attributes:
        model: whose values were varied; empty for the recipe's own.
        choice: of all models.
        scores: mean score by task's model, higher is better.
        gains: recovered gain by task's model; None with ``compare: raw``.
        objective: of the recovered gains, or of the scores with ``compare: raw``.
        behind: how much the objective is below the best trial's.
        behind_se: standard error of that, paired over the samples.
    """

    model: str
    choice: Choice
    scores: Mapping[str, float]
    gains: Mapping[str, float] | None
    objective: float
    behind: float
    behind_se: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """All trials of a search, in the order they were made.

    Attributes:
        trials: the first is the recipe's own.
        best: of them, the largest objective; of equals the earliest.
        base, single: mean score of the base, and of each task's own whole model, by
            task's model.
        n_samples: by task's model.
        what: the objective, in words.
    """

    trials: tuple[Trial, ...]
    best: Trial
    base: Mapping[str, float]
    single: Mapping[str, float]
    n_samples: Mapping[str, int]
    what: str


ScoreChoices = Callable[[Sequence[Choice]], list[list[FloatArray]]]
"""Choices -> scores by choice, then task, each ``[samples]``."""


def search_merge(
    merge: PlannedMerge,
    settings: SearchSettings,
    progress: Callable[[int, str], None] = lambda calls, label: None,
) -> SearchResult:
    """Choose density and scale, and weights where asked, for each model of a merge.

    Args:
        merge: a planned `hi_merging` recipe with calibration data; all its rows choose.
        settings: what is tried.
        progress: told of block forwards done.

    Raises:
        RecipeError: the recipe has no calibration data, a wider ``scope``, or weights
            and floors of tasks.
        ValueError: data or models cannot be used.
    """
    if not merge.tasks:
        raise RecipeError(
            "a search must have calibration data, got none; name a file as "
            "'calibration' under the 'parameters' of each model"
        )
    if merge.settings["plan"]:
        raise RecipeError(
            f"a search must score plain merges, got plan: {merge.settings['plan']}; "
            "remove 'plan' for the search"
        )
    if merge.settings["scope"] != "tensor":
        raise RecipeError(
            f"a search must rank inside tensors, got scope: {merge.settings['scope']}; "
            "remove 'scope' for the search"
        )
    for task in merge.tasks:
        if task.task_weight != 1 or task.floor is not None:
            raise RecipeError(
                "a search must count all tasks the same, got task_weight "
                f"{task.task_weight:g} and floor {task.floor} for '{task.model}'; "
                "remove both for the search"
            )
    device = pick_device(merge.options)
    tasks = read_data(merge, device, accept_share=0.0)
    replay = make_replay(merge, device)
    memory = parse_bytes(str(merge.settings["analysis_memory"]))
    plain = merge.resolve(None)
    tasks = add_teachers(
        tasks, plain, replay, device=device, memory=memory, progress=progress
    )
    models = [task.settings.model for task in tasks]
    cuts: Cuts = {}

    def score(
        choices: Sequence[Choice], tensors: Sequence[PlannedTensor] = plain
    ) -> list[list[FloatArray]]:
        return score_merges(
            [_apply(tensors, choice) for choice in choices],
            tasks,
            replay,
            device=device,
            memory=memory,
            cuts=cuts,
            progress=progress,
        )

    # An expert that is added to the base alone, as nothing but the base dilutes it.
    alone = {"lambda": 1.0, "consensus": "none", "normalize": False}
    undiluted = [tensor.with_shared(**alone) for tensor in plain]
    search = _Search(
        models,
        score,
        score_alone=lambda choices: score(choices, undiluted),
        is_raw=merge.settings["compare"] == "raw",
        objective=settings.objective or merge.settings["objective"],
    )
    search.measure_references()
    search.try_all("", [{}])
    for model in models:
        _search_grid(search, model, settings)
    for model in models if settings.weights else ():
        best = search.best()
        around = [
            {**best, model: replace(best.get(model, Values()), weight=weight)}
            for weight in settings.weights
        ]
        search.try_all(model, around)
    return search.result()


def _search_grid(search: "_Search", model: str, settings: SearchSettings) -> None:
    """Try a coarse grid for one model, then neighbours of the best, ever closer."""
    held = search.best()
    grid = settings.grid

    def choose(cell: tuple[int, int]) -> Choice:
        density, scale = ((index + 1) / grid for index in cell)
        values = replace(held.get(model, Values()), density=density, scale=scale)
        return {**held, model: values}

    def try_cells(cells: Sequence[tuple[int, int]]) -> None:
        for cell, objective in zip(
            cells, search.try_all(model, [choose(c) for c in cells]), strict=True
        ):
            tried[cell] = objective

    tried: dict[tuple[int, int], float] = {}
    step = next(
        s
        for s in range(1, grid + 1)
        if len(_spread(grid, s)) ** 2 <= settings.evaluations
    )
    try_cells([(d, s) for d in _spread(grid, step) for s in _spread(grid, step)])
    while len(tried) < settings.evaluations:
        step = max(1, step // 2)
        best = max(sorted(tried), key=lambda cell: tried[cell])
        near = [
            (best[0] + d, best[1] + s)
            for d in (-step, 0, step)
            for s in (-step, 0, step)
        ]
        new = [
            cell
            for cell in near
            if cell not in tried and all(0 <= index < grid for index in cell)
        ]
        if new:
            try_cells(new[: settings.evaluations - len(tried)])
        elif step == 1:
            break


def _spread(grid: int, step: int) -> list[int]:
    """Spread indexes evenly over a grid, its ends among them."""
    count = max(2, math.ceil((grid - 1) / step) + 1)
    return sorted({round(i * (grid - 1) / (count - 1)) for i in range(count)})


class _Search:
    """Trials made so far, and what they are compared by."""

    def __init__(
        self,
        models: Sequence[str],
        score: ScoreChoices,
        *,
        is_raw: bool,
        objective: Kind = "mean",
        score_alone: ScoreChoices | None = None,
    ) -> None:
        self._models = models
        self._score = score
        self._score_alone = score_alone or score
        self._is_raw = is_raw
        self._kind: Kind = objective
        self._made: dict[str, tuple[str, Choice, list[FloatArray]]] = {}
        self._base: list[FloatArray] = []
        self._single: list[FloatArray] = []

    def measure_references(self) -> None:
        """Score the base, and each task's own model, whole and alone.

        Raises:
            ValueError: a model does not beat the base on its own data.
        """
        alone: list[Choice] = [
            {
                model: Values(1.0, 1.0, 1.0 if model == own else 0.0)
                for model in self._models
            }
            for own in ("", *self._models)
        ]
        base, *singles = self._score_alone(alone)
        self._base = base
        self._single = [scores[t] for t, scores in enumerate(singles)]
        for model, gain in zip(self._models, self._gains(), strict=True):
            if gain <= 0:
                raise ValueError(
                    f"model '{model}' must beat the base on its own calibration data "
                    f"to compare gains, got gain {gain:.3g}; mend its calibration "
                    "data or set compare: raw"
                )

    def _gains(self) -> list[float]:
        if self._is_raw:
            return [1.0] * len(self._models)
        pairs = zip(self._single, self._base, strict=True)
        return [float((single - base).mean()) for single, base in pairs]

    @property
    def _objective(self) -> Objective:
        base = [np.zeros_like(b) for b in self._base] if self._is_raw else self._base
        return Objective(self._kind, base, self._gains())

    def try_all(self, model: str, choices: Sequence[Choice]) -> list[float]:
        """Score the choices that are new and return every one's objective."""
        new = [choice for choice in choices if _key(choice) not in self._made]
        for choice, scores in zip(new, self._score(new) if new else [], strict=True):
            self._made[_key(choice)] = (model, choice, scores)
        return [
            self._objective.value(self._made[_key(choice)][2]) for choice in choices
        ]

    def best(self) -> Choice:
        """Return the best choice; of equals the earliest."""
        return max(
            self._made.values(), key=lambda made: self._objective.value(made[2])
        )[1]

    def result(self) -> SearchResult:
        """Describe all trials, each against the best."""
        best = self._made[_key(self.best())][2]
        trials = [self._describe(*made, best) for made in self._made.values()]
        return SearchResult(
            trials=tuple(trials),
            best=max(trials, key=lambda trial: trial.objective),
            base=self._means(self._base),
            single=self._means(self._single),
            what=f"{self._kind} " + ("score" if self._is_raw else "recovered gain"),
            n_samples={
                m: len(b) for m, b in zip(self._models, self._base, strict=True)
            },
        )

    def _means(self, scores: Sequence[FloatArray]) -> dict[str, float]:
        return {m: float(s.mean()) for m, s in zip(self._models, scores, strict=True)}

    def _describe(
        self,
        model: str,
        choice: Choice,
        scores: Sequence[FloatArray],
        best: Sequence[FloatArray],
    ) -> Trial:
        objective = self._objective.value(scores)
        return Trial(
            model=model,
            choice=choice,
            scores=self._means(scores),
            gains=None if self._is_raw else self._means(self._objective.shares(scores)),
            objective=objective,
            behind=self._objective.value(best) - objective,
            behind_se=self._objective.difference_se(best, scores),
        )


def _key(choice: Choice) -> str:
    return repr(sorted(choice.items()))


def _apply(plain: Sequence[PlannedTensor], choice: Choice) -> list[PlannedTensor]:
    """Put a choice into the planned tensors."""
    merged = []
    for tensor in plain:
        changes: dict[Any, dict[str, float]] = {}
        for model in tensor.experts:
            values = choice.get(str(model), Values())
            changes[model] = {
                name: tensor.value(model, name) if given is None else given
                for name, given in (
                    ("density", values.density),
                    ("scale", values.scale),
                    ("weight", values.weight),
                )
            }
        merged.append(tensor.with_values(changes))
    return merged


def write_recipe(
    merge: PlannedMerge, result: SearchResult, folder: Path | None = None
) -> str:
    """Write the recipe with the best trial's values, and comments that say so.

    Args:
        merge: what was searched.
        result: what was found.
        folder: where the recipe will lie, so that its data is found from there; None
            leaves paths as they are.
    """
    document = to_document(merge.config)
    if folder is not None:
        _move_data(document, merge.folders, folder)
    for name in ("models", "slices", "modules"):
        _put_values(document.get(name), result.best.choice)
    start, best = result.trials[0], result.best
    what = result.what
    samples = ", ".join(f"{n} samples of '{m}'" for m, n in result.n_samples.items())
    lines = [
        f"Tuned by mergekit-himerging search: {len(result.trials)} merges scored on",
        f"{samples}.",
        f"{what}: {best.objective:.4f}; of the recipe as it was: {start.objective:.4f}",
        f"(difference {start.behind:.4f} ± {start.behind_se:.4f}, one standard error).",
        "Chosen on these samples: evaluate it on others before you believe it.",
        "Scores are of the plain merge, before an analysis of it treats any layer.",
    ]
    for model, score in best.scores.items():
        recovered = "" if best.gains is None else f", recovered {best.gains[model]:.3f}"
        lines.append(
            f"'{model}': base {result.base[model]:.4f}, whole expert "
            f"{result.single[model]:.4f}, this merge {score:.4f}{recovered}"
        )
    head = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    return head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _move_data(value: Any, folders: Sequence[Path], to: Path) -> None:
    """Write relative paths of data as they are found from another folder."""
    if isinstance(value, list):
        for item in value:
            _move_data(item, folders, to)
    if not isinstance(value, dict):
        return
    data = value.get("calibration")
    if isinstance(data, str) and data != SELF and not os.path.isabs(data):
        found = next((f / data for f in folders if (f / data).exists()), None)
        if found is not None:
            value["calibration"] = os.path.relpath(found, to)
    for item in value.values():
        _move_data(item, folders, to)


def _put_values(value: Any, choice: Choice) -> None:
    """Set the values of every model in a recipe, wherever it stands."""
    if isinstance(value, list):
        for item in value:
            _put_values(item, choice)
    if not isinstance(value, dict):
        return
    values = choice.get(str(value.get("model")), None)
    if values is not None:
        parameters = value.setdefault("parameters", {})
        for name in ("density", "scale", "weight"):
            given = getattr(values, name)
            if given is not None:
                parameters[name] = given
    for item in value.values():
        _put_values(item, choice)


def write_table(result: SearchResult) -> str:
    """Write all trials as CSV, a row each, in the order they were made."""
    models = list(result.base)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("density", "scale", "weight", "score", "recovered_gain")
    writer.writerow(
        ["varied", "objective", "behind_best", "behind_best_se"]
        + [f"{name} {model}" for model in models for name in names]
    )
    for trial in result.trials:
        row: list[object] = [
            trial.model,
            trial.objective,
            trial.behind,
            trial.behind_se,
        ]
        for model in models:
            values = trial.choice.get(model, Values())
            gain = None if trial.gains is None else trial.gains[model]
            row += [values.density, values.scale, values.weight]
            row += [trial.scores[model], gain]
        writer.writerow(["" if cell is None else cell for cell in row])
    return text.getvalue()
