"""Small copies of whole pictures: put together from a bank's cells, and what a token of one is to say."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from jobs.bundled_training.architecture import Architecture
from jobs.bundled_training.bank import NOTHING_COLOUR, NOTHING_FIGURE, GroupBank
from pipeline.synthetic.draw import FRAME_PX
from pipeline.synthetic.picture import SIDES

_CELL_PX = FRAME_PX // SIDES.start
"""As large as a cell can be in a thumbnail."""

_BATCH_PICTURES = 48
_MOST_NEEDLES = 16


class Thumbnails:
    """Makes thumbnails of pictures whose cells are rows of a bank.

    Args:
        frames: (groups, 1, FRAME_PX, FRAME_PX, 3) uint8, a bank's.
    """

    def __init__(self, frames: Tensor) -> None:
        chunks = [resized(chunk[:, 0].permute(0, 3, 1, 2), _CELL_PX).round().byte() for chunk in frames.split(512)]
        self._cells = torch.cat(chunks)

    def __call__(self, rows: Tensor) -> Tensor:
        """(pictures, cells) rows of the bank to (pictures, 1, FRAME_PX, FRAME_PX, 3) float32 in 0..255."""
        pictures, side = len(rows), isqrt(rows.shape[1])
        cells = self._cells[rows].view(pictures, side, side, 3, _CELL_PX, _CELL_PX)
        whole = cells.permute(0, 3, 1, 4, 2, 5).reshape(pictures, 3, side * _CELL_PX, side * _CELL_PX)
        return resized(whole, FRAME_PX).permute(0, 2, 3, 1)[:, None]

    def features(self, encode: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """What gives (pictures, tokens, hidden) features of thumbnails, from rows, without gradients."""
        return torch.no_grad()(lambda rows: encode(self(rows)))


def resized(pictures: Tensor, side_px: int) -> Tensor:
    """Resize (pictures, 3, px, px) as the image processor does, to float32 in 0..255."""
    return functional.interpolate(pictures.float(), size=(side_px, side_px), mode="bicubic", antialias=True).clamp(0, 255)


def thumbnail_loss(
    architecture: Architecture,
    model: Any,
    head: Callable[[Tensor], tuple[Tensor, Tensor]],
    thumbnails: Thumbnails,
    bank: GroupBank,
    generator: torch.Generator,
) -> Tensor:
    """How far a thumbnail's tokens are from naming, each with equal share, the needles in their part of the picture.

    Without it the tower, which trains alone, would tell nothing of a thumbnail.
    """
    side = int(torch.randint(SIDES.start, SIDES.stop, (), generator=generator))
    needles, others = ((bank.colour != NOTHING_COLOUR).nonzero()[:, 0], (bank.colour == NOTHING_COLOUR).nonzero()[:, 0])
    shape = (_BATCH_PICTURES, side * side)
    share = torch.rand(_BATCH_PICTURES, 1, generator=generator) * min(0.7, _MOST_NEEDLES / side**2)
    drawn = (rows[torch.randint(len(rows), shape, generator=generator)] for rows in (needles, others))
    rows = torch.where(torch.rand(shape, generator=generator) < share, next(drawn), next(drawn))
    logits = head(architecture.encode(model, thumbnails(rows)))
    wanted = (parts_named(bank.colour[rows], NOTHING_COLOUR), parts_named(bank.figure[rows], NOTHING_FIGURE))
    losses = [functional.cross_entropy(given.flatten(0, 1), want.flatten(0, 1)) for given, want in zip(logits, wanted, strict=True)]
    return torch.stack(losses).sum()


def parts_named(classes: Tensor, nothing: int) -> Tensor:
    """What the 2 x 2 tokens of a thumbnail are to name.

    Args:
        classes: (pictures, cells) int64, `nothing` where a cell shows no needle.
        nothing: the last class.

    Returns:
        (pictures, 4, nothing + 1) shares that sum to one; a cell on the border between two parts counts half in each.
    """
    side = isqrt(classes.shape[1])
    ends = torch.tensor([[0.0, side / 2], [side / 2, side]])
    starts = torch.arange(side)[:, None].float()
    overlap = (torch.minimum(starts + 1, ends[:, 1]) - torch.maximum(starts, ends[:, 0])).clamp(min=0)  # (side, 2)
    named = functional.one_hot(classes, nothing + 1).float().view(-1, side, side, nothing + 1)
    shares = torch.einsum("prck,rt,cu->ptuk", named, overlap, overlap).flatten(1, 2)
    shares[..., nothing] = (shares[..., :nothing].sum(-1) == 0).float()
    return shares / shares.sum(-1, keepdim=True)
