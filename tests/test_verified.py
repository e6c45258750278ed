"""What is written is what was planned, or there is nothing that looks finished."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import make_recipe
from mergekit import merge as mergekit_merge
from mergekit.io.tasks import SaveTensor
from safetensors.torch import load_file, save_file

MODEL = "model.safetensors"


def spoil(monkeypatch, change):
    """Change the merged folder after MergeKit's last step in it."""
    last = mergekit_merge._copy_tagalong_files

    def after(merge_config, out_path, **rest):
        last(merge_config, out_path, **rest)
        change(Path(out_path))

    monkeypatch.setattr(mergekit_merge, "_copy_tagalong_files", after)


def flip(folder: Path) -> None:
    """Change one value of every tensor, as a bad disk or too little memory might."""
    tensors = load_file(folder / MODEL)
    for tensor in tensors.values():
        tensor.view(-1)[0] += 1
    save_file(tensors, folder / MODEL)


def drop(folder: Path) -> None:
    tensors = load_file(folder / MODEL)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / MODEL)


def add(folder: Path) -> None:
    save_file({**load_file(folder / MODEL), "odd": torch.zeros(1)}, folder / MODEL)


def truncate(folder: Path) -> None:
    content = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes(content[: len(content) // 2])


def leave_shard(folder: Path) -> None:
    """A shard that no index names."""
    save_file({"odd": torch.zeros(1)}, folder / "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (flip, "another '.*' than its merge gives"),
        (drop, r"1 tensors missing \(the first: model.norm.weight\)"),
        (add, r"1 tensors never planned \(the first: odd\)"),
        (truncate, "merged model must be what was planned"),
        (leave_shard, r"do not share: \['model-00002-of-00002.safetensors'\]"),
    ],
)
def test_folder_that_is_not_the_merge_is_not_kept(
    zoo, run_recipe, tmp_path, monkeypatch, change, problem
):
    spoil(monkeypatch, change)
    out = tmp_path / "merged"
    result = run_recipe(make_recipe(zoo, "a", "b"), out=out)
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert re.search(problem, text), text
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))


def test_shards_are_verified_through_their_index(zoo, merge, tmp_path):
    out = tmp_path / "merged"
    run = ("--out-shard-size", "20000")
    with pytest.raises(FileNotFoundError, match=MODEL):
        merge(make_recipe(zoo, "a", "b"), *run, out=out)
    index = json.loads((out / f"{MODEL}.index.json").read_text(encoding="utf-8"))
    shards = {name: load_file(out / name) for name in set(index["weight_map"].values())}
    assert len(shards) > 1
    whole = merge(make_recipe(zoo, "a", "b"), out=tmp_path / "whole")
    for name, shard in index["weight_map"].items():
        assert torch.equal(shards[shard][name], whole[name])


def test_failure_while_writing_leaves_what_was_there(
    zoo, run_recipe, tmp_path, monkeypatch
):
    out = tmp_path / "merged"
    out.mkdir()
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    execute, count = SaveTensor.execute, iter(range(100))

    def failing(self, **inputs):
        if next(count) == 7:
            raise OSError(28, "No space left on device")
        return execute(self, **inputs)

    monkeypatch.setattr(SaveTensor, "execute", failing)
    assert run_recipe(make_recipe(zoo, "a", "b"), out=out).exit_code == 1
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    monkeypatch.setattr(SaveTensor, "execute", execute)
    assert run_recipe(make_recipe(zoo, "a", "b"), out=out).exit_code == 0
    assert (out / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert (out / MODEL).is_file()
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_what_cannot_be_verified_is_said(zoo, run_recipe, caplog):
    result = run_recipe(make_recipe(zoo, "a", "b"), "--no-safe-serialization")
    assert result.exit_code == 0, result.output
    assert "not in safetensors, so it is not verified" in caplog.text


def test_output_under_a_file_is_one_sentence(zoo, run_recipe, tmp_path):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    result = run_recipe(make_recipe(zoo, "a", "b"), out=tmp_path / "file" / "merged")
    assert result.exit_code == 1
    assert result.output == (
        "Error: the output folder must be one that can be written, got Not a "
        f"directory ('{tmp_path}/file/merged'); name another\n"
    )
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_config_names_the_dtype_of_the_files(zoo, run_recipe, tmp_path, monkeypatch):
    """MergeKit takes it from the base or the recipe, whatever was written."""

    def lie(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = "bfloat16"
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

    spoil(monkeypatch, lie)
    out = tmp_path / "merged"
    assert run_recipe(make_recipe(zoo, "a", "b"), out=out).exit_code == 0
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == "float32"
