"""Leverage: keep the keys that the others can't rebuild (ridge leverage scores; Compactor, arXiv 2507.08143)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.policies.base import CacheView, EvictionPolicy


class Policy(EvictionPolicy):
    """Query-agnostic, known for compression after the prefill of text; here during it.

    Args:
        ridge: regularisation lambda; larger pulls all scores together.
    """

    def __init__(self, ridge: float = 0.02):
        if not ridge > 0:
            raise ValueError(f"ridge={ridge} must be above 0")
        self.ridge = ridge

    def score(self, view: CacheView) -> Tensor:
        """k^T (G/n + (ridge/D) I)^-1 k over a head's L2-normalised keys before RoPE, G their Gram matrix over n entries.

        Args:
            view: unrotated keys (kv_heads, slots, head_dim). Queries aren't used.

        Returns:
            (kv_heads, slots) float32.
        """
        keys = F.normalize(view.unrotated_keys, dim=-1)
        slots, dim = keys.shape[1:]
        gram = keys.transpose(1, 2) @ keys / slots + self.ridge / dim * torch.eye(dim, device=keys.device)
        return (keys * torch.linalg.solve(gram, keys.transpose(1, 2)).transpose(1, 2)).sum(-1)
