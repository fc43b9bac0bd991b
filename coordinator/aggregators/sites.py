"""The coordinator's side of relays that sum the updates of their site.

The coordinator says to each relay which round is open, and which of the relay's agents are expected in it. The relay
takes their updates and offers their exact sum, which names its members. Once the sum is in the store and the journal
names it with each of them, they get their receipts. A relay has no key that its agents would trust: what it has to say
to them about an upload, it asks the coordinator to say. It is trusted with its agents' updates, so the configuration
names the relays whose sums are taken.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edge_agent.core.errors import ChunkError, MessageError, TensorsError
from edge_agent.core.exact_sum import LARGEST
from edge_agent.core.storage import mapped, sync_folder
from edge_agent.core.weighted_sum import WeightedSum, forms_of_sum
from edge_agent.wire.blobs import flow
from edge_agent.wire.blobs.chunks import Incoming, decode_frame
from edge_agent.wire.messages.fields import BlobRef, Command
from edge_agent.wire.messages.site_sums import (
    MEMBERS,
    MOST_MEMBERS,
    Heard,
    OpenSite,
    SendSum,
    SiteRound,
    SiteSays,
    SiteSeal,
    Speak,
    SummedUpdate,
    SumReady,
    SumReceipt,
    ToSite,
    members_of,
)
from edge_agent.wire.packed import unpack
from edge_agent.wire.tensors import MAX_HEADER_BYTES, Spec, check_specs, decode, first_non_finite, inspect
from edge_agent.wire.topics import Topics

from ..fleet.collection import Collection
from ..fleet.run_ids import RunIds
from ..fleet.uploads import Collector, remove_partial
from ..rounds.compute_requests import MethodValues
from ..rounds.partitioned import Sites
from ..rounds.server_side import forms_of
from ..state.status_file import SiteStatus
from ..text import listed

log = logging.getLogger(__name__)

LEASE_S = 20.0
"""A relay that is silent for so long is not online; it says every five seconds that it is."""

SHARE_OF_DEADLINE = 0.5
"""The share of a round's time after which a relay sends the sum of what it has."""

AT_ONCE_S = 0.001
"""The time after which a relay sends the sum of what it has, once the round has its quorum."""

LEAST_AGENTS = 3
"""Sites with fewer agents in a round send single updates."""

LEAST_CHUNK_BYTES = 1024
"""Chunks below this size are not taken: a peer could cause lists of millions."""

MOST_STARTS = 8
"""The most starts of a relay that are remembered."""

DOUBLE_RETURNS = 2
"""How often starts that were replaced speak again before two relays have one id: a message may come late once."""

_CHECKED = re.compile(r"[0-9a-f]{64}\.whole")
"""Names of the files of sums that are being checked."""

_LENGTH_BYTES = 8
"""The bytes before the header of a container of tensors."""


@dataclass(frozen=True)
class SiteLink:
    """How the coordinator speaks to relays and to agents, and how it knows them."""

    topics: Topics
    publish: Callable[[str, bytes], None]
    subscribe: Callable[..., None]
    send: Callable[[str, Command], None]
    """Sends a command to an agent."""

    seal_of: Callable[[str], SiteSeal]
    """Returns what a relay's messages are sealed by."""

    relay_of: Callable[[str], str]
    """Returns the relay through which an agent speaks; empty: through none."""

    is_double: Callable[[str, str], None]
    """Notes that two relays have one id: the id, and where they run."""

    start: str
    """The start of the coordinator."""


@dataclass
class _Arriving:
    """A sum on its way."""

    ref: BlobRef
    receiving: flow.Receiving


@dataclass
class _Site:
    """A relay whose sums are taken."""

    name: str
    says: SiteSays | None = None
    heard_at: float = float("-inf")
    number: int = 0
    """How many messages about the open round were sent to the relay; it answers with the number of the latest."""

    round: SiteRound | None = None
    """What the relay sums, by the latest of these messages; None: nothing."""

    arriving: _Arriving | None = None
    sums: int = 0
    summed: int = 0
    holds: frozenset[str] = field(default_factory=frozenset)
    hosts: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """The starts of the relay, the newest last, and where each of them runs."""

    returns: int = 0
    """How often a start has spoken after it was replaced by another one."""

    def drop(self) -> None:
        """Take no more of a sum that is on its way, and remove what has arrived of it."""
        if self.arriving is not None:
            self.arriving.receiving.incoming.discard()
            self.arriving = None


class RemoteSites(Sites):
    """Tells relays what is collected, and takes their sums."""

    def __init__(
        self,
        names: Sequence[str],
        link: SiteLink,
        collector: Collector,
        folder: Path,
        run_ids: RunIds,
        objection: Callable[[str, SummedUpdate], str],
        within_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Begin with no relay online.

        Args:
            names: The relays whose sums are taken.
            link: How it speaks and listens.
            collector: What is collected.
            folder: Folder of sums on their way, on the disk of the blobs.
            run_ids: The ids of runs in messages.
            objection: Returns why an agent's update cannot be a part of a sum; empty: it can.
            within_s: Seconds of a round after which relays send what they have.
            clock: Seconds of a clock that never goes back.
        """
        self._sites = {name: _Site(name) for name in names}
        self._link = link
        self._collector = collector
        self._folder = folder
        self._run_ids = run_ids
        self._objection = objection
        self._within_s = within_s
        self._clock = clock
        self._epoch = 0
        self._collection: Collection | None = None
        self._values: MethodValues | None = None
        self._is_hurried = False
        """Whether the open round has its quorum."""

        self._counted: list[tuple[_Site, Collection, str]] = []
        """Sums that count, and whose relays have no receipt yet."""

    def start(self, epoch: int) -> None:
        """Begin to serve: relays that are online say so within seconds."""
        self._epoch = epoch
        remove_partial(self._folder)
        for path in self._folder.glob("*/*.whole"):
            if _CHECKED.fullmatch(path.name):
                path.unlink(missing_ok=True)
        for name in self._sites:
            self._link.subscribe(self._link.topics.site_up(name), self._link.topics.site_chunks(name))

    # --- as rounds see it ------------------------------------------------------------------------------------------

    def announce_collection(self, collection: Collection, values: MethodValues) -> None:
        """Tell the relays what is collected now, where its updates can be summed by them."""
        is_plain = collection.purpose == "train" and not collection.session and not collection.joining
        own = {"fold", "objection"} & set(values.own)
        can_sum = is_plain and values.server_step_is_sum and not own
        self._collection = collection if can_sum else None
        self._values = values
        self._is_hurried = False
        for site in self._sites.values():
            site.drop()
            self._tell(site)

    def hurry(self) -> None:
        """Have the relays send what they have now: the round has its quorum, and will not wait for long."""
        if self._is_hurried:
            return
        self._is_hurried = True
        for site in self._sites.values():
            if site.round is not None:
                self._tell(site)

    def holds(self, agent: str) -> bool:
        """Return whether the update of an agent is at its site."""
        site = self._sites.get(self._link.relay_of(agent))
        return site is not None and agent in site.holds

    def status(self) -> list[SiteStatus]:
        """Return the relays whose sums are taken."""
        now = self._clock()
        rows = []
        for site in self._sites.values():
            is_online = site.says is not None and now - site.heard_at <= LEASE_S
            host = site.says.host if is_online and site.says is not None else ""
            rows.append(SiteStatus(site.name, host, len(site.holds), site.sums, site.summed))
        return rows

    # --- as the event loop sees it ---------------------------------------------------------------------------------

    def heard(self, relay: str, payload: bytes) -> None:
        """Handle a message of a relay.

        Raises:
            MessageError: It is not one of a relay whose sums are taken.
        """
        site = self._sites.get(relay)
        if site is None:
            super().heard(relay, payload)
            return
        message = self._link.seal_of(relay).from_site(payload)
        site.heard_at = self._clock()
        if isinstance(message, SiteSays):
            self._on_says(site, message)
        elif isinstance(message, Speak):
            self._on_speak(site, message)
        else:
            self._on_ready(site, message)

    def chunk(self, relay: str, payload: bytes) -> None:
        """Store chunks of a relay's sum; after the last one it is checked, and counts.

        Raises:
            MessageError: The relay is none whose sums are taken.
            ChunkError: The chunks are of no sum that is awaited, or cannot be stored.
        """
        site = self._sites.get(relay)
        if site is None:
            super().chunk(relay, payload)
            return
        arriving = site.arriving
        if arriving is None:
            raise ChunkError(f"chunks of relay '{relay}' for no sum that is awaited")
        if arriving.receiving.add(decode_frame(payload), self._clock()):
            site.arriving = None
            self._finish(site, arriving)
        elif arriving.receiving.report_due(self._clock()):
            self._ask_for(site, arriving)

    def tick(self) -> None:
        """Confirm sums that are journaled, acknowledge chunks, and forget what relays held that are offline now."""
        self._confirm()
        now = self._clock()
        is_awaited = self._awaited() is not None
        for site in self._sites.values():
            if not is_awaited:
                site.drop()
            if site.arriving is not None and site.arriving.receiving.report_due(now):
                self._ask_for(site, site.arriving)
            if site.holds and now - site.heard_at > LEASE_S:
                log.warning("relay_lost relay=%s holds=%d", site.name, len(site.holds))
                site.holds = frozenset()

    # --- what relays say -------------------------------------------------------------------------------------------

    def _on_says(self, site: _Site, message: SiteSays) -> None:
        """Note that a relay is online, and tell it again what is collected where it does not know."""
        if site.says is None or site.says.boot != message.boot:
            self._on_start(site, message)
        site.says = message
        site.holds = frozenset(message.holds)
        is_behind = (message.start, message.number) != (self._link.start, site.number)
        # Agents of the site may have said hello after the round was opened.
        if is_behind or self._round_of(site) != site.round:
            self._tell(site)
        elif message.holds or site.round is not None:
            self._say(site, Heard())

    def _on_start(self, site: _Site, message: SiteSays) -> None:
        """Note another start of a relay; those that were replaced and speak again show that two relays have one id."""
        if message.boot not in site.hosts:
            log.info("relay_joined relay=%s host=%s", site.name, message.host)
            site.hosts[message.boot] = message.host
            while len(site.hosts) > MOST_STARTS:
                site.hosts.popitem(last=False)
            return
        site.returns += 1
        if site.returns >= DOUBLE_RETURNS:
            hosts = " and ".join(dict.fromkeys(host or "a host without a name" for host in site.hosts.values()))
            self._link.is_double(site.name, f"two relays with this id speak in turn, at {hosts}")

    def _on_speak(self, site: _Site, message: Speak) -> None:
        """Say to an agent what its relay asks for, where it is about the agent's update in the open round.

        Raises:
            MessageError: It is about something else.
        """
        collection = self._awaited()
        agent = message.agent
        if collection is None or agent not in collection.outstanding or self._link.relay_of(agent) != site.name:
            raise MessageError(f"relay '{site.name}' speaks to '{agent}', from which no update of its site is awaited")
        if message.command.run != self._run_ids.of(collection.run):
            raise MessageError(f"relay '{site.name}' speaks to '{agent}' about another run")
        self._link.send(agent, message.command.model_copy(update={"run": collection.run}))

    def _on_ready(self, site: _Site, message: SumReady) -> None:
        """Have a relay send a sum, unless it is here already, or comes too late."""
        digest = message.blob.digest
        run = self._run_ids.name(message.run)
        if any(digest == counted for _, _, counted in self._counted):
            return  # the next tick sends the receipt
        if run is not None and self._collector.has_sum(run, message.round, digest):
            self._say(site, SumReceipt(digest=digest, is_accepted=True))
            return
        if run is not None and self._collector.may_open(run, message.round):
            return  # the relay keeps its sum, and announces it again
        collection = self._awaited()
        if collection is None or (run, message.round) != (collection.run, collection.round):
            self._refuse(site, digest, "late: the round of the sum is not open")
            return
        if not self._fits(message.blob, collection):
            self._refuse(site, digest, f"{message.blob.size_bytes} bytes, which no sum of this round has")
            return
        arriving = site.arriving
        if arriving is None or arriving.ref != message.blob:
            site.drop()
            incoming = Incoming(message.blob, self._folder / site.name)
            receiving = flow.Receiving(incoming, self._clock(), flow.UPLOAD_REPORT_BYTES)
            arriving = site.arriving = _Arriving(message.blob, receiving)
        arriving.receiving.restart(self._clock())
        if arriving.receiving.incoming.chunks.complete:
            site.arriving = None
            self._finish(site, arriving)
        else:
            self._ask_for(site, arriving)

    # --- sums ------------------------------------------------------------------------------------------------------

    def _fits(self, blob: BlobRef, collection: Collection) -> bool:
        """Return whether a sum may have this size, before anything is allocated for it; packing may add a little."""
        most = _most_bytes(collection) * 11 // 10
        return blob.size_bytes <= most and blob.chunk_bytes >= LEAST_CHUNK_BYTES

    def _ask_for(self, site: _Site, arriving: _Arriving) -> None:
        self._say(site, SendSum(digest=arriving.ref.digest, missing=arriving.receiving.missing))

    def _finish(self, site: _Site, arriving: _Arriving) -> None:
        """Check a sum that has arrived; take it, or remove it and say to the relay why."""
        # 1. A damaged one is awaited again: the relay announces it again.
        digest = arriving.ref.digest
        path = self._folder / site.name / f"{digest}.whole"
        incoming = arriving.receiving.incoming
        try:
            incoming.finish(path, durable=True)
        except ChunkError as error:
            log.warning("sum_damaged relay=%s reason=%s", site.name, error)
            return
        except OSError:
            incoming.close()
            raise
        # 2. Its round is open still, and its content is a sum of updates of that round.
        collection = self._awaited()
        try:
            if collection is None:
                raise MessageError("late: its round is over")
            members = self._check(path, collection)
        except (MessageError, TensorsError) as error:
            path.unlink(missing_ok=True)
            self._refuse(site, digest, str(error))
            return
        # 3. Updates of all its members are awaited; otherwise the relay makes it again without some.
        wrong = self._wrong_members(site, collection, members)
        if wrong:
            path.unlink(missing_ok=True)
            self._refuse(site, digest, next(iter(wrong.values())), tuple(sorted(wrong)))
            return
        self._take(site, collection, path, members)

    def _take(self, site: _Site, collection: Collection, path: Path, members: tuple[SummedUpdate, ...]) -> None:
        """Put a checked sum into the store, and journal it with its members; receipts follow in the next tick."""
        digest = path.stem
        size_bytes = path.stat().st_size
        blob = self._collector.blobs.path(digest)
        path.replace(blob)
        sync_folder(blob.parent)
        self._collector.summed(collection, members, digest, size_bytes)
        site.sums += 1
        site.summed += len(members)
        site.holds -= {member.agent for member in members}
        log.info(
            "sum_taken relay=%s run=%s round=%d updates=%d bytes=%d",
            *(site.name, collection.run, collection.round, len(members), size_bytes),
        )
        self._counted.append((site, collection, digest))

    def _confirm(self) -> None:
        """Tell relays that their sums count, where the journal has their updates now; others offer theirs again."""
        counted = self._counted
        self._counted = []
        for site, collection, digest in counted:
            if self._collector.has_sum(collection.run, collection.round, digest):
                self._say(site, SumReceipt(digest=digest, is_accepted=True))

    def _check(self, path: Path, collection: Collection) -> tuple[SummedUpdate, ...]:
        """Return the members of a sum that has the tensors of the round's updates, and the weight of its members.

        Raises:
            TensorsError: It has others, or is no sum.
            MessageError: Its members are malformed, it is of another round, or its weight is not that of its members.
        """
        # 1. Names, forms and round, before a value is read.
        data = unpack(mapped(path), _most_bytes(collection))
        specs, about = inspect(data)
        check_specs(specs, _specs_of_sum(collection.expected))
        members = members_of(about.get(MEMBERS, ""))
        if (about.get("run"), about.get("round")) != (self._run_ids.of(collection.run), str(collection.round)):
            raise MessageError("the sum is of another round")
        # 2. Values.
        tensors = decode(data)
        not_finite = first_non_finite(tensors)
        if not_finite is not None:
            raise MessageError(f"'{not_finite}' of the sum holds NaN or infinity")
        total = WeightedSum.from_tensors(tensors)
        self._check_weight(total, members)
        _check_values(total)
        return members

    def _check_weight(self, total: WeightedSum, members: Sequence[SummedUpdate]) -> None:
        """Return quietly where a sum has as many updates as members, and their weight.

        Raises:
            MessageError: It has others, or is not exact.
        """
        weight = float(len(members))
        if self._values is not None and self._values.weighting == "samples":
            weight = float(sum(member.samples for member in members))
        if total.count != len(members) or total.weight != weight or not total.is_exact:
            raise MessageError(
                f"the sum has {total.count} updates of weight {total.weight:g}, and its members have {len(members)} of "
                f"{weight:g}"
            )

    def _wrong_members(self, site: _Site, collection: Collection, members: Sequence[SummedUpdate]) -> Mapping[str, str]:
        """Return agent -> reason, of those whose updates cannot be a part of this sum."""
        outstanding = set(collection.outstanding)
        wrong = {}
        for member in members:
            if member.agent not in outstanding:
                wrong[member.agent] = f"no update of {member.agent} is awaited in round {collection.round}"
            elif self._link.relay_of(member.agent) != site.name:
                wrong[member.agent] = f"{member.agent} does not speak through relay '{site.name}'"
            elif objection := self._objection(member.agent, member):
                wrong[member.agent] = objection
        return wrong

    def _refuse(self, site: _Site, digest: str, reason: str, without: tuple[str, ...] = ()) -> None:
        log.warning("sum_refused relay=%s without=%s reason=%s", site.name, listed(without), reason)
        receipt = SumReceipt(digest=digest, is_accepted=False, reason=reason[:1000], without=without[:MOST_MEMBERS])
        self._say(site, receipt)

    # --- messages to relays ----------------------------------------------------------------------------------------

    def _awaited(self) -> Collection | None:
        """Return the collection whose updates are summed by relays; None where there is none that is still open."""
        collection = self._collection
        return collection if collection is not None and self._collector.open_round is collection else None

    def _round_of(self, site: _Site) -> SiteRound | None:
        """Return what a relay is to sum; None: nothing."""
        collection = self._awaited()
        if collection is None or self._values is None:
            return None
        agents = tuple(agent for agent in collection.outstanding if self._link.relay_of(agent) == site.name)
        if not LEAST_AGENTS <= len(agents) <= MOST_MEMBERS:
            return None
        return SiteRound(
            run=self._run_ids.of(collection.run),
            round=collection.round,
            agents=agents,
            update=forms_of(collection.expected),
            weighting=self._values.weighting,
            within_s=AT_ONCE_S if self._is_hurried else self._within_s,
        )

    def _tell(self, site: _Site) -> None:
        """Tell a relay what is collected now; what is too long for a message is collected one by one."""
        site.round = self._round_of(site)
        site.number += 1
        message = OpenSite(epoch=self._epoch, start=self._link.start, number=site.number, round=site.round)
        try:
            self._say(site, message)
        except MessageError as error:
            log.warning("round_not_told relay=%s reason=%s", site.name, error)
            self._say(site, message.model_copy(update={"round": None}))

    def _say(self, site: _Site, message: ToSite) -> None:
        payload = self._link.seal_of(site.name).encode(message)
        self._link.publish(self._link.topics.site_down(site.name), payload)


def _check_values(total: WeightedSum) -> None:
    """Return quietly where no value of a sum shows that one of its updates would have been refused.

    Raises:
        MessageError: A value is larger than that of any exact sum, or a variance is below 0.
    """
    for name, array in total.sums():
        if array.size and max(array.max(), -array.min()) > LARGEST:
            raise MessageError(f"'{name}' of the sum has a value beyond {LARGEST:g}, which no exact sum has")
        if name.endswith(".running_var") and (array < 0).any():
            raise MessageError(f"'{name}' of the sum holds a variance below 0")


def _most_bytes(collection: Collection) -> int:
    """Return the most bytes of a sum of the collection's updates, before it is packed."""
    content_bytes = sum(spec.nbytes for spec in _specs_of_sum(collection.expected).values())
    return content_bytes + _LENGTH_BYTES + MAX_HEADER_BYTES


def _specs_of_sum(expected: Mapping[str, Spec]) -> dict[str, Spec]:
    """Return the form of each array of a sum of updates with these forms."""
    forms = forms_of_sum({name: (spec.dtype, spec.shape) for name, spec in expected.items()})
    return {name: Spec(dtype, shape) for name, (dtype, shape) in forms.items()}
