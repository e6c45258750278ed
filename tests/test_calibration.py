"""Calibration data: what a row means, which tokens are its target, how it scores."""

import csv
import datetime
import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from mergekit_himerging.analysis import row_files
from mergekit_himerging.analysis.calibration import (
    Batch,
    Row,
    Sample,
    Tokenized,
    TokenSequence,
    choose_rows,
    hash_rows,
    make_batches,
    read_rows,
    score_samples,
    tokenize_rows,
)
from mergekit_himerging.analysis.rows import parse_row

PROMPT = {"prompt": "2 + 4 =", "completion": " 6"}
CHOICES = {"prompt": "Sky?", "choices": ["blue", "green", "red"], "answer": "B"}
MESSAGES = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Sky?"},
        {"role": "assistant", "content": "Blue."},
    ]
}
INSTRUCTION = {"instruction": "Translate.", "input": "sky", "output": "天空"}
TEXT = {"text": "The sky is blue."}
SHORT = {"prompt": "abc", "completion": "yz"}
PLACE = "calib.jsonl line 7"

ROWS = {
    "completion": (PROMPT, Row(PLACE, "completion", " 6", prompt="2 + 4 =")),
    "choices": (
        CHOICES,
        Row(PLACE, "choices", "green", "Sky?", "", ("blue", "green", "red"), 1),
    ),
    "messages": (
        MESSAGES,
        Row(
            PLACE,
            "messages",
            "Blue.",
            turns=(("system", "Be brief."), ("user", "Sky?")),
        ),
    ),
    "instruction": (
        INSTRUCTION,
        Row(PLACE, "instruction", "天空", prompt="Translate.", context="sky"),
    ),
    "instruction without input": (
        {"instruction": "Sing.", "output": "La"},
        Row(PLACE, "instruction", "La", prompt="Sing."),
    ),
    "instruction with a blank input": (
        {"instruction": "Sing.", "input": "", "output": "La"},
        Row(PLACE, "instruction", "La", prompt="Sing."),
    ),
    "text": (TEXT, Row(PLACE, "text", "The sky is blue.")),
    "keys of no meaning": (
        {**TEXT, "id": 7, "y": [None]},
        Row(PLACE, "text", "The sky is blue."),
    ),
    "null is absent": (
        {**TEXT, "prompt": None, "choices": None},
        Row(PLACE, "text", "The sky is blue."),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_shape_is_told_by_keys(name: str) -> None:
    record, row = ROWS[name]
    assert parse_row(record, PLACE) == row


@pytest.mark.parametrize(
    ("choices", "answer", "index"),
    [
        (["blue", "green", "red"], "C", 2),
        (["blue", "green", "red"], "c", 2),
        (["blue", "green", "red"], 0, 0),
        (["blue", "green", "red"], "green", 1),
        (["blue", "green ", "red"], "green", 1),
        (["A", "B"], "B", 1),  # letter and text agree
        (["yes", "I"], "I", 1),  # no ninth choice
        (["0", "1"], 1, 1),
        (["10", "11"], "11", 1),
    ],
)
def test_answer_is_letter_index_or_text(
    choices: list[str], answer: object, index: int
) -> None:
    row = parse_row({"prompt": "?", "choices": choices, "answer": answer}, PLACE)
    assert (row.answer, row.completion) == (index, choices[index])


def with_messages(*messages: object) -> dict[str, object]:
    return {"messages": list(messages)}


USER = {"role": "user", "content": "Sky?"}
ASSISTANT = {"role": "assistant", "content": "Blue."}
BAD_ROWS: dict[str, tuple[object, str]] = {
    "no object": ([1], "must be an object of keys and values, got [1]"),
    "no shape": (
        {"text_a": "x"},
        "must have 'prompt' and 'completion', or 'prompt', 'choices' and 'answer', or "
        "'messages', or 'instruction' and 'output', or 'text', got keys ['text_a']",
    ),
    "half a shape": ({"prompt": "x", "y": 1}, "got keys ['prompt', 'y']"),
    "null in a shape": ({"prompt": "x", "completion": None}, "got keys ['prompt']"),
    "two shapes": (
        {**PROMPT, **TEXT},
        "must have the keys of one shape, got 'prompt' and 'completion' with 'text' "
        "(keys ['completion', 'prompt', 'text']); remove or rename",
    ),
    "a shape and a half": ({**INSTRUCTION, "answer": "A"}, "with 'answer'"),
    "number as text": (
        {**PROMPT, "completion": 6},
        "must have text as 'completion', got 6",
    ),
    "blank prompt": (
        {**PROMPT, "prompt": " \n"},
        "must have text as 'prompt', got a blank one",
    ),
    "blank completion": ({**PROMPT, "completion": ""}, "'completion', got a blank one"),
    "blank text": ({"text": "\u3000"}, "'text', got a blank one"),
    "blank output": ({**INSTRUCTION, "output": ""}, "'output', got a blank one"),
    "half a surrogate pair": (
        {"text": "ab\ud83d"},
        r"must have Unicode text as 'text', got 'ab\ud83d'",
    ),
    "choices as text": (
        {**CHOICES, "choices": "blue;red"},
        "must have a list as 'choices', got 'blue;red'; a CSV file cannot hold one",
    ),
    "no choice": (
        {**CHOICES, "choices": []},
        "must have at least 2 choices, got 0; use 'prompt' and 'completion'",
    ),
    "one choice": ({**CHOICES, "choices": ["blue"]}, "at least 2 choices, got 1"),
    "the same choice twice": (
        {**CHOICES, "choices": ["red", "blue", "red "]},
        "must have distinct choices, got 'red' twice",
    ),
    "number as choice": (
        {**CHOICES, "choices": ["1", 2]},
        "must have text as each of 'choices', got 2",
    ),
    "blank choice": ({**CHOICES, "choices": ["1", ""]}, "'choices', got a blank one"),
    "answer beyond the choices": (
        {**CHOICES, "answer": "D"},
        "must have the letter, the 0-based index or the text of one of 3 choices as "
        "'answer', got 'D'",
    ),
    "index beyond the choices": ({**CHOICES, "answer": 3}, "'answer', got 3"),
    "negative index": ({**CHOICES, "answer": -1}, "'answer', got -1"),
    "truth as answer": ({**CHOICES, "answer": True}, "'answer', got True"),
    "index as text": ({**CHOICES, "answer": "1"}, "'answer', got '1'"),
    "number that is a text, no index": (
        {**CHOICES, "choices": ["8", "9"], "answer": 9},
        "'answer', got 9",
    ),
    "letter of one, text of another": (
        {**CHOICES, "choices": ["B", "A"], "answer": "A"},
        "must have an unambiguous 'answer', got 'A', the letter of 'B' and the text of "
        "another choice; write the 0-based index",
    ),
    "index of one, text of another": (
        {**CHOICES, "choices": ["1", "2"], "answer": 1},
        "got 1, the index of '2' and the text of another choice; write the letter",
    ),
    "messages as text": (
        {"messages": "hi"},
        "must have a list as 'messages', got 'hi'",
    ),
    "no message": (
        with_messages(),
        "assistant's turn as its last message, the target, ",
    ),
    "user speaks last": (with_messages(ASSISTANT, USER), "got role 'user'"),
    "target alone": (
        with_messages(ASSISTANT),
        "must have a message before the target, got the target alone; use 'text'",
    ),
    "message without content": (
        with_messages({"role": "user"}, ASSISTANT),
        "message 1 must have 'role' and 'content' alone, got keys ['role']",
    ),
    "message with more": (
        with_messages(USER, {**ASSISTANT, "tool_calls": []}),
        "message 2 must have 'role' and 'content' alone, got keys ['content', 'role', "
        "'tool_calls']",
    ),
    "message as text": (with_messages("hi", ASSISTANT), "message 1 must be an object"),
    "cut as text": (
        {**with_messages(USER, ASSISTANT), "cut": "true"},
        "'cut' must be true or false, got 'true'",
    ),
    "content in parts": (
        with_messages({"role": "user", "content": ["hi"]}, ASSISTANT),
        "message 1 must have text as 'content', got ['hi']",
    ),
    "blank user": (
        with_messages({"role": "user", "content": ""}, ASSISTANT),
        "message 1 must have text as 'content', got a blank one",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_refused_with_its_place(name: str) -> None:
    record, message = BAD_ROWS[name]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_row(record, PLACE)
    assert str(error.value).startswith(PLACE)


# Files


def write(folder: Path, name: str, content: str | bytes) -> tuple[Row, ...]:
    """Write a file and read its rows."""
    data = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(data)
    return read_rows(name, [folder])


def lines(*records: object) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_jsonl_has_a_row_a_line(tmp_path: Path, bom: bytes, newline: str) -> None:
    text = lines(PROMPT) + "\n \t\n" + lines(INSTRUCTION).rstrip("\n")
    rows = write(tmp_path, "a.jsonl", bom + text.replace("\n", newline).encode())
    assert rows == (
        parse_row(PROMPT, "a.jsonl line 1"),
        parse_row(INSTRUCTION, "a.jsonl line 4"),
    )


def test_line_separators_of_unicode_are_text(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three\x0bfour"
    (row,) = write(tmp_path, "a.jsonl", lines({"text": text}))
    assert row.completion == text


def test_json_places_are_the_lines_that_rows_begin_on(tmp_path: Path) -> None:
    text = f"\n[{json.dumps(PROMPT, indent=1)}\n,\n\n {json.dumps(TEXT)}]\n\n"
    rows = write(tmp_path, "a.json", text)
    assert rows == (
        parse_row(PROMPT, "a.json line 2"),
        parse_row(TEXT, "a.json line 8"),
    )
    assert text.splitlines()[7].startswith(' {"text"')


@settings(max_examples=25, deadline=None)
@given(
    records=st.lists(
        st.fixed_dictionaries(
            {"text": st.text('x",]}\\\n\u2028天😀', min_size=1).filter(str.strip)},
            optional={"extra": st.lists(st.none() | st.lists(st.integers()))},
        ),
        min_size=1,
        max_size=4,
    ),
    indent=st.none() | st.integers(0, 2),
)
def test_json_reads_as_the_standard_library_does(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[dict[str, str]],
    indent: int | None,
) -> None:
    text = json.dumps(records, indent=indent, ensure_ascii=False)
    rows = write(tmp_path_factory.mktemp("json"), "a.json", text)
    assert [row.completion for row in rows] == [r["text"] for r in json.loads(text)]


def test_csv_cells_stay_text(tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "prompt", "completion"])
        writer.writerow([1, 'When, "then"?\nSay', "2020-01-01"])
        writer.writerow([2, "2 + 4 =", "6"])
    rows = read_rows("a.csv", [tmp_path])
    assert [(row.prompt, row.completion, row.place) for row in rows] == [
        ('When, "then"?\nSay', "2020-01-01", "a.csv line 2"),
        ("2 + 4 =", "6", "a.csv line 4"),
    ]


def test_parquet_rows_read_as_the_same_records(tmp_path: Path) -> None:
    records = [CHOICES, MESSAGES, INSTRUCTION]
    table = pyarrow.Table.from_pylist(
        [
            {**dict.fromkeys({**CHOICES, **MESSAGES, **INSTRUCTION}), **r}
            for r in records
        ]
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read_rows("a.parquet", [tmp_path]) == tuple(
        parse_row(record, f"a.parquet row {number}")
        for number, record in enumerate(records, start=1)
    )


def test_parquet_dates_are_no_text(tmp_path: Path) -> None:
    table = pyarrow.table(
        {"prompt": ["When?"], "completion": [datetime.date(2020, 1, 1)]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet row 1 must have text as 'compl"):
        read_rows("a.parquet", [tmp_path])


HEAD = lines(TEXT)
BAD_FILES: dict[str, tuple[str, str | bytes, str]] = {
    "empty": ("a.jsonl", "\n\n", "a.jsonl must have at least one row, got none"),
    "empty json": ("a.json", "", "a.json must have at least one row, got none"),
    "empty list": ("a.json", "[ ]", "a.json must have at least one row, got none"),
    "header alone": ("a.csv", "text\n", "a.csv must have at least one row, got none"),
    "bad row": (
        "a.jsonl",
        HEAD + "\n" + lines({"prompt": 1}),
        "a.jsonl line 3 must have 'prompt' and 'completion', or",
    ),
    "latin 1": (
        "a.jsonl",
        HEAD.encode() + b'{"text": "\xe9"}\n',
        "a.jsonl line 2 must be UTF-8, got byte 0xe9 as byte 11 of the line; save",
    ),
    "utf-16": (
        "a.json",
        json.dumps([TEXT]).encode("utf-16"),
        "a.json line 1 must be UTF-8, got byte 0xff as byte 1 of the line",
    ),
    "gbk in json": (
        "a.json",
        b"[\n" + '{"text": "天"}]'.encode("gbk"),
        "a.json line 2 must be UTF-8, got byte 0xcc as byte 11 of the line",
    ),
    "gbk in csv": (
        "a.csv",
        "text\n天\n".encode("gbk"),
        "a.csv line 2 must be UTF-8, got byte 0xcc as byte 1 of the line",
    ),
    "no json": (
        "a.jsonl",
        HEAD + "{'text': 1}\n",
        "a.jsonl line 2 must be JSON: Expecting property name enclosed in double",
    ),
    "two rows a line": (
        "a.jsonl",
        lines(TEXT).strip() + lines(TEXT),
        "a.jsonl line 1 must be JSON: Extra data (character 29)",
    ),
    "no object": ("a.jsonl", "[1]\n", "a.jsonl line 1 must be an object of keys and"),
    "nan": (
        "a.jsonl",
        HEAD + '{"text": "x", "y": NaN}',
        "a.jsonl line 2 must have finite numbers, got NaN",
    ),
    "key twice": (
        "a.jsonl",
        '{"text": "x", "text": "y"}',
        "a.jsonl line 1 must have each field once, got ['text'] twice",
    ),
    "nested": (
        "a.jsonl",
        '{"text": ' + "[" * 100_000,
        "a.jsonl line 1 must not be nested so deep",
    ),
    "thousands of digits": (
        "a.jsonl",
        '{"text": "x", "y": ' + "1" * 5000 + "}",
        "a.jsonl line 1 must be JSON: Exceeds the limit",
    ),
    "infinity in json": (
        "a.json",
        '[{"text": "x"},\n{"text":\n"x", "y": -Infinity}]',
        "a.json line 2 must have finite numbers, got -Infinity",
    ),
    "key twice in json": (
        "a.json",
        '\n\n[{"y": {"a": 1, "a": 1}}]',
        "a.json line 3 must have each field once, got ['a'] twice",
    ),
    "rows a line in json": (
        "a.json",
        HEAD + HEAD,
        'a.json must be a list of rows, got \'{"text": "The sky is\'; name the file '
        ".jsonl if it has one row a line",
    ),
    "no object in json": ("a.json", '[{"text": "x"},\n 3]', "a.json line 2 must be an"),
    "open list": (
        "a.json",
        '[{"text": "x"}\n',
        "a.json line 2 must be JSON: Expecting ',' or ']' (character 1)",
    ),
    "comma at the end": (
        "a.json",
        '[{"text": "x"},\n]',
        "a.json line 2 must be JSON: Expecting value (character 1)",
    ),
    "text after the list": (
        "a.json",
        '[{"text": "x"}]\n\n  x',
        "a.json line 3 must be JSON: Extra data (character 3)",
    ),
    "cells missing": (
        "a.csv",
        "prompt,completion\na,b\na\n",
        "a.csv line 3 must have 2 cells, as the first line, got 1",
    ),
    "cells in excess": (
        "a.csv",
        "prompt,completion\n\na,b,c\n",
        "a.csv line 3 must have 2 cells, as the first line, got 3; write '\"' around",
    ),
    "column twice": (
        "a.csv",
        "text,text\na,b\n",
        "a.csv line 1 must name each column once, got ['text']",
    ),
    "open quotes": (
        "a.csv",
        'text\na\n"b\nc\n',
        "a.csv line 3 must be CSV: unexpected end of data; a .jsonl file holds any",
    ),
    "long cell": (
        "a.csv",
        "text\n" + "x" * 140_000,
        "a.csv line 2 must be CSV: field larger than field limit (131072)",
    ),
    "choices in csv": (
        "a.csv",
        "prompt,choices,answer\na,b|c,A\n",
        "a.csv line 2 must have a list as 'choices', got 'b|c'; a CSV file cannot",
    ),
    "blank cell": (
        "a.csv",
        "prompt,completion\na,\n",
        "a.csv line 2 must have text as 'completion', got a blank one",
    ),
    "no parquet": ("a.parquet", "PAR1", "a.parquet must be Parquet: "),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    file, content, message = BAD_FILES[name]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        write(tmp_path, file, content)
    assert str(error.value).startswith(file)
    assert "\n" not in str(error.value)


def test_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MAX_LINE_BYTES", len(lines(TEXT)))
    write(tmp_path, "a.jsonl", lines(TEXT, TEXT))
    too_long = lines({"text": TEXT["text"] + "."})
    with pytest.raises(ValueError, match=r"a\.jsonl line 2 must be at most 1 MiB"):
        write(tmp_path, "a.jsonl", lines(TEXT) + too_long)
    with pytest.raises(ValueError, match=r"a\.json line 1 must be a row of at most 1"):
        write(tmp_path, "a.json", f"[{lines({'text': TEXT['text'] + '..'})}   ]")
    monkeypatch.setattr(row_files, "MAX_FILE_BYTES", len(lines(TEXT)) - 1)
    with pytest.raises(ValueError, match=r"a\.jsonl must be at most 1 MiB, got 1 MiB"):
        write(tmp_path, "a.jsonl", lines(TEXT))


def test_relative_path_is_looked_for_in_order(tmp_path: Path) -> None:
    beside, working = tmp_path / "beside", tmp_path / "working"
    for folder, text in ((beside, "one"), (working, "two")):
        folder.mkdir()
        (folder / "a.jsonl").write_text(lines({"text": text}), encoding="utf-8")
    assert read_rows("a.jsonl", [beside, working])[0].completion == "one"
    assert read_rows("a.jsonl", [working, beside])[0].completion == "two"
    absolute = str(working / "a.jsonl")
    assert read_rows(absolute, [beside])[0].place == f"{absolute} line 1"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Stand in for the hub; returns the list of what is asked of it."""
    asked: list[str] = []

    def answer(content: object) -> list[str]:
        def load(name: str) -> object:
            asked.append(name)
            if isinstance(content, Exception):
                raise content
            return content

        monkeypatch.setattr(datasets, "load_dataset", load)
        return asked

    return answer


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("b.jsonl", "b.jsonl must be a file, got none (looked for '{0}/one/b.jsonl', "),
        ("b.JSON", "'{0}/b.JSON')"),
        ("org/b.csv", "org/b.csv must be a file, got none"),
        ("{0}/b.parquet", "looked for '{0}/b.parquet')"),
        ("d.jsonl", "d.jsonl must be a file, got none"),
        ("d", "d must be a file, got a folder; name a file in it"),
        ("a.txt", "a.txt must end in one of .jsonl, .json, .csv, .parquet, got '.txt'"),
        ("./b", "or the id of a hub dataset, got './b'"),
        ("{0}/b", "or the id of a hub dataset, got '{0}/b'"),
        ("a/b/c", "or the id of a hub dataset, got 'a/b/c'"),
        ("", "must be a file"),
    ],
)
def test_path_is_never_asked_of_a_hub(
    tmp_path: Path, hub: Callable[..., list[str]], source: str, message: str
) -> None:
    asked = hub(AssertionError("asked"))
    (tmp_path / "d").mkdir()
    (tmp_path / "d.jsonl").mkdir()
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    expected = re.escape(message.replace("{0}", str(tmp_path)))
    with pytest.raises(ValueError, match=expected):
        read_rows(source.replace("{0}", str(tmp_path)), [tmp_path / "one", tmp_path])
    assert asked == []


def make_split(*texts: str) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"text": text, "label": 1} for text in texts])


@pytest.mark.parametrize("split", ["train", "test"])
def test_hub_dataset_gives_train_or_its_only_split(
    tmp_path: Path, hub: Callable[..., list[str]], split: str
) -> None:
    splits = {split: make_split("one", "two")}
    if split == "train":
        splits["test"] = make_split("three")
    asked = hub(datasets.DatasetDict(splits))
    rows = read_rows("org/data", [tmp_path])
    assert [(row.completion, row.place) for row in rows] == [
        ("one", "org/data row 1"),
        ("two", "org/data row 2"),
    ]
    assert asked == ["org/data"]


def test_hub_dataset_of_other_splits_is_refused(
    tmp_path: Path, hub: Callable[..., list[str]]
) -> None:
    hub(datasets.DatasetDict({"test": make_split("a"), "dev": make_split("b")}))
    with pytest.raises(
        ValueError,
        match=re.escape("must have a split 'train' or one split alone, got ['dev', "),
    ):
        read_rows("org/data", [tmp_path])


def test_hub_failure_is_one_sentence(
    tmp_path: Path, hub: Callable[..., list[str]]
) -> None:
    hub(ConnectionError("no route\n  to host " + "x" * 1000))
    with pytest.raises(
        ValueError, match="cannot load dataset 'data': no route to "
    ) as e:
        read_rows("data", [tmp_path])
    assert len(str(e.value)) < 420


# Choice


def make_rows(*texts: str, file: str = "a.jsonl") -> tuple[Row, ...]:
    return tuple(
        parse_row({"text": text}, f"{file} line {number}")
        for number, text in enumerate(texts, start=1)
    )


@settings(max_examples=50, deadline=None)
@given(
    texts=st.lists(st.sampled_from("abcdefghij天地"), min_size=1, max_size=20),
    samples=st.integers(1, 15),
    seed=st.integers(-3, 3),
    shuffle=st.randoms(use_true_random=False),
)
def test_choice_depends_on_content_and_seed_alone(
    texts: list[str], samples: int, seed: int, shuffle: random.Random
) -> None:
    def choose(texts: Sequence[str], file: str) -> list[str]:
        rows = make_rows(*texts, file=file)
        chosen = choose_rows(rows, samples=samples, seed=seed)
        assert set(chosen) <= set(rows)
        return [row.completion for row in chosen]

    chosen = choose(texts, "a.jsonl")
    other = list(texts) + texts[:2]
    shuffle.shuffle(other)
    assert choose(other, "b.jsonl") == chosen
    assert len(chosen) == len(set(chosen)) == min(samples, len(set(texts)))
    assert (
        chosen[: samples - 1]
        == [
            row.completion
            for row in choose_rows(
                make_rows(*texts), samples=max(samples - 1, 1), seed=seed
            )
        ][: samples - 1]
    )


def test_another_seed_chooses_other_rows() -> None:
    rows = make_rows(*map(str, range(100)))
    first, second = (set(choose_rows(rows, samples=50, seed=s)) for s in (0, 1))
    assert 10 < len(first & second) < 40


def test_choice_is_the_same_under_any_hash_seed() -> None:
    code = (
        "from mergekit_himerging.analysis.rows import choose_rows, parse_row\n"
        "rows = [parse_row({'text': c}, 'x') for c in 'abcdefgh']\n"
        "print([row.completion for row in choose_rows(rows, samples=4, seed=5)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    # Pinned: a choice is part of what makes a published plan reproducible.
    texts = sorted(
        "abcdefgh",
        key=lambda c: hashlib.sha256(
            f'5 ["text", "{c}", "", "", [], 0, []]'.encode()
        ).hexdigest(),
    )
    assert outputs == {f"{texts[:4]}\n".encode()}


def test_samples_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        choose_rows(make_rows("a"), samples=0, seed=0)


def test_hash_follows_content_alone() -> None:
    one = hash_rows(make_rows("a", "b", "c"))
    assert re.fullmatch("[0-9a-f]{64}", one)
    assert hash_rows(reversed(make_rows("a", "b", "c", file="b.csv"))) == one
    assert hash_rows(make_rows("a", "b")) != one
    assert hash_rows(make_rows("a", "b", "c", "c")) != one
    contents = [
        parse_row({"prompt": "a", "completion": "bc"}, "x"),
        parse_row({"prompt": "ab", "completion": "c"}, "x"),
        parse_row({"instruction": "a", "output": "bc"}, "x"),
        parse_row({"instruction": "a", "input": "b", "output": "c"}, "x"),
        *(
            parse_row({"prompt": "a", "choices": choices, "answer": answer}, "x")
            for choices in (["b", "c"], ["c", "b"], ["b", "c", "d"])
            for answer in (0, 1)
        ),
    ]
    assert len({hash_rows([row]) for row in contents}) == len(contents)


# Tokens

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING = TEMPLATE.replace("%}<|assistant|>{%", "%}<|assistant|><think>{%")
ENGLISH = "The cat sat on the mat. Question: is the sky blue? Answer: yes, it is"
CHINESE = "今天天气很好，我们去公园吧。问题：天空是蓝色的吗？答案：是的，胸部损伤"


def make_bpe(
    *, bos: bool = False, eos: bool = False, template: str | None = None
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE; `bos` and `eos` are added around a text by default."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<pad>", *(f"<|{w}|>" for w in ("user", "assistant"))]
    specials += ["<|system|>", "<|end|>"]
    backend.train_from_iterator(
        [ENGLISH, CHINESE] * 3,
        trainers.BpeTrainer(
            vocab_size=360,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=specials,
            show_progress=False,
        ),
    )
    backend.post_processor = processors.TemplateProcessing(
        single=f"{'<s> ' * bos}$A{' </s>' * eos}",
        special_tokens=[("<s>", 0), ("</s>", 1)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=template,
    )


BPE = make_bpe()
BPE_BOS = make_bpe(bos=True)


def tokenize(
    *records: dict[str, Any],
    tokenizer: Any = BPE,
    metric: Any = "loss",
    max_length: int = 512,
    vocab_size: int = 400,
) -> Tokenized:
    rows = [parse_row(r, f"a.jsonl line {n}") for n, r in enumerate(records, start=1)]
    return tokenize_rows(
        rows, tokenizer, metric=metric, max_length=max_length, vocab_size=vocab_size
    )


def parts(sequence: TokenSequence, tokenizer: Any = BPE) -> tuple[str, str]:
    """Decode prompt and target apart."""
    return (
        tokenizer.decode(sequence.ids[: sequence.n_prompt]),
        tokenizer.decode(sequence.ids[sequence.n_prompt :]),
    )


def only(tokenized: Tokenized) -> TokenSequence:
    ((sequence,),) = (sample.options for sample in tokenized.samples)
    return sequence


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("Question: is the sky blue? Answer:", " yes"),
        ("Question: is the sky blue?\nAnswer:\n", "yes, it is"),
        ("问题：天空是蓝色的吗？\n答案：", "是的，胸部损伤"),
        ("天空", "龘靐"),  # no merges: three tokens a character
        ("天空是 ", "😀🙂"),
        ("Say '天':", "天 day"),
        ("a", "  b"),
    ],
)
@pytest.mark.parametrize("bos", [False, True])
def test_targets_decode_to_the_completion(
    prompt: str, completion: str, bos: bool
) -> None:
    tokenizer = BPE_BOS if bos else BPE
    sequence = only(
        tokenize({"prompt": prompt, "completion": completion}, tokenizer=tokenizer)
    )
    assert parts(sequence) == ("<s>" * bos + prompt, completion)
    # The tokens are those of the joined text, as a model sees it.
    assert list(sequence.ids) == tokenizer(prompt + completion)["input_ids"]


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.text("ab 天，。sk\n", min_size=1).filter(str.strip),
    completion=st.text("ab 天，。sk\n", min_size=1).filter(str.strip),
)
def test_targets_hold_the_completion_and_begin_at_its_first_token(
    prompt: str, completion: str
) -> None:
    record = {"prompt": prompt, "completion": completion}
    tokenized = tokenize(record, tokenizer=BPE_BOS)
    sequence = only(tokenized)
    # Oracle in bytes: a token belongs to the prompt while the bytes so far are in it.
    token_bytes = [
        b"" if i == 0 else bytes(BYTES[char] for char in BPE.convert_ids_to_tokens(i))
        for i in sequence.ids
    ]
    size = len(prompt.encode())
    lengths = [len(b"".join(token_bytes[:n])) for n in range(len(token_bytes) + 1)]
    assert lengths[sequence.n_prompt] <= size < lengths[sequence.n_prompt + 1]
    assert b"".join(token_bytes) == (prompt + completion).encode()
    assert tokenized.n_tokens == len(sequence.ids)
    assert tokenized.n_targets == len(sequence.ids) - sequence.n_prompt


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }


BYTES = _byte_characters()


def test_bytes_of_characters_without_a_token_stay_on_their_side() -> None:
    # As Llama 2: "▁" before a text and for spaces, bytes for what it has no token for.
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {"▁": 256, "a": 257, "▁a": 258, "<s>": 259}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 259)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    sequence = only(
        tokenize({"prompt": "a a天", "completion": "地 a"}, tokenizer=tokenizer)
    )
    prompt_ids, target_ids = [259, 258, 258, *"天".encode()], [*"地".encode(), 258]
    assert sequence == TokenSequence((*prompt_ids, *target_ids), len(prompt_ids))


def test_token_across_the_boundary_is_a_target() -> None:
    record = {"prompt": "The sky ", "completion": "blue"}
    assert parts(only(tokenize(record))) == ("The sky", " blue")


def test_end_mark_is_not_added() -> None:
    tokenizer = make_bpe(bos=True, eos=True)
    sequence = only(tokenize(PROMPT, tokenizer=tokenizer))
    assert parts(sequence) == ("<s>2 + 4 =", " 6")
    spelled = only(tokenize({**PROMPT, "completion": " 6</s>"}, tokenizer=tokenizer))
    assert parts(spelled) == ("<s>2 + 4 =", " 6</s>")


@pytest.mark.parametrize(
    ("prompt", "option", "joined"),
    [
        ("Answer:", "yes", "Answer: yes"),
        ("Answer: ", "yes", "Answer: yes"),
        ("Answer:\n", "yes", "Answer:\nyes"),
        ("Answer:", " yes", "Answer: yes"),
        ("答案：", "是的", "答案：是的"),
        ("天空", "是", "天空是"),
        ("天空。", "yes", "天空。yes"),
        ("答:", "是", "答: 是"),
        ("\uff76\uff98", "x", "\uff76\uff98 x"),  # half-width kana
    ],
)
def test_choice_is_joined_as_its_language_does(
    prompt: str, option: str, joined: str
) -> None:
    record = {"prompt": prompt, "choices": ["no", option], "answer": 1}
    sequence = only(tokenize(record))
    before, target = parts(sequence)
    assert before + target == joined
    assert target.strip() == option.strip()


def test_loss_takes_the_right_choice_and_accuracy_all() -> None:
    (sample,) = tokenize(CHOICES).samples
    assert sample.answer == 0
    assert [parts(option) for option in sample.options] == [("Sky?", " green")]
    tokenized = tokenize(CHOICES, metric="accuracy")
    (sample,) = tokenized.samples
    assert sample.answer == 1
    assert [parts(option) for option in sample.options] == [
        ("Sky?", " blue"),
        ("Sky?", " green"),
        ("Sky?", " red"),
    ]
    assert tokenized.n_tokens == sum(len(option.ids) for option in sample.options)
    assert tokenized.n_targets == sum(option.n_targets for option in sample.options)


def test_accuracy_needs_choices() -> None:
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl line 2 must have 'choices' for metric 'accuracy', got a row "
        "of shape 'text'; use metric 'loss'",
    ):
        tokenize(CHOICES, TEXT, metric="accuracy")


def test_target_of_messages_is_what_the_template_adds() -> None:
    tokenizer = make_bpe(bos=True, template=TEMPLATE)
    sequence = only(tokenize(MESSAGES, tokenizer=tokenizer))
    # No <s>: the template decides.
    assert parts(sequence) == (
        "<|system|>Be brief.<|end|>\n<|user|>Sky?<|end|>\n<|assistant|>",
        "Blue.<|end|>\n",
    )


def test_earlier_assistant_turns_are_prompt() -> None:
    tokenizer = make_bpe(template=TEMPLATE)
    record = with_messages(USER, ASSISTANT, USER, {**ASSISTANT, "content": "是"})
    before, target = parts(only(tokenize(record, tokenizer=tokenizer)))
    assert before.count("Blue.") == 1
    assert target == "是<|end|>\n"


@pytest.mark.parametrize(
    ("record", "template", "expected"),
    [
        (INSTRUCTION, None, ("Translate.\n\nsky\n\n", "天空")),
        ({"instruction": "Sing", "output": "La"}, None, ("Sing\n\n", "La")),
        (
            INSTRUCTION,
            TEMPLATE,
            ("<|user|>Translate.\n\nsky<|end|>\n<|assistant|>", "天空<|end|>\n"),
        ),
    ],
)
def test_instruction_takes_the_template_where_there_is_one(
    record: dict[str, Any], template: str | None, expected: tuple[str, str]
) -> None:
    sequence = only(tokenize(record, tokenizer=make_bpe(template=template)))
    assert parts(sequence) == expected


@pytest.mark.parametrize(
    ("record", "template", "message"),
    [
        (
            MESSAGES,
            None,
            "a.jsonl line 1 has 'messages' and must have a chat template, got a "
            "tokenizer without one",
        ),
        (
            with_messages({"role": "tool", "content": "x"}, ASSISTANT),
            TEMPLATE,
            "a.jsonl line 1 must fit the chat template: no tools",
        ),
        (
            MESSAGES,
            THINKING,
            "a.jsonl line 1 must begin with the generation prompt when the chat "
            "template renders it whole, got 'Blue.<|end|>\\n' where the prompt has "
            "'<think>'; use 'prompt' and 'completion'",
        ),
    ],
)
def test_chat_that_does_not_fit_is_refused(
    record: dict[str, Any], template: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenize(record, tokenizer=make_bpe(template=template))


def test_every_token_of_a_text_after_the_first_is_a_target() -> None:
    ids = BPE(TEXT["text"])["input_ids"]
    assert only(tokenize(TEXT)) == TokenSequence(tuple(ids), 1)
    assert only(tokenize(TEXT, tokenizer=BPE_BOS)) == TokenSequence((0, *ids), 1)


def test_target_without_tokens_is_refused() -> None:
    message = (
        r"a\.jsonl line 1 must have a target of at least one token after the first, "
        r"got none \(of 1 tokens in all\)"
    )
    with pytest.raises(ValueError, match=message):
        tokenize({"text": "a"})
    assert only(tokenize({"text": "a"}, tokenizer=BPE_BOS)).n_targets == 1
    silent = make_bpe()
    silent.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("b", "removed")
    with pytest.raises(ValueError, match="at least one token after the first"):
        tokenize({"prompt": "a", "completion": "b"}, tokenizer=silent)


def test_token_that_the_model_lacks_is_refused() -> None:
    highest = max(BPE(TEXT["text"])["input_ids"])
    token = BPE.convert_ids_to_tokens(highest)
    tokenize(TEXT, vocab_size=highest + 1)
    with pytest.raises(
        ValueError,
        match=re.escape(
            "a.jsonl line 2 must have token ids below the model's vocabulary of "
            f"{highest}, got {highest} ({token!r}); use the tokenizer"
        ),
    ):
        tokenize({"text": "xx"}, TEXT, vocab_size=highest)


@pytest.mark.parametrize("bos", [False, True])
def test_long_prompt_loses_its_beginning(bos: bool) -> None:
    tokenizer = BPE_BOS if bos else BPE
    record = {"prompt": "x" * 50 + "abc", "completion": "yz"}
    whole = only(tokenize(record, tokenizer=tokenizer))
    tokenized = tokenize(record, SHORT, tokenizer=tokenizer, max_length=7)
    assert tokenized.n_truncated == 1
    assert tokenized.n_tokens == sum(len(s.options[0].ids) for s in tokenized.samples)
    cut = tokenized.samples[0].options[0]
    assert (len(cut.ids), cut.n_prompt) == (7, 5)
    assert parts(cut) == ("<s>xabc" if bos else "xxabc", "yz")
    assert whole.ids[-2:] == cut.ids[-2:]


def test_least_prompt_is_one_token() -> None:
    record = {"prompt": "abcd", "completion": "xyz"}
    for tokenizer, first in ((BPE, "d"), (BPE_BOS, "<s>")):
        cut = only(tokenize(record, tokenizer=tokenizer, max_length=4))
        assert parts(cut) == (first, "xyz")
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl line 1 must have a target of at most 2 tokens, got 3; shorten",
    ):
        tokenize(record, max_length=3)
    with pytest.raises(ValueError, match="max_length must be at least 2, got 1"):
        tokenize(record, max_length=1)


def test_all_options_lose_the_same_of_the_prompt() -> None:
    record = {"prompt": "abcdefgh\n", "choices": ["x", "xyzxyz"], "answer": 0}
    tokenized = tokenize(record, metric="accuracy", max_length=9)
    (sample,) = tokenized.samples
    assert tokenized.n_truncated == 1
    assert [parts(option) for option in sample.options] == [
        ("gh\n", "x"),
        ("gh\n", "xyzxyz"),
    ]


def test_long_text_loses_its_end() -> None:
    tokenized = tokenize({"text": "abcdefgh"}, tokenizer=BPE_BOS, max_length=5)
    assert parts(only(tokenized)) == ("<s>", "abcd")
    assert tokenized.n_truncated == 1


class CharacterTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python, without offsets; `<s>` before a text by default."""

    def __init__(self, **options: Any) -> None:
        self._characters = ["<s>", "</s>", *"abcdefgh ", "天"]
        super().__init__(bos_token="<s>", eos_token="</s>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._characters)

    def get_vocab(self) -> dict[str, int]:
        return {char: n for n, char in enumerate(self._characters)}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._characters.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._characters[index]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [0, *token_ids_0, 1]


def test_slow_tokenizer_gets_the_parts() -> None:
    slow = CharacterTokenizer()
    assert not slow.is_fast
    sequence = only(tokenize({"prompt": "ab", "completion": " 天"}, tokenizer=slow))
    assert sequence == TokenSequence((0, 2, 3, 10, 11), 3)
    assert only(tokenize({"text": "ab"}, tokenizer=slow)) == TokenSequence((0, 2, 3), 1)


def test_records_check_themselves() -> None:
    with pytest.raises(ValueError, match=r"n_prompt must be in \[1, 2\] for 3 tokens"):
        TokenSequence((1, 2, 3), 3)
    with pytest.raises(ValueError, match="n_prompt must be"):
        TokenSequence((1, 2, 3), 0)
    with pytest.raises(ValueError, match="index into 1 options, got 1"):
        Sample((TokenSequence((1, 2), 1),), 1)


# Batches and scores


@st.composite
def sample_lists(draw: st.DrawFn, *, n_options: int = 4) -> list[Sample]:
    def sequence() -> TokenSequence:
        ids = draw(st.lists(st.integers(1, 50), min_size=2, max_size=9))
        return TokenSequence(tuple(ids), draw(st.integers(1, len(ids) - 1)))

    samples = []
    for _ in range(draw(st.integers(0, 6))):
        options = tuple(sequence() for _ in range(draw(st.integers(1, n_options))))
        samples.append(Sample(options, draw(st.integers(0, len(options) - 1))))
    return samples


@settings(max_examples=40, deadline=None)
@given(samples=sample_lists(), max_tokens=st.integers(1, 40))
def test_batches_hold_each_target_once(samples: list[Sample], max_tokens: int) -> None:
    batches = make_batches(samples, max_tokens=max_tokens, pad_id=0)
    found = []
    for batch in batches:
        for row, position, token, sequence in zip(
            batch.target_rows.tolist(),
            batch.target_positions.tolist(),
            batch.target_ids.tolist(),
            batch.target_sequence.tolist(),
            strict=True,
        ):
            ids = batch.input_ids[row][batch.attention_mask[row] == 1].tolist()
            assert ids[position + 1] == token
            found.append((sequence, tuple(ids), position + 1))
    sequences = [option for sample in samples for option in sample.options]
    assert sorted(found) == [
        (number, sequence.ids, position)
        for number, sequence in enumerate(sequences)
        for position in range(sequence.n_prompt, len(sequence.ids))
    ]
    assert sum(b.n_targets for b in batches) == sum(s.n_targets for s in sequences)
    assert sum(b.n_tokens for b in batches) == sum(len(s.ids) for s in sequences)


@settings(max_examples=40, deadline=None)
@given(samples=sample_lists(), max_tokens=st.integers(1, 40))
def test_batches_are_bounded_padded_right_and_sorted(
    samples: list[Sample], max_tokens: int
) -> None:
    batches = make_batches(samples, max_tokens=max_tokens, pad_id=77)
    lengths = []
    for batch in batches:
        assert batch.input_ids.numel() <= max_tokens or len(batch.input_ids) == 1
        assert batch.input_ids.shape == batch.attention_mask.shape
        for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
            length = int(mask.sum())
            assert mask.tolist() == [1] * length + [0] * (len(mask) - length)
            assert row[length:].tolist() == [77] * (len(mask) - length)
            lengths.append(length)
        assert batch.attention_mask[0].all()  # no column of padding alone
        tensors = [
            getattr(batch, name) for name in Batch.__slots__ if name != "teacher"
        ]
        assert {tensor.dtype for tensor in tensors} == {torch.int64}
    assert lengths == sorted(lengths, reverse=True)


def test_equal_lengths_stay_in_order() -> None:
    sequences = [TokenSequence((n, n), 1) for n in range(10)]
    samples = [Sample((sequence,), 0) for sequence in sequences]
    batches = make_batches(samples, max_tokens=8, pad_id=0)
    assert [batch.input_ids[:, 0].tolist() for batch in batches] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


def draw_values(batches: Sequence[Batch], seed: int, *, n_values: int) -> torch.Tensor:
    """Draw log-probabilities from few values, so that ties come up."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(batch.n_targets for batch in batches)
    return -torch.randint(1, n_values, (total,), generator=generator).float() / 4


@settings(max_examples=75, deadline=None)
@given(
    samples=sample_lists(),
    max_tokens=st.integers(1, 40),
    seed=st.integers(0, 1000),
    n_values=st.sampled_from([2, 3, 1000]),
)
def test_scores_equal_plain_python(
    samples: list[Sample], max_tokens: int, seed: int, n_values: int
) -> None:
    batches = make_batches(samples, max_tokens=max_tokens, pad_id=0)
    values = draw_values(batches, seed, n_values=n_values)
    by_sequence: dict[int, list[float]] = {}
    given_values = iter(values.tolist())
    for batch in batches:
        for sequence in batch.target_sequence.tolist():
            by_sequence.setdefault(sequence, []).append(next(given_values))
    losses, accuracies, number = [], [], 0
    for sample in samples:
        means = []
        for _ in sample.options:
            means.append(math.fsum(by_sequence[number]) / len(by_sequence[number]))
            number += 1
        right = means.pop(sample.answer)
        losses.append(right)
        accuracies.append(float(all(right > mean for mean in means)))
    before = values.clone()
    scores = score_samples(samples, values, batches, metric="loss")
    assert scores.dtype == torch.float64
    assert scores.tolist() == pytest.approx(losses, rel=1e-12)
    scores = score_samples(samples, values, batches, metric="accuracy")
    assert scores.dtype == torch.float64
    assert scores.tolist() == accuracies
    assert torch.equal(values, before)


def score_two_options(values: list[float]) -> float:
    options = (TokenSequence((1, 2), 1), TokenSequence((1, 2), 1))
    samples = [Sample(options, 1)]
    batches = make_batches(samples, max_tokens=100, pad_id=0)
    scores = score_samples(samples, torch.tensor(values), batches, metric="accuracy")
    return scores.item()


@pytest.mark.parametrize(
    ("values", "score"),
    [
        ([-2.0, -1.0], 1.0),
        ([-1.0, -2.0], 0.0),
        ([-1.0, -1.0], 0.0),
        ([-math.inf, -1.0], 1.0),
        ([-math.inf, -math.inf], 0.0),
    ],
)
def test_right_option_must_win_alone(values: list[float], score: float) -> None:
    assert score_two_options(values) == score


def test_scores_of_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got NaN for 1 of 2 targets"):
        score_two_options([-1.0, math.nan])
    with pytest.raises(ValueError, match=r"each of 2 targets, got shape \[3\]"):
        score_two_options([-1.0, -1.0, -1.0])
    samples = [Sample((TokenSequence((1, 2, 3), n),), 0) for n in (1, 2)]
    batches = make_batches(samples, max_tokens=100, pad_id=0)
    with pytest.raises(
        ValueError, match="must hold the 2 targets of the samples, got 3"
    ):
        score_samples(samples[1:] * 2, torch.zeros(3), batches, metric="loss")


def test_file_becomes_scores(tmp_path: Path) -> None:
    records = [
        {"prompt": "Sky?", "choices": ["blue", "a long green"], "answer": "A"},
        {"prompt": "天空？", "choices": ["是", "蓝色的"], "answer": "蓝色的"},
    ]
    rows = choose_rows(write(tmp_path, "a.jsonl", lines(*records)), samples=2, seed=0)
    tokenized = tokenize_rows(
        rows, BPE, metric="accuracy", max_length=64, vocab_size=400
    )
    batches = make_batches(tokenized.samples, max_tokens=16, pad_id=0)
    # A model that gives each token of the Chinese right option 1, all others 1/e.
    right = set(BPE("蓝色的")["input_ids"])
    values = torch.cat(
        [
            torch.tensor(
                [0.0 if i in right else -1.0 for i in batch.target_ids.tolist()]
            )
            for batch in batches
        ]
    )
    scores = score_samples(tokenized.samples, values, batches, metric="accuracy")
    by_place = dict(zip((row.place for row in rows), scores.tolist(), strict=True))
    assert by_place == {"a.jsonl line 1": 0.0, "a.jsonl line 2": 1.0}
