"""Random cache views for tests of policies."""

from __future__ import annotations

import torch

from engine.policies import CacheView


def random_view(
    slots: int = 40, protected: int = 4, *, heads: int = 4, kv_heads: int = 2, dim: int = 16, queries: int = 3, seed: int = 0
) -> CacheView:
    """A layer of `slots` entries: text first, then groups of 6 places; slots shuffled per head behind the protected ones."""
    rng = torch.Generator().manual_seed(seed)
    entries = torch.zeros(kv_heads, slots, 4, dtype=torch.int32)
    for head in range(kv_heads):
        order = torch.cat([torch.arange(protected), torch.randperm(slots - protected, generator=rng) + protected])
        visual = order - protected
        entries[head] = torch.stack([order, torch.where(visual >= 0, visual // 6, -1), visual.clamp(min=0) % 6, order], -1)
    return CacheView(
        layer=1,
        keys=torch.randn(kv_heads, slots, dim, generator=rng),
        values=torch.randn(kv_heads, slots, dim, generator=rng),
        entries=entries,
        protected=protected,
        queries=torch.randn(heads, queries, dim, generator=rng),
        scale=dim**-0.5,
        unrotate=lambda keys, positions: keys.float(),
    )
