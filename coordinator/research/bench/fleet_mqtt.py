"""Connections of thousands of agents to an MQTT broker, by one selector in one thread of a separate process.

It speaks the part of MQTT 3.1.1 that agents need: CONNECT, SUBSCRIBE, UNSUBSCRIBE, PUBLISH with QoS 1, PING.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator

from edge_agent.core.errors import MeasuringFailed
from edge_agent.core.limits import OPEN_FILES, allow_open_files
from edge_agent.wire.topics import Topics

from .fleet_agents import AgentLink, FleetAgent, Models, Timers
from .measuring import lines, send_line

KEEPALIVE_S = 300
"""Agents send heartbeats far more often, so nothing else has to keep the connection open."""

CONNECTING_AT_ONCE = 100
"""The most connections that are being opened at the same time."""

FLOOD_PER_S = 5000
"""Messages that a flooding agent sends in a second."""

FLOOD_S = 10.0
"""Seconds that a flood lasts."""

FLOODING = "agent-flooding"
"""The id of the agent that floods."""

READ_BYTES = 1 << 18
"""The most bytes that are read from a socket at once."""

CONNECT = 1
CONNACK = 2
PUBLISH = 3
PUBACK = 4
SUBSCRIBE = 8
SUBACK = 9
UNSUBSCRIBE = 10


def packet(kind: int, body: bytes, flags: int = 0) -> bytes:
    """Return an MQTT packet as bytes.

    Args:
        kind: The type of the packet, such as `PUBLISH`.
        body: All that follows its length.
        flags: The lower half of its first byte.
    """
    # The length has seven bits in each byte, the lowest first; the highest bit says that another byte follows.
    length = bytearray()
    remaining, digit = divmod(len(body), 128)
    while remaining:
        length.append(digit | 0x80)
        remaining, digit = divmod(remaining, 128)
    length.append(digit)
    return bytes([kind << 4 | flags]) + bytes(length) + body


def text(value: str) -> bytes:
    """Return a string as MQTT encodes it: its length in two bytes, then UTF-8."""
    data = value.encode()
    return struct.pack(">H", len(data)) + data


def packets(received: bytearray) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, flags and body of each whole packet in ``received``, and remove all of them from it at the end."""
    start = 0
    while True:
        body = _span_of_body(received, start)
        if body is None or body.stop > len(received):
            break
        yield received[start] >> 4, received[start] & 0x0F, bytes(received[body.start : body.stop])
        start = body.stop
    del received[:start]


def _span_of_body(received: bytearray, start: int) -> range | None:
    """Return where the body of the packet at ``start`` begins and ends; None where its length is cut off."""
    length = 0
    shift = 0
    for position in range(start + 1, len(received)):
        digit = received[position]
        length |= (digit & 0x7F) << shift
        shift += 7
        is_last_digit = not digit & 0x80
        if is_last_digit:
            begin = position + 1
            return range(begin, begin + length)
    return None


class Connection:
    """The connection of an agent to the broker."""

    def __init__(self, name: str, federation: str, address: tuple[str, int]) -> None:
        self.name = name
        self.topics = Topics(federation)
        self.received = bytearray()
        self.unsent = bytearray()
        self.is_up = False
        self._mid = 0
        self._pending: dict[int, str] = {}
        """Packet id -> the blob of the topic that was subscribed to; empty: the agent's own topics."""

        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect_ex(address)
        will = text(self.topics.presence(name)) + text("offline")
        flags = 0x02 | 0x04 | 0x08  # clean session; a will, of QoS 1
        head = text("MQTT") + bytes([4, flags]) + struct.pack(">H", KEEPALIVE_S)
        self.unsent += packet(CONNECT, head + text(f"{name}-bench") + will)

    def subscribe(self, filters: tuple[str, ...], blob: str = "") -> None:
        """Subscribe to topics with QoS 1; `handled` yields ``blob`` when the broker has confirmed it."""
        mid = self._next()
        self._pending[mid] = blob
        requests = b"".join(text(topic_filter) + b"\x01" for topic_filter in filters)
        self.unsent += packet(SUBSCRIBE, struct.pack(">H", mid) + requests, 2)

    def unsubscribe(self, topic: str) -> None:
        """Ask the broker to send no more messages of a topic."""
        self.unsent += packet(UNSUBSCRIBE, struct.pack(">H", self._next()) + text(topic), 2)

    def publish(self, topic: str, payload: bytes) -> None:
        """Publish a payload with QoS 1."""
        self.unsent += packet(PUBLISH, text(topic) + struct.pack(">H", self._next()) + payload, 2)

    def handled(self) -> Iterator[tuple[str, bytes] | str]:
        """Yield what has arrived: topic and payload of each message, and the blob of each confirmed subscription.

        Raises:
            MeasuringFailed: The broker refuses the connection.
        """
        for kind, flags, body in packets(self.received):
            if kind == CONNACK:
                if body[1]:
                    raise MeasuringFailed(f"the broker refuses {self.name}: code {body[1]}")
                self.is_up = True
                self.subscribe(self.topics.for_agent(self.name))
            elif kind == SUBACK:
                yield self._pending.pop(struct.unpack_from(">H", body)[0])
            elif kind == PUBLISH:
                (length,) = struct.unpack_from(">H", body)
                begin = 2 + length
                if flags & 0x06:
                    self.unsent += packet(PUBACK, body[begin : begin + 2])
                    begin += 2
                yield body[2 : 2 + length].decode(), body[begin:]

    def _next(self) -> int:
        """Return the id of the next packet, 1 to 65535 in turn."""
        self._mid = self._mid % 65535 + 1
        return self._mid


class MqttFleet:
    """All agents of this process; `step` has to be called again and again."""

    def __init__(self, count: int, federation: str, address: tuple[str, int]) -> None:
        self._address = address
        self._federation = federation
        self._selector = selectors.DefaultSelector()
        self._connections: dict[str, Connection] = {}
        self._unsent: set[str] = set()
        self._topics = Topics(federation)
        models = Models()
        link = AgentLink(self._publish, self._subscribe, self._unsubscribe)
        names = [f"agent-{number}" for number in range(count)]
        self.agents = {name: FleetAgent(name, self._topics, models, link, time.monotonic) for name in names}
        self._waiting = names[::-1]
        self._connecting: set[str] = set()
        self._timers = Timers([])
        """Of the agents that have subscribed to their topics."""

        self.sent = 0

    @property
    def welcomed(self) -> int:
        """The number of agents that the coordinator has on its roster."""
        return sum(agent.welcomed for agent in self.agents.values())

    def step(self) -> None:
        """Connect some more agents, and handle what sockets and timers have."""
        self._connect()
        # 1. Read what has arrived; while agents are still connecting, no timer says how long nothing will happen.
        now = time.monotonic()
        pause_s = 0.01
        if not self._waiting and not self._connecting:
            pause_s = min(0.1, self._timers.due_in(now))
        for key, events in self._selector.select(pause_s):
            if events & selectors.EVENT_READ:
                self._read(key.data)
            self._unsent.add(key.data.name)
        # 2. Let agents speak whose time has come.
        self._timers.run(time.monotonic())
        # 3. Write what all of that has left to send.
        unsent = self._unsent
        self._unsent = set()
        for name in unsent:
            self._write(self._connections[name])

    def flood(self, kind: str) -> list[float]:
        """Return the seconds from hello to welcome of one agent, while another sends `FLOOD_PER_S` messages a second.

        ``kind``: none, junk, hello or update (a manifest of round 1).
        """
        first = next(iter(self.agents.values()))
        flooding = self._connections.get(FLOODING) or self._add(FLOODING)
        payload = first.flood_message(kind)
        begin = time.monotonic()
        hello_at = begin
        sent = 0
        answers = list[float]()
        first.hello()
        while True:
            now = time.monotonic()
            if now - begin >= FLOOD_S and answers:
                return answers
            # 1. Send as many messages as are due by now, a thousand at once at most.
            due = 0
            if kind != "none" and flooding.is_up:
                due = int((now - begin) * FLOOD_PER_S)
            for _ in range(min(due - sent, 1000)):
                flooding.publish(self._topics.up(FLOODING), payload)
                sent += 1
            self._unsent.add(FLOODING)
            self.step()
            # 2. Note how long the other agent has waited for its welcome, and let it say hello again a moment later.
            if first.welcomed:
                answers.append(time.monotonic() - hello_at)
                pause_until = time.monotonic() + 0.2
                while time.monotonic() < pause_until:
                    self.step()
                hello_at = time.monotonic()
                first.hello()
            elif now - begin > 60.0:
                answers.append(now - hello_at)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _add(self, name: str) -> Connection:
        """Begin to connect an agent, and return its connection."""
        connection = Connection(name, self._federation, self._address)
        self._connections[name] = connection
        self._selector.register(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        return connection

    def _publish(self, topic: str, payload: bytes, _kind: str) -> None:
        name, _ = self._topics.sender(topic)
        self.sent += 1
        self._connections[name].publish(topic, payload)
        self._unsent.add(name)

    def _subscribe(self, agent: FleetAgent, topic: str) -> None:
        self._connections[agent.id].subscribe((topic,), topic.rsplit("/", 1)[-1])
        self._unsent.add(agent.id)

    def _unsubscribe(self, agent: FleetAgent, topic: str) -> None:
        self._connections[agent.id].unsubscribe(topic)
        self._unsent.add(agent.id)

    def _connect(self) -> None:
        """Begin to connect agents that wait for it, so that some are connecting at the same time."""
        for _ in range(min(len(self._waiting), CONNECTING_AT_ONCE - len(self._connecting))):
            name = self._waiting.pop()
            self._connecting.add(name)
            self._add(name)

    def _read(self, connection: Connection) -> None:
        """Read what has arrived on a connection, and hand it to the agent.

        Raises:
            MeasuringFailed: The broker has closed the connection.
        """
        with contextlib.suppress(BlockingIOError):
            data = connection.socket.recv(READ_BYTES)
            if not data:
                raise MeasuringFailed(f"the broker has closed the connection of {connection.name}")
            connection.received += data
        agent = self.agents.get(connection.name)
        for event in connection.handled():
            if agent is None:  # that which floods reads nothing
                continue
            if isinstance(event, str):
                agent.subscribed(event)
                # Its own topics, the first ones: from now on it sends heartbeats, while others still connect.
                if connection.name in self._connecting:
                    self._connecting.remove(connection.name)
                    self._timers.add(agent)
            else:
                agent.received(*event)

    def _write(self, connection: Connection) -> None:
        """Send as much as the socket takes, and wait for it to take more only while something is left."""
        if connection.unsent:
            with contextlib.suppress(BlockingIOError):
                sent_bytes = connection.socket.send(connection.unsent)
                del connection.unsent[:sent_bytes]
        events = selectors.EVENT_READ
        if connection.unsent:
            events |= selectors.EVENT_WRITE
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)


def main() -> None:
    """Run a fleet by the arguments ``host port agents federation``, until its parent ends.

    The parent sends lines: for each of them the fleet is flooded as `MqttFleet.flood` says (not at all by an empty
    one), and its figures are sent back as JSON.
    """
    parser = argparse.ArgumentParser()
    for name, kind in (("host", str), ("port", int), ("agents", int), ("federation", str)):
        parser.add_argument(name, type=kind)
    arguments = parser.parse_args()
    allow_open_files(2 * arguments.agents + OPEN_FILES)
    fleet = MqttFleet(arguments.agents, arguments.federation, (arguments.host, arguments.port))
    requests = queue.SimpleQueue[str]()
    stop = threading.Event()

    def listen() -> None:
        for line in lines():
            requests.put(line)
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    while not stop.is_set():
        fleet.step()
        with contextlib.suppress(queue.Empty):
            flood_kind = requests.get_nowait()
            figures = {
                "welcome_s": fleet.flood(flood_kind) if flood_kind else [],
                "welcomed": fleet.welcomed,
                "sent": fleet.sent,
                "received_bytes": sum(agent.received_bytes for agent in fleet.agents.values()),
                "receipts": sum(agent.receipts for agent in fleet.agents.values()),
            }
            send_line(json.dumps(figures))


if __name__ == "__main__":
    main()
