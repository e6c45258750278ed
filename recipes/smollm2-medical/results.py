"""What the benchmark found, as it stands in its JSON files.

Invariant: a value of one test row stands at the row's index in every model's list, so
that anyone can pair models row by row.
"""

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

Samples = dict[str, dict[str, list[float | None]]]
"""By task, then metric: a value for each test row."""


_NUMBERS = re.compile(r"\[[\s\d.,eE+-]+(?:null[\s\d.,eE+-]*)*\]")


class Record(BaseModel):
    """A record of a JSON file; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class Budget(Record):
    """How much work is done.

    Attributes:
        name: of the folder that the results lie in.
        test_rows: of each task at most, a seeded choice.
        trials: merges that tune one row.
        tuning_rows: calibration rows of each task that a trial is scored on.
        samples: calibration rows of each task where layers are measured; half of them
            judge.
        generated_rows: test rows of each task with free answers, the first, on which
            answers are generated and compared.
    """

    name: str
    test_rows: int
    trials: int
    tuning_rows: int
    samples: int
    generated_rows: int


class Trial(Record):
    """One merge that was tried.

    Attributes:
        values: what was varied.
        gains: recovered gain by task, on the tuning rows' loss.
        objective: their mean.
        merge_seconds, score_seconds: of the process.
    """

    values: dict[str, float]
    gains: dict[str, float]
    objective: float
    merge_seconds: float
    score_seconds: float


class Analysis(Record):
    """What a plan says.

    Attributes:
        seconds: of the process.
        forwards: full forward passes over the choosing samples that it stands for.
        n_treated: (layer, model) pairs that are not kept, of ``n_pairs``.
        n_pairs: layers times models.
        guard_difference: treated minus plain merge on the judging samples, in shares of
            the gain; below 0 the guard would have put the plain merge back.
        decided_anew: from the scores of another row, without a measurement.
    """

    seconds: float
    forwards: float | None
    n_treated: int
    n_pairs: int
    guard_difference: float | None
    decided_anew: bool


class Scored(Record):
    """One model on the test rows.

    Attributes:
        seed: where the method draws.
        samples: of every test row.
        seconds: of the process.
        generated: of generated answers, where the budget asks for some.
    """

    seed: int
    samples: Samples
    seconds: float
    generated: Samples = {}


class MethodResult(Record):
    """One method in one setting.

    Attributes:
        name: of the method.
        trials: in the order they were made.
        values: that were chosen.
        recipe: that was tested.
        analysis: where layers were measured.
        tests: one for each random seed.
    """

    name: str
    trials: list[Trial] = []
    values: dict[str, float] = {}
    recipe: dict[str, Any] = {}
    analysis: Analysis | None = None
    tests: list[Scored] = []


class SettingResult(Record):
    """One setting.

    Attributes:
        setting: its name.
        budget: how much was done.
        tasks: in order.
        inputs: hashes of base, experts and data files, by name.
        versions: of the packages that measured.
        machine: in words.
        command: that made this.
        references: base, experts and the mixed adapter on the test rows, by name.
        tuning: by task, the mean loss of base and expert on the tuning rows.
        rows: by name.
        trivial: by task with options, the share of test rows that is right by always
            taking the option that is the commonest answer in the calibration file.
        copying: by task with free answers, then metric, the mean over the generated
            rows of answering with the question itself.
    """

    setting: str
    budget: Budget
    tasks: list[str]
    inputs: dict[str, str]
    versions: dict[str, str]
    machine: str
    command: str
    references: dict[str, Scored] = {}
    tuning: dict[str, dict[str, float]] = {}
    rows: dict[str, MethodResult] = {}
    trivial: dict[str, float] = {}
    copying: dict[str, dict[str, float]] = {}


def read_result(path: Path) -> SettingResult | None:
    """Read a setting's file; None where there is none.

    Raises:
        ValueError: it is not such a file.
    """
    if not path.exists():
        return None
    return SettingResult.model_validate_json(path.read_text(encoding="utf-8"))


def write_result(path: Path, result: SettingResult) -> None:
    """Write a setting's file; a stop while writing leaves the earlier one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    text = result.model_dump_json(indent=1)
    # A list of numbers is one line, not one line each.
    text = _NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


def plan_path(folder: Path, setting: str, method: str) -> Path:
    """Return where the plan of a method is kept, in a folder of results."""
    words = method.replace(",", "").replace(" ", "-")
    return folder / "plans" / setting / f"{words}.json"
