"""Watch videos, answer questions about them, write Parquet: the main job.

Exit codes: 0 all questions answered; 1 the job failed; 2 settings, manifest, model or cluster can't work; 3 finished, but some questions
have no answer; 130 stopped by Ctrl-C or SIGTERM. After 1 and 130 the same command goes on with what is missing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.errors import ReelkeepError
from jobs.terminal import complain, make_console
from pipeline.config import JobConfig, load_config
from pipeline.logs import set_up_logging, shown
from pipeline.plan import VideoPlan, plan_video, predicted_kv_bytes
from pipeline.progress import clock_time
from pipeline.run import JobFailedError, Run, RunSummary, StoppedError

ANSWERED, FAILED, UNUSABLE, UNANSWERED, STOPPED = 0, 1, 2, 3, 130
VIDEOS_SHOWN = 50

log = logging.getLogger("reelkeep.answer")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return carry_out(lambda: load_config(None, arguments, prog="reelkeep answer"), show_plan)


def carry_out(settings: Callable[[], JobConfig], show: Callable[[Run, Console], None]) -> int:
    """Run the job that `settings` describes, or `show` it for a dry run; errors become one line and an exit code."""
    console = make_console()
    try:
        config = settings()
        set_up_logging(config.log)
        if config.dry_run:
            show(Run(config), console)
            return ANSWERED
        from pipeline import dispatch  # brings Ray, which takes seconds: only once the settings are known to be right

        summary = dispatch.run(config)
    except StoppedError as error:
        return _say(error, STOPPED)
    except KeyboardInterrupt:
        return _say("stopped; run the same command again to go on", STOPPED)
    except JobFailedError as error:
        return _say(error, FAILED)
    except ReelkeepError as error:
        return _say(error, UNUSABLE)
    show_summary(summary, console)
    return UNANSWERED if summary.counts.questions_failed else ANSWERED


def show_plan(job: Run, console: Console) -> None:
    """What would be done: each video's length, tokens and state; the memory it would take."""
    config = job.config
    todo = {task.video_id for task in job.pending}
    missing = {video_id: reason for video_id, _, reason in job.manifest.missing}
    with ThreadPoolExecutor(8) as threads:
        plans = {plan.video_id: plan for plan in threads.map(lambda task: plan_video(task, job.geometry, config), job.pending)}
    table = Table("video", "questions", "MB", "length", "tokens", "state", title=f"{len(todo)} of {job.total_videos} videos to do")
    for task in job.manifest.tasks[:VIDEOS_SHOWN]:
        plan = plans.get(task.video_id, VideoPlan(task.video_id))
        state = missing.get(task.video_id) or plan.problem or ("to do" if task.video_id in todo else "done")
        size = "?" if task.size_bytes is None else f"{task.size_bytes / 1e6:.1f}"
        length = "?" if plan.duration_s is None else clock_time(plan.duration_s)
        tokens = "?" if plan.tokens is None else f"{plan.tokens:,}"
        table.add_row(plain(task.video_id), str(len(task.questions)), size, length, tokens, plain(state))
    console.print(table)
    if job.total_videos > VIDEOS_SHOWN:
        console.print(f"and {job.total_videos - VIDEOS_SHOWN} more")
    for note in job.manifest.notes:
        console.print(plain(note))
    known = [plan for plan in plans.values() if plan.tokens]
    hours = sum(plan.duration_s or 0.0 for plan in known) / 3600
    console.print(
        f"to do: {sum(len(t.questions) for t in job.pending)} questions about {len(todo)} videos; headers read: {len(known)}, "
        f"{hours:.2f} h, {sum(plan.tokens or 0 for plan in known):,} tokens ('?' is told once a file is downloaded)"
    )
    if known:
        peak, full = predicted_kv_bytes(config, max(plan.tokens or 0 for plan in known), job.model_folder)
        console.print(
            f"KV memory per engine: at most {bytes_text(peak)}; a full cache would hold {bytes_text(full)} for the longest of them"
        )
    console.print(f"nothing was done (--dry-run); output would be {plain(config.output)}")


def show_summary(summary: RunSummary, console: Console) -> None:
    """Questions and answers, the memory kept, where the tables are."""
    counts = summary.counts
    table = Table(
        "video", "question", "answer", "expected", title=f"{min(len(summary.answers), counts.questions)} of {counts.questions} questions"
    )
    for row in summary.answers:
        said = plain(row["answer"] or "") if row["error"] is None else Text(plain(row["error"]).plain, style="red")
        table.add_row(plain(row["video_id"]), plain(row["question"]), said, plain(row["expected"] or ""))
    console.print(table)
    before = f" ({summary.videos_done_before} done before)" if summary.videos_done_before else ""
    console.print(
        f"{counts.questions_answered} of {counts.questions} questions answered; {counts.videos_answered} of {counts.videos} "
        f"videos{before}, {counts.videos_failed} set aside; {summary.warnings} warnings; {clock_time(summary.seconds)}"
    )
    if counts.questions_judged:
        share = 100 * counts.questions_right / counts.questions_judged
        console.print(f"{counts.questions_right} of {counts.questions_judged} answers that could be judged are right: {share:.1f}%")
    if summary.kv_full_bytes:
        held, full = summary.kv_peak_bytes, summary.kv_full_bytes
        times = full / max(held, 1)
        console.print(
            f"KV memory, longest video: {bytes_text(held)} held at most; a full cache holds {bytes_text(full)}, {times:.1f} times as much"
        )
    for video_id, reason in summary.set_aside:
        console.print(Text.assemble("set aside: ", plain(video_id), ": ", plain(reason)), soft_wrap=True)
    if counts.videos_failed > len(summary.set_aside):
        console.print(f"and {counts.videos_failed - len(summary.set_aside)} more; the quarantine table lists them")
    console.print("tables: " + plain(summary.output).plain.rstrip("/") + "/{answers,memory,quarantine}/*.parquet", markup=False)


def plain(text: str, longest: int = 300) -> Text:
    """Foreign text as it may be shown on a terminal: one line, no control characters, no escapes, no markup."""
    line = shown(str(text).replace("\n", " "))
    return Text(line if len(line) <= longest else line[: longest - 1] + "…")


def bytes_text(count: int) -> str:
    """Bytes in the unit that people would choose."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def _say(error: ReelkeepError | str, code: int) -> int:
    complain(f"reelkeep: {error}")
    return code


if __name__ == "__main__":
    sys.exit(main())
