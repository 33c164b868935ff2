"""Video-MME without subtitles, all of it or its long videos.

Sources: https://github.com/MME-Benchmarks/Video-MME (README: prompt; evaluation/output_test_template.json: JSON form; eval_your_results.py:
rule), the hub's lmms-lab/Video-MME (`videomme/test-00000-of-00001.parquet`, a row a question).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jobs.benchmarks.base import (
    LETTERS,
    Benchmark,
    Problem,
    Sample,
    annotation_files,
    chosen,
    entries,
    lettered,
    misfit,
    texts,
    without_letter,
)
from jobs.benchmarks.judging import by_first_letter
from pipeline.storage import join_uri, local_path, split_s3

LENGTHS = {"short": "short (under 2 min)", "medium": "medium (4 to 15 min)", "long": "long (30 to 60 min)"}
INSTRUCTION = (
    "Select the best answer to the following multiple-choice question based on the video. Respond with only the letter (A, B, C, or D) "
    "of the correct option."
)
_SUFFIXES = (".mp4", ".MP4", ".mkv")


def _load(annotations: Path, videos: str, tasks: Sequence[str], only: str | None = None) -> Iterator[Sample | Problem]:
    """Rows of a question each (Parquet, JSON, JSON Lines), or of a video with its `questions` (the JSON of the evaluation scripts)."""
    files = annotation_files(annotations, "*.parquet", "videomme/*.parquet", "*.json", "*.jsonl")
    read = (sample for file in files for where, entry in entries(file) for sample in _samples(where, entry, videos))
    for sample in chosen(read, tasks):
        if not only or isinstance(sample, Problem) or sample.columns["duration"] == only:
            yield sample


def _samples(where: str, entry: Any, videos: str) -> Iterator[Sample | Problem]:
    if isinstance(entry, Problem):
        yield entry
    elif isinstance(entry, dict) and isinstance(entry.get("questions"), list):
        about = {name: value for name, value in entry.items() if name != "questions"}
        about = {"duration": about.get("duration_category"), "domain": about.get("video_category")} | about
        for number, question in enumerate(entry["questions"]):
            place = f"{where}.questions[{number}]"
            yield _sample(place, about | question, videos) if isinstance(question, dict) else Problem(place, "must be an object")
    else:
        yield _sample(where, entry, videos)


def _sample(where: str, entry: Any, videos: str) -> Sample | Problem:
    problem = misfit(entry, duration=str, question_id=str, task_type=str, question=str, answer=str)
    if problem:
        return Problem(where, problem)
    options = entry.get("options", entry.get("choices"))
    if not texts(options):
        return Problem(where, "options must be a list of texts")
    # The evaluation scripts' JSON has no videoID; its url ends with it.
    video = entry.get("videoID") or str(entry.get("url") or "").rpartition("v=")[2] or entry.get("video_id")
    if not isinstance(video, str) or not video:
        return Problem(where, "videoID is missing")
    if entry["duration"] not in LENGTHS:
        return Problem(where, f"duration={entry['duration']!r:.80} must be one of {', '.join(LENGTHS)}")
    plain = tuple(without_letter(option, letter) for option, letter in zip(options, LETTERS, strict=False))
    letter = entry["answer"].strip().upper()
    if len(letter) != 1 or letter not in LETTERS[: len(plain)]:
        return Problem(where, f"the answer {entry['answer']!r:.80} is not one of the letters of options={options}")
    columns = {name: entry.get(name) for name in ("duration", "domain", "sub_category", "task_type")}
    return Sample(
        where=where,
        video_id=video,
        question_id=entry["question_id"],
        uri=_found(videos, video),
        question=entry["question"],
        options=plain,
        expected=plain[LETTERS.index(letter)],
        prompt="\n".join([INSTRUCTION, entry["question"], *lettered(plain, "{}. "), "The best answer is:"]),
        task=entry["task_type"],
        length=LENGTHS[entry["duration"]],
        columns=columns,
    )


def _found(videos: str, video: str) -> str:
    """The video's file: the hub's archives hold .mp4, .MP4 and .mkv; where none is there to see, the first."""
    names = [join_uri(videos, video + suffix) for suffix in _SUFFIXES]
    return names[0] if split_s3(videos) else next((name for name in names if local_path(name).exists()), names[0])


ALL = Benchmark(
    name="videomme",
    title="Video-MME",
    load=_load,
    judge=by_first_letter,
    annotations="the hub's .parquet, the scripts' .json, or a folder with it",
    videos="folder or prefix with the videos, named by videoID",
    source="github.com/MME-Benchmarks/Video-MME; hub lmms-lab/Video-MME",
    skips_unparsed=True,
)
LONG = Benchmark(
    name="videomme-long",
    title="Video-MME (Long)",
    load=partial(_load, only="long"),
    judge=by_first_letter,
    annotations=ALL.annotations,
    videos=ALL.videos,
    source=ALL.source,
    skips_unparsed=True,
    paper="Video-MME-Long",
)
