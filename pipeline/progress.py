"""Where a run stands: one line that lives on a terminal, or one line a minute in a log. Knows no Ray and no storage."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline.config import LogConfig

log = logging.getLogger("reelkeep")


@dataclass
class Progress:
    """Counts what has finished and says how long the rest may take.

    Attributes:
        total_videos: videos of this run, those finished by an earlier start included.
        earlier_videos: videos that an earlier start of the same job had finished.
        weights: work of each video still to do, in any common unit (bytes of the file); a video not named weighs 1.
    """

    total_videos: int
    earlier_videos: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.started_s = self.clock()
        self.done = self.earlier_videos
        self.failures = 0
        self.tokens = 0
        self.video_s = 0.0
        self._done_weight = 0.0
        self._under_way: dict[str, tuple[float, int]] = {}
        self._finished: set[str] = set()
        self._left = dict(self.weights)

    def seen(self, video_id: str, video_s: float, tokens: int) -> None:
        """Note how far a video that is being read has come: seconds of it, and tokens. One that has finished is counted already."""
        self._under_way[video_id] = (video_s, tokens)
        if video_id in self._finished:  # asked last, since `finish` may run in another thread at this moment
            self._under_way.pop(video_id, None)

    def finish(self, video_id: str, *, video_s: float, tokens: int, failed: bool) -> None:
        """Note the end of one video."""
        self._finished.add(video_id)
        self._under_way.pop(video_id, None)
        self._done_weight += self._left.pop(video_id, 1.0)
        self.done += 1
        self.failures += failed
        self.video_s += video_s
        self.tokens += tokens

    def left_s(self) -> float | None:
        """Seconds until the end at the pace so far; None before the first video has finished."""
        if not self._done_weight:
            return None
        todo = sum(self._left.values()) if self.weights else float(self.total_videos - self.done)
        return (self.clock() - self.started_s) * todo / self._done_weight

    def line(self) -> str:
        """One line: videos, hours of video, tokens a second, failures, time left."""
        elapsed_s = max(self.clock() - self.started_s, 1e-9)
        video_s = self.video_s + sum(seconds for seconds, _ in list(self._under_way.values()))
        tokens = self.tokens + sum(count for _, count in list(self._under_way.values()))
        left_s = self.left_s()
        parts = [f"{self.done}/{self.total_videos} videos"]
        if self.earlier_videos:
            parts.append(f"{self.earlier_videos} from before")
        parts += [f"{video_s / 3600:.2f} h of video", f"{tokens / elapsed_s:,.0f} tokens/s", f"{self.failures} failed"]
        parts.append("time left unknown" if left_s is None else f"{clock_time(left_s)} left")
        return " · ".join(parts)


def clock_time(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class ProgressLine:
    """Shows a `Progress` while a job runs: a live line on a terminal, else a log line now and then. A context manager.

    Args:
        progress: what to show; its counts may change at any time.
        config: `progress` says which of the two, `progress_interval_s` how often.
        console: where a live line goes; default: standard error.
    """

    def __init__(self, progress: Progress, config: LogConfig, console: Console | None = None) -> None:
        self.progress = progress
        self.console = console or Console(stderr=True)
        self.mode = ("live" if self.console.is_terminal else "lines") if config.progress == "auto" else config.progress
        self.every_s = config.progress_interval_s
        self._live: Live | None = None
        self._over = threading.Event()
        self._writer: threading.Thread | None = None

    def __enter__(self) -> ProgressLine:
        if self.mode == "live":
            self._live = Live(get_renderable=lambda: Text(self.progress.line()), console=self.console, refresh_per_second=4)
            self._live.start()
        elif self.mode == "lines":
            self._writer = threading.Thread(target=self._write_lines, name="progress", daemon=True)
            self._writer.start()
        return self

    def _write_lines(self) -> None:
        while not self._over.wait(self.every_s):
            log.info(self.progress.line())
        log.info(self.progress.line())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()
        if self._writer is not None:
            self._writer.join(timeout=5)
