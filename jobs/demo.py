"""The whole way in one command: make a few videos, watch them on local Ray under a small budget, show what was right and what wrong."""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from engine.errors import ReelkeepError
from jobs import answer, generate
from jobs.terminal import complain, make_console
from pipeline.outcome import verdict

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit code of `jobs.answer`."""
    parser = argparse.ArgumentParser(prog="reelkeep demo", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where videos and answers go")
    parser.add_argument("--videos", type=int, default=4, help="number of videos")
    parser.add_argument("--groups", type=int, default=300, help="length of each in temporal groups of a second")
    arguments = parser.parse_args(argv)
    console, videos = make_console(), arguments.folder / "videos"
    console.print("[bold]1. Videos whose every event is known[/]")
    shape = ["--videos", str(arguments.videos), "--groups", str(arguments.groups), "--seed", "2026"]
    if code := generate.main(["--output", str(videos), *shape, "--questions", "8", "--options", "never"]):
        return code
    console.print("\n[bold]2. The main job: decode, prefill under a budget, answer, write Parquet[/]")
    output = arguments.folder / "answers"
    code = answer.main(["--config", str(CONFIG), "--manifest", str(videos / "manifest.jsonl"), "--output", str(output)])
    if code in (answer.ANSWERED, answer.UNANSWERED):
        console.print("\n[bold]3. Right and wrong[/]")
        show_score(console, output)
    return code


def show_score(console: Console, output: Path) -> None:
    """How many answers were right, by kind of question, and the memory behind them."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in pq.read_table(output / "answers").to_pylist():
        counts[row["question_id"].rsplit("-", 1)[0]][verdict(row)] += 1
    verdicts = [v for v in ("right", "wrong", "error") if v != "error" or any(count[v] for count in counts.values())]
    table = Table("kind of question", *verdicts)
    for kind, count in sorted(counts.items()):
        table.add_row(kind, *(str(count[v]) for v in verdicts))
    table.add_section()
    table.add_row("all", *(str(sum(count[v] for count in counts.values())) for v in verdicts))
    console.print(table)
    memory = pq.read_table(output / "memory").to_pylist()
    read, kept = sum(row["visual_tokens"] or 0 for row in memory), max(row["budget_tokens"] for row in memory)
    console.print(
        f"{read:,} visual tokens were read; each layer kept {kept} entries a video, the prompt's own tokens included. The model is a test "
        "model of 1.2 million parameters that knows shapes, colours and digits. Which came first it never learnt, and when only in part: its card, "
        "engine/bundled/qwen2_5_vl_tiny/README.md, has the figures."
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ReelkeepError as error:
        complain(f"reelkeep demo: {error}")
        sys.exit(1)
