"""How often a bundle answers rightly: real files, decoded as the main job does, through the engine with the whole cache."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine import Engine, Question
from jobs.studying.trial import is_right
from pipeline.synthetic.dataset import plan_videos
from pipeline.synthetic.questions import SyntheticQuestion
from pipeline.synthetic.video import GROUP_S
from pipeline.video.config import DecodeConfig
from pipeline.video.source import open_media


@dataclass(frozen=True)
class Tally:
    """Right answers of one kind in one form, at one length of one set.

    Attributes:
        form: "options" for multiple choice, "words" for free-form.
    """

    set_name: str
    groups: int
    kind: str
    form: str
    right: int
    questions: int


def evaluate_bundle(folder: Path, *, set_name: str, groups: int, videos: int, seed: int, questions: int = 14) -> list[Tally]:
    """Generate unseen videos or pictures, ask about them, count.

    Args:
        folder: what `Architecture.save` wrote.
        set_name: a key of `SETS`.
        seed: of the videos or pictures; training uses other ones.
    """
    engine = Engine.load(folder, policy="full", dtype="float32", device="cpu")
    asked, right = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as scratch:
        for video in plan_videos(videos=videos, groups=groups, set_name=set_name, seed=seed, questions=questions):
            path = video.write(Path(scratch))
            wanted = [question for _, question in video.questions]
            for question, correct in zip(wanted, answers_right(engine, path, wanted), strict=True):
                key = (question.kind, "options" if question.options else "words")
                asked[key] += 1
                right[key] += correct
            path.unlink()
    return [Tally(set_name, groups, *key, right[key], asked[key]) for key in sorted(asked)]


def answers_right(engine: Engine, path: Path, questions: list[SyntheticQuestion]) -> Iterator[bool]:
    """For each question whether the engine's answer about a video or picture is right, in every word."""
    geometry = engine.geometry
    source = open_media(str(path), geometry, DecodeConfig(fps=geometry.frames_per_group / GROUP_S))
    kept = engine.prefill(source.blocks(engine.config.block_tokens))
    answers = engine.answer(kept, [Question(q.text, q.options) for q in questions])
    return (is_right(answer.text, question) for answer, question in zip(answers, questions, strict=True))
