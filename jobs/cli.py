"""The `reelkeep` command: `reelkeep NAME ...` is `python -m jobs.NAME ...`."""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

JOBS = Path(__file__).parent


def job_names() -> list[str]:
    """Jobs there are: the modules and packages of this folder that have something to run."""
    return sorted(info.name for info in pkgutil.iter_modules([str(JOBS)]) if info.name != "cli" and _source(info.name) is not None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one job; returns its exit code, 2 for a name that isn't a job's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print("\n".join(_help()))
        return 0 if arguments else 2
    if name not in job_names():
        near = difflib.get_close_matches(name, job_names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(job_names())}"
        print(f"reelkeep: {name!r} is not a job; {hint}", file=sys.stderr)
        return 2
    module = f"jobs.{name}.__main__" if (JOBS / name / "__main__.py").is_file() else f"jobs.{name}"
    return int(importlib.import_module(module).main(arguments[1:]) or 0)


def _help() -> Iterator[str]:
    yield "usage: reelkeep JOB [options]\n"
    for name in job_names():
        source = _source(name)
        summary = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) if source else None
        yield f"  {name:<18} {(summary or '').splitlines()[0] if summary else ''}"
    yield "\nreelkeep JOB --help explains a job's options."


def _source(name: str) -> Path | None:
    """The file that holds a job's `main`, found without importing it."""
    for candidate in (JOBS / f"{name}.py", JOBS / name / "__main__.py"):
        if candidate.is_file() and "def main(" in candidate.read_text(encoding="utf-8"):
            return candidate
    return None


if __name__ == "__main__":
    sys.exit(main())
