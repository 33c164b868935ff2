"""A uniform sample of everything seen: the control that every score must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.policies.base import CacheView, EvictionPolicy, hashed_uniform


class Policy(EvictionPolicy):
    """Each head of each layer keeps its own uniform sample, the same in every run with the same seed.

    Args:
        seed: another seed, another sample.
    """

    def __init__(self, seed: int = 0):
        if seed < 0:
            raise ValueError(f"seed={seed} must be at least 0")
        self.seed = seed

    def score(self, view: CacheView) -> Tensor:
        """(kv_heads, slots) float32: a number that depends on seed, layer, head and entry alone."""
        return torch.stack([hashed_uniform(index, self.seed, view.layer, head) for head, index in enumerate(view.index)])
