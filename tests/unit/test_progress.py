"""The progress line, and the rooms that a pool of engines fits into."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from engine.errors import ConfigError
from jobs import cli
from jobs.answer import bytes_text, plain
from pipeline.config import JobConfig, LogConfig
from pipeline.dispatch import find_room
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


def config(**pool: object) -> JobConfig:
    where = pool.pop("where", "worker")
    return JobConfig.model_validate({"videos": "v", "questions": "q", "output": "o", "pool": pool, "decode": {"where": where}})


def test_the_defaults_fit_two_cores() -> None:
    room = find_room(config(), {"CPU": 2.0}, videos=10)
    assert (room.min_actors, room.max_actors, room.num_gpus) == (1, 1, 0.0)
    assert room.data_cpus == 1.5, "half a CPU is left to the decoder"


def test_a_pool_grows_to_what_cluster_and_videos_allow() -> None:
    assert find_room(config(num_cpus=1), {"CPU": 64.0, "GPU": 4.0}, videos=100).max_actors == 4
    assert find_room(config(num_gpus=0.5), {"CPU": 64.0, "GPU": 4.0}, videos=100).max_actors == 8
    assert find_room(config(num_gpus=0.4), {"CPU": 64.0, "GPU": 4.0}, videos=100).max_actors == 8, "a fraction never spans two GPUs"
    assert find_room(config(), {"CPU": 64.0}, videos=3).max_actors == 3
    assert find_room(config(min_actors=4, initial_actors=4), {"CPU": 64.0}, videos=2).initial_actors == 2
    assert find_room(config(max_actors=5, initial_actors=2), {"CPU": 64.0}, videos=100).initial_actors == 2
    assert find_room(config(max_actors=9), {"CPU": 2.0}, videos=100).max_actors == 9, "what is asked for may come by autoscaling"


@pytest.mark.parametrize(
    ("pool", "cluster", "words"),
    [
        ({}, {"CPU": 1.0}, ["missing 0.5 CPUs", "decode.where=actor"]),
        ({"min_actors": 4, "where": "actor"}, {"CPU": 3.0}, ["missing 1 CPUs", "lower pool.min_actors"]),
        ({"num_gpus": 1}, {"CPU": 8.0}, ["missing 0 CPUs and 1 GPUs", "lower pool.num_gpus"]),
    ],
)
def test_what_is_missing_is_said(pool: dict[str, object], cluster: dict[str, float], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_room(config(**pool), cluster, videos=10)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


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
