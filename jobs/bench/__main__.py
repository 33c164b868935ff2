"""`python -m jobs.bench NAME [ARGUMENTS]`: runs the benchmark of that name in this folder."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import jobs.bench
from engine.errors import ReelkeepError
from jobs.terminal import complain


def main(argv: list[str]) -> int:
    """Dispatch to `jobs.bench.NAME.main`; exit code 2 for an unknown name or a user's mistake."""
    names = sorted(module.name for module in pkgutil.iter_modules(jobs.bench.__path__) if not module.name.startswith("_"))
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: python -m jobs.bench NAME [ARGUMENTS]\nbenchmarks: {', '.join(names)}")
        return 0 if argv else 2
    if argv[0] not in names:
        print(f"no benchmark is called {argv[0]!r}; there are: {', '.join(names)}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(f"jobs.bench.{argv[0]}").main(argv[1:]))
    except ReelkeepError as error:
        complain(error)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
