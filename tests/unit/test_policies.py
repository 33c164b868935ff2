"""The registry, and what each score prefers."""

from __future__ import annotations

import sys

import pytest
import torch

from engine.policies import EvictionPolicy, make_policy, policy_names
from engine.policies.base import hashed_uniform
from tests.support.policies import random_view


def test_a_new_file_is_a_new_policy(tmp_path, monkeypatch):
    import engine.policies

    (tmp_path / "oldest.py").write_text(
        "from engine.policies.base import EvictionPolicy\n\n\nclass Policy(EvictionPolicy):\n    def score(self, view):\n        return -view.index\n"
    )
    monkeypatch.setattr(engine.policies, "__path__", [*engine.policies.__path__, str(tmp_path)])
    try:
        view = random_view()
        kept = make_policy("oldest").keep(view, 5)
        assert [sorted(view.index[h, s].item() for s in kept[h]) for h in range(2)] == [[4, 5, 6, 7, 8]] * 2
    finally:
        sys.modules.pop("engine.policies.oldest", None)


@pytest.mark.parametrize("name", [n for n in policy_names() if n != "full"])
def test_keep_returns_distinct_unprotected_slots(name):
    view = random_view(slots=64, protected=5)
    kept = make_policy(name).keep(view, 20)
    assert kept.shape == (2, 20) and kept.min() >= 5 and kept.max() < 64
    assert all(len(set(row.tolist())) == 20 for row in kept)


@pytest.mark.parametrize("name", [n for n in policy_names() if n not in ("full", "random")])
def test_the_choice_does_not_depend_on_where_entries_lie(name):
    """Slots are physical; the same entries in other slots must lead to the same entries kept."""
    view = random_view(slots=50, protected=4)
    turned = random_view(slots=50, protected=4)
    if name == "coverage":  # keeps whole tokens: a slot is then the same entry in every head
        view.index[1], turned.index[1] = view.index[0].clone(), turned.index[0].clone()
    order = torch.cat([torch.arange(4), torch.randperm(46, generator=torch.Generator().manual_seed(1)) + 4])
    for field in ("keys", "values", "index", "group", "place", "positions"):
        setattr(turned, field, getattr(turned, field)[:, order])
    a, b = make_policy(name).keep(view, 16), make_policy(name).keep(turned, 16)
    for head in range(2):
        assert set(view.index[head, a[head]].tolist()) == set(turned.index[head, b[head]].tolist())


def test_keydiff_drops_the_common_and_keeps_the_odd():
    view = random_view(slots=30, protected=2)
    view.keys[:] = view.keys[:, :1]
    view.keys[:, 17] *= -1
    assert (make_policy("keydiff").keep(view, 1) == 17).all()


def test_value_norm_keeps_the_largest():
    view = random_view()
    view.values[0, 9] *= 100
    view.values[1, 21] *= 100
    assert make_policy("value_norm").keep(view, 1).flatten().tolist() == [9, 21]


def test_sliding_window_keeps_the_newest():
    view = random_view(slots=30, protected=2)
    kept = make_policy("sliding_window").keep(view, 6)
    assert all(sorted(view.index[h, kept[h]].tolist()) == list(range(24, 30)) for h in range(2))


def test_snapkv_keeps_what_the_question_looks_at():
    view = random_view(slots=30, protected=2)
    view.keys[1, 12] = view.queries[2:4].mean((0, 1)) * 50
    neighbours = make_policy("snapkv", {"kernel_size": 1}).keep(view, 1)
    assert neighbours[1] == 12


def test_a_policy_without_a_score_says_so():
    with pytest.raises(TypeError, match="must define score or keep"):
        EvictionPolicy().keep(random_view(), 3)


def test_hashed_uniform_is_uniform_and_fixed():
    draws = hashed_uniform(torch.arange(100_000), 3, 1, 0)
    assert torch.equal(draws, hashed_uniform(torch.arange(100_000), 3, 1, 0))
    histogram = torch.histc(draws, 20, 0, 1)
    assert draws.min() >= 0 and draws.max() < 1 and (histogram - 5000).abs().max() < 400
    assert (draws - hashed_uniform(torch.arange(100_000), 3, 1, 1)).abs().mean() > 0.3


@pytest.mark.parametrize(
    "spoil", [lambda k, v: k.zero_(), lambda k, v: k[0].zero_(), lambda k, v: k[0, 9].fill_(torch.nan), lambda k, v: v.fill_(torch.inf)]
)
@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("name", [n for n in policy_names() if n != "full"])
def test_numbers_that_are_none_break_no_count(name, count, spoil):
    """What is wrong with a model is told after its forward; until then each policy keeps as many as it was asked to."""
    view = random_view(slots=40, protected=4)
    spoil(view.keys, view.values)
    kept = make_policy(name).keep(view, count)
    assert kept.shape == (2, count) and all(len(set(row.tolist())) == count for row in kept)
    assert count == 0 or (kept.min() >= 4 and kept.max() < 40)
