"""Plans of earlier analyses, found again by everything that went into them.

A plan is reused only where its fingerprint is the same: settings, resolved values of
every tensor, token ids of the calibration data, versions, this package's own code, and
what is cheap to read of the models: names, sizes and times of their files, and hashes
of safetensors headers, indexes, configs and adapters' configs. A file that is changed
in place without a change of size or time is not noticed.
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache

from mergekit_himerging.files import write_text
from mergekit_himerging.plan import Plan, read_plan

VERSIONED = ("mergekit-himerging", "mergekit", "transformers", "torch")
PACKAGE = Path(__file__).parents[1]
MAX_HEADER_BYTES = 100 * 2**20
SAMPLES, SAMPLE_BYTES = 256, 512
"""How many blocks of a file of weights are hashed, and how long they are."""


def read_versions() -> dict[str, str]:
    """Read the versions of the packages that a measurement depends on."""
    return {name: version(name) for name in VERSIONED}


@functools.cache
def hash_code(package: Path = PACKAGE) -> str:
    """Hash a package's code, as sha256 hex: of one version there may be many states."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def folders_of(model: ModelReference) -> list[Path]:
    """List the folders that hold a model's files, and its adapter's."""
    folders = [Path(LoaderCache().get(model).index.base_path)]
    if model.lora is not None:
        folders += [p for p in (Path(model.lora.path),) if p.is_dir()]
    return folders


def hash_model(folders: Iterable[Path]) -> str:
    """Hash what is cheap to read of a model's files, as sha256 hex.

    Args:
        folders: the model's folder, and its adapter's.
    """
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if not path.is_file():
                continue
            if path.suffix in (".safetensors", ".bin", ".pt"):
                stat = path.stat()
                digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
                digest.update(_read_sample(path, stat.st_size))
            if path.suffix == ".safetensors":
                digest.update(_read_header(path))
            elif path.suffix in (".json", ".model", ".txt", ".jinja", ".py"):
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def make_fingerprint(content: Mapping[str, Any]) -> str:
    """Hash everything that a plan depends on, as sha256 hex."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def find_plan(fingerprint: str) -> Plan | None:
    """Return the plan of an earlier analysis with this fingerprint."""
    path = find_place(f"{fingerprint}.json")
    try:
        return read_plan(path) if path.is_file() else None
    except (OSError, ValueError):  # of another version, or damaged: measured again
        return None


def keep_plan(fingerprint: str, plan: Plan) -> Path:
    """Keep a plan for later runs; returns its file."""
    path = find_place(f"{fingerprint}.json")
    write_text(path, plan.to_json())
    return path


def find_place(name: str) -> Path:
    """Return where a file of this name is kept for later runs."""
    chosen = os.environ.get("MERGEKIT_HIMERGING_CACHE")
    if chosen:
        return Path(chosen) / name
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "mergekit-himerging" / name


def _read_sample(path: Path, size: int) -> bytes:
    """Read some blocks, evenly over the file."""
    step = max(SAMPLE_BYTES, size // SAMPLES)
    read = []
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            read.append(file.read(SAMPLE_BYTES))
    return b"".join(read)


def _read_header(path: Path) -> bytes:
    """Read a safetensors file's header: eight bytes of length, then JSON."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return file.read(min(size, MAX_HEADER_BYTES))
