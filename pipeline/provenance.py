"""Which code a run used: versions of what matters to an answer, and the source commit where it can be known."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from pipeline.config import COMMIT_VARIABLE

_PACKAGES = ("reelkeep", "torch", "torchvision", "transformers", "ray", "pyarrow", "av", "decord", "numpy", "boto3")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that an answer depends on; None for one that isn't installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def source_commit() -> str | None:
    """The source's commit, "-dirty" with local changes; None where the code isn't a git checkout and REELKEEP_COMMIT isn't set."""
    if commit := os.environ.get(COMMIT_VARIABLE):
        return commit
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # A copy installed inside somebody else's checkout isn't that checkout's code.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
