"""What every decoder offers: frames at wanted moments, in order, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from engine.errors import ReelkeepError

Sample = tuple[float, np.ndarray]
"""Presentation time in seconds in the file's own clock, and the frame: (height_px, width_px, 3) uint8 RGB, upright."""

LONG_GAP_S = 1.0
"""A longer time without packets, after the last one's own duration, is noted: a recording's pause, or lost data."""


def fault_note(what: str, count: int, first_s: float) -> str:
    """The form of a note on something that befell frames or packets."""
    return f"{what}: {count}, the first near {first_s:.3f} s"


GAPS = "stretches without frames, in which the picture before is held"


class DecoderRefusedError(ReelkeepError):
    """This decoder can't read the file, or would read it wrongly; another may."""


class FrameReader(Protocol):
    """Reads one file.

    Attributes:
        name: the decoder's name.
        warnings: what went differently than on the plain path; complete once an iterator is exhausted.
        read_to_s: how far the file was read, in its own clock; the end of its last frame once the file is exhausted.
        exhausted: whether reading stopped because the file did.
    """

    name: str
    warnings: list[str]
    read_to_s: float
    exhausted: bool

    def at(self, times_s: Iterable[float]) -> Iterator[Sample]:
        """The frame being shown at each time; ends early where the file does. `times_s` may be endless and must ascend."""
        ...

    def keyframes(self, start_s: float, end_s: float) -> Iterator[Sample]:
        """Every keyframe from `start_s` up to `end_s`, decoding no other frame."""
        ...
