"""`python -m jobs.bench vision`: the vision tower with equal windows in one batch, against transformers' loop over the windows.

The same random-weight Qwen2.5-VL tower on the same block of frames, by turns; medians, also of processor time, and the largest difference between
the features.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.table import Table

from engine import Engine, VideoBlock
from jobs.bench._measure import add_json, add_profile, add_turns, by_turns, costliest, device_name, publish, shares, synchronise
from jobs.bench._model import bench_engine
from jobs.terminal import whole_numbers


def main(argv: list[str]) -> int:
    """Run the rows, print the table and, last, one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m jobs.bench vision", description=__doc__)
    parser.add_argument(
        "--windows", type=whole_numbers, default=[28, 56, 112], help="window sides in pixels, multiples of 28 (default 28,56,112)"
    )
    parser.add_argument("--frame-px", type=int, default=196, help="side of a frame, a multiple of 28 (default 196: 49 tokens)")
    parser.add_argument("--groups", type=int, default=16, help="temporal groups in the block (default 16: 784 tokens of 196 px)")
    parser.add_argument("--hidden", type=whole_numbers, default=[96, 320], help="widths of the tower, multiples of 32 (default 96,320)")
    parser.add_argument("--depth", type=int, default=8, help="its layers, of which every eighth looks at whole frames (default 8)")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of PyTorch (default: all cores)")
    add_turns(parser, repeats=21)
    add_profile(parser)
    add_json(parser)
    arguments = parser.parse_args(argv)
    for name, values, unit in (
        ("--windows", arguments.windows, 28),
        ("--frame-px", [arguments.frame_px], 28),
        ("--hidden", arguments.hidden, 32),
    ):
        for value in values:
            if value % unit:
                parser.error(f"{name}: {value} must be a multiple of {unit}")
    torch.set_num_threads(arguments.threads)
    rows = []
    device = ""
    for hidden in arguments.hidden:
        for window_px in arguments.windows:
            engine = tower_engine(arguments, hidden, window_px)
            device = device_name(engine.adapter.device)
            rows.append(
                {"hidden": hidden, "window_px": window_px, **measure(engine, f"{hidden} wide, windows of {window_px} px", arguments)}
            )
    shape = {name: getattr(arguments, name) for name in ("depth", "frame_px", "groups")}
    title = f"Vision tower, {arguments.groups} groups of {arguments.frame_px} px, {device}: grouped windows against transformers' loop"
    profiles = [
        f"{r['hidden']} wide, windows of {r['window_px']} px, {way}: {shares(r[f'{way}_profile'])}"
        for r in rows
        for way in ("library", "grouped")
        if arguments.profile
    ]
    publish({"bench": "vision", "device": device, **shape, "rows": rows}, as_table(rows, title), *profiles, only_json=arguments.json)
    return 0


def tower_engine(arguments: argparse.Namespace, hidden: int, window_px: int) -> Engine:
    """An engine whose vision tower is this wide and has these windows, over a language model too small to matter."""
    vision = {
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "depth": arguments.depth,
        "num_heads": hidden // 32,
        "window_size": window_px,
        "fullatt_block_indexes": list(range(7, arguments.depth, 8)),
    }
    return bench_engine(hidden=64, layers=1, heads=2, kv_heads=1, vision=vision, device=arguments.device)


def measure(engine: Engine, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both ways over one block of noise."""
    adapter: Any = engine.adapter
    config = adapter.model.config.vision_config
    shape = (arguments.groups * engine.geometry.frames_per_group, 3, arguments.frame_px, arguments.frame_px)
    frames = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    block = VideoBlock(frames, times_s=tuple(float(i) for i in range(arguments.groups)), first_group=0, seconds_per_group=1.0)
    patches, grid = adapter.patches(block)

    def as_it_comes() -> torch.Tensor:
        features = tower(patches, grid_thw=grid)
        return getattr(features, "pooler_output", features)

    def timed(way: Callable[[], torch.Tensor]) -> dict[str, float]:
        began, cpu_began = time.perf_counter(), time.process_time()
        way()
        synchronise(adapter.device)
        return {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began}

    tower = library_tower(adapter.model.model.visual)
    with torch.inference_mode():
        ways: dict[str, Callable[[], torch.Tensor]] = {"library": as_it_comes, "grouped": partial(adapter.features, patches, grid)}
        first, second = (way() for way in ways.values())
        calls = {f"{name}, {way}": partial(timed, call) for way, call in ways.items()}
        seconds = by_turns(calls, repeats=arguments.repeats, limit_s=arguments.limit_s)
        profiles = {f"{way}_profile": costliest(call, adapter.device) for way, call in ways.items()} if arguments.profile else {}
    library, grouped = (seconds[call] for call in calls)
    return {
        "windows": arguments.groups * (-(-arguments.frame_px // config.window_size)) ** 2,
        "patches_a_window": (config.window_size // 14) ** 2,
        "library_s": library["s"],
        "grouped_s": grouped["s"],
        "ratio": library["s"] / grouped["s"],
        "cpu_ratio": library["cpu_s"] / grouped["cpu_s"],
        "largest_difference": float((first - second).abs().max()),
        "largest_feature": float(first.abs().max()),
        **profiles,
    }


def library_tower(ours: Any) -> Any:
    """transformers' tower as it comes, with the same weights."""
    config = copy.deepcopy(ours.config)
    config._attn_implementation = "sdpa"
    tower = type(ours)(config).to(ours.device, ours.dtype).eval().requires_grad_(False)
    tower.load_state_dict(ours.state_dict())
    return tower


def as_table(rows: list[dict[str, Any]], title: str) -> Table:
    """The table for people."""
    table = Table(title=title)
    for name in ("width", "window px", "windows", "patches a window", "library s", "grouped s", "ratio", "CPU ratio", "largest difference"):
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(
            str(r["hidden"]),
            str(r["window_px"]),
            f"{r['windows']:,}",
            str(r["patches_a_window"]),
            f"{r['library_s']:.3f}",
            f"{r['grouped_s']:.3f}",
            f"{r['ratio']:.2f}",
            f"{r['cpu_ratio']:.2f}",
            f"{r['largest_difference']:.1e}",
        )
    return table
