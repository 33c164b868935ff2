"""What an archive would take on GPUs: tokens, memory, engines per GPU, GPU-hours, storage, cost. Loads no weights and needs no GPU.

    python -m jobs.plan --hours 10000 --model Qwen/Qwen2.5-VL-7B-Instruct --fps 1 --gpu-memory-gb 80 --tokens-per-second 12000
    python -m jobs.plan --config configs/nightly.yaml --manifest tonight.jsonl --measured s3://answers/last-night --gpus 8 --json

Takes every setting of jobs.answer besides (--help of that lists them); --model, --fps, --budget-tokens, --block-tokens and --dtype stand for
engine.model, decode.fps, engine.budget_tokens, engine.block_tokens and engine.dtype. Exit codes: 0 planned, 2 the input can't be used.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.errors import ConfigError, ReelkeepError
from engine.footprint import Footprint, read_footprint
from jobs.terminal import complain, make_console, whole_number
from pipeline.capacity import QUERY_AWARE, USABLE_SHARE, Archive, Capacity, Clip, Speed, clip_of, hours_of_video, plan
from pipeline.config import JobConfig, load_config
from pipeline.task import VideoTask

PROG = "reelkeep plan"
SHORT = {
    "--model": "--engine.model",
    "--fps": "--decode.fps",
    "--budget-tokens": "--engine.budget-tokens",
    "--block-tokens": "--engine.block-tokens",
    "--dtype": "--engine.dtype",
}
POLICIES = Path(__file__).parents[1] / "engine" / "policies"
LENGTH_COLUMNS = ("duration_s", "duration")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; returns the exit code."""
    own, rest = _parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        config = _settings(own, rest)
        model = read_footprint(_model_folder(config))
        capacity = plan(
            config,
            model,
            _archive(own, config, model),
            gpu_bytes=own.gpu_memory_gb * 1e9,
            gpus=own.gpus,
            speed=_speed(own, config),
            price_per_hour=own.price_per_gpu_hour,
        )
    except ReelkeepError as error:
        complain(f"{PROG}: {error}")
        return 2
    show(config, own, capacity, make_console())
    if own.json:
        print(json.dumps(as_json(config, own, capacity)))
    return 0


def _settings(own: argparse.Namespace, rest: Sequence[str]) -> JobConfig:
    """The job's settings; what it takes no part in (where answers go) is filled in."""
    words = [SHORT.get(name, name) + equals + value for name, equals, value in (word.partition("=") for word in rest)]
    named = [word.partition("=")[0] for word in words if word.partition("=")[0] in ("--manifest", "--videos", "--questions")]
    if own.hours is not None and named:
        raise ConfigError(f"--hours can't be combined with {named[0]}; give one or the other")
    if own.hours is not None:
        words += ["--manifest", "none", "--videos", "null", "--questions", "null"]
    elif not any(word.partition("=")[0] in ("--manifest", "--videos", "--config") for word in words):
        raise ConfigError("nothing to plan: give --hours, --manifest, or --videos and --questions")
    config = load_config(None, words, prog=PROG, defaults={"output": "none"})
    policies = sorted(path.stem for path in POLICIES.glob("[a-z]*.py") if path.stem != "base")  # importing them would bring torch
    if config.engine.policy not in policies:
        raise ConfigError(f"engine.policy={config.engine.policy!r} is not a policy; choose one of {', '.join(policies)}")
    return config


def _archive(own: argparse.Namespace, config: JobConfig, model: Footprint) -> Archive:
    if own.hours is None:
        return archive_of_manifest(config, model, video_minutes=own.video_minutes, frame_px=own.frame_size)
    minutes = min(own.video_minutes or 60.0, own.hours * 60)
    return hours_of_video(config, model, own.hours, video_s=minutes * 60, frame_px=own.frame_size, questions=own.questions_per_video)


def archive_of_manifest(config: JobConfig, model: Footprint, *, video_minutes: float | None, frame_px: tuple[int, int]) -> Archive:
    """The videos of a manifest. A length comes from its column `duration_s` or `duration` (seconds), else from the header of a file on this
    machine, else it is `video_minutes`, else the mean of the others.

    Args:
        frame_px: (height, width) where no header tells.

    Raises:
        ReelkeepError: the manifest can't be used, or no length is known at all.
    """
    from pipeline.manifest import read_manifest
    from pipeline.storage import Storage, split_s3

    manifest = read_manifest(config, Storage(config.storage))
    missing = {video_id for video_id, _, _ in manifest.missing}
    tasks = [task for task in manifest.tasks if task.video_id not in missing]
    notes = [f"{len(missing)} videos can't be read and are left out"] if missing else []
    lengths = {task.video_id: _told_length(task) for task in tasks}
    untold = [task for task in tasks if lengths[task.video_id] is None]
    clips = [clip_of(config, model, seconds, frame_px) for seconds in lengths.values() if seconds is not None]
    clips += _clips_by_header([task for task in untold if split_s3(task.uri) is None], config, model, notes)
    unknown = sum(split_s3(task.uri) is not None for task in untold)
    if unknown:
        if video_minutes is None and not clips:
            raise ConfigError(
                "none of the manifest's videos says how long it is: add a column duration_s (seconds), or give --video-minutes"
            )
        seconds = video_minutes * 60 if video_minutes is not None else sum(clip.seconds for clip in clips) / len(clips)
        clips.append(clip_of(config, model, seconds, frame_px, unknown))
        notes.append(f"{unknown} videos don't say how long they are: taken to be {seconds / 60:.1f} minutes each")
    if not clips:
        raise ConfigError(f"none of the manifest's videos can be read, so there is nothing to plan; {'; '.join(notes)}")
    return Archive(tuple(clips), max(len(task.questions) for task in tasks), tuple(notes))


def _model_folder(config: JobConfig) -> str:
    """Where the model's configuration is: of one in a bucket it is fetched, without the weights."""
    if not config.engine.model.startswith("s3://"):
        return config.engine.model
    from pipeline.storage import Storage
    from pipeline.weights import checkpoint_folder

    return str(checkpoint_folder(config.engine, Storage(config.storage), weights=False))


def _told_length(task: VideoTask) -> float | None:
    columns: dict[str, Any] = dict(task.extra)
    for question in task.questions:
        columns |= question.extra
    for name in LENGTH_COLUMNS:
        try:
            seconds = float(columns[name])
        except (KeyError, TypeError, ValueError):
            continue
        if 0 < seconds < math.inf:
            return seconds
    return None


def _clips_by_header(tasks: list[VideoTask], config: JobConfig, model: Footprint, notes: list[str]) -> list[Clip]:
    """Lengths and tokens of files on this machine, as a dry run tells them; what can't be read is noted and left out."""
    if not tasks:
        return []
    from concurrent.futures import ThreadPoolExecutor

    from pipeline.plan import plan_video  # brings torch, which takes seconds

    with ThreadPoolExecutor(8) as threads:
        plans = list(threads.map(lambda task: plan_video(task, model.geometry, config), tasks))
    problems = [plan.problem for plan in plans if plan.problem]
    if problems:
        notes.append(f"{len(problems)} videos can't be read and are left out, the first because {problems[0]}")
    return [
        Clip(found.duration_s or 0.0, round(found.tokens / found.groups), found.tokens)
        for found in plans
        if not found.problem and found.tokens and found.groups
    ]


def _speed(own: argparse.Namespace, config: JobConfig) -> Speed | None:
    if own.measured is None:
        return Speed(own.tokens_per_second, "as given") if own.tokens_per_second is not None else None
    from jobs.report_page.facts import read_run
    from pipeline.storage import Storage

    facts = read_run(own.measured, Storage(config.storage), sys.maxsize)
    questions = Counter(answer["video_id"] for answer in facts.answers)
    watched = [video for video in facts.videos if video["error"] is None and video["visual_tokens"]]
    seconds = sum(video["total_s"] for video in watched)
    if not seconds:
        raise ConfigError(f"measured={own.measured}: no video was answered there, so it tells no speed; name another run")
    if not 0 < seconds < math.inf:
        raise ConfigError(f"measured={own.measured}: its times add up to {seconds:g} s; name another run")
    pool = facts.run["config"].get("pool")
    share = pool.get("num_gpus") if isinstance(pool, dict) else None
    engines = int(1 / share) if isinstance(share, int | float) and 1e-3 < share < 1 else 1
    others = {str(video["model"]) for video in watched} - {config.engine.model}
    where = "" if any(video["device_peak_bytes"] for video in watched) else ", measured on CPU"
    where += f", with {', '.join(sorted(others))}" if others else ""
    source = f"{len(watched)} videos of {own.measured}, answering included, {engines} engine{'s' * (engines > 1)} a GPU{where}"
    # A query-aware policy has read a video once a question, which the table's tokens don't count.
    tokens = sum(video["visual_tokens"] * (questions[video["video_id"]] if video["policy"] in QUERY_AWARE else 1) for video in watched)
    return Speed(engines * tokens / seconds, source)


def as_json(config: JobConfig, own: argparse.Namespace, capacity: Capacity) -> dict[str, Any]:
    """The plan for machines: units are in the names; null where something isn't known."""
    archive, memory, speed = capacity.archive, capacity.memory, capacity.speed
    return {
        "model": config.engine.model,
        "videos": archive.videos,
        "hours": archive.hours,
        "visual_tokens": archive.tokens,
        "group_tokens": archive.group_tokens,
        "budget_tokens": config.engine.budget_tokens,
        "block_tokens": config.engine.block_tokens,
        "read_tokens": memory.read_tokens,
        "weights_bytes": memory.weights,
        "kv_peak_bytes": memory.kv_peak,
        "kv_full_bytes": capacity.kv_full_bytes,
        "vision_peak_bytes": memory.vision,
        "language_peak_bytes": memory.language,
        "answering_peak_bytes": memory.answering,
        "reserve_bytes": memory.reserve,
        "engine_bytes": memory.total,
        "gpu_memory_bytes": int(capacity.gpu_bytes),
        "usable_share": USABLE_SHARE,
        "fits": capacity.fits,
        "largest_block_tokens": capacity.largest_block_tokens,
        "actors_per_gpu": capacity.actors_per_gpu,
        "blocks": [
            {"block_tokens": m.block_tokens, "engine_bytes": m.total, "actors_per_gpu": capacity.actors_with(m)} for m in capacity.blocks
        ],
        "gpus": own.gpus,
        "tokens_per_s": speed.tokens_per_s if speed else None,
        "speed_source": speed.source if speed else None,
        "gpu_hours": capacity.gpu_hours,
        "wall_hours": capacity.wall_hours,
        "cost": capacity.cost,
        "cache_bytes": capacity.cache_bytes,
        "storage_bytes": capacity.storage_bytes,
        "longest_video_s": capacity.longest_s,
        "notes": list(capacity.notes),
    }


def show(config: JobConfig, own: argparse.Namespace, capacity: Capacity, console: Console) -> None:
    """The plan for people."""
    archive, memory, speed = capacity.archive, capacity.memory, capacity.speed
    table = Table("what", "how much", "told by", title=f"{config.engine.model}, {_hours(archive.hours)} of video")
    table.columns[1].justify = "right"

    def row(what: str, value: str, how: str = "") -> None:
        table.add_row(what, value, how)

    row("videos", f"{archive.videos:,}")
    row("visual tokens", f"{archive.tokens:,}", f"{archive.group_tokens:,} a temporal group")
    table.add_section()
    row("weights", _gb(memory.weights), config.engine.dtype.replace("auto", "bfloat16"))
    row("keys and values, peak", _gb(memory.kv_peak), f"a full cache: {_gb(capacity.kv_full_bytes)} for the longest video")
    row("vision tower, peak", _gb(memory.vision), f"blocks of {memory.read_tokens:,} tokens")
    row("decoder layer and eviction, peak", _gb(memory.language))
    asked = min(archive.questions, config.engine.answer.batch_questions)
    row("answering, peak", _gb(memory.answering), f"{asked} question{'s' * (asked > 1)} at once")
    row("CUDA and PyTorch", _gb(memory.reserve), "set aside")
    row("one engine", _gb(memory.total), "the three peaks don't coincide: the largest counts")
    row("GPU memory", _gb(capacity.gpu_bytes), f"{USABLE_SHARE:.0%} of it are used")
    row("fits", "yes" if capacity.fits else "no", f"blocks of up to {capacity.largest_block_tokens or 0:,} tokens do")
    row("engines on a GPU", str(capacity.actors_per_gpu), _pool_setting(capacity.actors_per_gpu))
    table.add_section()
    row("tokens a second and GPU", f"{speed.tokens_per_s:,.0f}" if speed else "unknown", speed.source if speed else "")
    row("GPU-hours", _hours(capacity.gpu_hours), "reading" if speed else "")
    row(f"wall time on {own.gpus} GPU{'s' * (own.gpus > 1)}", _hours(capacity.wall_hours))
    row(
        "cost",
        "unknown" if capacity.cost is None else f"{capacity.cost:,.2f}",
        f"{own.price_per_gpu_hour or 0:g} a GPU-hour" * (capacity.cost is not None),
    )
    row("kept caches", _gb(capacity.storage_bytes), f"{capacity.cache_bytes / 1e6:,.1f} MB a video at most")
    console.print(table)
    blocks = Table("block, tokens", "one engine", "engines on a GPU", title="other block sizes")
    for tried in capacity.blocks:
        blocks.add_row(f"{tried.block_tokens:,}", _gb(tried.total), str(capacity.actors_with(tried)))
    console.print(blocks)
    for note in capacity.notes:
        console.print(note, markup=False, soft_wrap=True)


def _pool_setting(actors: int) -> str:
    return f"pool.num_gpus={math.floor(100 / actors) / 100:g}" if actors > 1 else ""


def _gb(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _hours(hours: float | None) -> str:
    return "unknown" if hours is None else f"{hours:,.1f} h" if hours >= 10 else f"{hours:.3g} h"


def _frame_size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})[x×](\d{1,6})", text)
    if not found or 0 in (size := (int(found[2]), int(found[1]))):
        raise argparse.ArgumentTypeError(f"{text!r} must be WIDTHxHEIGHT in pixels, e.g. 1280x720")
    return size


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1e-9 <= value <= 1e12:
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be a number above 0 and at most 1e12")
    return value


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every job does."""

    def error(self, message: str) -> Any:
        complain(f"{PROG}: {message}")
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--hours", type=_positive, help="hours of video, instead of a manifest")
    add("--video-minutes", type=_positive, help="length of a video where it isn't known; default 60 with --hours")
    add(
        "--frame-size",
        type=_frame_size,
        default=(720, 1280),
        metavar="WxH",
        help="pixels of a frame where no header tells; default 1280x720",
    )
    add("--questions-per-video", type=whole_number(1), default=1, metavar="N", help="with --hours; default 1")
    add("--gpu-memory-gb", type=_positive, default=80.0, metavar="GB", help="memory of one GPU as sold, in 10^9 bytes; default 80")
    add("--gpus", type=whole_number(1), default=1, metavar="N", help="GPUs at work at once; default 1")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument(
        "--tokens-per-second", type=_positive, metavar="N", help="visual tokens that one GPU reads, all its engines together"
    )
    speed.add_argument("--measured", metavar="OUTPUT", help="take the speed from the tables of a finished run")
    add("--price-per-gpu-hour", type=_positive, metavar="PRICE", help="in any currency")
    add("--json", action="store_true", help="the plan as a JSON object, in the last line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
