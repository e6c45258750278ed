"""The whole analysis: probes and planned tensors -> scores -> treatments -> guard.

Invariant: nothing of what is decided here touches a tensor; the outcome is a plan, and
the merge reads the plan.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mergekit_himerging.analysis.calibration import NotANumberError
from mergekit_himerging.analysis.contribution import (
    Contribution,
    FloatArray,
    Resolution,
    TaskScores,
    measure_layers,
    resolve_conflicts,
)
from mergekit_himerging.analysis.data import Probes, TaskData
from mergekit_himerging.analysis.gradients import (
    GRADIENT_FORWARDS,
    measure_gradients,
)
from mergekit_himerging.analysis.graph import Cuts, PlannedWeights
from mergekit_himerging.analysis.jobs import Depth, Job, Measured
from mergekit_himerging.analysis.judging import (
    Whole,
    check_gains,
    describe_whole,
    judge,
    make_proof,
    mean_score,
)
from mergekit_himerging.analysis.measured import choose_factors, pick_way
from mergekit_himerging.analysis.probe_scores import find_unit, score_probes
from mergekit_himerging.analysis.proof import Proof, SideScores
from mergekit_himerging.analysis.replay import Replay
from mergekit_himerging.analysis.selfcheck import SelfCheck, pick_rows
from mergekit_himerging.analysis.settings import AnalysisSettings
from mergekit_himerging.analysis.slopes import Slopes
from mergekit_himerging.analysis.streams import LOGITS_BYTES, Progress, run_jobs
from mergekit_himerging.analysis.teachers import add_teachers
from mergekit_himerging.plan import Plan, Treatment
from mergekit_himerging.scores import (
    GuardReport,
    LayerScores,
    MatrixGradients,
    Slope,
    StepReport,
    TaskReport,
)
from mergekit_himerging.tasks import PlannedTensor, list_merged

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Largest difference of the self-check, in nats; 0.25 in shorter dtypes."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What an analysis runs on.

    Attributes:
        resolve: a plan, or None for the plain merge -> planned tensors with their final
            values.
        replay: the model to run.
        make_replay: makes another one, for the self-check.
        device: where deltas are merged.
        progress: told of block forwards done.
        cuts: of deltas, found in one pass and used in the next.
    """

    resolve: Callable[[Plan | None], Sequence[PlannedTensor]]
    replay: Replay
    make_replay: Callable[[], Replay]
    device: torch.device
    progress: Progress
    cuts: Cuts = field(default_factory=dict)


def analyse_merge(
    skeleton: Plan,
    tasks: Sequence[TaskData],
    settings: AnalysisSettings,
    engine: Engine,
) -> Plan:
    """Measure a planned merge and decide what to do with every (layer, model).

    Args:
        skeleton: a plan without treatments: base, models, layers, settings.
        tasks: one for each model.
        settings: how.
        engine: on what.

    Returns:
        The plan, with scores and with the treatments that are to be merged.

    Raises:
        ValueError: the models cannot be analysed, or their tasks not be compared.
    """
    tasks = add_teachers(
        tasks,
        engine.resolve(None),
        engine.replay,
        device=engine.device,
        memory=settings.memory,
        progress=engine.progress,
    )
    choosing, accepting, units = _measure_wholes(tasks, settings, engine)
    aims = {task.settings.model: task.settings for task in tasks}
    if settings.rules.compare == "gain":
        check_gains(choosing, aims, settings)
    proof = make_proof(choosing, accepting, settings, aims)
    models = list(aims)
    plain = SideScores(
        *([side[model].merged for model in models] for side in (choosing, accepting))
    )
    if settings.resolve == "measured":
        outcome = _resolve_by_measurement(
            skeleton, tasks, proof, plain, units, settings, engine
        )
    else:
        outcome = _resolve_by_rules(
            skeleton, tasks, (choosing, accepting), settings, engine
        )
    treatments = outcome.treatments
    treated = SideScores(
        *zip(*(outcome.treated[model] for model in models), strict=True)
    )
    guard = judge(proof, plain, treated, models, settings)
    if guard.acted:
        treatments = _put_back(treatments)
    gradients: Sequence[tuple[MatrixGradients, ...]] = [()] * len(tasks)
    if settings.gradients:
        gradients = measure_gradients(
            engine.resolve(None),
            tasks,
            engine.replay,
            device=engine.device,
            memory=settings.memory,
            cuts=engine.cuts,
            progress=engine.progress,
        )
    return skeleton.model_copy(
        update={
            "treatments": treatments,
            "order": outcome.order,
            "steps": outcome.steps,
            "choice_forwards": outcome.forwards,
            "gradient_forwards": GRADIENT_FORWARDS if settings.gradients else 0,
            "tasks": tuple(
                _report(
                    task,
                    {**details, "gradients": found},
                    choosing,
                    accepting,
                    outcome.treated,
                    guard,
                )
                for task, details, found in zip(
                    tasks, outcome.details, gradients, strict=True
                )
            ),
            "guard": guard,
        }
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """What was decided, and what from.

    Attributes:
        treatments: of every (layer, model).
        treated: scores of the merge by them, on choosing and accepting samples, by
            model.
        order: layers by summed conflict; none where they were not measured.
        details: what goes into each task's report.
        steps, forwards: of treatments chosen by measurement.
    """

    treatments: tuple[Treatment, ...]
    treated: Mapping[str, tuple[FloatArray, FloatArray]]
    order: tuple[int, ...]
    details: Sequence[Mapping[str, Any]]
    steps: tuple[StepReport, ...] = ()
    forwards: int = 0


def _resolve_by_rules(
    skeleton: Plan,
    tasks: Sequence[TaskData],
    wholes: tuple[Mapping[str, Whole], Mapping[str, Whole]],
    settings: AnalysisSettings,
    engine: Engine,
) -> _Outcome:
    """Measure every layer and treat those in conflict, round by round."""
    choosing, accepting = wholes
    layers = _measure_layers(tasks, settings, engine, None)
    contributions = [measure_layers(scores) for scores in layers]
    first = resolution = resolve_conflicts(contributions, settings.rules)
    treatments = treat_decisions(resolution, {})
    treated = {
        model: (whole.merged, accepting[model].merged)
        for model, whole in choosing.items()
    }
    if any(treatment.action != "keep" for treatment in treatments):
        treated = _score_treated(skeleton, treatments, tasks, settings, engine)
    best = mean_score(choosing, {m: t[0] for m, t in treated.items()}, settings)
    for number in range(2, settings.rounds + 1):
        plan = skeleton.model_copy(update={"treatments": treatments})
        again = _measure_layers(tasks, settings, engine, plan)
        resolution = resolve_conflicts(
            [measure_layers(scores) for scores in again], settings.rules
        )
        earlier = {(t.layer, t.model): t for t in treatments}
        more = treat_decisions(resolution, earlier, label=f"in round {number} ")
        if more == treatments:
            break
        scores = _score_treated(skeleton, more, tasks, settings, engine)
        score = mean_score(choosing, {m: s[0] for m, s in scores.items()}, settings)
        if score <= best:
            break
        best, treatments, treated = score, more, scores
    return _Outcome(
        treatments=treatments,
        treated=treated,
        order=first.order,
        details=[{"layers": _list_layers(found)} for found in contributions],
    )


def _resolve_by_measurement(
    skeleton: Plan,
    tasks: Sequence[TaskData],
    proof: Proof,
    plain: SideScores,
    units: FloatArray,
    settings: AnalysisSettings,
    engine: Engine,
) -> _Outcome:
    """Climb the slopes of the tasks' scores by the factors of every (layer, model)."""
    models = [task.settings.model for task in tasks]
    way = pick_way(settings.measure, tasks, engine.replay, settings.memory)
    tensors = engine.resolve(None)
    merged = list_merged(tensors)
    is_merged = np.array(
        [[(layer, m) in merged for m in models] for layer in range(skeleton.n_layers)]
    )
    shared: dict[str, Any] = {
        "device": engine.device,
        "memory": settings.memory,
        "cuts": engine.cuts,
        "progress": engine.progress,
    }

    def resolve(factors: FloatArray) -> Sequence[PlannedTensor]:
        update = {"treatments": _set_factors(factors, models)}
        return engine.resolve(skeleton.model_copy(update=update))

    def measure(factors: FloatArray) -> Slopes:
        found = way.measure(tensors, resolve(factors), tasks, engine.replay, **shared)
        for model, of_task in zip(models, found.slopes, strict=True):
            if not np.isfinite(of_task).all():
                raise ValueError(
                    f"slopes of '{model}' must be finite, got "
                    f"{int((~np.isfinite(of_task)).sum())} that are not; set 'dtype: "
                    "float32' in the recipe, or 'resolve: rules'"
                )
        return Slopes(found.scores, found.slopes * units[:, None, None] * is_merged)

    def score(factors: FloatArray) -> SideScores:
        treatments = _set_factors(factors, models)
        try:
            found = _score_treated(skeleton, treatments, tasks, settings, engine)
        except NotANumberError:
            return SideScores([np.full(1, np.nan)], [np.zeros(0)])
        return SideScores(*zip(*(found[model] for model in models), strict=True))

    choice = choose_factors(
        proof,
        measure,
        score,
        plain=plain.accepting,
        n_layers=skeleton.n_layers,
        n_models=len(models),
        forwards=way.forwards,
        budget=way.budget,
    )
    weights = proof.choosing.weigh_tasks(plain.choosing)
    slopes = np.tensordot(weights, choice.slopes, axes=1)  # [layers, models]
    n_taken = sum(step.taken for step in choice.steps)
    unit = "in score" if settings.rules.compare == "raw" else "of the gain"
    treatments = tuple(
        treatment.model_copy(
            update={
                "reason": f"slope {slopes[t, models.index(treatment.model)]:+.3g} "
                f"{unit} at the plain merge; {n_taken} of {len(choice.steps)} steps "
                "taken"
            }
        )
        for treatment in _set_factors(choice.factors, models)
        for t in (treatment.layer,)
    )
    return _Outcome(
        treatments=treatments,
        treated={
            model: (choice.scores.choosing[m], choice.scores.accepting[m])
            for m, model in enumerate(models)
        },
        order=(),
        details=[
            {
                "slopes": tuple(
                    Slope(layer=layer, model=model, slope=float(of_task[layer, m]))
                    for layer in range(skeleton.n_layers)
                    for m, model in enumerate(models)
                )
            }
            for of_task in choice.slopes
        ],
        steps=choice.steps,
        forwards=choice.forwards,
    )


def _set_factors(factors: FloatArray, models: Sequence[str]) -> tuple[Treatment, ...]:
    """Make the treatments that put factors on the weights."""
    return tuple(
        Treatment(
            layer=layer,
            model=model,
            action="keep" if factor == 1 else "set",
            weight_factor=float(factor),
        )
        for layer, row in enumerate(factors)
        for model, factor in zip(models, row, strict=True)
    )


def _measure_wholes(
    tasks: Sequence[TaskData],
    settings: AnalysisSettings,
    engine: Engine,
) -> tuple[dict[str, Whole], dict[str, Whole], FloatArray]:
    """Score F, M_m and G on the choosing and on the accepting samples.

    A small part of the work, done first: it checks the engine on this architecture, and
    finds tasks that cannot be compared. The last are the units of the tasks' slopes,
    see ``find_unit``.
    """
    measured = _measure(
        tasks, settings, engine, None, ("fronts", "fronts"), is_checked=True
    )
    fields = ("base", "single", "merged")
    wholes = [
        {
            task.settings.model: Whole(
                *(score_probes(task, part, found, f) for f in fields)
            )
            for task, part, found in measured
            if part is getattr(task, side)
        }
        for side in ("choosing", "accepting")
    ]
    units = [
        find_unit(task, found)
        for task, part, found in measured
        if part is task.choosing
    ]
    return wholes[0], wholes[1], np.array(units)


def _measure_layers(
    tasks: Sequence[TaskData],
    settings: AnalysisSettings,
    engine: Engine,
    plan: Plan | None,
) -> list[TaskScores]:
    """Measure every layer on the choosing samples."""
    fields = (
        *("base", "single", "merged", "removed_single", "added_single"),
        *("removed_merged", "added_merged"),
    )
    return [
        TaskScores(
            model=task.settings.model,
            **{field: score_probes(task, part, found, field) for field in fields},
        )
        for task, part, found in _measure(
            tasks, settings, engine, plan, ("layers", None)
        )
    ]


def _measure(
    tasks: Sequence[TaskData],
    settings: AnalysisSettings,
    engine: Engine,
    plan: Plan | None,
    depths: tuple[Depth, Depth | None],
    *,
    is_checked: bool = False,
) -> list[tuple[TaskData, Probes, list[Measured]]]:
    """Measure the tasks' choosing and accepting samples, each to its depth."""
    parts = [
        (task, part, depth)
        for task in tasks
        for part, depth in zip((task.choosing, task.accepting), depths, strict=True)
        if depth is not None
    ]
    jobs = [
        Job(task.settings.model, batch, depth)
        for task, part, depth in parts
        for batch in part.batches
    ]
    weights = PlannedWeights(
        engine.resolve(None),
        engine.resolve(plan),
        device=engine.device,
        reference=settings.reference,
        cuts=engine.cuts,
        only_merged=depths[0] == "merged",
    )
    check = None
    if is_checked:
        tolerance = TOLERANCE.get(engine.replay.dtype, 0.25)
        few = pick_rows(jobs[0].batch, engine.replay.vocabulary, LOGITS_BYTES)
        few_rows = replace(jobs[0], batch=few)
        check = SelfCheck(engine.make_replay, few_rows, tolerance)
    results = iter(
        run_jobs(
            jobs,
            weights,
            engine.replay,
            memory=settings.memory,
            progress=engine.progress,
            check=check,
        )
    )
    return [
        (task, part, [next(results) for _ in part.batches]) for task, part, _ in parts
    ]


def _score_treated(
    skeleton: Plan,
    treatments: tuple[Treatment, ...],
    tasks: Sequence[TaskData],
    settings: AnalysisSettings,
    engine: Engine,
) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Score the treated merge on the choosing and on the accepting samples."""
    plan = skeleton.model_copy(update={"treatments": treatments})
    measured = _measure(tasks, settings, engine, plan, ("merged", "merged"))
    scores = [
        score_probes(task, part, found, "merged") for task, part, found in measured
    ]
    pairs = zip(scores[::2], scores[1::2], strict=True)
    return {task.settings.model: pair for task, pair in zip(tasks, pairs, strict=True)}


def treat_decisions(
    resolution: Resolution,
    earlier: Mapping[tuple[int, str], Treatment],
    label: str = "",
) -> tuple[Treatment, ...]:
    """Turn decisions into treatments; an earlier one stays unless this is stronger.

    The label goes before the reasons: a plan's scores are those of the first round.
    """
    strength = {"keep": 0, "shrink": 1, "drop": 2}
    treatments = []
    for decision in resolution.decisions:
        treatment = Treatment(
            layer=decision.layer,
            model=decision.model,
            action=decision.action,
            density_factor=decision.density_factor,
            scale_factor=decision.scale_factor,
            weight_factor=0.0 if decision.action == "drop" else 1.0,
            reason=label + decision.reason,
        )
        before = earlier.get((decision.layer, decision.model))
        if before and strength[before.action] >= strength[treatment.action]:
            treatment = before
        treatments.append(treatment)
    return tuple(treatments)


def _put_back(treatments: Sequence[Treatment]) -> tuple[Treatment, ...]:
    """Keep every delta, and say what was proposed."""
    return tuple(
        treatment
        if treatment.action == "keep"
        else Treatment(
            layer=treatment.layer,
            model=treatment.model,
            action="keep",
            reason="guard put the plain merge back; proposed was "
            f"{_describe_proposed(treatment)}: {treatment.reason}",
        )
        for treatment in treatments
    )


def _describe_proposed(treatment: Treatment) -> str:
    if treatment.action == "set":
        return f"set to {treatment.weight_factor:g} of weight"
    return treatment.action


def _list_layers(contribution: Contribution) -> tuple[LayerScores, ...]:
    names = (
        *("removal_single", "addition_single", "removal_merged", "addition_merged"),
        *("contribution_single", "contribution_merged", "conflict", "conflict_se"),
    )
    return tuple(
        LayerScores(
            layer=layer,
            **{name: float(getattr(contribution, name)[layer]) for name in names},
        )
        for layer in range(contribution.n_layers)
    )


def _report(
    task: TaskData,
    details: Mapping[str, Any],
    choosing: Mapping[str, Whole],
    accepting: Mapping[str, Whole],
    treated: Mapping[str, tuple[FloatArray, FloatArray]],
    guard: GuardReport,
) -> TaskReport:
    model = task.settings.model
    chosen, judged = (
        describe_whole(whole[model], after, task.settings.floor, is_plain=guard.acted)
        for whole, after in zip((choosing, accepting), treated[model], strict=True)
    )
    return TaskReport(
        **chosen.model_dump(),
        model=model,
        metric=task.settings.metric,
        calibration=task.settings.calibration,
        calibration_sha256=task.rows_sha256,
        calibration_rows=task.row_hashes,
        n_tokens=task.tokenized.n_tokens,
        n_targets=task.tokenized.n_targets,
        n_truncated=task.tokenized.n_truncated,
        accepted_on=judged,
        task_weight=task.settings.task_weight,
        floor=task.settings.floor,
        **details,
    )
