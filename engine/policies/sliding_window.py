"""Prefix and newest: the control that forgets the past (StreamingLLM's pattern, arXiv 2309.17453)."""

from __future__ import annotations

from torch import Tensor

from engine.policies.base import CacheView, EvictionPolicy


class Policy(EvictionPolicy):
    """Keeps the protected prefix and the newest entries."""

    def score(self, view: CacheView) -> Tensor:
        """(kv_heads, slots) int32: the place in the sequence."""
        return view.index
