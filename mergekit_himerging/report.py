"""Plans in words: the table that a merge prints."""

from collections.abc import Iterator

from mergekit_himerging.plan import Plan
from mergekit_himerging.scores import TaskReport
from mergekit_himerging.views.factors import describe_choice


def summarize(plan: Plan) -> str:
    """Describe what was measured and done, a line per layer.

    Args:
        plan: with scores; without them only the treatments are listed.

    Returns:
        Lines of text, ending without a newline. Contributions and conflicts are in the
        unit of the task's metric; a conflict above 0 means that merging weakened the
        task in that layer.
    """
    return "\n".join(_lines(plan))


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


def describe_way(plan: Plan) -> str:
    """Say how slopes were measured; empty where none were."""
    if not any(task.slopes for task in plan.tasks):
        return ""
    if plan.settings.get("measure") == "exact":
        return "slopes measured by every factor up and down (exact)"
    return "slopes measured by a pass back (first_order)"


def _lines(plan: Plan) -> Iterator[str]:
    short = {task.model: f"task {number}" for number, task in enumerate(plan.tasks, 1)}
    names = {model: f"'{model}'" for model in plan.models} | short
    for task in plan.tasks:
        unit = "share right" if task.metric == "accuracy" else "nats per token"
        yield f"{short[task.model]}: '{task.model}', score in {unit}, higher is better"
    is_measured = any(task.layers for task in plan.tasks)
    if is_measured:
        heads = "".join(
            f" | {short[task.model] + ' alone':>12} {'merged':>8} {'conflict':>17}"
            for task in plan.tasks
        )
        yield f"layer{heads} | treatment"
    actions: dict[int, list[str]] = {}
    for treatment in plan.treatments:
        if treatment.action != "keep":
            name = short.get(treatment.model, f"'{treatment.model}'")
            done = f"{treatment.action} {name}"
            if treatment.action == "set":
                done += f" to {treatment.weight_factor:g} of its weight"
            actions.setdefault(treatment.layer, []).append(done)
    for layer in range(plan.n_layers):
        done = ", ".join(actions.get(layer, ["keep"]))
        if is_measured or layer in actions:
            cells = "".join(_cell(task, layer) for task in plan.tasks if task.layers)
            yield f"{layer:5}{cells} | {done}"
    if describe_way(plan):
        yield describe_way(plan)
    has_floors = any(task.floor is not None for task in plan.tasks)
    counting = " with the cost of missed floors" if has_floors else ""
    for number, step in enumerate(plan.steps, 1):
        lacking = f"floors lack {step.shortfall:.4f}, " if step.shortfall else ""
        yield (
            f"step {number}: objective {step.objective:.4f}, {lacking}"
            f"{step.improvement:+.4f} ± {step.improvement_se:.4f}{counting}, "
            f"{'taken' if step.taken else 'not taken'}"
            f"{', breaks a floor' if step.breaks_floor else ''} "
            f"({step.forwards} forward passes)"
        )
    for name, text in describe_choice(plan, names).items():
        yield f"{name}: {text}"
    for task in plan.tasks:
        yield _whole(short[task.model], task)
        if describe_aim(task):
            yield f"{short[task.model]}: {describe_aim(task)}"
    if plan.guard is not None:
        yield f"guard: {plan.guard.reason}"


def _cell(task: TaskReport, layer: int) -> str:
    scores = task.layers[layer]
    conflict = f"{scores.conflict:+.4f} ± {scores.conflict_se:.4f}"
    return (
        f" | {scores.contribution_single:12.4f} {scores.contribution_merged:8.4f} "
        f"{conflict:>17}"
    )


def _whole(name: str, task: TaskReport) -> str:
    def show(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    held = task.accepted_on
    line = (
        f"{name}: base {show(task.score_base)}, alone {show(task.score_single)}, "
        f"merged {show(task.score_merged)}, treated {show(task.score_treated)} "
        f"(n={task.n_samples})"
    )
    if held.n_samples:
        line += (
            f"; on samples that did not choose: merged {show(held.score_merged)}, "
            f"treated {show(held.score_treated)} (n={held.n_samples}), recovered gain "
            f"{show(held.recovered_merged)} and {show(held.recovered_treated)}"
        )
    return line
