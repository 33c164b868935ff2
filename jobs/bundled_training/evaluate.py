"""How often a bundle answers rightly: real files, decoded, through transformers' own forward with the whole cache."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor
from transformers import AutoProcessor, PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

from jobs.bundled_training.lessons import OPTION_LETTERS, PREFIX, expected_reply, question_prompt, video_positions
from jobs.bundled_training.model import GROUP_FRAMES
from pipeline.synthetic.dataset import plan_videos
from pipeline.synthetic.questions import SyntheticQuestion
from pipeline.synthetic.script import SetName
from pipeline.synthetic.video import FRAMES_PER_GROUP, GROUP_S


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


def evaluate_bundle(folder: Path, *, set_name: SetName, groups: int, videos: int, seed: int, questions: int = 14) -> list[Tally]:
    """Generate unseen videos, ask about them, count.

    Args:
        folder: what `save_bundle` wrote.
        seed: of the videos; training uses other ones.
    """
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    asked, right = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as scratch:
        for video in plan_videos(videos=videos, groups=groups, set_name=set_name, seed=seed, questions=questions):
            path = video.write(Path(scratch))
            wanted = [question for _, question in video.questions]
            for question, correct in zip(wanted, answers_right(model, processor, path, wanted), strict=True):
                key = (question.kind, "options" if question.options else "words")
                asked[key] += 1
                right[key] += correct
            path.unlink()
    return [Tally(set_name, groups, *key, right[key], asked[key]) for key in sorted(asked)]


@torch.no_grad()
def answers_right(
    model: Qwen2_5_VLForConditionalGeneration, processor: AutoProcessor, path: Path, questions: list[SyntheticQuestion]
) -> Iterator[bool]:
    """For each question whether the model's answer is right: its best letter, or every word of its greedy reply."""
    tokenizer = processor.tokenizer
    frames = torch.from_numpy(np.stack(list(sampled_frames(path)))).permute(0, 3, 1, 2)
    inputs = processor.video_processor(videos=[frames], return_tensors="pt")
    features = torch.cat(model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"], return_dict=True).pooler_output)
    prefix = tokenizer(PREFIX).input_ids
    times_s = np.arange(int(inputs["video_grid_thw"][0, 0])) * GROUP_S
    visual = torch.from_numpy(video_positions(times_s, start=len(prefix)))
    embed = model.get_input_embeddings()
    for question in questions:
        prompt, reply = tokenizer(question_prompt(question)).input_ids, _reply(tokenizer, question)
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
