"""A coordinator ready to serve: state folder locked, broker reachable, signals handled; closed at the end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from edge_agent.wire.messages import Topics
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.wire.transport import Transport
from edge_agent.worker import ThreadWorker

from ..broker import EmbeddedBroker
from ..config import CoordinatorConfig
from ..fleet.rate_limits import RateLimits
from ..hosted.run_hooks import OwnDataHooks
from ..hosted.transport import CombinedTransport, HostedTransport
from ..processes.compute import ComputeProcess
from ..state.store import StateFolder
from .coordinator import Coordinator
from .peers import PROBE_S
from .preflight import overlaps

log = logging.getLogger(__name__)

START_LIMIT_S = 10.0
"""How long a start waits until it may serve, before it reports what it waits for."""


@contextlib.contextmanager
def coordinator(config: CoordinatorConfig) -> Iterator[Coordinator]:
    """A started coordinator; it is closed with the context, and the next start resumes.

    Raises:
        StateError: another process works in the state folder, or it is damaged.
        DuplicateCoordinator: another coordinator serves the federation.
        BrokerAway: the broker does not answer and ``broker.wait`` is false.
    """
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(StateFolder(config.state).open("headwater serve"))
        broker, embedded = config.broker, config.embedded
        if broker is None:
            served = EmbeddedBroker(
                embedded.bind, embedded.port, federation=config.federation, password_file=embedded.password_file
            )
            stack.enter_context(served)
            broker = served.config()
            log.info("broker_started url=%s", broker.url)
        topics = Topics(config.federation)
        limits, heartbeats = RateLimits(topics), topics.heartbeat("")
        mqtt = MqttTransport(
            broker,
            f"{config.federation}-coordinator",
            admits=limits.admits,
            is_urgent=lambda topic: topic.startswith(heartbeats),
        )
        worker = ThreadWorker(mqtt.wake)
        transport: Transport = mqtt
        if config.hosted:
            side, ids = HostedTransport.of(config, mqtt.wake), [client.id for client in config.hosted]
            transport = CombinedTransport(mqtt, side, topics, ids, side.away)
        hooks = OwnDataHooks(
            config.proxy, ComputeProcess(state.path / "hosted" / "compute.log"), ThreadWorker(mqtt.wake)
        )
        probe_s = 0.0 if config.broker is None else PROBE_S  # an embedded broker has just been started
        service = Coordinator(
            config,
            state,
            transport,
            worker=worker,
            hooks=hooks,
            broker_url=broker.url,
            probe_s=probe_s,
            limits=limits,
        )
        for overlap in overlaps(config):
            log.warning("samples_serve_twice %s", overlap)
        stack.callback(service.close)
        service.start()
        until = time.monotonic() + START_LIMIT_S
        while not service.is_serving and service.waiting.about != "broker" and time.monotonic() < until:
            service.step(service.idle_s())
        yield service
