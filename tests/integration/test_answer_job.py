"""The whole job on real Ray: `jobs.answer` from files to tables, with things going wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from engine.config import EngineConfig
from engine.models import load_geometry
from engine.types import VideoBlock
from jobs import answer
from jobs.bench._clips import repeat_clip
from pipeline.config import JobConfig
from pipeline.stream import StreamTail
from pipeline.task import ManifestQuestion, VideoTask
from tests.support.jobs import DECODER, ENGINE, answers, command_line, kill, processes, rows, said, small_cluster
from tests.support.s3 import S3Server
from tests.support.videos import make_video

VIDEOS = 10
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(s3_credentials: None) -> Iterator[None]:
    with small_cluster():
        yield


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten short videos of different lengths."""
    folder = tmp_path_factory.mktemp("archive")
    for number in range(VIDEOS):
        make_video(folder / f"video{number}.mp4", frames=20 + 10 * number, fps=10)
    return folder


@pytest.fixture(scope="module")
def job(folders: dict[str, Path], archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """job(output, videos=..., extra options): a command line for the tiny model."""
    questions = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    rows = [
        {"question_id": "free", "question": "What number is shown?"},
        {"question_id": "pick", "question": "Which is it?", "options": ["black", "white", "grey"], "expected": "white"},
    ]
    questions.write_text("\n".join(json.dumps(row) for row in rows))

    def command(output: Path | str, *options: str, videos: Path | str = archive) -> list[str]:
        return command_line(folders["qwen2_5_vl"], videos, questions, output, *options)

    return command


def committed(output: Path) -> list[Path]:
    return sorted((output / "results").rglob("*.json"))


@pytest.fixture(scope="module")
def undisturbed(cluster: None, job: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run in which nothing went wrong, decoded by tasks of their own."""
    output = tmp_path_factory.mktemp("undisturbed")
    assert answer.main(job(output, "--decode.where", "worker")) == 0
    return output


def test_ten_videos_are_answered(undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = answers(undisturbed)
    assert len(table) == 2 * VIDEOS
    assert all(row["error"] is None and row["answer"] is not None for row in table.values())
    assert {row["choice"] for row in table.values() if row["question_id"] == "pick"} <= {"A", "B", "C"}
    memory = {row["video_id"]: row for row in pq.read_table(undisturbed / "memory").to_pylist()}
    assert len(memory) == VIDEOS
    longest = memory[f"video{VIDEOS - 1}.mp4"]
    assert longest["duration_s"] == pytest.approx(11.0, abs=0.1) and longest["frames"] == 22
    assert longest["kv_peak_bytes"] < longest["kv_full_bytes"] and longest["decode_wait_s"] > 0
    assert (undisturbed / "_SUCCESS").exists()
    assert not (undisturbed / "attempts").exists(), "tries are forgotten once a result is committed"


def test_run_again_and_nothing_is_done(undisturbed: Path, job: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    before = [(path, path.stat().st_mtime_ns) for path in committed(undisturbed)]
    assert answer.main(job(undisturbed)) == 0
    assert [(path, path.stat().st_mtime_ns) for path in committed(undisturbed)] == before
    printed = capsys.readouterr().out
    assert "(10 done before)" in printed and "20 of 20 questions answered" in printed


def test_two_engines_that_decode_for_themselves_give_the_same_answers(
    cluster: None, job: Callable[..., list[str]], tmp_path: Path, undisturbed: Path
) -> None:
    assert answer.main(job(tmp_path, "--decode.where", "actor", "--pool.min-actors", "2")) == 0
    assert said(tmp_path) == said(undisturbed)


def test_objects_in_s3_give_the_same_answers_as_files(
    cluster: None,
    job: Callable[..., list[str]],
    archive: Path,
    folders: dict[str, Path],
    tmp_path: Path,
    s3_server: S3Server,
    undisturbed: Path,
) -> None:
    """Videos, weights, questions' answers: everything in a bucket."""
    bucket, storage = s3_server.new_bucket(), s3_server.storage()
    for name, folder in (("in", archive), ("model", folders["qwen2_5_vl"])):
        for path in folder.iterdir():
            storage.write_bytes(f"s3://{bucket}/{name}/{path.name}", path.read_bytes())
    options = [
        "--engine.model",
        f"s3://{bucket}/model",
        "--storage.models-dir",
        str(tmp_path / "models"),
        "--storage.endpoint-url",
        s3_server.endpoint_url,
        "--storage.addressing-style",
        "path",
        "--storage.spool-dir",
        str(tmp_path / "spool"),
    ]
    assert answer.main(job(f"s3://{bucket}/out", *options, videos=f"s3://{bucket}/in")) == 0
    assert storage.exists(f"s3://{bucket}/out/_SUCCESS")
    for uri in storage.list(f"s3://{bucket}/out/answers"):
        local = tmp_path / "answers" / uri.rpartition("/")[2]
        local.parent.mkdir(exist_ok=True)
        local.write_bytes(storage.read_bytes(uri))
    assert said(tmp_path) == said(undisturbed)
    assert not [p for p in (tmp_path / "spool").iterdir() if p.suffix == ".mp4"]


def test_one_broken_video_costs_no_other_its_answer(
    cluster: None, job: Callable[..., list[str]], archive: Path, tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed, output = tmp_path / "in", tmp_path / "out"
    mixed.mkdir()
    for number in range(3):
        (mixed / f"video{number}.mp4").write_bytes((archive / f"video{number}.mp4").read_bytes())
    (mixed / "broken.mp4").write_bytes(b"\x1b]0;owned\x07 this is no video")
    assert answer.main(job(output, videos=mixed)) == answer.UNANSWERED
    table = answers(output)
    assert {key for key, row in table.items() if row["error"]} == {("broken.mp4", "free"), ("broken.mp4", "pick")}
    assert table["broken.mp4", "free"]["error"].startswith("probe: ") and table["broken.mp4", "free"]["answer"] is None
    expected = said(undisturbed)
    assert all(said(output)[key] == expected[key] for key in table if key[0] != "broken.mp4")
    assert [row["video_id"] for row in pq.read_table(output / "quarantine").to_pylist()] == ["broken.mp4"]
    printed = capsys.readouterr()
    assert "6 of 8 questions answered" in printed.out and "Traceback" not in printed.err
    forwarded = [line for line in printed.err.splitlines() if " WARNING reelkeep.worker video_id=broken.mp4 probe: " in line]
    assert len(forwarded) == 1, "what an engine warns of is shown where the job was started"
    assert "1 to 1 engines, 1 at first, each on 1 CPUs and no GPU" in printed.err


def test_a_decoder_that_finds_no_free_cpu_is_replaced_by_its_engine(
    cluster: None, folders: dict[str, Path], archive: Path, tmp_path: Path
) -> None:
    import ray

    from pipeline.dispatch import read_in_task

    config = JobConfig.model_validate({"videos": "v", "questions": "q", "output": str(tmp_path), "engine": {"block_tokens": 24}})
    geometry = load_geometry(EngineConfig(model=str(folders["qwen2_5_vl"])))
    question = ManifestQuestion(question_id="q0", question="What is it?")
    task = VideoTask(video_id="video3.mp4", uri=str(archive / "video3.mp4"), questions=(question,))
    holder = ray.remote(num_cpus=2)(type("Holder", (), {"ready": lambda self: True})).remote()
    assert ray.get(holder.ready.remote(), timeout=120)
    try:
        *blocks, tail = read_in_task(task, geometry, config, wait_s=1.0)
    finally:
        ray.kill(holder)
    assert isinstance(tail, StreamTail) and any("no CPU was free for a decoder within 1 s" in warning for warning in tail.warnings)
    *elsewhere, tail = read_in_task(task, geometry, config)
    assert isinstance(tail, StreamTail) and not any("no CPU" in warning for warning in tail.warnings)
    times = [[block.times_s for block in found if isinstance(block, VideoBlock)] for found in (blocks, elsewhere)]
    assert times[0] == times[1] != []


class Deadly:
    """Ends the process that it arrives in."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def test_planning_that_dies_stops_no_job_and_is_not_repeated(cluster: None, archive: Path, tmp_path: Path) -> None:
    from pipeline import dispatch

    config = JobConfig.model_validate({"videos": "v", "questions": "q", "output": str(tmp_path)})
    tasks = [VideoTask(video_id=path.name, uri=str(path), questions=()) for path in archive.iterdir()]
    began = time.monotonic()
    plans = dispatch._plan(SimpleNamespace(config=config, pending=tasks, geometry=Deadly()))  # type: ignore[arg-type]
    assert time.monotonic() - began < 120
    assert set(plans) == {task.video_id for task in tasks} and all(plan.tokens is None for plan in plans.values())


def test_a_cluster_that_may_grow_can_be_asked(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline import dispatch

    monkeypatch.setenv("RAY_ADDRESS", "joined already")
    config = JobConfig.model_validate({"videos": "v", "questions": "q", "output": str(tmp_path), "engine": {"device": "cpu"}})
    room = dispatch._find_room_soon(config, 3)
    assert (room.min_actors, room.max_actors, room.num_gpus) == (1, 1, 0.0)


def test_an_engine_killed_once_costs_no_answer(
    cluster: None, job: Callable[..., list[str]], archive: Path, tmp_path: Path, undisturbed: Path
) -> None:
    killed: list[int] = []

    def kill_soon() -> None:
        while len(committed(tmp_path)) < 3:
            time.sleep(0.01)
        killed.extend(pid for pid in processes(ENGINE) if kill(pid))

    killer = threading.Thread(target=kill_soon, daemon=True)
    killer.start()
    assert answer.main(job(tmp_path)) == 0
    killer.join(10)
    assert len(killed) == 1
    assert said(tmp_path) == said(undisturbed)


def test_a_decoder_killed_once_costs_no_answer(cluster: None, job: Callable[..., list[str]], archive: Path, tmp_path: Path) -> None:
    long = tmp_path / "in"
    long.mkdir()
    repeat_clip(long / "long.mp4", archive / "video9.mp4", 60)
    output = tmp_path / "out"
    killed: list[int] = []
    over = threading.Event()

    def kill_soon() -> None:
        while not killed and not over.wait(0.005):
            killed.extend(pid for pid in processes(DECODER) if kill(pid))

    killer = threading.Thread(target=kill_soon, daemon=True)
    killer.start()
    assert answer.main(job(output, "--decode.where", "worker", videos=long)) == 0
    over.set()
    killer.join(10)
    assert killed
    assert all(row["answer"] is not None for row in answers(output).values())
    assert rows(output, "memory")[0]["attempts"] == 2


def stop_when(output: Path, command: list[str], finished: int, number: signal.Signals) -> str:
    """Start the job as a process of its own and signal it once so many videos are done; returns what it said."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.answer", *command],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs tests in the background has it ignored
    )
    try:
        deadline = time.monotonic() + 240
        while len(committed(output)) < finished and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == answer.STOPPED, stderr
    assert "Traceback" not in stderr
    return stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_keeps_what_is_done_and_the_same_command_goes_on(
    cluster: None, job: Callable[..., list[str]], tmp_path: Path, undisturbed: Path, number: signal.Signals
) -> None:
    stderr = stop_when(tmp_path, job(tmp_path), 1, number)  # nine videos are left then
    # The engine may commit one more video between the tables, the message and its end; nothing is told that isn't kept.
    told = int(re.search(rf"stopped: (\d+) of {VIDEOS} videos are done and kept", stderr)[1])  # type: ignore[index]
    answered = sum(row["error"] is None for row in answers(tmp_path).values())
    assert 1 <= told <= len(committed(tmp_path)) and 2 <= answered <= 2 * told
    assert answered == 2 * VIDEOS or not (tmp_path / "_SUCCESS").exists()
    assert answer.main(job(tmp_path)) == 0
    assert said(tmp_path) == said(undisturbed)
    assert (tmp_path / "_SUCCESS").exists()


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(
    job: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert answer.main(job(output, "--dry-run")) == 0
    printed = capsys.readouterr().out
    assert (
        "10 of 10 videos to do" in printed
        and "video9.mp4" in printed
        and "nothing was done" in printed
        and "KV memory per engine" in printed
    )
    assert not output.exists()


def test_a_second_dry_run_knows_what_is_done(undisturbed: Path, job: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert answer.main(job(undisturbed, "--dry-run")) == 0
    assert "0 of 10 videos to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine.budgit-tokens", "3"], "did you mean --engine.budget-tokens?"),
        (["--engine.model", "/nonexistent/model"], "engine.model=/nonexistent/model"),
        (["--only", "video77.mp4"], "no such video_id"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    job: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert answer.main(job(tmp_path / "out", *options)) == answer.UNUSABLE
    error = capsys.readouterr().err.strip()
    assert words in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_pool_that_does_not_fit_is_refused_not_waited_for(
    cluster: None, job: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    assert answer.main(job(tmp_path, "--pool.num-cpus", "2", "--decode.where", "worker")) == answer.UNUSABLE
    assert "missing 0.5 CPUs" in capsys.readouterr().err
    assert time.monotonic() - started < 30


def test_a_model_that_does_not_load_fails_the_job_in_one_line(
    cluster: None, job: Callable[..., list[str]], folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for path in folders["qwen2_5_vl"].iterdir():
        (broken / path.name).write_bytes(path.read_bytes()[:100] if path.suffix == ".safetensors" else path.read_bytes())
    assert answer.main(job(tmp_path / "out", "--engine.model", str(broken))) == answer.FAILED
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert "header" in last and "run the same command again to go on" in last
    assert "Traceback" not in printed.err + printed.out and "raylet" not in printed.out
