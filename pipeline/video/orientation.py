"""Turns stored frames upright, by the display matrix that cameras write."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from av.sidedata.sidedata import Type
from av.video.frame import VideoFrame


@dataclass(frozen=True)
class Orientation:
    """One of the eight ways a stored frame can lie.

    Attributes:
        transpose: whether rows become columns first.
        flip_rows, flip_columns: whether the (transposed) picture is then reversed top to bottom, left to right.
        skewed: the matrix asked for something else than quarter turns and mirrors; the nearest was taken.
        stored_deg: the angle it asked for, clockwise.
    """

    transpose: bool = False
    flip_rows: bool = False
    flip_columns: bool = False
    skewed: bool = False
    stored_deg: float = 0.0

    @classmethod
    def of(cls, frame: VideoFrame) -> Orientation:
        """Read a frame's display matrix; upright when it has none."""
        entry = cast(Any, frame.side_data).get(Type.DISPLAYMATRIX)
        if entry is None:
            return cls()
        a, b, _, c, d, *_ = struct.unpack("<9i", bytes(entry)[:36])
        # (x, y) of the stored picture is shown at (a x + c y, b x + d y).
        length = max(1.0, math.hypot(a, b), math.hypot(c, d))
        transpose = abs(b) > abs(a)
        horizontal, vertical = (c, b) if transpose else (a, d)
        skewed = any(min(abs(v) / length, abs(abs(v) / length - 1)) > 0.02 for v in (a, b, c, d))
        return cls(transpose, vertical < 0, horizontal < 0, skewed, math.degrees(math.atan2(b, a)) % 360)

    @property
    def mirrored(self) -> bool:
        """Whether the picture is mirrored, and not only turned."""
        return (self.flip_rows != self.flip_columns) != self.transpose

    @property
    def rotation_deg(self) -> int:
        """Clockwise turn in degrees: 0, 90, 180 or 270; a mirrored picture is flipped left to right after it."""
        if self.transpose:
            return 270 if self.flip_rows else 90
        return 180 if self.flip_rows else 0

    def upright_size(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Size (height, width) once upright."""
        return (width_px, height_px) if self.transpose else (height_px, width_px)

    def apply(self, frame: np.ndarray) -> np.ndarray:
        """Turn a (height, width, 3) frame upright; a view of the same memory."""
        if self.transpose:
            frame = frame.swapaxes(0, 1)
        return frame[:: -1 if self.flip_rows else 1, :: -1 if self.flip_columns else 1]
