"""Groups that went through a file, with their labels: the raw material of both training stages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jobs.bundled_training.architecture import Architecture
from pipeline.synthetic.script import script_with
from pipeline.synthetic.vocabulary import COLOURS, DIGITS, SHAPES

COLOUR_NAMES = tuple(COLOURS)
FIGURES = SHAPES + DIGITS
NOTHING_COLOUR, NOTHING_FIGURE = len(COLOUR_NAMES), len(FIGURES)


@dataclass(frozen=True)
class GroupBank:
    """Groups as read from files, and what they show.

    Attributes:
        frames: (groups, frames a group, px, px, 3) uint8.
        colour, figure: (groups,) int64 index into COLOUR_NAMES and FIGURES; one past the end when the group shows no needle.
        glitch: (groups,) bool, whether the group is a glitch.
    """

    frames: Tensor
    colour: Tensor
    figure: Tensor
    glitch: Tensor


def build_bank(architecture: Architecture, seed: int, groups: int) -> GroupBank:
    """Draw, encode and decode crowded videos or pictures: about two thirds of the groups show a needle."""
    frames, colours, figures, glitches = [], [], [], []
    size = architecture.chunk_groups
    for chunk in range(groups // size):
        rng = np.random.default_rng([seed, chunk])
        script = script_with(rng, size, shapes=18, digits=22, glitch_share=0.25)
        frames.append(architecture.through_file(rng, script))
        colour, figure = np.full(size, NOTHING_COLOUR), np.full(size, NOTHING_FIGURE)
        for needle in script.needles:
            colour[needle.group], figure[needle.group] = COLOUR_NAMES.index(needle.colour), FIGURES.index(needle.figure)
        colours.append(colour)
        figures.append(figure)
        glitches.append(np.isin(np.arange(size), sorted(script.glitches)))
    return GroupBank(
        torch.from_numpy(np.concatenate(frames)),
        torch.from_numpy(np.concatenate(colours)),
        torch.from_numpy(np.concatenate(figures)),
        torch.from_numpy(np.concatenate(glitches)),
    )
