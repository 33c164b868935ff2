"""What only positions tell, read off the first layers by heads that are thrown away, so that they learn to write it down."""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from jobs.bundled_training.internvl import TILE_TOKENS
from jobs.bundled_training.lessons import Lesson
from pipeline.synthetic.vocabulary import QUARTERS, quarter

_CLOCK_WEIGHT, _COMPASS_WEIGHT = 0.05, 0.5
_MEAN_LOG_TIME = 5.0


class Clock(nn.Module):
    """Reads from what the first layers make of a visual token when in the video it was seen; thrown away after training.

    Only rotary positions tell the time, and those are no value that attention could carry on. With this loss the first layers learn to
    write it down, without which "when" stays at chance.
    """

    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, 1)
        nn.init.normal_(self.linear.weight, std=hidden**-0.5, generator=torch.Generator().manual_seed(seed))

    def loss(self, early: tuple[Tensor, ...], lesson: Lesson) -> Tensor:
        """Weighted mean squared error of the logarithm of the time, over layers.

        Args:
            early: hidden states after the first layers, each (videos, all tokens, hidden).
        """
        first, tokens = len(lesson.prefix), lesson.features.shape[1]
        seen = slice(first, first + tokens)
        time = (1 + lesson.positions[0, :, seen] - first).float().log2() - _MEAN_LOG_TIME
        return _CLOCK_WEIGHT * torch.stack([functional.mse_loss(self.linear(hidden[:, seen])[..., 0], time) for hidden in early]).mean()


class Compass(nn.Module):
    """Reads from what the first layers make of a tile in which quarter of the picture it is; thrown away after training.

    As with the clock, only positions tell. How many tiles there are isn't known before the last one, so the first layers are to write the
    quarter down for each number of tiles that training shows; which of them holds, the question can see.
    """

    def __init__(self, hidden: int, seed: int, lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, len(lengths) * len(QUARTERS))
        nn.init.normal_(self.linear.weight, std=hidden**-0.5, generator=torch.Generator().manual_seed(seed))
        self._quarters = torch.full((max(lengths), len(lengths)), -100)
        for column, cells in enumerate(lengths):
            for cell in range(cells):
                if (name := quarter(cell, isqrt(cells))) is not None:
                    self._quarters[cell, column] = QUARTERS.index(name)

    def loss(self, early: tuple[Tensor, ...], lesson: Lesson) -> Tensor:
        """Weighted mean cross-entropy of the quarter, over layers; the last tile is the thumbnail, which is in none.

        Args:
            early: hidden states after the first layers, each (pictures, all tokens, hidden).
        """
        first, tokens = len(lesson.prefix), lesson.features.shape[1]
        wanted = self._quarters[: tokens // TILE_TOKENS - 1].repeat_interleave(TILE_TOKENS, dim=0).flatten().repeat(len(lesson.features))
        read = [self.linear(hidden[:, first : first + tokens - TILE_TOKENS]).reshape(-1, len(QUARTERS)) for hidden in early]
        return _COMPASS_WEIGHT * torch.stack([functional.cross_entropy(logits, wanted) for logits in read]).mean()
