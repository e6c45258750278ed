"""A merge is tried before it gets its name, beside its base, from one prompt."""

import json
import logging
import shutil
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import (
    VOCABULARY,
    make_llama,
    make_recipe,
    make_tokenizer,
    run_command,
    save_model,
)
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.scripts.run_yaml import main as mergekit_yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergekit_himerging import smoke
from mergekit_himerging.parameters import RecipeError
from mergekit_himerging.smoke import PROMPT, try_merge
from mergekit_himerging.views.markdown import REPORT_FILE

REPEATS = "the merge repeats one token where the base does not"


@pytest.fixture(autouse=True)
def _whole_lines(monkeypatch):
    monkeypatch.setattr(smoke, "N_TOKENS", 16)


def make_counter() -> transformers.LlamaForCausalLM:
    """Make a model that goes on to the next word of the vocabulary each time."""
    model = make_llama(seed=0, hidden_size=len(VOCABULARY) + 6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.zero_().fill_diagonal_(1)
        model.lm_head.weight.zero_()
        for token in range(len(VOCABULARY)):
            model.lm_head.weight[(token + 1) % len(VOCABULARY), token] = 1
    return model


def make_stutterer() -> transformers.LlamaForCausalLM:
    """Make the same model, but one that says `q` whatever came before."""
    model = make_counter()
    with torch.no_grad():
        model.lm_head.weight[VOCABULARY.index("q")] = 9
    return model


def make_loud(model: transformers.LlamaForCausalLM) -> transformers.LlamaForCausalLM:
    """Let a model's logits overflow float32, though each of its weights is finite."""
    with torch.no_grad():
        model.model.norm.weight.fill_(3e38)
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_model(make_counter(), folder / "base")
    save_model(make_stutterer(), folder / "stutterer")
    save_model(make_loud(make_counter()), folder / "loud")
    save_model(make_loud(make_stutterer()), folder / "loud-stutterer")
    return folder


def run(recipe: dict[str, Any], folder: Path) -> Any:
    """Run a recipe, with a plan so that there is a report, and return what was said."""
    plan = {
        "schema": 1,
        "base": recipe["base_model"],
        "models": [model["model"] for model in recipe["models"]],
        "n_layers": 3,
        "treatments": [],
    }
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    recipe.setdefault("parameters", {})["plan"] = str(folder / "plan.json")
    path = folder / "recipe.yml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return run_command(mergekit_yaml, str(path), str(folder / "merged"))


def go_on(folder: Path) -> str:
    """Take the likeliest token each time, by whole forwards without a cache."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(PROMPT)["input_ids"]
    n_prompt = len(ids)
    for _ in range(16):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(ids[n_prompt:], skip_special_tokens=True))


def test_lines_are_the_likeliest_and_stand_in_the_report(zoo, tmp_path):
    said = run(make_recipe(zoo, "a", "b"), tmp_path)
    assert said.exit_code == 0, said.output
    lines = {"base": go_on(zoo / "base"), "merge": go_on(tmp_path / "merged")}
    assert lines["base"] != lines["merge"]
    report = (tmp_path / "merged" / REPORT_FILE).read_text(encoding="utf-8")
    for who, text in lines.items():
        assert f"hi_merging: smoke test, {who}: {text}\n" in said.output
        assert f"| {who} | {text} |" in report
    assert f"| prompt | {PROMPT} |" in report


def test_line_ends_with_the_models_own_end(pair, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(pair / "base", folder)
    settings = {"eos_token_id": VOCABULARY.index("h")}  # not the tokenizer's
    (folder / "generation_config.json").write_text(json.dumps(settings))
    lines = try_folders(folder, folder)
    assert lines["merge"] == "f g h"
    assert try_folders(pair / "base", folder)["base"].startswith("f g h i j")


def test_merge_of_infinite_logits_is_refused_unless_it_is_not_tried(pair, tmp_path):
    said = run(make_recipe(pair, "loud"), tmp_path)
    assert said.exit_code == 1
    assert said.output.count("Error:") == 1
    text = " ".join(said.output.split())
    assert "must give finite logits as its base does, got NaN or infinity" in text
    assert "'smoke_test: false' keeps it" in text
    assert not (tmp_path / "merged").exists()
    recipe = make_recipe(pair, "loud", parameters={"smoke_test": False})
    said = run(recipe, tmp_path)
    assert said.exit_code == 0, said.output
    assert "smoke test" not in said.output
    report = (tmp_path / "merged" / REPORT_FILE).read_text(encoding="utf-8")
    assert "Smoke test" not in report


def test_merge_that_repeats_one_token_is_kept_with_a_warning(pair, tmp_path, caplog):
    said = run(make_recipe(pair, "stutterer"), tmp_path)
    assert said.exit_code == 0, said.output
    assert f"smoke test: {REPEATS}" in caplog.text
    report = (tmp_path / "merged" / REPORT_FILE).read_text(encoding="utf-8")
    assert f"| found | {REPEATS} |" in report
    assert f"| merge | {' '.join('q' * 16)} |" in report


def try_folders(base: Path, merged: Path) -> dict[str, str]:
    options = MergeOptions()
    LoaderCache().setup(options=options)
    reference = ModelReference.model_validate({"model": {"path": str(base)}})
    return try_merge(merged, reference, options)


@pytest.mark.parametrize(
    ("base", "merged", "warned"),
    [
        ("base", "base", []),
        ("stutterer", "stutterer", []),
        ("stutterer", "base", []),
        ("loud", "loud", ["base and merge that are not finite"]),
        ("loud", "base", ["base and merge that are not finite"]),
    ],
)
def test_merge_is_held_against_its_base(pair, caplog, base, merged, warned):
    lines = try_folders(pair / base, pair / merged)
    assert lines.keys() >= {"prompt", "base", "merge"}
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == len(warned)
    assert all(words in text for words, text in zip(warned, found, strict=True))


def make_masked(folder: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
    )
    save_model(transformers.BertForMaskedLM(config), folder)


def remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "unheard-of"}')


def lose_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


BROKEN = {
    "another kind of model": (make_masked, "got BertForMaskedLM"),
    "no tokenizer": (remove_tokenizer, "tokenizer"),
    "unknown architecture": (break_config, "unheard-of"),
    "missing tensor": (lose_tensor, "1 tensors without a value (the first: model.norm"),
}


@pytest.mark.parametrize(("change", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_base_that_cannot_be_run_leaves_the_merge_untried(
    pair, tmp_path, caplog, change, reason
):
    folder = tmp_path / "base"
    shutil.copytree(pair / "base", folder)
    change(folder)
    caplog.set_level(logging.WARNING, logger="mergekit_himerging")
    assert try_folders(folder, pair / "base") == {}
    (record,) = (r for r in caplog.records if r.name == "mergekit_himerging.smoke")
    text = record.getMessage()
    assert f"no smoke test of the merge, since '{folder}' was not run: " in text
    assert reason in text


@pytest.mark.parametrize("name", ["unknown architecture", "missing tensor"])
def test_merge_that_cannot_be_run_as_its_base_is_refused(pair, tmp_path, name):
    change, reason = BROKEN[name]
    folder = tmp_path / "merged"
    shutil.copytree(pair / "base", folder)
    change(folder)
    with pytest.raises(RecipeError, match="must run as its base does") as caught:
        try_folders(pair / "base", folder)
    assert reason in str(caught.value)


def test_one_model_is_in_memory_at_a_time(pair, monkeypatch):
    earlier: list[Any] = []
    load = smoke._load

    def watch(folder: Path, *, trusts: bool) -> Any:
        assert [reference() for reference in earlier] == [None] * len(earlier)
        model = load(folder, trusts=trusts)
        earlier.append(weakref.ref(model.lm_head.weight))
        return model

    monkeypatch.setattr(smoke, "_load", watch)
    try_folders(pair / "base", pair / "stutterer")
    assert len(earlier) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_run_in_the_dtype_of_their_files(tmp_path, monkeypatch, dtype):
    folder = save_model(make_counter(), tmp_path / "base", dtype=dtype)
    loaded = []
    load = smoke._load
    monkeypatch.setattr(
        smoke, "_load", lambda *a, **k: loaded.append(load(*a, **k)) or loaded[-1]
    )
    assert try_folders(folder, folder)["merge"].startswith("f g h")
    assert {p.dtype for model in loaded for p in model.parameters()} == {dtype}


def test_model_that_does_not_fit_is_not_loaded(pair, monkeypatch, caplog):
    size = (pair / "base" / "model.safetensors").stat().st_size
    monkeypatch.setattr(
        smoke.psutil,
        "virtual_memory",
        lambda: types.SimpleNamespace(available=size),
    )
    monkeypatch.setattr(smoke, "_load", None)
    assert try_folders(pair / "base", pair / "base") == {}
    assert "was not run: memory must have 0.00 GiB for a model" in caplog.text


@pytest.mark.parametrize(
    ("bound", "used", "cached", "fits"),
    [
        ("max", 10**9, 0, True),
        ("2000000000", 10**9, 0, True),
        ("1000000000", 10**9, 10**8, True),
        ("1000000000", 10**9, 0, False),
    ],
)
def test_bound_of_a_container_counts(
    pair, tmp_path, monkeypatch, caplog, bound, used, cached, fits
):
    (tmp_path / "memory.max").write_text(f"{bound}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(
        f"anon 1\ninactive_file {cached}\nactive_file 0\n"
    )
    monkeypatch.setattr(smoke, "CGROUP", tmp_path)
    assert bool(try_folders(pair / "base", pair / "base")) == fits
    assert ("the container must have" in caplog.text) != fits


def test_tokenizer_is_that_of_each_model(pair, tmp_path):
    """As after a union, where ids of the base mean other words in the merge."""
    folder = tmp_path / "merged"
    shutil.copytree(pair / "base", folder)
    words = [*VOCABULARY[:3], *reversed(VOCABULARY[3:])]
    text = make_tokenizer().backend_tokenizer.to_str()
    content = json.loads(text)
    content["model"]["vocab"] = {word: i for i, word in enumerate(words)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    lines = try_folders(pair / "base", folder)
    assert lines["base"].startswith("f g h")
    assert lines["merge"].startswith("d c b a")
