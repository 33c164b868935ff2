"""Reelkeep's engine: multimodal prefill under a fixed KV budget. A library for PyTorch; knows no Ray and no object store."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.compressed import CompressedVideo
    from engine.config import AnswerConfig, EngineConfig
    from engine.engine import Engine
    from engine.types import Answer, FrameGroup, PrefillTrace, Question, TextPart, VideoBlock

_HOMES = {
    "engine.compressed": ("CompressedVideo",),
    "engine.config": ("AnswerConfig", "EngineConfig"),
    "engine.engine": ("Engine",),
    "engine.types": ("Answer", "FrameGroup", "PrefillTrace", "Question", "TextPart", "VideoBlock"),
}

__all__ = [
    "Answer",
    "AnswerConfig",
    "CompressedVideo",
    "Engine",
    "EngineConfig",
    "FrameGroup",
    "PrefillTrace",
    "Question",
    "TextPart",
    "VideoBlock",
]


def __getattr__(name: str) -> Any:
    """Import on first use: a decode worker needs the types and the frame geometry, not transformers."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
