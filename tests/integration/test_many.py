"""Many short videos: memory stays flat and the number of files sane."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import mean

import psutil
import pytest

from jobs import answer
from tests.support.jobs import answers, command_line, small_cluster, write_questions
from tests.support.videos import make_video

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with small_cluster() as address:
        yield address


def engine_bytes() -> int:
    """Resident bytes of the engine, a child of this process's cluster; 0 before it is up."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(part.startswith("ray::MapWorker(Map(_Engine))") for part in process.cmdline()):
                return int(process.memory_info().rss)
    return 0


@pytest.mark.parametrize("videos", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_is_flat_over_many_short_videos(videos: int, cluster: str, folders: dict[str, Path], tmp_path: Path) -> None:
    archive, output = tmp_path / "in", tmp_path / "out"
    archive.mkdir()
    clip = make_video(tmp_path / "clip.mp4", frames=20, fps=10)
    for number in range(videos):
        shutil.copyfile(clip, archive / f"video{number:04d}.mp4")
    questions = write_questions(tmp_path / "q.jsonl", "What number is shown?", "Which is it?")
    samples: list[tuple[int, int, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.25):
            done = sum(1 for _ in (output / "results").rglob("*.json")) if output.exists() else 0
            if 0 < done < videos and (engine := engine_bytes()):
                samples.append((done, psutil.Process().memory_info().rss, engine))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.monotonic()
    options = ["--decode.where", "actor", "--pool.max-actors", "1"]
    assert answer.main(command_line(folders["qwen2_5_vl"], archive, questions, output, *options)) == 0
    took_s = time.monotonic() - began
    over.set()
    watcher.join(10)

    first = [sample for sample in samples if sample[0] <= videos / 4]
    last = [sample for sample in samples if sample[0] > 3 * videos / 4]
    assert first and last
    (driver_first, driver_last), (engine_first, engine_last) = ([mean(s[n] for s in part) for part in (first, last)] for n in (1, 2))
    print(
        f"{videos} videos in {took_s:.0f} s; driver {driver_first / MIB:.0f} -> {driver_last / MIB:.0f} MiB, "
        f"engine {engine_first / MIB:.0f} -> {engine_last / MIB:.0f} MiB (means of the first and the last quarter)"
    )
    assert driver_last <= 1.1 * driver_first
    assert engine_last <= 1.1 * engine_first
    assert len(answers(output)) == 2 * videos and not any(row["error"] for row in answers(output).values())
    files = [path for path in output.rglob("*") if path.is_file()]
    tables = [path for path in files if path.suffix == ".parquet"]
    assert len(tables) == 3, "a file a table"
    assert len(files) == 2 * videos + len(tables) + 3, "a result and a cache a video; run.json, settings.json and _SUCCESS"
