"""Compress as you prefill: encode a block, run it through the model, let each layer score and evict, go on.

Source of the method: Kim & Bae, arXiv 2604.16734. `Prefill.read` and `Prefill.step` are the loop; everything else keeps the books.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.blocks import check_block, halves
from engine.cache import ENTRY_FIELDS, BudgetedCache, Mark
from engine.compressed import ReadState
from engine.config import EngineConfig
from engine.errors import InputError, NumericalError, OutOfMemoryError, PositionLimitError
from engine.memory import MemoryMeter
from engine.models.base import Encoded, ModelAdapter, advance
from engine.types import TextPart, VideoBlock

_END = object()


class Prefill:
    """Reads one prompt into one cache.

    Args:
        adapter, cache, meter: the model, where entries go, who counts.
        config: block size and alignment.
        encode: what runs the vision tower over a block; the adapter itself when None.
        proxy_ids: token ids of the question, for query-aware policies: run behind every block, never stored.
        state: where an earlier read of the same prompt stopped.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: BudgetedCache,
        meter: MemoryMeter,
        config: EngineConfig,
        *,
        encode: Callable[[VideoBlock], Encoded] | None = None,
        proxy_ids: Sequence[int] = (),
        state: ReadState | None = None,
    ):
        self.adapter, self.cache, self.meter, self.config = adapter, cache, meter, config
        self.vision = encode or adapter.encode
        self.state = state or ReadState()
        self.proxy = adapter.embed_text(list(proxy_ids))
        self.text: list[int] = [] if state else adapter.tokenize(adapter.prompt_parts()[0], special=True)
        self.waiting: list[tuple[Tensor, Tensor]] = []  # unaligned blocks: what is encoded but not yet run
        self.vision_s = 0.0

    def run(self, stream: Iterable[VideoBlock | TextPart]) -> None:
        """Read the whole stream.

        Raises:
            InputError: no block came.
            PositionLimitError, NumericalError, OutOfMemoryError: see `check`, `step` and `read`.
        """
        for item in self.timed(stream):
            if isinstance(item, TextPart):
                self.text += self.adapter.tokenize(item.text)
            else:
                self.check_block(item)
                self.open_media(item)
                for block in self.fitting(item):
                    self.read(block)
        if self.state.kind is None:
            raise InputError(
                "the stream held no frames, so there is nothing to ask about; check the video's length and the sampling settings"
            )
        if self.text:
            self.close_media()
        self.flush_text()

    def read(self, block: VideoBlock) -> None:
        """Encode one block and run it; out of memory, go on with halves as long as nothing of it was lost."""
        mark, state, full = self.cache.mark(), self.state, ""
        try:
            visual_tokens = self.run_block(block)
        except torch.OutOfMemoryError as error:
            # The retry waits until this clause is left: the error keeps every tensor of the failed pass alive.
            full, self.state = str(error).splitlines()[0], state
        if full:
            for half in self.halved(block, mark, full):
                self.read(half)
            return
        trace = self.meter.trace
        trace.groups, trace.frames = trace.groups + block.groups, trace.frames + len(block.frames)
        trace.visual_tokens += visual_tokens

    def run_block(self, block: VideoBlock) -> int:
        """Vision tower and decoder over one block; returns how many visual tokens it had."""
        embeds, entries = self.encode(block)
        self.waiting.append((embeds, entries))
        visual_tokens = int((entries[:, 1] >= 0).sum())
        for embeds, entries in self.cut(last=self.config.alignment == "group"):
            self.step(embeds, entries, time_s=block.times_s[-1])
        return visual_tokens

    def step(self, embeds: Tensor, entries: Tensor, *, protect: bool = False, time_s: float = 0.0) -> None:
        """One pass of the model over one block; each layer evicts as soon as its attention has run.

        Args:
            embeds: (tokens, hidden); entries: (tokens, 3 + axes) int32.

        Raises:
            NumericalError: the model returned NaN or infinity.
        """
        started, evicted_before = time.perf_counter(), self.cache.evict_s
        self.cache.begin_block(entries, protect=protect)
        self.forward(embeds, entries)
        self.meter.record(
            self.cache,
            block_tokens=len(embeds),
            forward_tokens=len(embeds) + len(self.proxy),
            vision_s=self.vision_s,
            prefill_s=time.perf_counter() - started,
            evict_s=self.cache.evict_s - evicted_before,
            time_s=time_s,
        )
        self.vision_s = 0.0

    def forward(self, embeds: Tensor, entries: Tensor) -> None:
        """Run a block with the proxy queries behind it. `entries` may be empty: then only the proxies run."""
        positions = entries[:, ENTRY_FIELDS:].long()
        behind = torch.arange(len(self.proxy), device=positions.device)[:, None].expand(-1, positions.shape[1]) + self.state.cursor.next
        hidden = self.adapter.forward(torch.cat([embeds, self.proxy])[None], torch.cat([positions, behind])[None], self.cache)
        if not torch.isfinite(hidden[0, -1]).all():
            raise NumericalError(
                f"the model returned NaN or infinity after {self.cache.seen_tokens} tokens (engine.dtype={self.config.dtype}); "
                "load it in bfloat16 or float32, and check the weights"
            )

    def compress_now(self) -> None:
        """Evict once, after a full prefill, by the same policy (the way of SnapKV and KeyDiff as published)."""
        self.cache.evicts_while_reading = self.cache.policy.evicts
        nothing = torch.empty(0, ENTRY_FIELDS + self.adapter.axes, dtype=torch.int32, device=self.adapter.device)
        if len(self.proxy):
            self.cache.begin_block(nothing)
            self.forward(self.proxy[:0], nothing)
        else:
            for layer in range(self.cache.shape.layers):
                self.cache.compress(layer)
        self.meter.trace.kept_tokens = self.cache.held_tokens

    # Books

    def encode(self, block: VideoBlock) -> tuple[Tensor, Tensor]:
        """Vision tower, positions and entry descriptions of one block; moves the cursor behind it."""
        started = time.perf_counter()
        piece = self.vision(block)
        self.synchronize()
        self.vision_s += time.perf_counter() - started
        positions = self.adapter.positions(block, piece, self.state.cursor)
        self.check(positions)
        group = torch.where(piece.visual, piece.group + self.state.groups_before, -1)
        entries = self.described(positions, group, piece.place)
        groups = self.state.groups_before + block.first_group + block.groups
        self.state = replace(self.state, cursor=advance(self.state.cursor, positions), groups=groups)
        return piece.embeds.to(self.adapter.dtype), entries

    def described(self, positions: Tensor, group: Tensor, place: Tensor) -> Tensor:
        """(tokens, 3 + axes) int32 descriptions of tokens that come next in the sequence."""
        first = self.cache.seen_tokens + sum(len(entries) for _, entries in self.waiting)
        index = torch.arange(first, first + len(positions), device=positions.device)
        return torch.cat([torch.stack([index, group, place], dim=-1), positions], dim=-1).int()

    def check_block(self, block: VideoBlock) -> None:
        """Refuse a block that doesn't fit the model or doesn't follow the one before."""
        check_block(block, self.adapter.geometry)
        state = self.state
        if state.open and block.media == state.media:
            expected = state.groups - state.groups_before
            if block.kind != state.kind or block.first_group < expected:
                raise InputError(
                    f"block of {block.kind} group {block.first_group} of media {block.media}: {state.kind} group {expected} or a later one "
                    "comes next; give blocks in order, each once, and a new media number to a new item"
                )
        elif block.media < state.media:
            raise InputError(f"block of media {block.media} behind media {state.media}: number the items of a prompt upwards")

    def open_media(self, block: VideoBlock) -> None:
        """Before the first block of a media item: run the text that stands before it."""
        if self.state.open and block.media == self.state.media:
            return
        self.close_media()
        self.text += self.adapter.tokenize(self.adapter.opening_text(self.adapter.processor, block.kind), special=True)
        self.flush_text(protect=self.state.kind is None)
        cursor = replace(self.state.cursor, media_start=self.state.cursor.next, media_time_s=block.times_s[0])
        groups = self.state.groups
        self.state = replace(self.state, cursor=cursor, media=block.media, kind=block.kind, open=True, groups_before=groups)

    def close_media(self) -> None:
        """Put the text that ends the open media item, if there is one, before the text gathered since."""
        if self.state.open and self.state.kind is not None:
            self.text = self.adapter.tokenize(self.adapter.close_text(self.state.kind), special=True) + self.text
            self.state = replace(self.state, open=False)

    def flush_text(self, *, protect: bool = False) -> None:
        """Run the text gathered so far: the prompt prefix in one protected step, later text in steps of the block size."""
        for embeds, entries in self.cut(last=True):
            self.step(embeds, entries)
        length = len(self.text) if protect else self.config.block_tokens
        for start in range(0, len(self.text), length):
            ids = self.text[start : start + length]
            ones = torch.ones(len(ids), self.adapter.axes, dtype=torch.long, device=self.adapter.device)
            positions = ones.cumsum(0) - 1 + self.state.cursor.next
            self.check(positions)
            entries = self.described(positions, -ones[:, 0], torch.zeros_like(ones[:, 0]))
            self.state = replace(self.state, cursor=advance(self.state.cursor, positions))
            self.step(self.adapter.embed_text(ids), entries, protect=protect)
        if protect:
            self.meter.trace.prefix_tokens = len(self.text)
        self.text = []

    def cut(self, *, last: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Hand out what is encoded: whole blocks as they are, or exact lengths that ignore structure (alignment none)."""
        if not self.waiting:
            return
        embeds, entries = (torch.cat(parts) for parts in zip(*self.waiting, strict=True))
        self.waiting = []
        length = len(embeds) if self.config.alignment == "group" else self.config.block_tokens
        while len(embeds) >= length or (last and len(embeds)):
            yield embeds[:length], entries[:length]
            embeds, entries = embeds[length:], entries[length:]
        if len(embeds):
            self.waiting = [(embeds, entries)]

    def fitting(self, block: VideoBlock) -> Iterator[VideoBlock]:
        """The block, or its halves when blocks had to shrink before."""
        if self.state.largest_block_groups is None or block.groups <= self.state.largest_block_groups:
            yield block
            return
        for half in halves(block):
            yield from self.fitting(half)

    def halved(self, block: VideoBlock, mark: Mark, full: str) -> tuple[VideoBlock, VideoBlock]:
        """Undo the block and cut it, or give up with what to do.

        Args:
            full: what the device said.

        Raises:
            OutOfMemoryError: the block is one group, or layers have evicted already and can't be undone.
        """
        groups = block.groups
        self.waiting = []
        if groups < 2 or self.config.alignment != "group" or not self.cache.can_roll_back(mark):
            raise OutOfMemoryError(
                f"no room for a block of {groups} groups at {block.times_s[0]:.1f} s: {full}; "
                f"set engine.block_tokens to half of {self.config.block_tokens}, lower decode.max_frame_px, or use a larger device"
            )
        self.cache.roll_back(mark)
        if self.adapter.device.type == "cuda":
            torch.cuda.empty_cache()
        self.state = replace(self.state, largest_block_groups=(groups + 1) // 2)
        self.meter.trace.warnings.append(
            f"blocks halved to {self.state.largest_block_groups} groups at {block.times_s[0]:.1f} s: out of memory"
        )
        return halves(block)

    def check(self, positions: Tensor) -> None:
        """Refuse tokens that lie past the last position the model was made for, before the model runs over them."""
        limit, last = self.adapter.position_limit, int(positions.max())
        if last >= limit:
            raise PositionLimitError(
                f"the input reaches rotary position {last}, the model ends at {limit} (engine.position_limit); "
                f"its first {self.state.groups} groups fit: sample fewer frames (decode.fps), cut the video (decode.end_s), "
                "or raise engine.position_limit if this checkpoint extrapolates"
            )

    def timed(self, stream: Iterable[VideoBlock | TextPart]) -> Iterator[VideoBlock | TextPart]:
        """The stream, with the time spent waiting for it counted."""
        iterator = iter(stream)
        while True:
            started = time.perf_counter()
            item = next(iterator, _END)
            self.meter.trace.input_wait_s += time.perf_counter() - started
            if item is _END:
                return
            yield item  # type: ignore[misc]

    def synchronize(self) -> None:
        """Let the device finish, so that times are true."""
        if self.adapter.device.type == "cuda":
            torch.cuda.synchronize(self.adapter.device)
