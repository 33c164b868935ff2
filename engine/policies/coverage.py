"""Coverage: drop what another kept token stands close to, so that every token seen has a kept one near it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.policies.base import CacheView, EvictionPolicy


class Policy(EvictionPolicy):
    """Query-agnostic; keeps whole tokens, the same in all heads of a layer, chosen jointly.

    Of all entries the one with the least weight * distance to its nearest neighbour goes, then of the rest, and so on. Related: greedy
    k-center picking (CoRDS, arXiv 2605.14310, in joint key and value space), which adds entries one by one and so needs as many steps as
    it keeps. Dropping takes a few rounds, however many go: an entry's loss only grows when its neighbour goes, so each of the `left`
    entries of least loss would go anyway, at its turn, unless its own neighbour goes first.
    """

    def keep(self, view: CacheView, count: int) -> Tensor:
        """Drop entries until `count` are left beyond the protected ones, which stay but count as neighbours.

        An entry's feature is its keys before RoPE of all KV heads, each divided by that head's mean key norm; its weight is the mean
        norm of its values. Takes slots * slots * 4 bytes for a moment.

        Returns:
            (kv_heads, count) int64 slots, equal in all heads.
        """
        keys = view.unrotated_keys
        scaled = keys / keys.norm(dim=-1).mean(dim=1).clamp_min(torch.finfo(keys.dtype).tiny)[:, None, None]
        features = scaled.transpose(0, 1).reshape(keys.shape[1], -1)
        weight = view.values.float().norm(dim=-1).mean(0)
        distances = torch.cdist(features, features).fill_diagonal_(torch.inf)
        kept = _drop_nearest(distances, weight, view.protected, len(weight) - view.protected - count)
        return kept[view.protected :].expand(keys.shape[0], -1)


def _drop_nearest(distances: Tensor, weight: Tensor, protected: int, left: int) -> Tensor:
    """Slots that stay when `left` of them go, protected ones first, ascending: what dropping one by one would leave.

    Args:
        distances: (slots, slots), overwritten. weight: (slots,).
    """

    def loss_of(weight: Tensor, nearest: Tensor) -> Tensor:
        return torch.nan_to_num(weight * nearest, nan=0.0)  # finite: infinity is for those that don't go, or are gone

    slots = len(weight)
    nearest, neighbour = distances.min(dim=1)
    loss = loss_of(weight, nearest)
    stays = torch.ones(slots, dtype=torch.bool, device=weight.device)
    loss[:protected] = torch.inf
    while left > 0:
        least = loss.topk(left, largest=False).indices
        turn = torch.full((slots,), slots, device=weight.device)
        turn[least] = torch.arange(left, device=weight.device)
        gone = least[turn[neighbour[least]] >= turn[least]]  # whoever's neighbour goes first waits: its loss is about to change
        stays[gone] = False
        loss[gone] = torch.inf
        distances[:, gone] = torch.inf
        bereft = (stays & ~stays[neighbour]).nonzero().flatten()
        nearest, neighbour[bereft] = distances[bereft].min(dim=1)
        loss[bereft] = loss_of(weight[bereft], nearest).masked_fill(bereft < protected, torch.inf)
        left -= len(gone)
    return stays.nonzero().flatten()
