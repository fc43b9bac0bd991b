"""A relay as a program: its connections to two brokers, its lock, and its status file."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..core.children import ThreadWorker
from ..core.errors import StateError
from ..core.limits import OPEN_FILES, allow_open_files
from ..core.locks import folder_lock
from ..core.own_folders import check_own_folder
from ..core.storage import read_json, sweep, write_atomic
from ..wire.mqtt import MqttTransport
from ..wire.seal import read_key
from .certificate import RelayCertificate
from .relay import Relay
from .settings import RelayConfig

log = logging.getLogger(__name__)

STATUS = "relay.json"
"""The status file in a relay's state folder."""

STATUS_EVERY_S = 5.0
"""Seconds between two looks at whether the status has changed."""


@contextlib.contextmanager
def relay(config: RelayConfig) -> Iterator[Relay]:
    """Yield a started relay, which holds its state folder; it is closed with the context.

    Raises:
        StateError: Another process uses the state folder.
        BrokerAway: A broker does not answer, and ``wait`` is false in its table.
        UsageError: A broker refuses the login, and ``wait`` is false in its table.
    """
    allow_open_files(OPEN_FILES)
    check_own_folder(config.state)
    with folder_lock(config.state, f"edge-agent relay {config.id}"):
        sweep(config.state)
        upstream = MqttTransport(config.broker, config.id)
        site = MqttTransport(config.site, config.id, on_event=upstream.wake)
        key = read_key(config)
        service = Relay(config, upstream, site, time.monotonic, time.time, key, ThreadWorker(upstream.wake))
        with contextlib.closing(service):
            service.start()
            yield service


def renewal(config: RelayConfig) -> RelayCertificate:
    """Return what renews the certificate of a relay."""
    return RelayCertificate(config.state, ThreadWorker(lambda: None), time.monotonic)


class StatusFile:
    """What `edge-agent relay --status` shows, kept up by the relay that runs."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._looked_at = float("-inf")
        self._written: dict[str, Any] = {}

    def tick(self, service: Relay) -> None:
        """Write the status where it has changed since the last time; at most every `STATUS_EVERY_S`."""
        now = self._clock()
        if now - self._looked_at < STATUS_EVERY_S:
            return
        self._looked_at = now
        status = service.status()
        if status == self._written:
            return
        try:
            write_atomic(self._path, json.dumps(status).encode(), durable=False)
        except OSError as error:
            log.warning("status_not_written reason=%s", error)
            return
        self._written = status


def read_status(config: RelayConfig) -> dict[str, Any]:
    """Return what the relay has written of itself last.

    Raises:
        StateError: It has written nothing yet.
    """
    path = config.state / STATUS
    status = read_json(path)
    if status is None:
        raise StateError(f"{path}: no relay has run with this state folder yet; start one with 'edge-agent relay'")
    return status
