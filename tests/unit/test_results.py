"""Results: one object a video, written once; tables that other tools open; a row for every question, whatever happened."""

from __future__ import annotations

import json
import math
import pickle
import re
import threading
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from engine.types import Answer, BlockTrace
from pipeline import provenance, results, tables
from pipeline.config import JobConfig
from pipeline.manifest import ManifestQuestion, VideoTask
from pipeline.results import TABLES, ResultStore, VideoResult, columns_table, fingerprint
from pipeline.storage import Storage
from pipeline.storage_errors import StorageError, StorageSetupError

README = Path(__file__).parents[2] / "configs" / "README.md"
STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def task(video_id: str, *texts: str, **fields: Any) -> VideoTask:
    questions = tuple(ManifestQuestion(question_id=f"q{n}", question=text) for n, text in enumerate(texts or ("what?",)))
    return VideoTask(video_id=video_id, uri=f"/videos/{video_id}.mp4", questions=questions, **fields)


def answer(number: int = 0, **fields: Any) -> dict[str, Any]:
    return {"question_id": f"q{number}", "answer": "a cat", "finish_reason": "stop", "answer_tokens": 2, "ttft_s": 0.5} | fields


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    return JobConfig(manifest="m.jsonl", output=str(tmp_path / "out"), trace=True)


@pytest.fixture
def store(config: JobConfig) -> ResultStore:
    store = ResultStore(config.output, Storage(), "run1")
    store.start()
    return store


def test_a_video_is_committed_once(config: JobConfig, store: ResultStore) -> None:
    name = fingerprint(config, task("v"))
    assert store.commit(VideoResult("v", name, answers=[answer()]))
    assert not store.commit(VideoResult("v", name, answers=[answer(answer="a dog")]))
    store.compact(config, [task("v")], STARTED)
    assert pd.read_parquet(f"{config.output}/answers").answer.tolist() == ["a cat"]


def test_of_many_committers_one_wins(config: JobConfig, store: ResultStore) -> None:
    name = fingerprint(config, task("v"))
    gate = threading.Barrier(6)
    won: list[bool] = []

    def commit(number: int) -> None:
        gate.wait()
        won.append(store.commit(VideoResult("v", name, answers=[answer(answer=str(number))])))

    threads = [threading.Thread(target=commit, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 5 + [True]


def test_done_takes_over_from_earlier_runs_but_not_what_may_be_mended(config: JobConfig, store: ResultStore) -> None:
    tasks = [task("ok"), task("broken"), task("out-of-reach"), task("new")]
    names = {t.video_id: fingerprint(config, t) for t in tasks}
    store.commit(VideoResult("ok", names["ok"], answers=[answer()]))
    store.commit(VideoResult("broken", names["broken"], error="no picture"))
    store.commit(VideoResult("out-of-reach", names["out-of-reach"], error="no network", retry=True))
    later = pickle.loads(pickle.dumps(ResultStore(config.output, Storage(), "run2")))
    assert later.done(names) == {"ok", "broken"}
    assert later.commit(VideoResult("out-of-reach", names["out-of-reach"], answers=[answer()]))
    assert later.done(names) == {"ok", "broken", "out-of-reach"}
    counts = later.compact(config, tasks[:3], STARTED).counts
    assert (counts.videos_answered, counts.videos_failed, counts.videos_not_run) == (2, 1, 0)
    frame = pd.read_parquet(f"{config.output}/answers").set_index("video_id")
    assert frame.run_id.to_dict() == {"ok": "run1", "broken": "run1", "out-of-reach": "run2"}


def change(task_: VideoTask, **fields: Any) -> VideoTask:
    return task_.model_copy(update=fields)


def test_the_fingerprint_follows_what_changes_answers_and_nothing_else(config: JobConfig) -> None:
    base = task("v", "what?", content_tag="1")
    name = fingerprint(config, base)

    def settings(section: str, **fields: Any) -> JobConfig:
        return config.model_copy(update={section: getattr(config, section).model_copy(update=fields)})

    other_question = (ManifestQuestion(question_id="q0", question="what? "),)
    other_expected = (ManifestQuestion(question_id="q0", question="what?", expected="a cat"),)
    different = [
        fingerprint(settings("engine", model="other"), base),
        fingerprint(settings("engine", revision="abc"), base),
        fingerprint(settings("engine", budget_tokens=2), base),
        fingerprint(settings("engine", policy_options={"seed": 1}), base),
        fingerprint(settings("decode", fps=2.0), base),
        fingerprint(config, change(base, uri="/elsewhere.mp4")),
        fingerprint(config, change(base, content_tag="2")),
        fingerprint(config, change(base, questions=other_question)),
        fingerprint(config, change(base, video_id="w")),
    ]
    assert len({name, *different}) == len(different) + 1
    same = [
        fingerprint(settings("decode", where="actor", prefetch_blocks=9), base),
        fingerprint(settings("pool", max_actors=9), base),
        fingerprint(config.model_copy(update={"limit": 3, "trace": False}), base),
        fingerprint(config, change(base, questions=other_expected, extra={"camera": 1}, size_bytes=5)),
    ]
    assert set(same) == {name}
    assert fingerprint(config, change(base, video_id="../../etc/passwd")).replace("/", "").isalnum()


def test_every_question_has_exactly_one_row(config: JobConfig, store: ResultStore) -> None:
    tasks = [task("fine", "a?", "b?"), task("half", "a?", "b?"), task("broken", "a?", "b?"), task("never", "a?"), task("odd", "a?")]
    store.commit(VideoResult("fine", fingerprint(config, tasks[0]), answers=[answer(1), answer(0)]))
    store.commit(
        VideoResult("half", fingerprint(config, tasks[1]), answers=[answer(0), answer(1, answer=None, choice="B", error="NaN logits")])
    )
    store.commit(VideoResult("broken", fingerprint(config, tasks[2]), memory={"attempts": 3}, error="no picture"))
    store.commit(VideoResult("odd", fingerprint(config, tasks[4]), answers=[answer(7)]))
    counts = store.compact(config, tasks, STARTED).counts
    frame = pd.read_parquet(f"{config.output}/answers")
    assert list(zip(frame.video_id, frame.question_id, strict=True)) == [(t.video_id, q.question_id) for t in tasks for q in t.questions]
    answered = frame.error.isna()
    assert answered.tolist() == [True, True, True, False, False, False, False, False]
    assert frame.answer.notna().tolist() == answered.tolist()
    assert set(frame.finish_reason[~answered]) == {"error"}
    assert frame.choice.isna().all()
    assert set(frame.error[frame.video_id == "broken"]) == {"no picture"}
    assert "run again with the same output" in frame.error[frame.video_id == "never"].item()
    assert (frame.model == "bundled").all()
    assert asdict(counts) == {
        "videos": 5,
        "videos_answered": 3,
        "videos_failed": 1,
        "videos_not_run": 1,
        "questions": 8,
        "questions_answered": 3,
        "questions_failed": 5,
        "questions_judged": 0,
        "questions_right": 0,
    }
    quarantine = pd.read_parquet(f"{config.output}/quarantine")
    assert quarantine[["video_id", "attempts", "error", "questions"]].values.tolist() == [["broken", 3, "no picture", 2]]


def test_answers_are_judged_where_the_manifest_says_what_is_right(config: JobConfig, store: ResultStore) -> None:
    asked = [("cat?", (), " A Cat"), ("dog?", (), "wrong"), ("open?", (), None), ("which?", ("x", "y"), "y"), ("lost?", (), "a")]
    questions = [
        ManifestQuestion(question_id=f"q{i}", question=text, options=options, expected=expected)
        for i, (text, options, expected) in enumerate(asked)
    ]
    judged = change(task("v"), questions=tuple(questions))
    answers = [answer(0), answer(1), answer(2), answer(3, choice="B"), answer(4, answer=None, error="NaN logits")]
    store.commit(VideoResult("v", fingerprint(config, judged), answers=answers))
    counts = store.compact(config, [judged], STARTED).counts
    assert (counts.questions_right, counts.questions_judged) == (2, 3)


def test_what_is_told_at_the_end_is_known_without_reading_the_tables(config: JobConfig, store: ResultStore) -> None:
    tasks = [task(f"v{number:02d}", "a?", "b?") for number in range(30)]
    for number, t in enumerate(tasks):
        name = fingerprint(config, t)
        if number % 10 == 9:
            store.commit(VideoResult(t.video_id, name, error="no picture"))
            continue
        memory = {"kv_peak_bytes": 10 + number, "kv_full_bytes": 1000 - number if number else 5}
        store.commit(VideoResult(t.video_id, name, [answer(0), answer(1)], memory, warnings=["rotated"]))
    outcome = store.compact(config, tasks, STARTED)
    told = pd.read_parquet(f"{config.output}/answers").head(20)
    assert [(row["video_id"], row["question_id"]) for row in outcome.answers] == list(zip(told.video_id, told.question_id, strict=True))
    assert (outcome.kv_peak_bytes, outcome.kv_full_bytes, outcome.warnings) == (11, 999, 27)
    assert outcome.set_aside == [(f"v{number}", "no picture") for number in ("09", "19", "29")]
    assert (outcome.counts.videos_answered, outcome.counts.videos_failed) == (27, 3)


def test_the_settings_digest_is_made_once_a_job(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(results, "checkpoint_digest", lambda model: asked.append(model) or "0" * 16)
    fresh = config.model_copy(update={"engine": config.engine.model_copy(update={"model": "digested/once"})})
    names = {fingerprint(fresh, task(f"v{number}")) for number in range(50)}
    assert len(names) == 50 and len({name.partition("/")[0] for name in names}) == 1
    assert asked == ["digested/once"]
    assert min(names).partition("/")[0] == results.digest(results.answer_settings(fresh))[:16]


def test_success_is_last_and_only_when_all_is_done(config: JobConfig, store: ResultStore) -> None:
    marker = Path(config.output) / "_SUCCESS"
    tasks = [task("a"), task("b")]
    store.commit(VideoResult("a", fingerprint(config, tasks[0]), answers=[answer()]))
    store.compact(config, tasks, STARTED)
    assert not marker.exists()
    store.commit(VideoResult("b", fingerprint(config, tasks[1]), error="no picture"))
    store.compact(config, tasks, STARTED, complete=False)
    assert not marker.exists()
    store.compact(config, tasks, STARTED)
    assert marker.exists()
    run = json.loads((Path(config.output) / "run.json").read_text())
    assert (run["run_id"], run["complete"], run["started_at"]) == ("run1", True, "2026-01-02T03:04:05+00:00")
    assert run["config"]["engine"]["budget_tokens"] == 1024
    assert run["counts"]["videos_failed"] == 1
    assert run["versions"]["torch"]
    ResultStore(config.output, Storage(), "run2").start()
    assert not marker.exists()


def test_the_order_of_writing(config: JobConfig, store: ResultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = Storage.write_bytes
    monkeypatch.setattr(Storage, "write_bytes", lambda self, uri, *a, **k: written.append(uri) or write(self, uri, *a, **k))
    store.commit(VideoResult("a", fingerprint(config, task("a")), answers=[answer()]))
    store.compact(config, [task("a")], STARTED)
    assert written[-2:] == [f"{config.output}/run.json", f"{config.output}/_SUCCESS"]


def test_tables_of_earlier_runs_are_replaced(config: JobConfig, store: ResultStore) -> None:
    tasks = [task("a"), task("b")]
    for t in tasks:
        store.commit(VideoResult(t.video_id, fingerprint(config, t), answers=[answer()], trace=[{"block_tokens": 4}]))
    store.compact(config, tasks, STARTED)
    again = ResultStore(config.output, Storage(), "run2")
    again.start()
    again.compact(config.model_copy(update={"trace": False}), tasks[:1], STARTED)
    assert duckdb.sql(f"select video_id from '{config.output}/answers/*.parquet'").fetchall() == [("a",)]
    assert not list(Path(config.output, "trace").glob("*"))


@pytest.fixture
def rich(config: JobConfig, store: ResultStore) -> list[VideoTask]:
    """Two videos with everything there is, and one that failed; hostile texts throughout."""
    hostile = "né\x00 \n 漢😀 'quote' \u202e"
    choice = ManifestQuestion(question_id="pick", question=hostile, options=("red", "blue"), expected="B", extra={"kind": "colour"})
    tasks = [
        VideoTask(video_id="v1", uri="/v1.mp4", questions=(choice,), extra={"camera": 7, "tags": ["é"]}),
        task("v2"),
        task("v3"),
    ]
    picked = answer(question_id="pick", answer="blue", choice="B", choice_probabilities=[0.25, np.float64(0.75)], finish_reason="choice")
    block = asdict(BlockTrace(1, 2, 3, 4, 5, 6, 7, 0.1, 0.2, 0.3, 0.4))
    memory = {"frames": np.int64(9), "kv_peak_bytes": 2**40, "duration_s": math.pi, "decoder": "pyav", "attempts": 2}
    store.commit(VideoResult("v1", fingerprint(config, tasks[0]), [picked], memory, [block, block], ["rotated", "rotated", "cut"]))
    store.commit(VideoResult("v2", fingerprint(config, tasks[1]), [answer()], {"attempts": 1}))
    store.commit(VideoResult("v3", fingerprint(config, tasks[2]), error="broken \udcff name"))
    store.compact(config, tasks, STARTED)
    return tasks


def test_pandas_opens_the_tables(config: JobConfig, rich: list[VideoTask]) -> None:
    frame = pd.read_parquet(f"{config.output}/answers")
    first = frame.iloc[0]
    assert first.question == rich[0].questions[0].question
    assert list(first.options) == ["red", "blue"]
    assert (first.answer, first.choice, first.expected) == ("blue", "B", "B")
    assert list(first.choice_probabilities) == [0.25, 0.75]
    assert json.loads(first.extra) == {"camera": 7, "tags": ["é"], "kind": "colour"}
    assert frame.extra.isna().tolist() == [False, True, True]
    memory = pd.read_parquet(f"{config.output}/memory")
    assert memory.kv_peak_bytes.iloc[0] == 2**40
    assert list(memory.warnings.iloc[0]) == ["rotated", "cut"]
    assert memory.error.iloc[2] == "broken ? name"
    assert pd.read_parquet(f"{config.output}/trace").block.tolist() == [0, 1]


def test_duckdb_opens_the_tables(config: JobConfig, rich: list[VideoTask]) -> None:
    where = config.output
    assert duckdb.sql(
        f"select video_id, options[2], extra->>'camera' from '{where}/answers/*.parquet' where choice is not null"
    ).fetchall() == [("v1", "blue", "7")]
    joined = f"from '{where}/answers/*.parquet' a join '{where}/memory/*.parquet' m using (video_id)"
    assert duckdb.sql(f"select a.video_id, m.frames, len(m.warnings) {joined} order by 1").fetchall() == [
        ("v1", 9, 2),
        ("v2", None, 0),
        ("v3", None, 0),
    ]
    assert duckdb.sql(f"select max(seen_tokens) from '{where}/trace/*.parquet'").fetchall() == [(2,)]
    assert duckdb.sql(f"select count(*) from '{where}/quarantine/*.parquet'").fetchall() == [(1,)]


def test_files_carry_exactly_the_schema_and_only_plain_types(config: JobConfig, rich: list[VideoTask]) -> None:
    for name, schema in TABLES.items():
        dataset = pads.dataset(f"{config.output}/{name}")
        assert dataset.schema.equals(schema, check_metadata=False)
        assert dataset.files
        for file in dataset.files:
            stored = pq.ParquetFile(file).schema
            kinds = {str(stored.column(i).logical_type) for i in range(len(stored))} | {
                stored.column(i).physical_type for i in range(len(stored))
            }
            assert kinds <= {"String", "None", "BYTE_ARRAY", "INT64", "DOUBLE"}


def test_an_empty_table_opens_too(config: JobConfig, store: ResultStore) -> None:
    store.commit(VideoResult("a", fingerprint(config, task("a")), answers=[answer()]))
    store.compact(config, [task("a")], STARTED)
    assert duckdb.sql(f"select count(error) from '{config.output}/quarantine/*.parquet'").fetchall() == [(0,)]
    assert pd.read_parquet(f"{config.output}/trace").empty


def test_large_tables_are_split_in_order(config: JobConfig, store: ResultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_ROWS_CONVERTED", 3)
    monkeypatch.setattr(tables, "ROWS_PER_GROUP", 6)
    monkeypatch.setattr(tables, "BYTES_PER_FILE", 3000)
    monkeypatch.setattr(results, "_VIDEOS_AT_ONCE", 4)
    tasks = [task(f"v{n}", "a?", "b?") for n in range(25)]
    for t in tasks:
        store.commit(VideoResult(t.video_id, fingerprint(config, t), answers=[answer(0), answer(1)]))
    store.compact(config, tasks, STARTED)
    files = sorted(Path(config.output, "answers").glob("*.parquet"))
    assert len(files) > 1
    assert pq.ParquetFile(files[0]).num_row_groups > 1
    read = [(r["video_id"], r["question_id"]) for file in files for r in pq.read_table(file).to_pylist()]
    assert read == [(t.video_id, q) for t in tasks for q in ("q0", "q1")]


def test_rows_that_do_not_fit_are_refused_at_once(store: ResultStore) -> None:
    with pytest.raises(ValueError, match="the table answers has no column anser"):
        store.commit(VideoResult("v", "a/b", answers=[{"anser": "x"}]))
    with pytest.raises(ValueError, match="a row doesn't fit the table memory"):
        store.commit(VideoResult("v", "a/b", memory={"frames": "many"}))


def test_the_engines_own_records_fit_the_tables(store: ResultStore) -> None:
    row = asdict(Answer("q0", "x"))
    row["answer"] = row.pop("text")
    block = asdict(BlockTrace(1, 2, 3, 4, 5, 6, 7, 0.1, 0.2, 0.3))
    assert store.commit(VideoResult("v", "a/b", answers=[row], trace=[block]))


def test_a_damaged_result_is_named(config: JobConfig, store: ResultStore) -> None:
    name = fingerprint(config, task("v"))
    Storage().write_bytes(f"{config.output}/results/{name}.json", b'{"video_id": ')
    with pytest.raises(StorageError, match=rf"{name}.json: damaged .* delete it and run again"):
        store.compact(config, [task("v")], STARTED)


def test_a_store_that_overwrites_is_refused(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Storage.write_bytes
    monkeypatch.setattr(Storage, "write_bytes", lambda self, uri, data, *, if_absent=False: write(self, uri, data))
    with pytest.raises(StorageSetupError, match="ignores If-None-Match"):
        ResultStore(config.output, Storage(), "run1").start()


def test_the_documentation_has_every_column() -> None:
    text = README.read_text(encoding="utf-8")
    for name, schema in TABLES.items():
        assert columns_table(schema) in text, f"configs/README.md: bring the table of {name} up to date (pipeline.results.columns_table)"
        assert all(field.metadata[b"description"] for field in schema)


def test_the_source_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REELKEEP_COMMIT", "from-the-image")
    assert provenance.source_commit() == "from-the-image"
    monkeypatch.delenv("REELKEEP_COMMIT")
    found = provenance.source_commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.source_commit() is None
