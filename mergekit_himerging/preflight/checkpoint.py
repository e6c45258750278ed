"""The weight files of a folder, as MergeKit finds them: names, types and shapes.

Invariant: only headers and indexes are read; every file that cannot be used is a
finding that says what the file is instead.
"""

import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mergekit_himerging.preflight.finding import Finding, list_names
from mergekit_himerging.preflight.headers import (
    Stored,
    describe_error,
    read_header,
    read_json,
    read_pickle,
)

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""What MergeKit looks for, alone or with `.index.json`, in this order."""


@dataclass(slots=True)
class Checkpoint:
    """What a folder holds.

    Attributes:
        folder: where.
        tensors: what can be read, by name.
        findings: what is wrong with the files.
        is_whole: whether every tensor's name is known.
    """

    folder: Path
    tensors: dict[str, Stored] = field(default_factory=dict)
    is_whole: bool = True
    findings: list[Finding] = field(default_factory=list)

    def refuse(self, text: str) -> None:
        """Add an error."""
        self.is_whole = False
        self.findings.append(Finding("error", text))

    def warn(self, text: str) -> None:
        """Add a warning."""
        self.findings.append(Finding("warning", text))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read names, types and shapes of all tensors of a folder, and what is wrong."""
    checkpoint = Checkpoint(folder)
    for name in WEIGHT_FILES:
        single, index = folder / name, folder / f"{name}.index.json"
        if index.exists():
            _read_sharded(checkpoint, index, single)
            return checkpoint
        if single.exists():
            checkpoint.tensors.update(_read_file(checkpoint, single))
            _warn_of_strays(checkpoint, {name})
            return checkpoint
    checkpoint.refuse(_explain_missing(folder))
    return checkpoint


def _is_old_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(2)
    return start == b"\x80\x02" and not zipfile.is_zipfile(path)


def _read_file(checkpoint: Checkpoint, path: Path) -> dict[str, Stored]:
    if path.suffix != ".safetensors" and _is_old_pickle(path):
        checkpoint.is_whole = False
        checkpoint.warn(
            f"'{path}' must be in PyTorch's zip format to be checked, got the format "
            "before 1.6; save the model as safetensors"
        )
        return {}
    try:
        return read_header(path) if path.suffix == ".safetensors" else read_pickle(path)
    except ValueError as error:
        checkpoint.refuse(str(error))
    except OSError as error:
        checkpoint.refuse(describe_error(error))
    return {}


def _read_sharded(checkpoint: Checkpoint, index: Path, single: Path) -> None:
    try:
        places = read_json(index)["weight_map"]
        names = {str(file) for file in places.values()}
    except (ValueError, OSError) as error:
        checkpoint.refuse(describe_error(error))
        return
    except (KeyError, AttributeError):
        checkpoint.refuse(
            f"'{index}' must have a 'weight_map' of file names, got none; "
            "download it anew"
        )
        return
    if single.exists() and single.name not in names:
        checkpoint.refuse(
            f"'{checkpoint.folder}' must hold one checkpoint, got '{single.name}' and "
            f"'{index.name}' for other files; MergeKit reads the index, transformers "
            "the single file, so remove what is old"
        )
    missing = sorted(n for n in names if not (checkpoint.folder / n).exists())
    if missing:
        checkpoint.refuse(
            f"'{index}' must name files that exist, got {list_names(missing)}, which "
            "do not; download the rest of the model"
        )
    for name in sorted(names - set(missing)):
        held = _read_file(checkpoint, checkpoint.folder / name)
        wanted = {tensor for tensor, file in places.items() if file == name}
        checkpoint.tensors.update((t, held[t]) for t in wanted if t in held)
        if held and wanted - set(held):
            checkpoint.refuse(
                f"'{checkpoint.folder / name}' must hold what '{index.name}' says, got "
                f"no {list_names(sorted(wanted - set(held)))}; download both anew"
            )
        unnamed = sorted(set(held) - set(places))
        if unnamed:
            checkpoint.warn(
                f"'{index}' must name every tensor of its files, got none of "
                f"{list_names(unnamed)} ('{name}'); they are not merged, so write the "
                "model anew if they belong to it"
            )
    _warn_of_strays(checkpoint, names | {single.name})


def _warn_of_strays(checkpoint: Checkpoint, used: set[str]) -> None:
    strays = sorted(set(find_shards(checkpoint.folder)) - used)
    if strays:
        checkpoint.warn(
            f"'{checkpoint.folder}' must hold one checkpoint, got also "
            f"{list_names(strays)}, which nothing names; if the model was saved twice "
            "there, save it in a new folder"
        )


def find_shards(folder: Path) -> Iterator[str]:
    """Name the numbered weight files of a folder, also of a merge that was stopped."""
    for path in folder.iterdir():
        stem, kind = os.path.splitext(path.name)
        if kind in (".safetensors", ".bin") and stem.startswith(
            ("model-", "pytorch_model-")
        ):
            yield path.name


def _explain_missing(folder: Path) -> str:
    what = f"'{folder}' must hold a model that MergeKit reads, got"
    try:
        files = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return describe_error(error)
    kinds = {name.rpartition(".")[2].lower() for name in files}
    if "adapter_config.json" in files:
        return (
            f"{what} an adapter alone; write it behind its base, as "
            f"'path/to/base+{folder}'"
        )
    if "gguf" in kinds:
        return f"{what} gguf files alone; merge the model that they were made from"
    if any(name.startswith(("model-", "pytorch_model-")) for name in files):
        return f"{what} shards without an index; download '*.index.json' too"
    weights = [
        name
        for name in files
        if name.endswith((".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack"))
    ]
    if weights:
        return (
            f"{what} {list_names(weights)} alone; convert it to 'model.safetensors' "
            "with save_pretrained"
        )
    if any(name.startswith(("global_step", "zero_to_fp32")) for name in files):
        return f"{what} a DeepSpeed checkpoint; convert it with its 'zero_to_fp32.py'"
    return f"{what} no weights; download the whole model"
