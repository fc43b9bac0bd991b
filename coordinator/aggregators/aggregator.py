"""An aggregator: it takes, checks and stores the updates of its partitions, and reads them for the coordinator.

It remembers nothing that is not on disk or with the coordinator: an update that it has stored counts once the
coordinator has noted it, and only then the coordinator sends the agent its receipt.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from edge_agent import __version__
from edge_agent.core.children import InlineWorker, Worker
from edge_agent.core.errors import HeadwaterError, MessageError, StateError, UsageError
from edge_agent.wire.blobs.chunks import decode_frame
from edge_agent.wire.messages import codec
from edge_agent.wire.messages.down import Receipt
from edge_agent.wire.messages.fields import Command, start_of_partition
from edge_agent.wire.messages.up import UpdateManifest
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Connected, Disconnected, Message, Transport

from ..fleet.partitions import Partition, partition_of
from ..fleet.rejections import Rejections
from ..fleet.uploads import Collector
from ..journal.memory import MemoryJournal
from ..state.command_keys import CommandKeys
from ..state.store import BlobStore
from ..text import counted, reason_of
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
from .open_round import OpenRound, partial_folder, read_round
from .reports import Reports
from .requests import PassFiles

log = logging.getLogger(__name__)

SERVING_EVERY_S = 1.0
"""Seconds between two messages by which an aggregator says that it is online."""

TICK_S = 0.5
"""The longest wait for a message in seconds: timers are looked at after it."""

COLLECT_EVERY_S = 0.02
"""The least seconds between two looks at all uploads while messages come."""

MOST_PASSES = 64
"""Requests for passes beyond which those that are finished are forgotten; the coordinator has a few at a time."""

MOST_UNREADABLE = 5
"""Descriptions of a round in a row that cannot be read, after which the folder is taken not to be the coordinator's."""


@dataclass(frozen=True)
class Site:
    """Where an aggregator works, and how others know it."""

    partition: Partition
    """The partition that it was started for."""

    topics: Topics
    blobs: BlobStore
    folder: Path
    """The folder that coordinator and aggregators share."""

    keys: CommandKeys
    name: str
    boot: str


@dataclass
class _Count:
    """How many commands were sent in one term of a partition; agents obey none whose number they have seen."""

    term: int
    commands: int = 0


@dataclass
class _Assignment:
    """The work that the coordinator has given this aggregator last."""

    federation: str = ""
    epoch: int = 0
    start: str = ""
    """The coordinator's start; empty before it was heard."""

    terms: dict[Partition, int] = field(default_factory=dict)
    """Partition -> the term in which it is served."""

    collection: str = ""
    """The digest of the open round's file; empty: no round is open."""


@dataclass
class _Pass:
    """A pass that the coordinator has requested."""

    is_done: bool = False
    error: str = ""
    """Why it was not made; empty where it was, or is being made."""


class Aggregator:
    """One aggregator: call `start`, then `step` in a loop, then `close`."""

    def __init__(
        self, site: Site, transport: Transport, clock: Callable[[], float], worker: Worker | None = None
    ) -> None:
        """Put an aggregator together; it does nothing before `start`.

        Args:
            site: Where it works.
            transport: Its connection to the broker.
            clock: Seconds of a clock that never goes back.
            worker: Makes the passes; None: they are made at once, in the loop.
        """
        self.site = site
        self.transport = transport
        self._clock = clock
        self._worker = worker or InlineWorker()
        self._sealed = Sealed(site.keys.for_aggregators())
        self._files = PassFiles(site.folder)
        self._assignment = _Assignment()
        self._collector = self._new_collector()
        self._manifests: dict[str, UpdateManifest] = {}
        """Agent -> the update that it has offered last in the open round."""

        self._counts: dict[Partition, _Count] = {}
        """Partition -> the commands of its newest term, of the coordinator of now."""

        self._reports = Reports(clock)
        self.stored = 0
        """Updates that were stored since the start."""

        self.passes_made = 0
        """Passes over updates that were made since the start."""

        self._unreadable = 0
        """How many descriptions of a round in a row could not be read."""

        self._passes: dict[str, _Pass] = {}
        """Id of a request -> the pass."""

        self._presence = 0
        """The number of the newest message of presence."""

        self._said_at = float("-inf")
        """When the last message said that this aggregator is online."""

        self._ticked_at = float("-inf")
        """When all uploads were last looked at."""

        self._is_connected = False
        self.rejected = Rejections(clock)

    @property
    def waits_for(self) -> str:
        """The peer that this aggregator waits for, in words; empty while it serves."""
        if not self._is_connected:
            return "the broker"
        if not self._assignment.start:
            return f"a coordinator of federation '{self.site.topics.federation}' with [aggregators]"
        return ""

    def start(self) -> None:
        """Subscribe to the messages of the coordinator, and connect to the broker."""
        self.transport.subscribe(self.site.topics.aggregators_down)
        self.transport.start()

    def close(self) -> None:
        """Stop serving; uploads stay on disk for the process that serves the partitions next."""
        self._collector.pause()
        self._worker.close()
        self.transport.close()

    def step(self, timeout_s: float) -> bool:
        """Handle at most one event and what is due; True when there was an event.

        Raises:
            UsageError: The federation has another number of partitions.
            StateError: Its folder is not the coordinator's.
        """
        event = self.transport.receive(min(timeout_s, self._due_s()))
        if isinstance(event, Message):
            self._on_message(event)
        elif isinstance(event, Connected):
            self._is_connected = True
            self._said_at = float("-inf")
            self._reports.say_again()
            log.info("aggregator_connected partition=%s broker=%s", self.site.partition, event.broker)
        elif isinstance(event, Disconnected):
            self._is_connected = False
            log.warning("aggregator_disconnected reason=%s", event.reason)
        self._worker.collect()
        # All uploads are looked at: not after each message, of which there are many for each.
        now = self._clock()
        if event is None or now - self._ticked_at >= COLLECT_EVERY_S:
            self._ticked_at = now
            self._look_at_uploads()
        self._tell_stored()
        self._report_presence()
        return event is not None

    # --- messages --------------------------------------------------------------------------------------------------

    def _on_message(self, event: Message) -> None:
        """Handle one message; whatever is wrong with one of an agent, this process serves on."""
        if event.topic == self.site.topics.aggregators_down:
            try:
                message = self._sealed.to_aggregator(event.payload)
            except MessageError as error:
                self._ignore("coordinator", error)
                return
            if message.whom == self.site.name:
                self._obey(message)
            return
        try:
            agent, kind = self.site.topics.sender(event.topic)
            if event.retained:
                raise MessageError(f"retained message on {event.topic}; clear it at the broker")
            self._on_upload(agent, kind, event.payload)
        except HeadwaterError as error:
            self._ignore(event.topic, error)
        except OSError as error:
            # A full disk, or a file that another process has finished meanwhile: the agent offers its update again.
            self._collector.give_up(agent)
            self._ignore(event.topic, error)
        except Exception as error:  # a bug of this program, or of a method: no single message may end the service
            log.exception("message_broke from=%s", event.topic)
            self._ignore(event.topic, error)

    def _look_at_uploads(self) -> None:
        """Acknowledge uploads, and begin those that have waited; one that cannot be written is offered again."""
        try:
            self._collector.tick()
        except (HeadwaterError, OSError) as error:
            self._ignore("uploads", error)

    def _on_upload(self, agent: str, kind: str, payload: bytes) -> None:
        """Handle what an agent sends of its update.

        Raises:
            HeadwaterError: The message is invalid; it is dropped without other effects.
        """
        if kind == "ub":
            self._collector.chunk(agent, decode_frame(payload))
            return
        message = codec.parse_from_agent(payload)
        if not isinstance(message, UpdateManifest):
            raise MessageError(f"'{message.type}' on a topic of updates")
        collection = self._collector.open_round
        # What is not of the round that is open here is for the coordinator to answer: it may be late.
        if collection is None or not collection.takes(agent, message):
            self._reports.add(Stored(manifest=message, agent=agent))
            return
        self._manifests[agent] = message
        self._collector.manifest(agent, message)

    def _obey(self, message: ServePartitions | Noted | MakePass | Dismissed) -> None:
        """Do what the coordinator asks for.

        Raises:
            UsageError, StateError: See `step`.
        """
        if isinstance(message, MakePass):
            self._make(message.request)
            return
        if message.boot != self.site.boot or self._is_of_replaced(message):
            return
        if isinstance(message, Dismissed):
            raise UsageError(f"aggregator for partition {self.site.partition}: {message.reason}")
        if isinstance(message, Noted):
            self._on_noted(message)
        else:
            self._on_partitions(message)

    def _is_of_replaced(self, message: ServePartitions | Noted | Dismissed) -> bool:
        """Return whether a message is of a coordinator that was replaced.

        One that was suspended may speak once more before it finds that out. By then its successor has closed rounds,
        and removed the updates that it still looks for.
        """
        newest = self._assignment
        is_earlier = message.federation == newest.federation and message.epoch < newest.epoch
        if is_earlier:
            log.warning("earlier_coordinator_ignored epoch=%d newest=%d", message.epoch, newest.epoch)
        return is_earlier

    def _ignore(self, who: str, error: Exception) -> None:
        """Count and log a message that is not used; one that comes again and again is no longer a warning."""
        times = self.rejected.note(f"{who}: {type(error).__name__}")
        level = logging.DEBUG if times is None else logging.WARNING
        log.log(level, "message_refused from=%s reason=%s", who, reason_of(error))

    # --- partitions -------------------------------------------------------------------------------------------------

    def _on_partitions(self, message: ServePartitions) -> None:
        """Serve other partitions, or another round.

        Raises:
            StateError: The description of a round cannot be read, again and again.
        """
        before = self._assignment
        of = self.site.partition.of
        terms = {Partition(served.number, of): served.term for served in message.partitions}
        # 1. The partitions; a message that a broker has kept back is of an earlier term.
        if message.start != before.start:
            self._counts.clear()
            self._reports.say_again()
        if not self._count_commands(terms):
            names = ", ".join(partition.name for partition in sorted(terms))
            log.warning("late_message_ignored partitions=%s", names)
            return
        self._assignment = _Assignment(message.federation, message.epoch, message.start, terms, before.collection)
        self._change_partitions(before.terms.keys(), terms.keys())
        # 2. The round.
        if message.collection != before.collection or message.start != before.start:
            self._open(message.collection)
        else:
            self._unreadable = 0
        # 3. The coordinator waits for the answer before it asks agents to send here. A round that could not be opened
        #    is answered in the usual time, or the two would ask each other without a pause.
        if self._assignment.collection == message.collection:
            self._said_at = float("-inf")

    def _change_partitions(self, before: AbstractSet[Partition], now: AbstractSet[Partition]) -> None:
        """Subscribe to the topics of the partitions that are served ``now``, and not to those of ``before``."""
        for partition in sorted(before - now):
            self.transport.unsubscribe(*self.site.topics.for_partition(partition.name))
        for partition in sorted(now - before):
            self.transport.subscribe(*self.site.topics.for_partition(partition.name))
        if before != now:
            names = ", ".join(partition.name for partition in sorted(now))
            log.info("partitions_served numbers=%s", names or "none")

    def _count_commands(self, terms: Mapping[Partition, int]) -> bool:
        """Count the commands of each new term from the first one on; return False where a term has passed already.

        One that is served again goes on where it was: agents have seen those numbers.
        """
        for partition, term in terms.items():
            count = self._counts.get(partition)
            if count is not None and term < count.term:
                return False
        for partition, term in terms.items():
            count = self._counts.get(partition)
            if count is None or term > count.term:
                self._counts[partition] = _Count(term)
        return True

    def _open(self, digest: str) -> None:
        """Take updates of this round from now on; empty: take none.

        Raises:
            StateError: The description of a round cannot be read, again and again.
        """
        if not digest:
            self._collector.pause()
            self._assignment.collection = ""
            self._manifests.clear()
            return
        try:
            content = read_round(self.site.folder, digest)
        except StateError as error:
            # The coordinator may have opened the next round meanwhile, whose description comes within a second.
            self._unreadable += 1
            if self._unreadable >= MOST_UNREADABLE:
                raise
            log.warning("round_unreadable reason=%s", error)
            return
        self._unreadable = 0
        self._take_round(content)
        self._assignment.collection = digest
        log.info("round_taken run=%s round=%d cohort=%d", content.run, content.round, len(content.cohort))

    def _take_round(self, content: OpenRound) -> None:
        """Collect the updates of a round; of the one that is collected already, what is stored stays accepted."""
        collection = content.collection()
        before = self._collector.open_round
        if before is not None and (before.run, before.round) == (content.run, content.round):
            # What the coordinator has not noted yet is stored all the same.
            for agent, update in before.accepted.items():
                if agent in collection.cohort and update.digest in self.site.blobs:
                    collection.accepted.setdefault(agent, update)
        else:
            self._collector.pause()
            self._collector = self._new_collector()
            self._manifests.clear()
        self._collector.open(collection)

    def _new_collector(self) -> Collector:
        """Return a collector for one round; what it notes for itself is forgotten with it."""
        return Collector(
            self.site.blobs,
            MemoryJournal(),
            self._send,
            self._clock,
            is_stalled=lambda: True,
            unread_s=lambda: self.transport.unread_s,
            partial=partial_folder(self.site.folder, self.site.name),
        )

    # --- what was stored -------------------------------------------------------------------------------------------

    def _send(self, agent: str, message: Command) -> None:
        """Send a command of the collector to an agent, but a receipt to the coordinator, which gives it."""
        manifest = self._manifests.get(agent)
        if manifest is None:
            return
        if isinstance(message, Receipt):
            if message.accepted:
                self.stored += 1
            stored = Stored(manifest=manifest, agent=agent, refused=message.reason, is_stored=message.accepted)
            self._reports.add(stored)
            del self._manifests[agent]
            return
        partition = partition_of(agent, self.site.partition.of)
        if partition not in self._assignment.terms:
            return
        count = self._counts[partition]
        count.commands += 1
        stamp = {
            "boot": start_of_partition(self._assignment.start, partition.name),
            "seq": (count.term << 32) + count.commands,
            "federation": self._assignment.federation,
            "epoch": self._assignment.epoch,
        }
        payload = codec.encode(message.model_copy(update=stamp), manifest.v)
        self.transport.publish(self.site.topics.down(agent), self.site.keys.proven(agent, payload))

    def _tell_stored(self) -> None:
        """Tell the coordinator what was stored, and again what it has not noted for a while."""
        if not self._assignment.start or not self._is_connected:
            return
        for message in self._reports.due(self.site.name, self.site.boot):
            self._publish(message)

    def _on_noted(self, message: Noted) -> None:
        """Forget updates that the coordinator has.

        Raises:
            StateError: It does not find some that are here: it has another folder.
        """
        present = [digest for digest in message.missing if digest in self.site.blobs]
        if present:
            raise StateError(
                f"{self.site.blobs.folder}: the coordinator does not find {counted(len(present), 'update')} stored "
                f"here, such as {present[0][:12]}; an aggregator needs the state folder of its coordinator, on the "
                "same machine or as a shared folder"
            )
        updates = self._reports.noted(message.number)
        collection = self._collector.open_round
        if collection is None or not message.missing:
            return
        # What was removed here as well, by a person or with an earlier run, is taken from its agent once more.
        log.warning("updates_removed count=%d folder=%s", len(message.missing), self.site.blobs.folder)
        for stored in updates:
            if stored.manifest.blob.digest in message.missing:
                collection.accepted.pop(stored.agent, None)

    # --- passes ----------------------------------------------------------------------------------------------------

    def _make(self, request: str) -> None:
        """Have the worker make a pass; where it was made before, only say so again."""
        requested = self._passes.get(request)
        if requested is not None:
            if requested.is_done:
                self._report_pass(request)
            return
        if len(self._passes) > MOST_PASSES:
            self._passes = {name: earlier for name, earlier in self._passes.items() if not earlier.is_done}
        self._passes[request] = _Pass()

        def finish(_: None, error: BaseException | None) -> None:
            done = self._passes[request]
            done.is_done = True
            if error is None:
                self.passes_made += 1
            else:
                done.error = f"{type(error).__name__}: {reason_of(error)}"[:1000]
            self._report_pass(request)

        self._worker.submit("pass", lambda: self._files.make(request, self.site.blobs), finish)

    def _report_pass(self, request: str) -> None:
        """Tell the coordinator that a pass is finished, and why there is no answer where there is none."""
        self._publish(PassDone(name=self.site.name, request=request, error=self._passes[request].error))

    # --- presence --------------------------------------------------------------------------------------------------

    def _due_s(self) -> float:
        """Return for how many seconds nothing has to be said; without a connection nobody would hear it."""
        if not self._is_connected:
            return TICK_S
        return max(0.0, self._said_at + SERVING_EVERY_S - self._clock())

    def _report_presence(self) -> None:
        """Tell the coordinator each second that this aggregator is online, and what it does."""
        now = self._clock()
        if not self._is_connected or now - self._said_at < SERVING_EVERY_S:
            return
        self._said_at = now
        self._presence += 1
        partitions = sorted(self._assignment.terms.items())
        self._publish(
            Serving(
                name=self.site.name,
                boot=self.site.boot,
                number=self._presence,
                software=__version__,
                host=socket.gethostname()[:255],
                process=os.getpid(),
                wants=self.site.partition.number,
                of=self.site.partition.of,
                start=self._assignment.start,
                partitions=tuple(ServedPartition(number=partition.number, term=term) for partition, term in partitions),
                collection=self._assignment.collection,
                updates=self.stored,
            )
        )

    def _publish(self, message: Serving | Updates | PassDone) -> None:
        """Send a message with its proof to the coordinator."""
        self.transport.publish(self.site.topics.aggregators_up, self._sealed.encode(message))
