"""From a script to a still image: a square of cells, row by row, that a tiling model cuts into exactly those cells."""

from __future__ import annotations

from math import isqrt
from typing import BinaryIO

import numpy as np
from PIL import Image

from engine.errors import ConfigError
from pipeline.synthetic.draw import FRAME_PX
from pipeline.synthetic.script import Script
from pipeline.synthetic.video import draw_frames

SIDES = range(2, 9)
"""Cells along a side of a picture."""

CELL_PX = 42
"""Side of a cell in the file. Tiling takes the largest square grid of which the picture fills more than half: with cells as large as the
tiles (56 px) a picture of 4 x 4 would be cut into 5 x 5."""

_JPEG_QUALITY = 92


def side_of(cells: int) -> int:
    """Cells along a side of a picture of so many.

    Raises:
        ConfigError: no square of 2 to 8 cells a side has that many.
    """
    side = isqrt(max(0, cells))
    if side * side != cells or side not in SIDES:
        squares = ", ".join(str(n * n) for n in SIDES)
        raise ConfigError(f"groups={cells}: a picture is a square of cells; use one of {squares}")
    return side


def draw_picture(rng: np.random.Generator, script: Script) -> np.ndarray:
    """Draw a script's groups as cells, the first at the top left.

    Returns:
        (side * CELL_PX, side * CELL_PX, 3) uint8 RGB.
    """
    side = isqrt(script.groups)
    cells = np.stack(list(draw_frames(rng, script, frames_per_group=1))).reshape(side, side, FRAME_PX, FRAME_PX, 3)
    picture = Image.fromarray(cells.transpose(0, 2, 1, 3, 4).reshape(side * FRAME_PX, side * FRAME_PX, 3))
    return np.asarray(picture.resize((side * CELL_PX, side * CELL_PX), Image.Resampling.BOX))


def write_picture(target: str | BinaryIO, picture: np.ndarray) -> None:
    """Encode (height, width, 3) uint8 RGB as JPEG."""
    Image.fromarray(picture).save(target, format="JPEG", quality=_JPEG_QUALITY)
