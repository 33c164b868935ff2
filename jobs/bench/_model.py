"""Random-weight models of the real Qwen2.5-VL architecture, in memory, for benchmarks of speed and size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from engine import Engine, EngineConfig, FrameGroup, VideoBlock
from engine.models.qwen2_5_vl import Adapter
from jobs.bundled_training.model import build_config, build_processor
from jobs.bundled_training.tokenizer import build_tokenizer

FRAME_PX = 196
"""Side of a benchmark frame: 49 tokens a temporal group."""


def bench_engine(*, hidden: int, layers: int, heads: int, kv_heads: int, **settings) -> Engine:
    """An engine over random weights: `hidden` wide, `layers` deep, and a vision tower small beside it."""
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
    base["vision_config"] |= {"out_hidden_size": hidden, "depth": 2, "hidden_size": 48, "fullatt_block_indexes": [1]}
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**base)).eval().requires_grad_(False)
    config = EngineConfig(**({"device": "auto"} | settings))
    device = torch.device("cuda" if config.device == "auto" and torch.cuda.is_available() else config.device.replace("auto", "cpu"))
    model = model.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    return Engine(Adapter(model, build_processor(tokenizer), config), config)


def noise_blocks(engine: Engine, tokens: int, seed: int = 0) -> Iterator[VideoBlock]:
    """A stream of about `tokens` visual tokens of noise, made block by block."""
    rng = np.random.default_rng(seed)
    shape = (engine.geometry.frames_per_group, 3, FRAME_PX, FRAME_PX)
    count = max(1, tokens // engine.geometry.group_tokens(FRAME_PX, FRAME_PX))
    groups = (FrameGroup(rng.integers(0, 256, shape, dtype=np.uint8), float(i)) for i in range(count))
    return engine.planner.blocks(groups, seconds_per_group=1.0)
