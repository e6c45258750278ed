"""Where calibration rows come from: a local file, read strictly, or a hub dataset.

Invariant: what looks like a path is read from this machine or refused, never asked of
a hub; every problem names the file and the line.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from mergekit_himerging.analysis.rows import Row, parse_row
from mergekit_himerging.files import STRICT_JSON

MAX_FILE_BYTES = 2**30
"""A calibration set has some hundred rows; this refuses a training corpus."""

MAX_LINE_BYTES = 16 * 2**20
"""Of one line of .jsonl, or one row of .json."""

Records = Iterator[tuple[object, str]]
"""Values as read, each with its place."""


def read_rows(
    source: str, folders: Sequence[Path], *, needs_answer: bool = True
) -> tuple[Row, ...]:
    """Read all rows of a file or hub dataset.

    Args:
        source: a path to .jsonl, .json, .csv or .parquet, or a hub dataset's id.
        folders: where a relative path is looked for, in this order.
        needs_answer: whether a prompt alone is refused.

    Returns:
        The rows in file order, at least one.

    Raises:
        ValueError: there is no such file or dataset, it cannot be read, is too large or
            empty, or a row is not understood; the message names file and line.
    """
    try:
        path = _find_file(source, folders)
    except OSError as error:  # as of a name that is too long
        raise ValueError(f"cannot read {source}: {error.strerror}") from error
    if path is None:
        records = _read_hub(source)
    else:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ValueError(
                f"{source} must be at most {_megabytes(MAX_FILE_BYTES)}, "
                f"got {_megabytes(size)}; keep some hundred rows of it"
            )
        records = _READERS[path.suffix.lower()](source, path)
    try:
        rows = tuple(
            parse_row(record, place, needs_answer=needs_answer)
            for record, place in records
        )
    except OSError as error:
        raise ValueError(f"cannot read {source}: {error.strerror or error}") from error
    if not rows:
        raise ValueError(f"{source} must have at least one row, got none")
    return rows


def _find_file(source: str, folders: Sequence[Path]) -> Path | None:
    """Return the file that ``source`` leads to, or None where it is a hub id."""
    tried = [Path(folder) / source for folder in folders]
    if Path(source).is_absolute():
        tried = [Path(source)]
    suffix = Path(source).suffix.lower()
    found = next((path for path in tried if path.is_file()), None)
    if suffix in _READERS and found is not None:
        return found
    known = ", ".join(_READERS)
    if suffix in _READERS:
        places = ", ".join(f"'{path}'" for path in tried) or "no folder"
        raise ValueError(f"{source} must be a file, got none (looked for {places})")
    if found is not None:
        raise ValueError(f"{source} must end in one of {known}, got '{suffix}'")
    # `datasets` looks into the working directory too.
    if any(path.exists() for path in (*tried, Path(source))):
        raise ValueError(
            f"{source} must be a file, got a folder; name a file in it "
            f"that ends in one of {known}"
        )
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source, re.ASCII):
        raise ValueError(
            f"calibration must be a file that ends in one of {known}, or the id of a "
            f"hub dataset, got '{source}'"
        )
    return None


def _read_jsonl(name: str, path: Path) -> Records:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = f"{name} line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{place} must be at most {_megabytes(MAX_LINE_BYTES)}, got more; "
                    "write one row a line"
                )
            text = _decode(line, name, number)
            if text.strip():
                yield _decode_json(text, place), place


def _read_json(name: str, path: Path) -> Records:
    text = _decode(path.read_bytes(), name, 1)
    if not text.strip():
        return
    start = _skip_blanks(text, 0)
    if text[start] != "[":
        raise ValueError(
            f"{name} must be a list of rows, got {text[start : start + 20]!r}; "
            "name the file .jsonl if it has one row a line"
        )
    line, counted, end = 1, 0, _skip_blanks(text, start + 1)
    if text[end : end + 1] != "]":
        while True:
            line += text.count("\n", counted, end)
            counted = end
            place = f"{name} line {line}"
            record, end = _decode_json_at(text, end, name, place)
            if end - counted > MAX_LINE_BYTES:
                raise ValueError(
                    f"{place} must be a row of at most {_megabytes(MAX_LINE_BYTES)}, "
                    f"got {_megabytes(end - counted)}"
                )
            yield record, place
            end = _skip_blanks(text, end)
            if text[end : end + 1] != ",":
                break
            end = _skip_blanks(text, end + 1)
    _expect(text[end : end + 1] == "]", "Expecting ',' or ']'", text, end, name)
    end = _skip_blanks(text, end + 1)
    _expect(end == len(text), "Extra data", text, end, name)


def _read_csv(name: str, path: Path) -> Records:
    text = _decode(path.read_bytes(), name, 1)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    while True:
        place = f"{name} line {reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(
                f"{place} must be CSV: {error}; a .jsonl file holds any text"
            ) from error
        if cells is None:
            return
        if not cells:  # a blank line
            continue
        if header is None:
            header = cells
            repeated = sorted({key for key in header if header.count(key) > 1})
            if repeated:
                raise ValueError(f"{place} must name each column once, got {repeated}")
        elif len(cells) != len(header):
            raise ValueError(
                f"{place} must have {len(header)} cells, as the first line, "
                f"got {len(cells)}; write '\"' around text with a comma or line end"
            )
        else:
            yield dict(zip(header, cells, strict=True)), place


def _read_parquet(name: str, path: Path) -> Records:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    number = n_bytes = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            # A dictionary and run lengths may stand for any amount of text.
            for batch in file.iter_batches(batch_size=16):
                n_bytes += batch.nbytes
                if n_bytes > MAX_FILE_BYTES:
                    raise ValueError(
                        f"{name} must hold at most {_megabytes(MAX_FILE_BYTES)} of "
                        "text, got more; keep some hundred rows of it"
                    )
                for record in batch.to_pylist():
                    number += 1
                    yield record, f"{name} row {number}"
    except (pyarrow.ArrowException, NotImplementedError) as error:
        raise ValueError(f"{name} must be Parquet: {_one_line(error)}") from error


def _read_hub(name: str) -> Records:
    import datasets  # type: ignore[import-untyped]

    try:
        splits = datasets.load_dataset(name)
    except Exception as error:  # of a dozen libraries: network, files, formats
        raise ValueError(
            f"cannot load dataset '{name}': {_one_line(error)}; "
            "a .jsonl file of its rows does as well"
        ) from error
    if "train" not in splits and len(splits) != 1:
        raise ValueError(
            f"dataset '{name}' must have a split 'train' or one split alone, "
            f"got {sorted(splits)}; write the rows of one into a .jsonl file"
        )
    split = splits["train"] if "train" in splits else next(iter(splits.values()))
    for number, record in enumerate(split, start=1):
        yield record, f"{name} row {number}"


_READERS: Mapping[str, Callable[[str, Path], Records]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _decode(data: bytes, name: str, first_line: int) -> str:
    """Decode UTF-8; ``first_line`` is the 1-based line that ``data`` begins with."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise ValueError(
            f"{name} line {line} must be UTF-8, got byte 0x{data[error.start]:02x} "
            f"as byte {column} of the line; save the file as UTF-8"
        ) from error
    return text.removeprefix("\ufeff") if first_line == 1 else text


def _decode_json(text: str, place: str) -> object:
    try:
        return STRICT_JSON.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place} must be JSON: {error.msg} (character {error.pos + 1})"
        ) from error
    except (ValueError, RecursionError) as error:
        _refuse(place, error)


def _decode_json_at(text: str, start: int, name: str, place: str) -> tuple[object, int]:
    try:
        return STRICT_JSON.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise _not_json(error, name) from error
    except (ValueError, RecursionError) as error:
        _refuse(place, error)


def _refuse(place: str, error: Exception) -> NoReturn:
    fact = "must not be nested so deep"
    if isinstance(error, ValueError):
        # Ours, from the decoder's hooks, or an integer of thousands of digits.
        fact = str(error) if str(error).startswith("must") else f"must be JSON: {error}"
    raise ValueError(f"{place} {fact}") from error


def _expect(holds: bool, message: str, text: str, position: int, name: str) -> None:
    if not holds:
        raise _not_json(json.JSONDecodeError(message, text, position), name)


def _not_json(error: json.JSONDecodeError, name: str) -> ValueError:
    return ValueError(
        f"{name} line {error.lineno} must be JSON: {error.msg} "
        f"(character {error.colno})"
    )


def _skip_blanks(text: str, start: int) -> int:
    match = _BLANKS.match(text, start)
    return match.end() if match else start


_BLANKS = re.compile(r"[ \t\r\n]*")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} ..."


def _megabytes(n_bytes: int) -> str:
    return f"{-(-n_bytes // 2**20)} MiB"
