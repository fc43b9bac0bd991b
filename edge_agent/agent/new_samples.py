"""Samples that are added on a device while its agent runs: where they are, and when the head is to learn from them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from ..core.config import AgentConfig

log = logging.getLogger(__name__)

COLLECT_EVERY_S = 5.0
"""How often an agent looks for samples that were added on its device."""

SETTLED_S = 5.0
"""For so long a file of the watch folder has to be unchanged: one that is being copied is not whole yet."""

REFIT_AGAIN_S = 60.0
"""Seconds until a fit that failed is tried again for the first time; the pauses double from then on."""

REFIT_SELDOM_S = 3600.0
"""The longest pause between two tries of a fit that fails, in seconds.

New samples end a pause, at most once in `REFIT_AGAIN_S`: a camera that adds some all the time would leave no pause.
"""


FileMark = tuple[int, int]
"""Time of the last change, in nanoseconds, and size of a file."""


def samples_folder(config: AgentConfig) -> Path:
    """Return where samples are that were labelled on this device.

    That is the data source ``collected:DIR``, or a folder in the state folder beside another source.
    """
    kind, _, path = config.data.source.partition(":")
    return config.data.folder / Path(path).expanduser() if kind == "collected" else config.state / "samples"


def file_mark(path: Path) -> FileMark | None:
    """Return by what a change of a file is noticed; None where the file is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def is_settled(mark: FileMark, now: float) -> bool:
    """Return whether a file did not change lately.

    ``now`` is as `time.time`. A clock that was set leaves no file waiting.
    """
    return abs(now - mark[0] / 1e9) >= SETTLED_S


class NewSamples:
    """Notices samples that were added and files in the watch folder, from the names and times of files alone.

    A fit that failed is due again after a pause, also where nothing has changed. ``now``: as `time.time`.
    """

    def __init__(self, config: AgentConfig, clock: Callable[[], float], now: Callable[[], float] = time.time) -> None:
        """Look at the folders of a configuration, by a clock for pauses and, in ``now``, that of the files."""
        self._index = samples_folder(config) / "index.json"
        self._watch = config.data.watch
        self._clock = clock
        self._now = now
        self._seen: tuple[tuple[str, FileMark], ...] = ()
        """The files that were there when a fit was last due because of them."""

        self._looked_at = float("-inf")
        self._failures = 0
        """How many fits failed in a row."""

        self._reason = ""
        """Why the last one failed."""

        self._again_at = float("inf")
        """When a fit that failed is tried again."""

        self._early_at = float("-inf")
        """When new samples last ended a pause of tries."""

    def is_due(self) -> bool:
        """Return whether something has changed since the last time that this was so, or a fit is to be tried again.

        At most every `COLLECT_EVERY_S`. Call `tried` with what came out.
        """
        now = self._clock()
        # The folder is looked at from time to time, but not again soon after new samples have ended a pause of tries.
        if now - self._looked_at < COLLECT_EVERY_S:
            return False
        self._looked_at = now
        is_pause = self._failures > 0 and now < self._again_at
        if is_pause and now < self._early_at + REFIT_AGAIN_S:
            return False
        try:
            present = self._look()
        except OSError:  # a folder that goes while it is looked at: next time
            return now >= self._again_at
        if present == self._seen:
            return now >= self._again_at
        # New samples end a pause; an empty folder is no reason for a fit.
        self._seen = present
        if self._failures and present:
            self._early_at = now
        return bool(present)

    def _look(self) -> tuple[tuple[str, FileMark], ...]:
        """Return the files with samples that are there now, with their marks.

        The index of collected samples counts at once, files of the watch folder when they stop changing.

        Raises:
            OSError: The watch folder cannot be read.
        """
        present: list[tuple[str, FileMark]] = []
        index_mark = file_mark(self._index)
        if index_mark is not None:
            present.append((str(self._index), index_mark))
        watched = () if self._watch is None else sorted(self._watch.glob("[!.]*/[!.]*"))
        for path in watched:
            mark = file_mark(path)
            if mark is not None and is_settled(mark, self._now()):
                present.append((str(path), mark))
        return tuple(present)

    def tried(self, error: BaseException | None) -> None:
        """Note to what end a fit came; None: it is done, or nothing was to be fitted."""
        if error is None:
            self._failures = 0
            self._reason = ""
            self._again_at = float("inf")
            return
        # From the sixth doubling on the pause is the longest; 2.0**1024 would raise after as many failures.
        pause = min(REFIT_AGAIN_S * 2.0 ** min(self._failures, 6), REFIT_SELDOM_S)
        self._failures = self._failures + 1
        self._reason = f"{type(error).__name__}: {error}"
        self._again_at = self._clock() + pause
        log.warning("refit_failed tries=%d next_try_s=%.0f", self._failures, pause)

    def failure(self) -> dict[str, str | int] | None:
        """Return how often fits failed in a row, why, and when the next try is (UTC, ISO 8601), for the status."""
        if not self._failures:
            return None
        moment = datetime.fromtimestamp(self._now() + max(0.0, self._again_at - self._clock()), timezone.utc)
        return {
            "tries": self._failures,
            "reason": self._reason[:2000],
            "next_try": moment.isoformat(timespec="seconds"),
        }
