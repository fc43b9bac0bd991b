"""Memory of a simulation while it runs: what its processes take, and an orderly stop before it is too much.

A thread looks a few times a second. Where the limit is near, the simulation stops as by Ctrl-C: client states and the
journal are whole after any kill, so that it can be resumed, with fewer workers for example, and ends in the same bits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_agent.core.errors import RunFailed
from edge_agent.core.limits import available_bytes

LOOK_EVERY_S = 0.2
STOP_SHARE = 0.97
"""The share of a limit at which a simulation stops."""

LEAST_AVAILABLE = 128 << 20
"""The bytes that have to be left for other programs where no limit was given."""


@dataclass(frozen=True)
class Occupied:
    """Memory of some processes in bytes: what each has for itself, and what they share, counted once."""

    private: int
    shared: int

    @property
    def total(self) -> int:
        """The bytes of all these processes, with what they share counted once."""
        return self.private + self.shared


def occupied(pids: Sequence[int]) -> Occupied | None:
    """Return what this process and those with these ids take; None where the system does not say it (no ``/proc``)."""
    own = _pages_of("self")
    if own is None:
        return None
    private, shared = own
    for pid in pids:
        pages = _pages_of(str(pid))
        if pages is not None:  # it may have ended meanwhile
            private += pages[0]
            shared = max(shared, pages[1])
    page = os.sysconf("SC_PAGE_SIZE")
    return Occupied(private * page, shared * page)


def private_bytes(pid: int) -> int:
    """Return what a process has for itself alone, without samples in shared memory; 0: the system does not say it."""
    pages = _pages_of(str(pid))
    return 0 if pages is None else pages[0] * os.sysconf("SC_PAGE_SIZE")


def _pages_of(process: str) -> tuple[int, int] | None:
    """Return the pages of a process that it has for itself, and those of files and of shared memory."""
    try:
        fields = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()
        resident = int(fields[1])
        shared = int(fields[2])
    except (OSError, ValueError, IndexError):
        return None
    return resident - shared, shared


class MemoryWatch:
    """Looks at the memory of a simulation from another thread, and interrupts it before there is too little."""

    def __init__(
        self,
        limit: int | None,
        pids: Callable[[], Sequence[int]],
        *,
        every_s: float = LOOK_EVERY_S,
        available: Callable[[], int | None] = available_bytes,
    ) -> None:
        """Make a watch.

        Args:
            limit: The bytes that all processes together may take; None: as long as the machine has some left.
            pids: Returns the ids of the worker processes.
            every_s: Seconds between two looks.
            available: Returns the bytes that processes can still take here.
        """
        self._limit = limit
        self._pids = pids
        self._every_s = every_s
        self._available = available
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._interrupts: int | None = None
        self.peak = 0
        """The most bytes that were seen."""

        self.reason = ""
        """Why the simulation has to stop; empty while it need not."""

    def look(self) -> str:
        """Return why the simulation has to stop now; empty: it need not."""
        now = occupied(self._pids())
        if now is not None:
            self.peak = max(self.peak, now.total)
            if self._limit is not None and now.total > STOP_SHARE * self._limit:
                return f"its processes take {now.total / 1e9:.2f} GB of the {self._limit / 1e9:.2f} GB that are allowed"
        left = self._available()
        if left is not None and left < LEAST_AVAILABLE:
            return f"this machine, or the control group of this process, has {left / 1e6:.0f} MB of memory left"
        return ""

    @contextlib.contextmanager
    def watching(self, where: str) -> Iterator[None]:
        """Watch while the context lasts; ``where`` names the folder of the simulation.

        Raises:
            RunFailed: There was too little memory; the simulation can be resumed.
        """
        if threading.current_thread() is threading.main_thread():
            self._interrupts = threading.main_thread().ident
        self._thread.start()
        try:
            yield
        except KeyboardInterrupt:
            if not self.reason:
                raise
            raise RunFailed(self._message(where)) from None
        finally:
            self._stop.set()
            self._thread.join()

    def check(self, where: str) -> None:
        """Raise where the simulation has to stop: in a thread that cannot be interrupted, between two jobs.

        Raises:
            RunFailed: There is too little memory; the simulation can be resumed.
        """
        if self.reason:
            raise RunFailed(self._message(where))

    def _message(self, where: str) -> str:
        return (
            f"{where}: stopped before memory ran out: {self.reason}; nothing is lost: resume with fewer --workers, "
            "--engine serial or a larger --max-memory"
        )

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.reason = self.look()
            if self.reason:
                if self._interrupts is not None:
                    signal.pthread_kill(self._interrupts, signal.SIGINT)
                return
