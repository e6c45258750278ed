"""What stops a merge leaves nothing that looks finished; the next run is whole."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from faults import Child, Server
from test_analysis import completions, make_analysis, save_school, write_rows

from mergekit_himerging.plan import PLAN_FILE, read_plan
from mergekit_himerging.staging import stage_folder
from mergekit_himerging.views.markdown import REPORT_FILE

MODEL = "model.safetensors"
ANALYSIS = "mergekit_himerging.analysis.streams:_Streams.advance"
MERGE = "mergekit_himerging.method:merge_tensor"
WRITE = "mergekit.io.tasks:FinalizeModel.execute"
REUSED = "so its analysis is reused"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_school(tmp_path_factory.mktemp("school"))


class Desk:
    """A folder with a recipe, run as often as a test asks for it."""

    def __init__(self, server: Server, folder: Path, recipe: dict[str, Any]) -> None:
        self._server = server
        self._runs = 0
        self.folder = folder
        self.out = folder / "merged"
        self.path = folder / "recipe.yml"
        self.path.write_text(yaml.safe_dump(recipe), encoding="utf-8")

    def start(self, **how: Any) -> Child:
        self._runs += 1
        talk = self.folder / f"talk{self._runs}"
        return self._server.start(talk, self.path, self.out, **how)

    def run(self, **how: Any) -> str:
        """Run to the good end; returns what was said."""
        child = self.start(**how)
        assert child.end() == 0, child.said
        return child.said

    def fail(self, **how: Any) -> str:
        """Run to an end that is one sentence; returns it."""
        child = self.start(**how)
        assert child.end() == 1, child.said
        assert child.said.count("Error: ") == 1, child.said
        assert "Traceback" not in child.said
        return " ".join(child.said.partition("Error: ")[2].split())

    def read(self) -> dict[str, bytes] | None:
        """Read what lies in the target; None where there is none."""
        if not self.out.exists():
            return None
        shown = (path for path in self.out.iterdir() if path.name[0] != ".")
        return {path.name: path.read_bytes() for path in shown}

    def list_hidden(self) -> list[str]:
        """List what is left beside the target and in it."""
        places = [self.folder, *([self.out] if self.out.exists() else [])]
        return [p.name for place in places for p in place.iterdir() if p.name[0] == "."]


@pytest.fixture(scope="module")
def whole(server, school, tmp_path_factory) -> Desk:
    """An analysed merge that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = make_analysis(school, folder, "a", "b", guard="report", density=0.5)
    desk = Desk(server, folder, recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERGEKIT_HIMERGING_CACHE", str(folder / "cache"))
        desk.run()
    return desk


@pytest.fixture
def desk(server, whole, tmp_path, monkeypatch) -> Desk:
    """The same recipe, with no cache and no target yet."""
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(tmp_path / "cache"))
    recipe = yaml.safe_load(whole.path.read_text(encoding="utf-8"))
    recipe["parameters"]["plan_out"] = str(tmp_path / "plan.json")
    return Desk(server, tmp_path, recipe)


def put_earlier_merge(desk: Desk, whole: Desk) -> None:
    """Put a merge into the target that differs in every file from what will come."""
    shutil.copytree(whole.out, desk.out)
    for path in desk.out.iterdir():
        if path.name != MODEL:
            path.write_bytes(path.read_bytes() + b"\n")
    weights = bytearray((desk.out / MODEL).read_bytes())
    weights[-1] ^= 1
    (desk.out / MODEL).write_bytes(weights)


def assert_same_merge(desk: Desk, whole: Desk) -> None:
    """Compare all bytes but those of the recipe, which names its folder."""
    merged, expected = desk.read(), whole.read()
    assert merged is not None
    assert expected is not None
    assert merged.keys() == expected.keys()
    named = {"README.md", "mergekit_config.yml", REPORT_FILE}
    for name in merged.keys() - named:
        assert merged[name] == expected[name], name
    assert not desk.list_hidden()


STOPS = {
    "analysis": (ANALYSIS, 5),
    "merge": (MERGE, 7),
    "writing": (WRITE, 0),
    "smoke test": ("mergekit_himerging.smoke:_load", 1),
}
SIGNALS = {
    signal.SIGTERM: -signal.SIGTERM,
    signal.SIGKILL: -signal.SIGKILL,
    signal.SIGINT: 1,  # click's, after our clean-up
}


@pytest.mark.parametrize(
    ("phase", "signum", "target"),
    [
        ("analysis", signal.SIGTERM, "new"),
        ("analysis", signal.SIGINT, "new"),
        ("analysis", signal.SIGKILL, "earlier"),
        ("merge", signal.SIGTERM, "earlier"),
        ("merge", signal.SIGKILL, "new"),
        ("merge", signal.SIGINT, "earlier"),
        ("writing", signal.SIGTERM, "new"),
        ("writing", signal.SIGKILL, "earlier"),
        ("writing", signal.SIGINT, "new"),
        ("smoke test", signal.SIGINT, "earlier"),
    ],
)
def test_killed_merge_leaves_what_was_there_and_the_next_is_whole(
    desk, whole, phase, signum, target
):
    if target == "earlier":
        put_earlier_merge(desk, whole)
    before = desk.read()
    place, count = STOPS[phase]
    child = desk.start(stop_at=place, count=count)
    child.await_stop()
    assert child.end(signum) == SIGNALS[signum], child.said
    assert desk.read() == before
    if signum == signal.SIGINT:
        assert not desk.list_hidden()
        assert "Traceback" not in child.said
        assert "Aborted!" in child.said
    assert (REUSED in desk.run()) == (phase != "analysis")
    assert_same_merge(desk, whole)


class PowerCutError(BaseException):
    pass


@pytest.mark.parametrize("moved", range(6))
@pytest.mark.parametrize("target", ["new", "earlier"])
def test_power_cut_in_the_move_leaves_no_model_or_a_whole_one(
    tmp_path, monkeypatch, moved, target
):
    names = {"model.safetensors", "config.json", "tokenizer.json", "notes.txt"}
    out = tmp_path / "merged"
    if target == "earlier":
        out.mkdir()
        for name in names | {PLAN_FILE}:
            (out / name).write_text("earlier")
    replace, count = os.replace, iter(range(100))

    def cut(source: Path, to: Path) -> None:
        if next(count) == moved:
            raise PowerCutError
        replace(source, to)

    def merge() -> None:
        with stage_folder(out, replaced=[PLAN_FILE]) as staged:
            for name in names - {"notes.txt"}:
                (staged / name).write_text("new")

    monkeypatch.setattr(os, "replace", cut)
    # A power cut leaves no time to clean up.
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    try:
        merge()
    except PowerCutError:
        assert not (out / "config.json").exists()
        assert target == "earlier" or not out.exists()
    else:
        assert moved >= (3 if target == "earlier" else 1)
    monkeypatch.undo()
    merge()
    kept = names if target == "earlier" else names - {"notes.txt"}
    assert {path.name for path in out.iterdir()} == kept
    for name in kept - {"notes.txt"}:
        assert (out / name).read_text() == "new"


def test_file_that_does_not_fit_is_one_sentence(desk, whole):
    put_earlier_merge(desk, whole)
    before = desk.read()
    recipe = yaml.safe_load(desk.path.read_text(encoding="utf-8"))
    del recipe["parameters"]["plan_out"]
    desk.path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    said = desk.fail(file_bytes=40_000)
    assert "File too large" in said
    assert desk.read() == before
    assert not desk.list_hidden()
    desk.run()
    assert_same_merge(desk, whole)


@pytest.fixture
def small_disk(desk: Desk) -> Iterator[Path]:
    """A disk of 96 KiB, at the target."""
    desk.out.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(desk.out)]
    try:
        done = subprocess.run(command, capture_output=True, check=False).returncode
    except FileNotFoundError:
        done = 1
    if done != 0:
        pytest.skip("mounting a small disk needs rights that this user has not")
    yield desk.out
    subprocess.run(["umount", str(desk.out)], check=True)


def test_disk_that_is_too_small_is_found_before_the_analysis(desk, small_disk):
    said = desk.fail()
    assert f"the disk of '{small_disk}' must have 0.00 GiB for the merge" in said
    assert not list(small_disk.iterdir())
    assert not (desk.folder / "cache").exists()


def test_disk_that_fills_up_under_way_is_one_sentence(desk, whole, small_disk):
    remount = ["mount", "-o", "remount,size={}", str(small_disk)]

    def resize(size: str) -> None:
        subprocess.run([word.format(size) for word in remount], check=True)

    resize("4m")
    child = desk.start(stop_at=WRITE, count=0)
    child.await_stop()
    resize("96k")
    child.go_on()
    assert child.end() == 1
    text = " ".join(child.said.partition("Error: ")[2].split())
    assert text.startswith(
        f"the disk must have room for the merge, got 'No space left on device' "
        f"('{small_disk}'); what was written is removed"
    )
    assert not list(small_disk.iterdir())
    resize("4m")
    assert REUSED in desk.run()
    assert_same_merge(desk, whole)


@pytest.mark.parametrize("place", ["parent", "target"])
def test_folder_that_may_not_be_written_is_one_sentence(desk, place):
    closed = desk.folder / "closed"
    desk.out = closed if place == "target" else closed / "merged"
    closed.mkdir()
    closed.chmod(0o555)
    said = desk.fail(drops_powers=True)
    assert said.startswith(
        "the output folder must be one that can be written, got Permission denied "
        f"('{desk.out}')"
    )
    assert not list(closed.iterdir())
    assert not (desk.folder / "cache").exists()


def test_data_that_change_under_way_are_recorded_as_they_were_used(desk, whole):
    recipe = yaml.safe_load(desk.path.read_text(encoding="utf-8"))
    shutil.copy(whole.folder / "a.jsonl", desk.folder)
    recipe["models"][0]["parameters"]["calibration"] = "a.jsonl"
    desk.path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    child = desk.start(stop_at=ANALYSIS, count=0)
    child.await_stop()
    write_rows(desk.folder, "a", completions("a")[:3])
    child.go_on()
    assert child.end() == 0, child.said
    assert (desk.out / MODEL).read_bytes() == (whole.out / MODEL).read_bytes()
    used, expected = (
        {task.model: task.calibration_sha256 for task in read_plan(path).tasks}
        for path in (desk.out / PLAN_FILE, whole.out / PLAN_FILE)
    )
    assert used == expected
    assert REUSED not in desk.run()
    changed = {
        task.model: task.calibration_sha256
        for task in read_plan(desk.out / PLAN_FILE).tasks
    }
    differing = [model for model in used if used[model] != changed[model]]
    assert differing == [recipe["models"][0]["model"]]
