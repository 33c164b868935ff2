"""How videos become frames: the settings, each with its unit, default and bound."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_WAIT_S = 1e6
"""Longest wait that may be set: timers overflow far above it."""


class DecodeConfig(BaseModel):
    """Which frames are read, how large, by whom."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    sampling: Literal["fps", "frames", "keyframes"] = Field(
        "fps",
        description="fps: `fps` frames a second. frames: `frames` frames spread evenly. keyframes: the keyframes alone (cheapest).",
    )
    fps: float = Field(1.0, gt=0.0, le=240.0, description="Frames read per second of video, with sampling=fps. Default 1.")
    frames: int = Field(64, ge=1, le=1_000_000, description="Frames read per video, with sampling=frames. Default 64.")
    start_s: float | None = Field(None, description="Read from this time on, in seconds of the file's own clock. Default: its first frame.")
    end_s: float | None = Field(None, description="Read up to this time (exclusive), in seconds of the file's own clock. Default: its end.")
    min_frame_px: int | None = Field(
        None, ge=1, description="Smallest frame given to the model, in pixels (height times width). Default: the model processor's."
    )
    max_frame_px: int | None = Field(
        None, ge=1, description="Largest frame given to the model, in pixels (height times width). Default: the model processor's."
    )
    max_source_px: int = Field(
        67_108_864,
        ge=1,
        description="Largest frame or image accepted, in pixels; a larger one is refused. Default 8192 x 8192.",
    )
    decoder: Literal["auto", "decord", "pyav"] = Field(
        "auto",
        description="auto: pyav, by the project's benchmark. decord: falls back to pyav where it refuses or harms.",
    )
    threads: int = Field(1, ge=1, le=16, description="Decoding threads of one video (slices, never whole frames). Default 1.")
    where: Literal["worker", "actor"] = Field(
        "worker", description="worker: decode in CPU tasks, ahead of the engine. actor: decode inside the engine's process, in turn."
    )
    prefetch_blocks: int = Field(4, ge=1, description="Blocks that may wait for the engine, with where=worker. Default 4.")
    stall_timeout_s: float = Field(
        120.0, gt=0.0, le=MAX_WAIT_S, description="Give a file up when no frame comes for this long, in seconds. Default 120."
    )

    @model_validator(mode="after")
    def _check_order(self) -> DecodeConfig:
        if self.start_s is not None and self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError(f"decode.end_s={self.end_s} must exceed decode.start_s={self.start_s}; raise end_s or leave it out")
        if self.min_frame_px is not None and self.max_frame_px is not None and self.max_frame_px < self.min_frame_px:
            raise ValueError(f"decode.max_frame_px={self.max_frame_px} must be at least decode.min_frame_px={self.min_frame_px}; raise it")
        if self.min_frame_px is not None and self.min_frame_px > self.max_source_px:
            raise ValueError(f"decode.min_frame_px={self.min_frame_px} must be at most decode.max_source_px={self.max_source_px}; lower it")
        return self
