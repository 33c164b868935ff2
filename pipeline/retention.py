"""What is kept of a video while it is read and afterwards: checkpoints to go on from, and a cache to ask tomorrow."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from engine.compressed import CompressedVideo
from engine.errors import CacheMismatchError, ReelkeepError
from engine.types import Question, TextPart, VideoBlock
from pipeline.caches import CacheKey, CacheMissingError, CacheStore
from pipeline.config import JobConfig
from pipeline.stream import StageError, one_line
from pipeline.task import VideoTask

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger("reelkeep.caches")


class Retention:
    """Stands between a worker and the cache store; everything off the plain path goes into the list of notes that each method takes.

    Nothing is kept for a query-aware policy, whose caches serve one question only.

    Args:
        store: where caches are; None keeps nothing and finds nothing.
    """

    def __init__(self, config: JobConfig, engine: Engine, store: CacheStore | None) -> None:
        self.config, self.engine, self.caches = config, engine, config.caches
        self.store = None if engine.query_aware else store
        self.without_reason = store is not None and engine.query_aware and config.caches.retain == "all"
        every = (self.caches.checkpoint_every_s, self.caches.checkpoint_every_blocks)
        whole_blocks = config.engine.alignment == "group" and config.engine.compress == "during"
        self.checkpoints = self.store is not None and any(every) and whole_blocks

    def recall(self, task: VideoTask, notes: list[str]) -> CompressedVideo | None:
        """The kept cache of a video; None when it has to be watched.

        Raises:
            StageError: there is none to use, and the job doesn't watch (`caches.missing`).
        """
        refuse = self.caches.missing == "refuse"
        if self.store is None or not (refuse or self.caches.retain == "all"):
            if self.without_reason:
                notes.append(f"no cache is kept: policy {self.config.engine.policy} reads a video for one question (caches.retain)")
            return None
        key = self._key(task)
        try:
            return self.store.load(self.engine, key)
        except CacheMissingError as error:
            problem: ReelkeepError = error
        except ReelkeepError as error:
            problem = error
            if not refuse:
                notes.append(f"{one_line(error)}; the video was watched again")
            if not refuse and isinstance(error, CacheMismatchError):
                self._remove(key, partial=False)
        if refuse:
            raise StageError("cache", f"{one_line(problem)}; watch it with --prefill-missing", retry=True)
        return None

    def resume(self, task: VideoTask, notes: list[str]) -> CompressedVideo | None:
        """What an earlier attempt has stored of a video that it didn't finish; None to begin at the beginning."""
        if self.store is None or not self.checkpoints:
            return None
        key = self._key(task)
        try:
            stored = self.store.load(self.engine, key, partial=True)
        except CacheMissingError:
            return None
        except ReelkeepError as error:
            notes.append(f"{one_line(error)}; the video was read from its beginning")
            if isinstance(error, CacheMismatchError):
                self._remove(key, partial=True)
            return None
        groups, time_s = stored.state.groups, stored.trace.last_time_s
        notes.append(
            f"resumed behind {time_s:.3f} s ({groups} groups) from what attempt {stored.labels.get('attempt')} had stored; "
            "what the decoder noticed before that isn't listed here"
        )
        log.info("resumed behind %.3f s", time_s, extra={"video_id": task.video_id})
        return stored

    def read(
        self,
        task: VideoTask,
        blocks: Iterator[VideoBlock | TextPart],
        notes: list[str],
        *,
        question: Question | None = None,
        resumed: CompressedVideo | None = None,
        attempt: int = 1,
        stored: Callable[[], None] = lambda: None,
    ) -> CompressedVideo:
        """Prefill, storing now and then how far it has come; the result is the same as without.

        Args:
            stored: called after each checkpoint.
        """
        if self.store is None or not self.checkpoints:
            return self.engine.prefill(blocks, question=question)
        compressed = resumed
        while True:
            part = _Part(blocks, self.caches.checkpoint_every_blocks, self.caches.checkpoint_every_s)
            compressed = self.engine.prefill(part, resume=compressed)
            if part.was_last:
                return compressed
            try:
                self.store.save(self._key(task), compressed, {"attempt": str(attempt)} | _now(task), partial=True)
                stored()
            except ReelkeepError as error:
                notes.append(f"how far the video was read couldn't be stored: {one_line(error)}")

    def keep(self, task: VideoTask, compressed: CompressedVideo, facts: dict[str, Any], notes: list[str]) -> str | None:
        """Store the cache of a video that was read to its end.

        Args:
            facts: what later rows should know of the reading; values that JSON can hold.

        Returns:
            Its id; None when it isn't kept. A store that fails costs the cache, not the answers.
        """
        if self.store is None or self.caches.retain == "none":
            return None
        try:
            return self.store.save(self._key(task), compressed, {"facts": json.dumps(facts)} | _now(task))
        except ReelkeepError as error:
            notes.append(f"its cache couldn't be kept: {one_line(error)}")
            return None

    def id_of(self, task: VideoTask) -> str:
        """The id of a video's cache."""
        return self._key(task).cache_id()

    def forget_progress(self, task: VideoTask) -> None:
        """Drop the checkpoint of a video that has its result."""
        if self.checkpoints:
            self._remove(self._key(task), partial=True)

    def _key(self, task: VideoTask) -> CacheKey:
        return CacheKey.of(self.config, task, self.engine.identity["dtype"])

    def _remove(self, key: CacheKey, *, partial: bool) -> None:
        assert self.store is not None
        try:
            self.store.remove(key.cache_id(partial=partial))
        except ReelkeepError as error:
            log.warning("%s", one_line(error))


class _Part:
    """The next blocks of a stream, until a checkpoint is due."""

    def __init__(self, blocks: Iterator[VideoBlock | TextPart], most_blocks: int | None, most_s: float | None) -> None:
        self.blocks, self.most_blocks, self.most_s = blocks, most_blocks, most_s
        self.was_last = False

    def __iter__(self) -> Iterator[VideoBlock | TextPart]:
        started, count = time.monotonic(), 0
        for item in self.blocks:
            yield item  # whoever asks for the next one has read this one
            if isinstance(item, TextPart):
                continue  # reading goes on behind blocks only
            count += 1
            if count == self.most_blocks or (self.most_s is not None and time.monotonic() - started >= self.most_s):
                return
        self.was_last = True


def _now(task: VideoTask) -> dict[str, str]:
    return {"video_id": task.video_id, "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds")}
