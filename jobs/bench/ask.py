"""`python -m jobs.bench ask`: a new question about a watched video, from its kept cache and by watching it again.

Both go the way of the jobs: the whole worker, from the file (or the cache's file) to the result, one engine, one process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from rich.table import Table

from engine import Engine
from engine.errors import InputError
from jobs.bench._clips import make_clip, repeat_clip
from jobs.bench._measure import add_json, add_shape, publish, say, shape_of
from pipeline.caches import CacheStore
from pipeline.config import JobConfig
from pipeline.results import VideoResult
from pipeline.storage import Storage
from pipeline.task import ManifestQuestion, VideoTask
from pipeline.worker import VideoWorker

CLIP_S = 10
ASKS = 5
"""Times that the kept cache is asked, each from the file; the median counts. Watching takes long enough to be timed once."""


def main(argv: list[str]) -> int:
    """Run the rows, print the table and, last, one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m jobs.bench ask", description=__doc__)
    parser.add_argument("--model", help="hub id or folder; default: random weights of the Qwen2.5-VL architecture in the size below")
    parser.add_argument("--minutes", default="1,5", help="lengths of the video (default: 1 and 5 minutes of 640x360, 1 frame a second)")
    parser.add_argument("--questions", type=int, default=4, help="questions asked together (default: 4)")
    parser.add_argument("--budget-tokens", type=int, default=1024)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    add_shape(parser, hidden=256, layers=4, heads=4)
    add_json(parser)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        clip = make_clip(Path(folder, "clip.mp4"), seconds=CLIP_S, height_px=360, width_px=640)
        engine: Engine | None = None
        for minutes in arguments.minutes.split(","):
            video = repeat_clip(Path(folder, f"video{minutes}.mp4"), clip, max(1, round(float(minutes) * 60 / CLIP_S)))
            config = settings(arguments, Path(folder, f"out{minutes}"))
            engine = engine or load(arguments, config)
            rows.append({"video_s": float(minutes) * 60} | measure(engine, config, video, arguments.questions))
            say(f"{minutes} minutes: done")
    publish({"rows": rows}, as_table(rows), only_json=arguments.json)
    return 0


def settings(arguments: argparse.Namespace, output: Path) -> JobConfig:
    """The job's settings; frames small enough for a laptop."""
    engine = {"budget_tokens": arguments.budget_tokens, "answer": {"max_new_tokens": arguments.max_new_tokens}}
    return JobConfig.model_validate(
        {
            "videos": str(output),
            "questions": str(output),
            "output": str(output),
            "engine": engine | ({"model": arguments.model} if arguments.model else {}),
            "decode": {"max_frame_px": 196 * 196},
        }
    )


def load(arguments: argparse.Namespace, config: JobConfig) -> Engine:
    """The engine that both ways share."""
    if arguments.model:
        return Engine.load(config.engine)
    from jobs.bench._model import bench_engine

    return bench_engine(**shape_of(arguments), **config.engine.model_dump(include={"budget_tokens", "answer"}))


def measure(engine: Engine, config: JobConfig, video: Path, questions: int) -> dict[str, float]:
    """Watch once to keep the cache; then ask the same new questions both ways."""
    tag = Storage().stat(str(video)).tag
    first, new = (
        VideoTask(
            video_id=video.stem,
            uri=str(video),
            content_tag=tag,
            questions=tuple(ManifestQuestion(question_id=f"{kind}{n}", question=f"What happens in part {n}?") for n in range(count)),
        )
        for kind, count in (("first", 1), ("new", questions))
    )
    only_ask = config.model_copy(update={"caches": config.caches.model_copy(update={"missing": "refuse"})})
    store = CacheStore.of(config)
    watched, _ = timed(VideoWorker(config, engine=engine, caches=store), first)
    asks = [timed(VideoWorker(only_ask, engine=engine, caches=store), new) for _ in range(ASKS)]
    asked, ask_s = asks[0][0], median(seconds for _, seconds in asks)
    again, watch_s = timed(VideoWorker(config, engine=engine), new)
    for result in (watched, asked, again):
        if result.error:
            raise InputError(f"{video.name}: {result.error}")
    same = [(a["answer"], a["choice"]) for a in asked.answers] == [(a["answer"], a["choice"]) for a in again.answers]
    return {
        "visual_tokens": again.memory["visual_tokens"],
        "cache_bytes": sum(entry.size_bytes for entry in store.entries()),
        "ask_s_per_question": ask_s / questions,
        "watch_s_per_question": watch_s / questions,
        "ratio": watch_s / ask_s,
        "same_answers": same,
    }


def timed(worker: VideoWorker, task: VideoTask) -> tuple[VideoResult, float]:
    """One video through the worker, and the seconds it took."""
    began = time.perf_counter()
    result = worker.watch(task)
    return result, time.perf_counter() - began


def as_table(rows: list[dict[str, float]]) -> Table:
    """The table for people."""
    table = Table(title="Seconds a question: from the kept cache, and watching again")
    for name in ("video, s", "visual tokens", "cache, MB", "asked, s", "watched again, s", "ratio", "same answers"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['video_s']:.0f}",
            f"{row['visual_tokens']:,}",
            f"{row['cache_bytes'] / 1e6:.2f}",
            f"{row['ask_s_per_question']:.3f}",
            f"{row['watch_s_per_question']:.3f}",
            f"{row['ratio']:.1f}",
            "yes" if row["same_answers"] else "NO",
        )
    return table
