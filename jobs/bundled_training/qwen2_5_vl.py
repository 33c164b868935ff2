"""The tiny Qwen2.5-VL: its configuration, its processor, its videos, and a vision pass that encodes many groups at once."""

from __future__ import annotations

import io
from typing import Any, ClassVar

import av
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from jobs.bundled_training.architecture import Architecture, normalise
from jobs.bundled_training.tokenizer import build_tokenizer
from pipeline.synthetic.draw import FRAME_PX, Background
from pipeline.synthetic.natural import NaturalBackground
from pipeline.synthetic.script import Script
from pipeline.synthetic.video import FRAMES_PER_GROUP, draw_frames, write_video

PATCH_PX, MERGE, GROUP_FRAMES = 14, 2, 2
GROUP_TOKENS = (FRAME_PX // (PATCH_PX * MERGE)) ** 2
_GRID = FRAME_PX // PATCH_PX
TOKENS_PER_SECOND = 2
_NATURAL_SHARE = 1 / 3
"""Of the bank's videos: those with textured, colourful backgrounds, harder to tell from needles than the plain ones."""


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """Qwen2.5-VL's architecture at 1.2 million parameters."""

    def token(name: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(name))  # type: ignore[arg-type]

    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": token("<|im_end|>"),
        "pad_token_id": token("<|endoftext|>"),
        # The longest temporal wavelength must span a few hundred groups, and the axes that don't carry time must hardly turn at all.
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e10, "mrope_section": [4, 6, 6]},
    }
    vision = {
        "depth": 3,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_heads": 3,
        "patch_size": PATCH_PX,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": GROUP_FRAMES,
        "window_size": PATCH_PX * MERGE,
        "fullatt_block_indexes": [1, 2],
        "out_hidden_size": 128,
        "tokens_per_second": TOKENS_PER_SECOND,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLProcessor:
    """A processor that leaves frames of FRAME_PX x FRAME_PX as they are and brings others near that area."""
    size = {"shortest_edge": FRAME_PX**2, "longest_edge": FRAME_PX**2}
    sizes = {"size": size, "patch_size": PATCH_PX, "merge_size": MERGE, "temporal_patch_size": GROUP_FRAMES}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        video_processor=Qwen2VLVideoProcessor(**sizes),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained model, the same for the same seed."""
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(build_config(tokenizer)).float()


def patches(frames: Tensor) -> Tensor:
    """Normalise and cut groups as the processor does.

    Args:
        frames: (groups, GROUP_FRAMES, FRAME_PX, FRAME_PX, 3) uint8, or float in 0..255.

    Returns:
        (groups, patches a group, 3 * GROUP_FRAMES * PATCH_PX**2) float32, in the vision tower's order.
    """
    pixels = normalise(frames, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
    side = _GRID // MERGE
    cut = pixels.view(len(frames), GROUP_FRAMES, side, MERGE, PATCH_PX, side, MERGE, PATCH_PX, 3)
    return cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(len(frames), _GRID**2, -1)


def encode_groups(model: Qwen2_5_VLForConditionalGeneration, patches: Tensor) -> Tensor:
    """The vision tower over many groups in a few batched products instead of a loop over windows.

    Args:
        patches: (groups, patches a group, values), from `patches`.

    Returns:
        (groups, GROUP_TOKENS, hidden) what `get_video_features` gives for the same groups.
    """
    tower: Any = model.model.visual
    groups, count, _ = patches.shape
    # The same sums as the tower's own convolution, whose backward takes four times as long on a CPU.
    hidden = functional.linear(patches, tower.patch_embed.proj.weight.flatten(1))
    places = torch.arange(count)
    window, inner = places // MERGE**2, places % MERGE**2
    side = _GRID // MERGE
    rows, columns = (window // side) * MERGE + inner // MERGE, (window % side) * MERGE + inner % MERGE
    cos, sin = tower.rotary_pos_emb(hidden, torch.stack([rows, columns], dim=1))
    for index, block in enumerate(tower.blocks):
        span = count if index in tower.fullatt_block_indexes else MERGE**2
        hidden = hidden + _attend(block.attn, block.norm1(hidden), cos, sin, span)
        hidden = hidden + block.mlp(block.norm2(hidden))
    return tower.merger(hidden.reshape(groups * count, -1)).view(groups, GROUP_TOKENS, -1)


def _attend(attention: Any, hidden: Tensor, cos: Tensor, sin: Tensor, span: int) -> Tensor:
    groups, count, width = hidden.shape
    qkv = attention.qkv(hidden).view(groups, count, 3, attention.num_heads, -1)
    query, key, value = qkv.unbind(2)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    def windows(x: Tensor) -> Tensor:
        return x.reshape(groups * count // span, span, attention.num_heads, -1).transpose(1, 2)

    mixed = functional.scaled_dot_product_attention(windows(rotate(query)), windows(rotate(key)), windows(value))
    return attention.proj(mixed.transpose(1, 2).reshape(groups, count, width))


class Qwen2_5_VL(Architecture):
    """Videos of two frames a group, 3-D positions that follow the clock."""

    name = "qwen2_5_vl"
    prefix = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
    close = "<|vision_end|>"
    axes = 3
    group_tokens = GROUP_TOKENS
    timed = True
    has_thumbnail = False
    kind_weights: ClassVar = {
        "colour": 0.18,
        "shape": 0.18,
        "digit": 0.18,
        "exists": 0.18,
        "count": 0.09,
        "order": 0.09,
        "when": 0.10,
        "glimpse": 0.08,
    }
    lengths = (2, 4, 8, 16, 32, 64)
    short = (4, 8, 16)
    chunk_groups = 60
    bank_groups, vision_steps, language_steps = 36_000, 1_600, 4_000

    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        return build_tokenizer()

    def build_processor(self, tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLProcessor:
        return build_processor(tokenizer)

    def build_model(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2_5_VLForConditionalGeneration:
        return build_model(tokenizer, seed)

    def vision(self, model: Qwen2_5_VLForConditionalGeneration) -> nn.Module:
        return model.model.visual

    def encode(self, model: Qwen2_5_VLForConditionalGeneration, frames: Tensor) -> Tensor:
        return encode_groups(model, patches(frames))

    def through_file(self, rng: np.random.Generator, script: Script) -> np.ndarray:
        file = io.BytesIO()
        scenery = NaturalBackground if rng.random() < _NATURAL_SHARE else Background
        write_video(file, draw_frames(rng, script, scenery=scenery))
        file.seek(0)
        step = FRAMES_PER_GROUP // GROUP_FRAMES  # keeps the frames that a sampler at 2 fps would take
        with av.open(file) as container:
            kept = [f.to_ndarray(format="rgb24") for i, f in enumerate(container.decode(video=0)) if i % step == 0]
        return np.stack(kept).reshape(script.groups, GROUP_FRAMES, *kept[0].shape)

    def positions(self, times_s: np.ndarray, start: int) -> np.ndarray:
        side = int(GROUP_TOKENS**0.5)
        time = np.repeat(np.floor(times_s * TOKENS_PER_SECOND).astype(np.int64), GROUP_TOKENS)
        place = np.tile(np.arange(GROUP_TOKENS), len(times_s))
        return start + np.stack([time, place // side, place % side])


QWEN2_5_VL = Qwen2_5_VL()
