"""The yardstick of transport: the same bytes over plain TCP, ``sendfile`` on one side, ``recv_into`` on the other."""

from __future__ import annotations

import argparse
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.research.bench.measuring import module

LIMIT_S = 60.0
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parent)}
_GO = b"g"
_DONE = b"d"


def seconds(agents: int, size_bytes: int, folder: Path) -> tuple[float, float]:
    """Seconds to bring a blob to all agents, and one of that size from each.

    Raises:
        MeasuringFailed: an agent ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    blob = folder / "blob"
    blob.write_bytes(bytes(size_bytes))
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        server.settimeout(LIMIT_S)
        arguments = [server.getsockname()[1], blob]
        for number in range(agents):
            stack.enter_context(
                module(f"tcp-{number}", arguments, folder, module="yardstick_tcp", environment=ENVIRONMENT)
            )
        peers = [stack.enter_context(server.accept()[0]) for _ in range(agents)]
        for peer in peers:
            peer.settimeout(LIMIT_S)
        return _timed(lambda peer: _give(peer, blob), peers), _timed(lambda peer: _take(peer, size_bytes), peers)


def _timed(work: Callable[[socket.socket], None], peers: Sequence[socket.socket]) -> float:
    threads = [threading.Thread(target=work, args=(peer,), daemon=True) for peer in peers]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return time.perf_counter() - begin


def _give(peer: socket.socket, blob: Path) -> None:
    with blob.open("rb") as file:
        peer.sendfile(file)
    receive(peer, len(_DONE))


def _take(peer: socket.socket, size_bytes: int) -> None:
    peer.sendall(_GO)
    receive(peer, size_bytes)


def receive(peer: socket.socket, size_bytes: int) -> bytearray:
    """Exactly so many bytes.

    Raises:
        ConnectionError: the other side has closed before.
    """
    buffer = bytearray(size_bytes)
    view = memoryview(buffer)
    position = 0
    while position < size_bytes:
        count = peer.recv_into(view[position:])
        if not count:
            raise ConnectionError(f"closed after {position} of {size_bytes} bytes")
        position += count
    return buffer


def main() -> None:
    """An agent's side: take the blob, say so, and give it back when told to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("blob", type=Path)
    arguments = parser.parse_args()
    with socket.create_connection(("127.0.0.1", arguments.port), LIMIT_S) as peer:
        receive(peer, arguments.blob.stat().st_size)
        peer.sendall(_DONE)
        receive(peer, len(_GO))
        with arguments.blob.open("rb") as file:
            peer.sendfile(file)
        peer.recv(1)


if __name__ == "__main__":
    main()
