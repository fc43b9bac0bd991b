"""Connections to a port, each handed on when there is room for it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

ACCEPT_AGAIN_S = 0.1
"""Pause after a connection could not be accepted: without files or threads the next one fails, too."""


class Acceptor:
    """A thread that accepts connections, so many at once; more wait in the system's queue.

    Whoever gets a connection calls `free` when it is closed.
    """

    def __init__(
        self, at_once: int, begin: Callable[[socket.socket, str], None], failed: Callable[[OSError], None]
    ) -> None:
        """Accept nothing yet.

        Args:
            at_once: The most connections that may be open.
            begin: Gets each connection and the address that it comes from, and returns at once.
            failed: Called with the first of several errors in a row.
        """
        self._begin = begin
        self._failed = failed
        self._free = threading.Semaphore(at_once)
        self._is_over = threading.Event()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_over(self) -> bool:
        """Whether `close` was called."""
        return self._is_over.is_set()

    def start(self, listener: socket.socket, name: str) -> None:
        """Accept connections of a socket that listens, in a thread of this name."""
        self._listener = listener
        self._thread = threading.Thread(target=self._run, args=(listener,), name=name, daemon=True)
        self._thread.start()

    def free(self) -> None:
        """Make room for another connection."""
        self._free.release()

    def close(self) -> None:
        """Listen no more, and wait for the thread; connections that are open stay so."""
        self._is_over.set()
        self._free.release()  # the thread may be waiting for that
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._thread is not None:
            self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        """Accept connections until `close`."""
        is_failing = False
        while True:
            self._free.acquire()
            if self._is_over.is_set():
                return
            try:
                peer, address = listener.accept()
            except OSError as error:  # no more files, or the peer has gone already
                self._free.release()
                if not self._is_over.wait(ACCEPT_AGAIN_S) and not is_failing:
                    self._failed(error)
                is_failing = True
            else:
                is_failing = False
                self._begin(peer, str(address[0]))
