"""How a job came out: counted while its tables are written, so that nothing has to be read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.manifest import ManifestQuestion
from pipeline.tables import NEVER_RUN

ROWS_SHOWN = 20


@dataclass
class Counts:
    """How a run came out.

    Attributes:
        videos, questions: what the manifest asked for.
        videos_failed: watched in vain, or given up: the quarantine table lists them.
        videos_not_run: their turn never came.
        questions_failed: questions without an answer, for whatever reason.
        questions_judged, questions_right: answers to questions whose `expected` answer is known, and how many of them are right.
    """

    videos: int = 0
    videos_answered: int = 0
    videos_failed: int = 0
    videos_not_run: int = 0
    questions: int = 0
    questions_answered: int = 0
    questions_failed: int = 0
    questions_judged: int = 0
    questions_right: int = 0


@dataclass
class Outcome:
    """What there is to say about a job's tables.

    Attributes:
        counts: videos and questions, those of earlier starts included.
        answers: the first rows of the answers table.
        kv_peak_bytes, kv_full_bytes: of the video with the largest full cache: most held at once, and what a full cache would have held.
        warnings: warnings in the memory table, all videos together.
        set_aside: the first videos without answers, and why.
    """

    counts: Counts = field(default_factory=Counts)
    answers: list[dict[str, Any]] = field(default_factory=list)
    kv_peak_bytes: int = 0
    kv_full_bytes: int = 0
    warnings: int = 0
    set_aside: list[tuple[str, str]] = field(default_factory=list)

    def add(self, error: str | None, rows: dict[str, list[dict[str, Any]]]) -> None:
        """Take in one video.

        Args:
            error: its result's.
            rows: its rows of every table, as `table_rows` makes them.
        """
        counts, answers, (memory,) = self.counts, rows["answers"], rows["memory"]
        failed = sum(row["error"] is not None for row in answers)
        counts.videos += 1
        counts.videos_not_run += error == NEVER_RUN
        counts.videos_failed += error not in (None, NEVER_RUN)
        counts.videos_answered += error is None
        counts.questions += len(answers)
        counts.questions_failed += failed
        counts.questions_answered += len(answers) - failed
        verdicts = [verdict(row) for row in answers]
        counts.questions_right += verdicts.count("right")
        counts.questions_judged += verdicts.count("right") + verdicts.count("wrong")
        self.answers += answers[: ROWS_SHOWN - len(self.answers)]
        self.set_aside += [(row["video_id"], row["error"]) for row in rows["quarantine"]][: ROWS_SHOWN - len(self.set_aside)]
        self.warnings += len(memory["warnings"] or ())
        if (memory["kv_full_bytes"] or 0) > self.kv_full_bytes:
            self.kv_full_bytes, self.kv_peak_bytes = memory["kv_full_bytes"], memory["kv_peak_bytes"] or 0


def verdict(row: Mapping[str, Any]) -> str:
    """right, wrong, error, or open where the manifest didn't say what is right. Texts are compared without case and outer spaces."""
    if row["error"] is not None:
        return "error"
    if row["expected"] is None:
        return "open"
    if row["options"]:
        asked = ManifestQuestion.model_construct(question_id="", question="", options=tuple(row["options"]), expected=row["expected"])
        return "right" if row["choice"] == asked.expected_choice else "wrong"
    said, wanted = ((row[name] or "").strip().casefold() for name in ("answer", "expected"))
    return "right" if said == wanted else "wrong"
