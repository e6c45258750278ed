"""Output folders that exist only when they are complete."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Give a temporary sibling of ``final`` and rename it once the block succeeded."""
    final.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        yield unfinished
        # mkdtemp makes folders for the owner alone.
        unfinished.chmod(0o755)
        unfinished.rename(final)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
