"""Merge the experts by every method, each tuned alike, and test each once.

Needs: what prepare.py and train_expert.py leave, the extras `plots` and `evaluate`, and
`pip install optuna`.
Run from the repository root:

    python recipes/smollm2-medical/benchmark.py --quick

Every method's numbers are chosen on calibration rows, with the same number of merges
for each, by the same tuner; then each is tested, once, on rows that nobody has seen.
The merges are made in memory. Results lie in `recipes/smollm2-medical/results/`, a file
for each setting, written after every merge: the same command goes on where a stopped
one was. RESULTS.md is written at the end, and by `--page` alone.
"""

import concurrent.futures
import dataclasses
import hashlib
import multiprocessing
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import click
import numpy as np
import optuna
import torch
import transformers
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from methods import (
    METHODS,
    UNTUNED_WEIGHT,
    Method,
    list_ranges,
    list_rows,
    make_recipe,
)
from page import write_page
from results import (
    Analysis,
    Budget,
    MethodResult,
    Samples,
    Scored,
    SettingResult,
    Trial,
    plan_path,
    read_result,
    write_result,
)
from settings import HERE, SETTINGS, Setting, is_there, model_of

from mergekit_himerging.analysis.calibration import Row
from mergekit_himerging.analysis.overlap import hash_row
from mergekit_himerging.api import make_plan as decide_anew
from mergekit_himerging.evaluation import records
from mergekit_himerging.evaluation.data import Task, read_task, refuse_overlap
from mergekit_himerging.evaluation.generation import FREE_SHAPES, generate_answers
from mergekit_himerging.evaluation.metrics import score_answers
from mergekit_himerging.evaluation.models import (
    find_plan,
    load_merge,
    make_model_candidate,
)
from mergekit_himerging.evaluation.run import Candidate, Loaded, evaluate
from mergekit_himerging.evaluation.scoring import Scorer
from mergekit_himerging.files import write_text
from mergekit_himerging.plan import Plan, read_plan
from mergekit_himerging.planning import PlannedMerge, plan_recipe
from mergekit_himerging.recipe import to_document

QUICK = Budget(
    name="quick",
    test_rows=100,
    trials=3,
    tuning_rows=16,
    samples=16,
    generated_rows=0,
)
FULL = Budget(
    name="full",
    test_rows=100,
    trials=6,
    tuning_rows=32,
    samples=16,
    generated_rows=32,
)
PACKAGES = ("mergekit", "mergekit-himerging", "optuna", "torch", "transformers")
MAX_TOKENS = 2048
"""Cells of a batch, on the CPU."""
MAX_NEW_TOKENS = 48
"""Of a generated answer."""


@click.command()
@click.option("--quick", is_flag=True, help="The leading rows, tuned little.")
@click.option(
    "--setting",
    "settings",
    multiple=True,
    type=click.Choice(list(SETTINGS)),
    help="Only these; by default all whose experts are there, of a quick run the "
    "settings of adapters.",
)
@click.option(
    "--method",
    "methods",
    multiple=True,
    type=click.Choice(list(METHODS)),
    help="Only these rows; all of the setting by default.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Settings worked on at a time, each on one thread.",
)
@click.option("--page", "only_page", is_flag=True, help="Write RESULTS.md alone.")
def main(
    quick: bool,
    settings: Sequence[str],
    methods: Sequence[str],
    workers: int,
    only_page: bool,
) -> None:
    """Merge the experts by every method and test each merge."""
    budget = QUICK if quick else FULL
    folder = HERE / "results" / budget.name
    usual = [s.name for s in SETTINGS.values() if not (quick and s.is_brief)]
    wanted = [SETTINGS[name] for name in settings or usual]
    ready = [setting for setting in wanted if not setting.missing]
    if not only_page:
        for setting in wanted:
            if setting not in ready:
                click.echo(
                    f"{setting.name}: left out, experts are missing: "
                    f"{', '.join(setting.missing)}; make them with train_expert.py"
                )
        base = str(HERE / "base")
        for setting in ready:  # adapters are merged before anybody runs beside
            for expert in setting.experts.values():
                _merged(ModelReference.parse(model_of(expert, base)))
        command = " ".join([str(HERE / "benchmark.py"), *sys.argv[1:]])
        jobs = [
            (s.name, budget, methods or list_rows(s, is_quick=quick), command)
            for s in sorted(ready, key=lambda s: len(s.tasks), reverse=True)
        ]
        if workers == 1:
            for job in jobs:
                run_setting(*job)
        else:
            # Spawned: torch's threads do not live on in a forked process.
            spawned = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(workers, spawned) as pool:
                for future in [pool.submit(run_setting, *job) for job in jobs]:
                    future.result()
    if quick:
        page = folder / "RESULTS.md"
        write_page(folder, page)
        click.echo(f"wrote {page}")
    else:
        page = HERE / "RESULTS.md"
        write_page(folder, page, readme=Path("README.md"))
        click.echo(f"wrote {page}, and its summary into README.md")


def run_setting(
    name: str, budget: Budget, methods: Sequence[str], command: str
) -> None:
    """Do what is missing in one setting's file."""
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    bench = Bench(SETTINGS[name], budget, command)
    bench.save()
    bench.measure_references()
    for method in methods:
        bench.measure(METHODS[method])


class Bench:
    """One setting: its models, its rows, and its file.

    Raises:
        ValueError: the file is of other inputs, or test rows calibrate.
    """

    def __init__(self, setting: Setting, budget: Budget, command: str) -> None:
        self.setting = setting
        self.budget = budget
        self.base = str(HERE / "base")
        self.experts = {t: model_of(e, self.base) for t, e in setting.experts.items()}
        data = HERE / "data"
        self.calibration = {
            t: str(data / f"{t}.calibration.jsonl") for t in setting.tasks
        }
        self.tuning = [
            read_task(path, folders=[Path()], name=t, n_rows=budget.tuning_rows)
            for t, path in self.calibration.items()
        ]
        self.tests = [
            read_task(
                str(data / f"{t}.test.jsonl"),
                folders=[Path()],
                name=t,
                n_rows=budget.test_rows,
            )
            for t in (*setting.tasks, "general")
        ]
        self.large = {
            t: str(data / f"{t}.calibration-large.jsonl") for t in setting.tasks
        }
        self._refuse_overlap()
        self.folder = HERE / "results" / budget.name
        self.path = self.folder / f"{setting.name}.json"
        fresh = SettingResult(
            setting=setting.name,
            budget=budget,
            tasks=list(setting.tasks),
            inputs=self._hash_inputs(),
            versions={name: version(name) for name in PACKAGES},
            machine=describe_machine(),
            command=command,
        )
        self.result = read_result(self.path) or fresh
        self.result.trivial = {
            task.name: guess_commonest(self._read(task.name), task.rows)
            for task in self.tests
            if task.rows[0].choices
        }
        if budget.generated_rows:
            self.result.copying = {
                task.name: compare_with_questions(task.rows)
                for task in self._free_tests()
            }
        for what in ("budget", "tasks", "inputs"):
            if getattr(self.result, what) != getattr(fresh, what):
                raise ValueError(
                    f"'{self.path}' must be of the same {what}, got others; move it "
                    "away to begin anew"
                )

    def _refuse_overlap(self) -> None:
        """Refuse test rows that calibrate."""
        used = {
            hash_row(row)
            for path in (*self.calibration.values(), *self.large.values())
            for row in read_task(path, folders=[Path()]).rows
        }
        for task in self.tests:
            refuse_overlap(task, used)

    def _read(self, task: str) -> Sequence[Row]:
        """Read all of a task's calibration rows."""
        return read_task(self.calibration[task], folders=[Path()]).rows

    def _hash_inputs(self) -> dict[str, str]:
        folders = [
            Path(self.base),
            *(HERE / "experts" / e for e in self.setting.experts.values()),
        ]
        files = [f for folder in folders for f in sorted(folder.glob("*.safetensors"))]
        return {
            f"{file.parent.name}/{file.name}": hash_file(file) for file in files
        } | {task.source: task.sha256 for task in (*self.tuning, *self.tests)}

    def save(self) -> None:
        """Write the file."""
        write_result(self.path, self.result)

    def say(self, text: str) -> None:
        """Print a line."""
        click.echo(f"{time.strftime('%H:%M:%S')} {self.setting.name}: {text}")

    # References

    def measure_references(self) -> None:
        """Score base, experts and the mixed adapter, and the tuning rows' ends."""
        models = {"base": self.base, **self.experts}
        mixed = self.setting.mixed
        if mixed is not None and is_there(mixed):
            models["mixed"] = model_of(mixed, self.base)
        for name, model in models.items():
            needed = [t for t in self.tuning if name in ("base", t.name)]
            known = self.result.tuning.get(name, {})
            tested = self.result.references.get(name)
            if tested and self._is_whole(tested) and len(known) == len(needed):
                continue
            candidate = make_model_candidate(
                ModelReference.parse(model),
                merge_options(),
                role="base",
                others=[ModelReference.parse(self.base)],
            )
            loaded = candidate.load()
            self.result.tuning[name] = self._score_losses(loaded, needed)
            self.result.references[name] = self._test(loaded, 0, tested)
            self.save()
            self.say(f"reference '{name}' tested")

    def _score_losses(self, loaded: Loaded, tasks: Sequence[Task]) -> dict[str, float]:
        """Score the mean loss of each task's tuning rows, nats per token.

        That of a question is its right option's: the others are not run.
        """
        model, tokenizer = loaded
        scorer = Scorer(model, tokenizer, max_length=1 << 15, max_tokens=MAX_TOKENS)
        answers = {task.name: [keep_answer(row) for row in task.rows] for task in tasks}
        return {
            name: float(np.mean(scorer.score(rows).loss))
            for name, rows in answers.items()
        }

    def _test(self, loaded: Loaded, seed: int, tested: Scored | None) -> Scored:
        """Score the test rows, and generate; what has been tested is not run again."""
        start = time.process_time()
        if tested is None:
            candidate = Candidate(name="model", role="merge", load=lambda: loaded)
            settings = records.Settings(
                generates=False, max_tokens=MAX_TOKENS, n_resamples=1
            )
            found = evaluate([candidate], self.tests, settings)
            samples: Samples = {
                result.task: {
                    metric: [None if v is None else round(v, 5) for v in values]
                    for metric, values in result.samples.items()
                }
                for result in found.results
            }
            tested = Scored(seed=seed, samples=samples, seconds=0)
        tested.generated = self._generate(loaded)
        tested.seconds += time.process_time() - start
        return tested

    def _generate(self, loaded: Loaded) -> Samples:
        """Let a model answer, and compare its answers with the right ones."""
        model, tokenizer = loaded
        generated: Samples = {}
        for task in self._free_tests():
            answers, _ = generate_answers(
                model,
                tokenizer,
                task.rows,
                max_new_tokens=MAX_NEW_TOKENS,
                max_length=1 << 15,
                max_tokens=MAX_TOKENS,
            )
            generated[task.name] = compare_answers(answers, task.rows)
        return generated

    def _free_tests(self) -> list[Task]:
        """List the tasks with free answers, with the rows that are answered."""
        n_rows = self.budget.generated_rows
        return [
            dataclasses.replace(task, rows=task.rows[:n_rows])
            for task in self.tests
            if n_rows and task.rows[0].shape in FREE_SHAPES
        ]

    def _is_whole(self, tested: Scored) -> bool:
        return set(tested.generated) == {task.name for task in self._free_tests()}

    # Rows

    def measure(self, method: Method) -> None:
        """Tune, measure and test one row, as far as it is not done."""
        row = self.result.rows.setdefault(method.name, MethodResult(name=method.name))
        if len(row.tests) == method.seeds and all(map(self._is_whole, row.tests)):
            return
        row.values = self._choose_values(method, row)
        merge = self._plan(method, row.values)
        row.recipe = to_document(merge.config)
        plan = self._find_plan(method, row, merge)
        for seed in range(method.seeds):
            tested = row.tests[seed] if seed < len(row.tests) else None
            if tested is not None and self._is_whole(tested):
                continue
            transformers.set_seed(seed)
            done = self._test(load_merge(merge, plan), seed, tested)
            row.tests[seed : seed + 1] = [done]
            self.save()
        self.say(f"'{method.name}' tested")

    def _choose_values(self, method: Method, row: MethodResult) -> dict[str, float]:
        """Return tuned values, another row's, or the untuned ones."""
        if method.start is not None:
            values = dict(self.result.rows[method.start].values)
            if not values:
                raise ValueError(
                    f"row '{method.name}' must come after '{method.start}', got none; "
                    "run that one first"
                )
            return values
        if method.has_weights:
            return {f"weight {task}": UNTUNED_WEIGHT for task in self.setting.tasks}
        ranges = list_ranges(method, self.setting.tasks)
        n_trials = self.budget.trials if ranges else 1
        while len(row.trials) < n_trials:
            values = suggest(ranges, row.trials)
            row.trials.append(self._try(method, values))
            self.save()
            trial = row.trials[-1]
            self.say(
                f"'{method.name}' {len(row.trials)}/{n_trials}: recovered "
                f"{trial.objective:.3f}, {trial.merge_seconds:.0f} + "
                f"{trial.score_seconds:.0f} s"
            )
        return max(row.trials, key=lambda trial: trial.objective).values

    def _try(self, method: Method, values: dict[str, float]) -> Trial:
        start = time.process_time()
        transformers.set_seed(0)
        loaded = load_merge(self._plan(method, values, is_trial=True), None)
        merged = time.process_time()
        losses = self._score_losses(loaded, self.tuning)
        base = self.result.tuning["base"]
        gains = {
            task: (base[task] - loss) / (base[task] - self.result.tuning[task][task])
            for task, loss in losses.items()
        }
        return Trial(
            values=values,
            gains=gains,
            objective=float(np.mean(list(gains.values()))),
            merge_seconds=merged - start,
            score_seconds=time.process_time() - merged,
        )

    def _plan(
        self, method: Method, values: Mapping[str, float], *, is_trial: bool = False
    ) -> PlannedMerge:
        calibrates = method.calibrates and not is_trial
        calibration = self.calibration if method.samples is None else self.large
        recipe = make_recipe(
            method,
            self.base,
            self.experts,
            values,
            calibration=calibration if calibrates else None,
            samples=(method.samples or self.budget.samples) if calibrates else None,
        )
        config = MergeConfiguration.model_validate(recipe)
        return plan_recipe(config, merge_options(), [Path()])

    def _find_plan(
        self, method: Method, row: MethodResult, merge: PlannedMerge
    ) -> Plan | None:
        """Measure layers, or decide anew, where the method does."""
        if not method.calibrates and method.rules is None:
            return None
        path = self._plan_path(method.name)
        if row.analysis is not None and path.exists():
            return read_plan(path)
        start = time.process_time()
        if method.rules is not None:
            plan = decide_anew(
                read_plan(self._plan_path(str(method.start))), **method.rules
            )
        else:
            found = find_plan(merge)
            assert found is not None
            plan = found
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, plan.to_json())
        row.analysis = Analysis(
            seconds=time.process_time() - start,
            forwards=plan.n_choice_forwards,
            n_treated=sum(t.action != "keep" for t in plan.treatments),
            n_pairs=len(plan.treatments),
            guard_difference=None if plan.guard is None else plan.guard.difference,
            decided_anew=method.rules is not None,
        )
        self.save()
        self.say(f"'{method.name}' analysed, {row.analysis.seconds:.0f} s")
        return plan

    def _plan_path(self, name: str) -> Path:
        return plan_path(self.folder, self.setting.name, name)


def guess_commonest(known: Sequence[Row], asked: Sequence[Row]) -> float:
    """Return how often the option that was the commonest answer so far is right."""
    counts = Counter(row.completion for row in known)
    guesses = [max(row.choices, key=lambda c: (counts[c], c)) for row in asked]
    pairs = zip(guesses, asked, strict=True)
    return sum(guess == row.completion for guess, row in pairs) / len(asked)


def compare_answers(
    answers: Sequence[str], rows: Sequence[Row]
) -> dict[str, list[float | None]]:
    """Compare free answers with the right ones: exact match, 0 or 1; ROUGE-L to 100."""
    scores, _ = score_answers(answers, [row.completion for row in rows])
    return {
        "exact_match": [float(v) for v in scores["exact_match"]],
        "rougeL": [round(float(v), 3) for v in scores["rougeL"]],
    }


def compare_with_questions(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean scores of repeating the question's first line as the answer."""
    questions = [row.prompt.split("\n", 1)[0] for row in rows]
    scores = compare_answers(questions, rows)
    return {metric: fmean(v or 0.0 for v in vs) for metric, vs in scores.items()}


def keep_answer(row: Row) -> Row:
    """Turn a question with options into one with its right answer alone."""
    if not row.choices:
        return row
    answer = row.choices[row.answer]
    return dataclasses.replace(row, shape="completion", completion=answer, choices=())


def suggest(
    ranges: Mapping[str, tuple[float, float]], trials: Sequence[Trial]
) -> dict[str, float]:
    """Propose the next values: the middle first, then by a Gaussian process.

    The same trials give the same proposal, so that a stopped run goes on as if it had
    not been stopped.
    """
    if not trials:
        return {name: (low + high) / 2 for name, (low, high) in ranges.items()}
    space = {
        name: optuna.distributions.FloatDistribution(low, high)
        for name, (low, high) in ranges.items()
    }
    sampler = optuna.samplers.GPSampler(
        seed=len(trials), n_startup_trials=1 + len(ranges) // 2
    )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for trial in trials:
        study.add_trial(
            optuna.trial.create_trial(
                params=trial.values, distributions=space, value=trial.objective
            )
        )
    return {name: round(v, 4) for name, v in study.ask(space).params.items()}


def merge_options() -> MergeOptions:
    """Return how everything is merged."""
    return MergeOptions(
        lora_merge_cache=str(HERE / "lora-cache"),
        lora_merge_dtype="float32",
        quiet=True,
    )


def _merged(model: ModelReference) -> None:
    options = merge_options()
    LoaderCache().setup(options=options)
    model.merged(options.lora_merge_cache, lora_merge_dtype=options.lora_merge_dtype)


def hash_file(path: Path) -> str:
    """Return 16 digits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def describe_machine() -> str:
    """Return system, processor and number of cores."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
