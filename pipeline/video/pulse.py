"""The decoder's sign of life, and a watchdog that stops waiting when it stays away."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")
_LOOK_S = 1.0

last_beat_s = time.monotonic()


def beat() -> None:
    """Tell that the decoder of this process has got on: a packet, a frame."""
    global last_beat_s
    last_beat_s = time.monotonic()


def watched(items: Iterator[_T], timeout_s: float, stalled: Callable[[], Exception]) -> Iterator[_T]:
    """Pull from an iterator in a thread of its own, and give up when neither an item nor a beat comes for `timeout_s`.

    A read that the operating system or a codec never returns from can't be interrupted; its thread is left behind, asleep. The iterator
    works only while an item is waited for, so that no more than one is in memory.

    Raises:
        Exception: what `stalled` makes; or whatever the iterator raises.
    """
    wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
    given: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        while wanted.get():
            try:
                given.put((next(items), None))
            except BaseException as error:
                given.put((None, error))
                return
        getattr(items, "close", lambda: None)()

    worker = threading.Thread(target=work, name="decode", daemon=True)
    worker.start()
    alive = True
    try:
        while True:
            beat()
            wanted.put(True)
            try:
                item, error = _wait(given, timeout_s)
            except queue.Empty:
                alive = False
                raise stalled() from None
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
            del item
    finally:
        wanted.put(False)
        if alive:
            worker.join(timeout_s)


def _wait(given: queue.SimpleQueue[tuple[Any, BaseException | None]], timeout_s: float) -> tuple[Any, BaseException | None]:
    while True:
        try:
            return given.get(timeout=min(_LOOK_S, timeout_s / 4))
        except queue.Empty:
            if time.monotonic() - last_beat_s > timeout_s:
                raise
