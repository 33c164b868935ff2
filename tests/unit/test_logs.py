"""Log lines: fields that nobody can forge, and the way from a worker to the driver."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from pipeline.logs import Forwarder, JsonFormatter, TextFormatter, show_forwarded
from pipeline.stream import StageError, stage

HOSTILE = "cam 7 attempt=99 stage=done\u202e"


def record(message: str, *arguments: object, **fields: Any) -> logging.LogRecord:
    return logging.getLogger("reelkeep.test").makeRecord("reelkeep.test", logging.WARNING, "", 0, message, arguments, None, extra=fields)


def test_json_lines_carry_ids_whole_and_take_no_fields_from_text() -> None:
    line = json.loads(JsonFormatter().format(record("%s; trying again", f"no stage=forged in {HOSTILE}", video_id=HOSTILE, attempt=2)))
    assert line["video_id"] == HOSTILE and line["attempt"] == 2 and line["level"] == "warning"
    assert "stage" not in line and "stage=forged" in line["message"]


def test_text_lines_quote_ids_that_could_be_taken_for_something_else() -> None:
    assert (
        TextFormatter()
        .format(record("started", video_id="cam7/0301.mp4", attempt=2))
        .endswith(" WARNING reelkeep.test video_id=cam7/0301.mp4 attempt=2 started")
    )
    odd = TextFormatter().format(record("started", video_id=HOSTILE, attempt=2))
    assert odd.endswith(r" video_id='cam 7 attempt=99 stage=done\u202e' attempt=2 started")


def test_text_lines_move_no_cursor() -> None:
    line = TextFormatter().format(record("%s", "no such codec \x1b[2J\x07 in file"))
    assert line.endswith("no such codec \ufffd[2J\ufffd in file")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """What the project logs."""
    logger, lines = logging.getLogger("reelkeep"), Lines()
    monkeypatch.setattr(logger, "handlers", [lines])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logging.getLogger("reelkeep").manager._clear_cache()  # type: ignore[attr-defined]
    return lines.records


def test_a_stage_says_which_video_it_is_about(shown: list[logging.LogRecord]) -> None:
    with pytest.raises(StageError), stage("prefill", HOSTILE):
        raise KeyError("surprise")
    line = json.loads(JsonFormatter().format(shown[0]))
    assert (line["video_id"], line["stage"], line["message"]) == (HOSTILE, "prefill", "unforeseen error")
    assert "KeyError: 'surprise'" in line["trace"]


def test_warnings_of_a_worker_are_shown_by_the_driver(shown: list[logging.LogRecord]) -> None:
    sent: list[str] = []
    forwarder = Forwarder(lambda values: sent.append(json.dumps(values)))
    worker = logging.Logger("reelkeep.worker")
    worker.addHandler(forwarder)
    worker.info("started", extra={"video_id": "a"})
    try:
        raise ValueError("broken")
    except ValueError:
        worker.exception("unforeseen %s", "error", extra={"video_id": HOSTILE, "attempt": 1})
    assert len(sent) == 1
    show_forwarded(json.loads(sent[0]))
    (line,) = shown
    assert line.name == "reelkeep.worker" and line.getMessage() == "unforeseen error"
    assert json.loads(JsonFormatter().format(line))["video_id"] == HOSTILE
    assert (
        "ValueError: broken" in TextFormatter().format(line) and "ValueError: broken" in json.loads(JsonFormatter().format(line))["trace"]
    )
    logging.getLogger("reelkeep").setLevel(logging.CRITICAL)
    show_forwarded(json.loads(sent[0]))
    assert len(shown) == 1, "the driver's own level counts"
