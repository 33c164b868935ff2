"""What is told of a video before it is watched: bounded by start and end, and never at the cost of the job."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ReelkeepError
from engine.geometry import FrameGeometry
from engine.models import load_geometry
from pipeline import plan
from pipeline.config import JobConfig
from pipeline.plan import plan_video, predicted_kv_bytes
from pipeline.stream import StreamHead, read_video
from pipeline.task import ManifestQuestion, VideoTask
from tests.support.videos import make_video


@pytest.fixture(scope="module")
def geometry(folders: dict[str, Path]) -> FrameGeometry:
    return load_geometry(EngineConfig(model=str(folders["qwen2_5_vl"])))


def config(engine: dict[str, object] | None = None, **decode: object) -> JobConfig:
    return JobConfig.model_validate({"videos": "v", "questions": "q", "output": "o", "decode": decode, "engine": engine or {}})


def task(uri: Path | str) -> VideoTask:
    return VideoTask(video_id="clip", uri=str(uri), questions=(ManifestQuestion(question_id="q0", question="What is it?"),))


@pytest.mark.parametrize(
    ("decode", "span_s"), [({}, 30.0), ({"start_s": 5.0, "end_s": 12.0}, 7.0), ({"start_s": 20.0, "end_s": 99.0}, 10.0)]
)
def test_the_length_of_keyframes_is_that_of_the_part_that_is_read(
    decode: dict[str, float], span_s: float, geometry: FrameGeometry, tmp_path: Path
) -> None:
    video = make_video(tmp_path / "clip.mp4", frames=300, fps=10)
    messages = read_video(task(video), geometry, config(sampling="keyframes", **decode))
    head = next(messages)
    messages.close()  # type: ignore[attr-defined]
    assert isinstance(head, StreamHead) and head.span_s == pytest.approx(span_s, abs=0.2)


def test_whatever_opening_a_file_raises_is_a_problem_of_that_file(geometry: FrameGeometry, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(plan, "open_media", broken)
    assert plan_video(task("/a.mp4"), geometry, config()).problem == "KeyError: 'surprise'"
    assert plan_video(task("gs://no/such/scheme.mp4"), geometry, config()).problem
    assert plan_video(task("s3://b/a.mp4"), geometry, config()).problem == ""


def test_a_file_that_hangs_is_left_after_the_time_limit(geometry: FrameGeometry, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(plan, "open_media", lambda *_: release.wait(30))
    began = time.monotonic()
    problem = plan_video(task("/a.mp4"), geometry, config(stall_timeout_s=0.3)).problem
    assert time.monotonic() - began < 20 and "/a.mp4" in problem and "decode.stall_timeout_s=0.3" in problem
    release.set()


def test_memory_is_predicted_for_a_gpu_without_having_one(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object, **__: object) -> None:
        raise ReelkeepError("a device was asked for")

    monkeypatch.setattr(torch, "zeros", touched)
    settings = {"model": str(folders["qwen2_5_vl"]), "budget_tokens": 80, "block_tokens": 24}
    peaks = {device: predicted_kv_bytes(config({**settings, "device": device}), 1000)[0] for device in ("cuda", "cuda:1", "cpu")}
    assert peaks["cuda"] == peaks["cuda:1"] == peaks["cpu"] / 2
    assert predicted_kv_bytes(config({**settings, "device": "cpu", "dtype": "float16"}), 1000)[0] == peaks["cuda"]
