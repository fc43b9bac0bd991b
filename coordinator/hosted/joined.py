"""Two transports as one: hosted clients behind the one, everybody else behind the other.

The coordinator does not see the difference. An id that is hosted here is nobody else's: what comes under it from the
broker is not listened to.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from edge_agent.errors import MessageError
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Event, Message, Transport

log = logging.getLogger(__name__)


class Joined:
    """A `wire.transport.Transport`. ``side`` calls ``main.wake`` when it has something to say, or is asked in turn."""

    def __init__(self, main: Transport, side: Transport, topics: Topics, hosted: Collection[str]) -> None:
        self._main, self._side, self._topics, self._hosted = main, side, topics, frozenset(hosted)
        self.max_payload_bytes = min(main.max_payload_bytes, side.max_payload_bytes)
        self.traffic = main.traffic
        """That of the broker: what hosted clients say goes nowhere."""

        self._to_side = {topic for agent in hosted for topic in (topics.down(agent), topics.down_chunks(agent))}
        self._broadcasts = topics.broadcast("")
        self._is_sides_turn = False
        self._imposters = set[str]()

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
            agent, _ = self._topics.sender(message.topic)
        except MessageError:
            return False  # whoever listens says why it is refused
        if agent in self._hosted and agent not in self._imposters:
            self._imposters.add(agent)
            log.warning("duplicate_id agent=%s is hosted here and was heard at the broker; give it another id", agent)
        return agent in self._hosted
