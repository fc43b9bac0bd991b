"""State of an agent on its disk beside that of runs: room for downloads, and the federation that the agent follows."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ..core.config import AgentConfig
from ..core.errors import StateError, cause
from ..core.storage import read_json, size_of, write_json
from ..core.task import Frozen
from ..wire.blobs.chunks import BlobCache
from ..wire.messages.fields import Command, Epoch, FederationId

log = logging.getLogger(__name__)


def make_room(config: AgentConfig, cache: BlobCache, needed_bytes: int, kept_digests: Collection[str]) -> int:
    """Remove what can be had again until a download leaves ``min_free_bytes`` of the disk free.

    Old downloads go first, then cached features, each the oldest first. Client state stays: it cannot be had again, and
    its run may be paused.

    Args:
        config: The device's configuration.
        cache: The downloads.
        needed_bytes: How much is to be downloaded.
        kept_digests: Digests of the downloads that stay.

    Returns:
        How many bytes are free now that were not before.
    """
    from ..personal.encoder import feature_files  # brings numpy, which an idle agent does without

    state = config.state
    short = needed_bytes + config.min_free_bytes - shutil.disk_usage(state).free
    if short <= 0:
        return 0
    downloads = cache.free(short, kept_digests)
    features = 0
    # Files of the cache alone. Hidden ones are being written, here or by another process (`storage.write_atomic`).
    for path in feature_files(state / "features"):
        if downloads + features >= short:
            break
        features += size_of(path)
        path.unlink(missing_ok=True)
    log.info("room_made of=%d downloads_bytes=%d features_bytes=%d", short, downloads, features)
    return downloads + features


def disk_usage(config: AgentConfig) -> dict[str, int]:
    """Return what the agent has on its disk, and its bounds, in bytes."""
    state = config.state
    return {
        "runs": sum(path.is_dir() for path in (state / "runs").glob("*")),
        "keep_runs": config.keep_runs,
        "runs_bytes": size_of(state / "runs"),
        "downloads_bytes": size_of(state / "cache"),
        "cache_bytes": config.cache_bytes,
        "features": size_of(state / "features"),
        "features_bytes": config.features_bytes,
        "free_bytes": shutil.disk_usage(state).free,
        "min_free_bytes": config.min_free_bytes,
    }


FOLLOW_S = 10.0
"""How long the agent's own coordinator may not answer hello before the agent follows another that answers."""

SAID_AGAIN_S = 60.0
"""Seconds after which the log repeats that commands are ignored."""

NOTED_S = 60.0
"""For how many seconds after the last ignored command the status shows it."""


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
    """The federation that an agent follows, saved at ``path``; empty before its first welcome."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Read what was followed when the agent ended; a file that is damaged counts as none."""
        self._path = path
        self._clock = clock
        self.federation = ""
        self.epoch = 0
        try:
            raw = read_json(path)
            if raw is not None:
                followed = _Followed.model_validate(raw)
                self.federation = followed.federation
                self.epoch = followed.epoch
        except (StateError, ValidationError) as error:  # the next welcome writes it again
            log.warning("federation_unreadable path=%s reason=%s", path, cause(error))
        self._other: _Other | None = None
        self._ignored = ""
        self._ignored_at = float("-inf")
        self._said_at = float("-inf")

    def allows(self, message: Command) -> bool:
        """Return whether a message is of the federation that is followed, and of no earlier coordinator of it."""
        return not self.federation or (message.federation == self.federation and message.epoch >= self.epoch)

    def is_current(self, message: Command) -> bool:
        """Return whether the message is of the coordinator that has welcomed this agent last.

        Its commands are obeyed.
        """
        return (message.federation, message.epoch) == (self.federation, self.epoch)

    def ignored(self, message: Command) -> None:
        """Note a message that is not allowed: a line in the log from time to time, and who may have to be followed."""
        now = self._clock()
        if message.federation == self.federation:
            why = f"of epoch {message.epoch}, epoch {self.epoch} has been heard"
        else:
            why = f"of federation {message.federation[:12]}, this agent follows {self.federation[:12]}"
            if self._other is None or self._other.federation != message.federation:
                self._other = _Other(message.federation, message.epoch, now, now)
            else:
                self._other.epoch = max(self._other.epoch, message.epoch)
                self._other.heard_at = now
        self._ignored = f"{why}: two coordinators, or a state folder that was replaced"
        self._ignored_at = now
        if now - self._said_at >= SAID_AGAIN_S:
            self._said_at = now
            log.warning("order_ignored type=%s %s", message.type, self._ignored)

    def answered(self) -> None:
        """Note that the agent's own coordinator is online, or the broker is not: no other is to be followed now."""
        self._other = None

    def to_follow(self) -> tuple[str, int] | None:
        """Return federation and epoch to follow from now on; None almost always.

        Those of another coordinator that was online for all the time that the own one had for an answer.
        """
        rival = self._other
        now = self._clock()
        if rival is None:
            return None
        if now - rival.since >= FOLLOW_S and rival.heard_at - rival.since >= FOLLOW_S / 2:
            self._other = None
            return rival.federation, rival.epoch
        if now - rival.heard_at >= FOLLOW_S:
            self._other = None
        return None

    def note(self) -> str | None:
        """Return that commands were ignored in the last `NOTED_S` seconds, for the status.

        It is None where there were none.
        """
        return f"ignores orders {self._ignored}" if self._clock() - self._ignored_at < NOTED_S else None

    def accept(self, federation: str, epoch: int) -> None:
        """Follow that federation and epoch from now on. A disk that cannot be written is logged, not raised."""
        if (federation, epoch) == (self.federation, self.epoch):
            return
        self.federation = federation
        self.epoch = epoch
        self._ignored_at = float("-inf")  # the sender that was ignored may be the one that it follows now
        try:
            write_json(self._path, {"federation": federation, "epoch": epoch})
        except OSError as error:
            log.warning("federation_not_written path=%s reason=%s", self._path, cause(error))
