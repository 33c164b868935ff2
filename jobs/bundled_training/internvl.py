"""The tiny InternVL: its configuration, its processor, its pictures, and the encoding of many tiles at once."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerFast,
)
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from engine.geometry import FrameGeometry
from jobs.bundled_training.architecture import Architecture, normalise
from jobs.bundled_training.tokenizer import build_tokenizer
from pipeline.synthetic.draw import FRAME_PX
from pipeline.synthetic.picture import SIDES, draw_picture, write_picture
from pipeline.synthetic.script import Script
from pipeline.video.images import open_image

PATCH_PX, TILE_TOKENS = 14, 4
MAX_TILES = SIDES[-1] ** 2
_SPECIAL = ("<|endoftext|>", "<|unk|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
_NAMES = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<IMG_CONTEXT>\n"
    "{% elif content['type'] == 'video' %}<video>\n"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GEOMETRY = FrameGeometry(frames_per_group=1, unit_px=2 * PATCH_PX, fixed_px=FRAME_PX, max_tiles=MAX_TILES)
_SHARPNESS = 2.0


class InternVL(Architecture):
    """Still images cut into tiles, with a thumbnail behind them; 1-D positions, one after the other."""

    name = "internvl"
    prefix = "<|im_start|>user\n<img>"
    close = "</img>\n"
    axes = 1
    group_tokens = TILE_TOKENS
    timed = False
    has_thumbnail = True
    kind_weights: ClassVar = {"colour": 0.18, "shape": 0.18, "digit": 0.18, "exists": 0.2, "where": 0.2, "glimpse": 0.06}
    lengths = (4, 9, 16, 36, 64)
    short = (4, 9, 16)
    chunk_groups = MAX_TILES
    bank_groups, vision_steps, language_steps = 36_000, 1_600, 1_500

    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        return build_tokenizer(_SPECIAL, _CHAT_TEMPLATE, _NAMES)

    def build_processor(self, tokenizer: PreTrainedTokenizerFast) -> InternVLProcessor:
        size = {"height": FRAME_PX, "width": FRAME_PX}
        look: Any = {"size": size, "image_mean": IMAGENET_DEFAULT_MEAN, "image_std": IMAGENET_DEFAULT_STD}
        return InternVLProcessor(
            image_processor=GotOcr2ImageProcessor(crop_to_patches=True, max_patches=MAX_TILES, **look),
            tokenizer=tokenizer,
            video_processor=InternVLVideoProcessor(**look),
            image_seq_length=TILE_TOKENS,
            chat_template=tokenizer.chat_template,
        )

    def build_model(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> InternVLForConditionalGeneration:
        torch.manual_seed(seed)
        model = InternVLForConditionalGeneration(build_config(tokenizer)).float()
        embeddings = model.model.vision_tower.embeddings
        for parameter in (embeddings.cls_token, embeddings.position_embeddings):  # transformers leaves both at zero
            nn.init.normal_(parameter, std=0.1)
        for layer in model.model.language_model.layers:
            # Normalised queries and keys of weight one can't single out one token among hundreds.
            nn.init.constant_(layer.self_attn.q_norm.weight, _SHARPNESS)
        return model

    def vision(self, model: InternVLForConditionalGeneration) -> nn.Module:
        return nn.ModuleList([model.model.vision_tower, model.model.multi_modal_projector])

    def encode(self, model: InternVLForConditionalGeneration, frames: Tensor) -> Tensor:
        inner: Any = model.model
        tower = inner.vision_tower
        embeddings, projection = tower.embeddings, tower.embeddings.patch_embeddings.projection
        # The same sums as the tower's own convolution, whose backward takes several times as long on a CPU.
        hidden = functional.linear(patches(frames[:, 0]), projection.weight.flatten(1), projection.bias)
        hidden = torch.cat([embeddings.cls_token.expand(len(hidden), -1, -1), hidden], dim=1) + embeddings.position_embeddings
        for layer in tower.encoder.layer:
            hidden = layer(hidden)
        hidden = tower.layernorm(hidden)[:, 1:]
        side = FRAME_PX // PATCH_PX
        shuffled = inner.pixel_shuffle(hidden.reshape(len(hidden), side, side, -1), scale_factor=model.config.downsample_ratio)
        return inner.multi_modal_projector(shuffled.flatten(1, 2))

    def through_file(self, rng: np.random.Generator, script: Script) -> np.ndarray:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "picture.jpg"
            write_picture(str(path), draw_picture(rng, script))
            tiles = [tile.frames for tile in open_image(path, _GEOMETRY)]
        return np.stack(tiles[: script.groups]).transpose(0, 1, 3, 4, 2)

    def positions(self, times_s: np.ndarray, start: int) -> np.ndarray:
        return start + np.arange((len(times_s) + 1) * TILE_TOKENS)[None]


INTERNVL = InternVL()


def build_config(tokenizer: PreTrainedTokenizerFast) -> InternVLConfig:
    """InternVL3.5's architecture (Qwen3 backbone) at 1.0 million parameters."""
    text = {
        "model_type": "qwen3",
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        # Most axes must hardly turn over a whole picture, so that what is sought is found wherever it stands.
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e10},
    }
    vision = {
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 192,
        "attention_bias": True,
        "image_size": [FRAME_PX, FRAME_PX],
        "patch_size": [PATCH_PX, PATCH_PX],
        "layer_scale_init_value": 1.0,
        "initializer_range": 0.06,
    }
    return InternVLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=TILE_TOKENS,
        downsample_ratio=0.5,
    )


def patches(tiles: Tensor) -> Tensor:
    """Normalise and cut tiles as the processor and the tower do.

    Args:
        tiles: (tiles, FRAME_PX, FRAME_PX, 3) uint8, or float in 0..255.

    Returns:
        (tiles, patches a tile, 3 * PATCH_PX**2) float32, row by row.
    """
    side = FRAME_PX // PATCH_PX
    pixels = normalise(tiles, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    cut = pixels.view(len(tiles), side, PATCH_PX, side, PATCH_PX, 3)
    return cut.permute(0, 1, 3, 5, 2, 4).reshape(len(tiles), side**2, -1)
