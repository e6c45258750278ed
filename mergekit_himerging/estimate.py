"""What an analysis and its merge will cost, from counting and one short measurement.

Invariant: forwards and bytes are counted by the code that makes them; only the seconds
are extrapolated, from one block, one head call and one layer on this machine.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.io.tasks import LoaderCache
from safetensors import SafetensorError

from mergekit_himerging.analysis.agreement import PAIR_BYTES
from mergekit_himerging.analysis.data import TaskData
from mergekit_himerging.analysis.differences import SIGNS, count_forwards, plan_turns
from mergekit_himerging.analysis.gradients import take_norms
from mergekit_himerging.analysis.graph import PlannedWeights
from mergekit_himerging.analysis.jobs import Depth, Job
from mergekit_himerging.analysis.measured import pick_way
from mergekit_himerging.analysis.replay import Replay, RunBlock, Weights
from mergekit_himerging.analysis.selfcheck import pick_rows
from mergekit_himerging.analysis.session import make_replay, pick_device, read_data
from mergekit_himerging.analysis.slopes import FORWARDS, split_tasks
from mergekit_himerging.analysis.streams import LOGITS_BYTES, read_targets, split_jobs
from mergekit_himerging.analysis.teachers import needs_teacher
from mergekit_himerging.parameters import RecipeError, parse_bytes
from mergekit_himerging.planning import PlannedMerge
from mergekit_himerging.tasks import PlannedTensor, apply_plan, stored_itemsize

TIMED_SECONDS = 0.3
"""How long a call is repeated to be timed."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one round of analysis and the merge take, at most.

    Attributes:
        n_block_calls: forwards of one batch through one block.
        n_tokens: of all calibration samples.
        n_passes: how often every layer is read, the merge included.
        bytes_read: by all passes, from the files; what lies outside the layers is read
            several times in a pass.
        seconds: of the analysis on this machine.
        n_to_draw: rows that experts draw from themselves before.
        peak_bytes: of the analysis: hidden states, one layer of every variant, what
            lies outside the layers, and logits; not the libraries, nor pages of mapped
            files, which the system takes back.
    """

    n_block_calls: int
    n_tokens: int
    n_passes: int
    bytes_read: int
    seconds: float
    peak_bytes: int
    n_to_draw: int = 0

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
        if self.n_to_draw:
            text = f"{self.n_to_draw:,}, by experts that are loaded whole"
            rows.insert(0, ("rows to be drawn", text))
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
    share = merge.settings["accept_share"]
    tasks = read_data(merge, device, share, may_draw=False)
    replay = make_replay(merge, device)
    # A wider scope would read every tensor to find its cuts.
    plain = apply_plan(merge.tensors, None)
    weights = PlannedWeights(
        plain, plain, device=device, reference=merge.settings["reference"]
    )
    way = merge.settings["resolve"]
    if way == "measured":
        way = merge.settings["measure"]
    turns = split_tasks(tasks, replay, memory) if way == "first_order" else ()
    n_measurements, n_steps = 0, 0
    if way != "rules":
        n_measurements, n_steps = pick_way(way, tasks, replay, memory).count_most(
            sum(len(task.choosing.batches) for task in tasks),
            sum(len(task.accepting.batches) for task in tasks),
        )
    passes = [
        chunk
        for jobs in [
            *_list_passes(
                tasks,
                way,
                turns=turns,
                n_measurements=n_measurements,
                n_steps=n_steps,
            ),
            *(_list_gradient_passes(tasks) if merge.settings["gradients"] else ()),
        ]
        for chunk in split_jobs(jobs, replay, memory)
    ]
    n_layers = len(replay.blocks)
    taught = {
        batch
        for task in tasks
        if needs_teacher(task)
        for part in (task.choosing, task.accepting)
        for batch in part.batches
    }
    every_job = [job for chunk in passes for job in chunk]
    calls = [sum(map(job.n_block_calls, range(n_layers))) for job in every_job]

    start = time.perf_counter()
    variants = weights.load(0)
    per_layer = time.perf_counter() - start
    outer = replay.pick_outer(weights.load_outer("base", ""))
    outer_bytes = _count_bytes(outer)
    per_cell, per_target = _time_calls(every_job[0], replay, variants.base, outer)
    exact = _Exact()
    if way == "exact":
        exact = _count_exact(tasks, replay, memory, n_measurements)
    seconds = per_layer * n_layers * (len(passes) + exact.n_reads)
    seconds += exact.n_block_cells * per_cell + exact.n_targets * per_target
    for job, n_calls in zip(every_job, calls, strict=True):
        seconds += n_calls * job.batch.input_ids.numel() * per_cell
        n_heads = job.n_streams(n_layers)
        n_heads += len(job.fronts) if job.batch in taught else 0  # the expert's
        seconds += n_heads * job.batch.n_targets * per_target
    # Each layer's, at the base and at every task's model.
    if merge.settings["gradients"]:
        seconds += 2 * len(tasks) * n_layers * _time_norms(variants.base)

    # What lies outside the blocks is read twice for a front, or once and kept.
    n_fronts = [
        len(
            {front for job in chunk for front in job.fronts}
            | {("expert", job.model) for job in chunk if job.batch in taught}
        )
        for chunk in passes
    ]
    n_kept = [min(n, memory // 4 // outer_bytes) for n in n_fronts]
    outer_reads = 2 * sum(n_fronts) - sum(n_kept) + exact.n_outer_reads
    # A wider scope: twice for the plain merge, and twice where the rules treat one to
    # other densities.
    n_ranked = 4 if way == "rules" else 2
    n_scope, n_outside = {
        "tensor": (0, 0),
        "layer": (n_ranked, 0),
        "model": (n_ranked, n_ranked),
    }[merge.settings["scope"]]
    in_layers, outside = _count_stored(plain)
    n_reads = len(passes) + math.ceil(exact.n_reads) + n_scope + 1

    width, item_size = replay.width, replay.dtype.itemsize
    hidden = [sum(j.n_bytes(n_layers, width, item_size) for j in c) for c in passes]
    hidden.append(exact.hidden_bytes)
    if way == "first_order":  # the way back needs every block's input
        choosing = [b for task in tasks for b in task.choosing.batches]
        cells = sum(batch.input_ids.numel() for batch in choosing)
        hidden.append(min(memory, (n_layers + 2) * cells * width * item_size))
    # Half of the streams are read at once at most: those under the base.
    positions = max(
        max(1, job.n_streams(n_layers) // 2) * job.batch.n_targets for job in every_job
    )
    positions = max(positions, exact.n_positions)
    logits = min(LOGITS_BYTES, positions * replay.vocabulary * 4)
    checked = pick_rows(every_job[0].batch, replay.vocabulary, LOGITS_BYTES)
    logits = max(logits, checked.input_ids.numel() * replay.vocabulary * 4)
    drawn = [task for task in tasks if task.n_to_draw]
    for task in drawn:
        # A prompt is drawn, then read again with its answer, in small steps.
        n_tokens = task.tokenized.n_tokens
        seconds += n_tokens * (2 * n_layers * per_cell + per_target)
    n_taught = sum(batch.n_targets for batch in taught)
    expected = min(PAIR_BYTES, n_taught * replay.vocabulary * 4)
    peak = (
        max(hidden)
        + _count_bytes(variants.base, *variants.singles.values(), variants.merged)
        + (max(n_kept) + 1) * outer_bytes
        + 2 * logits  # and their exponentials
        + 2 * expected
        + n_taught * width * item_size
    )
    return Cost(
        n_block_calls=sum(calls) + exact.n_block_calls,
        n_tokens=sum(task.tokenized.n_tokens for task in tasks),
        n_passes=n_reads,
        bytes_read=in_layers * n_reads + outside * (outer_reads + n_outside + 1),
        seconds=seconds,
        # An expert that draws is loaded whole, before the analysis.
        peak_bytes=max(peak, _count_whole(merge, replay.dtype) if drawn else 0),
        n_to_draw=sum(task.n_to_draw for task in drawn),
    )


def _count_whole(merge: PlannedMerge, dtype: torch.dtype) -> int:
    """Count the bytes of a whole model in memory; all have the base's tensors."""
    base = merge.config.base_model or merge.config.referenced_models()[0]
    n_values = sum(read_sizes(base).values()) // (stored_itemsize(base) or 4)
    return n_values * dtype.itemsize


def _count_bytes(*named: Weights) -> int:
    """Count the bytes of tensors, one that has several names once."""
    tensors = {id(tensor): tensor for weights in named for tensor in weights.values()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def check_space(merge: PlannedMerge, out: Path) -> None:
    """Check that the disk has room for a merge, as far as its base tells.

    Args:
        merge: as planned.
        out: the output folder; it need not exist.

    Raises:
        RecipeError: it has not.
    """
    here = out.absolute()
    folder = next(path for path in (here, *here.parents) if path.exists())
    base = merge.config.base_model or merge.config.referenced_models()[0]
    needed = sum(read_sizes(base).values())
    stored = stored_itemsize(base)
    dtype = dtype_from_name(merge.config.out_dtype or merge.config.dtype)
    if stored is not None and dtype is not None:
        needed = needed * dtype.itemsize // stored
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RecipeError(
            f"the disk of '{folder}' must have {needed / 2**30:.2f} GiB for the merge, "
            f"got {free / 2**30:.2f} GiB; free some, or write elsewhere"
        )


def read_sizes(model: ModelReference) -> dict[str, int]:
    """Read how many bytes each tensor of a model takes in its files.

    Args:
        model: whose files are at hand; of an adapter what it was merged into.

    Returns:
        Bytes by tensor, from the headers of safetensors files; the tensors of another
        file have equal shares of it.

    Raises:
        ValueError: a safetensors file is cut short.
        OSError: a file is missing.
    """
    try:
        index = LoaderCache().get(model).index
    except SafetensorError as error:
        raise ValueError(
            f"the model's safetensors file must be whole, got '{error}'; copy or "
            "download it anew"
        ) from error
    files: dict[Path, list[str]] = {}
    for name, file in index.tensor_paths.items():
        files.setdefault(Path(index.base_path) / file, []).append(name)
    sizes: dict[str, int] = {}
    for path, names in files.items():
        if path.suffix == ".safetensors":
            found = _read_header(path)
            sizes |= {name: found[name] for name in names if name in found}
        else:
            sizes |= dict.fromkeys(names, path.stat().st_size // len(names))
    return sizes


def _read_header(path: Path) -> dict[str, int]:
    """Read the bytes of each tensor: eight bytes of length, then JSON."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, size))
    try:
        ends = {
            name: tensor["data_offsets"]
            for name, tensor in json.loads(header).items()
            if name != "__metadata__"
        }
    except ValueError as error:
        raise ValueError(
            f"'{path}' must be a safetensors file, got a broken header; copy it anew"
        ) from error
    whole = 8 + length + max((end for _, end in ends.values()), default=0)
    if size != whole:
        raise ValueError(
            f"'{path}' must have {whole} bytes, got {size}; copy or download it anew"
        )
    return {name: end - start for name, (start, end) in ends.items()}


def _count_stored(tensors: Sequence[PlannedTensor]) -> tuple[int, int]:
    """Count the bytes of all inputs, in the layers and outside."""
    sizes: dict[ModelReference, dict[str, int]] = {}
    counts = {True: 0, False: 0}
    for tensor in tensors:
        inputs: Any = tensor.task.gather_tensors
        gather = getattr(inputs, "gather_tensors", inputs)
        for model, info in gather.weight_info.items():
            if model not in sizes:
                sizes[model] = read_sizes(model)
            names = (info.name, *(info.aliases or ()), *(info.tied_names or ()))
            found = (sizes[model][name] for name in names if name in sizes[model])
            counts[tensor.layer is not None] += next(found, 0)
    return counts[True], counts[False]


@dataclass(frozen=True, slots=True)
class _Exact:
    """What exact measurements of slopes take; nothing where there are none.

    Attributes:
        n_block_calls: forwards of one batch through one block.
        n_block_cells: the same times the cells of the batch.
        n_targets: positions that are read, over all streams.
        n_positions: the most of one batch at once.
        n_reads: of all layers, since a turn begins at its first.
        n_outer_reads: of what lies outside the layers.
        hidden_bytes: of the largest turn.
    """

    n_block_calls: int = 0
    n_block_cells: int = 0
    n_targets: int = 0
    n_positions: int = 0
    n_reads: float = 0.0
    n_outer_reads: int = 0
    hidden_bytes: int = 0


def _count_exact(
    tasks: Sequence[TaskData], replay: Replay, memory: int, n_measurements: int
) -> _Exact:
    """Count what the exact measurements of a choice take, without its steps."""
    n_layers, n_models = len(replay.blocks), len(tasks)
    batches = [batch for task in tasks for batch in task.choosing.batches]
    cells = sum(batch.input_ids.numel() for batch in batches)
    stream_bytes = cells * replay.width * replay.dtype.itemsize
    turns = plan_turns(stream_bytes, memory, n_layers=n_layers, n_models=n_models)
    per_layer = len(SIGNS) * n_models
    n_calls = n_measurements * count_forwards(n_layers, n_models) * n_layers
    n_streams = n_measurements * (1 + per_layer * n_layers)
    n_layer_reads = sum(n_layers - turn.start for turn in turns)
    return _Exact(
        n_block_calls=n_calls * len(batches),
        n_block_cells=n_calls * cells,
        n_targets=n_streams * sum(batch.n_targets for batch in batches),
        n_positions=per_layer
        * len(turns[0])
        * max(batch.n_targets for batch in batches),
        n_reads=n_measurements * n_layer_reads / n_layers,
        n_outer_reads=n_measurements,
        hidden_bytes=(1 + per_layer * len(turns[0])) * stream_bytes,
    )


def _list_passes(
    tasks: list[TaskData],
    way: Literal["rules", "first_order", "exact"],
    *,
    turns: Sequence[range],
    n_measurements: int,
    n_steps: int,
) -> list[list[Job]]:
    """List the jobs of each pass of one round, as the analysis makes them.

    The first are the experts', of tasks that are scored by agreement with them.

    Of treatments chosen by measurement, so many measurements, each a pass there and one
    back that costs the rest of `FORWARDS`, and so many steps of one pass; where the
    batches go back in turns, each turn reads the layers twice. Exact measurements are
    counted apart.
    """

    def jobs(choosing: Depth, accepting: Depth | None) -> list[Job]:
        return [
            Job(task.settings.model, batch, depth)
            for task in tasks
            for part, depth in ((task.choosing, choosing), (task.accepting, accepting))
            if depth is not None
            for batch in part.batches
        ]

    once, step = jobs("merged", None), jobs("merged", "merged")
    middle = [jobs("layers", None), step]
    if way == "exact":
        middle = [step] * n_steps
    if way == "first_order":
        back = [once * (FORWARDS - 1)]
        if len(turns) > 1:
            some = [[once[number] for number in turn] for turn in turns]
            back = [jobs for part in some for jobs in (part, part * (FORWARDS - 1))]
        middle = [once, *back] * n_measurements + [step] * n_steps
    experts = [
        Job(task.settings.model, batch, "merged")
        for task in tasks
        if needs_teacher(task)
        for part in (task.choosing, task.accepting)
        for batch in part.batches
    ]
    whole = [jobs("fronts", "fronts"), *middle]
    return [experts, *whole] if experts else whole


def _list_gradient_passes(tasks: list[TaskData]) -> list[list[Job]]:
    """List the jobs of each pass for gradients: at the base, then at each model."""
    passes = []
    for some in (tasks, *([task] for task in tasks)):
        once = [
            Job(task.settings.model, batch, "merged")
            for task in some
            for batch in task.choosing.batches
        ]
        passes += [once, once * (FORWARDS - 1)]
    return passes


def _time_norms(block: Weights) -> float:
    """Time the norms of one layer's matrices, in seconds."""
    matrices = [t.float() for t in block.values() if t.dim() in (2, 3)]
    start = time.perf_counter()
    for matrix in matrices:
        take_norms(matrix)
    return time.perf_counter() - start


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


def _time(call: Callable[[], None]) -> float:
    """Return the mean seconds of a call, over a short while, after one to warm up."""
    call()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < TIMED_SECONDS or count < 3:
        call()
        count += 1
    return (time.perf_counter() - start) / count


def _show_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} TiB"
