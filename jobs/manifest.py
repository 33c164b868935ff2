"""Makes manifests: `python -m jobs.manifest mlvu --annotations DIR --videos PREFIX --output manifest.jsonl`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.errors import InputError, ReelkeepError
from jobs.complaint import complain
from pipeline.manifest import PROBLEMS_SHOWN, ManifestError, tasks_from_rows
from pipeline.manifest_rows import Row
from pipeline.storage import Storage, join_uri

_FIELDS = {"video", "duration", "question", "candidates", "answer", "question_type"}


def mlvu_rows(annotations: Path, videos: str, tasks: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Read MLVU's multiple-choice annotation files, a manifest row a question.

    Args:
        annotations: folder with `1_plotQA.json` and the like.
        videos: folder or prefix under which each video lies in a folder named like its annotation file, as MLVU is published.
        tasks: question types or file names to take (`plotQA`, `1_plotQA`); all when empty.

    Yields:
        Where an annotation stands, its manifest row, and what is wrong with it ("" when nothing is).

    Raises:
        InputError: no annotation files, one that isn't JSON, or an unknown task.
    """
    files = sorted(annotations.glob("*.json"))
    if not files:
        raise InputError(f"annotations={annotations}: holds no .json files")
    unknown = set(tasks) - {name for file in files for name in _task_names(file)}
    if unknown:
        raise InputError(f"tasks={min(unknown)}: not among {', '.join(_task_names(file)[0] for file in files)}")
    for file in files:
        if tasks and not set(tasks) & set(_task_names(file)):
            continue
        try:
            entries = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{file}: not valid JSON: {error}") from None
        for index, entry in enumerate(entries):
            problem = _problem(entry)
            row = {} if problem else _row(entry, index, file.stem, videos)
            yield f"{file.name}[{index}]", row, problem


def _task_names(file: Path) -> tuple[str, str]:
    return file.stem.partition("_")[2] or file.stem, file.stem


def _row(entry: dict[str, Any], index: int, stem: str, videos: str) -> dict[str, Any]:
    return {
        "video_id": f"{stem}/{entry['video']}",
        "uri": join_uri(videos, stem, entry["video"]),
        "question_id": f"{stem}-{index}",
        "question": entry["question"],
        "options": entry["candidates"],
        "expected": entry["answer"],
        "question_type": entry["question_type"],
        "duration_s": float(entry["duration"]),
    }


def _problem(entry: Any) -> str:
    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        return f"must be an object with exactly {', '.join(sorted(_FIELDS))}"
    candidates, answer = entry["candidates"], entry["answer"]
    if not isinstance(candidates, list) or not all(isinstance(text, str) for text in candidates):
        return "candidates must be a list of texts"
    if len(set(candidates)) < 2:
        return f"there is nothing to choose between: candidates={candidates}"
    if answer not in candidates:
        return f"the answer {answer!r} is not among candidates={candidates}"
    return ""


def convert_mlvu(annotations: Path, videos: str, output: str, tasks: Sequence[str] = ()) -> tuple[int, list[str]]:
    """Write the manifest.

    Returns:
        How many questions were written, and a line for each annotation that was left out.

    Raises:
        ManifestError: the rows don't make a manifest.
    """
    rows, left_out = [], []
    for where, row, problem in mlvu_rows(annotations, videos, tasks):
        if problem:
            left_out.append(f"{where}: {problem}")
        else:
            rows.append(Row(where, row))
    if left_out and not rows:
        reasons = "\n".join(f"  {line}" for line in left_out[:PROBLEMS_SHOWN])
        raise ManifestError(f"annotations={annotations}: none of its {len(left_out)} annotations can be used; the first:\n{reasons}")
    tasks_from_rows(rows, output)
    text = "".join(json.dumps(row.values, ensure_ascii=False) + "\n" for row in rows)
    Storage().write_bytes(output, text.encode())
    return len(rows), left_out


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, convert, report; 0 when a manifest was written, 2 when the input can't be used."""
    parser = argparse.ArgumentParser(prog="python -m jobs.manifest", description=__doc__, allow_abbrev=False)
    kinds = parser.add_subparsers(dest="kind", required=True)
    mlvu = kinds.add_parser("mlvu", help="from MLVU's annotation files", description="From MLVU's annotation files.", allow_abbrev=False)
    mlvu.add_argument("--annotations", type=Path, required=True, help="folder with 1_plotQA.json and the like")
    mlvu.add_argument("--videos", required=True, help="folder or s3:// prefix that holds MLVU's video folder (1_plotQA/... below it)")
    mlvu.add_argument("--output", required=True, help="manifest to write, .jsonl, local or s3://")
    mlvu.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="question types to take, e.g. plotQA needle; default: all")
    given = parser.parse_args(argv)
    try:
        written, left_out = convert_mlvu(given.annotations, given.videos, given.output, given.tasks)
    except ReelkeepError as error:
        complain(error)
        return 2
    for line in left_out:
        complain(f"left out {line}")
    print(f"{given.output}: {written} questions written, {len(left_out)} left out, {written + len(left_out)} read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
