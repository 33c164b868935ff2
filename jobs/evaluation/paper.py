"""The figures of the method's paper, to be shown beside ours: per cent right, from arXiv 2604.16734."""

from __future__ import annotations

import re
from dataclasses import dataclass

SOURCE = "Kim & Bae, arXiv 2604.16734"
NOTE = (
    "The paper reads up to 8,192 visual tokens with Qwen2.5-VL, and 36 tiles or 32 frames with InternVL3.5; ImageNeedle is MileBench's "
    "ImageNeedleInAHaystack (320 questions), MLVU is MLVU-Test (502), Video-MME its Long part."
)
COLUMNS = ("ImageNeedle", "V*", "MLVU", "Video-MME-Long")


@dataclass(frozen=True)
class Figure:
    """One row of the paper's table.

    Attributes:
        policy: full, snapkv or keydiff.
        budget: entries kept; None for the full cache.
        percent: right answers, by column of the table.
    """

    model: str
    policy: str
    budget: int | None
    percent: dict[str, float]


def _row(model: str, policy: str, budget: int | None, *percent: float) -> Figure:
    return Figure(model, policy, budget, dict(zip(COLUMNS, percent, strict=True)))


FIGURES = (
    _row("InternVL3.5-8B", "full", None, 80.31, 84.35, 51.28, 53.89),
    _row("InternVL3.5-8B", "snapkv", 4096, 80.94, 82.72, 50.00, 52.33),
    _row("InternVL3.5-8B", "snapkv", 2048, 80.31, 83.76, 49.61, 52.33),
    _row("InternVL3.5-8B", "snapkv", 1024, 80.00, 82.61, 51.00, 53.11),
    _row("InternVL3.5-8B", "keydiff", 4096, 83.13, 74.87, 49.60, 51.33),
    _row("InternVL3.5-8B", "keydiff", 2048, 79.69, 75.39, 50.40, 52.00),
    _row("InternVL3.5-8B", "keydiff", 1024, 74.06, 74.35, 50.40, 52.22),
    _row("Qwen2.5-VL-7B", "full", None, 83.70, 79.58, 48.80, 50.00),
    _row("Qwen2.5-VL-7B", "snapkv", 4096, 85.00, 78.53, 44.82, 48.77),
    _row("Qwen2.5-VL-7B", "snapkv", 2048, 72.19, 78.53, 45.42, 49.11),
    _row("Qwen2.5-VL-7B", "snapkv", 1024, 45.31, 76.96, 46.02, 49.56),
    _row("Qwen2.5-VL-7B", "keydiff", 4096, 81.56, 79.58, 47.41, 49.33),
    _row("Qwen2.5-VL-7B", "keydiff", 2048, 78.44, 69.63, 46.41, 48.00),
    _row("Qwen2.5-VL-7B", "keydiff", 1024, 66.25, 67.02, 43.43, 46.55),
    _row("InternVL3.5-14B", "full", None, 84.06, 83.76, 49.67, 57.89),
    _row("InternVL3.5-14B", "keydiff", 1024, 75.94, 64.92, 46.41, 52.78),
    _row("Qwen2.5-VL-32B", "full", None, 96.56, 83.77, 48.40, 55.22),
    _row("Qwen2.5-VL-32B", "keydiff", 1024, 67.19, 72.25, 45.82, 54.56),
)
BLOCK_SIZES = {256: 72.19, 512: 75.31, 784: 80.63, 1024: 79.38}
"""ImageNeedle of Qwen2.5-VL-7B with a budget of 2048, by block size; the paper's table doesn't name the policy."""


def same_model(ours: str, theirs: str) -> bool:
    """Whether a hub id or folder is of the paper's model: "Qwen/Qwen2.5-VL-7B-Instruct" is its Qwen2.5-VL-7B."""

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]+", "", name.lower())

    return plain(theirs) in plain(ours)


def figure(model: str, policy: str, budget: int | None, column: str) -> float | None:
    """What the paper has for these settings; None where it has nothing."""
    for row in FIGURES:
        if same_model(model, row.model) and (row.policy, row.budget) == (policy, budget):
            return row.percent[column]
    return None
