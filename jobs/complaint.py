"""What went wrong, on standard error: texts that others may have written, as they may be shown on a terminal."""

from __future__ import annotations

import sys


def shown(text: object) -> str:
    """A text without control characters or escapes; its lines stay lines."""
    return "\n".join(
        "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in line)
        for line in str(text).split("\n")
    )


def complain(text: object) -> None:
    """Print a text on standard error, shown as above."""
    print(shown(text).encode(errors="replace").decode(), file=sys.stderr)
