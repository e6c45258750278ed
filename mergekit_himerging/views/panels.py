"""Panels of a plot that hold for any plan: factors, slopes, gradients.

Invariant: the colours are told apart in colour blindness (Okabe and Ito) and never say
anything that a place, a marker, a line style or a hatch does not say too.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

from rich.cells import cell_len, chop_cells

from mergekit_himerging.scores import TaskReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
SKY, ORANGE, PURPLE = "#56B4E9", "#E69F00", "#CC79A7"

Place = Literal["base", "single"]
PLACES: tuple[Place, ...] = ("base", "single")
"""Where gradients are taken: at the base, and at the task's own model."""

RAISED: Mapping[str, Any] = {"facecolor": BLUE}
LOWERED: Mapping[str, Any] = {"facecolor": ORANGE, "hatch": "////"}
OWN: Mapping[str, Any] = {"color": BLUE, "marker": "o", "linestyle": "-"}
OTHERS: Mapping[str, Any] = {"color": VERMILION, "marker": "s", "linestyle": "--"}

MATRIX_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, "black")
MATRIX_MARKERS = "osD^vPX*<>"  # not as many as colours: pairs come back late


def draw_factors(axes: "Axes", weights: Mapping[int, float], name: str) -> None:
    """Draw one model's effective weight by layer as bars that stand or hang at 1.

    Args:
        axes: to draw on.
        weights: by layer, as factors on what the recipe says.
        name: of the model.
    """
    raised = {layer: weight for layer, weight in weights.items() if weight > 1}
    lowered = {layer: weight for layer, weight in weights.items() if weight < 1}
    for label, look, drawn in (
        ("factor above 1", RAISED, raised),
        ("factor below 1", LOWERED, lowered),
    ):
        if drawn:
            axes.bar(
                list(drawn),
                [weight - 1 for weight in drawn.values()],
                bottom=1,
                width=0.8,
                edgecolor="black",
                linewidth=0.5,
                label=label,
                **look,
            )
    set_title(axes, f"{name}: factor on the weight", "factor", at=1)


def draw_slopes(
    axes: "Axes", own: Mapping[int, float], others: Mapping[int, float], name: str
) -> None:
    """Draw how tasks' scores change with one model's factor, by layer.

    Args:
        axes: to draw on.
        own, others: slopes by layer of its own task, and the mean of the others'.
        name: of the model.
    """
    for label, look, slopes in (
        ("slope of its own task", OWN, own),
        ("mean slope of other tasks", OTHERS, others),
    ):
        if slopes:
            layers = sorted(slopes)
            values = [slopes[layer] for layer in layers]
            axes.plot(layers, values, label=label, markersize=4, **look)
    set_title(axes, f"{name}: slopes at the plain merge", "nats per token")


def draw_gradients(axes: "Axes", task: TaskReport, place: Place, name: str) -> None:
    """Draw the nuclear norms of one task's gradients, a line for each matrix.

    Args:
        axes: to draw on.
        task: with gradients.
        place: which of them.
        name: of the model.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    looks = zip(cycle(MATRIX_COLOURS), cycle(MATRIX_MARKERS), strict=False)
    every: list[float] = []
    for found, (colour, marker) in zip(task.gradients, looks, strict=False):
        norms = found.nuclear_base if place == "base" else found.nuclear_single
        axes.plot(
            found.layers,
            norms,
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1,
            label=found.matrix,
        )
        every += [*found.nuclear_base, *found.nuclear_single]
    where = "base" if place == "base" else "alone"
    set_title(axes, f"{name}: gradients, {where}", "nuclear norm", at=None)
    positive = [norm for norm in every if norm > 0]
    if positive:
        low, high = min(positive), max(positive)
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(low / 1.3, high * 1.3)  # the same beside it
        subs = (1.0,) if high > 100 * low else (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda norm, _: f"{norm:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def span_factors(weights: Iterable[float]) -> tuple[float, float]:
    """Find limits that show 0, 1 and every factor of all models."""
    every = [0.0, 1.0, *weights]
    margin = 0.06 * (max(every) - min(every))
    return min(every) - margin, max(every) + margin


def set_title(axes: "Axes", title: str, unit: str, *, at: float | None = 0) -> None:
    """Name a panel and its axes, and draw a line at what the values are held against.

    Args:
        axes: of the panel.
        title: above it, at its left.
        unit: of its values.
        at: the line's value; None draws none.
    """
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel("layer number")
    axes.set_ylabel(unit)
    if at is not None:
        axes.axhline(at, color="black", linewidth=0.8)


def mark_layers(axes: "Axes", n_layers: int) -> None:
    """Number the layers alike in every panel."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.6, n_layers - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def wrap_name(name: str, columns: int) -> str:
    """Break a name into lines; Chinese letters take two columns each."""
    if cell_len(name) == len(name):
        return textwrap.fill(name, columns)
    lines: Sequence[str] = chop_cells(name, columns)
    return "\n".join(lines)
