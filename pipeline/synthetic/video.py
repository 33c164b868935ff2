"""From a script to an H.264 file, frame by frame: memory doesn't grow with the video's length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import av
import numpy as np

from pipeline.synthetic.draw import FRAME_PX, Background, NeedleSprite, glitch
from pipeline.synthetic.natural import NaturalBackground
from pipeline.synthetic.script import Script

FILE_FPS = 4
GROUP_S = 1.0
"""Seconds a temporal group lasts: two frames sampled at 2 fps."""

FRAMES_PER_GROUP = int(FILE_FPS * GROUP_S)

_X264 = {
    "crf": "21",
    "preset": "veryfast",
    "g": str(12 * FILE_FPS),
    # With macroblock trees or several threads the same frames don't always give the same bytes.
    "x264-params": "threads=1:mbtree=0",
}


def draw_frames(
    rng: np.random.Generator,
    script: Script,
    frames_per_group: int = FRAMES_PER_GROUP,
    scenery: type[Background] | type[NaturalBackground] = Background,
) -> Iterator[np.ndarray]:
    """Yield every frame of the file, (FRAME_PX, FRAME_PX, 3) uint8 RGB, `frames_per_group` a temporal group."""
    background = scenery(rng)
    needles = {n.group: n for n in script.needles}
    for group in range(script.groups):
        if group in script.cuts:
            background.cut()
        needle = needles.get(group)
        sprite = NeedleSprite(rng, needle.colour, needle.figure) if needle else None
        flash = glitch(rng) if group in script.glitches else None
        for _ in range(frames_per_group):
            frame = background.frame() if flash is None else flash
            if sprite is not None:
                frame = sprite.over(frame)
            yield np.clip(frame, 0, 255).astype(np.uint8)


def write_video(target: str | BinaryIO, frames: Iterator[np.ndarray]) -> None:
    """Encode frames as H.264 in MP4, 4:2:0, `FILE_FPS` frames a second.

    Args:
        target: path or writable, seekable binary file.
        frames: (FRAME_PX, FRAME_PX, 3) uint8 RGB.
    """
    # bitexact: no time of writing and no library version in the file, so that a seed gives the same bytes.
    with av.open(target, "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libx264", rate=FILE_FPS, options=_X264)
        stream.width = stream.height = FRAME_PX
        stream.pix_fmt = "yuv420p"
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
