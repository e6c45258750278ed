"""How far a merge is from an expert: the divergence of their next-token distributions.

Invariant: the logits of some targets are held at a time, of expert and merge alike;
those of all targets never are.
"""

from collections.abc import Iterator, Sequence

import torch

from mergekit_himerging.analysis.calibration import Batch, Teacher
from mergekit_himerging.analysis.replay import Replay, Weights

PAIR_BYTES = 64 * 2**20
"""Bound for the logits that are held at a time, of expert and merges each."""


def agree(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return minus the divergence KL(expert || merge) at each target, in nats.

    Args:
        logits: of the merge, ``[..., targets, vocabulary]``, float32.
        expected: log-probabilities of the expert, ``[targets, vocabulary]``, float32.

    Returns:
        ``[..., targets]``, at most 0 but for rounding.
    """
    return (expected.exp() * (logits.log_softmax(-1) - expected)).sum(-1)


def recall(teacher: Teacher, replay: Replay) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield which targets, and the expert's log-probabilities there, float32.

    They are ``[targets, vocabulary]``, of as many targets as fit.
    """
    outer = teacher.load_outer()
    at_once = _count_positions(replay)
    for start in range(0, len(teacher.hidden), at_once):
        some = slice(start, start + at_once)
        states = teacher.hidden[some].to(replay.device)
        # One position a row: learned positions and masks are made for few tokens.
        logits = replay.read_out(outer, states[:, None])[:, 0]
        yield some, logits.float().log_softmax(-1)


def read_agreement(
    streams: Sequence[torch.Tensor],
    replay: Replay,
    weights: Weights,
    batch: Batch,
    teacher: Teacher,
) -> torch.Tensor:
    """Read minus the divergence from the expert at a batch's targets.

    Args:
        streams: hidden states after the last block, each ``[rows, tokens, width]``.
        replay: the model.
        weights: those outside the blocks, of the streams.
        batch: where its targets are.
        teacher: the expert on this batch.

    Returns:
        ``[streams, targets]``, float64 on the CPU, in nats.
    """
    rows = batch.target_rows.to(replay.device)
    positions = batch.target_positions.to(replay.device)
    found = torch.zeros((len(streams), batch.n_targets), dtype=torch.float64)
    for some, expected in recall(teacher, replay):
        n_streams = max(1, _count_positions(replay) // len(expected))
        for start in range(0, len(streams), n_streams):
            part = streams[start : start + n_streams]
            states = torch.stack([s[rows[some], positions[some]] for s in part])
            flat = states.reshape(-1, 1, states.shape[-1])  # [part * some, 1, width]
            logits = replay.read_out(weights, flat)[:, 0].float()
            by_stream = logits.reshape(len(part), len(expected), -1)
            agreed = agree(by_stream, expected).double().cpu()
            found[start : start + n_streams, some] = agreed
    return found


def _count_positions(replay: Replay) -> int:
    return max(1, PAIR_BYTES // (replay.vocabulary * 4))
