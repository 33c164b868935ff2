"""Log lines, for people or for collectors, the same in the driver and in every worker process."""

from __future__ import annotations

import json
import logging
import re

from pipeline.config import LogConfig

_FIELD = re.compile(r"\b(video_id|stage|attempt)=(\S+)")


class JsonFormatter(logging.Formatter):
    """One JSON object a line; video_id, stage and attempt are fields of their own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        message = record.getMessage()
        line = {"time": self.formatTime(record), "level": record.levelname.lower(), "logger": record.name, "message": message}
        line |= dict(_FIELD.findall(message))
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(config: LogConfig) -> None:
    """Write the project's lines to standard error as configured; other libraries' only from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter() if config.format == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    )
    logger = logging.getLogger("reelkeep")
    logger.handlers = [handler]
    logger.setLevel(config.level.upper())
    logger.propagate = False
