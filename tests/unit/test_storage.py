"""Local storage, the spool, and errors in words."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import threading
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
from botocore import exceptions as botocore

from engine.errors import InputError
from pipeline.config import StorageConfig
from pipeline.spool import Spool
from pipeline.storage import Storage, join_uri, local_path, split_s3
from pipeline.storage_errors import (
    AccessDeniedError,
    MissingBucketError,
    MissingObjectError,
    SpoolSpaceError,
    StorageError,
    StorageSetupError,
    StorageUnreachableError,
    translated,
)


@pytest.fixture
def storage() -> Storage:
    return Storage()


def test_addresses() -> None:
    assert split_s3("s3://b/a//b%20?#.mp4") == ("b", "a//b%20?#.mp4")
    assert split_s3("/a/b") is None
    assert local_path("file:///a/b%20c") == Path("/a/b c")
    assert join_uri("s3://b/", "x") == "s3://b/x"
    assert join_uri("/", "x") == "/x"
    for uri in ("gs://b/x", "http://host/x", "s3://", "file://host/x"):
        with pytest.raises(StorageError, match=uri):
            split_s3(uri)
            local_path(uri)


def test_write_read_size_list_delete(storage: Storage, tmp_path: Path) -> None:
    folder = str(tmp_path / "deep" / "folder")
    for name in ("b", "a", "sub/c"):
        assert storage.write_bytes(join_uri(folder, name), name.encode() * 3)
    assert storage.read_bytes(f"file://{folder}/a") == b"aaa"
    assert storage.size(join_uri(folder, "sub/c")) == 15
    assert list(storage.list(folder)) == [f"{folder}/a", f"{folder}/b", f"{folder}/sub/c"]
    assert [entry.uri for entry in storage.scan(folder, recursive=False)] == [f"{folder}/a", f"{folder}/b"]
    storage.delete(join_uri(folder, "a"))
    storage.delete(join_uri(folder, "a"))
    assert not storage.exists(join_uri(folder, "a"))
    assert list(storage.list(str(tmp_path / "nothing"))) == []


def test_listing_is_honest_about_what_it_cannot_see(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert list(storage.list(str(tmp_path))) == [str(tmp_path / "a"), str(tmp_path / "b")]
    with pytest.raises(MissingObjectError, match="a part of the path is a file"):
        storage.list(str(tmp_path / "a"))

    def closed(_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(AccessDeniedError, match="permission denied"):
        storage.list(str(tmp_path))


def test_a_write_is_never_half_visible(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x"
    storage.write_bytes(str(target), b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SpoolSpaceError, match="no space left"):
        storage.write_bytes(str(target), b"new")
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_of_many_conditional_writers_one_wins(storage: Storage, tmp_path: Path) -> None:
    uri = str(tmp_path / "marker")
    wins: list[int] = []
    gate = threading.Barrier(8)

    def write(number: int) -> None:
        gate.wait()
        if storage.write_bytes(uri, str(number).encode(), if_absent=True):
            wins.append(number)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert storage.read_bytes(uri) == str(wins[0]).encode()
    assert os.listdir(tmp_path) == ["marker"]


def test_the_tag_changes_with_the_content(storage: Storage, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one")
    first = storage.stat(str(path)).tag
    path.write_bytes(b"other")
    assert storage.stat(str(path)).tag != first


def test_stat_many_keeps_each_files_error(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    found = storage.stat_many([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path), "gs://x/y"])
    kinds = [type(value).__name__ for value in found.values()]
    assert kinds == ["ObjectStat", "MissingObjectError", "StorageError", "StorageError"]
    assert "folder" in str(found[str(tmp_path)])


class OneBucketWithoutListing:
    """An S3 client for which `closed` can't be listed, `gone` isn't there, and everything else works."""

    def get_paginator(self, _: str) -> OneBucketWithoutListing:
        return self

    def paginate(self, Bucket: str, **_: object) -> list[dict[str, object]]:
        raise client_error("AccessDenied" if Bucket == "closed" else "NoSuchBucket", 403 if Bucket == "closed" else 404)

    def head_object(self, Bucket: str, Key: str) -> dict[str, object]:
        if Bucket == "gone" or Key.endswith("/7"):
            raise client_error("404", 404)
        return {"ContentLength": 5, "ETag": "'x'", "LastModified": datetime.now(timezone.utc)}


def test_a_folder_that_cannot_be_listed_is_asked_object_by_object(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_s3", lambda: OneBucketWithoutListing())
    found = storage.stat_many(f"s3://{bucket}/in/{number}" for bucket in ("closed", "gone") for number in range(201))
    assert len(found) == 402
    assert all(isinstance(found[f"s3://gone/in/{number}"], MissingObjectError) for number in range(201))
    assert [uri for uri, value in found.items() if uri.startswith("s3://closed") and isinstance(value, StorageError)] == [
        "s3://closed/in/7"
    ]


def test_the_remedy_for_a_denied_request_names_every_right_a_job_needs() -> None:
    for code in ("AccessDenied", "403"):
        with pytest.raises(AccessDeniedError) as caught, translated("s3://b/k"):
            raise client_error(code, 403)
        assert all(right in str(caught.value) for right in ("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"))


def test_a_local_file_is_spooled_in_place(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"1234")
    with storage.spool(str(tmp_path / "a.mp4")) as path:
        assert path == tmp_path / "a.mp4"
    assert path.exists()
    with pytest.raises(MissingObjectError, match="no such file"), storage.spool(str(tmp_path / "b.mp4")):
        pass


def test_storage_can_be_sent_to_another_process(tmp_path: Path) -> None:
    storage = Storage(StorageConfig(spool_dir=str(tmp_path), max_attempts=2))
    assert pickle.loads(pickle.dumps(storage)).config == storage.config
    error = pickle.loads(pickle.dumps(MissingObjectError("a: gone")))
    assert isinstance(error, InputError)
    assert str(error) == "a: gone"


def test_the_spool_refuses_what_can_never_fit(tmp_path: Path) -> None:
    with pytest.raises(SpoolSpaceError, match=r"its 11 bytes exceed storage.spool_bytes=10"), Spool(str(tmp_path), 10, 5).file("u", 11, ""):
        pass


def test_the_spool_waits_for_room_and_then_gives_up(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), 10, wait_s=0.5)
    with spool.file("first", 6, ".mp4") as (path, _):
        assert path.suffix == ".mp4"
        with pytest.raises(SpoolSpaceError, match=r"6 of storage.spool_bytes=10 in use"), spool.file("second", 6, ""):
            pass
        with spool.file("third", 4, ""):
            pass
    with spool.file("second", 6, ""):
        pass
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_the_spool_hands_room_on(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), 10, wait_s=20)
    entered = threading.Event()

    def second() -> None:
        with spool.file("second", 10, ""):
            entered.set()

    with spool.file("first", 10, ""):
        waiting = threading.Thread(target=second)
        waiting.start()
        assert not entered.wait(0.5)
    waiting.join(20)
    assert entered.is_set()


def _die_holding(folder: str) -> None:
    with Spool(folder, 10, 0).file("u", 10, "") as (_, file):
        file.write(b"x" * 10)
        file.flush()
        os._exit(9)


def test_the_spool_clears_up_after_the_dead(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_die_holding, args=(str(tmp_path),))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert len(list(tmp_path.glob("10-*"))) == 1
    with Spool(str(tmp_path), 10, 0).file("u", 10, ""):
        assert len(list(tmp_path.glob("10-*"))) == 1


def test_the_spool_asks_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3))
    with pytest.raises(SpoolSpaceError, match="3 bytes free on the disk"), Spool(str(tmp_path), 100, 5).file("u", 4, ""):
        pass


def client_error(code: str, status: int = 400, message: str = "words of the server") -> botocore.ClientError:
    return botocore.ClientError({"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")


@pytest.mark.parametrize(
    ("error", "kind", "word"),
    [
        (client_error("NoSuchKey", 404), MissingObjectError, "no such object"),
        (client_error("404", 404), MissingObjectError, "no such object"),
        (client_error("NoSuchBucket", 404), MissingBucketError, "no such bucket"),
        (client_error("AccessDenied", 403), AccessDeniedError, "access denied"),
        (client_error("ExpiredToken"), StorageSetupError, "expired; sign in again"),
        (client_error("InvalidAccessKeyId", 403), StorageSetupError, "access key"),
        (client_error("SignatureDoesNotMatch", 403), StorageSetupError, "secret key"),
        (client_error("SlowDown", 503), StorageUnreachableError, "slow down"),
        (client_error("Weird", 500), StorageUnreachableError, "the server answered Weird: words of the server"),
        (client_error("Weird", 418), StorageError, "the server answered Weird"),
        (botocore.NoCredentialsError(), StorageSetupError, "no credentials found; set AWS_ACCESS_KEY_ID"),
        (botocore.ConnectTimeoutError(endpoint_url="http://h"), StorageUnreachableError, "storage.connect_timeout_s"),
        (botocore.ReadTimeoutError(endpoint_url="http://h"), StorageUnreachableError, "storage.read_timeout_s"),
        (botocore.EndpointConnectionError(endpoint_url="http://h:1/b/k?x=y"), StorageSetupError, "can't be reached"),
        (PermissionError(errno.EACCES, "Permission denied"), AccessDeniedError, "permission denied"),
        (OSError(errno.ENOSPC, "No space"), SpoolSpaceError, "no space left"),
        (IsADirectoryError(errno.EISDIR, "Is a directory"), StorageError, "a folder"),
    ],
)
def test_errors_become_one_line_about_the_object(error: Exception, kind: type[StorageError], word: str) -> None:
    with pytest.raises(StorageError) as caught, translated("s3://b/k"):
        raise error
    assert type(caught.value) is kind
    assert str(caught.value).startswith("s3://b/k: ")
    assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_credentials_never_appear_in_a_message() -> None:
    leaky = client_error("Weird", message="key AKIAIOSFODNN7EXAMPLE at https://me:hush@host/x")
    with pytest.raises(StorageError) as caught, translated("s3://b/k", "http://me:hush@host"):
        raise leaky
    assert "EXAMPLE" not in str(caught.value)
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None
