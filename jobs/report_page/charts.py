"""The report's two pictures as numbers that the page's template draws: places in pixels, texts ready to show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs.answer import bytes_text
from jobs.report_page.facts import STEPS, RunFacts

WIDTH_PX, HEIGHT_PX = 720, 300
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 76, 40, 12, 44
MAX_POINTS = 2000
STEP_NAMES = {
    "decode_wait_s": "waiting for frames",
    "vision_s": "vision tower",
    "prefill_s": "prefill",
    "evict_s": "eviction",
    "answer_s": "answers",
}


@dataclass(frozen=True)
class Tick:
    """A line across the plot."""

    at_px: float
    text: str


@dataclass(frozen=True)
class Point:
    """One video: its place along the length, the heights of what was kept and of a full cache, and what a pointer over it says."""

    x_px: float
    kept_px: float
    full_px: float
    text: str


@dataclass(frozen=True)
class MemoryPlot:
    """Bytes of keys and values against visual tokens, both axes logarithmic."""

    points: list[Point]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    left_out: int


@dataclass(frozen=True)
class Share:
    """A step's part of the engines' time."""

    step: str
    name: str
    seconds: float
    share: float
    start: float


def memory_plot(videos: Sequence[dict[str, Any]]) -> MemoryPlot | None:
    """What each video's cache held at most, and what a full one would have held; None when no video was watched."""
    watched = [v for v in videos if v.get("visual_tokens") and v.get("kv_peak_bytes") and v.get("kv_full_bytes")]
    if not watched:
        return None
    shown = watched[:: max(1, math.ceil(len(watched) / MAX_POINTS))]
    x_range = _decades([v["visual_tokens"] for v in watched])
    y_range = _decades([v["kv_peak_bytes"] for v in watched] + [v["kv_full_bytes"] for v in watched])

    def x(value: float) -> float:
        return _place(value, x_range, LEFT_PX, WIDTH_PX - RIGHT_PX)

    def y(value: float) -> float:
        return _place(value, y_range, HEIGHT_PX - BOTTOM_PX, TOP_PX)

    points = [
        Point(
            x(v["visual_tokens"]),
            y(v["kv_peak_bytes"]),
            y(v["kv_full_bytes"]),
            f"{v['video_id']}: {v['visual_tokens']:,} visual tokens, {bytes_text(v['kv_peak_bytes'])} held, "
            f"{bytes_text(v['kv_full_bytes'])} in a full cache",
        )
        for v in shown
    ]
    x_ticks = [Tick(x(10.0**d), f"{10**d:,}") for d in range(x_range[0], x_range[1] + 1)]
    y_ticks = [Tick(y(10.0**d), bytes_text(10**d)) for d in range(y_range[0], y_range[1] + 1)]
    return MemoryPlot(points, x_ticks, y_ticks, len(watched) - len(shown))


def time_shares(facts: RunFacts) -> list[Share]:
    """The engines' time by step, in the order in which a video goes through them; empty when none was spent."""
    totals = facts.step_totals
    everything = sum(totals.values())
    shares: list[Share] = []
    start = 0.0
    for step in STEPS if everything else ():
        share = totals[step] / everything
        shares.append(Share(step, STEP_NAMES[step], totals[step], share, start))
        start += share
    return shares


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _place(value: float, decades: tuple[int, int], first_px: float, last_px: float) -> float:
    share = (math.log10(value) - decades[0]) / (decades[1] - decades[0])
    return round(first_px + share * (last_px - first_px), 1)
