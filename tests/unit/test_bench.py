"""The benches' verdicts."""

from __future__ import annotations

from jobs.bench.pipeline import over_target


def test_the_pipeline_bench_says_what_missed_its_target() -> None:
    assert over_target({"actor_overhead_percent": 9.9, "worker_overhead_percent": -1.0}) == []
    assert over_target({"actor_overhead_percent": 12.5, "worker_overhead_percent": 3.0}) == ["decode.where=actor missed it by 2.5"]
