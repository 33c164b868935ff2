"""What the dispatcher asks of Ray and how it takes Ray's answers, with Ray played by the test."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import WorkerCrashedError

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models import load_geometry
from pipeline import dispatch
from pipeline.config import JobConfig
from pipeline.plan import VideoPlan
from pipeline.run import JobFailedError
from pipeline.stream import StreamHead, StreamTail
from pipeline.task import ManifestQuestion, VideoTask
from tests.support.videos import make_video


def config(**sections: Any) -> JobConfig:
    return JobConfig.model_validate({"videos": "v", "questions": "q", "output": "o"} | sections)


def task(uri: Path | str, video_id: str = "clip") -> VideoTask:
    return VideoTask(video_id=video_id, uri=str(uri), questions=(ManifestQuestion(question_id="q0", question="What is it?"),))


class GrowingCluster:
    """A cluster that starts with nothing and gets a node some looks after it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, node: dict[str, float], looks: int = 3) -> None:
        self.node, self.looks, self.requests = node, looks, list[Any]()
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
        monkeypatch.setattr(dispatch, "NODES_ASKED_EVERY_S", 0.01)
        monkeypatch.setattr(dispatch, "request_resources", lambda *, bundles: self.requests.append(bundles))
        monkeypatch.setattr(dispatch.ray, "cluster_resources", self.resources)

    def resources(self) -> dict[str, float]:
        self.looks -= bool(self.requests)
        return self.node if self.looks <= 0 else {}


def test_nodes_are_asked_for_and_the_request_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = GrowingCluster(monkeypatch, {"CPU": 8.0, "GPU": 1.0})
    room = dispatch._find_room_soon(config(engine={"device": "cuda"}), 5)
    assert (room.num_gpus, room.max_actors) == (1.0, 1)
    assert cluster.requests == [[{"CPU": 1.0, "GPU": 1.0}, {"CPU": 0.5}], []]


def test_a_cluster_without_the_gpu_that_was_meant_is_given_up_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = GrowingCluster(monkeypatch, {"CPU": 8.0})
    with pytest.raises(ConfigError, match="missing 0 CPUs and 1 GPUs"):
        dispatch._find_room_soon(config(engine={"dtype": "bfloat16"}, pool={"cluster_wait_s": 0.1}), 5)
    assert cluster.requests[-1] == []


def test_what_was_chosen_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    GrowingCluster(monkeypatch, {"CPU": 8.0})
    said: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(dispatch.log, level, lambda message, *arguments: said.append(message % arguments))
    dispatch._find_room_soon(config(), 2)
    assert "1 to 2 engines, 1 at first, each on 1 CPUs and no GPU; the cluster has 8 CPUs and 0 GPUs" in said
    assert any(line.startswith("no GPU has joined the cluster, so engines run on CPU") for line in said)


def test_a_machine_of_our_own_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(dispatch, "request_resources", lambda **_: pytest.fail("nobody to ask"))
    monkeypatch.setattr(dispatch.ray, "cluster_resources", lambda: {"CPU": 1.0})
    with pytest.raises(ConfigError, match=r"missing 0\.5 CPUs"):
        dispatch._find_room_soon(config(), 5)


def test_a_file_that_kills_whoever_plans_it_costs_only_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(tasks: list[VideoTask]) -> list[VideoPlan]:
        if tasks[0].video_id == "b":
            raise WorkerCrashedError
        return [VideoPlan(task.video_id, 3.0, 30) for task in tasks]

    monkeypatch.setattr(dispatch, "PLANNED_AT_ONCE", 1)
    monkeypatch.setattr(dispatch, "_plan_some", SimpleNamespace(remote=lambda tasks, geometry, config: tasks))
    monkeypatch.setattr(dispatch.ray, "get", plan)
    job: Any = SimpleNamespace(config=config(), geometry=None, pending=[task(f"/{name}.mp4", name) for name in "abc"])
    assert dispatch._plan(job) == {"a": VideoPlan("a", 3.0, 30), "b": VideoPlan("b"), "c": VideoPlan("c", 3.0, 30)}


def test_a_decoder_that_gets_no_cpu_is_not_waited_for_for_ever(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, cancelled = object(), list[object]()
    monkeypatch.setattr(dispatch, "_read", SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: never)))
    monkeypatch.setattr(dispatch.ray, "wait", lambda references, timeout: ([], references))
    monkeypatch.setattr(dispatch.ray, "cancel", cancelled.append)
    geometry = load_geometry(EngineConfig(model=str(folders["qwen2_5_vl"])))
    video = make_video(tmp_path / "clip.mp4", frames=40, fps=10)
    messages = list(dispatch.read_in_task(task(video), geometry, config(engine={"block_tokens": 24}), wait_s=3))
    assert cancelled == [never], "or it would begin later, for nobody"
    assert isinstance(messages[0], StreamHead) and len(messages) > 2
    assert isinstance(messages[-1], StreamTail) and "no CPU was free for a decoder within 3 s" in messages[-1].warnings[-1]


def test_ray_that_does_not_start_is_one_line_and_its_own_noise_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def init(**options: Any) -> None:
        os.write(2, b"[I] Set ray log level from environment variable RAY_BACKEND_LOG_LEVEL to 3\nsomething else\n")
        raise Exception("The current node timed out during startup.\nThis could happen because")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(dispatch.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(dispatch.ray, "init", init)
    with pytest.raises(JobFailedError) as raised, dispatch._cluster(config()):
        pass
    assert str(raised.value).startswith("Ray didn't start: The current node timed out during startup; is this machine overloaded")
    assert "\n" not in str(raised.value)
    err = capfd.readouterr().err
    assert "something else\n" in err and "Set ray log level" not in err
