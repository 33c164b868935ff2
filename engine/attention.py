"""Attention over a cache in two parts: what was kept, and what is new.

The kept entries need no mask (every new token may see all of them), the new ones need the plain square causal mask. Each part runs
in a flash kernel that also returns its log-sum-exp, and the two results are merged exactly. So attention concatenates nothing, no dense
mask is made, grouped KV heads are never repeated over the kept entries, and a batch of questions reads one cache without copying it.

Knows no model, no policy and no storage. The merge is the one of FlashAttention's split-KV form (arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ConfigError

NAME = "reelkeep"
"""Name under which transformers' attention interface finds `budgeted_attention`."""

WINDOWS = "reelkeep_flash_windows"
"""Name of `windowed_attention`; the "flash" in it makes transformers hand over all windows at once."""

Part = tuple[Tensor, Tensor]
"""An attention output (batch, heads, queries, head_dim) and its log-sum-exp (batch, heads, queries) in float32."""

Kernel = Callable[[Tensor, Tensor, Tensor, float, bool], Part]


def eager(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, mask: Tensor | None = None) -> Part:
    """Plain matrix products; works on any device, with any mask, and materialises the scores.

    Args:
        query: (batch, heads, queries, head_dim).
        key, value: (batch, heads, keys, head_dim).
        scale: factor on the dot products.
        causal: query i sees keys 0 to i; queries and keys are then equally many.
        mask: (batch, 1, queries, keys) bool, True where a query may look; None for everywhere.
    """
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(value.dtype) @ value, lse


def fused(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Part:
    """PyTorch's own flash (CPU, CUDA half precision) or memory-efficient (CUDA float32) kernel, log-sum-exp included."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    if query.dtype in (torch.float16, torch.bfloat16):
        out, lse = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)[:2]
    else:
        out, lse = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, causal, scale=scale)[:2]
    return out, lse[..., : query.shape[2]]  # kernels may pad the queries of the log-sum-exp


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel for `engine.attention`; "auto" tries the fused one on a few numbers of the model's kind and falls back to eager.

    Raises:
        ConfigError: "fused" was asked for and doesn't run here.
    """
    if name == "eager":
        return eager
    probe = torch.zeros(1, 1, 8, head_dim, device=device, dtype=dtype)
    try:
        fused(probe, probe, probe, 1.0, True)
    except (RuntimeError, AttributeError) as error:
        if name == "fused":
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"engine.attention=fused does not run on device {device} with {dtype} and heads of {head_dim}: {reason}; use auto or eager"
            ) from error
        return eager
    return fused


def merge(first: Part, second: Part) -> Tensor:
    """Exact attention over the union of two disjoint sets of keys, from the attention over each."""
    (out_a, lse_a), (out_b, lse_b) = first, second
    share_a = torch.sigmoid(lse_a - lse_b)[..., None]
    return torch.lerp(out_b.float(), out_a.float(), share_a).to(out_a.dtype)


def over_kept(kernel: Kernel, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Part:
    """Attention of every query of a batch over one shared set of entries.

    Args:
        query: (batch, heads, queries, head_dim); heads that share a KV head are adjacent, as in transformers.
        keys, values: (kv_heads, entries, head_dim), the same for the whole batch.
    """
    batch, heads, queries, dim = query.shape
    kv_heads = keys.shape[0]
    folded = query.reshape(batch, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    out, lse = kernel(folded, keys[None], values[None], scale, False)
    unfold = (kv_heads, batch, heads // kv_heads, queries)
    out = out.reshape(*unfold, dim).transpose(0, 1).reshape(batch, heads, queries, dim)
    return out, lse.reshape(unfold).transpose(0, 1).reshape(batch, heads, queries)


def over_new(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Part:
    """Causal attention of a block over itself: query (1, heads, n, head_dim), key and value (1, kv_heads, n, head_dim)."""
    groups = query.shape[1] // key.shape[1]
    return kernel(query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), scale, True)


def over_tail(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor) -> Part:
    """Attention of each question over its own tokens.

    Args:
        query: (batch, heads, queries, head_dim).
        keys, values: (batch, kv_heads, slots, head_dim).
        mask: (batch, queries, slots) bool, True where a query may look.
    """
    batch, heads, queries, dim = query.shape
    kv_heads = keys.shape[1]
    folded = query.reshape(batch, kv_heads, -1, dim)
    out, lse = eager(folded, keys, values, scale, False, mask.repeat(1, heads // kv_heads, 1)[:, None])
    return out.reshape(batch, heads, queries, dim), lse.reshape(batch, heads, queries)


def budgeted_attention(module, query, key, value, attention_mask, dropout=0.0, *, scaling, kv_cache, **_) -> tuple[Tensor, None]:
    """What transformers calls in each layer: hands the post-RoPE queries to the cache that holds the layer's entries.

    `kv_cache` travels through the forward's keyword arguments; no hook is placed on any module.
    """
    out = kv_cache.attend(module.layer_idx, query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None


def windowed_attention(module, query, key, value, attention_mask, dropout=0.0, *, scaling, cu_seq_lens_q, **_) -> tuple[Tensor, None]:
    """Attention within many short windows of a vision tower, all windows of one length in a single batch.

    transformers loops over the windows in Python unless a kernel with "flash" in its name is asked for; such a kernel is handed all of them.

    Args:
        query, key, value: (1, heads, tokens, head_dim), windows one after the other.
        cu_seq_lens_q: (windows + 1,) int, where each window begins and ends.

    Returns:
        (1, tokens, heads, head_dim).
    """
    starts, lengths = cu_seq_lens_q[:-1].long(), cu_seq_lens_q.diff()
    sizes = lengths.unique().tolist()
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # (tokens, heads, head_dim): a token's row lies in one piece
    if len(sizes) == 1:  # the windows lie side by side: nothing needs gathering
        q, k, v = (t.unflatten(0, (-1, sizes[0])).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1)[None], None
    out = torch.empty_like(q)
    for length in sizes:
        tokens = starts[lengths == length][:, None] + torch.arange(length, device=query.device)
        some_q, some_k, some_v = (t[tokens].transpose(1, 2) for t in (q, k, v))  # (windows, heads, length, head_dim)
        out[tokens] = F.scaled_dot_product_attention(some_q, some_k, some_v, scale=scaling).transpose(1, 2)
    return out[None], None


def register() -> None:
    """Make both attention functions known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, budgeted_attention)
    AttentionInterface.register(WINDOWS, windowed_attention)
