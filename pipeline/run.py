"""A job's life without Ray: what there is to do, what is done already, how it ends."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

import pyarrow.dataset as pads

from engine.errors import ConfigError, ReelkeepError
from engine.geometry import FrameGeometry
from engine.models import load_geometry
from pipeline.caches import CacheStore
from pipeline.config import JobConfig
from pipeline.lease import Lease
from pipeline.manifest import Manifest, read_manifest
from pipeline.results import Counts, ResultStore, answer_settings, fingerprint
from pipeline.storage import Storage, join_uri
from pipeline.task import VideoTask

ANSWERS_SHOWN = 20


class JobFailedError(ReelkeepError):
    """The job as a whole can't go on: the model doesn't load, the output can't be written, the cluster is gone."""


class StoppedError(ReelkeepError):
    """Someone stopped the job; what is done is kept."""


@dataclass(frozen=True)
class RunSummary:
    """How a job came out.

    Attributes:
        run_id: of this start.
        output: where the tables are.
        counts: videos and questions, those of earlier starts included.
        videos_done_before: videos that were done when this start began.
        seconds: from reading the manifest to the last table.
        answers: the first rows of the answers table.
        kv_peak_bytes, kv_full_bytes: of the video with the largest full cache: most held at once, and what a full cache would have held.
        warnings: warnings in the memory table, all videos together.
        set_aside: the first videos without answers, and why.
    """

    run_id: str
    output: str
    counts: Counts
    videos_done_before: int
    seconds: float
    answers: list[dict[str, Any]] = field(default_factory=list)
    kv_peak_bytes: int = 0
    kv_full_bytes: int = 0
    warnings: int = 0
    set_aside: list[tuple[str, str]] = field(default_factory=list)


class Run:
    """One start of a job.

    Args:
        config: the job. Its manifest is read and checked, its model's configuration too; nothing is written yet.

    Raises:
        ConfigError, InputError: settings, manifest or model can't work.

    Attributes:
        pending: the videos that have no result yet, or are to be tried again, in the manifest's order.
        run_id: names this start; recorded with every result it makes.
        lease: what keeps other jobs off the output while this one is `held`.
    """

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.started_at = datetime.now(timezone.utc)
        self.run_id = f"{self.started_at:%Y%m%dT%H%M%SZ}_{secrets.token_hex(3)}"
        self.storage = Storage(config.storage)
        self.manifest: Manifest = read_manifest(config, self.storage)
        self.geometry: FrameGeometry = load_geometry(config.engine)
        self.store = ResultStore(config.output, self.storage, self.run_id)
        self.lease = Lease(config.output, self.storage, self.run_id, take_over=config.take_over)
        self._check_settings()
        self._retried: set[str] = set()
        self.pending: list[VideoTask] = self._pending()

    @property
    def total_videos(self) -> int:
        """Videos of the job, done or not."""
        return len(self.manifest.tasks)

    def done(self) -> set[str]:
        """Ids of the videos whose result is committed by now."""
        return self.store.done(self._names)

    def name_of(self, video_id: str) -> str:
        """The name under which a video's result and tries are kept."""
        return self._names[video_id]

    @cached_property
    def _names(self) -> dict[str, str]:
        return {task.video_id: fingerprint(self.config, task) for task in self.manifest.tasks}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other jobs off the output during the block; at its beginning, check that the output can be written.

        Raises:
            OutputHeldError: another job is at work there.
            StorageError: the output can't be written.
        """
        with self.lease:
            self.store.start()
            self.store.note_settings(self.config)
            self.pending = self._pending()
            self.store.forget(self._names[video_id] for video_id in self._retried)
            yield

    def _pending(self) -> list[VideoTask]:
        done = self.done()
        if self.config.retry_quarantined:
            self._retried = self.store.failed({video_id: self._names[video_id] for video_id in self._names if video_id in done})
        return [task for task in self.manifest.tasks if task.video_id not in done - self._retried]

    def _check_settings(self) -> None:
        before, now = self.store.settings_before(), answer_settings(self.config)
        if before in (None, now) or self.config.on_changed_settings == "restart":
            return
        old, new = _flat(before), _flat(now)
        changed = [f"{name}={old.get(name)} there, {new.get(name)} now" for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        raise ConfigError(
            f"output={self.config.output} holds answers made with other settings ({'; '.join(changed)}); name another output, or replace "
            "its tables with --on-changed-settings restart"
        )

    def finish(self, *, complete: bool = True) -> RunSummary:
        """Make the tables of what is committed.

        Args:
            complete: False when the job was stopped early: the tables then say what is missing, and nothing is marked as a success.

        Raises:
            JobFailedError: results can't be read or tables not written.
        """
        try:
            CacheStore.of(self.config, self.storage).expire_if_limited()
            counts = self.store.compact(self.config, self.manifest.tasks, self.started_at, complete=complete)
            answers = self._table("answers").head(ANSWERS_SHOWN).to_pylist()
            memory = self._table("memory").to_table(columns=["kv_peak_bytes", "kv_full_bytes", "warnings"]).to_pylist()
            set_aside = self._table("quarantine").head(ANSWERS_SHOWN, columns=["video_id", "error"]).to_pylist()
        except ReelkeepError as error:
            raise JobFailedError(f"{error}; what is done is kept, run the same command again to go on") from error
        largest = max(memory, key=lambda row: row["kv_full_bytes"] or 0)
        return RunSummary(
            run_id=self.run_id,
            output=self.config.output,
            counts=counts,
            videos_done_before=self.total_videos - len(self.pending),
            seconds=(datetime.now(timezone.utc) - self.started_at).total_seconds(),
            answers=answers,
            kv_peak_bytes=largest["kv_peak_bytes"] or 0,
            kv_full_bytes=largest["kv_full_bytes"] or 0,
            warnings=sum(len(row["warnings"] or ()) for row in memory),
            set_aside=[(row["video_id"], row["error"]) for row in set_aside],
        )

    def _table(self, name: str) -> pads.Dataset:
        filesystem, path = self.storage.pyarrow_filesystem(join_uri(self.store.output, name))
        return pads.dataset(path, filesystem=filesystem, format="parquet")


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(settings, dict):
        return {prefix.rstrip("."): settings}
    return {name: value for key, inner in settings.items() for name, value in _flat(inner, f"{prefix}{key}.").items()}
