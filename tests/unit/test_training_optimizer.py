"""The optimizer that trains the bundled models."""

from __future__ import annotations

import torch
from torch import nn

from jobs.bundled_training.optimizer import MuonAndAdamW


class Small(nn.Module):
    """An embedding, a layer, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.head = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def step(self, optimizer: MuonAndAdamW, step: int) -> None:
        optimizer.descend(nn.functional.cross_entropy(self.head(self.layer(self.embedding.weight)), torch.arange(5)), step)


def optimizer_of(model: Small, steps: int = 400) -> MuonAndAdamW:
    return MuonAndAdamW(model.layer, model.parameters(), steps=steps, learning_rate=0.01, weight_decay=0.1)


def test_only_matrices_of_layers_step_in_all_directions_alike():
    model = Small()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.step(optimizer_of(model), 100)
    change = {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}
    assert all(c.abs().max() > 0 for c in change.values())
    undecayed = {name: c - 0.01 * 0.1 * (2 if name == "layer.weight" else 1) * before[name] for name, c in change.items() if c.ndim > 1}
    # Gradients of a cross-entropy sum to zero over its five classes: four directions.
    spread = {name: torch.linalg.svdvals(c)[:4] for name, c in undecayed.items()}
    assert spread["layer.weight"].max() < 2.5 * spread["layer.weight"].min()
    assert spread["head.weight"].max() > 2.5 * spread["head.weight"].min()
    assert torch.allclose(change["head.bias"].abs(), torch.tensor(0.01), rtol=0.01), "AdamW's first step, not decayed"


def test_a_saved_optimizer_goes_on_as_if_it_had_not_stopped():
    straight, stopped, cold = Small(), Small(), Small()
    first, second = optimizer_of(straight), optimizer_of(stopped)
    for step in range(1, 6):
        straight.step(first, step)
        stopped.step(second, step)
    resumed = optimizer_of(stopped)
    resumed.load_state_dict(second.state_dict())
    cold.load_state_dict(stopped.state_dict())
    straight.step(first, 6)
    stopped.step(resumed, 6)
    cold.step(optimizer_of(cold), 6)
    for name in ("embedding.weight", "layer.weight"):
        assert torch.equal(straight.state_dict()[name], stopped.state_dict()[name])
        assert not torch.equal(straight.state_dict()[name], cold.state_dict()[name])


def test_the_rate_warms_up_and_ends_at_nothing():
    model = Small()
    optimizer = optimizer_of(model)

    def change(step: int) -> float:
        before = model.head.bias.detach().clone()
        model.step(optimizer, step)
        return float((model.head.bias.detach() - before).abs().max())

    first, full, last = change(1), change(200), change(400)
    assert first < 0.05 * full and last == 0
