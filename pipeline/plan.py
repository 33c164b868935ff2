"""What a video will cost, told from its header: for the order of work, a dry run, and files that can't be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from engine.errors import InputError
from engine.geometry import FrameGeometry
from engine.memory import kv_bytes, peak_kv_bytes
from engine.models import model_path
from pipeline.config import JobConfig
from pipeline.room import expected_dtype
from pipeline.storage import local_path, split_s3
from pipeline.stream import one_line
from pipeline.task import VideoTask
from pipeline.video import pulse
from pipeline.video.source import open_media


@dataclass(frozen=True)
class VideoPlan:
    """One video before it is watched.

    Attributes:
        duration_s, tokens, groups: what the header promises; None where the file has to be downloaded to tell.
        problem: why it can't be watched, already known now; "" when nothing is.
    """

    video_id: str
    duration_s: float | None = None
    tokens: int | None = None
    groups: int | None = None
    problem: str = ""


def plan_video(task: VideoTask, geometry: FrameGeometry, config: JobConfig) -> VideoPlan:
    """Look at a file that is on this machine; an object isn't fetched just for a look. Never raises, and doesn't hang on a file that does."""
    timeout_s = config.decode.stall_timeout_s

    def look() -> Iterator[VideoPlan]:
        if split_s3(task.uri) is not None:
            yield VideoPlan(task.video_id)
            return
        source = open_media(local_path(task.uri), geometry, config.decode)
        yield VideoPlan(task.video_id, source.probe.duration_s, source.predicted_tokens(), source.predicted_groups())

    def stalled() -> InputError:
        return InputError(f"{task.uri}: opening it took more than decode.stall_timeout_s={timeout_s:g} without a sign of life")

    try:
        return next(pulse.watched(look(), timeout_s, stalled))
    except Exception as error:  # whatever it is, it will be met again, and told, when the video's turn comes
        return VideoPlan(task.video_id, problem=one_line(error))


def predicted_kv_bytes(config: JobConfig, tokens: int, model_folder: Path | None = None) -> tuple[int, int]:
    """Bytes of keys and values for a video of so many tokens: the most held at once, and what a full cache would hold. Loads no
    weights, and asks no more of a GPU than whether there is one: the machine that plans need not have any.

    Args:
        model_folder: where the model's configuration is, when it had to be fetched.
    """
    dtype = getattr(torch, expected_dtype(config))
    model = AutoConfig.from_pretrained(model_folder or model_path(config.engine), revision=config.engine.revision)
    full = kv_bytes(model, tokens, dtype)
    return min(peak_kv_bytes(model, config.engine.budget_tokens, config.engine.block_tokens, dtype), full), full
