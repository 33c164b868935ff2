"""The engine: load a model, read a prompt under a fixed budget, answer questions about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from engine.answer import answer
from engine.blocks import BlockPlanner
from engine.cache import BudgetedCache
from engine.compressed import CompressedVideo, load_into
from engine.config import EngineConfig
from engine.errors import CacheMismatchError, ConfigError, InputError, PositionLimitError
from engine.geometry import FrameGeometry
from engine.memory import MemoryMeter
from engine.models import ModelAdapter, load_adapter
from engine.models.base import Encoded
from engine.policies import make_policy
from engine.prefill import Prefill
from engine.types import Answer, PrefillTrace, Question, TextPart, VideoBlock

QUESTION_TOKENS = 64
"""Positions kept free for a question behind the longest video that `Engine.check_length` lets pass, beside the answer's own."""


class Engine:
    """Answers questions about videos and images of any length, holding at most `budget_tokens` entries a layer.

    Args:
        adapter: a loaded model; `Engine.load` makes one from a hub id or a folder.
        config: budget, block size, policy and answer settings.
        encode: what runs the vision tower over a block; the adapter itself when None. Engines that read the same blocks can share it.

    Attributes:
        trace: of the prompt that is being read, or was read last; grows block by block, for whoever watches an engine at work.
    """

    def __init__(self, adapter: ModelAdapter, config: EngineConfig, encode: Callable[[VideoBlock], Encoded] | None = None):
        self.trace: PrefillTrace | None = None
        self.adapter, self.config, self.encode = adapter, config, encode or adapter.encode
        self.policy = make_policy(config.policy, config.policy_options)
        self._identity: dict[str, str] | None = None

    @classmethod
    def load(cls, config: EngineConfig | str | Path, *, folder: str | Path | None = None, **settings: Any) -> Engine:
        """Load a checkpoint.

        Args:
            config: all settings, or just the hub id or folder.
            folder: where this machine has the model's files, when they aren't where its name says (fetched from a bucket, say).
            settings: fields of `EngineConfig` that differ: `Engine.load("Qwen/Qwen2.5-VL-7B-Instruct", budget_tokens=2048)`.

        Raises:
            ConfigError: the checkpoint, the device, the policy or a setting can't be used; says which and what to do.
        """
        given = config.model_dump() if isinstance(config, EngineConfig) else {"model": str(config)}
        try:
            config = EngineConfig(**(given | settings))
        except ValidationError as error:
            problems = (f"engine.{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors())
            raise ConfigError("; ".join(problems)) from error
        make_policy(config.policy, config.policy_options)  # a misspelt policy fails before the weights load
        return cls(load_adapter(config, folder), config)

    @property
    def geometry(self) -> FrameGeometry:
        """Frame sizes and token counts of the loaded model."""
        return self.adapter.geometry

    @property
    def planner(self) -> BlockPlanner:
        """Cuts a stream of frame groups into blocks of this engine's size."""
        return BlockPlanner(self.config.block_tokens, self.geometry.group_tokens)

    @property
    def query_aware(self) -> bool:
        """Whether the policy needs the question, so that each question takes a prefill of its own."""
        return self.policy.needs_question

    @property
    def identity(self) -> dict[str, str]:
        """What a stored cache must match to be asked by this engine."""
        if self._identity is None:
            config = self.config
            self._identity = self.adapter.identity() | {
                "policy": config.policy,
                "policy_options": str(sorted(config.policy_options.items())),
                "budget_tokens": str(config.budget_tokens),
                "block_tokens": str(config.block_tokens),
                "alignment": config.alignment,
                "compress": config.compress,
            }
        return self._identity

    def check_length(self, groups: int, seconds: float, height_px: int, width_px: int) -> None:
        """Refuse, before any work, a video whose positions would run past the model's end.

        Args:
            groups: temporal groups it would have; seconds: its sampled span; height_px, width_px: frame size after resizing.

        Raises:
            PositionLimitError: says how long a video fits.
        """
        head = len(self.adapter.tokenize(self.adapter.prompt_parts()[0], special=True))
        span, limit = self.adapter.span_positions(groups, seconds, height_px, width_px), self.adapter.position_limit
        room = max(0, limit - head - QUESTION_TOKENS - self.config.answer.max_new_tokens)
        if span > room:
            share = room / span
            raise PositionLimitError(
                f"the video needs {span} rotary positions, the model ends at {limit} (engine.position_limit) and prompt and answer need some; about {int(groups * share)} of its "
                f"{groups} groups fit ({seconds * share:.0f} of {seconds:.0f} s): sample fewer frames (decode.fps), cut it (decode.start_s, "
                "decode.end_s), or raise engine.position_limit if this checkpoint extrapolates"
            )

    def prefill(
        self, stream: Iterable[VideoBlock | TextPart], *, question: Question | None = None, resume: CompressedVideo | None = None
    ) -> CompressedVideo:
        """Read a prompt block by block, evicting on the way.

        Args:
            stream: blocks in order, media items one after the other, text between them as `TextPart`; pulled lazily.
            question: the question, for query-aware policies.
            resume: what an earlier call returned for the beginning of the same prompt; reading goes on behind it, in the same cache,
                so that `resume` itself must not be asked any more.

        Raises:
            ConfigError: the budget is too small for the prompt prefix, or the policy needs a question.
            InputError: the stream held no frames, or runs past the model's last position.
            NumericalError, OutOfMemoryError: see `engine.errors`.
        """
        if self.query_aware and question is None:
            raise ConfigError(f"engine.policy={self.config.policy} is query-aware and needs the question: pass question=, or use keydiff")
        if resume:
            self._check_own(resume)
            if self.config.compress == "after" or self.config.alignment == "none":
                raise ConfigError("resume goes on behind whole blocks only: use engine.compress=during and engine.alignment=group")
        cache = resume.cache if resume else self.new_cache()
        meter = MemoryMeter(self.adapter.device, resume.trace if resume else None)
        self.trace = meter.trace
        asked = question if self.query_aware else None
        proxy = self.adapter.question_ids(asked) if asked else []
        state = resume.state if resume else None
        reader = Prefill(self.adapter, cache, meter, self.config, encode=self.encode, proxy_ids=proxy, state=state)
        with torch.inference_mode():
            reader.run(stream)
            if self.config.compress == "after":
                reader.compress_now()
        return CompressedVideo(cache, reader.state, meter.trace, self.identity, (asked.text, *asked.options) if asked else None)

    def answer(self, compressed: CompressedVideo, questions: Sequence[Question | str]) -> list[Answer]:
        """Answer questions about what was read. The cache isn't changed, so it can be asked again and again.

        Raises:
            CacheMismatchError: another model or setting made the cache.
            InputError: the cache was kept for another question (query-aware policies).
        """
        self._check_own(compressed)
        if isinstance(questions, str):
            raise InputError(f"questions={questions!r} is one text; give a list of questions")
        asked = [Question(q) if isinstance(q, str) else q for q in questions]
        meter = MemoryMeter(self.adapter.device, compressed.trace)
        with torch.inference_mode():
            answers = answer(self.adapter, compressed, asked, self.config.answer)
        meter.note_peaks()
        return answers

    def load_compressed(self, path: str | Path) -> CompressedVideo:
        """Open a cache that `CompressedVideo.save` stored.

        Raises:
            CacheMismatchError: it is damaged, or another model, revision, prompt or setting wrote it.
        """
        return load_into(self.new_cache(), path, self.identity)

    def _check_own(self, compressed: CompressedVideo) -> None:
        for key, ours in self.identity.items():
            if compressed.identity.get(key) != ours:
                raise CacheMismatchError(
                    f"this cache was made with {key}={compressed.identity.get(key)}, the engine has {key}={ours}; "
                    "load that model and setting, or prefill the video again"
                )

    def new_cache(self) -> BudgetedCache:
        """An empty cache of this engine's budget."""
        try:
            cache = BudgetedCache(
                self.adapter.cache_shape,
                self.policy,
                self.config.budget_tokens,
                unrotate=self.adapter.unrotate,
                kernel=self.adapter.kernel,
            )
        except (RuntimeError, TypeError) as error:
            needed = self.config.budget_tokens * self.adapter.cache_shape.entry_bytes * self.adapter.cache_shape.layers
            raise ConfigError(
                f"engine.budget_tokens={self.config.budget_tokens} needs {needed:,} bytes, which {self.adapter.device} hasn't got; lower it"
            ) from error
        if self.config.compress == "after":
            cache.evicts_while_reading = False
        return cache
