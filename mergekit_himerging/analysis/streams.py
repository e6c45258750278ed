"""Probes through the layers, every variant at once -> log-probabilities of the targets.

One pass over the layers measures what removing or adding any single layer's delta does.
At layer l the streams of the base B, of the single model S = M_m and of the merge G
branch: S without l, G without l, B plus l of S, B plus l of G; every stream that
branched at an earlier layer is carried on. Invariant: one layer's weights are in memory
at a time, and every stream is exactly what a full forward of its model would hold.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from mergekit_himerging.analysis.agreement import read_agreement
from mergekit_himerging.analysis.calibration import Batch
from mergekit_himerging.analysis.jobs import (
    Front,
    Job,
    Measured,
    Variants,
    WeightSource,
)
from mergekit_himerging.analysis.replay import Recording, Replay, RunBlock, Weights
from mergekit_himerging.analysis.selfcheck import SelfCheck

LOGITS_BYTES = 128 * 2**20
"""Bound for the logits of one call of the head; more positions are read in turns."""


Progress = Callable[[int, str], None]
"""Called with block forwards done and a label of where the pass is."""


def run_jobs(
    jobs: Sequence[Job],
    source: WeightSource,
    replay: Replay,
    *,
    memory: int,
    progress: Progress = lambda calls, label: None,
    check: SelfCheck | None = None,
) -> list[Measured]:
    """Measure all jobs in as few passes over the layers as memory allows.

    Args:
        jobs: what to measure; the result of each depends on its own batch alone.
        source: the weights; read once per pass, outside the blocks at most twice for
            each front.
        replay: the model to run.
        memory: bytes that the hidden states of one pass may take.
        progress: told after every layer of every job.
        check: of the first job; runs beside the first pass.

    Returns:
        One record per job, in their order.

    Raises:
        UnsupportedModelError: the check failed, or weights are missing.
        ValueError: a single job needs more than ``memory``.
    """
    measured: list[Measured] = []
    with torch.no_grad():
        for chunk in split_jobs(jobs, replay, memory):
            measured += _run_pass(chunk, source, replay, memory, progress, check)
            check = None
    return measured


def split_jobs(jobs: Sequence[Job], replay: Replay, memory: int) -> Iterator[list[Job]]:
    """Split jobs into chunks whose hidden states fit, keeping their order."""
    width = replay.width
    chunk: list[Job] = []
    held = 0
    for job in jobs:
        needed = job.n_bytes(len(replay.blocks), width, replay.dtype.itemsize)
        if needed > memory:
            rows, tokens = job.batch.input_ids.shape
            raise ValueError(
                f"analysis_memory must be at least {math.ceil(needed / 2**20)}MiB for "
                f"{rows} x {tokens} tokens of '{job.model}' through "
                f"{len(replay.blocks)} layers, got {memory / 2**20:.3g}MiB; raise it, "
                "or shorten the longest rows of the calibration data"
            )
        if chunk and held + needed > memory:
            yield chunk
            chunk, held = [], 0
        chunk.append(job)
        held += needed
    if chunk:
        yield chunk


@dataclass(slots=True)
class _Streams:
    """The hidden states of one job, each ``[rows, tokens, width]``.

    They lie in one block of memory that is taken at the start: hundreds of tensors that
    come and go between weights would leave holes several times their size.

    Attributes:
        job: whose they are.
        n_layers: of the model.
        calls: recordings under the outer weights of F, M_m and G.
        base, single, merged: the fronts B, S and G; None where the job has none.
        removed_single, removed_merged: S and G without layer k, by k.
        added_single, added_merged: B plus layer k of S and of G, by k.
    """

    job: Job
    n_layers: int
    calls: dict[Front, Recording] = field(default_factory=dict)
    base: torch.Tensor | None = None
    single: torch.Tensor | None = None
    merged: torch.Tensor | None = None
    removed_single: list[torch.Tensor] = field(default_factory=list)
    added_single: list[torch.Tensor] = field(default_factory=list)
    removed_merged: list[torch.Tensor] = field(default_factory=list)
    added_merged: list[torch.Tensor] = field(default_factory=list)
    read: dict[Front, torch.Tensor] = field(default_factory=dict)
    _store: torch.Tensor | None = None
    _n_stored: int = 0

    def start(self, front: Front, replay: Replay, weights: Weights) -> None:
        """Record the batch under the outer weights of one front."""
        batch = self.job.batch
        ids = batch.input_ids.to(replay.device)
        mask = batch.attention_mask.to(replay.device)
        recording = replay.record(weights, ids, mask)
        self.calls[front] = replace(recording, hidden=self._keep(recording.hidden))
        setattr(self, front, self.calls[front].hidden)

    def _keep(self, hidden: torch.Tensor) -> torch.Tensor:
        """Copy a new stream into the store."""
        if self._store is None:
            n_streams = self.job.n_streams(self.n_layers)
            self._store = hidden.new_empty((n_streams, *hidden.shape))
        slot = self._store[self._n_stored].copy_(hidden)
        self._n_stored += 1
        return slot

    def advance(self, layer: int, replay: Replay, weights: Variants) -> None:
        """Take every stream through one layer and branch the new ones off."""
        front = {
            name: (_given(getattr(self, name)), recording.calls[layer])
            for name, recording in self.calls.items()
        }
        layered = self.job.depth == "layers"

        def carry(run: RunBlock, streams: list[torch.Tensor], name: Front) -> None:
            call = self.calls[name].calls[layer]
            for stream in streams:
                stream.copy_(run(stream, call))

        def branch(run: RunBlock, name: Front, into: list[torch.Tensor]) -> None:
            into.append(self._keep(run(*front[name])))

        def under_base(run: RunBlock) -> None:
            moved["base"] = run(*front["base"])
            if layered:
                carry(run, self.added_single, "base")
                carry(run, self.added_merged, "base")
                branch(run, "single", new_single)
                branch(run, "merged", new_merged)

        def under_single(run: RunBlock) -> None:
            moved["single"] = run(*front["single"])
            if layered:
                carry(run, self.removed_single, "single")
                branch(run, "base", self.added_single)

        def under_merged(run: RunBlock) -> None:
            moved["merged"] = run(*front["merged"])
            if layered:
                carry(run, self.removed_merged, "merged")
                branch(run, "base", self.added_merged)

        moved: dict[Front, torch.Tensor] = {}
        new_single: list[torch.Tensor] = []
        new_merged: list[torch.Tensor] = []
        if self.job.depth != "merged":
            base = replay.pick_block(weights.base, layer)
            replay.with_block(layer, base, under_base)
            single = replay.pick_block(weights.singles[self.job.model], layer)
            replay.with_block(layer, single, under_single)
        merged = replay.pick_block(weights.merged, layer)
        replay.with_block(layer, merged, under_merged)
        # The fronts last: every branch starts from where they stood.
        for name, output in moved.items():
            _given(getattr(self, name)).copy_(output)
        self.removed_single += new_single
        self.removed_merged += new_merged

    def read_out(self, front: Front, replay: Replay, weights: Weights) -> None:
        """Read the log-probabilities of one front's streams and let go of them."""
        streams = [_given(getattr(self, front))]
        if front == "base":
            streams += [*self.added_single, *self.added_merged]
            self.added_single, self.added_merged = [], []
        elif front == "single":
            streams += self.removed_single
            self.removed_single = []
        else:
            streams += self.removed_merged
            self.removed_merged = []
        setattr(self, front, None)
        self.read[front] = read_targets(streams, replay, weights, self.job.batch)

    def measured(self) -> Measured:
        """Return what was read, once all fronts are."""
        merged = self.read["merged"]
        if self.job.depth == "merged":
            return Measured(merged=merged[0])
        base, single = self.read["base"], self.read["single"]
        if self.job.depth == "fronts":
            return Measured(merged=merged[0], base=base[0], single=single[0])
        return Measured(
            merged=merged[0],
            base=base[0],
            single=single[0],
            removed_single=single[1:],
            added_single=base[1 : 1 + self.n_layers],
            removed_merged=merged[1:],
            added_merged=base[1 + self.n_layers :],
        )


class _OuterWeights:
    """What lies outside the blocks, one front at a time; kept where that is cheap."""

    def __init__(self, source: WeightSource, replay: Replay, limit: int) -> None:
        self._source = source
        self._replay = replay
        self._limit = limit
        self._kept: dict[tuple[Front, str], Weights] = {}

    def get(self, front: Front, model: str) -> Weights:
        key = (front, model)
        if key in self._kept:
            return self._kept[key]
        weights = self._replay.pick_outer(self._source.load_outer(front, model))
        n_bytes = sum(t.numel() * t.element_size() for t in weights.values())
        if n_bytes * (len(self._kept) + 1) <= self._limit:
            self._kept[key] = weights
        return weights


def _run_pass(
    jobs: Sequence[Job],
    source: WeightSource,
    replay: Replay,
    memory: int,
    progress: Progress,
    check: SelfCheck | None,
) -> list[Measured]:
    """Take some jobs through all layers, reading every block's weights once."""
    outer = _OuterWeights(source, replay, memory // 4)
    streams = [_Streams(job, len(replay.blocks)) for job in jobs]
    fronts = list(dict.fromkeys(front for job in jobs for front in job.fronts))
    try:
        for name, model in fronts:
            weights = outer.get(name, model)
            for stream in streams:
                if (name, model) in stream.job.fronts:
                    stream.start(name, replay, weights)
            if check is not None:
                check.start(name, weights)
        for layer in range(len(replay.blocks)):
            variants = source.load(layer)
            for stream in streams:
                stream.advance(layer, replay, variants)
                label = f"layer {layer + 1}/{len(replay.blocks)}, '{stream.job.model}'"
                progress(stream.job.n_block_calls(layer), label)
            if check is not None:
                check.feed(layer, variants)
        for name, model in fronts:
            weights = outer.get(name, model)
            for stream in streams:
                if (name, model) in stream.job.fronts:
                    stream.read_out(name, replay, weights)
        measured = [stream.measured() for stream in streams]
        if check is not None:
            check.compare(measured[0])
    finally:
        if check is not None:
            check.stop()
    return measured


def read_targets(
    streams: Sequence[torch.Tensor], replay: Replay, weights: Weights, batch: Batch
) -> torch.Tensor:
    """Read the log-probabilities of a batch's targets after the last block.

    Of a batch with a teacher, read minus the divergence from it there.

    Args:
        streams: hidden states of the batch, each ``[rows, tokens, width]``.
        replay: the model.
        weights: those outside the blocks.
        batch: where its targets are.

    Returns:
        ``[streams, targets]``, float64 on the CPU, in nats.
    """
    if batch.teacher is not None:
        return read_agreement(streams, replay, weights, batch, batch.teacher)
    rows = batch.target_rows.to(replay.device)
    positions = batch.target_positions.to(replay.device)
    ids = batch.target_ids.to(replay.device)
    at_once = max(1, LOGITS_BYTES // (replay.vocabulary * 4))
    # Of long texts even the targets of a few streams are many.
    n_streams = max(1, at_once // max(1, len(ids)))
    read = []
    for start in range(0, len(streams), n_streams):
        some = streams[start : start + n_streams]
        hidden = torch.stack([stream[rows, positions] for stream in some])
        # One position a row: learned positions and masks are made for few tokens.
        flat = hidden.reshape(-1, 1, hidden.shape[-1])  # [some * targets, 1, width]
        parts = (torch.split(t, at_once) for t in (flat, ids.repeat(len(some))))
        for states, targets in zip(*parts, strict=True):
            logits = replay.read_out(weights, states)[:, 0].float()
            chosen = logits.gather(-1, targets[:, None])[:, 0]
            read.append((chosen - logits.logsumexp(-1)).double().cpu())
    return torch.cat(read).reshape(len(streams), -1)


def _given(stream: torch.Tensor | None) -> torch.Tensor:
    if stream is None:
        raise ValueError("a stream must have been started")
    return stream
