"""Input that is broken or meant to hurt: refused in one line or carried through harmlessly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs import answer, ask, caches, generate, report
from jobs import manifest as mlvu
from jobs.terminal import complain
from pipeline.config import JobConfig
from pipeline.manifest import Manifest, ManifestError, read_manifest
from pipeline.manifest_columns import MAX_DEPTH
from pipeline.storage import Storage, local_path
from pipeline.storage_errors import StorageError, translated

ROW = '"uri": "a.mp4", "question": "what?"'


def read(folder: Path, *lines: str) -> Manifest:
    (folder / "a.mp4").write_bytes(b"x")
    manifest = folder / "m.jsonl"
    manifest.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_manifest(JobConfig(manifest=str(manifest), output="out"), Storage())


def refusal(folder: Path, *lines: str) -> str:
    with pytest.raises(ManifestError) as caught:
        read(folder, *lines)
    return str(caught.value)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 300, 900])
@pytest.mark.parametrize("column", ["v", "options", "questions", "video_id"])
def test_deep_nesting_is_refused_by_row_and_column(tmp_path: Path, column: str, depth: int) -> None:
    row = '"uri": "a.mp4"' if column == "questions" else ROW
    text = refusal(tmp_path, f"{{{ROW}}}", f'{{{row}, "{column}": {nested(depth)}}}')
    assert f"line 2: column {column} is nested deeper than {MAX_DEPTH}; flatten it" in text


def test_nesting_up_to_the_bound_is_carried(tmp_path: Path) -> None:
    (task,) = read(tmp_path, f'{{{ROW}, "v": {nested(MAX_DEPTH)}}}').tasks
    assert json.dumps(task.questions[0].extra["v"]).replace(" ", "") == nested(MAX_DEPTH)


def test_numbers_that_json_cannot_hold_become_null_and_are_noted(tmp_path: Path) -> None:
    manifest = read(tmp_path, f'{{{ROW}, "score": NaN, "deep": {{"a": [1.5, -Infinity]}}, "fine": 2.0}}')
    extra = manifest.tasks[0].questions[0].extra
    assert extra == {"score": None, "deep": {"a": [1.5, None]}, "fine": 2.0}
    assert [note.split()[1] for note in manifest.notes] == ["'score'", "'deep'"]
    json.dumps(extra, allow_nan=False)


def test_large_further_columns_are_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path, f'{{{ROW}, "blob": "{"x" * 1_000_001}", "camera": 7}}')
    assert "line 1: further columns of" in text and "leave out the largest, blob" in text and len(text) < 400


def test_a_broken_character_in_an_option_is_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path, f'{{{ROW}, "options": ["fine", "\\ud800"]}}')
    assert "line 1: question 0: options.1=" in text
    text.encode()


@pytest.mark.parametrize(
    ("column", "near"), [("question_ids", "question_id"), ("Expected", "expected"), ("option", "options"), ("video-id", "video_id")]
)
def test_a_misspelt_column_is_noted(tmp_path: Path, column: str, near: str) -> None:
    (note,) = read(tmp_path, f'{{{ROW}, "{column}": "x"}}').notes
    assert repr(column) in note and note.endswith(f"did you mean {near}?")


def test_other_columns_are_not_noted(tmp_path: Path) -> None:
    assert read(tmp_path, f'{{{ROW}, "question_type": "x", "camera": 1, "duration_s": 2, "video_uri": "y", "url": "z"}}').notes == []


@pytest.mark.parametrize("uri", ["file:///x%00.mp4", "file:///x%1b]0;owned%07.mp4", "file:///a%0Ab.mp4"])
def test_controls_hidden_in_an_address_are_refused(tmp_path: Path, uri: str) -> None:
    text = refusal(tmp_path, json.dumps({"uri": uri, "question": "what?"}))
    assert "line 1: " in text and all(line.isprintable() for line in text.splitlines())


@pytest.mark.parametrize("uri", ["a\0b", "file:///a%00b"])
def test_a_null_character_is_no_path(uri: str) -> None:
    with pytest.raises(StorageError, match="null character") as caught:
        local_path(uri)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_names_that_the_system_refuses_are_storage_errors(name: str) -> None:
    with pytest.raises(StorageError) as caught, translated(name):
        Path(name).read_bytes()
    assert str(caught.value).isprintable()


def test_what_is_explained_already_stays(tmp_path: Path) -> None:
    mine: Any = StorageError("mine")
    with pytest.raises(StorageError) as caught, translated("x"):
        raise mine
    assert caught.value is mine


def test_complaints_never_reach_the_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    complain("first \x1b]0;owned\x07\r\u202e\x9b31m é 漢\n  second\ud800 \t|")
    assert capsys.readouterr().err == "first \ufffd]0;owned\ufffd \ufffd\ufffd31m é 漢\n  second\ufffd  |\n"


def test_every_job_shows_errors_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = str(tmp_path / "x\x1b[31m\x07")
    assert answer.main(["--manifest", f"{evil}.jsonl", "--output", str(tmp_path / "out"), "--dry-run"]) == 2
    assert ask.main(["--archive", evil, "--manifest", "m.jsonl", "--output", str(tmp_path / "out")]) == 2
    assert caches.main(["show", evil, "some"]) == 2
    assert report.main([evil]) == 2
    assert generate.main(["--output", str(tmp_path / "out"), "--kinds", "\x1b[31m"]) == 2
    assert mlvu.main(["mlvu", "--annotations", evil, "--videos", "v", "--output", str(tmp_path / "m.jsonl")]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 6 and all(line.isprintable() for line in said.splitlines())


def test_generate_names_an_output_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert generate.main(["--output", str(tmp_path / "file"), "--videos", "1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "file: File exists; name a folder" in said
    assert (tmp_path / "file").read_text() == "mine"


def test_mlvu_of_nothing_but_bad_rows_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "1_plotQA.json").write_text('[{"video": "a"}, 3]')
    assert mlvu.main(["mlvu", "--annotations", str(tmp_path), "--videos", "v", "--output", str(tmp_path / "m.jsonl")]) == 2
    said = capsys.readouterr().err
    assert "none of its 2 annotations" in said and "1_plotQA.json[1]: must be an object with video, duration" in said
    assert not (tmp_path / "m.jsonl").exists()
