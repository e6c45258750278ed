"""What was chosen by measurement: factors, slopes and gradients, as all views tell it.

Invariant: an effective weight is the factor on the weight of what is kept of a delta,
whoever chose it: the paper's rules, a measurement or a hand.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from mergekit_himerging.plan import Plan, Treatment
from mergekit_himerging.scores import StepReport
from mergekit_himerging.views.words import describe_treatment, show_share


def is_measured(plan: Plan) -> bool:
    """Say whether the plan's treatments were chosen by measured slopes."""
    return any(task.slopes for task in plan.tasks)


def weigh_treatment(treatment: Treatment) -> float:
    """Return the effective weight: 1 where a delta is kept, 0 where it is dropped."""
    return treatment.factors.weight * treatment.factors.scale


def list_layers(plan: Plan) -> list[int]:
    """List the layers that have a slope or a treatment, from the lowest up."""
    slopes = {slope.layer for task in plan.tasks for slope in task.slopes}
    return sorted(slopes | {treatment.layer for treatment in plan.treatments})


def list_weights(plan: Plan, model: str) -> dict[int, float]:
    """List one model's effective weight by layer, of ``list_layers``."""
    found = {t.layer: weigh_treatment(t) for t in plan.treatments if t.model == model}
    return {layer: found.get(layer, 1.0) for layer in list_layers(plan)}


def list_slopes(plan: Plan, model: str) -> tuple[dict[int, float], dict[int, float]]:
    """List how scores change with one model's factor, by layer.

    Returns:
        Slopes of the model's own task, and the mean of the other tasks'.
    """
    own: dict[int, float] = {}
    others: dict[int, list[float]] = {}
    for task in plan.tasks:
        for slope in task.slopes:
            if slope.model == model and task.model == model:
                own[slope.layer] = slope.slope
            elif slope.model == model:
                others.setdefault(slope.layer, []).append(slope.slope)
    return own, {layer: fmean(slopes) for layer, slopes in others.items()}


def list_factors(plan: Plan) -> list[tuple[str, list[str]]]:
    """List what is done in each layer, layers with equal factors in one row.

    Returns:
        Layers, such as ``3`` or ``4-7``, and a cell for each of the plan's models: the
        factor on its weight, or the whole treatment where it is more than that.
    """
    treatments = {(t.layer, t.model): t for t in plan.treatments}

    def show(layer: int) -> list[str]:
        found = (treatments.get((layer, model)) for model in plan.models)
        return ["1" if t is None else _show_factor(t) for t in found]

    groups = groupby(list_layers(plan), key=show)
    return [(join_layers(layers), cells) for cells, layers in groups]


def _show_factor(treatment: Treatment) -> str:
    if treatment.action == "drop":
        return "0"
    factors = treatment.factors
    if factors.density == factors.scale == 1:
        return f"{factors.weight:g}"
    return describe_treatment(treatment)


def join_layers(layers: Iterable[int]) -> str:
    """Write ascending layer numbers with runs joined: ``0-2, 5``."""
    numbered = enumerate(layers)
    runs = []
    for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0]):
        members = [layer for _, layer in run]
        first, last = members[0], members[-1]
        runs.append(f"{first}" if first == last else f"{first}-{last}")
    return ", ".join(runs)


@dataclass(frozen=True, slots=True)
class Extreme:
    """A largest or smallest effective weight.

    Attributes:
        weight: the value.
        layers: where it stands, by model.
    """

    weight: float
    layers: Mapping[str, Sequence[int]]


def find_extremes(plan: Plan) -> tuple[Extreme, Extreme]:
    """Find the largest and the smallest effective weight of a measured plan."""
    weights = {model: list_weights(plan, model) for model in plan.models}
    values = [value for of_model in weights.values() for value in of_model.values()]

    def find(value: float) -> Extreme:
        layers = {
            model: [layer for layer, weight in of_model.items() if weight == value]
            for model, of_model in weights.items()
        }
        return Extreme(
            value, {model: found for model, found in layers.items() if found}
        )

    return find(max(values)), find(min(values))


def describe_way(plan: Plan) -> str:
    """Say how slopes were measured; empty where none were."""
    if not is_measured(plan):
        return ""
    if plan.settings.get("measure") == "exact":
        return "slopes measured by every factor up and down (exact)"
    return "slopes measured by a pass back (first_order)"


STEP_HEADS = (
    "step",
    "moves",
    "objective",
    "better by",
    "judging",
    "forwards",
    "outcome",
)
"""What the cells of a step are: see ``StepReport``; "judging" is how much it is better
on the judging samples alone, and forward passes are those so far."""


def list_steps(plan: Plan) -> list[list[str]]:
    """List the steps that were tried, with a cell for each of ``STEP_HEADS``."""
    return [
        [
            str(number),
            step.moves,
            f"{step.objective:.4f}",
            f"{step.improvement:+.4f} ± {step.improvement_se:.4f}",
            "" if step.improvement_apart is None else f"{step.improvement_apart:+.4f}",
            str(step.forwards),
            _describe_outcome(step),
        ]
        for number, step in enumerate(plan.steps, 1)
    ]


def _describe_outcome(step: StepReport) -> str:
    words = ["taken" if step.taken else "not taken"]
    if step.breaks_floor:
        words.append("breaks a floor")
    if step.mends_floor:
        words.append("mends a floor")
    if step.shortfall:
        words.append(f"floors lack {step.shortfall:.4f}")
    if step.mends_floor or step.shortfall:
        words.append("which counts in 'better by'")
    return ", ".join(words)


def describe_choice(plan: Plan, labels: Mapping[str, str]) -> dict[str, str]:
    """Say what was done to choose a measured plan, and what came of it.

    Args:
        plan: with slopes; of another the result is empty.
        labels: what to call each model.

    Returns:
        Sentences by what they tell of.
    """
    if not is_measured(plan):
        return {}
    facts = {"steps": _describe_steps(plan)}
    largest, smallest = find_extremes(plan)
    if largest.weight == smallest.weight == 1:
        facts["factors"] = "1 everywhere, so this is the plain merge"
    else:
        facts["largest factor"] = _describe_extreme(largest, labels)
        facts["smallest factor"] = _describe_extreme(smallest, labels)
    is_refused = plan.guard is not None and plan.guard.acted
    after = "in the merge that the guard refused" if is_refused else "after"
    for role in ("choosing", "judging"):
        parts = [
            f"{labels[task.model]} {show_share(scores.recovered_merged)} before and "
            f"{show_share(scores.recovered_treated)} {after}"
            for task in plan.tasks
            for scores in [task if role == "choosing" else task.accepted_on]
            if scores.n_samples
        ]
        if parts:
            facts[f"recovered gain, {role}"] = "; ".join(parts)
    return facts


def _describe_steps(plan: Plan) -> str:
    if plan.steps:
        n_taken = sum(step.taken for step in plan.steps)
        text = (
            f"{n_taken} of {len(plan.steps)} steps taken, in "
            f"{plan.n_choice_forwards} forward passes over the choosing samples"
        )
    else:
        text = "none was tried, since no factor that may move raises the objective"
    if plan.gradient_forwards:
        text += f"; {plan.gradient_forwards} more for the gradients"
    return text


def _describe_extreme(extreme: Extreme, labels: Mapping[str, str]) -> str:
    places = [
        f"{labels[model]} in layer{'s' if len(layers) > 1 else ''} "
        f"{join_layers(layers)}"
        for model, layers in extreme.layers.items()
    ]
    return f"{extreme.weight:g} ({'; '.join(places)})"


@dataclass(frozen=True, slots=True)
class GradientRow:
    """One matrix of one task: means over the layers, see ``MatrixGradients``.

    Attributes:
        model: the task's.
        matrix: its short name.
        nuclear: mean nuclear norm at the base, and at the task's model.
        difference: between neighbouring layers, likewise; None with one layer.
    """

    model: str
    matrix: str
    nuclear: tuple[float, float]
    difference: tuple[float | None, float | None]


GRADIENT_HEADS = (
    *("nuclear norm, base", "nuclear norm, alone"),
    *("between layers, base", "between layers, alone"),
)
"""What the numbers of a gradient's row are."""

GRADIENT_WORDS = (
    "gradients of the task's mean score, in nats per token by unit of weight: the mean "
    "over the layers of their nuclear norm, and of its absolute difference between "
    "neighbouring layers"
)


def list_gradients(plan: Plan) -> list[GradientRow]:
    """List every task's gradients, by task and matrix."""
    return [
        GradientRow(
            model=task.model,
            matrix=found.matrix,
            nuclear=(fmean(found.nuclear_base), fmean(found.nuclear_single)),
            difference=(found.difference_base, found.difference_single),
        )
        for task in plan.tasks
        for found in task.gradients
    ]


def show_gradients(row: GradientRow) -> list[str]:
    """Show a row's numbers with three digits, in the order of ``GRADIENT_HEADS``."""
    values = (*row.nuclear, *row.difference)
    return ["-" if value is None else f"{value:.3g}" for value in values]
