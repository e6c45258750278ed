"""The experts as they were given, run once: what metric `agreement` compares with.

Invariant: one layer's weights are in memory at a time; of each batch only the hidden
states at its targets are kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from mergekit_himerging.analysis.calibration import Batch, Teacher
from mergekit_himerging.analysis.data import Probes, TaskData
from mergekit_himerging.analysis.graph import load_inputs
from mergekit_himerging.analysis.jobs import Job
from mergekit_himerging.analysis.replay import Call, Replay, RunBlock, Weights
from mergekit_himerging.analysis.streams import Progress, split_jobs
from mergekit_himerging.tasks import PlannedTensor


def needs_teacher(task: TaskData) -> bool:
    """Return whether a task's scores are taken against its expert."""
    return task.settings.metric == "agreement"


def add_teachers(
    tasks: Sequence[TaskData],
    planned: Sequence[PlannedTensor],
    replay: Replay,
    *,
    device: torch.device,
    memory: int,
    progress: Progress = lambda calls, label: None,
) -> list[TaskData]:
    """Give the batches of every task that is scored by agreement their teacher.

    It is the expert's own weights, undiluted: with the single model of the analysis,
    ``density``, ``scale`` and ``reference`` would move what a merge is to agree with,
    and the merge that changes the base least would agree best.

    Args:
        tasks: all tasks; others than these are returned as they are.
        planned: planned tensors with any values.
        replay: the model to run.
        device: where tensors are loaded.
        memory: bytes that hidden states may take.
        progress: told of block forwards done.

    Raises:
        ValueError: a single batch needs more than ``memory``.
    """
    jobs = [
        Job(task.settings.model, batch, "merged")
        for task in tasks
        if needs_teacher(task)
        for part in (task.choosing, task.accepting)
        for batch in part.batches
    ]
    if not jobs:
        return list(tasks)
    experts = _Experts(planned, replay, device, memory // 4)
    taught: dict[Batch, Batch] = {}
    with torch.no_grad():
        for chunk in split_jobs(jobs, replay, memory):
            for job, hidden in zip(
                chunk, _run_pass(chunk, experts, replay, progress), strict=True
            ):
                load_outer = partial(experts.load_outer, job.model)
                teacher = Teacher(hidden, load_outer)
                taught[job.batch] = replace(job.batch, teacher=teacher)

    def teach(part: Probes) -> Probes:
        return replace(part, batches=tuple(taught[batch] for batch in part.batches))

    return [
        replace(task, choosing=teach(task.choosing), accepting=teach(task.accepting))
        if needs_teacher(task)
        else task
        for task in tasks
    ]


class _Experts:
    """The experts' own weights by layer; those outside the blocks kept where cheap."""

    def __init__(
        self,
        planned: Sequence[PlannedTensor],
        replay: Replay,
        device: torch.device,
        limit: int,
    ) -> None:
        self._replay = replay
        self._device = device
        self._limit = limit
        self._by_layer: dict[int | None, list[PlannedTensor]] = {}
        for tensor in planned:
            self._by_layer.setdefault(tensor.layer, []).append(tensor)
        self._kept: dict[str, Weights] = {}

    def load(
        self, layer: int | None, models: Sequence[str]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Load one layer of some experts; a tensor that one lacks is the base's."""
        found: dict[str, dict[str, torch.Tensor]] = {model: {} for model in models}
        for tensor, inputs in load_inputs(self._by_layer.get(layer, []), self._device):
            for model, weights in found.items():
                weights[tensor.weight.name] = inputs.tuned.get(model, inputs.base)
        return found

    def load_outer(self, model: str) -> Weights:
        """Load what lies outside the blocks; of the last expert it is always kept."""
        if model not in self._kept:
            outer = self._replay.pick_outer(self.load(None, [model])[model])
            n_bytes = sum(t.numel() * t.element_size() for t in outer.values())
            if n_bytes * (len(self._kept) + 1) > self._limit:
                self._kept.clear()
            self._kept[model] = outer
        return self._kept[model]


def _run_pass(
    jobs: Sequence[Job], experts: _Experts, replay: Replay, progress: Progress
) -> list[torch.Tensor]:
    """Take each batch through its expert; returns ``[targets, width]`` of each."""
    recordings = [
        replay.record(
            experts.load_outer(job.model),
            job.batch.input_ids.to(replay.device),
            job.batch.attention_mask.to(replay.device),
        )
        for job in jobs
    ]
    hidden = [recording.hidden for recording in recordings]
    models = list(dict.fromkeys(job.model for job in jobs))

    def advance(numbers: Sequence[int], calls: Sequence[Call], run: RunBlock) -> None:
        for number, call in zip(numbers, calls, strict=True):
            hidden[number] = run(hidden[number], call)

    for layer in range(len(replay.blocks)):
        loaded = experts.load(layer, models)
        for model, weights in loaded.items():
            own = [n for n, job in enumerate(jobs) if job.model == model]
            calls = [recordings[n].calls[layer] for n in own]
            block = replay.pick_block(weights, layer)
            replay.with_block(layer, block, partial(advance, own, calls))
        progress(len(jobs), f"experts, layer {layer + 1}/{len(replay.blocks)}")
    return [
        states[
            job.batch.target_rows.to(replay.device),
            job.batch.target_positions.to(replay.device),
        ].cpu()
        for job, states in zip(jobs, hidden, strict=True)
    ]
