"""What a video will cost, told from its header: for the order of work, a dry run, and files that can't be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoConfig

from engine.errors import ReelkeepError
from engine.geometry import FrameGeometry
from engine.memory import kv_bytes, peak_kv_bytes
from engine.models import choose_device, model_path
from pipeline.config import JobConfig
from pipeline.storage import local_path, split_s3
from pipeline.task import VideoTask
from pipeline.video.source import open_media


@dataclass(frozen=True)
class VideoPlan:
    """One video before it is watched.

    Attributes:
        duration_s, tokens: what the header promises; None where the file has to be downloaded to tell.
        problem: why it can't be watched, already known now; "" when nothing is.
    """

    video_id: str
    duration_s: float | None = None
    tokens: int | None = None
    problem: str = ""


def plan_video(task: VideoTask, geometry: FrameGeometry, config: JobConfig) -> VideoPlan:
    """Look at a file that is on this machine; an object isn't fetched just for a look."""
    try:
        if split_s3(task.uri) is not None:
            return VideoPlan(task.video_id)
        source = open_media(local_path(task.uri), geometry, config.decode)
        return VideoPlan(task.video_id, source.probe.duration_s, source.predicted_tokens())
    except ReelkeepError as error:
        return VideoPlan(task.video_id, problem=str(error))


def predicted_kv_bytes(config: JobConfig, tokens: int) -> tuple[int, int]:
    """Bytes of keys and values for a video of so many tokens: the most held at once, and what a full cache would hold. Loads no weights."""
    device = choose_device(config.engine.device)
    dtype = (
        getattr(torch, config.engine.dtype)
        if config.engine.dtype != "auto"
        else (torch.float32 if device.type == "cpu" else torch.bfloat16)
    )
    model = AutoConfig.from_pretrained(model_path(config.engine), revision=config.engine.revision)
    full = kv_bytes(model, tokens, dtype)
    return min(peak_kv_bytes(model, config.engine.budget_tokens, config.engine.block_tokens, dtype), full), full
