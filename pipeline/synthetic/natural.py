"""Backgrounds with the look of the outdoors: textures whose detail falls off as in photographs, and things of any colour moving through."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.synthetic.draw import CANVAS_PX, FRAME_PX, window

_FALL_OFF = 1.2
"""Amplitude of a texture falls with spatial frequency to this power, as in photographs."""


@dataclass
class _Thing:
    """A soft, shaded ellipse that moves.

    Attributes:
        centre, step, radii: pixels, (2,); the step is a frame's.
        rgb: (3,) in 0..255.
    """

    centre: np.ndarray
    step: np.ndarray
    radii: np.ndarray
    rgb: np.ndarray
    angle: float

    def over(self, frame: np.ndarray) -> np.ndarray:
        """Lay the thing over a frame and move it on."""
        y, x = np.mgrid[:FRAME_PX, :FRAME_PX]
        right, down = x - self.centre[0], y - self.centre[1]
        cos, sin = np.cos(self.angle), np.sin(self.angle)
        along, across = (cos * right + sin * down) / self.radii[0], (cos * down - sin * right) / self.radii[1]
        mask = np.clip(2.5 * (1 - np.hypot(along, across)), 0, 1)[..., None]
        shaded = self.rgb * (1 - 0.35 * np.clip(across, -1, 1)[..., None])
        self.centre = (self.centre + self.step) % FRAME_PX
        return frame * (1 - mask) + np.clip(shaded, 0, 255) * mask


class NaturalBackground:
    """A textured scene with moving things, as colourful as what is asked about."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.cut()

    def cut(self) -> None:
        """Change to another scene at once."""
        rng = self._rng
        frequency = np.fft.fftfreq(CANVAS_PX)
        radius = np.hypot(frequency[:, None], frequency)
        radius[0, 0] = np.inf
        real, imaginary = rng.normal(size=(2, CANVAS_PX, CANVAS_PX, 4))
        fields = np.fft.ifft2((real + 1j * imaginary) / radius[..., None] ** _FALL_OFF, axes=(0, 1)).real
        fields /= fields.std(axis=(0, 1))
        mean = rng.uniform(60, 170) + rng.uniform(-30, 30, size=3)
        light, tint = rng.uniform(25, 45) * fields[..., :1], rng.uniform(8, 22) * fields[..., 1:]
        self._canvas = np.clip(mean + light + tint, 0, 255)
        self._drift_px = rng.uniform(-5, 5, size=2)
        self._offset = rng.uniform(0, CANVAS_PX, size=2)
        self._things = [
            _Thing(
                centre=rng.uniform(0, FRAME_PX, size=2),
                step=rng.uniform(-4, 4, size=2),
                radii=rng.uniform(5, 16, size=2),
                rgb=rng.uniform(20, 235, size=3),
                angle=rng.uniform(0, np.pi),
            )
            for _ in range(rng.integers(1, 4))
        ]

    def frame(self) -> np.ndarray:
        """The next frame, (FRAME_PX, FRAME_PX, 3) float in 0..255."""
        self._offset = self._offset + self._drift_px
        frame = window(self._canvas, self._offset)
        for thing in self._things:
            frame = thing.over(frame)
        return frame + self._rng.normal(0, 4, size=frame.shape)
