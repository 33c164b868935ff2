"""SnapKV: keep what the question looks at (arXiv 2404.14469)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.policies.base import CacheView, EvictionPolicy


class Policy(EvictionPolicy):
    """Query-aware: the question's tokens, run behind each block and not stored, are the observation window.

    Args:
        kernel_size: width of the average pooling over neighbours in the sequence; odd, 1 switches it off.
    """

    needs_question = True

    def __init__(self, kernel_size: int = 5):
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size} must be odd and at least 1")
        self.kernel_size = kernel_size

    def score(self, view: CacheView) -> Tensor:
        """Rank entries by the attention that the question's tokens pay to them.

        Args:
            view: queries (heads, queries, head_dim) and keys (kv_heads, slots, head_dim), both after RoPE.

        Returns:
            (kv_heads, slots) float32: softmax over the cache, mean over the queries, average-pooled over neighbours, mean over the
            query heads that share a KV head.

        Source: SnapKV, arXiv 2404.14469; mean over grouped heads as in its issue 22.
        """
        assert view.queries is not None  # needs_question sees to it
        kv_heads, _, dim = view.keys.shape
        queries = view.queries.float().view(kv_heads, -1, view.queries.shape[1], dim)
        weights = torch.softmax(queries @ view.keys.float()[:, None].transpose(-1, -2) * view.scale, dim=-1).mean(2)
        order = view.order[:, None].expand_as(weights)
        pooled = F.avg_pool1d(weights.gather(-1, order), self.kernel_size, stride=1, padding=self.kernel_size // 2).mean(1)
        return torch.empty_like(pooled).scatter_(-1, view.order, pooled)
