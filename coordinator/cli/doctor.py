"""``headwater doctor``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from edge_agent import capabilities
from edge_agent.cli.doctor import Step, attempted, walk
from edge_agent.config import BrokerConfig
from edge_agent.errors import UsageError
from edge_agent.wire.messages import Topics
from edge_agent.wire.mqtt import MqttTransport, user_of
from edge_agent.wire.transport import Message, Subscribed

from ..broker import find_mosquitto
from ..config import CoordinatorConfig, load_config
from .options import Json
from .output import print_json, show, table

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; its broker is checked: login and topic rules.")
]

TIMEOUT_S = 5.0


def doctor(config: Config = None, as_json: Json = False) -> None:
    """What this machine can do as a coordinator, and whether a configuration's broker lets one in.

    Example: headwater doctor --config coordinator.toml
    """
    settings = load_config(config) if config is not None else None
    result = capabilities.find()
    mosquitto = find_mosquitto()
    facts = {
        "python": result.python,
        "system": result.system,
        "machine": result.machine,
        "cores": result.cores,
        "memory_mb": None if result.memory_bytes is None else result.memory_bytes // 10**6,
        "accelerators": ", ".join(result.accelerators),
        "mosquitto": str(mosquitto) if mosquitto else None,
        **result.packages,
    }
    advice = [
        *result.advice(),
        *([] if mosquitto else ["no mosquitto: the embedded broker serves trials and small fleets"]),
    ]
    steps = list(_walk(settings)) if settings is not None else []
    if as_json:
        told = [{"step": step.name, "ok": step.is_ok, "detail": step.detail} for step in steps]
        print_json({**facts, "advice": advice, "broker": told})
    else:
        show(table("this machine", ("what", "found"), list(facts.items()), left=2), *(f"- {line}" for line in advice))
        show(*(f"broker {step.name}: {'ok' if step.is_ok else 'FAILED'}: {step.detail}" for step in steps))
    failed = next((step for step in steps if not step.is_ok), None)
    if failed is not None:
        raise typer.Exit(failed.exit_code)


def _walk(config: CoordinatorConfig) -> Iterator[Step]:
    """The way to the broker and its topics, up to and with the first step that fails."""
    if config.broker is None:
        yield Step("embedded", is_ok=True, detail="'headwater serve' starts a broker of its own")
        return
    tls = config.broker.tls
    for step in walk(config.broker, tls.ca if tls else None, TIMEOUT_S):
        yield step
        if not step.is_ok:
            return
    topics = Topics(config.federation)
    transport = MqttTransport(config.broker.model_copy(update={"wait": False}), f"{config.federation}-coordinator")
    try:
        step = attempted("login", lambda: _login(transport, topics, config.broker))
        yield step
        if step.is_ok:
            yield attempted("topics", lambda: _hear_oneself(transport, topics, config.federation))
    finally:
        transport.close()


def _login(transport: MqttTransport, topics: Topics, broker: BrokerConfig | None) -> str:
    transport.subscribe(*topics.for_coordinator())
    transport.start()
    user = None if broker is None else user_of(broker, transport.client_id)
    return "without a user" if user is None else f"as user '{user}'"


def _hear_oneself(transport: MqttTransport, topics: Topics, federation: str) -> str:
    """Say something that nobody acts on, where agents say that they are there, and hear it."""
    topic, until = topics.presence(f"doctor-{secrets.token_hex(8)}"), time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        event = transport.receive(0.1)
        if isinstance(event, Subscribed):
            transport.publish(topic, b"offline doctor")
        elif isinstance(event, Message) and event.topic == topic:
            return f"may listen and speak on those of federation '{federation}'"
    raise UsageError(
        f"the broker does not let this user listen and speak on the topics of federation '{federation}'; its rules "
        f"lack that federation or user: 'headwater enroll coordinator --acl FILE --federation {federation}' adds them; "
        "then reload the broker"
    )
