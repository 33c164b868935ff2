"""Training batches for the language model: videos put together from encoded groups, several questions to each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from jobs.bundled_training.bank import COLOUR_NAMES, FIGURES, GroupBank
from jobs.bundled_training.model import GROUP_TOKENS, TOKENS_PER_SECOND
from pipeline.synthetic.questions import SyntheticQuestion, ask
from pipeline.synthetic.script import Script, script_with

PREFIX = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
OPTION_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
KIND_WEIGHTS = {"colour": 0.18, "shape": 0.18, "digit": 0.18, "exists": 0.18, "count": 0.09, "order": 0.09, "when": 0.10, "glimpse": 0.08}
RECALL = ("colour", "shape", "digit", "exists")
# A random gap in front of the options: they must be compared with the question by content, not by how far behind it they are.
_GAP_SHARE, _GAP_POSITIONS = 0.7, 40
_STRIDES_S, _STRIDE_SHARES = (0.5, 1.0, 2.0, 4.0, 8.0), (0.15, 0.4, 0.25, 0.12, 0.08)


def question_prompt(question: SyntheticQuestion) -> str:
    """Everything from the end of the video to the place of the answer, in the chat template's form."""
    lines = [question.text, *(f"{letter}. {option}" for letter, option in zip(OPTION_LETTERS, question.options, strict=False))]
    if question.options:
        lines.append("Answer with the option's letter.")
    return "<|vision_end|>" + "\n".join(lines) + "<|im_end|>\n<|im_start|>assistant\n"


def expected_reply(question: SyntheticQuestion) -> str:
    """What the model is to say: the option's letter, or the answer itself."""
    return OPTION_LETTERS[question.options.index(question.answer)] if question.options else question.answer


def video_positions(times_s: np.ndarray, start: int) -> np.ndarray:
    """Positions of a video's tokens, (3, groups * GROUP_TOKENS): time from seconds, height and width from the place in the frame."""
    side = int(GROUP_TOKENS**0.5)
    groups = len(times_s)
    time = np.repeat(np.floor(times_s * TOKENS_PER_SECOND).astype(np.int64), GROUP_TOKENS)
    place = np.tile(np.arange(GROUP_TOKENS), groups)
    return start + np.stack([time, place // side, place % side])


@dataclass(frozen=True)
class FeatureBank:
    """Encoded groups, found by what they show.

    Attributes:
        features: (groups, GROUP_TOKENS, hidden) float32.
        needles: rows of `features` by (colour, figure).
        backgrounds: rows without needle or glitch, neighbours in the video being neighbours here.
        glitches: rows that show a glitch.
    """

    features: Tensor
    needles: dict[tuple[str, str], np.ndarray]
    backgrounds: np.ndarray
    glitches: np.ndarray

    @classmethod
    def from_groups(cls, bank: GroupBank, features: Tensor) -> FeatureBank:
        """Index a bank's encoded groups."""
        colour, figure, glitch = bank.colour.numpy(), bank.figure.numpy(), bank.glitch.numpy()
        needles = {(c, f): np.flatnonzero((colour == i) & (figure == j)) for i, c in enumerate(COLOUR_NAMES) for j, f in enumerate(FIGURES)}
        empty = colour == len(COLOUR_NAMES)
        return cls(features, needles, np.flatnonzero(empty & ~glitch), np.flatnonzero(glitch))

    def rows(self, rng: np.random.Generator, script: Script) -> np.ndarray:
        """A row of `features` for every group of a script."""
        first = rng.integers(len(self.backgrounds))
        rows = self.backgrounds[(first + np.arange(script.groups)) % len(self.backgrounds)]
        for group in script.glitches:
            rows[group] = rng.choice(self.glitches)
        for needle in script.needles:
            rows[needle.group] = rng.choice(self.needles[needle.colour, needle.figure])
        return rows


@dataclass(frozen=True)
class Lesson:
    """One training batch of equally long videos, the questions of each side by side and blind to one another.

    Attributes:
        prefix: (prefix tokens,) ids.
        features: (videos, groups * GROUP_TOKENS, hidden).
        questions: (videos, questions, question tokens) ids, padded at the end.
        positions: (3, videos, all tokens), the questions one after the other behind the video.
        targets: (videos, questions, question tokens) the next token where an answer is due, -100 elsewhere.
        hints: as `targets`, for training alone: the answer's first word before and at the question mark; at each option's last word its
            letter if it is the right one, else "no". They break a long chain of steps into short ones.
        asked: the questions of each video; some may have fewer than others.
    """

    prefix: Tensor
    features: Tensor
    questions: Tensor
    positions: Tensor
    targets: Tensor
    hints: Tensor
    asked: list[list[SyntheticQuestion]]


def draw_times(rng: np.random.Generator, groups: int) -> np.ndarray:
    """Start of each group in seconds: mostly regular at one of several strides, sometimes irregular as with keyframes."""
    stride_s = rng.choice(_STRIDES_S, p=_STRIDE_SHARES)
    if rng.random() < 0.8:
        return np.arange(groups) * stride_s
    return np.concatenate([[0.0], np.cumsum(stride_s * rng.uniform(0.3, 1.7, size=groups - 1))])


def draw_lesson(
    rng: np.random.Generator,
    bank: FeatureBank,
    tokenizer: PreTrainedTokenizerFast,
    *,
    groups: int,
    videos: int,
    questions: int,
    with_options: bool,
    kind_weights: dict[str, float] = KIND_WEIGHTS,
) -> Lesson:
    """Draw a batch: scripts from nearly empty to crowded, questions of the given kinds, all of one form."""
    prefix = tokenizer(PREFIX).input_ids
    asked = []
    rows = np.empty((videos, groups), dtype=np.int64)
    visual = np.empty((3, videos, groups * GROUP_TOKENS), dtype=np.int64)
    for video in range(videos):
        script = _draw_script(rng, groups)
        times_s = draw_times(rng, groups)
        rows[video] = bank.rows(rng, script)
        visual[:, video] = video_positions(times_s, start=len(prefix))
        asked.append(_draw_questions(rng, script, times_s, questions, with_options, kind_weights))
    prompts = [[tokenizer(question_prompt(q)).input_ids for q in mine] for mine in asked]
    replies = [[[*tokenizer(expected_reply(q)).input_ids, tokenizer.eos_token_id] for q in mine] for mine in asked]
    width = max(len(p) + len(r) - 1 for ps, rs in zip(prompts, replies, strict=True) for p, r in zip(ps, rs, strict=True))
    ids = np.full((videos, questions, width), tokenizer.pad_token_id)
    targets = np.full((videos, questions, width), -100)
    hints = targets.copy()
    gaps = np.zeros_like(targets)
    newline, mark, no = tokenizer.convert_tokens_to_ids(["\n", "?", "no"])
    for video in range(videos):
        for index, (prompt, reply) in enumerate(zip(prompts[video], replies[video], strict=True)):
            ids[video, index, : len(prompt) + len(reply) - 1] = prompt + reply[:-1]
            targets[video, index, len(prompt) - 1 : len(prompt) + len(reply) - 1] = reply
            question = asked[video][index]
            asked_at = prompt.index(mark)
            hints[video, index, asked_at - 1 : asked_at + 1] = tokenizer(question.answer).input_ids[0]
            if question.options and rng.random() < _GAP_SHARE:
                gaps[video, index, asked_at + 1 :] = rng.integers(_GAP_POSITIONS)
            ends = np.flatnonzero(np.array(prompt) == newline)[1 : 1 + len(question.options)]
            for end, option in zip(ends, question.options, strict=False):
                hints[video, index, end - 1] = reply[0] if option == question.answer else no
    resumed = visual.max(axis=(0, 2))[:, None, None] + 1 + np.arange(width) + gaps
    text = np.broadcast_to(np.arange(len(prefix)), (3, videos, len(prefix)))
    spoken = np.broadcast_to(resumed.reshape(videos, -1), (3, videos, questions * width))
    return Lesson(
        prefix=torch.tensor(prefix),
        features=bank.features[torch.from_numpy(rows)].flatten(1, 2),
        questions=torch.from_numpy(ids),
        positions=torch.from_numpy(np.concatenate([text, visual, spoken], axis=2)),
        targets=torch.from_numpy(targets),
        hints=torch.from_numpy(hints),
        asked=asked,
    )


def _draw_questions(
    rng: np.random.Generator, script: Script, times_s: np.ndarray, count: int, with_options: bool, kind_weights: dict[str, float]
) -> list[SyntheticQuestion]:
    weights = np.array(list(kind_weights.values()))
    kinds = rng.choice(list(kind_weights), size=2 * count, p=weights / weights.sum())
    drawn = (ask(rng, script, times_s, kind, with_options) for kind in kinds)
    return list(dict.fromkeys(q for q in drawn if q is not None))[:count]


def _draw_script(rng: np.random.Generator, groups: int) -> Script:
    most = min(groups if groups < 6 else int(groups * 0.7), 16)
    total = int(rng.integers(max(1, most // (2 if groups < 6 else 4)), most + 1))
    digits = int(rng.binomial(total, 0.35))
    return script_with(rng, groups, total - digits, digits, glitch_share=float(rng.choice([0.0, 0.06, 0.25])))
