"""How every task's score changes with every (layer, model) factor: one pass back.

The merge is linear in the factor f on one model's delta in one layer, W = F + sum_m f_m
w_m d_m, so the slope of a score is the inner product of its gradient by the layer's
weights with w_m d_m. Invariant: one layer's weights are in memory at a time; every
block runs again on the way back, from the hidden state that went into it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise

import numpy as np
import torch

from mergekit_himerging.analysis.agreement import agree, recall
from mergekit_himerging.analysis.calibration import Batch, Sample
from mergekit_himerging.analysis.contribution import FloatArray
from mergekit_himerging.analysis.data import TaskData
from mergekit_himerging.analysis.graph import (
    Cuts,
    load_inputs,
    make_parts,
    merge_inputs,
)
from mergekit_himerging.analysis.jobs import Job, Measured
from mergekit_himerging.analysis.probe_scores import score_probes
from mergekit_himerging.analysis.replay import Recording, Replay, RunBlock, Weights
from mergekit_himerging.analysis.streams import LOGITS_BYTES, Progress, read_targets
from mergekit_himerging.kernel import weigh_delta
from mergekit_himerging.tasks import PlannedTensor

FORWARDS = 4
"""Cost in forward passes: one there, one again on the way back, two for gradients; one
more where the batches go back in turns."""


@dataclass(frozen=True, slots=True, eq=False)
class Slopes:
    """A merge's scores and how they change.

    Attributes:
        scores: by task, ``[samples]``, in the task's metric.
        slopes: ``[tasks, layers, models]``, of each task's mean score by the factor, in
            nats per token; of accuracy, that of the log-probability of the right option
            among all.
    """

    scores: Sequence[FloatArray]
    slopes: FloatArray


def split_turns(
    batches: Sequence[Batch], *, n_layers: int, cell_bytes: int, memory: int
) -> list[range]:
    """Split batches into turns that go back one after the other.

    A batch in its turn holds what goes into every block; besides, every batch holds its
    embeddings, a gradient and what is between two blocks.

    Args:
        batches: in order.
        n_layers: of the model.
        cell_bytes: of one token's hidden state.
        memory: bytes that hidden states may take.

    Returns:
        Numbers of batches; a single turn wherever all fit.

    Raises:
        ValueError: the largest batch needs more than ``memory``.
    """
    cells = [batch.input_ids.numel() for batch in batches]
    if (n_layers + 2) * sum(cells) * cell_bytes <= memory:
        return [range(len(cells))]
    needed = (3 * sum(cells) + n_layers * max(cells)) * cell_bytes
    if needed > memory:
        raise ValueError(
            f"analysis_memory must be at least {-(-needed // 2**20)}MiB to measure "
            f"slopes on all samples, got {memory / 2**20:.3g}MiB; raise it, or use "
            "fewer samples"
        )
    room = memory // cell_bytes - 3 * sum(cells)
    starts, left = [0], room
    for number, n_cells in enumerate(cells):
        if n_layers * n_cells > left:
            starts.append(number)
            left = room
        left -= n_layers * n_cells
    return [range(*ends) for ends in pairwise([*starts, len(cells)])]


@dataclass(slots=True)
class _Stream:
    """One batch: what went into each block, and the gradient on its way back."""

    task: int
    job: Job
    recording: Recording
    hidden: list[torch.Tensor]
    gradient: torch.Tensor | None = None


def measure_slopes(
    plain: Sequence[PlannedTensor],
    merged: Sequence[PlannedTensor],
    tasks: Sequence[TaskData],
    replay: Replay,
    *,
    device: torch.device,
    memory: int,
    cuts: Cuts,
    progress: Progress = lambda calls, label: None,
) -> Slopes:
    """Measure slopes at a merge, on every task's choosing samples.

    Args:
        plain: planned tensors as the recipe weighs them; their deltas are varied.
        merged: the same with the factors at which slopes are taken.
        tasks: what is scored.
        replay: the model to run.
        device: where deltas are merged.
        memory: bytes that hidden states may take; batches that do not fit together go
            back in turns.
        cuts: of earlier passes; extended.
        progress: told of block forwards done.

    Raises:
        ValueError: the hidden states of a batch need more than ``memory``.
    """
    models = [task.settings.model for task in tasks]
    by_layer: dict[int | None, list[PlannedTensor]] = {}
    for tensor in merged:
        by_layer.setdefault(tensor.layer, []).append(tensor)
    deltas_of = {tensor.weight.name: tensor for tensor in plain}
    slopes = np.zeros((len(tasks), len(replay.blocks), len(models)))
    deltas: dict[str, dict[str, torch.Tensor]] = {}  # of the layer on the way back

    def load(layer: int | None) -> dict[str, torch.Tensor]:
        members = by_layer.get(layer, [])
        return {
            tensor.weight.name: merge_inputs(tensor, inputs, cuts)
            for tensor, inputs in load_inputs(members, device)
        }

    def open_block(layer: int) -> tuple[Weights, Weights]:
        leaves: dict[str, torch.Tensor] = {}
        deltas.clear()
        for tensor, inputs in load_inputs(by_layer.get(layer, []), device):
            name = tensor.weight.name
            leaves[name] = merge_inputs(tensor, inputs, cuts).to(replay.dtype)
            strength = tensor.task.parameters["lambda"]
            for part in make_parts(deltas_of[name], inputs, cuts):
                if part.counts:
                    delta = weigh_delta(part, inputs.base) * strength
                    deltas.setdefault(name, {})[part.name] = delta
        varied = {name: leaves[name].detach().clone() for name in deltas}
        for leaf in varied.values():
            leaf.requires_grad_()
        return replay.pick_block({**leaves, **varied}, layer), varied

    def add_up(layer: int, task: int, gradients: Weights) -> None:
        for name, gradient in gradients.items():
            for model, delta in deltas[name].items():
                product = torch.sum(gradient * delta.to(gradient))
                slopes[task, layer, models.index(model)] += float(product)

    scores = take_back(
        tasks,
        replay,
        load,
        open_block,
        add_up,
        turns=split_tasks(tasks, replay, memory),
        progress=progress,
    )
    return Slopes(scores, slopes)


def split_tasks(tasks: Sequence[TaskData], replay: Replay, memory: int) -> list[range]:
    """Split the choosing samples' batches into turns, see ``split_turns``."""
    return split_turns(
        [batch for task in tasks for batch in task.choosing.batches],
        n_layers=len(replay.blocks),
        cell_bytes=replay.width * replay.dtype.itemsize,
        memory=memory,
    )


def take_back(
    tasks: Sequence[TaskData],
    replay: Replay,
    load: Callable[[int | None], Weights],
    open_block: Callable[[int], tuple[Weights, Weights]],
    visit: Callable[[int, int, Weights], None],
    *,
    turns: Sequence[range],
    progress: Progress,
    label: str = "slopes",
) -> list[FloatArray]:
    """Score tasks, and take the gradients of their mean scores back layer by layer.

    The score of ``accuracy`` is, for the gradients, the log-probability of the right
    option among all.

    Args:
        tasks: what is scored, on their choosing samples.
        replay: the model to run.
        load: a block's number, or None for all outside -> weights by MergeKit's names.
        open_block: a block's number -> its weights by local name, and those of them
            to differentiate by, under names of the caller's.
        visit: told block, task (its place in ``tasks``) and the gradients under the
            same names, ``[*weight]``, summed over the samples of a turn; once for each
            pair and turn.
        turns: batches, over all tasks, that go back together.
        progress: told of block forwards done.
        label: what progress is told.

    Returns:
        Scores by task, ``[samples]``, in the task's metric.
    """
    jobs = [
        (number, Job(task.settings.model, batch, "merged"))
        for number, task in enumerate(tasks)
        for batch in task.choosing.batches
    ]
    n_layers = len(replay.blocks)
    in_turns = len(turns) > 1

    def forward(some: Sequence[_Stream], upto: int, *, keeps: bool, word: str) -> None:
        with torch.no_grad():
            for layer in range(upto):
                block = replay.pick_block(load(layer), layer)
                step = partial(_step_forward, some, layer, keeps)
                replay.with_block(layer, block, step)
                told = f"{label}, {word}, layer {layer + 1}/{n_layers}"
                progress(len(some), told)

    outer = replay.pick_outer(load(None))
    streams = []
    with torch.no_grad():
        for number, job in jobs:
            ids = job.batch.input_ids.to(replay.device)
            mask = job.batch.attention_mask.to(replay.device)
            recording = replay.record(outer, ids, mask)
            streams.append(_Stream(number, job, recording, [recording.hidden]))
        forward(streams, n_layers, keeps=not in_turns, word="forward")
        read = [
            read_targets([s.hidden[-1]], replay, outer, s.job.batch)[0] for s in streams
        ]
    scores, coefficients = _score(tasks, streams, read)
    for stream, coefficient in zip(streams, coefficients, strict=True):
        stream.gradient = _start_back(stream, coefficient, replay, outer)
    del outer
    for turn in turns:
        some = [streams[number] for number in turn]
        if in_turns:
            for stream in some:
                stream.hidden = [stream.recording.hidden]
            forward(some, n_layers - 1, keeps=True, word="forward again")
        for layer in reversed(range(n_layers)):
            with torch.enable_grad():
                block, varied = open_block(layer)
                step = partial(_step_back, some, layer, varied, visit)
                replay.with_block(layer, block, step)
            progress(3 * len(some), f"{label}, back, layer {layer + 1}/{n_layers}")
    return scores


def _step_forward(
    streams: Sequence[_Stream], layer: int, keeps: bool, run: RunBlock
) -> None:
    for stream in streams:
        output = run(stream.hidden[-1], stream.recording.calls[layer])
        if not keeps:
            stream.hidden.pop()
        stream.hidden.append(output)


def _score(
    tasks: Sequence[TaskData],
    streams: Sequence[_Stream],
    read: Sequence[torch.Tensor],
) -> tuple[list[FloatArray], list[torch.Tensor]]:
    """Score each task, and weigh each target's log-probability in its mean score."""
    scores, coefficients = [], []
    for number, task in enumerate(tasks):
        own = [i for i, stream in enumerate(streams) if stream.task == number]
        measured = [Measured(merged=read[i]) for i in own]
        scores.append(score_probes(task, task.choosing, measured, "merged"))
        weights = _weigh_options(
            task.choosing.samples,
            torch.cat([read[i] for i in own]),
            torch.cat([streams[i].job.batch.target_sequence for i in own]),
        )
        coefficients += [
            weights[streams[i].job.batch.target_sequence].to(torch.float32) for i in own
        ]
    return scores, coefficients


def _weigh_options(
    samples: Sequence[Sample], values: torch.Tensor, sequence: torch.Tensor
) -> torch.Tensor:
    """Return the derivative of the mean score by each target, by option, ``[options]``.

    The score of a sample with several options is the log-probability of the right one
    among them, each taken at its mean over tokens.
    """
    counts = torch.tensor([o.n_targets for s in samples for o in s.options])
    means = torch.zeros(len(counts), dtype=torch.float64)
    means.index_add_(0, sequence, values)
    means /= counts
    weights, start = [], 0
    for sample in samples:
        options = means[start : start + len(sample.options)]
        start += len(sample.options)
        right = torch.zeros(len(options), dtype=torch.float64)
        right[sample.answer] = 1
        weights.append(right - options.softmax(0) if len(options) > 1 else right)
    return torch.cat(weights) / counts / len(samples)


def _start_back(
    stream: _Stream, coefficients: torch.Tensor, replay: Replay, outer: Weights
) -> torch.Tensor:
    """Return the gradient by the last block's output, ``[rows, tokens, width]``."""
    batch = stream.job.batch
    rows = batch.target_rows.to(replay.device)
    positions = batch.target_positions.to(replay.device)
    ids = batch.target_ids.to(replay.device)
    coefficients = coefficients.to(replay.device)
    last = stream.hidden.pop()
    gradient = torch.zeros_like(last)
    at_once = max(1, LOGITS_BYTES // (replay.vocabulary * 4))
    for some, expected in _split_targets(batch, replay, at_once):
        states = last[rows[some], positions[some]].detach().requires_grad_()
        with torch.enable_grad():
            logits = replay.read_out(outer, states[:, None])[:, 0].float()
            if expected is None:
                chosen = logits.gather(-1, ids[some, None])[:, 0] - logits.logsumexp(-1)
            else:
                chosen = agree(logits, expected)
            score = (chosen * coefficients[some]).sum()
        (found,) = torch.autograd.grad(score, [states])
        gradient[rows[some], positions[some]] = found
    return gradient


def _split_targets(
    batch: Batch, replay: Replay, at_once: int
) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """Yield some targets at a time, with what the expert says there if it is asked."""
    if batch.teacher is not None:
        yield from recall(batch.teacher, replay)
        return
    for start in range(0, batch.n_targets, at_once):
        yield slice(start, start + at_once), None


def _step_back(
    streams: Sequence[_Stream],
    layer: int,
    varied: Weights,
    visit: Callable[[int, int, Weights], None],
    run: RunBlock,
) -> None:
    """Take every gradient back through one block, task by task, and hand it on."""
    for task, members in groupby(streams, key=lambda stream: stream.task):
        sums: dict[str, torch.Tensor] = {}
        for stream in members:
            hidden = stream.hidden.pop().detach().requires_grad_()
            with torch.enable_grad():
                output = run(hidden, stream.recording.calls[layer])
            found = torch.autograd.grad(
                output,
                [hidden, *varied.values()],
                grad_outputs=stream.gradient,
                materialize_grads=True,  # zeros by weights that nothing ran through
            )
            stream.gradient = found[0]
            for name, part in zip(varied, found[1:], strict=True):
                # Over many batches short dtypes would lose what is small.
                part = part.to(torch.promote_types(part.dtype, torch.float32))
                sums[name] = sums[name] + part if name in sums else part
        visit(layer, task, sums)
