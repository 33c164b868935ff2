"""`python -m jobs.bench prefill`: block-wise prefill under a budget against transformers' full prefill of the same model.

Both read the same embeddings with the same positions; the vision tower is left out of both (`jobs.bench vision` times it). The first turn
of each row is taken in a fresh process, which reads block-wise first and in full afterwards and notes the largest resident set after each;
the other turns alternate over all rows in one process. Times are medians. Budgets and block sizes beyond the first take the full
prefill's figures from the first: it has neither. Processor seconds are shown as well: on a machine that others use they change less than the clock's.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from typing import Any

import torch
from rich.table import Table
from transformers import DynamicCache

from engine import Engine, Question
from engine.memory import process_peak_bytes
from engine.policies import make_policy
from jobs.bench._measure import (
    MIB,
    add_json,
    add_profile,
    add_shape,
    add_turns,
    apart,
    by_turns,
    costliest,
    device_name,
    device_peak_bytes,
    publish,
    say,
    shape_of,
    shares,
    synchronise,
)
from jobs.bench._model import WithoutTower, bench_engine, blank_blocks, cache_bytes, full_forward, whole_prompt, with_settings
from jobs.terminal import whole_numbers

QUESTION = Question("What happens at the gate?")


def main(argv: list[str]) -> int:
    """Run the rows, print the table and, last, one JSON object."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench prefill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=whole_numbers, default=[1024, 4096, 8192], help="visual tokens of each stream (default 1024,4096,8192)"
    )
    parser.add_argument("--budgets", type=whole_numbers, default=[1024], help="budgets to try, in tokens a layer (default 1024)")
    parser.add_argument("--blocks", type=whole_numbers, default=[784], help="block sizes to try, in tokens (default 784)")
    parser.add_argument("--policy", default="keydiff", help="eviction policy (default keydiff)")
    parser.add_argument("--full-up-to", type=int, default=32768, metavar="TOKENS", help="no full prefill of longer streams (default 32768)")
    add_turns(parser)
    add_shape(parser)
    add_profile(parser)
    add_json(parser)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--with-full", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    make_policy(arguments.policy, {})
    torch.set_num_threads(arguments.threads)
    engine = bench_engine(adapter=WithoutTower, policy=arguments.policy, answer={"max_new_tokens": 1}, **shape_of(arguments))
    if arguments.apart:
        print(json.dumps(first_turn(engine, arguments)))
        return 0
    rows = measure(engine, argv, arguments)
    cost = per_token_cost(rows)
    title = f"Prefill, {arguments.policy}, {device_name(engine.adapter.device)}: block-wise against transformers' full prefill (medians)"
    note = (
        f"time per visual token, longest over shortest stream: block-wise {cost['block']:.2f} (processor time {cost['block_cpu']:.2f})"
        + (f", full {cost['full']:.2f} (at {cost['full_tokens']:,})" if cost["full"] else "")
    )
    result = {"bench": "prefill", "policy": arguments.policy, **shape_of(arguments)}
    result |= {"device": device_name(engine.adapter.device), "rows": rows, "per_token_cost": cost}
    profiles = [f"{r['visual_tokens']:,} tokens, block-wise: {shares(r['profile'])}" for r in rows if arguments.profile]
    publish(result, as_table(rows, title), note, *profiles, only_json=arguments.json)
    return 0


def measure(engine: Engine, argv: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The first turn of each row in a process of its own, then the others by turns."""
    combinations = [(tokens, budget, block) for tokens in arguments.tokens for budget in arguments.budgets for block in arguments.blocks]
    alone, calls, first = {}, {}, {}
    for tokens, budget, block in combinations:
        ours, full = named(tokens, budget, block), f"{tokens} tokens, full"
        with_full = tokens <= arguments.full_up_to and full not in calls
        choice = f"--tokens {tokens} --budgets {budget} --blocks {block} --apart {'--with-full' if with_full else ''}".split()
        found = apart("prefill", [*argv, *choice], CUDA_LAUNCH_BLOCKING="1")
        calls[ours] = partial(block_pass, with_settings(engine, budget_tokens=budget, block_tokens=block), tokens)
        first[ours] = found["block"]
        if with_full:
            calls[full], first[full] = partial(full_pass, engine, tokens), found["full"]
        alone[ours] = found["peaks"]
        say(f"{ours}: {found['block']['s']:.3f} s" + (f", full {found['full']['s']:.3f} s" if with_full else "") + ", in a fresh process")
    # On CUDA that process waits for every kernel: its times are no turn, and only its share of the compression is true.
    on_cuda = engine.adapter.device.type == "cuda"
    if on_cuda or arguments.repeats > 1:
        for once in (block_pass, full_pass):
            once(engine, min(*arguments.tokens, arguments.full_up_to))  # the first pass pays for start-up
    timed = by_turns(calls, repeats=arguments.repeats, limit_s=arguments.limit_s, first=None if on_cuda else first)
    rows = []
    for tokens, budget, block in combinations:
        ours, full = named(tokens, budget, block), f"{tokens} tokens, full"
        share = first[ours]["compress_share"] if on_cuda else timed[ours]["compress_share"]
        peaks = {"full_process_peak_bytes": None, "full_device_peak_bytes": None} | alone[named(tokens, *combinations[0][1:])] | alone[ours]
        line = row(tokens, budget, block, timed[ours] | {"compress_share": share}, timed.get(full)) | peaks
        if arguments.profile:
            line["profile"] = costliest(calls[ours], engine.adapter.device)
        rows.append(line)
    return rows


def named(tokens: int, budget: int, block: int) -> str:
    """One block-wise measurement in words."""
    return f"{tokens} tokens, block-wise, budget {budget}, block {block}"


def row(tokens: int, budget: int, block: int, ours: dict[str, float], full: dict[str, float] | None) -> dict[str, Any]:
    """The times of one line of the result; what needs a full prefill is None where it was left out."""
    read = int(ours["visual_tokens"])
    return {
        "tokens": tokens,
        "visual_tokens": read,
        "budget_tokens": budget,
        "block_tokens": block,
        "full_s": full and full["s"],
        "block_s": ours["s"],
        "ratio": full and ours["s"] / full["s"],
        "full_cpu_s": full and full["cpu_s"],
        "block_cpu_s": ours["cpu_s"],
        "cpu_ratio": full and ours["cpu_s"] / full["cpu_s"],
        "full_tokens_per_s": full and read / full["s"],
        "block_tokens_per_s": read / ours["s"],
        "full_ttft_s": full and full["ttft_s"],
        "block_ttft_s": ours["ttft_s"],
        "kv_held_bytes": int(ours["kv_held_bytes"]),
        "kv_full_bytes": int(full["kv_bytes"] if full else ours["kv_full_bytes"]),
        "compress_share": ours["compress_share"],
        "block_repeats": ours["repeats"],
        "full_repeats": full and full["repeats"],
    }


def block_pass(engine: Engine, tokens: int) -> dict[str, float]:
    """One block-wise prefill and a first token; what stands in for decoder and vision tower isn't counted."""
    device = engine.adapter.device
    began, cpu_began = time.perf_counter(), time.process_time()
    kept = engine.prefill(blank_blocks(engine, tokens), question=QUESTION if engine.query_aware else None)
    synchronise(device)
    trace, cpu_s = kept.trace, time.process_time() - cpu_began
    seconds = time.perf_counter() - began - trace.vision_s - trace.input_wait_s
    answer = engine.answer(kept, [QUESTION])[0]
    return {
        "s": seconds,
        "cpu_s": cpu_s,
        "ttft_s": seconds + answer.ttft_s,
        "compress_share": trace.evict_s / seconds,
        "visual_tokens": trace.visual_tokens,
        "kv_held_bytes": trace.kv_peak_bytes,
        "kv_full_bytes": trace.kv_full_bytes,
    }


def full_pass(engine: Engine, tokens: int) -> dict[str, float]:
    """One forward of transformers over everything, into its own cache, and a first token."""
    adapter, cache = engine.adapter, DynamicCache()
    embeds, positions = whole_prompt(engine, tokens)
    synchronise(adapter.device)
    began, cpu_began = time.perf_counter(), time.process_time()
    full_forward(engine, embeds, positions, cache)
    synchronise(adapter.device)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    held = cache_bytes(cache)
    ids = adapter.tokenize(adapter.close_text("video"), special=True) + adapter.question_ids(QUESTION)
    behind = torch.arange(len(ids), device=adapter.device)[None, :, None].expand(-1, -1, adapter.axes) + int(positions.max()) + 1
    hidden = full_forward(engine, adapter.embed_text(ids)[None], behind, cache)
    adapter.logits(hidden[:, -1]).argmax().item()
    return {"s": seconds, "cpu_s": cpu_s, "ttft_s": time.perf_counter() - began, "kv_bytes": held}


def first_turn(engine: Engine, arguments: argparse.Namespace) -> dict[str, Any]:
    """One turn of a row in this process, and its largest resident set (and allocation of the device) by then."""
    tokens, device = arguments.tokens[0], engine.adapter.device
    engine = with_settings(engine, budget_tokens=arguments.budgets[0], block_tokens=arguments.blocks[0])
    block_pass(engine, 2 * arguments.blocks[0])  # pays for start-up
    peaks = {"process_loaded_bytes": process_peak_bytes()}
    block = block_pass(engine, tokens)
    peaks |= {"process_peak_bytes": process_peak_bytes(), "device_peak_bytes": device_peak_bytes(device)}
    if not arguments.with_full:
        return {"block": block, "peaks": peaks}
    full = full_pass(engine, tokens)
    peaks |= {"full_process_peak_bytes": process_peak_bytes(), "full_device_peak_bytes": device_peak_bytes(device)}
    return {"block": block, "full": full, "peaks": peaks}


def per_token_cost(rows: list[dict[str, Any]]) -> dict[str, float | int | None]:
    """Seconds per visual token of the longest stream over those of the shortest, of the first budget and block size."""
    chosen = [r for r in rows if (r["budget_tokens"], r["block_tokens"]) == (rows[0]["budget_tokens"], rows[0]["block_tokens"])]
    with_full = [r for r in chosen if r["full_s"]]

    def cost(of: list[dict[str, Any]], key: str) -> float | None:
        ordered = sorted(of, key=lambda r: r["visual_tokens"])
        return (ordered[-1][key] / ordered[-1]["visual_tokens"]) / (ordered[0][key] / ordered[0]["visual_tokens"]) if of else None

    longest_full = max((r["visual_tokens"] for r in with_full), default=None)
    return {
        "block": cost(chosen, "block_s"),
        "block_cpu": cost(chosen, "block_cpu_s"),
        "full": cost(with_full, "full_s"),
        "full_tokens": longest_full,
    }


def as_table(rows: list[dict[str, Any]], title: str) -> Table:
    """The table for people."""
    table = Table(title=title)
    names = "visual tokens,M,b,full s,block s,ratio,CPU ratio,full tok/s,block tok/s,full TTFT s,block TTFT s,compress %,"
    names += "KV held MiB,KV full MiB,peak MiB,full peak MiB"
    for name in names.split(","):
        table.add_column(name, justify="right")
    for r in rows:
        device = bool(r["device_peak_bytes"])
        peak, full_peak = (r[f"{which}{'device' if device else 'process'}_peak_bytes"] for which in ("", "full_"))
        cells = [
            f"{r['visual_tokens']:,}",
            f"{r['budget_tokens']:,}",
            f"{r['block_tokens']:,}",
            *(_cell(r[key], 2) for key in ("full_s", "block_s", "ratio", "cpu_ratio")),
            *(_cell(r[key], 0) for key in ("full_tokens_per_s", "block_tokens_per_s")),
            *(_cell(r[key], 2) for key in ("full_ttft_s", "block_ttft_s")),
            f"{100 * r['compress_share']:.1f}",
            *(_cell(value / MIB if value else None, 1) for value in (r["kv_held_bytes"], r["kv_full_bytes"])),
            *(_cell(value / MIB if value else None, 0) for value in (peak, full_peak)),
        ]
        table.add_row(*cells)
    return table


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
