"""Cells that read one video together get what each would have read alone; the report's tables say what they say whatever a text holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPlanner
from engine.geometry import FrameGeometry
from engine.types import FrameGroup, TextPart, VideoBlock
from jobs.benchmarks import Score
from jobs.evaluation.grid import grid
from jobs.evaluation.reading import ReadTogether
from jobs.evaluation.scores import Tally
from jobs.evaluation.tables import Table, escaped, markdown
from jobs.evaluation.turns import Seat, Stopped
from pipeline.config import JobConfig
from pipeline.stream import Message, StageError, StreamHead, StreamTail
from pipeline.task import VideoTask
from pipeline.video.probe import VideoProbe

GEOMETRY = FrameGeometry(frames_per_group=2, unit_px=2)
CONFIG = JobConfig(manifest="m.jsonl", output="out")
TASK = VideoTask(video_id="v", uri="/v.mp4", questions=())
HEAD = StreamHead(VideoProbe("/v.mp4", "video", "mp4", "h264", "yuv420p", 8, 4), 9, (4, 8), 9.0)
TAIL = StreamTail("pyav", ("a note",))
TOKENS = 8
"""Of one group."""


def group(number: int, size: tuple[int, int] = (4, 8)) -> FrameGroup:
    return FrameGroup(np.full((2, 3, *size), number % 251, np.uint8), float(number))


class Video:
    """Something to read: groups of one or several media items, texts between them, perhaps an error behind the first item."""

    def __init__(self, items: Sequence[int | str], error: StageError | None = None) -> None:
        self.items, self.error = items, error
        self.reads, self.pulled, self.closed = 0, 0, 0

    def read(self, task: VideoTask, geometry: FrameGeometry, config: JobConfig, first_group: int = 0) -> Iterator[Message]:
        """As `read_video`: blocks of the configured size."""
        self.reads += 1
        planner = BlockPlanner(config.engine.block_tokens, geometry.group_tokens)
        try:
            yield HEAD
            for media, item in enumerate(self.items):
                if isinstance(item, str):
                    yield TextPart(item)
                    continue
                for block in planner.blocks(self._groups(item), seconds_per_group=1.0, media=media):
                    self.pulled += block.groups
                    yield block
            yield TAIL
        finally:
            self.closed += 1

    def _groups(self, count: int) -> Iterator[FrameGroup]:
        yield from map(group, range(count))
        if self.error is not None:
            raise self.error


def config(block_tokens: int) -> JobConfig:
    return CONFIG.model_copy(update={"engine": CONFIG.engine.model_copy(update={"block_tokens": block_tokens})})


def plain(message: Message) -> Any:
    if not isinstance(message, VideoBlock):
        return message
    return message.frames.tobytes(), message.times_s, message.first_group, message.seconds_per_group, message.kind, message.media


def alone(video: Video, block_tokens: int) -> list[Any]:
    return [plain(message) for message in video.read(TASK, GEOMETRY, config(block_tokens))]


class Cell:
    """Reads to the end, some times over, or leaves early."""

    def __init__(self, together: ReadTogether, block_tokens: int, passes: int = 1, leave_after: int | None = None) -> None:
        self.passes, self.leave_after, self.config = passes, leave_after, config(block_tokens)
        self.got: list[list[Any]] = []
        self.blocks: list[VideoBlock] = []
        self.failures: list[str] = []
        self._read = together.reader(lambda: self.seat)
        self.seat = Seat(self._work, "cell")

    def _work(self, seat: Seat) -> None:
        for _ in range(self.passes):
            self.got.append([])
            messages = self._read(TASK, GEOMETRY, self.config, 0)
            try:
                for message in messages:
                    self.got[-1].append(plain(message))
                    if isinstance(message, VideoBlock):
                        self.blocks.append(message)
                    if len(self.got[-1]) == self.leave_after:
                        break
            except StageError as error:
                self.failures.append(str(error))
            messages.close()  # type: ignore[attr-defined]


def watch(video: Video, *cells: tuple[int, int, int | None]) -> list[Cell]:
    together = ReadTogether(video.read)
    made = [Cell(together, *cell) for cell in cells]
    together.watch(TASK, GEOMETRY, CONFIG, [cell.seat for cell in made])
    for cell in made:
        if cell.seat.error is not None:
            raise cell.seat.error
    return made


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(st.integers(1, 9), st.sampled_from(["text", "more"])), min_size=1, max_size=4),
    st.lists(st.integers(1, 5 * TOKENS), min_size=1, max_size=4),
)
def test_every_cell_reads_what_it_would_alone(items: list[int | str], sizes: list[int]) -> None:
    video = Video(items)
    cells = watch(video, *((size, 1, None) for size in sizes))
    assert video.reads == 1
    for cell, size in zip(cells, sizes, strict=True):
        assert cell.got == [alone(Video(items), size)]


def test_cells_of_one_size_get_the_very_same_blocks() -> None:
    one, other, third = watch(Video([7]), (16, 1, None), (16, 1, None), (24, 1, None))
    assert all(a is b for a, b in zip(one.blocks, other.blocks, strict=True))
    assert not any(a is b for a in one.blocks for b in third.blocks)


def test_nothing_is_read_far_ahead_of_anyone() -> None:
    video = Video([1000])
    held: list[int] = []

    class Watched(Cell):
        def _work(self, seat: Seat) -> None:
            for message in self._read(TASK, GEOMETRY, self.config, 0):
                if isinstance(message, VideoBlock):
                    held.append(video.pulled - message.first_group)

    together = ReadTogether(video.read)
    cells = [Watched(together, size) for size in (8, 40, 40)]
    together.watch(TASK, GEOMETRY, CONFIG, [cell.seat for cell in cells])
    assert max(held) <= 2 * 5, "groups of at most two of the largest blocks"


def test_an_error_reaches_every_cell_where_it_would_alone() -> None:
    error = StageError("decode", "the stream is damaged at 5.0 s")
    cells = watch(Video([5], error), (8, 1, None), (16, 1, None), (80, 1, None))
    for cell, size in zip(cells, (8, 16, 80), strict=True):
        assert cell.failures == [str(error)]
        expected = []
        with pytest.raises(StageError):
            for message in Video([5], error).read(TASK, GEOMETRY, config(size)):
                expected.append(plain(message))
        assert cell.got == [expected]
    assert [len(cell.got[0]) for cell in cells] == [6, 3, 1], "a block that was being gathered is lost"


def test_whoever_reads_again_shares_the_next_pass() -> None:
    video = Video([6])
    cells = watch(video, (16, 1, None), (16, 3, None), (8, 3, None), (16, 2, None))
    assert video.reads == video.closed == 3
    for cell in cells:
        assert cell.got == [alone(Video([6]), cell.config.engine.block_tokens)] * cell.passes


def test_a_video_that_cannot_be_opened_fails_every_pass() -> None:
    class Absent(Video):
        def read(self, task: VideoTask, geometry: FrameGeometry, config: JobConfig, first_group: int = 0) -> Iterator[Message]:
            self.reads += 1
            raise StageError("fetch", "no such file")
            yield HEAD

    video = Absent([])
    once, thrice, other = watch(video, (8, 1, None), (8, 3, None), (16, 3, None))
    assert [len(cell.failures) for cell in (once, thrice, other)] == [1, 3, 3] and video.reads == 3


def test_one_that_leaves_early_holds_nobody_up() -> None:
    video = Video([9])
    left, stayed = watch(video, (8, 1, 3), (16, 1, None))
    assert len(left.got[0]) == 3 and stayed.got == [alone(Video([9]), 16)]
    assert video.closed == 1
    again = Video([9])
    watch(again, (8, 1, 3))
    assert again.pulled < 9 and again.closed == 1, "what nobody wants isn't decoded"


def test_one_that_fails_costs_the_others_nothing() -> None:
    together = ReadTogether(Video([5]).read)

    class Broken(Cell):
        def _work(self, seat: Seat) -> None:
            next(iter(self._read(TASK, GEOMETRY, self.config, 0)))
            raise KeyError("surprise")

    broken, whole = Broken(together, 8), Cell(together, 8)
    together.watch(TASK, GEOMETRY, CONFIG, [broken.seat, whole.seat])
    assert isinstance(broken.seat.error, KeyError) and whole.got == [alone(Video([5]), 8)]


def test_a_group_of_another_size_is_refused_as_it_is_alone() -> None:
    class Odd(Video):
        def read(self, task: VideoTask, geometry: FrameGeometry, config: JobConfig, first_group: int = 0) -> Iterator[Message]:
            yield HEAD
            planner = BlockPlanner(config.engine.block_tokens, geometry.group_tokens)
            yield from planner.blocks([group(0), group(1, (8, 8)), group(2)], seconds_per_group=1.0)

    (cell,) = watch(Odd([]), (80, 1, None))
    assert cell.failures == ["decode: group 1 has frames of shape (2, 3, 8, 8), the ones before (2, 3, 4, 8); resize a stream to one size"]


def test_stopping_ends_every_thread() -> None:
    threads = threading.active_count()
    together = ReadTogether(Video([50]).read)

    class Interrupted(Cell):
        def _work(self, seat: Seat) -> None:
            for number, _ in enumerate(self._read(TASK, GEOMETRY, self.config, 0)):
                self.got.append([number])

    cells = [Interrupted(together, 8), Interrupted(together, 16)]
    turns = 0

    def interrupt(self: Seat, reply: Any = None) -> None:
        nonlocal turns
        turns += 1
        if turns == 10:
            raise KeyboardInterrupt
        turn(self, reply)

    turn = Seat.turn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Seat, "turn", interrupt)
        with pytest.raises(KeyboardInterrupt):
            together.watch(TASK, GEOMETRY, CONFIG, [cell.seat for cell in cells])
    assert all(isinstance(cell.seat.error, Stopped) for cell in cells)
    assert threading.active_count() == threads


def test_a_grid_has_a_folder_a_cell_and_no_cell_twice() -> None:
    cells = grid(CONFIG, "out", ["a/same", "b/same", "Qwen/Qwen2.5-VL-7B"], ["keydiff", "full"], [64, 128], [32])
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) == 9
    assert names[-3:] == ["Qwen2.5_VL_7B-keydiff-m64-b32", "Qwen2.5_VL_7B-keydiff-m128-b32", "Qwen2.5_VL_7B-full-b32"]
    assert [cell.evicts for cell in cells[-3:]] == [True, True, False]
    assert cells[0].config.output == f"out/cells/{names[0]}"


def test_what_has_no_answer_counts_as_wrong_and_is_shown() -> None:
    tally = Tally()
    for score, unanswered in (
        (Score(1), False),
        (Score(0), False),
        (Score(0, parsed=False), False),
        (Score(0, parsed=False), True),
        (None, True),
    ):
        tally.add(score, unanswered=unanswered)
    assert (tally.right, tally.total, tally.unanswered, tally.unparsed, tally.open) == (1, 4, 1, 1, 1)
    assert tally.accuracy == 0.25 and tally.of_parsed == 0.5


@given(st.text(max_size=40))
def test_a_text_cannot_leave_its_cell_in_markdown(text: str) -> None:
    lines = markdown(Table(["name", "value"], [[text, "1"]])).splitlines()
    assert len(lines) == 3
    bare = lines[2].replace("\\|", "")
    assert bare.count("|") == 3 and "<" not in bare


def test_markdown_keeps_words_readable() -> None:
    assert escaped("sliding_window a|b <b>") == "sliding\\_window a\\|b &lt;b&gt;"


def test_no_picture_breaks_over_a_name(tmp_path: Path) -> None:
    from jobs.evaluation.charts import short_model, shown

    assert short_model("/models/$x^{2\u202e}$/") == "$x^{2\N{REPLACEMENT CHARACTER}}$"
    assert shown("a\ud800" + "b" * 100).endswith("…")
