"""Lend the packages of this environment to the environment of the oldest supported transformers.

`python -m tests.support.oldest FOLDER CONSTRAINTS` links into FOLDER every package that CONSTRAINTS names at the release this environment
holds. The others stay out of sight: transformers imports what it finds, and what the newest brought along may not suit the oldest.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def named(constraints: Path, place: dict[str, str] | None = None) -> list[Requirement]:
    """The requirements of a constraints file that hold for this Python on this platform, or for those that `place` names."""
    lines = (line for line in constraints.read_text().splitlines() if line and not line.startswith("#"))
    return [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate(place)]


def main(folder: Path, constraints: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for requirement in named(constraints):
        try:
            package = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(package.version):
            continue
        site = Path(str(package.locate_file("")))
        for top in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(site / top)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
