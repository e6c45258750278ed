"""Prompts continued by a whole model: by the likeliest token, or by one that is drawn.

Invariant: what follows a prompt does not depend on what else is in its batch. Prompts
are padded on the left where a check shows that the model then continues them as it does
alone; else only prompts of one length share a batch.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mergekit_himerging.analysis.calibration import pick_pad

LOG = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Largest difference of an option's mean log-probability, nats, in float32."""

HALF_TOLERANCE = 0.1
"""The same in bfloat16 and float16, where rounding alone may pass 0.01."""

Ids = Sequence[int]
"""The tokens of a prompt."""


def tolerance_of(model: PreTrainedModel) -> float:
    """Return how far two ways of computing a log-probability may differ, in nats."""
    return TOLERANCE if model.dtype == torch.float32 else HALF_TOLERANCE


def measure_lengths(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, max_length: int
) -> tuple[int, int]:
    """Return the tokens of a sequence that a model takes, and its vocabulary's size."""
    config = model.config.get_text_config()
    own = (
        getattr(config, "max_position_embeddings", None),
        getattr(tokenizer, "model_max_length", None),
    )
    length = min([max_length, *(int(length) for length in own if length)])
    return length, int(config.vocab_size)


def pack_prompts(
    prompts: Sequence[Ids], max_tokens: int, max_new_tokens: int, *, may_pad: bool
) -> Iterator[list[int]]:
    """Yield numbers of prompts, a batch at a time, the longest first."""
    batch: list[int] = []
    for number in sorted(range(len(prompts)), key=lambda n: -len(prompts[n])):
        if batch:
            width = len(prompts[batch[0]])
            cells = (len(batch) + 1) * (width + max_new_tokens)
            fits = may_pad or len(prompts[number]) == width
            if cells > max_tokens or not fits:
                yield batch
                batch = []
        batch.append(number)
    if batch:
        yield batch


def find_may_pad(
    model: PreTrainedModel, prompts: Sequence[Ids], tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Check that the shortest prompt goes on the same beside the longest and alone."""
    ordered = sorted(prompts, key=len)
    if not ordered or len(ordered[0]) == len(ordered[-1]):
        return False
    first, last = ordered[0], ordered[-1]
    try:
        beside = _probe(model, [first, last], tokenizer)
    except (ValueError, NotImplementedError, TypeError) as error:
        LOG.warning("%s cannot pad prompts: %s", type(model).__name__, error)
        return False
    alone = _probe(model, [first], tokenizer)
    worst = float((beside - alone).abs().max())
    if worst <= tolerance_of(model):
        return True
    LOG.warning(
        "%s continues padded prompts otherwise, by %.2g nats: only prompts of one "
        "length share a batch, which takes longer",
        type(model).__name__,
        worst,
    )
    return False


def _probe(
    model: PreTrainedModel, prompts: Sequence[Ids], tokenizer: PreTrainedTokenizerBase
) -> torch.Tensor:
    """Return the first prompt's likeliest next log-probabilities, of two tokens."""
    outputs = generate(
        model,
        prompts,
        tokenizer,
        max_new_tokens=2,
        min_new_tokens=2,
        output_logits=True,
        return_dict_in_generate=True,
    )
    steps = [logits[0].float().log_softmax(-1).max() for logits in outputs.logits]
    return torch.stack(steps)


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Ids],
    tokenizer: PreTrainedTokenizerBase,
    **options: Any,
) -> Any:
    """Continue a batch of prompts; returns what the model's own ``generate`` does."""
    width = max(map(len, prompts))
    embeddings = cast(torch.nn.Embedding, model.get_input_embeddings())
    pad_id = pick_pad(tokenizer, embeddings.num_embeddings)
    ids = [[*[pad_id] * (width - len(p)), *p] for p in prompts]
    lengths = torch.tensor([[len(prompt)] for prompt in prompts])
    mask = torch.arange(width) >= width - lengths  # [prompts, tokens]
    with torch.inference_mode():
        return model.generate(  # type: ignore[operator]
            input_ids=torch.tensor(ids, device=model.device),
            attention_mask=mask.to(model.device, torch.int64),
            **options,
        )


class Drawn(LogitsProcessor):
    """Makes the likeliest token one that is drawn from the model's distribution.

    Gumbel noise on the logits does it, from a generator of its own, so that the state
    of torch plays no part.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor
    ) -> torch.FloatTensor:
        """Add the noise to ``[rows, vocabulary]``."""
        waits = torch.empty(scores.shape).exponential_(generator=self._generator)
        drawn: torch.FloatTensor = scores.float() - waits.log().to(scores.device)  # type: ignore[assignment]
        return drawn


@contextmanager
def by_argmax(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    *,
    more_ends: Sequence[int] = (),
) -> Iterator[None]:
    """Put the model's own generation settings aside: they may sample or penalise."""
    kept = model.generation_config
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=[*find_ends(model, tokenizer), *more_ends] or None,
        pad_token_id=tokenizer.pad_token_id or 0,
    )
    try:
        yield
    finally:
        model.generation_config = kept


def find_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List the ids that end a text, the model's and the tokenizer's."""
    settings = model.generation_config
    own = settings.eos_token_id if settings is not None else None
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
    return sorted(end for end in ends if end is not None)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Turn ids into text as it was written, without special tokens."""
    return str(
        tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    )
