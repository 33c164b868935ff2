"""Blocks put together are the input, whatever its length and the block size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.blocks import BlockPlanner, halves
from engine.errors import ConfigError, InputError
from engine.types import FrameGroup


def planner(block_tokens: int) -> BlockPlanner:
    return BlockPlanner(block_tokens, lambda height_px, width_px: height_px * width_px // 784)


def groups(count: int, height_px: int = 56, width_px: int = 84) -> list[FrameGroup]:
    return [FrameGroup(np.full((2, 3, height_px, width_px), i % 256, np.uint8), float(i)) for i in range(count)]


@given(count=st.integers(1, 40), block_tokens=st.integers(1, 100))
def test_blocks_concatenate_to_the_stream(count, block_tokens):
    source = groups(count)
    blocks = list(planner(block_tokens).blocks(source))
    assert np.array_equal(np.concatenate([b.frames for b in blocks]), np.concatenate([g.frames for g in source]))
    assert [t for b in blocks for t in b.times_s] == [g.time_s for g in source]
    assert [b.first_group for b in blocks] == list(np.cumsum([0, *[b.groups for b in blocks]])[:-1])
    for block in blocks:
        assert block.groups * 6 <= block_tokens or block.groups == 1
    for block in blocks[:-1]:
        assert (block.groups + 1) * 6 > block_tokens, "another group would have fitted"


def test_blocks_come_before_the_stream_ends():
    def endless():
        i = 0
        while True:
            yield groups(1)[0]
            i += 1
            assert i < 10, "the planner reads ahead"

    assert next(planner(12).blocks(endless())).groups == 2


@given(count=st.integers(2, 20))
def test_halves_are_the_block(count):
    (block,) = planner(1000).blocks(groups(count), seconds_per_group=1.5, media=2)
    first, second = halves(block)
    assert np.array_equal(np.concatenate([first.frames, second.frames]), block.frames)
    assert first.times_s + second.times_s == block.times_s
    assert second.first_group == first.groups and abs(first.groups - second.groups) <= 1
    assert (first.media, second.seconds_per_group, second.kind) == (2, 1.5, "video")


def test_bad_blocks_are_refused():
    with pytest.raises(ConfigError, match=r"engine.block_tokens=0 must be at least 1"):
        planner(0)
    with pytest.raises(InputError, match="group 1 has frames of shape"):
        list(planner(100).blocks([*groups(1), *groups(1, 84, 84)]))
    with pytest.raises(InputError, match="can't be halved"):
        halves(next(planner(1).blocks(groups(1))))
