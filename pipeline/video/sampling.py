"""Which moments of a video are wanted. Knows times only, no decoder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from pipeline.video.config import DecodeConfig
from pipeline.video.container import refuse
from pipeline.video.probe import VideoProbe, count_keyframes

LARGEST_ROUNDING_S = 0.0005
HEADER_SLACK_S = 2.0
"""Headers tell a video's end only roughly when its frame rate varies."""


def tolerance_s(probe: VideoProbe) -> float:
    """How much later than wanted a frame's time may be and still count as shown: half the unit that times were rounded to."""
    return min(probe.tick_s / 2, LARGEST_ROUNDING_S)


def window_s(probe: VideoProbe, decode: DecodeConfig) -> tuple[float, float]:
    """First moment wanted, and the one at which to stop, in the file's own clock; the latter is infinite when only the file's end stops it.

    Raises:
        InputError: nothing of the file lies between `start_s` and `end_s`.
    """
    start_s = probe.start_s if decode.start_s is None else max(decode.start_s, probe.start_s)
    end_s = math.inf if decode.end_s is None else decode.end_s
    if end_s <= start_s or (probe.duration_s > 0 and start_s >= probe.end_s + HEADER_SLACK_S):
        wanted = f"decode.start_s={decode.start_s}, decode.end_s={decode.end_s}"
        raise refuse(probe.path, f"lies between {probe.start_s:.3f} s and {probe.end_s:.3f} s, outside {wanted}", "widen them")
    return start_s, end_s


def spacing_s(probe: VideoProbe, decode: DecodeConfig) -> float | None:
    """Seconds between two wanted moments; None for keyframes, which lie where they lie."""
    if decode.sampling == "fps":
        return 1.0 / decode.fps
    if decode.sampling == "frames":
        start_s, end_s = window_s(probe, decode)
        return max(0.0, min(end_s, probe.end_s) - start_s) / decode.frames
    return None


def wanted_times_s(probe: VideoProbe, decode: DecodeConfig) -> Iterator[float]:
    """The moments at which the frame being shown is wanted, ascending, in the file's own clock.

    fps: start + k / fps, without end unless `end_s` says so: the reader stops where the file does, so no total length is needed.
    frames: the middles of `frames` equal parts.
    """
    start_s, end_s = window_s(probe, decode)
    if decode.sampling == "fps":
        # Products, not running sums: an hour at 29.97 fps must not drift.
        times = (start_s + k / decode.fps for k in itertools.count())
        return itertools.takewhile(lambda time_s: time_s < end_s, times)
    spacing = spacing_s(probe, decode) or 0.0
    return (start_s + (k + 0.5) * spacing for k in range(decode.frames))


def predicted_frames(probe: VideoProbe, decode: DecodeConfig) -> int:
    """Frames that sampling will give, from what the header says; exact for a sound file, except for keyframes with a start or end.

    Counting keyframes reads a file without an index through, without decoding it.
    """
    if probe.kind == "image":
        return 1
    start_s, end_s = window_s(probe, decode)
    end_s = min(end_s, probe.end_s)
    if decode.sampling == "frames":
        return decode.frames
    if decode.sampling == "fps":
        return max(1, math.ceil((end_s - start_s) * decode.fps - 1e-6))
    share = (end_s - start_s) / probe.duration_s if probe.duration_s > 0 else 1.0
    return max(1, round(count_keyframes(probe.path) * min(1.0, share)))
