"""A relay: what passes between the broker of a site and that of the coordinator, and what is answered at the site."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.children import InlineWorker, Worker
from ..core.errors import HeadwaterError, MessageError, ProtocolMismatch, UsageError, cause
from ..core.formats import printable
from ..core.logs import is_power_of_two
from ..core.time_and_text import utc_text
from ..version import __version__
from ..wire.blobs.chunks import BlobCache, decode_frame
from ..wire.messages import codec, down, up
from ..wire.messages.fields import HTTP_BLOBS, HTTP_UPLOADS, RELAY, Command, Control
from ..wire.messages.site_sums import MOST_MEMBERS, FromSite, OpenSite, SendSum, SiteSays, SiteSeal, SumReceipt
from ..wire.seal import AgentKey
from ..wire.topics import Topics
from ..wire.transport import BrokerConnection, Connected, Disconnected, Event, Message, Subscribed, Transport
from .members import Member, Members
from .settings import RelayConfig
from .site_blobs import SiteBlobs
from .sums import SiteSums

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 0.5
"""The longest wait for a message in seconds: timers are looked at after it."""

BURST = 256
"""The most messages of the site that are handled before the coordinator's are looked at again."""

MOST_FACTS = 32
"""The most facts of a hello."""


SAYS_EVERY_S = 5.0
"""Seconds between two messages by which a relay says that it is online, to a coordinator that takes its sums."""

SAYS_SELDOM_S = 60.0
"""The same while no coordinator has said that it takes sums of this relay."""


@dataclass(frozen=True)
class _Followed:
    """The newest message of a coordinator about what is summed; a recorded one is older."""

    epoch: int = -1
    start: str = ""
    number: int = 0

    def is_newer(self, message: OpenSite) -> bool:
        """Return whether a message is of a later start of the coordinator, or a later one of the same start."""
        if message.epoch != self.epoch:
            return message.epoch > self.epoch
        return message.start == self.start and message.number > self.number


class Relay:
    """The relay of a site: call `start`, then `step` in a loop, then `close`."""

    def __init__(
        self,
        config: RelayConfig,
        upstream: Transport,
        site: Transport,
        clock: Callable[[], float],
        now: Callable[[], float],
        key: AgentKey | None = None,
        worker: Worker | None = None,
    ) -> None:
        """Put a relay together; nothing is sent before `start`.

        Args:
            config: Its configuration.
            upstream: The connection to the coordinator's broker.
            site: The connection to the broker of the site. Its events are handled after those of ``upstream``, whose
                `receive` returns where this one has events.
            clock: Monotonic seconds.
            now: Seconds of the wall clock, for the status.
            key: What this relay shares with its coordinator; None: it sums no updates.
            worker: Adds updates up; None: they are added up at once, in the loop.
        """
        self._worker = worker = worker or InlineWorker()
        self.config = config
        self.topics = Topics(config.federation)
        self._upstream = upstream
        self._site = site
        self._now = now
        self.members = Members(config.state / "agents", config.most_agents, clock())
        self._seq = 0
        cache = BlobCache(config.state / "cache", config.cache_bytes)
        self.blobs = SiteBlobs(cache, self, self._send_frame, clock)
        self._seal: SiteSeal | None = None
        self.sums: SiteSums | None = None
        """Sums updates; None where this relay has no key, or shall not."""

        if key is not None and config.sum_updates:
            self._seal = SiteSeal(key)
            self.sums = SiteSums(
                config.state / "updates", self._say, self._send_sum_frame, self._is_online, worker, clock
            )
        self._clock = clock
        self._boot = secrets.token_hex(8)
        self._followed = _Followed()
        self._says_at = float("-inf")
        self._upstream_broker: BrokerConnection | None = None
        """The coordinator's broker that is connected; None: none is."""

        self._site_broker: BrokerConnection | None = None
        self._upstream_up = False
        self._site_up = False
        self._hears_coordinator = False
        """Whether a coordinator has said something since the last connection."""

        self._broadcasts = self.topics.broadcast("")
        self.refused = 0
        """Messages that were not passed on, since the start."""

        self._turned_away = 0
        """How often an agent was turned away because the site has too many."""

    # --- life ------------------------------------------------------------------------------------------------------

    @property
    def waits_for(self) -> str:
        """What the relay waits for; empty while messages pass."""
        if not self._site_up:
            return f"the broker of the site, {self.config.site.names}"
        if not self._upstream_up:
            return f"the coordinator's broker, {self.config.broker.names}"
        if not self.members.online:
            return f"agents of federation '{self.config.federation}' at the broker of the site"
        if not self._hears_coordinator:
            return f"the coordinator of federation '{self.config.federation}'"
        return ""

    def start(self) -> None:
        """Subscribe, and connect to both brokers.

        Raises:
            BrokerAway: One of them does not answer, and the configuration says not to wait for it.
            UsageError: One of them refuses the login, and the configuration says not to wait for it.
        """
        self._upstream.subscribe(self.topics.announce)
        if self.sums is not None:
            self._upstream.subscribe(self.topics.site_down(self.config.id))
        for agent, _ in self.members:
            self._upstream.subscribe(*self._topics_to(agent))
        self._site.subscribe(*self.topics.for_relay())
        self._upstream.start()
        self._site.start()

    def close(self) -> None:
        """Disconnect; what has arrived of models stays on disk."""
        self.blobs.pause()
        if self.sums is not None:
            self.sums.pause()
        self._worker.close()
        self._site.close()
        self._upstream.close()

    def step(self, timeout_s: float) -> bool:
        """Handle one event of the coordinator's side, some of the site, and what is due; True where there was an event.

        Raises:
            UsageError: The two brokers share their messages, so that each message would be repeated for ever.
        """
        wait_s = max(0.0, min(timeout_s, LONGEST_WAIT_S, self.blobs.due_in()))
        event = self._upstream.receive(wait_s)
        if event is not None:
            self._guarded(self._on_upstream, event)
        is_busy = event is not None
        for _ in range(BURST):
            event = self._site.receive(0)
            if event is None:
                break
            self._guarded(self._on_site, event)
            is_busy = True
        self._guarded(self._tick, None)
        return is_busy

    def status(self) -> dict[str, Any]:
        """Return the state of the relay as its status file has it."""
        return {
            "id": self.config.id,
            "federation": self.config.federation,
            "waits_for": self.waits_for or None,
            "broker": None if self._upstream_broker is None else self._upstream_broker.to_json(),
            "site": None if self._site_broker is None else self._site_broker.to_json(),
            "agents": len(self.members),
            "online": self.members.online,
            "fetched_bytes": self.blobs.fetched_bytes,
            "served_bytes": self.blobs.served_bytes,
            "sent_bytes": self._upstream.traffic.bytes_up,
            "received_bytes": self._upstream.traffic.bytes_down,
            "can_sum": self.sums is not None,
            "sums": 0 if self.sums is None else self.sums.sums,
            "summed": 0 if self.sums is None else self.sums.summed,
            "refused": self.refused,
        }

    def _guarded(self, handle: Callable[[Any], None], event: Event | None) -> None:
        """Handle one event; whatever is wrong with it costs that event alone."""
        try:
            handle(event)
        except UsageError:
            raise
        except HeadwaterError as error:
            self._refuse(event, str(error))
        except OSError as error:
            self._refuse(event, cause(error))

    def _refuse(self, event: Event | None, reason: str) -> None:
        self.refused += 1
        topic = event.topic if isinstance(event, Message) else ""
        level = logging.WARNING if is_power_of_two(self.refused) else logging.DEBUG
        log.log(level, "message_refused count=%d topic=%s reason=%s", self.refused, printable(topic), printable(reason))

    def _tick(self, _: None) -> None:
        self.blobs.tick()
        if self.sums is None or not self._upstream_up:
            return
        self.sums.tick()
        now = self._clock()
        every_s = SAYS_EVERY_S if self._followed.start else SAYS_SELDOM_S
        if now - self._says_at >= every_s:
            self._says_at = now
            followed = self._followed if self.sums.is_told else _Followed()
            says = SiteSays(
                boot=self._boot,
                software=__version__,
                host=socket.gethostname()[:255],
                start=followed.start,
                number=followed.number,
                holds=self.sums.holds[:MOST_MEMBERS],
            )
            self._say(says)

    # --- from the site ---------------------------------------------------------------------------------------------

    def _on_site(self, event: Event) -> None:
        """Handle an event of the broker of the site.

        Raises:
            HeadwaterError: A message is malformed.
        """
        if isinstance(event, Message):
            self._on_site_message(event)
        elif isinstance(event, Connected):
            self._site_up = True
            self._site_broker = event.connection_since(utc_text(self._now()))
            log.info("site_connected broker=%s", event.broker or self.config.site.names)
        elif isinstance(event, Disconnected):
            self._site_up = False
            self._site_broker = None
            log.warning("site_disconnected reason=%s", event.reason)

    def _on_site_message(self, event: Message) -> None:
        """Pass a message of an agent up, or answer it here.

        Raises:
            HeadwaterError: It is malformed.
        """
        agent, kind = self.topics.sender(event.topic)
        if event.retained:
            raise MessageError(f"retained message on {event.topic}; clear it at the broker of the site")
        member = self._member(agent)
        if member is None:
            return
        if kind == "s":
            self._on_presence(agent, member, event)
        elif kind == "up":
            self._on_words(agent, member, event)
        elif kind != "ub" or not self._is_summed_chunk(agent, event.payload):
            self._pass_up(member, event.topic, event.payload, qos=0 if kind == "h" else 1)

    def _is_summed_chunk(self, agent: str, payload: bytes) -> bool:
        """Store chunks of an update that is summed here; False: they are for the coordinator.

        Raises:
            ChunkError: They are malformed, or cannot be stored.
        """
        return self.sums is not None and self.sums.chunk(agent, decode_frame(payload))

    def _member(self, agent: str) -> Member | None:
        """Return an agent of the site, which is new where it has said nothing before; None: there is no room for it."""
        member = self.members.get(agent)
        if member is not None:
            member.heard_at = self._clock()
            return member
        member, left = self.members.add(agent, self._clock())
        if left:
            self.blobs.left(left)
            self._upstream.unsubscribe(*self._topics_to(left))
        if member is None:
            self._turned_away += 1
            if is_power_of_two(self._turned_away):
                log.warning(
                    "agent_turned_away agent=%s count=%d: %d agents are online here; raise most_agents",
                    *(agent, self._turned_away, self.config.most_agents),
                )
            return None
        self._upstream.subscribe(*self._topics_to(agent))
        return member

    def _topics_to(self, agent: str) -> tuple[str, str]:
        """Return the topics of what the coordinator sends to an agent."""
        return self.topics.down(agent), self.topics.down_chunks(agent)

    def _on_presence(self, agent: str, member: Member, event: Message) -> None:
        """Pass on whether an agent is online; what is served to one that is not ends."""
        if member.is_online and member.is_end_of_connection(event.payload):
            self._on_gone(agent)
        self._pass_up(member, event.topic, event.payload)

    def _on_gone(self, agent: str) -> None:
        """Note that an agent is offline, and send it nothing more."""
        self.members.gone(agent)
        self.blobs.left(agent)

    def _on_words(self, agent: str, member: Member, event: Message) -> None:
        """Pass a control message of an agent up, or answer it here.

        Raises:
            HeadwaterError: It is malformed.
        """
        try:
            message = codec.parse_from_agent(event.payload)
        except ProtocolMismatch:  # of a version that the coordinator may know
            self._pass_up(member, event.topic, event.payload)
            return
        member.note_words(message)
        if isinstance(message, up.Hello):
            self._on_hello(agent, member, message)
            return
        if isinstance(message, up.Want) and self.blobs.want(agent, message):
            return
        if isinstance(message, up.Progress) and self.blobs.progress(agent, message):
            return
        if isinstance(message, up.UpdateManifest) and self.sums is not None and self.sums.manifest(agent, message):
            return
        if isinstance(message, up.Have):
            self.blobs.have(agent, message.digest)
        elif isinstance(message, up.Bye):
            self._on_gone(agent)
        self._pass_up(member, event.topic, event.payload)

    def _on_hello(self, agent: str, member: Member, message: up.Hello) -> None:
        """Note what an agent says of itself, and pass it up with the name of this relay.

        Raises:
            UsageError: It has been here before: the two brokers share their messages.
        """
        if message.facts.get(RELAY) == self.config.id:
            raise UsageError(
                f"agent '{agent}' said hello at the broker of the site by way of this relay, '{self.config.id}': "
                f"{self.config.site.names} and {self.config.broker.names} are one broker or share their messages; give "
                "the site a broker of its own, and each relay an id of its own"
            )
        before = member.hello
        if before is not None and (before.boot, before.connection) != (message.boot, message.connection):
            self.blobs.left(agent)  # its link is another one, and what was under way is lost
        self.members.said_hello(agent, message)
        self._say_hello(agent, member, message)

    def _say_hello(self, agent: str, member: Member, hello: up.Hello) -> None:
        """Pass the hello of an agent up, if answers to it would arrive; it is kept otherwise."""
        if not member.is_reachable:
            return
        # What passes by HTTP would pass once for each agent, and not through this relay.
        facts = {name: value for name, value in hello.facts.items() if name not in {HTTP_BLOBS, HTTP_UPLOADS}}
        if len(facts) < MOST_FACTS:
            facts.setdefault(RELAY, self.config.id)
        payload = codec.encode(hello.model_copy(update={"facts": facts}), hello.v)
        self._upstream.publish(self.topics.up(agent), payload)

    def _pass_up(self, member: Member, topic: str, payload: bytes, qos: int = 1) -> None:
        """Publish a message of an agent at the coordinator's broker; before answers could arrive, it is dropped.

        Raises:
            MessageError: It is larger than ``broker.max_packet_bytes``.
        """
        if member.is_reachable:
            self._upstream.publish(topic, payload, qos=qos)

    # --- from the coordinator --------------------------------------------------------------------------------------

    def _on_upstream(self, event: Event) -> None:
        """Handle an event of the coordinator's broker.

        Raises:
            HeadwaterError: A message is malformed.
        """
        if isinstance(event, Message):
            self._on_upstream_message(event)
        elif isinstance(event, Connected):
            self._upstream_up = True
            self._hears_coordinator = False
            self._upstream_broker = event.connection_since(utc_text(self._now()))
            self.members.cut()
            self.blobs.cut()
            self._says_at = float("-inf")
            if self.sums is not None:
                self.sums.cut()
            log.info("upstream_connected broker=%s", event.broker or self.config.broker.names)
        elif isinstance(event, Subscribed):
            self._on_subscribed(event)
        elif isinstance(event, Disconnected):
            self._upstream_up = False
            self._upstream_broker = None
            self.members.cut()
            log.warning("upstream_disconnected reason=%s", event.reason)

    def _on_subscribed(self, event: Subscribed) -> None:
        """Say hello in the name of the agents whose answers arrive from now on: messages to them may have been lost."""
        for topic in event.filters:
            agent = self._agent_of(topic)
            member = self.members.get(agent)
            if member is None or member.is_reachable:
                continue
            member.is_reachable = True
            if member.hello is not None and member.is_online:
                presence = f"online {member.hello.boot} {member.hello.connection}"
                self._upstream.publish(self.topics.presence(agent), presence.encode())
                # It may have answered a question, which is not asked now.
                self._say_hello(agent, member, member.hello.model_copy(update={"answers": ""}))
        self.blobs.listening(event.filters)

    def _agent_of(self, topic_filter: str) -> str:
        """Return the agent whose commands a filter covers; empty: it covers those of no single agent."""
        try:
            agent, kind = self.topics.receiver(topic_filter)
        except MessageError:
            return ""
        return agent if kind == "dn" else ""

    def _on_upstream_message(self, event: Message) -> None:
        """Pass a message of the coordinator to the site, or handle it here.

        Raises:
            HeadwaterError: It is malformed.
        """
        if event.retained:
            raise MessageError(f"retained message on {event.topic}; clear it at the coordinator's broker")
        self._hears_coordinator = True
        if event.topic == self.topics.announce:
            self._site.publish(event.topic, event.payload)
            return
        if event.topic == self.topics.site_down(self.config.id):
            self._on_site_command(event.payload)
            return
        if event.topic.startswith(self._broadcasts):
            self.blobs.broadcast_frame(decode_frame(event.payload))
            return
        agent, kind = self.topics.receiver(event.topic)
        if kind == "db":
            if not self.blobs.frame(agent, decode_frame(event.payload)):
                self._site.publish(event.topic, event.payload)
        elif not self._is_for_relay(agent, event.payload):
            self._site.publish(event.topic, event.payload)

    def _is_for_relay(self, agent: str, payload: bytes) -> bool:
        """Return whether a command to an agent is about what this relay does in its name; note what others name.

        Whether a command is authentic, the agent will see: it asks for no blob that an authentic one has not named.
        """
        try:
            message: Command = codec.parse_from_coordinator(payload)
        except (MessageError, ProtocolMismatch):  # the agent may know it, or refuses it
            return False
        if isinstance(message, down.Job):
            self.blobs.named(message.refs)
        elif isinstance(message, down.Install):
            self.blobs.named([message.blob])
        elif isinstance(message, down.Listen):
            return self.blobs.listen(agent, message)
        return False

    # --- sums ------------------------------------------------------------------------------------------------------

    def _on_site_command(self, payload: bytes) -> None:
        """Do what the coordinator says about sums.

        Raises:
            HeadwaterError: The message is not one of the coordinator, or names chunks outside the sum.
        """
        if self._seal is None or self.sums is None:
            return
        message = self._seal.to_site(payload)
        self.sums.heard()
        if isinstance(message, SendSum):
            self.sums.send(message)
        elif isinstance(message, SumReceipt):
            self.sums.receipt(message)
        elif isinstance(message, OpenSite) and self._followed.is_newer(message):
            self._followed = _Followed(message.epoch, message.start, message.number)
            self.sums.opened(message)

    def _say(self, message: FromSite) -> None:
        """Send a message about sums to the coordinator."""
        if self._seal is not None:
            self._upstream.publish(self.topics.site_up(self.config.id), self._seal.encode(message))

    def _send_sum_frame(self, frame: bytes) -> None:
        self._upstream.publish(self.topics.site_chunks(self.config.id), frame)

    def _is_online(self, agent: str) -> bool:
        member = self.members.get(agent)
        return member is not None and member.is_online

    # --- in the name of agents -------------------------------------------------------------------------------------

    def send_as(self, agent: str, message: Control) -> None:
        """Publish a control message in the name of an agent, at the coordinator's broker."""
        member = self.members.get(agent)
        if member is None:
            return
        self._seq += 1
        stamp = {"boot": member.boot, "seq": self._seq, "federation": member.federation}
        said = codec.encode(message.model_copy(update=stamp), member.protocol)
        self._upstream.publish(self.topics.up(agent), said)

    def listen(self, digest: str) -> None:
        """Begin to receive the broadcast of a blob."""
        self._upstream.subscribe(self.topics.broadcast(digest))

    def unlisten(self, digest: str) -> None:
        """Stop receiving the broadcast of a blob."""
        self._upstream.unsubscribe(self.topics.broadcast(digest))

    def _send_frame(self, agent: str, frame: bytes) -> None:
        self._site.publish(self.topics.down_chunks(agent), frame)
