"""Two transports as one: hosted clients behind the one, everybody else behind the other.

The coordinator does not see the difference. An id that is hosted here is nobody else's: what comes under it from the
broker is not listened to, and an agent that introduces itself with it is refused.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timezone

from edge_agent.errors import DuplicateId, HeadwaterError, MessageError
from edge_agent.wire import messages as wire
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Event, Message, Transport

log = logging.getLogger(__name__)


class Joined:
    """A `wire.transport.Transport`. ``side`` calls ``main.wake`` when it has something to say, or is asked in turn."""

    def __init__(
        self,
        main: Transport,
        side: Transport,
        topics: Topics,
        hosted: Collection[str],
        away: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """``away``: why hosted clients are not there, for those that are not."""
        self._main, self._side, self._topics, self._hosted = main, side, topics, frozenset(hosted)
        self.max_payload_bytes = min(main.max_payload_bytes, side.max_payload_bytes)
        self.traffic = main.traffic
        """That of the broker: what hosted clients say goes nowhere."""

        self._to_side = {topic for agent in hosted for topic in (topics.down(agent), topics.down_chunks(agent))}
        self._broadcasts = topics.broadcast("")
        self._is_sides_turn = False
        self._away = away
        self._imposters = dict[str, str]()
        self._boot, self._seq = secrets.token_hex(8), 0

    def start(self) -> None:
        """Begin with both.

        Raises:
            BrokerAway: as the main transport's.
        """
        self._side.start()
        self._main.start()

    def close(self) -> None:
        """Leave both."""
        self._side.close()
        self._main.close()

    def subscribe(self, *filters: str) -> None:
        """Of both."""
        self._side.subscribe(*filters)
        self._main.subscribe(*filters)

    def unsubscribe(self, *filters: str) -> None:
        """Of both."""
        self._side.unsubscribe(*filters)
        self._main.unsubscribe(*filters)

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """To whom it concerns: one hosted client, all agents, or both.

        Raises:
            MessageError: the payload is larger than ``max_payload_bytes``.
        """
        if topic in self._to_side:
            self._side.publish(topic, payload)
            return
        if topic == self._topics.announce or topic.startswith(self._broadcasts):
            self._side.publish(topic, payload)
        self._main.publish(topic, payload, qos=qos, retain=retain)

    def receive(self, timeout_s: float) -> Event | None:
        """The next event of either; they take turns, so that neither keeps the other waiting."""
        self._is_sides_turn = not self._is_sides_turn
        looks = (self._from_side, self._from_main) if self._is_sides_turn else (self._from_main, self._from_side)
        for look in looks:
            if (event := look(0)) is not None:
                return event
        return self._from_main(timeout_s) if timeout_s > 0 else None

    def wake(self) -> None:
        """Make a waiting `receive` return at once."""
        self._main.wake()

    def notes(self) -> dict[str, tuple[str, ...]]:
        """Hosted client -> what people should know of it: why it is away, and who else has its id."""
        away = self._away()
        told = {name: (away.get(name, ""), self._imposters.get(name, "")) for name in self._hosted}
        return {name: found for name, notes in told.items() if (found := tuple(filter(None, notes)))}

    def _from_side(self, timeout_s: float) -> Event | None:
        """A hosted client's word; that it is connected to its own process is no news to anybody."""
        while (event := self._side.receive(timeout_s)) is not None:
            if isinstance(event, Message):
                return event
        return None

    def _from_main(self, timeout_s: float) -> Event | None:
        event = self._main.receive(timeout_s)
        return None if isinstance(event, Message) and self._is_imposter(event) else event

    def _is_imposter(self, message: Message) -> bool:
        try:
            agent, kind = self._topics.sender(message.topic)
        except MessageError:
            return False  # whoever listens says why it is refused
        if agent not in self._hosted:
            return False
        if agent not in self._imposters:
            log.warning("duplicate_id agent=%s is hosted here and was heard at the broker; give it another id", agent)
            at = datetime.now(timezone.utc).isoformat(timespec="seconds")
            self._imposters[agent] = (
                f"an agent at the broker has the id '{agent}', too, was heard first at {at}, and is refused: this "
                "client is hosted here; give one of them another id"
            )
        if kind == "up" and not message.retained:
            self._answer(agent, message.payload)
        return True

    def _answer(self, agent: str, payload: bytes) -> None:
        """Refuse an agent that introduces itself; whatever else it says gets no answer."""
        try:
            said = wire.parse_from_agent(payload)
        except HeadwaterError:
            return
        if not isinstance(said, wire.Hello):
            return
        self._seq += 1
        refusal = wire.Refused(
            boot=self._boot, seq=self._seq, error=DuplicateId.__name__, message=_taken(agent, said.boot), whom=said.boot
        )
        self._main.publish(self._topics.down(agent), wire.encode(refusal))


def _taken(agent: str, boot: str) -> str:
    return (
        f"the id '{agent}' is in use: the coordinator hosts a client of that name itself, so this agent (start {boot}) "
        "cannot have it; give one of them another id in its configuration"
    )
