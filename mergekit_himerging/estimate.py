"""What an analysis and its merge will cost, from counting and one short measurement.

Invariant: forwards and bytes are counted by the code that makes them; only the seconds
are extrapolated, from one block, one head call and one layer on this machine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mergekit_himerging.analysis.data import TaskData
from mergekit_himerging.analysis.graph import PlannedWeights
from mergekit_himerging.analysis.jobs import Depth, Job
from mergekit_himerging.analysis.replay import Replay, RunBlock, Weights
from mergekit_himerging.analysis.session import make_replay, pick_device, read_data
from mergekit_himerging.analysis.streams import LOGITS_BYTES, read_targets, split_jobs
from mergekit_himerging.parameters import parse_bytes
from mergekit_himerging.planning import PlannedMerge


@dataclass(frozen=True, slots=True)
class Cost:
    """What one round of analysis and the merge take.

    Attributes:
        n_block_calls: forwards of one batch through one block.
        n_tokens: of all calibration samples.
        n_passes: how often every tensor is read, the merge included.
        bytes_read: by all passes.
        seconds: of the analysis on this machine.
        peak_bytes: of the analysis: hidden states, one layer of every variant, what
            lies outside the layers, and logits.
    """

    n_block_calls: int
    n_tokens: int
    n_passes: int
    bytes_read: int
    seconds: float
    peak_bytes: int

    def describe(self) -> str:
        """Return a table of two columns as lines of text."""
        minutes, seconds = divmod(round(self.seconds), 60)
        rows = [
            ("block forwards", f"{self.n_block_calls:,}"),
            ("calibration tokens", f"{self.n_tokens:,}"),
            (
                "reads of the models",
                f"{self.n_passes} ({_show_bytes(self.bytes_read)})",
            ),
            ("time of the analysis", f"about {minutes} min {seconds} s here"),
            ("peak memory", f"about {_show_bytes(self.peak_bytes)}"),
        ]
        return "\n".join(f"{name:22}{value}" for name, value in rows)


def estimate_cost(merge: PlannedMerge) -> Cost:
    """Count what a merge's analysis does, and time a sample of it.

    Args:
        merge: a planned `hi_merging` recipe with calibration data.

    Raises:
        ValueError: data or models cannot be used.
    """
    device = pick_device(merge.options)
    memory = parse_bytes(str(merge.settings["analysis_memory"]))
    tasks = read_data(merge, device, merge.settings["accept_share"])
    replay = make_replay(merge, device)
    plain = merge.resolve(None)
    weights = PlannedWeights(
        plain, plain, device=device, reference=merge.settings["reference"]
    )
    passes: list[list[list[Job]]] = [
        list(split_jobs(jobs, replay, memory)) for jobs in _list_passes(tasks)
    ]
    n_layers = len(replay.blocks)
    every_job = [job for chunks in passes for chunk in chunks for job in chunk]
    calls = sum(
        job.n_block_calls(layer) for job in every_job for layer in range(n_layers)
    )
    cells = sum(
        job.n_block_calls(layer) * job.batch.input_ids.numel()
        for job in every_job
        for layer in range(n_layers)
    )
    targets = sum(job.n_streams(n_layers) * job.batch.n_targets for job in every_job)
    n_passes = sum(len(chunks) for chunks in passes)

    start = time.perf_counter()
    variants = weights.load(0)
    per_layer = time.perf_counter() - start
    held = {
        id(tensor): tensor.numel() * tensor.element_size()
        for named in (variants.base, *variants.singles.values(), variants.merged)
        for tensor in named.values()
    }
    outer = replay.pick_outer(weights.load_outer("base", ""))
    outer_bytes = sum(t.numel() * t.element_size() for t in outer.values())
    per_cell, per_target = _time_calls(every_job[0], replay, variants.base, outer)
    hidden = max(
        sum(job.n_bytes(n_layers, replay.width, replay.dtype.itemsize) for job in chunk)
        for chunks in passes
        for chunk in chunks
    )
    block_bytes = sum(t.numel() * t.element_size() for t in variants.base.values())
    model_bytes = n_layers * block_bytes + outer_bytes
    return Cost(
        n_block_calls=calls,
        n_tokens=sum(task.tokenized.n_tokens for task in tasks),
        n_passes=n_passes + 1,
        bytes_read=model_bytes * (1 + len(merge.tasks)) * (n_passes + 1),
        seconds=cells * per_cell
        + targets * per_target
        + per_layer * n_layers * n_passes,
        peak_bytes=hidden + sum(held.values()) + 3 * outer_bytes + LOGITS_BYTES,
    )


def _list_passes(tasks: list[TaskData]) -> list[list[Job]]:
    """List the jobs of each pass of one round, as the analysis makes them."""

    def jobs(choosing: Depth, accepting: Depth | None) -> list[Job]:
        return [
            Job(task.settings.model, batch, depth)
            for task in tasks
            for part, depth in ((task.choosing, choosing), (task.accepting, accepting))
            if depth is not None
            for batch in part.batches
        ]

    return [jobs("fronts", "fronts"), jobs("layers", None), jobs("merged", "merged")]


def _time_calls(
    job: Job, replay: Replay, block: Weights, outer: Weights
) -> tuple[float, float]:
    """Time a block forward for each cell, and a head call for each target."""
    batch = job.batch
    with torch.no_grad():
        recording = replay.record(
            outer,
            batch.input_ids.to(replay.device),
            batch.attention_mask.to(replay.device),
        )
        picked = replay.pick_block(block, 0)

        def run_once(run: RunBlock) -> None:
            run(recording.hidden, recording.calls[0])

        def forward() -> None:
            replay.with_block(0, picked, run_once)

        def head() -> None:
            read_targets([recording.hidden], replay, outer, batch)

        return (
            _time(forward) / batch.input_ids.numel(),
            _time(head) / batch.n_targets,
        )


def _time(call: Callable[[], None], least: float = 0.3) -> float:
    """Return the mean seconds of a call, over a short while, after one to warm up."""
    call()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < least or count < 3:
        call()
        count += 1
    return (time.perf_counter() - start) / count


def _show_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} TiB"
