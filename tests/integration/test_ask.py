"""`jobs.ask` on real Ray: new questions on a watched archive, against watching it again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs import answer, ask
from tests.support.jobs import answers, command_line, rows, said, small_cluster, watch_in_this_process, write_questions
from tests.support.videos import make_video

VIDEOS = 4
Command = Callable[..., list[str]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with small_cluster() as address:
        yield address


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    for number in range(VIDEOS):
        make_video(folder / f"video{number}.mp4", frames=60 + 10 * number, fps=10)
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("first") / "q.jsonl", "What number is shown?", "Which is it?")


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("later") / "q.jsonl", "And at the end?", "Which was first?", "Anything else?")


@pytest.fixture(scope="module")
def job(folders: dict[str, Path], archive: Path) -> Command:
    """job(output, file of questions, further options): a command line for the tiny model."""
    return lambda output, asked, *options: command_line(folders["qwen2_5_vl"], archive, asked, output, *options)


@pytest.fixture(scope="module")
def first_job(cluster: str, job: Command, first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the job that watched."""
    output = tmp_path_factory.mktemp("watched")
    assert answer.main(job(output, first)) == 0
    return output


@pytest.fixture(scope="module")
def at_once(cluster: str, job: Command, later: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a job that watches for the later questions."""
    output = tmp_path_factory.mktemp("at_once")
    assert answer.main(job(output, later, "--caches.retain", "none")) == 0
    assert not (output / "caches").exists()
    return output


def test_asking_later_gives_what_asking_at_once_would_have_and_reads_no_video(
    first_job: Path, at_once: Path, archive: Path, later: Path, tmp_path: Path
) -> None:
    """The videos' content is replaced by zeros under the same identity: whoever looked at them would fail."""
    kept = {path: (path.read_bytes(), path.stat()) for path in archive.iterdir()}
    tables = sorted(first_job.rglob("*.parquet"))

    def put(path: Path, data: bytes) -> None:
        path.write_bytes(data)
        os.utime(path, ns=(kept[path][1].st_atime_ns, kept[path][1].st_mtime_ns))

    try:
        for path, (data, _) in kept.items():
            put(path, b"\x00" * len(data))
        asking = ["--archive", str(first_job), "--videos", str(archive), "--questions", str(later), "--output", str(tmp_path)]
        assert ask.main([*asking, "--log.progress", "off"]) == 0
    finally:
        for path, (data, _) in kept.items():
            put(path, data)
    assert said(tmp_path) == said(at_once), "bit for bit"
    assert len(said(tmp_path)) == 3 * VIDEOS and all(row["cache_id"] for row in answers(tmp_path).values())
    assert sorted(first_job.rglob("*.parquet")) == tables and not (tmp_path / "caches").exists()
    assert all(row["decoder"] == "pyav" and row["groups"] and row["error"] is None for row in rows(tmp_path, "memory"))


def test_missing_and_stale_caches_are_said_per_video_then_made(
    first_job: Path, at_once: Path, job: Command, later: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caches = tmp_path / "caches"
    damaged, absent, *_ = sorted((first_job / "caches").rglob("*.safetensors"))
    for path in (first_job / "caches").rglob("*.safetensors"):
        copy = caches / path.relative_to(first_job / "caches")
        copy.parent.mkdir(parents=True)
        data = path.read_bytes()
        if path != absent:
            copy.write_bytes(data[:-10] if path == damaged else data)
    output = tmp_path / "out"
    command = ["--archive", str(first_job), *job(output, later, "--caches.uri", str(caches))]
    assert ask.main([*command, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"3 have a cache under {caches}" in printed and f"no cache of it is under {caches}" in printed
    assert ask.main(command) == answer.UNANSWERED
    printed = capsys.readouterr().out
    assert printed.count("set aside: ") == 2 and "no cache of it is under" in printed and "can't be read" in printed
    failed = {key[0]: row["error"] for key, row in answers(output).items() if row["error"]}
    assert len(failed) == 2 and all(error.startswith("cache: ") and "--prefill-missing" in error for error in failed.values())
    assert {row["stage"] for row in rows(output, "quarantine")} == {"cache"}
    assert ask.main([*command, "--prefill-missing"]) == 0
    assert said(output) == said(at_once)
    assert len(list(caches.rglob("*.safetensors"))) == VIDEOS, "what was missing is kept now"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "no caches are named"),
        (["--archive", "/nonexistent/out"], "archive=/nonexistent/out: holds no run.json"),
        (["--caches.uri", "/nonexistent/x", "--engine.policy", "snapkv"], "engine.policy=snapkv reads a video for one question"),
        (["--caches.url", "/nonexistent/x"], "did you mean --caches.uri?"),
    ],
)
def test_mistakes_are_one_line(
    job: Command, later: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert ask.main([*job(tmp_path / "out", later), *options]) == answer.UNUSABLE
    error = capsys.readouterr().err.strip()
    assert words in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_archives_own_output_is_refused(first_job: Path, job: Command, later: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask.main(["--archive", str(first_job), *job(first_job, later)]) == answer.UNUSABLE
    assert "is the watched archive's own" in capsys.readouterr().err


def test_other_settings_in_the_same_output_are_refused_or_restart_it(
    job: Command, later: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_in_this_process(monkeypatch)
    assert answer.main(job(tmp_path, later)) == 0
    before = said(tmp_path)
    changed = job(tmp_path, later, "--engine.budget-tokens", "96")
    assert answer.main(changed) == answer.UNUSABLE
    error = capsys.readouterr().err
    assert "engine.budget_tokens=80 there, 96 now" in error and "--on-changed-settings restart" in error
    assert said(tmp_path) == before
    assert answer.main([*changed, "--on-changed-settings", "restart"]) == 0
    assert {row["budget_tokens"] for row in answers(tmp_path).values()} == {96}


def test_added_questions_are_answered_from_the_cache_and_added_videos_watched(
    folders: dict[str, Path], archive: Path, tmp_path: Path, later: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_in_this_process(monkeypatch)
    videos, output = tmp_path / "videos", tmp_path / "out"
    videos.mkdir()
    for number in range(2):
        os.link(archive / f"video{number}.mp4", videos / f"video{number}.mp4")
    few = write_questions(tmp_path / "few.jsonl", "And at the end?")
    assert answer.main(command_line(folders["qwen2_5_vl"], videos, few, output)) == 0
    os.link(archive / "video2.mp4", videos / "video2.mp4")
    assert answer.main(command_line(folders["qwen2_5_vl"], videos, later, output)) == 0
    assert len(answers(output)) == 3 * 3 and not any(row["error"] for row in answers(output).values())
    unwatched = {row["video_id"]: any("not watched again" in w for w in row["warnings"]) for row in rows(output, "memory")}
    assert unwatched == {"video0.mp4": True, "video1.mp4": True, "video2.mp4": False}
