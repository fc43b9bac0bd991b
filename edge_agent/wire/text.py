"""Words of a peer, for people, and the words for how an agent is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator


def printable(text: str) -> str:
    """``text`` with a space for each character that could steer a terminal or break a line of a log."""
    return "".join(character if character.isprintable() else " " for character in text)


Text = Annotated[str, AfterValidator(printable)]
"""No control characters, no line breaks, nothing that changes the direction of writing."""

DISK_ERROR = "DiskError"
"""The error of a `Fault` that says that an agent's disk cannot be written."""

ConditionName = Literal["ok", "fault", "stalled"]
"""How an agent is: able to work, failed at something last, or unable to keep anything on its disk now."""
