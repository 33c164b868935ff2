"""How much memory, time, storage and money an archive takes: arithmetic on sizes and speeds, without a model, a GPU or a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from engine.errors import ConfigError
from engine.footprint import Footprint, kv_bytes, peak_kv_bytes
from pipeline.settings import JobConfig

RESERVE_BYTES = 2 * 10**9
"""CUDA's context, PyTorch's workspaces and the allocator's slack, for each engine; the figure of the run book."""

USABLE_SHARE = 0.9
"""Of a GPU's memory; the rest is left to the driver and to fragmentation, as inference servers do."""

QUESTION_TOKENS = 64
"""Taken for a question with its options and the prompt around it."""

ELEMENT_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
QUERY_AWARE = ("snapkv",)
UNBOUNDED = ("full",)
BLOCKS_TRIED = (256, 512, 784, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Clip:
    """One video, or `count` videos of one kind: seconds of it, and tokens of one temporal group and of all of it."""

    seconds: float
    group_tokens: int
    tokens: int
    count: int = 1


@dataclass(frozen=True)
class Archive:
    """What is to be watched.

    Attributes:
        clips: at least one.
        questions: about each video, as many as the video with the most of them has.
        notes: what was assumed, in words.
    """

    clips: tuple[Clip, ...]
    questions: int = 1
    notes: tuple[str, ...] = ()

    @property
    def videos(self) -> int:
        """Number of videos."""
        return sum(clip.count for clip in self.clips)

    @property
    def hours(self) -> float:
        """Hours of video."""
        return sum(clip.seconds * clip.count for clip in self.clips) / 3600

    @property
    def tokens(self) -> int:
        """Visual tokens, texts around frames included."""
        return sum(clip.tokens * clip.count for clip in self.clips)

    @property
    def longest(self) -> Clip:
        """The video with the most tokens."""
        return max(self.clips, key=lambda clip: clip.tokens)

    @property
    def group_tokens(self) -> int:
        """Tokens of the largest temporal group: no block is smaller."""
        return max(clip.group_tokens for clip in self.clips)


@dataclass(frozen=True)
class Memory:
    """GPU memory of one engine at its height, in bytes. Blocks of `block_tokens` really hold `read_tokens`, since groups aren't split.

    Attributes:
        weights: of the whole model, vision tower included.
        kv_peak: most keys and values held while reading.
        descriptions: place and positions of the kept entries.
        vision, language: alive in the vision tower, and in one decoder layer with its eviction, one after the other.
        answering: what a batch of questions adds, once reading is over.
        reserve: for CUDA and PyTorch.
    """

    block_tokens: int
    read_tokens: int
    weights: int
    kv_peak: int
    descriptions: int
    vision: int
    language: int
    answering: int
    reserve: int = RESERVE_BYTES

    @property
    def total(self) -> int:
        """What one engine needs."""
        return self.weights + self.kv_peak + self.descriptions + max(self.vision, self.language, self.answering) + self.reserve


@dataclass(frozen=True)
class Speed:
    """Visual tokens a second that one GPU reads, all its engines together, and where the figure comes from."""

    tokens_per_s: float
    source: str


@dataclass(frozen=True)
class Capacity:
    """The plan of an archive on GPUs of one kind.

    Attributes:
        memory: of one engine with the configured block size.
        blocks: the same for other block sizes, ascending.
        kv_full_bytes: what a full cache would hold of the longest video.
        largest_block_tokens: largest block with which one engine fits on a GPU; None where not even a single group does.
        actors_per_gpu: engines that fit on a GPU; 0 where none does.
        gpu_hours, wall_hours, cost: None where no speed, or no price, is known. Reading counts, starting and answering don't.
        cache_bytes: of the largest compressed cache, as it is stored; 0 where the policy keeps none.
        storage_bytes: of the caches of all videos.
        longest_s: longest video before the model's rotary positions end; None when they don't.
        notes: everything a reader should know, in words.
    """

    archive: Archive
    memory: Memory
    blocks: tuple[Memory, ...]
    kv_full_bytes: int
    gpu_bytes: float
    speed: Speed | None
    largest_block_tokens: int | None
    actors_per_gpu: int
    gpu_hours: float | None
    wall_hours: float | None
    cost: float | None
    cache_bytes: int
    storage_bytes: int
    longest_s: float | None
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether an engine with the configured block size fits on a GPU."""
        return self.actors_per_gpu > 0

    def actors_with(self, memory: Memory) -> int:
        """Engines of that size that fit on a GPU."""
        return int(self.gpu_bytes * USABLE_SHARE // memory.total)


def hours_of_video(
    config: JobConfig, model: Footprint, hours: float, *, video_s: float, frame_px: tuple[int, int], questions: int
) -> Archive:
    """An archive of which only the hours are known: equal videos, and one that is what remains.

    Args:
        video_s: length of a video in seconds.
        frame_px: (height, width) of the files' frames.

    Raises:
        ConfigError: the sampling tells no number of frames; frames too long and thin for the model.
    """
    whole, rest_s = divmod(hours * 3600, video_s)
    lengths = [(video_s, int(whole))] if whole else []
    lengths += [(rest_s, 1)] if rest_s > 1e-6 * video_s else []
    clips = tuple(clip_of(config, model, seconds, frame_px, count) for seconds, count in lengths)
    size = f"{frame_px[1]}x{frame_px[0]}"
    return Archive(
        clips, questions, (f"taken to be {sum(count for _, count in lengths):,} videos of {video_s / 60:g} minutes at {size} px",)
    )


def clip_of(config: JobConfig, model: Footprint, seconds: float, frame_px: tuple[int, int], count: int = 1) -> Clip:
    """What a video of that length and frame size costs, as the reader samples it."""
    decode, geometry = config.decode, model.geometry.limited(config.decode.min_frame_px, config.decode.max_frame_px)
    if decode.sampling == "keyframes":
        raise ConfigError(
            "decode.sampling=keyframes: their number isn't known before a file is read; plan with decode.fps = 1 / seconds between keyframes"
        )
    read_s = max(0.0, min(seconds, decode.end_s or math.inf) - (decode.start_s or 0.0))
    frames = decode.frames if decode.sampling == "frames" else max(1, math.ceil(read_s * decode.fps - 1e-6))
    try:
        group_tokens = geometry.group_tokens(*geometry.target_size(*frame_px))
    except ValueError as error:
        raise ConfigError(f"frame-size={frame_px[1]}x{frame_px[0]}: {error}") from None
    return Clip(seconds, group_tokens, math.ceil(frames / geometry.frames_per_group) * group_tokens, count)


def memory_of(config: JobConfig, model: Footprint, archive: Archive, block_tokens: int) -> Memory:
    """GPU memory of one engine."""
    engine, answer = config.engine, config.engine.answer
    size, group = ELEMENT_BYTES[engine.dtype], archive.group_tokens
    read = group * max(1, min(block_tokens, archive.longest.tokens) // group)
    visual = (read // group) * (group - model.geometry.group_text_tokens)
    longest = archive.longest.tokens
    bounded = engine.policy not in UNBOUNDED and engine.compress == "during"
    kept = min(engine.budget_tokens, longest) if bounded else longest
    full = kv_bytes(model.dimensions, longest, size)
    kv_peak = min(peak_kv_bytes(model.dimensions, engine.budget_tokens, read, size), full) if bounded else full
    asked = min(archive.questions, answer.batch_questions)
    return Memory(
        block_tokens=block_tokens,
        read_tokens=read,
        weights=model.parameters * size,
        kv_peak=kv_peak,
        descriptions=model.description_bytes(kept),
        vision=model.vision_bytes(visual, size),
        language=model.language_bytes(read, size) + model.eviction_bytes(kept, read, size),
        answering=model.answering_bytes(asked, QUESTION_TOKENS, answer.max_new_tokens, size),
    )


def plan(
    config: JobConfig, model: Footprint, archive: Archive, *, gpu_bytes: float, gpus: int, speed: Speed | None, price_per_hour: float | None
) -> Capacity:
    """Put memory, time, storage and money together.

    Args:
        gpu_bytes: memory of one GPU, as sold (80 GB is 80e9).
        gpus: how many of them; a number below the engines' need only makes it take longer.
        price_per_hour: of one GPU.
    """
    usable = gpu_bytes * USABLE_SHARE
    group = archive.group_tokens
    memory = memory_of(config, model, archive, config.engine.block_tokens)
    sizes = sorted({*BLOCKS_TRIED, config.engine.block_tokens})
    tried = tuple(memory_of(config, model, archive, size) for size in sizes)
    actors = int(usable // memory.total)
    tokens = archive.tokens * (archive.questions if config.engine.policy in QUERY_AWARE else 1)
    gpu_hours = tokens / speed.tokens_per_s / 3600 if speed else None
    # A video is read by one engine, so more GPUs don't shorten the longest.
    alone = archive.longest.tokens / speed.tokens_per_s / 3600 if speed else 0.0
    keeps = config.engine.policy not in QUERY_AWARE and config.caches.retain == "all"
    caches = [_stored_bytes(config, model, clip.tokens) * keeps for clip in archive.clips]
    seconds_per_group = model.geometry.frames_per_group / config.decode.fps
    # A fixed number of frames whose tokens take a position each fits a video of any length, or none.
    limit = config.engine.position_limit or model.max_positions
    few_frames = config.decode.sampling == "frames" and model.positions_per_s is None and archive.longest.tokens <= limit
    capacity = Capacity(
        archive=archive,
        memory=memory,
        blocks=tried,
        kv_full_bytes=kv_bytes(model.dimensions, archive.longest.tokens, ELEMENT_BYTES[config.engine.dtype]),
        gpu_bytes=gpu_bytes,
        speed=speed,
        largest_block_tokens=_largest_block(config, model, archive, usable),
        actors_per_gpu=actors,
        gpu_hours=gpu_hours,
        wall_hours=max(gpu_hours / gpus, alone) if gpu_hours is not None else None,
        cost=gpu_hours * price_per_hour if gpu_hours is not None and price_per_hour is not None else None,
        cache_bytes=max(caches),
        storage_bytes=sum(size * clip.count for size, clip in zip(caches, archive.clips, strict=True)),
        longest_s=None if few_frames else model.longest_s(seconds_per_group, config.engine.position_limit),
    )
    return replace(capacity, notes=(*archive.notes, *_notes(config, capacity, group, speed)))


def _stored_bytes(config: JobConfig, model: Footprint, tokens: int) -> int:
    """Size of a kept cache's tensors: as many entries as the budget, or as the video has."""
    kept = tokens if config.engine.policy in UNBOUNDED else min(config.engine.budget_tokens, tokens)
    return kv_bytes(model.dimensions, kept, ELEMENT_BYTES[config.engine.dtype]) + model.description_bytes(kept)


def _largest_block(config: JobConfig, model: Footprint, archive: Archive, usable: float) -> int | None:
    """Largest whole number of groups with which an engine fits, in tokens; no larger than the longest video."""
    group = archive.group_tokens
    low, high = 0, max(1, archive.longest.tokens // group)
    while low < high:
        middle = (low + high + 1) // 2
        if memory_of(config, model, archive, middle * group).total <= usable:
            low = middle
        else:
            high = middle - 1
    return low * group or None


def _notes(config: JobConfig, capacity: Capacity, group: int, speed: Speed | None) -> Iterable[str]:
    archive, memory, engine = capacity.archive, capacity.memory, config.engine
    if memory.read_tokens > engine.block_tokens:
        yield f"a temporal group has {group:,} tokens, more than engine.block_tokens={engine.block_tokens}: a block is one group"
    if not capacity.fits:
        largest = capacity.largest_block_tokens
        remedy = f"lower engine.block_tokens to {largest}" if largest else "a larger GPU, decode.max_frame_px or a smaller model"
        yield f"an engine needs {memory.total / 1e9:.1f} GB of the {capacity.gpu_bytes * USABLE_SHARE / 1e9:.1f} GB to be used: {remedy}"
    longest_s = max(clip.seconds for clip in archive.clips)
    if capacity.longest_s is not None and longest_s > capacity.longest_s:
        yield (
            f"videos of up to {longest_s / 3600:.2f} h are longer than the model's positions reach ({capacity.longest_s / 3600:.2f} h): they would "
            "be refused; cut them, or lower decode.fps where each token takes a position"
        )
    if engine.policy in QUERY_AWARE:
        yield f"engine.policy={engine.policy} reads a video once per question and keeps no caches"
    if speed is None:
        yield "no speed is known, so neither hours nor cost: give --tokens-per-second, or --measured with the output of a run"
