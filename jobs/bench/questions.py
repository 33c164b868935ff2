"""`python -m jobs.bench questions`: many questions from one compressed cache, against a prefill for each.

One stream is read once; then each number of questions is answered one by one and in batches, by turns, and medians are shown. "A prefill
each" is the number times the median prefill plus the median single answer: nothing is shared there, so it is computed. Every answer is
decoded to its full length, so that all cost the same. A single question is asked of the stored cache as well, from the file to the answer.
Vision and decoding are left out everywhere; `jobs.bench ask` has both.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from engine import CompressedVideo, Engine
from jobs.bench._measure import add_json, add_shape, add_turns, by_turns, device_name, publish, shape_of, synchronise
from jobs.bench._model import WithoutTower, bench_engine, blank_blocks, with_settings
from jobs.terminal import whole_numbers

ALLOWED = 1.2
"""Target: each of many questions costs at most this many times a single answer."""


def main(argv: list[str]) -> int:
    """Run the rows, print the table and, last, one JSON object."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench questions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=whole_numbers, default=[1, 10, 100], help="numbers of questions (default 1,10,100)")
    parser.add_argument("--tokens", type=int, default=16384, help="visual tokens of the stream (default 16384)")
    parser.add_argument("--budget-tokens", type=int, default=1024)
    parser.add_argument("--block-tokens", type=int, default=784)
    parser.add_argument("--max-new-tokens", type=int, default=16, help="length of every answer (default 16)")
    parser.add_argument("--batch-questions", type=int, default=32, help="questions decoded together (default 32)")
    add_turns(parser)
    add_shape(parser)
    add_json(parser)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    settings = {"budget_tokens": arguments.budget_tokens, "block_tokens": arguments.block_tokens}
    answer = {"max_new_tokens": arguments.max_new_tokens, "batch_questions": arguments.batch_questions}
    engine = bench_engine(adapter=Unending, answer=answer, **settings, **shape_of(arguments))
    result = {"bench": "questions", **shape_of(arguments), "device": device_name(engine.adapter.device), **settings, **answer}
    with tempfile.TemporaryDirectory(prefix="reelkeep-bench-") as folder:
        result |= measure(engine, Path(folder, "cache.safetensors"), arguments)
    title = (
        f"Questions of one cache, {result['visual_tokens']:,} tokens read, {arguments.max_new_tokens} tokens an answer, {result['device']}"
    )
    notes = (
        f"one prefill {result['prefill_s']:.2f} s, a single answer {result['single_s']:.3f} s; "
        f"from the stored cache ({result['stored_bytes'] / 1e6:.1f} MB) {result['stored_s']:.3f} s, "
        f"{result['stored_ratio']:.0f} times less than the prefill",
        f"target, each question at most {ALLOWED:g} single answers: {', '.join(over_target(result['rows'])) or 'met'}",
    )
    publish(result, as_table(result["rows"], title), *notes, only_json=arguments.json)
    return 0


class Unending(WithoutTower):
    """No token ends an answer: all have the same length."""

    def stop_ids(self) -> set[int]:
        return set()


def measure(engine: Engine, path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prefill, single answer, stored cache and every number of questions, by turns."""
    batch = engine.config.answer
    alone = with_settings(engine, answer=batch.model_copy(update={"batch_questions": 1}))
    kept = engine.prefill(blank_blocks(engine, min(arguments.tokens, 4 * arguments.block_tokens)))
    ask(engine, kept, 2)  # the first pass pays for start-up
    kept = engine.prefill(blank_blocks(engine, arguments.tokens))
    kept.save(path)
    calls = {
        "prefill": partial(read, engine, arguments.tokens),
        "single answer": partial(ask, alone, kept, 1),
        "stored cache": partial(reopen, alone, path),
    }
    for count in arguments.questions:
        calls[f"{count} one by one"] = partial(ask, alone, kept, count)
        calls[f"{count} batched"] = partial(ask, engine, kept, count)
    seconds = {name: taken["s"] for name, taken in by_turns(calls, repeats=arguments.repeats, limit_s=arguments.limit_s).items()}
    prefill_s, single_s = seconds["prefill"], seconds["single answer"]
    rows = [
        {
            "questions": count,
            "one_by_one_s": seconds[f"{count} one by one"],
            "batched_s": seconds[f"{count} batched"],
            "a_prefill_each_s": count * (prefill_s + single_s),
            "ratio": (prefill_s + seconds[f"{count} batched"]) / (count * (prefill_s + single_s)),
            "one_by_one_ratio": (prefill_s + seconds[f"{count} one by one"]) / (count * (prefill_s + single_s)),
            "single_answers": seconds[f"{count} one by one"] / (count * single_s),
            "single_answers_batched": seconds[f"{count} batched"] / (count * single_s),
        }
        for count in arguments.questions
    ]
    return {
        "visual_tokens": kept.trace.visual_tokens,
        "prefill_s": prefill_s,
        "single_s": single_s,
        "stored_s": seconds["stored cache"],
        "stored_bytes": path.stat().st_size,
        "stored_ratio": prefill_s / seconds["stored cache"],
        "rows": rows,
    }


def read(engine: Engine, tokens: int) -> dict[str, float]:
    """One block-wise prefill; what stands in for decoder and vision tower isn't counted."""
    began = time.perf_counter()
    trace = engine.prefill(blank_blocks(engine, tokens)).trace
    synchronise(engine.adapter.device)
    return {"s": time.perf_counter() - began - trace.vision_s - trace.input_wait_s}


def ask(engine: Engine, kept: CompressedVideo, count: int) -> dict[str, float]:
    """Different questions of about one length."""
    began = time.perf_counter()
    engine.answer(kept, [f"What happens in part {number:03} of the video?" for number in range(count)])
    return {"s": time.perf_counter() - began}


def reopen(engine: Engine, path: Path) -> dict[str, float]:
    """One question of the stored cache, from the file to the answer."""
    began = time.perf_counter()
    ask(engine, engine.load_compressed(path), 1)
    return {"s": time.perf_counter() - began}


def over_target(rows: list[dict[str, Any]]) -> list[str]:
    """The numbers of questions whose cheaper way costs more than the target allows, in words."""
    cheaper = {r["questions"]: min(r["single_answers"], r["single_answers_batched"]) for r in rows}
    return [f"{count} questions missed it with {cost:.2f}" for count, cost in cheaper.items() if cost > ALLOWED]


def as_table(rows: list[dict[str, Any]], title: str) -> Table:
    """The table for people."""
    table = Table(title=title)
    names = "questions,one by one s,batched s,a prefill each s,one by one with prefill / each,batched with prefill / each,"
    names += "single answers a question,batched"
    for name in names.split(","):
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(
            str(r["questions"]),
            f"{r['one_by_one_s']:.2f}",
            f"{r['batched_s']:.2f}",
            f"{r['a_prefill_each_s']:.1f}",
            f"{r['one_by_one_ratio']:.3f}",
            f"{r['ratio']:.3f}",
            f"{r['single_answers']:.2f}",
            f"{r['single_answers_batched']:.2f}",
        )
    return table
