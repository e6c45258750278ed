"""How strongly every weight matrix pulls on a task's score, at the base and its expert.

Invariant: norms are those of the gradient of the mean score over all choosing samples,
summed over batches before a norm is taken; one task's gradients of one layer are in
memory at a time.
"""

import math
from collections.abc import Collection, Sequence
from functools import partial

import torch

from mergekit_himerging.analysis.data import TaskData
from mergekit_himerging.analysis.graph import Cuts, PlannedWeights
from mergekit_himerging.analysis.jobs import Front
from mergekit_himerging.analysis.replay import Replay, Weights
from mergekit_himerging.analysis.slopes import FORWARDS, split_tasks, take_back
from mergekit_himerging.analysis.streams import Progress
from mergekit_himerging.parameters import add_place
from mergekit_himerging.scores import MatrixGradients
from mergekit_himerging.tasks import PlannedTensor

GRADIENT_FORWARDS = 2 * FORWARDS
"""Forward passes over the choosing samples: at the base, and at each task's model."""

Norms = dict[tuple[str, int], tuple[float, float]]
"""Frobenius and nuclear norm by local name and layer."""


def measure_gradients(
    plain: Sequence[PlannedTensor],
    tasks: Sequence[TaskData],
    replay: Replay,
    *,
    device: torch.device,
    memory: int,
    cuts: Cuts,
    progress: Progress = lambda calls, label: None,
) -> list[tuple[MatrixGradients, ...]]:
    """Measure the gradients of every task's mean score by every weight matrix.

    The layer-wise view of arXiv:2410.23743, at the base and at the task's own model M_m
    (with the recipe's density and scale). A stack of matrices, as of fused experts,
    counts as one block-diagonal matrix; vectors are left out.

    Args:
        plain: planned tensors as the recipe weighs them.
        tasks: what is scored, on their choosing samples.
        replay: the model to run.
        device: where single models are made.
        memory: bytes that hidden states may take.
        cuts: of earlier passes; extended.
        progress: told of block forwards done.

    Returns:
        By task, a record for each matrix in the order of the blocks' own.

    Raises:
        ValueError: hidden states need more than ``memory``, or a gradient is not
            finite.
    """
    weights = PlannedWeights(plain, plain, device=device, reference="full", cuts=cuts)

    def measure(front: Front, some: Sequence[TaskData]) -> list[Norms]:
        load = partial(weights.load_front, front, some[0].settings.model)
        found: list[Norms] = [{} for _ in some]

        def open_block(layer: int) -> tuple[Weights, Weights]:
            block = replay.pick_block(load(layer), layer)
            varied = {
                name: block[name].detach().clone().requires_grad_()
                for name, parameter in replay.blocks[layer].named_parameters()
                if parameter.dim() in (2, 3) and parameter.is_floating_point()
            }
            return {**block, **varied}, varied

        def note(layer: int, task: int, gradients: Weights) -> None:
            for name, gradient in gradients.items():
                try:
                    found[task][name, layer] = take_norms(gradient)
                except ValueError as error:
                    model = some[task].settings.model
                    place = f"'{name}' of layer {layer}, task of '{model}'"
                    raise ValueError(add_place(error, place)) from error

        take_back(
            some,
            replay,
            load,
            open_block,
            note,
            turns=[_fit_turn(some, replay, memory)],
            progress=progress,
            label=f"gradients, {front}",
        )
        return found

    at_base = measure("base", tasks)
    at_single = [measure("single", [task])[0] for task in tasks]
    return [_list_matrices(*pair) for pair in zip(at_base, at_single, strict=True)]


def _fit_turn(tasks: Sequence[TaskData], replay: Replay, memory: int) -> range:
    """Return all batches as one turn: norms are of sums over all samples."""
    turns = split_tasks(tasks, replay, memory)
    if len(turns) > 1:
        raise ValueError(
            f"analysis_memory must hold all samples at once for 'gradients', got "
            f"{memory / 2**20:.3g}MiB, which holds them in {len(turns)} turns; raise "
            "it, use fewer samples, or remove 'gradients'"
        )
    return turns[0]


def take_norms(gradient: torch.Tensor) -> tuple[float, float]:
    """Take the norms of a matrix, or of a stack of them as blocks on a diagonal.

    Singular values are roots of the eigenvalues of the smaller Gram matrix, in float64:
    as exact as those of a float32 decomposition, and faster.

    Args:
        gradient: ``[rows, columns]`` or ``[stack, rows, columns]``, read only.

    Returns:
        Frobenius norm and nuclear norm, the sum of the singular values.

    Raises:
        ValueError: it is not finite.
    """
    wide = gradient.double()
    if wide.shape[-2] > wide.shape[-1]:
        wide = wide.mT
    frobenius = float(torch.linalg.vector_norm(wide))
    if not math.isfinite(frobenius):
        raise ValueError(
            f"gradient must be finite, got norm {frobenius}; remove 'gradients'"
        )
    squares = torch.linalg.eigvalsh(wide @ wide.mT)
    return frobenius, float(squares.clamp(min=0).sqrt().sum())  # -0 by rounding


def name_matrices(names: Collection[str]) -> dict[str, str]:
    """Cut local names of weights down to the last parts that tell them apart."""
    parts = {name: name.removesuffix(".weight").split(".") for name in names}

    def shorten(name: str) -> str:
        for n in range(1, len(parts[name])):
            if sum(other[-n:] == parts[name][-n:] for other in parts.values()) == 1:
                return ".".join(parts[name][-n:])
        return ".".join(parts[name])

    return {name: shorten(name) for name in names}


def _list_matrices(base: Norms, single: Norms) -> tuple[MatrixGradients, ...]:
    """List one task's norms by matrix; six digits, as a plan is read by people too."""
    pairs = sorted(base, key=lambda pair: pair[1])
    short = name_matrices(dict.fromkeys(name for name, _ in pairs))
    records = []
    for name, label in short.items():
        layers = [layer for other, layer in pairs if other == name]
        norms = {
            f"{kind}_{place}": tuple(
                float(f"{found[name, layer][number]:.6g}") for layer in layers
            )
            for place, found in (("base", base), ("single", single))
            for number, kind in enumerate(("frobenius", "nuclear"))
        }
        records.append(MatrixGradients(matrix=label, layers=tuple(layers), **norms))
    return tuple(records)
