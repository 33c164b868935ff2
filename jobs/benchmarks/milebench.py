"""MileBench's ImageNeedleInAHaystack: what a needle among many images says.

Sources: https://github.com/MileBench/MileBench (utils.py: prompt, evaluate.py: rule), the hub's FreedomIntelligence/MileBench
(`ImageNeedleInAHaystack/ImageNeedleInAHaystack.json`, `images/` beside it). Its scripts cut the context from the left to what a model can
take; here the whole of it is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.errors import InputError
from jobs.benchmarks.base import Benchmark, Picture, Problem, Sample, annotation_files, chosen, entries, misfit, texts
from jobs.benchmarks.judging import by_word
from pipeline.storage import join_uri

NAME = "ImageNeedleInAHaystack"
_PLACE = re.compile(r"\{(?:image|table)#(\d{1,6})\}")


def _load(annotations: Path, videos: str, tasks: Sequence[str]) -> Iterator[Sample | Problem]:
    return chosen(_read(annotations, videos), tasks, lambda sample: sample.length)


def _read(annotations: Path, videos: str) -> Iterator[Sample | Problem]:
    for file in annotation_files(annotations, f"{NAME}.json", f"{NAME}/{NAME}.json"):
        instructions = _instructions(file)
        for where, entry in entries(file, "data"):
            yield _sample(where, entry, videos, instructions)


def _instructions(file: Path) -> Any:
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))["meta_data"]
        if not isinstance(meta["task_instruction"], list | dict):
            raise TypeError("task_instruction must be a list or an object")
        return meta["task_instruction"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{file}: must hold meta_data.task_instruction: {error!s:.200}") from None


def _sample(where: str, entry: Any, videos: str, instructions: Any) -> Sample | Problem:
    problem = misfit(entry, sample_id=(int, str), task_instruction_id=(int, str), task_instance=dict, response=(str, int, float))
    problem = problem or misfit(entry["task_instance"], context=str, images_path=list)
    if not problem and not texts(entry["task_instance"]["images_path"]):
        problem = "images_path must be a list of texts"
    if problem:
        return Problem(where, problem)
    try:
        number = entry["task_instruction_id"]
        if isinstance(number, int) and number < 0:
            raise IndexError
        instruction = str(instructions[number])
    except (KeyError, IndexError, TypeError):
        return Problem(where, f"task_instruction_id={entry['task_instruction_id']!r} names no instruction")
    images = entry["task_instance"]["images_path"]
    parts: list[str | Picture] = []
    text = instruction + "\n" + entry["task_instance"]["context"]
    at = 0
    for place in _PLACE.finditer(text):
        number = int(place[1])
        if not 1 <= number <= len(images):
            return Problem(where, f"{place[0]} is none of its {len(images)} images")
        parts += [text[at : place.start()], Picture(join_uri(videos, images[number - 1]))]
        at = place.end()
    if not parts:
        return Problem(where, "the context shows no image")
    level = str(entry.get("image_quantity_level") or "")
    return Sample(
        where=where,
        video_id=f"{NAME}/{entry['sample_id']}",
        question_id="0",
        uri="",
        question=text[at:],
        options=(),
        expected=str(entry["response"]),
        prompt=text[at:],
        length=level,
        columns={"image_quantity_level": level, "images": len(images)},
        parts=tuple(part for part in parts if part),
    )


NEEDLE = Benchmark(
    name="milebench-needle",
    title="MileBench ImageNeedleInAHaystack",
    load=_load,
    judge=by_word,
    annotations=f"{NAME}.json, or a folder with it",
    videos="its images folder",
    source="github.com/MileBench/MileBench",
    max_new_tokens=64,
    paper="ImageNeedle",
)
