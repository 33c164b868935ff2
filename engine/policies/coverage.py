"""Coverage: keep tokens so that every token seen has a kept one near it (greedy k-center over keys)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.policies.base import CacheView, EvictionPolicy


class Policy(EvictionPolicy):
    """Query-agnostic; keeps whole tokens, the same in all heads of a layer, chosen jointly by farthest-first traversal.

    The picks depend on each other, so they are made one by one: with one small kernel launch a pick this is slow on a GPU.
    Related: CoRDS, arXiv 2605.14310, in joint key and value space.
    """

    def keep(self, view: CacheView, count: int) -> Tensor:
        """Start from the protected prefix, then take the entry of largest weight * distance to the nearest entry taken.

        An entry's feature is its keys before RoPE of all KV heads, each divided by that head's mean key norm; its weight is the mean
        norm of its values.

        Returns:
            (kv_heads, count) int64 slots, equal in all heads.
        """
        keys = view.unrotated_keys
        scaled = keys / keys.norm(dim=-1).mean(dim=1)[:, None, None]
        features = scaled.transpose(0, 1).reshape(keys.shape[1], -1)
        weight = view.values.float().norm(dim=-1).mean(0)
        distances = torch.cdist(features, features)
        nearest = distances[: view.protected].amin(0) if view.protected else torch.full_like(weight, torch.inf)
        taken = torch.zeros_like(weight, dtype=torch.bool)
        taken[: view.protected] = True
        picks = torch.empty(count, dtype=torch.long, device=keys.device)
        for i in range(count):
            picks[i] = (weight * nearest).masked_fill(taken, -1.0).argmax()
            nearest = torch.minimum(nearest, distances[picks[i]])
            taken[picks[i]] = True
        return picks.expand(keys.shape[0], -1)
