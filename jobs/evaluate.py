"""Run a benchmark, as published, through the main pipeline: a grid of models, policies, budgets and block sizes, scored and reported.

    python -m jobs.evaluate --benchmark mlvu --annotations MLVU/json --videos MLVU/video --output OUT \\
        --models Qwen/Qwen2.5-VL-7B-Instruct --policies keydiff,snapkv,full --budgets 1024,2048,4096 --block-sizes 784

Takes every setting of `jobs.answer` besides, which holds for all cells. Each cell's folder is the output of `jobs.answer` under the cell's
settings; run the same command again and it does only what is missing. The cells of a model read each video in lock-step in this one
process: it is decoded once, and its vision features are computed once a block size.

Exit codes: 0 all questions answered; 1 the job failed; 2 benchmark, settings or model can't work; 3 finished, but some questions have no
answer; 130 stopped by Ctrl-C or SIGTERM. After 1 and 130 the same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table as RichTable

from engine.errors import ConfigError, ReelkeepError
from jobs.answer import ANSWERED, FAILED, STOPPED, UNANSWERED, UNUSABLE, plain
from jobs.benchmarks import BENCHMARKS, Benchmark, Form, Problem, Sample
from jobs.manifest import check_output, write_manifest
from jobs.terminal import complain, make_console
from pipeline.config import JobConfig, load_config
from pipeline.logs import set_up_logging
from pipeline.stopping import sigterm_like_ctrl_c
from pipeline.storage import Storage, join_uri, local_path, split_s3

PROG = "reelkeep evaluate"
MANIFEST = "manifest"
SHOWN = ("model", "policy", "budget", "block", "right, %", "no answer", "paper, %")
"""Columns of the summary that a terminal has room for."""

log = logging.getLogger("reelkeep.evaluate")
_T = TypeVar("_T")


@dataclass
class Evaluation:
    """What is to be evaluated.

    Attributes:
        benchmark: None for a manifest with expected answers.
        config: the settings that all cells share.
        form: how questions are put.
        samples, problems: the benchmark's questions, and its rows that can't be used.
    """

    benchmark: Benchmark | None
    title: str
    config: JobConfig
    output: str
    form: Form
    samples: list[Sample]
    problems: list[Problem]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, rest = _parser().parse_known_args(arguments)
    try:
        return _run(own, rest)
    except KeyboardInterrupt:
        return _say("stopped; run the same command again to go on", STOPPED)
    except ReelkeepError as error:
        from pipeline.run import JobFailedError, StoppedError

        return _say(error, {StoppedError: STOPPED, JobFailedError: FAILED}.get(type(error), UNUSABLE))


def _run(own: argparse.Namespace, rest: Sequence[str]) -> int:
    asked = prepare(own, rest)
    set_up_logging(asked.config.log)
    from jobs.evaluation.grid import fill, grid

    engine = asked.config.engine
    cells = grid(
        asked.config,
        asked.output,
        own.models or [engine.model],
        own.policies or [engine.policy],
        own.budgets or [engine.budget_tokens],
        own.block_sizes or [engine.block_tokens],
    )
    for problem in asked.problems:
        log.warning("left out %s", problem)
    if asked.config.dry_run:
        return _show_plan(asked, cells)
    if asked.benchmark is not None and asked.benchmark.paper and (why_not := _incomparable(asked, own.tasks)):
        log.warning("the paper's figures are left out: %s", why_not)
        asked.benchmark = replace(asked.benchmark, paper=None)
    with sigterm_like_ctrl_c():
        fill(cells)
    return _report(asked, cells)


def _incomparable(asked: Evaluation, tasks: Sequence[str]) -> str:
    """Why the paper's figures mustn't stand beside these; "" when they may."""
    config = asked.config
    reasons = {
        f"--form {asked.form}": asked.form != "published",
        "--tasks": bool(tasks),
        "--limit": config.limit is not None,
        "--only": bool(config.only),
        f"engine.compress={config.engine.compress}": config.engine.compress != "during",
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def _report(asked: Evaluation, cells: list[Any]) -> int:
    from jobs.evaluation.report import write_report
    from jobs.evaluation.scores import GridScore, score_cell
    from jobs.evaluation.tables import summary
    from pipeline.manifest import read_manifest

    storage = Storage(asked.config.storage)
    scores = [score_cell(cell, asked.benchmark, asked.samples, storage) for cell in cells]
    missing = [(video_id, reason) for video_id, _, reason in read_manifest(asked.config, storage).missing]
    form = MANIFEST if asked.benchmark is None else asked.form
    grid = GridScore(asked.title, form, scores, asked.benchmark, asked.problems, missing)
    address = write_report(grid, asked.output, storage)
    console = make_console()
    table = summary(grid)
    places = [place for place, name in enumerate(table.columns) if name in SHOWN]
    shown = RichTable(title=plain(asked.title))
    for place in places:
        shown.add_column(table.columns[place], justify="left" if place < table.texts else "right")
    for row in table.rows:
        shown.add_row(*(plain(row[place]) for place in places))
    console.print(shown)
    console.print(plain(f"report: {address}", 2000), soft_wrap=True)
    return UNANSWERED if any(cell.overall.unanswered or cell.failures for cell in scores) else ANSWERED


def prepare(own: argparse.Namespace, rest: Sequence[str]) -> Evaluation:
    """Read benchmark and settings, and write the benchmark's manifest under the output.

    Raises:
        ConfigError, InputError: benchmark or settings can't work.
    """
    output = own.output if split_s3(own.output) else str(local_path(own.output))
    if own.benchmark == MANIFEST:
        if own.videos or own.tasks:
            raise ConfigError("--videos and --tasks are for benchmarks; a manifest names its videos, and --only takes some of them")
        config = load_config(None, rest, prog=PROG, defaults=_defaults(str(own.annotations), output, None))
        title = "/".join(own.annotations.split("/")[-2:])
        return Evaluation(None, title, config, output, "letters", [], [])
    benchmark = BENCHMARKS[own.benchmark]
    if own.videos is None:
        raise ConfigError(f"--videos is missing: {benchmark.videos}")
    manifest = join_uri(output, "manifest.jsonl")
    config = load_config(None, rest, prog=PROG, defaults=_defaults(manifest, output, benchmark if own.form == "published" else None))
    videos = own.videos if split_s3(own.videos) else str(local_path(own.videos))
    samples, problems = benchmark.read(Path(own.annotations), videos, own.tasks, own.form)
    check_output(manifest, Path(own.annotations), [*samples, *problems])
    write_manifest(samples, manifest, own.form, Storage(config.storage))
    return Evaluation(benchmark, benchmark.title, config, output, own.form, samples, problems)


def _defaults(manifest: str, output: str, benchmark: Benchmark | None) -> dict[str, Any]:
    engine: dict[str, Any] = {}
    if benchmark is not None:
        engine = {"system_prompt": benchmark.system_prompt, "answer": {"max_new_tokens": benchmark.max_new_tokens}}
    return {"manifest": manifest, "output": output, "caches": {"retain": "none"}, "engine": engine}


def _show_plan(asked: Evaluation, cells: list[Any]) -> int:
    from pipeline.run import Run

    console = make_console()
    table = RichTable("cell", "videos to do", "done", "questions to do", title=plain(asked.title))
    for cell in cells:
        job = Run(cell.config)
        todo = len(job.pending)
        table.add_row(cell.name, str(todo), str(job.total_videos - todo), str(sum(len(task.questions) for task in job.pending)))
    console.print(table)
    written = "" if asked.benchmark is None else f" besides {asked.config.manifest}"
    console.print(plain(f"nothing was done{written} (--dry-run); output would be {asked.output}", 2000), soft_wrap=True)
    return ANSWERED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--benchmark", required=True, choices=[*BENCHMARKS, MANIFEST], help="what to run; manifest: any manifest with expected answers"
    )
    parser.add_argument("--annotations", required=True, help="the benchmark's annotations as published (file or folder), or the manifest")
    parser.add_argument("--videos", help="folder or s3:// prefix with its videos or images")
    parser.add_argument("--output", required=True, help="folder or s3:// prefix: report.html, report.md, scores.json, cells/")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="tasks to take; default: all")
    parser.add_argument(
        "--form",
        choices=("published", "letters"),
        default="published",
        help="published: the benchmark's own prompt, answered freely, parsed by its rule (default). letters: options are given to the engine, "
        "which takes the likeliest letter",
    )
    parser.add_argument("--models", type=_several(str), metavar="A,B", help="hub ids or folders; default: engine.model")
    parser.add_argument("--policies", type=_several(str), metavar="A,B", help="eviction policies; default: engine.policy")
    parser.add_argument("--budgets", type=_several(int), metavar="N,M", help="entries a layer keeps; default: engine.budget_tokens")
    parser.add_argument("--block-sizes", type=_several(int), metavar="N,M", help="tokens of a block; default: engine.block_tokens")
    return parser


def _several(kind: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    def read(text: str) -> list[_T]:
        try:
            values = [kind(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas between them") from None
        if not values:
            raise argparse.ArgumentTypeError("give at least one")
        return list(dict.fromkeys(values))

    return read


def _say(error: ReelkeepError | str, code: int) -> int:
    complain(f"{PROG}: {error}")
    return code


if __name__ == "__main__":
    sys.exit(main())
