"""Coverage: drop what another kept token stands close to, so that every token seen has a kept one near it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.policies.base import CacheView, EvictionPolicy


class Policy(EvictionPolicy):
    """Query-agnostic; keeps whole tokens, the same in all heads of a layer, chosen jointly.

    Of all entries the one with the least weight * distance to its nearest neighbour goes, then of the rest, and so on. Related: greedy
    k-center picking (CoRDS, arXiv 2605.14310, in joint key and value space), which adds entries one by one and so needs as many steps as
    it keeps. Dropping usually takes a few rounds, however many go: an entry's loss only grows when its neighbour goes, so each of the `left`
    entries of least loss would go anyway, at its turn, unless its own neighbour goes first.
    """

    def keep(self, view: CacheView, count: int) -> Tensor:
        """Drop entries until `count` are left beyond the protected ones, which stay but count as neighbours.

        An entry's feature is its keys before RoPE of all KV heads, each divided by that head's mean key norm; its weight is the mean
        norm of its values. Holds slots * slots * 4 bytes until the choice is made, and for a moment up to as much again: little for a budget
        and a block, much where a whole long video is compressed once after its prefill.

        Returns:
            (kv_heads, count) int64 slots, equal in all heads.
        """
        keys = view.unrotated_keys
        scaled = keys / keys.norm(dim=-1).mean(dim=1).clamp_min(torch.finfo(keys.dtype).tiny)[:, None, None]
        features = scaled.transpose(0, 1).reshape(keys.shape[1], -1)
        weight = view.values.float().norm(dim=-1).mean(0)
        kept = _drop_nearest(features, weight, view.protected, len(weight) - view.protected - count)
        return kept[view.protected :].expand(keys.shape[0], -1)


def _drop_nearest(features: Tensor, weight: Tensor, protected: int, left: int) -> Tensor:
    """Slots that stay when `left` of them go, protected ones first, ascending: what dropping one by one would leave.

    Args:
        features: (slots, width). weight: (slots,).
    """
    slots = len(weight)
    squared = _squared_distances(features)

    def loss_of(entries: Tensor, nearest: Tensor) -> Tensor:
        loss = weight[entries] * nearest.clamp_min(0).sqrt()
        return torch.nan_to_num(loss, nan=0.0)  # finite: infinity is for those that don't go, or are gone

    gone = torch.zeros(slots, dtype=torch.bool, device=weight.device)
    nearest, neighbour = squared.min(dim=1)
    loss = loss_of(torch.arange(slots, device=weight.device), nearest)
    loss[:protected] = torch.inf
    while left > 0:
        # A loss whose neighbour is gone is a lower bound. No more than `left` entries can lie below one of these, so they are in reach.
        least = loss.topk(left, largest=False).indices
        turn = torch.full((slots,), slots, device=weight.device)
        turn[least] = torch.arange(left, device=weight.device)
        theirs = neighbour[least]
        goes = ~gone[theirs] & (turn[theirs] >= turn[least])  # whoever's neighbour goes first waits: its loss is about to change
        dropped = least[goes]
        gone[dropped], loss[dropped] = True, torch.inf
        left -= len(dropped)
        alone = least[~goes & gone[theirs]]
        nearest, neighbour[alone] = squared[alone].masked_fill_(gone, torch.inf).min(dim=1)
        loss[alone] = loss_of(alone, nearest)
    return (~gone).nonzero().flatten()


def _squared_distances(features: Tensor) -> Tensor:
    """Between every two of (slots, width) features, (slots, slots); the diagonal is the largest number, so that the last of all is its own neighbour."""
    squares, ones = features.square().sum(dim=1, keepdim=True), torch.ones_like(features[:, :1])
    # |a - b|^2 is one product of rows of these two.
    here, there = torch.cat([-2 * features, squares, ones], dim=1), torch.cat([features, ones, squares], dim=1)
    return (here @ there.T).fill_diagonal_(torch.finfo(features.dtype).max)
