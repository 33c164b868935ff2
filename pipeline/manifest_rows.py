"""Rows of a manifest or questions file, whatever its format: told by the suffix, each with its place for messages."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from engine.errors import InputError
from pipeline.storage import Storage, local_path, split_s3

MAX_MANIFEST_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Row:
    """One row: its values, and where it stands ("row 3", "line 3")."""

    where: str
    values: dict[str, Any]


@dataclass(frozen=True)
class RowProblem:
    """A row that can't even be parsed."""

    where: str
    problem: str


def read_rows(uri: str, storage: Storage, *, questions_only: bool = False) -> Iterator[Row | RowProblem]:
    """Read a file's rows in order.

    Args:
        questions_only: a questions file, which may also be JSON (a list) or text (one question a line).

    Raises:
        InputError: an unknown format, or a file that isn't what its suffix says.
    """
    suffix = PurePosixPath(uri).suffix.lower()
    needed = "question" if questions_only else "uri"
    readers: dict[str, Callable[[str, bytes], Iterator[Row | RowProblem]]] = {
        ".parquet": partial(_parquet, needed=needed),
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".csv": partial(_csv, needed=needed),
    }
    if questions_only:
        readers |= {".json": _json_list, ".txt": _text}
    if suffix not in readers:
        raise InputError(f"{uri}: the suffix {suffix!r} isn't one of {', '.join(readers)}; convert or rename the file")
    if split_s3(uri) is None and os.path.exists(path := local_path(uri)) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise InputError(f"{uri}: isn't a regular file; write it to one first")
    size = storage.size(uri)
    if size > MAX_MANIFEST_BYTES:
        raise InputError(f"{uri}: its {size} bytes exceed {MAX_MANIFEST_BYTES}; split it")
    return readers[suffix](uri, storage.read_bytes(uri))


def _check_header(uri: str, header: Sequence[str], needed: str) -> None:
    """Refuse a table without the column that every row must have."""
    if needed in header:
        return
    found = ", ".join(map(repr, header))[:200] or "none"
    hint = "; cells are separated by commas, not by semicolons or tabs" if len(header) == 1 and (";" in found or "\\t" in found) else ""
    raise InputError(f"{uri}: has no column {needed!r}; its columns are {found}{hint}")


def _parquet(uri: str, data: bytes, needed: str) -> Iterator[Row | RowProblem]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{uri}: not a Parquet file: {str(error).splitlines()[0]}") from None
    _check_header(uri, table.column_names, needed)
    number = 0
    for batch in table.to_batches(max_chunksize=4096):
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:
            yield RowProblem(f"rows {number + 1} to {number + batch.num_rows}", "a text isn't valid UTF-8")
            rows = []
        for values in rows:
            number += 1
            yield Row(f"row {number}", {k: v for k, v in values.items() if v is not None})


def _json_lines(uri: str, data: bytes) -> Iterator[Row | RowProblem]:
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            values = json.loads(line.decode(), object_pairs_hook=_unique_keys)
        except UnicodeDecodeError:
            yield RowProblem(where, "not valid UTF-8")
        except (ValueError, RecursionError) as error:
            yield RowProblem(where, f'not valid JSON: {error}; each line is an object such as {{"question": "What is shown?"}}')
        else:
            yield Row(where, values) if isinstance(values, dict) else RowProblem(where, "must be a JSON object")


def _csv(uri: str, data: bytes, needed: str) -> Iterator[Row | RowProblem]:
    csv.field_size_limit(MAX_MANIFEST_BYTES)
    try:
        reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        header = reader.fieldnames or []
        doubled = {name for name in header if header.count(name) > 1}
        if doubled:
            raise InputError(f"{uri}: the column {doubled.pop()!r} is given twice")
        if header:
            _check_header(uri, header, needed)
        for number, cells in enumerate(reader, 1):
            where = f"row {number}"
            if None in cells or None in cells.values():
                yield RowProblem(where, f"has more or fewer cells than the {len(header)} of the header")
                continue
            values: dict[str, Any] = {name: cell for name, cell in cells.items() if cell != ""}
            try:
                for name in ("questions", "options"):
                    if name in values:
                        values[name] = json.loads(values[name], object_pairs_hook=_unique_keys)
            except (ValueError, RecursionError) as error:
                yield RowProblem(where, f'{name} must be JSON, e.g. ["a red car", "a blue car"]: {error}')
                continue
            yield Row(where, values)
    except UnicodeDecodeError as error:
        raise InputError(f"{uri}: not valid UTF-8 at byte {error.start}; save it as UTF-8") from None
    except csv.Error as error:
        yield RowProblem(f"line {reader.line_num}", f"not valid CSV: {error}")


def _json_list(uri: str, data: bytes) -> Iterator[Row | RowProblem]:
    try:
        content = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{uri}: not valid JSON: {error}") from None
    if not isinstance(content, list):
        raise InputError(
            f'{uri}: must be a list of questions such as ["What is shown?", {{"question": "Is it red?", "options": ["yes", "no"]}}]'
        )
    for number, question in enumerate(content, 1):
        values = {"question": question} if isinstance(question, str) else question
        yield Row(f"entry {number}", values) if isinstance(values, dict) else RowProblem(f"entry {number}", "must be a text or an object")


def _text(uri: str, data: bytes) -> Iterator[Row | RowProblem]:
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{uri}: not valid UTF-8 at byte {error.start}; save it as UTF-8") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield Row(f"line {number}", {"question": line.removesuffix("\r")})


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        doubled = next(key for i, (key, _) in enumerate(pairs) if key in {k for k, _ in pairs[:i]})
        raise ValueError(f"the key {doubled!r} is given twice")
    return values
