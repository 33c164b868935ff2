"""Watches one video at a time: one task in, one result out. An engine with a reader in front and a store behind; no Ray."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from engine.errors import OutOfMemoryError
from engine.types import Answer, PrefillTrace, Question, VideoBlock
from pipeline.attempts import Attempts, CountedHere
from pipeline.caches import CacheStore
from pipeline.config import JobConfig
from pipeline.load import LoadMeter
from pipeline.results import ResultStore, VideoResult, fingerprint
from pipeline.retention import Retention
from pipeline.storage import Storage
from pipeline.stream import BlockReader, Lost, StageError, VideoStream, read_video, stage
from pipeline.task import VideoTask
from pipeline.weights import checkpoint_folder

if TYPE_CHECKING:
    from engine.compressed import CompressedVideo
    from engine.engine import Engine

log = logging.getLogger("reelkeep.worker")

Report = Callable[[str, float, int], None]
"""Told (video_id, seconds of video read, tokens read) now and then while a video is being read."""

Retried = Callable[[str], None]
"""Told why a video is begun again: the stage at which its process was lost, or `KILLED`."""

KILLED = "killed"
REPORT_EVERY_S = 1.0
SILENT_END = "the process that worked on it died without a word (out of memory, or a crash in native code)"


class WorkerLost(RuntimeError):
    """The process can't be trusted with another video; what happened is on record. Whoever called must end it."""


@dataclass
class Seen:
    """What came to light about one video in one attempt.

    Attributes:
        facts: columns of the memory table.
        traces: what each reading cost; one, or one a question.
        warnings: everything besides the plain path.
        cache_id: the kept cache that answered, or will answer from now on.
    """

    attempt: int
    facts: dict[str, Any] = field(default_factory=dict)
    traces: list[PrefillTrace] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    cache_id: str | None = None


class VideoWorker:
    """Loads the engine once; then turns each task into a committed result.

    A video's fault becomes a row with a reason and never raises. The try is on record before the work, so a video that kills the
    process is given up after `pool.max_attempts` tries, whoever makes them.

    Args:
        config: the job.
        engine: an engine that is already loaded; None loads the configured one.
        read: where blocks come from; the default decodes here, in turn.
        store: where results go; None keeps nothing, and each call just returns its result.
        attempts: where tries are recorded; None counts them in this process.
        caches: where compressed caches are kept and looked for; None watches every video and keeps none.
        report: told how far the video that is being read has come.
        retried: told why a video is begun again, before it is.

    Attributes:
        load: what the engine does with its time; any thread may sample it.
    """

    def __init__(
        self,
        config: JobConfig,
        *,
        engine: Engine | None = None,
        read: BlockReader = read_video,
        store: ResultStore | None = None,
        attempts: Attempts | CountedHere | None = None,
        caches: CacheStore | None = None,
        report: Report = lambda video_id, video_s, tokens: None,
        retried: Retried = lambda cause: None,
    ) -> None:
        if engine is None:
            from engine.engine import Engine

            engine = Engine.load(config.engine, folder=checkpoint_folder(config.engine, Storage(config.storage)))
        self.config, self.engine, self.read = config, engine, read
        self.store, self.attempts, self.report, self.retried = store, attempts or CountedHere(), report, retried
        self.load = LoadMeter(self._held_bytes)
        self.retention = Retention(config, engine, caches)

    @classmethod
    def for_job(cls, config: JobConfig, run_id: str, **parts: Any) -> VideoWorker:
        """A worker whose results and tries are kept under the job's output, and caches where the job says."""
        storage = Storage(config.storage)
        return cls(
            config,
            store=ResultStore(config.output, storage, run_id),
            attempts=Attempts(storage, config.output, run_id),
            caches=CacheStore.of(config, storage),
            **parts,
        )

    def __call__(self, task: VideoTask) -> VideoResult:
        """Watch and answer, or say why not; the result is committed before it is returned.

        Raises:
            WorkerLost: this process must end; another one goes on with the same task.
        """
        try:
            return self._until_done(task)
        finally:
            self.load.enter("idle")

    def _until_done(self, task: VideoTask) -> VideoResult:
        name = fingerprint(self.config, task)
        result = None
        while result is None:
            self.load.enter("busy")
            attempt, last_error = self.attempts.begin(name)
            if attempt > self.config.pool.max_attempts:
                result = _given_up(task, name, attempt - 1, last_error)
                break
            if attempt > 1:
                self.retried(last_error.partition(": ")[0] or KILLED)
            about = {"video_id": task.video_id, "attempt": attempt}
            log.info("started", extra=about)
            try:
                result = self.watch(task, attempt)
                if attempt > 1:
                    result.warnings.insert(0, f"attempt {attempt - 1} failed: {last_error or SILENT_END}")
            except StageError as error:
                self.attempts.failed(name, str(error))
                if error.lost == "worker":
                    log.error("%s; this process ends", error, extra=about)
                    raise WorkerLost(str(error)) from error
                log.warning("%s; trying again", error, extra=about)
        if self.store is not None:
            self.store.commit(result)
        self.attempts.clear(name)
        self.retention.forget_progress(task)
        log.log(logging.WARNING if result.error else logging.INFO, "%s", result.error or "done", extra={"video_id": task.video_id})
        return result

    def watch(self, task: VideoTask, attempt: int = 1) -> VideoResult:
        """Read one video and answer its questions; commits nothing.

        Raises:
            StageError: only one that lost a process; any other becomes the result's error.
        """
        questions = [Question(q.question, q.options, q.question_id) for q in task.questions]
        passes = [[question] for question in questions] if self.engine.query_aware else [questions]
        answers: list[dict[str, Any]] = []
        failures: list[StageError] = []
        seen = Seen(attempt)
        for asked in passes:
            try:
                answers += [_answer_row(answer) for answer in self._pass(task, asked, seen)]
            except StageError as error:
                if error.lost:
                    raise
                failures.append(error)
                answers += [_error_row(q.question_id, str(error)) for q in asked]
        if len(passes) > 1:
            seen.warnings.append(
                f"policy {self.config.engine.policy} needs the question: the video was read {len(passes)} times, once per question"
            )
        failed = str(failures[0]) if len(failures) == len(passes) else None
        return VideoResult(
            video_id=task.video_id,
            fingerprint=fingerprint(self.config, task),
            answers=[row | self._settings_row() | {"cache_id": seen.cache_id} for row in answers],
            memory=self._memory_row(seen),
            trace=[asdict(block) for block in seen.traces[0].blocks] if seen.traces and self.config.trace else [],
            warnings=list(dict.fromkeys(seen.warnings)),
            error=failed,
            stage=failures[0].stage if failed else None,
            last_error=failures[0].reason if failed else None,
            retry=any(failure.retry for failure in failures),
        )

    def _pass(self, task: VideoTask, asked: list[Question], seen: Seen) -> list[Answer]:
        """Read the video once, or take its kept cache, and answer some of its questions."""
        with stage("cache", task.video_id, lost_by):
            compressed = self.retention.recall(task, seen.warnings)
        if compressed is None:
            compressed = self._read(task, asked, seen)
            with stage("cache", task.video_id, lost_by):
                seen.cache_id = self.retention.keep(task, compressed, seen.facts | {"warnings": seen.warnings}, seen.warnings)
        else:
            facts = json.loads(compressed.labels.get("facts", "{}"))
            seen.cache_id = self.retention.id_of(task)
            seen.warnings += [*facts.pop("warnings", []), *self._unwatched(compressed)]
            seen.facts |= facts
        seen.traces.append(compressed.trace)
        try:
            with stage("answer", task.video_id, lost_by):
                answers = self.engine.answer(compressed, asked)
        finally:
            seen.warnings += compressed.trace.warnings  # answering may add to them
        seen.warnings += [
            f"question {a.question_id}: the answer was cut off at {a.answer_tokens} tokens" for a in answers if a.finish_reason == "length"
        ]
        return answers

    def _unwatched(self, compressed: CompressedVideo) -> list[str]:
        """The note on a video that was to be watched but had been watched already; a job that only asks expects that."""
        if self.config.caches.missing == "refuse":
            return []
        return [f"not watched again: answered from the cache kept at {compressed.labels.get('created_at', 'an unknown time')}"]

    def _read(self, task: VideoTask, asked: list[Question], seen: Seen) -> CompressedVideo:
        """Read the video, from the last checkpoint on if an earlier attempt has left one."""
        with stage("cache", task.video_id, lost_by):
            resumed = self.retention.resume(task, seen.warnings)
        first_group = 0
        if resumed is not None:
            first_group, seen.facts["resumed_s"] = resumed.state.groups, resumed.trace.last_time_s
        messages = self.read(task, self.engine.geometry, self.config, first_group)
        stream = None
        try:
            self.load.enter("waiting")
            with stage("fetch", task.video_id):
                stream = VideoStream(messages, on_block=self._reporter(task))
            self.load.enter("busy")
            head = stream.head
            seen.facts["duration_s"] = head.probe.duration_s
            with stage("prefill", task.video_id, lost_by):
                if head.probe.kind == "video":
                    self.engine.check_length(head.groups, head.span_s, *head.frame_size_px)
                question = asked[0] if self.engine.query_aware else None
                return self.retention.read(
                    task,
                    self.load.over(stream.blocks()),
                    seen.warnings,
                    question=question,
                    resumed=resumed,
                    attempt=seen.attempt,
                    stored=lambda: self.attempts.progressed(fingerprint(self.config, task)),
                )
        finally:
            if stream is not None and stream.tail is not None:
                seen.facts["decoder"] = stream.tail.decoder
                seen.warnings += stream.tail.warnings
            getattr(messages, "close", lambda: None)()

    def _reporter(self, task: VideoTask) -> Callable[[VideoBlock], None]:
        first_s: float | None = None
        next_s = 0.0
        tokens = 0

        def on_block(block: VideoBlock) -> None:
            nonlocal first_s, next_s, tokens
            first_s = block.times_s[0] if first_s is None else first_s
            read = block.groups * self.engine.geometry.group_tokens(*block.frames.shape[-2:])
            tokens += read
            self.load.took(read)
            if time.monotonic() >= next_s:
                self.report(task.video_id, block.times_s[-1] - first_s, tokens)
                next_s = time.monotonic() + REPORT_EVERY_S

        return on_block

    def _held_bytes(self) -> int:
        trace = self.engine.trace
        return trace.blocks[-1].kv_held_bytes if trace and trace.blocks else 0

    def _settings_row(self) -> dict[str, Any]:
        engine = self.config.engine
        return {"model": engine.model, "policy": engine.policy, "budget_tokens": engine.budget_tokens}

    def _memory_row(self, seen: Seen) -> dict[str, Any]:
        row = self._settings_row() | seen.facts | {"attempts": seen.attempt}
        traces = seen.traces
        if not traces:
            return row
        first = traces[0]
        counts = {name: getattr(first, name) for name in ("frames", "groups", "visual_tokens", "total_tokens", "kv_full_bytes")}
        largest = ("kv_peak_bytes", "kv_predicted_bytes", "device_peak_bytes", "process_peak_bytes")
        peaks = {name: max(getattr(t, name) for t in traces) for name in largest}
        sums = {name: sum(getattr(t, name) for t in traces) for name in ("vision_s", "prefill_s", "evict_s")}
        return row | counts | peaks | sums | {"blocks": len(first.blocks), "decode_wait_s": sum(t.input_wait_s for t in traces)}


def lost_by(error: Exception) -> Lost:
    """Which process an engine's error costs: this one, after running out of memory or once a CUDA context is gone."""
    fatal = isinstance(error, OutOfMemoryError | MemoryError) or "CUDA error" in str(error) or "CUDA out of memory" in str(error)
    return "worker" if fatal else ""


def _given_up(task: VideoTask, name: str, attempts: int, last_error: str) -> VideoResult:
    error = f"given up after {attempts} attempts: {last_error or SILENT_END}"
    answers = [_error_row(q.question_id, error) for q in task.questions]
    stage_name, _, reason = last_error.partition(": ")
    return VideoResult(
        task.video_id,
        name,
        answers=answers,
        memory={"attempts": attempts},
        error=error,
        stage=stage_name or None,
        last_error=reason or SILENT_END,
    )


def _answer_row(answer: Answer) -> dict[str, Any]:
    if answer.error is not None:
        return _error_row(answer.question_id, answer.error)
    row = asdict(answer)
    row["answer"] = row.pop("text")
    return row


def _error_row(question_id: str, error: str) -> dict[str, Any]:
    return {"question_id": question_id, "answer": None, "finish_reason": "error", "error": error}
