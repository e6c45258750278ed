"""Every recipe in the repository is loaded, and run where its models are there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import run_command
from mergekit.config import MergeConfiguration
from mergekit.scripts.run_yaml import main as mergekit_yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergekit_himerging.plan import read_plan
from mergekit_himerging.recipe import check_config, check_document

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*/*.yml"))  # not those of merged folders


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """One cache, so that the quick start is analysed once."""
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(autouse=True)
def at_root(monkeypatch, plans):
    """Recipes are run from the repository root."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(plans))


def generate(folder: Path, prompt: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**tokens, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(out[0, tokens["input_ids"].shape[1] :])


def test_there_are_recipes():
    assert {path.parent.name for path in RECIPES} >= {"quickstart", "smollm2-medical"}


@pytest.mark.parametrize(
    "path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_recipe_has_no_problems_and_says_how_it_is_run(path):
    text = path.read_text(encoding="utf-8")
    assert f"mergekit-yaml {path.relative_to(ROOT).as_posix()}" in text
    raw = yaml.safe_load(text)
    config = MergeConfiguration.model_validate(raw)
    assert check_document(raw, MergeConfiguration) == []
    if config.merge_method == "hi_merging":
        assert check_config(config) == []
    for model in config.referenced_models():
        # MergeKit's card step asks a hub about local paths with one slash at most.
        assert model.model.path.count("/") > 1


def test_quick_start_measures_every_layer_and_merges(tmp_path):
    out = tmp_path / "out"
    recipe = "recipes/quickstart/recipe.yml"
    result = run_command(mergekit_yaml, recipe, str(out))
    assert result.exit_code == 0, result.output
    plan = read_plan(out / "hi_merging_plan.json")
    assert [len(task.layers) for task in plan.tasks] == [plan.n_layers] * 2
    assert f"plan written to {out}" in result.output
    assert all(task.score_single > task.score_base for task in plan.tasks)
    assert generate(out, "Who")


def test_example_in_the_readme_runs(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:5] for line in lines[:2]] == [
        ["suffers", "most", "in", "layer"]
    ] * 2
    assert lines[2].endswith(" treated")
    assert "nats per token" in lines[3]
    assert "Values(density=" in lines[-1]


@pytest.mark.real
def test_real_experts_merge_and_answer(tmp_path):
    folder = ROOT / "recipes" / "smollm2-medical"
    if not (folder / "base").is_dir():
        command = [sys.executable, str(folder / "prepare.py")]
        subprocess.run(command, check=True)
    out = tmp_path / "out"
    result = run_command(
        *(mergekit_yaml, str(folder.relative_to(ROOT) / "english.yml"), str(out)),
        *("--lora-merge-cache", str(tmp_path / "adapters")),
        *("--lora-merge-dtype", "float32"),
    )
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert generate(out, "What is anemia?\nAnswer:").strip()
