"""The way to a broker, tried step by step: its name, port, certificate, login, topics, and a coordinator behind it."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.checks import Step, try_step
from ..core.errors import BrokerAway, UsageError, cause

if TYPE_CHECKING:
    from ..core.config import AgentConfig, BrokerConfig
    from .mqtt import MqttTransport


def walk_to_broker(
    broker: BrokerConfig, ca: Path | None, timeout_s: float, config: AgentConfig | None = None
) -> Iterator[Step]:
    """Try the steps to each broker in order, up to and with the first that fails, and yield each.

    Args:
        broker: The broker's address, or a list of them, whose steps name their broker; and how to log in.
        ca: File of trusted authorities; None: those of the system.
        timeout_s: Seconds that a step may take.
        config: An agent's configuration, whose login, topics and coordinator are then tried, too.
    """
    if isinstance(broker.url, str):
        yield from _walk_to_single(broker, ca, timeout_s, config)
        return
    for url in broker.url:
        config_of_url = None
        if config is not None:
            config_of_url = config.model_copy(update={"broker": config.broker.at(url)})
        for step in _walk_to_single(broker.at(url), ca, timeout_s, config_of_url):
            yield replace(step, name=f"{step.name} of {url}")


def _walk_to_single(
    broker: BrokerConfig, ca: Path | None, timeout_s: float, config: AgentConfig | None
) -> Iterator[Step]:
    """Try the steps to one broker, up to and with the first that fails, and yield each; see `walk_to_broker`."""
    address = broker.host, broker.port

    def look_up_name() -> str:
        """Look up the broker's addresses."""
        entries = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        addresses = sorted({str(entry[4][0]) for entry in entries})
        return f"{broker.host} is {', '.join(addresses)}"

    def connect() -> str:
        """Connect to the broker's port."""
        with socket.create_connection(address, timeout_s):
            return f"port {broker.port} is open"

    def check_certificate() -> str:
        """Check the broker's certificate, with this client's own: without it the broker reports a refused device."""
        import ssl

        from .mqtt import tls_context

        context = tls_context(broker, ca)
        try:
            with (
                socket.create_connection(address, timeout_s) as plain,
                context.wrap_socket(plain, server_hostname=broker.host) as secure,
            ):
                return f"{secure.version()}, certificate is trusted"
        except ssl.SSLCertVerificationError as error:
            authorities = "those of the system" if ca is None else f"those in {ca}"
            raise BrokerAway(
                f"{cause(error)}; trusted are {authorities}: give the file of the broker's authority, or correct "
                f"the broker's certificate, which has to be for '{broker.host}'"
            ) from error

    attempts = [_Attempt("name", look_up_name), _Attempt("tcp", connect)]
    if broker.uses_tls:
        attempts.append(_Attempt("tls", check_certificate, "and this device do not trust each other"))
    visit = None
    if config is not None:
        visit = _Visit(config, timeout_s)
        attempts += visit.attempts()
    try:
        for attempt in attempts:
            step = try_step(attempt.name, attempt.act, meaning=attempt.meaning)
            yield step
            if not step.is_ok:
                return
    finally:
        if visit is not None:
            visit.leave()


@dataclass(frozen=True)
class _Attempt:
    """A step that is to be tried."""

    name: str
    act: Callable[[], str]
    """Tries it, and returns what was seen."""

    meaning: str = "cannot be reached"
    """What a failure says of the broker, as the end of a sentence."""


class _Visit:
    """A short connection with an agent's user and password, beside the connection of the agent itself."""

    def __init__(self, config: AgentConfig, timeout_s: float) -> None:
        from .mqtt import user_of
        from .topics import Topics

        self._config = config
        self._timeout_s = timeout_s
        self._user = user_of(config.broker, config.id)
        self._topics = Topics(config.federation)
        self._broker = config.broker.model_copy(update={"user": self._user, "wait": False})
        self._transport: MqttTransport | None = None
        self._boot = secrets.token_hex(8)

    def attempts(self) -> list[_Attempt]:
        """Return the steps of the visit in their order."""
        return [
            _Attempt("login", self.login, "does not let it in"),
            _Attempt("topics", self.topics, "does not give it its topics"),
            _Attempt("coordinator", self.coordinator, "has no coordinator for it"),
            _Attempt("kind", self.kind),
        ]

    def login(self) -> str:
        """Connect as the agent does.

        Raises:
            UsageError: the broker does not let this user in.
            BrokerAway: it does not answer.
        """
        self._connect()
        if self._broker.tls is not None and self._broker.tls.cert is not None:
            return f"with the certificate in {self._broker.tls.cert}"
        return "without a user" if self._user is None else f"as user '{self._user}'"

    def _connect(self) -> MqttTransport:
        """Return the connection, which is made and subscribed the first time.

        Raises:
            UsageError: the broker does not let this user in.
            BrokerAway: it does not answer.
        """
        from .mqtt import MqttTransport

        if self._transport is None:
            self._transport = MqttTransport(self._broker, f"{self._config.id}-doctor")
            self._transport.subscribe(*self._topics.for_agent(self._config.id))
            self._transport.start()
        return self._transport

    def topics(self) -> str:
        """Listen and speak on the agent's topics.

        Raises:
            UsageError: the broker's rules do not let this user.
        """
        from .messages import codec, up
        from .mqtt import refused_topics
        from .transport import Subscribed

        agent = self._config.id
        # 1. Listen: the broker confirms each filter.
        unconfirmed = set(self._topics.for_agent(agent))
        until = time.monotonic() + self._timeout_s
        while unconfirmed and time.monotonic() < until:
            event = self._connect().receive(0.1)
            if isinstance(event, Subscribed):
                unconfirmed -= set(event.filters)
        if unconfirmed:
            raise self._forbidden(f"listen on {', '.join(sorted(unconfirmed))}")
        # 2. Speak, on another connection: it alone can be told that a message is refused.
        self.leave()  # with a certificate all connections have one id, and the second one ends the first
        beat = codec.encode(up.Heartbeat(boot=self._boot))  # of a start that has said no hello: it changes nothing
        spoken = {topic(agent): beat for topic in (self._topics.up, self._topics.heartbeat)}
        rejected = refused_topics(self._broker, agent, spoken, self._timeout_s)
        if rejected:
            raise self._forbidden(f"speak on {', '.join(sorted(rejected))} ({next(iter(rejected.values()))})")
        self._connect()
        text = f"may listen and speak on those of agent '{agent}' in federation '{self._config.federation}'"
        return f"{text}, as far as this broker tells" if rejected is None else text

    def coordinator(self) -> str:
        """Hear a coordinator answer: it asks for an introduction when a start that it does not know speaks.

        Raises:
            BrokerAway: none does.
        """
        from .messages import codec, up
        from .transport import Message

        until = time.monotonic() + self._timeout_s
        beat = codec.encode(up.Heartbeat(boot=self._boot))
        beat_at = float("-inf")
        while time.monotonic() < until:
            if time.monotonic() - beat_at >= 0.5:  # a connection that has just begun does not hear the first answers
                beat_at = time.monotonic()
                self._connect().publish(self._topics.heartbeat(self._config.id), beat)
            event = self._connect().receive(0.1)
            if isinstance(event, Message) and event.topic == self._topics.down(self._config.id):
                return f"one of federation '{self._config.federation}' answers"
        raise BrokerAway(
            f"none of federation '{self._config.federation}' answered within {self._timeout_s:g} s; start 'headwater "
            "serve' with the same federation and broker, and see that the broker's topic rules name it"
        )

    def kind(self) -> str:
        """Look which broker it is, as far as it can be told by what this agent may subscribe to."""
        from .broker_kinds import describe_broker
        from .mqtt import observe_broker

        self.leave()  # with a certificate all connections have one id, and the second one ends the first
        client_id = f"{self._config.id}-doctor"
        return describe_broker(observe_broker(self._broker, client_id, self._topics.broadcasts, self._timeout_s))

    def leave(self) -> None:
        """Disconnect."""
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    def _forbidden(self, action: str) -> UsageError:
        """Return the error that the broker does not let this user do something, with its remedy."""
        agent = self._config.id
        federation = self._config.federation
        if self._user not in {None, agent}:
            remedy = f"an agent logs in with its id, and this one's is '{agent}': change id or broker.user"
        else:
            remedy = (
                f"its topic rules lack federation '{federation}' or this agent: 'headwater password {agent} --acl FILE "
                f"--federation {federation}' adds those of Mosquitto, and configs/brokers has those of NATS and "
                "RabbitMQ; then reload the broker"
            )
        who = "a login without user" if self._user is None else f"user '{self._user}'"
        return UsageError(f"the broker does not let {who} {action}; {remedy}")
