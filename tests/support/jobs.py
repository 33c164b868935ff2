"""Jobs in tests: command lines over made videos, the tables they write, and a way to run them without a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from pipeline import dispatch
from pipeline.run import Run
from pipeline.worker import VideoWorker

TINY = ["--engine.budget-tokens", "80", "--engine.block-tokens", "24", "--engine.answer.max-new-tokens", "4"]
QUIET = ["--decode.fps", "2", "--log.progress", "off"]


ENGINE, DECODER = "ray::MapWorker(Map(_Engine))", "ray::_read"
"""How the titles of a job's worker processes begin."""


def write_questions(path: Path, *texts: str) -> Path:
    """A questions file; every other question has options."""
    options = ["black", "white", "grey"]
    rows = [{"question_id": f"q{n}", "question": text, **({"options": options} if n % 2 else {})} for n, text in enumerate(texts)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def command_line(model: Path | str, videos: Path | str, questions: Path, output: Path | str, *options: str) -> list[str]:
    """Arguments of `jobs.answer` for a tiny model."""
    return [
        *("--videos", str(videos), "--questions", str(questions), "--output", str(output), "--engine.model", str(model)),
        *(*TINY, *QUIET, *options),
    ]


def answers(output: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The answers table; fails when a question has two rows."""
    rows = pq.read_table(output / "answers").to_pylist()
    table = {(row["video_id"], row["question_id"]): row for row in rows}
    assert len(table) == len(rows)
    return table


def said(output: Path) -> dict[tuple[str, str], tuple[Any, ...]]:
    """What was answered, to the last bit; times and addresses left out."""
    return {
        key: (r["answer"], r["choice"], r["choice_probabilities"], r["finish_reason"], r["error"]) for key, r in answers(output).items()
    }


def rows(output: Path, table: str) -> list[dict[str, Any]]:
    """A table, in its order."""
    found: list[dict[str, Any]] = pq.read_table(output / table).to_pylist()
    return found


def watch_in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Let jobs run here, video after video, instead of on a Ray cluster."""

    def watch_all(job: Run, room: object) -> None:
        worker = VideoWorker.for_job(job.config, job.run_id)
        for task in job.pending:
            worker(task)

    patch.setattr(dispatch, "_cluster", lambda config: contextlib.nullcontext())
    patch.setattr(dispatch, "_find_room_soon", lambda config, videos: None)
    patch.setattr(dispatch, "_watch_all", watch_all)


@contextlib.contextmanager
def small_cluster() -> Iterator[str]:
    """Ray on this machine, with two CPUs; gives the address that other processes can join it by."""
    import ray

    context = ray.init(num_cpus=2, object_store_memory=128 * 2**20, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


def processes(title: str) -> list[int]:
    """Ids of the workers at this work, of the cluster that this process started and of no other."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(part.startswith(title) for part in process.cmdline()):
                found.append(process.pid)
    return found


def kill(pid: int) -> bool:
    """Kill a process; False when it was gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
