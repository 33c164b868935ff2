"""A job's life without Ray: what there is to do, what is done already, how it ends."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from engine.errors import ConfigError, ReelkeepError
from engine.geometry import FrameGeometry
from engine.models import load_geometry
from engine.policies import make_policy
from pipeline.caches import CacheStore
from pipeline.config import JobConfig
from pipeline.lease import Lease
from pipeline.manifest import PROBLEMS_SHOWN, Manifest, read_manifest
from pipeline.outcome import Outcome
from pipeline.results import ResultStore, answer_settings, fingerprint
from pipeline.storage import Storage
from pipeline.task import VideoTask
from pipeline.weights import checkpoint_folder, pinned_revision

log = logging.getLogger("reelkeep.run")

UNFINISHED_FOR_S = 24 * 3600.0
"""Age at which a file that is still being written counts as left behind: no write takes that long."""


class JobFailedError(ReelkeepError):
    """The job as a whole can't go on: the model doesn't load, the output can't be written, the cluster is gone."""


class StoppedError(ReelkeepError):
    """Someone stopped the job; what is done is kept."""


@dataclass
class RunSummary(Outcome):
    """One start of a job and what its tables hold.

    Attributes:
        run_id: of this start.
        output: where the tables are.
        videos_done_before: videos that were done when this start began.
        seconds: from reading the manifest to the last table.
    """

    run_id: str = ""
    output: str = ""
    videos_done_before: int = 0
    seconds: float = 0.0


class Run:
    """One start of a job.

    Args:
        config: the job. Its manifest is read and checked, its model's configuration too; nothing is written yet.

    Raises:
        ConfigError, InputError: settings, manifest or model can't work.

    Attributes:
        config: the job, with the revision of the weights that all its workers are to use.
        model_folder: where this machine has the model's configuration and processor, when they had to be fetched.
        pending: the videos that have no result yet, or are to be tried again, in the manifest's order.
        run_id: names this start; recorded with every result it makes.
        lease: what keeps other jobs off the output while this one is `held`.
    """

    def __init__(self, config: JobConfig) -> None:
        self.started_at = datetime.now(timezone.utc)
        self.run_id = f"{self.started_at:%Y%m%dT%H%M%SZ}_{secrets.token_hex(3)}"
        make_policy(config.engine.policy, config.engine.policy_options)  # misspelt, it would fail in every engine
        self.storage = Storage(config.storage)
        pinned = config.engine.model_copy(update={"revision": pinned_revision(config.engine, self.storage)})
        self.config = config = config.model_copy(update={"engine": pinned})
        self.manifest: Manifest = read_manifest(config, self.storage)
        self.model_folder = checkpoint_folder(config.engine, self.storage, weights=False)
        self.geometry: FrameGeometry = load_geometry(config.engine, self.model_folder)
        self.store = ResultStore(config.output, self.storage, self.run_id)
        self.store.check_place()
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
            tell_problems(self.manifest)
            self.storage.remove_unfinished(self.config.output, UNFINISHED_FOR_S)
            if self.config.caches.uri:
                self.storage.remove_unfinished(self.config.caches.uri, UNFINISHED_FOR_S)
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
            outcome = self.store.compact(self.config, self.manifest.tasks, self.started_at, complete=complete)
        except ReelkeepError as error:
            raise JobFailedError(f"{error}; what is done is kept, run the same command again to go on") from error
        return RunSummary(
            **vars(outcome),
            run_id=self.run_id,
            output=self.config.output,
            videos_done_before=self.total_videos - len(self.pending),
            seconds=(datetime.now(timezone.utc) - self.started_at).total_seconds(),
        )


def tell_problems(manifest: Manifest) -> None:
    """Log what was found out about a manifest before any work: its notes, and the videos that can't be read."""
    for note in manifest.notes:
        log.warning("%s", note)
    for video_id, _, reason in manifest.missing[:PROBLEMS_SHOWN]:
        log.warning("can't be read: %s", reason, extra={"video_id": video_id})
    if manifest.missing:
        log.warning("%d of %d videos can't be read; their questions get an error", len(manifest.missing), len(manifest.tasks))


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(settings, dict):
        return {prefix.rstrip("."): settings}
    return {name: value for key, inner in settings.items() for name, value in _flat(inner, f"{prefix}{key}.").items()}
