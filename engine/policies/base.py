"""What a policy sees and what it must say."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor


class CacheView:
    """One layer's entries at the moment of an eviction: the kept ones first, then the block's.

    Slots are physical places and in no order; `index` gives an entry's place in the sequence. The first `protected` slots hold the
    prompt prefix. They are never evicted, but they count in statistics such as KeyDiff's anchor.

    Attributes:
        layer: number of the layer.
        keys: (kv_heads, slots, head_dim), after RoPE, as cached.
        values: (kv_heads, slots, head_dim).
        index: (kv_heads, slots) int32, place of each entry in the whole token sequence.
        group: (kv_heads, slots) int32, temporal group or tile, counted over the whole prompt; -1 for text.
        place: (kv_heads, slots) int32, place of the entry within its group.
        positions: (kv_heads, slots, axes) int32, the rotary positions the keys were written with.
        protected: how many leading slots can't be evicted.
        queries: (heads, queries, head_dim) post-RoPE proxy queries of the question, or None.
        scale: factor on query-key dot products.
    """

    def __init__(
        self,
        *,
        layer: int,
        keys: Tensor,
        values: Tensor,
        entries: Tensor,
        protected: int,
        queries: Tensor | None,
        scale: float,
        unrotate: Callable[[Tensor, Tensor], Tensor],
    ):
        self.layer, self.keys, self.values = layer, keys, values
        self.index, self.group, self.place = entries[..., 0], entries[..., 1], entries[..., 2]
        self.positions = entries[..., 3:]
        self.protected, self.queries, self.scale = protected, queries, scale
        self._unrotate = unrotate

    @cached_property
    def unrotated_keys(self) -> Tensor:
        """(kv_heads, slots, head_dim) float32: the keys as they were before RoPE."""
        return self._unrotate(self.keys, self.positions)

    @cached_property
    def order(self) -> Tensor:
        """(kv_heads, slots) int64: slots of each head in the order of the sequence."""
        return self.index.argsort(dim=-1)


class EvictionPolicy:
    """Chooses the entries that stay. Most policies only write `score`.

    Attributes:
        needs_question: the score uses the question's queries, so one compressed cache serves one question.
        evicts: False for the full cache.
    """

    needs_question = False
    evicts = True

    def score(self, view: CacheView) -> Tensor:
        """(kv_heads, slots) float32, higher is kept. Scores of protected slots are ignored."""
        raise TypeError(f"{type(self).__module__} must define score or keep")

    def keep(self, view: CacheView, count: int) -> Tensor:
        """Choose `count` entries beyond the protected ones.

        Returns:
            (kv_heads, count) int64 slots, each at least `view.protected`, distinct within a head.
        """
        return self.score(view)[:, view.protected :].topk(count, dim=-1, sorted=False).indices + view.protected


def hashed_uniform(index: Tensor, *salts: int) -> Tensor:
    """A fixed number in [0, 1) for each entry, from its sequence index and some integers (SplitMix64's finaliser).

    The same entry always draws the same number, so repeated evictions keep a uniform sample and a resumed run equals an unbroken one.
    """
    mask = (1 << 64) - 1
    salt = 0
    for part in salts:
        salt = (salt * 0x9E3779B97F4A7C15 + part + 1) & mask
    x = index.to(torch.int64) * -7046029254386353131 + (salt - (1 << 64) if salt >= 1 << 63 else salt)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return (x & ((1 << 24) - 1)).float() / (1 << 24)
