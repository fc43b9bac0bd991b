"""The time that a personal model takes to answer over HTTP, beside its encoder in a bare loop of ONNX Runtime.

The client sends prepared bytes over one connection by a socket, so that little of what is measured is its own time. The
server states in each answer how long decoding, encoder and head took. The rest of the whole time is its overhead.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_agent.core.errors import MeasuringFailed
from edge_agent.core.storage import read_regular
from edge_agent.personal.personalizer import load_bundle
from edge_agent.serving.inputs import Decoder
from edge_agent.serving.pair import Pair

from ...processes.serving import serving
from .measuring import Row, ServePlan, quantile, usage

_HEADER_END = b"\r\n\r\n"
_LENGTH = b"content-length:"
_WAIT_S = 30.0
_LOOPS = 200


@dataclass(frozen=True)
class _Timed:
    """Milliseconds of one answer: all of it, and its parts; overhead is what is neither decoding, encoder nor head."""

    whole: float
    decoding: float
    encoder: float
    head: float
    overhead: float


def rows(plan: ServePlan, folder: Path) -> Iterator[Row]:
    """Yield all figures: time of the first answer and of later ones, answers in a second, and memory.

    Raises:
        HeadwaterError: The server does not start, or bundle, head and input do not belong together.
        MeasuringFailed: The server does not answer.
    """
    body = read_regular(plan.input)
    options = ["--bundle", str(plan.bundle)]
    if plan.head is not None:
        options += ["--head", str(plan.head)]
    began_at = time.perf_counter()
    with serving(options, folder / "serve.log") as server, _Client(server.port) as client:
        client.ask(body)
        yield Row("first answer after the start", time.perf_counter() - began_at, "s")
        loaded = usage(server.process.pid)
        timed = _at_rate(client, body, plan.rate, plan.seconds)
        yield from _quantiles(f"answer at {plan.rate:g} a second", [answer.whole for answer in timed])
        yield from _quantiles("of it overhead", [answer.overhead for answer in timed])
        yield Row("of it decoding, p50", quantile([answer.decoding for answer in timed], 0.5), "ms")
        yield Row("of it encoder, p50", quantile([answer.encoder for answer in timed], 0.5), "ms")
        yield Row("of it head, p50", quantile([answer.head for answer in timed], 0.5), "ms")
        yield Row("answers a second, one after the other", _throughput(client, body, plan.seconds), "1/s")
        yield Row("memory after the first answer", loaded.rss_mb, "MB")
        yield Row("memory at the most", usage(server.process.pid).peak_mb, "MB")
    yield Row("encoder alone, a bare loop of ONNX Runtime, p50", _bare_loop(plan, body), "ms")


class _Client:
    """One connection on which one request follows the other."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> _Client:
        """Return the client, which is closed at the end of the context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._socket.close()

    def ask(self, body: bytes) -> _Timed:
        """Return how long an answer to an input took.

        Raises:
            MeasuringFailed: There was no answer, or an error.
        """
        head = b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        began_at = time.perf_counter()
        try:
            self._socket.sendall(head + body)
            status, content = self._read()
        except OSError as error:
            raise MeasuringFailed(f"the server has closed the connection: {error}") from error
        whole = 1000 * (time.perf_counter() - began_at)
        if status != 200:
            raise MeasuringFailed(f"the server answers {status}: {content.decode(errors='replace')[:300]}")
        stages: dict[str, float] = json.loads(content)["ms"]
        overhead = whole - sum(stages.values())
        return _Timed(whole, stages["decode"], stages["encode"], stages["head"], overhead)

    def _read(self) -> tuple[int, bytes]:
        """Return status and body of one response."""
        received = b""
        while _HEADER_END not in received:
            received += self._more()
        header, _, body = received.partition(_HEADER_END)
        lines = header.lower().splitlines()
        lengths = [line.removeprefix(_LENGTH) for line in lines if line.startswith(_LENGTH)]
        length = int(lengths[0])
        while len(body) < length:
            body += self._more()
        return int(lines[0].split()[1]), body

    def _more(self) -> bytes:
        """Return the next bytes of the connection.

        Raises:
            ConnectionResetError: The connection has ended.
        """
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionResetError("it has ended")
        return data


def _at_rate(client: _Client, body: bytes, rate: float, seconds: float) -> list[_Timed]:
    """Return the times of answers to ``rate`` requests a second, each of which is sent when it is due."""
    pause = threading.Event()
    began_at = time.perf_counter()
    timed = []
    for number in range(max(1, round(rate * seconds))):
        pause.wait(max(0.0, began_at + number / rate - time.perf_counter()))
        timed.append(client.ask(body))
    return timed


def _throughput(client: _Client, body: bytes, seconds: float) -> float:
    """Return how many answers a second come where one request follows the other at once."""
    began_at = time.perf_counter()
    count = 0
    while time.perf_counter() - began_at < seconds:
        client.ask(body)
        count += 1
    return count / (time.perf_counter() - began_at)


def _bare_loop(plan: ServePlan, body: bytes) -> float:
    """Return the median of milliseconds that the encoder takes for the same input, in this process."""
    pair = Pair.open(load_bundle(plan.bundle), plan.head)
    inputs = Decoder(pair.input).decode(body)[:1]
    session = pair.encoder.session
    name = pair.encoder.input_name
    times = []
    for _ in range(_LOOPS):
        began_at = time.perf_counter()
        session.run(None, {name: inputs})
        times.append(1000 * (time.perf_counter() - began_at))
    return quantile(times, 0.5)


def _quantiles(name: str, values: Sequence[float]) -> Iterator[Row]:
    """Yield the median, the 90th and the 99th percentile of some milliseconds."""
    for text, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        yield Row(f"{name}, {text}", quantile(values, share), "ms")
