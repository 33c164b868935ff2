"""What the jobs' command lines share: numbers as options, errors on standard error, tables on standard output."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from pipeline.logs import shown

FILE_WIDTH = 160
"""Characters of a line where there is no terminal to ask."""


def complain(text: object) -> None:
    """Print a text that others may have written on standard error."""
    print(shown(text).encode(errors="replace").decode(), file=sys.stderr)


def whole_number(least: int) -> Callable[[str], int]:
    """An option's type: a whole number of at least that, and of nine digits at most."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r:.80} must be a whole number of at least {least} and at most 999999999")
        return int(text)

    return read


def whole_numbers(text: str) -> list[int]:
    """An option's type: whole numbers above 0 with commas between."""
    try:
        return [whole_number(1)(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be whole numbers above 0 with commas between, such as 4096,8192") from None


def make_console(**options: Any) -> Console:
    """Where tables go; wide enough for a log file when it isn't a terminal."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH
    return Console(highlight=False, width=width, **options)
