"""What an expert is trained on at every step, and at which learning rate.

Invariant: both are a function of seed and step alone, so that a resumed run sees what
an unbroken one would have seen.
"""

import math
import random
from collections.abc import Iterator, Sequence

from scoring import Example

BATCH_ROWS = 8
# Rows of similar length share a batch: sorted inside windows of this many batches.
WINDOW_BATCHES = 8
WARM_UP_STEPS = 10


def mix_batches(
    examples: Sequence[Sequence[Example]], steps: Sequence[int], seed: int
) -> Iterator[list[Example]]:
    """Yield each task's batches, spread evenly over the whole.

    Args:
        examples: by task.
        steps: by task, how many batches.
        seed: of the order of rows.
    """
    streams = [
        draw_batches(rows, seed, n) for rows, n in zip(examples, steps, strict=True)
    ]
    turns = [
        ((done + 0.5) / n, task) for task, n in enumerate(steps) for done in range(n)
    ]
    for _, task in sorted(turns):
        yield next(streams[task])


def draw_batches(
    examples: Sequence[Example], seed: int, n_batches: int
) -> Iterator[list[Example]]:
    """Yield batches of ``BATCH_ROWS``, epoch after epoch; the last rows may be cut."""
    generator = random.Random(seed)
    produced = 0
    while produced < n_batches:
        order = list(examples)
        generator.shuffle(order)
        window = BATCH_ROWS * WINDOW_BATCHES
        epoch = []
        for start in range(0, len(order), window):
            rows = sorted(order[start : start + window], key=lambda e: len(e.ids))
            in_window = [
                rows[i : i + BATCH_ROWS] for i in range(0, len(rows), BATCH_ROWS)
            ]
            generator.shuffle(in_window)
            epoch += [batch for batch in in_window if len(batch) == BATCH_ROWS]
        if not epoch:
            raise ValueError(
                f"training needs {BATCH_ROWS} rows or more, got {len(examples)}; "
                "use the pinned wheels"
            )
        yield from epoch[: n_batches - produced]
        produced += len(epoch)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm up linearly, then fall to zero along half a cosine; ``step`` from 0."""
    if step < WARM_UP_STEPS:
        return peak * (step + 1) / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))
