"""The thread of a store: libraries of stores may take long, which the loop of the coordinator must not wait for.

One thread does one thing after another, so that what is withdrawn while it is on its way is removed after it has come.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

END_S = 5.0
"""The seconds that what was asked for before the end may take; the thread does not hold up the end of the program."""

LOOK_S = 10.0
"""The seconds between two looks of the thread at whether a sweep is due."""


class StoreThread:
    """Does what it is asked for, in that order, and sweeps from time to time."""

    def __init__(self, name: str, sweep: Callable[[], None], every_s: float, clock: Callable[[], float]) -> None:
        """Do nothing yet.

        Args:
            name: The thread's name.
            sweep: Called in the thread every ``every_s`` seconds; removes what the store need not hold.
            every_s: The seconds between two sweeps; the first comes so long after the start of the program.
            clock: The time in seconds, which only goes forward.
        """
        self._sweep = sweep
        self._every_s = every_s
        self._clock = clock
        self._sweep_at = clock() + every_s
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, which begins with what was asked for before."""
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        """Have something done after all that was asked for before. It must not raise."""
        self._work.put(work)

    def close(self, within_s: float = END_S) -> None:
        """End after all that was asked for before, for which ``within_s`` seconds are waited."""
        self._work.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                work = self._work.get(timeout=LOOK_S)
                if work is None:
                    return
                work()
            if self._clock() >= self._sweep_at:
                self._sweep()
                self._sweep_at = self._clock() + self._every_s
