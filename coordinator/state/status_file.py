"""``status.json``: what the coordinator last wrote about its work, for commands, pages and monitoring beside it.

The coordinator writes the file each second (`coordinator.service.status`); nobody asks it anything. `Status` is what a
reader gets: a value of another form, as a coordinator of another version may write it, counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from edge_agent.core import formats
from edge_agent.core.storage import read_regular

from ..views.values import as_number, as_text
from .fault_log import Fault
from .fleet_rows import HeardAgent
from .privacy_spent import PrivacySpent

STATUS = "status.json"
EVERYONE = "agents.json"
"""The file with all agents of a fleet that has more than `MOST_LISTED`."""

CLOCKS_APART_S = 60.0
"""Seconds between two clocks from which people are told: logs and times of entries mislead, and URLs end too early."""

MOST_LISTED = 200
"""The most agents that ``status.json`` lists."""


# --- what it says ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Awaited:
    """What the coordinator waits for."""

    what: str = ""
    whom: tuple[str, ...] = ()
    """Agents; of many, only some."""

    count: int = 0
    """Agents that are waited for, in all."""

    seconds_left: float | None = None
    """From the time of the status to the end of the wait at the latest; None: there is no limit."""

    is_idle: bool = False
    """Whether nothing is to be done until a person starts something."""

    @classmethod
    def from_body(cls, body: object) -> Awaited | None:
        """Return what an object of the status says; None where there is none."""
        if not isinstance(body, Mapping) or not body:
            return None
        return cls(
            what=as_text(body.get("for") or ""),
            whom=_texts(body.get("whom")),
            count=int(as_number(body.get("count")) or 0),
            seconds_left=as_number(body.get("seconds_left")),
            is_idle=body.get("idle") is True,
        )


@dataclass(frozen=True)
class RunUnderWay:
    """The run that the coordinator works on, and its open round."""

    id: str
    round: int | None = None
    """The round that is open, or whose job is on offer; 0 or None: none is."""

    rounds: int | None = None
    """How many the run has; None: not said, as of a run that is stalled before its first round."""

    cohort: tuple[str, ...] = ()
    """Agents of the open round; of many, only some."""

    cohort_size: int = 0
    accepted: tuple[str, ...] = ()
    """Agents whose update is accepted; of many, only some."""

    accepted_count: int = 0
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Agent -> why it has no update."""

    left_out: Mapping[str, str] = field(default_factory=dict)
    """Agent -> why the run does not ask it."""

    privacy: PrivacySpent | None = None
    """None: the run adds no noise."""

    stall: str | None = None
    """Why the run waits for its disk or files; None: it does not."""

    @classmethod
    def from_body(cls, body: object) -> RunUnderWay | None:
        """Return the run that an object of the status describes; None where there is none."""
        if not isinstance(body, Mapping) or not body:
            return None
        stalled = body.get("stalled")
        return cls(
            id=as_text(body.get("id") or ""),
            round=_whole(body.get("round")),
            rounds=_whole(body.get("rounds")),
            cohort=_texts(body.get("cohort")),
            cohort_size=_whole(body.get("cohort_size")) or 0,
            accepted=_texts(body.get("accepted")),
            accepted_count=_whole(body.get("accepted_count")) or 0,
            rejected={as_text(agent): as_text(reason) for agent, reason in _object(body.get("rejected")).items()},
            left_out={as_text(agent): _reason(note) for agent, note in _object(body.get("left_out")).items()},
            privacy=PrivacySpent.from_body(body.get("privacy")),
            stall=as_text(stalled.get("reason") or "") if isinstance(stalled, Mapping) else None,
        )


@dataclass(frozen=True)
class FleetCounts:
    """How many agents the coordinator knows, and how many of them are online, have a fault, or are stalled."""

    agents: int = 0
    online: int = 0
    fault: int = 0
    stalled: int = 0


@dataclass(frozen=True)
class FleetAccuracy:
    """An accuracy over the agents that have reported it, each by its newest report."""

    mean: float
    """0..1"""

    worst_tenth: float
    """0..1, mean of the lowest tenth of the agents, at least of one."""

    agents: int


@dataclass(frozen=True)
class RefusedDevice:
    """A device that was kept out in the last minutes; its id is empty where it has not said who it is."""

    id: str
    by: str
    """``broker``, ``enrolment`` or ``coordinator``."""

    why: Fault
    times: int

    @classmethod
    def from_body(cls, body: Mapping[str, object]) -> RefusedDevice:
        """Return the device that an object of the status describes."""
        why = Fault.from_body({**body, "code": None})
        return cls(
            id=as_text(body.get("id") or ""),
            by=as_text(body.get("by") or ""),
            why=why if why is not None else Fault("", "", ""),
            times=_whole(body.get("times")) or 0,
        )


@dataclass(frozen=True)
class RejectedSoFar:
    """Messages or updates that were rejected since the coordinator's start."""

    total: int
    causes: Mapping[str, int]
    """The most frequent causes -> times, the most frequent first."""


@dataclass(frozen=True)
class BrokerTraffic:
    """What has gone through the broker since the coordinator's start, as the coordinator counts it."""

    messages_received: int
    bytes_received: int
    bytes_published: int
    blob_bytes_published: int
    """Part of `bytes_published`: the blobs that agents have received."""

    dropped: int
    """Messages that were dropped because too many came."""


@dataclass(frozen=True)
class SiteStatus:
    """A relay whose sums the coordinator takes."""

    relay: str
    host: str
    """Where it runs; empty where it is not online."""

    holds: int
    """Updates that it has, and the coordinator has not."""

    sums: int
    """Sums that were taken since the coordinator's start."""

    summed: int
    """Updates in them."""

    problem: str = ""
    """Why its sums are not taken; empty: they are."""

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> SiteStatus:
        """Return what an object of the status says."""
        return cls(
            relay=as_text(body.get("relay") or ""),
            host=as_text(body.get("host") or ""),
            holds=_whole(body.get("holds")) or 0,
            sums=_whole(body.get("sums")) or 0,
            summed=_whole(body.get("summed")) or 0,
            problem=as_text(body.get("problem") or ""),
        )


@dataclass(frozen=True)
class PartitionStatus:
    """A partition of the agents, and the aggregator that takes their updates."""

    partition: str
    """Such as ``2/4``."""

    aggregator: str
    """Its name; empty where the coordinator takes the updates itself."""

    host: str
    process: int
    updates: int
    """What that aggregator has stored since its start."""

    stands_by: tuple[str, ...] = ()
    """Other aggregators that were started for the same partition."""

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> PartitionStatus:
        """Return what an object of the status says."""
        return cls(
            partition=as_text(body.get("partition") or ""),
            aggregator=as_text(body.get("aggregator") or ""),
            host=as_text(body.get("host") or ""),
            process=_whole(body.get("process")) or 0,
            updates=_whole(body.get("updates")) or 0,
            stands_by=_texts(body.get("stands_by")),
        )


class Status:
    """What the coordinator last wrote; each property is read from the content when it is first asked for."""

    def __init__(self, content: Mapping[str, Any], written_ns: int | None = None) -> None:
        self.content = content
        """The JSON of the file, for ``--json``; empty where the coordinator has written nothing yet."""

        self._written_ns = written_ns
        """When it was written, by the clock of the file system, in nanoseconds since 1970; None: not known."""

    @cached_property
    def at(self) -> datetime | None:
        """When it was written; None: it does not say."""
        try:
            return datetime.fromisoformat(str(self.content.get("at")))
        except ValueError:
            return None

    def age_s(self, now: datetime) -> float | None:
        """Return how many seconds before ``now`` it was written; None where it does not say."""
        try:
            return None if self.at is None else (now - self.at).total_seconds()
        except TypeError:  # a time without a zone
            return None

    @cached_property
    def clock_ahead_s(self) -> float:
        """By how many seconds the coordinator's clock is ahead of that of its folder's file system; 0: not known.

        It writes the file right after it has looked at its clock.
        """
        if self.at is None or self.at.tzinfo is None or self._written_ns is None:
            return 0.0
        return self.at.timestamp() - self._written_ns / 1e9

    @property
    def version(self) -> str | None:
        """The version of the coordinator."""
        version = self.content.get("version")
        return None if version is None else as_text(version)

    @property
    def federation(self) -> str:
        """The name of the federation; empty: not said."""
        return as_text(self.content.get("federation") or "")

    @property
    def broker(self) -> str | None:
        """The address of the broker."""
        broker = self.content.get("broker")
        return None if broker is None else as_text(broker)

    @property
    def broker_connection(self) -> str | None:
        """The connected broker, since when, and which others of a list were left and why; None: not said."""
        connection = self.content.get("broker_connection")
        return formats.broker(connection) if isinstance(connection, dict) else None

    @property
    def is_broker_away(self) -> bool:
        """Whether the coordinator cannot reach the broker."""
        return bool(self.content.get("broker_away"))

    @property
    def settings(self) -> Mapping[str, str] | None:
        """Part of the configuration -> digest of its values at the coordinator's start; None: not said."""
        settings = self.content.get("settings")
        return settings if isinstance(settings, dict) else None

    @cached_property
    def partitions(self) -> tuple[PartitionStatus, ...]:
        """The partitions of the agents; empty where the coordinator takes all updates itself."""
        rows = self.content.get("aggregators")
        if not isinstance(rows, list):
            return ()
        return tuple(PartitionStatus.from_body(row) for row in rows if isinstance(row, dict))

    @cached_property
    def sites(self) -> tuple[SiteStatus, ...]:
        """The relays whose sums are taken; empty where there are none."""
        rows = self.content.get("sites")
        if not isinstance(rows, list):
            return ()
        return tuple(SiteStatus.from_body(row) for row in rows if isinstance(row, dict))

    @cached_property
    def run(self) -> RunUnderWay | None:
        """The run under way; None: there is none."""
        return RunUnderWay.from_body(self.content.get("run"))

    @cached_property
    def awaited(self) -> Awaited | None:
        """What the coordinator waits for."""
        return Awaited.from_body(self.content.get("waiting"))

    @cached_property
    def fleet(self) -> FleetCounts | None:
        """The counts of all agents."""
        counts = self.content.get("fleet")
        if not isinstance(counts, dict) or not counts:
            return None
        names = ("agents", "online", "fault", "stalled")
        return FleetCounts(**{name: _whole(counts.get(name)) or 0 for name in names})

    @cached_property
    def accuracies(self) -> Mapping[str, FleetAccuracy]:
        """Scope (local, global, personal) -> the accuracy over all agents that have reported it."""
        accuracies = dict[str, FleetAccuracy]()
        for scope, body in _object(self.content.get("acc")).items():
            mean = as_number(_object(body).get("mean"))
            worst_tenth = as_number(_object(body).get("worst_tenth"))
            if mean is not None and worst_tenth is not None:
                accuracies[scope] = FleetAccuracy(mean, worst_tenth, _whole(body.get("agents")) or 0)
        return accuracies

    @cached_property
    def agents(self) -> Sequence[ListedAgent]:
        """The agents that the status lists, at most `MOST_LISTED`."""
        return list_agents(self.content.get("agents"))

    @property
    def has_agents(self) -> bool:
        """Whether it has a list of agents, which may be empty."""
        return "agents" in self.content

    @cached_property
    def refused(self) -> Sequence[RefusedDevice]:
        """The devices that were kept out in the last minutes."""
        return [RefusedDevice.from_body(body) for body in _objects(self.content.get("refused_agents"))]

    def rejected(self, kind: Literal["messages", "updates"]) -> RejectedSoFar:
        """Return what was rejected since the coordinator's start."""
        causes = _object(_object(self.content.get("rejected_most")).get(kind))
        return RejectedSoFar(
            total=_whole(self.content.get(f"rejected_{kind}")) or 0,
            causes={as_text(cause): _whole(times) or 0 for cause, times in causes.items()},
        )

    @property
    def storage(self) -> str:
        """What is wrong with the files of the state folder; empty: nothing."""
        return _joined(self.content.get("storage"))

    @property
    def other_coordinator(self) -> str:
        """Which other coordinator serves the federation; empty: none."""
        return _joined(self.content.get("other_coordinator"))

    @property
    def standby(self) -> str:
        """Which coordinators stand by to take over; empty: none."""
        return _joined(self.content.get("standby"))

    @property
    def blobs_by_http(self) -> str:
        """Where large blobs go by HTTP, how many bytes have gone, and what is wrong there; empty: nowhere."""
        blobs = _object(self.content.get("blobs"))
        if not blobs:
            return ""
        traffic = _object(self.content.get("traffic"))
        text = f"{as_text(blobs.get('where') or '')}, {formats.size(_whole(traffic.get('blob_bytes_fetched')))} fetched"
        if blobs.get("takes_updates") is True:
            text = f"{text}, {formats.size(_whole(traffic.get('update_bytes_by_http')))} of updates received"
        problem = as_text(blobs.get("problem") or "")
        return f"{text}; blobs go over MQTT: {problem}" if problem else text

    @property
    def traffic(self) -> BrokerTraffic:
        """What has gone through the broker since the coordinator's start."""
        counts = _object(self.content.get("traffic"))
        names = [name.name for name in fields(BrokerTraffic)]
        return BrokerTraffic(**{name: _whole(counts.get(name)) or 0 for name in names})

    @property
    def resident_bytes(self) -> float | None:
        """Memory of the coordinator's process; None: not known."""
        return as_number(_object(self.content.get("process")).get("resident_bytes")) or None


@dataclass(frozen=True)
class ListedAgent:
    """An agent in the file: what it says, and the object itself, which ``--json`` prints as it is."""

    agent: HeardAgent
    content: Mapping[str, Any]


def list_agents(bodies: object) -> list[ListedAgent]:
    """Return the agents of a list in a status, those without an id left out."""
    return [ListedAgent(HeardAgent.from_body(body), body) for body in _objects(bodies) if "id" in body]


# --- the files -------------------------------------------------------------------------------------------------------


class JsonFile:
    """A file that others write: `look` parses it again only when it has changed, from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: tuple[tuple[int, int, int] | None, Any] = None, None  # at once, as other threads see it

    @property
    def stamp(self) -> tuple[int, int, int] | None:
        """Time of change in nanoseconds, size and inode of what was read; None: nothing was."""
        return self._known[0]

    @property
    def content(self) -> Any:
        """What it said at the last look; None where there is no file, or nothing that can be read."""
        return self._known[1]

    def look(self) -> bool:
        """Read it again, and return whether it has changed; one that cannot be read just now has not."""
        try:
            status = self._path.stat()
            stamp = status.st_mtime_ns, status.st_size, status.st_ino
            if self.stamp == stamp:
                return False
            self._known = stamp, json.loads(read_regular(self._path))
        except FileNotFoundError:
            had_content = self.stamp is not None
            self._known = None, None
            return had_content
        except (OSError, ValueError, RecursionError):
            return False
        return True


class StatusFiles:
    """What the coordinator of a state folder last wrote about its work."""

    def __init__(self, state: Path) -> None:
        self._status = JsonFile(state / STATUS)
        self._everyone = JsonFile(state / EVERYONE)

    def status(self) -> Status:
        """Return the coordinator's status; an empty one where it has written nothing yet."""
        self._status.look()
        content = self._status.content
        stamp = self._status.stamp
        return Status(content if isinstance(content, dict) else {}, None if stamp is None else stamp[0])

    def agents(self) -> Sequence[ListedAgent]:
        """Return all agents that the coordinator has written about."""
        status = self.status()
        if status.fleet is None or status.fleet.agents <= MOST_LISTED:
            return status.agents
        self._everyone.look()
        content = self._everyone.content
        return list_agents(content) if isinstance(content, list) else status.agents


def read_status(state: Path) -> Status:
    """Return what the coordinator of a state folder last wrote about its work; empty where it has written nothing."""
    return StatusFiles(state).status()


def read_agents(state: Path) -> Sequence[ListedAgent]:
    """Return all agents that the coordinator of a state folder last wrote about."""
    return StatusFiles(state).agents()


# --- values of the file ----------------------------------------------------------------------------------------------


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(as_text, value)) if isinstance(value, list) else ()


def _whole(value: object) -> int | None:
    number = as_number(value)
    return None if number is None else int(number)


def _reason(note: object) -> str:
    """Return why an agent is left out: the reason in an object, or the text that earlier versions wrote."""
    return as_text(_object(note).get("reason") or "") if isinstance(note, dict) else as_text(note)


def _joined(trouble: object) -> str:
    """Return one or more lines of the status as one; empty: there is none."""
    if isinstance(trouble, list):
        return "; ".join(map(as_text, trouble))
    return as_text(trouble) if trouble else ""
