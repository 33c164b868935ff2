"""What memory a prompt needs, predicted and measured. Bytes are counted from shapes and read from the device, never estimated."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch

from engine import footprint
from engine.cache import BudgetedCache
from engine.models import kv_dimensions
from engine.types import BlockTrace, PrefillTrace


def kv_bytes(model_config: Any, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of keys and values of `tokens` tokens in every layer, for any transformers configuration, without its weights.

    At bfloat16 one token takes 57,344 bytes in Qwen2.5-VL-7B and 147,456 in InternVL3.5-8B.
    """
    return footprint.kv_bytes(kv_dimensions(model_config), tokens, dtype.itemsize)


def peak_kv_bytes(model_config: Any, budget_tokens: int, block_tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Largest number of KV bytes that exist at once: every layer's budget, and the block in one layer (L * M + b entries)."""
    return footprint.peak_kv_bytes(kv_dimensions(model_config), budget_tokens, block_tokens, dtype.itemsize)


def step_peak_entries(layers: int, budget_tokens: int | None, seen_tokens: int, block_tokens: int) -> int:
    """Entries that exist at the height of one step, when the last layer holds its block and the others have evicted theirs.

    With a full cache that is layers * budget_tokens + block_tokens. `budget_tokens` None means that nothing is evicted.
    """
    limit = seen_tokens + block_tokens if budget_tokens is None else budget_tokens
    return (layers - 1) * min(limit, seen_tokens + block_tokens) + min(limit, seen_tokens) + block_tokens


def process_peak_bytes() -> int:
    """Largest resident set this process has had; a child's doesn't start from its parent's, as getrusage's does."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class MemoryMeter:
    """Fills a `PrefillTrace`, one `BlockTrace` a step.

    Args:
        device: of the model; on CUDA its peak allocation is read, elsewhere it is 0 and the process's peak counts.
        trace: one to go on filling.
    """

    def __init__(self, device: torch.device, trace: PrefillTrace | None = None):
        self.device, self.trace = device, trace or PrefillTrace()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def device_peak_bytes(self) -> int:
        """Peak allocation on the CUDA device since the meter was made; 0 on CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def record(
        self,
        cache: BudgetedCache,
        *,
        block_tokens: int,
        forward_tokens: int,
        vision_s: float,
        prefill_s: float,
        evict_s: float,
        time_s: float,
    ) -> None:
        """Note one step: `block_tokens` stored by a forward over `forward_tokens` (proxy queries included)."""
        trace, shape = self.trace, cache.shape
        held = step_peak_entries(
            shape.layers, cache.budget_tokens if cache.evicts_while_reading else None, trace.total_tokens, block_tokens
        )
        predicted = (held + forward_tokens - block_tokens) * shape.entry_bytes
        trace.kv_predicted_bytes = max(trace.kv_predicted_bytes, predicted)
        trace.total_tokens += block_tokens
        block = BlockTrace(
            block_tokens=block_tokens,
            seen_tokens=trace.total_tokens,
            kept_tokens=cache.held_tokens,
            kv_held_bytes=cache.peak_entries * shape.entry_bytes,
            kv_full_bytes=trace.total_tokens * shape.layers * shape.entry_bytes,
            device_peak_bytes=self.device_peak_bytes(),
            process_peak_bytes=process_peak_bytes(),
            vision_s=vision_s,
            prefill_s=prefill_s,
            evict_s=evict_s,
            time_s=time_s,
        )
        trace.blocks.append(block)
        trace.kv_peak_bytes = max(trace.kv_peak_bytes, block.kv_held_bytes)
        trace.kv_full_bytes, trace.kept_tokens = block.kv_full_bytes, block.kept_tokens
        self.note_peaks()
        trace.vision_s += vision_s
        trace.prefill_s += prefill_s
        trace.evict_s += evict_s
        trace.last_time_s = max(trace.last_time_s, time_s)

    def note_peaks(self) -> None:
        """Raise the trace's peaks of device and process to what they are by now."""
        trace = self.trace
        trace.device_peak_bytes = max(trace.device_peak_bytes, self.device_peak_bytes())
        trace.process_peak_bytes = max(trace.process_peak_bytes, process_peak_bytes())
