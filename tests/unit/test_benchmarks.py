"""Benchmarks as published: their files, prompts and rules, on rows of the real form; broken rows are named, never asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from engine.errors import InputError
from engine.geometry import FrameGeometry
from engine.types import TextPart, VideoBlock
from jobs.benchmarks import BENCHMARKS, Sample
from jobs.benchmarks.base import without_letter
from jobs.benchmarks.judging import (
    by_best_option,
    by_first_letter,
    by_needle,
    by_standing_letter,
    by_word,
    first_letter,
    plain_words,
    unpunctuated,
    wilson,
)
from jobs.evaluation.paper import figure, same_model
from jobs.manifest import main as manifest_main
from pipeline.video.config import DecodeConfig
from pipeline.video.prompt import PromptSource, prompt_document
from pipeline.video.source import open_media

MLVU = Path(__file__).parents[3] / "shared" / "data" / "annotations" / "mlvu_dev"


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in value) if path.suffix == ".jsonl" else json.dumps(value)
    )
    path.write_text(text, encoding="utf-8")
    return path


def read(name: str, annotations: Path, videos: str = "/v", **more: Any) -> tuple[list[Sample], list[str]]:
    samples, problems = BENCHMARKS[name].read(annotations, videos, **more)
    return samples, [str(problem) for problem in problems]


def choice(options: tuple[str, ...] = ("red", "blue", "white", "grey"), right: int = 1) -> Sample:
    return Sample("row", "v", "q", "/v/v.mp4", "?", options, options[right], "?")


def free(expected: str) -> Sample:
    return Sample("row", "v", "q", "", "?", (), expected, "?")


# MLVU


@pytest.mark.skipif(not MLVU.is_dir(), reason="MLVU's annotations are not beside the checkout (../shared/data)")
def test_mlvu_dev_as_published() -> None:
    samples, problems = read("mlvu", MLVU, "s3://b/mlvu")
    assert (len(samples), len(problems)) == (2172, 3)
    assert [p.split(":")[0] for p in problems] == ["2_needle.json[34]", "2_needle.json[338]", "7_topic_reasoning.json[26]"]
    first = samples[0]
    assert (first.video_id, first.uri, first.task) == ("1_plotQA/movie101_66.mp4", "s3://b/mlvu/1_plotQA/movie101_66.mp4", "plotQA")
    assert first.prompt == (
        "Question: What color is the main male character in the video?\nOptions:\n(A) Yellow\n(B) Red\n(C) Green\n(D) Blue\n"
        "Only give the best option.\nBest option: ("
    )
    assert (first.letter, first.length) == ("A", "up to 5 min")
    assert {sample.task for sample in samples} == {"plotQA", "findNeedle", "ego", "count", "order", "anomaly_reco", "topic_reasoning"}
    needles, _ = read("mlvu", MLVU, tasks=("needle",))
    assert {sample.task for sample in needles} == {"findNeedle"}


def test_mlvus_generation_tasks_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "1_plotQA.json", [{k: v for k, v in TEST_ROW.items() if k != "question_id"}])
    write(tmp_path / "9_summary.json", [{"video": "x.mp4", "question": "Summarise.", "answer": "It is long."}])
    samples, problems = read("mlvu", tmp_path)
    assert [sample.question_id for sample in samples] == ["1_plotQA-0"] and not problems


TEST_ROW = {
    "video": "AR_0.mp4",
    "duration": 480.5,
    "question": "Is there any abnormality?",
    "candidates": ["Arson", "Robbery", "Normal", "Fighting", "Burglary", "Assault"],
    "answer": "Burglary",
    "question_type": "anomaly_reco",
    "question_id": "AR_0",
}


def test_mlvu_test_as_published(tmp_path: Path) -> None:
    rows = [TEST_ROW, TEST_ROW | {"question_id": "AR_1", "answer": "Theft"}, {"video": "x.mp4"}, TEST_ROW]
    samples, problems = read("mlvu-test", write(tmp_path / "test-ground-truth" / "test_mcq_gt.json", rows).parent.parent)
    (sample,) = samples
    assert (sample.question_id, sample.uri, sample.letter, sample.length) == ("AR_0", "/v/AR_0.mp4", "E", "5 to 15 min")
    assert sample.prompt.endswith("(E) Burglary\n(F) Assault\nOnly give the best option.\nBest option: (")
    assert "[1]: the answer 'Theft' is not among candidates" in problems[0] and "question_id is missing" in problems[1]
    assert "[3]: question_id 'AR_0' was already given in test_mcq_gt.json[0]" in problems[2]
    with pytest.raises(InputError, match="tasks=nedle: not among anomaly_reco"):
        read("mlvu-test", tmp_path / "test-ground-truth", tasks=("nedle",))


# Video-MME

HUB_ROW = {
    "video_id": "001",
    "duration": "short",
    "domain": "Knowledge",
    "sub_category": "Humanity & History",
    "url": "https://www.youtube.com/watch?v=fFjv93ACGo8",
    "videoID": "fFjv93ACGo8",
    "question_id": "001-1",
    "task_type": "Counting Problem",
    "question": "Which kind of decoration has the largest number?",
    "options": ["A. Apples.", "B. Candles.", "C. Berries.", "D. The three kinds are of the same number."],
    "answer": "C",
}
LONG_ROW = HUB_ROW | {"videoID": "lllllllllll", "video_id": "601", "duration": "long", "question_id": "601-1", "task_type": "OCR Problems"}


def video_mme(form: str, folder: Path) -> Path:
    broken = HUB_ROW | {"question_id": "001-2", "answer": "E"}
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist([HUB_ROW, LONG_ROW, broken]), folder / "test-00000-of-00001.parquet")
        return folder
    if form == "jsonl":
        return write(folder / "videomme.jsonl", [HUB_ROW, LONG_ROW, broken])
    of_question = ("question_id", "task_type", "question", "options", "answer")
    grouped: dict[str, dict[str, Any]] = {}
    for row in (HUB_ROW, LONG_ROW, broken):
        about = {name: row[name] for name in ("video_id", "duration", "domain", "sub_category", "url", "videoID")}
        grouped.setdefault(str(row["video_id"]), about | {"questions": []})["questions"].append({name: row[name] for name in of_question})
    return write(folder / "output_test_template.json", list(grouped.values()))


@pytest.mark.parametrize("form", ["parquet", "jsonl", "json"])
def test_video_mme_as_published(tmp_path: Path, form: str) -> None:
    annotations = video_mme(form, tmp_path)
    samples, problems = read("videomme", annotations)
    assert [(s.video_id, s.question_id, s.letter, s.length) for s in samples] == [
        ("fFjv93ACGo8", "001-1", "C", "short (under 2 min)"),
        ("lllllllllll", "601-1", "C", "long (30 to 60 min)"),
    ]
    assert samples[0].prompt == (
        "Select the best answer to the following multiple-choice question based on the video. Respond with only the letter (A, B, C, or D) "
        "of the correct option.\nWhich kind of decoration has the largest number?\nA. Apples.\nB. Candles.\nC. Berries.\n"
        "D. The three kinds are of the same number.\nThe best answer is:"
    )
    assert samples[0].options[2] == "Berries." and samples[0].columns["domain"] == "Knowledge"
    assert len(problems) == 1 and "the answer 'E' is not one of the letters" in problems[0]
    only_long, _ = read("videomme-long", annotations)
    assert [s.question_id for s in only_long] == ["601-1"]
    counting, _ = read("videomme", annotations, tasks=("Counting Problem",))
    assert [s.question_id for s in counting] == ["001-1"]


def test_video_mme_finds_the_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "fFjv93ACGo8.mkv").write_bytes(b"x")
    samples, _ = read("videomme", write(tmp_path / "a.jsonl", [HUB_ROW, LONG_ROW]), str(tmp_path))
    assert [Path(s.uri).name for s in samples] == ["fFjv93ACGo8.mkv", "lllllllllll.mp4"]


# LongVideoBench

LVB_ROW = {
    "video_id": "86CxyhFV9MI",
    "question": "In the video, which subtitles appear at the same time as the man?",
    "question_wo_referring_query": "Which subtitles?",
    "candidates": ["promisc", "the", "a", "b", "c"],
    "correct_choice": 4,
    "position": [0, 30],
    "topic_category": "NP-News-Programs",
    "question_category": "TOS",
    "level": "L2-Relation",
    "id": "86CxyhFV9MI_0",
    "video_path": "86CxyhFV9MI.mp4",
    "subtitle_path": "86CxyhFV9MI_en.json",
    "duration_group": 600,
    "starting_timestamp_for_subtitles": 0,
    "duration": 190.16,
    "view_count": 259852,
}


def test_long_video_bench_as_published(tmp_path: Path) -> None:
    without_answer = {k: v for k, v in LVB_ROW.items() if k != "correct_choice"} | {"id": "t_0"}
    samples, problems = read(
        "longvideobench", write(tmp_path / "lvb_val.json", [LVB_ROW, without_answer, LVB_ROW | {"id": "u", "correct_choice": 5}])
    )
    (sample,) = samples
    assert sample.prompt == (
        "Question: In the video, which subtitles appear at the same time as the man?\nA. promisc\nB. the\nC. a\nD. b\nE. c\n"
        "Answer with the option's letter from the given choices directly."
    )
    assert (sample.letter, sample.task, sample.length, sample.uri) == ("E", "TOS", "3 to 10 min", "/v/86CxyhFV9MI.mp4")
    assert all("correct_choice" in problem for problem in problems) and len(problems) == 2


# V* Bench

VSTAR_ROW = {
    "image": "direct_attributes/sa_4690.jpg",
    "text": "What is the material of the glove?\n(A) rubber\n(B) cotton\n(C) kevlar\n(D) leather\n"
    "Answer with the option's letter from the given choices directly.",
    "category": "direct_attributes",
    "label": "A",
    "question_id": 0,
}


def test_vstar_as_published(tmp_path: Path) -> None:
    two = VSTAR_ROW | {
        "image": "relative_position/sa_1.jpg",
        "text": "Is the cup left of the dog?\n(A) left\n(B) right\nAnswer with the option's letter from the given choices directly.",
        "category": "relative_position",
        "label": "B",
        "question_id": 1,
    }
    rows = [VSTAR_ROW, two, '{"image": ', VSTAR_ROW | {"question_id": 9, "text": "What?"}, VSTAR_ROW | {"question_id": 8, "label": "E"}]
    samples, problems = read("vstar", write(tmp_path / "test_questions.jsonl", rows))
    assert [(s.letter, s.options, s.task) for s in samples] == [
        ("A", ("rubber", "cotton", "kevlar", "leather"), "direct_attributes"),
        ("B", ("left", "right"), "relative_position"),
    ]
    assert samples[0].prompt == VSTAR_ROW["text"] and samples[0].question == "What is the material of the glove?"
    assert [p.split(":")[1].split(" ")[0] for p in problems] == ["3", "4", "5"]
    assert "not valid JSON" in problems[0] and "must list its options" in problems[1] and "label='E'" in problems[2]


# MileBench

NEEDLE = {
    "sample_id": 0,
    "task_instruction_id": 0,
    "task_instance": {"context": "{image#1}Some text.{image#2}\nWhat is the secret word?", "images_path": ["a.png", "b.png"]},
    "response": "PR7IF",
    "image_quantity_level": "Few",
}


def milebench(folder: Path, data: list[Any]) -> Path:
    value = {"meta_data": {"dataset": "ImageNeedleInAHaystack", "task_instruction": ["Find the needle."], "question_type": "open-ended"}}
    return write(folder / "ImageNeedleInAHaystack.json", value | {"data": data})


def test_milebench_needle_as_published(tmp_path: Path) -> None:
    beyond = NEEDLE | {"sample_id": 1, "task_instance": {"context": "{image#3} what?", "images_path": ["a.png"]}}
    blind = NEEDLE | {"sample_id": 2, "task_instance": {"context": "what?", "images_path": ["a.png"]}}
    samples, problems = read(
        "milebench-needle", milebench(tmp_path, [NEEDLE, beyond, blind, NEEDLE | {"sample_id": 3, "task_instruction_id": 4}])
    )
    (sample,) = samples
    assert [part if isinstance(part, str) else part.uri for part in sample.parts] == [
        "Find the needle.\n",
        "/v/a.png",
        "Some text.",
        "/v/b.png",
    ]
    assert (sample.prompt, sample.expected, sample.length) == ("\nWhat is the secret word?", "PR7IF", "Few")
    reasons = ("none of its 1 images", "shows no image", "names no instruction")
    assert all(reason in problem for reason, problem in zip(reasons, problems, strict=True))


# MM-NIAH


def niah(**fields: Any) -> dict[str, Any]:
    meta = {"placed_depth": [0.2], "context_length": 3500, "num_images": 1, "needles": ["x"], "choices": None, "choices_image_path": None}
    row = {
        "id": 0,
        "images_list": ["o/1.jpg"],
        "context": "Words <image> more words.",
        "question": "What did the cat hold?",
        "answer": "oak",
    }
    return row | fields | {"meta": meta | fields.get("meta", {})}


def test_mm_niah_as_published(tmp_path: Path) -> None:
    folder = tmp_path / "annotations"
    write(folder / "retrieval-text.jsonl", [niah(), niah(id=1, images_list=[])])
    write(folder / "counting-text.jsonl", [niah(answer=[2, 1])])
    chosen = niah(answer=1, question="Which is in the text?", meta={"choices": ["a cat", "a dog"]})
    write(folder / "retrieval-image.jsonl", [chosen, chosen | {"id": 1, "answer": 2}])
    write(folder / "reasoning-image.jsonl", [niah(answer=0, meta={"choices_image_path": ["c/1.jpg", "c/2.jpg"], "context_length": 900})])
    samples, problems = read("mmniah", tmp_path)
    by_task = {sample.task: sample for sample in samples}
    text = by_task["retrieval-text"]
    assert text.prompt == " more words.\nWhat did the cat hold?\nAnswer the question using a single word or phrase."
    assert [p if isinstance(p, str) else p.uri for p in text.parts] == ["Words ", "/v/o/1.jpg"] and text.length == "from 2k tokens"
    assert json.loads(by_task["counting-text"].expected) == [2, 1]
    assert by_task["retrieval-image"].prompt.endswith(
        "\nA. a cat\nB. a dog\nAnswer with the option's letter from the given choices directly."
    )
    pictured = by_task["reasoning-image"]
    assert [p if isinstance(p, str) else p.uri for p in pictured.parts] == [
        "Words ",
        "/v/o/1.jpg",
        " more words.\nWhat did the cat hold?\nA. ",
        "/v/c/1.jpg",
        "\nB. ",
        "/v/c/2.jpg",
    ]
    assert (pictured.prompt, pictured.letter) == ("\nAnswer with the option's letter from the given choices directly.", "A")
    assert pictured.length == "under 1k tokens" and "options" not in pictured.manifest_row("letters")
    assert len(problems) == 2 and "images_list holds 0" in problems[1] and "is not the number of one of 2 choices" in problems[0]


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
@pytest.mark.parametrize(
    "text", ["", "[", "[5, null, [], {}]", '{"data": 3}', "[" * 100_000], ids=["empty", "cut", "odd", "object", "deep"]
)
def test_files_of_another_form_are_refused_in_words(tmp_path: Path, name: str, text: str) -> None:
    for file in (
        "test_mcq_gt.json",
        "lvb_val.json",
        "test_questions.jsonl",
        "ImageNeedleInAHaystack.json",
        "x.jsonl",
        "x.json",
        "x.parquet",
    ):
        (tmp_path / file).write_text(text)
    with pytest.raises(InputError) as raised:
        read(name, tmp_path)
    assert "annotations" in str(raised.value) or str(tmp_path) in str(raised.value)
    with pytest.raises(InputError, match="holds no"):
        read(name, tmp_path / "absent")


# Manifests


@pytest.mark.parametrize("form", ["letters", "published"])
def test_a_manifest_of_any_benchmark(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "m.jsonl"
    arguments = ["--annotations", str(write(tmp_path / "test_questions.jsonl", [VSTAR_ROW])), "--videos", "/v", "--form", form]
    assert manifest_main(["vstar", *arguments, "--output", str(output)]) == 0
    (row,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert row["uri"] == "/v/direct_attributes/sa_4690.jpg" and row["category"] == "direct_attributes"
    if form == "letters":
        assert (row["question"], row["options"][0], row["expected"]) == ("What is the material of the glove?", "rubber", "rubber")
    else:
        assert "options" not in row and (row["question"], row["expected"]) == (VSTAR_ROW["text"], "A")
    assert "1 questions written, 0 left out" in capsys.readouterr().out


def test_interleaved_prompts_are_written_once_beside_the_manifest(tmp_path: Path) -> None:
    annotations = milebench(tmp_path / "in", [NEEDLE])
    arguments = [
        "milebench-needle",
        "--annotations",
        str(annotations),
        "--videos",
        str(tmp_path),
        "--output",
        str(tmp_path / "out" / "m.jsonl"),
    ]
    assert manifest_main(arguments) == 0
    (prompt,) = (tmp_path / "out" / "prompts").iterdir()
    before = prompt.stat().st_mtime_ns
    assert manifest_main(arguments) == 0 and prompt.stat().st_mtime_ns == before
    assert json.loads(prompt.read_text())["parts"][1] == {"image": str(tmp_path / "a.png")}


# Rules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("B", "B"),
        ("The best answer is C.", "C"),
        ("b", ""),
        ("", ""),
        ("A cat", "A"),
        ("nothing at all", ""),
        ("Answer: D", "A"),
        ("E", ""),
    ],
)
def test_the_first_letter(text: str, said: str) -> None:
    assert first_letter(text) == said  # "Answer:" isn't among the phrases that the published rule takes away


@pytest.mark.parametrize(
    ("text", "value", "parsed"),
    [
        ("B", 1, True),
        ("B) blue", 1, True),
        ("(B) blue", 1, True),
        ("B. blue", 1, True),
        ("C)", 0, True),
        ("blue", 0, False),
        ("", 0, False),
    ],
)
def test_mlvus_best_option(text: str, value: float, parsed: bool) -> None:
    score = by_best_option(choice(), text)
    assert (score.value, score.parsed) == (value, parsed)


def test_more_than_four_options_have_letters_too() -> None:
    six = choice(tuple("uvwxyz"), right=5)
    assert by_first_letter(six, "F").value == 1 and by_best_option(six, "(F)").value == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [("B", 1), ("(b) blue", 1), ("the answer is B", 1), ("It says blue. (B)", 1), ("A", 0), ("the colour seems blue", 0), ("", 0)],
)
def test_vstars_standing_letter(text: str, value: float) -> None:
    assert by_standing_letter(choice(), text).value == value


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The word is PR7IF.", "The word is PR7IF"),
        ("it's 3.5, see", "it's 3.5 see"),
        ("a/b", "a b"),
        ("1,000/2", "10002"),
        ("(x) y", " x y"),
        ("one\ntwo\tthree", "one two three"),
    ],
)
def test_punctuation_goes_as_in_the_vqa_evaluation(text: str, plain: str) -> None:
    assert unpunctuated(text) == plain


def test_milebenchs_needle_is_a_whole_word() -> None:
    assert by_word(free("PR7IF"), "The secret word is pr7if.").value == 1
    assert by_word(free("PR7IF"), "PR7IFX").value == 0
    assert not by_word(free("PR7IF"), " ").parsed


@pytest.mark.parametrize(
    ("sample", "text", "value"),
    [
        (free("oak"), "The oak.", 1),
        (free("two dogs"), "2 dogs", 1),
        (free("don't"), "I dont know", 1),
        (free("oak"), "oaks", 0),
        (free("[2, 1]"), "[2, 1]", 1),
        (free("[2, 1]"), "```json\n[2, 3]```", 0.5),
        (free("[2, 1]"), '{"a": [2]}', 0.5),
        (free("[2, 1]"), "two and one", 0),
        (choice(), "B", 1),
        (choice(), "The answer is **b**.", 1),
        (choice(), "1", 1),
        (choice(), "So the camera is moving right.", 1),
        (choice(), "blue", 0),
        (choice(), "None", 0),
    ],
)
def test_mm_niahs_rules(sample: Sample, text: str, value: float) -> None:
    assert by_needle(sample, text).value == value


def test_words_of_mm_niah() -> None:
    assert plain_words("The Twenty-one cant's, a couldntve") == "20 1 cant's couldn't've"


@given(st.text(max_size=80), st.sampled_from(["oak", "[1, 2]"]))
def test_no_answer_breaks_a_rule(text: str, expected: str) -> None:
    for judge in (by_first_letter, by_best_option, by_standing_letter, by_needle):
        assert 0 <= judge(choice(), text).value <= 1
    for judge in (by_word, by_needle):
        assert 0 <= judge(free(expected), text).value <= 1


def test_wilsons_interval() -> None:
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(251, 502) == pytest.approx((0.4564, 0.5436), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 3000), st.floats(0, 1))
def test_an_interval_holds_its_share(total: int, share: float) -> None:
    low, high = wilson(share * total, total)
    assert 0 <= low <= share + 1e-9 and share - 1e-9 <= high <= 1


def test_options_lose_the_letter_they_were_stored_with() -> None:
    assert [without_letter(text, "A") for text in ("A. Apples.", "(A) x", "A) y", "Apples", "B. no")] == [
        "Apples.",
        "x",
        "y",
        "Apples",
        "B. no",
    ]


def test_the_papers_figures_are_found_by_the_models_name() -> None:
    assert figure("Qwen/Qwen2.5-VL-7B-Instruct", "keydiff", 1024, "MLVU") == 43.43
    assert figure("/models/InternVL3_5-8B-HF", "full", None, "V*") == 84.35
    assert figure("bundled", "full", None, "V*") is None and figure("Qwen/Qwen2.5-VL-3B-Instruct", "full", None, "V*") is None
    assert same_model("OpenGVLab/InternVL3_5-14B-HF", "InternVL3.5-14B") and not same_model("InternVL3_5-14B", "InternVL3.5-8B")


# Interleaved prompts

GEOMETRY = FrameGeometry(frames_per_group=1, unit_px=4, fixed_px=16, max_tiles=4)


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    for name, size in (("a.png", (16, 16)), ("b.png", (32, 16)), ("c.png", (16, 16))):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)).save(tmp_path / name)
    parts = [
        {"text": "one"},
        {"image": "a.png"},
        {"image": "b.png"},
        {"text": "two"},
        {"text": "three"},
        {"image": str(tmp_path / "c.png")},
    ]
    (tmp_path / "p.prompt").write_bytes(prompt_document(parts))
    return tmp_path / "p.prompt"


def shape(items: list[Any]) -> list[Any]:
    return [item.text if isinstance(item, TextPart) else (item.media, item.first_group, item.groups) for item in items]


def test_an_interleaved_prompt_comes_in_order(prompt: Path) -> None:
    source = open_media(prompt, GEOMETRY, DecodeConfig())
    assert isinstance(source, PromptSource)
    assert source.predicted_groups() == 5 and source.predicted_tokens() == 5 * 16
    assert shape(list(source.blocks(32))) == ["one", (0, 0, 1), (1, 0, 2), (1, 2, 1), "two", "three", (2, 0, 1)]


@pytest.mark.parametrize("first", range(6))
def test_an_interleaved_prompt_goes_on_behind_any_group(prompt: Path, first: int) -> None:
    source = PromptSource(prompt, GEOMETRY, DecodeConfig())
    whole = list(source.blocks(16))
    groups = 0
    rest: list[Any] = []
    for item in whole:
        if isinstance(item, VideoBlock):
            groups += item.groups
        if groups > first or (isinstance(item, TextPart) and groups >= first):
            rest.append(item)
    assert shape(list(source.blocks(16, first_group=first))) == shape(rest)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"{", "isn't an interleaved prompt"),
        (b"[]", "isn't an interleaved prompt"),
        (b'{"parts": [{"text": "only"}]}', "shows no image"),
        (b'{"parts": [{"image": "a.png", "text": "x"}]}', "neither a text nor an image"),
        (b'{"parts": [{"image": "s3://b/a.png"}]}', "no local file"),
        (b'{"parts": [{"text": "\\ud800"}, {"image": "a.png"}]}', "isn't an interleaved prompt"),
        (b'{"parts": [{"image": "absent.png"}]}', "absent.png"),
        (b"[" * 100_000, "isn't an interleaved prompt"),
    ],
)
def test_broken_prompts_are_refused_in_words(prompt: Path, document: bytes, reason: str) -> None:
    prompt.write_bytes(document)
    with pytest.raises(InputError) as raised:
        open_media(prompt, GEOMETRY, DecodeConfig())
    assert reason in str(raised.value)
