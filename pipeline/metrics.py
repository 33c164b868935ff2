"""What an operator sees of a job while it runs: every metric with its kind, meaning and tags, and who sets it. Through Ray's own metrics.

Ray serves them at each node's metrics port, with `ray_` before the name and `_total` behind a counter's. A metric costs its caller
microseconds; Ray sends what was set every 10 seconds, and forgets a gauge that isn't set any more because its process has ended.

What the driver counts is a gauge too, set to the count so far: Ray's counters begin at the first event instead of 0, and one that can't be sent
(for some 10 seconds after a node's death, say) is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pipeline.load import Load

if TYPE_CHECKING:
    from pipeline.results import VideoResult

RAY_PREFIX = "ray_"
COUNTER_SUFFIX = "_total"


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: without what Ray adds; units as suffixes.
        kind: a counter only grows; a gauge is the latest value.
        description: what is counted, by whom.
        tags: besides `run`, which all have, and Ray's own.
    """

    name: str
    kind: Literal["counter", "gauge"]
    description: str
    tags: tuple[str, ...] = ()

    @property
    def exported_name(self) -> str:
        """Its name at a node's metrics port, and so in Prometheus."""
        return RAY_PREFIX + self.name + (COUNTER_SUFFIX if self.kind == "counter" else "")


RUN_TAG = "run"
CAUSES = ("killed", "decode", "prefill", "answer")
OUTCOMES = ("done", "failed", "quarantined")

VIDEOS = Metric(
    "reelkeep_videos",
    "gauge",
    "Videos that this start of the job has brought to a result. done: all questions answered; failed: some aren't, or the next start tries "
    "the video again; quarantined: set aside.",
    ("outcome",),
)
QUESTIONS = Metric("reelkeep_questions", "gauge", "Questions of those videos; failed and quarantined ones have no answer.", ("outcome",))
VIDEO_HOURS = Metric("reelkeep_video_hours", "gauge", "Hours of video in those that have answers.")
RETRIES = Metric(
    "reelkeep_retries",
    "gauge",
    "Videos begun again because a process died under them. cause: the stage at which it went wrong (decode: the decoder's process; prefill "
    "or answer: out of memory, or a lost GPU), or killed, where it died without a word.",
    ("cause",),
)
QUEUE_VIDEOS = Metric("reelkeep_queue_videos", "gauge", "Videos of the job that have no result yet, those being watched included.")
VISUAL_TOKENS = Metric("reelkeep_visual_tokens", "counter", "Visual tokens that an engine has taken in; its rate is tokens a second.")
TOKENS_PER_SECOND = Metric(
    "reelkeep_tokens_per_second", "gauge", "Visual tokens a second of one engine over the last seconds; 0 when idle."
)
BUSY_RATIO = Metric("reelkeep_engine_busy_ratio", "gauge", "Share of the last seconds that an engine spent computing, 0 to 1.")
DECODE_WAIT_RATIO = Metric("reelkeep_decode_wait_ratio", "gauge", "Share of the last seconds that an engine waited for frames, 0 to 1.")
KV_BYTES = Metric("reelkeep_kv_bytes", "gauge", "Most bytes of keys and values that an engine held in its latest block; 0 when idle.")

METRICS = (
    VIDEOS,
    QUESTIONS,
    VIDEO_HOURS,
    RETRIES,
    QUEUE_VIDEOS,
    VISUAL_TOKENS,
    TOKENS_PER_SECOND,
    BUSY_RATIO,
    DECODE_WAIT_RATIO,
    KV_BYTES,
)


def outcome_of(result: VideoResult) -> str:
    """One of `OUTCOMES`, as the tables will tell it."""
    if result.error is not None:
        return "failed" if result.retry else "quarantined"
    return "failed" if any(row.get("error") for row in result.answers) else "done"


class RunMetrics:
    """The driver's: what becomes of videos. Everything is there from the beginning, at 0.

    Args:
        run_id: value of the tag `run`.
        videos: that have no result yet.
    """

    def __init__(self, run_id: str, videos: int) -> None:
        self._set = _Made(run_id, (VIDEOS, QUESTIONS, VIDEO_HOURS, RETRIES, QUEUE_VIDEOS)).set
        self._so_far: defaultdict[tuple[Metric, str], float] = defaultdict(float)
        self._count(QUEUE_VIDEOS, videos)
        self._count(VIDEO_HOURS, 0)
        for outcome in OUTCOMES:
            self._count(VIDEOS, 0, outcome)
            self._count(QUESTIONS, 0, outcome)
        for cause in CAUSES:
            self._count(RETRIES, 0, cause)

    def finished(self, row: Mapping[str, Any]) -> None:
        """Note a video's result: `outcome`, `video_s`, `answered` and `unanswered` (questions)."""
        outcome = row["outcome"]
        self._count(QUEUE_VIDEOS, -1)
        self._count(VIDEOS, 1, outcome)
        self._count(QUESTIONS, row["answered"], "done")
        self._count(QUESTIONS, row["unanswered"], "quarantined" if outcome == "quarantined" else "failed")
        if row["answered"]:
            self._count(VIDEO_HOURS, row["video_s"] / 3600)

    def retried(self, cause: str) -> None:
        """Note that a video is tried again."""
        self._count(RETRIES, 1, cause)

    def _count(self, metric: Metric, amount: float, tag: str = "") -> None:
        self._so_far[metric, tag] += amount
        self._set(metric, self._so_far[metric, tag], **dict.fromkeys(metric.tags, tag))


class EngineMetrics:
    """An engine's: what it does with its time and memory."""

    def __init__(self, run_id: str) -> None:
        made = _Made(run_id, (VISUAL_TOKENS, TOKENS_PER_SECOND, BUSY_RATIO, DECODE_WAIT_RATIO, KV_BYTES))
        self._add, self._set = made.add, made.set

    def note(self, load: Load) -> None:
        """Set everything to what the last seconds were."""
        self._add(VISUAL_TOKENS, load.tokens)
        self._set(TOKENS_PER_SECOND, load.tokens_per_s)
        self._set(BUSY_RATIO, load.busy_ratio)
        self._set(DECODE_WAIT_RATIO, load.wait_ratio)
        self._set(KV_BYTES, load.kv_bytes)


class _Made:
    """Some metrics as Ray's objects, one each and process; all carry the run."""

    def __init__(self, run_id: str, metrics: tuple[Metric, ...]) -> None:
        from ray.util.metrics import Counter, Gauge

        kinds: dict[str, Any] = {"counter": Counter, "gauge": Gauge}
        self._run = {RUN_TAG: run_id}
        self._made: dict[Metric, Any] = {m: kinds[m.kind](m.name, description=m.description, tag_keys=(RUN_TAG, *m.tags)) for m in metrics}

    def add(self, metric: Metric, amount: float, **tags: str) -> None:
        if amount > 0:  # Ray refuses 0
            self._made[metric].inc(amount, self._run | tags)

    def set(self, metric: Metric, value: float, **tags: str) -> None:
        self._made[metric].set(value, self._run | tags)
