"""Where the pair in use comes from, and a thread that loads it again after it has changed.

The pair is either named at the start, or it is that of a device's state folder, where releases, fits and rollbacks
replace it.
"""

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
"""Seconds between two checks of a state folder. A check is cheap: two calls of ``stat``."""

_RETRY_S = 5.0
"""Seconds until a pair that could not be loaded is tried again."""

Precision = Literal["auto", "fp32", "int8"]
FileVersion = tuple[int, int, int]
"""Inode, size and time of change in nanoseconds: they differ after the file has been replaced by a rename."""


class PairSource(Protocol):
    """A place that pairs are loaded from."""

    def version(self) -> object:
        """Return a value that changes whenever another pair comes into use; values are compared by ``==``."""

    def open(self) -> Pair:
        """Load the pair in use.

        Raises:
            HeadwaterError: There is no pair, or it cannot be used.
        """


class NamedPair:
    """The pair of a bundle and a head folder that were named at the start."""

    def __init__(
        self, bundle: Bundle, head_folder: Path | None, precision: Precision = "auto", threads: int = 1
    ) -> None:
        self._bundle = bundle
        self._head_folder = head_folder
        self._precision: Precision = precision
        self._threads = threads

    def version(self) -> object:
        """Return the version of the head's card, which every fit replaces; None without a head."""
        return None if self._head_folder is None else _file_version(self._head_folder / CARD)

    def open(self) -> Pair:
        """Load the pair; see `Pair.open`."""
        return Pair.open(self._bundle, self._head_folder, self._precision, self._threads)


class LoadedPair:
    """A pair that a Python program has already loaded. It never changes."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def version(self) -> object:
        """Return the pair's id, which is always the same."""
        return self._pair.id

    def open(self) -> Pair:
        """Return the pair."""
        return self._pair


class StatePair:
    """The pair in use in the state folder of a device. Releases, fits and rollbacks replace it."""

    def __init__(self, state: Path, precision: Precision = "auto", threads: int = 1) -> None:
        self._state = state
        self._precision: Precision = precision
        self._threads = threads

    def version(self) -> object:
        """Return the versions of the head's card and of the file that names the bundle in use."""
        return _file_version(self._state / "head" / CARD), _file_version(installed.pointer(self._state / "bundles"))

    def open(self) -> Pair:
        """Load the bundle in use and the head that was fitted on it.

        A release replaces the head first and the bundle next. In between, `heads.saved.load` returns the previous head
        for the previous bundle, so a bundle is never loaded with the head of another one.

        Raises:
            StateError: No bundle is in use.
            HeadwaterError: The pair cannot be used; see `Pair.open`.
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


def _file_version(path: Path) -> FileVersion | None:
    """Return the version of a file; None if it cannot be read."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None


class PairWatch:
    """A thread that loads the pair in use whenever it has changed, and switches the predictor to it.

    The previous pair answers until the new one is loaded and warmed up. If a new pair cannot be loaded, the previous
    one stays in use, and loading is tried again.
    """

    def __init__(self, source: PairSource, predictor: Predictor, every_s: float = _EVERY_S) -> None:
        self._source = source
        self._predictor = predictor
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pairs", daemon=True)
        self._version: object = None
        self.problem = ""
        """Why the pair in use could not be loaded, for people; empty: it was loaded."""

    def start(self) -> None:
        """Load the pair in use, then watch for changes. If there is no pair yet, the first one is waited for.

        Raises:
            HeadwaterError: There is a pair, but it cannot be used.
        """
        self._version = self._source.version()
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

    def reload_if_changed(self) -> bool:
        """Switch to the pair in use if it has changed since the last call; return whether it was switched."""
        # The version is read before the pair: a change during loading is then noticed by the next call.
        version = self._source.version()
        if version == self._version and not self.problem:
            return False
        try:
            pair = self._source.open()
        except (HeadwaterError, OSError) as error:
            reason = str(error) if isinstance(error, HeadwaterError) else cause(error)
            if reason != self.problem:
                log.warning("pair_not_taken reason=%s: the previous one stays in use", reason)
            self.problem = reason
            return False
        self.problem = ""
        self._version = version
        self._predictor.switch(pair)
        return True

    def _run(self) -> None:
        """Check for a change at regular intervals until `close` is called."""
        wait_s = self._every_s
        while not self._stop.wait(wait_s):
            try:
                self.reload_if_changed()
            except Exception:  # a bug must not end the thread
                log.exception("pair_watch_broke")
            wait_s = _RETRY_S if self.problem else self._every_s
