"""Published benchmarks: how each is laid out, put and judged. docs/evaluate.md tells the same for people."""

from __future__ import annotations

from jobs.benchmarks import longvideobench, milebench, mlvu, mmniah, videomme, vstar
from jobs.benchmarks.base import Benchmark, Form, Problem, Sample, Score

__all__ = ["BENCHMARKS", "Benchmark", "Form", "Problem", "Sample", "Score"]

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        mlvu.DEV,
        mlvu.TEST,
        videomme.ALL,
        videomme.LONG,
        longvideobench.VALIDATION,
        vstar.TEST,
        milebench.NEEDLE,
        mmniah.DOCUMENTS,
    )
}
