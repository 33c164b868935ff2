"""Log lines, for people or for collectors, the same in the driver and in every worker process."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any

from pipeline.config import LogConfig

FIELDS = ("video_id", "stage", "attempt")
"""What a line can be about; given as `extra` with a log call, never as part of its text, which others may have written."""

_PLAIN = re.compile(r"[\w./:-]+", re.ASCII)


class JsonFormatter(logging.Formatter):
    """One JSON object a line; video_id, stage and attempt are fields of their own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {"time": self.formatTime(record), "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        line |= fields_of(record)
        if trace := trace_of(record):
            line["trace"] = trace
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """A line for people; the fields stand before the message, quoted where they hold more than letters, digits and ./:-_."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(fields)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the trace below it if there is one."""
        fields = ((name, str(value)) for name, value in fields_of(record).items())
        record.fields = "".join(f"{name}={value if _PLAIN.fullmatch(value) else repr(value)} " for name, value in fields)
        return shown(super().format(record))


class Forwarder(logging.Handler):
    """Hands warnings and errors to whoever shows them elsewhere.

    Args:
        send: given the plain values that `logging.makeLogRecord` takes.
        wait: called when lines must have arrived, as this process is about to end.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None], wait: Callable[[], None] = lambda: None) -> None:
        super().__init__(logging.WARNING)
        self._send, self._wait = send, wait

    def emit(self, record: logging.LogRecord) -> None:
        """Send one line."""
        try:
            kept = ("name", "levelno", "levelname", "created", "msecs")
            values = {name: getattr(record, name) for name in kept} | fields_of(record)
            self._send(values | {"msg": record.getMessage(), "exc_text": trace_of(record)})
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until what was sent has arrived."""
        self._wait()


def show_forwarded(values: dict[str, Any]) -> None:
    """Log what a `Forwarder` has sent, as configured in this process."""
    record = logging.makeLogRecord(values)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def shown(text: object) -> str:
    """A text that others may have written, as a terminal may show it: without control characters or escapes; its lines stay lines."""
    return "\n".join(
        "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in line)
        for line in str(text).split("\n")
    )


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that a log call was given."""
    return {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}


def trace_of(record: logging.LogRecord) -> str | None:
    """The exception that was logged, as text."""
    return logging.Formatter().formatException(record.exc_info) if record.exc_info else record.exc_text


def set_up_logging(config: LogConfig) -> None:
    """Write the project's lines to standard error as configured; other libraries' only from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    logger = logging.getLogger("reelkeep")
    logger.handlers = [handler]
    logger.setLevel(config.level.upper())
    logger.propagate = False
