"""The watchdog over the decoder, and reading on from a group in the middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import InputError
from engine.geometry import FrameGeometry
from engine.models import load_geometry
from pipeline.config import JobConfig
from pipeline.stream import StageError, StreamHead, StreamTail, read_video
from pipeline.task import ManifestQuestion, VideoTask
from pipeline.video import pulse
from pipeline.video.config import DecodeConfig
from pipeline.video.frame_stream import FrameStream
from pipeline.video.source import open_media
from tests.conftest import DATA
from tests.support.videos import make_damaged, make_video, variable_times

QUESTION = ManifestQuestion(question_id="q0", question="What is it?")


@pytest.fixture(scope="module")
def geometry(folders: dict[str, Path]) -> FrameGeometry:
    return load_geometry(EngineConfig(model=str(folders["qwen2_5_vl"])))


def stalled() -> InputError:
    return InputError("no sign of life")


def test_items_come_as_they_are_and_errors_too() -> None:
    assert list(pulse.watched(iter(range(5)), 5.0, stalled)) == list(range(5))

    def failing() -> Iterator[int]:
        yield 1
        raise KeyError("inside")

    items = pulse.watched(failing(), 5.0, stalled)
    assert next(items) == 1
    with pytest.raises(KeyError, match="inside"):
        next(items)


def test_only_one_item_is_made_ahead_of_need() -> None:
    made: list[int] = []

    def making() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            yield number

    items = pulse.watched(making(), 5.0, stalled)
    next(items)
    time.sleep(0.05)
    assert made == [0]


def test_the_iterator_is_closed_in_its_own_thread_when_the_consumer_stops() -> None:
    threads: list[threading.Thread] = []

    def making() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            threads.append(threading.current_thread())

    items = pulse.watched(making(), 5.0, stalled)
    next(items)
    items.close()
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


def test_silence_is_cut_off_and_beats_are_not() -> None:
    release = threading.Event()

    def silent() -> Iterator[int]:
        yield 1
        release.wait(30)
        yield 2

    items = pulse.watched(silent(), 0.2, stalled)
    next(items)
    began = time.monotonic()
    with pytest.raises(InputError, match="no sign of life"):
        next(items)
    assert 0.2 <= time.monotonic() - began < 5
    release.set()

    def slow() -> Iterator[int]:
        for _ in range(8):
            time.sleep(0.1)
            pulse.beat()
        yield 1

    assert list(pulse.watched(slow(), 0.4, stalled)) == [1]


def test_a_slow_consumer_is_not_taken_for_a_hung_decoder() -> None:
    items = pulse.watched(iter([1, 2]), 0.1, stalled)
    next(items)
    time.sleep(0.4)
    assert next(items) == 2


def config(tmp_path: Path, **decode: object) -> JobConfig:
    return JobConfig.model_validate(
        {"videos": "unused", "questions": "unused", "output": str(tmp_path), "decode": decode, "engine": {"block_tokens": 24}}
    )


def test_a_decoder_that_never_returns_is_an_error_of_that_video(
    tmp_path: Path, geometry: FrameGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = make_video(tmp_path / "clip.mp4", frames=40, fps=10)
    release = threading.Event()
    monkeypatch.setattr(FrameStream, "_decode_packet", lambda self, packet: release.wait(30) and [])
    task = VideoTask(video_id="clip", uri=str(video), questions=(QUESTION,))
    messages = read_video(task, geometry, config(tmp_path, stall_timeout_s=0.3))
    assert isinstance(next(messages), StreamHead)
    with pytest.raises(StageError, match=r"decode: .*clip\.mp4: the decoder gave no sign of life for 0\.3 s .* decode\.stall_timeout_s"):
        next(messages)
    release.set()


def sources(tmp_path: Path) -> Iterator[tuple[str, Path, dict[str, object]]]:
    yield "long intervals", make_video(tmp_path / "gop.mp4", frames=300, fps=10, gop=100), {"fps": 2}
    yield "open intervals", make_video(tmp_path / "open.mkv", frames=200, fps=10, gop=24, options={"x264-params": "open-gop=1"}), {"fps": 3}
    yield "short intervals", make_video(tmp_path / "short.mp4", frames=300, fps=10), {"fps": 0.7}
    yield "variable rate", make_video(tmp_path / "vfr.mp4", frames=60, times=variable_times(60)), {"fps": 2}
    yield "keyframes", make_video(tmp_path / "keys.mp4", frames=200, fps=10), {"sampling": "keyframes"}
    yield "number of frames", make_video(tmp_path / "n.mp4", frames=200, fps=10), {"sampling": "frames", "frames": 11}
    yield "start and end", make_video(tmp_path / "cut.mp4", frames=200, fps=10), {"fps": 2, "start_s": 3.3, "end_s": 15.1}
    yield "decord", make_video(tmp_path / "decord.mp4", frames=200, fps=10), {"fps": 2, "decoder": "decord"}
    yield "damaged", make_damaged(tmp_path / "hurt.mp4", make_video(tmp_path / "whole.mp4", frames=300, fps=10), 0.3, 0.33), {"fps": 2}
    if DATA.is_dir():
        for path in sorted((DATA / "videos").iterdir()):
            if path.suffix in (".mp4", ".mkv", ".webm", ".avi", ".gif"):
                yield path.name, path, {"fps": 2}


def test_reading_on_from_a_group_gives_the_same_groups(tmp_path: Path, geometry: FrameGeometry) -> None:
    compared = 0
    for name, path, decode in sources(tmp_path):
        settings = DecodeConfig.model_validate(decode)
        whole = list(open_media(path, geometry, settings).blocks(24))
        for cut in range(1, len(whole) + 1, max(1, len(whole) // 3)):
            first = sum(block.groups for block in whole[:cut])
            source = open_media(path, geometry, settings)
            rest = list(source.blocks(24, first_group=first))
            assert [b.times_s for b in rest] == [b.times_s for b in whole[cut:]], name
            assert [b.first_group for b in rest] == [b.first_group for b in whole[cut:]], name
            assert all(np.array_equal(a.frames, b.frames) for a, b in zip(rest, whole[cut:], strict=True)), name
            compared += len(rest)
    assert compared > 50


def test_the_tail_of_a_stream_read_on_from_its_end_comes_at_once(tmp_path: Path, geometry: FrameGeometry) -> None:
    video = make_video(tmp_path / "clip.mp4", frames=40, fps=10)
    task = VideoTask(video_id="clip", uri=str(video), questions=(QUESTION,))
    messages = list(read_video(task, geometry, config(tmp_path), 2))
    assert isinstance(messages[0], StreamHead) and isinstance(messages[1], StreamTail) and len(messages) == 2
