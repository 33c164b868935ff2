"""Stage one: the vision tower learns, alone, to name what a group or tile shows, through a classifier that is thrown away afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jobs.bundled_training.architecture import Architecture
from jobs.bundled_training.bank import COLOUR_NAMES, FIGURES, NOTHING_COLOUR, GroupBank
from jobs.bundled_training.optimizer import MuonAndAdamW
from jobs.bundled_training.thumbnails import Thumbnails, thumbnail_loss

_TURN, _STRETCH, _SHIFT_PX = 0.12, 0.1, 3.0
"""Furthest turn in radians, stretch as a share and shift in pixels, either way."""

_THUMBNAIL_WEIGHT = 0.25
"""Small: several needles to name at once make a noisy loss, which would drown the tiles' own."""

_NOTHING_WEIGHT = 0.05
"""Of the variance among the normalised tokens of groups without a needle, glitches included: KeyDiff keeps keys that differ from the mean."""


class ThrowAwayHead(nn.Module):
    """Reads colour and figure, "nothing" included, from every single visual token."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.linear = nn.Linear(hidden, len(COLOUR_NAMES) + 1 + len(FIGURES) + 1)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(groups, tokens, hidden) to logits of the colour and of the figure, (groups, tokens, classes)."""
        logits = self.linear(self.norm(features))
        return logits[..., : len(COLOUR_NAMES) + 1], logits[..., len(COLOUR_NAMES) + 1 :]


def train_vision(
    architecture: Architecture,
    model: Any,
    train: GroupBank,
    held_out: GroupBank,
    *,
    seed: int,
    steps: int,
    log: Callable[[str], None],
    batch_groups: int = 192,
    learning_rate: float = 2e-3,
) -> float:
    """Train the vision tower in place.

    Returns:
        Share of held-out groups that the tokens of each, taken together, name rightly in colour and figure.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    head = ThrowAwayHead(model.get_input_embeddings().embedding_dim)
    vision = architecture.vision(model)
    parameters = [*vision.parameters(), *head.parameters()]
    optimizer = MuonAndAdamW(vision, parameters, steps=steps, learning_rate=learning_rate, weight_decay=0.02)
    thumbnails = Thumbnails(train.frames) if architecture.has_thumbnail else None
    started, running = time.monotonic(), 0.0
    for step in range(1, steps + 1):
        rows = torch.randint(len(train.frames), (batch_groups,), generator=generator)
        seen = disturbed(train.frames[rows], generator)
        encoded = architecture.encode(model, seen)
        loss = _loss(head(encoded), train.colour[rows], train.figure[rows])
        nothing = head.norm(encoded[train.colour[rows] == NOTHING_COLOUR]).flatten(0, 1)
        loss = loss + _NOTHING_WEIGHT * nothing.var(dim=0).mean()
        if thumbnails is not None:
            loss = loss + _THUMBNAIL_WEIGHT * thumbnail_loss(architecture, model, head, thumbnails, train, generator)
        optimizer.descend(loss, step)
        running += (loss.item() - running) / min(step, 50)
        if step % 50 == 0 or step == steps:
            right = measure_vision(architecture, model, head, held_out) if step % 200 == 0 or step == steps else None
            shown = "" if right is None else f" held-out groups named rightly {right:.3f}"
            log(f"vision step {step}/{steps} loss {running:.4f} {time.monotonic() - started:.0f} s{shown}")
    return measure_vision(architecture, model, head, held_out)


def disturbed(frames: Tensor, generator: torch.Generator) -> Tensor:
    """Turn, stretch and shift each group a little and change its contrast, brightness and noise, so that a bank lasts for many rounds.

    Args:
        frames: (groups, frames, px, px, 3) uint8.

    Returns:
        The same shape, float32 in 0..255.
    """
    groups, count, side, _, _ = frames.shape
    turn, stretch, right, down, contrast, brightness, loudness = torch.rand(7, groups, generator=generator) * 2 - 1
    turn, stretch, shift_x, shift_y = _TURN * turn, 1 + _STRETCH * stretch, 2 * _SHIFT_PX / side * right, 2 * _SHIFT_PX / side * down
    cos, sin = stretch * turn.cos(), stretch * turn.sin()
    motion = torch.stack([torch.stack([cos, -sin, shift_x], dim=1), torch.stack([sin, cos, shift_y], dim=1)], dim=1)
    pictures = frames.permute(0, 1, 4, 2, 3).reshape(groups, count * 3, side, side).float()
    grid = functional.affine_grid(motion, list(pictures.shape), align_corners=False)
    moved = functional.grid_sample(pictures, grid, padding_mode="border", align_corners=False)
    contrast, brightness, loudness = (x[:, None, None, None] for x in (1 + 0.1 * contrast, 10 * brightness, 3 + 3 * loudness))
    noise = torch.randn(moved.shape, generator=generator) * loudness
    changed = (moved * contrast + brightness + noise).clamp(0, 255)
    return changed.view(groups, count, 3, side, side).permute(0, 1, 3, 4, 2)


@torch.no_grad()
def measure_vision(architecture: Architecture, model: Any, head: ThrowAwayHead, bank: GroupBank) -> float:
    """Share of groups that the tokens of each, taken together, name rightly in colour and figure."""
    right = 0
    for start in range(0, len(bank.frames), 256):
        rows = slice(start, start + 256)
        colour, figure = head(architecture.encode(model, bank.frames[rows]))
        guesses = (logits.log_softmax(-1).mean(dim=1).argmax(-1) for logits in (colour, figure))
        right += int(((next(guesses) == bank.colour[rows]) & (next(guesses) == bank.figure[rows])).sum())
    return right / len(bank.frames)


def _loss(logits: tuple[Tensor, Tensor], colour: Tensor, figure: Tensor) -> Tensor:
    tokens = logits[0].shape[1]
    by_token = (colour[:, None].expand(-1, tokens), figure[:, None].expand(-1, tokens))
    both = [functional.cross_entropy(given.flatten(0, 1), wanted.flatten()) for given, wanted in zip(logits, by_token, strict=True)]
    return torch.stack(both).sum()
