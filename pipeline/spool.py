"""A bounded folder for downloads, shared by every process of one machine without a server."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pipeline.storage_errors import SpoolSpaceError, StorageError, translated


class Spool:
    """Hands out files in one folder so that all together stay under a limit.

    A file's name starts with the bytes set aside for it, and its holder keeps it locked: whoever comes next adds up the names and
    removes the files whose holder died.
    """

    def __init__(self, folder: str | None, limit_bytes: int, wait_s: float) -> None:
        self.folder = Path(folder) if folder else Path(tempfile.gettempdir()) / f"reelkeep-spool-{os.getuid()}"
        self.limit_bytes = limit_bytes
        self.wait_s = wait_s

    @contextmanager
    def file(self, uri: str, size_bytes: int, suffix: str) -> Iterator[tuple[Path, BinaryIO]]:
        """Give an empty, locked file with `size_bytes` set aside, removed at the end of the block.

        Raises:
            SpoolSpaceError: the file alone is over the limit, or no room came free within the wait.
        """
        if size_bytes > self.limit_bytes:
            raise SpoolSpaceError(f"{uri}: its {size_bytes} bytes exceed storage.spool_bytes={self.limit_bytes}; raise it")
        path, handle = self._reserve(uri, size_bytes, suffix)
        try:
            with handle:
                yield path, handle
        finally:
            path.unlink(missing_ok=True)

    def _reserve(self, uri: str, size_bytes: int, suffix: str) -> tuple[Path, BinaryIO]:
        deadline = time.monotonic() + self.wait_s
        with translated(str(self.folder)):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.folder.stat().st_uid != os.getuid():
            raise StorageError(f"storage.spool_dir={self.folder} belongs to another user; name a folder of your own")
        while True:
            with translated(str(self.folder)), (self.folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                reserved, unwritten = self._taken()
                free = shutil.disk_usage(self.folder).free - unwritten
                if reserved + size_bytes <= self.limit_bytes and size_bytes <= free:
                    path = self.folder / f"{size_bytes}-{uuid.uuid4().hex}{suffix}"
                    handle = path.open("w+b")
                    fcntl.flock(handle, fcntl.LOCK_EX)
                    return path, handle
            if not reserved or time.monotonic() >= deadline:
                raise SpoolSpaceError(
                    f"{uri}: its {size_bytes} bytes don't fit in storage.spool_dir={self.folder}: {max(free, 0)} bytes free on the disk, "
                    f"{reserved} of storage.spool_bytes={self.limit_bytes} in use; free some space or name another folder"
                )
            time.sleep(0.2)

    def _taken(self) -> tuple[int, int]:
        """Bytes set aside by living holders, and how many of them aren't on disk yet; removes what the dead left."""
        reserved = unwritten = 0
        for path in self.folder.iterdir():
            size = path.name.split("-", 1)[0]
            if not size.isdigit():
                continue
            try:
                with path.open("rb") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        reserved += int(size)
                        unwritten += max(0, int(size) - os.fstat(file.fileno()).st_size)
                    else:
                        path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue
        return reserved, unwritten
