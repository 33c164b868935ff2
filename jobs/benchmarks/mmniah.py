"""MM-NIAH: needles in long documents of text and images; retrieval, counting, reasoning, each with needles in the text or in the images.

Sources: https://github.com/OpenGVLab/MM-NIAH (README: format, utils/tools.py: prompt, calculate_scores.py: rule), the hub's
OpenGVLab/MM-NIAH (`mm_niah_val/annotations/retrieval-text.jsonl` and the like, `mm_niah_val/images/`).
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.errors import InputError
from jobs.benchmarks.base import LETTERS, Benchmark, Picture, Problem, Sample, annotation_files, entries, lettered, misfit, texts
from jobs.benchmarks.judging import by_needle
from pipeline.storage import join_uri

PLACE = "<image>"
BINS = (1000, 2000, 4000, 8000, 12000, 16000, 24000, 32000, 40000, 48000, 64000)
CHOOSE = "Answer with the option's letter from the given choices directly."
SAY = "Answer the question using a single word or phrase."


def _load(annotations: Path, videos: str, tasks: Sequence[str]) -> Iterator[Sample | Problem]:
    files = annotation_files(annotations, "*.jsonl", "annotations/*.jsonl")
    if unknown := set(tasks) - {file.stem for file in files}:
        raise InputError(f"tasks={min(unknown)}: not among {', '.join(file.stem for file in files)}")
    for file in files:
        if tasks and file.stem not in tasks:
            continue
        for where, entry in entries(file):
            yield _sample(where, entry, videos, file.stem)


def _sample(where: str, entry: Any, videos: str, task: str) -> Sample | Problem:
    problem = misfit(entry, id=int, images_list=list, context=str, question=str, answer=(str, int, list), meta=dict)
    if not problem and not texts(entry["images_list"]):
        problem = "images_list must be a list of texts"
    if problem:
        return Problem(where, problem)
    meta, images = entry["meta"], list(entry["images_list"])
    choices, pictured = meta.get("choices"), meta.get("choices_image_path")
    text = f"{entry['context']}\n{entry['question']}"
    if text.count(PLACE) != len(images):
        return Problem(where, f"context and question show {text.count(PLACE)} images, images_list holds {len(images)}")
    if choices and pictured:
        return Problem(where, "has both choices and choices_image_path")
    if (choices and not texts(choices)) or (pictured and not texts(pictured)):
        return Problem(where, "choices must be texts")
    options = tuple(choices or pictured or ())
    if len(options) > len(LETTERS) or any(PLACE in option for option in options):
        return Problem(where, f"its {len(options)} choices must be at most {len(LETTERS)}, and none may hold {PLACE}")
    right = entry["answer"]
    if bool(options) != isinstance(right, int) or (options and not 0 <= right < len(options)):
        return Problem(where, f"the answer {right!r:.80} is not the number of one of {len(options)} choices")
    shown = choices or [PLACE] * len(options)
    text = "\n".join([text, *lettered(shown, "{}. "), CHOOSE if options else SAY])
    *before, prompt = text.split(PLACE)
    images += pictured or ()
    parts = [p for pair in zip(before, (Picture(join_uri(videos, i)) for i in images), strict=True) for p in pair if p]
    if not parts:
        return Problem(where, "shows no image")
    tokens = meta.get("context_length")
    return Sample(
        where=where,
        video_id=f"{task}/{entry['id']}",
        question_id="0",
        uri="",
        question=prompt.strip("\n"),
        options=options,
        expected=options[right] if options else json.dumps(right) if isinstance(right, list) else right,
        prompt=prompt,
        task=task,
        length=_range(tokens) if isinstance(tokens, int | float) else "",
        columns={"context_length": tokens, "placed_depth": json.dumps(meta.get("placed_depth"))},
        parts=tuple(parts),
    )


def _range(tokens: float) -> str:
    """The benchmark's own range of context lengths, in tokens."""
    at = bisect.bisect_right(BINS, tokens)
    return f"from {BINS[at - 1] // 1000}k tokens" if at else "under 1k tokens"


DOCUMENTS = Benchmark(
    name="mmniah",
    title="MM-NIAH",
    load=_load,
    judge=by_needle,
    annotations="folder with retrieval-text.jsonl and the like, or one of them",
    videos="its images folder",
    source="github.com/OpenGVLab/MM-NIAH",
    max_new_tokens=96,
)
