"""How big a frame must be and how many tokens it costs: known from a checkpoint's processor, without its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # whoever only plans waits for neither
    import numpy as np

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class FrameGeometry:
    """The frame rules of one model, small enough to send to every decode worker.

    Attributes:
        frames_per_group: frames that make one temporal group.
        unit_px: side of the square of pixels that becomes one token (patch times merge); sizes are multiples of it.
        min_px, max_px: bounds on height * width of one video frame (area, in pixels). Unused with `fixed_px`.
        image_min_px, image_max_px: the same for a still image; None as for video.
        fixed_px: side of the square every frame is resized to (InternVL); None when the size follows the aspect ratio.
        group_text_tokens: tokens of text that each group brings along ("Frame7: <img>...</img>" in InternVL).
        max_tiles: most tiles an image is cut into (thumbnail not counted); 1 when images aren't tiled.
        resample: PIL resampling code of the processor (3 is bicubic).
    """

    frames_per_group: int
    unit_px: int
    min_px: int = 0
    max_px: int = 0
    fixed_px: int | None = None
    group_text_tokens: int = 0
    max_tiles: int = 1
    resample: int = 3
    image_min_px: int | None = None
    image_max_px: int | None = None

    def for_images(self) -> FrameGeometry:
        """The rules for still images: their own pixel bounds."""
        return self.limited(self.image_min_px, self.image_max_px)

    def limited(self, min_px: int | None = None, max_px: int | None = None) -> FrameGeometry:
        """The same rules with other pixel bounds (areas); None keeps the processor's."""
        return replace(self, min_px=self.min_px if min_px is None else min_px, max_px=self.max_px if max_px is None else max_px)

    def target_size(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Size (height, width) in pixels that the model's processor would resize a frame to: transformers' `smart_resize`, held to it by a test.

        Raises:
            ValueError: the frame is too long and thin for the processor.
        """
        if self.fixed_px is not None:
            return self.fixed_px, self.fixed_px
        ratio, unit, area = max(height_px, width_px) / min(height_px, width_px), self.unit_px, height_px * width_px
        if ratio > MAX_ASPECT_RATIO:
            raise ValueError(f"aspect ratio {ratio:.0f} must be at most {MAX_ASPECT_RATIO}")
        height, width = round(height_px / unit) * unit, round(width_px / unit) * unit
        if height * width > self.max_px:
            shrink = math.sqrt(area / self.max_px)
            return max(unit, math.floor(height_px / shrink / unit) * unit), max(unit, math.floor(width_px / shrink / unit) * unit)
        if height * width < self.min_px:
            stretch = math.sqrt(self.min_px / area)
            return math.ceil(height_px * stretch / unit) * unit, math.ceil(width_px * stretch / unit) * unit
        return height, width

    def group_tokens(self, height_px: int, width_px: int) -> int:
        """Tokens one group costs, its text included, given a frame's size after `target_size`."""
        return (height_px // self.unit_px) * (width_px // self.unit_px) + self.group_text_tokens

    def resize(self, frames: np.ndarray) -> np.ndarray:
        """Resize as the processor does.

        Args:
            frames: (frames, 3, height_px, width_px) uint8 RGB.

        Returns:
            (frames, 3, target height, target width) uint8, equal to the processor's own result before normalisation.
        """
        size = self.target_size(*frames.shape[-2:])
        if size == frames.shape[-2:]:
            return frames
        import numpy as np
        import torch
        from torchvision.transforms.v2 import functional as tvf

        mode = {0: tvf.InterpolationMode.NEAREST, 2: tvf.InterpolationMode.BILINEAR, 3: tvf.InterpolationMode.BICUBIC}[self.resample]
        return tvf.resize(torch.from_numpy(np.ascontiguousarray(frames)), list(size), interpolation=mode, antialias=True).numpy()
