"""Tries of a video, put on record before the work: what kills a process can't be counted by it afterwards."""

from __future__ import annotations

import secrets
from collections import Counter
from contextlib import suppress

from pipeline.storage import Storage, join_uri, local_path, split_s3


class Attempts:
    """One small object a try, beside the results; removed once the video's result is committed.

    A try that an earlier start of the job left behind as its last may have ended with that start (a preempted machine, Ctrl-C), so it
    isn't held against the video; any other unfinished try is. Tries from before the latest checkpoint aren't counted either.

    Args:
        output: the job's output address.
        start_id: names this start of the job; "-" and "/" aren't allowed in it.
    """

    def __init__(self, storage: Storage, output: str, start_id: str) -> None:
        self.storage, self.folder, self.start_id = storage, join_uri(output, "attempts"), start_id

    def begin(self, name: str) -> tuple[int, str]:
        """Record a new try.

        Args:
            name: the video's fingerprint.

        Returns:
            The number of this try, from 1, and how the one before ended ("" when nobody lived to say).
        """
        before = self._names(name)
        starts = Counter(before_name.split("-")[0] for before_name in before)
        held_against = sum(count if start == self.start_id else count - 1 for start, count in starts.items())
        last_error = self.storage.read_bytes(self._uri(name, before[-1])).decode() if before else ""
        number = int(before[-1].split("-")[1]) + 1 if before else 0
        # A name that nobody else writes, so that a write whose answer got lost can be repeated without counting twice.
        self.storage.write_bytes(self._uri(name, f"{self.start_id}-{number:04d}-{secrets.token_hex(4)}"), b"")
        return held_against + 1, last_error

    def failed(self, name: str, error: str) -> None:
        """Note how this start's latest try of a video ended."""
        mine = [n for n in self._names(name) if n.split("-")[0] == self.start_id]
        if mine:
            self.storage.write_bytes(self._uri(name, mine[-1]), error.encode())

    def progressed(self, name: str) -> None:
        """Forget the tries before this one: it has come further than they have."""
        for attempt in self._names(name)[:-1]:
            self.storage.delete(self._uri(name, attempt))

    def clear(self, name: str) -> None:
        """Forget a video's tries: its result is committed."""
        for attempt in self._names(name):
            self.storage.delete(self._uri(name, attempt))
        if split_s3(self.folder) is None:
            tries = local_path(join_uri(self.folder, name))
            for unfinished in tries.glob("*.part"):  # of a process killed while it wrote
                unfinished.unlink(missing_ok=True)
            with suppress(OSError):  # not empty: other videos are under way
                for folder in (tries, tries.parent, local_path(self.folder)):
                    folder.rmdir()

    def _names(self, name: str) -> list[str]:
        """Names of a video's tries, oldest first."""
        found = [uri.rpartition("/")[2] for uri in self.storage.list(join_uri(self.folder, name))]
        return sorted(found, key=lambda n: n.split("-")[1])

    def _uri(self, name: str, attempt: str) -> str:
        return join_uri(self.folder, name, attempt)


class CountedHere:
    """The same without a store: counts the tries that this process makes."""

    def __init__(self) -> None:
        self._tries: dict[str, list[str]] = {}

    def begin(self, name: str) -> tuple[int, str]:
        """Count a new try; returns its number and how the one before ended."""
        tries = self._tries.setdefault(name, [])
        tries.append("")
        return len(tries), tries[-2] if len(tries) > 1 else ""

    def failed(self, name: str, error: str) -> None:
        """Note how the latest try ended."""
        self._tries[name][-1] = error

    def progressed(self, name: str) -> None:
        """Forget the tries before this one."""
        self._tries[name] = self._tries.get(name, [])[-1:]

    def clear(self, name: str) -> None:
        """Forget a video's tries."""
        self._tries.pop(name, None)
