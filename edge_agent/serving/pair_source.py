"""Which pair is in use: the one that was named at the start, or that of a device whose releases and fits change it."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Literal, Protocol

from ..bundle import installed
from ..bundle.unpacked import Bundle
from ..core.errors import HeadwaterError, StateError, cause
from ..heads.saved import CARD
from .pair import Pair
from .predictor import Predictor

log = logging.getLogger(__name__)

_EVERY_S = 0.5
"""Seconds between two looks at a state folder: two calls of the system."""

_AGAIN_S = 5.0
"""Seconds after which a pair that could not be loaded is tried again; a bundle may have been removed meanwhile."""

Precision = Literal["auto", "fp32", "int8"]
Mark = tuple[int, int, int]
"""What tells two contents of a file apart that were both put there by a rename: inode, size and nanoseconds."""


class PairSource(Protocol):
    """Where pairs come from."""

    def mark(self) -> object:
        """Return something that differs from the mark before as soon as another pair is in use."""

    def open(self) -> Pair:
        """Load the pair in use.

        Raises:
            HeadwaterError: There is none, or it cannot be used.
        """


class NamedPair:
    """A bundle and a head that were named; both stay as they are."""

    def __init__(
        self, bundle: Bundle, head_folder: Path | None, precision: Precision = "auto", threads: int = 1
    ) -> None:
        self._bundle = bundle
        self._head_folder = head_folder
        self._precision: Precision = precision
        self._threads = threads

    def mark(self) -> object:
        """Return a mark of the head's card: fitting it again makes another pair."""
        return None if self._head_folder is None else _mark(self._head_folder / CARD)

    def open(self) -> Pair:
        """Load the pair; see `Pair.open`."""
        return Pair.open(self._bundle, self._head_folder, self._precision, self._threads)


class HeldPair:
    """A pair that a Python program has in memory."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def mark(self) -> object:
        """Return the pair's id: it never changes."""
        return self._pair.id

    def open(self) -> Pair:
        """Return the pair."""
        return self._pair


class StatePair:
    """The pair in use in the state folder of a device, which releases, fits and rollbacks change."""

    def __init__(self, state: Path, precision: Precision = "auto", threads: int = 1) -> None:
        self._state = state
        self._precision: Precision = precision
        self._threads = threads

    def mark(self) -> object:
        """Return marks of the head's card and of the list of bundles."""
        return _mark(self._state / "head" / CARD), _mark(installed.pointer(self._state / "bundles"))

    def open(self) -> Pair:
        """Load the bundle in use and the head that was fitted on it.

        A release puts the head in place first and its bundle next. `heads.saved.load` gives the head before for the
        bundle before, so that a pair is never mixed, whenever it is read.

        Raises:
            StateError: No bundle is in use.
            HeadwaterError: As `Pair.open`.
        """
        bundle = installed.current(self._state / "bundles")
        if bundle is None:
            raise StateError(
                f"{self._state / 'bundles'}: no bundle is in use; import one ('edge-agent import'), or wait for a "
                "release"
            )
        folder = self._state / "head"
        has_head = (folder / CARD).is_file()
        return Pair.open(bundle, folder if has_head else None, self._precision, self._threads)


def _mark(path: Path) -> Mark | None:
    """Return the mark of a file; None where there is none."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None


class PairWatch:
    """A thread that loads the pair in use whenever another one is, and switches the predictor to it.

    The pair before answers until the new one has answered once. One that cannot be loaded changes nothing.
    """

    def __init__(self, source: PairSource, predictor: Predictor, every_s: float = _EVERY_S) -> None:
        self._source = source
        self._predictor = predictor
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pairs", daemon=True)
        self._mark: object = None
        self.problem = ""
        """Why the pair that should be in use is not; empty: it is."""

    def start(self) -> None:
        """Load the pair in use, then begin to watch for others; where none can be loaded yet, the first is waited for.

        Raises:
            HeadwaterError: The pair is there and cannot be used.
        """
        self._mark = self._source.mark()
        try:
            self._predictor.switch(self._source.open())
        except StateError as error:
            self.problem = str(error)
            log.warning("no_pair_yet reason=%s", error)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> bool:
        """Switch to the pair in use if it is another one than at the last look; returns whether it did."""
        mark = self._source.mark()
        if mark == self._mark and not self.problem:
            return False
        try:
            pair = self._source.open()
        except (HeadwaterError, OSError) as error:
            reason = str(error) if isinstance(error, HeadwaterError) else cause(error)
            if reason != self.problem:
                log.warning("pair_not_taken reason=%s: the one before answers on", reason)
            self.problem = reason
            return False
        self.problem = ""
        # What has changed while it was read is seen at the next look.
        self._mark = mark
        self._predictor.switch(pair)
        return True

    def _run(self) -> None:
        wait_s = self._every_s
        while not self._stop.wait(wait_s):
            try:
                self.look()
            except Exception:  # a bug must not end the watch
                log.exception("pair_watch_broke")
            wait_s = _AGAIN_S if self.problem else self._every_s
