"""Which federation an agent works for, and the highest epoch of its coordinator; both survive restarts of the agent.

An agent takes orders of one federation and one epoch. It leaves its federation only for another coordinator that is
there again and again, while its own answers no hello for `FOLLOW_S`: its state folder was replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ..errors import StateError, cause
from ..store import read_json, write_json
from ..task import Frozen
from ..wire.messages import Command, Epoch, FederationId

log = logging.getLogger(__name__)

FOLLOW_S = 10.0
"""How long the agent's own coordinator may leave hello unanswered before the agent follows another that answers."""

SAID_AGAIN_S, NOTED_S = 60.0, 60.0
"""How often the log repeats that orders are ignored, and how long after the last one the status shows it."""


class _Followed(Frozen):
    federation: FederationId
    epoch: Epoch


@dataclass
class _Other:
    """A coordinator of another federation than the agent's own. Times are monotonic seconds."""

    federation: str
    epoch: int
    since: float
    heard_at: float


class Membership:
    """What lies in the file at ``path``; `federation` is empty before an agent has been welcomed for the first time."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        found = self._read()
        self.federation, self.epoch = found.federation, found.epoch
        self._other: _Other | None = None
        self._ignored = ""
        self._ignored_at = self._said_at = float("-inf")

    def allows(self, message: Command) -> bool:
        """Whether the message is of the federation that is followed, and of no coordinator that has a successor."""
        return not self.federation or (message.federation == self.federation and message.epoch >= self.epoch)

    def is_current(self, message: Command) -> bool:
        """Whether the message is of the coordinator that has welcomed this agent last: its orders are carried out."""
        return (message.federation, message.epoch) == (self.federation, self.epoch)

    def ignored(self, message: Command) -> None:
        """Note a message that is not allowed: one line in the log now and then, and who may have to be followed."""
        now = self._clock()
        if message.federation == self.federation:
            why = f"of epoch {message.epoch}, epoch {self.epoch} has been heard"
        else:
            why = f"of federation {message.federation[:12]}, this agent follows {self.federation[:12]}"
            self._note_other(message, now)
        self._ignored, self._ignored_at = f"{why}: two coordinators, or a state folder that was replaced", now
        if now - self._said_at >= SAID_AGAIN_S:
            self._said_at = now
            log.warning("order_ignored type=%s %s", message.type, self._ignored)

    def answered(self) -> None:
        """The agent's own coordinator is there, or nobody can be heard: no other is to be followed now."""
        self._other = None

    def to_follow(self) -> tuple[str, int] | None:
        """Federation and epoch to follow from now on; None almost always.

        Those of another coordinator that has been there for all the time that the own one had for an answer.
        """
        other, now = self._other, self._clock()
        if other is None:
            return None
        if now - other.since >= FOLLOW_S and other.heard_at - other.since >= FOLLOW_S / 2:
            self._other = None
            return other.federation, other.epoch
        if now - other.heard_at >= FOLLOW_S:
            self._other = None
        return None

    def note(self) -> str | None:
        """That orders were ignored in the last `NOTED_S` seconds, for people; None where there were none."""
        return f"ignores orders {self._ignored}" if self._clock() - self._ignored_at < NOTED_S else None

    def accept(self, federation: str, epoch: int) -> None:
        """Follow that federation and epoch from now on. A disk that cannot be written is logged, not raised."""
        if (federation, epoch) == (self.federation, self.epoch):
            return
        self.federation, self.epoch = federation, epoch
        self._ignored_at = float("-inf")  # who was ignored may be whom it follows now
        try:
            write_json(self._path, {"federation": federation, "epoch": epoch})
        except OSError as error:
            log.warning("federation_not_written path=%s reason=%s", self._path, cause(error))

    def _read(self) -> _Followed:
        try:
            raw = read_json(self._path)
            return _Followed(federation="", epoch=0) if raw is None else _Followed.model_validate(raw)
        except (StateError, ValidationError) as error:  # the next welcome writes it again
            log.warning("federation_unreadable path=%s reason=%s", self._path, cause(error))
            return _Followed(federation="", epoch=0)

    def _note_other(self, message: Command, now: float) -> None:
        if self._other is None or self._other.federation != message.federation:
            self._other = _Other(message.federation, message.epoch, now, now)
        else:
            self._other.epoch, self._other.heard_at = max(self._other.epoch, message.epoch), now
