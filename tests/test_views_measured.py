"""Views of plans whose treatments were chosen by measurement, and of gradients."""

import json
import re
from typing import Any

import pytest
from matplotlib.figure import Figure
from test_views import (
    EN,
    HOSTILE,
    ZH,
    draw_svg,
    find_table,
    make_bare_plan,
    make_plan,
    make_task,
    parse,
    show,
    squeeze,
    visible,
)

from mergekit_himerging.plan import Plan
from mergekit_himerging.scores import MatrixGradients, Slope, StepReport
from mergekit_himerging.views.factors import (
    describe_choice,
    join_layers,
    list_factors,
    list_slopes,
    list_steps,
    list_weights,
)
from mergekit_himerging.views.markdown import write_card_section, write_report
from mergekit_himerging.views.panels import (
    draw_factors,
    draw_gradients,
    draw_slopes,
    span_factors,
    wrap_name,
)
from mergekit_himerging.views.plot import draw_plan
from mergekit_himerging.views.table import plan_as_json

FACTORS = {EN: (1.5, 1.5, 0.25), ZH: (1.0, 1.0, 2.0)}
"""By model, in each of three layers."""

SLOPES = {
    EN: {EN: (0.3, 0.2, -0.1), ZH: (-0.01, 0.02, 0.0)},
    ZH: {EN: (-0.04, 0.0, 0.05), ZH: (0.5, 0.25, 0.125)},
}
"""By task, then by model, in each layer."""


def make_gradients(matrix: str, by: float) -> MatrixGradients:
    return MatrixGradients(
        matrix=matrix,
        layers=(0, 1, 2),
        frobenius_base=(by, by, by),
        nuclear_base=(by, 4 * by, 2 * by),
        frobenius_single=(0.1, 0.1, 0.1),
        nuclear_single=(0.5, 0.25, 0.5),
    )


def make_step(*, taken: bool, forwards: int) -> StepReport:
    return StepReport(
        objective=0.9,
        improvement=0.1,
        improvement_se=0.01,
        radius=0.5,
        taken=taken,
        forwards=forwards,
    )


def make_measured(models: tuple[str, str] = (EN, ZH), **changes: Any) -> Plan:
    """Make a plan of two tasks, chosen by measurement, with gradients."""
    spelled = dict(zip((EN, ZH), models, strict=True))
    tasks = [
        make_task(spelled[name], metric, n_layers=0).model_copy(
            update={
                "slopes": tuple(
                    Slope(layer=layer, model=spelled[model], slope=slope)
                    for model, slopes in SLOPES[name].items()
                    for layer, slope in enumerate(slopes)
                ),
                "gradients": (make_gradients("q_proj", 1), make_gradients("c", 10)),
            }
        )
        for name, metric in ((EN, "loss"), (ZH, "accuracy"))
    ]
    treatments = [
        {
            "layer": layer,
            "model": spelled[model],
            "action": "keep" if factor == 1 else "set",
            "weight_factor": factor,
            "reason": "slope +0.1 of the gain at the plain merge; 2 of 3 steps taken",
        }
        for model, factors in FACTORS.items()
        for layer, factor in enumerate(factors)
    ]
    return make_plan(
        models=models,
        **{
            "tasks": tasks,
            "treatments": treatments,
            "order": (),
            "steps": [
                make_step(taken=True, forwards=5),
                make_step(taken=False, forwards=10),
                make_step(taken=True, forwards=11),
            ],
            "gradient_forwards": 8,
            **changes,
        },
    )


def put_back() -> Plan:
    """Make a plan whose steps the guard refused."""
    plan = make_measured()
    assert plan.guard is not None
    return make_measured(
        guard=plan.guard.model_copy(update={"acted": True}),
        treatments=[
            {"layer": 0, "model": EN, "action": "keep", "reason": "guard: was 1.5"}
        ],
    )


# Words


@pytest.mark.parametrize(
    ("layers", "text"),
    [([], ""), ([4], "4"), ([0, 1], "0-1"), ([0, 2, 3, 4, 9], "0, 2-4, 9")],
)
def test_runs_of_layers_are_joined(layers, text):
    assert join_layers(layers) == text


def test_choice_is_told_in_plain_words():
    labels = {EN: "english", ZH: "zh"}
    gains = "80.0% before and 90.0% after"
    assert describe_choice(make_measured(), labels) == {
        "steps": "2 of 3 steps taken, in 11 forward passes over the choosing samples; "
        "8 more for the gradients",
        "largest factor": "2 (zh in layer 2)",
        "smallest factor": "0.25 (english in layer 2)",
        "recovered gain, choosing": f"english {gains}; zh {gains}",
        "recovered gain, judging": f"english {gains}; zh {gains}",
    }
    assert describe_choice(make_plan(), labels) == {}


def test_factor_that_stands_in_several_places_names_them_all():
    treatments = [
        {"layer": layer, "model": model, "action": "set", "weight_factor": 2}
        for layer, model in ((0, EN), (1, EN), (2, ZH))
    ]
    facts = describe_choice(make_measured(treatments=treatments), {EN: "a", ZH: "b"})
    assert facts["largest factor"] == "2 (a in layers 0-1; b in layer 2)"
    assert facts["smallest factor"] == "1 (a in layer 2; b in layers 0-1)"


def test_choice_without_steps_says_so():
    plan = make_measured(steps=(), treatments=(), gradient_forwards=0)
    facts = describe_choice(plan, {EN: "a", ZH: "b"})
    assert facts["steps"] == (
        "none was tried, since no factor that may move raises the objective"
    )
    assert facts["factors"] == "1 everywhere, so this is the plain merge"
    assert "largest factor" not in facts


def test_gain_of_a_refused_choice_is_told_as_such():
    facts = describe_choice(put_back(), {EN: "a", ZH: "b"})
    refused = "90.0% in the merge that the guard refused"
    assert facts["recovered gain, judging"].count(refused) == 2
    assert facts["factors"].startswith("1 everywhere")


def test_layers_with_equal_factors_are_one_row():
    assert list_factors(make_measured()) == [
        ("0-1", ["1.5", "1"]),
        ("2", ["0.25", "2"]),
    ]


def test_treatments_that_change_more_than_the_weight_are_told_whole():
    treatments = [
        {"layer": 0, "model": EN, "action": "drop"},
        {"layer": 2, "model": ZH, "action": "shrink", "scale_factor": 0.5},
    ]
    rows = list_factors(make_measured(treatments=treatments))
    shrunk = "shrink to 1 of density and 0.5 of scale"
    assert rows == [("0", ["0", "1"]), ("1", ["1", "1"]), ("2", ["1", shrunk])]


def test_rules_give_effective_weights_too():
    # Shrunk to 0.75 of its scale in layer 0; dropped in layer 2.
    assert list_weights(make_plan(), EN) == {0: 0.75, 2: 1.0}
    assert list_weights(make_plan(), ZH) == {0: 1.0, 2: 0.0}


def test_slopes_of_other_tasks_are_averaged():
    third = make_task("c", "loss", n_layers=0).model_copy(
        update={"slopes": (Slope(layer=0, model=EN, slope=0.1),)}
    )
    plan = make_measured(tasks=[*make_measured().tasks, third])
    own, others = list_slopes(plan, EN)
    assert own == dict(enumerate(SLOPES[EN][EN]))
    assert others == pytest.approx({0: (-0.04 + 0.1) / 2, 1: 0.0, 2: 0.05})


def test_steps_are_told_with_their_floors_and_cost():
    missed = make_step(taken=False, forwards=10).model_copy(
        update={"shortfall": 0.25, "breaks_floor": True}
    )
    taken = make_step(taken=True, forwards=5)
    taken = taken.model_copy(update={"moves": "models", "improvement_apart": -0.05})
    mending = make_step(taken=True, forwards=11)
    mending = mending.model_copy(update={"mends_floor": True})
    plan = make_measured(steps=[taken, missed, mending])
    assert list_steps(plan) == [
        ["1", "models", "0.9000", "+0.1000 ± 0.0100", "-0.0500", "5", "taken"],
        [
            *("2", "layers", "0.9000", "+0.1000 ± 0.0100", "", "10"),
            "not taken, breaks a floor, "
            "floors lack 0.2500, which counts in 'better by'",
        ],
        [
            *("3", "layers", "0.9000", "+0.1000 ± 0.0100", "", "11"),
            "taken, mends a floor, which counts in 'better by'",
        ],
    ]


# Table and JSON


def test_table_shows_factors_beside_their_slopes():
    text = show(make_measured(), width=100)
    number = r"([+-]?\d+(?:\.\d+)?)"
    found = re.findall(
        rf"^ *(\d) +(\S+) +{number} +{number} +{number} *$", text, re.MULTILINE
    )
    expected = [
        (
            str(layer),
            name,
            f"{FACTORS[model][layer]:g}",
            f"{SLOPES[model][model][layer]:+.4f}",
            f"{SLOPES[other][model][layer]:+.4f}",
        )
        for layer in range(3)
        for model, other, name in ((EN, ZH, "english"), (ZH, EN, "中文专家"))
    ]
    assert found == expected
    assert "of the gain at the plain merge" not in text
    assert "largest factor 2 (中文专家 in layer 2)" in squeeze(text)


@pytest.mark.parametrize("width", [60, 80])
def test_table_shows_gradients_at_any_usual_width(width):
    text = show(make_measured(), width=width)
    assert "…" not in text
    # Base (1, 4, 2): mean 7/3, differences 3 and 2; alone (0.5, 0.25, 0.5).
    assert re.search(
        r"english +q_proj +2\.33 +0\.417 +2\.5 +0\.25 *$", text, re.MULTILINE
    )
    assert re.search(r"english +c +23\.3 +0\.417 +25 +0\.25 *$", text, re.MULTILINE)


def test_table_says_what_the_guard_refused():
    assert "layer 0 english: guard: was 1.5" in squeeze(show(put_back()))


def test_json_sums_up_choice_and_gradients():
    plan = make_measured()
    content = json.loads(plan_as_json(plan))
    assert Plan.model_validate(content["plan"]) == plan
    assert content["summary"]["measurement"] == {
        "steps": 3,
        "steps_taken": 2,
        "forwards": 11,
        "gradient_forwards": 8,
        "largest": {"factor": 2.0, "layers": {ZH: [2]}},
        "smallest": {"factor": 0.25, "layers": {EN: [2]}},
    }
    differences = {
        "q_proj": {"base": 2.5, "alone": 0.25},
        "c": {"base": 25.0, "alone": 0.25},
    }
    assert content["summary"]["gradient_differences"] == {
        EN: differences,
        ZH: differences,
    }


# Markdown


def test_report_has_one_row_for_layers_with_equal_factors():
    report = write_report(make_measured(), recipe=None, plot=None)
    expected = [
        {"Layers": "0-1", "english": "1.5", ZH: "1"},
        {"Layers": "2", "english": "0.25", ZH: "2"},
    ]
    assert find_table(report, "Layers", "english") == expected
    section = write_card_section(make_measured(), recipe=None)
    assert find_table(section, "Layers", "english") == expected
    assert "A contribution is" not in report


def test_report_tells_choice_and_gradients():
    report = write_report(make_measured(), recipe=None, plot=None)
    said = [visible(token) for token in parse(report) if token.type == "inline"]
    assert f"largest factor: 2 ({ZH} in layer 2)" in said
    assert "recovered gain, judging: english 80.0% before and 90.0% after" in "".join(
        said
    )
    rows = find_table(report, "Task", "Matrix")
    assert [row["Task"] for row in rows] == ["english", "english", ZH, ZH]
    assert list(rows[0].values())[1:] == ["q_proj", "2.33", "0.417", "2.5", "0.25"]


def test_report_of_other_plans_has_no_choice_and_no_gradients():
    report = write_report(make_plan(), recipe=None, plot=None)
    assert "## Choice" not in report
    assert "## Gradients" not in report


def test_card_of_a_refused_choice_has_no_factors():
    section = write_card_section(put_back(), recipe=None)
    assert "Layers |" not in section
    assert "the guard put the plain merge back" in section


def test_hostile_names_stay_text_among_factors():
    report = write_report(make_measured(models=(HOSTILE, "x")), recipe=None, plot=None)
    shown = HOSTILE.replace("\n", " ").replace("\x1b", " ")
    (row, _) = find_table(report, "Layers", shown)
    assert row == {"Layers": "0-1", shown: "1.5", "x": "1"}
    kinds = {child.type for token in parse(report) for child in token.children or []}
    assert not kinds & {"html_inline", "image", "em_open", "strong_open", "s_open"}


# Plot


def test_bars_stand_and_hang_at_factor_one():
    axes = Figure().add_subplot()
    draw_factors(axes, {0: 1.5, 1: 1.0, 2: 0.25, 5: -0.5}, "a")
    bars = {
        round(bar.get_x() + bar.get_width() / 2): (bar.get_y(), bar.get_height())
        for bar in axes.patches
    }
    assert bars == {0: (1, 0.5), 2: (1, -0.75), 5: (1, -1.5)}
    (line,) = axes.lines
    assert list(line.get_ydata()) == [1, 1]
    raised, lowered = (bars.patches[0] for bars in axes.containers)
    assert raised.get_hatch() != lowered.get_hatch()


@pytest.mark.parametrize(
    ("weights", "low", "high"), [([0.5], 0, 1), ([2.0, 1.0], 0, 2), ([-1, 3], -1, 3)]
)
def test_span_shows_zero_one_and_every_factor(weights, low, high):
    found = span_factors(weights)
    margin = 0.06 * (high - low)
    assert found == pytest.approx((low - margin, high + margin))


def test_slopes_are_drawn_as_they_are_without_those_of_no_task():
    axes = Figure().add_subplot()
    draw_slopes(axes, {2: 0.5, 0: -0.25}, {}, "a")
    own, zero = axes.lines
    assert own.get_xydata().tolist() == [[0, -0.25], [2, 0.5]]
    assert list(zero.get_ydata()) == [0, 0]


def test_gradients_have_a_line_for_each_matrix_on_one_scale():
    figure = Figure()
    left, right = figure.subplots(1, 2)
    task = make_measured().tasks[0]
    draw_gradients(left, task, "base", "a")
    draw_gradients(right, task, "single", "a")
    assert [list(line.get_ydata()) for line in left.lines] == [[1, 4, 2], [10, 40, 20]]
    assert [list(line.get_ydata()) for line in right.lines] == [[0.5, 0.25, 0.5]] * 2
    assert left.get_yscale() == "log"
    assert left.get_ylim() == right.get_ylim()
    looks = {(line.get_color(), line.get_marker()) for line in left.lines}
    assert len(looks) == 2


def test_gradients_of_nothing_are_drawn_without_a_log_scale(tmp_path):
    zeros = dict.fromkeys(
        ("frobenius_base", "nuclear_base", "frobenius_single", "nuclear_single"),
        (0.0, 0.0),
    )
    none = MatrixGradients(matrix="q", layers=(0, 2), **zeros)
    tasks = [t.model_copy(update={"gradients": (none,)}) for t in make_measured().tasks]
    texts, _ = draw_svg(make_measured(tasks=tasks), tmp_path)
    assert "english: gradients, base" in texts


def test_svg_of_a_measured_plan_says_what_its_panels_are(tmp_path):
    texts, _ = draw_svg(make_measured(), tmp_path)
    for name in ("english", "中文专家"):
        for panel in (
            *("factor on the weight", "slopes at the plain merge"),
            *("gradients, base", "gradients, alone"),
        ):
            assert f"{name}: {panel}" in texts
    assert {"factor above 1", "slope of its own task", "q_proj"} <= set(texts)
    assert "treatment" not in texts
    assert not [text for text in texts if "$" in text]


def test_svg_says_what_factors_do_not(tmp_path):
    texts, _ = draw_svg(put_back(), tmp_path)
    assert "treatment: the guard put the plain merge back" in texts
    edited = [{"layer": 0, "model": EN, "action": "set", "density_factor": 0.5}]
    texts, _ = draw_svg(make_measured(treatments=edited), tmp_path)
    assert "treatment" in texts


def test_plan_with_slopes_of_some_layers_is_shown_and_drawn(tmp_path):
    task = make_task(EN, "loss", n_layers=0).model_copy(
        update={"slopes": (Slope(layer=7, model="other", slope=1.0),)}
    )
    plan = make_measured(tasks=[task], n_layers=10**9)
    assert "recovered gain, choosing" in show(plan)
    draw_plan(plan, tmp_path / "plan.svg")


def test_names_break_where_their_letters_fill_the_columns():
    assert wrap_name("医学中文专家", 8) == "医学中文\n专家"
    assert wrap_name("base+en expert", 8) == "base+en\nexpert"


def test_plan_that_keeps_everything_has_no_factors(tmp_path):
    kept = [{"layer": 0, "model": EN, "action": "keep"}]
    texts, _ = draw_svg(make_bare_plan(treatments=kept), tmp_path)
    assert "english: factor on the weight" not in texts
