"""The whole evaluation: every model on every task, one model in memory at a time.

Invariant: what is kept of a stopped run is found again by content alone: the model's
fingerprint, the rows, the settings that matter, the versions and this package's code.
"""

import gc
import importlib.metadata
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from mergekit_himerging.analysis.cache import hash_code, make_fingerprint
from mergekit_himerging.analysis.references import Loaded
from mergekit_himerging.evaluation.compare import (
    compare_models,
    measure_forgetting,
    measure_recovery,
    summarize,
)
from mergekit_himerging.evaluation.data import Task
from mergekit_himerging.evaluation.generation import FREE_SHAPES, generate_answers
from mergekit_himerging.evaluation.metrics import check_packages
from mergekit_himerging.evaluation.records import (
    Evaluation,
    Measured,
    ModelInfo,
    Role,
    Settings,
    TaskInfo,
)
from mergekit_himerging.evaluation.scoring import Scorer
from mergekit_himerging.files import write_text
from mergekit_himerging.parameters import add_place

LOG = logging.getLogger(__name__)

MEASURES = ("mergekit-himerging", "torch", "transformers")
"""Packages whose version may change what a model does."""

COMPARES = ("rouge-score", "sacrebleu", "numpy")
"""Packages whose version may change what is made of it."""

ROLES: tuple[Role, ...] = ("base", "expert", "merge")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to evaluate.

    Attributes:
        name: for tables, distinct.
        role: what it is; one base at most.
        load: loads model and tokenizer; called once, or not at all where everything is
            kept from an earlier run.
        task: the name of the task that an expert was tuned for, if it is evaluated.
        fingerprint: names the model's content; without one nothing is kept.
    """

    name: str
    role: Role
    load: Callable[[], Loaded]
    task: str | None = None
    fingerprint: str | None = None


Progress = Callable[[str, str, int, int], None]
"""Model, task, how many (model, task) pairs are done, of how many."""


def evaluate(
    candidates: Sequence[Candidate],
    tasks: Sequence[Task],
    settings: Settings | None = None,
    *,
    keep_in: Path | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Score models on tasks and compare them.

    Models run in float32 on a CPU, in their own dtype elsewhere, on the device that
    they were loaded to.

    Args:
        candidates: one or more, in any order; the outcome does not depend on it.
        tasks: one or more, in the order of the tables.
        settings: the defaults where None.
        keep_in: a folder for finished (model, task) pairs; a later call with the same
            content reads them instead of loading the model.
        progress: called after every pair.

    Returns:
        All scores and comparisons.

    Raises:
        ValueError: there is no candidate or task, names repeat, there are two bases, an
            expert's task is not among the tasks, a package is missing for generated
            answers, a row cannot be used with a model's tokenizer, or a model's loss is
            not finite.
    """
    settings = settings or Settings()
    _check(candidates, tasks, settings)
    ordered = sorted(candidates, key=lambda c: (ROLES.index(c.role), c.name))
    measured: dict[tuple[str, str], Measured] = {}
    n_pairs = len(ordered) * len(tasks)
    for candidate in ordered:
        work = _Work(candidate, settings, keep_in)
        for task in tasks:
            try:
                measured[candidate.name, task.name] = work.measure(task)
            except ValueError as error:
                place = f"model '{candidate.name}', task '{task.name}'"
                raise ValueError(add_place(error, place)) from error
            if progress is not None:
                progress(candidate.name, task.name, len(measured), n_pairs)
        work.close()
    results = {
        (candidate.name, task.name): summarize(
            candidate.name, task, measured[candidate.name, task.name], settings
        )
        for task in tasks
        for candidate in ordered
    }
    models = tuple(
        ModelInfo(name=c.name, role=c.role, task=c.task, fingerprint=c.fingerprint)
        for c in ordered
    )
    return Evaluation(
        settings=settings,
        models=models,
        tasks=tuple(
            TaskInfo(
                name=task.name,
                source=task.source,
                sha256=task.sha256,
                n_rows=len(task.rows),
            )
            for task in tasks
        ),
        results=tuple(results.values()),
        differences=compare_models(models, results, settings),
        recovered=measure_recovery(models, results, settings),
        forgetting=measure_forgetting(models, results, settings),
        versions=_versions(*MEASURES, *COMPARES),
    )


class _Work:
    """One candidate's way through the tasks; its model is loaded when first needed."""

    def __init__(
        self, candidate: Candidate, settings: Settings, keep_in: Path | None
    ) -> None:
        self._candidate = candidate
        self._settings = settings
        self._keep_in = keep_in if candidate.fingerprint is not None else None
        self._loaded: Loaded | None = None
        self._scorer: Scorer | None = None

    def measure(self, task: Task) -> Measured:
        """Read what is kept of a task, or run the model and keep it."""
        path = self._path(task)
        kept = _read_kept(path) if path is not None else None
        if kept is not None:
            return kept
        measured = self._run(task)
        if path is not None:
            write_text(path, measured.model_dump_json() + "\n")
        return measured

    def close(self) -> None:
        """Free the model."""
        if self._loaded is not None:
            self._loaded = self._scorer = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _run(self, task: Task) -> Measured:
        (model, tokenizer), scorer = self._load()
        settings = self._settings
        scores = scorer.score(task.rows)
        answers: list[str | None] = [None] * len(task.rows)
        n_cut = 0
        free = _find_free(task) if settings.generates else []
        if free:
            texts, n_cut = generate_answers(
                model,
                tokenizer,
                [task.rows[n] for n in free],
                max_new_tokens=settings.max_new_tokens,
                max_length=settings.max_length,
                max_tokens=settings.max_tokens,
            )
            for number, text in zip(free, texts, strict=True):
                answers[number] = text
        return Measured(
            loss=scores.loss,
            accuracy=scores.accuracy,
            answers=tuple(answers),
            n_tokens=scores.n_tokens,
            n_targets=scores.n_targets,
            n_truncated=scores.n_truncated,
            n_prompts_cut=n_cut,
            tokens_sha256=scores.tokens_sha256,
        )

    def _load(self) -> tuple[Loaded, Scorer]:
        if self._loaded is None or self._scorer is None:
            model, tokenizer = self._candidate.load()
            model.eval()  # type: ignore[no-untyped-call]
            if model.device.type == "cpu":
                model.float()  # type: ignore[no-untyped-call]
            self._loaded = model, tokenizer
            self._scorer = Scorer(
                model,
                tokenizer,
                max_length=self._settings.max_length,
                max_tokens=self._settings.max_tokens,
            )
        return self._loaded, self._scorer

    def _path(self, task: Task) -> Path | None:
        if self._keep_in is None:
            return None
        matters = self._settings.model_dump(
            include={"generates", "max_new_tokens", "max_length"}
        )
        fingerprint = make_fingerprint(
            {
                "candidate": self._candidate.fingerprint,
                "rows": task.sha256,
                "settings": matters,
                "versions": _versions(*MEASURES),
                "code": hash_code(),
            }
        )
        return self._keep_in / f"{fingerprint}.json"


def _read_kept(path: Path) -> Measured | None:
    try:
        return Measured.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        LOG.warning("cannot read '%s', so it is measured again: %s", path, error)
        return None


def _check(
    candidates: Sequence[Candidate], tasks: Sequence[Task], settings: Settings
) -> None:
    for what, names in (
        ("candidates", [candidate.name for candidate in candidates]),
        ("tasks", [task.name for task in tasks]),
    ):
        if not names:
            raise ValueError(f"{what} must be one or more, got none")
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise ValueError(
                f"{what} must have distinct names, got '{repeated[0]}' twice"
            )
    bases = [c.name for c in candidates if c.role == "base"]
    if len(bases) > 1:
        raise ValueError(f"candidates must have one base at most, got {sorted(bases)}")
    known = [task.name for task in tasks]
    for candidate in candidates:
        if candidate.task is not None and candidate.role != "expert":
            raise ValueError(
                f"task must be None for a {candidate.role}, got '{candidate.task}' "
                f"('{candidate.name}')"
            )
        if candidate.task is not None and candidate.task not in known:
            raise ValueError(
                f"task must be one of {known} or None, got '{candidate.task}' "
                f"('{candidate.name}')"
            )
    if settings.generates and any(map(_find_free, tasks)):
        check_packages()


def _find_free(task: Task) -> list[int]:
    return [n for n, row in enumerate(task.rows) if row.shape in FREE_SHAPES]


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
