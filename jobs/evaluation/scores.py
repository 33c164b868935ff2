"""A grid's tables judged: right answers by task and length with their intervals, memory, times. Nothing is left out without a count."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.benchmarks import longvideobench, mmniah, videomme
from jobs.benchmarks.base import Benchmark, Problem, Sample, Score, length_group
from jobs.benchmarks.judging import wilson
from jobs.evaluation.grid import Cell
from jobs.evaluation.paper import figure
from jobs.report_page.facts import Row, read_run
from pipeline.outcome import verdict
from pipeline.storage import Storage

ALL_ANSWERS = 10**9
TTFT = ("vision_s", "prefill_s", "evict_s", "question_s")
"""What passes before the first token of a video that is decoded: vision, prefill, eviction, reading the question."""
LENGTHS = (
    *("up to 5 min", "5 to 15 min", "15 to 60 min", "over 60 min"),
    *videomme.LENGTHS.values(),
    *longvideobench.LENGTHS.values(),
    *("Few", "Medium", "Many"),
    *("under 1k tokens", *(f"from {tokens // 1000}k tokens" for tokens in mmniah.BINS)),
)
"""Every benchmark's groups, each in its order."""


@dataclass
class Tally:
    """Some questions of one cell.

    Attributes:
        right: points won; a question gives up to one.
        total: questions that have a right answer, those below included.
        unanswered: without any answer (missing video, error): none of them is right.
        unparsed: answered in a way that the benchmark's rule finds no answer in: none of them is right.
        open: questions to which nobody said what is right; not in `total`.
    """

    right: float = 0.0
    total: int = 0
    unanswered: int = 0
    unparsed: int = 0
    open: int = 0

    def add(self, score: Score | None, *, unanswered: bool = False) -> None:
        """Count a question; None is an open one."""
        if score is None:
            self.open += 1
            return
        self.total += 1
        self.right += score.value
        self.unanswered += unanswered
        self.unparsed += not unanswered and not score.parsed

    @property
    def accuracy(self) -> float | None:
        """Share of right answers among all questions; None without any."""
        return self.right / self.total if self.total else None

    @property
    def of_parsed(self) -> float | None:
        """Share among the questions in whose answer the rule found one, which is what some published scripts print."""
        parsed = self.total - self.unanswered - self.unparsed
        return self.right / parsed if parsed else None

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of `accuracy`, Wilson."""
        return wilson(self.right, self.total)


@dataclass
class CellScore:
    """What came out of one cell.

    Attributes:
        overall, tasks, lengths: its tallies.
        videos: rows of the memory table, times those of one pass, with `question_s` (until the first token of the first answer, the
            video being read) and `ttft_s` (all of `TTFT`).
        failures: (video_id, reason) of the videos without answers, and of single questions without one.
        paper: what the paper has for these settings, per cent.
    """

    cell: Cell
    run: Row
    overall: Tally = field(default_factory=Tally)
    tasks: dict[str, Tally] = field(default_factory=dict)
    lengths: dict[str, Tally] = field(default_factory=dict)
    videos: list[Row] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    paper: float | None = None

    @property
    def task_mean(self) -> float | None:
        """Mean of the tasks' accuracies, each counting alike."""
        shares = [tally.accuracy for tally in self.tasks.values() if tally.accuracy is not None]
        return statistics.fmean(shares) if shares else None

    def median(self, column: str) -> float | None:
        """Median of a column over the videos that were read."""
        values = [row[column] for row in self.videos if row.get(column) is not None and row.get("visual_tokens")]
        return statistics.median(values) if values else None

    def most(self, column: str) -> int:
        """Largest value of a column."""
        return max((row.get(column) or 0 for row in self.videos), default=0)


@dataclass
class GridScore:
    """All cells of a benchmark, and what was left out before any was asked.

    Attributes:
        form: how questions were put.
        left_out: annotations that can't be used.
        missing: (video_id, reason) of videos that aren't there.
    """

    title: str
    form: str
    cells: list[CellScore]
    benchmark: Benchmark | None = None
    left_out: list[Problem] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)

    @property
    def task_names(self) -> list[str]:
        """Tasks of any cell, in their order."""
        return list(dict.fromkeys(name for cell in self.cells for name in cell.tasks))

    @property
    def length_names(self) -> list[str]:
        """Lengths of any cell, the shortest first."""
        names = dict.fromkeys(name for cell in self.cells for name in cell.lengths)
        return sorted(names, key=lambda name: LENGTHS.index(name) if name in LENGTHS else len(LENGTHS))


def score_cell(cell: Cell, benchmark: Benchmark | None, samples: Sequence[Sample], storage: Storage) -> CellScore:
    """Judge a cell's tables.

    Args:
        benchmark: whose rule judges; None for a manifest, whose `expected` is compared as the run report does.
        samples: the benchmark's questions.
    """
    facts = read_run(cell.config.output, storage, ALL_ANSWERS)
    scored = CellScore(cell, facts.run)
    known = {(sample.video_id, sample.question_id): sample for sample in samples}
    seconds = {row["video_id"]: row.get("duration_s") for row in facts.videos}
    first: dict[str, float] = {}
    for row in facts.answers:
        sample = known.get((row["video_id"], row["question_id"]))
        score = _judged(row, benchmark, sample)
        task, length = (sample.task, sample.length) if sample else _groups(row, seconds[row["video_id"]])
        tallies = [scored.overall, *([scored.tasks.setdefault(task, Tally())] if task else [])]
        for tally in tallies + ([scored.lengths.setdefault(length, Tally())] if length else []):
            tally.add(score, unanswered=row["error"] is not None)
        if row["error"] is None:
            first[row["video_id"]] = min(row["ttft_s"] or 0.0, first.get(row["video_id"], float("inf")))
    failed = {row["video_id"]: row["error"] for row in facts.failed}
    scored.failures = list(failed.items()) + [
        (f"{row['video_id']}, {row['question_id']}", row["error"])
        for row in facts.answers
        if row["error"] and row["video_id"] not in failed
    ]
    asked = Counter(row["video_id"] for row in facts.answers)
    scored.videos = [_with_times(row, first, asked[row["video_id"]] if cell.query_aware else 1) for row in facts.videos]
    if benchmark is not None and benchmark.paper:
        scored.paper = figure(cell.engine.model, cell.engine.policy, cell.engine.budget_tokens if cell.evicts else None, benchmark.paper)
    return scored


def _judged(row: Row, benchmark: Benchmark | None, sample: Sample | None) -> Score | None:
    if benchmark is None or sample is None:
        said = verdict(row)
        return None if row["expected"] is None else Score(float(said == "right"))
    if row["error"] is not None:
        return Score(0.0, parsed=False)
    if row["options"]:
        return Score(float(row["choice"] == sample.letter))
    return benchmark.judge(sample, row["answer"] or "")


def _groups(row: Row, duration_s: float | None) -> tuple[str, str]:
    """Task and length of a manifest's question: its column `task` or `question_type`, else its id without the number."""
    try:
        extra = json.loads(row["extra"] or "{}")
    except ValueError:
        extra = {}
    task = extra.get("task") or extra.get("question_type")
    numbered = re.fullmatch(r"(.*[^\W\d].*?)[-_]?\d+", row["question_id"])
    name = str(task) if task else numbered[1].rstrip("-_") if numbered else ""
    return ("" if name in ("q", "Q") else name), ("" if not duration_s else length_group(duration_s))


def _with_times(row: Row, first: dict[str, float], passes: int) -> Row:
    """A video's row, its times those of one pass, with the seconds until its first token once it is decoded."""
    row = row | {name: row[name] / passes for name in ("vision_s", "prefill_s", "evict_s", "decode_wait_s")}
    row["question_s"] = first.get(row["video_id"])
    times = [row[name] for name in TTFT]
    return row | {"ttft_s": sum(times) if None not in times else None}


def as_plain(grid: GridScore) -> dict[str, Any]:
    """The scores as plain values, for scores.json."""

    def tally(t: Tally) -> dict[str, Any]:
        counts = {"right": t.right, "total": t.total, "unanswered": t.unanswered, "unparsed": t.unparsed, "open": t.open}
        return counts | {"accuracy": t.accuracy, "interval": list(t.interval), "of_parsed": t.of_parsed}

    def group(tallies: dict[str, Tally]) -> dict[str, Any]:
        return {name: tally(t) for name, t in tallies.items()}

    return {
        "benchmark": grid.title,
        "form": grid.form,
        "left_out": [str(problem) for problem in grid.left_out],
        "missing": [list(pair) for pair in grid.missing],
        "cells": [
            {
                "name": c.cell.name,
                "engine": c.cell.engine.model_dump(mode="json"),
                "decode": c.cell.config.decode.model_dump(mode="json"),
                "overall": tally(c.overall),
                "task_mean": c.task_mean,
                "tasks": group(c.tasks),
                "lengths": group(c.lengths),
                "kv_peak_bytes": c.most("kv_peak_bytes"),
                "kv_full_bytes": c.most("kv_full_bytes"),
                "ttft_s": c.median("ttft_s"),
                "paper": c.paper,
                "failures": [list(pair) for pair in c.failures],
            }
            for c in grid.cells
        ],
    }
