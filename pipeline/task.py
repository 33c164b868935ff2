"""A row of work: one video and what is asked about it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_TEXT_CHARS = 100_000
MAX_OPTIONS = 26


class ManifestQuestion(BaseModel):
    """One question about a video; its text is kept as it is, to the last space and control character.

    Attributes:
        expected: the right answer, if known: for a multiple-choice question an option's text or its letter.
        extra: further columns of a manifest with a row a question.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    question_id: str = Field(min_length=1, max_length=1000)
    question: str = Field(max_length=MAX_TEXT_CHARS)
    options: tuple[Annotated[str, Field(max_length=MAX_TEXT_CHARS)], ...] = Field((), max_length=MAX_OPTIONS)
    expected: str | None = Field(None, max_length=MAX_TEXT_CHARS)
    extra: dict[str, Any] = Field(default_factory=dict)

    @property
    def expected_choice(self) -> str | None:
        """Letter of the right option; None for a free-form question or when the answer isn't given. Text goes before letter."""
        if self.expected is None or not self.options:
            return None
        if self.expected in self.options:
            return _letter(self.options.index(self.expected))
        return self.expected.upper()

    @model_validator(mode="after")
    def _answerable(self) -> ManifestQuestion:
        if not self.question.strip():
            raise ValueError("question is empty")
        if self.options and self.expected is not None and self.expected not in self.options:
            last = _letter(len(self.options) - 1)
            if len(self.expected) != 1 or not "A" <= self.expected.upper() <= last:
                raise ValueError(f"expected={self.expected[:80]!r} is none of the options and none of the letters A to {last}")
        return self


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


def _letter(index: int) -> str:
    return chr(ord("A") + index)
