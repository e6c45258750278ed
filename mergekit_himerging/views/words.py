"""Words that all views of a plan share: units, numbers, names, treatments.

Invariant: names and reasons come from plans of strangers, so they pass `clean_text`
before they are shown, and `shorten_names` before they are published.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mergekit_himerging.names import clean_text, shorten_names
from mergekit_himerging.plan import Plan, Treatment
from mergekit_himerging.scores import LayerScores, TaskReport

UNITS: Mapping[str, str] = {
    "loss": "nats per token",
    "accuracy": "share right",
    "agreement": "nats per token",
}
"""Unit of scores, contributions and conflicts, by metric."""

SCORES: Mapping[str, str] = {
    "loss": "negative loss in nats per target token, higher is better",
    "accuracy": "share of choices ranked right, higher is better",
    "agreement": "minus the divergence from the expert in nats per token, 0 is best",
}
"""What a score is, by metric."""

DONE: Mapping[str, str] = {
    "keep": "kept",
    "shrink": "shrunk",
    "drop": "dropped",
    "set": "set",
}
"""What was done with a layer's delta, by action."""

_START = r"(?<![\w./\\~-])(?<!http:)(?<!https:)(?:~|\.\.|[A-Za-z]:)?[/\\]"
_PATHS = rf"(?<=')(?:{_START}[^'\n]+)(?=')|{_START}[^\s'\"`,;()<>|]+"
"""Local paths in a sentence, in quotes or without spaces."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one layer.

    Attributes:
        layer: 0-based decoder block of the output model.
        model: as the plan spells it.
        scores: of the model's own task; None where it was not measured.
        n_samples: that the scores run over.
        action: what was done: the treatment's, or ``keep`` without one.
        done: the same in words.
        reason: as the plan gives it; may be empty.
    """

    layer: int
    model: str
    scores: LayerScores | None
    n_samples: int
    action: Literal["keep", "shrink", "drop", "set"]
    done: str
    reason: str


def list_rows(plan: Plan) -> list[Row]:
    """List what was measured and done, by layer, then by model in the plan's order.

    A layer that has neither scores nor a treatment has no row; all of it is kept.
    """
    tasks = {task.model: task for task in plan.tasks}
    models = dict.fromkeys([*plan.models, *tasks])
    scores = {(s.layer, t.model): s for t in plan.tasks for s in t.layers}
    treatments = {(t.layer, t.model): t for t in plan.treatments}
    layers = sorted({layer for layer, _ in [*scores, *treatments]})
    rows = []
    for layer in layers:
        for model in models:
            treatment = treatments.get((layer, model)) or Treatment(
                layer=layer, model=model, action="keep"
            )
            rows.append(
                Row(
                    layer=layer,
                    model=model,
                    scores=scores.get((layer, model)),
                    n_samples=tasks[model].n_samples if model in tasks else 0,
                    action=treatment.action,
                    done=describe_treatment(treatment),
                    reason=treatment.reason,
                )
            )
    return rows


def describe_treatment(treatment: Treatment) -> str:
    """Say what is done with one delta; factors stand on the recipe's values."""
    if treatment.action == "shrink":
        return (
            f"shrink to {treatment.density_factor:g} of density "
            f"and {treatment.scale_factor:g} of scale"
        )
    if treatment.action == "set":
        return (
            f"set to {treatment.density_factor:g} of density, "
            f"{treatment.scale_factor:g} of scale and "
            f"{treatment.weight_factor:g} of weight"
        )
    return treatment.action


def count_actions(plan: Plan) -> dict[str, dict[str, int]]:
    """Count layers by action for each of the plan's models; absent ones are kept."""
    counts = {model: dict.fromkeys(DONE, 0) for model in plan.models}
    for treatment in plan.treatments:
        counts[treatment.model][treatment.action] += 1
    for of_model in counts.values():
        of_model["keep"] += plan.n_layers - sum(of_model.values())
    return counts


def find_treated_layers(plan: Plan) -> list[int]:
    """List the layers in which a delta is not kept, from the lowest up."""
    return sorted({t.layer for t in plan.treatments if t.action != "keep"})


def describe_counts(counts: Mapping[str, int]) -> str:
    """Say how many layers of a model were kept, shrunk, dropped and set."""
    return ", ".join(
        f"{number} {DONE[action]}"
        for action, number in counts.items()
        if number or action != "set"
    )


def summarize_plan(plan: Plan) -> str:
    """Say in one sentence what the plan does."""
    treated = find_treated_layers(plan)
    if treated:
        actions = Counter[str](t.action for t in plan.treatments if t.action != "keep")
        deltas = [
            f"{actions[action]} {DONE[action]}" for action in DONE if actions[action]
        ]
        verb = "is" if len(treated) == 1 else "are"
        return (
            f"{len(treated)} of {plan.n_layers} layers {verb} treated "
            f"(deltas: {', '.join(deltas)}), the rest is merged as the recipe says."
        )
    if plan.guard is not None and plan.guard.acted:
        return (
            f"All {plan.n_layers} layers are merged as the recipe says: the guard put "
            "the plain merge back."
        )
    return f"All {plan.n_layers} layers are merged as the recipe says."


def describe_guard(plan: Plan) -> str:
    """Say what the guard found and did; a plan without one was not judged."""
    if plan.guard is None:
        return "none: the plan was not judged on other samples"
    acted = "acted" if plan.guard.acted else "did not act"
    text = f"{plan.guard.reason} ({plan.guard.setting}, {acted})"
    if plan.guard.acted:
        text += "; scores called treated are of the merge that it refused"
    return text


def show_number(value: float | None, *, sign: str = "") -> str:
    """Show a score with four decimals; a dash for None; ``sign`` "+" shows both."""
    if value is None:
        return "-"
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{round(value, 4) + 0.0:{sign}{'.4f' if abs(value) < 1e6 else '.3e'}}"


def show_conflict(scores: LayerScores, n_samples: int) -> str:
    """Show a conflict with its standard error, unknown below two samples."""
    error = show_number(scores.conflict_se) if n_samples > 1 else "?"
    return f"{show_number(scores.conflict, sign='+')} ± {error}"


def show_layer(row: Row) -> tuple[str, str, str]:
    """Show a layer alone and merged, and its conflict; dashes without scores."""
    if row.scores is None:
        return ("-", "-", "-")
    return (
        show_number(row.scores.contribution_single),
        show_number(row.scores.contribution_merged),
        show_conflict(row.scores, row.n_samples),
    )


def show_share(value: float | None) -> str:
    """Show a recovered gain in percent; a dash where there is no gain to recover."""
    return "-" if value is None else f"{value:.1%}"


def list_names(plan: Plan) -> list[str]:
    """List the names of models and data in a plan."""
    names = [plan.base, *plan.models, *plan.inputs]
    return names + [
        name for task in plan.tasks for name in (task.model, task.calibration)
    ]


def shorten_sentence(text: str, labels: Mapping[str, str]) -> str:
    """Put labels for the names in a sentence, and cut other local paths in it.

    Args:
        text: such as a treatment's reason.
        labels: as `shorten_names` returns them.
    """
    changed = [name for name, label in labels.items() if name.strip() and name != label]
    known = "|".join(map(re.escape, sorted(changed, key=len, reverse=True)))
    pattern = rf"(?<![\w/])(?:{known})(?![\w/])|{_PATHS}" if known else _PATHS

    def name(match: re.Match[str]) -> str:
        found = match[0]
        return labels[found] if found in labels else shorten_names([found])[found]

    return clean_text(re.sub(pattern, name, text))


def describe_aim(task: TaskReport) -> str:
    """Say how a task counted, and whether its floor is kept; empty where as usual."""
    parts = []
    if task.task_weight == 0:
        parts.append("not aimed at (task_weight 0)")
    elif task.task_weight != 1:
        parts.append(f"task_weight {task.task_weight:g}")
    if task.floor is not None:
        kept = {True: "kept", False: "NOT KEPT", None: "unknown, for want of a gain,"}
        parts.append(f"floor {task.floor:g}")
        for role, scores in (("choosing", task), ("judging", task.accepted_on)):
            held = f"{kept[scores.floor_kept]} on the" if scores.n_samples else "no"
            parts.append(f"{held} {role} samples")
    return ", ".join(parts)
