"""Value norm: keep the entries that would add the most to an attention output."""

from __future__ import annotations

from torch import Tensor

from engine.policies.base import CacheView, EvictionPolicy


class Policy(EvictionPolicy):
    """Query-agnostic; the "VaN" half of InfiniPot-V (arXiv 2506.15745), alone."""

    def score(self, view: CacheView) -> Tensor:
        """(kv_heads, slots) float32: the L2 norm of each value."""
        return view.values.float().norm(dim=-1)
