"""Recipes, plans and data as a stranger or an accident might write them.

`make_*` write one case from a source of chance; `try_*` read it as the package does,
and raise what no user should see: anything but one sentence.
"""

import copy
import io
import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from mergekit.options import MergeOptions
from rich.console import Console

from mergekit_himerging import api
from mergekit_himerging.analysis.calibration import (
    choose_rows,
    hash_rows,
    read_rows,
)
from mergekit_himerging.analysis.overlap import hash_row
from mergekit_himerging.parameters import PARAMETERS
from mergekit_himerging.plan import read_plan
from mergekit_himerging.recipe import read_settings, read_tasks
from mergekit_himerging.views.markdown import write_card_section, write_report
from mergekit_himerging.views.table import plan_as_json, render_plan

LONGEST = 20_000
"""Characters of a sentence to the user, with names in it that may be long."""

ODD = (
    *(None, True, False, 0, -1, 1, 2**63, -(2**64), 10**400, 0.5, 1e308, -0.0),
    *("", " ", "x", "\0", "a\0.json", "../../etc/passwd", "/dev/zero", "~root", "."),
    *("a+b+c", "a@b@c", "+", "hf://x", "\u202e", "\ud800", "名", "x" * 300, "-"),
    *("/" * 300, "a/" * 3000, "/a" * 3000 + ".json", "1e999", "!!int", "${HOME}"),
    *([], {}, [[]], [None], {"": None}, {"value": 1}, [{"value": 1, "filter": "("}]),
    *([[[[[[[[]]]]]]]], {"a": {"b": {"c": {}}}}, list(range(50)), "$(touch PWNED)"),
)

SNIPPETS = (
    *("&a ", "*a", "<<: *a", "!!int", "!!timestamp x", "!!bool x", "!!set {x}", "? "),
    *("!!python/object/apply:os.system ['touch PWNED']", "!!binary ''", "%TAG ! x"),
    *("0x" + "f" * 5000, "1" * 5000, ".nan", ".inf", "1e999", "2020-99-99", "190:20"),
    *("[" * 2000, "{" * 2000, "- " * 500, "\0", "\ufeff", "\x85", "---\n", "...\n"),
    *("'", '"', "|", ">", "#", ":", "\t", "\n", "\\ud800", "\\u0000", "NaN", "1e400"),
    *('{"a":' * 500, "-Infinity", ",", "]", "}", "\u2028", "=", "@", "`", "~"),
)


def make_recipe_text(chance: random.Random, zoo: Path) -> str:
    """Write a recipe: a good one, with a few things done to it."""
    model = {"model": str(zoo / "a"), "parameters": {"weight": 0.5, "density": 0.5}}
    recipe: Any = {
        "merge_method": "hi_merging",
        "base_model": str(zoo / "base"),
        "models": [model, {"model": f"{zoo / 'b'}", "parameters": {"scale": 0.1}}],
        "parameters": {"normalize": True, "lambda": 1.0, "scope": "tensor"},
        "dtype": "float32",
        "tokenizer": {"source": "base"},
    }
    if chance.random() < 0.3:
        sources = [
            {"model": str(zoo / name), "layer_range": [0, 2]} for name in ("base", "a")
        ]
        del recipe["models"]
        recipe["slices"] = [{"sources": sources}]
    for _ in range(chance.randrange(3)):
        name = chance.choice(list(PARAMETERS))
        recipe["parameters"][name] = copy.deepcopy(chance.choice(ODD))
    for _ in range(chance.randrange(3)):
        _change(recipe, chance)
    try:
        text = yaml.safe_dump(recipe, allow_unicode=True, sort_keys=False)
    except (ValueError, yaml.YAMLError):  # a number or text that YAML cannot write
        text = repr(recipe)
    return _damage(text, chance)


def make_plan_text(chance: random.Random) -> str:
    """Write a plan: a good one, with a few things done to it."""
    scores = {
        **{"removal_single": 0.1, "addition_single": 0.1, "removal_merged": 0.1},
        **{"addition_merged": 0.1, "contribution_single": 0.2, "conflict_se": 0.1},
        **{"contribution_merged": 0.2, "conflict": 0.0},
    }
    plan: Any = {
        **{"schema": 1, "base": "/m/base", "models": ["/m/a", "org/b"], "n_layers": 2},
        "settings": {"mixed": "degraded"},
        "order": [1, 0],
        "tasks": [
            {
                **{"model": "/m/a", "metric": "loss", "calibration": "a.jsonl"},
                **{"n_samples": 2, "score_base": -1.0, "score_single": -0.5},
                "layers": [{"layer": 0, **scores}, {"layer": 1, **scores}],
            }
        ],
        "guard": {
            **{"setting": "report", "acted": False, "unit": "raw"},
            **{"difference": 0.1, "reason": "better"},
        },
        "recipe": {"merge_method": "hi_merging"},
        "warnings": ["mind '/m/a'"],
        "inputs": {"/m/a": "00"},
        "treatments": [
            {"layer": 0, "model": "/m/a", "action": "drop", "reason": "for '/m/a'"},
            {"layer": 1, "model": "org/b", "action": "set", "weight_factor": 0.5},
        ],
    }
    for _ in range(chance.randrange(4)):
        _change(plan, chance)
    return _damage(json.dumps(plan), chance)


def make_rows(chance: random.Random) -> tuple[str, bytes]:
    """Write a file of rows: its suffix and its bytes."""
    rows: Any = [
        {"prompt": "p", "completion": "c"},
        {"prompt": "p", "choices": ["x", "y"], "answer": "A"},
        {
            "messages": [
                {"role": "user", "content": "p"},
                {"role": "assistant", "content": "c"},
            ]
        },
        {"instruction": "i", "input": "", "output": "o"},
        {"text": "t"},
    ]
    for _ in range(chance.randrange(4)):
        _change(rows, chance)
    suffix = chance.choice([".jsonl", ".json", ".csv", ".parquet"])
    if suffix == ".json" or not isinstance(rows, list):
        text = json.dumps(rows)
    elif suffix == ".csv":
        text = "prompt,completion\n" + "".join(f"p{n},c\n" for n in range(5))
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    text = _damage(text, chance)
    data = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.2:
        place = chance.randrange(len(data) + 1)
        data = data[:place] + chance.randbytes(3) + data[place:]
    return suffix, data


def try_recipe(path: Path) -> bool:
    """Check a recipe as every command does; tells whether it is good."""
    try:
        read = api._read_recipe(path)
        read.check()
        if read.config.merge_method == "hi_merging":
            read_settings(read.config)
            read_tasks(read.config)
        problems = api.check(path, MergeOptions(quiet=True), out=path.parent / "out")
    except ValueError as error:
        assert_sentence(error)
        return False
    for problem in problems.problems:
        assert 0 < len(problem) <= LONGEST
    return not problems.problems


def try_plan(path: Path) -> bool:
    """Read a plan, write it again and show it; tells whether it is one."""
    try:
        plan = read_plan(path)
    except ValueError as error:
        assert_sentence(error)
        return False
    again = path.with_name("again.json")
    again.write_text(plan.to_json(), encoding="utf-8")
    assert read_plan(again).to_json() == plan.to_json()
    Console(file=io.StringIO(), width=120).print(render_plan(plan))
    plan_as_json(plan).encode("utf-8")
    for text in (
        write_report(plan, recipe=None, plot=None),
        write_card_section(plan, recipe=None),
    ):
        text.encode("utf-8")
    return True


def try_rows(path: Path) -> bool:
    """Read a file of rows as far as the tokenizer; tells whether it is good."""
    try:
        rows = read_rows(path.name, [path.parent])
    except ValueError as error:
        assert_sentence(error)
        return False
    assert len(hash_rows(choose_rows(rows, samples=3, seed=0))) == 64
    assert all(len(hash_row(row)) == 16 for row in rows)
    return True


def assert_sentence(error: ValueError) -> None:
    """Assert that an error says something, and no more than can be read."""
    text = str(error)
    assert text.strip()
    assert len(text) <= LONGEST, f"{len(text)} characters"
    assert not isinstance(error, UnicodeError), repr(error)


def _change(value: Any, chance: random.Random) -> None:
    """Change one thing somewhere in a document."""
    holder, places = value, 0
    while True:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        if not keys:
            return
        key: Any = chance.choice(list(keys))
        inner, places = holder[key], places + 1
        if not isinstance(inner, dict | list) or not inner or chance.random() < 0.3:
            break
        holder = inner
    kind = chance.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[chance.choice(["", "x", "path", "densty", "值"])] = holder.pop(key)
    elif kind == 2 and isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[key] = copy.deepcopy(chance.choice(ODD))


def _damage(text: str, chance: random.Random) -> str:
    """Change a text as a text, half of the time."""
    changes: list[Callable[[str, int], str]] = [
        lambda t, n: t[:n] + chance.choice(SNIPPETS) + t[n:],
        lambda t, n: t[:n] + t[n + chance.randrange(1, 9) :],
        lambda t, n: t[:n] + chance.choice(string.printable) + t[n + 1 :],
        lambda t, n: t[:n],
        lambda t, n: t + t[n:],
    ]
    for _ in range(chance.choice([0, 0, 1, 1, 2, 4])):
        text = chance.choice(changes)(text, chance.randrange(len(text) + 1))
    return text
