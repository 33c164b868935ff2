"""A manifest's columns: those that are read, and the further ones, which go into the tables' `extra` as JSON."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

QUESTION_COLUMNS = ("question_id", "question", "options", "expected")
COLUMNS = ("video_id", "uri", "questions", *QUESTION_COLUMNS)
MAX_DEPTH = 64
MAX_EXTRA_CHARS = 1_000_000
_COLUMNS_NOTED = 1000
_ALSO_CALLED = {
    "answer": "expected",
    "correct": "expected",
    "label": "expected",
    "text": "question",
    "prompt": "question",
    "choices": "options",
    "candidates": "options",
    "id": "question_id",
}


def checked_columns(row: Mapping[str, Any], extras: dict[str, bool]) -> dict[str, Any]:
    """A row whose further columns are as JSON can hold them; notes in `extras` their names, and which of them had to be changed.

    Raises:
        ValueError: a column is nested too deep, or the further ones are too large.
    """
    values: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for name, value in row.items():
        try:
            plain, changed = _json_value(value)
        except RecursionError:
            raise ValueError(f"column {name!s:.80} is nested deeper than {MAX_DEPTH}; flatten it") from None
        values[name] = value if name in COLUMNS else plain
        if name not in COLUMNS:
            sizes[name] = len(name) + len(json.dumps(plain, ensure_ascii=False))
            extras[name] = extras.get(name, False) or changed
    if sum(sizes.values()) > MAX_EXTRA_CHARS:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"further columns of {sum(sizes.values())} characters exceed {MAX_EXTRA_CHARS}; leave out the largest, {largest:.80}"
        )
    return values


def unknown_fields(question: Mapping[str, Any]) -> list[str]:
    """A line for each field of a question that isn't one, with what may be meant."""
    lines = []
    for name in question:
        if name not in QUESTION_COLUMNS:
            near = _ALSO_CALLED.get(str(name).lower()) or next(iter(difflib.get_close_matches(str(name)[:80], QUESTION_COLUMNS, n=1)), "")
            hint = f"did you mean {near}?" if near else f"the fields are {', '.join(QUESTION_COLUMNS)}"
            lines.append(f"{name!s:.80} is not a field; {hint}")
    return lines


def _json_value(value: Any, depth: int = 0) -> tuple[Any, bool]:
    """A value as JSON can hold it, and whether a number in it had to become null.

    Raises:
        RecursionError: lists and objects deeper than MAX_DEPTH.
    """
    if depth >= MAX_DEPTH and isinstance(value, Mapping | list | tuple):
        raise RecursionError
    if isinstance(value, Mapping):
        inside = {str(key): _json_value(v, depth + 1) for key, v in value.items()}
        return {key: plain for key, (plain, _) in inside.items()}, any(changed for _, changed in inside.values())
    if isinstance(value, list | tuple):
        items = [_json_value(v, depth + 1) for v in value]
        return [plain for plain, _ in items], any(changed for _, changed in items)
    if isinstance(value, float) and not math.isfinite(value):
        return None, True
    return (value if isinstance(value, str | int | float | None) else str(value)), False


def column_notes(extras: Mapping[str, bool]) -> Iterator[str]:
    """What a person should know about the further columns, as `checked_columns` has noted them."""
    for name, changed in list(extras.items())[:_COLUMNS_NOTED]:
        if changed:
            yield f"column {name!r:.80} holds numbers that JSON can't (NaN, infinity); they are null in `extra`"
        if near := difflib.get_close_matches(name[:80].lower(), COLUMNS, n=1, cutoff=0.85):
            yield f"column {name!r:.80} isn't one that is read and goes into `extra`; did you mean {near[0]}?"
