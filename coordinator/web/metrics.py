"""Figures of a federation for Prometheus, read from the state folder: the coordinator's loop has no part in it.

Names follow the conventions of Prometheus: base units, ``_total`` for counters. No label holds the id of an agent, a
run or a release, so the number of series does not grow with fleet and time. Rounds and updates are counted from the
journal, so that their counters go on after a restart where they were.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from edge_agent import __version__
from edge_agent.core.errors import StateError
from edge_agent.core.worst_tenth import mean_of_worst_tenth
from edge_agent.wire.faults import CODES

from ..journal.kinds import FINAL
from ..journal.store import follow, utc_now
from ..state.fleet_rows import HeardAgent, Presence
from ..state.privacy_spent import PrivacySpent
from ..state.status_file import Awaited, Status, StatusFiles
from ..state.store import StateFolder
from ..views.counts import Counts, RoundAccuracies, RoundOfRun
from ..views.follower import Follower, reopen
from ..views.releases import Book
from .health import is_fresh, objection

if TYPE_CHECKING:
    from prometheus_client import Metric
    from starlette.routing import Route

log = logging.getLogger(__name__)

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
LEAST_PAUSE_S = 1.0
"""Two questions within this time get the same answer: a flood of them reads the folder once a second."""

ENTRIES_AT_ONCE = 2000
"""Entries that are read in one transaction."""

TIERS = ("train", "head")
PRESENCES = (Presence.ONLINE, Presence.FAULT, Presence.STALLED, Presence.OFFLINE)
"""What an agent that was heard can be."""

STAGES = ("canary", "paused", "everybody", "held", "rolled back")


@dataclass(frozen=True)
class Snapshot:
    """A federation at one moment."""

    now: datetime
    status: Status
    agents: Sequence[HeardAgent] = ()
    counts: Counts | None = None
    """None: the journal cannot be read."""

    releases: Mapping[str, int] = field(default_factory=dict)
    """Stage -> releases."""

    outcomes: Mapping[str, int] = field(default_factory=dict)
    """Outcome -> devices, of the releases that devices may get now."""

    held_channels: int = 0
    """Channels whose newest release is held."""

    rollbacks: int = 0
    pinned: int = 0
    accuracies: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Scope -> accuracies that agents have reported in the last closed round."""

    disk_free_bytes: int | None = None
    disk_size_bytes: int | None = None
    state_bytes: Mapping[str, int] = field(default_factory=dict)
    """Part of the state folder -> its size."""


class Reader:
    """Makes snapshots of a state folder; the journal is read on from where it was read before."""

    def __init__(self, state: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._state = StateFolder(state)
        self._now = now
        self._files = StatusFiles(state)
        self._begin()

    def _begin(self) -> None:
        """Begin with a journal of which nothing was read."""
        self._counts = Counts()
        self._book = Book()
        self._follower = Follower(self._state.journal, self._counts, self._book)
        self._accuracies = RoundAccuracies()
        self._measured_round: RoundOfRun | None = None
        """The round that these accuracies are of."""

    def close(self) -> None:
        """Close the journal."""
        self._state.journal.close()

    def snapshot(self) -> Snapshot:
        """Return the federation as its folder has it now; what cannot be read is left out."""
        folder = self._state.path
        now = self._now()
        agents = [row.agent for row in self._files.agents()]
        files = Snapshot(now, self._files.status(), agents, state_bytes=self._sizes())
        if folder.is_dir():
            disk = shutil.disk_usage(folder)
            files = replace(files, disk_free_bytes=disk.free, disk_size_bytes=disk.total)
        try:
            self._read()
        except StateError as error:
            self.close()
            log.warning("metrics_without_journal reason=%s", error)
            return files
        releases = self._book.releases
        newest = {release.plan.channel: release for release in releases}
        outcomes = Counter[str]()
        for release in self._book.current():
            outcomes.update(release.count)
        return replace(
            files,
            counts=self._counts,
            releases=Counter(release.stage for release in releases),
            outcomes=outcomes,
            held_channels=sum(bool(release.held) for release in newest.values()),
            rollbacks=sum(bool(release.rolls_back) for release in releases),
            pinned=sum(self._book.pin(agent, now) is not None for agent in self._book.pins),
            accuracies=self._accuracies.by_scope,
        )

    def _read(self) -> None:
        """Read what was written since the last time, and the accuracies of a round that was closed since.

        Raises:
            StateError: The journal is missing, or cannot be read.
        """
        journal = self._state.journal
        if reopen(journal):
            self._begin()
        self._follower.catch_up(ENTRIES_AT_ONCE)
        closed = self._counts.closed_round
        if closed is None or closed == self._measured_round:
            return
        accuracies = RoundAccuracies()
        kinds = accuracies.kinds
        for entry in follow(journal, closed.run, kinds, round=closed.round, page=ENTRIES_AT_ONCE):
            accuracies.add(entry)
        self._accuracies = accuracies
        self._measured_round = closed

    def _sizes(self) -> dict[str, int]:
        sizes = {"blobs": 0, "journal": 0}
        for part, paths in (("blobs", self._state.blobs.folder.glob("*")), ("journal", self._journal_files())):
            for path in paths:
                with suppress(OSError):  # a coordinator at work may remove one at any moment
                    sizes[part] += path.stat().st_size
        return sizes

    def _journal_files(self) -> Iterable[Path]:
        return self._state.path.glob("journal.db*")


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the figures of a snapshot."""
    yield from _coordinator(snapshot)
    yield from _fleet(snapshot)
    yield from _run(snapshot)
    if snapshot.counts is not None:
        yield from _journaled(snapshot, snapshot.counts)
        yield from _releases(snapshot)
    yield from _accuracy(snapshot)
    yield from _storage(snapshot)


def exposition(snapshot: Snapshot) -> bytes:
    """Return the figures in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Once:
        def collect(self) -> Iterator[Metric]:
            return families(snapshot)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    return generate_latest(registry)


def _gauge(name: str, about: str, value: float) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"headwater_{name}", about, value=value)


def _gauges(name: str, about: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"headwater_{name}", about, labels=labels)
    for key, value in values.items():
        family.add_metric(key if isinstance(key, tuple) else (key,), value)
    return family


def _counter(name: str, about: str, value: float) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(f"headwater_{name}", about, value=value)


def _coordinator(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield whether the coordinator is there, and where its status is new, what it counts."""
    from prometheus_client.core import InfoMetricFamily

    status = snapshot.status
    now = snapshot.now
    names = {"version": __version__, "federation": status.federation}
    yield InfoMetricFamily("headwater", "Version of this program, and the name of the federation.", value=names)
    is_up = is_fresh(status, now)
    yield _gauge("coordinator_up", "1 while the coordinator is heard.", is_up)
    yield _gauge("coordinator_ready", "1 while agents can be served, as /ready says.", not objection(status, now))
    yield _gauge("journal_up", "1 while the journal can be read.", snapshot.counts is not None)
    if status.at is not None:
        at = status.at.timestamp()
        yield _gauge("coordinator_status_timestamp_seconds", "When the coordinator wrote its status.", at)
    if not is_up:
        return  # what it said last is not what is
    yield _gauge("broker_up", "1 while the coordinator is connected to the broker.", not status.is_broker_away)
    is_stalled = status.run is not None and status.run.stall is not None
    yield _gauge("run_stalled", "1 while a run waits for its disk or files.", is_stalled)
    if status.resident_bytes is not None:
        about = "Memory of the coordinator's process."
        yield _gauge("coordinator_resident_memory_bytes", about, status.resident_bytes)
    traffic = status.traffic
    for name, count, about in (
        ("messages_received", traffic.messages_received, "Messages from the broker since the coordinator's start."),
        ("messages_dropped", traffic.dropped, "Messages that were dropped because too many came, since its start."),
        ("received_bytes", traffic.bytes_received, "Bytes from the broker since its start."),
        ("published_bytes", traffic.bytes_published, "Bytes to the broker since its start."),
    ):
        yield _counter(name, about, count)
    rejected = status.rejected("messages").total
    yield _counter("messages_rejected", "Messages that were rejected since the coordinator's start.", rejected)


def _fleet(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield how many agents are there, by tier, presence and fault; nothing where the status is old."""
    if not is_fresh(snapshot.status, snapshot.now):
        return
    # Series that are always there begin at zero, so that a rate over them is known from the first agent on.
    standing = Counter[tuple[str, str]]({(tier, presence.value): 0 for tier in TIERS for presence in PRESENCES})
    inputs = Counter[str]()
    faults = Counter[str](dict.fromkeys((*sorted(CODES), "other"), 0))
    for agent in snapshot.agents:
        tier = agent.tier if agent.tier in TIERS else "unknown"
        standing[tier, agent.presence.value] += 1
        if agent.is_present and agent.inputs_since is not None:
            inputs["changed" if agent.inputs_since else "as fitted"] += 1
        if agent.is_present and agent.fault:
            code = agent.fault.code
            faults[code if code in CODES else "other"] += 1
    yield _gauges("agents", "Agents that the coordinator knows.", ("tier", "state"), standing)
    about = "Agents that tell how the inputs of their servers are: as fitted, or changed since."
    yield _gauges("agents_by_inputs", about, ("inputs",), inputs)
    yield _gauges("agents_with_fault", "Agents whose last task failed, by the code of the fault.", ("code",), faults)


def _run(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield how far the run under way is, and what it waits for; nothing where the status is old."""
    status = snapshot.status
    if not is_fresh(status, snapshot.now):
        return
    run = status.run
    awaited = status.awaited or Awaited()
    yield _gauge("run_active", "1 while a run is under way.", run is not None)
    if run is not None and run.rounds is not None:
        yield _gauge("run_round", "The round that the run is in.", run.round or 0)
        yield _gauge("run_rounds", "The rounds of the run under way.", run.rounds)
    yield _gauge("waiting_agents", "Agents that are waited for now.", awaited.count)
    if awaited.seconds_left is not None:
        yield _gauge("waiting_left_seconds", "Time until the wait ends at the latest.", awaited.seconds_left)
    if run is not None and run.privacy is not None:
        yield from _privacy(run.privacy)


def _privacy(privacy: PrivacySpent) -> Iterator[Metric]:
    """Yield what the run under way has spent of its privacy budget."""
    if privacy.epsilon is not None:
        yield _gauge("privacy_epsilon", "Epsilon that all rounds with noise have spent.", privacy.epsilon)
    if privacy.epsilon_left is not None:
        yield _gauge("privacy_epsilon_left", "Epsilon that may still be spent.", privacy.epsilon_left)
    yield _gauge("privacy_delta", "Delta of that epsilon.", privacy.delta)
    without = privacy.rounds_without_noise
    yield _gauge("privacy_uncovered_rounds", "Closed rounds without noise, which epsilon does not cover.", without)


def _journaled(snapshot: Snapshot, counts: Counts) -> Iterator[Metric]:
    """Yield what the journal counts: starts, runs, rounds and updates."""
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    yield _counter("coordinator_starts", "Starts of a coordinator on this state folder.", counts.starts)
    statuses = Counter[str](dict.fromkeys(("requested", "running", *FINAL.values()), 0))
    statuses.update(counts.runs.values())
    yield _gauges("runs", "Runs by status.", ("status",), statuses)
    for name, about, histogram in (
        ("round_duration_seconds", "Time of a closed round from the tasks to the new model.", counts.rounds),
        ("round_waiting_seconds", "Time that a closed round waited for agents before that.", counts.waits),
    ):
        yield HistogramMetricFamily(f"headwater_{name}", about, buckets=histogram.buckets(), sum_value=histogram.sum)
    if counts.open_round is not None and is_fresh(snapshot.status, snapshot.now):
        opened = datetime.fromisoformat(counts.opened_at).timestamp()
        yield _gauge("round_opened_timestamp_seconds", "When the round that is open was opened.", opened)
    yield _counter("updates_accepted", "Updates in closed rounds.", counts.accepted)
    yield _counter("updates_late", "Updates that came after their round was closed.", counts.late)
    rejected = CounterMetricFamily(
        "headwater_updates_rejected", "Updates or agents that open rounds did without.", labels=("reason",)
    )
    for reason, number in sorted({"UpdateRejected": 0, "other": 0, **counts.rejected}.items()):
        rejected.add_metric((reason,), number)
    yield rejected
    yield _counter("round_received_bytes", "Bytes of updates in closed rounds.", counts.received_bytes)
    yield _counter("round_sent_bytes", "Bytes of models to agents in closed rounds.", counts.sent_bytes)


def _releases(snapshot: Snapshot) -> Iterator[Metric]:
    stages = {stage.replace(" ", "_"): snapshot.releases.get(stage, 0) for stage in STAGES}
    yield _gauges("releases", "Releases by stage.", ("stage",), stages)
    outcomes = {outcome: snapshot.outcomes.get(outcome, 0) for outcome in ("ok", "failed", "declined", "unable")}
    yield _gauges("release_devices", "Devices by what they said of the releases on offer.", ("outcome",), outcomes)
    yield _gauge("channels_held", "Channels whose newest release is held.", snapshot.held_channels)
    yield _counter("release_rollbacks", "Releases that took an earlier one back.", snapshot.rollbacks)
    yield _gauge("pinned_devices", "Devices that stay with one release.", snapshot.pinned)


def _accuracy(snapshot: Snapshot) -> Iterator[Metric]:
    values = dict[tuple[str, str], float]()
    for scope, accuracies in sorted(snapshot.accuracies.items()):
        values[scope, "mean"] = fmean(accuracies)
        values[scope, "worst_tenth"] = mean_of_worst_tenth(accuracies)
    if values:
        about = "Accuracy that agents reported in the last closed round: mean, and mean of the worst tenth."
        yield _gauges("accuracy_ratio", about, ("scope", "statistic"), values)


def _storage(snapshot: Snapshot) -> Iterator[Metric]:
    if snapshot.disk_free_bytes is not None and snapshot.disk_size_bytes is not None:
        yield _gauge("disk_free_bytes", "Free space on the disk of the state folder.", snapshot.disk_free_bytes)
        yield _gauge("disk_size_bytes", "Size of that disk.", snapshot.disk_size_bytes)
    yield _gauges("state_bytes", "Size of parts of the state folder.", ("part",), snapshot.state_bytes)


def routes(state: Path, now: Callable[[], datetime] = utc_now) -> list[Route]:
    """``/metrics`` of the federation in this state folder."""
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    reader = Reader(state, now)
    lock = threading.Lock()
    made_at = float("-inf")
    text = b""

    def metrics(_: Request) -> Response:
        nonlocal made_at, text
        if lock.acquire(blocking=not text):  # while the folder is read, everybody else gets the figures before
            try:
                if time.monotonic() - made_at >= LEAST_PAUSE_S:
                    made_at = time.monotonic()
                    text = exposition(reader.snapshot())
            finally:
                lock.release()
        return Response(text, media_type=TEXT_FORMAT)

    return [Route("/metrics", metrics)]
