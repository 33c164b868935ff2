"""Writes a folder of synthetic videos or pictures with a manifest of their questions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.errors import ConfigError
from pipeline.synthetic.draw import Background
from pipeline.synthetic.natural import NaturalBackground
from pipeline.synthetic.picture import draw_picture, side_of, write_picture
from pipeline.synthetic.questions import KINDS, PICTURE_KINDS, SyntheticQuestion, ask
from pipeline.synthetic.script import Script, write_script
from pipeline.synthetic.video import GROUP_S, draw_frames, write_video


@dataclass(frozen=True)
class SyntheticVideo:
    """One video's script and questions, before anything is drawn.

    Attributes:
        video_id: unique within the data set, and telling: set, length, seed and index.
        script: what it shows.
        questions: (question_id, question) in the order of the manifest.
        seed: what its pictures are drawn from.
    """

    video_id: str
    script: Script
    questions: tuple[tuple[str, SyntheticQuestion], ...]
    seed: tuple[int, ...]

    kinds: ClassVar[tuple[str, ...]] = tuple(KINDS)
    group_letter: ClassVar[str] = "g"
    scenery: ClassVar[type[Background] | type[NaturalBackground]] = Background

    @classmethod
    def check_groups(cls, groups: int) -> None:
        """Refuse a length that can't be made: any can."""

    def write(self, folder: Path) -> Path:
        """Draw and encode the video; returns the file's path."""
        path = folder / f"{self.video_id}.mp4"
        write_video(str(path), draw_frames(np.random.default_rng([*self.seed, 1]), self.script, scenery=self.scenery))
        return path

    def manifest_row(self, uri: str) -> dict[str, Any]:
        """The row of the manifest, with the kind and options of each question."""
        questions = []
        for question_id, question in self.questions:
            row: dict[str, Any] = {"question_id": question_id, "question": question.text, "expected": question.answer}
            if question.options:
                row["options"] = list(question.options)
            questions.append(row)
        return {"video_id": self.video_id, "uri": uri, "questions": questions}


class NaturalVideo(SyntheticVideo):
    """A video whose backgrounds look like the outdoors."""

    scenery = NaturalBackground


class SyntheticPicture(SyntheticVideo):
    """One still image's script and questions; the groups are its cells, row by row."""

    kinds = tuple(PICTURE_KINDS)
    group_letter = "c"

    @classmethod
    def check_groups(cls, groups: int) -> None:
        """Refuse a number of cells that makes no square of 2 to 8 a side."""
        side_of(groups)

    def write(self, folder: Path) -> Path:
        """Draw and encode the picture; returns the file's path."""
        path = folder / f"{self.video_id}.jpg"
        write_picture(str(path), draw_picture(np.random.default_rng([*self.seed, 1]), self.script))
        return path


PICTURES = "pictures-"

SETS: dict[str, type[SyntheticVideo]] = {
    "simple": SyntheticVideo,
    "dense": SyntheticVideo,
    "natural": NaturalVideo,
    PICTURES + "simple": SyntheticPicture,
    PICTURES + "dense": SyntheticPicture,
}
"""Every set by its name: videos, or pictures of as many events as videos of that name have."""


def plan_videos(
    *,
    videos: int,
    groups: int,
    set_name: str,
    seed: int,
    questions: int = 8,
    options: bool | None = None,
    kinds: tuple[str, ...] | None = None,
) -> Iterator[SyntheticVideo]:
    """Yield the scripts and questions of a data set; the same arguments give the same videos.

    Args:
        videos: how many videos or pictures.
        groups: length of each video in temporal groups of `GROUP_S` seconds, or cells of each picture.
        set_name: a key of `SETS`.
        questions: questions a video, the kinds in turn; fewer when a script has nothing more to ask about.
        options: True for multiple choice, False for free-form answers, None for either by lot.
        kinds: which kinds to ask, of the medium's `kinds`; None for all of them.

    Raises:
        ConfigError: a kind that the set hasn't, too few groups for its events, or cells that make no square.
    """
    medium = SETS[set_name]
    if unknown := [kind for kind in kinds or () if kind not in medium.kinds]:
        raise ConfigError(
            f"kinds={','.join(kinds or ())}: {unknown[0]!r} is not a kind of the {set_name} set; there are {', '.join(medium.kinds)}"
        )
    medium.check_groups(groups)
    times_s = np.arange(groups) * GROUP_S
    for index in range(videos):
        entropy = (seed, groups, index)
        rng = np.random.default_rng(entropy)
        script = write_script(rng, groups, set_name.removeprefix(PICTURES))
        asked: dict[tuple[str, str], SyntheticQuestion] = {}
        for kind, _attempt in zip(cycle(kinds or medium.kinds), range(4 * questions), strict=False):
            if len(asked) == questions:
                break
            question = ask(rng, script, times_s, kind, bool(rng.random() < 0.5) if options is None else options)
            if question is not None:
                asked.setdefault((kind, question.text), question)
        named = tuple((f"{question.kind}-{number}", question) for number, question in enumerate(asked.values()))
        yield medium(f"{set_name}-{groups}{medium.group_letter}-s{seed}-{index:04d}", script, named, entropy)


def write_dataset(folder: Path, planned: Iterator[SyntheticVideo]) -> Path:
    """Write every video or picture and `manifest.jsonl`; returns the manifest's path. Paths in it are relative to the manifest's folder."""
    videos = list(planned)  # whatever can't be made is told before a file is touched
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.jsonl"
    with manifest.open("w") as lines:
        for video in videos:
            path = video.write(folder)
            lines.write(json.dumps(video.manifest_row(path.name)) + "\n")
    return manifest
