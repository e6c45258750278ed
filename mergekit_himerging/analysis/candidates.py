"""Many merges of the same models scored in one pass over the layers.

Invariant: every tensor is read once for all merges, ranked once for all densities, and
merged by the kernel that will write it; no checkpoint is written. The scores are those
that full forwards of the merged models would give.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from mergekit_himerging.analysis.contribution import FloatArray
from mergekit_himerging.analysis.data import TaskData
from mergekit_himerging.analysis.graph import Cuts, Inputs, load_inputs, merge_inputs
from mergekit_himerging.analysis.jobs import Job, Measured
from mergekit_himerging.analysis.probe_scores import score_probes
from mergekit_himerging.analysis.replay import Recording, Replay, RunBlock, Weights
from mergekit_himerging.analysis.streams import Progress, read_targets
from mergekit_himerging.kernel import find_cuts_at
from mergekit_himerging.tasks import PlannedTensor

Merge = Sequence[PlannedTensor]
"""One merge: the planned tensors of a recipe, with the values that it is made with."""


@dataclass(slots=True)
class _Stream:
    """One batch under one merge."""

    job: Job
    recording: Recording
    hidden: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.hidden = self.recording.hidden


def score_merges(
    merges: Sequence[Merge],
    tasks: Sequence[TaskData],
    replay: Replay,
    *,
    device: torch.device,
    memory: int,
    cuts: Cuts | None = None,
    progress: Progress = lambda calls, label: None,
) -> list[list[FloatArray]]:
    """Score merges of the same models on every task's choosing samples.

    Args:
        merges: each with the same tensors in the same order.
        tasks: what to score on.
        replay: the model to run.
        device: where deltas are merged.
        memory: bytes that the hidden states of one pass may take; more merges than fit
            are read in turns.
        cuts: of earlier passes; extended.
        progress: told of block forwards done.

    Returns:
        Scores by merge, then task, each ``[samples]``, higher is better.

    Raises:
        ValueError: a tensor cannot be merged, or one merge needs more than ``memory``.
    """
    jobs = [
        Job(task.settings.model, batch, "merged")
        for task in tasks
        for batch in task.choosing.batches
    ]
    cells = sum(job.batch.input_ids.numel() for job in jobs)
    needed = cells * replay.width * replay.dtype.itemsize
    if needed > memory:
        raise ValueError(
            f"analysis_memory must be at least {-(-needed // 2**20)}MiB for one merge "
            f"on all samples, got {memory / 2**20:.3g}MiB; raise it, or use fewer"
        )
    known: Cuts = {} if cuts is None else cuts
    at_once = memory // needed
    scores = []
    with torch.no_grad():
        for start in range(0, len(merges), at_once):
            some = merges[start : start + at_once]
            for measured in _run_pass(some, jobs, replay, device, known, progress):
                left = iter(measured)
                scores.append(
                    [
                        score_probes(
                            task,
                            task.choosing,
                            [next(left) for _ in task.choosing.batches],
                            "merged",
                        )
                        for task in tasks
                    ]
                )
    return scores


def _run_pass(
    merges: Sequence[Merge],
    jobs: Sequence[Job],
    replay: Replay,
    device: torch.device,
    cuts: Cuts,
    progress: Progress,
) -> list[list[Measured]]:
    """Take every job under every merge through all layers."""
    by_layer = [_sort_by_layer(merge) for merge in merges]
    streams = []
    recordings: list[Recording] = []
    last: Weights | None = None
    for _, weights in _merge_layer(by_layer, None, device, cuts):
        outer = replay.pick_outer(weights)
        # Adapters leave these weights alone: one recording serves all merges then.
        if last is None or any(outer[n].data_ptr() != last[n].data_ptr() for n in last):
            recordings = [_record(replay, outer, job) for job in jobs]
            last = outer  # alive, so that its memory is nobody else's
        pairs = zip(jobs, recordings, strict=True)
        streams.append([_Stream(job, recording) for job, recording in pairs])
    last = None
    for layer in range(len(replay.blocks)):
        for number, weights in _merge_layer(by_layer, layer, device, cuts):
            block = replay.pick_block(weights, layer)

            replay.with_block(layer, block, partial(_advance, streams[number], layer))
            label = f"layer {layer + 1}/{len(replay.blocks)}, merge {number + 1}"
            progress(len(jobs), label)
    measured = []
    for number, weights in _merge_layer(by_layer, None, device, cuts):
        outer = replay.pick_outer(weights)
        measured.append(
            [
                Measured(merged=read_targets([s.hidden], replay, outer, s.job.batch)[0])
                for s in streams[number]
            ]
        )
    return measured


def _advance(streams: Sequence[_Stream], layer: int, run: RunBlock) -> None:
    for stream in streams:
        stream.hidden = run(stream.hidden, stream.recording.calls[layer])


def _record(replay: Replay, outer: Weights, job: Job) -> Recording:
    ids = job.batch.input_ids.to(replay.device)
    return replay.record(outer, ids, job.batch.attention_mask.to(replay.device))


def _sort_by_layer(merge: Merge) -> dict[int | None, list[PlannedTensor]]:
    found: dict[int | None, list[PlannedTensor]] = {}
    for tensor in merge:
        found.setdefault(tensor.layer, []).append(tensor)
    return found


def _merge_layer(
    merges: Sequence[dict[int | None, list[PlannedTensor]]],
    layer: int | None,
    device: torch.device,
    cuts: Cuts,
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Yield one layer's weights of each merge in turn; inputs are loaded once."""
    members = merges[0].get(layer, [])
    inputs = {t.weight.name: found for t, found in load_inputs(members, device)}
    tensors = [
        {tensor.weight.name: tensor for tensor in merge.get(layer, ())}
        for merge in merges
    ]
    for name, found in inputs.items():
        _rank([named[name] for named in tensors], found, cuts)
    for number, named in enumerate(tensors):
        weights = {
            name: merge_inputs(named[name], found, cuts)
            for name, found in inputs.items()
        }
        yield number, weights


def _rank(tensors: Sequence[PlannedTensor], inputs: Inputs, cuts: Cuts) -> None:
    """Find one tensor's cuts for the densities of all merges, in one selection."""
    name = tensors[0].weight.name
    for model in tensors[0].experts:
        tuned = inputs.tuned.get(str(model))
        wanted = sorted({tensor.value(model, "density") for tensor in tensors})
        missing = [d for d in wanted if (name, str(model), d) not in cuts]
        if tuned is None or not missing:
            continue
        found = find_cuts_at(str(model), tuned, inputs.base, missing)
        for density, cut in zip(missing, found, strict=True):
            cuts[name, str(model), density] = cut
