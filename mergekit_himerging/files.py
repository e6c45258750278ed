"""Files written whole or not at all."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file whole or not at all, making its folder where needed."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, making its folder where needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
