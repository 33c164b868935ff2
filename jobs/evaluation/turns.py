"""Plain functions that run in turns, one at any time: each in a thread that waits whenever it asks for something."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Stopped(BaseException):
    """Raised where a seat waits, when nobody will answer it any more."""


class Seat:
    """One function at work. It runs during `turn` alone, so that seats share whatever they like without locks.

    Args:
        work: called with the seat, in a thread of its own, at the first turn.

    Attributes:
        over: it has returned or raised.
        error: what it raised.
    """

    def __init__(self, work: Callable[[Seat], None], name: str) -> None:
        self.over = False
        self.error: BaseException | None = None
        self._work = work
        self._reply: Any = None
        self._may_run, self._has_run = threading.Semaphore(0), threading.Semaphore(0)
        self._running = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self) -> Any:
        """Called by the work: end this turn; returns what the next one brings, or raises it if it is an error."""
        self._running = False
        self._has_run.release()
        self._may_run.acquire()
        if isinstance(self._reply, BaseException):
            raise self._reply
        return self._reply

    def turn(self, reply: Any = None) -> None:
        """Let it run until it asks again or is over."""
        if not self._running:
            assert not self.over, "nobody is there to take the turn"
            self._reply, self._running = reply, True
            self._may_run.release()
        self._has_run.acquire()

    def stop(self) -> None:
        """Let it end at the place where it waits."""
        while not self.over:
            self.turn(Stopped())
        self._thread.join()

    def _run(self) -> None:
        self._may_run.acquire()
        try:
            if not isinstance(self._reply, BaseException):
                self._work(self)
        except BaseException as error:
            self.error = error
        self.over, self._running = True, False
        self._has_run.release()
