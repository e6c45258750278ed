"""The check of every analysis: streams against the model's own forward.

Two full forwards, of F and of G, run beside the streams and share their weights as each
layer is loaded, so that the check costs no second read. Each has a model of its own and
passes on whatever its blocks hand each other; the streams, interleaved through the same
blocks, must come to the same log-probabilities.
"""

import queue
import threading
from collections.abc import Callable

import torch

from mergekit_himerging.analysis.agreement import agree, recall
from mergekit_himerging.analysis.calibration import Batch, NotANumberError
from mergekit_himerging.analysis.jobs import Front, Job, Measured, Variants
from mergekit_himerging.analysis.replay import Replay, UnsupportedModelError, Weights


def pick_rows(batch: Batch, vocabulary: int, most_bytes: int) -> Batch:
    """Pick the first rows of a batch, one at least, whose logits fit.

    A full forward holds them of every token, float32, not of the targets alone.
    """
    row_bytes = batch.input_ids.shape[1] * vocabulary * 4
    return batch.keep_rows(max(1, most_bytes // row_bytes))


class SelfCheck:
    """Full forwards of one job's batch under F and under G, fed layer by layer.

    Args:
        make_replay: makes a model to run, one for each forward.
        job: whose batch is checked, or its first rows.
        tolerance: largest difference of a log-probability, in nats.
    """

    def __init__(
        self, make_replay: Callable[[], Replay], job: Job, tolerance: float
    ) -> None:
        self._make_replay = make_replay
        self._job = job
        self._tolerance = tolerance
        self._forwards: dict[Front, _Forward] = {}

    def start(self, front: Front, outer: Weights) -> None:
        """Begin the forward of a front that is checked; it waits before block 0."""
        if front != "single":
            self._forwards[front] = _Forward(self._make_replay(), outer, self._job)

    def feed(self, layer: int, weights: Variants) -> None:
        """Take both forwards through one layer."""
        self._forwards["base"].feed(layer, weights.base)
        self._forwards["merged"].feed(layer, weights.merged)

    def stop(self) -> None:
        """End the forwards, also those that something else has left waiting."""
        for forward in self._forwards.values():
            forward.stop()

    def compare(self, measured: Measured) -> None:
        """Compare the forwards' log-probabilities with the streams'.

        Raises:
            NotANumberError: the model's own forward gives NaN.
            UnsupportedModelError: they differ by more than the tolerance.
        """
        for name, forward in self._forwards.items():
            full, streamed = forward.finish(), getattr(measured, name)
            if streamed is None:
                continue
            streamed = streamed[: len(full)]
            if full.isnan().any():
                raise NotANumberError(
                    f"log-probabilities of {forward.name} must be numbers, got NaN "
                    f"under the {name} weights; set 'dtype: float32', or look for a "
                    "damaged model"
                )
            apart = torch.where(full == streamed, 0.0, full - streamed)  # -inf twice
            error = apart.abs().max().item()
            if not error <= self._tolerance:
                raise UnsupportedModelError(
                    f"{forward.name} cannot be analysed layer by layer: streams differ "
                    f"from its own forward by {error:.2g} nats under the {name} "
                    f"weights, more than {self._tolerance:g}; "
                    "remove 'calibration' for the model-wise merge"
                )


class _StoppedError(Exception):
    """Ends a forward that is not fed any more."""


class _Forward:
    """One full forward in a thread that only runs while its layer is fed."""

    def __init__(self, replay: Replay, outer: Weights, job: Job) -> None:
        self.name = replay.name
        self._replay = replay
        self._job = job
        self._wants: queue.Queue[int | None] = queue.Queue()
        self._weights: queue.Queue[Weights | None] = queue.Queue()
        self._result: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(outer,), daemon=True)
        self._thread.start()
        self._next = self._wants.get()

    def feed(self, layer: int, weights: Weights) -> None:
        """Run one block and wait until the next one, or the end, is reached."""
        if self._next != layer:
            return
        self._weights.put(self._replay.pick_block(weights, layer))
        self._next = self._wants.get()

    def stop(self) -> None:
        """End a forward that waits for weights."""
        self._weights.put(None)
        self._thread.join()

    def finish(self) -> torch.Tensor:
        """Return what the streams measure of the targets, ``[targets]``, float64.

        Raises:
            UnsupportedModelError: the model did not ask for its blocks in order.
        """
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise UnsupportedModelError(
                f"{self.name} must run its blocks once each and in order, "
                f"got stuck before block {self._next}"
            )
        return self._result

    def _fetch(self, layer: int) -> Weights:
        self._wants.put(layer)
        weights = self._weights.get()
        if weights is None:
            raise _StoppedError
        return weights

    def _run(self, outer: Weights) -> None:
        try:
            batch, device = self._job.batch, self._replay.device
            with torch.no_grad():
                logits = self._replay.full_forward(
                    outer,
                    batch.input_ids.to(device),
                    batch.attention_mask.to(device),
                    self._fetch,
                )
                at_targets = logits[batch.target_rows, batch.target_positions].float()
                if batch.teacher is None:
                    at_targets = at_targets.cpu()
                    chosen = at_targets.gather(-1, batch.target_ids[:, None])[:, 0]
                    result = chosen - at_targets.logsumexp(-1)
                else:
                    parts = recall(batch.teacher, self._replay)
                    agreed = [agree(at_targets[some], those) for some, those in parts]
                    result = torch.cat(agreed).cpu()
                self._result = result.double()
        except BaseException as error:
            self._error = error
        finally:
            self._wants.put(None)
