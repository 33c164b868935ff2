"""A job's life without Ray and without a model."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pytest

from pipeline import run
from pipeline.config import JobConfig
from pipeline.manifest import Manifest
from pipeline.results import VideoResult
from pipeline.run import Run
from pipeline.storage import Storage
from pipeline.storage_errors import StorageSetupError


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("reelkeep.run"), "handlers", [handler])
    return found


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    """25 videos of which one is there, each with a question whose options repeat."""
    monkeypatch.setattr(run, "load_geometry", lambda engine, folder: None)
    (tmp_path / "v00.mp4").write_bytes(b"x")
    rows = [{"uri": f"v{n:02d}.mp4", "questions": [{"question": "which?", "options": ["a", "a"]}]} for n in range(25)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return JobConfig(manifest=str(tmp_path / "m.jsonl"), output=str(tmp_path / "out"))


def test_a_real_run_tells_what_is_wrong_with_its_manifest(config: JobConfig, lines: list[logging.LogRecord]) -> None:
    with Run(config).held():
        told = [line.getMessage() for line in lines]
    assert told[0] == "25 questions have the same option twice"
    assert len(told) == 1 + 20 + 1 and told[-1] == "24 of 25 videos can't be read; their questions get an error"
    assert [line.video_id for line in lines[1:3]] == ["v01.mp4", "v02.mp4"]  # type: ignore[attr-defined]
    assert "v01.mp4: no such file" in told[1]


def test_a_manifest_without_problems_says_nothing(lines: list[logging.LogRecord]) -> None:
    run.tell_problems(Manifest([], 0))
    assert lines == []


def test_what_a_killed_writer_left_is_removed_after_a_day(config: JobConfig) -> None:
    results, caches = Path(config.output, "results"), Path(config.output, "caches", "abc")
    names = {"old": f".{'0' * 32}.part", "young": f".{'1' * 32}.part", "foreign": ".rsync.part"}
    for folder in (results, caches):
        folder.mkdir(parents=True)
        for age, name in names.items():
            (folder / name).write_bytes(b"half")
            if age != "young":
                os.utime(folder / name, times=(time.time() - run.UNFINISHED_FOR_S - 60,) * 2)
    with Run(config).held():
        pass
    for folder in (results, caches):
        assert {path.name for path in folder.iterdir()} == {names["young"], names["foreign"]}


def test_an_output_that_cannot_be_written_is_told_beforehand(config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageSetupError, match=r"output=.*/file/out: .*/file is a file; name a folder"):
        Run(config.model_copy(update={"output": str(tmp_path / "file" / "out")}))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StorageSetupError, match=r"this user may not write in"):
        Run(config)
    assert not Path(config.output).exists()


def test_the_summary_reads_no_table_back(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Run(config)
    with job.held():
        job.store.commit(VideoResult("v00.mp4", job.name_of("v00.mp4"), [{"question_id": "q0", "answer": "a", "finish_reason": "choice"}]))
        monkeypatch.setattr(Storage, "pyarrow_filesystem", lambda self, uri: pytest.fail("pyarrow has its own way to a bucket"))
        summary = job.finish()
    assert (summary.run_id, summary.output, summary.videos_done_before) == (job.run_id, config.output, 0)
    assert summary.answers[0]["answer"] == "a" and summary.counts.videos == 25
