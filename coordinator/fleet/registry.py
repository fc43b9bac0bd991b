"""Agents and runs: who is online, who may have an id, what was rejected, and the commands and ids that are sent.

An agent that restarts has a new boot, and its predecessor is offline: the broker has said so, or it does not answer.
Only where the start that has the id and the one that claims it both answer are there two; the later one is rejected.
"""

from __future__ import annotations

import heapq
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from edge_agent import __version__
from edge_agent.core.errors import DuplicateId, MessageError, RunFailed
from edge_agent.core.time_and_text import show_time
from edge_agent.core.worst_tenth import mean_of_worst_tenth
from edge_agent.wire.messages import codec, down, fields, up
from edge_agent.wire.messages.fields import run_name
from edge_agent.wire.topics import Topics

from ..journal.entries import RunHeard, RunningFigures, RunRequested
from ..journal.store import Journal, run_number, utc_now
from ..state.command_keys import CommandKeys
from ..views.candidate import Candidate
from ..views.values import as_number
from .link_breaks import LinkBreaks

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""How long an offline agent is waited for when all others are done: it may only have lost its connection."""

HEARTBEATS_PER_S = 50.0
"""Of a fleet of thousands without jobs: 60 s between those of one of 3,000 agents, 120 s from 6,000 on."""

LONGEST_HEARTBEAT_S = 120.0
LEASE_HEARTBEATS = 3
"""A lease is as long as so many heartbeats."""

LATEST_TIME = 1e11
"""Seconds since 1970, beyond which a time that an agent says is none: it has no date."""

MOST_RSS_MB = 1e9
"""No device has a petabyte of memory: a hello that says so is damaged, or hostile."""

RETURN_S = 10.0
"""The same for agents not heard since the coordinator's start: they may be between two tries to connect."""


@dataclass(frozen=True)
class Figures:
    """What an agent last said of the models that it runs, and of its memory; None and empty: nothing yet."""

    acc: Mapping[str, float] = field(default_factory=dict)
    """Scope (local, global, personal) -> accuracy, 0..1."""

    head: str = ""
    better_alone: bool = False
    rss_mb: float | None = None
    support: int | None = None
    """Held-out samples behind the accuracies."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Figures:
        """Return the figures of an agent at the end of a run; ``record``: JSON of `coordinator.runs.results`."""
        accuracies = record.get("acc") or {}
        return cls(
            acc={scope: float(value) for scope, value in accuracies.items() if value is not None},
            head=str(record.get("head") or ""),
            better_alone=bool(record.get("better_alone")),
            rss_mb=record.get("rss_mb") or None,
            support=record.get("support") or None,
        )

    def with_update(self, metrics: Mapping[str, float | None]) -> Figures:
        """Return the figures with the accuracies that came with an update."""
        acc: dict[str, float] = {}
        for scope in ("local", "global", "personal"):
            value = metrics.get(f"acc.{scope}")
            if value is not None and 0 <= value <= 1:
                acc[scope] = value
        if not acc:
            return self
        return replace(self, acc={**self.acc, **acc})

    def with_report(self, message: up.Report) -> Figures:
        """Return the figures with what a report says of the bundle that the agent runs."""
        rss_mb = message.rss_mb or self.rss_mb
        if Candidate.from_report(message) is not None:
            # All figures are of a bundle that it went back from, but for that of its own pair beside it.
            before = message.metrics.get("acc.before")
            if before is None or not 0 <= before <= 1:
                return replace(self, rss_mb=rss_mb)
            return replace(self, acc={**self.acc, "personal": before}, rss_mb=rss_mb)
        acc = dict(self.acc)
        # Accuracies on no samples are none.
        if message.samples:
            scopes = {"local": message.acc_local, "global": message.acc_global, "personal": message.acc_personal}
            acc |= {scope: value for scope, value in scopes.items() if value is not None}
        return Figures(
            acc,
            head=message.head or self.head,
            better_alone=message.better_alone,
            rss_mb=rss_mb,
            support=message.support or self.support,
        )

    def to_fact(self) -> RunningFigures:
        """Return the figures for an entry of the journal."""
        return RunningFigures(
            acc=dict(self.acc),
            head=self.head,
            better_alone=self.better_alone,
            rss_mb=self.rss_mb,
            support=self.support,
        )

    def with_facts(self, facts: Mapping[str, object]) -> Figures:
        """Return the figures with the memory that a hello says; a value that is no size is passed over."""
        rss_mb = facts.get("rss_mb")
        if not isinstance(rss_mb, float | int) or isinstance(rss_mb, bool):
            return self
        if not 0 < rss_mb < MOST_RSS_MB:
            return self
        return replace(self, rss_mb=float(rss_mb))


def as_time(value: object) -> float | None:
    """Return a time that an agent has said, in seconds since 1970; None for what is none."""
    number = as_number(value)
    return number if number is not None and 0 <= number < LATEST_TIME else None


@dataclass
class Member:
    """One agent as it described itself, and when it was last heard."""

    id: str
    tier: str
    boot: str
    software: str
    samples: int
    bundle_id: str
    heard_at: float = 0.0
    offline_at: float | None = None
    notes: dict[str, str] = field(default_factory=dict)
    """Notes for the status, by subject."""

    fault: dict[str, str] | None = None
    """Its last fault, if that still stands: error, message, remedy, and when it was reported."""

    figures: Figures = field(default_factory=Figures)
    candidate: Candidate | None = None
    """A bundle that it has tried last and does not run."""

    condition: fields.ConditionName = "ok"
    stalled_at: float = 0.0

    heartbeat_s: float = 0.0
    """The least time between its heartbeats without a job, as last sent to it."""

    asked_at: float | None = None
    """When it was asked to do a task, until a heartbeat says that it has none; then its heartbeats are its own."""

    inputs_since: float | None = None
    """When the inputs of its server changed, in seconds since 1970; 0: they are as fitted; None: it does not say."""

    connection: int = 0
    """Number of its connection to the broker; the last will of an earlier one says nothing of it."""

    breaks: LinkBreaks = field(default_factory=LinkBreaks)
    """How often its connection to the broker has broken."""

    @property
    def is_present(self) -> bool:
        """Whether it counts as online."""
        return self.offline_at is None

    @property
    def is_well(self) -> bool:
        """Whether it is online and there is nothing to say about it."""
        has_nothing_to_say = self.fault is None and self.candidate is None and not self.notes
        return self.is_present and self.condition == "ok" and has_nothing_to_say and not self.inputs_since


class Roster:
    """All agents heard of since the start. An agent that is silent for ``lease_s`` seconds counts as offline."""

    def __init__(self, clock: Callable[[], float], lease_s: float) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._ready: set[str] = set()
        self._sorted: dict[str | None, list[str]] = {}
        self._leases: list[tuple[float, str]] = []
        """A heap of (time, agent): its lease ends then or later."""

        self._lease_at: dict[str, float] = {}
        """The entry of each agent that counts; others are of earlier leases."""

        self._connected_at: float | None = clock()
        self._deaf_since = 0.0
        self._deaf_s = 0.0
        self._faults = Rejections(clock)
        self._before = dict[str, Figures]()
        self._candidates = dict[str, Candidate]()
        """What agents had tried before this start, by their ids."""

        self._accuracies: dict[str, dict[str, float]] | None = None

    def remember(self, figures: Mapping[str, Figures], candidates: Mapping[str, Candidate]) -> None:
        """Take what agents said before this start, of what they run and of what they tried, by their ids."""
        self._before = dict(figures)
        self._candidates = dict(candidates)

    def hello(self, agent: str, message: up.Hello) -> Member:
        """Note that an agent introduces itself (again), and return what is known of it."""
        member = Member(agent, message.tier, message.boot, message.software, message.samples, message.bundle_id)
        member.connection = message.connection
        member.inputs_since = as_time(message.facts.get("inputs_since"))
        before = self._members.get(agent)
        figures = self._before.pop(agent, Figures()) if before is None else before.figures
        member.figures = figures.with_facts(message.facts)
        candidate = self._candidates.pop(agent, None) if before is None else before.candidate
        if candidate is not None and (candidate.bundle_id != member.bundle_id or not member.bundle_id):
            member.candidate = candidate
        self._accuracies = None
        if before is not None:
            member.samples = member.samples or before.samples
            member.breaks = before.breaks
            if self._has_lost_connection(before, member):
                member.breaks.add(self._clock(), utc_now())
            if before.boot == member.boot:
                member.notes = before.notes
                member.fault = before.fault
                member.condition = before.condition
                member.stalled_at = before.stalled_at
                member.asked_at = before.asked_at
        member.heard_at = self._clock()
        self._members[agent] = member
        self._sorted.clear()
        self._enter_lease(member, member.heard_at)
        self.note_condition(agent, message.condition)
        return member

    def trained(self, agent: str, metrics: Mapping[str, float | None]) -> None:
        """Note the accuracies that an agent sent with an update."""
        member = self._members.get(agent)
        if member is not None:
            member.figures = member.figures.with_update(metrics)
            self._accuracies = None

    def accuracies(self) -> dict[str, dict[str, float]]:
        """Scope -> mean and worst tenth of the newest accuracies, and of how many agents; kept until one changes."""
        if self._accuracies is None:
            self._accuracies = {}
            for scope in ("local", "global", "personal"):
                values = [m.figures.acc[scope] for m in self._members.values() if scope in m.figures.acc]
                if not values:
                    continue
                self._accuracies[scope] = {
                    "mean": fmean(sorted(values)),
                    "worst_tenth": mean_of_worst_tenth(values),
                    "agents": len(values),
                }
        return self._accuracies

    def reported(self, agent: str, message: up.Report) -> bool:
        """Note samples and encoder of an agent, and why if it is not the new one; False for an agent not listed."""
        member = self._members.get(agent)
        if member is None:
            return False
        member.samples = message.samples or member.samples
        member.figures = member.figures.with_report(message)
        self._accuracies = None
        candidate = Candidate.from_report(message)
        if message.bundle_id:
            member.bundle_id = message.bundle_id
            member.candidate = None
        if candidate is not None:
            member.candidate = candidate
            log.warning("rolled_back agent=%s run=%s why=%s", agent, message.run, message.rolled_back)
        return True

    def failed(self, agent: str, message: up.Fault) -> dict[str, str] | None:
        """Note an agent's fault; it stands until the agent reports the condition "ok".

        Returns it where it is worth a line in the log, and not one of many of the same.
        """
        times = self._faults.note(f"{agent}: {message.error}: {message.message}")
        level = logging.DEBUG if times is None else logging.WARNING
        fault = {
            "error": message.error,
            "code": message.code,
            "message": message.message,
            "remedy": message.remedy,
        }
        form = "agent_fault agent=%s times=%d error=%s code=%s message=%s remedy=%s"
        log.log(level, form, agent, times or 0, *fault.values())
        member = self._members.get(agent)
        if member is not None:
            self.note_condition(agent, "stalled" if message.error == fields.DISK_ERROR else "fault")
            member.fault = {**fault, "at": utc_now().isoformat(timespec="seconds")}
        return None if times is None else fault

    def note_condition(self, agent: str, condition: fields.ConditionName) -> bool:
        """Note the condition of an agent; False where it has a fault that has not been received here."""
        member = self._members.get(agent)
        if member is None:
            return True
        if condition == "stalled" != member.condition:
            member.stalled_at = self._clock()
        member.condition = condition
        if condition == "ok":
            member.fault = None
        self._note_ready(member)
        return condition == "ok" or member.fault is not None

    def heard(self, agent: str, boot: str | None = None) -> bool:
        """Note that an agent is online; False when it has to send a hello first (unknown, offline, or restarted)."""
        member = self._members.get(agent)
        if member is None or not member.is_present or (boot is not None and boot != member.boot):
            return False
        member.heard_at = self._clock()
        return True

    def mark_offline(self, agent: str) -> None:
        """Its will was published, or it said goodbye."""
        member = self._members.get(agent)
        if member is not None and member.is_present:
            member.offline_at = self._clock()
            self._note_ready(member)

    def expire(self, unread_s: float = 0.0) -> list[str]:
        """Return the agents whose lease has just expired.

        None expires while the coordinator itself cannot be reached, and none because of messages that wait here unread:
        silence is known up to the arrival of the oldest of them only.

        Args:
            unread_s: how long the oldest message that has arrived here has waited to be handled.
        """
        now = self._clock()
        since = self._connected_at
        if since is None:
            return []
        heard_until = now - unread_s
        silent = []
        while self._leases and self._leases[0][0] < heard_until:
            at, agent = heapq.heappop(self._leases)
            if self._lease_at.get(agent) != at:
                continue
            del self._lease_at[agent]
            member = self._members[agent]
            if not member.is_present:
                continue
            if self._lease_end(member, since) >= heard_until:
                self._enter_lease(member, since)
            else:
                member.offline_at = now
                self._note_ready(member)
                silent.append(agent)
        return sorted(silent)

    def __len__(self) -> int:
        """Return how many agents have been heard of."""
        return len(self._members)

    def heartbeat_s(self) -> float:
        """Least time between heartbeats of an agent without a job; 0: as the agent is configured.

        A small fleet sends as many as its agents like; that of thousands about `HEARTBEATS_PER_S` in total.
        """
        stretched_s = min(LONGEST_HEARTBEAT_S, len(self._ready) / HEARTBEATS_PER_S)
        # Where a lease lasts as long anyway, there is nothing to stretch.
        if stretched_s <= self.lease_s / LEASE_HEARTBEATS:
            return 0.0
        return stretched_s

    def new_heartbeat_s(self, agent: str) -> float | None:
        """Return the `heartbeat_s` to send to an agent now; None where the one that it has is about right."""
        member = self._members[agent]
        now_s = self.heartbeat_s()
        # Each agent that comes or goes changes it a little: half as much more, or less, is not worth a message.
        if 2 / 3 * member.heartbeat_s <= now_s <= 3 / 2 * member.heartbeat_s:
            return None
        self.note_heartbeat_s(agent, now_s)
        return now_s

    def note_heartbeat_s(self, agent: str, heartbeat_s: float) -> None:
        """Note what is sent to the agent."""
        self._members[agent].heartbeat_s = heartbeat_s

    def note_asked(self, agent: str) -> None:
        """Note that the agent was asked to do a task: it answers, and sends heartbeats as it is configured."""
        member = self._members.get(agent)
        if member is not None:
            member.asked_at = self._clock()
            self._enter_lease(member, member.asked_at)

    def note_idle(self, agent: str) -> None:
        """Note that the agent says that it has no task."""
        self._members[agent].asked_at = None

    def get(self, agent: str) -> Member | None:
        """Return what is known of an agent."""
        return self._members.get(agent)

    @property
    def ready(self) -> AbstractSet[str]:
        """Ids of the agents that are online and can write to their disks."""
        return self._ready

    def present(self, tier: str | None = None) -> list[str]:
        """Return the agents that are `ready`, sorted; of one tier where given."""
        if tier not in self._sorted:
            members = map(self._members.__getitem__, sorted(self._ready))
            self._sorted[tier] = [member.id for member in members if tier in {None, member.tier}]
        return list(self._sorted[tier])

    def members(self) -> list[Member]:
        """Return all agents heard of, sorted by id."""
        return [self._members[agent] for agent in sorted(self._members)]

    def connected(self) -> None:
        """Note that the broker is reached (again): agents get the time of a lease to be heard again."""
        self._deaf_s = self.deaf_s
        self._connected_at = self._clock()

    def disconnected(self) -> None:
        """Note that nothing is received: it cannot be known who is online, until it is `connected`."""
        if self._connected_at is not None:
            self._connected_at = None
            self._deaf_since = self._clock()

    @property
    def deaf_s(self) -> float:
        """Seconds since the start in which the coordinator could receive nothing: no agent's time runs meanwhile."""
        return self._deaf_s + (self._clock() - self._deaf_since if self._connected_at is None else 0.0)

    def heard_s(self) -> float:
        """Return the clock of agents' deadlines, in seconds: it stands still without a connection to the broker."""
        return self._clock() - self.deaf_s

    def patience(self, agent: str) -> float | None:
        """Return the seconds that an offline or stalled agent is still waited for (0 or less: no more), else None."""
        member = self._members.get(agent)
        if member is None:
            offline_at = self._connected_at
            patience_s = RETURN_S
        else:
            is_stalled = member.is_present and member.condition == "stalled"
            offline_at = member.stalled_at if is_stalled else member.offline_at
            patience_s = PATIENCE_S
            if offline_at is None:
                return None
        if offline_at is None or self._connected_at is None:
            return RETURN_S
        return offline_at + patience_s - self._clock()

    def _lease_end(self, member: Member, since: float) -> float:
        """Return when the lease of an agent ends that is not heard from now on; it counts from ``since`` or later."""
        if member.asked_at is not None:
            return max(member.heard_at, since, member.asked_at) + self.lease_s
        return max(member.heard_at, since) + max(self.lease_s, LEASE_HEARTBEATS * member.heartbeat_s)

    def _enter_lease(self, member: Member, since: float) -> None:
        until = self._lease_end(member, since)
        if until < self._lease_at.get(member.id, float("inf")):  # an earlier entry leads to this one when it is due
            self._lease_at[member.id] = until
            heapq.heappush(self._leases, (until, member.id))

    def _has_lost_connection(self, before: Member, member: Member) -> bool:
        """Return whether an agent's connection broke, while its program went on and the broker was there.

        Where the coordinator has lost its own connection since it heard the agent, the broker was away.
        """
        is_same_start = before.boot == member.boot
        is_new_connection = before.connection != member.connection
        was_broker_here = self._connected_at is not None and before.heard_at >= self._connected_at
        return is_same_start and is_new_connection and was_broker_here

    def _note_ready(self, member: Member) -> None:
        is_ready = member.is_present and member.condition != "stalled"
        was_ready = member.id in self._ready
        if is_ready == was_ready:
            return
        if is_ready:
            self._ready.add(member.id)
        else:
            self._ready.discard(member.id)
        self._sorted.clear()


ANSWER_S = 1.5
"""How long the start that has an id may take to answer; less than an agent's pause between two hellos."""

MAX_CLAIMS = 1000
CLONE_RETURNS = 2
"""How often a start that was replaced is back when it counts as a clone: a late message of it may look like one."""

MOST_STARTS = 8
"""Starts of one agent that are remembered."""


@dataclass(frozen=True)
class _Claim:
    """Another start that claims the id."""

    boot: str
    question: str
    since: float


class DuplicateIds:
    """Who may have an id. Call `accept` for every hello."""

    def __init__(self, roster: Roster, send: Callable[[str, fields.Command], None], clock: Callable[[], float]) -> None:
        self._roster = roster
        self._send = send
        self._clock = clock
        self._claims: dict[str, _Claim] = {}
        self._rejected: dict[str, str] = {}
        self._starts: dict[str, dict[str, int]] = {}
        """Agent -> the starts that had its id and their newest connections, the first start first."""

        self._returns: dict[str, int] = {}

    def accept(self, agent: str, message: up.Hello) -> bool:
        """Return whether this start has the id now; if not, an answer of the start that has it is pending."""
        member = self._roster.get(agent)
        if member is None or member.boot == message.boot:
            return self._accept(agent, member, message)
        if self._is_clone(agent, member, message):
            return False
        accepted = self._accept(agent, member, message)
        if accepted:
            starts = self._starts.setdefault(agent, {})
            starts[member.boot] = member.connection
            starts[message.boot] = message.connection
            if len(starts) > MOST_STARTS:
                del starts[next(iter(starts))]
        return accepted

    def _is_clone(self, agent: str, member: Member, message: up.Hello) -> bool:
        """Return whether two starts take the id from each other; the one that had it first keeps it.

        A broker that takes an agent's id from its certificate ends the session of the other one at each connect, so
        that never both can answer. But a start that was replaced does not come back with a new connection, twice.
        """
        starts = self._starts.get(agent, {})
        if message.connection <= starts.get(message.boot, message.connection):
            return False
        starts[message.boot] = message.connection
        self._returns[agent] = self._returns.get(agent, 0) + 1
        if self._returns[agent] < CLONE_RETURNS or message.boot == next(iter(starts)):
            return False
        self._reject(agent, member, message.boot, "take the id from each other")
        return True

    def _reject(self, agent: str, member: Member, boot: str, conflict: str) -> None:
        """Reject a start for good; ``conflict``: what both starts did, as the rest of a sentence."""
        log.warning("duplicate_id agent=%s has=%s rejected=%s: both %s", agent, member.boot, boot, conflict)
        at = show_time(utc_now())
        member.notes["duplicate"] = (
            f"another agent with the id '{agent}' (start {boot}) was rejected at {at}: both were alive; "
            "give one of them another id"
        )
        self._rejected[agent] = boot
        self._send(agent, _rejection(member, boot, conflict))

    def _accept(self, agent: str, member: Member | None, message: up.Hello) -> bool:
        """Return whether the start that says hello has the id, by asking the one that had it whether it is alive."""
        # Nobody has the id now.
        if member is None or not member.is_present:
            self._claims.pop(agent, None)
            self._rejected.pop(agent, None)
            return True
        claim = self._claims.get(agent)
        # The start that has the id keeps it. If this answers the question, both it and the claimant are alive.
        if member.boot == message.boot:
            if claim is not None and message.answers == claim.question:
                del self._claims[agent]
                self._reject(agent, member, claim.boot, "answered at once")
            return True
        return self._accept_claim(agent, member, message, claim)

    def _accept_claim(self, agent: str, member: Member, message: up.Hello, claim: _Claim | None) -> bool:
        """Return whether another start than the one that has the id gets it: that one has not answered in time."""
        if self._rejected.get(agent) == message.boot:
            if not message.answers:  # it has not heard
                self._send(agent, _rejection(member, message.boot))
            return False
        # The first hello of this start makes it a claimant, and the other one is asked.
        if claim is None or claim.boot != message.boot:
            self._ask(agent, message.boot)
            return False
        if self._clock() - claim.since < ANSWER_S:
            return False
        del self._claims[agent]
        log.info("agent_restarted agent=%s boot=%s before=%s", agent, message.boot, member.boot)
        return True

    def is_claiming(self, agent: str, boot: str) -> bool:
        """Return whether this start does not have the id (yet), so that its messages do not count."""
        claim = self._claims.get(agent)
        return (claim is not None and claim.boot == boot) or self._rejected.get(agent) == boot

    def _ask(self, agent: str, boot: str) -> None:
        if max(len(self._claims), len(self._rejected)) >= MAX_CLAIMS:
            self._claims.clear()
            self._rejected.clear()
        question = secrets.token_hex(8)
        self._claims[agent] = _Claim(boot, question, self._clock())
        self._send(agent, down.Who(question=question))


def _rejection(member: Member, boot: str, conflict: str = "answered the same question") -> down.Refused:
    """Return the message that rejects a start; ``conflict``: what both starts did, as the rest of a sentence."""
    message = (
        f"the id '{member.id}' is in use: this agent (start {boot}) and one that was here before (start {member.boot}, "
        f"tier {member.tier}) both {conflict}, so both are alive; give one of them another id in its "
        "configuration, or stop it"
    )
    return down.Refused(error=DuplicateId.__name__, message=message, whom=boot)


AGAIN_S = 60.0
"""The same rejection is logged again after this time, with its count."""

LINES_AT_ONCE = 30
"""Lines within `AGAIN_S` in total: a thousand unknown senders cause no thousand lines."""

MAX_COUNTED = 1000
"""Different rejections that are counted: a bound on the memory that unknown senders can use."""


class Rejections:
    """Rejections by what they are about. ``total`` counts all since the start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.total = 0
        self.counts: dict[str, int] = {}
        self._logged_at: dict[str, float] = {}
        self._window = float("-inf")
        self._lines = 0

    def note(self, what: str, times: int = 1) -> int | None:
        """Count so many; how often it has happened if that is worth a line in the log now, else None."""
        if len(self.counts) >= MAX_COUNTED and what not in self.counts:
            self.counts.clear()
            self._logged_at.clear()
        self.total += times
        self.counts[what] = self.counts.get(what, 0) + times
        now = self._clock()
        if now - self._window >= AGAIN_S:
            self._window = now
            self._lines = 0
        if self._lines >= LINES_AT_ONCE or now - self._logged_at.get(what, float("-inf")) < AGAIN_S:
            return None
        self._lines += 1
        self._logged_at[what] = now
        return self.counts[what]

    def top(self, most: int = 5) -> dict[str, int]:
        """Return the most frequent ones with their counts, the most frequent first."""
        return dict(sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))[:most])


MOST_SKIPPED_NAMES = 1000
"""How far the word of one agent may raise the number of the next run: a hostile agent could use up all numbers."""


class RunIds:
    """Names of runs in one journal, such as ``run-0001``, and the ids that no other journal has."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known: dict[str, str] = {}
        self._skips_names = False
        self._believed: set[str] = set()
        """Agents whose word has moved the number of the next run since the start."""

    def skip_names_that_agents_know(self) -> None:
        """Give no new run the name of one that an agent worked for and this journal, which began as a copy, lacks."""
        self._skips_names = True

    def note_elsewhere(self, agent: str, run_id: str) -> None:
        """Note that an agent has worked for a run that was requested after the backup that this journal began as.

        Agents know runs by their ids, so nothing is mixed up; people and figures know them by their names.
        """
        number = run_number(run_name(run_id))
        if not self._skips_names or agent in self._believed or number is None:
            return
        newest = self._journal.newest_run()
        if newest < number <= newest + MOST_SKIPPED_NAMES:
            self._believed.add(agent)
            self._journal.append(RunHeard(newest_run=number), agent=agent)
            log.info("run_names_skipped until=%s: agent %s has worked for it", run_name(run_id), agent)

    def check(self, name: str) -> None:
        """Return quietly when agents can work for the run of that name.

        Raises:
            RunFailed: it was requested with a version that gave runs no ids, so its updates cannot be recognised.
        """
        if not self._id(name):
            raise RunFailed(
                f"{name} was requested by an older version, which gave runs no id that agents know them by; "
                "ask for it again with 'headwater run'"
            )

    def of(self, name: str) -> str:
        """Return the id of a run, or its name where the journal has none: old releases are still offered."""
        return self._id(name) or name

    def name(self, run_id: str) -> str | None:
        """Return the name of the run with that id; None when it was not requested here."""
        name = run_name(run_id)
        return name if self._id(name) == run_id else None

    def _id(self, name: str) -> str:
        if name not in self._known:
            for entry in self._journal.entries(name, kinds=("run_requested",)):
                requested = entry.fact
                id_ = requested.id if isinstance(requested, RunRequested) else None
                self._known[name] = id_ or ""
        return self._known.get(name, "")


class RunNames(RunIds):
    """Names instead of ids: in a simulation there is no other coordinator, and clients have their own folder."""

    def _id(self, name: str) -> str:
        return name


class CommandSender:
    """Sends the messages of one coordinator, from `serve_as` on.

    With ``keys`` they carry a proof of their sender, which agents that have a key ask for.
    """

    def __init__(
        self,
        topics: Topics,
        publish: Callable[[str, bytes], None],
        run_ids: RunIds,
        boot: str,
        keys: CommandKeys | None = None,
    ) -> None:
        self._topics = topics
        self._publish = publish
        self._run_ids = run_ids
        self._boot = boot
        self._keys = keys
        self.federation = ""
        self.epoch = 0
        self._seq = 0
        self._epochs: dict[str, int] = {}
        self._protocols: dict[str, int] = {}

    def serve_as(self, federation: str, epoch: int) -> None:
        """Messages are of this federation and this start of its coordinator from now on."""
        self.federation = federation
        self.epoch = epoch

    def speaks(self, agent: str, protocol: int) -> None:
        """Messages to this agent are of that version of the protocol from now on; to others, of the oldest."""
        self._protocols[agent] = protocol

    def send(self, agent: str, message: fields.Command) -> None:
        """One control message to one agent; a run in it is named as the journal names it."""
        run = getattr(message, "run", "")
        self._send(agent, message, **({"run": self._run_ids.of(run)} if run else {}))

    def announce(self) -> None:
        """Announce this coordinator to all agents."""
        payload = self._stamped(down.Announce(software=__version__), self.epoch)
        self._publish(self._topics.announce, payload if self._keys is None else self._keys.signed(payload))

    def announce_to(self, agent: str) -> None:
        """Announce it to one agent that follows another federation, which may find its own coordinator offline."""
        self._send(agent, down.Announce(software=__version__))

    def to_coordinators(self, message: down.Present) -> None:
        """Send to other coordinators of this federation."""
        self._publish(self._topics.coordinators, self._stamped(message, self.epoch))

    def may_give(self, agent: str, epoch: int, is_alone: Callable[[], bool]) -> bool:
        """Return whether an agent that knows that epoch may be sent commands; where it is higher, they carry it, too.

        A state folder that was put back from a backup counts from an older start. But as long as a coordinator with the
        higher epoch may be online, that one counts, and the agent sends its hello again.
        """
        if epoch <= self.epoch:
            self._epochs.pop(agent, None)
            return True
        if not is_alone():
            return False
        if self._epochs.get(agent) != epoch:
            log.warning("epoch_behind agent=%s knows=%d own=%d: put back from a backup?", agent, epoch, self.epoch)
        self._epochs[agent] = epoch
        return True

    def with_run_name(self, agent: str, message: fields.Control) -> fields.Control:
        """Return an agent's message with its run as the journal names it; an update of an unknown run gets its receipt.

        Raises:
            MessageError: the run was never requested in this state folder.
        """
        run_id = getattr(message, "run", "")
        if not run_id:
            return message
        name = self._run_ids.name(run_id)
        if name is not None:
            return message.model_copy(update={"run": name})
        self._run_ids.note_elsewhere(agent, run_id)
        if isinstance(message, up.Heartbeat | up.Fault):  # its condition counts; the job is of another coordinator
            return message.model_copy(update={"run": "", "round": 0})
        if isinstance(message, up.UpdateManifest):
            reason = f"unknown run {fields.run_name(run_id)}: it is of another coordinator or state folder"
            self._send(agent, down.Receipt(run=run_id, digest=message.blob.digest, accepted=False, reason=reason))
        raise MessageError(f"{type(message).__name__} about a run that was never asked for here")

    def _send(self, agent: str, message: fields.Command, **changes: str) -> None:
        epoch = max(self.epoch, self._epochs.get(agent, 0))
        payload = self._stamped(message, epoch, self._protocols.get(agent, fields.OLDEST_PROTOCOL), **changes)
        self._publish(self._topics.down(agent), payload if self._keys is None else self._keys.proven(agent, payload))

    def _stamped(
        self, message: fields.Command, epoch: int, protocol: int = fields.OLDEST_PROTOCOL, **changes: str
    ) -> bytes:
        self._seq += 1
        stamp = {"boot": self._boot, "seq": self._seq, "federation": self.federation, "epoch": epoch}
        return codec.encode(message.model_copy(update={**changes, **stamp}), protocol)


MOST_RECEIPTS = 4096
"""Of updates of rounds that are over, for agents that offer them again."""


class ReceiptMemory:
    """Answers a repeated manifest of an old round, which is in the journal and in no other memory."""

    def __init__(self, send: Callable[[str, fields.Command], None]) -> None:
        self._send = send
        self._given: OrderedDict[tuple[str, fields.JobKey, str], down.Receipt] = OrderedDict()
        self._about: tuple[str, fields.JobKey, str] | None = None

    def answer(self, agent: str, message: up.UpdateManifest, look: Callable[[str, up.UpdateManifest], None]) -> None:
        """Send the receipt that was given before, or let ``look`` find it, which sends it by `send`.

        Only for manifests that the open round does not take: their answer never changes.
        """
        key = (agent, down.job_key(message), message.blob.digest)
        receipt = self._given.get(key)
        if receipt is not None:
            self._given.move_to_end(key)
            self._send(agent, receipt)
            return
        self._about = key
        try:
            look(agent, message)
        finally:
            self._about = None

    def send(self, agent: str, message: fields.Command) -> None:
        """Send a message of the collector; a receipt that `answer` has asked for is remembered."""
        if self._about is not None and isinstance(message, down.Receipt):
            self._given[self._about] = message
            if len(self._given) > MOST_RECEIPTS:
                self._given.popitem(last=False)
        self._send(agent, message)
