"""Files on this machine, as `Storage` sees them: listed in order, written whole or not at all."""

from __future__ import annotations

import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

PART = ".part"
"""Ends the name of a file that is still being written; no listing shows it."""

_PART_NAME = re.compile(rf"\.[0-9a-f]{{32}}{re.escape(PART)}")


@dataclass(frozen=True)
class ObjectStat:
    """What is known of a file without reading it.

    Attributes:
        tag: changes when the content does: the ETag, or size and time of change.
        md5: digest of the content, where the server is known to give it; else "".
        modified_s: when it was written, in seconds since 1970.
    """

    uri: str
    size_bytes: int
    tag: str
    md5: str = ""
    modified_s: float = 0.0


def scan(root: Path, recursive: bool) -> Iterator[ObjectStat]:
    """Regular files, sorted. Files and folders that vanish meanwhile aren't there; ones that can't be entered are an error."""

    def entering_failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    paths = []
    for folder, folders, names in os.walk(root, onerror=entering_failed):
        paths += [os.path.join(folder, name) for name in names if not name.endswith(PART)]
        if not recursive:
            folders.clear()
    for path in sorted(paths):
        try:
            found = os.stat(path)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(found.st_mode):
            yield ObjectStat(path, found.st_size, f"{found.st_size}-{found.st_mtime_ns}", modified_s=found.st_mtime)


def write(path: Path, data: bytes, if_absent: bool) -> bool:
    """Write a file, whole or not at all; returns whether this call's data is what is there now.

    Args:
        if_absent: leave a file that is already there alone. Of several writers at once exactly one wins.
    """
    if if_absent and path.exists():
        return False
    part = path.with_name(f".{uuid.uuid4().hex}{PART}")
    new = _opened_in_its_folder(part)
    try:
        with new as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not if_absent:
            os.replace(part, path)
            return True
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        return True
    finally:
        part.unlink(missing_ok=True)


def _opened_in_its_folder(path: Path, tries: int = 50) -> BinaryIO:
    """A new file, its folder made where needed; another process may be removing that folder as empty at this very moment."""
    for turn in range(tries):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("xb")
        except FileNotFoundError:
            if turn + 1 == tries:
                raise
    raise AssertionError


def remove_unfinished(root: Path, older_than_s: float) -> None:
    """Remove the parts of files whose writers were killed, as far as one may; younger ones may still be written."""
    for folder, _, names in os.walk(root):
        for name in filter(_PART_NAME.fullmatch, names):
            part = Path(folder, name)
            with suppress(OSError):
                if time.time() - part.stat().st_mtime > older_than_s:
                    part.unlink()
