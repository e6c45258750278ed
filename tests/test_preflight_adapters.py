"""Adapters, and cached merges that are not theirs any more."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from conftest import make_llama, make_recipe, save_model
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from preflight_cases import (
    Case,
    copy_model,
    edit_json,
    inspect,
    recipe_of,
)

from mergekit_himerging.preflight import inspect_recipe


def save_adapter(zoo: Path, folder: Path, *, seed: int = 1, **config: Any) -> Path:
    """Save an adapter of the zoo's base with seeded weights that do something."""
    base = transformers.AutoModelForCausalLM.from_pretrained(zoo / "base")
    torch.manual_seed(seed)
    settings = peft.LoraConfig(
        **{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], **config}
    )
    model = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(folder)
    return folder


def merge_adapter(zoo: Path, lora: Path, cache: Path, dtype: str = "float32") -> Path:
    """Let MergeKit merge an adapter into its cache."""
    reference = ModelReference.parse(f"{zoo}/base+{lora}")
    merged = reference.merged(str(cache), lora_merge_dtype=dtype)
    return Path(merged.model.path)


def with_adapter(edit=lambda zoo, here, lora: None, **config: Any):
    """Make a recipe for the base with an adapter `{here}/lora`, then edit."""

    def make(zoo, here):
        lora = save_adapter(zoo, here / "lora", **config)
        edit(zoo, here, lora)
        return make_recipe(zoo, models=[{"model": f"{zoo}/base+{lora}"}])

    return make


def train_anew(zoo, here, lora):
    merge_adapter(zoo, lora, here / "cache")
    before = (lora / "adapter_model.safetensors").stat()
    save_adapter(zoo, lora, seed=2)
    for path in lora.iterdir():  # as a copy that keeps the times would
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def train_anew_with_dora(zoo, here, lora):
    merged = merge_adapter(zoo, lora, here / "cache")
    save_adapter(zoo, lora, seed=2, use_dora=True)
    later = (merged / "config.json").stat().st_mtime + 60
    os.utime(lora / "adapter_model.safetensors", (later, later))


def train_base_anew(zoo, here, lora):
    """Merge another base into the cache, under the name of this one."""
    other = copy_model(zoo, here, "c", "base")
    merged = merge_adapter(here, lora, here / "other-cache")
    assert other.is_dir()
    target = merge_adapter(zoo, lora, here / "cache")
    shutil.rmtree(target)
    shutil.copytree(merged, target)


def stop_the_merge(zoo, here, lora):
    merged = merge_adapter(zoo, lora, here / "cache")
    for path in merged.iterdir():
        path.unlink()


def cut_the_merge(zoo, here, lora):
    path = merge_adapter(zoo, lora, here / "cache") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def merge_in_bfloat16(zoo, here, lora):
    merge_adapter(zoo, lora, here / "cache", "bfloat16")


def name_other_base(zoo, here, lora):
    edit_json(lora / "adapter_config.json", base_model_name_or_path="org/Other-7B")


def lose_config(zoo, here, lora):
    (lora / "adapter_config.json").unlink()


def lose_weights(zoo, here, lora):
    (lora / "adapter_model.safetensors").unlink()


def beside_a_model(zoo, here):
    folder = copy_model(zoo, here, "a")
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    return recipe_of(zoo, folder)


CACHE = {"lora_merge_cache": "{here}/cache", "lora_merge_dtype": "float32"}
STALE = "must be of the adapter as it is now, got one of other weights"
ADAPTERS = {
    "trained anew": Case(
        with_adapter(train_anew),
        "error",
        ("the cached merge of '{zoo}/base+{here}/lora'", STALE, "remove '{here}/cache"),
        CACHE,
    ),
    "trained anew, of a kind that is only known by its time": Case(
        with_adapter(train_anew_with_dora),
        "error",
        ("the cached merge of '{zoo}/base+{here}/lora'", STALE),
        CACHE,
    ),
    "base trained anew": Case(
        with_adapter(train_base_anew),
        "error",
        ("the cached merge of '{zoo}/base+{here}/lora'", STALE),
        CACHE,
    ),
    "a cached merge that was stopped": Case(
        with_adapter(stop_the_merge),
        "error",
        ("the cached merge of '{zoo}/base+{here}/lora' must be whole, got",),
        CACHE,
    ),
    "a cached merge that was cut": Case(
        with_adapter(cut_the_merge),
        "error",
        ("the cached merge of '{zoo}/base+{here}/lora' must be whole", "bytes, got"),
        CACHE,
    ),
    "a cached merge in another type": Case(
        with_adapter(merge_in_bfloat16),
        "error",
        ("must be in '--lora-merge-dtype float32', got BF16", "remove '{here}/cache"),
        CACHE,
    ),
    "no cache": Case(
        with_adapter(),
        "error",
        ("adapters must have a folder to be merged in", "'--lora-merge-cache cache/'"),
    ),
    "of another base": Case(
        with_adapter(name_other_base),
        "warning",
        ("adapter '{here}/lora' must be put on", "'{zoo}/base'", "'org/Other-7B'"),
        CACHE,
    ),
    "no adapter": Case(
        with_adapter(lose_config),
        "error",
        ("'{here}/lora' must be an adapter, got no 'adapter_config.json'",),
        CACHE,
    ),
    "no weights": Case(
        with_adapter(lose_weights),
        "error",
        ("'{here}/lora' must hold 'adapter_model.safetensors', got no weights",),
        CACHE,
    ),
    "beside a model": Case(
        beside_a_model,
        "warning",
        ("'{here}/a' must be a model or an adapter, got both in one folder",),
    ),
}


@pytest.mark.parametrize("case", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_adapter_that_would_not_be_merged_as_it_is_is_named(zoo, tmp_path, case):
    case.check(zoo, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cached_merge_of_the_adapter_as_it_is_is_no_finding(zoo, tmp_path, dtype):
    def touch(zoo, here, lora):
        merged = merge_adapter(zoo, lora, here / "cache", dtype)
        later = (merged / "config.json").stat().st_mtime + 60
        for path in lora.iterdir():
            os.utime(path, (later, later))

    recipe = with_adapter(touch)(zoo, tmp_path)
    cache = str(tmp_path / "cache")
    assert inspect(recipe, lora_merge_cache=cache, lora_merge_dtype=dtype) == []


def test_quantised_copy_of_the_base_counts_as_the_base(zoo, tmp_path):
    def rename(zoo, here, lora):
        name = "org/base-unsloth-bnb-4bit"
        edit_json(lora / "adapter_config.json", base_model_name_or_path=name)

    recipe = with_adapter(rename)(zoo, tmp_path)
    assert inspect(recipe, lora_merge_cache=str(tmp_path / "cache")) == []


def test_adapter_on_a_tied_head_is_a_warning(tmp_path):
    save_model(make_llama(seed=0, tied=True), tmp_path / "base")
    with pytest.warns(UserWarning, match="tie"):
        lora = save_adapter(tmp_path, tmp_path / "lora", modules_to_save=["lm_head"])
    recipe = make_recipe(tmp_path, models=[{"model": f"{tmp_path}/base+{lora}"}])
    config = json.loads((lora / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["modules_to_save"] == ["lm_head"]
    found = inspect_recipe(
        MergeConfiguration.model_validate(recipe),
        MergeOptions(lora_merge_cache=str(tmp_path / "cache")),
        None,
    )
    assert any("must not change 'lm_head' of a base with" in f.text for f in found)
