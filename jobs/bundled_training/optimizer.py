"""The optimizer of both stages: Muon for the matrices inside the layers, AdamW for all else; a tiny model needs far fewer steps with it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Muon

_MUON_SHARE = 2.0
"""Muon's learning rate, matched to AdamW's mean step, as a multiple of it; its steps have no direction that is much larger than the others."""


class MuonAndAdamW:
    """Steps with a warm-up of 100 steps, a constant rate, then a cosine to nothing over the last 35%.

    Muon: https://kellerjordan.github.io/posts/muon. Embeddings, convolutions, norms, biases and heads that are thrown away are AdamW's.
    """

    def __init__(
        self, layers: nn.Module, parameters: Iterable[nn.Parameter], *, steps: int, learning_rate: float, weight_decay: float
    ) -> None:
        matrices = {id(p): p for p in layers.parameters() if p.ndim == 2}
        rest = [p for p in parameters if id(p) not in matrices]
        groups = [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self._parameters = [*matrices.values(), *rest]
        self._steps = steps
        self._rates = {
            AdamW(groups, lr=learning_rate, betas=(0.9, 0.98)): learning_rate,
            Muon(matrices.values(), lr=_MUON_SHARE * learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"): _MUON_SHARE
            * learning_rate,
        }

    def descend(self, loss: Tensor, step: int) -> None:
        """Take one step, gradients clipped to a norm of 1.

        Args:
            step: from 1.
        """
        for optimizer, rate in self._rates.items():
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(step, self._steps)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self._rates:
            optimizer.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """What `load_state_dict` takes."""
        return [optimizer.state_dict() for optimizer in self._rates]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on where another run stopped."""
        for optimizer, state in zip(self._rates, states, strict=True):
            optimizer.load_state_dict(state)


def schedule(step: int, steps: int) -> float:
    """Share of the full learning rate at a step, from 1."""
    decay_from = 0.65 * steps
    if step <= decay_from:
        return min(1.0, step / 100)
    return 0.5 * (1 + math.cos(math.pi * (step - decay_from) / (steps - decay_from)))
