"""`python -m jobs.bench kvpress`: kvpress's KeyDiff, SnapKV and BlockPress against the engine, on one language model.

kvpress runs the text part as transformers' Qwen2ForCausalLM, a class it supports, with the same weights; its presses compress within one
full forward, BlockPress too. Both sides read the same embeddings and keep as many entries. The first turn of each method is taken in a
fresh process, whose peak resident set is shown; the others alternate in one process, and times are medians. "Held at most" counts keys and
values in all layers at the worst moment.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from rich.table import Table
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from engine import Engine, Question
from engine.errors import ConfigError
from engine.memory import process_peak_bytes
from jobs.bench._measure import (
    MIB,
    add_json,
    add_shape,
    add_turns,
    apart,
    by_turns,
    device_name,
    device_peak_bytes,
    publish,
    say,
    shape_of,
    synchronise,
)
from jobs.bench._model import WithoutTower, bench_engine, blank_blocks, cache_bytes, whole_prompt
from jobs.terminal import whole_numbers

QUESTION = Question("What happens at the gate?")
OURS = {"engine, keydiff": "keydiff", "engine, snapkv": "snapkv"}
PRESSES = ("no press", "KeyDiffPress", "SnapKVPress", "BlockPress(KeyDiffPress)")


def main(argv: list[str]) -> int:
    """Run the rows, print the table and, last, one JSON object."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench kvpress", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=whole_numbers, default=[4096, 16384], help="visual tokens of each stream (default 4096,16384)")
    parser.add_argument("--budget-tokens", type=int, default=1024)
    parser.add_argument("--block-tokens", type=int, default=784)
    add_turns(parser, repeats=3)
    add_shape(parser)
    add_json(parser)
    parser.add_argument("--apart", metavar="METHOD", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        importlib.import_module("kvpress")  # here, so that every method's process has it in memory
    except ImportError as error:
        raise ConfigError(
            "kvpress isn't installed: pip install 'reelkeep[peers]' in an environment of its own, since it needs transformers below 5.3 "
            "(in a checkout: make .venv-oldest/installed, then .venv-oldest/bin/python -m jobs.bench kvpress)"
        ) from error
    torch.set_num_threads(arguments.threads)
    settings = {"budget_tokens": arguments.budget_tokens, "block_tokens": arguments.block_tokens}
    base = bench_engine(adapter=WithoutTower, **settings, **shape_of(arguments))
    engines = {name: Engine(base.adapter, base.config.model_copy(update={"policy": policy})) for name, policy in OURS.items()}
    text = text_part(base)

    def method(name: str, tokens: int) -> Callable[[], dict[str, float]]:
        return partial(engine_pass, engines[name], tokens) if name in OURS else partial(press_pass, base, text, name, tokens)

    device = base.adapter.device
    if arguments.apart:
        method(arguments.apart, 2 * arguments.budget_tokens)()  # pays for start-up
        figures = method(arguments.apart, arguments.tokens[0])()
        print(json.dumps(figures | {"process_peak_bytes": process_peak_bytes(), "device_peak_bytes": device_peak_bytes(device)}))
        return 0
    rows = measure(method, argv, arguments)
    where = device_name(device)
    title = f"kvpress against the engine, budget {arguments.budget_tokens:,}, block {arguments.block_tokens}, {where} (medians)"
    result = {"bench": "kvpress", **shape_of(arguments), "device": where, **settings, "rows": rows}
    publish(result, as_table(rows, title), only_json=arguments.json)
    return 0


def measure(
    method: Callable[[str, int], Callable[[], dict[str, float]]], argv: list[str], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The first turn of each method in a process of its own, then the others by turns."""
    calls, first, rows = {}, {}, []
    for tokens in arguments.tokens:
        for name in (*OURS, *PRESSES):
            call = f"{tokens} tokens, {name}"
            calls[call], first[call] = method(name, tokens), apart("kvpress", [*argv, "--tokens", str(tokens), "--apart", name])
            say(f"{call}: {first[call]['s']:.3f} s, in a fresh process")
    timed = by_turns(calls, repeats=arguments.repeats, limit_s=arguments.limit_s, first=first)
    for tokens in arguments.tokens:
        for name in (*OURS, *PRESSES):
            taken = timed[f"{tokens} tokens, {name}"]
            ours = timed[f"{tokens} tokens, {'engine, snapkv' if 'SnapKV' in name else 'engine, keydiff'}"]
            alone = first[f"{tokens} tokens, {name}"]
            counted = {
                key: int(alone[key]) for key in ("kept_tokens", "kv_held_bytes", "kv_kept_bytes", "process_peak_bytes", "device_peak_bytes")
            }
            rows.append(
                {
                    "tokens": tokens,
                    "method": name,
                    "s": taken["s"],
                    "cpu_s": taken["cpu_s"],
                    "against_ours": taken["s"] / ours["s"],
                    "cpu_against_ours": taken["cpu_s"] / ours["cpu_s"],
                    **counted,
                    "repeats": taken["repeats"],
                }
            )
    return rows


def engine_pass(engine: Engine, tokens: int) -> dict[str, float]:
    """One block-wise prefill; what stands in for decoder and vision tower isn't counted."""
    began, cpu_began = time.perf_counter(), time.process_time()
    kept = engine.prefill(blank_blocks(engine, tokens), question=QUESTION if engine.query_aware else None)
    synchronise(engine.adapter.device)
    trace, cpu_s = kept.trace, time.process_time() - cpu_began
    seconds = time.perf_counter() - began - trace.vision_s - trace.input_wait_s
    return {
        "s": seconds,
        "cpu_s": cpu_s,
        "kv_held_bytes": trace.kv_peak_bytes,
        "kv_kept_bytes": kept.cache.held_bytes,
        "kept_tokens": kept.cache.held_tokens,
    }


def press_pass(engine: Engine, text: Qwen2ForCausalLM, name: str, tokens: int) -> dict[str, float]:
    """One full forward under a press. SnapKV's window is the question, which stands at the end of the prompt there."""
    adapter = engine.adapter
    cache: Any = DynamicCache()
    embeds, _ = whole_prompt(engine, tokens)
    question = adapter.tokenize(adapter.close_text("video"), special=True) + adapter.question_ids(QUESTION)
    if name == "SnapKVPress":
        embeds = torch.cat([embeds, adapter.embed_text(question)[None]], dim=1)
    ratio = max(0.0, 1 - engine.config.budget_tokens / embeds.shape[1])
    held: list[int] = []
    # Placed before the press's own hooks, so that each looks at its layer before that is compressed.
    watches = [layer.self_attn.register_forward_hook(lambda *_: held.append(cache_bytes(cache))) for layer in text.model.layers]
    synchronise(adapter.device)
    began, cpu_began = time.perf_counter(), time.process_time()
    try:
        with torch.inference_mode(), make_press(name, ratio, len(question), engine.config.block_tokens, text):
            text.model(inputs_embeds=embeds, past_key_values=cache, use_cache=True)
        synchronise(adapter.device)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    finally:
        for watch in watches:
            watch.remove()
    return {
        "s": seconds,
        "cpu_s": cpu_s,
        "kv_held_bytes": max(held),
        "kv_kept_bytes": cache_bytes(cache),
        "kept_tokens": cache.layers[0].keys.shape[2],
    }


def make_press(name: str, ratio: float, window_tokens: int, block_tokens: int, model: Qwen2ForCausalLM) -> Any:
    """The context in which a forward of `model` is compressed."""
    from kvpress import BlockPress, KeyDiffPress, SnapKVPress

    if name == "no press":
        return nullcontext()
    if name == "SnapKVPress":
        return SnapKVPress(compression_ratio=ratio, window_size=window_tokens)(model)
    press = KeyDiffPress(compression_ratio=ratio)
    return (press if name == "KeyDiffPress" else BlockPress(press, block_size=block_tokens))(model)


def text_part(engine: Engine) -> Qwen2ForCausalLM:
    """The language model alone in the class that kvpress supports, sharing the weights; its positions have one axis."""
    ours = engine.adapter.text_config
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = Qwen2Config(
        **{field: getattr(ours, field) for field in (*fields, "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")},
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_parameters["rope_theta"]},
    )
    config._attn_implementation = "sdpa"
    model: Any = Qwen2ForCausalLM(config)
    model.to(engine.adapter.device)
    model.model.load_state_dict(engine.adapter.text_model.state_dict(), assign=True)
    model.lm_head = engine.adapter.model.lm_head
    return model.eval().requires_grad_(False)


def as_table(rows: list[dict[str, Any]], title: str) -> Table:
    """The table for people."""
    table = Table(title=title)
    for name in (
        "tokens",
        "method",
        "s",
        "against ours",
        "CPU s",
        "against ours",
        "entries kept",
        "KV held at most, MiB",
        "KV kept, MiB",
        "peak MiB",
    ):
        table.add_column(name, justify="left" if name == "method" else "right")
    for r in rows:
        table.add_row(
            f"{r['tokens']:,}",
            r["method"],
            f"{r['s']:.2f}",
            f"{r['against_ours']:.2f}",
            f"{r['cpu_s']:.2f}",
            f"{r['cpu_against_ours']:.2f}",
            f"{r['kept_tokens']:,}",
            f"{r['kv_held_bytes'] / MIB:.1f}",
            f"{r['kv_kept_bytes'] / MIB:.1f}",
            f"{(r['device_peak_bytes'] or r['process_peak_bytes']) / MIB:,.0f}",
        )
    return table
