"""Training batches for the language model: videos or pictures put together from encoded groups, several questions to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from jobs.bundled_training.architecture import Architecture
from jobs.bundled_training.bank import COLOUR_NAMES, FIGURES, GroupBank
from pipeline.synthetic.questions import SyntheticQuestion, ask
from pipeline.synthetic.script import Script, script_with

OPTION_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LOOKUPS = ("colour", "shape", "digit")
RECALL = (*LOOKUPS, "exists")
# A random gap in front of the options: they must be compared with the question by content, not by how far behind it they are.
_GAP_SHARE, _GAP_POSITIONS = 0.7, 40
_STRIDES_S, _STRIDE_SHARES = (0.5, 1.0, 2.0, 4.0, 8.0), (0.15, 0.4, 0.25, 0.12, 0.08)


def question_prompt(architecture: Architecture, question: SyntheticQuestion) -> str:
    """Everything from the end of the video or picture to the place of the answer, in the chat template's form."""
    lines = [question.text, *(f"{letter}. {option}" for letter, option in zip(OPTION_LETTERS, question.options, strict=False))]
    if question.options:
        lines.append("Answer with the option's letter.")
    return architecture.close + "\n".join(lines) + "<|im_end|>\n<|im_start|>assistant\n"


def expected_reply(question: SyntheticQuestion) -> str:
    """What the model is to say: the option's letter, or the answer itself."""
    return OPTION_LETTERS[question.options.index(question.answer)] if question.options else question.answer


@dataclass(frozen=True)
class FeatureBank:
    """Encoded groups, found by what they show.

    Attributes:
        features: (groups, group tokens, hidden) float32.
        needles: rows of `features` by (colour, figure).
        backgrounds: rows without needle or glitch, neighbours in the video being neighbours here.
        glitches: rows that show a glitch.
        thumbnails: features of a whole picture's small copy from its (pictures, cells) rows, where the architecture has one.
    """

    features: Tensor
    needles: dict[tuple[str, str], np.ndarray]
    backgrounds: np.ndarray
    glitches: np.ndarray
    thumbnails: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def from_groups(cls, bank: GroupBank, features: Tensor, thumbnails: Callable[[Tensor], Tensor] | None = None) -> FeatureBank:
        """Index a bank's encoded groups."""
        colour, figure, glitch = bank.colour.numpy(), bank.figure.numpy(), bank.glitch.numpy()
        needles = {(c, f): np.flatnonzero((colour == i) & (figure == j)) for i, c in enumerate(COLOUR_NAMES) for j, f in enumerate(FIGURES)}
        empty = colour == len(COLOUR_NAMES)
        return cls(features, needles, np.flatnonzero(empty & ~glitch), np.flatnonzero(glitch), thumbnails)

    def rows(self, rng: np.random.Generator, script: Script) -> np.ndarray:
        """A row of `features` for every group of a script."""
        first = rng.integers(len(self.backgrounds))
        rows = self.backgrounds[(first + np.arange(script.groups)) % len(self.backgrounds)]
        for group in script.glitches:
            rows[group] = rng.choice(self.glitches)
        for needle in script.needles:
            rows[needle.group] = rng.choice(self.needles[needle.colour, needle.figure])
        return rows

    def visual(self, rows: Tensor) -> Tensor:
        """Everything that the language model sees of (videos, groups) rows, (videos, visual tokens, hidden)."""
        seen = self.features[rows].flatten(1, 2)
        return seen if self.thumbnails is None else torch.cat([seen, self.thumbnails(rows)], dim=1)


@dataclass(frozen=True)
class Lesson:
    """One training batch of equally long videos, the questions of each side by side and blind to one another.

    Attributes:
        prefix: (prefix tokens,) ids.
        features: (videos, visual tokens, hidden).
        questions: (videos, questions, question tokens) ids, padded at the end.
        positions: (axes, videos, all tokens), the questions one after the other behind the video.
        targets: (videos, questions, question tokens) the next token where an answer is due, -100 elsewhere.
        hints: as `targets`, for training alone: the answer's first word before and at the question mark; at each option's last word its
            letter if it is the right one, else "no". They break a long chain of steps into short ones.
        lookups: as `targets`, for an early layer: `what_to_look_up`'s word at the question mark. What is found late can't be compared with
            options, or with what was asked for, any more.
        asked: the questions of each video; some may have fewer than others.
    """

    prefix: Tensor
    features: Tensor
    questions: Tensor
    positions: Tensor
    targets: Tensor
    hints: Tensor
    lookups: Tensor
    asked: list[list[SyntheticQuestion]]


def draw_times(rng: np.random.Generator, groups: int) -> np.ndarray:
    """Start of each group in seconds: mostly regular at one of several strides, sometimes irregular as with keyframes."""
    stride_s = rng.choice(_STRIDES_S, p=_STRIDE_SHARES)
    if rng.random() < 0.8:
        return np.arange(groups) * stride_s
    return np.concatenate([[0.0], np.cumsum(stride_s * rng.uniform(0.3, 1.7, size=groups - 1))])


def draw_lesson(
    rng: np.random.Generator,
    architecture: Architecture,
    bank: FeatureBank,
    tokenizer: PreTrainedTokenizerFast,
    *,
    groups: int,
    videos: int,
    questions: int,
    with_options: bool,
    kind_weights: dict[str, float] | None = None,
) -> Lesson:
    """Draw a batch: scripts from nearly empty to crowded, questions of the given kinds, all of one form."""
    prefix = tokenizer(architecture.prefix).input_ids
    asked, places, scripts = [], [], []
    rows = np.empty((videos, groups), dtype=np.int64)
    for video in range(videos):
        script = _draw_script(rng, groups)
        scripts.append(script)
        times_s = draw_times(rng, groups) if architecture.timed else np.zeros(groups)
        rows[video] = bank.rows(rng, script)
        places.append(architecture.positions(times_s, start=len(prefix)))
        asked.append(_draw_questions(rng, script, times_s, questions, with_options, kind_weights or architecture.kind_weights))
    prompts = [[tokenizer(question_prompt(architecture, q)).input_ids for q in mine] for mine in asked]
    replies = [[[*tokenizer(expected_reply(q)).input_ids, tokenizer.eos_token_id] for q in mine] for mine in asked]
    width = max(len(p) + len(r) - 1 for ps, rs in zip(prompts, replies, strict=True) for p, r in zip(ps, rs, strict=True))
    ids = np.full((videos, questions, width), tokenizer.pad_token_id)
    targets = np.full((videos, questions, width), -100)
    hints, lookups = targets.copy(), targets.copy()
    gaps = np.zeros_like(targets)
    newline, mark, no = tokenizer.convert_tokens_to_ids(["\n", "?", "no"])
    for video in range(videos):
        for index, (prompt, reply) in enumerate(zip(prompts[video], replies[video], strict=True)):
            ids[video, index, : len(prompt) + len(reply) - 1] = prompt + reply[:-1]
            targets[video, index, len(prompt) - 1 : len(prompt) + len(reply) - 1] = reply
            question = asked[video][index]
            asked_at = prompt.index(mark)
            answer = tokenizer(question.answer).input_ids[0]
            hints[video, index, asked_at - 1 : asked_at + 1] = answer
            found = what_to_look_up(question, scripts[video])
            if found is not None:
                lookups[video, index, asked_at] = tokenizer(found).input_ids[0]
            if question.options and rng.random() < _GAP_SHARE:
                gaps[video, index, asked_at + 1 :] = rng.integers(_GAP_POSITIONS)
            ends = asked_at + 1 + np.flatnonzero(np.array(prompt[asked_at + 1 :]) == newline)[1 : 1 + len(question.options)]
            for end, option in zip(ends, question.options, strict=False):
                hints[video, index, end - 1] = reply[0] if option == question.answer else no
    visual = np.stack(places, axis=1)
    resumed = visual.max(axis=(0, 2))[:, None, None] + 1 + np.arange(width) + gaps
    text = np.broadcast_to(np.arange(len(prefix)), (architecture.axes, videos, len(prefix)))
    spoken = np.broadcast_to(resumed.reshape(videos, -1), (architecture.axes, videos, questions * width))
    return Lesson(
        prefix=torch.tensor(prefix),
        features=bank.visual(torch.from_numpy(rows)),
        questions=torch.from_numpy(ids),
        positions=torch.from_numpy(np.concatenate([text, visual, spoken], axis=2)),
        targets=torch.from_numpy(targets),
        hints=torch.from_numpy(hints),
        lookups=torch.from_numpy(lookups),
        asked=asked,
    )


def what_to_look_up(question: SyntheticQuestion, script: Script) -> str | None:
    """The word that an early layer is to find in the video, before it is compared with anything; None where there isn't one.

    For "is there a red circle" it is the colour of the circle that is there: the asked one when it is, else that of the only one.
    """
    if question.kind in LOOKUPS:
        return question.answer
    if question.kind != "exists":
        return None
    colour, figure = question.text.rstrip("?").split()[-2:]
    colours = {n.colour for n in script.shapes if n.figure == figure}
    if colour in colours:
        return colour
    return colours.pop() if len(colours) == 1 else None


def _draw_questions(
    rng: np.random.Generator, script: Script, times_s: np.ndarray, count: int, with_options: bool, kind_weights: dict[str, float]
) -> list[SyntheticQuestion]:
    weights = np.array(list(kind_weights.values()))
    kinds = rng.choice(list(kind_weights), size=2 * count, p=weights / weights.sum()).tolist()
    drawn = (ask(rng, script, times_s, kind, with_options) for kind in kinds)
    return list(dict.fromkeys(q for q in drawn if q is not None))[:count]


def _draw_script(rng: np.random.Generator, groups: int) -> Script:
    most = min(groups if groups < 6 else int(groups * 0.7), 16)
    total = int(rng.integers(max(1, most // (2 if groups < 6 else 4)), most + 1))
    digits = int(rng.binomial(total, 0.35))
    return script_with(rng, groups, total - digits, digits, glitch_share=float(rng.choice([0.0, 0.06, 0.25])))
