"""A merge is written beside its target and moved there when it is complete.

Invariant: whatever ends a merge early, the target holds nothing that looks finished:
at most the plan, which is written as soon as it exists.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mergekit_himerging.parameters import RecipeError


@contextlib.contextmanager
def stage_folder(target: Path) -> Iterator[Path]:
    """Yield a folder of the target's name to write into, and move what is in it.

    It lies beside a new target, and inside one that exists, which may be a disk of its
    own. Files of the target that have the same names are replaced, one by one; where
    the body fails, all that was staged is removed. What a killed run has left is
    removed by the next.

    Args:
        target: a folder that exists or not; its parents are made.

    Raises:
        RecipeError: nothing can be written there.
    """
    target = target.absolute()
    outer = target.parent / f".{target.name}.partial"
    if target.is_dir():
        shutil.rmtree(outer, ignore_errors=True)
        outer = target / f".{target.name}.staged"
    shutil.rmtree(outer, ignore_errors=True)
    staged = outer / target.name
    try:
        staged.mkdir(parents=True)
    except OSError as error:
        raise RecipeError(
            f"the output folder must be one that can be written, got {error.strerror} "
            f"('{target}'); name another"
        ) from error
    try:
        yield staged
        _move(staged, target)
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def find_target(folder: Path) -> Path:
    """Return where a staged folder goes; any other folder is its own target."""
    outer = folder.absolute().parent
    if outer.name == f".{folder.name}.partial":
        return outer.parent / folder.name
    return outer.parent if outer.name == f".{folder.name}.staged" else folder


def _move(staged: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    # The index and the config last: without them nothing takes the folder for a model.
    files = sorted(
        staged.iterdir(), key=lambda path: (path.suffix == ".json", path.name)
    )
    for path in files:
        to = target / path.name
        if path.is_dir() and to.is_dir():
            shutil.rmtree(to)
        os.replace(path, to)
