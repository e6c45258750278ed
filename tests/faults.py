"""Merges in processes of their own that stop at a given call, are killed, or run dry.

One process loads what `mergekit-yaml` needs and forks a child for each merge, so that a
merge takes no ten seconds of imports. The process is this file, run as a script.
"""

import ctypes
import functools
import gc
import importlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LONGEST = 120
"""Seconds after which a child is taken to hang."""

MODULES = (
    *("mergekit.scripts.run_yaml", "mergekit_himerging.analysis.session"),
    *("mergekit_himerging.merged_folder", "mergekit_himerging.smoke"),
    *("mergekit_himerging.verify", "transformers.models.llama.modeling_llama"),
    *("matplotlib.figure", "matplotlib.style", "matplotlib.backends.backend_svg"),
)


class Child:
    """A merge in a process of its own."""

    def __init__(self, server: "Server", pid: int, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self.pid = pid

    def await_stop(self) -> None:
        """Wait until the child stands at the call that it was told of."""
        end = time.monotonic() + LONGEST
        while not (self._folder / "stopped").exists():
            assert time.monotonic() < end, self.said
            time.sleep(0.01)

    def go_on(self) -> None:
        """Let a child that stands at a call make it."""
        (self._folder / "go").touch()

    def end(self, signum: int | None = None) -> int:
        """Send a signal, if one is given, and return how the child has ended."""
        if signum is not None:
            os.kill(self.pid, signum)
        return int(self._server.ask(wait=self.pid))

    @property
    def said(self) -> str:
        """What it has written so far, to both its streams."""
        return (self._folder / "said").read_text(encoding="utf-8")


class Server:
    """Starts children."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )

    def ask(self, **request: Any) -> int:
        """Send a request and return the number that it is answered with."""
        sent, received = self._process.stdin, self._process.stdout
        assert sent is not None
        assert received is not None
        sent.write(json.dumps(request) + "\n")
        sent.flush()
        answer = received.readline()
        assert answer, "the process that forks has ended; its standard error says why"
        return int(answer)

    def start(self, folder: Path, *arguments: str | Path, **how: Any) -> Child:
        """Start `mergekit-yaml`.

        Args:
            folder: for what the child and the test tell each other; made anew.
            arguments: of the command.
            how: ``stop_at``, a function's module and name, and ``count``, the 0-based
                call before which to stop; ``file_bytes``, the most that a file may
                hold; ``drops_powers``, to obey permissions as other users do.
        """
        folder.mkdir(parents=True)
        words = [str(argument) for argument in arguments]
        pid = self.ask(start=words, folder=str(folder), how=how, env=dict(os.environ))
        return Child(self, pid, folder)

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=LONGEST)


def _stop_at(place: str, count: int, folder: Path) -> None:
    """Let one call of a function wait for the test."""
    module, _, path = place.partition(":")
    holder: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for step in outer:
        holder = getattr(holder, step)
    original, calls = getattr(holder, name), itertools.count()

    @functools.wraps(original)
    def stopping(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            (folder / "stopped").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
        return original(*args, **kwargs)

    setattr(holder, name, stopping)


def _drop_powers() -> None:
    """Give up what root may do beyond the permissions of files."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError("capset has failed")


def _run(request: dict[str, Any]) -> int:
    """Run a child's merge; returns its exit code."""
    folder, how = Path(request["folder"]), request["how"]
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["env"])
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
    signal.alarm(LONGEST)
    if "stop_at" in how:
        _stop_at(how["stop_at"], how["count"], folder)
    if "file_bytes" in how:
        resource.setrlimit(resource.RLIMIT_FSIZE, (how["file_bytes"],) * 2)
    if "drops_powers" in how:
        _drop_powers()
    try:
        importlib.import_module(MODULES[0]).main(request["start"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                os._exit(_run(request))
        print(answer, flush=True)


if __name__ == "__main__":
    for module in MODULES:
        importlib.import_module(module)
    sys.modules["mergekit_himerging.smoke"].N_TOKENS = 1
    gc.freeze()  # so that a child's collector does not copy what is shared
    _serve()
