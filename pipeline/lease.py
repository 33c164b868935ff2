"""One job at a time on one output: a numbered object that its holder keeps renewing."""

from __future__ import annotations

import _thread
import getpass
import json
import logging
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from engine.errors import ReelkeepError
from pipeline.storage import Storage, join_uri, local_path, split_s3
from pipeline.storage_errors import MissingObjectError

BEAT_S = 10.0
QUIET_S = 45.0

log = logging.getLogger("reelkeep.lease")


class OutputHeldError(ReelkeepError):
    """Another job is at work on this output."""


class Lease:
    """Held for the length of the block. The highest number holds; whoever takes over writes the next one, by a conditional write.

    Nobody's clock is compared: a lease that isn't renewed while one looks on for `quiet_s` is given up, and one whose process has ended on
    this very machine at once.

    Args:
        output: the job's output address.
        run_id: of the job that wants it.
        take_over: don't ask whether the present holder is alive; it stops at its next beat.

    Attributes:
        lost: another job has taken over.
    """

    def __init__(
        self, output: str, storage: Storage, run_id: str, *, take_over: bool = False, beat_s: float = BEAT_S, quiet_s: float = QUIET_S
    ) -> None:
        self.output, self.folder, self.storage, self.run_id = output, join_uri(output, "lease"), storage, run_id
        self.take_over, self.beat_s, self.quiet_s = take_over, beat_s, quiet_s
        self.lost = False
        self._number = 0
        self._token = uuid.uuid4().hex
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        """Take the lease.

        Raises:
            OutputHeldError: a living job holds it; says who.
            StorageError: the output can't be written.
        """
        first_seen: dict[str, Any] | None = None
        since_s = time.monotonic()
        while True:
            numbers = self._numbers()
            holder = self._read(numbers[-1]) if numbers else None
            if holder is None or self.take_over or _has_ended(holder) or time.monotonic() - since_s > self.quiet_s:
                if self._take(numbers[-1] + 1 if numbers else 1):
                    break
                first_seen, since_s = None, time.monotonic()
                continue
            if _is_alive_here(holder) or (first_seen is not None and holder != first_seen):
                raise OutputHeldError(
                    f"output={self.output} is held by {_who(holder)}; wait for it, stop it, name another output, or take over with --take-over"
                )
            if first_seen is None:
                log.info("%s is held by %s; looking whether it is alive", self.output, _who(holder))
            first_seen = holder
            time.sleep(self.beat_s / 2)
        self._beating.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._beating.join(timeout=2 * self.beat_s)
        with suppress(ReelkeepError):
            self.storage.delete(self._uri(self._number))
        if split_s3(self.folder) is None:
            with suppress(OSError):
                Path(local_path(self.folder)).rmdir()

    def _take(self, number: int) -> bool:
        self._number = number
        won = self.storage.write_bytes(self._uri(number), self._content(0), if_absent=True)
        # A write whose answer got lost is repeated and then finds its own first try.
        if not won and (self._read(number) or {}).get("token") != self._token:
            return False
        for older in self._numbers():
            if older < number:
                self.storage.delete(self._uri(older))
        return True

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(self.beat_s):
            count += 1
            try:
                if any(number > self._number for number in self._numbers()):
                    self.lost = True
                    log.error("%s was taken over by another job; this one stops", self.output)
                    _thread.interrupt_main()
                    return
                self.storage.write_bytes(self._uri(self._number), self._content(count))
            except ReelkeepError as error:
                log.warning("the lease on %s couldn't be renewed: %s", self.output, error)

    def _numbers(self) -> list[int]:
        names = (uri.rpartition("/")[2].removesuffix(".json") for uri in self.storage.list(self.folder))
        return sorted(int(name) for name in names if name.isdigit())

    def _read(self, number: int) -> dict[str, Any] | None:
        try:
            return dict(json.loads(self.storage.read_bytes(self._uri(number))))
        except MissingObjectError:
            return None
        except ValueError:
            return {"token": "damaged"}

    def _content(self, beat: int) -> bytes:
        process = psutil.Process()
        holder = {
            "token": self._token,
            "run_id": self.run_id,
            "user": _user(),
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": process.pid,
            "process_started_s": process.create_time(),
            "beat": beat,
            "beat_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        return json.dumps(holder).encode()

    def _uri(self, number: int) -> str:
        return join_uri(self.folder, f"{number:06d}.json")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _machine() -> str:
    """This boot of this machine and, in a container, its own table of processes: only there does a process id mean anything."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def _runs(holder: dict[str, Any]) -> bool | None:
    """Whether the holder's process runs; None when it isn't this machine's."""
    if holder.get("machine") != _machine():
        return None
    try:
        process = psutil.Process(holder["pid"])
        started_s = process.create_time()
        return abs(started_s - holder["process_started_s"]) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _has_ended(holder: dict[str, Any]) -> bool:
    return _runs(holder) is False


def _is_alive_here(holder: dict[str, Any]) -> bool:
    return _runs(holder) is True


def _who(holder: dict[str, Any]) -> str:
    return (
        f"run {holder.get('run_id')} (process {holder.get('pid')} of {holder.get('user')} on {holder.get('host')}, "
        f"last heard of at {holder.get('beat_at')})"
    )
