"""Virtual environments built for a test, and fresh interpreters that are cheap.

Importing what MergeKit stands on takes some ten seconds, so one process does it once
and forks a child per request. The child reads the `.pth` files of an environment as
the interpreter does at its start; no module of MergeKit or ours is loaded before that.
The process is this file, run as a script with `python -S -P`.
"""

import dataclasses
import faulthandler
import gc
import importlib
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

OURS = "himerging"
"""Part of every name that the project installs."""

PRELOADED = (
    *("torch", "peft", "transformers", "transformers.models.llama.modeling_llama"),
    *("networkx", "pydantic", "immutables", "click", "tqdm", "yaml"),
    *("safetensors.torch", "accelerate"),
)

LONGEST = 300
"""Seconds after which a child is taken to hang."""

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INDEX": "1",
    "PYTHONNOUSERSITE": "1",
}


def clean_environment(**changes: str) -> dict[str, str]:
    """Return the environment without what would lead an interpreter elsewhere."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "MERGEKIT_", "VIRTUAL_ENV"))
    }
    return {**kept, **SETTINGS, **changes}


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a process left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


@dataclasses.dataclass(frozen=True, slots=True)
class Venv:
    """A virtual environment at a folder."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python3*/site-packages")
        return found

    def run(self, *arguments: str | Path, **changes: str) -> Outcome:
        """Start the interpreter, away from the repository."""
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env=clean_environment(**changes),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def pip(self, command: str, *arguments: str | Path) -> None:
        """Run the outer pip on the environment."""
        pip = (sys.executable, "-m", "pip", "--quiet", "--python", self.python)
        subprocess.run(
            [*pip, command, *arguments],
            cwd=self.folder,
            env=clean_environment(),
            check=True,
            timeout=LONGEST,
        )

    def listing(self) -> list[str]:
        """List site-packages, with all that lies below."""
        root = self.site_packages
        return sorted(str(path.relative_to(root)) for path in root.rglob("*"))

    def copy_to(self, folder: Path) -> "Venv":
        """Copy the environment, to be broken."""
        return Venv(Path(shutil.copytree(self.folder, folder, symlinks=True)))


def link_dependencies(folder: Path) -> Path:
    """Link all that the outer environment has installed, but nothing of the project.

    `.pth` files are not read there.
    """
    folder.mkdir()
    places = [Path(p) for p in sys.path if Path(p).name.endswith("-packages")]
    for entry in (entry for place in places for entry in place.iterdir()):
        link = folder / entry.name
        if link.is_symlink():
            continue  # the first place wins, as in an import
        if OURS not in entry.name and entry.name != "__pycache__":
            link.symlink_to(entry)
    return folder


def make_venv(folder: Path, dependencies: Path) -> Venv:
    """Make an environment that sees the dependencies and has nothing installed."""
    command = [sys.executable, "-m", "venv", "--without-pip", folder]
    subprocess.run(command, env=clean_environment(), check=True, timeout=LONGEST)
    venv = Venv(folder)
    path = venv.site_packages / "dependencies.pth"
    path.write_text(f"{dependencies}\n", encoding="utf-8")
    return venv


class WarmPython:
    """A process that has the dependencies loaded and forks a child per request."""

    def __init__(self, venv: Venv, dependencies: Path) -> None:
        self._process = subprocess.Popen(
            [venv.python, "-S", "-P", __file__, dependencies],
            cwd=venv.folder,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        code: str,
        *arguments: str | Path,
        site_packages: Path | None = None,
        first: Iterable[Path] = (),
        **changes: str,
    ) -> Outcome:
        """Run code in a child, as `__main__`.

        Args:
            code: Python source.
            arguments: for `sys.argv`, from its first entry on.
            site_packages: folder whose `.pth` files are read before; None for `-S`.
            first: folders put at the front of `sys.path` before that.
            changes: environment variables, set before that.
        """
        request = {
            "code": code,
            "arguments": [str(argument) for argument in arguments] or ["-c"],
            "site_packages": None if site_packages is None else str(site_packages),
            "first": [str(folder) for folder in first],
            "changes": changes,
        }
        sent, received = self._process.stdin, self._process.stdout
        assert sent is not None
        assert received is not None
        sent.write(json.dumps(request) + "\n")
        sent.flush()
        answer = received.readline()
        assert answer, "the process that forks has ended; its standard error says why"
        return Outcome(**json.loads(answer))

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=LONGEST)


def _await_request() -> dict[str, Any]:
    """Fork a child per line of standard input; return its request in the child."""
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                faulthandler.dump_traceback_later(LONGEST, exit=True)
                request: dict[str, Any] = json.loads(line)
                return request
            _, status = os.waitpid(child, 0)
            texts = {}
            for name, file in (("out", out), ("err", err)):
                file.seek(0)
                texts[name] = file.read().decode()
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"code": code, **texts}), flush=True)
    os._exit(0)  # no request: the parent's own end


def _run_request(request: Mapping[str, Any]) -> None:
    os.environ.update(request["changes"])
    sys.path[:0] = request["first"]
    if request["site_packages"] is not None:
        sys.path.pop()  # the dependencies, which a `.pth` file of the environment adds
        site.addsitedir(request["site_packages"])
    sys.argv = request["arguments"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code: object = 0
    try:
        exec(compile(request["code"], "<request>", "exec"), main.__dict__)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # An orderly end would take longer than most requests.
    os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    for module in PRELOADED:
        importlib.import_module(module)
    early = [name for name in sys.modules if "mergekit" in name]
    assert not early, f"modules must not be loaded yet, got {early}"
    gc.freeze()  # so that a child's collector does not copy what is shared
    _run_request(_await_request())
