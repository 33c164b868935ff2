"""What crosses the engine's door: frames in, answers out. Plain data; knows no model and no file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

MediaKind = Literal["video", "image"]


@dataclass(frozen=True)
class FrameGroup:
    """The smallest piece of a visual stream that a block never cuts.

    A video's temporal group (2 frames for Qwen2.5-VL, 1 for InternVL), one tile of a tiled image, or a whole image.

    Attributes:
        frames: (frames, 3, height_px, width_px) uint8 RGB, already at the size the model wants.
        time_s: presentation time of the first frame, in the file's own clock; 0.0 for an image.
    """

    frames: np.ndarray
    time_s: float = 0.0


@dataclass(frozen=True)
class VideoBlock:
    """Whole consecutive groups of one video or image: what one prefill step reads.

    Attributes:
        frames: (groups * frames per group, 3, height_px, width_px) uint8 RGB.
        times_s: presentation time of each group's first frame; never decreasing, equal where a frame is shown at several wanted times.
        first_group: index, within this media item, of the first group.
        seconds_per_group: the nominal spacing of groups for regularly sampled video; None for irregular sampling
            (keyframes), where positions follow `times_s`.
        kind: "video" or "image".
        media: which item of the prompt this belongs to; 0 for the first. A change of `media` closes one item and opens the next.
    """

    frames: np.ndarray
    times_s: tuple[float, ...]
    first_group: int = 0
    seconds_per_group: float | None = None
    kind: MediaKind = "video"
    media: int = 0

    @property
    def groups(self) -> int:
        """Number of groups in this block."""
        return len(self.times_s)


@dataclass(frozen=True)
class TextPart:
    """Text between two media items of one prompt."""

    text: str


@dataclass(frozen=True)
class Question:
    """One question about what was prefilled.

    Attributes:
        text: the question, without options.
        options: answers to choose from, at most 26; empty for a free-form answer.
        question_id: carried through to the answer.
    """

    text: str
    options: tuple[str, ...] = ()
    question_id: str = ""


FinishReason = Literal["stop", "length", "choice", "error"]


@dataclass(frozen=True)
class Answer:
    """What the model said to one question.

    Attributes:
        text: the answer; for a multiple-choice question the chosen option's text. None when there is none (`error` says why).
        choice: letter of the chosen option ("A", "B", ...); None for free-form questions and errors.
        choice_probabilities: one a option, softmax over the option letters' logits; empty for free-form.
        finish_reason: "stop" (the model ended), "length" (cut off at max_new_tokens), "choice", or "error".
        prompt_tokens: tokens of this question, template included; the video's tokens are in the trace.
        answer_tokens: tokens generated.
        ttft_s: seconds from the start of the batch to this question's first token.
        answer_s: seconds from the start of the batch to this question's last token.
    """

    question_id: str
    text: str | None
    choice: str | None = None
    choice_probabilities: tuple[float, ...] = ()
    finish_reason: FinishReason = "stop"
    prompt_tokens: int = 0
    answer_tokens: int = 0
    ttft_s: float = 0.0
    answer_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class BlockTrace:
    """One prefill step, as measured.

    Attributes:
        block_tokens: tokens this step added.
        seen_tokens: tokens read so far, prefix included.
        kept_tokens: entries each layer holds per KV head after the step.
        kv_held_bytes: bytes of keys and values that held entries during the step, at its peak.
        kv_full_bytes: bytes a full cache would hold after the step.
        device_peak_bytes: CUDA's peak allocation so far; 0 on CPU.
        process_peak_bytes: peak resident set of the process so far.
        vision_s, prefill_s, evict_s: seconds in the vision tower, in the language model (eviction included), in eviction alone.
    """

    block_tokens: int
    seen_tokens: int
    kept_tokens: int
    kv_held_bytes: int
    kv_full_bytes: int
    device_peak_bytes: int
    process_peak_bytes: int
    vision_s: float
    prefill_s: float
    evict_s: float
    time_s: float = 0.0


@dataclass
class PrefillTrace:
    """What reading one prompt cost.

    Attributes:
        groups, frames, visual_tokens: what was read.
        total_tokens: every token read, text included.
        kv_peak_bytes: largest `kv_held_bytes` of any step.
        kv_predicted_bytes: the peak by arithmetic alone, L*M + b entries once the budget is full; `kv_peak_bytes` must equal it.
        kv_full_bytes: what a full cache would have held.
        warnings: everything that happened besides the plain path, in words ("block halved to 8 groups: out of memory").
    """

    groups: int = 0
    frames: int = 0
    visual_tokens: int = 0
    total_tokens: int = 0
    prefix_tokens: int = 0
    kept_tokens: int = 0
    kv_peak_bytes: int = 0
    kv_predicted_bytes: int = 0
    kv_full_bytes: int = 0
    device_peak_bytes: int = 0
    process_peak_bytes: int = 0
    vision_s: float = 0.0
    prefill_s: float = 0.0
    evict_s: float = 0.0
    input_wait_s: float = 0.0
    last_time_s: float = 0.0
    blocks: list[BlockTrace] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
