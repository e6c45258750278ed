"""Probes through the layers, every variant at once -> log-probabilities of the targets.

One pass over the layers measures what removing or adding any single layer's delta does.
At layer l the streams of the base B, of the single model S = M_m and of the merge G
branch: S without l, G without l, B plus l of S, B plus l of G; every stream that
branched at an earlier layer is carried on. Invariant: one layer's weights are in memory
at a time, and every stream is exactly what a full forward of its model would hold.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from mergekit_himerging.analysis.jobs import Job, Measured, Variants, WeightSource
from mergekit_himerging.analysis.replay import Recording, Replay, RunBlock, Weights
from mergekit_himerging.analysis.selfcheck import SelfCheck

LOGITS_BYTES = 128 * 2**20
"""Bound for the logits of one call of the head; more streams are read in turns."""


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
        source: the weights; read once per pass, outside the blocks at most twice.
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
                f"analysis_memory must be at least {needed / 2**20:.0f} MiB for "
                f"{rows} x {tokens} tokens of '{job.model}' through "
                f"{len(replay.blocks)} layers, got {memory / 2**20:.0f} MiB"
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

    Attributes:
        job: whose they are.
        calls: recordings under the outer weights of F, M_m and G.
        base, single, merged: the fronts B, S and G.
        removed_single, removed_merged: S and G without layer k, by k.
        added_single, added_merged: B plus layer k of S and of G, by k.
    """

    job: Job
    calls: dict[str, Recording]
    base: torch.Tensor | None
    single: torch.Tensor | None
    merged: torch.Tensor
    removed_single: list[torch.Tensor] = field(default_factory=list)
    added_single: list[torch.Tensor] = field(default_factory=list)
    removed_merged: list[torch.Tensor] = field(default_factory=list)
    added_merged: list[torch.Tensor] = field(default_factory=list)

    def advance(self, layer: int, replay: Replay, weights: Variants) -> None:
        """Take every stream through one layer and branch the new ones off."""
        front = {
            name: (stream, self.calls[name].calls[layer])
            for name, stream in (
                ("base", self.base),
                ("single", self.single),
                ("merged", self.merged),
            )
            if stream is not None
        }
        layered = self.job.depth == "layers"

        def carry(run: RunBlock, streams: list[torch.Tensor], name: str) -> None:
            call = self.calls[name].calls[layer]
            for index, stream in enumerate(streams):
                streams[index] = run(stream, call)

        def under_base(run: RunBlock) -> None:
            self.base = run(*front["base"])
            if layered:
                carry(run, self.added_single, "base")
                carry(run, self.added_merged, "base")
                new_single.append(run(*front["single"]))
                new_merged.append(run(*front["merged"]))

        def under_single(run: RunBlock) -> None:
            self.single = run(*front["single"])
            if layered:
                carry(run, self.removed_single, "single")
                self.added_single.append(run(*front["base"]))

        def under_merged(run: RunBlock) -> None:
            self.merged = run(*front["merged"])
            if layered:
                carry(run, self.removed_merged, "merged")
                self.added_merged.append(run(*front["base"]))

        new_single: list[torch.Tensor] = []
        new_merged: list[torch.Tensor] = []
        if self.job.depth != "merged":
            base = replay.pick_block(weights.base, layer)
            replay.with_block(layer, base, under_base)
            single = replay.pick_block(weights.singles[self.job.model], layer)
            replay.with_block(layer, single, under_single)
        merged = replay.pick_block(weights.merged, layer)
        replay.with_block(layer, merged, under_merged)
        self.removed_single += new_single
        self.removed_merged += new_merged

    def read_out(self, replay: Replay, outer: Variants) -> Measured:
        """Read the log-probabilities of the targets and let go of the streams."""

        def read(streams: list[torch.Tensor], weights: Weights) -> torch.Tensor:
            return _read_targets(streams, replay, weights, self.job)

        n_layers = len(replay.blocks)
        merged = read([self.merged, *self.removed_merged], outer.merged)
        if self.job.depth == "merged":
            return Measured(merged=merged[0])
        single = read([_given(self.single), *self.removed_single], self._single(outer))
        base = read(
            [_given(self.base), *self.added_single, *self.added_merged], outer.base
        )
        if self.job.depth == "fronts":
            return Measured(merged=merged[0], base=base[0], single=single[0])
        return Measured(
            merged=merged[0],
            base=base[0],
            single=single[0],
            removed_single=single[1:],
            added_single=base[1 : 1 + n_layers],
            removed_merged=merged[1:],
            added_merged=base[1 + n_layers :],
        )

    def _single(self, outer: Variants) -> Weights:
        return outer.singles[self.job.model]


def _run_pass(
    jobs: Sequence[Job],
    source: WeightSource,
    replay: Replay,
    memory: int,
    progress: Progress,
    check: SelfCheck | None,
) -> list[Measured]:
    """Take some jobs through all layers, reading every weight once."""
    outer = source.load(None)
    streams = [_start(job, replay, outer) for job in jobs]
    if check is not None:
        check.start(outer)
    keeps_outer = outer.n_bytes <= memory // 4
    if not keeps_outer:
        del outer
    for layer in range(len(replay.blocks)):
        weights = source.load(layer)
        for stream in streams:
            stream.advance(layer, replay, weights)
            label = f"layer {layer + 1}/{len(replay.blocks)}, '{stream.job.model}'"
            progress(stream.job.n_block_calls(layer), label)
        if check is not None:
            check.feed(layer, weights)
    if not keeps_outer:
        outer = source.load(None)
    measured = []
    while streams:
        measured.append(streams.pop(0).read_out(replay, outer))
    if check is not None:
        check.compare(measured[0])
    return measured


def _start(job: Job, replay: Replay, outer: Variants) -> _Streams:
    """Record a job's batch under every outer weights that it needs."""
    batch = job.batch
    ids = batch.input_ids.to(replay.device)
    mask = batch.attention_mask.to(replay.device)
    sides = {"merged": outer.merged}
    if job.depth != "merged":
        sides |= {"base": outer.base, "single": outer.singles[job.model]}
    calls = {
        name: replay.record(replay.pick_outer(weights), ids, mask)
        for name, weights in sides.items()
    }
    hidden = {name: recording.hidden for name, recording in calls.items()}
    return _Streams(
        job, calls, hidden.get("base"), hidden.get("single"), hidden["merged"]
    )


def _read_targets(
    streams: Sequence[torch.Tensor], replay: Replay, weights: Weights, job: Job
) -> torch.Tensor:
    """Read log-probabilities, ``[streams, targets]``, float64 on the CPU."""
    batch = job.batch
    rows = batch.target_rows.to(replay.device)
    positions = batch.target_positions.to(replay.device)
    ids = batch.target_ids.to(replay.device)
    outer = replay.pick_outer(weights)
    per_stream = max(1, len(ids) * replay.vocabulary * 4)
    at_once = max(1, LOGITS_BYTES // per_stream)
    read = []
    for start in range(0, len(streams), at_once):
        some = streams[start : start + at_once]
        hidden = torch.stack(
            [s[rows, positions] for s in some]
        )  # [some, targets, width]
        # One position a row: learned positions and masks are made for few tokens.
        flat = hidden.reshape(-1, 1, hidden.shape[-1])  # [some * targets, 1, width]
        logits = replay.read_out(outer, flat).reshape(*hidden.shape[:2], -1).float()
        chosen = logits.gather(-1, ids.expand(len(some), -1)[..., None])[..., 0]
        read.append((chosen - logits.logsumexp(-1)).double().cpu())
    return torch.cat(read)


def _given(stream: torch.Tensor | None) -> torch.Tensor:
    if stream is None:
        raise ValueError("a job that measures the merge alone has no other front")
    return stream
