"""InternVL3.5: square tiles and frames of 256 tokens, 1-D positions, text around every frame."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.geometry import FrameGeometry
from engine.models.base import Encoded, ModelAdapter, PositionCursor, normalised
from engine.types import MediaKind, VideoBlock


class Adapter(ModelAdapter):
    """`InternVLForConditionalGeneration`. Frames and tiles are encoded independently of each other."""

    model_types = ("internvl",)
    axes = 1

    @classmethod
    def load_model(cls, path: str, **kwargs: Any) -> Any:
        from transformers import InternVLForConditionalGeneration

        return InternVLForConditionalGeneration.from_pretrained(path, **kwargs)

    @classmethod
    def make_geometry(cls, model_config: Any, processor: Any) -> FrameGeometry:
        side, patch = model_config.vision_config.image_size[0], model_config.vision_config.patch_size[0]
        frame_text = processor.tokenizer("\nFrame1000: ", add_special_tokens=False).input_ids
        return FrameGeometry(
            frames_per_group=1,
            unit_px=round(patch / model_config.downsample_ratio),
            fixed_px=side,
            group_text_tokens=len(frame_text) + 2,
            max_tiles=getattr(processor.image_processor, "max_patches", 12),
            resample=int(processor.video_processor.resample),
        )

    @classmethod
    def opening_text(cls, processor: Any, kind: MediaKind) -> str:
        return str(processor.start_image_token) if kind == "image" else ""

    def close_text(self, kind: MediaKind) -> str:
        return self.processor.end_image_token + "\n" if kind == "image" else "\n"

    def encode(self, block: VideoBlock) -> Encoded:
        which = self.processor.video_processor if block.kind == "video" else self.processor.image_processor
        pixels = normalised(block.frames, which, self.device, self.dtype)
        features = self.model.model.get_image_features(pixel_values=pixels)
        embeds = getattr(features, "pooler_output", features)
        pieces = [self._frame(block, i, embeds[i]) for i in range(block.groups)]
        return Encoded(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))

    def positions(self, block: VideoBlock, piece: Encoded, cursor: PositionCursor) -> Tensor:
        """One after the other, text and image alike."""
        return torch.arange(cursor.next, cursor.next + len(piece.embeds), device=self.device)[:, None]

    def span_positions(self, groups: int, seconds: float, height_px: int, width_px: int) -> int:
        return groups * self.geometry.group_tokens(self.geometry.fixed_px or 0, self.geometry.fixed_px or 0)

    def _frame(self, block: VideoBlock, i: int, features: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One frame or tile with the text that belongs to it: embeds, visual, group, place."""
        number = block.first_group + i
        before, after = torch.empty(0, features.shape[-1]), torch.empty(0, features.shape[-1])
        if block.kind == "video":
            lead = "\n" if number else ""
            before = self.embed_text(self.tokenize(f"{lead}Frame{number + 1}: {self.processor.start_image_token}", special=True))
            after = self.embed_text(self.tokenize(self.processor.end_image_token, special=True))
        embeds = torch.cat([before.to(features), features, after.to(features)])
        visual = torch.zeros(len(embeds), dtype=torch.bool, device=self.device)
        visual[len(before) : len(before) + len(features)] = True
        group = torch.full((len(embeds),), number, device=self.device)
        return embeds, visual, group, torch.arange(len(embeds), device=self.device)
