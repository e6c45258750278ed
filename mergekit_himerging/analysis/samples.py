"""Calibration rows -> samples: the text of a row, its tokens, which are its target.

Invariant: the target is the end of a sequence and all of it; what does not fit is
refused, or cut at its beginning and counted.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from mergekit_himerging.analysis.rows import Row

Metric = Literal["loss", "accuracy", "agreement"]

WHOLE_SHAPES = ("text", "prompt")
"""Rows that are scored from their first token to their last."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt and its target as tokens.

    Attributes:
        ids: token ids, without padding.
        n_prompt: how many of them come before the target, at least 1, since nothing
            predicts the first; the targets are ``ids[n_prompt:]``, at least one.
    """

    ids: tuple[int, ...]
    n_prompt: int

    def __post_init__(self) -> None:
        if not 1 <= self.n_prompt < len(self.ids):
            raise ValueError(
                f"n_prompt must be in [1, {len(self.ids) - 1}] for {len(self.ids)} "
                f"tokens, got {self.n_prompt}"
            )

    @property
    def n_targets(self) -> int:
        """Tokens that are scored."""
        return len(self.ids) - self.n_prompt


@dataclass(frozen=True, slots=True)
class Sample:
    """What one row is scored on.

    Attributes:
        options: every choice for ``accuracy``, else the target alone.
        answer: index of the right one.
    """

    options: tuple[TokenSequence, ...]
    answer: int

    def __post_init__(self) -> None:
        if not 0 <= self.answer < len(self.options):
            raise ValueError(
                f"answer must be an index into {len(self.options)} options, "
                f"got {self.answer}"
            )


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The samples of one task.

    Attributes:
        samples: one per row, in the rows' order.
        n_truncated: samples that lost tokens.
        n_tokens: tokens of all options.
        n_targets: those of them that are scored.
    """

    samples: tuple[Sample, ...]
    n_truncated: int
    n_tokens: int
    n_targets: int


def tokenize_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    metric: Metric,
    max_length: int,
    vocab_size: int,
) -> Tokenized:
    """Turn rows into samples.

    - Prompt and completion are joined as they are; between a prompt and a choice comes
      a space, unless one of them has white space there or the prompt ends in a wide
      (Chinese, Japanese, Korean, full-width) character.
    - Messages go through the chat template; the target is what the whole conversation
      adds to the generation prompt, with the marks that end a turn unless the turn is
      cut. Instructions do too where there is a template, else they are "instruction,
      input, output" with a blank line between.
    - Of a text, all tokens after the first are targets. For ``agreement``, which
      compares distributions and knows no right token, the position after the last one
      counts too, where an answer would begin: the last id stands there once more, as a
      target that is never read. A prompt alone is a text then.

    A fast tokenizer gets the joined text, and every token that ends after the prompt's
    end is a target, so that a token across the boundary is one; a slow tokenizer gets
    the two parts. Special tokens that the tokenizer puts before a text by default are
    kept, those that it puts after one are not: no end mark is scored, except those of
    a chat template.

    A sample that is too long loses the beginning of its prompt, the same for all its
    options, but not a beginning-of-sequence token; a text loses its end.

    Args:
        rows: any shapes, mixed.
        tokenizer: the output model's.
        metric: ``loss`` and ``agreement`` take the completion, or the right choice;
            ``accuracy`` takes every choice.
        max_length: most tokens of a sequence, at least 2.
        vocab_size: token ids must be below it.

    Raises:
        ValueError: a row has no choices for ``accuracy``, is a prompt alone for another
            metric than ``agreement``, has messages where there is no chat template or
            one that refuses them, has a target of no tokens or more than
            ``max_length - 1``, or a token id that the model does not have; the message
            names the row's place.
    """
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2, got {max_length}")
    samples: list[Sample] = []
    n_truncated = 0
    for row in rows:
        if metric == "accuracy" and row.shape != "choices":
            raise ValueError(
                f"{row.place} must have 'choices' for metric 'accuracy', got a row of "
                f"shape '{row.shape}'; use metric 'loss'"
            )
        if metric != "agreement" and row.shape == "prompt":
            raise ValueError(
                f"{row.place} must have an answer for metric '{metric}', got a prompt "
                "alone; use metric 'agreement'"
            )
        texts, is_chat = _render(row, tokenizer, metric)
        options = [
            _tokenize(prompt, target, tokenizer, add_special_tokens=not is_chat)
            for prompt, target in texts
        ]
        if metric == "agreement" and row.shape in WHOLE_SHAPES:
            options = [_close(row, options[0][0], tokenizer.bos_token_id)]
        for ids, n_prompt in options:
            _check_tokens(row, ids, n_prompt, tokenizer, vocab_size)
        sequences, is_truncated = _fit(row, options, max_length, tokenizer.bos_token_id)
        n_truncated += is_truncated
        answer = row.answer if metric == "accuracy" else 0
        samples.append(Sample(sequences, answer))
    every = [option for sample in samples for option in sample.options]
    return Tokenized(
        samples=tuple(samples),
        n_truncated=n_truncated,
        n_tokens=sum(len(sequence.ids) for sequence in every),
        n_targets=sum(sequence.n_targets for sequence in every),
    )


def _render(
    row: Row, tokenizer: PreTrainedTokenizerBase, metric: Metric
) -> tuple[list[tuple[str, str]], bool]:
    """Return (prompt, target) of each option as text, and whether a template did it."""
    if row.shape == "messages":
        if not tokenizer.chat_template:
            raise ValueError(
                f"{row.place} has 'messages' and must have a chat template, got a "
                "tokenizer without one; set 'chat_template' in the recipe or use "
                "'prompt' and 'completion'"
            )
        return [_render_chat(row, row.turns, tokenizer)], True
    if row.shape == "instruction":
        parts = [row.prompt, row.context] if row.context.strip() else [row.prompt]
        prompt = "\n\n".join(parts)
        if tokenizer.chat_template:
            return [_render_chat(row, (("user", prompt),), tokenizer)], True
        return [(f"{prompt}\n\n", row.completion)], False
    if row.shape == "choices":
        wanted = row.choices if metric == "accuracy" else (row.completion,)
        return [
            (row.prompt, _separator(row.prompt, text) + text) for text in wanted
        ], False
    if row.shape == "prompt":
        return [("", row.prompt)], False
    return [(row.prompt, row.completion)], False


def _render_chat(
    row: Row,
    turns: Sequence[tuple[str, str]],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[str, str]:
    messages = [{"role": role, "content": content} for role, content in turns]
    target = {"role": "assistant", "content": row.completion}
    try:
        prompt = str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        )
        whole = str(tokenizer.apply_chat_template([*messages, target], tokenize=False))
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{row.place} must fit the chat template: {' '.join(str(error).split())}"
        ) from error
    if not whole.startswith(prompt):
        pairs = enumerate(zip(prompt, whole, strict=False))
        same = next((n for n, (ours, its) in pairs if ours != its), len(whole))
        raise ValueError(
            f"{row.place} must begin with the generation prompt when the chat template "
            f"renders it whole, got {whole[same : same + 40]!r} where the prompt has "
            f"{prompt[same : same + 40]!r}; use 'prompt' and 'completion'"
        )
    written = whole[len(prompt) :]
    if row.is_cut:
        before, found, _ = written.partition(row.completion.strip())
        written = before + found
    return prompt, written


def _close(row: Row, ids: list[int], bos_id: int | None) -> tuple[list[int], int]:
    """Add a target after the last token, so that the position there counts."""
    if all(token_id == bos_id for token_id in ids):
        raise ValueError(
            f"{row.place} must have a token of its own to agree at, got none (of "
            f"{len(ids)} tokens in all)"
        )
    return [*ids, ids[-1]], 1


def _separator(prompt: str, option: str) -> str:
    if prompt[-1].isspace() or option[0].isspace():
        return ""
    return "" if unicodedata.east_asian_width(prompt[-1]) in "WF" else " "


def _tokenize(
    prompt: str,
    target: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_special_tokens: bool,
) -> tuple[list[int], int]:
    """Return the ids, without special tokens after the text, and how many are prompt.

    At least one id counts as prompt, if there is any.
    """
    if not tokenizer.is_fast:
        return _tokenize_apart(
            prompt, target, tokenizer, add_special_tokens=add_special_tokens
        )
    encoding = tokenizer(
        prompt + target,
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,
    )
    ids: list[int] = encoding["input_ids"]
    end = len(ids)
    # Set for what the tokenizer adds, not for a special token spelled in the text.
    while end and encoding["special_tokens_mask"][end - 1]:
        end -= 1
    ends = [stop for _, stop in encoding["offset_mapping"][:end]]
    n_prompt = next((n for n, stop in enumerate(ends) if stop > len(prompt)), end)
    return ids[:end], max(n_prompt, 1)


def _tokenize_apart(
    prompt: str,
    target: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_special_tokens: bool,
) -> tuple[list[int], int]:
    def encode(text: str, *, special: bool = False) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)[
            "input_ids"
        ]
        return ids

    bare, target_ids = encode(prompt), encode(target)
    head = bare
    if add_special_tokens:
        full = encode(prompt, special=True)
        before = next(
            (n for n in range(len(full)) if full[n : n + len(bare)] == bare), 0
        )
        # A text without a prompt: of the special tokens alone, the first may be a bos.
        if not bare:
            before = int(bool(full) and full[0] == tokenizer.bos_token_id)
        head = full[: before + len(bare)]
    return head + target_ids, max(len(head), 1)


def _check_tokens(
    row: Row,
    ids: Sequence[int],
    n_prompt: int,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
) -> None:
    if n_prompt >= len(ids):
        raise ValueError(
            f"{row.place} must have a target of at least one token after the first, "
            f"got none (of {len(ids)} tokens in all)"
        )
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            token = tokenizer.convert_ids_to_tokens(token_id)
            raise ValueError(
                f"{row.place} must have token ids below the model's vocabulary of "
                f"{vocab_size}, got {token_id} ({token!r}); use the tokenizer that "
                "the model was made with"
            )


def _fit(
    row: Row,
    options: Sequence[tuple[list[int], int]],
    max_length: int,
    bos_id: int | None,
) -> tuple[tuple[TokenSequence, ...], bool]:
    """Cut a row's options to ``max_length``; tell whether any was cut."""
    if all(len(ids) <= max_length for ids, _ in options):
        return tuple(TokenSequence(tuple(ids), n) for ids, n in options), False
    if row.shape in WHOLE_SHAPES:
        ((ids, n_prompt),) = options
        return (TokenSequence(tuple(ids[:max_length]), n_prompt),), True
    n_targets = max(len(ids) - n for ids, n in options)
    room = max_length - n_targets
    if room < 1:
        raise ValueError(
            f"{row.place} must have a target of at most {max_length - 1} tokens, "
            f"got {n_targets}; shorten it or leave the row out"
        )
    return tuple(_cut_prompt(ids, n, room, bos_id) for ids, n in options), True


def _cut_prompt(
    ids: list[int], n_prompt: int, room: int, bos_id: int | None
) -> TokenSequence:
    kept = min(n_prompt, room)
    n_first = int(kept < n_prompt and ids[0] == bos_id)
    tail = ids[n_prompt - (kept - n_first) :]
    return TokenSequence((*ids[:n_first], *tail), kept)


def pick_pad(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Pick the id that batches are padded with.

    Padding is masked, so any will do that the model has. A tokenizer may have a pad
    token that its model was not resized for.
    """
    pad_id = tokenizer.pad_token_id
    return pad_id if pad_id is not None and pad_id < vocab_size else 0
