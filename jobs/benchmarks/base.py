"""What a benchmark is made of: its questions, how it puts them, how it judges answers. Each is read as published on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.errors import InputError
from pipeline.manifest import ManifestError, tasks_from_rows
from pipeline.manifest_rows import Row
from pipeline.task import MAX_OPTIONS

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

Form = Literal["published", "letters"]
"""How a multiple-choice question is put: in the benchmark's own words, answered freely and parsed by its own rule; or with its options
given to the engine, which takes the likeliest letter and so always answers."""


@dataclass(frozen=True)
class Picture:
    """An image within an interleaved prompt."""

    uri: str


@dataclass(frozen=True)
class Sample:
    """One question of a benchmark.

    Attributes:
        where: its place in the annotations, for messages.
        uri: address of the video or image; "" for an interleaved prompt.
        parts: texts and pictures that come before the prompt, in order; empty where `uri` is all there is to see.
        options: answers to choose from; empty for a free-form question.
        expected: the right option's text; for a free-form question the right answer, as JSON where it is a list.
        prompt: the question in the benchmark's own words, options and instruction included.
        task, length: groups that accuracy is told for; "" where the benchmark has none.
        columns: further columns of the manifest.
    """

    where: str
    video_id: str
    question_id: str
    uri: str
    question: str
    options: tuple[str, ...]
    expected: str
    prompt: str
    task: str = ""
    length: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    parts: tuple[str | Picture, ...] = ()

    @property
    def letter(self) -> str:
        """Letter of the right option."""
        return LETTERS[self.options.index(self.expected)]

    def manifest_row(self, form: Form, uri: str | None = None) -> dict[str, Any]:
        """The row of a manifest, one a question. An interleaved prompt always keeps its own words.

        Args:
            uri: address to watch instead of the sample's own, for an interleaved prompt.
        """
        row: dict[str, Any] = {"video_id": self.video_id, "uri": uri or self.uri, "question_id": self.question_id}
        if form == "letters" and self.options and not self.parts:
            return row | {"question": self.question, "options": list(self.options), "expected": self.expected} | self.columns
        return row | {"question": self.prompt, "expected": self.letter if self.options else self.expected} | self.columns


@dataclass(frozen=True)
class Problem:
    """A row of the annotations that can't be used."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True)
class Score:
    """An answer's worth.

    Attributes:
        value: 0 to 1; between them only where the benchmark gives part of a point.
        parsed: whether the benchmark's rule found an answer in the text.
    """

    value: float
    parsed: bool = True


Loader = Callable[[Path, str, Sequence[str]], Iterator[Sample | Problem]]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as published.

    Attributes:
        load: (annotations, videos, tasks) to its samples and the rows that can't be used.
        judge: the published rule, for an answer in the published form.
        annotations, videos: what the two arguments of `load` name, for the help.
        system_prompt: the system prompt that its authors use; None leaves the model's own.
        max_new_tokens: length of an answer.
        skips_unparsed: its published accuracy leaves out answers that its rule can't parse.
        source: where format, prompt and rule come from.
        paper: its column in the paper's table, if any.
    """

    name: str
    title: str
    load: Loader
    judge: Callable[[Sample, str], Score]
    annotations: str
    videos: str
    source: str
    system_prompt: str | None = None
    max_new_tokens: int = 16
    skips_unparsed: bool = False
    paper: str | None = None

    def read(
        self, annotations: Path, videos: str, tasks: Sequence[str] = (), form: Form = "published"
    ) -> tuple[list[Sample], list[Problem]]:
        """The samples that can be used, and why the others can't.

        Raises:
            InputError: the annotations aren't there or aren't of the published form, or a task is unknown.
            ManifestError: none of them can be used.
        """
        samples: list[Sample] = []
        problems: list[Problem] = []
        seen: dict[tuple[str, str], str] = {}
        for item in self.load(annotations, videos, tasks):
            reason = "" if isinstance(item, Problem) else _unusable(item, form, seen)
            if isinstance(item, Sample) and not reason:
                samples.append(item)
            else:
                problems.append(item if isinstance(item, Problem) else Problem(item.where, reason))
        if not samples:
            shown = "\n".join(f"  {problem}" for problem in problems[:20])
            raise ManifestError(f"annotations={annotations}: none of its {len(problems)} annotations can be used; the first:\n{shown}")
        return samples, problems


def _unusable(sample: Sample, form: Form, seen: dict[tuple[str, str], str]) -> str:
    """Why a sample can't be asked; "" when it can."""
    if sample.options:
        if len(set(sample.options)) < 2:
            return f"there is nothing to choose between: candidates={list(sample.options)}"
        if sample.expected not in sample.options:
            return f"the answer {sample.expected!r} is not among candidates={list(sample.options)}"
        if len(sample.options) > MAX_OPTIONS:
            return f"{len(sample.options)} options are more than {MAX_OPTIONS}"
    key = sample.video_id, sample.question_id
    if key in seen:
        return f"question_id {sample.question_id!r} was already given in {seen[key]}"
    row = sample.manifest_row(form, sample.uri or "prompt.json")
    try:
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        return f"can't be written as JSON: {error!s:.200}"
    try:
        tasks_from_rows([Row(sample.where, row)])
    except ManifestError as error:
        return str(error).splitlines()[1].strip().removeprefix(f"{sample.where}: ")
    seen[key] = sample.where
    return ""


def annotation_files(annotations: Path, *patterns: str) -> list[Path]:
    """The file itself, or a folder's files of the first pattern that finds any.

    Raises:
        InputError: there are none.
    """
    if annotations.is_file():
        return [annotations]
    for pattern in patterns:
        if files := sorted(path for path in annotations.glob(pattern) if path.is_file()):
            return files
    raise InputError(f"annotations={annotations}: holds no {' or '.join(patterns)} files")


def entries(file: Path, inside: str | None = None) -> Iterator[tuple[str, Any]]:
    """Where each entry of an annotation file stands, and the entry; a line that isn't JSON comes as a `Problem`.

    Args:
        file: a JSON list, JSON Lines or Parquet, by its suffix.
        inside: the key under which a JSON object holds its list.

    Raises:
        InputError: the file isn't what its suffix says.
    """
    if file.suffix == ".parquet":
        yield from _parquet(file)
        return
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix in (".jsonl", ".ndjson"):
            yield from _lines(file.name, text)
            return
        value = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: not valid JSON: {error}") from None
    if inside is not None:
        value = value.get(inside) if isinstance(value, dict) else None
    if not isinstance(value, list):
        raise InputError(f"{file}: must hold a list" + (f" under {inside!r}" if inside else ""))
    yield from ((f"{file.name}[{index}]", entry) for index, entry in enumerate(value))


def _lines(name: str, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{name}:{number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield where, Problem(where, f"not valid JSON: {error}")


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(file).to_pylist()
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:
        raise InputError(f"{file}: not valid Parquet: {str(error).splitlines()[0]}") from None
    yield from ((f"{file.name} row {index}", row) for index, row in enumerate(rows))


def chosen(
    read: Iterable[Sample | Problem], tasks: Sequence[str], task_of: Callable[[Sample], str] = lambda sample: sample.task
) -> Iterator[Sample | Problem]:
    """The samples of some tasks, all when none is named, and every problem: whose task a broken row was can't be told.

    Raises:
        InputError: a task that no sample has.
    """
    found: set[str] = set()
    for sample in read:
        if isinstance(sample, Sample):
            found.add(task_of(sample))
            if tasks and task_of(sample) not in tasks:
                continue
        yield sample
    if unknown := set(tasks) - found:
        raise InputError(f"tasks={min(unknown)}: not among {', '.join(sorted(found))}")


def misfit(entry: Any, **kinds: type | tuple[type, ...]) -> str:
    """What keeps an entry from having these fields of these types; "" when it has them. Further fields are no harm."""
    if isinstance(entry, Problem):
        return entry.reason
    if not isinstance(entry, dict):
        return f"must be an object with {', '.join(kinds)}"
    for name, kind in kinds.items():
        if name not in entry:
            return f"must be an object with {', '.join(kinds)}; {name} is missing"
        if not isinstance(entry[name], kind) or isinstance(entry[name], bool):
            wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            return f"{name}={entry[name]!r:.80} must be of type {wanted}"
    return ""


def texts(value: Any) -> bool:
    """Whether this is a list of texts."""
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def lettered(options: Iterable[str], mark: str) -> list[str]:
    """Options with their letters, `mark` such as "({}) " or "{}. "."""
    return [mark.format(letter) + option for letter, option in zip(LETTERS, options, strict=False)]


def without_letter(option: str, letter: str) -> str:
    """An option without the "A. " that some benchmarks store it with."""
    for mark in (f"{letter}. ", f"{letter}.", f"({letter}) ", f"{letter}) "):
        if option.startswith(mark):
            return option[len(mark) :].strip()
    return option


def length_group(seconds: float) -> str:
    """The group of a video's length, for benchmarks that publish none of their own."""
    for limit_s, name in ((300, "up to 5 min"), (900, "5 to 15 min"), (3600, "15 to 60 min")):
        if seconds <= limit_s:
            return name
    return "over 60 min"
