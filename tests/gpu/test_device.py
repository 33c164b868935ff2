"""On a CUDA device: kernels agree, the measured peak is flat, and predicted bytes are the measured ones. `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from engine import attention
from jobs.bench._model import bench_engine, noise_blocks

pytestmark = pytest.mark.gpu
SIZE = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 2, "budget_tokens": 1024, "block_tokens": 784, "device": "cuda"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 7, 784])
def test_fused_kernel_equals_eager(dtype, causal, queries):
    keys = queries if causal else 1024
    query, key, value = (torch.randn(2, 8, n, 64, device="cuda", dtype=dtype) for n in (queries, keys, keys))
    expected, expected_lse = attention.eager(query.float(), key.float(), value.float(), 0.125, causal)
    out, lse = attention.fused(query, key, value, 0.125, causal)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert (out.float() - expected).abs().max() < tolerance
    assert lse.shape == expected_lse.shape and (lse.float() - expected_lse).abs().max() < tolerance


def test_block_wise_logits_equal_one_block():
    engine = bench_engine(**(SIZE | {"budget_tokens": 4096}))
    small = bench_engine(**(SIZE | {"budget_tokens": 4096, "block_tokens": 98}))
    a, b = (e.answer(e.prefill(noise_blocks(e, 2000)), ["What colour is the circle?"])[0] for e in (engine, small))
    assert a.text == b.text


def test_peak_is_flat_as_the_stream_doubles():
    peaks = []
    for tokens in (8192, 16384, 32768):
        engine = bench_engine(**SIZE)
        torch.cuda.empty_cache()
        peaks.append(engine.prefill(noise_blocks(engine, tokens)).trace.device_peak_bytes)
        del engine
    assert max(peaks) / min(peaks) < 1.01


def test_predicted_kv_bytes_are_what_the_device_allocates():
    engine = bench_engine(**SIZE)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    cache = engine.new_cache()
    measured = torch.cuda.memory_allocated() - before
    assert 0 <= measured - cache.allocated_bytes < 1 << 20
    trace = engine.prefill(noise_blocks(engine, 8192)).trace
    assert trace.kv_peak_bytes == trace.kv_predicted_bytes
