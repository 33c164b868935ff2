"""What to watch and what to ask: read from Parquet, JSON Lines, CSV or a listing, and checked before any work starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import InputError
from pipeline.config import JobConfig


class ManifestError(InputError):
    """A manifest that can't be worked on: lists the first problems with their rows, and counts the rest."""


class ManifestQuestion(BaseModel):
    """One question about a video; the text is kept byte for byte."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question_id: str
    question: str
    options: tuple[str, ...] = ()
    expected: str | None = None
    extra: dict[str, Any] = Field(default_factory=dict)


class VideoTask(BaseModel):
    """One video and everything that is asked about it: a row of work.

    Attributes:
        extra: the manifest's further columns, carried through to the tables.
        size_bytes: size of the file; None where it is missing.
        content_tag: changes when the file does (ETag, or size and time of change); "" where the file is missing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    video_id: str
    uri: str
    questions: tuple[ManifestQuestion, ...]
    extra: dict[str, Any] = Field(default_factory=dict)
    size_bytes: int | None = None
    content_tag: str = ""


@dataclass(frozen=True)
class Manifest:
    """The videos to work on, after `--only` and `--limit`.

    Attributes:
        tasks: in the manifest's order; a missing video is still here and becomes an error row.
        total_videos: videos in the manifest before `--only` and `--limit`.
        missing: (video_id, uri, reason) of videos that aren't there.
        notes: anything a person should know that isn't an error (files ignored by a listing, doubled options).
    """

    tasks: list[VideoTask]
    total_videos: int
    missing: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
