"""KeyDiff: keep the keys that point elsewhere than the rest (arXiv 2504.15364)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.policies.base import CacheView, EvictionPolicy


class Policy(EvictionPolicy):
    """Query-agnostic, the default: one compressed cache serves any later question."""

    def score(self, view: CacheView) -> Tensor:
        """Rank entries by how unlike the rest of the cache their keys are.

        Args:
            view: keys (kv_heads, slots, head_dim), after RoPE. Queries aren't used.

        Returns:
            (kv_heads, slots) float32: minus the cosine to the anchor, the mean of the L2-normalised keys.

        Source: KeyDiff, arXiv 2504.15364, the anchor form.
        """
        directions = F.normalize(view.keys.float(), dim=-1)
        anchor = directions.mean(dim=1, keepdim=True)
        return -(directions * F.normalize(anchor, dim=-1)).sum(-1)
