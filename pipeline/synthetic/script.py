"""What happens in a synthetic video: which needle in which group, where it glitches, where it cuts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.errors import ConfigError
from pipeline.synthetic.vocabulary import COLOURS, DIGITS, SHAPES

EVENTS: dict[str, tuple[int, int]] = {"simple": (3, 1), "dense": (8, 4), "natural": (8, 4)}
"""Coloured shapes and coloured digits in one video of each set."""

_GLITCH_SHARE = 0.06
_CUT_SHARE = 0.12


@dataclass(frozen=True)
class Needle:
    """One event: a coloured shape or digit, on screen for exactly one temporal group.

    Attributes:
        group: index of the temporal group that shows it.
        colour: a key of `COLOURS`.
        figure: a shape's name or a digit.
    """

    group: int
    colour: str
    figure: str

    @property
    def is_digit(self) -> bool:
        """Whether the figure is a digit rather than a shape."""
        return self.figure in DIGITS

    @property
    def name(self) -> str:
        """How a question calls it, "red circle"."""
        return f"{self.colour} {self.figure}"


@dataclass(frozen=True)
class Script:
    """Everything that a video shows, before a pixel is drawn.

    Attributes:
        groups: length, in temporal groups.
        needles: in order of time; no two in one group.
        glitches: groups that show a loud, meaningless picture.
        cuts: groups at whose start the scene changes.
    """

    groups: int
    needles: tuple[Needle, ...]
    glitches: frozenset[int]
    cuts: frozenset[int]

    @property
    def shapes(self) -> tuple[Needle, ...]:
        """The needles that are shapes."""
        return tuple(n for n in self.needles if not n.is_digit)

    @property
    def digits(self) -> tuple[Needle, ...]:
        """The needles that are digits."""
        return tuple(n for n in self.needles if n.is_digit)


def write_script(rng: np.random.Generator, groups: int, set_name: str) -> Script:
    """Draw a script for one of the named sets, a key of `EVENTS`.

    Raises:
        ConfigError: the video is too short for the set's events.
    """
    shapes, digits = EVENTS[set_name]
    if groups < shapes + digits:
        raise ConfigError(f"groups={groups} is too short for the {shapes + digits} events of the {set_name} set; use at least that many")
    return script_with(rng, groups, shapes, digits)


def script_with(rng: np.random.Generator, groups: int, shapes: int, digits: int, glitch_share: float = _GLITCH_SHARE) -> Script:
    """Draw a script with given numbers of shapes and digits, each (colour, figure) at most once."""
    pairs = _pairs(rng, SHAPES, shapes) + _pairs(rng, DIGITS, digits)
    order = rng.permutation(len(pairs))
    places = np.sort(rng.choice(groups, size=len(pairs), replace=False))
    needles = tuple(Needle(int(place), *pairs[i]) for place, i in zip(places, order, strict=True))
    free = np.setdiff1d(np.arange(groups), places)
    glitches = free[rng.random(len(free)) < glitch_share]
    cuts = np.flatnonzero(rng.random(groups) < _CUT_SHARE)
    return Script(groups, needles, frozenset(glitches.tolist()), frozenset(cuts.tolist()))


def _pairs(rng: np.random.Generator, figures: tuple[str, ...], count: int) -> list[tuple[str, str]]:
    colours = list(COLOURS)
    picks = rng.choice(len(colours) * len(figures), size=count, replace=False)
    return [(colours[p // len(figures)], figures[p % len(figures)]) for p in picks]
