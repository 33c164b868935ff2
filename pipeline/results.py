"""A job's results: one small object for each finished video, merged into tables at the end, the marker last."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError, InputError
from engine.models import checkpoint_digest
from pipeline.config import JobConfig
from pipeline.manifest import VideoTask
from pipeline.outcome import Counts, Outcome
from pipeline.provenance import source_commit, versions
from pipeline.schemas import ANSWERS, MEMORY, QUARANTINE, TABLES, TRACE, columns_table
from pipeline.storage import Storage, join_uri, local_path, split_s3
from pipeline.storage_errors import MissingObjectError, StorageError, StorageSetupError
from pipeline.tables import NEVER_RUN, TableWriter, check_rows, table_rows
from pipeline.video.config import DecodeConfig

__all__ = ["ANSWERS", "MEMORY", "QUARANTINE", "TABLES", "TRACE", "Counts", "ResultStore", "VideoResult", "columns_table", "fingerprint"]

_VIDEOS_AT_ONCE = 128
# Settings that change how fast an answer comes but not the answer: tuning them doesn't throw away finished work.
_ENGINE_SPEED = {"answer": {"batch_questions"}}
DECODE_SPEED = {"where", "prefetch_blocks", "threads", "stall_timeout_s"}


@dataclass
class VideoResult:
    """What one finished video is: plain values only, so that it travels and is stored as JSON.

    Attributes:
        video_id: the video.
        fingerprint: `fingerprint(config, task)`; names the stored object.
        answers: a dict a question with the keys of `ANSWERS`; keys left out become null. run_id, video_id, uri, question, options,
            expected and extra are filled in from the task when the tables are written.
        memory: a dict with the keys of `MEMORY`, likewise.
        trace: a dict a block with the keys of `TRACE`, likewise; `block` is filled in by order.
        warnings: joined to the memory row's.
        error: why there are no answers; None when there are.
        stage, last_error: where and how it failed last.
        retry: the error is of the kind that another run may mend (storage out of reach, say): kept aside, so that the next run tries
            the video again instead of taking it for done.
    """

    video_id: str
    fingerprint: str
    answers: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)
    trace: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str | None = None
    stage: str | None = None
    last_error: str | None = None
    retry: bool = False


def fingerprint(config: JobConfig, task: VideoTask) -> str:
    """Name a video's result by everything that changes its answers: model, settings, the file, its questions.

    Returns:
        "<16 hex of the settings>/<32 hex of the video and its questions>"; the part before the slash is the same for a whole run.
    """
    video = {
        "video_id": task.video_id,
        "uri": task.uri,
        "content": task.content_tag,
        "questions": [[q.question_id, q.question, list(q.options)] for q in task.questions],
    }
    return f"{_settings_digest(config.engine.model_dump_json(), config.decode.model_dump_json())[:16]}/{digest(video)[:32]}"


def answer_settings(config: JobConfig) -> dict[str, Any]:
    """Everything in a job's settings that changes answers."""
    return _answer_settings(config.engine, config.decode)


def _answer_settings(engine: EngineConfig, decode: DecodeConfig) -> dict[str, Any]:
    return {
        "engine": engine.model_dump(mode="json", exclude=_ENGINE_SPEED),
        "decode": decode.model_dump(mode="json", exclude=DECODE_SPEED),
        "weights": checkpoint_digest(engine.model),
    }


@lru_cache
def _settings_digest(engine_json: str, decode_json: str) -> str:
    """A job asks this several times a video, of the same settings."""
    return digest(_answer_settings(EngineConfig.model_validate_json(engine_json), DecodeConfig.model_validate_json(decode_json)))


def digest(value: Any) -> str:
    """SHA-256 of a plain value, in hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class ResultStore:
    """Keeps finished videos and makes the tables of them. Can be sent to another process.

    Whoever finishes a video commits it under a name that follows from the video and the settings; a name that exists is done. So a job
    can be killed anywhere and started again, by whomever, and no answer is written twice.

    Args:
        output: the job's output address.
        storage: what writes there.
        run_id: recorded with every result.
    """

    def __init__(self, output: str, storage: Storage, run_id: str) -> None:
        self.output = output.rstrip("/") if split_s3(output) else str(local_path(output))
        self.storage, self.run_id = storage, run_id

    def check_place(self) -> None:
        """Refuse a local folder that can't be made or written, without making it; a bucket tells when it is written.

        Raises:
            StorageSetupError: says what is in the way.
        """
        if split_s3(self.output):
            return
        place = next(path for path in (Path(self.output), *Path(self.output).parents) if os.path.exists(path))
        if not place.is_dir():
            raise StorageSetupError(f"output={self.output}: {place} is a file; name a folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise StorageSetupError(f"output={self.output}: this user may not write in {place}; name another folder or change its rights")

    def start(self) -> None:
        """Take back the last run's `_SUCCESS`, and make sure that results can be written once only.

        Raises:
            StorageError: the output can't be written, or its server doesn't keep a conditional write from replacing what is there.
        """
        self.storage.delete(self._uri("_SUCCESS"))
        probe = self._uri("results", f"probe-{self.run_id}")
        try:
            self.storage.write_bytes(probe, b"first")
            if self.storage.write_bytes(probe, b"second", if_absent=True):
                raise StorageSetupError(
                    f"{self.output}: the server ignores If-None-Match, so answers could be written twice; use a newer server"
                )
        finally:
            self.storage.delete(probe)

    def commit(self, result: VideoResult) -> bool:
        """Store a finished video, whole or not at all.

        Returns:
            False when this video was committed before; what is there then stays.

        Raises:
            ValueError: a row has a column that its table doesn't, or a value of another type.
        """
        for table, rows in (("answers", result.answers), ("memory", [result.memory]), ("trace", result.trace)):
            check_rows(table, rows)
        data = json.dumps(asdict(result) | {"run_id": self.run_id}, default=_plain).encode()
        if result.retry:
            return self.storage.write_bytes(self._uri("failed", f"{result.fingerprint}.json"), data)
        return self.storage.write_bytes(self._uri("results", f"{result.fingerprint}.json"), data, if_absent=True)

    def done(self, fingerprints: Mapping[str, str]) -> set[str]:
        """Which videos have been committed, by this run or an earlier one.

        Args:
            fingerprints: `fingerprint(config, task)` of each video id.
        """
        committed = self._committed("results", fingerprints.values())
        return {video_id for video_id, name in fingerprints.items() if name in committed}

    def failed(self, fingerprints: Mapping[str, str]) -> set[str]:
        """Which committed videos were set aside: their result is an error."""

        def is_error(name: str) -> bool:
            uri = self._uri("results", f"{name}.json")
            try:
                return dict(json.loads(self.storage.read_bytes(uri))).get("error") is not None
            except (ValueError, TypeError, RecursionError) as error:
                if isinstance(error, InputError):
                    raise
                raise StorageError(f"{uri}: damaged ({error}); delete it and run again") from None

        with ThreadPoolExecutor(16) as threads:
            return {video_id for video_id, error in zip(fingerprints, threads.map(is_error, fingerprints.values()), strict=True) if error}

    def forget(self, names: Iterable[str]) -> None:
        """Take results back, so that their videos are tried again."""
        for name in names:
            self.storage.delete(self._uri("results", f"{name}.json"))

    def settings_before(self) -> dict[str, Any] | None:
        """The `answer_settings` of the results that are here; None where there are none.

        Raises:
            ConfigError: the output's settings.json is something else, or was cut short.
        """
        try:
            data = self.storage.read_bytes(self._uri("settings.json"))
        except MissingObjectError:
            return None
        try:
            settings = json.loads(data)
        except (ValueError, RecursionError):
            settings = None
        if not isinstance(settings, dict) or not all(isinstance(settings.get(section), dict) for section in ("engine", "decode")):
            raise ConfigError(f"output={self.output} holds a settings.json that this job didn't write; name another output or delete it")
        return settings

    def note_settings(self, config: JobConfig) -> None:
        """Record the settings that the tables will be made of."""
        self.storage.write_bytes(self._uri("settings.json"), json.dumps(answer_settings(config), indent=2).encode())

    def compact(self, config: JobConfig, tasks: Sequence[VideoTask], started_at: datetime, *, complete: bool = True) -> Outcome:
        """Make the tables of everything that is committed, in the manifest's order; then `run.json`; then `_SUCCESS`.

        Every question of every task gets exactly one row; one without an answer says why. Tables of earlier runs are replaced.

        Args:
            config: the job, recorded in `run.json`.
            tasks: all videos of this run, those that were done before included.
            started_at: when the run began, with time zone.
            complete: False when the run was stopped early; `_SUCCESS` isn't written then, nor when a video has no result.

        Returns:
            What to tell about them, so that they needn't be read.

        Raises:
            StorageError: results can't be read or tables not written.
        """
        outcome = Outcome()
        settings = {name: getattr(config.engine, name) for name in ("model", "policy", "budget_tokens")}
        names = ["answers", "memory", "quarantine", *(["trace"] if config.trace else [])]
        writers = {name: TableWriter(TABLES[name], self._uri(name), self.run_id, self.storage) for name in names}
        for task, result, run_id in self._results(config, tasks):
            rows = table_rows(task, result, settings | {"run_id": run_id})
            for name, writer in writers.items():
                writer.add(rows[name])
            outcome.add(result.error, rows)
        written = {uri for writer in writers.values() for uri in writer.close()}
        for name in TABLES:
            for uri in self.storage.list(self._uri(name)):
                if uri not in written:
                    self.storage.delete(uri)
        complete = complete and not outcome.counts.videos_not_run
        self._write_run(config, outcome.counts, started_at, complete)
        if complete:
            self.storage.write_bytes(self._uri("_SUCCESS"), b"")
        return outcome

    def _results(self, config: JobConfig, tasks: Sequence[VideoTask]) -> Iterator[tuple[VideoTask, VideoResult, str]]:
        names = [fingerprint(config, task) for task in tasks]
        folders = {folder: self._committed(folder, names) for folder in ("results", "failed")}

        def read(name: str) -> bytes | None:
            folder = next((folder for folder, there in folders.items() if name in there), None)
            return self.storage.read_bytes(self._uri(folder, f"{name}.json")) if folder else None

        with ThreadPoolExecutor(16) as threads:
            for first in range(0, len(tasks), _VIDEOS_AT_ONCE):
                part = slice(first, first + _VIDEOS_AT_ONCE)
                for task, name, data in zip(tasks[part], names[part], threads.map(read, names[part]), strict=True):
                    if data is None:
                        yield task, VideoResult(task.video_id, name, memory={"attempts": 0}, error=NEVER_RUN), self.run_id
                        continue
                    try:
                        values = json.loads(data)
                        run_id = values.pop("run_id")
                        result = VideoResult(**values)
                    except (ValueError, TypeError, KeyError) as error:
                        raise StorageError(f"{self._uri('results', name)}.json: damaged ({error}); delete it and run again") from None
                    yield task, result, run_id

    def _committed(self, folder: str, names: Iterable[str]) -> set[str]:
        """Fingerprints that have an object: one listing for all videos with the same settings."""
        found = set()
        for settings in {name.partition("/")[0] for name in names}:
            for uri in self.storage.list(self._uri(folder, settings)):
                found.add(f"{settings}/{uri.rpartition('/')[2].removesuffix('.json')}")
        return found

    def _write_run(self, config: JobConfig, counts: Counts, started_at: datetime, complete: bool) -> None:
        ended_at = datetime.now(timezone.utc)
        run = {
            "run_id": self.run_id,
            "complete": complete,
            "started_at": started_at.isoformat(),
            "ended_at": ended_at.isoformat(),
            "seconds": round((ended_at - started_at).total_seconds(), 3),
            "counts": asdict(counts),
            "config": config.model_dump(mode="json"),
            "versions": versions(),
            "commit": source_commit(),
        }
        self.storage.write_bytes(self._uri("run.json"), json.dumps(run, indent=2, ensure_ascii=False).encode())

    def _uri(self, *parts: str) -> str:
        return join_uri(self.output, *parts)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} isn't a plain value")
