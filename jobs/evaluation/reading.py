"""One video decoded once for many cells: every cell gets the blocks that it would have read alone, one cell after the other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from engine.blocks import BlockPlanner
from engine.geometry import FrameGeometry
from engine.types import TextPart, VideoBlock
from jobs.evaluation.turns import Seat
from pipeline.config import JobConfig
from pipeline.stream import BlockReader, Message, StageError, StreamHead, StreamTail, read_video
from pipeline.task import VideoTask


class Channel:
    """The stream as blocks of one size; a block is let go once every reader has taken it. Cells of one size get the very same block.

    Attributes:
        taken: how many messages each reader has taken.
    """

    def __init__(self, planner: BlockPlanner) -> None:
        self.planner = planner
        self.taken: dict[Seat, int] = {}
        self._messages: deque[Message | BaseException | None] = deque()
        self._first = 0
        self._waiting: list[VideoBlock] = []

    def has_for(self, reader: Seat) -> bool:
        """Whether the reader's next message is there."""
        return self.taken[reader] < self._first + len(self._messages)

    def take(self, reader: Seat) -> Message | BaseException | None:
        """The reader's next message; None behind the last."""
        message = self._messages[self.taken[reader] - self._first]
        self.taken[reader] += 1
        self.let_go()
        return message

    def let_go(self) -> None:
        """Drop what everybody has taken."""
        while self._messages and self._first < min(self.taken.values(), default=self._first + 1):
            self._messages.popleft()
            self._first += 1

    def put(self, message: Message | BaseException | None) -> None:
        """Take in the stream, its blocks being single groups."""
        if isinstance(message, VideoBlock):
            self._gather(message)
            return
        if not isinstance(message, BaseException):  # a stream that fails loses the block that was being gathered
            self._flush()
        self._messages.append(message)

    def _gather(self, group: VideoBlock) -> None:
        if self._waiting and group.media != self._waiting[0].media:
            self._flush()
        if self._waiting and group.frames.shape != self._waiting[0].frames.shape:
            number = group.first_group
            shapes = f"{group.frames.shape}, the ones before {self._waiting[0].frames.shape}"
            self._messages.append(StageError("decode", f"group {number} has frames of shape {shapes}; resize a stream to one size"))
            return
        self._waiting.append(group)
        if len(self._waiting) == self.planner.groups_per_block(*group.frames.shape[-2:]):
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            frames = np.concatenate([group.frames for group in self._waiting])
            times_s = tuple(time_s for group in self._waiting for time_s in group.times_s)
            self._messages.append(replace(self._waiting[0], frames=frames, times_s=times_s))
            self._waiting = []


class Reading:
    """One pass over a video.

    Attributes:
        decode_s: seconds spent on fetching and decoding it.
    """

    def __init__(self, messages: Iterator[Message], geometry: FrameGeometry) -> None:
        self.decode_s = 0.0
        self._messages, self._geometry = messages, geometry
        self._channels: dict[int, Channel] = {}
        self._groups: dict[Seat, int] = {}
        self._sizes: dict[Seat, int] = {}

    def join(self, reader: Seat, block_tokens: int) -> None:
        """Take part, before the first message is given out."""
        planner = BlockPlanner(block_tokens, self._geometry.group_tokens)
        self._channels.setdefault(block_tokens, Channel(planner)).taken[reader] = 0
        self._groups[reader], self._sizes[reader] = 0, block_tokens

    def leave(self, reader: Seat) -> None:
        """Read no further."""
        if reader in self._groups:
            channel = self._channels[self._sizes[reader]]
            del self._groups[reader], channel.taken[reader]
            channel.let_go()

    @property
    def furthest_behind(self) -> Seat | None:
        """Whose turn it is: no reader is more than a block ahead, and those of one size take a block right after one another."""
        return min(self._groups, key=lambda reader: (self._groups[reader], -self._sizes[reader]), default=None)

    def next_for(self, reader: Seat) -> Message | BaseException | None:
        """The reader's next message, decoded now if nobody has had it; an error where the stream failed, None behind its end."""
        channel = self._channels[self._sizes[reader]]
        while not channel.has_for(reader):
            self._pull()
        message = channel.take(reader)
        if isinstance(message, VideoBlock):
            self._groups[reader] += message.groups
        return message

    def close(self) -> None:
        """Stop decoding."""
        getattr(self._messages, "close", lambda: None)()

    def _pull(self) -> None:
        started = time.perf_counter()
        message: Message | BaseException | None
        try:
            message = next(self._messages, None)
        except Exception as error:
            message = error
        self.decode_s += time.perf_counter() - started
        for channel in self._channels.values():
            channel.put(message)


class ReadTogether:
    """A `BlockReader` for each cell, behind which one video at a time is read once.

    Args:
        read: what reads it.

    Attributes:
        decode_s: seconds of fetching and decoding of the passes that each seat has taken part in.
    """

    def __init__(self, read: BlockReader = read_video) -> None:
        self._read = read
        self._reading: Reading | None = None
        self._joining: dict[Seat, int] = {}
        self.decode_s: dict[Seat, float] = {}

    def watch(self, task: VideoTask, geometry: FrameGeometry, config: JobConfig, seats: list[Seat]) -> None:
        """Let every seat watch this video; returns when all are over.

        A seat that reads again (once a question, for policies that need it) waits for those that are still reading, and shares its next
        pass with whoever reads again as well.
        """
        single = config.model_copy(update={"engine": config.engine.model_copy(update={"block_tokens": 1})})
        self._joining, self.decode_s = {}, dict.fromkeys(seats, 0.0)
        try:
            for seat in seats:
                seat.turn()
            while self._joining:
                self._reading = Reading(self._read(task, geometry, single, 0), geometry)
                for seat, block_tokens in self._joining.items():
                    self._reading.join(seat, block_tokens)
                self._joining = {}
                while (reader := self._reading.furthest_behind) is not None:
                    reader.turn(self._reading.next_for(reader))
                    if reader.over:
                        self._reading.leave(reader)
                self._reading.close()
        finally:
            for seat in seats:
                seat.stop()
            if self._reading is not None:
                self._reading.close()
            self._reading = None

    def reader(self, seat: Callable[[], Seat]) -> BlockReader:
        """What a cell's worker reads with.

        Args:
            seat: the cell's seat at the time of reading.
        """

        def read(task: VideoTask, geometry: FrameGeometry, config: JobConfig, first_group: int = 0) -> Iterator[Message]:
            mine = seat()
            self._joining[mine] = config.engine.block_tokens
            try:
                while (message := mine.ask()) is not None:
                    assert isinstance(message, StreamHead | VideoBlock | TextPart | StreamTail)
                    yield message
            finally:
                self._joining.pop(mine, None)
                if self._reading is not None:
                    self.decode_s[mine] += self._reading.decode_s
                    self._reading.leave(mine)

        return read
