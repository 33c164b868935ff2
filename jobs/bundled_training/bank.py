"""Groups that went through the codec, with their labels: the raw material of both training stages."""

from __future__ import annotations

import io
from dataclasses import dataclass

import av
import numpy as np
import torch
from torch import Tensor

from jobs.bundled_training.model import GROUP_FRAMES
from pipeline.synthetic.script import Script, script_with
from pipeline.synthetic.video import FRAMES_PER_GROUP, draw_frames, write_video
from pipeline.synthetic.vocabulary import COLOURS, DIGITS, SHAPES

COLOUR_NAMES = tuple(COLOURS)
FIGURES = SHAPES + DIGITS
NOTHING_COLOUR, NOTHING_FIGURE = len(COLOUR_NAMES), len(FIGURES)
_CHUNK_GROUPS = 60


@dataclass(frozen=True)
class GroupBank:
    """Decoded groups and what they show.

    Attributes:
        frames: (groups, GROUP_FRAMES, px, px, 3) uint8, as decoded from H.264.
        colour, figure: (groups,) int64 index into COLOUR_NAMES and FIGURES; one past the end when the group shows no needle.
        glitch: (groups,) bool, whether the group is a glitch.
    """

    frames: Tensor
    colour: Tensor
    figure: Tensor
    glitch: Tensor


def build_bank(seed: int, groups: int) -> GroupBank:
    """Draw, encode and decode crowded videos: about two thirds of the groups show a needle."""
    frames, colours, figures, glitches = [], [], [], []
    for chunk in range(groups // _CHUNK_GROUPS):
        rng = np.random.default_rng([seed, chunk])
        script = script_with(rng, _CHUNK_GROUPS, shapes=18, digits=22, glitch_share=0.25)
        frames.append(through_codec(rng, script))
        colour, figure = np.full(_CHUNK_GROUPS, NOTHING_COLOUR), np.full(_CHUNK_GROUPS, NOTHING_FIGURE)
        for needle in script.needles:
            colour[needle.group], figure[needle.group] = COLOUR_NAMES.index(needle.colour), FIGURES.index(needle.figure)
        colours.append(colour)
        figures.append(figure)
        glitches.append(np.isin(np.arange(_CHUNK_GROUPS), sorted(script.glitches)))
    return GroupBank(
        torch.from_numpy(np.concatenate(frames)),
        torch.from_numpy(np.concatenate(colours)),
        torch.from_numpy(np.concatenate(figures)),
        torch.from_numpy(np.concatenate(glitches)),
    )


def through_codec(rng: np.random.Generator, script: Script) -> np.ndarray:
    """Encode a script and decode it again, keeping the frames a sampler at 2 fps would take.

    Returns:
        (groups, GROUP_FRAMES, px, px, 3) uint8.
    """
    file = io.BytesIO()
    write_video(file, draw_frames(rng, script))
    file.seek(0)
    step = FRAMES_PER_GROUP // GROUP_FRAMES
    with av.open(file) as container:
        kept = [f.to_ndarray(format="rgb24") for i, f in enumerate(container.decode(video=0)) if i % step == 0]
    return np.stack(kept).reshape(script.groups, GROUP_FRAMES, *kept[0].shape)
