"""A plan as a plot: what was measured and done over the layers.

Invariant: looks are chosen as in ``panels``; equal plans give equal plots.
"""

import io
import logging
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergekit_himerging.files import write_bytes
from mergekit_himerging.names import shorten_names
from mergekit_himerging.plan import Plan
from mergekit_himerging.scores import TaskReport
from mergekit_himerging.views.factors import is_measured, list_slopes, list_weights
from mergekit_himerging.views.panels import (
    BLUE,
    GREEN,
    ORANGE,
    PLACES,
    PURPLE,
    SKY,
    VERMILION,
    draw_factors,
    draw_gradients,
    draw_slopes,
    mark_layers,
    set_title,
    span_factors,
    wrap_name,
)
from mergekit_himerging.views.words import DONE, UNITS, list_names

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

LOG = logging.getLogger(__name__)

ALONE: Mapping[str, Any] = {"color": BLUE, "marker": "o", "linestyle": "-"}
MERGED: Mapping[str, Any] = {"color": ORANGE, "marker": "s", "linestyle": "--"}
CONFLICT: Mapping[str, Any] = {"color": GREEN, "marker": "D", "linestyle": "none"}
TREATED: Mapping[str, Mapping[str, Any]] = {
    "keep": {"facecolor": "white", "hatch": ""},
    "shrink": {"facecolor": SKY, "hatch": "///"},
    "drop": {"facecolor": VERMILION, "hatch": "xxx"},
    "set": {"facecolor": PURPLE, "hatch": "---"},
}

FORMATS = (".png", ".svg")


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw what was measured and done over the layers.

    For each task contributions alone and merged and, beside them, conflicts with a bar
    of one standard error on each side, in the unit of the task's metric; for each model
    the factor on its weight and, where treatments were chosen by measurement, the
    slopes; nuclear norms of gradients at the base and alone; below, what else was done
    with each model in each layer. Equal plans give equal bytes under one version of
    matplotlib.

    Args:
        plan: with scores or treatments; without scores only the treatments are drawn.
        path: ends in ``.png`` or ``.svg``; written whole or not at all. Text in an SVG
            stays text. Names that no installed font can show are told by a warning.

    Raises:
        ValueError: matplotlib is missing, the suffix is another, or the plan has
            neither scores nor treatments.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(
            f"plot file must end in .png or .svg, got '{path.suffix}' ('{path}')"
        )
    tasks = [task for task in plan.tasks if task.layers]
    if not tasks and not plan.treatments:
        raise ValueError(
            "plan must have scores or treatments to be drawn, got neither; "
            "merge with calibration data to measure it"
        )
    try:
        from matplotlib import style
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib, which is not installed; "
            "run: pip install 'mergekit-himerging[plots]'"
        ) from error

    labels = shorten_names(list_names(plan), all_names=True)
    models = dict.fromkeys([*plan.models, *(task.model for task in plan.tasks)])
    shown = [labels[model] for model in models]
    fonts = _pick_fonts(shown, is_embedded=suffix == ".png")
    settings: dict[str, Any] = {
        "font.family": fonts,
        "font.size": 9,
        "text.parse_math": False,  # a name may hold dollar signs
        "svg.fonttype": "none",
        "svg.hashsalt": "mergekit-himerging",
    }
    with warnings.catch_warnings(), style.context(["default", settings]):
        # Said once, by `_pick_fonts`.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        content = _draw(plan, tasks, labels, suffix)
    write_bytes(path, content)


def _draw(
    plan: Plan, tasks: list[TaskReport], labels: Mapping[str, str], suffix: str
) -> bytes:
    from matplotlib.figure import Figure

    graded = [task for task in plan.tasks if task.gradients]
    weighted = list(plan.models) if _has_factors(plan) else []
    has_strip = _needs_strip(plan)
    heights = [2.4] * len(tasks)
    heights += [2.0 if is_measured(plan) else 1.4] * len(weighted)
    heights += [0.7 + 0.3 * len(plan.models)] * has_strip + [2.6] * len(graded)
    width = min(24.0, max(9.0, 4.0 + 0.15 * plan.n_layers))
    figure = Figure((width, sum(heights) + 0.8), dpi=150, layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    names = {model: wrap_name(label, 36) for model, label in labels.items()}
    rows = iter(range(len(heights)))
    for number, task in enumerate(tasks, 1):
        row = next(rows)
        left, right = (figure.add_subplot(grid[row, side]) for side in (0, 1))
        _draw_contributions(left, task, names[task.model])
        _draw_conflicts(right, task, names[task.model], number)
    for model in weighted:
        _draw_model(figure, grid, next(rows), plan, model, names)
    patches: list[Artist] = []
    if has_strip:
        strip = figure.add_subplot(grid[next(rows), :])
        patches = _draw_treatments(strip, plan, labels)
    handles = _collect_handles(figure.axes)
    figure.legend(handles=[*handles, *patches], loc="outside upper center", ncols=4)
    of_gradients = []
    for task in graded:
        row = next(rows)
        for side, place in enumerate(PLACES):
            axes = figure.add_subplot(grid[row, side])
            draw_gradients(axes, task, place, names[task.model])
            of_gradients.append(axes)
    if graded:
        handles = _collect_handles(of_gradients)
        figure.legend(handles=handles, loc="outside lower center", ncols=7)
    for axes in figure.axes:
        mark_layers(axes, plan.n_layers)
    _fix_layout(figure)
    buffer = io.BytesIO()
    is_svg = suffix == ".svg"
    metadata = {"Date": None, "Creator": None} if is_svg else {"Software": None}
    figure.savefig(buffer, format=suffix[1:], metadata=metadata)
    return buffer.getvalue()


def _fix_layout(figure: "Figure") -> None:
    """Lay out, and round where the axes lie: the solver's last bits vary by run.

    The names of clip paths are hashes of these bits.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = axes.get_position().bounds
        axes.set_position(
            (round(left, 6), round(bottom, 6), round(width, 6), round(height, 6))
        )


def _draw_model(
    figure: "Figure",
    grid: "GridSpec",
    row: int,
    plan: Plan,
    model: str,
    names: Mapping[str, str],
) -> None:
    """Draw one model's factors, on the scale of all models', and beside them slopes."""
    has_slopes = is_measured(plan)
    left = figure.add_subplot(grid[row, 0] if has_slopes else grid[row, :])
    draw_factors(left, list_weights(plan, model), names[model])
    every = (list_weights(plan, other) for other in plan.models)
    left.set_ylim(span_factors(w for weights in every for w in weights.values()))
    if has_slopes:
        right = figure.add_subplot(grid[row, 1])
        draw_slopes(right, *list_slopes(plan, model), names[model])


def _collect_handles(panels: Iterable["Axes"]) -> "list[Artist]":
    """Collect the entries of a legend, each label once."""
    handles: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return list(handles.values())


def _has_factors(plan: Plan) -> bool:
    """Say whether some weight is changed, or could have been."""
    return is_measured(plan) or any(t.action != "keep" for t in plan.treatments)


def _needs_strip(plan: Plan) -> bool:
    """Say whether factors on weights leave something of the treatments untold."""
    if not is_measured(plan) or (plan.guard is not None and plan.guard.acted):
        return True
    return any(
        treatment.action in ("shrink", "drop")
        or treatment.density_factor != 1
        or treatment.scale_factor != 1
        for treatment in plan.treatments
    )


def _draw_contributions(axes: "Axes", task: TaskReport, name: str) -> None:
    scores = sorted(task.layers, key=lambda scores: scores.layer)
    layers = [s.layer for s in scores]
    alone = [s.contribution_single for s in scores]
    merged = [s.contribution_merged for s in scores]
    axes.plot(layers, alone, label="alone", markersize=4, **ALONE)
    axes.plot(layers, merged, label="merged", markersize=4, **MERGED)
    set_title(axes, f"{name}: contribution", UNITS[task.metric])


def _draw_conflicts(axes: "Axes", task: TaskReport, name: str, number: int) -> None:
    label = "conflict ± 1 standard error"
    container = axes.errorbar(
        [s.layer for s in task.layers],
        [s.conflict for s in task.layers],
        # Unknown with one sample: a bar of no length would claim certainty.
        yerr=[s.conflict_se for s in task.layers] if task.n_samples > 1 else None,
        label=label,
        markersize=4,
        **CONFLICT,
    )
    for bars in container[2]:
        bars.set_gid(f"standard-errors-{number}")
    set_title(axes, f"{name}: conflict", UNITS[task.metric])


def _draw_treatments(
    axes: "Axes", plan: Plan, labels: Mapping[str, str]
) -> "list[Artist]":
    """Draw a strip for each model, the first on top; kept layers stay white."""
    from matplotlib.patches import Patch, Rectangle

    for treatment in plan.treatments:
        if treatment.action != "keep":
            corner = (treatment.layer - 0.5, plan.models.index(treatment.model) - 0.4)
            look = TREATED[treatment.action]
            axes.add_patch(
                Rectangle(corner, 1, 0.8, edgecolor="black", linewidth=0.5, **look)
            )
    names = [wrap_name(labels[model], 28) for model in plan.models]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    put_back = plan.guard is not None and plan.guard.acted
    title = "treatment" + (": the guard put the plain merge back" if put_back else "")
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel("layer number")
    shown = {"keep"} | {treatment.action for treatment in plan.treatments}
    return [
        Patch(edgecolor="black", linewidth=0.5, label=DONE[action], **look)
        for action, look in TREATED.items()
        if action in shown
    ]


def _pick_fonts(texts: Iterable[str], *, is_embedded: bool) -> list[str]:
    """Find fonts for all characters; warn of those that no installed font has.

    Args:
        texts: what is to be shown.
        is_embedded: whether this machine's fonts are drawn; else the reader's are, and
            nothing is warned of.

    Returns:
        Font families; each character is taken from the first that has it.
    """
    from matplotlib.font_manager import findfont, fontManager
    from matplotlib.ft2font import FT2Font

    def find_missing(file: str, wanted: set[str]) -> set[str]:
        try:
            font = FT2Font(file)
        except (OSError, RuntimeError):  # a broken or foreign font file
            return wanted
        return {c for c in wanted if not font.get_char_index(ord(c))}

    fonts = ["DejaVu Sans"]  # matplotlib brings it along
    missing = find_missing(findfont(fonts[0]), set("".join(texts)))
    for entry in sorted(
        fontManager.ttflist, key=lambda entry: (entry.name, entry.fname)
    ):
        if not missing:
            break
        if entry.style != "normal" or entry.name.startswith("Last Resort"):
            continue  # the latter has a box for every character
        rest = find_missing(entry.fname, missing)
        if rest < missing:
            fonts.append(entry.name)
            missing = rest
    if missing and is_embedded:
        LOG.warning(
            "no installed font has the characters %s, so the plot shows boxes; install "
            "one that does, such as Noto Sans CJK, or write the plot as .svg",
            "".join(sorted(missing)),
        )
    return [*fonts, "sans-serif"]
