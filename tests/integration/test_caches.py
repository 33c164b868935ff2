"""Caches that outlive the job: kept, found, refused by name, made again; a video taken over in its middle."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine.engine import Engine
from engine.errors import CacheMismatchError
from jobs import caches as caches_job
from pipeline.caches import CacheKey, CacheMissingError, CacheStore
from pipeline.config import JobConfig
from pipeline.results import VideoResult
from pipeline.storage import Storage
from pipeline.stream import Message, StageError, read_video
from pipeline.task import ManifestQuestion, VideoTask
from pipeline.video.prompt import prompt_document
from pipeline.worker import VideoWorker
from tests.support.s3 import S3Server
from tests.support.videos import make_video

QUESTIONS = (
    ManifestQuestion(question_id="free", question="What is it?"),
    ManifestQuestion(question_id="pick", question="Which colour?", options=("red", "blue")),
)
LATER = (
    ManifestQuestion(question_id="later", question="And what else?"),
    ManifestQuestion(question_id="which", question="Is it a number?", options=("yes", "no", "maybe")),
)


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> str:
    return str(folders["qwen2_5_vl"])


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_video(tmp_path_factory.mktemp("video") / "clip.mp4", frames=240, fps=10)


@pytest.fixture
def config(model: str, tmp_path: Path) -> JobConfig:
    return configured(model, tmp_path / "out")


def configured(model: str, output: Path | str, caches: dict[str, object] | None = None, **engine: object) -> JobConfig:
    settings = {"model": model, "budget_tokens": 80, "block_tokens": 24, "answer": {"max_new_tokens": 4}, **engine}
    return JobConfig.model_validate(
        {"videos": "unused", "questions": "unused", "output": str(output), "engine": settings, "caches": caches or {}, "trace": True}
    )


@pytest.fixture(scope="module")
def engine(model: str) -> Engine:
    return Engine.load(configured(model, "unused").engine)


def task_of(path: Path, questions: tuple[ManifestQuestion, ...] = QUESTIONS) -> VideoTask:
    stat = Storage().stat(str(path))
    return VideoTask(video_id=path.stem, uri=str(path), questions=questions, size_bytes=stat.size_bytes, content_tag=stat.tag)


def refusing_to_read(*arguments: object) -> Iterator[Message]:
    raise AssertionError("the video was read")
    yield


def watching(config: JobConfig, engine: Engine, store: CacheStore | None = None, **parts: Any) -> VideoWorker:
    return VideoWorker(config, engine=engine, caches=store or CacheStore.of(config), **parts)


def said(result: VideoResult) -> list[tuple[Any, ...]]:
    return [(a["question_id"], a["answer"], a.get("choice"), a.get("choice_probabilities"), a.get("error")) for a in result.answers]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_new_questions_get_the_answers_they_would_have_had_without_reading(config: JobConfig, engine: Engine, video: Path) -> None:
    watched = watching(config, engine).watch(task_of(video))
    assert watched.error is None and len(files(Path(config.output))) == 1
    at_once = VideoWorker(config, engine=engine).watch(task_of(video, LATER))
    asked = watching(config, engine, read=refusing_to_read).watch(task_of(video, LATER))
    assert said(asked) == said(at_once), "bit for bit, probabilities included"
    assert (
        {a["cache_id"] for a in asked.answers}
        == {a["cache_id"] for a in watched.answers}
        == {CacheKey.of(config, task_of(video)).cache_id()}
    )
    assert {a["cache_id"] for a in at_once.answers} == {None}
    same = ("duration_s", "decoder", "frames", "groups", "blocks", "visual_tokens", "kv_peak_bytes", "kv_full_bytes")
    assert {n: asked.memory[n] for n in same} == {n: watched.memory[n] for n in same}
    assert any("not watched again: answered from the cache kept at" in w for w in asked.warnings)


def test_a_job_that_only_asks_refuses_what_has_no_cache_and_says_why(model: str, config: JobConfig, engine: Engine, tmp_path: Path) -> None:
    video = make_video(tmp_path / "clip.mp4", frames=40, fps=10)
    only_ask = configured(model, config.output, {"missing": "refuse"})

    def refusal(config: JobConfig = only_ask, engine: Engine = engine) -> str:
        result = watching(config, engine, read=refusing_to_read).watch(task_of(video))
        assert result.error is not None and result.retry and all(a["error"] == result.error for a in result.answers)
        return result.error

    assert refusal().startswith("cache: no cache of it is under ") and "--prefill-missing" in refusal()
    watching(config, engine).watch(task_of(video))
    assert watching(only_ask, engine, read=refusing_to_read).watch(task_of(video)).error is None
    other = configured(model, config.output, {"missing": "refuse"}, budget_tokens=96)
    reason = refusal(other, Engine(engine.adapter, other.engine))
    assert "its cache was made with engine.budget_tokens=80 (now 96)" in reason
    make_video(video, frames=50, fps=10)
    assert "the video has changed since its cache was made" in refusal()


@pytest.mark.parametrize("harm", ["bit", "header", "cut", "empty", "renamed", "garbage"])
def test_a_damaged_cache_is_refused_by_name_and_made_again(
    harm: str, config: JobConfig, engine: Engine, model: str, video: Path, tmp_path: Path
) -> None:
    store, task = CacheStore.of(config), task_of(video)
    before = said(watching(config, engine).watch(task))
    (path,) = files(Path(config.output))
    data = bytearray(path.read_bytes())
    if harm == "bit":
        data[-100] ^= 4
    elif harm == "header":
        data[data.index(b"last_time_s") + 16] ^= 1
    elif harm == "renamed":
        other = make_video(tmp_path / "other.mp4", frames=40, fps=10)
        watching(config, engine).watch(task_of(other))
        data = bytearray(Path(store.address(CacheKey.of(config, task_of(other)).cache_id())).read_bytes())
    else:
        data = {"cut": data[: len(data) // 2], "empty": bytearray(), "garbage": bytearray(b"\xff" * 500)}[harm]
    path.write_bytes(data)
    with pytest.raises(CacheMismatchError, match=str(path)) as refused:
        store.load(engine, CacheKey.of(config, task))
    assert "\n" not in str(refused.value)
    with pytest.raises(CacheMismatchError, match=str(path)):
        store.verify(CacheKey.of(config, task).cache_id())
    only_ask = configured(model, config.output, {"missing": "refuse"})
    error = watching(only_ask, engine, read=refusing_to_read).watch(task).error
    assert error is not None and error.startswith("cache: ") and str(path) in error
    again = watching(config, engine).watch(task)
    assert said(again) == before
    assert any(str(path) in w and "watched again" in w for w in again.warnings)
    store.verify(CacheKey.of(config, task).cache_id())
    assert said(watching(config, engine, read=refusing_to_read).watch(task)) == before


def test_a_cache_of_another_revision_is_refused_by_name_and_made_again(
    config: JobConfig, engine: Engine, model: str, video: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = configured(model, config.output, revision="v2")
    task, store = task_of(video), CacheStore.of(config)
    watching(config, engine).watch(task)
    with pytest.raises(CacheMissingError, match=r'made with engine.revision=null \(now "v2"\)'):
        store.load(Engine(engine.adapter, newer.engine), CacheKey.of(newer, task))
    # The weights changed behind the same name: only the engine's own identity can tell.
    changed = Engine(engine.adapter, config.engine)
    changed._identity = engine.identity | {"weights": "0123456789abcdef"}
    with pytest.raises(CacheMismatchError, match=r"written with weights=\w+, the engine has weights=0123456789abcdef"):
        store.load(changed, CacheKey.of(config, task))
    again = watching(config, changed).watch(task)
    assert again.error is None and any("weights=" in w and "watched again" in w for w in again.warnings)
    assert watching(config, changed, read=refusing_to_read).watch(task).error is None


def test_engines_of_another_dtype_keep_caches_of_their_own(config: JobConfig, engine: Engine, video: Path) -> None:
    half = Engine.load(config.engine, dtype="bfloat16")  # what engine.dtype=auto is on a GPU
    task = task_of(video)
    made = [watching(config, each).watch(task) for each in (half, engine)]
    assert all(result.error is None and not any("cache" in w for w in result.warnings) for result in made)
    names = {entry.cache_id for entry in CacheStore.of(config).entries()}
    assert names == {CacheKey.of(config, task, dtype).cache_id() for dtype in ("bfloat16", "float32")}
    for each, before in zip((half, engine), made, strict=True):
        assert said(watching(config, each, read=refusing_to_read).watch(task)) == said(before)


def test_a_checkpoint_is_taken_up_and_the_answers_are_those_of_one_go(model: str, engine: Engine, video: Path, tmp_path: Path) -> None:
    undisturbed = VideoWorker(configured(model, tmp_path / "plain"), engine=engine).watch(task_of(video))
    blocks = undisturbed.memory["blocks"]
    assert blocks > 10
    for retain in ("all", "none"):
        config = configured(model, tmp_path / retain, {"checkpoint_every_blocks": 2, "checkpoint_every_s": None, "retain": retain})
        starts: list[int] = []

        def read(task: VideoTask, geometry: Any, config: JobConfig, first_group: int, starts: list[int] = starts) -> Iterator[Message]:
            starts.append(first_group)
            for number, message in enumerate(read_video(task, geometry, config, first_group)):
                if len(starts) == 1 and number > 0.6 * blocks:
                    raise StageError("decode", "the process that decoded it died", lost="reader")
                yield message

        result = watching(config, engine, read=read, store=None)(task_of(video))
        assert said(result) == said(undisturbed)
        assert result.memory["attempts"] == 2 and len(starts) == 2 and starts[0] == 0
        assert 0.4 * undisturbed.memory["groups"] < starts[1] < 0.7 * undisturbed.memory["groups"]
        assert result.memory["resumed_s"] == pytest.approx((starts[1] - 1) * 2.0)
        assert any(f"resumed behind {result.memory['resumed_s']:.3f} s ({starts[1]} groups)" in w for w in result.warnings)
        assert any("attempt 1 failed: decode: the process that decoded it died" in w for w in result.warnings)
        for name in ("frames", "groups", "blocks", "visual_tokens", "total_tokens", "kv_peak_bytes", "kv_full_bytes"):
            assert result.memory[name] == undisturbed.memory[name], name
        assert len(result.trace) == len(undisturbed.trace)
        left = files(Path(config.output))
        assert len(left) == (retain == "all") and not any(".partial" in path.name for path in left)


def test_a_damaged_checkpoint_costs_time_only(model: str, engine: Engine, video: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path, {"checkpoint_every_blocks": 3})
    store, task = CacheStore.of(config), task_of(video)
    expected = said(VideoWorker(config, engine=engine).watch(task))

    def read(*arguments: Any) -> Iterator[Message]:
        messages = read_video(*arguments)
        for _ in range(9):
            yield next(messages)
        raise StageError("decode", "gone", lost="reader")

    with pytest.raises(StageError):
        watching(config, engine, read=read).watch(task)
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-50])
    result = watching(config, engine).watch(task)
    assert said(result) == expected and result.memory.get("resumed_s") is None
    assert any(store.address(CacheKey.of(config, task).cache_id(partial=True)) in w and "from its beginning" in w for w in result.warnings)


def test_a_query_aware_policy_keeps_nothing_and_says_so_once(model: str, engine: Engine, video: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path / "out", policy="snapkv")
    aware = Engine(engine.adapter, config.engine)
    result = watching(config, aware).watch(task_of(video))
    assert result.error is None and not files(tmp_path)
    assert len([w for w in result.warnings if "no cache is kept: policy snapkv" in w]) == 1


def test_a_store_that_fails_costs_the_cache_not_the_answers(config: JobConfig, engine: Engine, video: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = watching(config, engine, CacheStore(str(tmp_path / "file"), Storage())).watch(task_of(video))
    assert result.error is None and all(a["answer"] is not None and a["cache_id"] is None for a in result.answers)
    assert any("its cache couldn't be kept" in w for w in result.warnings)


def test_age_and_size_limits(config: JobConfig, engine: Engine, model: str, tmp_path: Path) -> None:
    tasks = [task_of(make_video(tmp_path / f"clip{n}.mp4", frames=40, fps=10)) for n in range(4)]
    store = CacheStore.of(config)
    for number, task in enumerate(tasks):
        watching(config, engine).watch(task)
        path = Path(store.address(CacheKey.of(config, task).cache_id()))
        os.utime(path, times=(time.time() - 1000 + number, time.time() - 1000 + number))
    sizes = {entry.cache_id: entry.size_bytes for entry in store.entries()}
    assert len(sizes) == 4
    limited = CacheStore(store.uri, Storage(), max_bytes=sum(sizes.values()) - 1)
    assert limited.expire() == [CacheKey.of(config, tasks[0]).cache_id()], "the oldest goes first"
    large = f"{'f' * 24}/{'0' * 16}-{'0' * 16}"
    Path(store.address(large)).parent.mkdir()
    Path(store.address(large)).write_bytes(b"x" * sum(sizes.values()))
    os.utime(store.address(large), times=(time.time() - 998.5,) * 2)  # between the second and the third
    assert limited.expire() == [large], "what can never fit costs no other its place"
    aged = CacheStore(store.uri, Storage(), ttl_s=997.5)
    with pytest.raises(CacheMissingError, match=r"older than caches.ttl_s=997.5"):
        aged.load(engine, CacheKey.of(config, tasks[1]))
    aged.load(engine, CacheKey.of(config, tasks[3]))
    assert len(aged.expire()) == 2
    assert [entry.cache_id for entry in store.entries()] == [CacheKey.of(config, tasks[3]).cache_id()]
    # Room for one: a cache says how long it took, so it may be some digits longer the next time.
    full = configured(model, config.output, {"max_bytes": max(sizes.values()) * 3 // 2})
    watching(full, engine).watch(tasks[0])
    assert [entry.cache_id for entry in store.entries()] == [CacheKey.of(config, tasks[0]).cache_id()], "saving makes room"


def test_caches_in_s3(model: str, engine: Engine, video: Path, s3_server: S3Server, tmp_path: Path) -> None:
    storage = s3_server.storage(spool_dir=str(tmp_path / "spool"))
    config = configured(model, f"s3://{s3_server.new_bucket()}/out", {"checkpoint_every_blocks": 4})
    store = CacheStore.of(config, storage)
    task = task_of(video)
    watched = watching(config, engine, store).watch(task)
    assert said(watching(config, engine, store, read=refusing_to_read).watch(task)) == said(watched)
    entries = list(store.entries())
    assert [entry.cache_id for entry in entries if not entry.cache_id.endswith(".partial")] == [CacheKey.of(config, task).cache_id()]
    described = store.describe(entries[0].cache_id)
    assert described["labels"]["uri"] == task.uri and described["identity"]["budget_tokens"] == "80"
    for entry in entries:
        store.verify(entry.cache_id)
    data = bytearray(storage.read_bytes(store.address(CacheKey.of(config, task).cache_id())))
    data[-5] ^= 1
    storage.write_bytes(store.address(CacheKey.of(config, task).cache_id()), bytes(data))
    with pytest.raises(CacheMismatchError, match=r"s3://.* fails its checksum"):
        store.load(engine, CacheKey.of(config, task))
    assert not list((tmp_path / "spool").glob("*.safetensors"))


def test_two_writers_leave_one_whole_cache(config: JobConfig, engine: Engine, video: Path) -> None:
    store, key = CacheStore.of(config), CacheKey.of(config, task_of(video))
    messages = read_video(task_of(video), engine.geometry, config)
    next(messages)
    compressed = engine.prefill(m for m in messages if hasattr(m, "frames"))
    store.save(key, compressed, {"who": "first"})
    store.save(key, compressed, {"who": "second"})
    assert store.load(engine, key).labels["who"] == "first"
    assert len(files(Path(config.output))) == 1


def test_the_command_lists_shows_verifies_and_removes(
    config: JobConfig, engine: Engine, video: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watching(config, engine).watch(task_of(video))
    store = CacheStore.of(config)
    cache_id = CacheKey.of(config, task_of(video)).cache_id()
    assert caches_job.main(["ls", store.uri]) == 0
    listed = capsys.readouterr().out
    assert cache_id in listed.replace("\n", "") and "1 cache" in listed
    assert caches_job.main(["show", store.uri, cache_id]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["labels"]["uri"] == str(video) and shown["identity"]["policy"] == "keydiff" and "blocks" not in shown["trace"]
    assert caches_job.main(["verify", store.uri]) == 0
    assert "1 whole, 0 not" in capsys.readouterr().out
    path = Path(store.address(cache_id))
    path.write_bytes(path.read_bytes()[:-1])
    assert caches_job.main(["verify", store.uri]) == 1
    printed = capsys.readouterr().out
    assert str(path) in printed and "0 whole, 1 not" in printed
    assert caches_job.main(["rm", store.uri, "no/such-cache"]) == 2
    assert "no/such-cache" in capsys.readouterr().err
    assert caches_job.main(["rm", store.uri, cache_id]) == 0
    assert not list(store.entries())
    assert caches_job.main(["rm", store.uri]) == 2, "never everything by a slip"
    assert caches_job.main(["ls", "ftp://elsewhere"]) == 2


def test_a_folder_that_holds_no_caches_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "caches" / "model").mkdir(parents=True)
    weights = tmp_path / "caches" / "model" / "model.safetensors"
    weights.write_bytes(b"no cache")
    assert caches_job.main(["rm", str(tmp_path / "caches"), "--all"]) == 0 and weights.exists(), "only caches are removed"
    capsys.readouterr()
    assert caches_job.main(["ls", str(tmp_path / "nope")]) == 2
    assert "nope: no such folder" in capsys.readouterr().err
    assert caches_job.main(["ls", str(tmp_path)]) == 2
    assert f"its caches are in {tmp_path}/caches" in capsys.readouterr().err


def test_an_interleaved_prompt_is_stored_behind_its_pictures_only(model: str, engine: Engine, tmp_path: Path) -> None:
    pictures = []
    for number in range(3):
        Image.new("RGB", (112, 84), (80 * number, 40, 200)).save(tmp_path / f"{number}.png")
        pictures += [{"text": f"Picture {number}."}, {"image": f"{number}.png"}]
    (tmp_path / "many.prompt").write_bytes(prompt_document([*pictures, {"text": "The end."}]))
    task = task_of(tmp_path / "many.prompt")
    whole = VideoWorker(configured(model, tmp_path / "plain"), engine=engine).watch(task)
    config = configured(model, tmp_path / "out", {"checkpoint_every_blocks": 1})
    attempts = []

    class Interrupted(CacheStore):
        def save(self, *arguments: Any, partial: bool = False, **more: Any) -> str:
            saved = super().save(*arguments, partial=partial, **more)
            attempts.append(partial)
            if len(attempts) == 2:
                raise KeyboardInterrupt
            return saved

    store = Interrupted(CacheStore.of(config).uri, Storage())
    with pytest.raises(KeyboardInterrupt):
        watching(config, engine, store).watch(task)
    resumed = watching(config, engine, store).watch(task)
    assert whole.error is None and said(resumed) == said(whole)
    assert any("resumed behind" in warning for warning in resumed.warnings)
    assert resumed.memory["total_tokens"] == whole.memory["total_tokens"]
