"""From a video's result to rows of the tables, and from rows to Parquet files."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.manifest import VideoTask
from pipeline.schemas import ANSWERS, MEMORY, QUARANTINE, TABLES, TRACE
from pipeline.storage import Storage, join_uri

if TYPE_CHECKING:
    from pipeline.results import VideoResult

ROWS_PER_GROUP = 50_000
BYTES_PER_GROUP = 64 * 2**20
BYTES_PER_FILE = 128 * 2**20
_ROWS_CONVERTED = 1000
NEVER_RUN = "not watched: the job ended before this video's turn; run again with the same output to go on"


def check_rows(table: str, rows: list[dict[str, Any]]) -> None:
    """Refuse rows that the table can't hold, while the one who made them can still be told.

    Raises:
        ValueError: an unknown column, or a value of another type.
    """
    schema = TABLES[table]
    unknown = {key for row in rows for key in row} - set(schema.names)
    if unknown:
        raise ValueError(f"the table {table} has no column {min(unknown)}")
    try:
        pa.Table.from_pylist(rows, schema=schema)
    except (pa.ArrowException, TypeError) as error:
        raise ValueError(f"a row doesn't fit the table {table}: {error}") from None


def table_rows(task: VideoTask, result: VideoResult, settings: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of one video for every table; what the result leaves out comes from the task and the run's settings."""
    common = {**settings, "video_id": task.video_id, "uri": task.uri, "error": result.error}
    given = {row.get("question_id"): row for row in result.answers}
    answers, extra = [], _extra(task.extra)
    for question in task.questions:
        row = dict(given.get(question.question_id, {}))
        if result.error is not None:
            row["error"] = row.get("error") or result.error
        elif row.get("answer") is None:
            row["error"] = row.get("error") or "the engine returned no answer"
        if row.get("error"):
            row |= {"answer": None, "choice": None, "choice_probabilities": [], "finish_reason": "error"}
        asked: dict[str, Any] = {"question_id": question.question_id, "question": question.question, "options": list(question.options)}
        asked |= {"expected": question.expected, "extra": _extra(task.extra | question.extra) if question.extra else extra}
        answers.append(_row(ANSWERS, common | row | asked))
    warnings = list(dict.fromkeys([*(result.memory.get("warnings") or []), *result.warnings]))
    memory = _row(MEMORY, result.memory | common | {"warnings": warnings, "extra": extra})
    trace = [_row(TRACE, common | {"block": number} | block) for number, block in enumerate(result.trace)]
    set_aside = memory | {"questions": len(answers), "stage": result.stage, "last_error": result.last_error or result.error}
    return {
        "answers": answers,
        "memory": [memory],
        "trace": trace,
        "quarantine": [] if result.error in (None, NEVER_RUN) else [_row(QUARANTINE, set_aside)],
    }


def _row(schema: pa.Schema, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _storable(values.get(name)) for name in schema.names}


def _storable(value: Any) -> Any:
    """Texts as Parquet can hold them: a broken character in an error message mustn't cost the table."""
    if isinstance(value, list):
        return [_storable(v) for v in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) and not value.isascii() else value


def _extra(columns: Mapping[str, Any]) -> str | None:
    return json.dumps(columns, ensure_ascii=False, default=str) if columns else None


class TableWriter:
    """Writes rows to Parquet files of sane size, in the order they come; at least one file, so that an empty table opens too."""

    def __init__(self, schema: pa.Schema, folder: str, run_id: str, storage: Storage) -> None:
        self.schema, self.folder, self.run_id, self.storage = schema, folder, run_id, storage
        self.uris: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._tables: list[pa.Table] = []
        self._buffer = io.BytesIO()
        self._writer: pq.ParquetWriter | None = None

    def add(self, rows: list[dict[str, Any]]) -> None:
        self._rows += rows
        if len(self._rows) < _ROWS_CONVERTED:
            return
        self._convert()
        if sum(t.num_rows for t in self._tables) >= ROWS_PER_GROUP or sum(t.nbytes for t in self._tables) >= BYTES_PER_GROUP:
            self._write_group()
        if self._writer is not None and self._buffer.tell() >= BYTES_PER_FILE:
            self._finish_file()

    def close(self) -> list[str]:
        """Write what is left.

        Returns:
            The addresses of all files.
        """
        self._convert()
        if self._tables or not self.uris:
            self._write_group()
        if self._writer is not None:
            self._finish_file()
        return self.uris

    def _convert(self) -> None:
        if self._rows:
            self._tables.append(pa.Table.from_pylist(self._rows, schema=self.schema))
            self._rows = []

    def _write_group(self) -> None:
        if self._writer is None:
            self._buffer = io.BytesIO()
            self._writer = pq.ParquetWriter(self._buffer, self.schema)
        self._writer.write_table(pa.concat_tables(self._tables) if self._tables else self.schema.empty_table())
        self._tables = []

    def _finish_file(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        uri = join_uri(self.folder, f"part-{len(self.uris):05d}-{self.run_id}.parquet")
        self.storage.write_bytes(uri, self._buffer.getvalue())
        self.uris.append(uri)
