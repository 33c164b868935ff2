"""MLVU's multiple-choice questions, dev and test.

Sources: https://github.com/JUNJIE99/MLVU (videochat2/choice_bench.py, Evaluation_Test/test_bench.py), the hub's MLVU/MVLU (`json/`, `video/`)
and MLVU/MLVU_Test (`test-ground-truth/test_mcq_gt.json`, `video/`); for models without a prefilled answer LMMs-Eval's tasks/mlvu.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.errors import InputError
from jobs.benchmarks.base import Benchmark, Problem, Sample, annotation_files, chosen, entries, length_group, lettered, misfit, texts
from jobs.benchmarks.judging import by_best_option
from pipeline.storage import join_uri

SYSTEM_PROMPT = (
    "Carefully watch this video and pay attention to every detail. Based on your observations, select the best option that accurately "
    "addresses the question."
)


def _dev(annotations: Path, videos: str, tasks: Sequence[str]) -> Iterator[Sample | Problem]:
    """Videos lie in a folder named like their annotation file; 8_sub_scene.json and 9_summary.json ask for texts and are left alone."""
    files = [f for f in annotation_files(annotations, "*.json") if f.stem not in ("8_sub_scene", "9_summary")]
    unknown = set(tasks) - {name for file in files for name in _task_names(file)}
    if unknown:
        raise InputError(f"tasks={min(unknown)}: not among {', '.join(_task_names(file)[0] for file in files)}")
    for file in files:
        if tasks and not set(tasks) & set(_task_names(file)):
            continue
        for index, (where, entry) in enumerate(entries(file)):
            yield _sample(where, entry, f"{file.stem}/", join_uri(videos, file.stem), f"{file.stem}-{index}")


def _task_names(file: Path) -> tuple[str, str]:
    return file.stem.partition("_")[2] or file.stem, file.stem


def _test(annotations: Path, videos: str, tasks: Sequence[str]) -> Iterator[Sample | Problem]:
    return chosen(_read_test(annotations, videos), tasks)


def _read_test(annotations: Path, videos: str) -> Iterator[Sample | Problem]:
    for file in annotation_files(annotations, "test_mcq_gt.json", "test-ground-truth/test_mcq_gt.json", "*.json"):
        for where, entry in entries(file):
            problem = misfit(entry, question_id=(str, int))
            yield Problem(where, problem) if problem else _sample(where, entry, "", videos, str(entry["question_id"]))


def _sample(where: str, entry: Any, prefix: str, folder: str, question_id: str) -> Sample | Problem:
    problem = misfit(entry, video=str, duration=(int, float), question=str, candidates=list, answer=str, question_type=str)
    if not problem and not texts(entry["candidates"]):
        problem = "candidates must be a list of texts"
    if not problem and not 0 <= entry["duration"] < 1e9:
        problem = f"duration={entry['duration']!r:.80} must be a number of seconds"
    if problem:
        return Problem(where, problem)
    options = lettered(entry["candidates"], "({}) ")
    asked = "\n".join([f"Question: {entry['question']}", "Options:", *options]).rstrip()
    return Sample(
        where=where,
        video_id=prefix + entry["video"],
        question_id=question_id,
        uri=join_uri(folder, entry["video"]),
        question=entry["question"],
        options=tuple(entry["candidates"]),
        expected=entry["answer"],
        prompt=asked + "\nOnly give the best option.\nBest option: (",
        task=entry["question_type"],
        length=length_group(float(entry["duration"])),
        columns={"question_type": entry["question_type"], "duration_s": float(entry["duration"])},
    )


DEV = Benchmark(
    name="mlvu",
    title="MLVU dev",
    load=_dev,
    judge=by_best_option,
    annotations="folder with 1_plotQA.json and the like",
    videos="folder or prefix that holds 1_plotQA/ and the like",
    source="github.com/JUNJIE99/MLVU; LMMs-Eval tasks/mlvu",
    system_prompt=SYSTEM_PROMPT,
)
TEST = Benchmark(
    name="mlvu-test",
    title="MLVU-Test",
    load=_test,
    judge=by_best_option,
    annotations="test_mcq_gt.json, or a folder with it",
    videos="folder or prefix with the videos",
    source="github.com/JUNJIE99/MLVU; LMMs-Eval tasks/mlvu",
    system_prompt=SYSTEM_PROMPT,
    paper="MLVU",
)
