"""Dates and times in the form in which people write and read them."""

from __future__ import annotations

import re
from datetime import datetime, timezone

from .errors import UsageError


def moment_of(text: str) -> datetime:
    """Return the moment that a text such as ``2030-01-31`` or ``2030-01-31T02:00+01:00`` names; UTC without a zone.

    Raises:
        UsageError: ``text`` is not a date or time.
    """
    try:
        moment = datetime.fromisoformat(re.sub("Z$", "+00:00", text))
    except ValueError as error:
        raise UsageError(
            f"'{text[:40]}' is not a date or time; expected 2030-01-31 or 2030-01-31T02:00 (UTC)"
        ) from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)


def utc_text(at: float) -> str:
    """Return a time in seconds (as `time.time` gives it) as ISO 8601 text, UTC, to the second."""
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="seconds")


def show_time(at: object) -> str:
    """Return an ISO 8601 time in the form for people, ``2030-01-31 02:00:00 UTC``; other text is returned unchanged.

    Files, logs and ``--json`` keep ISO 8601.
    """
    try:
        return f"{moment_of(str(at)).astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (UsageError, OverflowError):
        return str(at)
