"""The same prompt twice: as a stream for the engine, and as inputs for transformers' one-shot forward with explicit positions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine import Engine, FrameGroup, TextPart
from engine.models.base import ModelAdapter

QUESTION = "what is on the picture?"
KINDS = {"video": "v", "image": "i", "mixed": "vti", "two_videos": "vv"}
SECONDS_PER_GROUP = 0.7


@dataclass
class Media:
    """One item of a prompt: frames (n, 3, height, width) uint8 at the model's size."""

    kind: str
    frames: np.ndarray


def make_media(engine: Engine, kinds: str, groups: int = 7) -> list[Media | str]:
    """v: a video of `groups` groups; i: an image (3 tiles for tiled models); t: text."""
    rng = np.random.default_rng(5)
    fixed, per_group = engine.geometry.fixed_px, engine.geometry.frames_per_group
    items: list[Media | str] = []
    for number, kind in enumerate(kinds):
        size = (fixed, fixed) if fixed else [(56, 84), (84, 56), (56, 56)][number % 3]
        if kind == "t":
            items.append("and now look at this")
        elif kind == "v":
            items.append(Media("video", rng.integers(0, 256, (groups * per_group, 3, *size), dtype=np.uint8)))
        else:
            items.append(Media("image", rng.integers(0, 256, (3 if fixed else 1, 3, *size), dtype=np.uint8)))
    return items


def stream(engine: Engine, items: list[Media | str]):
    """The prompt as `Engine.prefill` reads it."""
    media = 0
    for item in items:
        if isinstance(item, str):
            yield TextPart(item)
            continue
        per_group = engine.geometry.frames_per_group
        frames = item.frames
        if item.kind == "image" and not engine.geometry.fixed_px:
            frames = np.repeat(frames, per_group, axis=0)
        size = 1 if item.kind == "image" and engine.geometry.fixed_px else per_group
        groups = [FrameGroup(frames[i : i + size], 3.0 + i / size * SECONDS_PER_GROUP) for i in range(0, len(frames), size)]
        seconds = SECONDS_PER_GROUP if item.kind == "video" else None
        yield from engine.planner.blocks(groups, seconds_per_group=seconds, kind=item.kind, media=media)
        media += 1


def reference_inputs(folder: Path, items: list[Media | str], question: str = QUESTION) -> dict:
    """What transformers' own processor makes of the prompt, plus positions by the trained rule, from a loop of our own."""
    from transformers import AutoConfig, AutoProcessor

    processor, config = AutoProcessor.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    content = [{"type": "text", "text": i} if isinstance(i, str) else {"type": i.kind} for i in items]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
    if config.model_type == "qwen2_5_vl":
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": "You are a helpful assistant."}]})
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    videos = [torch.from_numpy(i.frames) for i in items if isinstance(i, Media) and i.kind == "video"]
    if config.model_type == "qwen2_5_vl":
        images = [torch.from_numpy(i.frames[0]) for i in items if isinstance(i, Media) and i.kind == "image"]
        inputs = dict(processor(text=[text], images=images or None, videos=videos or None, return_tensors="pt"))
        inputs["position_ids"] = qwen_positions(inputs, config)
        return {k: inputs[k] for k in inputs if k in WANTED}
    # InternVL tiles: the frames are tiles already, so only normalise them.
    pixels = []
    for item in items:
        if isinstance(item, Media):
            which = processor.video_processor if item.kind == "video" else processor.image_processor
            mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (which.image_mean, which.image_std))
            pixels.append((torch.from_numpy(item.frames).float() / 255 - mean) / std)
            tokens = processor.image_token * processor.image_seq_length
            if item.kind == "video":
                frames = [
                    f"Frame{n + 1}: {processor.start_image_token}{tokens}{processor.end_image_token}" for n in range(len(item.frames))
                ]
                text = text.replace("<video>", "\n".join(frames), 1)
            else:
                text = text.replace("<IMG_CONTEXT>\n", f"<img>{'@' * len(item.frames)}</img>\n", 1)
    text = text.replace("@", processor.image_token * processor.image_seq_length)
    ids = processor.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    return {"input_ids": ids, "pixel_values": torch.cat(pixels), "position_ids": torch.arange(ids.shape[1])[None]}


WANTED = {"input_ids", "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "position_ids"}


def qwen_positions(inputs: dict, config) -> torch.Tensor:
    """(3, 1, tokens): the rule Qwen2.5-VL was trained with, one token at a time."""
    grids = {
        config.image_token_id: iter(inputs.get("image_grid_thw", torch.zeros(0, 3)).tolist()),
        config.video_token_id: iter(inputs.get("video_grid_thw", torch.zeros(0, 3)).tolist()),
    }
    ids, positions, highest, i = inputs["input_ids"][0].tolist(), [], -1, 0
    while i < len(ids):
        if ids[i] not in grids:
            positions.append((highest + 1,) * 3)
            highest, i = highest + 1, i + 1
            continue
        t, h, w = (int(v) for v in next(grids[ids[i]]))
        start = highest + 1
        for step in range(t):
            time = int(step * SECONDS_PER_GROUP * config.vision_config.tokens_per_second) if ids[i] == config.video_token_id else 0
            for row in range(h // 2):
                for column in range(w // 2):
                    positions.append((start + time, start + row, start + column))
        highest = max(max(p) for p in positions)
        i += t * h * w // 4
    return torch.tensor(positions).T[:, None]


def last_logits(engine: Engine, compressed, question: str = QUESTION) -> torch.Tensor:
    """(vocabulary,) logits behind a question asked of a compressed cache."""
    from engine.answer import _Batch
    from engine.types import Question

    batch = _Batch(engine.adapter, compressed, [Question(question)], engine.config.answer)
    mark = compressed.cache.mark()
    with torch.inference_mode():
        compressed.cache.begin_tail(1, int(batch.counts.max()))
        logits = batch.read_questions()[0]
    compressed.cache.roll_back(mark)
    return logits


def load_reference(folder: Path, adapter: ModelAdapter):
    """The same weights in transformers' own class with its own attention."""
    return type(adapter).load_model(str(folder), dtype=torch.float32, attn_implementation="sdpa").eval()
