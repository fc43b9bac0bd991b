"""An aggregator ready to serve: configuration checked, secret read, connected to its coordinator's broker."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator

from edge_agent.core.children import ThreadWorker
from edge_agent.core.config import BrokerConfig
from edge_agent.core.errors import StateError, UsageError
from edge_agent.core.limits import OPEN_FILES, allow_open_files
from edge_agent.wire.mqtt import MqttTransport
from edge_agent.wire.topics import Topics

from ..broker import EmbeddedBroker
from ..config import CoordinatorConfig
from ..fleet.message_ranks import rank_by
from ..fleet.partitions import Partition
from ..fleet.rate_limits import RateLimits
from ..state.command_keys import MASTER, CommandKeys
from ..state.status_file import read_status
from ..state.store import AGGREGATORS, BlobStore
from .aggregator import Aggregator, Site


def check(config: CoordinatorConfig, partition: Partition) -> None:
    """Require that a coordinator of this configuration would have an aggregator for this partition.

    Raises:
        UsageError: It would not; all reasons are named.
    """
    of = config.aggregators.partitions
    mistakes = []
    if of == 0:
        mistakes.append(
            f"[aggregators] partitions is not set; set it to {partition.of} for the coordinator as well, and restart it"
        )
    elif of != partition.of:
        mistakes.append(
            f"[aggregators] partitions = {of}, and --partition names one of {partition.of}; give --partition K/{of}"
        )
    serving = read_status(config.state).federation
    if serving not in {"", config.federation}:
        mistakes.append(
            f"{config.state} is of federation '{serving}', and the configuration names '{config.federation}'; give the "
            "configuration of its coordinator"
        )
    if config.identity is not None:
        mistakes.append(
            "with [identity] the broker lets each certificate have one session, and that of the coordinator is taken; "
            "use [broker] url with users of your own"
        )
    if config.round.mode != "synchronous":
        mistakes.append(f"round.mode = '{config.round.mode}', and aggregators take updates of synchronous rounds alone")
    if config.privacy.secure_sum:
        mistakes.append("privacy.secure_sum = true, and the coordinator adds masked updates up itself")
    if mistakes:
        raise UsageError(f"aggregator for partition {partition}: {'; '.join(mistakes)}")


@contextlib.contextmanager
def aggregator(config: CoordinatorConfig, partition: Partition) -> Iterator[Aggregator]:
    """Yield a started aggregator; it is closed with the context.

    Args:
        config: The configuration of its coordinator.
        partition: The partition that it serves.

    Raises:
        UsageError: The configuration has no such partition.
        StateError: The state folder is not that of a coordinator.
        BrokerAway: The broker does not answer, and ``broker.wait`` is false.
    """
    check(config, partition)
    allow_open_files(OPEN_FILES)
    keys = _keys_of(config)
    topics = Topics(config.federation)
    boot = secrets.token_hex(8)
    name = f"sum-{partition.name}-{boot[:8]}"
    site = Site(partition, topics, BlobStore(config.state / "blobs"), config.state / AGGREGATORS, keys, name, boot)
    transport = MqttTransport(
        _broker_of(config),
        f"{config.federation}-{name}",
        admits=RateLimits(topics).admits,
        rank_of=rank_by(topics),
        spread_by=f"{config.federation}-{partition.name}",
    )
    service = Aggregator(site, transport, time.monotonic, ThreadWorker(transport.wake))
    with contextlib.closing(service):
        service.start()
        yield service


def _keys_of(config: CoordinatorConfig) -> CommandKeys:
    """Return the keys of the federation, which the coordinator has made.

    Raises:
        StateError: It has not, or this is another folder.
    """
    path = config.state / MASTER
    if not path.exists():
        raise StateError(
            f"{path}: not there; start the coordinator first, and give the aggregator the same state folder, on the "
            "same machine or as a shared folder"
        )
    return CommandKeys.of(config.state, config.federation)


def _broker_of(config: CoordinatorConfig) -> BrokerConfig:
    """Return how the aggregator connects: as its coordinator does.

    Raises:
        UsageError: The coordinator's own broker has no fixed port.
    """
    if config.broker is not None:
        return config.broker
    embedded = config.embedded
    if embedded.port == 0:
        raise UsageError("embedded.port = 0 is another port at each start; give it a number, or use [broker] url")
    return EmbeddedBroker(
        embedded.bind, embedded.port, federation=config.federation, password_file=embedded.password_file
    ).config()
