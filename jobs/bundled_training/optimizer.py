"""The optimizer of both stages: Muon for the matrices inside the layers, AdamW for all else."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Muon

_MUON_RATE = 2.0
"""Muon's learning rate as a multiple of AdamW's. Equal rates are made to give steps of equal size, so its steps and its weight decay are twice AdamW's."""


class MuonAndAdamW:
    """Descends with gradients clipped to a norm of 1, at a rate that follows the step.

    Muon (https://kellerjordan.github.io/posts/muon) gives every direction of a matrix's step the same size. docs/study.md says what came of it.

    Args:
        layers: a module whose every matrix is Muon's: it mustn't hold embeddings or heads.
        parameters: all that is trained; the others of them (embeddings, convolutions, norms, biases, heads) are AdamW's.
        steps: after which the rate is 0.
        learning_rate: AdamW's highest.
    """

    def __init__(
        self, layers: nn.Module, parameters: Iterable[nn.Parameter], *, steps: int, learning_rate: float, weight_decay: float
    ) -> None:
        matrices = {id(p): p for p in layers.parameters() if p.ndim == 2}
        rest = [p for p in parameters if id(p) not in matrices]
        self._steps, self._parameters = steps, [*matrices.values(), *rest]
        groups = [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
        ]
        muon_rate = _MUON_RATE * learning_rate
        self._optimizers = (
            AdamW(groups, lr=learning_rate, betas=(0.9, 0.98)),
            Muon(matrices.values(), lr=muon_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        )

    def descend(self, loss: Tensor, step: int) -> None:
        """Take one step.

        Args:
            loss: of this step, not yet differentiated.
            step: from 1.
        """
        for optimizer in self._optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * _schedule(step, self._steps)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """What `load_state_dict` takes."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on where another run stopped."""
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def _schedule(step: int, steps: int) -> float:
    """Share of the highest rate: a warm-up of 100 steps, a plateau, then a cosine to nothing over the last 35%."""
    decay_from = 0.65 * steps
    return min(1.0, step / 100) * 0.5 * (1 + math.cos(math.pi * max(0.0, step - decay_from) / (steps - decay_from)))
