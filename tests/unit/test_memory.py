"""Predicted bytes against published sizes, from configurations alone."""

from __future__ import annotations

import pytest
import torch
from transformers import InternVLConfig, Qwen2_5_VLConfig, Qwen3Config

from engine.memory import kv_bytes, peak_kv_bytes, step_peak_entries

QWEN_7B = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN_3B = {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2}
QWEN_32B = {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8}
QWEN3_8B = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Qwen2_5_VLConfig(text_config=QWEN_7B), 57_344),
        (Qwen2_5_VLConfig(text_config=QWEN_3B), 36_864),
        (Qwen2_5_VLConfig(text_config=QWEN_32B), 262_144),
        (InternVLConfig(text_config=Qwen3Config(**QWEN3_8B)), 147_456),
    ],
)
def test_bytes_of_a_token_in_bfloat16(config, expected):
    assert kv_bytes(config, 1) == expected
    assert kv_bytes(config, 1000, torch.float32) == 2000 * expected


def test_peak_is_every_layers_budget_and_one_block():
    config = Qwen2_5_VLConfig(text_config=QWEN_7B)
    assert peak_kv_bytes(config, 1024, 784) == 29_456 * 57_344 // 28


def test_step_peak_entries_by_counting():
    for layers, budget, seen, block in [(3, 10, 0, 4), (3, 10, 8, 4), (3, 10, 50, 4), (1, 10, 50, 30), (4, 10, 6, 30)]:
        held, most = [min(seen, budget)] * layers, 0
        for layer in range(layers):
            most = max(most, sum(held) + block)
            held[layer] = min(budget, held[layer] + block)
        assert step_peak_entries(layers, budget, seen, block) == most
