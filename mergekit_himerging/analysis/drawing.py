"""Rows that an expert draws from itself: prompts of its own, and its answers to them.

Invariant: expert, chat template, seed and number decide the rows, and nothing else that
was drawn or read before.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from jinja2 import TemplateError
from transformers import LogitsProcessorList, PreTrainedTokenizerBase

from mergekit_himerging.analysis.continuation import (
    Drawn,
    by_argmax,
    decode,
    find_ends,
    find_may_pad,
    generate,
    measure_lengths,
    pack_prompts,
)
from mergekit_himerging.analysis.references import Loaded
from mergekit_himerging.analysis.rows import Row

MAX_TOKENS = 64
"""Most tokens of a prompt, and of an answer."""

ROUNDS = 8
"""How often repeated and empty rows are drawn again."""

CELLS = 4096
"""Tokens of a batch, padding included."""

MARK = "words of the user"


@dataclass(frozen=True, slots=True)
class Turn:
    """What a chat template puts around the words of a user.

    Attributes:
        before: up to where they begin.
        after: from their end to where the answer begins.
    """

    before: str
    after: str

    def render(self, words: str) -> str:
        """Return the text that is answered."""
        return self.before + words + self.after


def open_turn(tokenizer: PreTrainedTokenizerBase) -> Turn | None:
    """Find a user's turn in a tokenizer's chat template; None where it has none.

    Raises:
        ValueError: the template does not show the user's words once, as they are.
    """
    if not tokenizer.chat_template:
        return None
    message = {"role": "user", "content": MARK}
    try:
        text = str(
            tokenizer.apply_chat_template(
                [message], tokenize=False, add_generation_prompt=True
            )
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            "the chat template must take a user's turn for calibration 'self': "
            f"{' '.join(str(error).split())}"
        ) from error
    before, _, after = text.partition(MARK)
    if text.count(MARK) != 1:
        raise ValueError(
            "the chat template must show a user's words once for calibration 'self', "
            f"got {text.count(MARK)} times in {text[:200]!r}; name a file"
        )
    return Turn(before, after)


def draw_rows(
    expert: Loaded,
    turn: Turn | None,
    *,
    name: str,
    n_rows: int,
    seed: int,
) -> tuple[Row, ...]:
    """Draw rows from a model.

    A prompt is drawn token by token from the model's own distribution, from where the
    chat template opens a user's turn, or from the beginning of a text; of a text that
    ends by itself, the first half is the prompt. The answer is the likeliest token each
    time. Both have at most ``MAX_TOKENS``, or what half of the model's context leaves.
    Repeated prompts are drawn again, and those that are, or whose answer is, empty or
    no Unicode text.

    Args:
        expert: the model, in evaluation mode, and its own tokenizer.
        turn: of the output model's chat template.
        name: of the expert, for messages.
        n_rows: how many, at least 1.
        seed: any integer.

    Returns:
        ``n_rows`` rows with different prompts, of shape ``messages`` with a turn, else
        ``completion``.

    Raises:
        ValueError: the model has no token to begin with or no room for a prompt, or
            gave fewer different rows in all its rounds.
    """
    drawer = _Drawer(expert, turn, name, seed)
    rows: dict[str, Row] = {}
    n_drawn = 0
    for _ in range(1 + ROUNDS):
        missing = n_rows - len(rows)
        if not missing:
            break
        n_drawn += missing
        prompts = [p for p in drawer.draw_prompts(missing) if p not in rows]
        for row in drawer.answer(list(dict.fromkeys(prompts))):
            prompt = row.prompt or row.turns[0][1]
            place = f"row {len(rows) + 1} drawn from '{name}'"
            rows[prompt] = replace(row, place=place)
    if len(rows) < n_rows:
        raise ValueError(
            f"'{name}' must draw {n_rows} different rows from itself, got {len(rows)} "
            f"in {n_drawn} draws; lower 'samples', change 'seed' or name a file as "
            "'calibration'"
        )
    return tuple(rows.values())


class _Drawer:
    """Draws prompts from one model and answers them."""

    def __init__(self, expert: Loaded, turn: Turn | None, name: str, seed: int) -> None:
        self._model, self._tokenizer = expert
        self._turn = turn
        self._generator = torch.Generator().manual_seed(seed)
        self._ends = find_ends(*expert)
        if turn is None:
            bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
            first = eos if bos is None else bos  # an end also separates texts
            if first is None:
                raise ValueError(
                    f"'{name}' must have a beginning-of-sequence token or a chat "
                    "template for calibration 'self', got none; name a file as "
                    "'calibration'"
                )
            self._start, n_around = [first], 1
        else:
            self._start = self._encode(turn.before)
            closing = self._encode(turn.after)
            n_around = len(self._start) + len(closing)
            if closing and closing[0] in self._tokenizer.all_special_ids:
                self._ends = [*self._ends, closing[0]]
        length, _ = measure_lengths(*expert, max_length=2**15)
        self._n_new = min(MAX_TOKENS, (length - n_around) // 2)
        if self._n_new < 1 or not self._start:
            raise ValueError(
                f"'{name}' must take {n_around + 2} tokens or more, and at least one "
                f"before a prompt, for calibration 'self', got {length} and "
                f"{len(self._start)}; name a file as 'calibration'"
            )

    def draw_prompts(self, n: int) -> list[str]:
        """Draw ``n`` prompts and return those that can be used."""
        at_once = max(1, CELLS // (len(self._start) + self._n_new))
        noise = LogitsProcessorList([Drawn(self._generator)])
        texts = []
        with self._by_argmax():
            for first in range(0, n, at_once):
                found = generate(
                    self._model,
                    [self._start] * min(at_once, n - first),
                    self._tokenizer,
                    logits_processor=noise,
                )
                for ids in found[:, len(self._start) :].tolist():
                    texts.append(self._read_prompt(*self._cut(ids)))
        return [text for text in texts if _is_usable(text)]

    def answer(self, prompts: Sequence[str]) -> list[Row]:
        """Answer prompts and return the rows of those whose answer can be used."""
        asked = [self._encode_prompt(prompt) for prompt in prompts]
        rows: dict[int, Row] = {}
        with self._by_argmax():
            may_pad = find_may_pad(self._model, asked, self._tokenizer)
            for numbers in pack_prompts(asked, CELLS, self._n_new, may_pad=may_pad):
                batch = [asked[number] for number in numbers]
                found = generate(self._model, batch, self._tokenizer)
                width = max(map(len, batch))
                for number, ids in zip(numbers, found[:, width:].tolist(), strict=True):
                    row = self._make_row(prompts[number], asked[number], ids)
                    if _is_usable(row.completion):
                        rows[number] = row
        return [rows[number] for number in sorted(rows)]

    def _by_argmax(self) -> AbstractContextManager[None]:
        return by_argmax(
            self._model, self._tokenizer, self._n_new, more_ends=self._ends
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _encode_prompt(self, prompt: str) -> list[int]:
        if self._turn is not None:
            return self._encode(self._turn.render(prompt))
        ids: list[int] = self._tokenizer(prompt)["input_ids"]
        while len(ids) > 1 and ids[-1] in self._ends:
            ids.pop()
        return ids

    def _cut(self, ids: Sequence[int]) -> tuple[list[int], bool]:
        """Return the ids before the first end, and whether there was one."""
        n_ids = next((n for n, i in enumerate(ids) if i in self._ends), len(ids))
        return list(ids[:n_ids]), n_ids < len(ids)

    def _read_prompt(self, ids: list[int], is_over: bool) -> str:
        if self._turn is None:
            kept = ids[: (len(ids) + 1) // 2] if is_over else ids
            return _drop_half_characters(decode(self._tokenizer, kept))
        text = decode(self._tokenizer, ids)
        closing = self._turn.after.strip().partition("\n")[0].strip()
        if closing:  # of a template whose marks are no tokens of their own
            text = text.partition(closing)[0]
        return _drop_half_characters(text).strip()

    def _make_row(self, prompt: str, asked: list[int], ids: list[int]) -> Row:
        kept, is_over = self._cut(ids)
        if self._turn is not None:
            text = _drop_half_characters(decode(self._tokenizer, kept)).strip()
            turns = (("user", prompt),)
            return Row("", "messages", text, turns=turns, is_cut=not is_over)
        # Some tokenizers drop a space at the beginning of what they decode.
        whole = _drop_half_characters(decode(self._tokenizer, [*asked, *kept]))
        before = decode(self._tokenizer, asked)
        answer = whole.removeprefix(before) if whole.startswith(before) else ""
        return Row("", "completion", answer, prompt=prompt)


def _is_usable(text: str) -> bool:
    """Whether a text is there, and no tokens in it that are no character."""
    return bool(text.strip()) and "\ufffd" not in text


def _drop_half_characters(text: str) -> str:
    """Drop the end of a text whose last character's tokens are not all there."""
    return text.rstrip("\ufffd")
