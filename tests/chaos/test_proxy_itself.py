"""The proxy does what the tests of transfers believe that it does."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from proxy import Proxy, Way


class Echo:
    """A server that sends back what it gets, and counts its connections that ended."""

    def __init__(self):
        self.ended = 0
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = self.server.getsockname()
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def _accept(self):
        while True:
            try:
                peer, _ = self.server.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self._serve, args=(peer,), daemon=True))
            self.threads[-1].start()

    def _serve(self, peer):
        with peer, contextlib.suppress(OSError):
            while data := peer.recv(65_536):
                peer.sendall(data)
        self.ended += 1

    def close(self):
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        for thread in self.threads:
            thread.join(5)


@pytest.fixture
def echo():
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo):
    with Proxy(echo.address, seed=1) as proxy:
        yield proxy


@pytest.fixture
def client(proxy):
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
        yield client


def exchange(client, data):
    """Seconds until all of it is back, and what came."""
    begin = time.monotonic()
    threading.Thread(target=client.sendall, args=(data,), daemon=True).start()
    found = bytearray()
    while len(found) < len(data) and (piece := client.recv(65_536)):
        found += piece
    return time.monotonic() - begin, bytes(found)


DATA = bytes(range(256)) * 400


def test_bytes_pass_unchanged_and_are_counted(proxy, client):
    assert exchange(client, DATA)[1] == DATA
    assert proxy.up.bytes == proxy.down.bytes == len(DATA)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_rate_is_kept(proxy, client, way):
    getattr(proxy, way).rate = 100_000
    took_s, found = exchange(client, DATA)
    assert found == DATA
    assert took_s > 0.9 * len(DATA) / 100_000


def test_a_delay_is_kept(proxy, client):
    proxy.up.delay_s = 0.1
    proxy.down.delay_s = 0.2
    took_s, _ = exchange(client, b"x")
    assert took_s >= 0.3


def test_a_rate_and_a_delay_cost_no_more_than_they_say():
    """By the clock that is passed in: the times above have no upper bound, as this machine may be busy."""
    way = Way(rate=100_000, delay_s=0.2)
    assert [way.passes_at(1000, 5.0) for _ in range(3)] == pytest.approx([5.21, 5.22, 5.23]), "one after another"
    assert way.passes_at(500, 9.0) == pytest.approx(9.205), "a pause is not made up for"
    way.rate = float("inf")
    way.delay_s = 0.0
    assert way.passes_at(10**9, 9.5) == 9.5
    assert way.bytes == 3500 + 10**9


def test_connections_are_reset_after_so_many_bytes(proxy, client, echo):
    proxy.up.cut_every = 30_000
    with pytest.raises(ConnectionResetError):
        while True:
            client.sendall(DATA[:1000])
            client.recv(65_536)
    assert proxy.up.cuts == 1
    assert 30_000 <= proxy.up.bytes < 31_001


def test_a_hole_swallows_nothing_and_tells_nobody(proxy, client):
    proxy.up.is_hole = True
    client.sendall(b"into the hole")
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(100)
    proxy.up.is_hole = False
    client.settimeout(10)
    assert client.recv(100) == b"into the hole"


def test_a_half_open_connection_ends_for_the_client_alone(proxy, client, echo):
    assert exchange(client, b"x")[1] == b"x"
    proxy.half_open()
    with pytest.raises(ConnectionResetError):
        client.recv(100)
    assert echo.ended == 0


def test_bits_are_flipped_one_in_a_byte_and_the_same_for_the_same_seed(echo):
    def flips(seed):
        with Proxy(echo.address, seed=seed) as proxy:
            proxy.up.flip = 0.01
            proxy.up.rate = 1e9
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
                _, found = exchange(client, DATA[:200])
        return [a ^ b for a, b in zip(found, DATA, strict=False) if a != b]

    assert flips(3) == flips(3)
    assert all(flip.bit_count() == 1 for flip in flips(3))
    assert flips(3) != flips(4)


def test_a_target_that_is_away_is_away_here_too():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    with (
        Proxy(address) as proxy,
        pytest.raises(ConnectionResetError),  # while connecting, or after it
        socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client,
    ):
        client.recv(1)
