"""A merge is written beside its target and moved there when it is complete.

Invariant: whatever ends a merge early, a new target is not there and an earlier one is
as it was; in the moment of the move itself, a target that exists is no model.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from mergekit_himerging.parameters import RecipeError

CONFIG_FILE = "config.json"

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def stage_folder(target: Path, *, replaced: Collection[str] = ()) -> Iterator[Path]:
    """Yield a folder of the target's name to write into, and move what is in it.

    It lies beside a new target, and inside one that exists, which may be a disk of its
    own. Files of the target that have the same names are replaced, one by one; where
    the body fails, all that was staged is removed. What a killed run has left is
    removed by the next.

    Args:
        target: a folder that exists or not; its parents are made.
        replaced: names of files that the target loses where none was staged.

    Raises:
        RecipeError: nothing can be written there, or the body has filled the disk.
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
        _move(staged, target, replaced)
    except Exception as error:
        number = _find_number(error)
        if number not in NO_ROOM:
            raise
        raise RecipeError(
            f"the disk must have room for the merge, got '{os.strerror(number)}' "
            f"('{target}'); what was written is removed, free some or write elsewhere"
        ) from error
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def _find_number(error: Exception) -> int:
    """Return the system's number of an error, 0 without one.

    Libraries in Rust put it into their words.
    """
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"\(os error (\d+)\)|\bOs \{ code: (\d+)", str(error))
    return int(found[1] or found[2]) if found else 0


def find_target(folder: Path) -> Path:
    """Return where a staged folder goes; any other folder is its own target."""
    outer = folder.absolute().parent
    if outer.name == f".{folder.name}.partial":
        return outer.parent / folder.name
    return outer.parent if outer.name == f".{folder.name}.staged" else folder


def _move(staged: Path, target: Path, replaced: Collection[str]) -> None:
    if not target.exists():
        os.replace(staged, target)
        return
    # Without a config nothing takes the folder for a model: it goes first, comes last.
    for name in (CONFIG_FILE, *replaced):
        (target / name).unlink(missing_ok=True)
    files = sorted(staged.iterdir(), key=lambda path: path.name == CONFIG_FILE)
    for path in files:
        to = target / path.name
        if path.is_dir() and to.is_dir():
            shutil.rmtree(to)
        os.replace(path, to)
