"""The scripts that time things run to their end, on tiny models; no time is tested."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_analysis import ROWS, save_school, write_rows

from mergekit_himerging.analysis import session


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Base, experts and their data, as the scripts take them."""
    monkeypatch.setenv("MERGEKIT_HIMERGING_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(Path(__file__).parent / "benchmarks")
    school = save_school(tmp_path / "school")
    found = [str(school / "base")]
    for name in "ab":
        rows = [{"prompt": p, "completion": c} for p, c in ROWS[name]]
        found += [str(school / name), write_rows(tmp_path, name, rows)]
    return [*found, "--samples", "4", "--cache", str(tmp_path / "adapters")]


@pytest.mark.parametrize(
    "options",
    [["--resolve", "rules"], ["--resolve", "measured", "--accept-share", "0.5"]],
)
def test_analysis_is_timed_against_a_checkpoint_per_probe(
    arguments, monkeypatch, options
):
    import analysis_speed

    monkeypatch.setattr(session, "find_plan", session.find_plan)  # put back after
    result = CliRunner().invoke(
        analysis_speed.main, [*arguments, *options], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert "3 layers, 2 tasks, 4 samples each" in result.output
    times = re.findall(r"times 24 = \d+ s .*; [\d.]+ times the analysis", result.output)
    assert len(times) == 2


def test_search_is_timed_against_a_run_per_candidate(arguments):
    import search_speed

    result = CliRunner().invoke(
        search_speed.main, [*arguments, "--no-full-grid"], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert re.search(r"coarse: .* merges, [\d.]+ times faster", result.output)
