"""``headwater doctor``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from edge_agent import __version__
from edge_agent.core import capabilities
from edge_agent.core.checks import Step, try_step
from edge_agent.core.children import in_child
from edge_agent.core.config import BrokerConfig
from edge_agent.core.errors import UsageError
from edge_agent.core.formats import other_version
from edge_agent.core.locks import lock_holder
from edge_agent.wire.broker_kinds import Amqtt, Mosquitto, describe_broker, describe_kind
from edge_agent.wire.broker_steps import walk_to_broker
from edge_agent.wire.mqtt import MqttTransport, observe_broker, user_of
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Message, Subscribed

from ..broker import find_mosquitto
from ..config import CoordinatorConfig, load_config
from ..service.preflight import check_defaults, without_lost_weights
from ..shadowed import file_before_headwater
from ..state.journal_location import examine_database
from ..state.status_file import read_status
from .options import Json
from .output import present, table

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; it is checked as 'serve' does, and its broker.")
]

TIMEOUT_S = 5.0


def doctor(config: Config = None, as_json: Json = False) -> None:
    """Show what this machine can do as a coordinator, and whether 'headwater serve' would start with a configuration.

    It looks at method, task and data of runs as 'serve' does, at the database of the journal where one is named, and at
    the broker: login, topic rules, and which one it is, with its known limits.

    Example: headwater doctor --config coordinator.toml
    """
    settings = None if config is None else load_config(config)
    # 1. What this machine is, and what would help.
    device = capabilities.find()
    mosquitto = find_mosquitto()
    facts = {
        "python": device.python,
        "system": device.system,
        "machine": device.machine,
        "cores": device.cores,
        "memory_mb": None if device.memory_bytes is None else device.memory_bytes // 10**6,
        "accelerators": ", ".join(device.accelerators),
        "mosquitto": None if mosquitto is None else str(mosquitto),
        **device.packages,
    }
    advice = [*device.advice(), *capabilities.torchvision_advice()]
    if mosquitto is None:
        advice.append("no mosquitto: the embedded broker serves trials and small fleets")
    hiding = file_before_headwater(Path.cwd())
    if hiding is not None:
        advice.append(f"{hiding}: scripts here get it by 'import headwater', and not the package; rename it")
    # 2. Whether 'serve' would start with the configuration, if one is named.
    checks = _Checks()
    if settings is not None:
        serving = _serving_version(settings.state)
        if serving:
            advice.append(serving)
        checks = _check(settings, config, advice)
    # 3. All of it; the exit code is that of the first step that fails.
    parts: list[Table | str] = [table("this machine", ("what", "found"), list(facts.items()), left=2)]
    parts += [f"- {line}" for line in advice]
    for name, step in checks.in_order():
        outcome = "ok" if step.is_ok else "FAILED"
        parts.append(f"{name}: {outcome}: {step.detail}")
    present({**facts, "advice": advice, **checks.to_json()}, parts, as_json=as_json)
    for _, step in checks.in_order():
        if not step.is_ok:
            raise typer.Exit(step.exit_code)


@dataclass(frozen=True)
class _Checks:
    """The steps that were tried with a configuration; None for a part that it does not name."""

    runs: Step | None = None
    journal: Step | None = None
    broker: tuple[Step, ...] = ()
    blobs: Step | None = None

    def in_order(self) -> Iterator[tuple[str, Step]]:
        """Yield the steps with their titles, in the order in which 'headwater serve' would meet them."""
        if self.runs is not None:
            yield "runs", self.runs
        if self.journal is not None:
            yield "journal", self.journal
        for step in self.broker:
            yield f"broker {step.name}", step
        if self.blobs is not None:
            yield "blobs", self.blobs

    def to_json(self) -> dict[str, object]:
        """Return the steps as ``--json`` prints them."""
        return {
            "runs": _shown(self.runs),
            "journal": _shown(self.journal),
            "blobs": _shown(self.blobs),
            "broker": [_shown(step) for step in self.broker],
        }


def _check(settings: CoordinatorConfig, path: Path | None, advice: list[str]) -> _Checks:
    """Try what a configuration names, and add to the advice what should be changed."""
    runs = try_step("runs", lambda: _check_runs(settings, path))
    broker = tuple(_steps(settings))
    journal = None
    if settings.journal is not None:
        url = settings.journal
        journal = try_step("journal", lambda: _check_journal(settings.state, url, advice))
    blobs = None
    if settings.blobs is not None:
        blobs = try_step("blobs", lambda: _check_blobs(settings))
    return _Checks(runs, journal, broker, blobs)


def _serving_version(state: Path) -> str:
    """Return a note that the coordinator at work on ``state`` is of another version; empty where it is not."""
    try:
        is_held = lock_holder(state) is not None
    except OSError:
        return ""
    serving = read_status(state).version if is_held else None
    return other_version(serving, __version__, "'headwater serve'")


def _shown(step: Step | None) -> dict[str, object] | None:
    """Return a step as ``--json`` prints it; None where it was not tried."""
    if step is None:
        return None
    return {"step": step.name, "ok": step.is_ok, "detail": step.detail}


def _check_runs(settings: CoordinatorConfig, path: Path | None) -> str:
    """Return what runs do by default, where they can do it.

    Raises:
        HeadwaterError: they cannot, and 'headwater serve' would say the same.
    """
    in_child(lambda: check_defaults(without_lost_weights(settings), path))  # models need torch, 190 MB
    return f"method {settings.run.method}, encoder {settings.task.encoder}"


def _check_journal(state: Path, url: str, advice: list[str]) -> str:
    """Return what is in the database of the journal, and add to the advice what its server should do.

    Raises:
        StateError: The database cannot be reached, or is not that of the state folder.
    """
    report = examine_database(state, url)
    advice += report.advice
    return report.description


def _check_blobs(settings: CoordinatorConfig) -> str:
    """Return how agents fetch large blobs by HTTP, where that can work.

    Raises:
        HeadwaterError: The store refuses, or the certificate cannot be used.
    """
    from ..blobs.opening import check_blobs

    return check_blobs(settings)


def _steps(config: CoordinatorConfig) -> Iterator[Step]:
    """Yield the steps to the broker and its topics, or to each broker of a list."""
    if config.identity is not None:
        from ..identity.serving import checks

        for name, check in checks(config.state, config.federation, config.identity):
            yield try_step(name, check)
        yield Step("kind", is_ok=True, detail=describe_kind(Mosquitto))
        return
    if config.broker is None:
        yield Step("embedded", is_ok=True, detail="'headwater serve' starts its own broker")
        yield Step("kind", is_ok=True, detail=describe_kind(Amqtt))
        return
    for url in config.broker.urls:
        for step in _steps_to(config.broker.at(url), config.federation):
            is_single = isinstance(config.broker.url, str)
            yield step if is_single else replace(step, name=f"{step.name} of {url}")


def _steps_to(broker: BrokerConfig, federation: str) -> Iterator[Step]:
    """Yield the steps to one broker and its topics, up to and with the first one that fails."""
    tls = broker.tls
    for step in walk_to_broker(broker, tls.ca if tls else None, TIMEOUT_S):
        yield step
        if not step.is_ok:
            return
    topics = Topics(federation)
    transport = MqttTransport(broker.model_copy(update={"wait": False}), f"{federation}-coordinator")
    try:
        step = try_step("login", lambda: _login(transport, topics, broker))
        yield step
        if not step.is_ok:
            return
        step = try_step("topics", lambda: _receive_own_message(transport, topics, federation))
        yield step
    finally:
        transport.close()
    # With a certificate all connections have one id, and the second one ends the first: so this comes after it.
    if step.is_ok:
        yield try_step("kind", lambda: _kind(broker, topics, f"{federation}-coordinator"))


def _login(transport: MqttTransport, topics: Topics, broker: BrokerConfig) -> str:
    transport.subscribe(*topics.for_coordinator())
    transport.start()
    user = user_of(broker, transport.client_id)
    return "without a user" if user is None else f"as user '{user}'"


def _kind(broker: BrokerConfig, topics: Topics, client_id: str) -> str:
    """Return which broker it is, as far as it can be told, and its limits."""
    return describe_broker(observe_broker(broker, client_id, topics.root, TIMEOUT_S))


def _receive_own_message(transport: MqttTransport, topics: Topics, federation: str) -> str:
    """Publish a message without effect on the presence topic of an agent that does not exist, and receive it."""
    topic = topics.presence(f"doctor-{secrets.token_hex(8)}")
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        event = transport.receive(0.1)
        if isinstance(event, Subscribed):
            transport.publish(topic, b"offline doctor")
        elif isinstance(event, Message) and event.topic == topic:
            return f"may listen and speak on those of federation '{federation}'"
    raise UsageError(
        f"the broker does not let this user listen and speak on the topics of federation '{federation}'; its rules "
        f"lack that federation or user: 'headwater password coordinator --acl FILE --federation {federation}' adds "
        "those of Mosquitto, and configs/brokers has those of NATS and RabbitMQ; then reload the broker"
    )
