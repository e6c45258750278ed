"""What single files hold: JSON, headers of safetensors and PyTorch files.

Invariant: no tensor is read; a file that is something else is named as what it is.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MAX_HEADER = 100 * 2**20
"""Bytes; safetensors itself reads no longer header."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types that are merged, in the words of safetensors."""

DTYPE_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16"},
    **{torch.bfloat16: "BF16", torch.bool: "BOOL", torch.uint8: "U8"},
    **{torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64"},
}
"""Types of pickled tensors, in the words of safetensors."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as its file describes it.

    Attributes:
        dtype: in the words of safetensors: ``BF16``, ``F8_E4M3``, ...
        shape: of the stored tensor.
        path: the file.
    """

    dtype: str
    shape: tuple[int, ...]
    path: Path


def describe_content(path: Path) -> str | None:
    """Say what a file holds in place of data: nothing, a pointer, a web page.

    Returns:
        Words for an error, with the remedy; None where the file looks like data.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(256)
    if not start:
        return "an empty file; download it anew"
    if start.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer; fetch the file with 'git lfs pull'"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page; download it anew"
    return None


def describe_error(error: Exception) -> str:
    """Turn what reading a file has raised into a sentence."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"'{error.filename}' must be readable, got: {error.strerror}; mend it"
    return " ".join(str(error).split())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that must be a mapping.

    Raises:
        ValueError: it is something else; a whole sentence.
        OSError: it cannot be read.
    """
    found = describe_content(path)
    if found is None:
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            found = f"{' '.join(str(error).split())}; download it anew"
        else:
            if isinstance(content, dict):
                return content
            found = f"a {type(content).__name__}; download it anew"
    raise ValueError(f"'{path}' must be a JSON mapping, got {found}")


def read_header(path: Path) -> dict[str, Stored]:
    """Read the header of a safetensors file and compare it with the file's length.

    Raises:
        ValueError: the file is damaged or no safetensors file; a whole sentence.
        OSError: it cannot be read.
    """
    what = f"'{path}' must be a safetensors file"
    found = describe_content(path)
    if found is not None:
        raise ValueError(f"{what}, got {found}")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_HEADER):
            raise ValueError(
                f"{what}, got a header of {length} bytes in {size}; download it anew"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {
            name: Stored(entry["dtype"], tuple(entry["shape"]), path)
            for name, entry in header.items()
        }
        ends = [entry["data_offsets"][1] for entry in header.values()]
        whole = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{what}, got a header that cannot be read; download it anew"
        ) from error
    if size != whole:
        raise ValueError(
            f"'{path}' must have {whole} bytes, got {size}; download it anew"
        )
    return tensors


def read_pickle(path: Path) -> dict[str, Stored]:
    """Read names, types and shapes of a PyTorch file.

    Raises:
        ValueError: it is damaged or holds more than tensors; a whole sentence.
        OSError: it cannot be read.
    """
    found = describe_content(path)
    if found is not None:
        raise ValueError(f"'{path}' must be a PyTorch file, got {found}")
    try:
        content = load_pickle(path)
    except Exception as error:  # what an archive may raise is without bounds
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"'{path}' must be a PyTorch file of plain tensors, got: {reason}; "
            "save the model as safetensors"
        ) from error
    return {
        name: Stored(
            DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
            tuple(tensor.shape),
            path,
        )
        for name, tensor in content.items()
    }


def load_pickle(path: Path) -> Mapping[str, torch.Tensor]:
    """Map a PyTorch file into memory without reading its tensors."""
    content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    content = content.get("state_dict", content)
    return {k: v for k, v in content.items() if isinstance(v, torch.Tensor)}
