"""What keeps this agent from its work: the last fault of each kind, with its remedy, here and for the coordinator.

The whole message stays on the device, in its log and its status. The coordinator gets the class of the error and what
to do about it; what could name local files or classes is left out.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from .. import errors
from ..errors import HeadwaterError, cause
from ..store import write_atomic
from ..wire.messages import Fault
from ..wire.text import DISK_ERROR, ConditionName

Kind = Literal["disk", "data", "work", "bundle", "start"]
"""What failed: writing to the disk, a look at local data, a job of a run, a bundle, the start of the agent."""

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EROFS, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC)})
LEAST_FREE_BYTES = 1 << 20
"""With less room than this an agent cannot even keep what it needs for itself."""

_PROBE_BYTES = 64 * 1024
_PATH = re.compile(r"(?<![\w:/.])~?/[^\s'\":;,)]+")
_OF_DATA = "local data do not fit what is asked of this device"
_REMEDIES: tuple[tuple[type[BaseException], str], ...] = (
    (errors.DataError, "correct the data, or [data] in the agent's configuration"),
    (errors.ConfigError, "correct the agent's configuration and restart the agent"),
    (errors.UnknownName, "correct the agent's configuration and restart the agent"),
    (errors.MissingCapability, "install what is missing on the device, or give it another tier"),
    (errors.BundleError, "export and release the encoder again"),
    (errors.TrainingFailed, "look at the data of this device and at the step size"),
    (errors.StateError, "look into the agent's log; what is damaged in its state folder can be removed"),
    (errors.DuplicateId, "give one of the two agents another id"),
    (errors.ProtocolMismatch, "upgrade the side that speaks the older protocol"),
    (MemoryError, "give the agent more memory, or another tier"),
)


@dataclass(frozen=True)
class Problem:
    """One fault: what failed, its whole message, what to do, and when it was (UTC, ISO 8601)."""

    kind: Kind
    error: str
    message: str
    public: str
    remedy: str
    at: str

    def to_coordinator(self, run: str = "", number: int = 0) -> Fault:
        """The fault as the coordinator gets to see it, about that job; about none where no run is given."""
        return Fault(error=self.error, message=self.public, remedy=self.remedy, run=run, round=number)

    def as_json(self) -> dict[str, str]:
        """For the status of this device."""
        return {name: value for name, value in asdict(self).items() if name != "public"}


class Condition:
    """The problems that this agent has now, one of each kind."""

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)) -> None:
        self._now = now
        self._problems: dict[Kind, Problem] = {}

    @property
    def name(self) -> ConditionName:
        """``stalled`` while the disk cannot be written, ``fault`` after another failure, else ``ok``."""
        return "stalled" if self.is_stalled else "fault" if self._problems else "ok"

    @property
    def is_stalled(self) -> bool:
        """Whether nothing can be kept on the disk now."""
        return "disk" in self._problems

    @property
    def problem(self) -> Problem | None:
        """What people should know first: the disk, else the newest."""
        return self._problems.get("disk") or next(reversed(self._problems.values()), None)

    def note(self, kind: Kind, error: BaseException) -> Problem:
        """Something failed; returns what is told of it. Errors of the disk count as such, whatever failed by them."""
        found = problem_of(kind, error, self._now())
        self._problems.pop(found.kind, None)
        self._problems[found.kind] = found
        return found

    def clear(self, *kinds: Kind) -> bool:
        """These work again; whether one of them had not."""
        before = len(self._problems)
        for kind in kinds:
            self._problems.pop(kind, None)
        return len(self._problems) < before


def problem_of(kind: Kind, error: BaseException, at: datetime) -> Problem:
    """What is told of an error: class and remedy to the coordinator, everything on this device."""
    whole = whole_message(error)
    moment = at.isoformat(timespec="seconds")
    if (reason := disk_error(error)) is not None:
        remedy = "free space on the device's disk, or mount it for writing; the agent resumes by itself"
        return Problem("disk", DISK_ERROR, whole, f"its disk cannot be written: {cause(reason)}", remedy, moment)
    remedy = next((words for error_kind, words in _REMEDIES if isinstance(error, error_kind)), "look into its log")
    if isinstance(error, errors.DataError):
        public = _OF_DATA
    elif isinstance(error, errors.StateError | errors.ConfigError | OSError):
        public = "see 'edge-agent status' on the device"
    else:
        public = _PATH.sub("…", whole)
    return Problem(kind, type(error).__name__[:64], whole, public, remedy, moment)


def whole_message(error: BaseException) -> str:
    """An error in words, at most 2,000 characters; the file with it where the system names one."""
    if isinstance(error, HeadwaterError):
        return str(error)[:2000] or "no message"
    named = getattr(error, "filename", None) if isinstance(error, OSError) else None
    return (f"{named}: " if named is not None else "") + cause(error)[:1800]


def disk_error(error: BaseException) -> OSError | None:
    """The error of a full, read-only or broken disk that ``error`` is, or that it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in DISK_ERRORS:
            return seen
        seen = seen.__cause__
    return None


def try_disk(folder: Path, needed_bytes: int = 0) -> None:
    """Return quietly when ``folder`` can be written and ``needed_bytes`` have room.

    Raises:
        OSError: they have not.
    """
    probe = folder / "disk-probe"
    try:
        write_atomic(probe, bytes(_PROBE_BYTES))
    finally:
        probe.unlink(missing_ok=True)
    needed = max(needed_bytes, LEAST_FREE_BYTES)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(errno.ENOSPC, f"{free} bytes are free, {needed} are needed", str(folder))


def look_at_disk(folder: Path) -> dict[str, Any] | None:
    """What is wrong with the disk of ``folder``, for a status that the agent cannot write there; None: nothing."""
    import os

    if not hasattr(os, "statvfs"):
        return None
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return problem_of("disk", OSError(errno.EIO, cause(error)), datetime.now(timezone.utc)).as_json()
    if found.f_flag & getattr(os, "ST_RDONLY", 0):
        code = errno.EROFS
    elif found.f_bavail * found.f_frsize < _PROBE_BYTES or (found.f_files and not found.f_favail):
        code = errno.ENOSPC
    else:
        return None
    found_wrong = OSError(code, os.strerror(code), str(folder))
    return problem_of("disk", found_wrong, datetime.now(timezone.utc)).as_json()
