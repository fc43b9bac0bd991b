"""Entries that one thread defers: written in one transaction, whose end waits for the files that they are about."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

from edge_agent.core.errors import StateError
from edge_agent.core.storage import PendingSyncs, syncs_into


class DeferredEntries(ABC):
    """The part of a store on a disk or in a database that makes deferred entries durable together.

    A store that is derived from this class says how its transaction ends, in `_commit` and `_roll_back`. It begins one
    where it writes the first deferred entry, and notes that in ``_has_deferred``.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """Held while entries are read or written."""

        self._pending = PendingSyncs()
        """Syncs of files that deferred entries are about."""

        self._deferring = 0
        """The thread that defers; 0: none does."""

        self._has_deferred = False
        self._lost: StateError | OSError | None = None
        """Why deferred entries could not be written, until `flush` has raised it."""

        self._losses = 0

    @property
    def has_deferred(self) -> bool:
        """Whether entries wait for `flush`, or were lost and the next `flush` says so."""
        return self._has_deferred or self._lost is not None

    @property
    def losses(self) -> int:
        """Another number whenever deferred entries were lost, or the journal was closed."""
        return self._losses

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Inside, entries of this thread, and the files that they are about, wait for the disk in `flush` only.

        Entries can be read at once; other processes see them after `flush`, which any other entry implies.
        """
        before = self._deferring
        self._deferring = threading.get_ident()
        try:
            with syncs_into(self._pending):
                yield
        finally:
            self._deferring = before

    def flush(self) -> None:
        """All deferred entries are durable when this returns, in one transaction, and before them their files.

        Raises:
            StateError: They could not be written, at any time since the last call; none of that transaction is.
            OSError: A file could not be written, with the same result.
        """
        with self._lock:
            try:
                self._commit_deferred()
            finally:
                lost = self._lost
                self._lost = None
            if lost is not None:
                raise lost

    def _commit_deferred(self) -> None:
        """Sync the pending files, then commit the transaction of the deferred entries, which are lost otherwise.

        Raises:
            StateError: The entries could not be written.
            OSError: A file could not be written.
        """
        try:
            self._pending.finish()
            if self._has_deferred:
                self._commit()
        except (StateError, OSError) as error:
            if self._has_deferred:
                self._drop_deferred(error)
            raise
        self._has_deferred = False

    def _drop_deferred(self, error: StateError | OSError) -> None:
        """Give the deferred entries up, and keep the reason for the next `flush`."""
        self._roll_back()
        self._has_deferred = False
        self._lost = error
        self._losses += 1

    def _forget_deferred(self) -> None:
        """Forget the deferred entries, as in a crash: the journal is closed."""
        self._pending.discard()
        self._has_deferred = False
        self._lost = None
        self._losses += 1

    @abstractmethod
    def _commit(self) -> None:
        """Commit the transaction of the deferred entries.

        Raises:
            StateError: They could not be written.
        """

    @abstractmethod
    def _roll_back(self) -> None:
        """End the transaction of the deferred entries without them; one whose connection is lost has ended."""
