"""The KV cache that never outgrows its budget, however long the input.

Each layer owns `budget_tokens` preallocated slots per KV head. A block's keys and values arrive through transformers' own forward; as
soon as the layer's attention has run, the policy says which of the kept and the new entries stay, and the slots are filled with those.
So at any moment at most layers * budget_tokens + block entries are held, nothing grows with the input, and an entry keeps the
rotary position it was written with. While a policy looks at a layer, that one layer's entries exist a second time, in one piece.
Knows no model and no video.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from engine import attention
from engine.errors import ConfigError
from engine.policies import CacheView, EvictionPolicy

ENTRY_FIELDS = 3
"""Columns of `entries` before the rotary positions: place in the sequence, group (-1 for text), place in the group."""


@dataclass(frozen=True)
class CacheShape:
    """What one entry is made of.

    Attributes:
        layers, kv_heads, head_dim: of the language model.
        axes: rotary position axes, 3 for M-RoPE, 1 otherwise.
        dtype, device: of keys and values.
    """

    layers: int
    kv_heads: int
    head_dim: int
    axes: int
    dtype: torch.dtype
    device: torch.device

    @property
    def entry_bytes(self) -> int:
        """Bytes of one layer's key and value of one token, all KV heads."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Mark:
    """A state of the cache that `roll_back` can return to."""

    lengths: tuple[int, ...]
    evictions: int
    seen: int


@dataclass
class _Step:
    """The block that is being read: its entries' descriptions and how many of the forward's tokens are stored."""

    entries: Tensor  # (stored, 3 + axes) int32
    stored: int


@dataclass
class _Tail:
    """The tokens of a batch of questions, one row a question; the kept entries are shared and untouched."""

    keys: list[Tensor]  # per layer (questions, kv_heads, slots, head_dim)
    values: list[Tensor]
    lengths: Tensor  # (questions,) int64
    added: Tensor  # (questions,) int64: valid tokens of the forward that is running


class BudgetedCache(Cache):
    """Storage, selection, and attention over what is stored.

    Args:
        shape: see `CacheShape`.
        policy: who stays; one with `evicts` False makes the cache grow.
        budget_tokens: slots per layer and KV head, protected entries included; for a growing cache, the slots to start with.
        unrotate: (keys (kv_heads, slots, head_dim), positions (kv_heads, slots, axes)) -> keys before RoPE, for policies that ask.
        kernel: attention kernel, see `engine.attention`.
    """

    def __init__(
        self,
        shape: CacheShape,
        policy: EvictionPolicy,
        budget_tokens: int,
        *,
        unrotate: Callable[[Tensor, Tensor], Tensor],
        kernel: attention.Kernel = attention.eager,
    ):
        super().__init__(layers=[])
        self.shape, self.policy, self.budget_tokens = shape, policy, budget_tokens
        self.evicts_while_reading = policy.evicts  # off for one compression after a full prefill
        self.protected_tokens = 0
        self.seen_tokens = 0
        self.evictions = 0
        self.peak_entries = 0
        self.evict_s = 0.0
        self._unrotate, self._kernel = unrotate, kernel
        self._lengths = [0] * shape.layers
        self._step: _Step | None = None
        self._tail: _Tail | None = None
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._entries: list[Tensor] = []
        for _ in range(shape.layers):
            self._allocate(budget_tokens)

    # What is held

    def keys(self, layer: int) -> Tensor:
        """(kv_heads, held, head_dim) view of the layer's keys, after RoPE, in slot order."""
        return self._keys[layer][:, : self._lengths[layer]]

    def values(self, layer: int) -> Tensor:
        """(kv_heads, held, head_dim) view of the layer's values, in slot order."""
        return self._values[layer][:, : self._lengths[layer]]

    def entries(self, layer: int) -> Tensor:
        """(kv_heads, held, 3 + axes) int32 view: place in the sequence, group, place in the group, rotary positions."""
        return self._entries[layer][:, : self._lengths[layer]]

    def positions(self, layer: int) -> Tensor:
        """(kv_heads, held, axes) int32: the rotary positions the keys were written with."""
        return self.entries(layer)[..., ENTRY_FIELDS:]

    @property
    def held_tokens(self) -> int:
        """Entries the fullest layer holds per KV head."""
        return max(self._lengths)

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values held now."""
        return sum(self._lengths) * self.shape.entry_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storage behind keys, values and entry descriptions."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values, *self._entries))

    def get_seq_length(self, layer_idx: int = 0, *_) -> int:
        """Entries held by a layer (transformers asks; positions are always passed explicitly, never derived from this)."""
        return self._lengths[layer_idx]

    # Reading

    def begin_block(self, entries: Tensor, *, protect: bool = False) -> None:
        """Announce the tokens that the next forward stores; tokens behind them in the same forward are proxy queries.

        Args:
            entries: (tokens, 3 + axes) int32.
            protect: never evict them (the prompt prefix); only before anything else was stored.

        Raises:
            ConfigError: the protected entries leave no room in the budget.
        """
        self._step = _Step(entries.to(self.shape.device), len(entries))
        self.seen_tokens += len(entries)
        self.peak_entries = 0
        if protect:
            self.protected_tokens += len(entries)
            if self.policy.evicts and self.protected_tokens >= self.budget_tokens:
                raise ConfigError(
                    f"engine.budget_tokens={self.budget_tokens} must exceed the {self.protected_tokens} protected prompt tokens; "
                    f"raise it to at least {self.protected_tokens} + the tokens you want to keep"
                )

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Called by transformers' attention; storing waits until the layer's attention has run (`attend`)."""
        return key_states, value_states

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of new tokens over what the layer holds and over themselves, then storage and eviction.

        Args:
            query: (batch, heads, tokens, head_dim), key and value: (batch, kv_heads, tokens, head_dim), after RoPE.

        Returns:
            (batch, heads, tokens, head_dim).
        """
        if self._tail is not None:
            return self._attend_tail(layer, query, key, value, scale)
        assert self._step is not None, "begin_block comes before the forward"
        out = attention.over_new(self._kernel, query, key, value, scale)
        if self._lengths[layer]:
            kept = attention.over_kept(self._kernel, query, self.keys(layer), self.values(layer), scale)
            result = attention.merge(kept, out)
        else:
            result = out[0]
        stored = self._step.stored
        self.peak_entries = max(self.peak_entries, sum(self._lengths) + key.shape[2])
        queries = query[0, :, stored:] if stored < query.shape[2] else None
        started = time.perf_counter()  # on CUDA this counts launches, not kernels
        self._store(layer, key[0, :, :stored], value[0, :, :stored], self._step.entries, queries, scale)
        self.evict_s += time.perf_counter() - started
        return result

    def compress(self, layer: int, queries: Tensor | None = None, scale: float = 1.0) -> None:
        """Evict down to the budget now: for compression after a full prefill."""
        if self._lengths[layer] <= self.budget_tokens or not self.policy.evicts:
            return
        held = (self.keys(layer), self.values(layer), self.entries(layer))
        stay = self._chosen(layer, held, queries, scale)
        rows = [_picked(t, stay) for t in held]
        self._keys[layer], self._values[layer], self._entries[layer] = rows
        self._lengths[layer] = self.budget_tokens
        self.evictions += 1

    def restore(self, tensors: dict[str, Tensor], *, protected_tokens: int, seen_tokens: int) -> None:
        """Fill an empty cache with stored entries: tensors named keys.N, values.N and entries.N for each layer N."""
        for layer in range(self.shape.layers):
            held = tensors[f"keys.{layer}"].shape[1]
            if held > self._keys[layer].shape[1]:
                self._grow(layer, held)
            for name, store in (("keys", self._keys), ("values", self._values), ("entries", self._entries)):
                store[layer][:, :held] = tensors[f"{name}.{layer}"]
            self._lengths[layer] = held
        self.protected_tokens, self.seen_tokens = protected_tokens, seen_tokens

    # Answering

    def begin_tail(self, questions: int, slots: int) -> None:
        """Open a tail of `slots` tokens for each of a batch of questions. What is held stays as it is, to the byte."""
        size = (questions, self.shape.kv_heads, slots, self.shape.head_dim)
        lengths = torch.zeros(questions, dtype=torch.long, device=self.shape.device)
        keys, values = ([self._empty(size) for _ in range(self.shape.layers)] for _ in "kv")
        self._tail = _Tail(keys, values, lengths, lengths)

    def extend_tail(self, counts: Tensor) -> None:
        """Announce how many of the next forward's right-padded tokens are each question's own: (questions,) int64."""
        assert self._tail is not None, "begin_tail comes first"
        self._tail.lengths = self._tail.lengths + self._tail.added
        self._tail.added = counts

    def mark(self) -> Mark:
        """Remember what is held now."""
        return Mark(tuple(self._lengths), self.evictions, self.seen_tokens)

    def can_roll_back(self, mark: Mark) -> bool:
        """Whether no entry was evicted since the mark."""
        return self.evictions == mark.evictions

    def roll_back(self, mark: Mark) -> None:
        """Forget everything stored since the mark, questions' tails included; every byte held then is as it was.

        Raises:
            ConfigError: entries were evicted since; they are gone.
        """
        if not self.can_roll_back(mark):
            raise ConfigError("the cache can't be rolled back over an eviction; mark it after the block instead")
        self._step = self._tail = None
        self._lengths, self.seen_tokens = list(mark.lengths), mark.seen

    # How it is done

    def _attend_tail(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        tail = self._tail
        assert tail is not None
        tokens, slots = key.shape[2], tail.keys[layer].shape[2]
        rows = torch.arange(key.shape[0], device=key.device)[:, None]
        places = (tail.lengths[:, None] + torch.arange(tokens, device=key.device)).clamp(max=slots - 1)
        tail.keys[layer][rows, :, places] = key.transpose(1, 2)
        tail.values[layer][rows, :, places] = value.transpose(1, 2)
        seen = torch.arange(slots, device=key.device)[None, None] <= places[..., None]
        own = attention.over_tail(query, tail.keys[layer], tail.values[layer], scale, seen)
        return attention.merge(attention.over_kept(self._kernel, query, self.keys(layer), self.values(layer), scale), own)

    def _store(self, layer: int, key: Tensor, value: Tensor, entries: Tensor, queries: Tensor | None, scale: float) -> None:
        """Put a block's entries into the layer's slots, evicting what the policy gives up."""
        held, new = self._lengths[layer], key.shape[1]
        entries = entries.expand(self.shape.kv_heads, -1, -1)
        slots, limit = self._keys[layer].shape[1], self.budget_tokens
        if self.evicts_while_reading and new == 0:
            return self.compress(layer, queries, scale)
        stores, block = (self._keys, self._values, self._entries), (key, value, entries)
        if self.evicts_while_reading and held + new > limit:
            joined = [torch.cat([store[layer][:, :held], t], 1) for store, t in zip(stores, block, strict=True)]
            stay = self._chosen(layer, joined, queries, scale)
            for store, t in zip(stores, joined, strict=True):
                store[layer][:, :limit] = _picked(t, stay)
            self._lengths[layer] = limit
            self.evictions += 1
            return
        if held + new > slots:
            self._grow(layer, held + new)
        for store, t in zip(stores, block, strict=True):
            store[layer][:, held : held + new] = t
        self._lengths[layer] = held + new

    def _chosen(self, layer: int, held: Sequence[Tensor], queries: Tensor | None, scale: float) -> Tensor:
        """(kv_heads, budget_tokens) int64: of keys, values and entries, the protected slots and those the policy keeps, ascending."""
        keys, values, entries = held
        view = CacheView(
            layer=layer,
            keys=keys,
            values=values,
            entries=entries,
            protected=self.protected_tokens,
            queries=queries,
            scale=scale,
            unrotate=self._unrotate,
        )
        protected = torch.arange(self.protected_tokens, device=keys.device).expand(self.shape.kv_heads, -1)
        return torch.cat([protected, self.policy.keep(view, self.budget_tokens - self.protected_tokens)], 1).sort(dim=1).values

    def _allocate(self, slots: int) -> None:
        heads, device = self.shape.kv_heads, self.shape.device
        self._keys.append(torch.empty(heads, slots, self.shape.head_dim, dtype=self.shape.dtype, device=device))
        self._values.append(torch.empty_like(self._keys[-1]))
        self._entries.append(torch.empty(heads, slots, ENTRY_FIELDS + self.shape.axes, dtype=torch.int32, device=device))

    def _empty(self, size: tuple[int, ...]) -> Tensor:
        return torch.zeros(size, dtype=self.shape.dtype, device=self.shape.device)

    def _grow(self, layer: int, needed: int) -> None:
        """Double a layer's slots: only for the full cache, whose size nobody knows beforehand."""
        slots = max(needed, 2 * self._keys[layer].shape[1])
        for store in (self._keys, self._values, self._entries):
            old = store[layer]
            store[layer] = old.new_empty(old.shape[0], slots, old.shape[2])
            store[layer][:, : old.shape[1]] = old


def _picked(entries: Tensor, slots: Tensor) -> Tensor:
    """Of (kv_heads, n, width) what is in each head's slots (kv_heads, m)."""
    return entries[torch.arange(len(slots), device=slots.device)[:, None], slots]
