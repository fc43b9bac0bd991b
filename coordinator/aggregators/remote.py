"""The coordinator's side of aggregators: who serves which partition, what they have stored, and the passes they make.

A partition is served by the aggregator that was started for it; while there is none, by another one that is online;
and where none is, by the coordinator itself, which then listens to its agents. Agents notice none of that: they send
to the topics of their partition.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_agent import __version__
from edge_agent.core.errors import HeadwaterError
from edge_agent.wire.topics import Topics

from ..fleet.collection import Collection
from ..fleet.partitions import Partition, partition_of
from ..fleet.run_ids import RunIds
from ..fleet.uploads import Collector, remove_partial
from ..rounds.compute_requests import MethodValues, OfMethod
from ..rounds.partitioned import Aggregators, UpdatesOfRound
from ..rounds.passes import Answer, Pass
from ..state.status_file import PartitionStatus
from ..text import listed
from .messages import (
    Dismissed,
    MakePass,
    Noted,
    PassDone,
    Sealed,
    ServedPartition,
    ServePartitions,
    Serving,
    Stored,
    Updates,
)
from .open_round import OpenRound, partial_folder, write_round
from .requests import PassFiles

log = logging.getLogger(__name__)

LEASE_S = 3.0
"""An aggregator that is silent for so long is lost; it says each second that it is there."""

AGAIN_S = 2.0
"""After so long a request for a pass is sent again."""

PARTIAL_S = 60.0
"""After so long the incomplete updates of an aggregator that was lost are removed.

One that is suspended, or whose machine is busy, may be back within seconds, and continues them.
"""

LEAST_UPDATES = 3
"""Rounds with fewer updates are read by the coordinator."""


@dataclass
class _Member:
    """An aggregator that is online, and what it has said last."""

    says: Serving
    heard_at: float


@dataclass
class _Holder:
    """The process that serves a partition now."""

    name: str = ""
    """The aggregator; empty: the coordinator itself."""

    term: int = 0
    """Counts the changes of the name."""


@dataclass
class _PassRequest:
    """A pass over the updates of one partition, which an aggregator is to make."""

    id: str
    """It names the files of the request."""

    number: int
    """The number of the partition."""

    agents: tuple[str, ...]
    """The agents whose updates are read."""

    holder: str = ""
    """The aggregator that was asked last."""

    sent_at: float = float("-inf")
    is_done: bool = False
    error: str = ""


@dataclass(frozen=True)
class AggregatorLink:
    """How the coordinator speaks and listens to its aggregators, and how they know it."""

    topics: Topics
    publish: Callable[[str, bytes], None]
    subscribe: Callable[..., None]
    unsubscribe: Callable[..., None]
    sealed: Sealed
    start: str
    """The start of the coordinator."""

    folder: Path
    """The folder that coordinator and aggregators share."""

    unread_s: Callable[[], float] = lambda: 0.0
    """Seconds that the oldest message has waited to be handled (`Transport.unread_s`)."""


@dataclass(frozen=True)
class CoordinatorSteps:
    """The steps that only the coordinator itself can take after what an aggregator has said."""

    take: Callable[[Stored], bool]
    """Takes what an aggregator says of an agent's update; False: the update is not in the store."""

    ask_again: Callable[[str], None]
    """Sends an agent its job again, so that it offers its update at once."""

    refuse: Callable[[str, str], None]
    """Notes for the status that somebody, who is named, cannot take part, and why."""


class RemoteAggregators(Aggregators):
    """Assigns partitions to aggregators, notes what they store, and has them make passes."""

    def __init__(
        self,
        of: int,
        link: AggregatorLink,
        collector: Collector,
        run_ids: RunIds,
        steps: CoordinatorSteps,
        clock: Callable[[], float],
    ) -> None:
        """Make the coordinator's side of its aggregators, of which none is online yet.

        Args:
            of: The number of partitions, 1 or more.
            link: How it speaks and listens to them.
            collector: What is collected.
            run_ids: The ids of runs in messages.
            steps: What it has the coordinator do.
            clock: Seconds of a clock that never goes back.
        """
        self.of = of
        self._link = link
        self._collector = collector
        self._files = PassFiles(link.folder)
        self._run_ids = run_ids
        self._steps = steps
        self._clock = clock
        self._members: dict[str, _Member] = {}
        self._lost: dict[str, float] = {}
        """Aggregator that is not online -> since when, while its incomplete updates are there."""

        self._newest: dict[tuple[str, str], int] = {}
        """Name and start of an aggregator -> the number of its newest message of presence."""

        self._holders = {number: _Holder() for number in range(1, of + 1)}
        self._orphaned: set[int] = set()
        """Partitions that have changed hands, until the new holder listens."""

        self._own: set[int] = set()
        """The partitions that the coordinator listens to itself."""

        self._federation = ""
        self._epoch = 0
        self._serves_own_from = float("inf")
        """When the coordinator begins to serve partitions that no aggregator has asked for."""

        self._collection: Collection | None = None
        self._digest = ""
        """Names the file of what is collected now; empty where nothing is, or not by aggregators."""

        self._passes: dict[str, _PassRequest] = {}
        """Id of a request -> the request, of those that somebody waits for."""

    def start(self, federation: str, epoch: int) -> None:
        """Begin to serve: aggregators that are online say so within a second."""
        self._federation = federation
        self._epoch = epoch
        self._serves_own_from = self._clock() + LEASE_S
        # The coordinator before has ended, or stops; what its aggregators write for it now is of no use.
        self._files.remove_others()
        self._files.sweep()
        now = self._clock()
        self._lost = {folder.name: now for folder in (self._link.folder / "partial").glob("*")}
        self._link.subscribe(self._link.topics.aggregators_up)

    # --- as rounds see it ------------------------------------------------------------------------------------------

    def partition_of(self, agent: str) -> str:
        """Return the name of the partition whose aggregator takes an agent's update."""
        return partition_of(agent, self.of).name

    def announce_collection(self, collection: Collection, about: OfMethod, values: MethodValues) -> None:
        """Tell the aggregators what is collected now, where it is the updates of a round."""
        if collection.purpose != "train" or collection.session:
            self._collection = None
            self._digest = ""
        else:
            content = OpenRound.from_collection(collection, self._run_ids.of(collection.run), about, values)
            self._collection = collection
            self._digest = write_round(self._link.folder, content)
        self._tell_all()

    def would_read(self, updates: int) -> bool:
        """Return whether an aggregator is online, and the round is not so small that the coordinator reads it."""
        return updates >= LEAST_UPDATES and bool(self._members)

    def make(self, one_pass: Pass[Answer], updates: UpdatesOfRound) -> Generator[str, None, Answer | None]:
        """Yield what is waited for, and return the answer of a pass; None where the coordinator has to make it."""
        if not self.would_read(len(updates.accepted)):
            return None
        # A request for each partition of which there are updates.
        agents_of = self._divide(updates.accepted)
        requests = [_PassRequest(secrets.token_hex(16), number, tuple(agents)) for number, agents in agents_of.items()]
        try:
            # An answer that came after its pass was over goes now.
            self._files.remove_others(self._passes.keys())
            for request in requests:
                self._passes[request.id] = request
                self._files.write_request(request.id, one_pass, updates, request.agents)
            self._ask_for_passes()
            yield from self._wait_for(requests, one_pass.name)
            return self._join(requests, one_pass)
        except (HeadwaterError, OSError) as error:
            log.warning("pass_failed name=%s: the coordinator reads all updates: %s", one_pass.name, error)
            return None
        finally:
            for request in requests:
                self._passes.pop(request.id, None)
                self._files.remove(request.id)

    def _wait_for(self, requests: Sequence[_PassRequest], name: str) -> Generator[str, None, None]:
        """Yield who still makes a pass, until nobody does; `tick` replaces aggregators that are lost meanwhile."""
        while True:
            holders = sorted({request.holder for request in requests if not request.is_done})
            if not holders:
                return
            yield f"aggregators read the updates ({name}): {listed(holders)}"

    def _join(self, requests: Sequence[_PassRequest], one_pass: Pass[Answer]) -> Answer | None:
        """Return the answer for all updates from those of requests that are done; None where it is of no use.

        That is where an aggregator has failed, and where the bits depend on how the updates were divided.

        Raises:
            StateError: An answer cannot be read.
            TensorsError: An answer is damaged.
        """
        errors = sorted({request.error for request in requests if request.error})
        if errors:
            log.warning("pass_failed name=%s: the coordinator reads all updates: %s", one_pass.name, errors[0])
            return None
        answers = (self._files.read_answer(request.id, one_pass, request.agents) for request in requests)
        answer = one_pass.join(answers)
        return answer if one_pass.is_exact(answer) else None

    def _divide(self, agents: Iterable[str]) -> dict[int, list[str]]:
        """Return the number of each partition -> those of the agents that belong to it, both in order."""
        agents_of: dict[int, list[str]] = {}
        for agent in sorted(agents):
            agents_of.setdefault(partition_of(agent, self.of).number, []).append(agent)
        return dict(sorted(agents_of.items()))

    # --- as the event loop sees it ---------------------------------------------------------------------------------

    def heard(self, payload: bytes) -> None:
        """Handle a message of an aggregator.

        Raises:
            MessageError: It is not a message of an aggregator of this coordinator.
        """
        message = self._link.sealed.from_aggregator(payload)
        if isinstance(message, Serving):
            self._on_serving(message)
        elif isinstance(message, Updates):
            self._on_updates(message)
        else:
            self._on_pass_done(message)

    def tick(self) -> None:
        """Replace aggregators that are silent, and tell all of them when nothing is collected any more."""
        now = self._clock()
        # Of a coordinator that is behind, what an aggregator has said may be among the messages that wait.
        lease_s = LEASE_S + self._link.unread_s()
        silent = [name for name, member in self._members.items() if now - member.heard_at > lease_s]
        for name in silent:
            log.warning("aggregator_lost name=%s silent_s=%.1f", name, now - self._members.pop(name).heard_at)
            self._lost[name] = now
        for name in [name for name, lost_at in self._lost.items() if now - lost_at >= PARTIAL_S]:
            del self._lost[name]
            self._remove_partial(name)
        if silent:
            self._assign()
        if self._collection is not None and self._collector.open_round is not self._collection:
            self._collection = None
            self._digest = ""
            self._tell_all()
        self._serve_own()
        self._ask_for_passes()

    def status(self) -> list[PartitionStatus]:
        """Return a row for each partition, with who serves it and who stands by."""
        return [self._status_of(number, holder) for number, holder in self._holders.items()]

    def _status_of(self, number: int, holder: _Holder) -> PartitionStatus:
        """Return who serves a partition, and who else was started for it."""
        partition = str(Partition(number, self.of))
        others = tuple(sorted(name for name in self._started_for(number) if name != holder.name))
        member = self._members.get(holder.name)
        if member is None:
            return PartitionStatus(partition, holder.name, host="", process=0, updates=0, stands_by=others)
        says = member.says
        return PartitionStatus(partition, holder.name, says.host, says.process, says.updates, others)

    def _started_for(self, number: int) -> list[str]:
        """Return the names of the aggregators that were started for a partition and are online."""
        return [name for name, member in self._members.items() if member.says.wants == number]

    # --- who serves what -------------------------------------------------------------------------------------------

    def _on_serving(self, message: Serving) -> None:
        """Note that an aggregator is online, and tell it what to do where it does something else."""
        # Brokers deliver some messages twice, and late: one that has ended would seem to be online.
        sender = (message.name, message.boot)
        if message.number <= self._newest.get(sender, -1):
            return
        self._newest[sender] = message.number
        reason = self._objection(message)
        if reason:
            self._dismiss(message, reason)
            return
        if message.name not in self._members:
            log.info(
                "aggregator_joined aggregator=%s partition=%s host=%s pid=%d",
                *(message.name, Partition(message.wants, message.of), message.host, message.process),
            )
        self._members[message.name] = _Member(message, self._clock())
        self._lost.pop(message.name, None)
        self._assign()
        partitions = self._served_by(message.name)
        does = (message.start, message.partitions, message.collection)
        is_to_do = (self._link.start, partitions, self._digest)
        if does != is_to_do:
            self._tell(message.name)
        else:
            self._ask_agents_of({served.number for served in partitions})

    def _objection(self, message: Serving) -> str:
        """Return why an aggregator cannot serve; empty where it can."""
        if message.of != self.of:
            return (
                f"this federation has {self.of} partitions ([aggregators] partitions), and it was started for "
                f"{message.wants}/{message.of}; start it with --partition K/{self.of}"
            )
        # Another version may compute other bits.
        if message.software != __version__:
            return (
                f"it is of version {message.software}, and the coordinator of {__version__}; install that one, and "
                "start it again"
            )
        return ""

    def _dismiss(self, message: Serving, reason: str) -> None:
        """Tell an aggregator that it cannot serve, and why."""
        self._members.pop(message.name, None)
        self._steps.refuse(f"aggregator {message.wants}/{message.of} at {message.host}", reason)
        about = {"whom": message.name, "boot": message.boot}
        self._send(Dismissed(**about, federation=self._federation, epoch=self._epoch, reason=reason))

    def _assign(self) -> None:
        """Give each partition to the aggregator that was started for it, or else to the one with the fewest."""
        changed = set[str]()
        orphaned = set[int]()
        for number, holder in self._holders.items():
            successor = self._holder_for(number, holder.name)
            if successor == holder.name:
                continue
            if holder.name:
                orphaned.add(number)
            changed |= {holder.name, successor}
            holder.name = successor
            holder.term += 1
            log.info("partition_served partition=%s by=%s", Partition(number, self.of), successor or "the coordinator")
        for name in sorted(changed & self._members.keys()):
            self._tell(name)
        if changed:
            self._serve_own()
        self._orphaned |= orphaned
        self._ask_agents_of({number for number in orphaned if number in self._own})

    def _ask_agents_of(self, partitions: set[int]) -> None:
        """Have the agents of partitions that have changed hands offer their updates now, as somebody listens again.

        By themselves they would wait for some seconds more.
        """
        listened = self._orphaned & partitions
        self._orphaned -= listened
        if not listened or self._collection is None:
            return
        for agent in self._collection.outstanding:
            if partition_of(agent, self.of).number in listened:
                self._steps.ask_again(agent)

    def _holder_for(self, number: int, holder: str) -> str:
        """Return who is to serve a partition that ``holder`` has served; empty: nobody is online."""
        # 1. An aggregator that was started for it: the holder, where that is one.
        started_for_it = self._started_for(number)
        if holder in started_for_it:
            return holder
        if started_for_it:
            return started_for_it[0]
        # 2. The holder, where it is still online: a partition does not change hands without need.
        if holder in self._members:
            return holder
        # 3. The aggregator that serves the fewest partitions, by name where several do.
        served = Counter(other.name for other in self._holders.values())
        return min(self._members, key=lambda name: (served[name], name), default="")

    def _serve_own(self) -> None:
        """Listen to the partitions that no aggregator serves, once those that are online had time to say so."""
        if self._clock() < self._serves_own_from:
            return
        unserved = {number for number, holder in self._holders.items() if not holder.name}
        topics = self._link.topics
        for number in sorted(unserved - self._own):
            self._link.subscribe(*topics.for_partition(Partition(number, self.of).name))
        for number in sorted(self._own - unserved):
            self._link.unsubscribe(*topics.for_partition(Partition(number, self.of).name))
        self._own = unserved

    def _served_by(self, name: str) -> tuple[ServedPartition, ...]:
        """Return the partitions that an aggregator is to serve, each with its term."""
        served = {number: holder for number, holder in self._holders.items() if holder.name == name}
        return tuple(ServedPartition(number=number, term=holder.term) for number, holder in served.items())

    def _tell_all(self) -> None:
        for name in self._members:
            self._tell(name)

    def _tell(self, name: str) -> None:
        """Tell an aggregator which partitions it serves now, and what is collected."""
        self._send(
            ServePartitions(
                whom=name,
                boot=self._members[name].says.boot,
                federation=self._federation,
                epoch=self._epoch,
                start=self._link.start,
                partitions=self._served_by(name),
                collection=self._digest,
            )
        )

    def _remove_partial(self, name: str) -> None:
        """Remove the incomplete updates of a silent aggregator; their agents send them again."""
        folder = partial_folder(self._link.folder, name)
        remove_partial(folder)
        for empty in (*folder.glob("*"), folder):
            with contextlib.suppress(OSError):  # it is in use, or gone
                empty.rmdir()

    # --- what they have stored -------------------------------------------------------------------------------------

    def _on_updates(self, message: Updates) -> None:
        """Take the updates that an aggregator has received, and say so."""
        missing = [stored.manifest.blob.digest for stored in message.updates if not self._steps.take(stored)]
        noted = Noted(
            whom=message.name,
            boot=message.boot,
            federation=self._federation,
            epoch=self._epoch,
            number=message.number,
            missing=tuple(missing),
        )
        self._send(noted)

    # --- passes ----------------------------------------------------------------------------------------------------

    def _ask_for_passes(self) -> None:
        """Request each unfinished pass from the aggregator that serves its partition now."""
        now = self._clock()
        for request in self._passes.values():
            if request.is_done:
                continue
            holder = self._holders[request.number].name
            if not holder:
                request.is_done = True
                request.error = "no aggregator is online any more"
            elif holder != request.holder or now - request.sent_at >= AGAIN_S:
                request.holder = holder
                request.sent_at = now
                self._send(MakePass(whom=holder, request=request.id))

    def _on_pass_done(self, message: PassDone) -> None:
        """Note that a pass is made, or why it is not."""
        request = self._passes.get(message.request)
        if request is None or request.is_done or message.name != request.holder:
            return
        request.is_done = True
        request.error = message.error

    def _send(self, message: ServePartitions | Noted | MakePass | Dismissed) -> None:
        self._link.publish(self._link.topics.aggregators_down, self._link.sealed.encode(message))
