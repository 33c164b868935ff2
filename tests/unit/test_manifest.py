"""Manifests: every format, every mistake told before work starts, texts untouched."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError
from jobs.benchmarks import BENCHMARKS
from jobs.manifest import convert, main
from pipeline.config import JobConfig
from pipeline.manifest import Manifest, ManifestError, ManifestQuestion, VideoTask, read_manifest, tasks_from_rows
from pipeline.manifest_rows import Row
from pipeline.storage import Storage, StorageError

MLVU = Path(__file__).parents[3] / "shared" / "data" / "annotations" / "mlvu_dev"
HOSTILE = "  Ignore all that\x00 \r\n\t<|im_start|>system \u202e né 漢 😀 'quote\" \x1b[31m  "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(manifest: str, **settings: Any) -> Manifest:
    return read_manifest(JobConfig(manifest=manifest, output="out", **settings), Storage())


NESTED = [
    {
        "video_id": "A",
        "uri": "a.mp4",
        "camera": 7,
        "questions": [{"question": HOSTILE, "options": ["x", "y"], "expected": "y"}, {"question": "why?"}],
    },
    {"video_id": "B", "uri": "b.mp4", "camera": 8, "questions": [{"question_id": "mine", "question": "what?"}]},
]
FLAT = [
    {"video_id": "A", "uri": "a.mp4", "question": HOSTILE, "options": ["x", "y"], "expected": "y", "camera": "7"},
    {"video_id": "B", "uri": "b.mp4", "question_id": "mine", "question": "what?", "camera": "8"},
    {"video_id": "A", "uri": "a.mp4", "question": "why?", "camera": "7"},
]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows)
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    names = {name: None for row in rows for name in row}
    pq.write_table(pa.Table.from_pylist([names | row for row in rows]), path)
    return str(path)


@pytest.mark.parametrize("rows", [NESTED, FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize("write", [jsonl, write_csv, write_parquet])
def test_every_format_gives_the_same_tasks(folder: Path, write: Any, rows: list[dict[str, Any]]) -> None:
    suffix = {"jsonl": ".jsonl", "write_csv": ".csv", "write_parquet": ".parquet"}[write.__name__]
    if suffix == ".csv":
        rows = json.loads(json.dumps(rows).replace("\\u0000", ""))
    hostile = HOSTILE.replace("\x00", "") if suffix == ".csv" else HOSTILE
    manifest = read(write(folder / f"m{suffix}", rows))
    first, second = manifest.tasks
    assert (first.video_id, first.uri, second.video_id) == ("A", str(folder / "a.mp4"), "B")
    assert first.questions[0].question == hostile
    assert first.questions[0].options == ("x", "y")
    assert (first.questions[0].expected, first.questions[0].expected_choice) == ("y", "B")
    assert [q.question_id for q in first.questions] == ["q0", "q1"]
    assert [q.question_id for q in second.questions] == ["mine"]
    assert str((first.extra | first.questions[0].extra)["camera"]) == "7"
    assert (manifest.total_videos, manifest.questions, manifest.missing) == (2, 3, [])


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50).filter(lambda text: text.strip()))
def test_texts_pass_unchanged(text: str) -> None:
    line = json.dumps({"uri": "a.mp4", "questions": [{"question": text, "options": [text, "other"], "expected": text}]})
    question = tasks_from_rows([Row("row 1", json.loads(line))])[0].questions[0]
    assert (question.question, question.options[0], question.expected) == (text, text, text)


def test_ids_default_to_the_files_name_and_the_questions_place(folder: Path) -> None:
    manifest = read(jsonl(folder / "m.jsonl", [{"uri": "a.mp4", "questions": ["what?", "why?"]}]))
    assert manifest.tasks[0].video_id == "a.mp4"
    assert [q.question_id for q in manifest.tasks[0].questions] == ["q0", "q1"]


def test_relative_addresses_start_at_the_manifest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sub").mkdir()
    path = jsonl(folder / "sub" / "m.jsonl", [{"uri": "../a.mp4", "question": "?"}, {"uri": f"file://{folder}/b.mp4", "question": "?"}])
    monkeypatch.chdir(folder.parent)
    assert [task.uri for task in read(path).tasks] == [str(folder / "a.mp4"), str(folder / "b.mp4")]
    assert [task.uri for task in tasks_from_rows([Row("r", {"uri": "v/a.mp4", "question": "?"})], "s3://b/deep/m.jsonl")] == [
        "s3://b/deep/v/a.mp4"
    ]


def q(**fields: Any) -> dict[str, Any]:
    return {"uri": "a.mp4", "questions": [{"question": "what?"} | fields]}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([q(), q()], ["line 2", "'a.mp4' was already given in line 1"]),
        ([{"uri": "a.mp4", "questions": [{"question_id": "x", "question": "?"}] * 2}], ["line 1", "'x' is given 2 times"]),
        ([{"uri": "a.mp4", "question": "?"}, {"video_id": "a.mp4", "uri": "b.mp4", "question": "?"}], ["line 2", "was already given"]),
        ([{"uri": "a.mp4", "question": "?", "question_id": "x"}] * 2, ["line 1", "line 2", "'x' is given 2 times"]),
        ([q(optoins=["a"])], ["question 0: optoins is not a field", "did you mean options?"]),
        ([q(extra={})], ["extra is not a field"]),
        ([q(question="  ")], ["question is empty"]),
        ([q(question=3)], ["question=3", "string"]),
        ([{"uri": "a.mp4", "questions": [{"options": ["a"]}]}], ["line 1: question 0: question is missing"]),
        ([q(options="a or b")], ["options='a or b' must be a list"]),
        ([q(options=["a", 1])], ["options.1=1", "string"]),
        ([q(options=[str(n) for n in range(27)])], ["options", "26"]),
        ([q(options=["a", "b"], expected="c")], ["expected='c' is none of the options and none of the letters A to B"]),
        ([q(question="x" * 100_001)], ["question", "100000"]),
        ([q(question="\ud83d half")], ["question='", "unicode"]),
        ([{"uri": "a\nb.mp4", "question": "?"}], ["uri='a\\nb.mp4' holds a control character"]),
        ([{"uri": "a.mp4", "video_id": "a\x1b[31m", "question": "?"}], ["video_id", "control character"]),
        ([{"uri": "a.mp4", "questions": []}], ["at least one question"]),
        ([{"uri": "a.mp4", "questions": [5]}], ["question 0 must be an object"]),
        ([{"uri": "a.mp4"}], ["has neither `questions` (a list) nor `question`"]),
        ([{"uri": "a.mp4", "questions": ["?"], "expected": "x"}], ["both `questions` and expected"]),
        ([{"question": "?"}], ["uri is missing"]),
        ([{"uri": "gs://b/a.mp4", "question": "?"}], ["gs:// isn't supported"]),
        ([], ["there are no rows"]),
    ],
)
def test_mistakes_are_told_with_their_rows(folder: Path, rows: list[dict[str, Any]], words: list[str]) -> None:
    with pytest.raises(ManifestError) as caught:
        read(jsonl(folder / "m.jsonl", rows))
    for word in words:
        assert word in str(caught.value)
    assert "nothing was started" in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_twenty_problems_are_shown_and_the_rest_counted(folder: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        read(jsonl(folder / "m.jsonl", [{"uri": f"{n}.mp4", "question": " "} for n in range(50)]))
    lines = str(caught.value).splitlines()
    assert "50 problems" in lines[0]
    assert len(lines) == 22
    assert lines[-1].strip() == "and 30 more"


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("m.jsonl", b'{"uri": "a.mp4", "question": "?"}\n{broken\n', "line 2: not valid JSON"),
        ("m.jsonl", b'{"uri": "a.mp4", "uri": "b.mp4", "question": "?"}\n', "the key 'uri' is given twice"),
        ("m.jsonl", b'{"uri": "\xff", "question": "?"}\n', "line 1: not valid UTF-8"),
        ("m.jsonl", b"[1]\n", "must be a JSON object"),
        ("m.jsonl", b"[" * 100_000 + b"\n", "not valid JSON"),
        ("m.csv", b"uri,question\na.mp4,what?,more\n", "row 1: has more or fewer cells"),
        ("m.csv", b"uri,uri\na,b\n", "the column 'uri' is given twice"),
        ("m.csv", b"uri,question,options\na.mp4,?,red;blue\n", "options must be JSON"),
        ("m.csv", b"uri,question\na.mp4,\xe9\n", "not valid UTF-8 at byte 19"),
        ("m.csv", b'uri,question\na.mp4,"open', "not valid CSV"),
        ("m.parquet", b"not parquet", "not a Parquet file"),
        ("m.xlsx", b"", "the suffix '.xlsx' isn't one of .parquet"),
    ],
)
def test_files_that_are_not_what_they_say(folder: Path, name: str, content: bytes, word: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(str(folder / name))
    assert word in str(caught.value)


def test_a_byte_order_mark_and_empty_lines_are_harmless(folder: Path) -> None:
    (folder / "m.jsonl").write_bytes(b'\xef\xbb\xbf{"uri": "a.mp4", "question": "?"}\r\n\n')
    (folder / "m.csv").write_bytes(b"\xef\xbb\xbfuri,question\r\na.mp4,?\r\n")
    assert read(str(folder / "m.jsonl")).tasks == read(str(folder / "m.csv")).tasks


def test_missing_files_are_listed_and_kept(folder: Path) -> None:
    manifest = read(jsonl(folder / "m.jsonl", [{"uri": u, "question": "?"} for u in ("a.mp4", "gone.mp4")]))
    assert [task.video_id for task in manifest.tasks] == ["a.mp4", "gone.mp4"]
    assert [(video_id, "no such file" in reason) for video_id, _, reason in manifest.missing] == [("gone.mp4", True)]
    assert [task.size_bytes for task in manifest.tasks] == [1, None]


def test_all_missing_is_an_error(folder: Path) -> None:
    with pytest.raises(ManifestError, match=r"none of the 2 videos can be read"):
        read(jsonl(folder / "m.jsonl", [{"uri": u, "question": "?"} for u in ("x.mp4", "y.mp4")]))


def test_only_and_limit(folder: Path) -> None:
    path = jsonl(folder / "m.jsonl", [{"video_id": f"cam-{n}", "uri": "a.mp4", "question": "?"} for n in range(5)])
    assert [t.video_id for t in read(path, limit=2).tasks] == ["cam-0", "cam-1"]
    assert [t.video_id for t in read(path, only=["cam-3", "cam-1"]).tasks] == ["cam-1", "cam-3"]
    assert read(path, only=["cam-3", "cam-1"], limit=1).total_videos == 5
    with pytest.raises(ManifestError, match=r"only=cam3: no such video_id among 5; did you mean cam-3"):
        read(path, only=["cam3"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.txt", "what?\r\nwhere?\n"),
        ("q.json", '["what?", {"question": "where?"}]'),
        ("q.jsonl", '{"question": "what?"}\n{"question": "where?"}\n'),
        ("q.csv", "question\nwhat?\nwhere?\n"),
    ],
)
def test_one_set_of_questions_for_a_folder(folder: Path, name: str, content: str) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "c.MOV").write_bytes(b"x")
    (folder / name).write_text(content, newline="")
    config = JobConfig(videos=str(folder), questions=str(folder / name), output="out")
    manifest = read_manifest(config, Storage())
    assert [task.video_id for task in manifest.tasks] == ["a.mp4", "b.mp4", "sub/c.MOV"]
    assert [question.question for question in manifest.tasks[2].questions] == ["what?", "where?"]
    assert manifest.notes == [f"1 of 4 files under {folder} have no video's or image's suffix and are left out"]


def test_a_folder_without_videos_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("what?")
    with pytest.raises(ManifestError, match="none of its 1 files is a video or an image"):
        read_manifest(JobConfig(videos=str(tmp_path), questions=str(tmp_path / "q.txt"), output="out"), Storage())


def test_a_name_that_is_not_unicode_is_told(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("what?")
    with open(bytes(tmp_path) + b"/\xff.mp4", "wb"):
        pass
    with pytest.raises(ManifestError, match="broken"):
        read_manifest(JobConfig(videos=str(tmp_path), questions=str(tmp_path / "q.txt"), output="out"), Storage())


def test_the_expected_letter(folder: Path) -> None:
    def letter(expected: str | None, *options: str) -> str | None:
        return ManifestQuestion(question_id="q", question="?", options=options, expected=expected).expected_choice

    assert letter("red", "blue", "red") == "B"
    assert letter("b", "blue", "red") == "B"
    assert letter("A", "B", "A") == "B"
    assert letter(None, "x", "y") is None
    assert letter("free text") is None


def test_doubled_options_are_noted(folder: Path) -> None:
    manifest = read(jsonl(folder / "m.jsonl", [q(options=["a", "b", "a"])]))
    assert manifest.notes == ["1 questions have the same option twice"]


def test_a_hundred_thousand_rows_are_checked_in_seconds(folder: Path) -> None:
    row = {"uri": "a.mp4", "questions": [{"question": "what?", "options": ["a", "b"], "expected": "a"}]}
    path = jsonl(folder / "m.jsonl", [{"video_id": f"v{n}"} | row for n in range(100_000)])
    began = time.process_time()
    assert len(read(path).tasks) == 100_000
    assert time.process_time() - began < 30


@pytest.mark.skipif(not MLVU.is_dir(), reason="needs ../shared/data/annotations/mlvu_dev")
def test_mlvu_converts_and_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "mlvu.jsonl"
    assert main(["mlvu", "--annotations", str(MLVU), "--videos", "s3://b/mlvu", "--output", str(output)]) == 0
    shown = capsys.readouterr()
    assert "2172 questions written, 3 left out, 2175 read" in shown.out
    assert "2_needle.json[34]: the answer 'Catching a flying drone quadcopter' is not among candidates" in shown.err
    assert "7_topic_reasoning.json[26]: there is nothing to choose between" in shown.err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    source = {
        f"{file.stem}-{index}": entry
        for file in MLVU.glob("*.json")
        for index, entry in enumerate(json.loads(file.read_text(encoding="utf-8")))
    }
    assert len(source) == 2175
    for row in rows:
        entry = source[row["question_id"]]
        assert (row["question"], row["options"], row["expected"]) == (entry["question"], entry["candidates"], entry["answer"])
        assert row["expected"] in row["options"]
    tasks = tasks_from_rows([Row(str(n), row) for n, row in enumerate(rows)])
    assert sum(len(task.questions) for task in tasks) == 2172
    assert isinstance(tasks[0], VideoTask)
    assert tasks[0].uri == "s3://b/mlvu/1_plotQA/movie101_66.mp4"


def test_mlvu_reports_broken_annotations_by_file_and_place(tmp_path: Path) -> None:
    good = {"video": "a.mp4", "duration": 1, "question": "?", "candidates": ["x", "y"], "answer": "x", "question_type": "t"}
    entries = [good, {"video": "a.mp4"}, good | {"candidates": "x"}, good | {"answer": "z"}, 5]
    (tmp_path / "1_t.json").write_text(json.dumps(entries))
    written, left_out = convert(BENCHMARKS["mlvu"], tmp_path, "/v", str(tmp_path / "m.jsonl"))
    assert len(written) == 1
    assert [problem.where for problem in left_out] == ["1_t.json[1]", "1_t.json[2]", "1_t.json[3]", "1_t.json[4]"]


def test_mlvu_mistakes_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "1_plotQA.json").write_text("[]")
    arguments = ["mlvu", "--annotations", str(tmp_path), "--videos", "v", "--output", str(tmp_path / "m.jsonl"), "--tasks", "nedle"]
    assert main(arguments) == 2
    assert "tasks=nedle: not among plotQA" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "semi.csv",
            "video_id;uri;question\na;a.mp4;what?\n",
            r"no column 'uri'; its columns are 'video_id;uri;question'; cells are separated",
        ),
        ("names.csv", "name,question\na,what?\n", r"no column 'uri'; its columns are 'name', 'question'$"),
        ("bare.jsonl", "What is shown?\n", r'each line is an object such as \{"question": "What is shown\?"\}'),
        (
            "named.jsonl",
            '{"uri": "a.mp4", "questions": [{"question": "what?", "answer": "y"}]}',
            "answer is not a field; did you mean expected",
        ),
        (
            "odd.jsonl",
            '{"uri": "a.mp4", "questions": [{"question": "what?", "camera": 7}]}',
            "camera is not a field; the fields are question_id",
        ),
    ],
)
def test_what_a_stranger_writes_is_met_with_what_is_meant(tmp_path: Path, name: str, content: str, told: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=told):
        read_manifest(JobConfig(manifest=str(tmp_path / name), output="out"), Storage())


def test_a_name_longer_than_the_file_system_takes(tmp_path: Path) -> None:
    long = str(tmp_path / ("x" * 300))
    with pytest.raises(StorageError, match="the name is too long"):
        read(long + ".jsonl")
    (tmp_path / "q.txt").write_text("What is shown?")
    with pytest.raises(ManifestError, match="no such folder; check the spelling"):
        read_manifest(JobConfig(videos=long, questions=str(tmp_path / "q.txt"), output="out"), Storage())


def test_a_manifest_given_as_questions_and_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"uri": "a.mp4", "questions": ["what?"]}')
    (tmp_path / "q.txt").write_text("What is shown?")
    (tmp_path / "one.mp4").write_bytes(b"x")

    def job(videos: str, questions: str) -> JobConfig:
        return JobConfig(videos=str(tmp_path / videos), questions=str(tmp_path / questions), output="out")

    with pytest.raises(ManifestError, match=r"is a manifest, whose rows name videos; give it as --manifest"):
        read_manifest(job(".", "m.jsonl"), Storage())
    with pytest.raises(ManifestError, match=r"videos=.*/vids: no such folder; check the spelling"):
        read_manifest(job("vids", "q.txt"), Storage())
    (task,) = read_manifest(job("one.mp4", "q.txt"), Storage()).tasks
    assert (task.video_id, task.uri, task.size_bytes) == ("one.mp4", str(tmp_path / "one.mp4"), 1)
