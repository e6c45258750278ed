"""A plan as Markdown: the report of a merged folder, and a section of its model card.

Invariant: what is written here is published. Names and reasons come from strangers and
cannot become markup; local paths are cut to what tells them apart.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import quote

import yaml

from mergekit_himerging.names import clean_text, is_local, shorten_names
from mergekit_himerging.plan import PLAN_FILE, Plan
from mergekit_himerging.scores import WholeScores
from mergekit_himerging.views.factors import (
    GRADIENT_HEADS,
    GRADIENT_WORDS,
    STEP_HEADS,
    describe_choice,
    describe_way,
    is_measured,
    list_factors,
    list_gradients,
    list_steps,
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
    list_names,
    list_rows,
    shorten_sentence,
    show_layer,
    show_number,
    show_share,
    summarize_plan,
)

REPORT_FILE = "hi_merging_report.md"
"""Name of the report in a merged folder."""

BEGIN, END = "<!-- hi_merging -->", "<!-- /hi_merging -->"
"""Lines around the section of a model card."""

_SECTION = re.compile(
    rf"^{BEGIN}[ \t]*\r?$(?:(?!^{BEGIN}).)*?^{END}[ \t]*\r?$", re.DOTALL | re.MULTILINE
)

_LINK = "[Hi-Merging](https://arxiv.org/abs/2506.12379)"

_HOW_TO_READ = (
    "A contribution is the score that a model loses without a layer's delta, plus the "
    "score that the base wins by that delta alone: above 0 the layer helps the task. "
    "A conflict is the contribution in the task's own model (alone) minus the one in "
    "the merge, with its standard error over the samples, all in the unit of the "
    "task's score: above 0 merging weakened the task in that layer. "
    "Treatments were chosen on the choosing samples and checked on the judging ones, "
    "and factors in them stand on what the recipe resolves for each tensor."
)

_HOW_TO_READ_FACTORS = (
    "A factor stands on the weight that the recipe gives a model's delta in a layer: 1 "
    "is the plain merge, 0 leaves the delta out. Factors were chosen by slopes, which "
    "say how each task's score changes with a factor at the plain merge: below 0 the "
    "delta harms the task there, on the choosing samples. Steps of whole models were "
    "tried first, then steps of their layers. One was taken where it made the merge "
    "better on all samples by more than its standard error, and no worse on the "
    "judging ones alone, unless it mends a floor: so the judging samples gave no "
    "slopes, but had their say in every step. All slopes stand in the plan."
)


def write_report(
    plan: Plan,
    *,
    recipe: str | None,
    plot: str | None,
    lines: Mapping[str, str] | None = None,
) -> str:
    """Write the report of a merged folder.

    Args:
        plan: what was merged; with scores or without.
        recipe: the resolved recipe, YAML; its comments are left out.
        plot: the plot's file, relative to the report.
        lines: what base and merge wrote in the smoke test, by words for them.

    Returns:
        Markdown with GitHub's tables, ending with a newline.

    Raises:
        ValueError: the recipe is not a YAML mapping.
    """
    content, labels = _read_recipe(plan, recipe)
    blocks = [
        "# Hi-Merging report",
        f"{_LINK}: {summarize_plan(plan)}",
        *_list_models(plan, labels),
        "## How to read it",
        _HOW_TO_READ_FACTORS if is_measured(plan) else _HOW_TO_READ,
        "## What was measured",
        *(_tabulate_data(plan, labels) or ["Nothing: the plan has no scores."]),
        *_with_head(
            "## Scores", [*_tabulate_scores(plan, labels), *_list_aims(plan, labels)]
        ),
        *_with_head("## Choice", _list_choice(plan, labels)),
        *_with_head("## Layers", _tabulate_done(plan, list_rows(plan), labels)),
        *_with_head("## Gradients", _tabulate_gradients(plan, labels)),
    ]
    if plot is not None:
        blocks.append(f"![What was measured and done by layer]({quote(plot)})")
    if plan.order:
        blocks.append(f"Worst layers first: {', '.join(map(str, plan.order))}.")
    blocks += ["## Guard", f"Guard: {_tell(describe_guard(plan), labels)}."]
    blocks += _with_head("## Smoke test", _tabulate("Who", "Text", lines or {}))
    blocks += _with_head(
        "## Warnings", [f"- {_tell(text, labels)}" for text in plan.warnings]
    )
    settings = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in plan.settings.items()
    }
    inputs = {labels[name]: value for name, value in plan.inputs.items()}
    blocks += _with_head("## Settings", _tabulate("Setting", "Value", settings))
    blocks += _with_head("## Versions", _tabulate("Package", "Version", plan.versions))
    blocks += _with_head("## Inputs", _tabulate("Model", "Hash", inputs))
    blocks += _with_head("## Recipe", _fence(content))
    return "\n\n".join(blocks) + "\n"


def write_card_section(plan: Plan, *, recipe: str | None) -> str:
    """Write the model card's section on this merge, between `BEGIN` and `END`.

    Args:
        plan: what was merged; with scores or without.
        recipe: the resolved recipe, YAML; its comments are left out.

    Returns:
        Markdown with GitHub's tables, ending with a newline.

    Raises:
        ValueError: the recipe is not a YAML mapping.
    """
    content, labels = _read_recipe(plan, recipe)
    treated = [row for row in list_rows(plan) if row.action != "keep"]
    blocks = [
        BEGIN,
        "## Hi-Merging",
        f"{_LINK}: {summarize_plan(plan)}",
        *_list_models(plan, labels),
        *_tabulate_scores(plan, labels),
        *_list_aims(plan, labels),
        *_tabulate_done(plan, treated, labels),
    ]
    if plan.guard is not None:
        blocks.append(f"Guard: {_tell(describe_guard(plan), labels)}.")
    blocks += [f"More in `{REPORT_FILE}` and `{PLAN_FILE}`.", *_fence(content), END]
    return "\n\n".join(blocks) + "\n"


def put_section(card: str, section: str) -> str:
    """Put a section into a model card, at its end or in place of an earlier one.

    Args:
        card: Markdown; all else in it stays as it is.
        section: as `write_card_section` returns it.
    """
    if _SECTION.search(card):
        return _SECTION.sub(lambda _: section.rstrip("\n"), card, count=1)
    rest = card.rstrip()
    return f"{rest}\n\n{section}" if rest else section


def escape_markdown(text: str) -> str:
    """Escape text so that it is shown as it is, in a table's cell too.

    Args:
        text: one line; control characters in it become spaces.
    """
    # Entities where renderers disagree on what a backslash does.
    text = re.sub(r"[\\|<>&$`]", lambda found: f"&#{ord(found[0])};", clean_text(text))
    text = re.sub(r"[*_\[\]!~@]|(?<!&)#", r"\\\g<0>", text)
    # Bare addresses become links in GitHub's Markdown.
    return re.sub(r"(?i)(?<=www)\.|:(?=//)", r"\\\g<0>", text)


def _list_models(plan: Plan, labels: Mapping[str, str]) -> list[str]:
    lines = [f"- base: {escape_markdown(labels[plan.base])}"]
    for model, counts in count_actions(plan).items():
        name = escape_markdown(labels[model])
        lines.append(f"- model: {name} (layers: {describe_counts(counts)})")
    return ["\n".join(lines)]


def _tabulate_data(plan: Plan, labels: Mapping[str, str]) -> list[str]:
    heads = (
        *("Model", "Data", "Score", "Samples choosing", "Samples judging"),
        *("Tokens", "Scored tokens", "Texts cut", "SHA-256 of the rows"),
    )
    rows = [
        (
            *(labels[task.model], labels[task.calibration], SCORES[task.metric]),
            *(task.n_samples, task.accepted_on.n_samples),
            *(task.n_tokens, task.n_targets, task.n_truncated),
            task.calibration_sha256,
        )
        for task in plan.tasks
    ]
    return _make_table(heads, rows)


def _tabulate_scores(plan: Plan, labels: Mapping[str, str]) -> list[str]:
    heads = (
        *("Model", "Samples", "Unit", "Base", "Alone", "Merged", "Treated"),
        *("Recovered gain, merged", "Recovered gain, treated"),
    )
    rows = [
        (
            labels[task.model],
            f"{scores.n_samples} {role}",
            UNITS[task.metric],
            *_show_scores(scores),
        )
        for task in plan.tasks
        for role, scores in (("choosing", task), ("judging", task.accepted_on))
        if scores.n_samples
    ]
    return _make_table(heads, rows)


def _list_aims(plan: Plan, labels: Mapping[str, str]) -> list[str]:
    lines = [f"- {describe_way(plan)}"] if describe_way(plan) else []
    lines += [
        f"- {escape_markdown(labels[task.model])}: {describe_aim(task)}"
        for task in plan.tasks
        if describe_aim(task)
    ]
    return ["\n".join(lines)] if lines else []


def _show_scores(scores: WholeScores) -> Iterator[str]:
    yield show_number(scores.score_base)
    yield show_number(scores.score_single)
    yield show_number(scores.score_merged)
    yield show_number(scores.score_treated)
    yield show_share(scores.recovered_merged)
    yield show_share(scores.recovered_treated)


def _list_choice(plan: Plan, labels: Mapping[str, str]) -> list[str]:
    facts = describe_choice(plan, labels)
    lines = [f"- {name}: {escape_markdown(text)}" for name, text in facts.items()]
    steps = _make_table([head.capitalize() for head in STEP_HEADS], list_steps(plan))
    return ["\n".join(lines), *steps] if lines else []


def _tabulate_done(
    plan: Plan, rows: Sequence[Row], labels: Mapping[str, str]
) -> list[str]:
    """Tabulate layers: measured factors by model, or each layer's scores and reason."""
    if not is_measured(plan):
        return _tabulate_layers(rows, labels)
    if not rows:
        return []
    heads = ["Layers", *(escape_markdown(labels[model]) for model in plan.models)]
    return _make_table(heads, [(name, *cells) for name, cells in list_factors(plan)])


def _tabulate_gradients(plan: Plan, labels: Mapping[str, str]) -> list[str]:
    heads = ("Task", "Matrix", *(head.capitalize() for head in GRADIENT_HEADS))
    rows = [
        (labels[row.model], row.matrix, *show_gradients(row))
        for row in list_gradients(plan)
    ]
    words = f"{GRADIENT_WORDS[0].upper()}{GRADIENT_WORDS[1:]}."
    return [words, *_make_table(heads, rows)] if rows else []


def _tabulate_layers(rows: Iterable[Row], labels: Mapping[str, str]) -> list[str]:
    heads = ("Layer", "Model", "Alone", "Merged", "Conflict", "Done", "Why")
    cells = [
        (
            *(row.layer, labels[row.model], *show_layer(row), row.done),
            shorten_sentence(row.reason, labels),
        )
        for row in rows
    ]
    return _make_table(heads, cells)


def _tabulate(name: str, value: str, texts: Mapping[str, str]) -> list[str]:
    """Tabulate names and values that may be anything in a plan of strangers."""
    rows = [[shorten_sentence(text, {}) for text in item] for item in texts.items()]
    return _make_table((name, value), rows)


def _make_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Make one block of a table, or none without rows."""
    if not rows:
        return []
    lines = [" | ".join(heads), " | ".join(["---"] * len(heads))]
    lines += [" | ".join(escape_markdown(str(cell)) for cell in row) for row in rows]
    return ["\n".join(f"| {line} |" for line in lines)]


def _with_head(head: str, blocks: list[str]) -> list[str]:
    return [head, *blocks] if blocks else []


def _tell(text: str, labels: Mapping[str, str]) -> str:
    return escape_markdown(shorten_sentence(text, labels))


def _read_recipe(plan: Plan, recipe: str | None) -> tuple[object, dict[str, str]]:
    """Read a recipe, and shorten the names in it and in the plan alike."""
    names = list_names(plan)
    if recipe is None:
        return None, shorten_names(names)
    try:
        content = yaml.safe_load(recipe)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"recipe must be YAML, got {problem}") from error
    if not isinstance(content, dict):
        raise ValueError(f"recipe must be a mapping, got {type(content).__name__}")
    labels = shorten_names([*names, *_list_local_names(content)])
    return _shorten_values(content, labels), labels


def _list_local_names(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _list_local_names(item)
    elif isinstance(value, list):
        for item in value:
            yield from _list_local_names(item)
    elif isinstance(value, str) and is_local(value):
        yield value


def _shorten_values(value: object, labels: Mapping[str, str]) -> object:
    if isinstance(value, dict):
        return {key: _shorten_values(item, labels) for key, item in value.items()}
    if isinstance(value, list):
        return [_shorten_values(item, labels) for item in value]
    return labels.get(value, value) if isinstance(value, str) else value


def _fence(recipe: object) -> list[str]:
    """Write a recipe as one block of code that nothing in it can end."""
    if recipe is None:
        return []
    text = yaml.safe_dump(recipe, allow_unicode=True, sort_keys=False, width=88)
    lines = [clean_text(line) for line in text.removesuffix("\n").split("\n")]
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return ["\n".join([f"{fence}yaml", *lines, fence])]
