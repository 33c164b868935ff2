"""What went wrong, on standard error."""

from __future__ import annotations

import sys

from pipeline.logs import shown


def complain(text: object) -> None:
    """Print a text that others may have written on standard error."""
    print(shown(text).encode(errors="replace").decode(), file=sys.stderr)
