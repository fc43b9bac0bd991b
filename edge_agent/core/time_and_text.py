"""Dates and times as people write them."""

from __future__ import annotations

import re
from datetime import datetime, timezone

from .errors import UsageError


def moment_of(text: str) -> datetime:
    """A moment such as ``2030-01-31`` or ``2030-01-31T02:00+01:00``; UTC where it names no zone.

    Raises:
        UsageError: it is none.
    """
    try:
        moment = datetime.fromisoformat(re.sub("Z$", "+00:00", text))
    except ValueError as error:
        raise UsageError(f"'{text[:40]}' is no date or time; expected 2030-01-31 or 2030-01-31T02:00 (UTC)") from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)


def shown(at: object) -> str:
    """A time as ISO 8601 text, for people: ``2030-01-31 02:00:00 UTC``; a text that is no time stays as it is.

    Files, logs and ``--json`` have ISO 8601.
    """
    try:
        return f"{moment_of(str(at)).astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (UsageError, OverflowError):
        return str(at)
