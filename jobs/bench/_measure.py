"""What benches share: common options, calls by turns, a measurement in a process of its own, and how a result is printed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

MIB = 1 << 20


def add_shape(parser: argparse.ArgumentParser, *, hidden: int = 512, layers: int = 8, heads: int = 8, kv_heads: int = 2) -> None:
    """Options for the size of the random-weight model, and for where it runs."""
    parser.add_argument("--hidden", type=int, default=hidden, help=f"width of the language model (default {hidden})")
    parser.add_argument("--layers", type=int, default=layers, help=f"its layers (default {layers})")
    parser.add_argument("--heads", type=int, default=heads, help=f"its query heads (default {heads})")
    parser.add_argument("--kv-heads", type=int, default=kv_heads, help=f"its KV heads (default {kv_heads})")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N; float32 on the CPU, bfloat16 on CUDA")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of PyTorch (default: all cores)")


def add_turns(parser: argparse.ArgumentParser, *, repeats: int = 5) -> None:
    """Options for how often a measurement is repeated."""
    parser.add_argument(
        "--repeats", type=int, default=repeats, help=f"times each measurement is taken; medians are shown (default {repeats})"
    )
    parser.add_argument(
        "--limit-s", type=float, default=600.0, help="no further repeat of a measurement that took this long altogether (600)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option that leaves nothing but JSON on standard output."""
    parser.add_argument("--json", action="store_true", help="only the JSON object on standard output, the table on standard error")


def shape_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `bench_engine` that `add_shape` asked for."""
    return {name: getattr(arguments, name) for name in ("hidden", "layers", "heads", "kv_heads", "device")}


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def by_turns(
    calls: Mapping[str, Callable[[], dict[str, float]]],
    *,
    repeats: int,
    limit_s: float,
    first: Mapping[str, dict[str, float]] | None = None,
) -> dict[str, dict[str, float]]:
    """Measure several ways one after the other and round again, so that a machine's changing load meets all of them alike.

    Args:
        calls: each returns its figures; `s` is the time it took.
        repeats: turns each gets, or fewer once its times add up to `limit_s`; one at least.
        first: figures of a first turn that was taken elsewhere.

    Returns:
        For each way the medians of its figures, and `repeats`, the turns it got.
    """
    taken = {name: [first[name]] if first else [] for name in calls}
    for turn in range(1 if first else 0, repeats):
        for name, call in calls.items():
            if not taken[name] or sum(figures["s"] for figures in taken[name]) < limit_s:
                taken[name].append(call())
                say(f"{name}: {taken[name][-1]['s']:.3f} s ({turn + 1} of {repeats})")
    return {name: {key: median(row[key] for row in rows) for key in rows[-1]} | {"repeats": len(rows)} for name, rows in taken.items()}


def add_profile(parser: argparse.ArgumentParser) -> None:
    """The option that tells where the time goes."""
    parser.add_argument("--profile", action="store_true", help="after the table, each row's costliest PyTorch operations in one more pass")


def costliest(call: Callable[[], Any], device: torch.device, count: int = 8) -> dict[str, float]:
    """Share of each of PyTorch's costliest operations in all time that its operations take themselves, in one call."""
    field = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities[: 2 if device.type == "cuda" else 1]) as profile:
        call()
        synchronise(device)
    times = {event.key.removeprefix("aten::"): getattr(event, field) for event in profile.key_averages()}
    total = sum(times.values())
    return {name: times[name] / total for name in sorted(times, key=times.__getitem__, reverse=True)[:count]}


def shares(of: Mapping[str, float]) -> str:
    """Operations and their shares in one line."""
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in of.items())


def apart(bench: str, argv: Sequence[str], **environment: str) -> dict[str, Any]:
    """Run a bench's own hidden measurement in a fresh process, so that its peak resident set is its own.

    Returns:
        What the process printed on its last line.
    """
    command = [sys.executable, "-m", "jobs.bench", bench, *argv]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ | environment)
    return json.loads(done.stdout.splitlines()[-1])


def synchronise(device: torch.device) -> None:
    """Let the device finish, so that a clock read next is true."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """The device in words, for a table's title."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def device_peak_bytes(device: torch.device) -> int:
    """CUDA's largest allocation since it was last reset; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def publish(result: Mapping[str, Any], table: Table, *notes: str, only_json: bool) -> None:
    """Print the table and notes for people and, last, one JSON object."""
    console = Console(width=175, stderr=only_json, highlight=False)
    console.print(table)
    for note in notes:
        console.print(note)
    print(json.dumps(result))
