"""V* Bench: small things in large images.

Sources: https://github.com/penghao-wu/vstar, the hub's craigwu/vstar_bench (`test_questions.jsonl`, whose texts hold options and
instruction; `direct_attributes/`, `relative_position/`), LMMs-Eval tasks/vstar_bench (rule).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jobs.benchmarks.base import LETTERS, Benchmark, Problem, Sample, annotation_files, chosen, entries, misfit
from jobs.benchmarks.judging import by_standing_letter
from pipeline.storage import join_uri

_OPTION = re.compile(r"^\(([A-Z])\)[ \t]*(.+?)[ \t]*$", re.MULTILINE)


def _load(annotations: Path, videos: str, tasks: Sequence[str]) -> Iterator[Sample | Problem]:
    files = annotation_files(annotations, "test_questions.jsonl", "*.jsonl")
    return chosen((_sample(where, entry, videos) for file in files for where, entry in entries(file)), tasks)


def _sample(where: str, entry: Any, videos: str) -> Sample | Problem:
    problem = misfit(entry, image=str, text=str, category=str, label=str, question_id=(int, str))
    if problem:
        return Problem(where, problem)
    found = _OPTION.findall(entry["text"])
    options = tuple(text for _, text in found)
    if not options or "".join(letter for letter, _ in found) != LETTERS[: len(options)]:
        return Problem(where, "text must list its options as lines (A), (B) and so on")
    label = entry["label"].strip().upper()
    if len(label) != 1 or label not in LETTERS[: len(options)]:
        return Problem(where, f"label={entry['label']!r:.80} is not the letter of an option")
    return Sample(
        where=where,
        video_id=entry["image"],
        question_id=str(entry["question_id"]),
        uri=join_uri(videos, entry["image"]),
        question=entry["text"][: entry["text"].index("(A)")].strip(),
        options=options,
        expected=options[LETTERS.index(label)],
        prompt=entry["text"],
        task=entry["category"],
        columns={"category": entry["category"]},
    )


TEST = Benchmark(
    name="vstar",
    title="V* Bench",
    load=_load,
    judge=by_standing_letter,
    annotations="test_questions.jsonl, or a folder with it",
    videos="folder or prefix with direct_attributes/ and relative_position/",
    source="github.com/penghao-wu/vstar; LMMs-Eval tasks/vstar_bench",
    paper="V*",
)
