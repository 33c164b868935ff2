"""Cuts a visual stream into blocks. Structure in, structure out: a group is never split, and no total length is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from engine.errors import ConfigError, InputError
from engine.geometry import FrameGeometry
from engine.types import FrameGroup, MediaKind, VideoBlock


@dataclass(frozen=True)
class BlockPlanner:
    """Gathers whole groups into blocks of at most `block_tokens`; a larger group is a block of its own.

    Attributes:
        block_tokens: tokens a block may have.
        group_tokens: tokens one group costs, given a frame's (height_px, width_px).
    """

    block_tokens: int
    group_tokens: Callable[[int, int], int]

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"engine.block_tokens={self.block_tokens} must be at least 1; 784 is a good start")

    def groups_per_block(self, height_px: int, width_px: int) -> int:
        """Whole groups that fit in one block; at least 1."""
        return max(1, self.block_tokens // self.group_tokens(height_px, width_px))

    def blocks(
        self,
        groups: Iterable[FrameGroup],
        *,
        seconds_per_group: float | None = None,
        kind: MediaKind = "video",
        media: int = 0,
        first_group: int = 0,
    ) -> Iterator[VideoBlock]:
        """Yield the blocks of one media item as soon as each is full.

        Raises:
            InputError: a group's frames differ in size from the group before.
        """
        waiting: list[FrameGroup] = []
        index = first_group
        for group in groups:
            if waiting and group.frames.shape != waiting[0].frames.shape:
                raise InputError(
                    f"group {index + len(waiting)} has frames of shape {group.frames.shape}, the ones before {waiting[0].frames.shape}; "
                    "resize a stream to one size"
                )
            waiting.append(group)
            if len(waiting) == self.groups_per_block(*group.frames.shape[-2:]):
                yield _block(waiting, index, seconds_per_group, kind, media)
                index += len(waiting)
                waiting = []
        if waiting:
            yield _block(waiting, index, seconds_per_group, kind, media)


def _block(groups: list[FrameGroup], first: int, seconds_per_group: float | None, kind: MediaKind, media: int) -> VideoBlock:
    return VideoBlock(
        frames=np.concatenate([g.frames for g in groups]),
        times_s=tuple(g.time_s for g in groups),
        first_group=first,
        seconds_per_group=seconds_per_group,
        kind=kind,
        media=media,
    )


def check_block(block: object, geometry: FrameGeometry) -> None:
    """Refuse what would be read wrongly without a word.

    Args:
        block: what the stream gave.
        geometry: the model's frame rules.

    Raises:
        InputError: names the field, its value and the remedy.
    """
    if not isinstance(block, VideoBlock):
        raise InputError(f"the stream gave a {type(block).__name__}; give VideoBlock (engine.planner.blocks makes them) or TextPart")
    frames, where = block.frames, f"block at group {block.first_group} of media {block.media}"
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[1] != 3:
        kind = f"{getattr(frames, 'dtype', type(frames).__name__)} of shape {tuple(getattr(frames, 'shape', ()))}"
        raise InputError(f"{where}: frames are {kind}; give uint8 RGB of shape (frames, 3, height, width)")
    if block.kind not in ("video", "image"):
        raise InputError(f"{where}: kind={block.kind!r} must be video or image")
    per_group = 1 if block.kind == "image" and geometry.fixed_px else geometry.frames_per_group
    if block.groups < 1 or len(frames) != block.groups * per_group:
        raise InputError(f"{where}: {len(frames)} frames and {block.groups} times_s; give {per_group} frames and one time a group")
    height_px, width_px = frames.shape[-2:]
    wanted = f"{geometry.fixed_px} x {geometry.fixed_px}" if geometry.fixed_px else f"multiples of {geometry.unit_px}"
    fits = (
        (height_px, width_px) == (geometry.fixed_px,) * 2
        if geometry.fixed_px
        else not (height_px % geometry.unit_px or width_px % geometry.unit_px)
    )
    if not fits:
        raise InputError(f"{where}: frames of {height_px} x {width_px} px must be {wanted}; use geometry.resize")
    times = np.asarray(block.times_s, dtype=float)
    if not np.isfinite(times).all() or (np.diff(times) < 0).any():
        raise InputError(f"{where}: times_s must be finite and never decrease")
    if block.seconds_per_group is not None and not 0 < block.seconds_per_group < float("inf"):
        raise InputError(f"{where}: seconds_per_group={block.seconds_per_group} must be above 0; None takes times_s instead")


def halves(block: VideoBlock) -> tuple[VideoBlock, VideoBlock]:
    """Cut a block between two groups, as evenly as can be.

    Raises:
        InputError: the block is a single group, which is never cut.
    """
    if block.groups < 2:
        raise InputError("a block of one group can't be halved")
    cut = block.groups // 2
    frame = cut * (len(block.frames) // block.groups)
    return (
        replace(block, frames=block.frames[:frame], times_s=block.times_s[:cut]),
        replace(block, frames=block.frames[frame:], times_s=block.times_s[cut:], first_group=block.first_group + cut),
    )


def subsample(blocks: Iterable[VideoBlock], *, total_groups: int, keep_groups: int) -> Iterator[VideoBlock]:
    """Uniform frame subsampling, the reference that drops frames instead of cache entries.

    Args:
        blocks: all blocks of one video; total_groups: how many groups they hold; keep_groups: how many to keep, evenly spread.

    Yields:
        One block a kept group, at its own time and place.
    """
    wanted = {int((i + 0.5) * total_groups / keep_groups) for i in range(keep_groups)}
    for block in blocks:
        per_group = len(block.frames) // block.groups
        for i in range(block.groups):
            if block.first_group + i in wanted:
                frames = block.frames[i * per_group : (i + 1) * per_group]
                yield replace(block, frames=frames, times_s=block.times_s[i : i + 1], first_group=block.first_group + i)
