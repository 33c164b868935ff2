"""What the pipeline costs beside the bare engine: the same videos through both, in one run, on this machine.

One engine in each. The clock runs from the end of the first video to the end of the last, so that what happens once (starting Ray, loading
the model, starting a decode process) is left out, and everything that happens for each video is in: dispatch, decoding, tries and results
on disk. The bare loop runs before and after the pipeline and its mean counts, since other programs' load comes and goes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import torch
from rich.table import Table

from engine import Engine, Question
from jobs.bench._clips import make_clip, repeat_clip
from jobs.bench._measure import add_json, publish
from jobs.bench._model import bench_engine
from pipeline.config import JobConfig
from pipeline.video.source import open_media

QUESTIONS = ("What is shown?", "What moves?")
TARGET_PERCENT = 10.0

Answers = dict[tuple[str, str], str | None]


def main(argv: Sequence[str]) -> int:
    """Run both ways and print the ratio; the last line is JSON. Returns 1 where the pipeline costs more than the target."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--videos", type=int, default=6, help="number of videos, all of one length; the first isn't timed (default 6)")
    parser.add_argument("--seconds", type=int, default=120, help="length of each (default 120)")
    parser.add_argument("--height", type=int, default=360, help="height of the pictures in pixels (default 360)")
    parser.add_argument("--fps", type=float, default=2.0, help="frames read per second (default 2)")
    parser.add_argument("--model", help="checkpoint folder or hub id (default: random weights, 4 layers of width 256)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch in either way (default 1)")
    add_json(parser)
    arguments = parser.parse_args(argv)
    if arguments.videos < 2:
        parser.error("--videos must be at least 2: the first isn't timed")
    with tempfile.TemporaryDirectory(prefix="reelkeep-bench-") as name:
        return _compare(Path(name), arguments)


def _compare(folder: Path, arguments: argparse.Namespace) -> int:
    videos = _make_videos(folder / "videos", arguments)
    model = arguments.model or str(_save_random_model(folder / "model"))
    questions = folder / "questions.txt"
    questions.write_text("\n".join(QUESTIONS))

    def job(where: str) -> JobConfig:
        settings = {"budget_tokens": 256, "block_tokens": 256, "model": model, "answer": {"max_new_tokens": 8}}
        return JobConfig.model_validate(
            {
                "videos": str(videos),
                "questions": str(questions),
                "output": str(folder / where),
                "engine": settings,
                "decode": {"fps": arguments.fps, "where": where},
                "pool": {"max_actors": 1, "threads": arguments.threads},
                "log": {"progress": "off", "level": "warning"},
            }
        )

    torch.set_num_threads(arguments.threads)
    engine = Engine.load(job("actor").engine)
    before_s, wait_s, expected = _bare_loop(engine, job("actor"), videos)
    pipelines = {where: _pipeline(job(where), expected) for where in ("actor", "worker")}
    after_s, _, _ = _bare_loop(engine, job("actor"), videos)
    bare_s = (before_s + after_s) / 2

    timed = arguments.videos - 1
    table = Table(
        "way", "seconds", "per video", "against the bare loop", "waiting for frames", title=f"{timed} videos of {arguments.seconds} s"
    )
    table.add_row("bare loop, before", f"{before_s:.2f}", f"{before_s / timed:.2f}", "", f"{wait_s:.2f} s")
    table.add_row("bare loop, after", f"{after_s:.2f}", f"{after_s / timed:.2f}", "", "")
    figures: dict[str, float | bool | int] = {"videos": timed, "bare_s": bare_s, "bare_decode_wait_s": wait_s}
    for where, (seconds, wait_s) in pipelines.items():
        overhead = 100 * (seconds / bare_s - 1)
        table.add_row(f"pipeline, decode.where={where}", f"{seconds:.2f}", f"{seconds / timed:.2f}", f"{overhead:+.1f}%", f"{wait_s:.2f} s")
        figures |= {f"{where}_s": seconds, f"{where}_overhead_percent": overhead, f"{where}_decode_wait_s": wait_s}
    figures["bare_spread_percent"] = 100 * abs(before_s - after_s) / bare_s
    missed = over_target(figures)
    note = f"Answers are the same in all ways. Target: at most {TARGET_PERCENT:g}% over the bare loop: {', '.join(missed) or 'met'}."
    publish({key: round(value, 3) for key, value in figures.items()}, table, note, only_json=arguments.json)
    return 1 if missed else 0


def over_target(figures: Mapping[str, float]) -> list[str]:
    """The ways that cost more than the target, in words."""
    overheads = {where: figures[f"{where}_overhead_percent"] for where in ("actor", "worker")}
    return [f"decode.where={where} missed it by {over - TARGET_PERCENT:.1f}" for where, over in overheads.items() if over > TARGET_PERCENT]


def _bare_loop(engine: Engine, config: JobConfig, videos: Path) -> tuple[float, float, Answers]:
    """Seconds from the first video's end to the last one's, seconds of waiting for frames, and the answers."""
    ends: list[float] = []
    waits: list[float] = []
    answers: Answers = {}
    for path in sorted(videos.iterdir()):
        source = open_media(path, engine.geometry, config.decode)
        kept = engine.prefill(source.blocks(config.engine.block_tokens))
        for question, answer in zip(QUESTIONS, engine.answer(kept, [Question(text) for text in QUESTIONS]), strict=True):
            answers[path.name, question] = answer.text
        ends.append(time.time())
        waits.append(kept.trace.input_wait_s)
    return ends[-1] - ends[0], sum(waits[1:]), answers


def _pipeline(config: JobConfig, expected: Answers) -> tuple[float, float]:
    """Seconds from the first committed result to the last, and seconds of waiting for frames after the first video."""
    from pipeline import dispatch

    dispatch.run(config)
    output = Path(config.output)
    answers = {(row["video_id"], row["question"]): row["answer"] for row in pq.read_table(output / "answers").to_pylist()}
    if answers != expected:
        raise AssertionError("the pipeline's answers differ from the bare loop's")
    ends = sorted(path.stat().st_mtime for path in (output / "results").rglob("*.json"))
    waits = [row["decode_wait_s"] for row in pq.read_table(output / "memory").to_pylist()]
    return ends[-1] - ends[0], sum(waits) * (len(waits) - 1) / len(waits)


def _make_videos(folder: Path, arguments: argparse.Namespace) -> Path:
    folder.mkdir()
    clip = make_clip(folder.parent / "clip.mp4", seconds=10, height_px=arguments.height, width_px=arguments.height * 16 // 9 // 2 * 2)
    for number in range(arguments.videos):
        repeat_clip(folder / f"video{number}.mp4", clip, max(1, arguments.seconds // 10))
    return folder


def _save_random_model(folder: Path) -> Path:
    adapter = bench_engine(hidden=256, layers=4, heads=4, kv_heads=2, device="cpu").adapter
    adapter.model.save_pretrained(folder)
    adapter.processor.save_pretrained(folder)
    return folder
