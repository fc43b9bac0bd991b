"""Transports that are closed in the end, and a port at which a test answers them by hand."""

from __future__ import annotations

import socket

import pytest
from mqtt_harness import PATIENCE_S

from edge_agent.wire.mqtt import MqttTransport


@pytest.fixture
def open_transport():
    """A function that makes transports which are closed when the test ends."""
    made = []

    def make(config, name="porch", **options):
        made.append(MqttTransport(config, name, **options))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def listener():
    """A TCP socket that listens and whose connections a test answers by hand."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        yield server
