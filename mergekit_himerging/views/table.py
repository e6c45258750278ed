"""A plan as a table for a terminal or a pipe, and as JSON for other programs."""

import json
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mergekit_himerging.names import clean_text, shorten_names
from mergekit_himerging.plan import Plan
from mergekit_himerging.scores import TaskReport, WholeScores
from mergekit_himerging.views.factors import (
    GRADIENT_HEADS,
    GRADIENT_WORDS,
    STEP_HEADS,
    Extreme,
    describe_choice,
    describe_way,
    find_extremes,
    is_measured,
    list_gradients,
    list_layers,
    list_slopes,
    list_steps,
    list_weights,
    show_gradients,
)
from mergekit_himerging.views.words import (
    SCORES,
    UNITS,
    Row,
    count_actions,
    describe_aim,
    describe_counts,
    describe_guard,
    find_treated_layers,
    list_names,
    list_rows,
    shorten_sentence,
    show_layer,
    show_number,
    show_share,
    summarize_plan,
)


def make_console() -> Console:
    """Make a console that is wide in a pipe, where nobody counts columns."""
    # Names may have brackets and colons that are no markup.
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    return console


def render_plan(plan: Plan) -> Group:
    """Lay out a plan in words: what was measured, what was done and why.

    Contributions and conflicts are in the unit of the task's metric; a conflict above 0
    means that merging weakened the task in that layer.

    Args:
        plan: with scores; without them only the treatments are listed.

    Returns:
        What ``rich.console.Console.print`` takes; from 60 columns on nothing is cut
        off, and below that an ellipsis says where.
    """
    labels = shorten_names(list_names(plan), all_names=True)
    rows = list_rows(plan)
    blocks = [_list_models(plan, labels)]
    if is_measured(plan):
        # Their slopes are in the table.
        rows = [row for row in rows if not row.reason.startswith("slope ")]
        blocks += [_tabulate_slopes(plan, labels), *_list_reasons(rows, labels)]
    elif rows:
        blocks += [_tabulate_layers(rows, labels), *_list_reasons(rows, labels)]
    if any(task.gradients for task in plan.tasks):
        blocks.append(_tabulate_gradients(plan, labels))
    if plan.steps:
        blocks.append(_tabulate_steps(plan))
    if any(task.n_samples for task in plan.tasks):
        blocks.append(_tabulate_scores(plan.tasks, labels))
    blocks.append(_list_facts(plan, labels))
    # An empty line between two blocks.
    spaced = [part for block in blocks for part in (Text(""), block)]
    return Group(*spaced[1:])


def plan_as_json(plan: Plan) -> str:
    """Write a plan and what follows from it as JSON text, without a last newline.

    Returns:
        An object with ``plan``, as in a plan file, and ``summary``: the sentence, the
        treated layers, the worst layers first, layers by action for each model, and
        on the samples that chose and on those that judged whether each floor is kept
        (or null) and the recovered gain of each task's merges (a share, or null); of
        treatments chosen by measurement the steps, their cost and the extreme factors,
        else null; and the difference of each gradient's nuclear norm between
        neighbouring layers.
    """
    summary = {
        "sentence": summarize_plan(plan),
        "treated_layers": find_treated_layers(plan),
        "worst_layers": list(plan.order),
        "actions": count_actions(plan),
        "floor_kept": {
            task.model: {
                "choosing": task.floor_kept,
                "judging": task.accepted_on.floor_kept,
            }
            for task in plan.tasks
            if task.floor is not None
        },
        "recovered_gain": {
            task.model: {
                "choosing": _recovered(task),
                "judging": _recovered(task.accepted_on),
            }
            for task in plan.tasks
        },
        "measurement": _summarize_choice(plan) if is_measured(plan) else None,
        "gradient_differences": {
            task.model: {
                found.matrix: {
                    "base": found.difference_base,
                    "alone": found.difference_single,
                }
                for found in task.gradients
            }
            for task in plan.tasks
            if task.gradients
        },
    }
    content = {"plan": plan.model_dump(mode="json", by_alias=True), "summary": summary}
    return json.dumps(content, ensure_ascii=False, indent=2)


def _recovered(scores: WholeScores) -> dict[str, float | None]:
    return {"merged": scores.recovered_merged, "treated": scores.recovered_treated}


def _summarize_choice(plan: Plan) -> dict[str, object]:
    def show(extreme: Extreme) -> dict[str, object]:
        return {"factor": extreme.weight, "layers": dict(extreme.layers)}

    largest, smallest = find_extremes(plan)
    return {
        "steps": len(plan.steps),
        "steps_taken": sum(step.taken for step in plan.steps),
        "forwards": plan.n_choice_forwards,
        "gradient_forwards": plan.gradient_forwards,
        "largest": show(largest),
        "smallest": show(smallest),
    }


def _list_models(plan: Plan, labels: Mapping[str, str]) -> Table:
    """List the models with their full names and data."""
    tasks = {task.model: task for task in plan.tasks}
    grid = _make_grid()
    grid.add_row(Text("base"), Text(clean_text(plan.base)))
    for model in dict.fromkeys([*plan.models, *tasks]):
        text = clean_text(model)
        if model in tasks:
            task = tasks[model]
            text += (
                f"\n  on {clean_text(task.calibration)}: {task.n_tokens} tokens, "
                f"{task.n_targets} scored, {task.n_truncated} texts cut\n"
                f"  score: {SCORES[task.metric]}"
            )
        grid.add_row(Text(labels[model]), Text(text))
    return grid


def _tabulate_layers(rows: list[Row], labels: Mapping[str, str]) -> Table:
    """Tabulate layers and models; contributions only where any were measured."""
    is_measured = any(row.scores is not None for row in rows)
    table = _make_table()
    _add_number(table, "layer")
    _add_words(table, "model")
    for name in ("alone", "merged", "conflict") if is_measured else ():
        _add_number(table, name)
    _add_words(table, "done")
    for row in rows:
        numbers = show_layer(row) if is_measured else ()
        cells = [str(row.layer), labels[row.model], *numbers, row.done]
        table.add_row(*map(Text, cells))
    return table


def _tabulate_slopes(plan: Plan, labels: Mapping[str, str]) -> Table:
    """Tabulate factors by layer and model, with the slopes that they come from."""
    table = _make_table()
    _add_number(table, "layer")
    _add_words(table, "model")
    for name in ("factor", "slope, own task", "other tasks"):
        _add_number(table, name)
    columns = {
        model: (list_weights(plan, model), *list_slopes(plan, model))
        for model in plan.models
    }
    for layer in list_layers(plan):
        for model, (weights, *slopes_of) in columns.items():
            slopes = [show_number(of.get(layer), sign="+") for of in slopes_of]
            cells = [str(layer), labels[model], f"{weights[layer]:g}", *slopes]
            table.add_row(*map(Text, cells))
    return table


def _tabulate_steps(plan: Plan) -> Table:
    table = _make_table()
    _add_folding_numbers(table, STEP_HEADS[:-1])
    _add_words(table, STEP_HEADS[-1])
    for cells in list_steps(plan):
        table.add_row(*map(Text, cells))
    return table


def _tabulate_gradients(plan: Plan, labels: Mapping[str, str]) -> Table:
    table = _make_table()
    _add_words(table, "task")
    _add_words(table, "matrix")
    _add_folding_numbers(table, GRADIENT_HEADS)
    for row in list_gradients(plan):
        cells = [labels[row.model], row.matrix, *show_gradients(row)]
        table.add_row(*map(Text, cells))
    return table


def _list_reasons(rows: list[Row], labels: Mapping[str, str]) -> Iterator[Table]:
    """Say why, once for all models of a layer that share the reason."""
    grid = _make_grid()
    reasons: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        if row.reason:
            models = reasons.setdefault((row.layer, row.reason), [])
            models.append(labels[row.model])
    for (layer, reason), models in reasons.items():
        text = f"{', '.join(models)}: {shorten_sentence(reason, labels)}"
        grid.add_row(Text(f"layer {layer}"), Text(text))
    if reasons:
        yield grid


def _tabulate_scores(tasks: tuple[TaskReport, ...], labels: Mapping[str, str]) -> Table:
    """Tabulate whole models on the samples that chose and on those that judged."""
    table = _make_table()
    _add_words(table, "model")
    _add_words(table, "samples")
    for name in ("base", "alone", "merged", "treated"):
        _add_number(table, name)
    _add_words(table, "recovered gain")
    for task in tasks:
        for role, scores in (("choosing", task), ("judging", task.accepted_on)):
            if scores.n_samples:
                values = (
                    *(scores.score_base, scores.score_single),
                    *(scores.score_merged, scores.score_treated),
                )
                cells = [
                    labels[task.model],
                    f"{scores.n_samples} {role}",
                    *map(show_number, values),
                    f"{show_share(scores.recovered_merged)} merged, "
                    f"{show_share(scores.recovered_treated)} treated",
                ]
                table.add_row(*map(Text, cells))
    return table


def _list_facts(plan: Plan, labels: Mapping[str, str]) -> Table:
    """List the summary, line by line."""
    facts = {"plan": summarize_plan(plan)}
    for model, counts in count_actions(plan).items():
        facts[f"layers of {labels[model]}"] = describe_counts(counts)
    if plan.order:
        facts["worst layers first"] = ", ".join(map(str, plan.order))
    if any(task.layers for task in plan.tasks):
        units = dict.fromkeys(UNITS[task.metric] for task in plan.tasks)
        facts["contributions"] = (
            f"in {' or '.join(units)}; conflict is alone minus merged ± standard "
            "error, above 0 where merging weakened the task"
        )
    if describe_way(plan):
        facts["slopes"] = describe_way(plan)
    for task in plan.tasks:
        if describe_aim(task):
            facts[f"aim of {labels[task.model]}"] = describe_aim(task)
    facts |= describe_choice(plan, labels)
    if is_measured(plan):
        facts["columns"] = (
            "slopes are in nats per token by the factor, at the plain merge: of the "
            "model's own task, and the mean of the others; below 0 a delta harms there"
        )
    if any(task.gradients for task in plan.tasks):
        facts["gradients"] = GRADIENT_WORDS
    facts["guard"] = shorten_sentence(describe_guard(plan), labels)
    grid = _make_grid()
    for name, text in facts.items():
        grid.add_row(Text(name), Text(text))
    return grid


def _make_grid() -> Table:
    """Make two columns without lines: what is told, and the words."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold", max_width=24)
    grid.add_column(overflow="fold")
    return grid


def _make_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


def _add_number(table: Table, name: str) -> None:
    table.add_column(name, justify="right", no_wrap=True, overflow="ellipsis")


def _add_words(table: Table, name: str) -> None:
    table.add_column(name, overflow="fold")


def _add_folding_numbers(table: Table, names: Sequence[str]) -> None:
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
