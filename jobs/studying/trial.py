"""One synthetic video or picture, kept in many ways: who still answers its questions?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engine import Engine, EngineConfig, Question, VideoBlock
from engine.blocks import BlockPlanner, subsample
from engine.cache import BudgetedCache
from engine.models import ModelAdapter
from engine.types import FrameGroup, MediaKind
from jobs.studying.cells import UNIFORM, Cell
from pipeline.synthetic.dataset import SyntheticVideo
from pipeline.synthetic.questions import SyntheticQuestion
from pipeline.synthetic.video import GROUP_S
from pipeline.video.config import DecodeConfig
from pipeline.video.source import open_media


@dataclass(frozen=True)
class Watched:
    """A decoded video or picture, small enough to hold: a row of groups, each with its own time.

    Attributes:
        groups: temporal groups, or tiles and the thumbnail behind them.
        group_tokens: visual tokens of each.
    """

    groups: list[FrameGroup]
    group_tokens: int
    kind: MediaKind

    @classmethod
    def of(cls, path: Path, adapter: ModelAdapter) -> Watched:
        """Decode a file as the main job does."""
        geometry = adapter.geometry
        source = open_media(str(path), geometry, DecodeConfig(fps=geometry.frames_per_group / GROUP_S))
        blocks = [block for block in source.blocks(1) if isinstance(block, VideoBlock)]  # a group is never split, so each is a block
        tokens = geometry.group_tokens(*source.frame_size_px) - (geometry.group_text_tokens if blocks[0].kind == "image" else 0)
        return cls([FrameGroup(block.frames, block.times_s[0]) for block in blocks], tokens, blocks[0].kind)

    def blocks(self, cell: Cell) -> Iterator[VideoBlock]:
        """The video or picture as a cell reads it."""

        def planned(block_groups: int) -> Iterator[VideoBlock]:
            planner = BlockPlanner(block_groups * self.group_tokens, lambda height_px, width_px: self.group_tokens)
            return planner.blocks(self.groups, seconds_per_group=GROUP_S if self.kind == "video" else None, kind=self.kind)

        if cell.policy == UNIFORM and cell.budget_tokens is not None:
            return subsample(planned(1), total_groups=len(self.groups), keep_groups=max(1, cell.budget_tokens // self.group_tokens))
        return planned(cell.block_groups)


class Laboratory:
    """One loaded model behind the engines of all cells."""

    def __init__(self, adapter: ModelAdapter, kind: MediaKind = "video") -> None:
        self.adapter = adapter
        self.prefix_tokens = adapter.prefix_tokens(adapter.processor, adapter.config, kind)

    @cache  # noqa: B019 - lives as long as the study
    def engine(self, cell: Cell, group_tokens: int) -> Engine:
        """The engine of a cell, over the same weights as all others."""
        budget = 1 if cell.budget_tokens is None else cell.budget_tokens
        settings = cell.settings() | {
            "budget_tokens": self.prefix_tokens + budget,
            "block_tokens": cell.block_groups * group_tokens + (group_tokens // 2 if cell.alignment == "none" else 0),
            "compress": cell.compress,
            "alignment": cell.alignment,
        }
        return Engine(self.adapter, EngineConfig.model_validate(self.adapter.config.model_dump() | settings))

    def try_cell(self, cell: Cell, watched: Watched, video: SyntheticVideo) -> list[dict[str, Any]]:
        """Keep a video in one way and ask all its questions.

        Returns:
            A row a question: cell, video_id, question_id, kind, right, and for the video events_kept (share of its events of which a
            layer keeps a token, mean of the layers) and kv_peak_bytes.
        """
        engine = self.engine(cell, watched.group_tokens)
        asked = [Question(q.text, q.options, question_id) for question_id, q in video.questions]
        passes: Sequence[list[Question]] = [[question] for question in asked] if engine.query_aware else [asked]
        rows = []
        for questions in passes:
            kept = engine.prefill(watched.blocks(cell), question=questions[0] if engine.query_aware else None)
            events_kept = _events_kept(kept.cache, [needle.group for needle in video.script.needles])
            wanted = dict(video.questions)
            for answer in engine.answer(kept, questions):
                rows.append(
                    {
                        "cell": cell.name,
                        "video_id": video.video_id,
                        "question_id": answer.question_id,
                        "kind": wanted[answer.question_id].kind,
                        "right": is_right(answer.text, wanted[answer.question_id]),
                        "events_kept": events_kept,
                        "kv_peak_bytes": kept.trace.kv_peak_bytes,
                    }
                )
        return rows


def is_right(said: str | None, question: SyntheticQuestion) -> bool:
    """Whether an answer is the expected one, in every word."""
    return said is not None and said.strip().lower() == question.answer.lower()


def _events_kept(cache: BudgetedCache, events: list[int]) -> float:
    shares = []
    for layer in range(cache.shape.layers):
        groups = set(cache.entries(layer)[..., 1].flatten().tolist())
        shares.append(sum(event in groups for event in events) / len(events))
    return sum(shares) / len(shares)
