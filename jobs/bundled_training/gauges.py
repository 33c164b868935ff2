"""What only positions tell, read off the first layers by heads that are thrown away, so that they learn to write it down."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from jobs.bundled_training.lessons import Lesson
from pipeline.synthetic.vocabulary import QUARTERS

_CLOCK_WEIGHT, _COMPASS_WEIGHT = 0.05, 0.2
_MEAN_LOG_TIME = 5.0


class Clock(nn.Module):
    """Reads from what the first layers make of a visual token when in the video it was seen; thrown away after training.

    Only rotary positions tell the time, and those are no value that attention could carry on. With this loss the first layers learn to
    write it down, without which "when" and "which came first" stay at chance.
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
    """Reads from what the first layers make of a thumbnail's token which quarter of the picture it shows; thrown away after training.

    As with the clock: the tower's features hardly tell a token's place, and without this loss "where" stays at chance.
    """

    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, len(QUARTERS))
        nn.init.normal_(self.linear.weight, std=hidden**-0.5, generator=torch.Generator().manual_seed(seed))

    def loss(self, early: tuple[Tensor, ...], lesson: Lesson) -> Tensor:
        """Weighted mean cross-entropy of the quarter, over layers; the thumbnail's tokens are the last visual ones.

        Args:
            early: hidden states after the first layers, each (pictures, all tokens, hidden).
        """
        end = len(lesson.prefix) + lesson.features.shape[1]
        quarters = torch.arange(len(QUARTERS)).repeat(len(lesson.features))
        read = [self.linear(hidden[:, end - len(QUARTERS) : end]).flatten(0, 1) for hidden in early]
        return _COMPASS_WEIGHT * torch.stack([functional.cross_entropy(logits, quarters) for logits in read]).mean()
