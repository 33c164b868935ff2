"""Qwen2.5-VL: 3-D rotary positions, temporal groups of two frames, sizes that follow the aspect ratio."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import attention
from engine.config import EngineConfig
from engine.geometry import FrameGeometry
from engine.models.base import Encoded, ModelAdapter, PositionCursor, normalised
from engine.types import MediaKind, VideoBlock


class Adapter(ModelAdapter):
    """`Qwen2_5_VLForConditionalGeneration`.

    Its vision tower never attends across temporal groups, so encoding block by block gives the features of the whole video.
    """

    model_types = ("qwen2_5_vl",)
    axes = 3
    default_system_prompt = "You are a helpful assistant."

    def __init__(self, model: Any, processor: Any, config: EngineConfig):
        super().__init__(model, processor, config)
        model.config.vision_config._attn_implementation = attention.WINDOWS
        model.model.visual.patch_embed = PatchProduct(model.model.visual.patch_embed.proj)

    @classmethod
    def load_model(cls, path: str, **kwargs: Any) -> Any:
        from transformers import Qwen2_5_VLForConditionalGeneration

        return Qwen2_5_VLForConditionalGeneration.from_pretrained(path, **kwargs)

    @classmethod
    def make_geometry(cls, model_config: Any, processor: Any) -> FrameGeometry:
        vision, video, image = model_config.vision_config, processor.video_processor, processor.image_processor
        return FrameGeometry(
            frames_per_group=vision.temporal_patch_size,
            unit_px=vision.patch_size * vision.spatial_merge_size,
            min_px=video.size["shortest_edge"],
            max_px=video.size["longest_edge"],
            image_min_px=image.size["shortest_edge"],
            image_max_px=image.size["longest_edge"],
            resample=int(video.resample),
        )

    @classmethod
    def opening_text(cls, processor: Any, kind: MediaKind) -> str:
        return "<|vision_start|>"

    def close_text(self, kind: MediaKind) -> str:
        return "<|vision_end|>"

    def encode(self, block: VideoBlock) -> Encoded:
        embeds = self.features(*self.patches(block))
        tokens = len(embeds) // block.groups
        index = torch.arange(len(embeds), device=self.device)
        return Encoded(embeds, torch.ones_like(index, dtype=torch.bool), index // tokens + block.first_group, index % tokens)

    def patches(self, block: VideoBlock) -> tuple[Tensor, Tensor]:
        """What the vision tower takes, as the processor makes it of a block's frames.

        Returns:
            Patches (n, values), merge windows together, and their grid (1, 3) int64: groups, rows, columns.
        """
        pixels = normalised(block.frames, self.processor.video_processor, self.device, self.dtype)
        flat, grid = self._patches(pixels, block.groups)
        return flat, torch.tensor([grid], device=self.device)

    def features(self, patches: Tensor, grid: Tensor) -> Tensor:
        """(tokens, hidden) what the vision tower makes of patches and their grid."""
        found = self.model.model.visual(patches, grid_thw=grid)
        return getattr(found, "pooler_output", found)

    def positions(self, block: VideoBlock, piece: Encoded, cursor: PositionCursor) -> Tensor:
        """The trained rule: time = start + floor(group * seconds per group * tokens per second), rows and columns from start.

        Irregularly sampled groups take their own time instead of group * seconds per group.
        """
        vision = self.model.config.vision_config
        width = block.frames.shape[-1] // self.geometry.unit_px
        group, place = piece.group.long(), piece.place.long()
        if block.kind == "image":
            time = torch.zeros_like(group)
        elif block.seconds_per_group is not None:
            time = (group.double() * block.seconds_per_group * vision.tokens_per_second + 1e-6).floor().long()
        else:
            times_s = torch.tensor(block.times_s, dtype=torch.float64, device=self.device) - cursor.media_time_s
            time = (times_s * vision.tokens_per_second + 1e-6).floor().long()[group - block.first_group]
        return torch.stack([time, place // width, place % width], dim=-1) + cursor.media_start

    def span_positions(self, groups: int, seconds: float, height_px: int, width_px: int) -> int:
        time = int(seconds * self.model.config.vision_config.tokens_per_second) + 1
        return max(time, height_px // self.geometry.unit_px, width_px // self.geometry.unit_px)

    def rotary(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().rotary(like, positions)
        if cos.ndim == 3:
            return cos, sin
        # Older releases return one table an axis, (3, rows, slots, head_dim), and pick the sections later.
        sections = list(self.text_config.rope_parameters["mrope_section"]) * 2
        return tuple(torch.cat([part[i % 3] for i, part in enumerate(table.split(sections, dim=-1))], dim=-1) for table in (cos, sin))  # type: ignore[return-value]

    def _patches(self, pixels: Tensor, groups: int) -> tuple[Tensor, tuple[int, int, int]]:
        """Cut (frames, 3, height, width) into the rows the tower wants, merge windows together, as the processor does."""
        vision = self.model.config.vision_config
        patch, merge, depth = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        rows, columns = pixels.shape[-2] // patch, pixels.shape[-1] // patch
        cut = pixels.view(groups, depth, 3, rows // merge, merge, patch, columns // merge, merge, patch)
        flat = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(groups * rows * columns, -1)
        return flat, (groups, rows, columns)


class PatchProduct(nn.Module):
    """The tower's patch embedding as a matrix product: the same numbers as its convolution, whose stride is its kernel, in less time.

    Args:
        proj: the convolution; its weight keeps its name.
    """

    def __init__(self, proj: nn.Conv3d):
        super().__init__()
        self.proj = proj

    def forward(self, patches: Tensor) -> Tensor:
        weight = self.proj.weight.flatten(1)
        return F.linear(patches.to(weight.dtype), weight)
