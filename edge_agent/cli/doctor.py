"""Check a device, an agent's configuration and the way to its broker."""

from __future__ import annotations

import argparse
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import BrokerAway, HeadwaterError, MissingCapability, UsageError, cause
from . import output

if TYPE_CHECKING:
    from ..core.capabilities import Capabilities
    from ..core.config import AgentConfig, BrokerConfig
    from ..wire.mqtt import MqttTransport


@dataclass(frozen=True)
class Step:
    """One thing that was looked at; ``exit_code`` is that of the error, 0 where there was none."""

    name: str
    is_ok: bool
    detail: str
    exit_code: int = 0


_TIERS = {
    "train": "train: trains encoders and fits heads",
    "head": "head: runs encoders and fits heads",
    "idle": "none yet",
}


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``edge-agent doctor``."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", type=Path, metavar="FILE", help="check every step of the agent in this TOML file")
    which.add_argument("--broker", metavar="URL", help="check every step to this broker: mqtt://host or mqtts://host")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="trusted authorities for mqtts (default: the system's)")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds for each step (default: 5)")


def doctor(arguments: argparse.Namespace) -> int:
    """Show what this device can do, what would let it do more, and whether an agent's configuration works.

    With --config, the steps of an agent are tried as far as they succeed: tier, state folder, data, head, then the
    broker's name, port, certificate and login, the topics of the agent, and whether a coordinator answers on them. An
    agent with this configuration may run meanwhile, undisturbed; a fault of it counts. Classes of the data are compared
    with the task that a coordinator named last, or with that of the bundle in use. --broker checks the steps to a
    broker alone. The verdict at the end is "ready" only when nothing has failed, and then the exit code is 0; else it
    is that of the first step that failed, 75 where the broker is not reached.

    Example:
      edge-agent doctor --config agent.toml
    """
    from ..core.capabilities import find
    from ..core.config import AgentConfig, BrokerConfig, load, parse

    device = find()
    config = None
    ca = arguments.ca
    steps: list[Step] = []
    if arguments.config is not None:
        config = load(AgentConfig, arguments.config)
        own = list(look(config))
        ca = ca or (config.broker.tls.ca if config.broker.tls else None)
        steps = list(_way(config, ca, arguments.timeout))
    else:
        own = [attempted("tier", lambda: _check_tier(device, device.tier))]
    if arguments.broker is not None:
        broker = parse(BrokerConfig, {"url": arguments.broker}, where="--broker")
        steps = list(walk(broker, ca, arguments.timeout))
    content = {
        **device.model_dump(mode="json"),
        "tier": device.tier,
        "head": device.head,
        "advice": list(device.advice()),
        "verdict": _verdict(device, config, own, steps),
    }
    for whose, some in (("agent", own), ("broker", steps)):
        content[whose] = [{"step": step.name, "ok": step.is_ok, "detail": step.detail} for step in some]
    output.result(arguments, content, lambda: _lines(device, config, own, steps))
    return next((step.exit_code for step in (*own, *steps) if not step.is_ok), 0)


def _way(config: AgentConfig, ca: Path | None, timeout_s: float) -> Iterator[Step]:
    """The steps to the broker and a coordinator.

    A broker that takes the client's id from its certificate would end the session of an agent that runs. Then what that
    agent reports is shown instead.
    """
    from ..core.locks import lock_holder
    from ..core.storage import read_json
    from ..identity.certificates import IdentityFolder

    holder = lock_holder(config.state) if IdentityFolder(config.state).file.exists() else None
    yield from walk(config.broker, ca, timeout_s, None if holder is not None else config)
    if holder is not None:
        status = read_json(config.state / "status.json") or {}
        reason = status.get("waits_for") or "it has just been started"

        def agent() -> str:
            if not status.get("welcomed"):
                raise BrokerAway(f"{holder} is not welcomed by a coordinator: {reason}")
            return f"{holder} is connected and welcomed; login and topics are not tried beside it"

        yield attempted("agent", agent)


def look(config: AgentConfig) -> Iterator[Step]:
    """What an agent with this configuration finds on its own device: tier, state, data, key of commands, head."""
    from .. import heads
    from ..agent.app import choose_tier
    from ..core.capabilities import find
    from ..core.config import check_tls, is_loopback, own_methods
    from ..core.storage import check_writable
    from ..identity.certificates import IdentityFolder, check_identity
    from ..privacy.policy import check_policy

    head = config.head
    yield attempted("tier", lambda: _check_tier(find(), choose_tier(config)))
    yield attempted("state", lambda: check_writable(config.state), f"{config.state} can be written")
    yield attempted("data", lambda: _check_data(config))
    yield attempted(
        "privacy",
        lambda: check_policy(config.privacy, own_methods(config.training)) or "'edge-agent privacy' shows what leaves",
    )
    yield attempted("commands", lambda: _check_key(config))
    yield attempted("head", lambda: heads.check(head.name, head.params), f"'{head.name}' with its parameters is known")
    if IdentityFolder(config.state).file.exists():
        yield attempted("certificate", lambda: check_identity(config, time.time()))
        yield attempted("enrolment", lambda: _ask_standing(config))
        yield attempted("clock", lambda: _compare_clocks(config))
    elif not config.broker.uses_tls and not is_loopback(config.broker.host):
        yield attempted("tls", lambda: check_tls(config.broker))
    yield from _look_at_running_agent(config)


def _check_data(config: AgentConfig) -> str:
    """Return what the local data fit.

    Raises:
        HeadwaterError: they are not there, cannot be used, or are not those of the last task.
    """
    from ..agent.data_check import last_task
    from ..data import probe
    from ..data.partition import check_own

    task = last_task(config.state)
    check_own(config.data, config.id, task, own_classes=config.head.own_classes)
    if config.data.partition is None:
        probe(config.data.source, config.data.folder)
    if task is None:
        return f"{config.data.source} is there; which classes it needs is known after the first contact"
    return f"{config.data.source} is there and fits the last task"


def _look_at_running_agent(config: AgentConfig) -> Iterator[Step]:
    """Yield a step about the agent that runs with this state folder: it fails where that agent has a fault.

    Its status file is renewed every few seconds, so what it says of a running agent is true now.
    """
    from ..core import errors
    from ..core.locks import lock_holder
    from ..core.storage import read_json
    from ..version import __version__

    try:
        holder = lock_holder(config.state)
        if holder is None:
            return
        status = read_json(config.state / "status.json") or {}
    except (HeadwaterError, OSError) as error:
        yield Step("running agent", is_ok=False, detail=str(error), exit_code=HeadwaterError.exit_code)
        return
    fault = status.get("fault")
    if status.get("condition") in {"fault", "stalled"} and isinstance(fault, dict):
        kind = getattr(errors, str(fault.get("error")), HeadwaterError)
        yield Step(
            "running agent",
            is_ok=False,
            detail=f"{fault.get('error')}: {fault.get('message')}; {fault.get('remedy')}",
            exit_code=getattr(kind, "exit_code", HeadwaterError.exit_code),
        )
        return
    other = output.other_version(status.get("version"), __version__, "the agent")
    detail = f"{holder} has no fault; {other}" if other else f"{holder} has no fault"
    yield Step("running agent", is_ok=True, detail=detail)


def _ask_standing(config: AgentConfig) -> str:
    from ..identity.renewal import Renewal

    try:
        return f"the coordinator says that the certificate counts until {Renewal(config.state).standing()}"
    except BrokerAway as error:
        return f"not asked: {error}"


def _compare_clocks(config: AgentConfig) -> str:
    from ..identity.certificates import IdentityFolder, check_clock
    from ..identity.enrolment_port import ask

    folder = IdentityFolder(config.state)
    identity = folder.read()
    if identity is None:
        return "no certificate"
    try:
        answer = ask((identity.host, identity.port), folder.ca_der(), {"ask": "authority"}, checks_time=False)
    except BrokerAway as error:
        return f"not compared: {error}"
    return f"{check_clock(answer, time.time()):+.0f} s from the coordinator's"


def _check_key(config: AgentConfig) -> str:
    from ..wire.seal import read_key

    if read_key(config) is None:
        return "not authenticated: anyone who may publish on its topics commands it; set broker.command_key_file"
    return "authenticated: only those of the coordinator that made this agent's key are obeyed"


def _check_tier(device: Capabilities, tier: str) -> str:
    if tier == "idle":
        raise MissingCapability(f"no encoder can run here; {next(iter(device.advice()), 'see the packages above')}")
    return f"'{tier}' can be done here"


def walk(broker: BrokerConfig, ca: Path | None, timeout_s: float, config: AgentConfig | None = None) -> Iterator[Step]:
    """The steps to the broker, in order, up to and with the first that fails; with ``config`` to a coordinator."""
    address = broker.host, broker.port

    def name() -> str:
        result = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        return f"{broker.host} is {', '.join(sorted({str(entry[4][0]) for entry in result}))}"

    def tcp() -> str:
        with socket.create_connection(address, timeout_s):
            return f"port {broker.port} is open"

    def tls() -> str:
        import ssl

        from ..core.config import credential

        context = ssl.create_default_context(cafile=str(ca) if ca is not None else None)
        if broker.tls is not None and broker.tls.cert is not None:  # else the broker reports a refused device
            key = broker.tls.key
            context.load_cert_chain(credential(broker.tls.cert), credential(key) if key is not None else None)
        with (
            socket.create_connection(address, timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=broker.host) as secure,
        ):
            return f"{secure.version()}, certificate is trusted"

    steps = [name, tcp, tls] if broker.uses_tls else [name, tcp]
    if config is not None:
        visit = _Visit(config, timeout_s)
        steps += [visit.login, visit.topics, visit.coordinator]
    try:
        for attempt in steps:
            step = attempted(attempt.__name__, attempt)
            yield step
            if not step.is_ok:
                return
    finally:
        if config is not None:
            visit.leave()


def attempted(name: str, attempt: Callable[[], object], detail: str = "") -> Step:
    """The result of one step; it has failed where it raises an error of ours or of the system.

    Where it succeeds its detail is ``detail``, or what ``attempt`` returns.
    """
    try:
        result = attempt()
        return Step(name, is_ok=True, detail=detail or str(result))
    except HeadwaterError as error:
        return Step(name, is_ok=False, detail=str(error).removeprefix(f"{name}: "), exit_code=error.exit_code)
    except OSError as error:  # name, connection and certificate errors are all kinds of OSError
        return Step(name, is_ok=False, detail=cause(error), exit_code=BrokerAway.exit_code)


class _Visit:
    """A short connection with an agent's user and password, beside that of the agent."""

    def __init__(self, config: AgentConfig, timeout_s: float) -> None:
        from ..wire.mqtt import user_of
        from ..wire.topics import Topics

        self._config = config
        self._timeout_s = timeout_s
        self._user = user_of(config.broker, config.id)
        self._topics = Topics(config.federation)
        self._broker = config.broker.model_copy(update={"user": self._user, "wait": False})
        self._transport: MqttTransport | None = None
        self._boot = secrets.token_hex(8)

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
        from ..wire.mqtt import MqttTransport

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
        from ..wire.messages import codec, up
        from ..wire.mqtt import refused_topics
        from ..wire.transport import Subscribed

        agent = self._config.id
        wanted = set(self._topics.for_agent(agent))
        until = time.monotonic() + self._timeout_s
        while wanted and time.monotonic() < until:
            event = self._connect().receive(0.1)
            if isinstance(event, Subscribed):
                wanted -= set(event.filters)
        if wanted:
            raise self._forbidden(f"listen on {', '.join(sorted(wanted))}")
        self.leave()  # with a certificate all connections have one id, and the second one ends the first
        beat = codec.encode(up.Heartbeat(boot=self._boot))  # of a start that has said no hello: it changes nothing
        spoken = {topic(agent): beat for topic in (self._topics.up, self._topics.heartbeat)}
        rejected = refused_topics(self._broker, agent, spoken, self._timeout_s)
        if rejected:
            raise self._forbidden(f"speak on {', '.join(sorted(rejected))} ({next(iter(rejected.values()))})")
        self._connect()
        return f"may listen and speak on those of agent '{agent}' in federation '{self._config.federation}'" + (
            "" if rejected is not None else ", as far as this broker tells"
        )

    def coordinator(self) -> str:
        """Hear a coordinator answer: it asks for an introduction when a start that it does not know speaks.

        Raises:
            BrokerAway: none does.
        """
        from ..wire.messages import codec, up
        from ..wire.transport import Message

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

    def leave(self) -> None:
        """Disconnect."""
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    def _forbidden(self, what: str) -> UsageError:
        agent = self._config.id
        federation = self._config.federation
        if self._user not in {None, agent}:
            remedy = f"an agent logs in with its id, and this one's is '{agent}': change id or broker.user"
        else:
            remedy = (
                f"its topic rules lack federation '{federation}' or this agent: 'headwater password {agent} --acl FILE "
                f"--federation {federation}' adds them, then reload the broker"
            )
        who = "a login without user" if self._user is None else f"user '{self._user}'"
        return UsageError(f"the broker does not let {who} {what}; {remedy}")


def _lines(device: Capabilities, config: AgentConfig | None, own: list[Step], steps: list[Step]) -> list[str]:
    lines = output.pairs(
        [
            ("python", f"{device.python}, {'64' if device.is_64bit else '32'} bit"),
            ("system", f"{device.system}, {device.machine}"),
            ("board", device.board),
            ("processor", f"{device.cores} cores"),
            ("memory", f"{output.size(device.memory_bytes)}, {output.size(device.available_bytes)} available"),
            ("accelerators", ", ".join(device.accelerators) or "none found"),
            ("packages", ", ".join(f"{name} {version}" for name, version in device.packages.items())),
            ("suggested tier", _TIERS[device.tier]),
            ("suggested head", f"{device.head} (logistic regression)"),
        ]
    )
    lines += [f"note: {advice}" for advice in device.advice()]
    for whose, some in (("agent", own), ("broker", steps)):
        lines += [f"{whose} {step.name}: {'ok' if step.is_ok else 'FAILED'}: {step.detail}" for step in some]
    return [*lines, f"verdict: {_verdict(device, config, own, steps)}"]


def _verdict(device: Capabilities, config: AgentConfig | None, own: list[Step], steps: list[Step]) -> str:
    """What it all comes to, in one line: ready when no step has failed."""
    wrong = next((step for step in own if not step.is_ok), None)
    failed = next((step for step in steps if not step.is_ok), None)
    if wrong is not None:
        return f"not ready: {wrong.name}: {wrong.detail}"
    tier = device.tier if config is None or config.tier == "auto" else config.tier
    if failed is not None:
        what = {
            "login": "does not let it in",
            "topics": "does not give it its topics",
            "coordinator": "has no coordinator for it",
        }
        why = f"the broker {what.get(failed.name, 'cannot be reached')} ({failed.name}: {failed.detail})"
        return f"not ready: {why}; the device itself can be an agent of tier '{tier}'"
    ready = f"ready as an agent of tier '{tier}'"
    if not steps:
        return f"{ready}; --config FILE tries an agent's configuration, its login included"
    return f"{ready}, and the broker answers" + ("" if config is None else ", and so does a coordinator")
