"""The benches in small form: what they compare is the same on both sides, their figures add up, and their verdicts are right."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from transformers import DynamicCache

from engine.errors import ConfigError
from engine.memory import process_peak_bytes
from jobs.bench import _measure, kvpress, prefill, questions, vision
from jobs.bench.__main__ import main as bench
from jobs.bench._model import (
    WithoutTower,
    bench_engine,
    blank_blocks,
    cache_bytes,
    full_forward,
    library_attention,
    whole_prompt,
    with_settings,
)
from jobs.bench.pipeline import over_target
from jobs.terminal import whole_numbers

SMALL = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "device": "cpu"}
SHAPE = ["--hidden", "64", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--device", "cpu", "--threads", "1"]


@pytest.fixture(scope="module")
def small_engine():
    return bench_engine(adapter=WithoutTower, budget_tokens=128, block_tokens=98, answer={"max_new_tokens": 1}, **SMALL)


@pytest.fixture(autouse=True)
def threads():
    """Benches set PyTorch's threads; the other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(argv: list[str]) -> tuple[dict, str, str]:
    """A bench's JSON object, its standard output and its standard error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert bench(argv) == 0, err.getvalue()
    return json.loads(out.getvalue().splitlines()[-1]), out.getvalue(), err.getvalue()


def in_this_process(name: str, argv: list[str], **_) -> dict:
    """Stands in for `apart` where the peaks themselves aren't looked at."""
    return run([name, *argv])[0]


def test_the_pipeline_bench_says_what_missed_its_target() -> None:
    assert over_target({"actor_overhead_percent": 9.9, "worker_overhead_percent": -1.0}) == []
    assert over_target({"actor_overhead_percent": 12.5, "worker_overhead_percent": 3.0}) == ["decode.where=actor missed it by 2.5"]


@pytest.mark.parametrize("text", ["", "4096,", "0", "4k", "-1,3"])
def test_a_list_of_numbers_is_refused_with_an_example(text) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 4096,8192"):
        whole_numbers(text)


def test_turns_alternate_and_end_at_the_limit() -> None:
    order: list[str] = []

    def call(name: str, seconds: list[float]):
        def once() -> dict[str, float]:
            order.append(name)
            return {"s": seconds.pop(0)}

        return once

    result = _measure.by_turns({"quick": call("quick", [1.0, 5.0, 2.0]), "slow": call("slow", [4.0, 8.0])}, repeats=3, limit_s=10)
    assert order == ["quick", "slow", "quick", "slow", "quick"]
    assert result == {"quick": {"s": 2.0, "repeats": 3}, "slow": {"s": 6.0, "repeats": 2}}


def test_both_prefills_read_the_same_prompt(small_engine) -> None:
    engine = with_settings(small_engine, budget_tokens=600)
    kept = engine.prefill(blank_blocks(engine, 490))
    cache, (embeds, positions) = DynamicCache(), whole_prompt(engine, 490)
    full_forward(engine, embeds, positions, cache)
    assert embeds.shape[1] == kept.trace.total_tokens and kept.cache.evictions == 0
    assert cache_bytes(cache) == kept.trace.kv_full_bytes
    for layer in range(2):
        assert torch.equal(positions[0].int(), kept.cache.positions(layer)[0])
        assert (cache.layers[layer].keys[0] - kept.cache.keys(layer)).abs().max() < 1e-4


def test_prefill_bench(monkeypatch) -> None:
    monkeypatch.setattr(prefill, "apart", in_this_process)
    sizes = ["--tokens", "490,980", "--budgets", "128,256", "--blocks", "98", "--full-up-to", "500", "--repeats", "2"]
    result, out, err = run(["prefill", *sizes, *SHAPE, "--json"])
    assert len(out.splitlines()) == 1 and "block-wise against" in err, "with --json the table goes to standard error"
    rows = result["rows"]
    assert [(r["tokens"], r["budget_tokens"]) for r in rows] == [(490, 128), (490, 256), (980, 128), (980, 256)]
    assert [r["full_s"] is None for r in rows] == [False, False, True, True] == [r["ratio"] is None for r in rows]
    for r in rows:
        entry_bytes = 2 * 32 * 4
        assert r["visual_tokens"] == r["tokens"] and r["kv_held_bytes"] == (2 * r["budget_tokens"] + 98) * entry_bytes
        assert r["kv_full_bytes"] > 2 * r["tokens"] * entry_bytes
        assert 0 < r["compress_share"] < 1 and r["block_ttft_s"] > r["block_s"] > 0 and r["block_repeats"] == 2
        assert r["block_tokens_per_s"] == pytest.approx(r["visual_tokens"] / r["block_s"])
        assert r["process_peak_bytes"] >= r["process_loaded_bytes"] > 1 << 20
    assert rows[0]["ratio"] == pytest.approx(rows[0]["block_s"] / rows[0]["full_s"]) and rows[0]["full_ttft_s"] > rows[0]["full_s"]
    expected = (rows[2]["block_s"] / 980) / (rows[0]["block_s"] / 490)
    assert result["per_token_cost"]["block"] == pytest.approx(expected) and result["per_token_cost"]["full"] == 1


def test_peaks_are_those_of_a_process_of_its_own() -> None:
    ballast = torch.ones(1 << 27)  # half a gigabyte that must not count there
    sizes = ["--tokens", "2940", "--budgets", "128", "--blocks", "98"]
    found = _measure.apart("prefill", [*sizes, *SHAPE, "--apart", "--with-full"])["peaks"]
    assert found["process_loaded_bytes"] <= found["process_peak_bytes"] < found["full_process_peak_bytes"] < process_peak_bytes()
    del ballast


def test_questions_bench() -> None:
    sizes = ["--tokens", "490", "--budget-tokens", "128", "--block-tokens", "98", "--max-new-tokens", "3", "--repeats", "1"]
    result, _, _ = run(["questions", "--questions", "1,5", *sizes, *SHAPE])
    one, five = result["rows"]
    assert (one["questions"], five["questions"]) == (1, 5) and five["batched_s"] < five["one_by_one_s"]
    assert five["a_prefill_each_s"] == pytest.approx(5 * (result["prefill_s"] + result["single_s"]))
    assert five["ratio"] == pytest.approx((result["prefill_s"] + five["batched_s"]) / five["a_prefill_each_s"])
    assert result["stored_bytes"] > 2 * 2 * 128 * 32 * 4 and result["stored_s"] > 0


def test_questions_bench_says_which_number_missed_the_target() -> None:
    rows = [
        {"questions": 10, "single_answers": 1.5, "single_answers_batched": 0.4},
        {"questions": 100, "single_answers": 1.3, "single_answers_batched": 1.25},
    ]
    assert questions.over_target(rows) == ["100 questions missed it with 1.25"]


def test_evict_bench_counts_what_a_choice_takes() -> None:
    argv = ["evict", "--budget", "128", "--block", "98", "--blocks", "3", "--policies", "value_norm,coverage", *SHAPE]
    result, out, _ = run(argv)
    norm, coverage = result["rows"]
    assert norm["slots"] == coverage["slots"] == 226
    assert norm["flops"] == norm["waits"] == 0 < norm["operations"] < coverage["operations"]
    width = 32 + 2  # one KV head, and the two columns that make a product a squared distance
    assert coverage["flops"] >= 2 * 226 * 226 * width and coverage["moved_bytes"] > 226 * 226 * 4
    assert coverage["waits"] >= 2 and 0 < coverage["compress_share"] < 1
    assert norm["forward_flops"] == coverage["forward_flops"] > 0 and "of the forward's %" in out


def test_vision_bench_finds_the_same_features() -> None:
    sizes = ["--windows", "28,56", "--hidden", "64", "--depth", "8", "--frame-px", "84", "--groups", "2", "--repeats", "1"]
    result, out, _ = run(["vision", *sizes, "--device", "cpu", "--threads", "1", "--profile"])
    assert [(r["windows"], r["patches_a_window"]) for r in result["rows"]] == [(18, 4), (8, 16)]  # 56 px leaves smaller windows at the edge
    for r in result["rows"]:
        assert r["largest_difference"] < 2e-6 < 0.05 < r["largest_feature"]
        assert 0 < sum(r["grouped_profile"].values()) <= 1 and "addmm" in r["grouped_profile"]
    assert "grouped windows" in out and "56 px, library: " in out


def test_vision_bench_refuses_sides_that_no_token_has() -> None:
    with pytest.raises(SystemExit) as stopped, redirect_stderr(io.StringIO()) as err:
        vision.main(["--windows", "30"])
    assert stopped.value.code == 2 and "30 must be a multiple of 28" in err.getvalue()


def test_kvpress_bench_names_the_extra_it_needs(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(ConfigError, match=r"pip install 'reelkeep\[peers\]'"):
        kvpress.main([])


@pytest.mark.equivalence
def test_kvpress_runs_the_same_language_model(small_engine) -> None:
    """Where all axes agree, as in text, Qwen2 with the same weights gives the same states."""
    ids = list(range(20, 60))
    embeds = small_engine.adapter.embed_text(ids)[None]
    positions = torch.arange(len(ids))[None, :, None].expand(-1, -1, 3)
    with torch.inference_mode():
        theirs = kvpress.text_part(small_engine).model(inputs_embeds=embeds).last_hidden_state
    assert (full_forward(small_engine, embeds, positions, DynamicCache()) - theirs).abs().max() < 1e-5


def test_library_attention_is_put_back(small_engine) -> None:
    config = small_engine.adapter.text_config
    ours = config._attn_implementation
    with pytest.raises(ValueError, match="stop"), library_attention(config):
        assert config._attn_implementation == "sdpa"
        raise ValueError("stop")
    assert config._attn_implementation == ours


if importlib.util.find_spec("kvpress"):  # in the run on the oldest transformers

    @pytest.mark.equivalence
    def test_kvpress_bench(monkeypatch) -> None:
        monkeypatch.setattr(kvpress, "apart", in_this_process)
        sizes = ["--tokens", "490", "--budget-tokens", "98", "--block-tokens", "98", "--repeats", "2"]
        rows = {r["method"]: r for r in run(["kvpress", *sizes, *SHAPE])[0]["rows"]}
        assert list(rows) == [*kvpress.OURS, *kvpress.PRESSES]
        assert {r["kept_tokens"] for name, r in rows.items() if name != "no press"} <= {97, 98}  # kvpress rounds the ratio down
        held = {name: r["kv_held_bytes"] for name, r in rows.items()}
        assert held["engine, keydiff"] < held["KeyDiffPress"] == held["BlockPress(KeyDiffPress)"] < held["no press"]
