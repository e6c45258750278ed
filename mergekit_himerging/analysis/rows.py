"""One row of calibration data: told apart by its keys, checked, hashed, chosen.

Invariant: a row is understood in exactly one way or refused with its place; no field
with a meaning is ignored, no value is turned into another type.
"""

import hashlib
import json
import reprlib
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mergekit_himerging.files import has_surrogates

Shape = Literal["completion", "choices", "messages", "instruction", "text", "prompt"]

_KEYS: Mapping[Shape, tuple[str, ...]] = {
    "completion": ("prompt", "completion"),
    "choices": ("prompt", "choices", "answer"),
    "messages": ("messages",),
    "instruction": ("instruction", "output"),
    "text": ("text",),
    "prompt": ("prompt",),
}
_OPTIONAL: Mapping[Shape, tuple[str, ...]] = {"instruction": ("input",)}
_KNOWN = frozenset(
    key for keys in (*_KEYS.values(), *_OPTIONAL.values()) for key in keys
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row, checked.

    Attributes:
        place: for messages, as ``file.jsonl line 12``; no part of the content.
        shape: which keys it came with.
        completion: the target text: the completion, the right option, the content of
            the last turn, the output, or the whole text; empty for ``prompt``, else
            never blank.
        prompt: the prompt or instruction; empty for ``messages`` and ``text``.
        context: the ``input`` of an instruction, else empty.
        choices: all options of ``choices``, else none.
        answer: 0-based index into ``choices``.
        turns: (role, content) of the turns before the target, for ``messages``.
        is_cut: the last of ``messages`` goes on after its text, so that no end of a
            turn is a target.
    """

    place: str
    shape: Shape
    completion: str
    prompt: str = ""
    context: str = ""
    choices: tuple[str, ...] = ()
    answer: int = 0
    turns: tuple[tuple[str, str], ...] = ()
    is_cut: bool = False

    @property
    def content(self) -> str:
        """All of the row but its place, as one line of JSON."""
        return json.dumps(
            [
                self.shape,
                self.completion,
                self.prompt,
                self.context,
                self.choices,
                self.answer,
                self.turns,
                *(["cut"] if self.is_cut else []),
            ]
        )


def parse_row(record: object, place: str, *, needs_answer: bool = True) -> Row:
    """Read one record into a row.

    A field that is null counts as absent. Keys that belong to no shape are allowed.

    Args:
        record: a mapping of keys to values, as JSON has them.
        place: where it stands, for messages.
        needs_answer: whether a prompt alone is refused.

    Raises:
        ValueError: the record is no mapping, has the keys of no shape or of several, or
            a field is blank, no text, or out of range; the message names the place.
    """
    if not isinstance(record, Mapping):
        raise ValueError(
            f"{place} must be an object of keys and values, got {_brief(record)}"
        )
    fields = {str(key): value for key, value in record.items() if value is not None}
    shape = _tell_shape(fields, place, needs_answer)
    if shape == "messages":
        row = _parse_messages(fields["messages"], place)
        is_cut = fields.get("cut", False)
        if not isinstance(is_cut, bool):
            raise ValueError(
                f"{place} 'cut' must be true or false, got {_brief(is_cut)}"
            )
        return replace(row, is_cut=is_cut)
    if shape == "choices":
        return _parse_choices(fields, place)
    if shape == "text":
        return Row(place, shape, completion=_text(fields, "text", place))
    if shape == "prompt":
        return Row(place, shape, "", prompt=_text(fields, "prompt", place))
    if shape == "completion":
        return Row(
            place,
            shape,
            prompt=_text(fields, "prompt", place),
            completion=_text(fields, "completion", place),
        )
    return Row(
        place,
        shape,
        prompt=_text(fields, "instruction", place),
        context=_text({"input": "", **fields}, "input", place, may_be_blank=True),
        completion=_text(fields, "output", place),
    )


def choose_rows(rows: Iterable[Row], *, samples: int, seed: int) -> tuple[Row, ...]:
    """Choose rows without replacement, by content and seed alone.

    The order of the rows, their places and PYTHONHASHSEED play no part; rows of the
    same content count as one, the first. Fewer samples of the same seed are the
    beginning of more.

    Args:
        rows: the rows of a file.
        samples: how many, at least 1; all of them where there are fewer.
        seed: any integer.

    Raises:
        ValueError: ``samples`` is below 1.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    distinct: dict[str, Row] = {}
    for row in rows:
        distinct.setdefault(_hash(f"{seed} {row.content}"), row)
    return tuple(distinct[key] for key in sorted(distinct)[:samples])


def hash_rows(rows: Iterable[Row]) -> str:
    """Hash the content of rows, whatever their order and places: sha256, hex."""
    return _hash("\n".join(sorted(_hash(row.content) for row in rows)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _tell_shape(fields: Mapping[str, object], place: str, needs_answer: bool) -> Shape:
    is_bare = fields.keys() & _KNOWN == {"prompt"}
    if is_bare and not needs_answer:
        return "prompt"
    allowed = {s: keys for s, keys in _KEYS.items() if s != "prompt"}
    complete = [shape for shape, keys in allowed.items() if fields.keys() >= set(keys)]
    if not complete:
        options = ", or ".join(_name(keys) for keys in allowed.values())
        remedy = "; only metric 'agreement' takes a prompt alone" if is_bare else ""
        raise ValueError(
            f"{place} must have {options}, got keys {_keys(fields)}{remedy}"
        )
    shape = complete[0]
    ours = {*_KEYS[shape], *_OPTIONAL.get(shape, ())}
    foreign = sorted((fields.keys() & _KNOWN) - ours)
    if foreign:
        raise ValueError(
            f"{place} must have the keys of one shape, got {_name(_KEYS[shape])} with "
            f"{_name(foreign)} (keys {_keys(fields)}); remove or rename what is not "
            "meant"
        )
    return shape


def _parse_choices(fields: Mapping[str, object], place: str) -> Row:
    choices = fields["choices"]
    if not isinstance(choices, Sequence) or isinstance(choices, str):
        raise ValueError(
            f"{place} must have a list as 'choices', got {_brief(choices)}; "
            "a CSV file cannot hold one, a .jsonl file can"
        )
    texts = tuple(
        _text({"choices": choice}, "choices", place, what="each of 'choices'")
        for choice in choices
    )
    if len(texts) < 2:
        raise ValueError(
            f"{place} must have at least 2 choices, got {len(texts)}; "
            "use 'prompt' and 'completion' for a free answer"
        )
    bare = [text.strip() for text in texts]
    if len(set(bare)) < len(bare):
        repeated = next(text for text in bare if bare.count(text) > 1)
        raise ValueError(
            f"{place} must have distinct choices, got {_brief(repeated)} twice"
        )
    answer = _find_answer(fields["answer"], bare, place)
    return Row(
        place,
        "choices",
        prompt=_text(fields, "prompt", place),
        completion=texts[answer],
        choices=texts,
        answer=answer,
    )


def _find_answer(answer: object, choices: Sequence[str], place: str) -> int:
    """Return the 0-based index that a letter, an index or a text means."""
    meanings: dict[str, int] = {}
    spelled = str(answer).strip()
    if isinstance(answer, int) and not isinstance(answer, bool):
        if 0 <= answer < len(choices):
            meanings["index"] = answer
    elif isinstance(answer, str):
        letters = string.ascii_uppercase[: len(choices)]
        if len(spelled) == 1 and spelled.upper() in letters:
            meanings["letter"] = letters.index(spelled.upper())
    # A number never stands for a text, but one that might is not an index either.
    if spelled in choices and (meanings or isinstance(answer, str)):
        meanings["text"] = choices.index(spelled)
    if not meanings:
        raise ValueError(
            f"{place} must have the letter, the 0-based index or the text of one of "
            f"{len(choices)} choices as 'answer', got {_brief(answer)}"
        )
    if len(set(meanings.values())) > 1:
        kind = next(iter(meanings))
        remedy = "0-based index" if kind == "letter" else "letter"
        raise ValueError(
            f"{place} must have an unambiguous 'answer', got {_brief(answer)}, the "
            f"{kind} of {_brief(choices[meanings[kind]])} and the text of another "
            f"choice; write the {remedy}"
        )
    return next(iter(meanings.values()))


def _parse_messages(messages: object, place: str) -> Row:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(
            f"{place} must have a list as 'messages', got {_brief(messages)}"
        )
    turns = tuple(
        _parse_turn(message, f"{place} message {number}")
        for number, message in enumerate(messages, start=1)
    )
    if not turns or turns[-1][0] != "assistant":
        got = f"role {_brief(turns[-1][0])}" if turns else "none"
        raise ValueError(
            f"{place} must have an assistant's turn as its last message, the target, "
            f"got {got}"
        )
    if len(turns) < 2:
        raise ValueError(
            f"{place} must have a message before the target, got the target alone; "
            "use 'text' for text without a prompt"
        )
    return Row(place, "messages", completion=turns[-1][1], turns=turns[:-1])


def _parse_turn(message: object, place: str) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise ValueError(
            f"{place} must be an object with 'role' and 'content', "
            f"got {_brief(message)}"
        )
    fields = {str(key): value for key, value in message.items() if value is not None}
    if fields.keys() != {"role", "content"}:
        raise ValueError(
            f"{place} must have 'role' and 'content' alone, got keys {_keys(fields)}"
        )
    role = _text(fields, "role", place)
    blank = role not in ("user", "assistant")
    return role, _text(fields, "content", place, may_be_blank=blank)


def _text(
    fields: Mapping[str, object],
    key: str,
    place: str,
    *,
    what: str = "",
    may_be_blank: bool = False,
) -> str:
    value = fields[key]
    what = what or f"'{key}'"
    if not isinstance(value, str):
        raise ValueError(f"{place} must have text as {what}, got {_brief(value)}")
    if not may_be_blank and not value.strip():
        raise ValueError(f"{place} must have text as {what}, got a blank one")
    # As '\ud83d' alone; no tokenizer takes one.
    if has_surrogates(value):
        raise ValueError(f"{place} must have Unicode text as {what}, got {value!a:.60}")
    return value


def _name(keys: Iterable[str]) -> str:
    quoted = [f"'{key}'" for key in keys]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[1:] else quoted)


def _keys(fields: Mapping[str, object]) -> str:
    return _brief(sorted(fields))


def _brief(value: object) -> str:
    return reprlib.repr(value)
