"""A job's life without Ray: what there is to do, what is done already, how it ends."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

import pyarrow.dataset as pads

from engine.errors import ReelkeepError
from engine.geometry import FrameGeometry
from engine.models import load_geometry
from pipeline.config import JobConfig
from pipeline.manifest import Manifest, read_manifest
from pipeline.results import Counts, ResultStore, fingerprint
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


class Run:
    """One start of a job.

    Args:
        config: the job. Its manifest is read and checked, its model's configuration too; nothing is written yet.

    Raises:
        ConfigError, InputError: settings, manifest or model can't work.

    Attributes:
        pending: the videos that have no result yet, in the manifest's order.
        run_id: names this start; recorded with every result it makes.
    """

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.started_at = datetime.now(timezone.utc)
        self.run_id = f"{self.started_at:%Y%m%dT%H%M%SZ}_{secrets.token_hex(3)}"
        self.storage = Storage(config.storage)
        self.manifest: Manifest = read_manifest(config, self.storage)
        self.geometry: FrameGeometry = load_geometry(config.engine)
        self.store = ResultStore(config.output, self.storage, self.run_id)
        done = self.done()
        self.pending: list[VideoTask] = [task for task in self.manifest.tasks if task.video_id not in done]

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

    def begin(self) -> None:
        """Check that the output can be written, before anything is started.

        Raises:
            StorageError: it can't.
        """
        self.store.start()

    def finish(self, *, complete: bool = True) -> RunSummary:
        """Make the tables of what is committed.

        Args:
            complete: False when the job was stopped early: the tables then say what is missing, and nothing is marked as a success.

        Raises:
            JobFailedError: results can't be read or tables not written.
        """
        try:
            counts = self.store.compact(self.config, self.manifest.tasks, self.started_at, complete=complete)
            answers = self._table("answers").head(ANSWERS_SHOWN).to_pylist()
            memory = self._table("memory").to_table(columns=["kv_peak_bytes", "kv_full_bytes", "warnings"]).to_pylist()
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
        )

    def _table(self, name: str) -> pads.Dataset:
        filesystem, path = self.storage.pyarrow_filesystem(join_uri(self.store.output, name))
        return pads.dataset(path, filesystem=filesystem, format="parquet")
