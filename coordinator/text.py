"""Numbers and lists as text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edge_agent.core.errors import cause

SHOWN = 10
"""Names in one message; of a hundred agents the rest is a number."""


def counted(number: int, what: str) -> str:
    """``1 round``, ``2 rounds``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], empty: str = "none") -> str:
    """Names with commas between them, and how many more there are beyond the first ten."""
    if not names:
        return empty
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def about_time(seconds: float) -> str:
    """Return an estimate of a time in the unit that people would use: ``40 s``, ``12 min``, ``5 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def sentence(text: str) -> str:
    """The text as a sentence: with a capital, unless it begins with a name, a path or a command, and a full stop."""
    first = re.match(r"[a-z]+(?=[ ,;])", text)
    begun = text[:1].upper() + text[1:] if first else text
    return begun if begun[-1:] in {"", ".", "!", "?", "…"} else f"{begun}."


def plain(text: str) -> str:
    """Return a docstring's text without the marks of bold and code."""
    return re.sub(r"(``|\*\*)(\S(?:.*?\S)?)\1", r"\2", text)


def encoder_named(sha256: str) -> str:
    """Return the shared encoder by the beginning of its hash, or that the method shares none."""
    return f"encoder {sha256[:16]}" if sha256 else "no shared encoder"


def reason_of(error: BaseException) -> str:
    """Return an error as one line for a journal entry or a table."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{cause(error)}"
    return " ".join(f"{type(error).__name__}: {error}".split())


class SaidBefore:
    """Says the reason of a repeated event in full the first time, and afterwards how often it was the same."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, int]] = {}

    def reason(self, about: str, reason: str) -> str:
        """Return the text of a reason.

        Args:
            about: Whose reason it is; reasons of others do not count.
            reason: The reason in full.
        """
        before, times = self._last.get(about, ("", 0))
        if reason != before:
            self._last[about] = (reason, 1)
            return reason
        self._last[about] = (reason, times + 1)
        return f"as before ({times + 1} ×)"
