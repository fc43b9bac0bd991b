"""One coordinator's downloads and one agent's, with real HTTP between them and messages handed over directly.

Nothing sleeps: `Site.until` waits for the threads of fetches to call, and fails when nothing moves any more.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from coordinator.blobs.endpoint import Address, BlobEndpoint
from coordinator.blobs.signing import PathSigner
from coordinator.fleet.blob_urls import BlobUrls
from coordinator.fleet.downloads import Distributor
from edge_agent.agent.transfers import Downloads
from edge_agent.wire.blobs.by_http import BlobFetcher
from edge_agent.wire.blobs.chunks import BlobCache, Outgoing, decode_frame
from edge_agent.wire.messages import down, up
from edge_agent.wire.topics import Topics

TOPICS = Topics("home")
KEY = b"k" * 32
NO_PROGRESS_S = 30.0
"""Seconds without a byte or a message after which a test fails; on a busy machine a thread may wait for seconds."""


def endpoint(above_bytes: int = 0, *, clock=None, valid_s: float = 600.0, key: bytes = KEY, **options) -> BlobEndpoint:
    """A started endpoint on a free port of this machine."""
    signer = PathSigner(key, clock or (lambda: 0.0), valid_s)
    opened = BlobEndpoint(Address("127.0.0.1", 0), signer, above_bytes, **options)
    opened.start()
    return opened


def ask(url_host: tuple[str, int], request: bytes, context: ssl.SSLContext | None = None) -> bytes:
    """All that a server answers to some bytes until it closes the connection, or the client does after the answer."""
    with socket.create_connection(url_host, 10) as plain:
        sock = plain if context is None else context.wrap_socket(plain, server_hostname=url_host[0])
        with sock:
            sock.sendall(request)
            answer = b""
            while True:
                data = sock.recv(1 << 16)
                if not data:
                    return answer
                answer += data


class Site:
    """A distributor with an agent ``a``; ``by_http``: whether the agent fetches blobs by HTTP."""

    def __init__(self, folder: Path, urls: BlobUrls | None, *, by_http: bool = True, agent: str = "a") -> None:
        self.now = 0.0
        self.agent = agent
        self.by_http = by_http
        self.folder = folder
        self.urls = urls
        self.said: list[object] = []
        """What the agent has sent, in order."""

        self.chunk_bytes = 0
        """The bytes of frames that have come over MQTT."""

        self.change_urls: Callable[[tuple[str, ...]], tuple[str, ...]] = lambda found: found
        """What becomes of the URLs on their way to the agent."""

        self.woken = threading.Event()
        self._to_agent: list[Callable[[], object]] = []
        self.distributor = Distributor(TOPICS, self._publish, self._send, self.clock, urls=urls)
        self.distributor.note_way(agent, by_http=by_http)
        self.start_agent()

    def clock(self) -> float:
        return self.now

    def start_agent(self) -> None:
        """The agent's program starts, with the disk that the last one has left."""
        self._to_agent.clear()
        fetcher = BlobFetcher(self.woken.set, ssl.create_default_context) if self.by_http else None
        link = SimpleNamespace(send=self._said, listen=lambda _: None, unlisten=lambda _: None)
        self.cache = BlobCache(self.folder / "cache", 1 << 30)
        self.downloads = Downloads(self.cache, link, self.clock, fetcher)

    def offer(self, blob: Outgoing) -> None:
        """Give the agent a job that needs this blob."""
        self.distributor.offer(blob, (self.agent,))
        self.downloads.fetch((blob.ref,))

    def wants(self) -> list[up.Want]:
        return [message for message in self.said if isinstance(message, up.Want)]

    def step(self) -> None:
        """Everybody does what is due."""
        self.distributor.pump()
        waiting = list(self._to_agent)
        self._to_agent.clear()
        for hand_over in waiting:
            hand_over()
        self.downloads.tick()

    def until(self, is_over: Callable[[], bool]) -> None:
        """Step until something holds; fails when nothing moves for long."""
        idle_s = 0.0
        while not is_over():
            before = self._progress()
            self.woken.clear()
            self.step()
            if self._to_agent or self._progress() != before:
                idle_s = 0.0
                continue
            assert idle_s < NO_PROGRESS_S, f"nothing moves; the agent has said {self.said}"
            self.woken.wait(0.02)
            idle_s += 0.02
            self.now += 0.02

    def until_here(self, blob: Outgoing) -> bytes:
        """Step until the agent has a blob, and has said so; return its bytes."""
        have = up.Have(digest=blob.ref.digest)
        self.until(lambda: have in self.said)
        return bytes(self.cache.read(blob.ref.digest))

    def _progress(self) -> tuple[int, int, int]:
        ways = self.downloads.ways
        return len(self.said), ways.http_bytes, ways.mqtt_bytes

    def _publish(self, _topic: str, frame: bytes) -> None:
        self.chunk_bytes += len(frame)
        self._to_agent.append(lambda: self.downloads.frame(decode_frame(frame)))

    def _send(self, _agent: str, message: object) -> None:
        if isinstance(message, down.Located):
            message = message.model_copy(update={"urls": self.change_urls(message.urls)})
            self._to_agent.append(lambda: self.downloads.located(message))
        elif isinstance(message, down.Listen):
            self._to_agent.append(lambda: self.downloads.listen(message))

    def _said(self, message: object) -> None:
        self.said.append(message)
        if isinstance(message, up.Want):
            self.distributor.want(self.agent, message)
        elif isinstance(message, up.Have):
            self.distributor.have(self.agent, message.digest)
        elif isinstance(message, up.Progress):
            self.distributor.progress(self.agent, message)
