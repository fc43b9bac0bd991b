"""Downloads: blobs are offered to agents, and sent to those that ask, by broadcast where several need the same.

A blob that several agents ask for is broadcast once; an agent with a slow or far link gets it for itself.
`fleet.carousel` has the order of the chunks of a broadcast. Where large blobs have URLs (`fleet.blob_urls`), an agent
that fetches by HTTP gets them as the answer to its request, and chunks only when it says that they were of no use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_high, median_low

from edge_agent.wire.blobs import chunks
from edge_agent.wire.blobs.flow import AHEAD_BYTES, STALL_S, Pace, Sending
from edge_agent.wire.messages.down import Listen, Located
from edge_agent.wire.messages.fields import Command, Ranges
from edge_agent.wire.messages.up import Progress, Want
from edge_agent.wire.topics import Topics

from .blob_urls import BlobSite, BlobUrls
from .carousel import Carousel, bits_of

Send = Callable[[str, Command], None]

GATHER_S = 0.05
"""A blob that several agents need waits for the next one so long, unless all agents with the offer have answered."""

LONGEST_GATHER_S = 2.0
"""The longest that the first agent waits for others, however long these take to answer."""

OVERSHOOT = 0.1
"""Share of a blob that an agent may receive by broadcast though it has it."""

SLOW_SHARE = 1 / 8
"""A link below this share of the median rate is too slow for a broadcast with the others."""

SLOW_SAMPLES = 4
"""The number of measurements after which the rate of a link is trusted."""

FEW_LISTENERS = 8
"""Up to this number of silent agents, bad links may be chance: each of them gets the blob for itself."""

LONGEST_SILENCE_S = 10.0
"""How long more agents than that may be silent at once: the answers of thousands of agents take seconds to arrive.

Each that gets the blob for itself makes those of the others take longer still. Of 4,000 agents with 0.5 MB on two cores
1,106 were silent for two seconds at the first frames of a broadcast, and in the end nine in ten had got it alone.
"""


def _is_general(silent: int, listeners: int) -> bool:
    """Return whether so many of the listeners to a broadcast are silent that it is not for their links.

    Broker or machine are slow then. Sent to each of them alone, the blob would be published once for every agent.
    """
    return silent > FEW_LISTENERS and 2 * silent > listeners


def _silent_listeners(listeners: Mapping[str, Sending], heard_until: float) -> list[str]:
    """Return the listeners to a broadcast that have been silent for so long that it is for their links.

    Those that are silent hold back nobody, so it costs the others nothing to wait for them.

    Args:
        listeners: Agent -> what is sent to it.
        heard_until: Until when what has arrived here has been handled.
    """
    silent = [agent for agent, sending in listeners.items() if not sending.is_moving(heard_until)]
    if len(silent) <= FEW_LISTENERS:
        return silent
    if _is_general(len(silent), len(listeners)):
        return []
    return [agent for agent in silent if heard_until - listeners[agent].moved_at >= LONGEST_SILENCE_S]


LONGEST_JOIN_S = 10.0
"""How long agents may take to listen where most of them take long; the broadcast waits for them."""

FAR_TIMES = 4
"""A round trip of so many times the median, that is long for a broadcast besides, keeps an agent out of it."""

SWEEP_S = 0.5
"""The time between two looks at all offers under way, whether or not a message has come."""

Publish = Callable[[str, bytes], None]


@dataclass
class _Offer:
    """One blob and the agents that it is offered to."""

    blob: chunks.Outgoing
    carousel: Carousel
    unanswered: set[str] = field(default_factory=set)
    """Agents that were offered the blob and have not said whether they have it."""

    waiting: dict[str, Want] = field(default_factory=dict)
    """Agents that have asked for chunks, until the blob is sent to all who wait."""

    start_at: float = 0.0
    """When to send to those who wait, unless all have answered before."""

    last_start_at: float = 0.0
    """When to do so at the latest."""

    answered_at: float = 0.0
    """When an agent has answered last."""

    direct: dict[str, Sending] = field(default_factory=dict)
    """What is sent to single agents, beside the broadcast."""

    held: dict[str, Sending] = field(default_factory=dict)
    """What is under way to agents that wait again."""

    apart: set[str] = field(default_factory=set)
    """Agents that were asked not to listen to the broadcast."""

    invited: set[str] = field(default_factory=set)
    """Agents that were asked to listen to the broadcast; one that requests the blob for itself again cannot listen."""

    joining: dict[str, float] = field(default_factory=dict)
    """Invited agent -> when it was invited, until it answers. On a slow link it may listen before its answer comes."""

    unlocated: dict[str, Want] = field(default_factory=dict)
    """Agents that fetch by HTTP and have asked, until it is known where the blob is."""

    fetching: set[str] = field(default_factory=set)
    """Agents that were sent URLs, until they have the blob or ask for chunks."""

    median_rate: float = 0.0
    """Bytes per second of the links of all who get it, as of the last sweep or start; 0: unknown."""

    median_trip_s: float = 0.0
    """The round trip of those links, likewise; 0: unknown."""

    def sending_to(self, agent: str) -> Sending | None:
        """Return what is sent to an agent now; None where nothing is."""
        return self.direct.get(agent) or self.carousel.listeners.get(agent) or self.held.get(agent)

    def is_open_for(self, agent: str) -> bool:
        """Return whether the agent was offered the blob and has not said that it has it."""
        is_asking = agent in self.unanswered or agent in self.waiting or agent in self.joining
        is_fetching = agent in self.unlocated or agent in self.fetching
        return is_asking or is_fetching or self.sending_to(agent) is not None

    @property
    def sendings(self) -> tuple[Sending, ...]:
        """What is sent to all agents."""
        return (*self.direct.values(), *self.carousel.listeners.values(), *self.held.values())

    @property
    def is_busy(self) -> bool:
        """Whether anything is to be sent, or waits for others."""
        return bool(self.waiting or self.joining or self.unlocated or self.direct or self.carousel.listeners)


class Distributor:
    """All blobs on offer. `pump` does the sending; call it after each event and when it says."""

    def __init__(
        self,
        topics: Topics,
        publish: Publish,
        send: Send,
        clock: Callable[[], float],
        unread_s: Callable[[], float] = lambda: 0.0,
        urls: BlobUrls | None = None,
    ) -> None:
        """Begin without offers.

        Args:
            topics: The topics of the federation.
            publish: Publishes a frame on a topic.
            send: Sends a command to an agent.
            clock: The time in seconds, which only goes forward.
            unread_s: Returns how long the oldest message that has arrived has waited to be handled, in seconds.
            urls: The URLs of large blobs; None: all go in chunks.
        """
        self._topics = topics
        self._publish = publish
        self._say = send
        self._clock = clock
        self._unread_s = unread_s
        self._urls = urls
        self._by_http: set[str] = set()
        """Agents whose hello says that they fetch blobs by HTTP."""

        self._offers: dict[str, _Offer] = {}
        self._busy: dict[str, _Offer] = {}
        self._touched: dict[str, _Offer] = {}
        self._sweep_at = 0.0
        self._paces: dict[str, Pace] = {}
        self._listening: set[str] = set()
        """Agents whose last request was one to listen to a broadcast: the next one will be, too."""

        self.bytes_to: dict[str, int] = {}
        self.published_bytes = 0
        """What was published of blobs; a broadcast counts once, however many agents receive it."""

        self.fetched_bytes = 0
        """What agents have fetched of blobs by HTTP."""

    def describe_urls(self) -> BlobSite | None:
        """Return where large blobs are fetched by HTTP and how that fares, for the status; None: nowhere."""
        return None if self._urls is None else self._urls.describe()

    def note_way(self, agent: str, *, by_http: bool) -> None:
        """Note whether an agent fetches blobs by HTTP, as its hello says."""
        if by_http:
            self._by_http.add(agent)
        else:
            self._by_http.discard(agent)

    def offer(self, blob: chunks.Outgoing, agents: Iterable[str]) -> None:
        """Let these agents ask for the blob from now on; each of them is expected to answer."""
        digest = blob.ref.digest
        if digest not in self._offers:
            self._offers[digest] = _Offer(blob, Carousel(blob))
            if self._urls is not None and blob.ref.size_bytes > self._urls.above_bytes:
                self._urls.offered(blob)
        self._offers[digest].unanswered.update(agents)

    def withdraw(self, digests: Iterable[str]) -> None:
        """Take back the offers of these blobs, which are not needed any more."""
        for digest in digests:
            offer = self._offers.pop(digest, None)
            if offer is not None:
                for sending in offer.sendings:
                    sending.cut()
                if self._urls is not None:
                    self._urls.withdrawn(digest)
            self._busy.pop(digest, None)
            self._touched.pop(digest, None)

    def have(self, agent: str, digest: str) -> None:
        """Note that an agent has the blob, from its cache or because it has just received it."""
        offer = self._offers.get(digest)
        if offer is None:
            return
        sending = offer.sending_to(agent)
        if sending is not None:
            sending.arrived(self._clock())
        if self._urls is not None and agent in offer.fetching:
            self._urls.arrived(agent, offer.blob.ref)
        self._note_answer(offer, agent)
        self._leave(offer, agent)
        self._touch(offer)

    def want(self, agent: str, message: Want) -> bool:
        """Note which chunks an agent lacks; return False when no such blob is on offer.

        Raises:
            ChunkError: ranges outside the blob.
        """
        offer = self._offers.get(message.digest)
        if offer is None:
            return False
        if message.direct and agent in offer.joining:
            return True  # sent before it was asked to listen
        if self._may_fetch(offer, agent, message):
            chunks.flags_of(message.ranges, offer.blob.count)  # only checks them, before anything is changed
            if self._locate(offer, agent, message):
                return True
        offer.fetching.discard(agent)
        offer.unlocated.pop(agent, None)
        sending = offer.sending_to(agent)
        if sending is not None and agent not in offer.held and (agent in offer.direct) == message.direct:
            self._lacks(offer, sending, message.ranges)
        else:
            chunks.flags_of(message.ranges, offer.blob.count)  # only checks them, before anything is changed
            if sending is not None:  # what is under way to it arrives also when it listens otherwise from now on
                offer.direct.pop(agent, None)
                offer.carousel.leave(agent)
                offer.held[agent] = sending
            offer.waiting[agent] = message
        if message.direct:
            self._listening.discard(agent)
        else:
            self._listening.add(agent)
        offer.joining.pop(agent, None)
        self._note_answer(offer, agent)
        if not self._pace(agent).is_ready(offer.blob.ref.chunk_bytes):
            self._leave_abandoned(offer, agent)
        self._touch(offer)
        return True

    def waiting_for_blobs(self, agents: Iterable[str]) -> int:
        """Return how many of these agents have yet to say that they have all that they were offered."""
        count = 0
        for agent in agents:
            if any(offer.is_open_for(agent) for offer in self._offers.values()):
                count += 1
        return count

    def take(self, agent: str, digest: str, *, is_cached: bool = False) -> chunks.Outgoing | None:
        """Return the blob for an agent in this process; None: it is not on offer.

        It is counted as if it had been sent, unless the agent would have it in its cache.
        """
        offer = self._offers.get(digest)
        if offer is None:
            return None
        self.have(agent, digest)
        if not is_cached:
            self.bytes_to[agent] = self.bytes_to.get(agent, 0) + offer.blob.wire_bytes
        return offer.blob

    def progress(self, agent: str, message: Progress) -> None:
        """Note what has arrived at an agent since it asked, as it reports.

        Raises:
            ChunkError: ranges outside the blob.
        """
        offer = self._offers.get(message.digest)
        sending = None if offer is None else offer.sending_to(agent)
        if offer is None or sending is None:
            return
        self._lacks(offer, sending, message.missing)
        if agent in offer.carousel.listeners and self._is_slow(agent, offer):
            self._separate(offer, agent)
        self._touch(offer)

    def forget(self, agent: str) -> None:
        """Wait for nothing of an agent that is offline, or has a new connection: its link may be another one."""
        for offer in self._offers.values():
            self._note_answer(offer, agent)
            self._leave(offer, agent)
            offer.apart.discard(agent)
            offer.invited.discard(agent)
        self._paces.pop(agent, None)
        self._listening.discard(agent)

    def disconnected(self) -> None:
        """Note that the coordinator's own connection is lost, and what was under way with it."""
        for offer in self._busy.values():
            for sending in offer.sendings:
                sending.cut()
            offer.carousel.changed()

    def pump(self) -> float | None:
        """Publish what flow control allows.

        Returns:
            The seconds until the next call is due; None where only events matter.
        """
        now = self._clock()
        # From time to time all offers under way are looked at, otherwise those alone for which something has happened.
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            self._touched.update(self._busy)
            for offer in self._busy.values():
                self._measure(offer)
            self._count_fetched()
        touched = self._touched
        self._touched = {}
        for digest, offer in touched.items():
            if offer.waiting and self._has_gathered(offer, now):
                self._start(offer)
            self._locate_all(offer)
            self._send(offer, now)
            if not offer.is_busy:
                self._busy.pop(digest, None)
            elif offer.waiting:
                self._touched[digest] = offer
        if not self._busy:
            self._count_fetched()
            return None
        next_start_at = min((offer.start_at for offer in self._touched.values()), default=self._sweep_at)
        return max(0.0, min(self._sweep_at, next_start_at) - now)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _touch(self, offer: _Offer) -> None:
        digest = offer.blob.ref.digest
        self._touched[digest] = offer
        if offer.is_busy:
            self._busy[digest] = offer

    def _may_fetch(self, offer: _Offer, agent: str, message: Want) -> bool:
        """Return whether an agent that asks for a blob may get its URLs instead of chunks."""
        if self._urls is None or message.by_chunks or agent not in self._by_http:
            return False
        return offer.blob.ref.size_bytes > self._urls.above_bytes

    def _locate(self, offer: _Offer, agent: str, message: Want) -> bool:
        """Send an agent the URLs of a blob, or have it wait for them; return False where there will be none."""
        if self._urls is None:
            return False
        digest = offer.blob.ref.digest
        urls = self._urls.urls(agent, digest)
        if urls is not None and not urls:
            return False
        # From now on it is not sent chunks, neither alone nor by broadcast.
        self._leave(offer, agent)
        self._note_answer(offer, agent)
        if urls is None:
            offer.unlocated[agent] = message
        else:
            offer.fetching.add(agent)
            self._say(agent, Located(digest=digest, urls=urls))
        self._touch(offer)
        return True

    def _locate_all(self, offer: _Offer) -> None:
        """Answer those who wait to hear where a blob is, as soon as that is known."""
        waiting = offer.unlocated
        offer.unlocated = {}
        for agent, want in waiting.items():
            if not self._locate(offer, agent, want):
                offer.waiting[agent] = want

    def _count_fetched(self) -> None:
        """Count the bytes that agents have fetched since the last call as bytes to them."""
        if self._urls is None:
            return
        for agent, size in self._urls.take_fetched().items():
            self.fetched_bytes += size
            self.bytes_to[agent] = self.bytes_to.get(agent, 0) + size

    def _note_answer(self, offer: _Offer, agent: str) -> None:
        """While answers keep coming, the first of those who wait goes on waiting, up to a limit."""
        now = self._clock()
        offer.unanswered.discard(agent)
        if len(offer.waiting) == 1 and agent in offer.waiting:
            offer.last_start_at = now + LONGEST_GATHER_S
        offer.answered_at = now
        offer.start_at = min(now + GATHER_S, offer.last_start_at)

    def _has_gathered(self, offer: _Offer, now: float) -> bool:
        """Return whether to send to those who wait: all have answered, or the others take too long."""
        return not offer.unanswered or now >= self._gathered_at(offer, now)

    def _gathered_at(self, offer: _Offer, now: float) -> float:
        """Return when to stop waiting for more requests: as long as the longest of them may take to come."""
        if offer.start_at <= now < offer.last_start_at:
            longest = max((self._request_takes_s(agent) for agent in offer.unanswered), default=0.0)
            offer.start_at = min(max(offer.answered_at + longest, offer.start_at), offer.last_start_at)
        return offer.start_at

    def _request_takes_s(self, agent: str) -> float:
        """Return how long this agent takes to request a blob; 0 where its round trip is not known.

        One that listens to broadcasts subscribes before it asks, which is one round trip more. Without the time for
        that, the blob would be broadcast while it is about to ask: it would arrive, and be sent again as requested.
        """
        pace = self._paces.get(agent)
        if pace is None or not pace.samples:
            return 0.0
        trips = 2 if agent in self._listening else 1
        return trips * pace.round_trip_s

    def _leave(self, offer: _Offer, agent: str) -> None:
        offer.waiting.pop(agent, None)
        offer.joining.pop(agent, None)
        offer.unlocated.pop(agent, None)
        offer.fetching.discard(agent)
        for sending in (offer.direct.pop(agent, None), offer.held.pop(agent, None), offer.carousel.leave(agent)):
            if sending is not None:
                sending.cut()

    def _leave_abandoned(self, requested: _Offer, agent: str) -> None:
        """Send the agent no other blob that it needs no longer, which takes a part of its link.

        If it needs that one after all, it asks for it again.
        """
        for offer in self._busy.values():
            sending = offer.sending_to(agent)
            if offer is not requested and sending is not None and sending.is_abandoned(self._clock()):
                self._leave(offer, agent)

    def _lacks(self, offer: _Offer, sending: Sending, ranges: Ranges) -> None:
        before = sending.need
        sending.lacks(ranges, self._clock())
        if sending.need != before:
            offer.carousel.changed()

    def _start(self, offer: _Offer) -> None:
        """Send to all who wait: by broadcast to those who need the same, to the others alone."""
        self._measure(offer)
        waiting = offer.waiting
        offer.waiting = {}
        others = len(waiting) + len(offer.carousel.listeners) + len(offer.unanswered) - 1
        # 1. A broadcast sends each chunk that any agent needs. An agent that has many of them already gets the rest for
        # itself.
        needs = {agent: bits_of(chunks.flags_of(want.ranges, offer.blob.count)) for agent, want in waiting.items()}
        broadcast = offer.carousel.wanted
        for need in needs.values():
            broadcast |= need
        # 2. Each agent gets it by its own way, or is asked to take the other one.
        for agent, want in waiting.items():
            overshoot = (broadcast & ~needs[agent]).bit_count()
            is_apart = self._is_apart(offer, agent, overshoot)
            stays_alone = is_apart or not others or agent in offer.invited
            if want.direct and stays_alone:
                offer.direct[agent] = self._begin(offer, agent, want)
            elif want.direct:
                self._invite(offer, agent)
            elif is_apart and others:
                offer.apart.discard(agent)  # it asks as a listener: the message to it was lost, so it is sent again
                self._separate(offer, agent)
            else:
                offer.carousel.join(agent, self._begin(offer, agent, want), self._clock())

    def _is_apart(self, offer: _Offer, agent: str, overshoot: int) -> bool:
        """Return whether an agent is better served alone: by its link, or by what it has already.

        ``overshoot``: how many chunks it would receive by broadcast though it has them.
        """
        has_unlike_link = self._is_slow(agent, offer) or self._is_far(agent, offer)
        has_most = overshoot > OVERSHOOT * offer.blob.count
        return agent in offer.apart or has_most or has_unlike_link

    def _invite(self, offer: _Offer, agent: str) -> None:
        """Ask an agent that requests the blob for itself to listen to the broadcast; its answer is waited for."""
        self._say(agent, Listen(digest=offer.blob.ref.digest, broadcast=True))
        offer.invited.add(agent)
        offer.joining[agent] = self._clock()
        offer.unanswered.add(agent)

    def _begin(self, offer: _Offer, agent: str, want: Want) -> Sending:
        """Return what is sent to an agent from now on, which continues what is under way to it."""
        sending = offer.held.pop(agent, None) or Sending(offer.blob, self._pace(agent))
        sending.lacks(want.ranges, self._clock())
        return sending

    def _pace(self, agent: str) -> Pace:
        return self._paces.setdefault(agent, Pace(AHEAD_BYTES))

    def _measure(self, offer: _Offer) -> None:
        """Compute the median rate of the offer: not for each message, because all its agents count."""
        agents = {*offer.waiting, *offer.carousel.listeners, *offer.direct}
        paces = [pace for pace in map(self._paces.get, agents) if pace is not None]
        rates = [pace.rate for pace in paces if pace.rate]
        trips_s = [pace.round_trip_s for pace in paces if pace.samples]
        offer.median_rate = median_high(rates) if rates else 0.0
        offer.median_trip_s = median_low(trips_s) if trips_s else 0.0

    def _is_slow(self, agent: str, offer: _Offer) -> bool:
        """Return whether the others would have to wait for this agent's link."""
        mine = self._pace(agent)
        return mine.samples >= SLOW_SAMPLES and mine.rate < SLOW_SHARE * offer.median_rate

    def _is_far(self, agent: str, offer: _Offer) -> bool:
        """Return whether the others would get the blob while this agent is still about to listen.

        To be asked, to subscribe, to hear that it has, and to say so takes two round trips. What is broadcast meanwhile
        reaches it, too, and nobody knows: it would get the blob twice.
        """
        mine = self._pace(agent)
        takes_s = 2 * mine.round_trip_s
        return mine.samples > 0 and takes_s >= STALL_S and mine.round_trip_s > FAR_TIMES * offer.median_trip_s

    def _late_to_join(self, offer: _Offer, heard_until: float) -> list[str]:
        """Return the agents that were asked to listen long ago and have not said that they do.

        Where most of those asked are late, it is not their links, and they have more time.
        """
        patience_s = max(STALL_S, 3 * offer.median_trip_s)
        late = [agent for agent, at in offer.joining.items() if heard_until - at >= patience_s]
        if not _is_general(len(late), len(offer.joining) + len(offer.carousel.listeners)):
            return late
        return [agent for agent in late if heard_until - offer.joining[agent] >= LONGEST_JOIN_S]

    def _separate(self, offer: _Offer, agent: str) -> None:
        """Have an agent request the blob for itself."""
        if agent not in offer.apart:
            offer.apart.add(agent)
            self._say(agent, Listen(digest=offer.blob.ref.digest, broadcast=False))

    def _send(self, offer: _Offer, now: float) -> None:
        """Publish the chunks of one blob that are due: to single agents, then by broadcast."""
        for agent, sending in offer.direct.items():
            topic = self._topics.down_chunks(agent)
            for frame in sending.due(now):
                self._publish_frame(topic, frame, (agent,))
        # What has waited here unread may be the answer of those that seem silent.
        heard_until = now - self._unread_s()
        for agent in self._late_to_join(offer, heard_until):
            del offer.joining[agent]
            self._separate(offer, agent)
        if offer.joining:
            return
        listeners = offer.carousel.listeners
        for agent in _silent_listeners(listeners, heard_until):
            self._separate(offer, agent)
        digest = offer.blob.ref.digest
        topic = self._topics.down_chunks(*listeners) if len(listeners) == 1 else self._topics.broadcast(digest)
        for frame in offer.carousel.due(now):
            self._publish_frame(topic, frame, listeners)

    def _publish_frame(self, topic: str, frame: bytes, agents: Iterable[str]) -> None:
        """Publish one chunk, and count it once, and for each agent that receives it."""
        self._publish(topic, frame)
        self.published_bytes += len(frame)
        for agent in agents:
            self.bytes_to[agent] = self.bytes_to.get(agent, 0) + len(frame)
