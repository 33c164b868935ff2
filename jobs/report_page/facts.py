"""A run's tables, as the report shows them: plain values, nothing formatted."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pyarrow.dataset as pads

from engine.errors import ConfigError
from pipeline.outcome import verdict
from pipeline.schemas import TABLES
from pipeline.storage import Storage, join_uri
from pipeline.storage_errors import MissingObjectError

Row = dict[str, Any]

STEPS = ("decode_wait_s", "vision_s", "prefill_s", "evict_s", "answer_s")
"""Where an engine's time goes; prefill without eviction, which is counted by itself."""


@dataclass
class RunFacts:
    """One run.

    Attributes:
        run: run.json.
        videos: the memory table, with `answer_s` (seconds in answering) and `total_s` (all `STEPS`) added.
        failed: the quarantine table.
        answers: the answers table, at most as many rows as were asked for, with `verdict` added: right, wrong, error, or open where nobody
            said what is right.
        answers_total: rows of the answers table.
        verdicts: how many answers have each verdict, those that aren't among `answers` included.
    """

    run: Row
    videos: list[Row]
    failed: list[Row]
    answers: list[Row]
    answers_total: int
    verdicts: dict[str, int] = field(default_factory=dict)

    @property
    def step_totals(self) -> dict[str, float]:
        """Seconds of all engines together in each of `STEPS`."""
        return {step: sum(video[step] for video in self.videos) for step in STEPS}

    @property
    def accuracy(self) -> float | None:
        """Share of right answers among those that can be judged (an error can't); None when none can."""
        judged = self.verdicts.get("right", 0) + self.verdicts.get("wrong", 0)
        return self.verdicts.get("right", 0) / judged if judged else None


def read_run(output: str, storage: Storage, max_answers: int) -> RunFacts:
    """Read what a job wrote.

    Args:
        output: as `output` of the job.
        max_answers: answers to take, in the tables' order.

    Raises:
        ConfigError: that isn't the output of a job.
        StorageError: it can't be read.
    """
    try:
        run = json.loads(storage.read_bytes(join_uri(output, "run.json")))
        if not isinstance(run, dict) or not isinstance(run.get("config"), dict):
            raise ValueError("no object with the job's config")
    except MissingObjectError:
        raise ConfigError(f"run={output}: holds no run.json; give the output of a job that has ended") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"run={output}: its run.json isn't valid: {error}") from None
    rows = _table(output, "answers", storage)
    answer_s: dict[str, float] = {}
    verdicts: dict[str, int] = {}
    for row in rows:
        row["verdict"] = verdict(row)
        verdicts[row["verdict"]] = verdicts.get(row["verdict"], 0) + 1
        # A video's questions are answered together, so that the last one's time is the batch's.
        answer_s[row["video_id"]] = max(answer_s.get(row["video_id"], 0.0), row["answer_s"] or 0.0)
    videos = [_video(row, answer_s.get(row["video_id"], 0.0)) for row in _table(output, "memory", storage)]
    return RunFacts(run, videos, _table(output, "quarantine", storage), rows[:max_answers], len(rows), verdicts)


def _video(row: Row, answer_s: float) -> Row:
    steps = {step: float(row.get(step) or 0.0) for step in STEPS} | {"answer_s": answer_s}
    steps["prefill_s"] = max(0.0, steps["prefill_s"] - steps["evict_s"])
    return row | steps | {"total_s": sum(steps.values())}


def _table(output: str, name: str, storage: Storage) -> list[Row]:
    filesystem, path = storage.pyarrow_filesystem(join_uri(output, name))
    schema = TABLES[name]
    try:
        table = pads.dataset(path, filesystem=filesystem, format="parquet").to_table()
        rows: list[Row] = table.select(schema.names).cast(schema).to_pylist()
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own are ValueErrors and KeyErrors
        raise ConfigError(f"run={output}: its {name} table can't be read: {str(error).splitlines()[0]}") from None
    return rows
