"""Random-weight models of the real Qwen2.5-VL architecture, in memory, for benchmarks of speed and size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from engine import Engine, EngineConfig, FrameGroup, VideoBlock
from engine.models.base import Encoded, PositionCursor
from engine.models.qwen2_5_vl import Adapter
from jobs.bundled_training.qwen2_5_vl import build_config, build_processor
from jobs.bundled_training.tokenizer import build_tokenizer

FRAME_PX = 196
"""Side of a benchmark frame: 49 tokens a temporal group."""


class WithoutTower(Adapter):
    """Draws each group's embeddings from a generator instead of encoding its frames: what is timed is the language model alone."""

    def encode(self, block: VideoBlock) -> Encoded:
        tokens = self.geometry.group_tokens(*block.frames.shape[-2:])
        embeds = torch.cat([self._group(block.first_group + i, tokens) for i in range(block.groups)])
        index = torch.arange(len(embeds), device=self.device)
        return Encoded(embeds, torch.ones_like(index, dtype=torch.bool), index // tokens + block.first_group, index % tokens)

    def _group(self, number: int, tokens: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(number)
        return torch.randn(tokens, self.text_config.hidden_size, generator=generator, device=self.device, dtype=self.dtype)


def bench_engine(
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    adapter: type[Adapter] = Adapter,
    vision: Mapping[str, Any] | None = None,
    **settings,
) -> Engine:
    """An engine over random weights: `hidden` wide, `layers` deep, and a vision tower small beside it.

    Args:
        adapter: the class that drives the model.
        vision: fields of the tower's configuration that differ.
        settings: fields of `EngineConfig` that differ.
    """
    tokenizer = build_tokenizer()
    base = build_config(tokenizer).to_dict()
    head_dim = hidden // heads
    base["text_config"] |= {
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 1 << 30,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [head_dim // 8, *[head_dim * 3 // 16] * 2]},
    }
    base["vision_config"] |= {"out_hidden_size": hidden, "depth": 2, "hidden_size": 48, "fullatt_block_indexes": [1], **(vision or {})}
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**base)).eval().requires_grad_(False)
    config = EngineConfig(**({"device": "auto"} | settings))
    device = torch.device("cuda" if config.device == "auto" and torch.cuda.is_available() else config.device.replace("auto", "cpu"))
    model = model.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    return Engine(adapter(model, build_processor(tokenizer), config), config)


def with_settings(engine: Engine, **settings: Any) -> Engine:
    """The same loaded model under other engine settings."""
    return Engine(engine.adapter, engine.config.model_copy(update=settings))


def noise_blocks(engine: Engine, tokens: int, seed: int = 0) -> Iterator[VideoBlock]:
    """A stream of about `tokens` visual tokens of noise, made block by block."""
    rng = np.random.default_rng(seed)
    shape = (engine.geometry.frames_per_group, 3, FRAME_PX, FRAME_PX)
    count = max(1, tokens // engine.geometry.group_tokens(FRAME_PX, FRAME_PX))
    groups = (FrameGroup(rng.integers(0, 256, shape, dtype=np.uint8), float(i)) for i in range(count))
    return engine.planner.blocks(groups, seconds_per_group=1.0)


def blank_blocks(engine: Engine, tokens: int) -> Iterator[VideoBlock]:
    """A stream of about `tokens` visual tokens of black frames, for an engine that doesn't look at them."""
    frames = np.zeros((engine.geometry.frames_per_group, 3, FRAME_PX, FRAME_PX), np.uint8)
    count = max(1, tokens // engine.geometry.group_tokens(FRAME_PX, FRAME_PX))
    return engine.planner.blocks((FrameGroup(frames, float(i)) for i in range(count)), seconds_per_group=1.0)


@contextmanager
def library_attention(config: Any) -> Iterator[None]:
    """transformers' own attention instead of the engine's, in the part of a model that has this configuration."""
    ours, config._attn_implementation = config._attn_implementation, "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = ours


def whole_prompt(engine: Engine, tokens: int) -> tuple[Tensor, Tensor]:
    """What an engine of `WithoutTower` reads of `blank_blocks`, in one piece: embeds (1, n, hidden) and positions (1, n, axes)."""
    adapter = engine.adapter
    head = [
        token
        for text in (adapter.prompt_parts()[0], adapter.opening_text(adapter.processor, "video"))
        for token in adapter.tokenize(text, special=True)
    ]
    cursor = PositionCursor(len(head), len(head))
    pieces = [adapter.embed_text(head)]
    positions = [torch.arange(len(head), device=adapter.device)[:, None].expand(-1, adapter.axes)]
    for block in blank_blocks(engine, tokens):
        piece = adapter.encode(block)
        pieces.append(piece.embeds)
        positions.append(adapter.positions(block, piece, cursor))
    return torch.cat(pieces)[None], torch.cat(positions)[None]


def full_forward(engine: Engine, embeds: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    """transformers' own forward of the language model over new tokens, into its own growing cache: (1, n, hidden) states."""
    with library_attention(engine.adapter.text_config), torch.inference_mode():
        return engine.adapter.text_model(
            inputs_embeds=embeds,
            position_ids=positions.permute(2, 0, 1),
            use_cache=True,
            **{engine.adapter.cache_argument: cache},
        ).last_hidden_state


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values a transformers cache holds now."""
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
