"""Greedy answers to free questions.

Invariant: an answer does not depend on what else is in its batch.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from mergekit_himerging.analysis.calibration import Row, TokenSequence, tokenize_rows
from mergekit_himerging.analysis.continuation import (
    by_argmax,
    decode,
    find_ends,
    find_may_pad,
    generate,
    measure_lengths,
    pack_prompts,
)

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
    # Whole: a long reference takes nothing from the prompt.
    samples = tokenize_rows(
        rows, tokenizer, metric="loss", max_length=sys.maxsize, vocab_size=vocab_size
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
    with by_argmax(model, tokenizer, max_new_tokens):
        ids = [prompt.ids for prompt in prompts]
        may_pad = find_may_pad(model, ids, tokenizer)
        for numbers in pack_prompts(ids, max_tokens, max_new_tokens, may_pad=may_pad):
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
    target = decode(tokenizer, sequence.ids[sequence.n_prompt :])
    before, found, _ = target.partition(row.completion.strip())
    is_chat = row.shape == "messages" or (
        row.shape == "instruction" and bool(tokenizer.chat_template)
    )
    return Prompt(
        ids=ids,
        lead=before.strip() if found else "",
        one_line=not is_chat and "\n" not in row.completion.strip(),
    )


def _continue(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
) -> list[str]:
    width = len(prompts[0].ids)
    stop = _EndOfLine(tokenizer, prompts, width)
    generated = generate(
        model,
        [prompt.ids for prompt in prompts],
        tokenizer,
        stopping_criteria=StoppingCriteriaList([stop]),
    )
    ends = set(find_ends(model, tokenizer))
    answers = []
    for prompt, ids in zip(prompts, generated[:, width:].tolist(), strict=True):
        n_ids = next((n for n, token in enumerate(ids) if token in ends), len(ids))
        answers.append(_clean(decode(tokenizer, ids[:n_ids]), prompt))
    return answers


def _clean(text: str, prompt: Prompt) -> str:
    text = text.strip().removeprefix(prompt.lead).strip()
    return text.partition("\n")[0].strip() if prompt.one_line else text


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
        if "\n" not in decode(self._tokenizer, ids[-1:]):
            return False
        text = decode(self._tokenizer, ids).lstrip()
        return "\n" in text.removeprefix(prompt.lead).lstrip()
