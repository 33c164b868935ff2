"""Storage, manifests and results against a real S3 server process."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import multiprocessing
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import JobConfig
from pipeline.manifest import ManifestError, read_manifest
from pipeline.results import ResultStore, VideoResult, fingerprint
from pipeline.storage import Storage, join_uri
from pipeline.storage_errors import MissingObjectError, SpoolSpaceError, StorageError, StorageSetupError, StorageUnreachableError
from tests.support.s3 import S3Server, free_port


@pytest.fixture
def storage(s3_server: S3Server, tmp_path: Path) -> Storage:
    return s3_server.storage(spool_dir=str(tmp_path / "spool"))


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return f"s3://{s3_server.new_bucket()}"


def test_write_read_size_list_delete(storage: Storage, bucket: str) -> None:
    for name in ("cam/b.mp4", "cam/a b#?%20é.mp4", "cam/sub/c.mp4", "camera/d.mp4"):
        storage.write_bytes(join_uri(bucket, name), name.encode())
    odd = join_uri(bucket, "cam/a b#?%20é.mp4")
    assert storage.read_bytes(odd) == "cam/a b#?%20é.mp4".encode()
    assert storage.size(odd) == len("cam/a b#?%20é.mp4".encode())
    assert list(storage.list(f"{bucket}/cam")) == [odd, f"{bucket}/cam/b.mp4", f"{bucket}/cam/sub/c.mp4"]
    assert [entry.uri for entry in storage.scan(f"{bucket}/cam/", recursive=False)] == [odd, f"{bucket}/cam/b.mp4"]
    assert len(storage.list(bucket)) == 4
    storage.delete(odd)
    storage.delete(odd)
    assert not storage.exists(odd)


def test_listing_goes_past_one_page(storage: Storage, bucket: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: storage.write_bytes(f"{bucket}/many/{number:04d}", b"x"), range(1003)))
    assert len(storage.list(f"{bucket}/many")) == 1003
    found = storage.stat_many(
        [f"{bucket}/many/{number:04d}" for number in range(1002, 1005)] + [f"{bucket}/many/{n:04d}" for n in range(300)]
    )
    assert sum(isinstance(value, MissingObjectError) for value in found.values()) == 2


def test_of_two_conditional_writers_one_wins(storage: Storage, bucket: str) -> None:
    for number in range(10):
        uri = f"{bucket}/marker-{number}"
        gate = threading.Barrier(2)
        won: list[bytes] = []

        def write(data: bytes, uri: str = uri, gate: threading.Barrier = gate, won: list[bytes] = won) -> None:
            gate.wait()
            if storage.write_bytes(uri, data, if_absent=True):
                won.append(data)

        threads = [threading.Thread(target=write, args=(data,)) for data in (b"one", b"two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert storage.read_bytes(uri) == won[0]


def test_a_download_is_whole_bounded_and_removed(storage: Storage, bucket: str, tmp_path: Path) -> None:
    data = hashlib.sha256(b"seed").digest() * (20 * 2**20 // 32)
    storage.write_bytes(f"{bucket}/long video.MP4", data)
    with storage.spool(f"{bucket}/long video.MP4") as path:
        assert path.parent == tmp_path / "spool"
        assert path.suffix == ".MP4"
        assert path.read_bytes() == data
    assert not path.exists()
    with pytest.raises(ZeroDivisionError), storage.spool(f"{bucket}/long video.MP4") as path:
        raise ZeroDivisionError
    assert not path.exists()


def test_an_object_larger_than_the_spool_is_refused(s3_server: S3Server, bucket: str, tmp_path: Path) -> None:
    storage = s3_server.storage(spool_dir=str(tmp_path), spool_bytes=100)
    storage.write_bytes(f"{bucket}/a.mp4", b"x" * 101)
    with pytest.raises(SpoolSpaceError, match=r"a\.mp4: its 101 bytes exceed storage.spool_bytes=100"), storage.spool(f"{bucket}/a.mp4"):
        pass


def test_missing_things_are_named(storage: Storage, bucket: str) -> None:
    for call in (storage.size, storage.read_bytes, lambda uri: storage.spool(uri).__enter__()):
        with pytest.raises(MissingObjectError, match=rf"{bucket}/nothing\.mp4: no such object"):
            call(f"{bucket}/nothing.mp4")
    nowhere = "s3://no-such-bucket-here"
    assert not storage.exists(f"{nowhere}/a")
    for call in (storage.read_bytes, storage.list, lambda uri: storage.write_bytes(uri, b"x")):
        with pytest.raises(StorageSetupError, match="no such bucket; create it"):
            call(f"{nowhere}/a")
    with pytest.raises(StorageError, match="bucket name"):
        storage.read_bytes("s3://Not A Bucket/a")


def test_nobody_at_the_endpoint_is_said_within_seconds(s3_credentials: None) -> None:
    storage = S3Server(f"http://127.0.0.1:{free_port()}").storage(max_attempts=2)
    began = time.monotonic()
    with pytest.raises(StorageSetupError, match=r"s3://b/k: the server can't be reached .* at http://127.0.0.1"):
        storage.read_bytes("s3://b/k")
    assert time.monotonic() - began < 30


def test_a_silent_server_is_given_up(s3_credentials: None) -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        storage = S3Server(f"http://127.0.0.1:{listener.getsockname()[1]}").storage(max_attempts=2, read_timeout_s=0.5)
        with pytest.raises(StorageUnreachableError, match=r"storage\.read_timeout_s"):
            storage.read_bytes("s3://b/k")


def test_missing_credentials_name_the_usual_places(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageSetupError, match="no credentials found; set AWS_ACCESS_KEY_ID"):
        s3_server.storage().read_bytes("s3://b/k")


class _Damaged(http.server.BaseHTTPRequestHandler):
    """Promises 1000 bytes of one content and sends another."""

    content = b"a" * 1000
    sent = content
    announced = len(content)

    def do_HEAD(self) -> None:
        self.answer(len(self.content), b"")

    def do_GET(self) -> None:
        self.answer(self.announced, self.sent)

    def answer(self, announced: int, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(announced))
        self.send_header("ETag", f'"{hashlib.md5(self.content).hexdigest()}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def damaged(s3_credentials: None, tmp_path: Path) -> Iterator[tuple[type[_Damaged], Storage]]:
    handler = type("Damaged", (_Damaged,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, S3Server(f"http://127.0.0.1:{server.server_port}").storage(spool_dir=str(tmp_path), max_attempts=2)
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_damaging_server_is_otherwise_sound(damaged: tuple[type[_Damaged], Storage]) -> None:
    with damaged[1].spool("s3://b/a.mp4") as path:
        assert path.read_bytes() == _Damaged.content


def test_a_download_cut_short_is_caught(damaged: tuple[type[_Damaged], Storage], tmp_path: Path) -> None:
    handler, storage = damaged
    handler.sent = b"a" * 500
    with pytest.raises(StorageUnreachableError, match=r"s3://b/a\.mp4: the download was cut short"), storage.spool("s3://b/a.mp4"):
        pass
    with pytest.raises(StorageUnreachableError, match="cut short"):
        storage.read_bytes("s3://b/a.mp4")
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_a_shorter_answer_without_any_error_is_caught(damaged: tuple[type[_Damaged], Storage]) -> None:
    handler, storage = damaged
    handler.sent, handler.announced = b"a" * 500, 500
    with pytest.raises(StorageUnreachableError, match="500 bytes instead of 1000"), storage.spool("s3://b/a.mp4"):
        pass


def test_other_bytes_of_the_same_length_are_caught(damaged: tuple[type[_Damaged], Storage]) -> None:
    handler, storage = damaged
    handler.sent = b"b" * 1000
    with pytest.raises(StorageUnreachableError, match=r"differs from the object.*MD5"), storage.spool("s3://b/a.mp4"):
        pass


def _write_and_spool(storage_bytes: bytes, bucket: str) -> None:
    storage = pickle.loads(storage_bytes)
    storage.write_bytes(f"{bucket}/child", b"from a child")
    with storage.spool(f"{bucket}/child") as path:
        assert path.read_bytes() == b"from a child"


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_storage_works_in_another_process(storage: Storage, bucket: str, method: str) -> None:
    storage.write_bytes(f"{bucket}/parent", b"x")
    child = multiprocessing.get_context(method).Process(target=_write_and_spool, args=(pickle.dumps(storage), bucket))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert storage.read_bytes(f"{bucket}/child") == b"from a child"


def test_pyarrow_reaches_the_same_server(storage: Storage, bucket: str) -> None:
    filesystem, path = storage.pyarrow_filesystem(f"{bucket}/t.parquet")
    pq.write_table(pa.table({"x": [1, 2]}), path, filesystem=filesystem)
    assert pq.read_table(io.BytesIO(storage.read_bytes(f"{bucket}/t.parquet"))).to_pydict() == {"x": [1, 2]}


def job(s3_server: S3Server, **settings: object) -> JobConfig:
    return JobConfig.model_validate({"storage": s3_server.config().model_dump()} | settings)


def test_a_manifest_in_a_bucket(s3_server: S3Server, storage: Storage, bucket: str) -> None:
    for number in range(3):
        storage.write_bytes(f"{bucket}/videos/{number}.mp4", b"x" * number)
    rows = [{"video_id": str(n), "uri": f"videos/{n}.mp4", "questions": [{"question": "what?"}]} for n in range(5)]
    storage.write_bytes(f"{bucket}/m.jsonl", "\n".join(map(json.dumps, rows)).encode())
    manifest = read_manifest(job(s3_server, manifest=f"{bucket}/m.jsonl", output="out"), storage)
    assert [task.uri for task in manifest.tasks] == [f"{bucket}/videos/{n}.mp4" for n in range(5)]
    assert [task.size_bytes for task in manifest.tasks] == [0, 1, 2, None, None]
    assert [video_id for video_id, _, _ in manifest.missing] == ["3", "4"]


def test_a_prefix_with_one_set_of_questions(s3_server: S3Server, storage: Storage, bucket: str) -> None:
    for name in ("a.mp4", "sub/b.MKV", "notes.txt"):
        storage.write_bytes(f"{bucket}/videos/{name}", b"x")
    storage.write_bytes(f"{bucket}/q.txt", b"what?\nwhere?\n")
    manifest = read_manifest(job(s3_server, videos=f"{bucket}/videos", questions=f"{bucket}/q.txt", output="out"), storage)
    assert [task.video_id for task in manifest.tasks] == ["a.mp4", "sub/b.MKV"]
    assert manifest.questions == 4
    assert manifest.notes == [f"1 of 3 files under {bucket}/videos have no video's or image's suffix and are left out"]


def test_when_no_video_is_there_the_job_does_not_start(s3_server: S3Server, storage: Storage, bucket: str) -> None:
    row = {"uri": "s3://no-such-bucket-here/a.mp4", "question": "what?"}
    storage.write_bytes(f"{bucket}/m.jsonl", json.dumps(row).encode())
    with pytest.raises(ManifestError, match="none of the 1 videos can be read"):
        read_manifest(job(s3_server, manifest=f"{bucket}/m.jsonl", output="out"), storage)


def test_results_live_in_a_bucket(s3_server: S3Server, storage: Storage, bucket: str) -> None:
    for number in range(3):
        storage.write_bytes(f"{bucket}/{number}.mp4", b"x")
    rows = [{"video_id": str(n), "uri": f"{n}.mp4", "questions": ["what?"]} for n in range(3)]
    storage.write_bytes(f"{bucket}/m.jsonl", "\n".join(map(json.dumps, rows)).encode())
    config = job(s3_server, manifest=f"{bucket}/m.jsonl", output=f"{bucket}/out")
    tasks = read_manifest(config, storage).tasks
    store = pickle.loads(pickle.dumps(ResultStore(config.output, storage, "run1")))
    store.start()
    names = {task.video_id: fingerprint(config, task) for task in tasks}
    assert store.done(names) == set()
    answers = [{"question_id": "q0", "answer": "a cat", "finish_reason": "stop"}]
    assert store.commit(VideoResult("0", names["0"], answers=answers))
    assert not store.commit(VideoResult("0", names["0"], error="again"))
    assert store.commit(VideoResult("1", names["1"], error="no picture"))
    assert store.done(names) == {"0", "1"}
    counts = store.compact(config, tasks[:2], datetime.now(timezone.utc)).counts
    assert (counts.videos_answered, counts.videos_failed) == (1, 1)
    assert storage.exists(f"{bucket}/out/_SUCCESS")
    table = pa.concat_tables(pq.read_table(io.BytesIO(storage.read_bytes(uri))) for uri in storage.list(f"{bucket}/out/answers"))
    assert table.column("answer").to_pylist() == ["a cat", None]
    store.start()
    assert not storage.exists(f"{bucket}/out/_SUCCESS")
