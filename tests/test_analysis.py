"""The analysis inside `mergekit-yaml`, from files on disk to the plan and the merge."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    make_recipe,
    save_model,
)
from test_streams import ARCHITECTURES, Family
from transformers import AutoTokenizer

from mergekit_himerging.analysis.calibration import TokenSequence
from mergekit_himerging.plan import read_plan

ROWS = {
    "a": [("abc", "defg"), ("what is 1?", "2"), ("xyz", "uvw."), ("q", "rst, 9")],
    "b": [("0123", "456"), ("name?", "zoe."), ("9 8 7", "6"), ("hello", "world")],
    "c": [("m n", "o p"), ("10", "11"), ("yes", "no, no"), ("t", "u")],
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep plans of earlier runs apart from the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(folder))
    return folder


def write_rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    path = folder / f"{name}.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def completions(name: str) -> list[dict[str, Any]]:
    return [{"prompt": p, "completion": c} for p, c in ROWS[name]]


def make_analysis(
    zoo: Path, folder: Path, *experts: str, of_model: Any = None, **parameters: Any
) -> dict[str, Any]:
    """Make a recipe with calibration data for each expert, and a plan file."""
    recipe = make_recipe(
        zoo,
        *experts,
        parameters={"plan_out": str(folder / "plan.json"), **parameters},
    )
    for model, name in zip(recipe["models"], experts, strict=True):
        calibration = write_rows(folder, name, completions(name))
        model["parameters"] = {"calibration": calibration, **(of_model or {})}
    return recipe


def encode(tokenizer: Any, prompt: str, completion: str) -> TokenSequence:
    # As transformers loads it: some architectures split text in their own way.
    tokens = tokenizer(
        prompt + completion, add_special_tokens=False, return_offsets_mapping=True
    )
    n_prompt = sum(end <= len(prompt) for _, end in tokens["offset_mapping"])
    return TokenSequence(ids=tuple(tokens["input_ids"]), n_prompt=n_prompt)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plan_equals_brute_force_on_files(architecture, merge, tmp_path):
    family = Family(architecture, 2)
    names = {"expert0": "a", "expert1": "b"}
    states = {"base": family.base}
    states |= {names[m]: family.plus(d) for m, d in family.deltas.items()}
    for name, state in states.items():
        family.model.load_state_dict(state)
        save_model(family.model, tmp_path / name)
    merged = merge(
        make_analysis(tmp_path, tmp_path, "a", "b", accept_share=0.0, compare="raw")
    )
    plan = read_plan(tmp_path / "plan.json")
    assert plan.n_layers == family.n_layers
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")

    for report in plan.tasks:
        name = Path(report.model).name
        delta = family.deltas[{v: k for k, v in names.items()}[name]]
        texts = [[encode(tokenizer, *row)] for row in ROWS[name]]

        def score(state: dict[str, torch.Tensor], texts: Any = texts) -> float:
            each = [family.score(state, text).mean() for text in texts]
            return float(torch.stack(each).mean())

        def near(value: float) -> Any:
            return pytest.approx(value, abs=1e-5)

        base, whole = score(family.base), family.merge_delta
        single, both = score(family.plus(delta)), score(family.plus(whole))
        assert report.score_base == near(base)
        assert report.score_single == near(single)
        assert report.score_merged == near(both)
        for layer, found in enumerate(report.layers):
            removal = single - score(family.minus_layer(delta, layer))
            addition = score(family.plus(delta, {layer})) - base
            removal_merged = both - score(family.minus_layer(whole, layer))
            addition_merged = score(family.plus(whole, {layer})) - base
            assert found.removal_single == near(removal)
            assert found.addition_single == near(addition)
            assert found.removal_merged == near(removal_merged)
            assert found.addition_merged == near(addition_merged)
            conflict = removal + addition - removal_merged - addition_merged
            assert found.conflict == pytest.approx(conflict, abs=4e-5)
    assert merged
