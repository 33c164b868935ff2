"""The actor's body without the actor: real files, a tiny random model, no Ray."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.compressed import CompressedVideo
from engine.engine import Engine
from engine.errors import OutOfMemoryError
from engine.types import Question
from pipeline.attempts import Attempts
from pipeline.config import JobConfig
from pipeline.results import ResultStore, fingerprint
from pipeline.storage import Storage
from pipeline.stream import Message, StageError, read_video
from pipeline.task import ManifestQuestion, VideoTask
from pipeline.worker import VideoWorker, WorkerLost
from tests.support.videos import make_video

QUESTIONS = (
    ManifestQuestion(question_id="free", question="What is it?"),
    ManifestQuestion(question_id="pick", question="Which colour?", options=("red", "blue")),
)


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> str:
    return str(folders["qwen2_5_vl"])


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_video(tmp_path_factory.mktemp("video") / "clip.mp4", frames=40, fps=10)


def make_config(model: str, output: Path, **engine: object) -> JobConfig:
    settings = {"model": model, "budget_tokens": 80, "block_tokens": 24, "answer": {"max_new_tokens": 4}, **engine}
    return JobConfig(videos="unused", questions="unused", output=str(output), engine=settings, trace=True)


@pytest.fixture
def config(model: str, tmp_path: Path) -> JobConfig:
    return make_config(model, tmp_path / "out")


@pytest.fixture(scope="module")
def engine(model: str, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine.load(make_config(model, tmp_path_factory.mktemp("out")).engine)


def task(uri: Path | str, video_id: str = "clip") -> VideoTask:
    return VideoTask(video_id=video_id, uri=str(uri), questions=QUESTIONS)


def test_one_video_becomes_one_result(config: JobConfig, engine: Engine, video: Path) -> None:
    seen: list[tuple[str, float, int]] = []
    result = VideoWorker(config, engine=engine, report=lambda *a: seen.append(a)).watch(task(video))
    assert result.error is None
    free, pick = result.answers
    assert free["question_id"] == "free" and isinstance(free["answer"], str) and free["finish_reason"] in ("stop", "length")
    assert pick["choice"] in ("A", "B") and pick["answer"] == {"A": "red", "B": "blue"}[pick["choice"]]
    memory = result.memory
    assert memory["frames"] == 4 and memory["groups"] == 2 and memory["decoder"] == "pyav"
    assert memory["duration_s"] == pytest.approx(4.0, abs=0.01)
    assert 0 < memory["kv_peak_bytes"] <= memory["kv_predicted_bytes"]
    assert memory["blocks"] == len(result.trace) > 0
    assert seen and seen[0][0] == "clip" and seen[0][2] > 0


def test_the_trace_is_kept_on_request_only(config: JobConfig, engine: Engine, video: Path) -> None:
    quiet = config.model_copy(update={"trace": False})
    assert VideoWorker(quiet, engine=engine).watch(task(video)).trace == []


def test_warnings_land_in_the_result(config: JobConfig, engine: Engine, tmp_path: Path) -> None:
    odd = make_video(tmp_path / "odd.mp4", frames=30, fps=10)
    warnings = VideoWorker(config, engine=engine).watch(task(odd)).warnings
    assert any("repeating its last frame" in w for w in warnings)
    assert any("question free" in w and "cut off at 4 tokens" in w for w in warnings)


def test_a_video_that_cannot_be_read_is_a_row_with_stage_and_reason(config: JobConfig, engine: Engine, tmp_path: Path, video: Path) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video at all")
    worker = VideoWorker(config, engine=engine)
    for uri, start in ((broken, "probe: "), (tmp_path / "absent.mp4", "fetch: ")):
        result = worker(task(uri))
        assert result.error is not None and result.error.startswith(start) and str(uri) in result.error
        assert "\n" not in result.error
        assert [(a["question_id"], a["answer"], a["error"]) for a in result.answers] == [
            (q.question_id, None, result.error) for q in QUESTIONS
        ]
    assert worker(task(video)).error is None


def test_a_video_too_long_for_the_model_is_refused_before_it_is_read(model: str, tmp_path: Path, video: Path) -> None:
    config = make_config(model, tmp_path, position_limit=40)
    result = VideoWorker(config).watch(task(video))
    assert result.error is not None and result.error.startswith("prefill: ") and "position" in result.error
    assert result.memory.get("blocks") is None


def test_an_unforeseen_error_is_a_row_too(config: JobConfig, engine: Engine, video: Path, caplog: pytest.LogCaptureFixture) -> None:
    def read(*arguments: object) -> Iterator[Message]:
        messages = read_video(*arguments)  # type: ignore[arg-type]
        yield next(messages)
        raise KeyError("surprise")

    result = VideoWorker(config, engine=engine, read=read).watch(task(video))
    assert result.error is not None and "KeyError: 'surprise'" in result.error
    assert VideoWorker(config, engine=engine).watch(task(video)).error is None


def test_a_query_aware_policy_reads_once_per_question_and_says_so(model: str, tmp_path: Path, video: Path) -> None:
    config = make_config(model, tmp_path, policy="snapkv")
    reads: list[str] = []

    def read(*arguments: object) -> Iterator[Message]:
        reads.append("read")
        return read_video(*arguments)  # type: ignore[arg-type]

    result = VideoWorker(config, read=read).watch(task(video))
    assert len(reads) == 2
    assert all(a["answer"] is not None for a in result.answers)
    assert any("read 2 times, once per question" in w for w in result.warnings)
    assert len([w for w in result.warnings if "repeating" in w]) <= 1


class Noting:
    """A real engine whose answers come with a note, and whose second reading took more than the first."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.geometry, self.query_aware, self.check_length = engine.geometry, engine.query_aware, engine.check_length
        self.readings = 0

    def prefill(self, *arguments: object, **options: object) -> object:
        compressed = self.engine.prefill(*arguments, **options)  # type: ignore[arg-type]
        compressed.trace.kv_predicted_bytes += 1000 * self.readings
        self.readings += 1
        return compressed

    def answer(self, compressed: CompressedVideo, asked: list[Question]) -> object:
        compressed.trace.warnings.append("2 questions answered in batches of 1: out of memory")
        return self.engine.answer(compressed, asked)


def test_what_answering_notes_lands_in_the_result_and_the_bound_is_that_of_the_largest_pass(
    model: str, tmp_path: Path, video: Path
) -> None:
    config = make_config(model, tmp_path, policy="snapkv")
    noting = Noting(Engine.load(config.engine))
    result = VideoWorker(config, engine=noting).watch(task(video))  # type: ignore[arg-type]
    assert result.error is None and noting.readings == 2
    assert "2 questions answered in batches of 1: out of memory" in result.warnings
    alone = VideoWorker(config, engine=noting.engine).watch(task(video))
    assert result.memory["kv_predicted_bytes"] == alone.memory["kv_predicted_bytes"] + 1000


def test_a_question_that_storage_kept_from_its_pass_is_tried_again(model: str, tmp_path: Path, video: Path) -> None:
    config = make_config(model, tmp_path, policy="snapkv")
    reads: list[int] = []

    def read(*arguments: object) -> Iterator[Message]:
        reads.append(1)
        if len(reads) == 2:
            raise StageError("fetch", "s3://b/a.mp4: the server asked to slow down", retry=True)
        return read_video(*arguments)  # type: ignore[arg-type]

    storage = Storage()
    store = ResultStore(config.output, storage, "run1")
    result = VideoWorker(config, read=read, store=store)(task(video))
    assert result.error is None and [answer["error"] is None for answer in result.answers] == [True, False]
    name = fingerprint(config, task(video))
    assert store.done({"clip": name}) == set() and storage.exists(f"{config.output}/failed/{name}.json")


class Failing:
    """A real engine whose prefill fails in a chosen way."""

    def __init__(self, engine: Engine, error: Exception) -> None:
        self.engine, self.error = engine, error
        self.geometry, self.query_aware, self.check_length = engine.geometry, engine.query_aware, engine.check_length

    def prefill(self, stream: Iterator[object], **_: object) -> object:
        next(iter(stream))
        raise self.error


@pytest.mark.parametrize("error", [OutOfMemoryError("no room for a block"), RuntimeError("CUDA error: device-side assert triggered")])
def test_a_lost_device_ends_the_process_after_recording(config: JobConfig, engine: Engine, video: Path, error: Exception) -> None:
    attempts = Attempts(Storage(), config.output, "start1")
    worker = VideoWorker(config, engine=Failing(engine, error), attempts=attempts)  # type: ignore[arg-type]
    for _ in range(config.pool.max_attempts):
        with pytest.raises(WorkerLost):
            worker(task(video))
    result = worker(task(video))
    assert result.error is not None and result.error.startswith("given up after 3 attempts: prefill: ") and str(error) in result.error
    assert result.memory["attempts"] == 3


def test_a_reader_that_dies_is_tried_again_and_given_up_in_the_end(config: JobConfig, engine: Engine, video: Path) -> None:
    deaths = [2]

    def read(*arguments: object) -> Iterator[Message]:
        messages = read_video(*arguments)  # type: ignore[arg-type]
        yield next(messages)
        if deaths[0]:
            deaths[0] -= 1
            raise StageError("decode", "the process that decoded it died", lost="reader")
        yield from messages

    recovered = VideoWorker(config, engine=engine, read=read)(task(video))
    assert recovered.error is None and recovered.memory["attempts"] == 3
    deaths[0] = 100
    given_up = VideoWorker(config, engine=engine, read=read)(task(video))
    assert given_up.error == "given up after 3 attempts: decode: the process that decoded it died"
    assert deaths[0] == 97


def test_the_reader_is_closed_when_the_engine_stops_early(config: JobConfig, engine: Engine, video: Path) -> None:
    closed: list[bool] = []

    def read(*arguments: object) -> Iterator[Message]:
        try:
            yield from read_video(*arguments)  # type: ignore[arg-type]
        finally:
            closed.append(True)

    worker = VideoWorker(config, engine=Failing(engine, ValueError("stop")), read=read)  # type: ignore[arg-type]
    assert worker.watch(task(video)).error == "prefill: ValueError: stop"
    assert closed == [True]


def test_tries_left_by_a_start_that_ended_are_not_held_against_a_video(tmp_path: Path) -> None:
    storage = Storage()
    first = Attempts(storage, str(tmp_path), "aaaa")
    assert first.begin("run/video") == (1, "")
    assert first.begin("run/video") == (2, "")
    first.failed("run/video", "out of memory")
    second = Attempts(storage, str(tmp_path), "bbbb")
    assert second.begin("run/video") == (2, "out of memory"), "of two tries, the last may have been cut off by the end of its start"
    assert second.begin("run/video") == (3, "")
    assert second.begin("run/other") == (1, "")
    second.clear("run/video")
    assert Attempts(storage, str(tmp_path), "cccc").begin("run/video") == (1, "")


def test_a_write_whose_answer_got_lost_counts_as_one_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Storage.write_bytes

    def repeated(self: Storage, uri: str, data: bytes, *, if_absent: bool = False) -> bool:
        write(self, uri, data, if_absent=if_absent)
        return write(self, uri, data, if_absent=if_absent)

    monkeypatch.setattr(Storage, "write_bytes", repeated)
    attempts = Attempts(Storage(), str(tmp_path), "aaaa")
    assert [attempts.begin("run/video")[0] for _ in range(3)] == [1, 2, 3]
    assert len(Storage().list(str(tmp_path))) == 3


def test_tries_are_recorded_in_storage_before_the_work(config: JobConfig, engine: Engine, video: Path, tmp_path: Path) -> None:
    attempts = Attempts(Storage(), config.output, "start1")
    found: list[list[Path]] = []

    def read(*arguments: object) -> Iterator[Message]:
        found.append([p for p in Path(config.output).rglob("*") if p.is_file()])
        return read_video(*arguments)  # type: ignore[arg-type]

    VideoWorker(config, engine=engine, read=read, attempts=attempts)(task(video))
    assert [len(files) for files in found] == [1]
    assert not (Path(config.output) / "attempts").exists(), "a committed video leaves no tries behind"


def test_errors_name_the_address_not_the_spool(config: JobConfig, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video at all")
    spooled = tmp_path / "spool-123.mp4"

    @contextmanager
    def spool(self: Storage, uri: str) -> Iterator[Path]:
        yield Path(shutil.copy(broken, spooled))

    monkeypatch.setattr(Storage, "spool", spool)
    error = VideoWorker(config, engine=engine).watch(task("s3://archive/broken.mp4")).error
    assert error is not None and "s3://archive/broken.mp4" in error and "spool-123" not in error
