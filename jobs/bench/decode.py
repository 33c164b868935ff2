"""`python -m jobs.bench decode`: decord against PyAV against keyframes alone, in time and memory; decides the default decoder.

Every measurement runs in a process of its own, through the same `VideoSource` that the pipeline uses, so frames are resized for the
model as well. Speeds are told as ratios of processor time, since machines differ and are shared; memory as the peak resident set and its growth over the imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from engine.errors import ReelkeepError
from engine.geometry import FrameGeometry
from jobs.bench._clips import make_clip, repeat_clip
from jobs.bench._measure import MIB, add_json
from pipeline.video.config import DecodeConfig
from pipeline.video.source import open_video

GEOMETRY = FrameGeometry(frames_per_group=2, unit_px=28, min_px=128 * 28 * 28, max_px=384 * 28 * 28)

SPEED_CASES: dict[str, dict[str, Any]] = {
    "pyav fps": {"decoder": "pyav"},
    "decord fps": {"decoder": "decord"},
    "pyav 64 frames": {"decoder": "pyav", "sampling": "frames", "frames": 64},
    "decord 64 frames": {"decoder": "decord", "sampling": "frames", "frames": 64},
    "pyav keyframes": {"decoder": "pyav", "sampling": "keyframes"},
}


def main(argv: list[str]) -> int:
    """Run the comparison, or with `--memory` the peak on a 10-minute against a 60-minute file."""
    parser = argparse.ArgumentParser(prog="python -m jobs.bench decode", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="videos to read; default: generated 10-minute 720p files")
    parser.add_argument("--fps", type=float, default=1.0, help="frames sampled per second (default 1)")
    parser.add_argument("--memory", action="store_true", help="compare the peak on 10 and on 60 minutes of the same 720p video")
    parser.add_argument("--decoders", default="pyav,decord", help="which to compare with --memory (default pyav,decord; decord takes long)")
    add_json(parser)
    parser.add_argument("--measure", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.measure:
        print(json.dumps(_measure(arguments.files[0], DecodeConfig(**json.loads(arguments.measure)))))
        return 0
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr) if arguments.json else nullcontext():
        result = (
            _compare_memory(Path(folder), arguments.fps, arguments.decoders.split(","))
            if arguments.memory
            else _compare(arguments.files, Path(folder), arguments.fps)
        )
    print(json.dumps(result))
    return 0


def measure_apart(path: Path, decode: dict[str, Any]) -> dict[str, Any]:
    """Read one file in a fresh process.

    Returns:
        seconds, cpu_s, frames, decoder, warnings, peak_bytes (resident set) and growth_bytes (over the imports); or error.
    """
    command = [sys.executable, "-m", "jobs.bench", "decode", "--measure", json.dumps(decode), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=Path(__file__).parents[2])
    if done.returncode != 0:
        return {"error": (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def _measure(path: Path, decode: DecodeConfig) -> dict[str, Any]:
    GEOMETRY.target_size(720, 1280)
    before_bytes = _status_bytes("VmRSS")
    start, cpu_start = time.perf_counter(), time.process_time()
    try:
        source = open_video(path, GEOMETRY, decode)
        for _ in source.blocks(block_tokens=784):
            pass
    except ReelkeepError as error:
        return {"error": str(error)}
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    peak_bytes = _status_bytes("VmHWM")
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "frames": source.frames_read,
        "decoder": source.decoder,
        "warnings": source.warnings,
        "peak_bytes": peak_bytes,
        "growth_bytes": peak_bytes - before_bytes,
    }


def _status_bytes(field: str) -> int:
    # Not getrusage: its peak survives fork and exec, and would be that of a larger parent.
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _compare(files: list[Path], folder: Path, fps: float) -> dict[str, Any]:
    if not files:
        for gop in (50, 250):
            clip = make_clip(folder / f"clip_gop{gop}.mp4", gop=gop)
            files.append(repeat_clip(folder / f"720p_10min_gop{gop}.mp4", clip, 60))
    rows = []
    print(f"{'file':28} {'case':18} {'frames':>6} {'seconds':>8} {'cpu s':>7} {'ratio':>6} {'peak MiB':>9} {'growth MiB':>10}  read by")
    for path in files:
        plain_s = None
        for case, options in SPEED_CASES.items():
            row = {"file": path.name, "case": case, **measure_apart(path, {"fps": fps, **options})}
            rows.append(row)
            if "error" in row:
                print(f"{path.name[:28]:28} {case:18} {row['error']}")
                continue
            plain_s = plain_s or row["cpu_s"]
            row["ratio"] = row["cpu_s"] / plain_s
            print(
                f"{path.name[:28]:28} {case:18} {row['frames']:6} {row['seconds']:8.2f} {row['cpu_s']:7.2f} {row['ratio']:6.2f} "
                f"{row['peak_bytes'] / MIB:9.0f} {row['growth_bytes'] / MIB:10.0f}  {row['decoder']}"
            )
    return {"bench": "decode", "fps": fps, "rows": rows}


def _compare_memory(folder: Path, fps: float, decoders: list[str]) -> dict[str, Any]:
    clip = make_clip(folder / "clip.mp4")
    files = {minutes: repeat_clip(folder / f"720p_{minutes}min.mp4", clip, minutes * 6) for minutes in (10, 60)}
    rows = []
    print(f"{'decoder':8} {'minutes':>7} {'frames':>6} {'seconds':>8} {'peak MiB':>9} {'growth MiB':>10}")
    for decoder in decoders:
        for minutes, path in files.items():
            row = {"decoder": decoder, "minutes": minutes, **measure_apart(path, {"fps": fps, "decoder": decoder})}
            if "error" in row:
                raise ReelkeepError(f"{decoder} on {minutes} minutes: {row['error']}")
            rows.append(row)
            print(
                f"{decoder:8} {minutes:7} {row['frames']:6} {row['seconds']:8.2f} "
                f"{row['peak_bytes'] / MIB:9.0f} {row['growth_bytes'] / MIB:10.0f}"
            )
    ratios = {d: _ratio([r for r in rows if r["decoder"] == d], "peak_bytes") for d in decoders}
    print("peak of 60 minutes over peak of 10 minutes: " + ", ".join(f"{d} {ratio:.3f}" for d, ratio in ratios.items()))
    return {"bench": "decode --memory", "fps": fps, "rows": rows, "peak_ratio": ratios}


def _ratio(rows: list[dict[str, Any]], key: str) -> float:
    return rows[-1][key] / rows[0][key]
