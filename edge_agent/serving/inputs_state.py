"""Whether inputs have changed: the state, its texts, and its record in the device's state folder.

The comparison itself is in `inputs_watch`. `edge-agent status` reads the record without importing that.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from ..core.errors import HeadwaterError
from ..core.storage import read_json
from ..core.task import Frozen
from ..identity.certificates import show_utc
from .announcement import find_server


class InputsState(enum.Enum):
    """How the recent inputs compare with the training samples."""

    AS_FITTED = "as fitted"
    CHANGED = "changed"
    NOT_ENOUGH = "not enough"


@dataclass(frozen=True)
class InputsStatus:
    """The state of the inputs, as the page and metrics show it.

    Attributes:
        state: How they compare with the training samples.
        since: When the state began, in seconds since 1970; 0: no comparison has been made yet.
        text: State and time as a text for people.
    """

    state: InputsState
    since: float
    text: str

    def as_json(self) -> dict[str, Any]:
        """Return the status as a JSON object."""
        return {"state": self.state.value, "since": self.since or None, "text": self.text}


class InputsRecord(Frozen):
    """The state that is kept over a restart."""

    pair: str = Field(max_length=200, description="the encoder and the head that answered")
    state: InputsState
    since: float = Field(ge=0, description="seconds since 1970 at which the state began")


def read_record(file: Path) -> InputsRecord | None:
    """Return the record that a server has written; None if there is none, or it cannot be read."""
    try:
        content = read_json(file)
        return None if content is None else InputsRecord.model_validate(content)
    except (HeadwaterError, ValueError):
        return None


def inputs_since(state: Path) -> float | None:
    """Return since when the inputs of a device's server have changed, for the report to the coordinator.

    Args:
        state: The state folder of the device.

    Returns:
        When the inputs changed, in seconds since 1970; 0: they are as fitted; None: no server is running, or it has
        given too few answers.
    """
    if find_server(state) is None:
        return None
    record = read_record(record_file(state))
    if record is None or record.state is InputsState.NOT_ENOUGH:
        return None
    return record.since if record.state is InputsState.CHANGED else 0.0


def record_file(state: Path) -> Path:
    """Return the path of the record in a device's state folder."""
    return state / "serve" / "inputs.json"


def describe(state: InputsState, since: float, missing: int = 0) -> str:
    """Return the state of inputs as a text for people.

    Args:
        state: The state.
        since: When it began, in seconds since 1970.
        missing: How many more answers are needed before the first comparison.
    """
    if state is InputsState.CHANGED:
        return f"changed since {show_utc(since)}: unlike what the head learned from; label some and fit it again"
    if state is InputsState.AS_FITTED:
        return "as fitted"
    return f"not enough answers yet, {missing} more"
