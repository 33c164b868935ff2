"""Processes are killed at random, and on purpose: every answer is there once, and right."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs import answer
from jobs.bench._clips import repeat_clip
from pipeline.caches import CacheStore
from pipeline.config import load_config
from pipeline.manifest import read_manifest
from pipeline.results import fingerprint
from pipeline.storage import Storage
from tests.support.jobs import (
    DECODER,
    ENGINE,
    answers,
    command_line,
    kill,
    processes,
    rows,
    said,
    small_cluster,
    watch_in_this_process,
    write_questions,
)
from tests.support.videos import make_video

ROOT = Path(__file__).parents[2]


HANG = """
import sys, threading, time

def patch():
    while not hasattr(sys.modules.get("pipeline.video.frame_stream"), "FrameStream"):
        time.sleep(0.002)
    stream = sys.modules["pipeline.video.frame_stream"].FrameStream
    decode = stream._decode_packet
    stream._decode_packet = lambda self, packet: time.sleep(3600) if self._probe.path.endswith("hangs.mp4") else decode(self, packet)

threading.Thread(target=patch, daemon=True).start()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster in whose processes decoding never returns for files with `hangs` in their name."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(HANG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with small_cluster() as address:
            yield address


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("asked") / "q.jsonl", "What number is shown?", "Which is it?")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight videos of one to four minutes."""
    folder = tmp_path_factory.mktemp("archive")
    clip = make_video(tmp_path_factory.mktemp("clip") / "clip.mp4", frames=100, fps=10)
    for number in range(8):
        repeat_clip(folder / f"video{number}.mp4", clip, 6 + 2 * number)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folders: dict[str, Path], archive: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        watch_in_this_process(patch)
        assert answer.main(command_line(folders["qwen2_5_vl"], archive, questions, output, "--caches.retain", "none")) == 0
    return output


@contextmanager
def in_background(work: Callable[[threading.Event], None]) -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)


def committed(output: Path) -> int:
    return len(list((output / "results").rglob("*.json")))


@pytest.mark.parametrize("kills", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_random_kills_of_engines_decoders_and_drivers(
    kills: int, cluster: str, folders: dict[str, Path], archive: Path, questions: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """A job that ends before all kills are spent is followed by the next one."""
    chance, spent, starts, outputs = random.Random(kills), Counter[str](), 0, [tmp_path / "out0"]
    deadline = time.monotonic() + 120 * kills
    while True:
        output = outputs[-1]
        options = ["--caches.checkpoint-every-blocks", "4", "--pool.max-attempts", "100", "--decode.where", "worker"]
        command = [sys.executable, "-m", "jobs.answer", *command_line(folders["qwen2_5_vl"], archive, questions, output, *options)]
        starts += 1
        log = (tmp_path / "log").open("ab")
        driver = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"RAY_ADDRESS": cluster})
        try:
            kinds = ["engine", "engine", "decoder", "driver"]
            kind, next_s, since_s = chance.choice(kinds), chance.uniform(0.0, 2.0), time.monotonic()
            while driver.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.02)
                engines = processes(ENGINE)
                if not engines or spent.total() == kills:
                    since_s = time.monotonic()
                elif time.monotonic() - since_s > next_s:
                    victims = {"engine": engines, "decoder": processes(DECODER), "driver": [driver.pid]}[kind]
                    if victims and kill(chance.choice(victims)):
                        spent[kind] += 1
                        kind, next_s, since_s = chance.choice(kinds), chance.uniform(0.0, 3.0), time.monotonic()
        finally:
            driver.kill()
            driver.wait()
            log.close()
        assert driver.returncode in (0, -signal.SIGKILL), (tmp_path / "log").read_text()[-3000:]
        if driver.returncode == 0:
            assert said(output) == said(undisturbed)
            assert committed(output) == 8 and (output / "_SUCCESS").exists()
            assert not (output / "attempts").exists() and not (output / "lease").exists()
            files = [path for path in output.rglob("*") if path.is_file()]
            assert not [path for path in files if ".partial" in path.name]
            assert not [path for path in (output / "answers").iterdir() if path.suffix != ".parquet"]
            store = CacheStore(str(output / "caches"), Storage())
            entries = list(store.entries())
            assert len(entries) == 8
            for entry in entries:
                store.verify(entry.cache_id)
            if spent.total() == kills:
                break
            outputs.append(tmp_path / f"out{len(outputs)}")
    resumed = sum(row["resumed_s"] is not None for output in outputs for row in rows(output, "memory"))
    print(
        f"{kills} kills ({dict(spent)}), {starts} starts, {len(outputs)} jobs of 8 videos and 16 questions: all answers once and right, "
        f"{resumed} videos resumed in their middle"
    )


@pytest.mark.parametrize("where", ["worker", pytest.param("actor", marks=pytest.mark.slow)])
def test_an_engine_killed_at_sixty_percent_of_a_long_video_is_taken_over_there(
    where: str, cluster: str, folders: dict[str, Path], questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    videos, output, plain = tmp_path / "in", tmp_path / "out", tmp_path / "plain"
    videos.mkdir()
    repeat_clip(videos / "long.mp4", make_video(tmp_path / "clip.mp4", frames=100, fps=10), 60)
    command = [folders["qwen2_5_vl"], videos, questions]
    with monkeypatch.context() as here:
        watch_in_this_process(here)
        assert answer.main(command_line(*command, plain, "--caches.retain", "none")) == 0
    groups = rows(plain, "memory")[0]["groups"]
    store = CacheStore(str(output / "caches"), Storage())
    reached: list[int] = []

    def kill_at_sixty_percent(over: threading.Event) -> None:
        while not over.wait(0.005):
            for entry in store.entries():
                try:
                    read = store.describe(entry.cache_id)["state"]["groups"]
                except Exception:  # replaced by the next checkpoint meanwhile
                    continue
                if read >= 0.6 * groups and not reached:
                    reached.append(read)
                    for pid in processes(ENGINE):
                        kill(pid)

    with in_background(kill_at_sixty_percent):
        options = ["--caches.checkpoint-every-blocks", "5", "--decode.where", where]
        assert answer.main(command_line(*command, output, *options)) == 0
    assert reached and said(output) == said(plain)
    (row,) = rows(output, "memory")
    assert row["attempts"] == 2 and row["resumed_s"] >= 0.58 * row["duration_s"]
    assert any("resumed behind" in warning for warning in row["warnings"])
    for name in ("frames", "groups", "blocks", "visual_tokens", "total_tokens", "kv_peak_bytes"):
        assert row[name] == rows(plain, "memory")[0][name], name
    print(f"{groups} groups, killed with {reached[0]} stored; second attempt began behind {row['resumed_s']} of {row['duration_s']} s")


def test_a_video_that_kills_its_engine_each_time_is_quarantined_and_twenty_others_answered(
    cluster: str,
    folders: dict[str, Path],
    questions: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    videos, output = tmp_path / "in", tmp_path / "out"
    videos.mkdir()
    clip = make_video(tmp_path / "clip.mp4", frames=20, fps=10)
    repeat_clip(videos / "poison.mp4", clip, 200)
    for number in range(20):
        repeat_clip(videos / f"good{number:02d}.mp4", clip, 1 + number % 3)
    command = command_line(folders["qwen2_5_vl"], videos, questions, output, "--pool.max-actors", "1")
    config = load_config(None, command)
    poison = next(task for task in read_manifest(config, Storage()).tasks if task.video_id == "poison.mp4")
    tries = output / "attempts" / fingerprint(config, poison)
    killed: set[str] = set()

    def kill_whoever_watches_it(over: threading.Event) -> None:
        while not over.wait(0.005):
            begun = {path.name for path in tries.glob("*-*")} - killed
            if begun and len(killed) < 3:
                killed.update(begun)
                for pid in processes(ENGINE):
                    kill(pid)

    with in_background(kill_whoever_watches_it):
        assert answer.main(command) == answer.UNANSWERED == 3
    assert len(killed) == 3
    failed = {key for key, row in answers(output).items() if row["error"]}
    assert len(answers(output)) == 42 and failed == {("poison.mp4", "q0"), ("poison.mp4", "q1")}
    (row,) = rows(output, "quarantine")
    assert (row["video_id"], row["attempts"], row["stage"]) == ("poison.mp4", 3, None)
    assert "given up after 3 attempts" in row["error"] and "died without a word" in row["last_error"]
    assert "set aside: poison.mp4: given up after 3 attempts" in capsys.readouterr().out

    watch_in_this_process(monkeypatch)  # and nobody kills any more
    kept = {path: path.stat().st_mtime_ns for path in (output / "results").rglob("*.json")}
    assert answer.main(command) == 3, "without being asked, nothing is tried again"
    assert answer.main([*command, "--retry-quarantined"]) == 0
    assert not rows(output, "quarantine") and not any(row["error"] for row in answers(output).values())
    touched = [path for path, written in kept.items() if path.stat().st_mtime_ns != written]
    assert len(touched) == 1, "the twenty were left alone"


@pytest.mark.parametrize("where", ["worker", pytest.param("actor", marks=pytest.mark.slow)])
def test_decoding_that_hangs_is_cut_off_and_the_next_video_answered(
    where: str, cluster: str, folders: dict[str, Path], questions: Path, tmp_path: Path
) -> None:
    videos, output = tmp_path / "in", tmp_path / "out"
    videos.mkdir()
    clip = make_video(tmp_path / "clip.mp4", frames=40, fps=10)
    repeat_clip(videos / "hangs.mp4", clip, 3)
    repeat_clip(videos / "plays.mp4", clip, 1)
    began = time.monotonic()
    options = ["--decode.stall-timeout-s", "5", "--decode.where", where]
    assert answer.main(command_line(folders["qwen2_5_vl"], videos, questions, output, *options)) == answer.UNANSWERED
    assert time.monotonic() - began < 120
    assert {key[0]: row["error"] is None for key, row in answers(output).items()} == {"hangs.mp4": False, "plays.mp4": True}
    (row,) = rows(output, "quarantine")
    assert row["stage"] == "decode" and "gave no sign of life for 5 s and was cut off" in row["last_error"]


def test_a_second_job_on_the_same_output_is_refused_with_who_holds_it(
    cluster: str, folders: dict[str, Path], archive: Path, questions: Path, undisturbed: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "jobs.answer", *command_line(folders["qwen2_5_vl"], archive, questions, tmp_path / "out")]
    environment = os.environ | {"RAY_ADDRESS": cluster}
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "out" / "lease").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120)
        assert first.poll() is None or second.returncode == 0
        assert second.returncode == answer.UNUSABLE
        assert f"process {first.pid} of " in second.stderr and "--take-over" in second.stderr and len(second.stderr.splitlines()) == 1
        assert first.wait(240) == 0
    finally:
        first.kill()
    assert said(tmp_path / "out") == said(undisturbed)
