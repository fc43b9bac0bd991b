"""What keeps an agent from its work: faults with their remedies, protocol mismatches, and silent coordinators."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from ..core.config import AgentConfig
from ..core.disk import PROBE_BYTES, disk_error, disk_failure
from ..core.errors import SET_CLOCK, ProtocolMismatch
from ..core.storage import write_atomic
from ..core.time_and_text import utc_text
from ..wire.faults import (
    DISK_CODE,
    LOGIN_REFUSED,
    SEE_STATUS,
    TOPICS_REFUSED,
    known_error,
    nearest_class,
    public_text,
    whole_message,
)
from ..wire.messages.fields import DISK_ERROR, ConditionName, JobKey
from ..wire.messages.up import Fault
from ..wire.transport import Disconnected

log = logging.getLogger(__name__)

Kind = Literal["disk", "data", "work", "bundle", "start", "identity", "connection"]
"""What failed: writing to the disk, the check of local data, a job of a run, a bundle, the start of the agent, the
certificate, which counts no more, or the way to the coordinator, which therefore cannot be informed."""

WRONG_CLOCK = "WrongClock"
"""Error of a device, or of who it talks to, in the device's own status."""

MOST_OFF_S = 3600.0
"""Clocks that differ by more make times of releases, windows and certificates wrong; a time zone is an hour."""

LEAST_FREE_BYTES = 1 << 20
"""With less free space than this an agent cannot even save its own state."""


@dataclass(frozen=True)
class Problem:
    """One fault: what failed, its full message, what to do, and the time (UTC, ISO 8601)."""

    kind: Kind
    error: str
    code: str
    message: str
    public: str
    remedy: str
    at: str

    def to_coordinator(self, about: JobKey | None = None, release: int = 0) -> Fault:
        """Return the fault as it is sent to the coordinator, about that job or release, or neither."""
        job = about._asdict() if about is not None else {}
        return Fault(error=self.error, code=self.code, message=self.public, remedy=self.remedy, release=release, **job)

    def as_json(self) -> dict[str, str]:
        """Return the fields for the status of this device, which shows the whole message itself."""
        fields = {name: value for name, value in asdict(self).items() if name != "public"}
        return fields | {"remedy": self.remedy.replace(SEE_STATUS, "see the message")}


class Condition:
    """The problems that this agent has now, one of each kind."""

    def __init__(self) -> None:
        self._problems: dict[Kind, Problem] = {}
        self.noted = Counter[str]()
        """Code -> faults since the start."""

    @property
    def name(self) -> ConditionName:
        """``stalled`` while the disk cannot be written, ``fault`` after another failure, else ``ok``."""
        if self.is_stalled:
            return "stalled"
        return "fault" if self._problems else "ok"

    @property
    def is_stalled(self) -> bool:
        """Whether nothing can be written to the disk now."""
        return "disk" in self._problems

    @property
    def problem(self) -> Problem | None:
        """The most important one: of the disk, else the newest."""
        return self._problems.get("disk") or next(reversed(self._problems.values()), None)

    def note(self, kind: Kind, error: BaseException) -> Problem:
        """Note an error; returns its problem. Errors of the disk count as such, whatever failed because of them."""
        problem = problem_of(kind, error)
        self.noted[problem.code] += 1
        self._problems.pop(problem.kind, None)
        self._problems[problem.kind] = problem
        return problem

    def clear(self, *kinds: Kind) -> None:
        """Note that what belongs to these kinds works again."""
        for kind in kinds:
            self._problems.pop(kind, None)


def problem_of(kind: Kind, error: BaseException, at: datetime | None = None) -> Problem:
    """Return an error as a problem of the moment ``at``, by default now.

    Class, code and remedy are for the coordinator, all of it is for this device.
    """
    whole = whole_message(error)
    moment = (at or datetime.now(timezone.utc)).isoformat(timespec="seconds")
    reason = disk_error(error)
    if reason is not None:
        remedy = "free space on the device's disk, or mount it for writing; the agent resumes by itself"
        return Problem(
            "disk",
            DISK_ERROR,
            DISK_CODE,
            whole,
            f"its disk cannot be written: {os.strerror(reason.errno or 0)}",
            remedy,
            moment,
        )
    description = known_error(error)
    return Problem(kind, nearest_class(error), description.code, whole, public_text(error), description.remedy, moment)


def try_disk(folder: Path, needed_bytes: int = 0) -> None:
    """Return quietly when ``folder`` can be written and ``needed_bytes`` have room.

    Raises:
        OSError: they have not.
    """
    probe = folder / "disk-probe"
    try:
        write_atomic(probe, bytes(PROBE_BYTES))
    finally:
        probe.unlink(missing_ok=True)
    needed = max(needed_bytes, LEAST_FREE_BYTES)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{free} bytes are free, {needed} are needed", str(folder))


def look_at_disk(folder: Path) -> dict[str, str] | None:
    """Return the problem of the disk of ``folder``, for a status that the agent cannot write; None: no problem."""
    failure = disk_failure(folder)
    return None if failure is None else problem_of("disk", failure).as_json()


AGAIN_S = 2.0
"""Seconds until the disk is tried again for the first time; the pauses double from then on."""

SELDOM_S = 60.0
"""The longest pause between two tries, in seconds."""


class Disk:
    """The state folder's disk. Call `tick` from the agent's loop, and `failed` with every error of the system."""

    def __init__(
        self,
        folder: Path,
        condition: Condition,
        send: Callable[[Fault], None],
        *,
        stall: Callable[[], None],
        room_bytes: Callable[[], int],
        resume: Callable[[], None],
    ) -> None:
        """``stall`` drops what has not begun, when nothing can be written; ``room_bytes`` is what the work takes.

        ``resume`` is called when the disk can be written again: the coordinator asks for what is still to do.
        """
        self._folder = folder
        self._condition = condition
        self._send = send
        self._stall = stall
        self._room_bytes = room_bytes
        self._resume = resume
        self._again_at: float | None = None
        self._pause_s = AGAIN_S

    def failed(self, error: OSError, event: str) -> None:
        """Note that something could not be read or written; ``event`` begins the line in the log."""
        if disk_error(error) is None:
            log.warning("%s reason=%s", event, whole_message(error))
        else:
            self._condition.note("disk", error)

    def safely(self, act: Callable[[], None]) -> None:
        """Do something that may fail because of the disk."""
        try:
            act()
        except OSError as error:
            self.failed(error, "transfer_failed")

    def tick(self, now: float) -> None:
        """Release what needs the disk while it cannot be written, then try it from time to time."""
        if not self._condition.is_stalled:
            return
        if self._again_at is None:
            self._pause_s = AGAIN_S
            self._again_at = now + AGAIN_S
            problem = self._condition.problem
            if problem is not None:
                log.error("stalled reason=%s; %s", problem.message, problem.remedy)
                self._send(problem.to_coordinator())
            self.safely(self._stall)
        elif now >= self._again_at:
            try:
                try_disk(self._folder, self._room_bytes())
            except OSError as error:
                self._condition.note("disk", error)
                self._pause_s = min(2 * self._pause_s, SELDOM_S)
                self._again_at = now + self._pause_s
            else:
                self._condition.clear("disk")
                self._again_at = None
                log.info("resumed: the disk of %s can be written again", self._folder)
                self._resume()


HELLO_AGAIN_S = 2.0
ASK_RULES_S = 5.0
"""Time without an answer to hello after which the agent asks the broker whether it may speak on its topics."""

ALONE_S = 10.0
"""Seconds without an answer to hello after which the agent logs it."""

ALONE_AGAIN_S = 60.0
"""Seconds after which it logs it again."""


LEAVE_S = 30.0
"""Seconds without an answer to hello at one broker of a list after which the agent tries the next one.

The broker may be cut off from the others, and then the next one helps. Where the coordinator is away none does, so the
seconds double with each broker that was left.
"""

LONGEST_LEAVE_S = 480.0
"""The seconds that are not doubled any more."""


WAITS_FOR_RELEASE = (
    "waits for a release: an agent of tier 'head' trains no encoder, it installs the one that a run releases. Rounds "
    "ask it only where the coordinator has cohort.tier = 'any' and the method has a task for devices without torch; a "
    "method from a file (headwater run --method FILE:CLASS) has none, unless a head of the same name is installed. To "
    "take part in every round, install torch on this device and set tier = 'train' in the agent's file"
)
"""What a welcomed agent of tier ``head`` waits for while it has no bundle and no job."""


class Silence:
    """How long an agent has had no answer, from the moment that it could have had one, and why as far as is known."""

    def __init__(self, mismatch: Mismatch, clock: Callable[[], float]) -> None:
        self._mismatch = mismatch
        self._clock = clock
        self._since: float | None = None
        self._logged_at = 0.0
        self._away = ""
        self._problem: Problem | None = None
        self._has_asked = False
        self._leave_s = LEAVE_S

    def begin(self) -> None:
        """Note that from now on a coordinator could answer."""
        self._since = self._logged_at = self._clock()
        self._problem = None
        self._has_asked = False

    def answered(self) -> None:
        """Note that a coordinator has answered: the connected broker reaches one."""
        self._leave_s = LEAVE_S

    def is_leave_due(self) -> bool:
        """Return whether to try another broker of a list now, because no coordinator answers at this one.

        Where a coordinator speaks another protocol it has been heard, so the broker reaches it.
        """
        if self._since is None or self._mismatch.reason:
            return False
        return self._clock() - self._since >= self._leave_s

    def broker_left(self) -> None:
        """Note that the broker was left for the next one, which gets twice the time."""
        self._leave_s = min(2 * self._leave_s, LONGEST_LEAVE_S)

    def broker_away(self, event: Disconnected, config: AgentConfig) -> None:
        """Note that no answer can arrive until the broker is online again, and whether somebody has to act for it."""
        self._since = None
        self._away = event.reason
        remedy = event.remedy
        if not remedy:
            self._problem = None
            return
        message = event.reason.removesuffix(f"; {remedy}")
        if event.clocks_differ:
            message = f"{message}; this device's clock says {datetime.now(timezone.utc):%Y-%m-%d}"
            self._note(WRONG_CLOCK, message, f"{remedy}; where this one is right, the broker needs a new certificate")
            return
        if config.broker.user not in {None, config.id}:
            remedy = (
                f"{remedy}; or the broker does not let this user speak for id '{config.id}': give id and broker.user "
                "the same name"
            )
        self._note(LOGIN_REFUSED, message, remedy)

    def asks_rules(self) -> bool:
        """Return whether to ask now, once in a silence, whether the broker lets this agent speak."""
        since = self._since
        if since is None or self._has_asked or self._mismatch.reason or self._clock() - since < ASK_RULES_S:
            return False
        self._has_asked = True
        return True

    def rules_refuse(self, topics: Mapping[str, str], config: AgentConfig) -> None:
        """Note that the broker refuses these topics to this agent, with what it says."""
        if self._since is None or not topics:
            return
        user = config.broker.user
        speaker = "this login" if user is None else f"its MQTT user '{user}'"
        answer = next(iter(topics.values()))
        message = f"the broker does not let {speaker} speak for id '{config.id}' in '{config.federation}' ({answer})"
        remedy = (
            "give id and broker.user the same name, and see that the broker's rules are those of this federation: "
            f"'headwater password {config.id} --acl FILE' writes them"
        )
        self._note(TOPICS_REFUSED, message, remedy)
        log.error("topics_refused agent=%s topics=%s reason=%s; %s", config.id, ",".join(topics), message, remedy)

    def problem(self) -> Problem | None:
        """Return why no coordinator answers, where that is known and somebody has to act."""
        if self._mismatch.reason and self._since is not None:
            problem = problem_of("connection", ProtocolMismatch(self._mismatch.reason))
            if self._problem is None or self._problem.message != problem.message:
                self._problem = problem
        return self._problem

    def _note(self, error: str, message: str, remedy: str) -> None:
        current = self._problem
        if current is None or (current.error, current.message) != (error, message):
            at = datetime.now(timezone.utc).isoformat(timespec="seconds")
            self._problem = Problem("connection", error, "connection", message[:2000], "", remedy, at)

    def tell(self, config: AgentConfig) -> None:
        """Log that there is no answer: after a while, and then from time to time."""
        now = self._clock()
        since = self._since
        pause = ALONE_S if since == self._logged_at else ALONE_AGAIN_S
        if since is not None and now - self._logged_at >= pause:
            self._logged_at = now
            log.warning("unanswered seconds=%.0f %s", now - since, self.waits_for(config))

    def waits_for(self, config: AgentConfig) -> str:
        """Return what the agent waits for, and until when."""
        if self._since is None:
            reason = f" ({self._away})" if self._away else ""
            return (
                f"waits for the broker {config.broker.names}{reason}; tries until it is stopped. "
                "'edge-agent doctor --config FILE' tries the way to it"
            )
        if self._mismatch.reason:
            return (
                f"the coordinator at {config.broker.names} speaks another protocol ({self._mismatch.reason}); says "
                f"hello again in {self._mismatch.next_s():.0f} s, and ends when that goes on for {FINAL_S / 60:.0f} "
                "minutes"
            )
        if self._problem is not None:
            return f"{self._problem.message}; {self._problem.remedy}"
        if config.broker.user not in {None, config.id}:
            return (
                f"no coordinator answers: this agent's id is '{config.id}', its MQTT user '{config.broker.user}', and "
                "a broker with users lets an agent speak and listen under its own id alone; change id or broker.user. "
                "'edge-agent doctor --config FILE' tries the broker's rules"
            )
        return (
            f"no coordinator of federation '{config.federation}' answers at {config.broker.names}; says hello every "
            f"{HELLO_AGAIN_S:.0f} s until one does or the agent is stopped. Does 'headwater serve' run, with the same "
            "federation and broker? 'edge-agent doctor --config FILE' tries login and topics"
        )


class OtherClock:
    """How far this device's clock is from the coordinator's, for the device's own status."""

    def __init__(self, now: Callable[[], float], clock: Callable[[], float]) -> None:
        self._now = now
        self._clock = clock
        self._off_s = self._read_at = self._read = 0.0

    def heard(self, at: str) -> None:
        """Note what the coordinator's clock says (ISO 8601); what is no time says nothing."""
        try:
            theirs = datetime.fromisoformat(at)
        except (ValueError, OverflowError):
            return
        if theirs.tzinfo is not None:
            self._read_at = self._clock()
            self._read = self._now()
            self._off_s = self._read - theirs.timestamp()

    def problem(self) -> Problem | None:
        """Return why one of the two clocks has to be set; None from the moment on when this one was set right."""
        if abs(self._off_s) <= MOST_OFF_S:
            return None
        # The wall clock has moved further than time has passed: somebody has set it since the coordinator was heard.
        set_by_s = self._now() - self._read - (self._clock() - self._read_at)
        off_s = self._off_s + set_by_s
        if abs(off_s) <= MOST_OFF_S:
            return None
        difference = f"{abs(off_s) / 86_400:.1f} days" if abs(off_s) > 86_400 else f"{abs(off_s) / 3600:.1f} hours"
        direction = "ahead of" if off_s > 0 else "behind"
        message = f"this device's clock is {difference} {direction} the coordinator's"
        return Problem("connection", WRONG_CLOCK, "connection", message, "", SET_CLOCK, utc_text(self._read))


FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
FINAL_S = 300.0
LEAST_ANSWERS = 5
FORGOTTEN_S = 2 * LONGEST_PAUSE_S
"""Silence after which a mismatch is over: its sender is offline."""


class Mismatch:
    """``reason`` is what the other side speaks; empty while there is no mismatch."""

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self.clear()

    def clear(self) -> None:
        """Forget the mismatch: a coordinator that is understood has answered."""
        self.reason = ""
        self._since = self._heard_at = 0.0
        self._ask_at = float("inf")
        self._pause_s = FIRST_PAUSE_S
        self._has_asked = False
        self._answers = 0

    def note(self, reason: str) -> bool:
        """Note that something of another version has come; True when this is the first of it."""
        now = self._clock()
        is_new = not self.reason
        if is_new:
            self._since = now
            self._plan(now)
        elif self._has_asked:
            self._answers += 1
        self.reason = reason
        self._heard_at = now
        self._has_asked = False
        return is_new

    def is_final(self) -> bool:
        """Return whether asking again is in vain.

        That is so when the mismatch was heard for minutes, and as the answer to some hellos.
        """
        return self._answers >= LEAST_ANSWERS and self._heard_at - self._since >= FINAL_S

    def is_due(self) -> bool:
        """Return whether it is time for another hello, which then counts as said."""
        now = self._clock()
        if self.reason and now - self._heard_at >= FORGOTTEN_S:
            self.clear()
        if now < self._ask_at:
            return False
        self._has_asked = True
        self._plan(now)
        return True

    def next_s(self) -> float:
        """Return seconds until the next hello."""
        return max(0.0, self._ask_at - self._clock())

    def _plan(self, now: float) -> None:
        self._ask_at = now + self._pause_s * self._rng.uniform(0.5, 1.0)
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
