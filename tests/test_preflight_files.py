"""Files that are no weights, or not all of them, and folders that hold too much."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_llama, make_recipe, save_model
from preflight_cases import (
    Case,
    copy_model,
    edit_json,
    edit_tensors,
    inspect,
    recipe_of,
    with_base,
    with_expert,
)
from safetensors.torch import load_file, save_file

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456789\n"
UP = "model.layers.1.mlp.up_proj"
WEIGHTS = "model.safetensors"


def set_tensors(**tensors: torch.Tensor):
    """Make an edit that sets tensors; dots are written as two underscores."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return lambda folder: edit_tensors(folder, lambda held: held.update(named))


def convert(name: str, dtype: torch.dtype):
    """Make an edit that stores one tensor in another type."""

    def change(tensors):
        tensors[name] = tensors[name].to(dtype)

    return lambda folder: edit_tensors(folder, change)


def replace(name: str, content: str | bytes):
    """Make an edit that overwrites a file."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def keep_only(*names: str, rename: str | None = None):
    """Make an edit that leaves only some files; the weights may get another name."""

    def edit(folder: Path) -> None:
        if rename is not None:
            (folder / WEIGHTS).rename(folder / rename)
        for path in folder.iterdir():
            if path.name not in (*names, rename):
                path.unlink()

    return edit


def set_config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def shard(folder: Path) -> dict[str, str]:
    """Store a model in two shards with an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9]}
    parts["model-00002-of-00002.safetensors"] = names[9:]
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    places = {name: file for file, held in parts.items() for name in held}
    write_index(folder, places)
    return places


def write_index(folder: Path, places: dict[str, str]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": places})
    (folder / f"{WEIGHTS}.index.json").write_text(text, encoding="utf-8")


def lose_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def lose_index(folder: Path) -> None:
    shard(folder)
    (folder / f"{WEIGHTS}.index.json").unlink()


def misname_in_index(folder: Path) -> None:
    places = shard(folder)
    write_index(folder, {**places, "model.extra.weight": next(iter(places.values()))})


def leave_out_of_index(folder: Path) -> None:
    places = shard(folder)
    shards = list(dict.fromkeys(places.values()))
    tensors = load_file(folder / shards[0])
    save_file({**tensors, "v_head.weight": torch.ones(1)}, folder / shards[0])


def keep_old_single(folder: Path) -> None:
    shutil.copy(folder / WEIGHTS, folder / "old")
    shard(folder)
    (folder / "old").rename(folder / WEIGHTS)


def keep_old_shards(folder: Path) -> None:
    shutil.copy(folder / WEIGHTS, folder / "model-00001-of-00003.safetensors")


def truncate(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-100])


def truncate_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    data = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(data[: len(data) // 2])


QUANT = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
FLOATING = "must have weights in floating point, got"
QUANTISED = {
    "FP8 in an expert": Case(
        with_expert(convert(f"{UP}.weight", torch.float8_e4m3fn)),
        "error",
        ("model '{here}/a'", f"{FLOATING} F8_E4M3 ('{UP}.weight')", "quantisation"),
    ),
    "FP8 in the base": Case(
        with_base(convert(f"{UP}.weight", torch.float8_e5m2), dtype="bfloat16"),
        "error",
        ("base model '{here}/base'", f"{FLOATING} F8_E5M2 ('{UP}.weight')"),
    ),
    "8-bit of bitsandbytes": Case(
        with_expert(convert(f"{UP}.weight", torch.int8)),
        "error",
        ("model '{here}/a'", f"{FLOATING} I8 ('{UP}.weight')"),
    ),
    "scales beside the weights": Case(
        with_expert(
            set_tensors(model__layers__0__mlp__up_proj__weight_scale_inv=torch.ones(2))
        ),
        "error",
        ("model '{here}/a'", f"{FLOATING} F32 (", "up_proj.weight_scale_inv'"),
    ),
    "4-bit of bitsandbytes": Case(
        with_expert(
            set_tensors(
                model__layers__0__mlp__up_proj__weight=torch.ones(
                    768, 1, dtype=torch.uint8
                ),
                model__layers__0__mlp__up_proj__weight__absmax=torch.ones(24),
            )
        ),
        "error",
        ("model '{here}/a'", f"{FLOATING} F32 and U8 (", "up_proj.weight.absmax'"),
    ),
    "GPTQ": Case(
        with_expert(
            set_tensors(
                model__layers__0__mlp__up_proj__qweight=torch.ones(
                    4, 48, dtype=torch.int32
                )
            )
        ),
        "error",
        ("model '{here}/a'", f"{FLOATING} I32 (", "up_proj.qweight'"),
    ),
    "config alone": Case(
        with_expert(set_config(**QUANT)),
        "error",
        ("'{here}/a' must not be quantised, got 'quantization_config' bitsandbytes",),
    ),
    "gguf alone": Case(
        with_expert(keep_only("config.json", rename="model-q4_k_m.gguf")),
        "error",
        ("'{here}/a' must hold a model", "gguf files alone"),
    ),
}
DAMAGED = {
    "cut short": Case(
        with_expert(truncate),
        "error",
        (f"'{{here}}/a/{WEIGHTS}' must have", "bytes, got", "download it anew"),
    ),
    "header longer than the file": Case(
        with_expert(replace(WEIGHTS, (10**6).to_bytes(8, "little") + b"{}")),
        "error",
        (f"'{{here}}/a/{WEIGHTS}'", "a header of 1000000 bytes in 10"),
    ),
    "git-lfs pointer": Case(
        with_expert(replace(WEIGHTS, POINTER)),
        "error",
        (f"'{{here}}/a/{WEIGHTS}'", "got a git-lfs pointer", "'git lfs pull'"),
    ),
    "web page": Case(
        with_expert(replace(WEIGHTS, "<!DOCTYPE html><html>404</html>")),
        "error",
        (f"'{{here}}/a/{WEIGHTS}'", "got a web page"),
    ),
    "empty file": Case(
        with_base(replace(WEIGHTS, b"")),
        "error",
        (f"'{{here}}/base/{WEIGHTS}'", "got an empty file"),
    ),
    "half a PyTorch file": Case(
        with_expert(truncate_pickle),
        "error",
        ("'{here}/a/pytorch_model.bin' must be a PyTorch file of plain tensors",),
    ),
    "tokenizer as a pointer": Case(
        with_base(replace("tokenizer.json", POINTER)),
        "error",
        ("'{here}/base/tokenizer.json' must be a tokenizer, got a git-lfs pointer",),
    ),
    "tokenizer of an expert as a pointer": Case(
        with_expert(replace("tokenizer.json", POINTER)),
        "warning",
        ("'{here}/a/tokenizer.json' must be a tokenizer, got a git-lfs pointer",),
    ),
    "generation settings as a page": Case(
        with_base(replace("generation_config.json", "<html></html>")),
        "warning",
        ("'{here}/base/generation_config.json' must be a JSON mapping, got a web",),
    ),
    "index as a pointer": Case(
        with_expert(replace(f"{WEIGHTS}.index.json", POINTER)),
        "error",
        (f"'{{here}}/a/{WEIGHTS}.index.json' must be a JSON mapping, got a git-lfs",),
    ),
    "missing shard": Case(
        with_expert(lose_shard),
        "error",
        ("must name files that exist, got 'model-00002-of-00002.safetensors'",),
    ),
    "tensor that its shard lacks": Case(
        with_expert(misname_in_index),
        "error",
        ("'{here}/a/model-0000", "says, got no 'model.extra.weight'"),
    ),
    "tensor that the index lacks": Case(
        with_expert(leave_out_of_index),
        "warning",
        ("'{here}/a/", "got none of 'v_head.weight'", "they are not merged"),
    ),
    "shards without an index": Case(
        with_expert(lose_index), "error", ("'{here}/a'", "got shards without an index")
    ),
    "an index and another single file": Case(
        with_expert(keep_old_single),
        "error",
        ("'{here}/a' must hold one checkpoint, got 'model.safetensors' and",),
    ),
    "shards of an earlier save": Case(
        with_expert(keep_old_shards),
        "warning",
        ("'{here}/a' must hold one checkpoint", "'model-00001-of-00003.safetensors'"),
    ),
    "an adapter as a model": Case(
        with_expert(
            lambda folder: (
                keep_only("config.json")(folder),
                replace("adapter_config.json", "{}")(folder),
            )
        ),
        "error",
        ("'{here}/a' must hold a model", "an adapter alone", "base+{here}/a'"),
    ),
    "weights under another name": Case(
        with_expert(keep_only("config.json", rename="consolidated.safetensors")),
        "error",
        ("'{here}/a'", "got 'consolidated.safetensors' alone", "save_pretrained"),
    ),
    "no weights": Case(
        with_expert(keep_only("config.json")),
        "error",
        ("'{here}/a' must hold a model", "got no weights"),
    ),
}


@pytest.mark.parametrize("case", QUANTISED.values(), ids=QUANTISED.keys())
def test_quantised_model_is_an_error(zoo, tmp_path, case):
    case.check(zoo, tmp_path)


@pytest.mark.parametrize("case", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_or_incomplete_file_is_named(zoo, tmp_path, case):
    case.check(zoo, tmp_path)


def with_output(*names: str, **changes):
    """Make a good recipe and an output folder with these files in it."""

    def make(zoo, here):
        (here / "out").mkdir()
        for name in names:
            (here / "out" / name).write_text("{}", encoding="utf-8")
        return make_recipe(zoo, "a", **changes)

    return make


LEFTOVERS = "the output folder must hold no files of another model, got"
OUTPUTS = {
    "an index": Case(
        with_output("model.safetensors.index.json"),
        "error",
        (f"{LEFTOVERS} 'model.safetensors.index.json' ('{{here}}/out')", "remove them"),
        out=True,
    ),
    "a shard": Case(
        with_output("model-00002-of-00002.safetensors"),
        "error",
        (f"{LEFTOVERS} 'model-00002-of-00002.safetensors'",),
        out=True,
    ),
    "a merge that was stopped": Case(
        with_output("model-1.safetensors"),
        "error",
        (f"{LEFTOVERS} 'model-1.safetensors'",),
        out=True,
    ),
    "another format": Case(
        with_output("pytorch_model.bin"),
        "error",
        (f"{LEFTOVERS} 'pytorch_model.bin'",),
        out=True,
    ),
    "an adapter": Case(
        with_output("adapter_config.json"),
        "error",
        (f"{LEFTOVERS} 'adapter_config.json'",),
        out=True,
    ),
    "one file where shards come": Case(
        with_output("model.safetensors"),
        "error",
        (f"{LEFTOVERS} 'model.safetensors'",),
        options={"out_shard_size": 20000},
        out=True,
    ),
    "a chat template": Case(
        with_output("chat_template.jinja"),
        "warning",
        ("no tokenizer files of another model, got 'chat_template.jinja'",),
        out=True,
    ),
}


@pytest.mark.parametrize("case", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_what_the_merge_would_not_write_over_is_named(zoo, tmp_path, case):
    case.check(zoo, tmp_path)


def test_output_that_is_a_file_is_an_error(zoo, tmp_path):
    (tmp_path / "out").touch()
    (found,) = inspect(make_recipe(zoo, "a"), out=tmp_path / "out")
    assert found.level == "error"
    assert "the output must be a folder, got a file" in found.text


def test_merge_that_is_written_over_by_the_same_is_no_finding(zoo, tmp_path):
    make = with_output("model.safetensors", "config.json", "tokenizer.json")
    assert inspect(make(zoo, tmp_path), out=tmp_path / "out") == []


def test_sharded_model_and_pytorch_file_are_no_finding(zoo, tmp_path):
    folder = copy_model(zoo, tmp_path, "a")
    shard(folder)
    other = copy_model(zoo, tmp_path, "b")
    torch.save(load_file(other / WEIGHTS), other / "pytorch_model.bin")
    (other / WEIGHTS).unlink()
    assert inspect(recipe_of(zoo, folder, other)) == []


def test_integer_buffers_are_no_quantised_weights(zoo, tmp_path):
    folder = copy_model(zoo, tmp_path, "a")
    set_tensors(model__position_ids=torch.arange(4))(folder)
    assert inspect(recipe_of(zoo, folder)) == []


def test_old_pickle_is_said_to_be_unchecked(zoo, tmp_path):
    model = save_model(make_llama(seed=3), tmp_path / "old")
    torch.save(
        load_file(model / WEIGHTS),
        model / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )
    (model / WEIGHTS).unlink()
    found = inspect(recipe_of(zoo, model))
    assert [f.level for f in found] == ["warning"]
    assert "must be in PyTorch's zip format to be checked" in found[0].text
