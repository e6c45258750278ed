"""An evaluation as tables, at most as wide as asked for."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mergekit_himerging.evaluation.records import (
    Difference,
    Estimate,
    Evaluation,
    Metric,
    Recovered,
    Result,
    orientation,
)

HEADS: dict[Metric, str] = {
    "loss": "loss",
    "accuracy": "accuracy",
    "exact_match": "exact match",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "bleu": "BLEU-4",
    "corpus_bleu": "corpus BLEU-4",
}
GAP = 3
"""Cells between two columns."""

MIN_NAME = 12
"""A model's name keeps so many cells of a line, and is wrapped beyond."""


def make_tables(evaluation: Evaluation, *, width: int = 80) -> Group:
    """Lay out an evaluation for a console.

    For each task models are rows and metrics columns, with a 95 % interval under each
    value; the best value of a column is bold and marked with a star. Loss is in nats
    per token, lower is better; accuracy and exact match are shares, the rest 0 to 100.
    Recovered gain, differences and forgetting follow. What does not fit beside the
    names goes into a further table.

    Args:
        evaluation: with at least one task.
        width: cells of a line, for ``rich.console.Console(width=...)``.
    """
    return Group(*_make_all(evaluation, width))


def _make_all(evaluation: Evaluation, width: int) -> Iterator[RenderableType]:
    yield Text(
        "95 % intervals; * best; loss in nats per token, lower is better; accuracy and "
        "exact match in shares, ROUGE and BLEU 0 to 100"
    )
    for task in evaluation.tasks:
        results = [result for result in evaluation.results if result.task == task.name]
        metrics = list(results[0].estimates)
        yield _title(f"{task.name} ({task.n_rows} rows)")
        yield from _stack(
            [result.model for result in results],
            [_score_column(metric, results) for metric in metrics],
            width,
        )
        yield from _tell_cuts(results)
        yield from _tell_other_tokens(results)
        yield from _make_recovered(evaluation.recovered, task.name, width)
    yield from _make_differences(
        "differences, above 0 where the first is better", evaluation.differences, width
    )
    yield from _make_differences(
        "forgetting, below 0 where a model is worse than the base on a task that is "
        "not its own",
        evaluation.forgetting,
        width,
    )


def _tell_cuts(results: Sequence[Result]) -> Iterator[RenderableType]:
    """Say where a model did not see rows whole: its scores are of less than others."""
    for result in results:
        n_rows, n_prompts = result.measured.n_truncated, result.measured.n_prompts_cut
        parts = [f"{n_rows} rows lost tokens to its length"] if n_rows else []
        if n_prompts:
            parts.append(f"{n_prompts} prompts lost their beginning to the answer's")
        if parts:
            yield Text(f"{result.model}: {', '.join(parts)}")


def _tell_other_tokens(results: Sequence[Result]) -> Iterator[RenderableType]:
    """Say which models were scored on another text than the first one."""
    first = results[0]
    others = [
        result.model
        for result in results
        if result.measured.tokens_sha256 != first.measured.tokens_sha256
    ]
    if others:
        yield Text(
            f"{', '.join(others)}: scored on other tokens than {first.model} (another "
            "tokenizer, chat template or length), so a difference in loss is not of "
            "the weights alone; give all models the same tokenizer files to compare "
            "them",
            "bold",
        )


def _make_recovered(
    recovered: Sequence[Recovered], task: str, width: int
) -> Iterator[RenderableType]:
    for expert in dict.fromkeys(r.expert for r in recovered if r.task == task):
        ours = [r for r in recovered if (r.task, r.expert) == (task, expert)]
        shares = {(r.model, r.metric): r.share for r in ours}
        models = list(dict.fromkeys(r.model for r in ours))
        columns = [
            (HEADS[metric], [_show_share(shares[model, metric]) for model in models])
            for metric in dict.fromkeys(r.metric for r in ours)
        ]
        yield _title(f"{task}: share of the gain of {expert} recovered")
        yield from _stack(models, columns, width)


def _make_differences(
    title: str, differences: Sequence[Difference], width: int
) -> Iterator[RenderableType]:
    for task in dict.fromkeys(difference.task for difference in differences):
        ours = [d for d in differences if d.task == task]
        pairs = list(dict.fromkeys((d.model, d.other) for d in ours))
        by_pair = {(d.model, d.other, d.metric): d for d in ours}
        columns = [
            (
                HEADS[metric],
                [_show_difference(by_pair[(*pair, metric)]) for pair in pairs],
            )
            for metric in dict.fromkeys(d.metric for d in ours)
        ]
        yield _title(f"{task}: {title}")
        yield from _stack([f"{one} - {other}" for one, other in pairs], columns, width)


Column = tuple[str, list[Text]]
"""A head and a cell for each row."""


def _title(text: str) -> Text:
    return Text(f"\n{text}", "bold")


def _stack(
    names: Sequence[str], columns: Sequence[Column], width: int
) -> Iterator[Table]:
    """Put columns beside the rows' names, in as many tables as the width asks for."""
    widest = max(map(_width, columns))
    name_width = max(MIN_NAME, min(max(map(len, names)), width - widest - GAP))
    waiting = list(columns)
    while waiting:
        left = width - name_width
        taken: list[Column] = []
        while waiting and (not taken or GAP + _width(waiting[0]) <= left):
            taken.append(waiting.pop(0))
            left -= GAP + _width(taken[-1])
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        table.add_column("", max_width=name_width, overflow="fold")
        for head, _ in taken:
            table.add_column(Text(head), justify="right", no_wrap=True)
        for number, name in enumerate(names):
            table.add_row(Text(name), *(cells[number] for _, cells in taken))
        yield table


def _width(column: Column) -> int:
    head, cells = column
    lines = [line for cell in cells for line in cell.plain.split("\n")]
    return max(map(len, [head, *lines]))


def _score_column(metric: Metric, results: Sequence[Result]) -> Column:
    estimates = [result.estimates[metric] for result in results]
    best = max(orientation(metric) * estimate.value for estimate in estimates)
    differ = len({estimate.value for estimate in estimates}) > 1
    cells = []
    for estimate in estimates:
        is_best = differ and orientation(metric) * estimate.value == best
        cells.append(_show(estimate, mark="*" if is_best else "", bold=is_best))
    return HEADS[metric], cells


def _show_share(share: Estimate | None) -> Text:
    return Text("no gain") if share is None else _show(share)


def _show_difference(difference: Difference) -> Text:
    text = _show(difference.gain, sign="+")
    if difference.p_value is not None:
        text.append(f"\np = {difference.p_value:.2g}")
    return text


def _show(
    estimate: Estimate, *, sign: str = "", mark: str = "", bold: bool = False
) -> Text:
    digits = 1 if estimate.unit == "points" else 3
    text = Text(f"{estimate.value:{sign}.{digits}f}{mark}", "bold" if bold else "")
    if estimate.low is not None and estimate.high is not None:
        text.append(
            f"\n[{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]", "not bold"
        )
    return text
