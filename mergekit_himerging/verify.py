"""A merged folder against what was planned, before it gets its name.

Invariant: files are read as transformers will read them, through the index, and the
samples are compared bit for bit with what the merge's own tasks give.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from mergekit.common import dtype_from_name
from mergekit.graph import Executor, Task

from mergekit_himerging.files import write_text
from mergekit_himerging.parameters import RecipeError
from mergekit_himerging.tasks import PlannedTensor

LOG = logging.getLogger(__name__)

INDEX_FILE, WHOLE_FILE = "model.safetensors.index.json", "model.safetensors"


def verify_folder(
    folder: Path,
    tensors: Sequence[PlannedTensor],
    *,
    out_dtype: str | None,
    device: str | None,
) -> None:
    """Check that a folder holds the merge.

    Names of all tensors, shards against the index, and of every layer and of what lies
    outside the layers one tensor, merged again and compared bit for bit. A config that
    names another dtype than the files have is mended, with a warning.

    Args:
        folder: with safetensors files; others are left alone.
        tensors: all planned tensors, with the values that they were merged with.
        out_dtype: the recipe's.
        device: the math device of the merge.

    Raises:
        RecipeError: something differs; the folder must not be used.
    """
    if not any(folder.glob("*.safetensors")):
        LOG.warning(
            "hi_merging: the merge is not in safetensors, so it is not verified"
        )
        return
    try:
        files = _read_files(folder)
        problems = _check_names(files, tensors)
        if not problems:
            problems = _check_samples(files, tensors, out_dtype, device)
            _mend_dtype(folder, files)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        problems = [str(error)]
    if problems:
        raise RecipeError(
            f"the merged model must be what was planned, got {'; '.join(problems)} "
            f"(in {folder.name}); it was removed, look at disk and memory and try again"
        )


def _read_files(folder: Path) -> dict[str, Path]:
    """Map each tensor's name to its file, as the index says and as the headers do."""
    present = {path.name for path in folder.glob("*.safetensors")}
    index = folder / INDEX_FILE
    if index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    else:
        with safetensors.safe_open(folder / WHOLE_FILE, framework="pt") as file:
            listed = dict.fromkeys(file.keys(), WHOLE_FILE)
    odd = sorted(present ^ set(listed.values()))
    if odd:
        raise ValueError(f"files that the index and the folder do not share: {odd}")
    held: dict[str, str] = {}
    for name in sorted(present):
        with safetensors.safe_open(folder / name, framework="pt") as file:
            held |= dict.fromkeys(file.keys(), name)
    wrong = sorted(n for n in {*listed, *held} if listed.get(n) != held.get(n))
    if wrong:
        raise ValueError(f"{len(wrong)} tensors not where the index says: {wrong[0]}")
    return {tensor: folder / name for tensor, name in held.items()}


def _check_names(
    files: Mapping[str, Path], tensors: Sequence[PlannedTensor]
) -> list[str]:
    planned = {tensor.weight.name for tensor in tensors}
    needed = {t.weight.name for t in tensors if not t.weight.optional}
    problems = []
    for words, names in (
        ("missing", needed - set(files)),
        ("never planned", set(files) - planned),
    ):
        if names:
            problems.append(f"{len(names)} tensors {words} (the first: {min(names)})")
    return problems


def _mend_dtype(folder: Path, files: Mapping[str, Path]) -> None:
    """Let the config name the dtype of the files: transformers converts to it."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    stored: Counter[str] = Counter()
    for file in set(files.values()):
        with safetensors.safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            stored.update(opened.get_slice(name).get_dtype() for name in names)
    known = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    dtypes = [known[dtype] for dtype, _ in stored.most_common() if dtype in known]
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if dtypes and config.get(key) != dtypes[0]:
        LOG.warning(
            "hi_merging: the merge's config said %s, its tensors are %s; the config "
            "is mended",
            *(config.get(key), dtypes[0]),
        )
        config[key] = dtypes[0]
        write_text(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _check_samples(
    files: Mapping[str, Path],
    tensors: Sequence[PlannedTensor],
    out_dtype: str | None,
    device: str | None,
) -> list[str]:
    """Merge one tensor of each layer again and compare it with the file's."""
    layers: dict[Any, list[PlannedTensor]] = {}
    for tensor in tensors:
        if tensor.weight.name in files:
            layers.setdefault((tensor.module, tensor.layer), []).append(tensor)
    for number, members in enumerate(layers.values()):
        # Not always the same kind: each layer's turn comes at another place.
        tensor = members[number % len(members)]
        executor = Executor(
            [cast(Task[Any], tensor.task)],
            math_device=torch.device(device or "cpu"),
            storage_device=torch.device("cpu"),
        )
        ((_, value),) = executor.run(quiet=True)
        dtype = dtype_from_name(tensor.weight.force_dtype or out_dtype)
        expected = value if dtype is None else value.to(dtype)
        name = tensor.weight.name
        with safetensors.safe_open(files[name], framework="pt") as file:
            found = file.get_tensor(name)
        same = found.shape == expected.shape and found.dtype == expected.dtype
        if not same or not torch.equal(found, expected):
            return [f"another '{name}' than its merge gives"]
    return []
