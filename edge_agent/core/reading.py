"""How far the reading of data is: who reads says it, and whoever shows it to people is told, whatever lies between.

A command that shows progress calls `shown_by` around its work. A source goes through its files or samples by `each`. In
a process where nobody shows it, that costs nothing.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""A function that is called with the number of things that were read, and of all."""

Show = Callable[[str], Progress]
"""A function from what is read, such as ``images``, to what is called while that is read."""

FIRST_S = 1.0
"""Steps that are over by then are not shown."""

REDRAW_S = 0.1
"""Seconds between two looks of a line on a terminal: a folder of thousands of files is read in less."""

LINE_S = 10.0
"""Seconds between two lines where no terminal shows one that is redrawn; steps that are over by then print nothing."""

_LINES = 1000
"""Lines of text between two reports."""

_shown: ContextVar[Show | None] = ContextVar("shown", default=None)


@contextlib.contextmanager
def shown_by(show: Show | None) -> Iterator[None]:
    """Show by ``show`` how far the reading is that is done in this context; None: as around it."""
    if show is None:
        yield
        return
    token = _shown.set(show)
    try:
        yield
    finally:
        _shown.reset(token)


def each(items: Collection[T], what: str) -> Iterator[T]:
    """Yield the items, and report after each of them how many are done; ``what`` says what they are, in plural."""
    show = _shown.get()
    if show is None:
        yield from items
        return
    report = show(what)
    total = len(items)
    for number, item in enumerate(items, 1):
        yield item
        report(number, total)


def each_line(lines: Iterator[str], most_bytes: int) -> Iterator[str]:
    """Yield lines of text, and report how many of about ``most_bytes`` bytes are read, in megabytes."""
    show = _shown.get()
    if show is None:
        yield from lines
        return
    report = show("MB")
    total = math.ceil(most_bytes / 1e6)
    read_bytes = 0
    for number, line in enumerate(lines):
        read_bytes += len(line)
        if number % _LINES == 0:
            report(min(int(read_bytes / 1e6), total - 1), total)
        yield line
    report(total, total)


class Report:
    """Says how far one step of reading is, and how fast, at a pace that people can follow.

    Args:
        what: What is read, in plural.
        say: Is called with a text, and whether it is the last one of this step.
        is_redrawn: Whether a text replaces the one before it, as on a terminal; otherwise each is a line.
        clock: Seconds that go on.
    """

    def __init__(
        self,
        what: str,
        say: Callable[[str, bool], object],
        *,
        is_redrawn: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._say = say
        self._first_s = FIRST_S if is_redrawn else LINE_S
        self._pause_s = REDRAW_S if is_redrawn else LINE_S
        self._clock = clock
        self._begun_at = clock()
        self._said_at: float | None = None

    def __call__(self, done: int, total: int) -> None:
        """Say how many are done where it is time to: a step that has said something also says its end."""
        now = self._clock()
        if self._said_at is None:
            is_due = now - self._begun_at >= self._first_s
        else:
            is_due = now - self._said_at >= self._pause_s or done == total
        if not is_due:
            return
        self._said_at = now
        seconds = max(now - self._begun_at, 1e-9)
        self._say(f"read {done} of {total} {self._what}, {_rate_text(done / seconds)} a second", done == total)


def _rate_text(rate: float) -> str:
    """Return a number of things in a second with two digits, or as a whole number."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
