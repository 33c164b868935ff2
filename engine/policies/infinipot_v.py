"""InfiniPot-V: temporal redundancy for part of the budget, value norm for the rest (arXiv 2506.15745)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.policies.base import CacheView, EvictionPolicy


class Policy(EvictionPolicy):
    """The strongest published query-agnostic rule for video, as a rival at equal budget; without its optional layer-adaptive pooling.

    Args:
        temporal_share: part of the budget given by temporal redundancy (TaR); the rest goes by value norm (VaN).
        recent_share: part of the groups in the cache, the newest, that count as recent; they are kept first.
    """

    def __init__(self, temporal_share: float = 0.5, recent_share: float = 0.25):
        if not (0 <= temporal_share <= 1 and 0 < recent_share <= 1):
            raise ValueError(f"temporal_share={temporal_share} and recent_share={recent_share} must lie in 0..1 (recent_share above 0)")
        self.temporal_share, self.recent_share = temporal_share, recent_share

    def keep(self, view: CacheView, count: int) -> Tensor:
        """Fill `temporal_share` of the budget by novelty against recent groups, the rest by value norm among what is left."""
        by_time = round(count * self.temporal_share)
        novelty, norm = self.novelty(view), view.values.float().norm(dim=-1)
        novelty[:, : view.protected] = norm[:, : view.protected] = float("-inf")
        first = novelty.topk(by_time, dim=-1, sorted=False).indices
        second = norm.scatter(-1, first, float("-inf")).topk(count - by_time, dim=-1, sorted=False).indices
        return torch.cat([first, second], dim=-1)

    def novelty(self, view: CacheView) -> Tensor:
        """Dissimilarity to the keys at the same place in recent groups.

        Returns:
            (kv_heads, slots) float32: minus the mean cosine to the recent keys of the same place; 2 to 3 for the recent entries
            themselves (above any cosine, the newest highest), 0 where no recent entry of that place is held, and for text.

        Source: TaR, InfiniPot-V, arXiv 2506.15745.
        """
        scores = []
        newest_first = 2 + view.index / view.index.max()
        for head, (keys, group, place) in enumerate(zip(F.normalize(view.keys.float(), dim=-1), view.group, view.place, strict=True)):
            groups = group[group >= 0].unique()
            newest = groups[-max(1, round(len(groups) * self.recent_share)) :].min() if len(groups) else group.new_tensor(0)
            recent = group >= newest
            places = int(place.max()) + 1
            slot = place.long().clamp(min=0)
            totals = keys.new_zeros(places, keys.shape[-1]).index_add_(0, slot[recent], keys[recent])
            counts = keys.new_zeros(places).index_add_(0, slot[recent], keys.new_ones(int(recent.sum())))
            similarity = (keys * totals[slot]).sum(-1) / counts[slot].clamp(min=1)
            scores.append(torch.where(recent, newest_first[head], torch.where(group >= 0, -similarity, 0.0)))
        return torch.stack(scores)
