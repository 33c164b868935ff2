"""LongVideoBench's validation set, from frames alone (no subtitles between them).

Sources: https://github.com/longvideobench/LongVideoBench (longvideobench_dataset.py: format and prompt), the hub's
longvideobench/LongVideoBench (`lvb_val.json`, `videos/`), LMMs-Eval tasks/longvideobench (rule).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jobs.benchmarks.base import Benchmark, Problem, Sample, annotation_files, chosen, entries, lettered, misfit, texts
from jobs.benchmarks.judging import by_first_letter
from pipeline.storage import join_uri

LENGTHS = {15: "8 to 15 s", 60: "15 to 60 s", 600: "3 to 10 min", 3600: "15 to 60 min"}


def _load(annotations: Path, videos: str, tasks: Sequence[str]) -> Iterator[Sample | Problem]:
    files = annotation_files(annotations, "lvb_val.json", "*.json")
    return chosen((_sample(where, entry, videos) for file in files for where, entry in entries(file)), tasks)


def _sample(where: str, entry: Any, videos: str) -> Sample | Problem:
    problem = misfit(entry, id=str, video_path=str, question=str, candidates=list, question_category=str, duration_group=int)
    if problem:
        return Problem(where, problem)
    options, right = entry["candidates"], entry.get("correct_choice")
    if not texts(options):
        return Problem(where, "candidates must be a list of texts")
    if not isinstance(right, int) or isinstance(right, bool) or not 0 <= right < len(options):
        return Problem(where, f"correct_choice={right!r:.80} must be the number of a candidate, from 0 (the test set publishes none)")
    lines = [f"Question: {entry['question']}", *lettered(options, "{}. ")]
    group = entry["duration_group"]
    return Sample(
        where=where,
        video_id=entry["video_path"],
        question_id=entry["id"],
        uri=join_uri(videos, entry["video_path"]),
        question=entry["question"],
        options=tuple(options),
        expected=options[right],
        prompt="\n".join([*lines, "Answer with the option's letter from the given choices directly."]),
        task=entry["question_category"],
        length=LENGTHS.get(group, f"up to {group} s"),
        columns={"question_category": entry["question_category"], "duration_group": group, "duration_s": entry.get("duration")},
    )


VALIDATION = Benchmark(
    name="longvideobench",
    title="LongVideoBench (validation)",
    load=_load,
    judge=by_first_letter,
    annotations="lvb_val.json, or a folder with it",
    videos="folder or prefix with the videos",
    source="github.com/longvideobench/LongVideoBench; LMMs-Eval tasks/longvideobench",
)
