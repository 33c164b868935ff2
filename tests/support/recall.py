"""How often a bundled model's answers are right, about the right media and about others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine import Engine
from jobs.bundled_training.evaluate import answers_right
from pipeline.synthetic.dataset import SyntheticVideo


def share_right(engine: Engine, asked: Sequence[SyntheticVideo], shown: Sequence[Path]) -> float:
    """Share of right answers to each video's or picture's questions, put to the file shown in its place."""
    pairs = zip(asked, shown, strict=True)
    return float(np.mean([right for media, path in pairs for right in answers_right(engine, path, [q for _, q in media.questions])]))
