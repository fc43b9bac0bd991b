"""Words and names of a peer that people get to see, and the words for how an agent is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ..errors import UsageError


def printable(text: str) -> str:
    """``text`` with a space for each character that could steer a terminal or break a line of a log."""
    return "".join(character if character.isprintable() else " " for character in text)


Text = Annotated[str, AfterValidator(printable)]
"""No control characters, no line breaks, nothing that changes the direction of writing."""

Start = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{0,32}$")]
"""What one start of a program is known by, or a question to it; logs, status and reports show it."""

METRIC_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Metrics = Annotated[dict[Annotated[str, Field(pattern=METRIC_NAME)], float | None], Field(max_length=64)]
Fact = Annotated[Text, Field(max_length=64)]
FactText = Annotated[Text, Field(max_length=256)]

DISK_ERROR = "DiskError"
"""The error of a `Fault` that says that an agent's disk cannot be written."""

ConditionName = Literal["ok", "fault", "stalled"]
"""How an agent is: able to work, failed at something last, or unable to keep anything on its disk now."""


def metrics_of(log: Mapping[str, float]) -> dict[str, float | None]:
    """What a client has computed, as it travels: None for what is not finite.

    Raises:
        UsageError: a name that no other side would take.
    """
    if wrong := [name for name in log if not re.fullmatch(METRIC_NAME, name)]:
        raise UsageError(
            f"metric {wrong[0][:80]!r} cannot be sent; its name must be 1 to 64 letters, digits, dots, underscores and "
            "hyphens, the first a letter or digit: rename it in the method's client.log"
        )
    return {name: value if math.isfinite(value) else None for name, value in log.items()}
