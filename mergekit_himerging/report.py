"""Plans in words: the table that a merge prints."""

from collections.abc import Iterator

from mergekit_himerging.plan import Plan
from mergekit_himerging.scores import TaskReport


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


def _lines(plan: Plan) -> Iterator[str]:
    short = {task.model: f"task {number}" for number, task in enumerate(plan.tasks, 1)}
    for task in plan.tasks:
        unit = "nats per token" if task.metric == "loss" else "share right"
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
    for number, step in enumerate(plan.steps, 1):
        yield (
            f"step {number}: objective {step.objective:.4f}, "
            f"{step.improvement:+.4f} ± {step.improvement_se:.4f}, "
            f"{'taken' if step.taken else 'not taken'} ({step.forwards} forward passes)"
        )
    for task in plan.tasks:
        yield _whole(short[task.model], task)
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
