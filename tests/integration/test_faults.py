"""The object store misbehaves: nothing is lost, nothing is wrong, nothing hangs."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import answer
from pipeline.caches import CacheStore
from pipeline.storage import Storage
from pipeline.storage_errors import StorageError
from tests.support.faulty_s3 import FAULTS, FaultyProxy
from tests.support.jobs import answers, command_line, said, small_cluster, watch_in_this_process, write_questions
from tests.support.s3 import S3Server
from tests.support.videos import make_video

Command = Callable[..., list[str]]


@pytest.fixture(scope="module")
def cluster(s3_credentials: None) -> Iterator[str]:
    with small_cluster() as address:
        yield address


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    for number in range(8):
        make_video(folder / f"video{number}.mp4", frames=40 + 10 * number, fps=10)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("asked") / "q.jsonl", "What number is shown?", "Which is it?")


@pytest.fixture(scope="module")
def undisturbed(folders: dict[str, Path], archive: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        watch_in_this_process(patch)
        assert answer.main(command_line(folders["qwen2_5_vl"], archive, questions, output)) == 0
    return output


def s3_options(endpoint_url: str, spool: Path, **more: Any) -> list[str]:
    settings = {"endpoint_url": endpoint_url, "addressing_style": "path", "spool_dir": spool, "connect_timeout_s": 3, "read_timeout_s": 2}
    return [part for name, value in (settings | more).items() for part in (f"--storage.{name.replace('_', '-')}", str(value))]


def upload(server: S3Server, archive: Path) -> tuple[str, Storage]:
    bucket, storage = server.new_bucket(), server.storage()
    for path in archive.iterdir():
        storage.write_bytes(f"s3://{bucket}/in/{path.name}", path.read_bytes())
    return bucket, storage


def fetched(storage: Storage, output: str, folder: Path) -> Path:
    for uri in storage.list(f"{output}/answers"):
        (folder / "answers").mkdir(parents=True, exist_ok=True)
        (folder / "answers" / uri.rpartition("/")[2]).write_bytes(storage.read_bytes(uri))
    return folder


@pytest.mark.parametrize(("share", "runs", "where"), [(0.1, 1, "in this process"), pytest.param(0.1, 8, "on Ray", marks=pytest.mark.slow)])
def test_a_tenth_of_all_requests_spoilt_costs_no_answer(
    share: float,
    runs: int,
    where: str,
    folders: dict[str, Path],
    archive: Path,
    questions: Path,
    undisturbed: Path,
    s3_server: S3Server,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if where == "on Ray":
        request.getfixturevalue("cluster")
    else:
        watch_in_this_process(monkeypatch)
    bucket, storage = upload(s3_server, archive)
    faults = 0
    for seed in range(runs):
        output = f"s3://{bucket}/out{seed}"
        with FaultyProxy(s3_server.endpoint_url, share=share, seed=seed, silent_s=3.0).running() as proxy:
            options = s3_options(proxy.endpoint_url, tmp_path / "spool", max_attempts=8)
            assert answer.main(command_line(folders["qwen2_5_vl"], f"s3://{bucket}/in", questions, output, *options)) == 0
        folder = fetched(storage, output, tmp_path / f"out{seed}")
        assert said(folder) == said(undisturbed)
        assert len(list(storage.list(f"{output}/results"))) == 8 and storage.exists(f"{output}/_SUCCESS")
        store = CacheStore(f"{output}/caches", storage)
        kept = [entry.cache_id for entry in store.entries()]
        for cache_id in kept:
            store.verify(cache_id)
        faults += sum(proxy.injected.values())
        print(
            f"seed {seed}: {proxy.seen} requests, spoilt {dict(proxy.injected)}, {len(said(folder))} answers right, {len(kept)} caches whole"
        )
    assert faults >= 8 * runs
    assert not list((tmp_path / "spool").glob("*.mp4"))


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_alone_is_survived(fault: str, s3_server: S3Server, tmp_path: Path) -> None:
    bucket = f"s3://{s3_server.new_bucket()}"
    data = bytes(range(256)) * 4096
    s3_server.storage().write_bytes(f"{bucket}/there", data)
    with FaultyProxy(s3_server.endpoint_url, share=0.4, seed=5, silent_s=1.0, faults=(fault,)).running() as proxy:
        storage = S3Server(proxy.endpoint_url).storage(max_attempts=10, read_timeout_s=0.6, connect_timeout_s=2, spool_dir=str(tmp_path))
        for number in range(2):
            assert storage.read_bytes(f"{bucket}/there") == data
            with storage.spool(f"{bucket}/there") as path:
                assert path.read_bytes() == data
            assert storage.read_range(f"{bucket}/there", 100, 50) == data[100:150]
            storage.write_bytes(f"{bucket}/new{number}", data)
            storage.write_bytes(f"{bucket}/once{number}", data, if_absent=True)
            assert not storage.write_bytes(f"{bucket}/once{number}", b"other", if_absent=True)
            assert len(storage.list(bucket)) == 1 + 2 * (number + 1)
    assert proxy.injected[fault] >= 2
    for number in range(2):
        assert s3_server.storage().read_bytes(f"{bucket}/once{number}") == data == s3_server.storage().read_bytes(f"{bucket}/new{number}")


def test_a_slow_server_is_waited_for_longer_than_a_silent_one(s3_server: S3Server) -> None:
    uri, data = f"s3://{s3_server.new_bucket()}/there", bytes(range(250)) * 4
    s3_server.storage().write_bytes(uri, data)
    with FaultyProxy(s3_server.endpoint_url, share=1.0, seed=1, faults=("slow",)).running() as proxy:
        began = time.monotonic()
        assert S3Server(proxy.endpoint_url).storage(max_attempts=3, read_timeout_s=0.7).read_bytes(uri) == data
    assert time.monotonic() - began > 0.7 and proxy.injected["slow"] >= 1


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "slow"])
def test_a_server_that_only_fails_is_given_up_in_words(fault: str, s3_server: S3Server) -> None:
    bucket = f"s3://{s3_server.new_bucket()}"
    s3_server.storage().write_bytes(f"{bucket}/there", b"x" * 1000)
    with FaultyProxy(s3_server.endpoint_url, share=1.0, seed=1, silent_s=1.0, faults=(fault,)).running() as proxy:
        storage = S3Server(proxy.endpoint_url).storage(max_attempts=2, read_timeout_s=0.5, connect_timeout_s=2)
        began = time.monotonic()
        with pytest.raises(StorageError, match=f"{bucket}/there: ") as failed:
            storage.read_bytes(f"{bucket}/there")
    assert time.monotonic() - began < 30 and "\n" not in str(failed.value)


def test_a_video_that_cannot_be_fetched_is_a_row_that_the_next_start_tries_again(
    folders: dict[str, Path],
    archive: Path,
    questions: Path,
    undisturbed: Path,
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch_in_this_process(monkeypatch)
    bucket, _ = upload(s3_server, archive)
    output = tmp_path / "out"
    command = command_line(
        folders["qwen2_5_vl"],
        f"s3://{bucket}/in",
        questions,
        output,
        *s3_options(s3_server.endpoint_url, tmp_path / "spool", max_attempts=2),
    )
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
        assert answer.main([*command, "--storage.spool-wait-s", "0"]) == answer.UNANSWERED
    errors = {row["error"] for row in answers(output).values()}
    assert all(error.startswith(f"fetch: s3://{bucket}/in/") and "10 bytes free on the disk" in error for error in errors)
    assert len(errors) == 8
    assert answer.main(command) == 0
    assert said(output) == said(undisturbed)


def test_a_disk_that_fills_up_under_a_download_is_said(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = f"s3://{s3_server.new_bucket()}"
    s3_server.storage().write_bytes(f"{bucket}/a.mp4", b"x" * 1000)
    storage = s3_server.storage(spool_dir=str(tmp_path))

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage._s3(), "download_fileobj", full)
    with pytest.raises(StorageError, match=r"a\.mp4: no space left on the disk") as failed, storage.spool(f"{bucket}/a.mp4"):
        pass
    assert failed.value.worth_retrying, "another run may find room"
    assert not list(tmp_path.glob("*.mp4"))


def test_expired_credentials_stop_the_job_before_any_work(
    folders: dict[str, Path], questions: Path, s3_credentials: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FaultyProxy("http://127.0.0.1:1", share=1.0, seed=0, faults=("expired",)).running() as proxy:
        options = s3_options(proxy.endpoint_url, tmp_path, max_attempts=2)
        assert answer.main(command_line(folders["qwen2_5_vl"], "s3://bucket/in", questions, tmp_path / "out", *options)) == answer.UNUSABLE
    assert "the session's credentials have expired; sign in again" in capsys.readouterr().err
