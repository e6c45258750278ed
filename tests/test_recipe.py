"""Names, places and values of a recipe: what is found wrong, and in which words."""

import math
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mergekit.config import MergeConfiguration
from mergekit.scripts.merge_raw_pytorch import RawPyTorchMergeConfig

from mergekit_himerging.parameters import parse_bytes
from mergekit_himerging.recipe import (
    PARAMETERS,
    TaskSettings,
    check_config,
    check_document,
    check_value,
    find_repeated_keys,
    read_settings,
    read_tasks,
)

HEAD = "{merge_method: hi_merging, base_model: org/base, "


def read(text: str) -> dict[str, Any]:
    """Read flow-style YAML behind a method and a base."""
    document: dict[str, Any] = yaml.safe_load(HEAD + text + "}")
    return document


def problems_of(text: str) -> list[str]:
    document = read(text)
    return check_document(document, MergeConfiguration) + check_config(
        MergeConfiguration.model_validate(document)
    )


SLICE = "slices: [{sources: [{model: org/base, layer_range: [0, 2]}, %s]%s}]"
SOURCE = "{model: org/zh, layer_range: [0, 2]%s}"

GOOD = {
    "models": "models: [{model: org/zh}, {model: org/en}]",
    "base among the models": "models: [{model: org/base}, {model: org/zh}]",
    "per model": (
        "models: [{model: org/zh, parameters: {density: 0, scale: 1, weight: -2}}]"
    ),
    "per-model names at the top": (
        "models: [{model: org/zh}], parameters: {density: 0.5, scale: 1, weight: 0.3}"
    ),
    "shared names at the top": (
        "models: [{model: org/zh}], parameters: {normalize: true, consensus: count, "
        "lambda: 1.5, scope: layer, plan: plan.json}"
    ),
    "gradient": "models: [{model: org/zh, parameters: {density: [0, 0.5, 1]}}]",
    "filter": (
        "models: [{model: org/zh, parameters: {density: [{filter: mlp, value: 0.5}, "
        "{value: [0.1, 0.9]}]}}]"
    ),
    "lone filter": "models: [{model: org/zh}], parameters: {weight: {value: 0.5}}",
    "numbers as text": "models: [{model: org/zh}], parameters: {density: '5e-1'}",
    "words by layer": "models: [{model: org/zh}], parameters: {consensus: [none, sum]}",
    "slices": SLICE % (SOURCE % ", parameters: {density: 0.5}", ""),
    "slices with parameters": (
        SLICE % (SOURCE % "", ", parameters: {density: 0.5, normalize: true}")
    ),
    "slices with a base of their own": (
        "slices: [{base_model: org/other, sources: [{model: org/other, "
        "layer_range: [0, 2]}, {model: org/zh, layer_range: [0, 2]}]}]"
    ),
    "the same model in two slices": (
        "slices: [{sources: [{model: org/base, layer_range: [0, 2]}, "
        "{model: org/zh, layer_range: [0, 2]}]}, "
        "{sources: [{model: org/base, layer_range: [2, 3]}, "
        "{model: org/zh, layer_range: [2, 3]}]}]"
    ),
    "modules": (
        "modules: {text: {models: [{model: org/zh, parameters: {weight: 1}}], "
        "parameters: {density: 0.5, consensus: sum}}}"
    ),
    "modules with slices": f"modules: {{text: {{{SLICE % (SOURCE % '', '')}}}}}",
    "adapters": (
        "models: [{model: org/base+org/zh-lora}, {model: org/base+org/en-lora}]"
    ),
    "references spelled out": (
        "models: [{model: {model: {path: org/base, revision: main}, "
        "lora: {path: org/zh-lora}}}]"
    ),
    "tokenizer": (
        "models: [{model: org/zh}], tokenizer: {source: union, pad_to_multiple_of: 8, "
        "tokens: {a: {source: org/zh, force: true}, b: {source: {kind: zero}}, "
        "c: {source: {kind: model_token, model: org/zh, token_id: 3}}}}"
    ),
    "analysis": (
        "models: [{model: org/zh, parameters: {calibration: zh.jsonl, samples: 8}}, "
        "{model: org/en, parameters: {calibration: en.csv, metric: accuracy}}], "
        "parameters: {metric: loss, samples: 32, mixed: interfering, max_layers: 0, "
        "layer_density: 0, confidence: 1.5, rounds: 2, reference: same_weight, "
        "compare: raw, guard: report, accept_share: 0, seed: 7, "
        "analysis_memory: 512MB, plan_out: plan.json, resolve: rules}"
    ),
    "treatments measured by default": (
        "models: [{model: org/zh, parameters: {calibration: zh.jsonl, floor: 0.9}}, "
        "{model: org/en, parameters: {calibration: en.csv}}], "
        "parameters: {measure: exact, objective: worst}"
    ),
    "signs elected without an analysis": (
        "models: [{model: org/zh}], parameters: {consensus: sum, normalize: true}"
    ),
    "analysis of slices": (
        "slices: [{sources: [{model: org/base, layer_range: [0, 2]}, {model: org/zh, "
        "layer_range: [0, 2], parameters: {calibration: zh.jsonl}}]}, "
        "{sources: [{model: org/base, layer_range: [2, 3]}, {model: org/zh, "
        "layer_range: [2, 3]}]}]"
    ),
    "preset with its own values": (
        "models: [{model: org/zh, parameters: {calibration: zh.jsonl}}], "
        "parameters: {preset: paper, guard: report, layer_scale: 0.5}"
    ),
    "options of an analysis beside its plan": (
        "models: [{model: org/zh}], "
        "parameters: {plan: plan.json, rounds: 2, guard: report}"
    ),
    "everything MergeKit has at the top": (
        "models: [{model: org/zh}], dtype: float32, out_dtype: bfloat16, "
        "tokenizer_source: base, chat_template: auto"
    ),
}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD.keys())
def test_good_recipe_has_no_problem(text):
    assert problems_of(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "models: [{model: org/zh}], paramters: {density: 0.5}",
            "unknown key 'paramters' (top of the recipe); did you mean 'parameters'?",
        ),
        (
            "models: [{model: org/zh}], density: 0.5",
            "'density' is a parameter and dropped by MergeKit there "
            "(top of the recipe); move it under 'parameters:'",
        ),
        (
            "models: [{model: org/zh}], 3: x",
            "unknown key '3' (top of the recipe); remove it",
        ),
        (
            "models: [{model: org/en}, {model: org/zh, density: 0.5}]",
            "'density' is a parameter and dropped by MergeKit there "
            "(models[1] 'org/zh'); move it under 'parameters:'",
        ),
        (
            "models: [{model: org/zh, calibration: zh.jsonl}]",
            "'calibration' is a parameter and dropped by MergeKit there "
            "(models[0] 'org/zh'); move it under 'parameters:'",
        ),
        (
            "models: [{model: org/zh, densty: 0.5}]",
            "unknown key 'densty' (models[0] 'org/zh'); "
            "did you mean 'density' under 'parameters:'?",
        ),
        (
            "models: [{model: org/zh, paramters: {density: 0.5}}]",
            "unknown key 'paramters' (models[0] 'org/zh'); did you mean 'parameters'?",
        ),
        (
            "models: [{model: {model: {path: org/zh, revison: main}}}]",
            "unknown key 'revison' (models[0].model.model); did you mean 'revision'?",
        ),
        (
            "models: [{model: org/zh, layer_range: [0, 2]}]",
            "'layer_range' has no effect there (models[0] 'org/zh'); "
            "move it or remove it",
        ),
        (
            SLICE % (SOURCE % "", ", sorces: []"),
            "unknown key 'sorces' (slices[0]); did you mean 'sources'?",
        ),
        (
            SLICE % (SOURCE % ", weight: 1", ""),
            "'weight' is a parameter and dropped by MergeKit there "
            "(slices[0].sources[1] 'org/zh'); move it under 'parameters:'",
        ),
        (
            "modules: {text: {models: [{model: org/zh}], paramters: {density: 1}}}",
            "unknown key 'paramters' (modules.text); did you mean 'parameters'?",
        ),
        (
            "modules: {text: {models: [{model: org/zh, scale: 1}]}}",
            "'scale' is a parameter and dropped by MergeKit there "
            "(modules.text.models[0] 'org/zh'); move it under 'parameters:'",
        ),
        (
            "models: [{model: org/zh}], parameters: {density: {value: 1, fitler: mlp}}",
            "unknown key 'fitler' (parameters.density); did you mean 'filter'?",
        ),
        (
            "models: [{model: org/zh, parameters: {density: [{value: 1}, "
            "{value: 0.5, fliter: mlp}]}}]",
            "unknown key 'fliter' (models[0].parameters.density[1]); "
            "did you mean 'filter'?",
        ),
        (
            "models: [{model: org/zh}], tokenizer: {source: base, tokns: {}}",
            "unknown key 'tokns' (tokenizer); did you mean 'tokens'?",
        ),
        (
            "models: [{model: org/zh}], tokenizer: {tokens: {a: {sorce: org/zh}}}",
            "unknown key 'sorce' (tokenizer.tokens.a); did you mean 'source'?",
        ),
        (
            "models: [{model: org/zh}], "
            "tokenizer: {tokens: {a: {source: {kind: zero, tokn: 1}}}}",
            "unknown key 'tokn' (tokenizer.tokens.a.source); did you mean 'token'?",
        ),
    ],
)
def test_key_that_mergekit_would_drop_is_named_with_its_place(text, problem):
    assert check_document(read(text), MergeConfiguration) == [problem]


def test_several_dropped_keys_are_all_named():
    found = check_document(
        read("x: 1, models: [{model: org/zh, y: 2}]"), MergeConfiguration
    )
    assert [problem.split(";")[0] for problem in found] == [
        "unknown key 'x' (top of the recipe)",
        "unknown key 'y' (models[0] 'org/zh')",
    ]


@pytest.mark.parametrize("raw", [None, 3, "models", ["models"]])
def test_document_that_is_no_mapping_is_named(raw):
    (problem,) = check_document(raw, MergeConfiguration)
    assert problem == f"a recipe must be a mapping of keys, got {type(raw).__name__}"


UNDER_MODEL = "models: [{model: org/en}, {model: org/zh, parameters: {%s}}]"
AT_TOP = "models: [{model: org/zh}], parameters: {%s}"
IN_SLICE = SLICE % (SOURCE % "", ", parameters: {%s}")
IN_SOURCE = SLICE % (SOURCE % ", parameters: {%s}", "")
IN_MODULE = "modules: {text: {models: [{model: org/zh}], parameters: {%s}}}"
PLACES = {
    "parameters": AT_TOP,
    "models[1] 'org/zh'": UNDER_MODEL,
    "slices[0]": IN_SLICE,
    "slices[0].sources[1] 'org/zh'": IN_SOURCE,
    "modules.text": IN_MODULE,
    "modules.text.models[0] 'org/zh'": (
        "modules: {text: {models: [{model: org/zh, parameters: {%s}}]}}"
    ),
    "modules.text.slices[0]": f"modules: {{text: {{{IN_SLICE}}}}}",
}


@pytest.mark.parametrize(("where", "text"), PLACES.items(), ids=PLACES.keys())
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("densty", "did you mean 'density'?"),
        ("wieght", "did you mean 'weight'?"),
        ("zzz", "remove it"),
        (
            "int8_mask",
            "it saves memory in MergeKit's own methods and is not needed here",
        ),
        ("rescale", "set 'scale' per model instead"),
        (
            "gamma",
            "it drops the largest entries in 'breadcrumbs'; hi_merging keeps them",
        ),
        ("epsilon", "it belongs to 'della'"),
        ("t", "it belongs to 'slerp'"),
        ("select_topk", "it belongs to 'sce'"),
        ("_cut", "remove it"),
    ],
)
def test_unknown_parameter_is_named_at_every_level(where, text, name, remedy):
    assert problems_of(text % f"{name}: 0.1") == [
        f"unknown parameter '{name}' ({where}); {remedy}"
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("consensus", "sum"),
        ("normalize", "true"),
        ("lambda", "0.5"),
        ("scope", "layer"),
        ("plan", "plan.json"),
    ],
)
@pytest.mark.parametrize(
    ("where", "text"),
    [("models[1] 'org/zh'", UNDER_MODEL), ("slices[0].sources[1] 'org/zh'", IN_SOURCE)],
)
def test_shared_parameter_under_a_model_is_refused(name, value, where, text):
    assert problems_of(text % f"{name}: {value}") == [
        f"'{name}' is shared by all models and ignored under one ({where}); "
        "move it to the 'parameters' at the top of the recipe"
    ]


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("slices[0]", IN_SLICE),
        ("modules.text", IN_MODULE),
        ("modules.text.slices[0]", f"modules: {{text: {{{IN_SLICE}}}}}"),
    ],
)
@pytest.mark.parametrize("setting", ["plan: plan.json", "scope: model"])
def test_whole_merge_parameter_below_the_top_is_refused(where, text, setting):
    name = setting.split(":")[0]
    assert problems_of(text % setting) == [
        f"'{name}' holds for the whole merge ({where}); "
        "move it to the 'parameters' at the top of the recipe"
    ]


@pytest.mark.parametrize(
    ("name", "value"), [("plan", "[a.json, b.json]"), ("scope", "{value: layer}")]
)
def test_whole_merge_parameter_must_be_one_value(name, value):
    assert problems_of(AT_TOP % f"{name}: {value}") == [
        f"'{name}' must be one value, got a list or filter (parameters); "
        "write a single value"
    ]


@pytest.mark.parametrize("name", ["density", "scale", "weight"])
@pytest.mark.parametrize(
    ("where", "text"),
    [
        (
            "models[0] 'org/base'",
            "models: [{model: org/base, parameters: {%s}}, {model: org/zh}]",
        ),
        (
            "slices[0].sources[0] 'org/base'",
            "slices: [{sources: [{model: org/base, layer_range: [0, 2], "
            "parameters: {%s}}, {model: org/zh, layer_range: [0, 2]}]}]",
        ),
    ],
)
def test_per_model_parameter_of_the_base_is_refused(name, where, text):
    assert problems_of(text % f"{name}: 0.5") == [
        f"'{name}' has no effect on the base model ({where}); "
        "remove it there, or set it on the models that are merged into the base"
    ]


def test_base_of_a_slice_counts_as_the_base_there():
    text = (
        "slices: [{base_model: org/other, sources: [{model: org/other, "
        "layer_range: [0, 2], parameters: {density: 0.5}}, "
        "{model: org/zh, layer_range: [0, 2]}]}]"
    )
    (problem,) = problems_of(text)
    assert problem.startswith(
        "'density' has no effect on the base model (slices[0].sources[0] 'org/other')"
    )


SHAPES = {
    "scalar": "%s",
    "gradient": "[0.1, %s]",
    "filter": "{filter: mlp, value: %s}",
    "second filter": "[{filter: mlp, value: 0.1}, {value: %s}]",
    "gradient in a filter": "[{filter: mlp, value: [0.1, 0.2, %s]}, {value: 0.1}]",
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    ("value", "fact", "remedy"),
    [
        (
            "density: 50",
            "density must be in [0, 1], got 50",
            "it is the share of entries kept, so 50 percent is 0.5",
        ),
        (
            "density: '50'",
            "density must be in [0, 1], got 50",
            "it is the share of entries kept, so 50 percent is 0.5",
        ),
        (
            "density: -0.5",
            "density must be in [0, 1], got -0.5",
            "it is the share of entries kept",
        ),
        (
            "density: 1.5",
            "density must be in [0, 1], got 1.5",
            "it is the share of entries kept",
        ),
        (
            "density: .nan",
            "density must be in [0, 1], got nan",
            "it is the share of entries kept",
        ),
        (
            "density: .inf",
            "density must be in [0, 1], got inf",
            "it is the share of entries kept",
        ),
        (
            "scale: 30",
            "scale must be in [0, 1], got 30",
            "it is the factor on the kept entries, so 30 percent is 0.3",
        ),
        ("density: true", "density must be a number, got True", ""),
        ("density: half", "density must be a number, got 'half'", ""),
        ("weight: .nan", "weight must be a finite number, got nan", ""),
        ("weight: -.inf", "weight must be a finite number, got -inf", ""),
        ("weight: '1e999'", "weight must be a finite number, got inf", ""),
        ("weight: false", "weight must be a number, got False", ""),
    ],
)
def test_bad_number_is_named_with_model_and_parameter(shape, value, fact, remedy):
    name, _, number = value.partition(": ")
    assert problems_of(UNDER_MODEL % f"{name}: {shape % number}") == [
        f"{fact} (models[1] 'org/zh')" + (f"; {remedy}" if remedy else "")
    ]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("lambda: .inf", "lambda must be a finite number, got inf (parameters)"),
        ("lambda: true", "lambda must be a number, got True (parameters)"),
        ("normalize: 0.5", "normalize must be true or false, got 0.5 (parameters)"),
        ("plan: 5", "plan must be a text, got 5 (parameters)"),
        (
            "consensus: total",
            "consensus must be one of none, sum, count, got 'total' (parameters)",
        ),
        (
            "consensus: [none, total]",
            "consensus must be one of none, sum, count, got 'total' (parameters)",
        ),
        (
            "scope: block",
            "scope must be one of tensor, layer, model, got 'block' (parameters)",
        ),
        ("density: []", "'density' has an empty list (parameters); write a value"),
    ],
)
def test_bad_value_at_the_top_is_named(setting, problem):
    assert problems_of(AT_TOP % setting) == [problem]


WITH_DATA = (
    "models: [{model: org/zh, parameters: {calibration: zh.jsonl}}], parameters: {%s}"
)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("rounds: 0", "rounds must be at least 1, got 0 (parameters)"),
        ("rounds: 1.5", "rounds must be a whole number, got 1.5 (parameters)"),
        ("rounds: true", "rounds must be a number, got True (parameters)"),
        ("samples: 0", "samples must be at least 1, got 0 (parameters)"),
        ("max_layers: -1", "max_layers must be at least 0, got -1 (parameters)"),
        (
            "max_layers: few",
            "max_layers must be a whole number, got 'few' (parameters)",
        ),
        ("confidence: -1", "confidence must be at least 0, got -1 (parameters)"),
        ("confidence: .inf", "confidence must be at least 0, got inf (parameters)"),
        ("seed: -1", "seed must be at least 0, got -1 (parameters)"),
        (
            "accept_share: 0.95",
            "accept_share must be in [0, 0.9], got 0.95 (parameters); the rest chooses",
        ),
        (
            "layer_scale: 50",
            "layer_scale must be in [0, 1], got 50 (parameters); it is a factor on the "
            "model-wise value, so 50 percent is 0.5",
        ),
        (
            "mixed: both",
            "mixed must be one of degraded, interfering, got 'both' (parameters)",
        ),
        (
            "guard: off",
            "guard must be one of keep_better, report, got False (parameters)",
        ),
        (
            "metric: bleu",
            "metric must be one of loss, accuracy, agreement, got 'bleu' (parameters)",
        ),
        ("plan_out: 3", "plan_out must be a text, got 3 (parameters)"),
        (
            "calibration: zh.jsonl",
            "'calibration' must be one file per model, got one for all (parameters); "
            "move it under the 'parameters' of each model",
        ),
        (
            "seed: [1, 2]",
            "'seed' must be one value, got a list or filter (parameters); "
            "write a single value",
        ),
        *(
            (
                f"analysis_memory: {amount}",
                f"analysis_memory must be an amount above zero, got '{amount}' "
                "(parameters); write it as 4GB or 512MB",
            )
            for amount in ("0", "lots", "-4GB", "0MB", "GB", "4 gigs", "1.2.3GB")
        ),
    ],
)
def test_bad_setting_of_the_analysis_is_named(setting, problem):
    assert problems_of(WITH_DATA % setting) == [problem]


@pytest.mark.parametrize(
    "where", ["models[1] 'org/zh'", "slices[0].sources[1] 'org/zh'"]
)
@pytest.mark.parametrize("setting", ["rounds: 2", "guard: report", "preset: paper"])
def test_setting_of_the_whole_analysis_under_a_model_is_refused(where, setting):
    name = setting.split(":")[0]
    assert problems_of(PLACES[where] % setting) == [
        f"'{name}' is shared by all models and ignored under one ({where}); "
        "move it to the 'parameters' at the top of the recipe"
    ]


def test_list_of_calibration_files_is_refused():
    """MergeKit would spread it over the layers."""
    assert problems_of(UNDER_MODEL % "calibration: [a.jsonl, b.jsonl]") == [
        "'calibration' must be one value, got a list or filter (models[1] 'org/zh'); "
        "write a single value"
    ]


TWO_SLICES = (
    "slices: [{sources: [{model: org/base, layer_range: [0, 1]}, "
    "{model: org/zh, layer_range: [0, 1], parameters: {calibration: a.jsonl%s}}]}, "
    "{sources: [{model: org/base, layer_range: [1, 2]}, "
    "{model: org/zh, layer_range: [1, 2], parameters: {calibration: a.jsonl%s}}]%s}]"
)


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (", metric: loss", ", metric: accuracy", "'metric' .* ['accuracy', 'loss']"),
        (", samples: 8", ", samples: 16", "'samples' .* ['16', '8']"),
    ],
)
def test_slices_that_measure_one_model_differently_are_refused(one, other, found):
    name, values = found.split(" .* ")
    assert problems_of(TWO_SLICES % (one, other, "")) == [
        f"{name} of 'org/zh' must be one value, got {values}"
    ]
    assert problems_of(TWO_SLICES % (one, one, "")) == []


def test_preset_names_what_goes_against_it_in_a_slice():
    text = TWO_SLICES % ("", "", ", parameters: {consensus: sum}")
    assert problems_of(text + ", parameters: {preset: paper}") == [
        "'preset: paper' must keep consensus at none, got sum (slices[1]); "
        "remove one of the two"
    ]


def test_calibration_of_some_models_names_the_others():
    assert problems_of(UNDER_MODEL % "calibration: zh.jsonl") == [
        "every model must have 'calibration' or none, got none for ['org/en']; "
        "name a file under the 'parameters' of each model"
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (AT_TOP % "seed: 1, guard: report", "['guard', 'seed']"),
        (AT_TOP % "preset: paper", "['preset']"),
        ("models: [{model: org/zh, parameters: {samples: 3}}]", "['samples']"),
    ],
)
def test_settings_of_an_analysis_without_data_are_named(text, names):
    assert problems_of(text) == [
        f"{names} must come with calibration data, got none; name a file as "
        "'calibration' under the 'parameters' of each model, or remove them"
    ]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("guard: keep_better", "guard at report, got keep_better"),
        ("rounds: 3", "rounds at 1, got 3"),
        ("consensus: sum", "consensus at none, got sum"),
        ("max_layers: 4", "max_layers at None, got 4"),
        ("scope: model", "scope at tensor, got model"),
    ],
)
def test_preset_names_what_goes_against_it(setting, problem):
    assert problems_of(WITH_DATA % f"preset: paper, {setting}") == [
        f"'preset: paper' must keep {problem}; remove one of the two"
    ]


def test_preset_sets_the_papers_reading():
    config = MergeConfiguration.model_validate(
        read(WITH_DATA % "preset: paper, seed: 3")
    )
    read_back = read_settings(config)
    assert {name: read_back[name] for name in read_back if name != "plan_out"} == {
        **{"preset": "paper", "plan": "", "scope": "tensor", "mixed": "degraded"},
        **{"layer_density": 0.5, "layer_scale": 0.5, "max_layers": None},
        **{"confidence": 0.0, "rounds": 1, "reference": "full", "compare": "raw"},
        **{"guard": "report", "accept_share": 0.5, "seed": 3, "hide_paths": False},
        **{"resolve": "rules", "objective": "mean", "measure": "first_order"},
        **{"gradients": False, "smoke_test": True},
        "analysis_memory": "4GB",
    }


def test_treatments_are_measured_unless_the_recipe_asks_for_rules():
    text = GOOD["treatments measured by default"]
    config = MergeConfiguration.model_validate(read(text))
    assert read_settings(config)["resolve"] == "measured"
    config = MergeConfiguration.model_validate(read(GOOD["analysis"]))
    assert read_settings(config)["resolve"] == "rules"


def test_tasks_take_shared_values_where_a_model_has_none():
    config = MergeConfiguration.model_validate(read(GOOD["analysis"]))
    assert read_tasks(config) == [
        TaskSettings("org/en", "en.csv", "accuracy", 32),
        TaskSettings("org/zh", "zh.jsonl", "loss", 8),
    ]
    assert read_tasks(MergeConfiguration.model_validate(read(GOOD["models"]))) == []


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("4GB", 4 * 2**30),
        ("512 MB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("64k", 65536),
        ("1e", None),
        ("1000", 1000),
        (" 2tb ", 2**41),
    ],
)
def test_amount_of_memory_is_read_in_powers_of_1024(text, amount):
    if amount is None:
        with pytest.raises(ValueError, match=f"amount above zero, got '{text}'"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == amount


def test_all_problems_are_reported_at_once():
    found = problems_of(UNDER_MODEL % "densty: 1, scale: 2, weight: .nan")
    assert [problem.split(" (")[0] for problem in found] == [
        "unknown parameter 'densty'",
        "scale must be in [0, 1], got 2",
        "weight must be a finite number, got nan",
    ]


def test_missing_base_is_the_only_complaint():
    config = MergeConfiguration.model_validate(
        {"merge_method": "hi_merging", "models": [{"model": "org/zh"}]}
    )
    assert check_config(config) == [
        "hi_merging must have a base model, got none; "
        "add 'base_model:' with the model that the others were tuned from"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "models: [{model: org/base}]",
        "modules: {text: {models: [{model: org/base}]}}",
        "slices: [{sources: [{model: org/base, layer_range: [0, 2]}]}]",
    ],
)
def test_base_alone_is_refused(text):
    assert problems_of(text) == [
        "hi_merging must have a model besides the base, got the base alone; "
        "list the tuned models under 'models:'"
    ]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (
            "models: [{model: org/zh}, {model: org/en}, {model: org/zh}]",
            "models[0] and models[2]",
        ),
        (
            "modules: {text: {models: [{model: org/zh}, {model: org/zh}]}}",
            "modules.text.models[0] and modules.text.models[1]",
        ),
        (
            SLICE % (f"{SOURCE % ''}, {SOURCE % ''}", ""),
            "slices[0].sources[1] and slices[0].sources[2]",
        ),
    ],
)
def test_model_that_stands_twice_is_named(text, places):
    assert problems_of(text) == [
        f"models must be distinct, got 'org/zh' twice ({places}); "
        "remove one, or raise its weight"
    ]


def test_folder_spelled_in_two_ways_counts_as_one_model(tmp_path):
    (tmp_path / "zh").mkdir()
    (tmp_path / "link").symlink_to("zh")
    (problem,) = problems_of(
        f"models: [{{model: {tmp_path}/zh}}, {{model: {tmp_path}/link}}]"
    )
    assert problem == (
        f"models must be distinct, got '{tmp_path}/link' twice (models[0] and "
        "models[1]); remove one, or raise its weight"
    )


def test_base_spelled_in_two_ways_is_refused(tmp_path):
    """Else it would count as an expert and halve the others' default weight."""
    (tmp_path / "base").mkdir()
    config = MergeConfiguration.model_validate(
        {
            "merge_method": "hi_merging",
            "base_model": f"{tmp_path}/base",
            "models": [{"model": f"{tmp_path}/base/"}, {"model": "org/zh"}],
        }
    )
    assert check_config(config) == [
        f"the base model must be spelled in one way, got '{tmp_path}/base/' "
        f"(models[0]) and '{tmp_path}/base'; write it as in 'base_model:'"
    ]


def test_slice_without_its_base_is_named():
    assert problems_of(f"slices: [{{sources: [{SOURCE % ''}]}}]") == [
        "a slice must have its base model 'org/base' among its sources, "
        "got ['org/zh'] (slices[0]); add it there with its 'layer_range:'"
    ]


def test_flat_recipe_of_mergekit_pytorch_is_checked_too():
    document = {
        "merge_method": "hi_merging",
        "base_model": "base.safetensors",
        "models": [
            {"model": "base.safetensors"},
            {"model": "zh.safetensors", "parameters": {"density": 50}},
        ],
        "slices": [],
    }
    assert check_document(document, RawPyTorchMergeConfig) == [
        "'slices' has no effect there (top of the recipe); move it or remove it"
    ]
    config = RawPyTorchMergeConfig.model_validate(document)
    assert check_config(config) == [
        "density must be in [0, 1], got 50 (models[1] 'zh.safetensors'); "
        "it is the share of entries kept, so 50 percent is 0.5"
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: 1\nb: 2\na: 3\n", [("a", 3)]),
        ("a: {x: 1, y: 2}\nb: {x: 1}\n", []),
        (
            "models:\n- model: x\n  parameters: {}\n  parameters: {}\n",
            [("parameters", 4)],
        ),
        ("a: 1\na: 2\na: 3\n", [("a", 2), ("a", 3)]),
        ("a: 1\n---\na: 1\n", []),
        ("a: 1\n---\nb: 1\nb: 2\n", [("b", 4)]),
        ("x: &x {k: 1, k: 2}\ny: *x\nz: *x\n", [("k", 1)]),
        ("x: &x [*x]\n", []),
        ("'a': 1\na: 2\n", [("a", 2)]),
        ("", []),
        ("- 1\n- a\n", []),
    ],
)
def test_repeated_key_is_named_with_its_line(text, found):
    assert find_repeated_keys(text) == [
        f"key '{key}' stands twice in one mapping (line {line}); "
        "YAML keeps the last one only, so remove one"
        for key, line in found
    ]


@pytest.mark.parametrize(
    ("name", "value", "checked"),
    [
        ("density", "5e-1", 0.5),
        ("density", 1, 1.0),
        ("weight", None, None),
        ("normalize", True, True),
        ("consensus", "sum", "sum"),
        ("plan", "方案.json", "方案.json"),
    ],
)
def test_good_value_comes_back_in_its_type(name, value, checked):
    result = check_value(PARAMETERS[name], value)
    assert (result, type(result)) == (checked, type(checked))


@pytest.mark.parametrize("name", ["plan", "scope"])
def test_whole_merge_setting_has_its_default_where_absent(name):
    config = MergeConfiguration.model_validate(read(GOOD["models"]))
    assert read_settings(config)[name] == PARAMETERS[name].default


def test_whole_merge_setting_is_read_from_the_top():
    config = MergeConfiguration.model_validate(read(AT_TOP % "scope: model"))
    assert read_settings(config)["scope"] == "model"


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(
        ["hi_merging", "base", "union", "5e-1", "1e999", 10**400, "a@b@c"]
    )
)
NAMES = st.sampled_from(
    [
        *("models", "slices", "modules", "model", "sources", "layer_range"),
        *("parameters", "merge_method", "base_model", "tokenizer", "tokens", "source"),
        *("value", "filter", "kind", "path", "lora", "density", "plan", "scope", "x"),
    ]
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES | SCALARS.filter(lambda k: k == k), inner, max_size=4)
    ),
    max_leaves=12,
)
SETTINGS = st.dictionaries(
    NAMES | st.sampled_from(list(PARAMETERS)), ANYTHING, max_size=3
)
MODELS = st.fixed_dictionaries(
    {"model": st.sampled_from(["b", "x", "x+y", "a+b+c"]) | ANYTHING},
    optional={"parameters": SETTINGS, "layer_range": st.just([0, 2]), "x": ANYTHING},
)
RECIPES = st.fixed_dictionaries(
    {"merge_method": st.just("hi_merging")},
    optional={
        "base_model": st.just("b") | ANYTHING,
        "models": st.lists(MODELS, max_size=3) | ANYTHING,
        "slices": st.lists(
            st.fixed_dictionaries({"sources": st.lists(MODELS, max_size=2)}), max_size=2
        ),
        "parameters": SETTINGS,
        "tokenizer": ANYTHING,
    },
)
LIGHT = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck)
)


@LIGHT
@given(raw=ANYTHING | RECIPES)
def test_any_document_gives_a_list_of_sentences(raw):
    for model in (MergeConfiguration, RawPyTorchMergeConfig):
        found = check_document(raw, model)
        assert isinstance(found, list)
        assert all(isinstance(problem, str) for problem in found)


SCALAR_OR_GRADIENT = (
    st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.lists(st.floats() | st.integers() | st.text(max_size=4), max_size=3)
)
CONDITION = st.fixed_dictionaries(
    {"value": SCALAR_OR_GRADIENT}, optional={"filter": st.text(max_size=4)}
)
VALID_SETTINGS = st.dictionaries(
    st.text(max_size=4) | st.sampled_from(list(PARAMETERS)),
    SCALAR_OR_GRADIENT | CONDITION | st.lists(CONDITION, max_size=3),
    max_size=4,
)
VALID_MODELS = st.lists(
    st.fixed_dictionaries(
        {"model": st.sampled_from(["b", "x", "x+y", "./z"])},
        optional={"parameters": VALID_SETTINGS},
    ),
    min_size=1,
    max_size=3,
)


@LIGHT
@given(
    models=VALID_MODELS,
    parameters=VALID_SETTINGS,
    base=st.none() | st.just("b"),
    in_module=st.booleans(),
)
def test_any_valid_configuration_gives_a_list_of_sentences(
    models, parameters, base, in_module
):
    place = {"modules": {"m": {"models": models}}} if in_module else {"models": models}
    config = MergeConfiguration.model_validate(
        {
            "merge_method": "hi_merging",
            "base_model": base,
            "parameters": parameters,
            **place,
        }
    )
    found = check_config(config)
    assert isinstance(found, list)
    assert all(isinstance(problem, str) and problem for problem in found)


@LIGHT
@given(value=st.floats() | st.integers() | st.booleans())
def test_accepted_density_lies_in_its_bounds(value):
    try:
        density = check_value(PARAMETERS["density"], value)
    except ValueError:
        assert isinstance(value, bool) or not 0 <= value <= 1
    else:
        assert not isinstance(value, bool)
        assert math.isclose(density, value)
        assert 0 <= value <= 1
