"""Who is online: all agents heard of since the coordinator's start, their leases, and which of them can be asked.

An agent that restarts has a new boot, and its predecessor is offline: the broker has said so, or it does not answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from statistics import fmean

from edge_agent.core.worst_tenth import mean_of_worst_tenth
from edge_agent.wire.messages import fields, up

from ..journal.store import utc_now
from ..state.fault_log import Fault
from ..state.status_file import FleetAccuracy
from ..views.candidate import Candidate
from .leases import Leases
from .members import Figures, Member, as_relay, as_time
from .rejections import Rejections

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""How long an offline agent is waited for when all others are done: it may only have lost its connection."""

RETURN_S = 10.0
"""The same for agents not heard since the coordinator's start: they may be between two tries to connect."""

HEARTBEATS_PER_S = 50.0
"""Of a fleet of thousands without jobs: 60 s between those of one of 3,000 agents, 120 s from 6,000 on."""

LONGEST_HEARTBEAT_S = 120.0
LEASE_HEARTBEATS = 3
"""A lease is as long as so many heartbeats."""


def stretched_heartbeat_s(agents: int, lease_s: float) -> float:
    """Return the least seconds between heartbeats of one of so many agents without jobs; 0: as it is configured.

    Args:
        agents: How many agents wait for a job.
        lease_s: Seconds of the lease that the coordinator is configured with.
    """
    stretched_s = min(LONGEST_HEARTBEAT_S, agents / HEARTBEATS_PER_S)
    # Where a lease lasts as long anyway, there is nothing to stretch.
    if stretched_s <= lease_s / LEASE_HEARTBEATS:
        return 0.0
    return stretched_s


class Roster:
    """All agents heard of since the start. An agent that is silent for ``lease_s`` seconds counts as offline."""

    def __init__(self, clock: Callable[[], float], lease_s: float) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._ready: set[str] = set()
        self._sorted: dict[str | None, list[str]] = {}
        self._leases = Leases()
        self._connected_at: float | None = clock()
        self._deaf_since = 0.0
        self._deaf_s = 0.0
        self._faults = Rejections(clock)
        self._before = dict[str, Figures]()
        self._candidates = dict[str, Candidate]()
        """What agents had tried before this start, by their ids."""

        self._accuracies: dict[str, FleetAccuracy] | None = None

    def remember(self, figures: Mapping[str, Figures], candidates: Mapping[str, Candidate]) -> None:
        """Take what agents said before this start, of what they run and of what they tried, by their ids."""
        self._before = dict(figures)
        self._candidates = dict(candidates)

    def hello(self, agent: str, message: up.Hello) -> Member:
        """Note that an agent introduces itself (again), and return what is known of it."""
        member = Member(agent, message.tier, message.boot, message.software, message.samples, message.bundle_id)
        member.connection = message.connection
        member.inputs_since = as_time(message.facts.get("inputs_since"))
        member.relay = as_relay(message.facts.get(fields.RELAY))
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

    def accuracies(self) -> Mapping[str, FleetAccuracy]:
        """Return scope -> the newest accuracies of all agents; the same object until one changes."""
        if self._accuracies is None:
            self._accuracies = {}
            for scope in ("local", "global", "personal"):
                values = [m.figures.acc[scope] for m in self._members.values() if scope in m.figures.acc]
                if not values:
                    continue
                self._accuracies[scope] = FleetAccuracy(fmean(sorted(values)), mean_of_worst_tenth(values), len(values))
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

    def failed(self, agent: str, message: up.Fault) -> Fault | None:
        """Note an agent's fault; it stands until the agent reports the condition "ok".

        Returns:
            The fault where it is worth a line in the log; None for one of many of the same.
        """
        times = self._faults.note(f"{agent}: {message.error}: {message.message}")
        level = logging.DEBUG if times is None else logging.WARNING
        at = utc_now().isoformat(timespec="seconds")
        fault = Fault(message.error, message.message, message.remedy, at, message.code)
        form = "agent_fault agent=%s times=%d error=%s code=%s message=%s remedy=%s"
        log.log(level, form, agent, times or 0, fault.error, fault.code, fault.message, fault.remedy)
        member = self._members.get(agent)
        if member is not None:
            self.note_condition(agent, "stalled" if message.error == fields.DISK_ERROR else "fault")
            member.fault = fault
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
        for agent in self._leases.take_due(heard_until):
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
        return stretched_heartbeat_s(len(self._ready), self.lease_s)

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
        self._leases.note_end(member.id, self._lease_end(member, since))

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
