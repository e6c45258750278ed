"""Plans as tables, JSON, plots and Markdown."""

import io
import itertools
import json
import logging
import re
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from matplotlib.layout_engine import ConstrainedLayoutEngine
from rich.console import Console

from mergekit_himerging.names import shorten_names
from mergekit_himerging.plan import Plan
from mergekit_himerging.scores import LayerScores, TaskReport, WholeScores
from mergekit_himerging.views.markdown import (
    BEGIN,
    END,
    escape_markdown,
    put_section,
    write_card_section,
    write_report,
)
from mergekit_himerging.views.plot import draw_plan
from mergekit_himerging.views.table import plan_as_json, render_plan
from mergekit_himerging.views.words import summarize_plan

EN, ZH = "/home/me/models/english", "org/中文专家"
HOSTILE = (
    "a|b`c_d_*e*<img src=x>\n# [l](u) \\| ~~s~~ &amp; $m$ <!-- /hi_merging -->\x1b[31m"
)


def make_layer(layer: int, *, shift: float) -> LayerScores:
    alone, merged = 0.1234 * (layer + 1) + shift, -0.0317 * layer
    return LayerScores(
        layer=layer,
        removal_single=alone,
        addition_single=0,
        removal_merged=merged,
        addition_merged=0,
        contribution_single=alone,
        contribution_merged=merged,
        conflict=alone - merged,
        conflict_se=0.0123 + layer,
    )


def make_task(model: str, metric: str, *, n_layers: int = 3) -> TaskReport:
    scores = {
        "score_base": -2.5,
        "score_single": -1.25,
        "score_merged": -1.5,
        "score_treated": -1.375,
        "recovered_merged": 0.8,
        "recovered_treated": 0.9,
    }
    return TaskReport.model_validate(
        {
            **scores,
            "model": model,
            "metric": metric,
            "n_samples": 7,
            "calibration": f"/home/me/data/{metric}.jsonl",
            "calibration_sha256": "ab12",
            "n_tokens": 345,
            "n_targets": 67,
            "n_truncated": 8,
            "accepted_on": WholeScores(n_samples=5, **scores),
            "layers": [
                make_layer(i, shift=len(metric) / 10).model_dump()
                for i in range(n_layers)
            ],
        }
    )


def make_plan(*, models: tuple[str, str] = (EN, ZH), **changes: Any) -> Plan:
    """Make a plan of two tasks with one layer shrunk, one dropped, one untouched."""
    shrink = {"action": "shrink", "density_factor": 0.25, "scale_factor": 0.75}
    fields = {
        "schema": 1,
        "base": "org/base",
        "models": models,
        "n_layers": 3,
        "settings": {"confidence": 1.5, "max_layers": None},
        "treatments": [
            {"layer": 0, "model": models[0], "reason": "loses here", **shrink},
            {
                "layer": 2,
                "model": models[1],
                "action": "drop",
                "reason": f"less than '{models[0]}', see /root/secret/notes.txt",
            },
        ],
        "order": [2, 0, 1],
        "tasks": [make_task(models[0], "loss"), make_task(models[1], "accuracy")],
        "guard": {
            "setting": "keep_better",
            "acted": False,
            "unit": "gain",
            "difference": 0.1,
            "reason": "the treated merge is better by 0.1",
        },
        "versions": {"torch": "2.9"},
        "inputs": {models[0]: "cd34"},
    }
    return Plan.model_validate(fields | changes)


def make_bare_plan(**changes: Any) -> Plan:
    return make_plan(tasks=(), guard=None, order=(), settings={}, **changes)


def show(plan: Plan, *, width: int = 80) -> str:
    """Print a plan as into a pipe."""
    pipe = io.StringIO()
    Console(file=pipe, width=width).print(render_plan(plan))
    return pipe.getvalue()


def squeeze(text: str) -> str:
    return " ".join(text.split())


def parse(text: str) -> list[Token]:
    return MarkdownIt("gfm-like", {"linkify": False}).parse(text)


def visible(token: Token) -> str:
    """The text that a reader sees, entities and escapes resolved."""
    return "".join(child.content for child in token.children or [])


def read_tables(text: str) -> list[list[list[str]]]:
    """Tables of rows of cells, as another program reads the Markdown."""
    tables: list[list[list[str]]] = []
    tokens = parse(text)
    for before, token in itertools.pairwise(tokens):
        if before.type == "table_open":
            tables.append([])
        if token.type == "tr_open":
            tables[-1].append([])
        if before.type in ("td_open", "th_open"):
            tables[-1][-1].append(visible(token))
    return tables


def find_table(text: str, first: str, second: str) -> list[dict[str, str]]:
    """The rows of the one table whose heads begin so, by head."""
    (table,) = [t for t in read_tables(text) if t[0][:2] == [first, second]]
    return [dict(zip(table[0], row, strict=True)) for row in table[1:]]


# Table and JSON


def test_table_shows_the_numbers_of_the_plan():
    plan = make_plan()
    number = r"([+-]?\d+\.\d{4})"
    found = re.findall(
        rf"^ *(\d+) +(\S+) +{number} +{number} +{number} ± {number} +(\w+)",
        show(plan),
        re.MULTILINE,
    )
    done = {(0, EN): "shrink", (2, ZH): "drop"}
    expected = [
        (
            str(layer),
            name,
            *(f"{scores.contribution_single:.4f}", f"{scores.contribution_merged:.4f}"),
            *(f"{scores.conflict:+.4f}", f"{scores.conflict_se:.4f}"),
            done.get((layer, task.model), "keep"),
        )
        for layer in range(3)
        for task, name in zip(plan.tasks, ("english", "中文专家"), strict=True)
        for scores in [task.layers[layer]]
    ]
    # The merged contribution of layer 0 is -0.0.
    assert found == [tuple(c.replace("-0.0000", "0.0000") for c in e) for e in expected]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_table_says_all_in_words_at_any_usual_width(width):
    text = show(make_plan(), width=width)
    assert "\x1b" not in text
    assert "…" not in text
    words = squeeze(text)
    for said in (
        "345 tokens, 67 scored, 8 texts cut",
        "worst layers first 2, 0, 1",
        "2 kept, 1 shrunk, 0 dropped",
        "in nats per token or share right",
        "the treated merge is better by 0.1 (keep_better, did not act)",
        "2 of 3 layers are treated (deltas: 1 shrunk, 1 dropped)",
    ):
        assert said in words
    # Chinese letters take two columns each.
    sizes = [sum(1 + ("一" <= c <= "鿿") for c in line) for line in text.splitlines()]
    assert max(sizes) <= width


def test_table_shows_scores_of_both_sets_of_samples():
    text = squeeze(show(make_plan(), width=120))
    row = "-2.5000 -1.2500 -1.5000 -1.3750 80.0% merged, 90.0% treated"
    assert f"english 7 choosing {row}" in text
    assert f"中文专家 5 judging {row}" in text


def test_table_gives_a_reason_that_models_share_once():
    rows = [
        {"layer": 1, "model": model, "action": "keep", "reason": "no task loses"}
        for model in (EN, ZH)
    ]
    text = show(make_plan(treatments=rows))
    assert re.findall("no task loses", text) == ["no task loses"]
    assert "layer 1  english, 中文专家: no task loses" in text


def test_table_of_a_plan_without_scores_lists_the_treatments():
    text = squeeze(show(make_bare_plan()))
    assert "layer model done" in text
    assert "0 english shrink to 0.25 of density and 0.75 of scale" in text
    assert "conflict" not in text
    assert "guard none" in text


def test_table_of_a_plan_that_does_nothing_says_so():
    text = squeeze(show(make_bare_plan(treatments=(), n_layers=10**9)))
    assert "All 1000000000 layers are merged as the recipe says." in text


def test_table_takes_no_markup_and_no_control_characters_from_names():
    text = show(make_plan(models=("[red]x[/red]\x1b[31m", ":smile:")), width=120)
    assert "\x1b" not in text
    assert "red]x[" in text
    assert ":smile:" in text


def test_standard_error_of_one_sample_is_unknown():
    task = make_task(EN, "loss").model_copy(update={"n_samples": 1})
    text = show(make_plan(tasks=(task,)))
    assert len(re.findall(r"\d ± \? ", text)) == 3
    assert "± 0.01" not in text


def test_json_holds_the_plan_and_what_follows_from_it():
    plan = make_plan()
    content = json.loads(plan_as_json(plan))
    assert Plan.model_validate(content["plan"]) == plan
    shares = {"merged": 0.8, "treated": 0.9}
    assert content["summary"] == {
        "sentence": summarize_plan(plan),
        "treated_layers": [0, 2],
        "worst_layers": [2, 0, 1],
        "actions": {
            EN: {"keep": 2, "shrink": 1, "drop": 0, "set": 0},
            ZH: {"keep": 2, "shrink": 0, "drop": 1, "set": 0},
        },
        "floor_kept": {},
        "recovered_gain": {
            name: {"choosing": shares, "judging": shares} for name in (EN, ZH)
        },
        "measurement": None,
        "gradient_differences": {},
    }
    assert "中文专家" in plan_as_json(plan)


# Names


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["/a/b/c", "org/c"], ["c", "org/c"]),
        (["/a/x/c", "/a/y/c"], ["x/c", "y/c"]),
        (["/x/c", "c"], ["x/c", "c"]),
        (["/x/c", "/x/c/", "x/c"], ["x/c (2)", "x/c (3)", "x/c"]),
        (["~/m", "../n", r"C:\o\p", "file:///q/r"], ["m", "n", "p", "r"]),
        (["/a/base+/b/adapter", "org/m+~/ad"], ["base+adapter", "org/m+ad"]),
        (["./models/x", "recipes/x"], ["./models/x", "recipes/x"]),
        (["/a/x\ny\u202e", "/"], ["x y ", "/"]),
    ],
)
def test_local_names_keep_what_tells_them_apart(names, labels):
    assert shorten_names(names) == dict(zip(names, labels, strict=True))


def test_all_names_can_be_shortened():
    names = ["a/x", "b/x", "org/y"]
    labels = dict(zip(names, ["a/x", "b/x", "y"], strict=True))
    assert shorten_names(names, all_names=True) == labels


@given(st.lists(st.text(alphabet="ab/~.+ \n\\", max_size=8), max_size=6), st.booleans())
def test_labels_are_distinct_and_complete(names, all_names):
    labels = shorten_names(names, all_names=all_names)
    assert set(labels) == set(names)
    assert len(set(labels.values())) == len(labels)


# Markdown


@given(st.text(alphabet="ab\\|`*_{}[]<>()#+-.!~&:;/@$='\"1 中", max_size=14))
def test_escaped_text_reads_as_it_was(text):
    table = f"| H | I |\n| --- | --- |\n| {escape_markdown(text)} | z |"
    assert read_tables(table) == [[["H", "I"], [text.strip(), "z"]]]


def test_report_shows_the_numbers_of_the_plan():
    plan = make_plan()
    report = write_report(plan, recipe=None, plot=None)
    rows = find_table(report, "Layer", "Model")
    assert len(rows) == 6
    for row in rows:
        index = ("english", ZH).index(row["Model"])
        scores = plan.tasks[index].layers[int(row["Layer"])]
        assert float(row["Alone"]) == round(scores.contribution_single, 4)
        assert float(row["Merged"]) == round(scores.contribution_merged, 4)
        conflict = [float(part) for part in row["Conflict"].split(" ± ")]
        assert conflict == [round(scores.conflict, 4), round(scores.conflict_se, 4)]
    (data, _) = find_table(report, "Model", "Data")
    assert data["Data"] == "loss.jsonl"
    assert list(data.values())[3:] == ["7", "5", "345", "67", "8", "ab12"]
    scores = find_table(report, "Model", "Samples")
    assert [row["Samples"] for row in scores] == ["7 choosing", "5 judging"] * 2
    assert {row["Unit"] for row in scores} == {"nats per token", "share right"}
    assert {row["Recovered gain, treated"] for row in scores} == {"90.0%"}
    settings = find_table(report, "Setting", "Value")
    assert [row["Value"] for row in settings] == ["1.5", "null"]


def test_published_text_has_no_local_paths():
    recipe = yaml.safe_dump(
        {"models": [{"model": EN}, {"model": ZH}], "tokenizer": "~/private/tokens"}
    )
    section = write_card_section(make_plan(), recipe=recipe)
    for text in (write_report(make_plan(), recipe=recipe, plot=None), section):
        for private in ("/home", "/me", "models/english", "secret", "private"):
            assert private not in text
        assert "less than 'english', see notes.txt" in text
        (fence,) = [token for token in parse(text) if token.type == "fence"]
        assert yaml.safe_load(fence.content) == {
            "models": [{"model": "english"}, {"model": ZH}],
            "tokenizer": "tokens",
        }


def test_hostile_names_and_reasons_stay_text():
    treatment = {"layer": 1, "model": HOSTILE, "action": "drop", "reason": HOSTILE}
    plan = make_plan(
        models=(HOSTILE, "https://x.y/@z"),
        treatments=[treatment],
        settings={HOSTILE: HOSTILE},
        versions={HOSTILE: HOSTILE},
    )
    shown = HOSTILE.replace("\n", " ").replace("\x1b", " ")
    report = write_report(plan, recipe=None, plot=None)
    rows = find_table(report, "Layer", "Model")
    assert [row["Model"] for row in rows] == [shown, "https://x.y/@z"] * 3
    assert rows[2]["Why"] == shown
    # Outside names "/hi_merging" is taken for a path.
    other = shown.replace("/hi_merging", "hi_merging")
    assert find_table(report, "Setting", "Value") == [
        {"Setting": other, "Value": other}
    ]
    for text in (report, write_card_section(plan, recipe=None)):
        tokens = parse(text)
        kinds = {child.type for token in tokens for child in token.children or []}
        kinds |= {token.type for token in tokens}
        assert not kinds & {"html_inline", "image", "em_open", "strong_open", "s_open"}
        links = [
            child.attrs["href"]
            for token in tokens
            for child in token.children or []
            if child.type == "link_open"
        ]
        assert links == ["https://arxiv.org/abs/2506.12379"]


def test_recipe_cannot_end_its_block():
    recipe = {"chat_template": f"a\n```\n````\n{END}\n{BEGIN}\n\n# b", "中": "文"}
    text = yaml.safe_dump(recipe, allow_unicode=True)
    section = write_card_section(make_plan(), recipe=text)
    (fence,) = [token for token in parse(section) if token.type == "fence"]
    assert yaml.safe_load(fence.content) == recipe
    assert "中: 文" in fence.content
    card = put_section("# Card\n", section) + "\nafter\n"
    assert put_section(card, section) == card


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [("a: [", "recipe must be YAML, got .*line 1"), ("- a", "a mapping, got list")],
)
def test_recipe_that_is_none_is_refused(recipe, problem):
    with pytest.raises(ValueError, match=problem):
        write_report(make_plan(), recipe=recipe, plot=None)


def test_report_links_the_plot():
    report = write_report(make_plan(), recipe=None, plot="层 (1).svg")
    (image,) = [
        child
        for token in parse(report)
        for child in token.children or []
        if child.type == "image"
    ]
    assert image.attrs["src"] == "%E5%B1%82%20%281%29.svg"


def test_report_of_a_bare_plan_says_that_nothing_was_measured():
    report = write_report(make_bare_plan(), recipe=None, plot=None)
    assert "Nothing: the plan has no scores." in report
    rows = find_table(report, "Layer", "Model")
    assert [row["Conflict"] for row in rows] == ["-"] * 4
    assert "## Scores" not in report


def test_guard_that_acted_says_whose_scores_are_shown():
    guard = make_plan().guard.model_copy(update={"acted": True, "reason": "worse"})
    section = write_card_section(make_plan(guard=guard, treatments=()), recipe=None)
    assert "the guard put the plain merge back" in section
    assert "scores called treated are of the merge that it refused" in section


def test_card_keeps_its_text_and_one_section():
    old = write_card_section(make_bare_plan(), recipe=None)
    new = write_card_section(make_plan(), recipe=None)
    card = put_section("---\ntags: [merge]\n---\n# Card\n", old)
    assert card == "---\ntags: [merge]\n---\n# Card\n\n" + old
    card += "\n## Later\n"
    changed = put_section(card, new)
    assert changed == card.replace(old, new)
    assert put_section(changed, new) == changed
    assert put_section("", new) == new


def test_card_text_after_a_lone_marker_is_kept():
    section = write_card_section(make_plan(), recipe=None)
    card = put_section(f"{BEGIN}\nmine\n", section)
    assert put_section(card, section) == card
    assert card.startswith(f"{BEGIN}\nmine\n")


# Plot


def draw_svg(plan: Plan, folder: Any) -> tuple[list[str], ElementTree.Element]:
    path = folder / "plots" / "plan.svg"
    draw_plan(plan, path)
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.svg"]
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    return ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("text")], root


def test_svg_has_units_names_and_an_error_bar_for_each_layer_and_task(tmp_path):
    texts, root = draw_svg(make_plan(models=(EN, "/m/$专家$")), tmp_path)
    for said in (
        *("layer number", "nats per token", "share right", "shrunk", "dropped"),
        *("english: conflict", "$专家$: contribution", "conflict ± 1 standard error"),
    ):
        assert said in texts
    bars = [
        path
        for group in root.iter()
        if group.get("id", "").startswith("standard-errors-")
        for path in group
    ]
    assert len(bars) == 6
    assert (tmp_path / "plots" / "plan.svg").stat().st_size < 100_000


def test_svg_draws_no_error_bars_for_one_sample(tmp_path):
    task = make_task(EN, "loss").model_copy(update={"n_samples": 1})
    _, root = draw_svg(make_plan(tasks=(task,)), tmp_path)
    assert not [e for e in root.iter() if e.get("id", "").startswith("standard-err")]


def test_plot_of_a_bare_plan_has_factors_and_treatments_alone(tmp_path):
    texts, _ = draw_svg(make_bare_plan(), tmp_path)
    assert {"treatment", "english", "dropped", "factor below 1"} <= set(texts)
    assert "english: factor on the weight" in texts
    assert "nats per token" not in texts


def test_equal_plans_give_equal_bytes(tmp_path):
    for suffix in ("svg", "png"):
        paths = [tmp_path / f"{name}.{suffix}" for name in "ab"]
        for path in paths:
            draw_plan(make_bare_plan(), path)
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_png_is_a_png_and_names_without_a_font_are_told(tmp_path, caplog):
    # A private-use character, which is in no font.
    plan = make_bare_plan(models=("\uf8f0", "x"))
    with caplog.at_level(logging.WARNING):
        draw_plan(plan, tmp_path / "plan.PNG")
    assert (tmp_path / "plan.PNG").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "no installed font has the characters \uf8f0" in caplog.text


@pytest.mark.parametrize("name", ["plan.pdf", "plan"])
def test_other_suffix_is_named(tmp_path, name):
    suffix = name.removeprefix("plan")
    with pytest.raises(ValueError, match=rf"in \.png or \.svg, got '{suffix}'"):
        draw_plan(make_plan(), tmp_path / name)


def test_plan_with_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must have scores or treatments"):
        draw_plan(make_bare_plan(treatments=()), tmp_path / "plan.svg")
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_gives_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'mergekit-himerging\[plots\]'"):
        draw_plan(make_plan(), tmp_path / "plan.svg")


def test_plot_is_the_same_whatever_the_last_bits_of_its_layout(tmp_path, monkeypatch):
    lay_out = ConstrainedLayoutEngine.execute

    def draw(error: float) -> bytes:
        def execute(engine, figure):
            lay_out(engine, figure)
            for axes in figure.axes:
                places = [place * (1 + error) for place in axes.get_position().bounds]
                axes._set_position(places)

        monkeypatch.setattr(ConstrainedLayoutEngine, "execute", execute)
        draw_plan(make_plan(), tmp_path / "plan.svg")
        return (tmp_path / "plan.svg").read_bytes()

    assert draw(1e-13) == draw(0)
    assert draw(1e-3) != draw(0)
