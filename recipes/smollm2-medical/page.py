"""RESULTS.md: what the benchmark's files say, in tables and plots.

Invariant: every number on the page is computed from the JSON files; the first paragraph
says where Hi-Merging loses.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from compare import Comparison, Estimate, Standing, compare
from matplotlib.figure import Figure
from methods import METHODS, list_rows
from results import Budget, MethodResult, SettingResult, plan_path, read_result
from settings import SETTINGS

from mergekit_himerging.analysis.measured import BUDGET as FORWARDS
from mergekit_himerging.analysis.measured import list_courses
from mergekit_himerging.analysis.slopes import FORWARDS as SLOPE_FORWARDS
from mergekit_himerging.plan import Plan, read_plan
from mergekit_himerging.views.plot import draw_plan

OURS, OTHER = "#0072b2", "#999999"


MEASURED = "measured"
"""The row of the package's defaults at the other methods' cost: it is judged, and its
factors are drawn."""

WHOLE_DEFAULT = "measured, 64 samples"
"""The row with the package's default number of samples, at a higher cost."""

BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
"""Around the summary in the repository's README."""


def write_page(folder: Path, page: Path, *, readme: Path | None = None) -> None:
    """Write the page and its plots, and the summary in the repository's README.

    Args:
        folder: with a JSON file for each setting.
        page: the Markdown file to write.
        readme: the file with marks around its summary; None leaves it as it is.

    Raises:
        ValueError: there is no result.
    """
    comparisons = read_comparisons(folder)
    for comparison in comparisons:
        setting = comparison.result.setting
        draw(comparison, folder / f"{setting}.svg")
        if _is_tested(comparison.result, MEASURED):
            plan = read_plan(plan_path(folder, setting, MEASURED))
            draw_plan(plan, folder / f"{setting}-{MEASURED}.svg")
    page.write_text("\n".join(_write(comparisons, folder, page.parent)) + "\n", "utf-8")
    if readme is not None:
        text = readme.read_text("utf-8")
        readme.write_text(put_summary(text, comparisons), "utf-8")


def read_comparisons(folder: Path) -> list[Comparison]:
    """Read and compare all settings in which a method was tested.

    Raises:
        ValueError: there is none.
    """
    results = [read_result(folder / f"{name}.json") for name in SETTINGS]
    comparisons = [compare(r) for r in results if r is not None and _is_begun(r)]
    if not comparisons:
        raise ValueError(
            f"'{folder}' must hold a tested method, got none; run benchmark.py"
        )
    return comparisons


def put_summary(readme: str, comparisons: Sequence[Comparison]) -> str:
    """Put the summary between the README's marks."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    budget = comparisons[0].result.budget
    words = (
        f"Mean recovered gain on at most {budget.test_rows} test rows of each task; "
        f"'{MEASURED}' with {budget.samples} samples instead of its default of 64:"
    )
    lines = [BEGIN, words, "", *summarize(comparisons), END]
    return before + "\n".join(lines) + after


def _is_begun(result: SettingResult) -> bool:
    has_ends = {"base", *result.tasks} <= set(result.references)
    return has_ends and any(row.tests for row in result.rows.values())


def _is_tested(result: SettingResult, method: str) -> bool:
    return method in result.rows and bool(result.rows[method].tests)


def summarize(comparisons: Sequence[Comparison]) -> list[str]:
    """Write one line a setting: our rows against the best other method."""
    lines = [
        "| setting | best other method | recovered | default (`measured`) | difference "
        "| best Hi-Merging row | recovered | difference | others tested |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for comparison in comparisons:
        other, ours = comparison.best_other, _best_ours(comparison)
        if other is None or ours is None or ours.behind is None:
            continue
        default = _find_default(comparison)
        cells = ["", ""]
        if default is not None and default.behind is not None:
            cells = [f"{default.mean.value:.3f}", _show_signed(default.behind)]
        cells = [
            SETTINGS[comparison.result.setting].title,
            *(other.name, f"{other.mean.value:.3f}", *cells),
            *(ours.name, f"{ours.mean.value:.3f}", _show_signed(ours.behind)),
            str(_count_others(comparison)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _write_overview(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Write every row's mean recovered gain in every setting."""
    yield "Mean recovered gain of every row, the best of a setting in bold:"
    yield ""
    titles = [SETTINGS[comparison.result.setting].title for comparison in comparisons]
    yield "|  | " + " | ".join(titles) + " |"
    yield "|---|" + "---|" * len(titles)
    found = [{s.name: s.mean.value for s in c.methods} for c in comparisons]
    for name in METHODS:
        if not any(name in values for values in found):
            continue
        cells = []
        for values in found:
            cell = f"{values[name]:.3f}" if name in values else ""
            is_best = name == max(values, key=lambda n: values[n])
            cells.append(f"**{cell}**" if is_best else cell)
        yield f"| {name} | " + " | ".join(cells) + " |"


def _count_others(comparison: Comparison) -> int:
    return sum(not standing.is_ours for standing in comparison.methods)


def _find_default(comparison: Comparison) -> Standing | None:
    return next((s for s in comparison.methods if s.name == MEASURED), None)


def _best_ours(comparison: Comparison) -> Standing | None:
    return next((s for s in comparison.methods if s.is_ours), None)


def _write(
    comparisons: Sequence[Comparison], folder: Path, here: Path
) -> Iterator[str]:
    budget = comparisons[0].result.budget
    yield "# Does it merge better?"
    yield ""
    yield _verdict(comparisons)
    yield ""
    if budget.name == "quick":
        yield (
            f"**Quick run**: {budget.test_rows} test rows of each task and "
            f"{budget.trials} merges to tune a method. Leads, not results."
        )
        yield ""
    yield (
        "Recovered gain: (loss of the base - loss of the merge) / (loss of the base - "
        "loss of the expert), on the task's test rows; 1 as good as the expert, 0 as "
        "the base. Brackets: 95 % intervals over test rows. The best of several "
        "Hi-Merging rows stands against the best of several others, both picked on the "
        "test rows: with more rows one side has more tries."
    )
    yield ""
    yield from summarize(comparisons)
    yield ""
    yield from _write_overview(comparisons)
    done = {comparison.result.setting for comparison in comparisons}
    missing = [s.title for s in SETTINGS.values() if s.name not in done]
    if missing:
        yield ""
        yield f"Not run yet: {'; '.join(missing)}."
    for comparison in comparisons:
        yield ""
        yield from _write_setting(comparison, folder, here)
    yield ""
    yield from _write_method(comparisons)


def _verdict(comparisons: Sequence[Comparison]) -> str:
    """Say in which settings Hi-Merging is first, and in which it is not.

    The row that counts is the default's, and not the best of many.
    """
    first, open_, lost = [], [], []
    for comparison in comparisons:
        ours = _find_default(comparison) or _best_ours(comparison)
        if ours is None or ours.behind is None:
            continue
        title = SETTINGS[comparison.result.setting].title
        n_others = _count_others(comparison)
        words = f"{title} ({ours.name}, {_show_signed(ours.behind)}, of {n_others})"
        if ours.behind.low > 0:
            first.append(words)
        elif ours.behind.high < 0:
            lost.append(words)
        else:
            open_.append(words)
    parts = []
    if lost:
        parts.append(
            "Hi-Merging loses to the best other method in: " + "; ".join(lost) + "."
        )
    if open_:
        parts.append("The interval holds zero in: " + "; ".join(open_) + ".")
    if first:
        parts.append("Hi-Merging is first in: " + "; ".join(first) + ".")
    others = (
        _describe(
            comparisons, WHOLE_DEFAULT, "With the package's default of 64 samples"
        ),
        _describe(
            comparisons, "paper", "The paper's rules, against the best other method"
        ),
    )
    return " ".join(
        [
            *parts,
            f"In brackets: the row, which is the default '{MEASURED}' wherever that "
            "was tested, the difference of its mean recovered gain to the best other "
            "method's, and of how many others that is the best. Of each task it takes "
            f"{_tell_cost(comparisons[0].result.budget)}.",
            *filter(None, others),
        ]
    )


def _tell_cost(budget: Budget) -> str:
    """Say how much data our row sees, beside the tuning of another."""
    most_steps = max(steps for _, steps in list_courses(SLOPE_FORWARDS, FORWARDS))
    return (
        f"{budget.samples} samples, at most {FORWARDS} forward passes over half of "
        f"them and {most_steps} over the rest, besides the three whole models, where "
        f"the tuning of a method takes {budget.trials} over {budget.tuning_rows}"
    )


def _describe(comparisons: Sequence[Comparison], row: str, words: str) -> str:
    """Say how a row does against the best other method, wherever it was tested."""
    found = [
        f"{SETTINGS[comparison.result.setting].title} {_show_signed(standing.behind)}"
        for comparison in comparisons
        for standing in comparison.methods
        if standing.name == row and standing.behind is not None
    ]
    return f"{words}: {'; '.join(found)}." if found else ""


def _write_setting(comparison: Comparison, folder: Path, here: Path) -> Iterator[str]:
    result = comparison.result
    setting = SETTINGS[result.setting]
    yield f"## {setting.title[0].upper()}{setting.title[1:]}"
    yield ""
    yield "Experts: " + ", ".join(f"`{e}`" for e in setting.experts.values()) + "."
    yield ""
    plot = (folder / f"{result.setting}.svg").relative_to(here).as_posix()
    yield f"![Mean recovered gain of every method]({plot})"
    yield ""
    tasks = result.tasks
    heads = [f"`{t}` {_headline(comparison, t)}" for t in tasks]
    gains = [f"`{t}` recovered" for t in tasks]
    columns = [
        *("", *heads, *gains, "mean recovered", "to the best other"),
        *("Avg Impr.", "mean rank", "general text"),
    ]
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for standing in (*comparison.references, *comparison.methods):
        name = standing.name
        if standing in comparison.references:
            name = {"base": "*base*", "mixed": "*trained on all*"}.get(
                name, f"*expert* `{name}`"
            )
        elif standing.is_ours:
            name = f"**{name}**"
        seeds = f" (mean of {standing.n_seeds} seeds)" if standing.n_seeds > 1 else ""
        cells = [
            name + seeds,
            *(f"{standing.scores[t][comparison.headline[t]]:.3f}" for t in tasks),
            *(_show(standing.recovered[t]) for t in tasks),
            _show(standing.mean),
            "" if standing.behind is None else _show_signed(standing.behind),
            "" if standing.improvement is None else f"{standing.improvement:+.0%}",
            "" if standing.rank is None else f"{standing.rank:.1f}",
            f"{standing.forgotten.value:+.3f}",
        ]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield (
        "Avg Impr.: mean over the tasks of the relative change of the first columns "
        "against the base. Mean rank: among the methods, by the first columns. General "
        "text: loss above the base's on paragraphs about no medicine, nats per token."
    )
    for task, share in result.trivial.items():
        yield ""
        yield (
            f"`{task}`: chance is 0.25; taking the option that is the commonest answer "
            f"in the calibration file scores {share:.3f}."
        )
    rows = list_rows(setting, is_quick=result.budget.name == "quick")
    missing = [name for name in rows if not _is_tested(result, name)]
    if missing:
        yield ""
        yield f"Not run yet in this setting: {'; '.join(missing)}."
    if any(standing.generated for standing in comparison.methods):
        yield ""
        yield from _write_generated(comparison)
    yield ""
    yield from _write_analyses(result, folder)
    if _is_tested(result, MEASURED):
        plot = (folder / f"{result.setting}-{MEASURED}.svg").relative_to(here)
        yield ""
        yield f"What '{MEASURED}' chose, over the layers:"
        yield ""
        yield f"![Factors and slopes over the layers]({plot.as_posix()})"


def _headline(comparison: Comparison, task: str) -> str:
    return {"accuracy": "accuracy ↑", "loss": "loss ↓"}[comparison.headline[task]]


def _write_generated(comparison: Comparison) -> Iterator[str]:
    """Write the metrics of generated answers."""
    copying = comparison.result.copying
    pairs = [(t, m) for t, metrics in copying.items() for m in metrics]
    words = {"exact_match": "exact match", "rougeL": "ROUGE-L"}
    yield (
        f"Answers generated, by the likeliest token, to the first "
        f"{comparison.result.budget.generated_rows} test rows with free answers:"
    )
    yield ""
    yield "|  | " + " | ".join(f"`{t}` {words[m]} ↑" for t, m in pairs) + " |"
    yield "|---|" + "---|" * len(pairs)
    lines = {"*the question itself*": copying} | {
        s.name: s.generated
        for s in (*comparison.references, *comparison.methods)
        if s.generated
    }
    for name, means in lines.items():
        cells = [f"{means[t][m]:.{2 if m == 'exact_match' else 1}f}" for t, m in pairs]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _write_analyses(result: SettingResult, folder: Path) -> Iterator[str]:
    """Write what the analyses did, and what the guard would have done."""
    rows = [row for row in result.rows.values() if row.analysis is not None]
    if not rows:
        return
    heads = ("analysis", "what was done", "judged", "guard would act", "forwards")
    yield "| " + " | ".join((*heads, "seconds")) + " |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        analysis = row.analysis
        assert analysis is not None
        difference = analysis.guard_difference
        judged = "" if difference is None else f"{difference:+.3f}"
        acts = "" if difference is None else ("yes" if difference < 0 else "no")
        plan = read_plan(plan_path(folder, result.setting, row.name))
        forwards, seconds = f"{analysis.forwards or _count_forwards(plan):.0f}", ""
        if analysis.decided_anew:
            forwards = "none of its own"
        else:
            seconds = f"{analysis.seconds:.0f}"
        yield (
            f"| {row.name} | {_tell_treatments(result, plan)} | {judged} "
            f"| {acts} | {forwards} | {seconds} |"
        )
    yield ""
    yield (
        "What was done: in how many layers, to the weight where it was measured, as "
        "least, mean and largest factor. Judged: treated minus plain "
        "merge on the judging half of the calibration rows, in shares of the gain on "
        "all of them; where treatments are measured no step is taken that makes it "
        "worse, so it flatters there. The guard reports here and never acts. Forwards: "
        "full forward passes of a task's choosing rows that the analysis stands for, "
        "with one pass back as two."
    )
    plans = {
        row.name: read_plan(plan_path(folder, result.setting, row.name)) for row in rows
    }
    by_rules = {name: p for name, p in plans.items() if p.tasks[0].layers}
    if by_rules:
        yield ""
        yield from _write_signs(by_rules)


def _write_signs(plans: Mapping[str, Plan]) -> Iterator[str]:
    """Write what the rules' decisions rest on: signs of conflicts, and their noise."""
    yield (
        "| rules | layers where all tasks lose | some | none | signs within two "
        "standard errors of 0 |"
    )
    yield "|---|---|---|---|---|"
    for name, plan in plans.items():
        of_layers = list(zip(*(task.layers for task in plan.tasks), strict=True))
        losing = [sum(score.conflict > 0 for score in layer) for layer in of_layers]
        n_tasks = len(plan.tasks)
        n_all = sum(n == n_tasks for n in losing)
        n_none = sum(n == 0 for n in losing)
        scores = [score for layer in of_layers for score in layer]
        unclear = sum(abs(s.conflict) < 2 * s.conflict_se for s in scores)
        yield (
            f"| {name} | {n_all} | {len(losing) - n_all - n_none} | {n_none} "
            f"| {unclear} of {len(scores)} |"
        )
    yield ""
    yield (
        "A task loses in a layer whose contribution to it is less in the merge than "
        "alone. The rules treat every sign as a fact; `confidence` asks for that many "
        "standard errors."
    )


def _count_forwards(plan: Plan) -> float:
    """Count the full forward passes that the rules' rounds stand for, at most.

    Layer l runs 4 l + 7 times in each.
    """
    calls = sum(4 * layer + 7 for layer in range(plan.n_layers))
    return int(plan.settings["rounds"] or 1) * calls / plan.n_layers


def _tell_treatments(result: SettingResult, plan: Plan) -> str:
    """Say in how many layers each expert was treated, or by which factors."""
    words = []
    for expert in SETTINGS[result.setting].experts.values():
        of_expert = [t for t in plan.treatments if Path(t.model).name == expert]
        counts = Counter(t.action for t in of_expert)
        done = [
            f"{counts[action]} {verb}"
            for action, verb in (("drop", "dropped"), ("shrink", "shrunk"))
            if counts[action]
        ]
        if counts["set"]:
            factors = [t.weight_factor for t in of_expert]
            mean = sum(factors) / len(factors)
            done.append(f"× {min(factors):.2f}, {mean:.2f}, {max(factors):.2f}")
        words.append(f"`{expert}` {', '.join(done) or 'kept'}")
    return f"{'; '.join(words)}; of {plan.n_layers} layers"


def _write_method(comparisons: Sequence[Comparison]) -> Iterator[str]:
    result = comparisons[0].result
    budget = result.budget
    yield "## How it was done"
    yield ""
    yield (
        "Three splits by group: experts saw training rows, every choice was made on "
        "calibration rows, and each chosen merge was tested, once, on at most "
        f"{budget.test_rows} test rows of each task. A question in two splits is "
        "refused when the data is made, and a test row that calibrates, by its hash, "
        "before anything is merged. Each method with numbers to choose had "
        f"{budget.trials} merges, proposed by a Gaussian process from the middle of "
        f"the ranges below and scored by mean recovered gain on {budget.tuning_rows} "
        "calibration rows of each task; every expert has a weight of its own. Layers "
        f"were measured on {budget.samples} calibration rows of each task, half of "
        "which judge, where a row's name says nothing else."
    )
    yield ""
    yield "| method | what was chosen | trials | seconds of a merge | tuned values |"
    yield "|---|---|---|---|---|"
    for name, method in METHODS.items():
        tested = [
            (c.result, c.result.rows[name])
            for c in comparisons
            if name in c.result.rows and c.result.rows[name].tests
        ]
        if not tested:
            continue
        ranges = dict(method.tuned)
        if method.weight is not None:
            ranges = {"weight": method.weight, **ranges}
        chosen = ", ".join(
            f"{n} {low:g} to {high:g}" for n, (low, high) in ranges.items()
        )
        if method.start is not None:
            chosen = f"as in '{method.start}'"
        merges = [t.merge_seconds for _, row in tested for t in row.trials]
        yield (
            f"| {name}{f' ({method.note})' if method.note else ''} | {chosen} "
            f"| {max(len(row.trials) for _, row in tested) or ''} "
            f"| {f'{sum(merges) / len(merges):.0f}' if merges else ''} "
            f"| {'; '.join(_show_values(r.setting, row) for r, row in tested)} |"
        )
    n_rows = sum(1 for c in comparisons for s in c.methods if s.is_ours)
    yield ""
    yield (
        f"{n_rows} Hi-Merging rows and "
        f"{sum(len(c.methods) for c in comparisons) - n_rows} others are on this page; "
        "all that this benchmark has tested are. They took "
        f"{sum(_count_seconds(c.result) for c in comparisons) / 3600:.1f} hours of one "
        "core together."
    )
    yield ""
    yield "### What these numbers do not show"
    yield ""
    yield from (
        "- One base model of 135 million parameters, one training seed for each "
        "expert, experts of rank 8: others may rank the methods otherwise.",
        "- Intervals are over test rows alone: neither over training seeds nor over "
        "calibration rows.",
        "- The tasks are questions made from ICD and HPO terms, not exams.",
        "- Other methods were tuned within the ranges above; wider ones, or more "
        "merges, may serve them better.",
        "- Rules and measured rows that start from tuned values had those merges on "
        "top of their own forward passes.",
    )
    yield ""
    yield "### Made by"
    yield ""
    yield f"`{result.command}` on {result.machine}; " + ", ".join(
        f"{name} {number}" for name, number in result.versions.items()
    )


def _count_seconds(result: SettingResult) -> float:
    """Sum what trials, analyses and tests took, in seconds of one core."""
    tests = [*result.references.values()]
    seconds = 0.0
    for row in result.rows.values():
        tests += row.tests
        seconds += sum(t.merge_seconds + t.score_seconds for t in row.trials)
        seconds += 0 if row.analysis is None else row.analysis.seconds
    return seconds + sum(test.seconds for test in tests)


def _show_values(setting: str, row: MethodResult) -> str:
    if not row.trials:
        return setting
    values = ", ".join(
        f"{n.removeprefix('weight ')} {v:.2f}" for n, v in row.values.items()
    )
    return f"{setting}: {values}"


def _show(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _show_signed(estimate: Estimate) -> str:
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def draw(comparison: Comparison, path: Path) -> None:
    """Draw every method's mean recovered gain, with its interval."""
    standings = list(reversed(comparison.methods))
    with mpl.rc_context({"svg.hashsalt": "benchmark", "font.size": 9}):
        figure = Figure(figsize=(7, 0.6 + 0.24 * len(standings)), layout="constrained")
        axes = figure.subplots()
        for y, standing in enumerate(standings):
            colour = OURS if standing.is_ours else OTHER
            mean = standing.mean
            axes.plot([mean.low, mean.high], [y, y], color=colour, linewidth=1.5)
            axes.plot([mean.value], [y], "o", color=colour, markersize=5)
        mixed = next((s for s in comparison.references if s.name == "mixed"), None)
        if mixed is not None:
            axes.axvline(mixed.mean.value, color="#d55e00", linewidth=1, linestyle=":")
            axes.text(
                mixed.mean.value, len(standings) - 0.4, "trained on all", ha="center"
            )
        axes.axvline(1, color="black", linewidth=0.8)
        # A merge worse than the base would squeeze the rest.
        axes.set_xlim(left=max(-0.2, min(s.mean.low for s in standings) - 0.02))
        axes.set_yticks(range(len(standings)), [s.name for s in standings])
        axes.set_xlabel(
            "mean recovered gain (1: every expert on its own task); "
            "blue: Hi-Merging, grey: other methods"
        )
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
