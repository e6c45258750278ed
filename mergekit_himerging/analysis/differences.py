"""The slopes of every (layer, model) factor by exact differences instead of gradients.

At layer l the stream of the merge branches: for each model two streams run layer l with
the model's factor a step up and a step down, and the merge's own weights after it.
Invariant: a layer's tensors are loaded once a turn, one layer is in memory at a time,
and every stream is what a full forward of its merge would hold.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import numpy as np
import torch

from mergekit_himerging.analysis.data import TaskData
from mergekit_himerging.analysis.graph import Cuts, Inputs, load_inputs, merge_inputs
from mergekit_himerging.analysis.jobs import Job, Measured
from mergekit_himerging.analysis.probe_scores import score_probes, score_smoothly
from mergekit_himerging.analysis.replay import Recording, Replay, RunBlock, Weights
from mergekit_himerging.analysis.slopes import Slopes
from mergekit_himerging.analysis.streams import Progress, read_targets
from mergekit_himerging.tasks import PlannedTensor

STEP = 0.25
"""Change of a factor, up and down: as far as a step up the slopes goes, and far enough
that a change of weights is not lost where they are rounded to a short dtype."""

SIGNS = (1, -1)


def count_forwards(n_layers: int, n_models: int) -> int:
    """Count the forward passes of one measurement: block forwards over layers.

    One of the merge, and of each model two streams from every layer to the last.
    """
    return 1 + n_models * (n_layers + 1)


def plan_turns(
    stream_bytes: int, memory: int, *, n_layers: int, n_models: int
) -> list[range]:
    """Split the layers into turns whose streams fit.

    Args:
        stream_bytes: of the hidden states of all samples under one merge.
        memory: bytes that all hidden states may take.
        n_layers, n_models: of the merge.

    Returns:
        The layers that branch in each turn, in order.

    Raises:
        ValueError: the streams of one layer need more than ``memory``.
    """
    per_layer = len(SIGNS) * n_models
    needed = (1 + per_layer) * stream_bytes
    if needed > memory:
        raise ValueError(
            f"analysis_memory must be at least {-(-needed // 2**20)}MiB to measure "
            f"one layer's factors on all samples, got {memory / 2**20:.3g}MiB; raise "
            "it, or use fewer samples"
        )
    at_once = (memory // stream_bytes - 1) // per_layer
    starts = range(0, n_layers, at_once)
    return [range(start, min(start + at_once, n_layers)) for start in starts]


@dataclass(frozen=True, slots=True)
class _Layers:
    """The weights of one layer at a time, at the present factors and off them."""

    by_layer: Mapping[int | None, Sequence[PlannedTensor]]
    plain: Mapping[str, PlannedTensor]
    device: torch.device
    cuts: Cuts

    def load(self, layer: int | None) -> list[tuple[PlannedTensor, Inputs]]:
        return list(load_inputs(self.by_layer.get(layer, []), self.device))

    def merge(
        self,
        loaded: Sequence[tuple[PlannedTensor, Inputs]],
        model: str = "",
        by: float = 0.0,
    ) -> Weights:
        """Merge a layer, with one model's factor changed."""
        return {
            tensor.weight.name: merge_inputs(
                self._vary(tensor, model, by), inputs, self.cuts
            )
            for tensor, inputs in loaded
        }

    def _vary(self, tensor: PlannedTensor, model: str, by: float) -> PlannedTensor:
        plain = self.plain[tensor.weight.name]
        changes = {
            expert: {
                "weight": tensor.value(expert, "weight")
                + by * plain.value(expert, "weight")
            }
            for expert in tensor.experts
            if str(expert) == model
        }
        return tensor.with_values(changes) if changes else tensor


@dataclass(slots=True)
class _Stream:
    """One batch: the merge's stream, and those that branched off in this turn.

    Attributes:
        task: number of its task.
        job: whose it is.
        recording: of the merge's outer weights.
        front: of the merge, before the next layer to branch, ``[rows, tokens, width]``.
        varied: ``[streams, rows, tokens, width]``, by layer, model and sign.
    """

    task: int
    job: Job
    recording: Recording
    front: torch.Tensor
    varied: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.varied = self.front[None, :0]

    def make_room(self, n_streams: int) -> None:
        """Take the memory of a turn's streams, after that of the turn before is let go.

        One block: what comes and goes between weights would leave holes.
        """
        self.varied = self.front[None, :0]
        self.varied = self.front.new_empty((n_streams, *self.front.shape))

    def read(
        self, hidden: Iterable[torch.Tensor], replay: Replay, outer: Weights
    ) -> torch.Tensor:
        return read_targets(list(hidden), replay, outer, self.job.batch)


def measure_differences(
    plain: Sequence[PlannedTensor],
    merged: Sequence[PlannedTensor],
    tasks: Sequence[TaskData],
    replay: Replay,
    *,
    device: torch.device,
    memory: int,
    cuts: Cuts,
    progress: Progress = lambda calls, label: None,
    step: float = STEP,
) -> Slopes:
    """Measure slopes at a merge by central differences, on the choosing samples.

    ``(P(f + step) - P(f - step)) / (2 step)`` for each factor f alone, P the mean of
    ``score_smoothly``; where the score is no straight line, this is its mean slope
    between the two.

    Args:
        plain: planned tensors as the recipe weighs them; their deltas are varied.
        merged: the same with the factors at which slopes are taken.
        tasks: what is scored.
        replay: the model to run.
        device: where deltas are merged.
        memory: bytes that hidden states may take; layers that do not fit together are
            measured in turns.
        cuts: of earlier passes; extended.
        progress: told of block forwards done.
        step: change of a factor, above 0.

    Raises:
        ValueError: the hidden states of one layer's factors need more than ``memory``.
    """
    models = [task.settings.model for task in tasks]
    n_layers = len(replay.blocks)
    cells = sum(b.input_ids.numel() for task in tasks for b in task.choosing.batches)
    turns = plan_turns(
        cells * replay.width * replay.dtype.itemsize,
        memory,
        n_layers=n_layers,
        n_models=len(models),
    )
    by_layer: dict[int | None, list[PlannedTensor]] = {}
    for tensor in merged:
        by_layer.setdefault(tensor.layer, []).append(tensor)
    layers = _Layers(by_layer, {t.weight.name: t for t in plain}, device, cuts)
    slopes = np.zeros((len(tasks), n_layers, len(models)))
    with torch.no_grad():
        outer = replay.pick_outer(layers.merge(layers.load(None)))
        streams = [
            _start(number, Job(task.settings.model, batch, "merged"), replay, outer)
            for number, task in enumerate(tasks)
            for batch in task.choosing.batches
        ]
        for turn in turns:
            _run_turn(turn, streams, models, step, layers, replay, progress)
            for number, task in enumerate(tasks):
                own = [stream for stream in streams if stream.task == number]
                means = score_smoothly(
                    task.choosing.samples,
                    torch.cat([s.read(s.varied, replay, outer) for s in own], dim=1),
                    torch.cat([s.job.batch.target_sequence for s in own]),
                ).mean(dim=1)
                up, down = means.reshape(len(turn), len(models), 2).unbind(-1)
                slopes[number, turn.start : turn.stop] = (up - down) / (2 * step)
        scores = []
        for number, task in enumerate(tasks):
            found = [
                Measured(merged=stream.read([stream.front], replay, outer)[0])
                for stream in streams
                if stream.task == number
            ]
            scores.append(score_probes(task, task.choosing, found, "merged"))
    return Slopes(scores, slopes)


def _start(task: int, job: Job, replay: Replay, outer: Weights) -> _Stream:
    ids = job.batch.input_ids.to(replay.device)
    mask = job.batch.attention_mask.to(replay.device)
    recording = replay.record(outer, ids, mask)
    return _Stream(task, job, recording, recording.hidden)


def _run_turn(
    turn: range,
    streams: Sequence[_Stream],
    models: Sequence[str],
    step: float,
    layers: _Layers,
    replay: Replay,
    progress: Progress,
) -> None:
    """Branch off at the layers of a turn, and take every branch to the last layer."""
    variants = list(product(models, SIGNS))
    n_layers = len(replay.blocks)
    for stream in streams:
        stream.make_room(len(turn) * len(variants))
    for layer in range(turn.start, n_layers):
        loaded = layers.load(layer)
        n_before = (min(layer, turn.stop) - turn.start) * len(variants)
        n_run = n_before
        if layer in turn:
            for slot, (model, sign) in enumerate(variants, n_before):
                weights = layers.merge(loaded, model, sign * step)
                block = replay.pick_block(weights, layer)
                replay.with_block(layer, block, partial(_branch, streams, layer, slot))
            n_run += len(variants) + 1
        block = replay.pick_block(layers.merge(loaded), layer)
        carry = partial(_carry, streams, layer, n_before, layer in turn)
        replay.with_block(layer, block, carry)
        label = f"exact slopes from layer {turn.start + 1}, layer {layer + 1}"
        progress(n_run * len(streams), f"{label}/{n_layers}")


def _branch(streams: Sequence[_Stream], layer: int, slot: int, run: RunBlock) -> None:
    for stream in streams:
        call = stream.recording.calls[layer]
        stream.varied[slot].copy_(run(stream.front, call))


def _carry(
    streams: Sequence[_Stream],
    layer: int,
    n_before: int,
    moves_front: bool,
    run: RunBlock,
) -> None:
    for stream in streams:
        call = stream.recording.calls[layer]
        for varied in stream.varied[:n_before]:
            varied.copy_(run(varied, call))
        if moves_front:
            stream.front = run(stream.front, call)
