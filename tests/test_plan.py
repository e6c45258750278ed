"""The plan as a file: reading, writing, its own rules and its fit to a recipe."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mergekit_himerging import plan as plan_module
from mergekit_himerging.plan import Factors, Plan, Treatment, read_plan

PLAN = {"schema": 1, "base": "base", "models": ["zh", "en"], "n_layers": 3}


def make_plan(*treatments: dict[str, Any], **changes: Any) -> Plan:
    return Plan.model_validate({**PLAN, "treatments": treatments, **changes})


def write(folder: Path, content: object) -> Path:
    path = folder / "plan.json"
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def test_written_plan_reads_back_the_same(tmp_path):
    plan = make_plan(
        {"layer": 0, "model": "zh", "action": "keep"},
        {"layer": 1, "model": "zh", "action": "drop", "reason": 'less "useful"'},
        {"layer": 1, "model": "en", "action": "shrink", "density_factor": 0.5},
        {"layer": 2, "model": "en", "action": "set", "weight_factor": -0.1},
        settings={
            "mixed": "degraded",
            "layers": 3,
            "gain": 0.1,
            "on": True,
            "at": None,
        },
    )
    assert read_plan(write(tmp_path, plan.to_json())) == plan


def test_written_plan_has_a_treatment_a_line_and_chinese_as_it_is():
    plan = make_plan(
        {"layer": 0, "model": "医学", "action": "drop", "reason": "冲突"},
        {"layer": 2, "model": "医学", "action": "keep"},
        models=["医学"],
        base="基础",
    )
    text = plan.to_json()
    assert text.endswith("\n}\n")
    assert '"base": "基础"' in text
    assert [line.strip()[:28] for line in text.splitlines() if "layer\":" in line] == [
        '{"layer": 0, "model": "医学", ',
        '{"layer": 2, "model": "医学", ',
    ]  # fmt: skip
    assert '"reason": "冲突"' in text


def test_written_plan_without_treatments_is_json_too():
    assert json.loads(make_plan().to_json())["treatments"] == []


def test_file_may_have_a_byte_order_mark(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xef\xbb\xbf" + make_plan().to_json().encode())
    assert read_plan(path) == make_plan()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", " line 1 must be JSON: Expecting value"),
        ('{\n"schema": 1,\n}', " line 3 must be JSON: Illegal trailing comma"),
        ("[1]", ": must be an object, got [1]"),
        ("3", ": must be an object, got 3"),
        ("[" * 100_000, " must be a flat JSON object"),
        ('{"schema": NaN}', " must have finite numbers, got NaN"),
        ('{"schema": -Infinity}', " must have finite numbers, got -Infinity"),
        (
            '{"base": "a", "base": "b"}',
            " must have each field once, got ['base'] twice",
        ),
        (
            '{"treatments": [{"layer": 1, "layer": 2}]}',
            " must have each field once, got ['layer'] twice",
        ),
    ],
)
def test_text_that_is_no_plan_is_named(tmp_path, text, problem):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match="plan") as caught:
        read_plan(path)
    message = str(caught.value)
    # Python 3.13 words this one better than 3.11 does.
    message = message.replace(
        "Expecting property name enclosed in double quotes", "Illegal trailing comma"
    ).removesuffix(" before end of object")
    assert message == f"plan '{path}'{problem}"


TREATMENT = {"layer": 0, "model": "zh", "action": "set"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schema": 2}, ", schema: must be 1, got 2"),
        ({"models": []}, ", models: must have at least 1 item"),
        ({"models": "zh"}, ", models: must be a list, got 'zh'"),
        ({"models": ["zh", "zh"]}, ": models must be distinct, got ['zh', 'zh']"),
        ({"n_layers": 0}, ", n_layers: must be greater than or equal to 1, got 0"),
        ({"n_layers": 3.0}, ", n_layers: must be a valid integer, got 3.0"),
        ({"n_layers": True}, ", n_layers: must be a valid integer, got True"),
        ({"layers": 3}, ", layers: unknown field; remove it or mend its name"),
        ({"base": None}, ", base: must be a valid string, got None"),
        (
            {"settings": {"a": [1]}},
            ", settings.a.bool: must be a valid boolean, got [1]",
        ),
    ],
)
def test_bad_field_is_named_with_its_value(tmp_path, changes, problem):
    path = write(tmp_path, {**PLAN, **changes})
    with pytest.raises(ValueError, match="plan") as caught:
        read_plan(path)
    assert str(caught.value).startswith(f"plan '{path}'{problem}")


@pytest.mark.parametrize("field", PLAN)
def test_missing_field_is_named(tmp_path, field):
    content = {name: value for name, value in PLAN.items() if name != field}
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match="plan") as caught:
        read_plan(path)
    assert str(caught.value) == f"plan '{path}', {field}: field missing; add it"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer": -1}, ".layer: must be greater than or equal to 0, got -1"),
        ({"layer": "0"}, ".layer: must be a valid integer, got '0'"),
        ({"layer": False}, ".layer: must be a valid integer, got False"),
        (
            {"action": "remove"},
            ".action: must be 'keep', 'shrink', 'drop' or 'set', got 'remove'",
        ),
        (
            {"density_factor": -0.5},
            ".density_factor: must be greater than or equal to 0, got -0.5",
        ),
        (
            {"scale_factor": -1},
            ".scale_factor: must be greater than or equal to 0, got -1",
        ),
        ({"scale_factor": True}, ".scale_factor: must be a valid number, got True"),
        ({"weight_factor": "0.5"}, ".weight_factor: must be a valid number, got '0.5'"),
        ({"factor": 0.5}, ".factor: unknown field; remove it or mend its name"),
    ],
)
def test_bad_treatment_is_named_with_its_place(tmp_path, changes, problem):
    rows = [{**TREATMENT, "layer": 1}, {**TREATMENT, **changes}]
    path = write(tmp_path, {**PLAN, "treatments": rows})
    with pytest.raises(ValueError, match="plan") as caught:
        read_plan(path)
    assert str(caught.value) == f"plan '{path}', treatments[1]{problem}"


def test_number_beyond_floats_is_refused(tmp_path):
    row = '{"layer": 0, "model": "zh", "action": "set", "weight_factor": 1e999}'
    text = json.dumps({**PLAN, "treatments": ["ROW"]}).replace('"ROW"', row)
    with pytest.raises(ValueError, match=r"weight_factor: must be a finite number"):
        read_plan(write(tmp_path, text))


def test_setting_beyond_floats_is_refused(tmp_path):
    """It would be written as `Infinity`, which is not read again."""
    text = json.dumps({**PLAN, "settings": {"a": "X"}}).replace('"X"', "1e999")
    with pytest.raises(ValueError, match=r"settings\.a"):
        read_plan(write(tmp_path, text))


def test_further_problems_are_counted(tmp_path):
    path = write(tmp_path, {**PLAN, "schema": 2, "n_layers": 0})
    with pytest.raises(ValueError, match=r"schema: must be 1, got 2 \(and 1 more\)$"):
        read_plan(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot read plan") as caught:
        read_plan(tmp_path / "none.json")
    path = tmp_path / "none.json"
    assert str(caught.value) == f"cannot read plan '{path}': No such file or directory"


def test_folder_in_place_of_a_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read plan '.*': Is a directory"):
        read_plan(tmp_path)


def test_file_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b'{"base": "\xff"}')
    with pytest.raises(ValueError, match="plan") as caught:
        read_plan(path)
    assert str(caught.value) == (
        f"plan '{path}' must be UTF-8, got invalid start byte at byte 10"
    )


def test_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_module, "MAX_PLAN_BYTES", 2 * 2**20)
    path = write(tmp_path, " " * (3 * 2**20))
    with pytest.raises(ValueError, match="must be under 2 MiB, got 3 MiB"):
        read_plan(path)


@pytest.mark.parametrize(
    ("factors", "allowed"),
    [
        ({}, {"keep", "shrink", "drop", "set"}),
        ({"density_factor": 0.5}, {"shrink", "set"}),
        ({"scale_factor": 0}, {"shrink", "set"}),
        ({"density_factor": 0.5, "scale_factor": 0.5}, {"shrink", "set"}),
        ({"density_factor": 1.5}, {"set"}),
        ({"scale_factor": 1.5}, {"set"}),
        ({"weight_factor": 0.0}, {"drop", "set"}),
        ({"weight_factor": 0.5}, {"set"}),
        ({"weight_factor": 0.0, "density_factor": 0.5}, {"set"}),
    ],
)
@pytest.mark.parametrize(
    ("action", "rule"),
    [
        ("keep", "all factors at 1"),
        ("shrink", "density_factor and scale_factor up to 1, and no weight_factor"),
        ("drop", "weight_factor 0 or none, and no other factor"),
        ("set", ""),
    ],
)
def test_action_and_factors_must_agree(factors, allowed, action, rule):
    if action in allowed:
        Treatment(layer=0, model="zh", action=action, **factors)
        return
    given = {"density_factor": 1, "scale_factor": 1, "weight_factor": 1} | factors
    values = ", ".join(f"{name} {value:g}" for name, value in given.items())
    with pytest.raises(ValidationError) as caught:
        Treatment(layer=0, model="zh", action=action, **factors)
    (problem,) = caught.value.errors()
    assert problem["msg"] == (
        f"Value error, action '{action}' must have {rule}, got {values}; "
        "use action 'set' for free factors"
    )


@pytest.mark.parametrize(
    ("treatment", "factors"),
    [
        ({"action": "keep"}, (1, 1, 1)),
        ({"action": "drop"}, (1, 1, 0)),
        ({"action": "drop", "weight_factor": 0}, (1, 1, 0)),
        (
            {"action": "shrink", "density_factor": 0.5, "scale_factor": 0.25},
            (0.5, 0.25, 1),
        ),
        (
            {
                "action": "set",
                "density_factor": 2,
                "scale_factor": 3,
                "weight_factor": -4,
            },
            (2, 3, -4),
        ),
    ],
)
def test_action_stands_for_factors(treatment, factors):
    density, scale, weight = factors
    assert Treatment(layer=0, model="zh", **treatment).factors == Factors(
        density=density, scale=scale, weight=weight
    )


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (
            [{**TREATMENT, "model": "fr"}],
            "treatment of layer 0 must name one of the plan's models ['zh', 'en'], "
            "got 'fr'",
        ),
        (
            [{**TREATMENT, "model": "base"}],
            "treatment of layer 0 must name one of the plan's models ['zh', 'en'], "
            "got 'base'",
        ),
        (
            [{**TREATMENT, "layer": 3}],
            "layer must be below n_layers 3, got 3 ('zh')",
        ),
        (
            [TREATMENT, {**TREATMENT, "action": "keep"}],
            "layer 0 of 'zh' must have one treatment, got two; remove one",
        ),
    ],
)
def test_treatments_must_fit_their_own_plan(tmp_path, rows, problem):
    path = write(tmp_path, {**PLAN, "treatments": rows})
    with pytest.raises(ValueError, match="plan") as caught:
        read_plan(path)
    assert str(caught.value) == f"plan '{path}': {problem}"


def test_factors_are_looked_up_by_layer_and_model():
    plan = make_plan(
        {"layer": 2, "model": "en", "action": "drop"},
        {"layer": 0, "model": "zh", "action": "shrink", "density_factor": 0.5},
    )
    assert plan.factors_for(["en", "zh"]) == {
        (2, "en"): Factors(weight=0),
        (0, "zh"): Factors(density=0.5),
    }


def test_plan_fits_its_recipe_in_any_order_of_models():
    make_plan().check_fit(base="base", models=["en", "zh"], n_layers=3)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"base": "other"}, "plan is for base 'base', the recipe has 'other'"),
        (
            {"models": ["zh"]},
            "plan is for the models ['en', 'zh'], the recipe has ['zh']",
        ),
        (
            {"models": ["zh", "fr"]},
            "plan is for the models ['en', 'zh'], the recipe has ['fr', 'zh']",
        ),
        (
            {"models": ["zh", "en", "fr"]},
            "plan is for the models ['en', 'zh'], the recipe has ['en', 'fr', 'zh']",
        ),
        (
            {"models": ["zh", "zh"]},
            "plan is for the models ['en', 'zh'], the recipe has ['zh', 'zh']",
        ),
        (
            {"models": ["zh", "en+lora"]},
            "plan is for the models ['en', 'zh'], the recipe has ['en+lora', 'zh']",
        ),
        ({"n_layers": 4}, "plan is for 3 layers, the recipe makes 4"),
    ],
)
def test_plan_for_another_recipe_is_refused_naming_both(changes, problem):
    recipe = {"base": "base", "models": ["zh", "en"], "n_layers": 3, **changes}
    with pytest.raises(ValueError, match="plan is for") as caught:
        make_plan().check_fit(**recipe)
    assert str(caught.value) == problem


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Path:
    for name in ("base", "zh", "en", "lora"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("zh")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "spelling", ["zh", "./zh", "zh/", "link", "en/../zh", "{here}/zh", "{here}/link/"]
)
def test_same_folder_in_another_spelling_fits(folders, spelling):
    spelled = spelling.format(here=folders)
    plan = make_plan({"layer": 1, "model": "zh", "action": "drop"})
    plan.check_fit(base="./base/", models=["./en", spelled], n_layers=3)
    assert plan.factors_for(["./en", spelled]) == {(1, spelled): Factors(weight=0)}


def test_adapter_in_another_spelling_fits(folders):
    plan = make_plan(
        {"layer": 1, "model": "base+lora", "action": "drop"}, models=["base+lora"]
    )
    spelled = f"./base+{folders}/lora"
    plan.check_fit(base="base", models=[spelled], n_layers=3)
    assert plan.factors_for([spelled]) == {(1, spelled): Factors(weight=0)}


def test_one_folder_twice_in_the_plan_does_not_stand_for_two_models(folders):
    """Else the treatments of one of them would be lost."""
    plan = make_plan(models=["zh", "link"])
    with pytest.raises(ValueError, match=r"plan is for the models \['link', 'zh'\]"):
        plan.check_fit(base="base", models=["zh", "en"], n_layers=3)


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    models = draw(st.lists(TEXT, min_size=1, max_size=3, unique=True))
    n_layers = draw(st.integers(1, 5))
    pairs = draw(
        st.lists(
            st.tuples(st.integers(0, n_layers - 1), st.sampled_from(models)),
            max_size=5,
            unique=True,
        )
    )
    share = st.floats(0, 1)
    free = st.floats(0, allow_nan=False, allow_infinity=False)
    actions = st.one_of(
        st.just({"action": "keep"}),
        st.just({"action": "drop"}),
        st.fixed_dictionaries(
            {
                "action": st.just("shrink"),
                "density_factor": share,
                "scale_factor": share,
            }
        ),
        st.fixed_dictionaries(
            {
                "action": st.just("set"),
                "density_factor": free,
                "scale_factor": free,
                "weight_factor": NUMBERS,
            }
        ),
    )
    rows = [
        {"layer": layer, "model": model, "reason": draw(TEXT), **draw(actions)}
        for layer, model in pairs
    ]
    values = st.none() | st.booleans() | st.integers() | NUMBERS | TEXT
    return make_plan(
        *rows,
        base=draw(TEXT),
        models=models,
        n_layers=n_layers,
        settings=draw(st.dictionaries(TEXT, values, max_size=3)),
    )


LIGHT = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck)
)


@LIGHT
@given(plan=plans())
def test_any_plan_reads_back_the_same(tmp_path, plan):
    again = read_plan(write(tmp_path, plan.to_json()))
    assert again == plan
    # Equality takes True for 1 and -0.0 for 0.0; text does not.
    assert again.to_json() == plan.to_json()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner)
    ),
    max_leaves=8,
)
FIELDS = ("layer", "model", "action", "density_factor", "weight_factor", "reason")


@LIGHT
@given(
    content=JSON
    | st.fixed_dictionaries(
        {},
        optional={
            **{name: st.just(value) | JSON for name, value in PLAN.items()},
            "settings": JSON,
            "treatments": JSON
            | st.lists(
                st.dictionaries(
                    st.sampled_from(FIELDS),
                    JSON | st.sampled_from(["zh", "set", 0, math.inf]),
                ),
                max_size=3,
            ),
        },
    )
)
def test_any_json_is_a_plan_or_a_value_error(tmp_path, content):
    path = write(tmp_path, content)
    try:
        plan = read_plan(path)
    except ValueError as error:
        message = str(error)
    else:
        message = f"'{path}'"
        assert read_plan(write(tmp_path, plan.to_json())) == plan
    assert f"'{path}'" in message


@LIGHT
@given(content=st.binary(max_size=40))
def test_any_bytes_are_a_value_error(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="plan"):
        read_plan(path)
