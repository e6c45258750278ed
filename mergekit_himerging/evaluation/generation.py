"""Greedy answers to free questions.

Invariant: an answer does not depend on what else is in its batch. Prompts are padded on
the left where a check shows that the model then continues them as it does alone; else
only prompts of one length share a batch.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from mergekit_himerging.analysis.calibration import Row, TokenSequence, tokenize_rows
from mergekit_himerging.evaluation.scoring import measure_lengths, tolerance_of

LOG = logging.getLogger(__name__)

FREE_SHAPES = ("completion", "messages", "instruction")
"""Rows with a free answer: a text has no question, choices are ranked."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model continues.

    Attributes:
        ids: the prompt's tokens.
        lead: text that the tokens leave out before the answer, as the end of a prompt
            that shares a token with the answer, or an empty chain of thought that the
            chat template puts there; without white space around it.
        one_line: whether the answer ends with its first line.
    """

    ids: tuple[int, ...]
    lead: str
    one_line: bool


def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    max_length: int,
    max_tokens: int,
) -> tuple[tuple[str, ...], int]:
    """Let a model answer rows with a free answer, by the likeliest token each time.

    An answer ends at an end-of-sequence token of the model or the tokenizer, and is
    decoded without special tokens and white space around it. Where no chat template
    marks its end, it ends with its first line if the reference has one line.

    Args:
        model: in evaluation mode; its sampling settings play no part.
        tokenizer: the model's.
        rows: of ``FREE_SHAPES``.
        max_new_tokens: most tokens of an answer; half of the model's bound at most.
        max_length: most tokens of prompt and answer, beside the model's own bound; a
            longer prompt loses its beginning, but not a beginning-of-sequence token.
        max_tokens: most cells of a batch, padding and answers included.

    Returns:
        The answers, one for each row, and how many prompts were cut.

    Raises:
        ValueError: a row cannot be tokenised for this model.
    """
    length, vocab_size = measure_lengths(model, tokenizer, max_length=max_length)
    if max_new_tokens > length // 2:
        LOG.warning(
            "answers are cut at %d tokens, half of what the model takes", length // 2
        )
        max_new_tokens = max(1, length // 2)
    room = length - max_new_tokens
    samples = tokenize_rows(
        rows, tokenizer, metric="loss", max_length=length, vocab_size=vocab_size
    ).samples
    sequences = [sample.options[0] for sample in samples]
    prompts = [
        _make_prompt(row, sequence, tokenizer, room)
        for row, sequence in zip(rows, sequences, strict=True)
    ]
    n_cut = sum(
        len(prompt.ids) < sequence.n_prompt
        for prompt, sequence in zip(prompts, sequences, strict=True)
    )
    answers = [""] * len(rows)
    with _greedy(model, tokenizer, max_new_tokens):
        may_pad = _may_pad(model, prompts, tokenizer)
        for numbers in _pack(prompts, max_tokens, max_new_tokens, may_pad=may_pad):
            batch = [prompts[number] for number in numbers]
            texts = _continue(model, tokenizer, batch)
            for number, text in zip(numbers, texts, strict=True):
                answers[number] = text
    return tuple(answers), n_cut


def _make_prompt(
    row: Row, sequence: TokenSequence, tokenizer: PreTrainedTokenizerBase, room: int
) -> Prompt:
    ids = sequence.ids[: sequence.n_prompt]
    if len(ids) > room:
        n_first = int(ids[0] == tokenizer.bos_token_id and room > 1)
        ids = ids[:n_first] + ids[len(ids) - (room - n_first) :]
    target = _decode(tokenizer, sequence.ids[sequence.n_prompt :])
    before, found, _ = target.partition(row.completion.strip())
    is_chat = row.shape == "messages" or (
        row.shape == "instruction" and bool(tokenizer.chat_template)
    )
    return Prompt(
        ids=ids,
        lead=before.strip() if found else "",
        one_line=not is_chat and "\n" not in row.completion.strip(),
    )


def _pack(
    prompts: Sequence[Prompt], max_tokens: int, max_new_tokens: int, *, may_pad: bool
) -> Iterator[list[int]]:
    """Yield numbers of prompts, a batch at a time, the longest first."""
    batch: list[int] = []
    for number in sorted(range(len(prompts)), key=lambda n: -len(prompts[n].ids)):
        if batch:
            width = len(prompts[batch[0]].ids)
            cells = (len(batch) + 1) * (width + max_new_tokens)
            fits = may_pad or len(prompts[number].ids) == width
            if cells > max_tokens or not fits:
                yield batch
                batch = []
        batch.append(number)
    if batch:
        yield batch


def _may_pad(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
) -> bool:
    """Check that the shortest prompt goes on the same beside the longest and alone."""
    ordered = sorted(prompts, key=lambda prompt: len(prompt.ids))
    if not ordered or len(ordered[0].ids) == len(ordered[-1].ids):
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
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
) -> torch.Tensor:
    """Return the first prompt's likeliest next log-probabilities, of two tokens."""
    outputs = _generate(
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


def _continue(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
) -> list[str]:
    width = len(prompts[0].ids)
    stop = _EndOfLine(tokenizer, prompts, width)
    generated = _generate(
        model, prompts, tokenizer, stopping_criteria=StoppingCriteriaList([stop])
    )
    ends = set(_find_ends(model, tokenizer))
    answers = []
    for prompt, ids in zip(prompts, generated[:, width:].tolist(), strict=True):
        n_ids = next((n for n, token in enumerate(ids) if token in ends), len(ids))
        answers.append(_clean(_decode(tokenizer, ids[:n_ids]), prompt))
    return answers


def _clean(text: str, prompt: Prompt) -> str:
    text = text.strip().removeprefix(prompt.lead).strip()
    return text.partition("\n")[0].strip() if prompt.one_line else text


def _generate(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    **options: Any,
) -> Any:
    width = max(len(prompt.ids) for prompt in prompts)
    pad_id: int = tokenizer.pad_token_id or 0
    ids = [[*[pad_id] * (width - len(p.ids)), *p.ids] for p in prompts]
    lengths = torch.tensor([[len(prompt.ids)] for prompt in prompts])
    mask = torch.arange(width) >= width - lengths  # [prompts, tokens]
    with torch.inference_mode():
        return model.generate(  # type: ignore[operator]
            input_ids=torch.tensor(ids, device=model.device),
            attention_mask=mask.to(model.device, torch.int64),
            **options,
        )


class _EndOfLine(StoppingCriteria):
    """Ends a row whose answer is one line once that line is over.

    What comes after it is cut anyway: this saves time and changes no answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        width: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._width = width

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any
    ) -> torch.BoolTensor:
        ids = input_ids[:, self._width :].tolist()
        over = [
            prompt.one_line and self._is_over(prompt, row)
            for prompt, row in zip(self._prompts, ids, strict=True)
        ]
        return torch.tensor(over, device=input_ids.device)  # type: ignore[return-value]

    def _is_over(self, prompt: Prompt, ids: list[int]) -> bool:
        if "\n" not in _decode(self._tokenizer, ids[-1:]):
            return False
        text = _decode(self._tokenizer, ids).lstrip()
        return "\n" in text.removeprefix(prompt.lead).lstrip()


@contextmanager
def _greedy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> Iterator[None]:
    """Put the model's own generation settings aside: they may sample or penalise."""
    kept = model.generation_config
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=_find_ends(model, tokenizer) or None,
        pad_token_id=tokenizer.pad_token_id or 0,
    )
    try:
        yield
    finally:
        model.generation_config = kept


def _find_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    settings = model.generation_config
    own = settings.eos_token_id if settings is not None else None
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
    return sorted(end for end in ends if end is not None)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(
        tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    )
