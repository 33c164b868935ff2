"""What jobs show: errors on standard error, tables on standard output."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console

from pipeline.logs import shown

FILE_WIDTH = 160
"""Characters of a line where there is no terminal to ask."""


def complain(text: object) -> None:
    """Print a text that others may have written on standard error."""
    print(shown(text).encode(errors="replace").decode(), file=sys.stderr)


def make_console(**options: Any) -> Console:
    """Where tables go; wide enough for a log file when it isn't a terminal."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH
    return Console(highlight=False, width=width, **options)
