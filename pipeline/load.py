"""What an engine does with its time, for whoever asks now and then while it works. Knows no Ray and no metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

State = Literal["idle", "waiting", "busy"]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Load:
    """One engine since it was last asked.

    Attributes:
        tokens: visual tokens taken in.
        seconds: how long that was.
        busy_s: of it computing: vision tower, decoder, answers, storing what was read.
        wait_s: of it waiting for a video's frames.
        kv_bytes: most bytes of keys and values held in the latest block; 0 when idle.
    """

    tokens: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0
    wait_s: float = 0.0
    kv_bytes: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Visual tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def busy_ratio(self) -> float:
        """Share of the time spent computing."""
        return self.busy_s / self.seconds if self.seconds else 0.0

    @property
    def wait_ratio(self) -> float:
        """Share of the time spent waiting for frames."""
        return self.wait_s / self.seconds if self.seconds else 0.0


class LoadMeter:
    """Adds up the time an engine spends in each state, to the moment of asking, however long a block or a video takes.

    The engine's thread says what it does; any other thread may `sample`.

    Args:
        held: bytes of keys and values that the engine holds; asked when it isn't idle.
    """

    def __init__(self, held: Callable[[], int] = lambda: 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._held, self._clock, self._lock = held, clock, threading.Lock()
        self._state: State = "idle"
        self._since_s = clock()
        self._spent_s: dict[State, float] = {"idle": 0.0, "waiting": 0.0, "busy": 0.0}
        self._tokens = 0

    def enter(self, state: State) -> None:
        """From now on the engine is in this state."""
        with self._lock:
            self._add_up()
            self._state = state

    def took(self, tokens: int) -> None:
        """Note the visual tokens of a block."""
        with self._lock:
            self._tokens += tokens

    def over(self, blocks: Iterator[_T]) -> Iterator[_T]:
        """The same blocks: waiting while one is fetched, busy while it is in use and after the last."""
        self.enter("waiting")
        for block in blocks:
            self.enter("busy")
            yield block
            self.enter("waiting")
        self.enter("busy")

    def sample(self) -> Load:
        """What happened since the last sample."""
        with self._lock:
            self._add_up()
            spent, tokens, self._tokens = self._spent_s, self._tokens, 0
            self._spent_s = {"idle": 0.0, "waiting": 0.0, "busy": 0.0}
            held = 0 if self._state == "idle" else self._held()
        return Load(tokens, sum(spent.values()), spent["busy"], spent["waiting"], held)

    def _add_up(self) -> None:
        now_s = self._clock()
        self._spent_s[self._state] += now_s - self._since_s
        self._since_s = now_s
