"""Waiting for what a transport tells, and a broker that a test plays by hand."""

from __future__ import annotations

import time

import pytest

from coordinator.broker import find_mosquitto

PATIENCE_S = 30.0
NEEDS_MOSQUITTO = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
CONNACK = b"\x20\x02\x00\x00"


def wait_for(transport, kind, is_it=lambda event: True):
    """The first event of a kind; others are dropped."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        event = transport.receive(1.0)
        if isinstance(event, kind) and is_it(event):
            return event
    raise AssertionError(f"no {kind.__name__} within {PATIENCE_S:.0f} s")


def url_of(server) -> str:
    return f"mqtt://127.0.0.1:{server.getsockname()[1]}"


def take(peer, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = peer.recv(min(count - len(found), 4096))
        assert piece, "the client hung up"
        found += piece
    return found


def packet(peer) -> tuple[int, bytes]:
    """First byte and body of the next MQTT packet, read by the letter of the standard."""
    first = take(peer, 1)[0]
    length = 0
    shift = 0
    while True:
        digit = take(peer, 1)[0]
        length |= (digit & 127) << shift
        if digit < 128:
            return first, take(peer, length)
        shift += 7
