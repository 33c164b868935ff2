"""Draws backgrounds, needles and glitches into small frames: numpy only, no file, no codec."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeline.synthetic.vocabulary import COLOURS

FRAME_PX = 56
_SUPERSAMPLING = 3
CANVAS_PX = 2 * FRAME_PX

# 5 x 7 dot matrix, one string a row of dots.
_DIGIT_DOTS = {
    "0": "01110 10001 10001 10001 10001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00110 01000 10000 11111",
    "3": "11110 00001 00001 01110 00001 00001 11110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
}
_DOTS = {digit: np.array([[c == "1" for c in row] for row in rows.split()]) for digit, rows in _DIGIT_DOTS.items()}


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    angle = np.arctan2(x, -y)
    sector = np.abs((angle + np.pi / 5) % (2 * np.pi / 5) - np.pi / 5)
    # A five-pointed star's edge, in polar form, between an outer radius of 1 and an inner one of 0.42.
    inner, outer, half = 0.42, 1.0, np.pi / 5
    edge = inner * outer * np.sin(half) / (inner * np.sin(half - sector) + outer * np.sin(sector))
    return np.hypot(x, y) < edge


_INSIDE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "circle": lambda x, y: np.hypot(x, y) < 0.9,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) < 0.8,
    "triangle": lambda x, y: (y < 0.75) & (np.abs(x) * 1.65 < y + 0.9),
    "cross": lambda x, y: (np.minimum(np.abs(x), np.abs(y)) < 0.28) & (np.maximum(np.abs(x), np.abs(y)) < 0.95),
    "star": _star,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.7) < 0.24,
    "diamond": lambda x, y: np.abs(x) * 1.35 + np.abs(y) < 0.98,
    "heart": lambda x, y: ((1.15 * x) ** 2 + (0.15 - 1.2 * y) ** 2 - 0.7) ** 3 - (1.15 * x) ** 2 * (0.15 - 1.2 * y) ** 3 * 1.6 < 0,
}


def _inside_digit(digit: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    column, row = np.floor((x / 0.72 + 1) * 2.5).astype(int), np.floor((y + 1) * 3.5).astype(int)
    on_plate = (column >= 0) & (column < 5) & (row >= 0) & (row < 7)
    return on_plate & _DOTS[digit][np.clip(row, 0, 6), np.clip(column, 0, 4)]


def _coverage(inside: Callable[[np.ndarray, np.ndarray], np.ndarray], centre: np.ndarray, radius_px: float, angle: float) -> np.ndarray:
    """Share of each pixel that a figure covers, (FRAME_PX, FRAME_PX) in 0..1."""
    fine = (np.arange(FRAME_PX * _SUPERSAMPLING) + 0.5) / _SUPERSAMPLING
    x, y = np.meshgrid((fine - centre[0]) / radius_px, (fine - centre[1]) / radius_px)
    cos, sin = np.cos(angle), np.sin(angle)
    mask = inside(cos * x + sin * y, cos * y - sin * x)
    return mask.reshape(FRAME_PX, _SUPERSAMPLING, FRAME_PX, _SUPERSAMPLING).mean(axis=(1, 3))


class NeedleSprite:
    """One event's look, drawn once and laid over each of its frames.

    A needle is a coloured shape or digit with a dark rim, at a random place, size and slight turn.
    """

    def __init__(self, rng: np.random.Generator, colour: str, figure: str) -> None:
        is_digit = figure in _DOTS
        radius_px = rng.uniform(17.0 if is_digit else 14.0, 21.0)
        centre = rng.uniform(radius_px, FRAME_PX - radius_px, size=2)
        angle = rng.uniform(-0.2, 0.2)
        inside = (lambda x, y: _inside_digit(figure, x, y)) if is_digit else _INSIDE[figure]
        self._fill = _coverage(inside, centre, radius_px, angle)[..., None]
        rim = self._fill[..., 0]
        for axis in (0, 1):
            rim = np.maximum.reduce([rim, np.roll(rim, 1, axis), np.roll(rim, -1, axis)])
        self._rim = rim[..., None]
        self._rgb = np.clip(np.array(COLOURS[colour]) + rng.uniform(-12, 12, size=3), 0, 255)

    def over(self, frame: np.ndarray) -> np.ndarray:
        """Lay the needle over a frame, (FRAME_PX, FRAME_PX, 3) float in 0..255."""
        frame = frame * (1 - self._rim) + 20.0 * self._rim
        return frame * (1 - self._fill) + self._rgb * self._fill


class Background:
    """A drifting, noisy scene in muted colours; `cut` starts another one."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._noise = rng.normal(0.0, 1.0, size=(4, CANVAS_PX, CANVAS_PX, 3))
        self.cut()

    def cut(self) -> None:
        """Change to another scene at once."""
        rng = self._rng
        grey = rng.uniform(35, 165, size=(2, 1))
        tones = np.clip(grey + rng.uniform(-28, 28, size=(2, 3)), 0, 255)
        coarse = rng.uniform(0, 1, size=(6, 6))
        steps = np.arange(CANVAS_PX) * len(coarse) / CANVAS_PX
        low, share = np.floor(steps).astype(int), steps % 1
        high = (low + 1) % len(coarse)
        rows = coarse[low] * (1 - share[:, None]) + coarse[high] * share[:, None]
        blend = rows[:, low] * (1 - share) + rows[:, high] * share
        self._canvas = tones[0] * (1 - blend[..., None]) + tones[1] * blend[..., None]
        self._drift_px = rng.uniform(-5, 5, size=2)
        self._offset = rng.uniform(0, CANVAS_PX, size=2)
        self._noise_level = rng.uniform(2.0, 9.0)

    def frame(self) -> np.ndarray:
        """The next frame, (FRAME_PX, FRAME_PX, 3) float in 0..255."""
        self._offset = self._offset + self._drift_px
        return window(self._canvas, self._offset) + self._noise_level * window(
            self._noise[self._rng.integers(len(self._noise))], self._rng.integers(CANVAS_PX, size=2)
        )


def window(canvas: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """A frame's part of a canvas that goes on behind its edges, (FRAME_PX, FRAME_PX, 3), `offset` pixels down and right."""
    rows = (np.arange(FRAME_PX) + int(offset[0])) % CANVAS_PX
    columns = (np.arange(FRAME_PX) + int(offset[1])) % CANVAS_PX
    return canvas[rows[:, None], columns]


def glitch(rng: np.random.Generator) -> np.ndarray:
    """A loud picture that means nothing: blocks, stripes, a checkerboard or a flash. (FRAME_PX, FRAME_PX, 3) float in 0..255."""
    first, second = rng.uniform(0, 255, size=(2, 3))
    ramp = np.arange(FRAME_PX)
    kind = rng.integers(4)
    if kind == 0:
        cells = rng.uniform(0, 255, size=(7, 7, 3))
        return cells.repeat(FRAME_PX // 7, axis=0).repeat(FRAME_PX // 7, axis=1)
    if kind == 1:
        bands = (ramp // rng.integers(4, 14)) % 2 > 0
        on = np.broadcast_to(bands[:, None] if rng.random() < 0.5 else bands[None, :], (FRAME_PX, FRAME_PX))
    elif kind == 2:
        side = rng.integers(6, 14)
        on = (ramp[:, None] // side + ramp[None, :] // side) % 2 > 0
    else:
        on = np.zeros((FRAME_PX, FRAME_PX), dtype=bool)
    return np.where(on[..., None], first, second)
