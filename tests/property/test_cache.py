"""What must hold of the cache for any input: occupancy, protection, positions, bytes, roll-back, storage."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import attention
from engine.cache import BudgetedCache, CacheShape
from engine.memory import step_peak_entries
from engine.policies import make_policy, policy_names

LAYERS, KV_HEADS, HEADS, DIM = 3, 2, 4, 8
SHAPE = CacheShape(LAYERS, KV_HEADS, DIM, 1, torch.float32, torch.device("cpu"))
EVICTING = [name for name in policy_names() if name != "full"]


class Source:
    """Feeds a cache blocks of random keys and values, remembering every entry it made."""

    def __init__(self, cache: BudgetedCache, seed: int):
        self.cache, self.rng = cache, torch.Generator().manual_seed(seed)
        self.keys = [torch.empty(KV_HEADS, 0, DIM) for _ in range(LAYERS)]
        self.values = [torch.empty(KV_HEADS, 0, DIM) for _ in range(LAYERS)]
        self.position = 0

    def block(self, tokens: int, *, protect: bool = False, proxies: int = 0) -> None:
        index = torch.arange(tokens) + self.cache.seen_tokens
        group = torch.full_like(index, -1) if protect else index // 3
        entries = torch.stack([index, group, index % 3, index * 2 + 1], -1).int()
        self.cache.begin_block(entries, protect=protect)
        for layer in range(LAYERS):
            query = torch.randn(1, HEADS, tokens + proxies, DIM, generator=self.rng)
            key, value = (torch.randn(1, KV_HEADS, tokens + proxies, DIM, generator=self.rng) for _ in "kv")
            self.cache.attend(layer, query, *self.cache.update(key, value, layer), DIM**-0.5)
            self.keys[layer] = torch.cat([self.keys[layer], key[0, :, :tokens]], 1)
            self.values[layer] = torch.cat([self.values[layer], value[0, :, :tokens]], 1)


def make(policy: str, budget: int, seed: int, prefix: int) -> tuple[BudgetedCache, Source]:
    cache = BudgetedCache(SHAPE, make_policy(policy), budget, unrotate=lambda keys, positions: keys.float(), kernel=attention.eager)
    source = Source(cache, seed)
    source.block(prefix, protect=True, proxies=2 if cache.policy.needs_question else 0)
    return cache, source


def snapshot(cache: BudgetedCache) -> list[torch.Tensor]:
    return [t.clone() for layer in range(LAYERS) for t in (cache.keys(layer), cache.values(layer), cache.entries(layer))]


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(EVICTING),
    budget=st.integers(8, 24),
    prefix=st.integers(1, 5),
    blocks=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    seed=st.integers(0, 999),
)
def test_any_stream_stays_in_budget_and_keeps_true_entries(policy, budget, prefix, blocks, seed):
    cache, source = make(policy, budget, seed, prefix)
    storage, proxies = cache.allocated_bytes, 2 if cache.policy.needs_question else 0
    for tokens in blocks:
        before = cache.seen_tokens
        source.block(tokens, proxies=proxies)
        assert cache.held_tokens == min(budget, cache.seen_tokens)
        assert cache.peak_entries == step_peak_entries(LAYERS, budget, before, tokens) + proxies
        for layer in range(LAYERS):
            entries = cache.entries(layer)
            assert entries.shape[1] == min(budget, cache.seen_tokens)
            for head in range(KV_HEADS):
                index = entries[head, :, 0].long()
                assert len(index.unique()) == len(index)
                assert set(range(prefix)) <= set(index.tolist()), "a protected entry was evicted"
                assert (entries[head, :, 3] == index * 2 + 1).all(), "an entry lost its own position"
                order = index.argsort()
                assert (entries[head, order, 3].diff() > 0).all()
                assert torch.equal(cache.keys(layer)[head], source.keys[layer][head, index])
                assert torch.equal(cache.values(layer)[head], source.values[layer][head, index])
    assert cache.allocated_bytes == storage, "storage grew"


@settings(max_examples=30, deadline=None)
@given(policy=st.sampled_from(EVICTING), seed=st.integers(0, 999), questions=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_asking_and_rolling_back_changes_no_byte(policy, seed, questions):
    cache, source = make(policy, 12, seed, 3)
    for tokens in (7, 9):
        source.block(tokens, proxies=1 if cache.policy.needs_question else 0)
    before, mark = snapshot(cache), cache.mark()
    cache.begin_tail(len(questions), 10)
    for counts in (questions, [1] * len(questions), [1] * len(questions)):
        width = max(counts)
        cache.extend_tail(torch.tensor(counts))
        for layer in range(LAYERS):
            query = torch.randn(len(questions), HEADS, width, DIM)
            key, value = (torch.randn(len(questions), KV_HEADS, width, DIM) for _ in "kv")
            cache.attend(layer, query, key, value, 1.0)
    cache.roll_back(mark)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(cache), strict=True))
    assert cache.mark() == mark


@settings(max_examples=30, deadline=None)
@given(first=st.integers(1, 5), second=st.integers(1, 5), seed=st.integers(0, 99))
def test_a_block_without_eviction_can_be_rolled_back(first, second, seed):
    cache, source = make("keydiff", 20, seed, 2)
    source.block(first)
    before, mark = snapshot(cache), cache.mark()
    source.block(second)
    assert cache.can_roll_back(mark)
    cache.roll_back(mark)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(cache), strict=True))
    source.block(30)
    assert not cache.can_roll_back(mark)


@settings(max_examples=30, deadline=None)
@given(
    prefix=st.integers(1, 4),
    blocks=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    kernel=st.sampled_from([attention.eager, attention.fused]),
)
def test_attention_in_two_parts_equals_attention_at_once(prefix, blocks, seed, kernel):
    """The merged result over kept and new entries, against one softmax over everything with a causal mask."""
    cache = BudgetedCache(SHAPE, make_policy("full"), 4, unrotate=lambda k, p: k, kernel=kernel)
    rng, keys, values = torch.Generator().manual_seed(seed), torch.empty(KV_HEADS, 0, DIM), torch.empty(KV_HEADS, 0, DIM)
    for tokens in (prefix, *blocks):
        index = torch.arange(tokens) + cache.seen_tokens
        cache.begin_block(torch.stack([index, index, index, index], -1).int())
        query = torch.randn(1, HEADS, tokens, DIM, generator=rng)
        key, value = (torch.randn(1, KV_HEADS, tokens, DIM, generator=rng) for _ in "kv")
        out = cache.attend(0, query, key, value, 0.3)
        keys, values = torch.cat([keys, key[0]], 1), torch.cat([values, value[0]], 1)
        mask = torch.ones(tokens, keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - tokens)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, keys[None].repeat_interleave(2, 1), values[None].repeat_interleave(2, 1), attn_mask=mask, scale=0.3
        )
        assert torch.allclose(out, expected, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(total=st.integers(30, 300), budget=st.integers(8, 20), seed=st.integers(0, 99))
def test_random_keeps_the_same_sample_however_the_stream_is_cut(total, budget, seed):
    kept = []
    for size in (1, 7, total):
        cache, source = make("random", budget, seed, 2)
        while cache.seen_tokens < total:
            source.block(min(size, total - cache.seen_tokens))
        kept.append([sorted(cache.entries(layer)[h, :, 0].tolist()) for layer in range(LAYERS) for h in range(KV_HEADS)])
    assert kept[0] == kept[1] == kept[2]
    assert kept[0][0] != kept[0][1], "heads share one sample"


def test_random_is_uniform_over_the_stream():
    counts = torch.zeros(200)
    for seed in range(60):
        cache = BudgetedCache(SHAPE, make_policy("random", {"seed": seed}), 22, unrotate=lambda k, p: k, kernel=attention.eager)
        source = Source(cache, 0)
        source.block(2, protect=True)
        for _ in range(20):
            source.block(10)
        for layer in range(LAYERS):
            counts[(cache.entries(layer)[..., 0].flatten() - 2).clamp(min=0).long()] += 1
    quarters = counts[1:].split(50)
    assert max(q.sum() for q in quarters) / min(q.sum() for q in quarters) < 1.15
