"""The small world of the synthetic videos: its colours, shapes, digits and coarse times."""

from __future__ import annotations

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 35, 35),
    "green": (35, 175, 55),
    "blue": (45, 70, 235),
    "yellow": (240, 225, 45),
    "purple": (165, 45, 205),
    "orange": (250, 140, 20),
    "cyan": (55, 215, 225),
    "white": (245, 245, 245),
}

SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "cross", "star", "ring", "diamond", "heart")

DIGITS: tuple[str, ...] = tuple("0123456789")

# Upper edges double, so that the same words serve videos of half a minute and of hours.
TIME_RANGES: tuple[tuple[float, str], ...] = (
    (15.0, "before 15 seconds"),
    (30.0, "15 to 30 seconds"),
    (60.0, "30 to 60 seconds"),
    (120.0, "1 to 2 minutes"),
    (240.0, "2 to 4 minutes"),
    (480.0, "4 to 8 minutes"),
    (float("inf"), "after 8 minutes"),
)

QUARTERS: tuple[str, ...] = ("top left", "top right", "bottom left", "bottom right")

PLURALS: dict[str, str] = {shape: {"cross": "crosses"}.get(shape, shape + "s") for shape in SHAPES}


def quarter(cell: int, side: int) -> str | None:
    """The quarter of a picture of side x side cells that a cell is in, counted row by row; None in the middle row or column of an odd side."""
    down, right = 2 * (cell // side) + 1 - side, 2 * (cell % side) + 1 - side
    return QUARTERS[2 * (down > 0) + (right > 0)] if down and right else None


def time_range(time_s: float) -> str:
    """The coarse time that a moment, in seconds from the start of the video, falls into."""
    return next(name for edge_s, name in TIME_RANGES if time_s < edge_s)
