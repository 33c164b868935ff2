"""What to watch and what to ask: put together from rows or a listing, and checked before any work starts."""

from __future__ import annotations

import difflib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from engine.errors import InputError
from pipeline.config import JobConfig, describe_errors
from pipeline.manifest_columns import QUESTION_COLUMNS, checked_columns, column_notes, unknown_fields
from pipeline.manifest_rows import Row, RowProblem, read_rows
from pipeline.storage import ObjectStat, Storage, join_uri, local_path, split_s3
from pipeline.storage_errors import StorageError, StorageSetupError
from pipeline.task import ManifestQuestion, VideoTask

__all__ = ["Manifest", "ManifestError", "ManifestQuestion", "VideoTask", "read_manifest", "resolve_uri", "tasks_from_rows"]

PROBLEMS_SHOWN = 20
_VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".m2ts", ".mts", ".flv", ".wmv", ".3gp", ".ogv")
MEDIA_SUFFIXES = (*_VIDEO_SUFFIXES, ".gif", ".jpg", ".jpeg", ".png", ".webp", ".bmp")


class ManifestError(InputError):
    """A manifest that can't be worked on: lists the first problems with their rows, and counts the rest."""


@dataclass(frozen=True)
class Manifest:
    """The videos to work on, after `--only` and `--limit`.

    Attributes:
        tasks: in the manifest's order; a missing video is still here and becomes an error row.
        total_videos: videos in the manifest before `--only` and `--limit`.
        missing: (video_id, uri, reason) of videos that can't be read.
        notes: what a person should know though it stops nothing (files a listing left out, doubled options).
    """

    tasks: list[VideoTask]
    total_videos: int
    missing: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def questions(self) -> int:
        """Questions of all tasks."""
        return sum(len(task.questions) for task in self.tasks)


def read_manifest(config: JobConfig, storage: Storage) -> Manifest:
    """Read and check what a job is to do; nothing is decoded.

    Args:
        config: `manifest`, or `videos` and `questions`; then `only` and `limit`.
        storage: where both are read, and where the videos are looked for.

    Raises:
        ManifestError: problems in the rows, an unknown id in `only`, or none of the videos is there.
        StorageError: the manifest can't be read, or storage can't be used at all.
    """
    notes: list[str] = []
    if config.manifest is not None:
        tasks = _tasks(config.manifest, read_rows(config.manifest, storage), notes)
    else:
        assert config.videos is not None and config.questions is not None
        tasks = _listed_tasks(config.videos, config.questions, storage, notes)
    doubled = sum(len(set(q.options)) < len(q.options) for task in tasks for q in task.questions)
    if doubled:
        notes.append(f"{doubled} questions have the same option twice")
    chosen = _chosen(tasks, config)
    return _looked_up(chosen, len(tasks), notes, storage)


def tasks_from_rows(rows: Iterable[Row], source: str = "rows") -> list[VideoTask]:
    """Tasks from rows that are in memory already.

    Raises:
        ManifestError: as for a file.
    """
    return _tasks(source, iter(rows), [])


def _tasks(source: str, rows: Iterator[Row | RowProblem], notes: list[str]) -> list[VideoTask]:
    """Check rows and merge those of one video (in a manifest with a row a question)."""
    problems: list[str] = []
    videos: dict[str, dict[str, Any]] = {}
    extras: dict[str, bool] = {}
    folder = source.rpartition("/")[0] if split_s3(source) else str(local_path(source).parent)
    for row in rows:
        if isinstance(row, RowProblem):
            problems.append(f"{row.where}: {row.problem}")
            continue
        try:
            _add_row(row, folder, videos, extras)
        except ValueError as error:
            problems += [f"{row.where}: {line}" for line in str(error).splitlines()]
    for video in videos.values():
        problems += _doubled_questions(video)
    if not videos and not problems:
        problems.append("there are no rows")
    if problems:
        raise _manifest_error(source, problems)
    notes += column_notes(extras)
    return [
        VideoTask(video_id=name, uri=v["uri"], questions=tuple(q for q, _ in v["questions"]), extra=v["extra"])
        for name, v in videos.items()
    ]


def _add_row(row: Row, folder: str, videos: dict[str, dict[str, Any]], extras: dict[str, bool]) -> None:
    values = checked_columns(row.values, extras)
    uri = _identifier("uri", values.pop("uri", None))
    video_id = values.pop("video_id", None)
    video_id = _identifier("video_id", uri.rstrip("/").rpartition("/")[2] if video_id is None else video_id)
    uri = _without_controls("uri", resolve_uri(uri, folder))
    flat = "questions" not in values
    if flat and "question" not in values:
        raise ValueError("has neither `questions` (a list) nor `question`")
    if not flat:
        mixed = [name for name in QUESTION_COLUMNS if name in values]
        if mixed:
            raise ValueError(f"has both `questions` and {mixed[0]}; put it inside the questions")
        questions = values.pop("questions")
        if not isinstance(questions, list | tuple) or not questions:
            raise ValueError(f"questions={str(questions)[:80]!r} must be a list of at least one question")
        if video_id in videos:
            raise ValueError(f"video_id {video_id!r} was already given in {videos[video_id]['where']}; ids must be unique")
        checked = _checked_questions(questions)
        videos[video_id] = {"uri": uri, "flat": False, "where": row.where, "extra": values, "questions": [(q, row.where) for q in checked]}
        return
    first = videos.setdefault(video_id, {"uri": uri, "flat": True, "where": row.where, "extra": {}, "questions": []})
    if not first["flat"] or first["uri"] != uri:
        raise ValueError(f"video_id {video_id!r} was already given in {first['where']} with uri {first['uri']!r}; ids must be unique")
    question = {name: values.pop(name, None) for name in QUESTION_COLUMNS}
    checked = _checked_questions([question], start=len(first["questions"]), extra=values)
    first["questions"].append((checked[0], row.where))


def _checked_questions(questions: Iterable[Any], start: int = 0, extra: Mapping[str, Any] | None = None) -> list[ManifestQuestion]:
    checked = []
    for number, question in enumerate(questions, start):
        if isinstance(question, str):
            question = {"question": question}
        if not isinstance(question, Mapping):
            raise ValueError(f"question {number} must be an object with question_id, question, options, expected; it is {question!r:.80}")
        given = {name: value for name, value in question.items() if value is not None}
        if unknown := unknown_fields(given):
            raise ValueError("\n".join(f"question {number}: {line}" for line in unknown))
        given.setdefault("question_id", f"q{number}")
        if isinstance(given.get("options"), list):
            given["options"] = tuple(given["options"])
        try:
            checked.append(ManifestQuestion.model_validate(given | ({"extra": dict(extra)} if extra else {})))
        except ValidationError as error:
            raise ValueError(
                "\n".join(f"question {number}: {line}" for line in describe_errors(error, ManifestQuestion, noun="field"))
            ) from None
        _identifier("question_id", given["question_id"])
    return checked


def _doubled_questions(video: dict[str, Any]) -> list[str]:
    counts = Counter(q.question_id for q, _ in video["questions"])
    if max(counts.values(), default=0) < 2:
        return []
    return [
        f"{where}: question_id {q.question_id!r} is given {counts[q.question_id]} times for this video; ids must be unique in a video"
        for q, where in video["questions"]
        if counts[q.question_id] > 1
    ]


def _identifier(name: str, value: Any) -> str:
    """An id or address: text on one line, since it goes into log lines and file names."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if value is None or value == "":
        raise ValueError(f"{name} is missing")
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r:.80} must be text")
    if len(value) > 1000:
        raise ValueError(f"{name} of {len(value)} characters is longer than 1000")
    return _without_controls(name, value)


def _without_controls(name: str, value: str) -> str:
    if not value.isprintable() and any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in value):
        raise ValueError(f"{name}={value!r:.80} holds a control character or a broken one")
    return value


def resolve_uri(uri: str, folder: str) -> str:
    """The absolute address of a file; a relative one starts at `folder`, which is absolute.

    Raises:
        StorageError: a scheme that isn't supported.
    """
    if split_s3(uri) is not None:
        return uri
    if uri.startswith(("/", "~", "file://")):
        return str(local_path(uri))
    return join_uri(folder, uri) if split_s3(folder) else os.path.normpath(join_uri(folder, uri))


def _listed_tasks(videos: str, questions: str, storage: Storage, notes: list[str]) -> list[VideoTask]:
    """The same questions for every media file under a folder; a file's id is its path below the folder."""
    asked = []
    problems = []
    for number, row in enumerate(read_rows(questions, storage, questions_only=True)):
        if isinstance(row, RowProblem):
            problems.append(f"{row.where}: {row.problem}")
            continue
        if "uri" in row.values or "questions" in row.values:
            raise ManifestError(f"questions={questions}: is a manifest, whose rows name videos; give it as --manifest, without --videos")
        try:
            asked += _checked_questions([checked_columns(row.values, {})], start=number)
        except ValueError as error:
            problems += [f"{row.where}: {line}" for line in str(error).splitlines()]
    problems += _doubled_questions({"questions": [(q, "questions") for q in asked]})
    if not asked and not problems:
        problems.append("there are no questions")
    if problems:
        raise _manifest_error(questions, problems)
    alone = _is_file(videos, storage)
    if not alone and split_s3(videos) is None and not os.path.exists(local_path(videos)):
        raise ManifestError(f"videos={videos}: no such folder; check the spelling")
    files = [resolve_uri(videos, os.getcwd())] if alone else storage.list(videos)
    media = [uri for uri in files if "." + uri.rpartition(".")[2].lower() in MEDIA_SUFFIXES]
    if not media:
        raise ManifestError(f"videos={videos}: none of its {len(files)} files is a video or an image; check the folder's name")
    if len(media) < len(files):
        notes.append(f"{len(files) - len(media)} of {len(files)} files under {videos} have no video's or image's suffix and are left out")
    whole = videos if split_s3(videos) else str(local_path(videos))
    folder = len((whole.rpartition("/")[0] if alone else whole).rstrip("/")) + 1
    try:
        return [VideoTask(video_id=_identifier("video_id", uri[folder:]), uri=uri, questions=tuple(asked)) for uri in media]
    except ValueError as error:
        raise ManifestError(f"videos={videos}: {error}; rename the file") from None


def _is_file(uri: str, storage: Storage) -> bool:
    """Whether an address is one file's, not a folder's."""
    if split_s3(uri) is None:
        return os.path.isfile(local_path(uri))
    return uri.lower().endswith(MEDIA_SUFFIXES) and storage.exists(uri)


def _chosen(tasks: list[VideoTask], config: JobConfig) -> list[VideoTask]:
    if config.only:
        known = {task.video_id for task in tasks}
        for wanted in config.only:
            if wanted not in known:
                near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
                hint = f"did you mean {' or '.join(near)}?" if near else f"the manifest's first is {tasks[0].video_id}"
                raise ManifestError(f"only={wanted}: no such video_id among {len(tasks)}; {hint}")
        tasks = [task for task in tasks if task.video_id in set(config.only)]
    return tasks[: config.limit]


def _looked_up(tasks: list[VideoTask], total: int, notes: list[str], storage: Storage) -> Manifest:
    """Fill in each file's size and tag, and note the missing ones."""
    found = storage.stat_many(task.uri for task in tasks)
    missing = []
    complete = []
    for task in tasks:
        stat = found[task.uri]
        if isinstance(stat, StorageSetupError):
            raise stat
        if isinstance(stat, StorageError):
            missing.append((task.video_id, task.uri, str(stat)))
        elif isinstance(stat, ObjectStat):
            task = task.model_copy(update={"size_bytes": stat.size_bytes, "content_tag": stat.tag})
        complete.append(task)
    if len(missing) == len(tasks):
        shown = "\n".join(f"  {video_id}: {reason}" for video_id, _, reason in missing[:PROBLEMS_SHOWN])
        raise ManifestError(f"none of the {len(tasks)} videos can be read:\n{shown}{_and_more(len(missing))}")
    return Manifest(complete, total, missing, notes)


def _manifest_error(source: str, problems: list[str]) -> ManifestError:
    shown = "\n".join(f"  {problem}" for problem in problems[:PROBLEMS_SHOWN])
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ManifestError(f"{source}: {count}; nothing was started:\n{shown}{_and_more(len(problems))}")


def _and_more(count: int) -> str:
    return f"\n  and {count - PROBLEMS_SHOWN} more" if count > PROBLEMS_SHOWN else ""
