"""The MQTT transport on paho: a network thread of its own, callbacks that only enqueue, a new session after each break.

It uses MQTT 3.1.1 with clean sessions, QoS 0 and 1, which all brokers support. Each connection is a new paho client
with a new id, so that nothing of a broken session is sent again, neither by paho nor from a queue of the broker. Of a
list of brokers `failover` chooses the one for each connection; the new session subscribes again, and the programs on
both sides send again what is not confirmed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import re
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.reasoncodes import ReasonCode

from ..core.config import BrokerConfig, credential
from ..core.errors import (
    SET_CLOCK,
    BrokerAway,
    ConfigError,
    HeadwaterError,
    MessageError,
    UsageError,
    cause,
    is_of_another_time,
)
from .broker_traits import AnswerTo5, BrokerTraits
from .failover import QUEUED_SEGMENTS, Failover, LinkState, Strictness, Vigil, order_for
from .inbox import ORDINARY, Inbox, RankOf
from .login import FEDERATION_ADVICE, LoginAdvice
from .topics import matches
from .transport import Connected, Disconnected, Event, Message, Subscribed, Traffic, WillOf, Woken

log = logging.getLogger(__name__)

_SHUT_OUT = frozenset({134, 135})
"""The reason codes of MQTT 5 of a user that is not let in: bad user name or password, and not authorized."""

INFLIGHT = 96
"""The number of QoS 1 messages that may be unacknowledged; more wait in paho's queue, which flow control bounds."""

CONNECT_TIMEOUT_S = 10.0
"""Seconds that connecting may take."""

LEAVE_TIMEOUT_S = 2.0
"""Seconds by which a broker that has stopped reading may delay a disconnect."""

VISIT_TIMEOUT_S = 2.0
"""Seconds in which the first broker has to let a client in that is to return to it; its connection rests meanwhile."""

SUBSCRIBE_AGAIN_S = 1.0
"""Seconds until filters that the broker has refused are asked for again; they grow by half each time.

A NATS cluster refuses filters for some ten seconds after it has lost a node.
"""

SUBSCRIBE_SELDOM_S = 60.0
"""The most seconds between two such requests: a broker whose rules forbid a filter refuses it for ever."""

LONGEST_WAIT_S = 1.0
"""The longest wait in seconds for the network, after which timers are looked at."""

_TCP_INFO = struct.Struct("=24xI92xQQ8xI")
"""Of the system's `tcp_info`: segments in flight, confirmed and received bytes, bytes that were not sent yet."""


@dataclass
class _Attempt:
    """What is known of one attempt at a session, from the login to its end."""

    subscribe_pause_s: float
    """How many seconds after the next refusal filters are asked for again."""

    rejection: str = ""
    """Why the broker has refused the login, and the remedy; empty where it has not."""

    remedy: str = ""
    """What to do about that, or about a certificate; empty where waiting may help."""

    clocks_differ: bool = False
    """Whether a certificate was refused because it does not hold at the time of this machine's clock."""

    pending_filters: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Number of a subscription -> its filters, until the broker answers it."""

    subscribed_by: float = 0.0
    """The time until which the answer to the last subscription is waited for without a sign of life."""

    has_answered: bool = False
    """Whether the broker has answered a subscription."""

    is_thrown_off: bool = False
    """Whether the broker has ended the session instead of answering the first subscription."""

    refused_filters: list[str] = field(default_factory=list)
    """The filters that the broker has refused, to be asked for again."""

    subscribe_at: float = float("inf")
    """When they are asked for again."""


@dataclass(frozen=True)
class _SessionEnd:
    """How an attempt at a session ended."""

    reason: str
    was_up: bool
    """Whether there was a session: the broker had let this client in, and had not ended it for its subscription."""


@dataclass(frozen=True)
class _LoginRefusal:
    """A login that the broker has refused."""

    reason: str
    remedy: str
    """What to do; empty where waiting may help."""


class MqttTransport:
    """A `wire.transport.Transport` over one broker at a time."""

    def __init__(
        self,
        config: BrokerConfig,
        client_id: str,
        *,
        will: WillOf | None = None,
        rng: random.Random | None = None,
        admits: Callable[[str, bytes], bool] = lambda *_: True,
        rank_of: RankOf = lambda _: ORDINARY,
        advice: LoginAdvice = FEDERATION_ADVICE,
        spread_by: str = "",
        on_event: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a transport that does not connect yet.

        Args:
            config: Where the broker is, or several of them, and how to log in.
            client_id: The first part of the id of each session.
            will: Returns the will of each connection.
            rng: The source of random pauses.
            admits: Returns whether a message (topic, payload) is received at all; called in the network thread.
            rank_of: Returns the treatment of a message while it waits; called in the network thread.
            advice: What to do when the broker refuses the login.
            spread_by: The id that decides which broker of a list comes first; default: ``client_id``.
            on_event: Called in the network thread after each event that `receive` will return. A program with two
                transports waits for one of them, and has it woken by the other one.
        """
        self.config = config
        self.client_id = client_id
        self.will = will
        self.max_payload_bytes = config.max_packet_bytes
        self.traffic = Traffic()
        rng = rng or random.Random()  # noqa: S311 - spreads reconnects, guards nothing
        order = order_for(spread_by or client_id, config.urls)
        self._failover = Failover(order, rng, time.monotonic, return_after_s=config.return_after_s)
        self._strictness = Strictness(config.failover_s, config.keepalive_s, time.monotonic)
        self._is_returning = False
        """Whether the session ends because the first broker is to be connected again."""

        self._leave_reason = ""
        """Why this client leaves a broker that works; empty: it does not."""

        self._vigil: Vigil | None = None
        """The watch over the session of now; None: there is none."""

        self._connected_url = ""
        """The broker of the last session; empty before the first one."""

        self._admits = admits
        self._advice = advice
        self._inbox = Inbox(rank_of, on_event=on_event)
        self._filters: list[str] = []
        self._attempt = _Attempt(SUBSCRIBE_AGAIN_S)
        """What is known of the session of now, or of the last one."""

        self._subscribing = threading.RLock()
        """Held while a request to subscribe is sent and noted, or its answer is looked up."""

        self._client: paho.Client | None = None
        self._last_sent: paho.MQTTMessageInfo | None = None
        self._up = threading.Event()
        self._tried = threading.Event()
        self._stopping = threading.Event()
        self._first_failures: list[str] = []
        """Why the first attempt failed at each broker."""

        self._only_refusals = True
        """Whether each of these failures was a refused login for which there is a remedy."""

        self._was_away = False
        """Whether the log says that the broker is away."""

        self._thread: threading.Thread | None = None
        self._connection = 0

    def start(self) -> None:
        """Begin connecting, in a thread of the transport's own.

        Raises:
            BrokerAway: ``config.wait`` is false and the first attempt fails.
            UsageError: ``config.wait`` is false and the broker refuses this user, so that waiting would not help.
            ConfigError: A certificate or the password file cannot be read.
        """
        self._new_client()  # reads certificates and password: a mistake in them is raised here, not in a thread
        self._thread = threading.Thread(target=self._run, name="mqtt", daemon=True)
        self._thread.start()
        if self.config.wait:
            return
        # Each broker of a list is tried once.
        limit_s = CONNECT_TIMEOUT_S * len(self.config.urls)
        failure = f"no answer within {limit_s:.0f} s"
        is_refused = False
        if self._tried.wait(limit_s):
            failure = "; ".join(self._first_failures)
            is_refused = self._only_refusals
        if not failure:
            return
        self.close()
        if is_refused:
            raise UsageError(f"broker {self.config.names}: {failure}")
        raise BrokerAway(f"broker {self.config.names}: {failure}; is it running, and does it accept this user?")

    def close(self) -> None:
        """Disconnect, after sending the messages that were published before."""
        client = self._client
        last = self._last_sent
        # 1. Wait for the last acknowledgement. While one is unread, closing the socket would reset it: messages are
        # lost, and the broker publishes the will.
        if client is not None and last is not None and self._up.is_set():
            with contextlib.suppress(ValueError, RuntimeError):  # it was never sent
                last.wait_for_publish(LEAVE_TIMEOUT_S)
        # 2. End the session, and then the thread that serves it.
        self._stopping.set()
        if client is not None:
            client.disconnect()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CONNECT_TIMEOUT_S)

    def subscribe(self, *filters: str) -> None:
        """Receive messages under ``filters``, also after reconnects; at most 8 filters go into one packet."""
        self._filters += [topic_filter for topic_filter in filters if topic_filter not in self._filters]
        if self._up.is_set():
            self._ask_for(filters)

    def unsubscribe(self, *filters: str) -> None:
        """Receive no messages under ``filters`` once the broker has read this."""
        self._filters = [f for f in self._filters if f not in filters]
        client = self._client
        if client is not None and self._up.is_set():
            client.unsubscribe(list(filters))

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Hand one message to the network thread; while there is no session, it is dropped and counted.

        Raises:
            MessageError: The payload is larger than the broker is known to carry.
        """
        if len(payload) > self.max_payload_bytes:
            raise MessageError(f"payload of {len(payload)} bytes, broker.max_packet_bytes is {self.max_payload_bytes}")
        client = self._client
        if client is None or not self._up.is_set():
            self.traffic.dropped += 1
            return
        self._last_sent = client.publish(topic, payload, qos=qos, retain=retain)
        self.traffic.bytes_up += len(payload)
        self.traffic.messages_up += 1

    def receive(self, timeout_s: float) -> Event | None:
        """Return the next event, waiting at most ``timeout_s`` seconds; None where there is none."""
        try:
            return self._inbox.get(timeout_s)
        except queue.Empty:
            return None

    @property
    def broker(self) -> BrokerConfig:
        """The configuration of the broker that is connected, or tried next."""
        return self.config.at(self._failover.url)

    @property
    def unread_s(self) -> float:
        """The seconds that the oldest event has waited for `receive`; 0 where none waits."""
        return self._inbox.oldest_s

    def leave(self, reason: str) -> None:
        """Go to the next broker of a list, from any thread; a single broker is not left.

        Args:
            reason: Why, for the log and the status.
        """
        if self._failover.is_list:
            self._leave_reason = reason

    def wake(self) -> None:
        """Make a waiting `receive` return at once, from any thread."""
        self._inbox.put(Woken())

    # --- network thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Keep a session with a broker until `close`, with longer random pauses while none lets this client in."""
        while not self._stopping.is_set():
            url = self._failover.url
            end = self._serve_session()
            reason = end.reason
            self._note_first_attempt(url, reason)
            if self._stopping.is_set():
                return
            # 1. Which broker is next, and when.
            if self._is_returning:
                pause_s = self._failover.return_to_first()
                reasons = f"{url}: {reason}"
            else:
                pause_s = self._failover.failed(reason, was_up=end.was_up)
                reasons = self._failover.describe_left() if self._failover.is_list else reason
            # 2. The program has to know that nobody hears it meanwhile.
            self._was_away = True
            log.warning("broker_away url=%s reason=%s retry_in_s=%.1f", url, reason, pause_s)
            self._inbox.put(Disconnected(reasons, pause_s, self._attempt.remedy, self._attempt.clocks_differ))
            self._stopping.wait(pause_s)

    def _note_first_attempt(self, url: str, reason: str) -> None:
        """Note why the first attempt at a broker failed; after that at the last one, `start` need not wait longer."""
        if self._tried.is_set():
            return
        self._first_failures.append(f"{url}: {reason}" if self._failover.is_list else reason)
        self._only_refusals = self._only_refusals and bool(self._attempt.rejection and self._attempt.remedy)
        if len(self._first_failures) == len(self.config.urls):
            self._tried.set()

    def _serve_session(self) -> _SessionEnd:
        """Connect, serve the connection until its end, and return how it ended."""
        self._is_returning = False
        self._leave_reason = ""
        self._vigil = None
        broker = self.broker
        # A list is tried quickly once; when all of it has failed, a link may be so slow that it needs more time.
        limit_s = CONNECT_TIMEOUT_S
        if self._failover.is_list and not self._failover.is_patient:
            limit_s = min(limit_s, self._strictness.limit_s)
        login_until = time.monotonic() + limit_s if self._failover.is_list else float("inf")
        try:
            client = self._new_client()
            self._client = client
            client.connect_timeout = limit_s
            client.connect(broker.host, broker.port, keepalive=broker.keepalive_s)
            reason = self._serve(client, login_until)
        # A password or certificate that was being replaced just then.
        except HeadwaterError as error:
            reason = str(error)
        # A broken packet makes paho raise anything; a new session is the cure.
        except Exception as error:  # noqa: BLE001 - see above
            reason = cause(error)
            self._attempt.clocks_differ = is_of_another_time(error)
            self._attempt.remedy = SET_CLOCK if self._attempt.clocks_differ else ""
        # Somebody who is thrown off for what he asks for would be back at once, for ever, if that counted as a session.
        was_up = self._up.is_set() and not self._attempt.is_thrown_off
        self._up.clear()
        self._client = None  # its sockets close with it
        self._last_sent = None
        return _SessionEnd(self._attempt.rejection or reason, was_up)

    def _serve(self, client: _Client, login_until: float) -> str:
        """Handle what a connected client receives and sends until the connection ends, and return why it ended.

        Args:
            client: The client, which has sent its login.
            login_until: The time (as `time.monotonic`) until which the broker has to let it in.
        """
        code = paho.MQTT_ERR_SUCCESS
        leave_until = float("inf")
        while code == paho.MQTT_ERR_SUCCESS and time.monotonic() < leave_until:
            # 1. What the network brings and takes.
            code = client.loop(timeout=self._wait_s(login_until))
            # 2. The end that this side wants. `close` may have come before there was a client, so it is looked for here
            #    as well.
            is_leaving = self._stopping.is_set() or bool(self._leave_reason)
            if is_leaving and leave_until == float("inf"):
                leave_until = time.monotonic() + LEAVE_TIMEOUT_S
                client.disconnect()
            # 3. Filters that were refused.
            if time.monotonic() >= self._attempt.subscribe_at:
                self._subscribe_again()
            # 4. With another broker to go to, this one has to show that it lives.
            is_watched = self._failover.is_list and not is_leaving
            if is_watched and code == paho.MQTT_ERR_SUCCESS:
                reason = self._reason_to_end(client, login_until)
                if reason:
                    return reason
        return self._leave_reason or self._explain_end(code)

    def _explain_end(self, code: MQTTErrorCode) -> str:
        """Return why a connection ended that this side did not end, and note where the topic rules may be why."""
        reason = paho.error_string(code)
        has_certificate = self.config.tls is not None and self.config.tls.cert is not None
        if has_certificate and not self._up.is_set():
            reason = f"{reason.rstrip('.')}; the broker may refuse this certificate"
        # RabbitMQ answers a filter that its rules forbid by ending the connection.
        is_unanswered = bool(self._attempt.pending_filters) and not self._attempt.has_answered
        if self._up.is_set() and is_unanswered:
            self._attempt.is_thrown_off = True
            reason = f"{reason.rstrip('.')} before the broker answered the subscription; its topic rules may forbid it"
        return reason

    def _reason_to_end(self, client: _Client, login_until: float) -> str:
        """Return why the connection to a broker of a list is given up at once; empty: it stands.

        Where the first broker lets this client in again, the connection is to end after what was published before.
        """
        if not self._up.is_set():
            return "it does not answer the login" if time.monotonic() >= login_until else ""
        if self._vigil is None:
            self._vigil = Vigil(self._strictness.limit_s, time.monotonic)
        if self._is_lost(client, self._vigil):
            return f"it has not answered for {self._vigil.silence_s:.1f} s"
        if self._failover.is_return_due() and self._may_return():
            self._is_returning = True
            self._leave_reason = f"this client returns to its first broker {self._failover.first}"
        return ""

    def _wait_s(self, login_until: float) -> float:
        """Return how many seconds the network may be waited for before something is due."""
        if not self._failover.is_list or self._leave_reason:
            return LONGEST_WAIT_S
        if self._vigil is None:
            due_in_s = login_until - time.monotonic()
        else:
            due_in_s = min(self._vigil.due_in_s(), self._failover.return_in_s())
        return max(0.0, min(LONGEST_WAIT_S, due_in_s))

    def _is_lost(self, client: _Client, vigil: Vigil) -> bool:
        """Look for signs of life of the broker, ask for one where it is silent, and return whether it is lost.

        NATS reads nothing more of a client, also no question, until it has answered its subscription. That takes more
        than ten seconds after its cluster has lost a node, and would begin again at another node.
        """
        is_subscribing = bool(self._attempt.pending_filters) and time.monotonic() < self._attempt.subscribed_by
        vigil.observe(None if is_subscribing else _link_state(client))
        if vigil.is_lost:
            self._strictness.lost()
            return True
        if vigil.is_question_due:
            client.ask_for_sign_of_life()
            vigil.note_question()
        return False

    def _may_return(self) -> bool:
        """Try whether the first broker lets this client in, and note why where it does not."""
        first = self._failover.first
        broker = self.config.at(first)
        answers: list[ReasonCode] = []
        reason = f"it does not answer the login within {VISIT_TIMEOUT_S:g} s"
        try:
            visitor = _client(broker, self.client_id, session_of(self.client_id), paho.MQTTv311)
            visitor.connect_timeout = VISIT_TIMEOUT_S
            visitor.on_connect = lambda _client, _data, _flags, code, _props: answers.append(code)
            visitor.connect(broker.host, broker.port, keepalive=broker.keepalive_s)
            _loop_until(visitor, lambda: bool(answers), time.monotonic() + VISIT_TIMEOUT_S)
            visitor.disconnect()
        except HeadwaterError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - as in `_serve_session`: a visit that fails costs nothing
            reason = cause(error)
        if answers and not answers[0].is_failure:
            return True
        if answers:
            reason = f"broker refuses: {answers[0]}"
        log.info("broker_not_back url=%s reason=%s", first, reason)
        self._failover.not_returned(reason)
        return False

    def _new_client(self) -> _Client:
        """Return a client for the next connection, with its callbacks and will."""
        self._connection += 1
        self._attempt = _Attempt(SUBSCRIBE_AGAIN_S)
        client = _client(self.broker, self.client_id, session_of(self.client_id), paho.MQTTv311)
        client.max_inflight_messages_set(INFLIGHT)
        if self.will is not None:
            will = self.will(self._connection)
            client.will_set(will.topic, will.payload, qos=1, retain=will.retain)
        client.on_connect = self._on_connect
        client.on_message = self._on_message
        client.on_subscribe = self._on_subscribe
        # With this callback set, publish() leaves the socket to the thread that loops. Without it, both threads write,
        # and a packet that went out in part is continued with the middle of another.
        client.on_socket_register_write = lambda *_: None  # `loop` sees by itself that there is something to write
        return client

    def _on_connect(self, client: paho.Client, _data: object, _flags: object, code: ReasonCode, _props: object) -> None:
        """Note why the broker does not let this client in; otherwise tell the program, and subscribe again."""
        if code.is_failure:
            refusal = _explain_refusal(self.config, self.client_id, code, self._advice)
            self._attempt.remedy = refusal.remedy
            self._attempt.rejection = f"{refusal.reason}; {refusal.remedy}" if refusal.remedy else refusal.reason
            return
        sock = client.socket()
        if isinstance(sock, socket.socket):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._note_broker()
        self._up.set()
        if not self._tried.is_set():
            self._first_failures.clear()
            self._tried.set()
        self._inbox.put(Connected(self._connection, self._failover.url, self._failover.left))
        self._ask_for(tuple(self._filters))

    def _note_broker(self) -> None:
        """Log which broker is connected, where that is another one or one that was away."""
        self._failover.connected()
        url = self._failover.url
        previous = self._connected_url or self._failover.first
        if previous != url:
            reasons = {broker.url: broker.reason for broker in self._failover.left}
            reason = reasons.get(previous, "the first broker of this client lets it in again")
            log.warning("broker_changed url=%s left=%s reason=%s", url, previous, reason)
        elif self._was_away:
            log.info("broker_back url=%s", url)
        self._was_away = False
        self._connected_url = url

    def _ask_for(self, filters: tuple[str, ...]) -> None:
        """Subscribe at the broker, and note each request, whose answer has its number only."""
        client = self._client
        if client is None:
            return
        for begin in range(0, len(filters), 8):
            part = filters[begin : begin + 8]
            with_qos: list[tuple[str, int]] = [(topic_filter, self.config.qos) for topic_filter in part]
            with self._subscribing:  # the broker may confirm before this thread has noted the request
                _, mid = client.subscribe(with_qos)
                if mid is not None:
                    self._attempt.pending_filters[mid] = part
                    self._attempt.subscribed_by = time.monotonic() + self.config.keepalive_s

    def _on_subscribe(
        self, _client: paho.Client, _data: object, mid: int, codes: list[ReasonCode], _props: object
    ) -> None:
        """Tell the program which filters the broker grants, by the number of the request."""
        with self._subscribing:
            filters = self._attempt.pending_filters.pop(mid, ())
        self._attempt.has_answered = True
        answers = zip(filters, codes, strict=False)
        rejected = [topic_filter for topic_filter, code in answers if code.is_failure]
        if rejected:
            is_news = self._attempt.subscribe_pause_s == SUBSCRIBE_AGAIN_S
            log.log(logging.ERROR if is_news else logging.DEBUG, "subscription_refused filters=%s", ",".join(rejected))
            self._attempt.refused_filters += rejected
            self._attempt.subscribe_at = time.monotonic() + self._attempt.subscribe_pause_s
        granted = tuple(topic_filter for topic_filter in filters if topic_filter not in rejected)
        self._inbox.put(Subscribed(granted))

    def _subscribe_again(self) -> None:
        """Ask again for the filters that were refused and are still wanted; the broker may grant them by now."""
        attempt = self._attempt
        still_wanted = tuple(topic_filter for topic_filter in attempt.refused_filters if topic_filter in self._filters)
        attempt.refused_filters.clear()
        attempt.subscribe_at = float("inf")
        attempt.subscribe_pause_s = min(1.5 * attempt.subscribe_pause_s, SUBSCRIBE_SELDOM_S)
        self._ask_for(still_wanted)

    def _on_message(self, _client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        """Put a message into the inbox, if it is of a topic that was asked for and is admitted."""
        # amqtt greets each new session with whatever is retained under the filters of others, past all its rules.
        topic = message.topic
        if not any(matches(topic_filter, topic) for topic_filter in self._filters):
            return
        payload = bytes(message.payload)
        if not self._admits(topic, payload):
            return
        size = len(payload)
        self.traffic.bytes_down += size
        self.traffic.messages_down += 1
        if not self._inbox.put_message(Message(topic, payload, message.retain)):
            self.traffic.dropped += 1


class _Client(paho.Client):
    """A client of paho that can ask its broker for a sign of life when its owner wants to."""

    def ask_for_sign_of_life(self) -> None:
        """Send a PINGREQ, which every broker answers; to be called by the thread that loops."""
        self._send_pingreq()


def _link_state(client: paho.Client) -> LinkState | None:
    """Return what the system knows of a client's connection; None where it does not tell (it is Linux that does)."""
    sock = client.socket()
    option: int | None = getattr(socket, "TCP_INFO", None)
    if not isinstance(sock, socket.socket) or option is None:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO.size)
    except OSError:
        return None
    if len(info) < _TCP_INFO.size:  # Linux before 4.6
        return None
    in_flight, confirmed, received, unsent = _TCP_INFO.unpack(info)
    is_queued = client.want_write() or unsent > 0 or in_flight > QUEUED_SEGMENTS
    return LinkState(received_bytes=received, confirmed_bytes=confirmed, is_queued=is_queued)


def session_of(client_id: str) -> str:
    """Return the id of one more session of a client; it is random, because whoever knows it could end it."""
    return f"{client_id}-{secrets.token_hex(8)}"


def agent_of(session: str) -> str:
    """Return the client id to which a session of `session_of` belongs."""
    return re.sub(r"-[0-9a-f]{16}\Z", "", session)


def user_of(config: BrokerConfig, client_id: str) -> str | None:
    """Return the MQTT user that logs in: the one configured, or the client's id if there is a password; else None."""
    if config.user:
        return config.user
    return client_id if config.password_file else None


def refused_topics(
    config: BrokerConfig, client_id: str, messages: Mapping[str, bytes], timeout_s: float
) -> dict[str, str] | None:
    """Publish one message on each topic, and return what the broker says of the topics that it refuses.

    It is done with MQTT 5, which alone can refuse a message; with 3.1.1, which agents use, brokers drop it silently.

    Returns:
        The broker's reason for each refused topic; None where the broker does not tell.
    """
    session = f"{client_id}-doctor-{secrets.token_hex(4)}"  # a broker ends the session that had the same id
    client = _client(config, client_id, session, paho.MQTTv5)
    answers: dict[int, ReasonCode] = {}
    connected: list[bool] = []
    client.on_connect = lambda _client, _data, _flags, code, _props: connected.append(not code.is_failure)
    client.on_publish = lambda _client, _data, mid, code, _props: answers.update({mid: code})
    until = time.monotonic() + timeout_s
    try:
        # 1. Connect.
        client.connect(config.host, config.port)
        if not _loop_until(client, lambda: bool(connected), until) or not any(connected):
            return None
        # 2. Publish all messages at once, and wait for the broker's answers, which have the numbers of the messages.
        topics = {client.publish(topic, payload, qos=1).mid: topic for topic, payload in messages.items()}
        if not _loop_until(client, lambda: len(answers) >= len(topics), until):
            return None
    except (OSError, ValueError):
        return None
    finally:
        client.disconnect()
    # 3. A message without an answer in time counts as let through.
    failures = {mid: code for mid, code in answers.items() if code.is_failure}
    return {topics[mid]: str(code) for mid, code in failures.items() if mid in topics}


_NOT_GRANTED = 128
"""The code of a subscription that is not granted."""

_VERSION_TOPIC = "$SYS/broker/version"
"""The topic on which some brokers retain what they call themselves."""

_VERSION_BYTES = 100
"""The longest version of a broker that is shown."""

_VERSION_WAIT_S = 0.5
"""Seconds in which a broker that calls itself something has said so."""


class _Question(Enum):
    """A property of a broker that a subscription of `observe_broker` is to show."""

    QOS = "the highest quality of service"
    SPACE = "whether a topic may have a space in it"
    VERSION = "what the broker calls itself"


def observe_broker(config: BrokerConfig, client_id: str, root: str, timeout_s: float) -> BrokerTraits:
    """Return what can be seen of a broker that lets this client in.

    Args:
        config: The broker, and how to log in.
        client_id: The first part of the ids of the sessions, of which there is one at a time.
        root: A topic below which this client may subscribe.
        timeout_s: Seconds that each of the two connections may take.

    Raises:
        ConfigError: A certificate or key cannot be loaded.
    """
    observed = _observe_grants(config, client_id, root, timeout_s)
    qos = observed.codes.get(_Question.QOS, _NOT_GRANTED)
    space = observed.codes.get(_Question.SPACE)
    return BrokerTraits(
        version=observed.version,
        answer_to_5=_observe_answer_to_5(config, client_id, timeout_s),
        highest_qos=None if qos == _NOT_GRANTED else qos,
        takes_spaces=None if space is None else space != _NOT_GRANTED,
    )


@dataclass(frozen=True)
class _Observed:
    """The answers of a broker to the subscriptions of `observe_broker`."""

    codes: Mapping[_Question, int]
    """The code of each answer; a question without an answer has none."""

    version: str
    """What the broker calls itself; empty where it says nothing."""


def _observe_grants(config: BrokerConfig, client_id: str, root: str, timeout_s: float) -> _Observed:
    """Return what the broker answers to each question.

    The question that a topic rule may forbid comes last: RabbitMQ closes the connection then.
    """
    filters = {
        _Question.QOS: (f"{root}/doctor", 2),
        _Question.SPACE: (f"{root}/doctor doctor", 0),
        _Question.VERSION: (_VERSION_TOPIC, 0),
    }
    client = _client(config, client_id, session_of(client_id), paho.MQTTv311)
    connected: list[bool] = []
    codes: dict[int | None, int] = {}
    versions: list[str] = []
    answered: dict[_Question, int] = {}

    def note_message(_client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        if message.topic == _VERSION_TOPIC:
            versions.append(message.payload[:_VERSION_BYTES].decode(errors="replace"))

    client.on_connect = lambda _client, _data, _flags, code, _props: connected.append(not code.is_failure)
    client.on_subscribe = lambda _client, _data, mid, answers, _props: codes.update({mid: answers[0].value})
    client.on_message = note_message
    until = time.monotonic() + timeout_s
    try:
        client.connect(config.host, config.port)
        stands = _loop_until(client, lambda: bool(connected), until) and any(connected)
        for question, (topic_filter, qos) in filters.items():
            if not stands:
                break
            _, mid = client.subscribe(topic_filter, qos)
            stands = _loop_until(client, partial(codes.__contains__, mid), until)
            if mid in codes:
                answered[question] = codes[mid]
        # What is retained comes right after the answer to the subscription, from those that have it.
        if stands:
            _loop_until(client, lambda: bool(versions), min(until, time.monotonic() + _VERSION_WAIT_S))
    # A broken packet makes paho raise anything; what was seen until then is seen.
    except Exception as error:  # noqa: BLE001 - see above
        log.info("broker_not_observed url=%s reason=%s", config.names, cause(error))
    finally:
        client.disconnect()
    return _Observed(answered, version=versions[0] if versions else "")


def _observe_answer_to_5(config: BrokerConfig, client_id: str, timeout_s: float) -> AnswerTo5:
    """Return what the broker does with a client that wants to speak MQTT 5."""
    client = _client(config, client_id, session_of(client_id), paho.MQTTv5)
    lets_in: list[bool] = []
    client.on_connect = lambda _client, _data, _flags, code, _props: lets_in.append(not code.is_failure)
    try:
        client.connect(config.host, config.port)
        stands = _loop_until(client, lambda: bool(lets_in), time.monotonic() + timeout_s)
    except Exception as error:  # noqa: BLE001 - as in `_observe_grants`
        log.info("broker_not_observed url=%s reason=%s", config.names, cause(error))
        return AnswerTo5.NONE
    finally:
        client.disconnect()
    if lets_in:
        return AnswerTo5.SPOKEN if lets_in[0] else AnswerTo5.REFUSED
    return AnswerTo5.NONE if stands else AnswerTo5.CLOSED


def _loop_until(client: paho.Client, is_over: Callable[[], bool], until: float) -> bool:
    """Serve a connection until ``is_over`` or that time (as `time.monotonic`), and return whether it still stands."""
    while not is_over() and time.monotonic() < until:
        if client.loop(0.1) != paho.MQTT_ERR_SUCCESS:
            return False
    return True


def _client(config: BrokerConfig, client_id: str, session: str, protocol: MQTTProtocolVersion) -> _Client:
    """Return a client with user, password and TLS of the configuration.

    Args:
        config: The broker, and how to log in.
        client_id: The id of the agent or coordinator, which may be its user, too.
        session: The client's id at the broker.
        protocol: The version of MQTT.

    Raises:
        ConfigError: A certificate or key cannot be loaded.
    """
    client = _Client(CallbackAPIVersion.VERSION2, client_id=session, protocol=protocol, reconnect_on_failure=False)
    client.connect_timeout = CONNECT_TIMEOUT_S
    user = user_of(config, client_id)
    if user is not None:
        client.username_pw_set(user, config.password())
    if not config.uses_tls:
        return client
    ca = None if config.tls is None else config.tls.ca
    try:
        context = tls_context(config, ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("broker.tls", [f"certificates cannot be loaded: {cause(error)}"]) from error
    client.tls_set_context(context)
    return client


def tls_context(config: BrokerConfig, ca: Path | None) -> ssl.SSLContext:
    """Return the TLS settings of a broker's client, with its certificate where it has one.

    Args:
        config: The broker; its certificate and key are loaded.
        ca: The file of trusted authorities; None: those of the system.

    Raises:
        OSError: A file cannot be read.
        ssl.SSLError: A file holds no certificate or key.
    """
    authorities = None if ca is None else str(ca)
    context = ssl.create_default_context(cafile=authorities)
    if config.tls is not None and config.tls.cert is not None:
        key = None if config.tls.key is None else credential(config.tls.key)
        context.load_cert_chain(credential(config.tls.cert), key)
    return context


def blob_tls_context(config: BrokerConfig) -> ssl.SSLContext:
    """Return the TLS settings for fetching blobs by HTTPS: this agent's certificate, and whom it trusts.

    The coordinator's endpoint is certified by the authority of the broker, an object store by one of the system.

    Raises:
        OSError: A file cannot be read.
        ssl.SSLError: A file holds no certificate or key.
    """
    context = tls_context(config, None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.tls is not None and config.tls.ca is not None:
        context.load_verify_locations(config.tls.ca)
    return context


def _explain_refusal(config: BrokerConfig, client_id: str, code: ReasonCode, advice: LoginAdvice) -> _LoginRefusal:
    """Return why the broker has answered a login with a code, and what to do.

    Args:
        config: The broker, and how this client logs in.
        client_id: The id of the client, which may be its user, too.
        code: The broker's answer.
        advice: What to do where it does not let the user in.
    """
    user = user_of(config, client_id)
    if code.value not in _SHUT_OUT:
        return _LoginRefusal(f"broker refuses: {code}", remedy="")
    if user is None:
        return _LoginRefusal(f"broker refuses a login without a user ({code})", remedy=advice.without_user)
    password = f"the one in '{config.password_file}'" if config.password_file else "the empty one"
    reason = (
        f"broker refuses user '{user}' ({code}): it does not know the user, or has another password than {password}"
    )
    return _LoginRefusal(reason, remedy=advice.refused.format(user=user))
