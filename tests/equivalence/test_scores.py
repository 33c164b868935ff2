"""Scores against kvpress's on the same tensors (where it is installed) and against slow loops of our own."""

from __future__ import annotations

import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch

from engine.policies import make_policy
from tests.support.policies import random_view

pytestmark = pytest.mark.equivalence
PEERS = importlib.util.find_spec("kvpress") is not None


def in_order(view):
    """The view's tensors in the order of the sequence, as kvpress holds them: (1, kv_heads, slots, ...)."""
    index = view.order[..., None].expand_as(view.keys)
    return view.keys.gather(1, index)[None], view.values.gather(1, index)[None]


def in_slots(view, scores):
    """Scores in the order of the sequence, back to the view's slots."""
    return torch.empty_like(scores).scatter_(-1, view.order, scores)


if PEERS:  # the run on the oldest transformers has kvpress; there these tests are collected and must pass

    @pytest.mark.parametrize("seed", range(5))
    def test_keydiff_equals_kvpress(seed):
        from kvpress import KeyDiffPress

        view = random_view(seed=seed)
        keys, values = in_order(view)
        expected = KeyDiffPress().score(None, None, keys, values, None, {})[0]
        assert torch.allclose(make_policy("keydiff").score(view), in_slots(view, expected), atol=1e-6)

    @pytest.mark.parametrize("kernel_size", [1, 5, 7])
    def test_snapkv_equals_kvpress(kernel_size):
        from kvpress import SnapKVPress

        view = random_view(slots=50, queries=6)
        keys, _ = in_order(view)
        repeated = keys[0].repeat_interleave(2, 0)
        attention = torch.softmax(view.queries @ repeated.transpose(-1, -2) * view.scale, -1)
        window = view.queries.shape[1]
        # kvpress takes the observation window from the end of the cache; ours is run behind the block and never stored.
        attention = torch.nn.functional.pad(attention, (0, window))[None]
        padded = torch.nn.functional.pad(keys, (0, 0, 0, window))
        module = SimpleNamespace(config=SimpleNamespace(num_attention_heads=4, num_key_value_heads=2))
        press = SnapKVPress(window_size=window, kernel_size=kernel_size)
        expected = press.score(module, torch.zeros(1, 56, 1), padded, padded, attention, {})[0, :, : view.keys.shape[1]]
        assert torch.allclose(make_policy("snapkv", {"kernel_size": kernel_size}).score(view), in_slots(view, expected), atol=1e-6)


def test_kvpress_is_there_where_it_can_be():
    """The run on the oldest transformers exists to compare with kvpress; without it that run would prove nothing."""
    import transformers

    assert PEERS or tuple(map(int, transformers.__version__.split(".")[:2])) > (5, 2)


def test_keydiff_equals_a_slow_loop():
    view = random_view()
    scores = make_policy("keydiff").score(view)
    for head, keys in enumerate(view.keys.double()):
        unit = [k / math.sqrt(sum(x * x for x in k.tolist())) for k in keys]
        anchor = sum(unit) / len(unit)
        for slot, key in enumerate(keys):
            cosine = float(key @ anchor) / (float(key.norm()) * float(anchor.norm()))
            assert scores[head, slot] == pytest.approx(-cosine, abs=1e-5)


def test_snapkv_equals_a_slow_loop():
    view = random_view(slots=12, protected=2)
    scores = make_policy("snapkv").score(view)
    for head in range(2):
        order = sorted(range(12), key=lambda s: int(view.index[head, s]))
        attention = [0.0] * 12
        for query_head in (2 * head, 2 * head + 1):
            for query in view.queries[query_head]:
                weights = [math.exp(float(query @ view.keys[head, s]) * view.scale) for s in order]
                attention = [a + w / sum(weights) / 6 for a, w in zip(attention, weights, strict=True)]
        for place, slot in enumerate(order):
            pooled = sum(attention[max(0, place - 2) : place + 3]) / 5
            assert scores[head, slot] == pytest.approx(pooled, abs=1e-5)


def test_infinipot_v_equals_a_slow_loop():
    view = random_view(slots=34, protected=4)  # 5 groups of 6 places behind the text: the newest group is recent
    policy = make_policy("infinipot_v", {"temporal_share": 0.5, "recent_share": 0.25})
    novelty = policy.novelty(view)
    for head in range(2):
        recent = {int(view.place[head, s]): view.keys[head, s] for s in range(34) if view.group[head, s] == 4}
        for slot in range(34):
            group, place = int(view.group[head, slot]), int(view.place[head, slot])
            if group < 0:
                assert novelty[head, slot] == 0
            elif group == 4:
                assert novelty[head, slot] >= 2
            else:
                cosine = torch.cosine_similarity(view.keys[head, slot], recent[place], dim=0)
                assert novelty[head, slot] == pytest.approx(-float(cosine), abs=1e-5)
    kept = policy.keep(view, 20)
    by_norm = view.values.norm(dim=-1)
    for head in range(2):
        chosen = set(kept[head].tolist())
        assert len(chosen) == 20 and min(chosen) >= 4
        first = set((novelty[head, 4:].topk(10).indices + 4).tolist())
        rest = sorted(set(range(4, 34)) - first, key=lambda s: -float(by_norm[head, s]))[:10]
        assert chosen == first | set(rest)


def test_leverage_equals_a_slow_loop():
    view = random_view()
    scores = make_policy("leverage", {"ridge": 0.05}).score(view)
    for head, keys in enumerate(view.keys.double()):
        unit = [k / k.norm() for k in keys]
        gram = sum(torch.outer(k, k) for k in unit) / len(unit) + 0.05 / 16 * torch.eye(16, dtype=torch.float64)
        inverse = torch.linalg.inv(gram)
        for slot, key in enumerate(unit):
            assert scores[head, slot] == pytest.approx(float(key @ inverse @ key), rel=1e-4)


@pytest.mark.parametrize(("slots", "protected", "count"), [(30, 3, 9), (30, 0, 1), (120, 5, 100), (120, 5, 20), (20, 4, 0), (20, 0, 0)])
@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_coverage_equals_a_slow_loop(slots, protected, count, spread):
    """Whoever is dropped last, all at once or one by one: the same stay."""
    view = random_view(slots=slots, protected=protected)
    centre = torch.arange(slots) % 7
    view.keys[:] = view.keys[:, centre] + spread * view.keys  # clusters: neighbours of neighbours go
    kept = make_policy("coverage").keep(view, count)
    norms = [float(view.keys[h].norm(dim=-1).mean()) for h in range(2)]
    feature = [torch.cat([view.keys[h, s] / norms[h] for h in range(2)]) for s in range(slots)]
    weight = [sum(float(view.values[h, s].norm()) for h in range(2)) / 2 for s in range(slots)]
    distance = torch.stack([torch.stack([(a - b).norm() for b in feature]) for a in feature]).tolist()
    left = list(range(slots))
    while len(left) > protected + count:

        def loss(slot, left=left):
            return weight[slot] * min((distance[slot][other] for other in left if other != slot), default=0.0)

        left.remove(min((slot for slot in left if slot >= protected), key=loss))
    assert kept.tolist() == [left[protected:]] * 2
