"""`ray job submit` to a running cluster: a head and two nodes, one of which dies during the job."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.bench._clips import repeat_clip
from pipeline.metrics import METRICS
from tests.support.cluster import BIN, ProcessCluster, Series
from tests.support.videos import make_video

ROOT = Path(__file__).parents[2]
VIDEOS = 6
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    running = ProcessCluster()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    clip = make_video(tmp_path_factory.mktemp("clip") / "clip.mp4", frames=100, fps=10)
    for number in range(VIDEOS):
        repeat_clip(folder / f"video{number}.mp4", clip, 6 + number)
    (folder / "questions.txt").write_text("What number is shown?\nIs it black?\n")
    return folder


def submit(cluster: ProcessCluster, *job: str) -> subprocess.Popen[str]:
    """The README's command; its output is what the job's log view shows."""
    command = [
        BIN / "ray",
        "job",
        "submit",
        "--address",
        cluster.dashboard,
        "--working-dir",
        ".",
        "--runtime-env",
        "infra/runtime_env.yaml",
    ]
    return subprocess.Popen(
        [*command, "--", *job], cwd=ROOT, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def committed(output: Path) -> int:
    return len(list((output / "results").rglob("*.json")))


def tries(output: Path) -> set[Path]:
    """Records of the videos that are being watched just now."""
    with suppress(FileNotFoundError):  # the folder goes when a video has its result
        return {path for path in (output / "attempts").rglob("*") if path.is_file()}
    return set()


def log_so_far(process: subprocess.Popen[str]) -> str:
    process.kill()
    return process.communicate()[0]


def rows(output: Path, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(output / table).to_pylist()
    return found


def total(scraped: dict[Series, float], name: str, **labels: str) -> float:
    """Sum of the series with these labels."""
    return sum(value for (found, tags), value in scraped.items() if found == name and labels.items() <= dict(tags).items())


def test_a_submitted_job_outlives_a_node(cluster: ProcessCluster, folders: dict[str, Path], archive: Path, tmp_path: Path) -> None:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    output = tmp_path / "out"
    engine = ["--engine.model", str(folders["qwen2_5_vl"]), "--engine.budget-tokens", "80", "--engine.block-tokens", "24"]
    engine += ["--engine.answer.max-new-tokens", "4", "--decode.fps", "2", "--decode.where", "actor"]
    job = ["--videos", str(archive), "--questions", str(archive / "questions.txt"), "--output", str(output), *engine]
    with cluster.scraped() as metrics:
        process = submit(cluster, "python", "-m", "jobs.answer", *job, "--pool.max-actors", "1", "--log.progress-interval-s", "5")
        try:
            deadline = time.monotonic() + PATIENCE_S
            under_way = False
            while not under_way:
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline, log_so_far(process)
                time.sleep(0.01)
                if committed(output) < 2 or not tries(output):
                    continue
                # One engine; the node that has it is to die in the middle of a video, the other takes over.
                victim, engine_process = next(((node, found) for node in nodes for found in cluster.engines(node)), (0, None))
                if engine_process is not None:
                    engine_process.suspend()  # or it might be done with the video before it dies
                    under_way = bool(tries(output))
                    if not under_way:
                        engine_process.resume()
            cluster.kill(victim)
            done_before = committed(output)
            log, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert done_before < VIDEOS, "the node died too late to prove anything"
    assert process.returncode == 0, log
    answers = rows(output, "answers")
    assert len(answers) == 2 * VIDEOS == len({(row["video_id"], row["question_id"]) for row in answers})
    assert all(row["error"] is None and row["answer"] is not None for row in answers)
    assert [row["attempts"] for row in rows(output, "memory")].count(2) == 1, "one video was under way on the node that died"
    assert (output / "_SUCCESS").exists()
    assert f"{2 * VIDEOS} of {2 * VIDEOS} questions answered" in log and f"{VIDEOS}/{VIDEOS} videos" in log
    assert "Traceback" not in log
    run = json.loads((output / "run.json").read_text())
    assert run["complete"] is True
    # What Prometheus would have seen meanwhile.
    assert {name for name, _ in metrics} == {metric.exported_name for metric in METRICS}
    assert {dict(labels)["run"] for _, labels in metrics} == {run["run_id"]}
    assert total(metrics, "ray_reelkeep_videos", outcome="done") == VIDEOS and total(metrics, "ray_reelkeep_queue_videos") == 0
    assert total(metrics, "ray_reelkeep_questions", outcome="done") == 2 * VIDEOS
    assert total(metrics, "ray_reelkeep_retries") == total(metrics, "ray_reelkeep_retries", cause="killed") == 1
    hours = sum(row["duration_s"] for row in rows(output, "memory")) / 3600
    assert total(metrics, "ray_reelkeep_video_hours") == pytest.approx(hours)
    assert total(metrics, "ray_reelkeep_visual_tokens_total") > 0


def test_a_mistake_is_told_in_the_log_and_by_the_exit_code(cluster: ProcessCluster, tmp_path: Path) -> None:
    process = submit(cluster, "python", "-m", "jobs.answer", "--output", str(tmp_path / "out"), "--engine.budgit-tokens", "3")
    log, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, log
    assert "did you mean --engine.budget-tokens?" in log and "failed with exit code 2" in log.replace("\n", " ")
    assert "Traceback" not in log
