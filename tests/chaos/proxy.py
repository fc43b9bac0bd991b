"""A TCP proxy that is as bad as a real link, without root and repeatably: rate, delay, cuts, holes, flipped bits.

It runs in one thread of its own and serves any number of connections to one address. Both directions have their own
settings, which may be changed at any time and count for all connections together.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

LONGEST_WAIT_S = 0.05
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with 0 seconds: the peer gets a reset, and what was under way is lost


@dataclass
class Way:
    """One direction. ``rate`` is in bytes/s; ``flip`` is the probability that a byte has one bit flipped."""

    rate: float = float("inf")
    delay_s: float = 0.0
    flip: float = 0.0
    cut_every: int = 0
    """All connections are reset whenever so many more bytes have passed; 0: never."""

    is_hole: bool = False
    """Nothing passes, and nobody is told: what is sent waits."""

    bytes: int = 0
    cuts: int = 0
    _free_at: float = 0.0

    def passes_at(self, size: int, now: float) -> float:
        """When so many bytes, that begin now, have arrived."""
        self.bytes += size
        self._free_at = max(now, self._free_at) + size / self.rate
        return self._free_at + self.delay_s

    def is_free(self, now: float) -> bool:
        """Whether more may be read: else it waits with the sender."""
        return not self.is_hole and self._free_at <= now + LONGEST_WAIT_S

    def read_bytes(self) -> int:
        """How much to read at once: what passes in 20 ms."""
        return int(min(65_536, max(256, 0.02 * self.rate)))


@dataclass(eq=False)
class _Pipe:
    source: socket.socket
    target: socket.socket
    way: Way
    connection: _Connection
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)


@dataclass(eq=False)
class _Connection:
    client: socket.socket
    server: socket.socket
    pipes: list[_Pipe] = field(default_factory=list)


class Proxy:
    """Listens on a free port of this machine. Use as a context manager.

    ``up`` is the direction from the clients to ``target``, ``down`` the other one.
    """

    def __init__(self, target: tuple[str, int], *, seed: int = 0) -> None:
        self.target = target
        self.up = Way()
        self.down = Way()
        self._rng = np.random.default_rng(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._connections: list[_Connection] = []
        self._abandoned: list[socket.socket] = []
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(5)
        self.cut()
        for sock in (*self._abandoned, self._listener):
            sock.close()

    def cut(self) -> None:
        """Reset all connections on both sides; what is under way is lost."""
        with self._lock:
            for connection in self._connections:
                for sock in (connection.client, connection.server):
                    _reset(sock)
            self._connections.clear()

    def half_open(self) -> None:
        """Reset the clients' sides; the other sides stay open, as when a router forgets its connections."""
        with self._lock:
            for connection in self._connections:
                _reset(connection.client)
                self._abandoned.append(connection.server)
            self._connections.clear()

    # --- its thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            with selectors.DefaultSelector() as selector, self._lock:
                selector.register(self._listener, selectors.EVENT_READ)
                now = time.monotonic()
                wait_s = LONGEST_WAIT_S
                for connection in self._connections:
                    for pipe in connection.pipes:
                        if pipe.way.is_free(now):
                            selector.register(pipe.source, selectors.EVENT_READ, pipe)
                        if pipe.waiting and not pipe.way.is_hole:
                            wait_s = min(wait_s, max(0.0, pipe.waiting[0][0] - now))
                ready = self._select(selector, wait_s)
                self._pass(ready)

    def _select(self, selector: selectors.BaseSelector, wait_s: float) -> list[_Pipe]:
        """Wait, accept new connections, and return the pipes with something to read; others may `cut` meanwhile."""
        self._lock.release()
        try:
            events = selector.select(max(wait_s, 0.001))
        except (OSError, ValueError):
            events = []
        finally:
            self._lock.acquire()
        for key, _ in events:
            if key.data is None:
                self._accept()
        return [key.data for key, _ in events if key.data is not None]

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        try:
            server = socket.create_connection(self.target, timeout=2)
        except OSError:  # the target is away: so is this
            _reset(client)
            return
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(client, server)
        connection.pipes = [
            _Pipe(client, server, self.up, connection),
            _Pipe(server, client, self.down, connection),
        ]
        self._connections.append(connection)

    def _pass(self, ready: list[_Pipe]) -> None:
        now = time.monotonic()
        for pipe in ready:
            if pipe.connection in self._connections:
                self._read(pipe, now)
        for connection in list(self._connections):
            for pipe in connection.pipes:
                if connection in self._connections:
                    self._write(pipe, now)

    def _read(self, pipe: _Pipe, now: float) -> None:
        try:
            data = pipe.source.recv(pipe.way.read_bytes())
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(pipe.connection)
            return
        before = pipe.way.bytes
        pipe.waiting.append((pipe.way.passes_at(len(data), now), self._flipped(data, pipe.way.flip)))
        every = pipe.way.cut_every
        if every and before // every != pipe.way.bytes // every:
            pipe.way.cuts += 1
            self.cut()

    def _write(self, pipe: _Pipe, now: float) -> None:
        while pipe.waiting and pipe.waiting[0][0] <= now and not pipe.way.is_hole:
            at, data = pipe.waiting.popleft()
            try:
                sent = pipe.target.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._end(pipe.connection)
                return
            if sent < len(data):
                pipe.waiting.appendleft((at, data[sent:]))
                return

    def _end(self, connection: _Connection) -> None:
        """One side has closed: so does the other."""
        self._connections.remove(connection)
        for sock in (connection.client, connection.server):
            sock.close()

    def _flipped(self, data: bytes, probability: float) -> bytes:
        count = int(self._rng.binomial(len(data), probability)) if probability else 0
        if not count:
            return data
        damaged = bytearray(data)
        for position in self._rng.integers(len(damaged), size=count):
            damaged[position] ^= 1 << int(self._rng.integers(8))
        return bytes(damaged)


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()
