"""One merge's analysis from recipe to plan: data, cache, engine, files, progress."""

import copy
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
import torch
from mergekit.common import dtype_from_name
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_himerging.analysis.cache import (
    find_plan,
    folders_of,
    hash_code,
    hash_model,
    keep_plan,
    make_fingerprint,
    read_versions,
)
from mergekit_himerging.analysis.calibration import Row
from mergekit_himerging.analysis.contribution import Rules
from mergekit_himerging.analysis.data import (
    TaskData,
    bound_task,
    read_task,
    read_task_rows,
)
from mergekit_himerging.analysis.drawing import MAX_TOKENS
from mergekit_himerging.analysis.gradients import GRADIENT_FORWARDS
from mergekit_himerging.analysis.jobs import Job
from mergekit_himerging.analysis.measured import Way, pick_way
from mergekit_himerging.analysis.replay import Replay
from mergekit_himerging.analysis.run import Engine, analyse_merge
from mergekit_himerging.analysis.self_rows import make_self_rows
from mergekit_himerging.analysis.settings import AnalysisSettings
from mergekit_himerging.analysis.streams import Progress
from mergekit_himerging.analysis.teachers import needs_teacher
from mergekit_himerging.parameters import PARAMETERS, SELF, RecipeError, parse_bytes
from mergekit_himerging.plan import Plan
from mergekit_himerging.planning import PlannedMerge
from mergekit_himerging.recipe import TaskSettings, to_document
from mergekit_himerging.seam import forget_loaders
from mergekit_himerging.tasks import describe_merge
from mergekit_himerging.views.words import show_share

LOG = logging.getLogger(__name__)

MAX_LENGTH = 1 << 15
"""Tokens of a sequence where neither model nor tokenizer sets a limit."""

BATCH_CELLS = {"cpu": 1024}
"""Tokens of a batch, padding included; 8192 on an accelerator."""


NO_SETTINGS = ("plan", "plan_out", "analysis_memory", "hide_paths", "smoke_test")
"""Parameters that say where and how to work, and leave the outcome as it is."""


def make_plan(merge: PlannedMerge) -> Plan:
    """Analyse a merge, or find the plan of an equal analysis.

    Raises:
        RecipeError: data or models cannot be used; the message names file and line, or
            model and tensor.
    """
    # What is measured is what is hashed, also where files have changed since planning.
    forget_loaders()
    base, models, n_layers = describe_merge(merge.tensors)
    settings = merge.settings
    device = pick_device(merge.options)
    memory = parse_bytes(str(settings["analysis_memory"]))
    try:
        tasks = read_data(merge, device, settings["accept_share"])
        _check_samples(tasks, settings)
        inputs = {
            str(model): hash_model(folders_of(model))
            for model in dict.fromkeys(
                m for tensor in merge.tensors for m in tensor.task.model_order
            )
        }
        skeleton = Plan(
            version=1,
            base=base,
            models=tuple(models),
            n_layers=n_layers,
            settings={
                name: value
                for name, value in settings.items()
                if name not in NO_SETTINGS
            },
            recipe=_describe_recipe(merge.config),
            versions=read_versions(),
            inputs=dict(sorted(inputs.items())),
        )
        fingerprint = _fingerprint(merge, skeleton, tasks, device)
        plan = find_plan(fingerprint)
        if plan is not None:
            merge.say(
                "recipe, models and data are those of an earlier run, "
                "so its analysis is reused",
            )
            _warn_of_tasks(plan)
            return plan
        for task in tasks:
            merge.say(_describe(task))
        plan = _analyse(merge, skeleton, tasks, device, memory)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(str(error)) from error
    try:
        merge.say(f"plan kept in {keep_plan(fingerprint, plan)}, for a rerun")
    except OSError as error:
        LOG.warning("hi_merging: the plan is not kept for later runs: %s", error)
    _warn_of_tasks(plan)
    return plan


def _warn_of_tasks(plan: Plan) -> None:
    """Warn of tasks that the others' gains are paid with."""
    for task in plan.tasks:
        judged = task.accepted_on if task.accepted_on.n_samples else task
        acted = plan.guard is not None and plan.guard.acted
        if judged.fall and task.task_weight and not acted:
            LOG.warning(
                "hi_merging: the treatments that serve the tasks together cost '%s' "
                "%.3g in score on the %s samples (recovered gain %s before and %s "
                "after); %s protects it, without 'calibration' the merge is the plain "
                "one",
                *(task.model, judged.fall),
                "choosing" if judged is task else "judging",
                show_share(judged.recovered_merged),
                show_share(judged.recovered_treated),
                _find_protection(plan.settings),
            )
        for role, scores in (("choosing", task), ("judging", task.accepted_on)):
            if scores.floor_kept is False:
                LOG.warning(
                    "hi_merging: the floor of '%s' is not kept on the %s samples; see "
                    "its recovered gain in the plan",
                    *(task.model, role),
                )


def _find_protection(settings: Mapping[str, Any]) -> str:
    """Say what keeps a task from paying for the others."""
    if settings["resolve"] == "rules":
        return "'resolve: measured' with a 'floor' or 'objective: worst'"
    if settings["objective"] == "worst":
        return "a 'floor'"
    return "a 'floor' or 'objective: worst'"


def _analyse(
    merge: PlannedMerge,
    skeleton: Plan,
    tasks: Sequence[TaskData],
    device: torch.device,
    memory: int,
) -> Plan:
    settings = merge.settings
    rules = Rules(
        mixed=settings["mixed"],
        layer_density=settings["layer_density"],
        layer_scale=settings["layer_scale"],
        max_layers=settings["max_layers"],
        confidence=settings["confidence"],
        compare=settings["compare"],
    )
    n_layers = skeleton.n_layers
    replay = make_replay(merge, device)
    way = None
    if settings["resolve"] == "measured":
        way = pick_way(settings["measure"], tasks, replay, memory)
    with _show_progress(
        tasks,
        n_layers,
        way=way,
        gradients=settings["gradients"],
        quiet=merge.options.quiet,
    ) as progress:
        return analyse_merge(
            skeleton,
            tasks,
            AnalysisSettings(
                rules=rules,
                rounds=settings["rounds"],
                reference=settings["reference"],
                resolve=settings["resolve"],
                measure=settings["measure"],
                objective=settings["objective"],
                gradients=settings["gradients"],
                guard=settings["guard"],
                memory=memory,
            ),
            Engine(
                merge.resolve,
                replay,
                lambda: make_replay(merge, device),
                device,
                progress,
            ),
        )


def _describe_recipe(config: MergeConfiguration) -> dict[str, Any]:
    """Write the recipe down, the same for any order of models."""

    def sort(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: sort(item) for key, item in value.items()}
        if isinstance(value, list) and all(
            isinstance(item, dict) and "model" in item for item in value
        ):
            return [sort(item) for item in sorted(value, key=lambda m: str(m["model"]))]
        return [sort(item) for item in value] if isinstance(value, list) else value

    document: dict[str, Any] = sort(to_document(config))
    shared = document.get("parameters", {})
    kept = {name: value for name, value in shared.items() if name not in NO_SETTINGS}
    document.pop("parameters", None)
    return {**document, "parameters": kept} if kept else document


def make_replay(merge: PlannedMerge, device: torch.device) -> Replay:
    """Make a model without weights that runs the output model's blocks.

    Raises:
        UnsupportedModelError: it cannot be run block by block.
    """
    _, _, n_layers = describe_merge(merge.tensors)
    # Shorter dtypes are slow on a CPU, and float32 is what is merged there.
    dtype = torch.float32
    if device.type != "cpu":
        dtype = dtype_from_name(merge.config.dtype) or torch.float32
    model_config = copy.deepcopy(merge.load_output()[1])
    planned = {tensor.weight.name for tensor in merge.tensors}
    if any(name.endswith("lm_head.weight") for name in planned):
        # A head with weights of its own is loaded as such, whatever the config says.
        model_config.tie_word_embeddings = False
    return Replay(
        model_config,
        n_layers=n_layers,
        dtype=dtype,
        device=device,
        trust_remote_code=merge.options.trust_remote_code,
    )


def read_data(
    merge: PlannedMerge,
    device: torch.device,
    accept_share: float,
    *,
    may_draw: bool = True,
) -> list[TaskData]:
    """Read every task's calibration data, or let the expert draw it from itself.

    Args:
        merge: whose tasks.
        device: where they will be run.
        accept_share: of the rows, those that do not choose.
        may_draw: whether rows are drawn; else samples of their bounds stand for them.

    Raises:
        ValueError: the data cannot be used; the message names file and line.
    """
    _, _, n_layers = describe_merge(merge.tensors)
    tokenizer, model_config = merge.load_output()
    config = model_config.get_text_config()
    # A batch's hidden states must fit; a single sequence that does not is refused.
    memory = parse_bytes(str(merge.settings["analysis_memory"]))
    fitting = memory // ((4 * n_layers + 3) * config.hidden_size * 4)
    lengths = [
        int(length)
        for length in (
            getattr(config, "max_position_embeddings", None),
            getattr(tokenizer, "model_max_length", None),
        )
        if length
    ]
    max_length = min([MAX_LENGTH, *lengths])
    max_tokens = max(1, min(BATCH_CELLS.get(device.type, 8192), fitting))

    def read(task: TaskSettings) -> TaskData:
        rows: tuple[Row, ...] | None
        if task.calibration == SELF:
            rows = make_self_rows(merge, task, device, may_draw=may_draw)
        else:
            rows = read_task_rows(task, merge.folders)
        if rows is None:
            return bound_task(
                task,
                n_prompt=min(MAX_TOKENS, max_length // 2),
                n_answer=min(MAX_TOKENS, max_length // 2),
                accept_share=accept_share,
                max_tokens=max_tokens,
            )
        return read_task(
            task,
            rows,
            tokenizer=tokenizer,
            accept_share=accept_share,
            seed=merge.settings["seed"],
            max_length=max_length,
            vocab_size=config.vocab_size,
            max_tokens=max_tokens,
        )

    return [read(task) for task in merge.tasks]


def _check_samples(tasks: Sequence[TaskData], settings: Mapping[str, Any]) -> None:
    """Check that there are standard errors, where decisions hang on them."""
    for task in tasks:
        n_choosing = len(task.choosing.samples)
        n_samples = n_choosing + len(task.accepting.samples)
        if settings["confidence"] > 0 and n_choosing < 2:
            raise ValueError(
                f"'{task.settings.model}' must have two choosing samples or more for a "
                f"standard error, got {n_choosing}; raise samples, or "
                "set confidence: 0"
            )
        if settings["resolve"] == "measured" and n_samples < 2:
            raise ValueError(
                f"'{task.settings.model}' must have two samples or more for a standard "
                f"error, got {n_samples}; add rows to its calibration data, or raise "
                "samples"
            )


def _describe(task: TaskData) -> str:
    """Say what a task is measured on."""
    counts = task.tokenized
    cut = f", {counts.n_truncated} cut to length" if counts.n_truncated else ""
    return (
        f"'{task.settings.model}' on '{task.settings.calibration}': "
        f"{len(task.choosing.samples)} samples choose, "
        f"{len(task.accepting.samples)} accept; {counts.n_tokens} tokens, "
        f"{counts.n_targets} scored ({task.settings.metric}){cut}"
    )


def _fingerprint(
    merge: PlannedMerge,
    skeleton: Plan,
    tasks: Sequence[TaskData],
    device: torch.device,
) -> str:
    values = {
        tensor.weight.name: {
            str(model): {
                name: tensor.value(model, name)
                for name in ("weight", "density", "scale")
            }
            for model in tensor.experts
        }
        for tensor in merge.tensors
    }
    shared = {
        tensor.weight.name: {
            name: value
            for name, value in tensor.task.parameters.items()
            if name in PARAMETERS and not PARAMETERS[name].whole_merge
        }
        for tensor in merge.tensors
    }
    return make_fingerprint(
        {
            "skeleton": skeleton.model_dump(mode="json"),
            "memory": merge.settings["analysis_memory"],
            "values": values,
            "shared": shared,
            "sources": {t.weight.name: t.sources for t in merge.tensors},
            "tasks": [(str(task.settings), task.tokens_sha256) for task in tasks],
            "vocabulary": repr((merge.config.tokenizer, merge.config.tokenizer_source)),
            "model_config": merge.load_output()[1].to_dict(),
            "device": device.type,
            "dtype": merge.config.dtype,
            "code": hash_code(),
        }
    )


def pick_device(options: MergeOptions) -> torch.device:
    """Pick the math device; `--multi-gpu` alone leaves the option at the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if options.multi_gpu and accelerator is not None:
        return accelerator
    return torch.device(options.device or "cpu")


@contextmanager
def _show_progress(
    tasks: Sequence[TaskData],
    n_layers: int,
    *,
    way: Way | None,
    gradients: bool,
    quiet: bool,
) -> Iterator[Progress]:
    """Show block forwards done; a further round of analysis is added as it begins.

    With a way to measure, all that choosing by it may take.
    """
    n_choosing = sum(len(task.choosing.batches) for task in tasks)
    n_accepting = sum(len(task.accepting.batches) for task in tasks)
    if way is None:
        again = n_layers * (n_choosing + n_accepting)  # the treated merge
        for task in tasks:
            for batch in task.choosing.batches:
                job = Job(task.settings.model, batch, "layers")
                again += sum(job.n_block_calls(layer) for layer in range(n_layers))
    else:
        n_measurements, n_steps = way.count_most(n_choosing, n_accepting)
        n_passes = n_measurements * way.forwards + n_steps
        again = n_layers * (n_passes * n_choosing + n_steps * n_accepting)
    wholes = 0
    for task in tasks:
        n_batches = len(task.choosing.batches) + len(task.accepting.batches)
        wholes += (3 + needs_teacher(task)) * n_layers * n_batches
    if gradients:
        wholes += GRADIENT_FORWARDS * n_layers * n_choosing
    if quiet:
        yield lambda calls, label: None
        return
    length = wholes + again
    with click.progressbar(length=length, label="analysing", file=sys.stderr) as bar:

        def progress(calls: int, label: str) -> None:
            if sys.stderr.isatty():  # elsewhere every change of label is a line
                bar.label = f"analysing {label}"
            if bar.pos + calls > (bar.length or 0):  # another round
                bar.length = (bar.length or 0) + again
            bar.update(calls)

        yield progress
