"""How often a bundle answers rightly: real files, decoded, with the whole cache; videos through transformers' own forward, pictures
through the engine."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor
from transformers import AutoProcessor, PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

from engine import Engine, Question
from engine.types import VideoBlock
from jobs.bundled_training.lessons import OPTION_LETTERS, expected_reply, question_prompt
from jobs.bundled_training.qwen2_5_vl import GROUP_FRAMES, QWEN2_5_VL
from jobs.studying.trial import is_right
from pipeline.synthetic.dataset import PICTURES, plan_videos
from pipeline.synthetic.questions import SyntheticQuestion
from pipeline.synthetic.video import FRAMES_PER_GROUP, GROUP_S
from pipeline.video.images import open_image


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
    answered = _through_engine(folder) if set_name.startswith(PICTURES) else _through_forward(folder)
    asked, right = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as scratch:
        for video in plan_videos(videos=videos, groups=groups, set_name=set_name, seed=seed, questions=questions):
            path = video.write(Path(scratch))
            wanted = [question for _, question in video.questions]
            for question, correct in zip(wanted, answered(path, wanted), strict=True):
                key = (question.kind, "options" if question.options else "words")
                asked[key] += 1
                right[key] += correct
            path.unlink()
    return [Tally(set_name, groups, *key, right[key], asked[key]) for key in sorted(asked)]


Answered = Callable[[Path, list[SyntheticQuestion]], Iterator[bool]]


def _through_forward(folder: Path) -> Answered:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    return partial(answers_right, model, AutoProcessor.from_pretrained(folder))


def _through_engine(folder: Path) -> Answered:
    return partial(picture_answers_right, Engine.load(folder, policy="full", dtype="float32", device="cpu"))


def picture_answers_right(engine: Engine, path: Path, questions: list[SyntheticQuestion]) -> Iterator[bool]:
    """For each question whether the engine's answer about a picture is right, in every word."""
    blocks: Iterator[VideoBlock] = open_image(path, engine.geometry).blocks(engine.config.block_tokens)
    answers = engine.answer(engine.prefill(blocks), [Question(q.text, q.options) for q in questions])
    return (is_right(answer.text, question) for answer, question in zip(answers, questions, strict=True))


@torch.no_grad()
def answers_right(
    model: Qwen2_5_VLForConditionalGeneration, processor: AutoProcessor, path: Path, questions: list[SyntheticQuestion]
) -> Iterator[bool]:
    """For each question whether the model's answer is right: its best letter, or every word of its greedy reply."""
    tokenizer = processor.tokenizer
    frames = torch.from_numpy(np.stack(list(sampled_frames(path)))).permute(0, 3, 1, 2)
    inputs = processor.video_processor(videos=[frames], return_tensors="pt")
    features = torch.cat(model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"], return_dict=True).pooler_output)
    prefix = tokenizer(QWEN2_5_VL.prefix).input_ids
    times_s = np.arange(int(inputs["video_grid_thw"][0, 0])) * GROUP_S
    visual = torch.from_numpy(QWEN2_5_VL.positions(times_s, start=len(prefix)))
    embed = model.get_input_embeddings()
    for question in questions:
        prompt, reply = tokenizer(question_prompt(QWEN2_5_VL, question)).input_ids, _reply(tokenizer, question)
        spoken = torch.tensor(prompt + reply[:-1])
        embedded = torch.cat([embed(torch.tensor(prefix)), features, embed(spoken)])[None]
        text = torch.arange(len(prefix)).expand(3, -1)
        after = (visual.max() + 1 + torch.arange(len(spoken))).expand(3, -1)
        positions = torch.cat([text, visual, after], dim=1)[:, None]
        logits = model(inputs_embeds=embedded, position_ids=positions, logits_to_keep=len(reply), use_cache=False).logits[0]
        yield _is_right(tokenizer, question, logits, reply)


def sampled_frames(path: Path) -> Iterator[np.ndarray]:
    """The frames that a sampler at 2 fps takes, (px, px, 3) uint8 RGB."""
    step = FRAMES_PER_GROUP // GROUP_FRAMES
    with av.open(str(path)) as container:
        for index, frame in enumerate(container.decode(video=0)):
            if index % step == 0:
                yield frame.to_ndarray(format="rgb24")


def _reply(tokenizer: PreTrainedTokenizerBase, question: SyntheticQuestion) -> list[int]:
    ids = tokenizer(expected_reply(question)).input_ids
    return ids if question.options else [*ids, tokenizer.eos_token_id]


def _is_right(tokenizer: PreTrainedTokenizerBase, question: SyntheticQuestion, logits: Tensor, reply: list[int]) -> bool:
    if not question.options:
        return logits.argmax(-1).tolist() == reply
    letters = tokenizer.convert_tokens_to_ids(list(OPTION_LETTERS[: len(question.options)]))
    return letters[int(logits[0, letters].argmax())] == reply[0]
