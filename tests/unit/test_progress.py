"""The progress line, and what a terminal is shown."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from jobs import cli
from jobs.answer import bytes_text, plain
from pipeline.config import LogConfig
from pipeline.progress import Progress, ProgressLine


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_line_counts_videos_hours_tokens_failures_and_time_left() -> None:
    clock = Clock()
    progress = Progress(4, earlier_videos=1, weights={"a": 10.0, "b": 20.0, "c": 30.0}, clock=clock)
    assert "1/4 videos" in progress.line() and "time left unknown" in progress.line()
    clock.now += 10
    progress.finish("a", video_s=3600, tokens=5000, failed=False)
    progress.seen("b", 1800, 2500)
    assert progress.line() == "2/4 videos · 1 from before · 1.50 h of video · 750 tokens/s · 0 failed · 0:00:50 left"
    progress.finish("b", video_s=3600, tokens=5000, failed=True)
    assert "3/4 videos" in progress.line() and "2.00 h" in progress.line() and "1 failed" in progress.line()


def test_a_message_that_comes_after_the_end_is_not_counted_again() -> None:
    clock = Clock()
    progress = Progress(2, clock=clock)
    clock.now += 10
    progress.seen("a", 1800, 2500)
    progress.finish("a", video_s=3600, tokens=5000, failed=False)
    progress.seen("a", 3600, 5000)
    assert "1.00 h of video · 500 tokens/s" in progress.line()


def test_a_terminal_gets_one_live_line_and_a_log_gets_lines() -> None:
    progress = Progress(1, clock=Clock())
    screen = io.StringIO()
    with ProgressLine(progress, LogConfig(progress="auto"), Console(file=screen, force_terminal=True, width=120)):
        progress.finish("a", video_s=1, tokens=1, failed=False)
    assert "1/1 videos" in screen.getvalue()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("reelkeep")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with ProgressLine(progress, LogConfig(progress="auto"), Console(file=io.StringIO())):
            pass
        assert len(lines) == 1 and "1/1 videos" in lines[0]
        with ProgressLine(progress, LogConfig(progress="off"), Console(file=io.StringIO())):
            pass
        assert len(lines) == 1
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_foreign_text_cannot_steer_a_terminal() -> None:
    shown = plain("[red]x[/]\x1b]0;owned\x07\u202eabc\r\nsecond").plain
    assert shown == "[red]x[/]\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}abc  second"
    assert len(plain("x" * 1000).plain) == 300


def test_bytes_in_words() -> None:
    assert [bytes_text(n) for n in (999, 81_408, 58_720_256, 3_000_000_000_000)] == ["999 B", "81.4 kB", "58.7 MB", "3000.0 GB"]


def test_every_job_is_a_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert "answer" in cli.job_names() and "cli" not in cli.job_names()
    assert cli.main(["--help"]) == 0
    assert "answer" in capsys.readouterr().out
    assert cli.main(["anwser"]) == 2
    assert "did you mean answer?" in capsys.readouterr().err
    assert cli.main(["answer", "--engine.budgit-tokens", "3"]) == 2
    assert "did you mean --engine.budget-tokens?" in capsys.readouterr().err
