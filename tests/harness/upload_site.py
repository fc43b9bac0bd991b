"""One coordinator's collector and agents' outboxes, with real HTTP between them and messages handed over directly.

Nothing sleeps: `UploadSite.until` waits for the threads of uploads to call, and fails when nothing moves any more.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
from blob_site import KEY, NO_PROGRESS_S

from coordinator.blobs.endpoint import Address, BlobEndpoint
from coordinator.blobs.inflow import Inflow
from coordinator.blobs.signing import PathSigner
from coordinator.fleet.collection import Collection
from coordinator.fleet.upload_urls import UploadUrls
from coordinator.fleet.uploads import Collector
from coordinator.journal.entries import fact_of
from coordinator.state.store import StateFolder
from edge_agent.agent.transfers import Outbox, Uploads
from edge_agent.core.config import PrivacyConfig
from edge_agent.wire.blobs.chunks import decode_frame
from edge_agent.wire.blobs.put_by_http import BlobSender
from edge_agent.wire.messages import down, up
from edge_agent.wire.messages.fields import JobKey
from edge_agent.wire.tensors import specs_of

TENSORS = {"w": np.arange(1 << 18, dtype=np.float32)}
"""A megabyte, so that it takes several parts and slices."""


class CutProxy:
    """A TCP proxy that ends a connection after so many bytes of its client, a number for each connection."""

    def __init__(self, to: tuple[str, int], cuts: list[int]) -> None:
        self._to = to
        self._cuts = cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                left = self._cuts.pop(0) if self._cuts else 1 << 60
                server = socket.create_connection(self._to, 10)
                threading.Thread(target=self._pump, args=(server, client, 1 << 60), daemon=True).start()
                threading.Thread(target=self._pump, args=(client, server, left), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, left: int) -> None:
        with contextlib.suppress(OSError), source, sink:
            while left > 0:
                data = source.recv(min(1 << 16, left))
                if not data:
                    break
                sink.sendall(data)
                left -= len(data)
            for end in (source, sink):
                end.shutdown(socket.SHUT_RDWR)


class HoldingProxy(CutProxy):
    """A TCP proxy that holds each connection after so many bytes of its client, and then cuts all of them at once."""

    def __init__(self, to: tuple[str, int], hold_after: int) -> None:
        self._hold_after = hold_after
        self._goes = threading.Event()
        super().__init__(to, [])

    def cut(self) -> None:
        """Cut what is held; from now on all connections pass."""
        self._goes.set()

    def _pump(self, source: socket.socket, sink: socket.socket, left: int) -> None:
        passed = 0
        with contextlib.suppress(OSError), source, sink:
            while data := source.recv(1 << 16):
                is_held = sink.getpeername() == self._to and passed + len(data) > self._hold_after
                if is_held and not self._goes.is_set():
                    self._goes.wait()
                    break
                sink.sendall(data)
                passed += len(data)
            for end in (source, sink):
                end.shutdown(socket.SHUT_RDWR)


class UploadSite:
    """A collector with an open round of ``agents``, and what each of them has in its outbox."""

    def __init__(
        self,
        folder: Path,
        make_site: Callable[[UploadSite], UploadUrls | None],
        *,
        agents: tuple[str, ...] = ("a",),
        by_http: bool = True,
        hosts: tuple[str, ...] = (),
        needs_tls: bool = False,
    ) -> None:
        self.now = 0.0
        self.folder = folder
        self.agents = agents
        self.by_http = by_http
        self.hosts = hosts
        self.needs_tls = needs_tls
        self.said: list[tuple[str, object]] = []
        """What agents have sent, in order."""

        self.sent: list[tuple[str, object]] = []
        """What the coordinator has sent, in order."""

        self.receipts: list[tuple[str, down.Receipt]] = []
        self.mqtt_bytes = 0
        self.change: Callable[[str, down.UploadUrls], down.UploadUrls] = lambda _, message: message
        """What becomes of the messages with URLs on their way."""

        self.woken = threading.Event()
        self._waiting: list[Callable[[], object]] = []
        self._opened = contextlib.ExitStack()
        self._state = self._opened.enter_context(StateFolder(folder / "state").open("test"))
        self.run = self._state.journal.request_run(fact_of("run_requested", {}))
        self.make_site = make_site
        self.site: UploadUrls | None = None
        self.collection = Collection(self.run, 1, agents, specs_of(TENSORS))
        self.start_coordinator()
        self.uploads: dict[str, Uploads] = {}
        self.outboxes: dict[str, Outbox] = {}
        for agent in agents:
            self.start_agent(agent)

    def close(self) -> None:
        for uploads in self.uploads.values():
            uploads.pause()
        self.collector.pause()
        self._opened.close()

    def clock(self) -> float:
        return self.now

    @property
    def entries(self) -> list[str]:
        """Whose updates the journal counts."""
        return [entry.agent for entry in self._state.journal.entries(self.run, ("update_accepted",))]

    def start_coordinator(self) -> None:
        """The coordinator's program starts, with the disk that the last one has left."""
        self._waiting.clear()
        self.site = self.make_site(self)
        self.collector = Collector(self._state.blobs, self._state.journal, self._send, self.clock, site=self.site)
        for agent in self.agents:
            self.collector.note_way(agent, by_http=self.by_http)
        self.collector.open(self.collection)

    def start_agent(self, agent: str) -> None:
        """An agent's program starts, with the disk that the last one has left."""
        outbox = Outbox(self.folder / agent / "outbox", PrivacyConfig())
        link = SimpleNamespace(
            send=lambda message, _: self._said(agent, message), send_chunk=lambda frame, _: self._frame(agent, frame)
        )
        sender = None
        if self.by_http:
            sender = BlobSender(self.woken.set, ssl.create_default_context, self.hosts, needs_tls=self.needs_tls)
        self.outboxes[agent] = outbox
        self.uploads[agent] = Uploads(outbox, link, self.clock, sender)

    def train(self, agent: str, value: float = 0.0) -> up.UpdateManifest:
        """An agent has made an update."""
        tensors = {name: tensor + np.float32(value) for name, tensor in TENSORS.items()}
        manifest = self.outboxes[agent].put(tensors, JobKey(self.run, 1), 9, {})
        self.uploads[agent].offer(manifest)
        return manifest

    def addresses(self) -> list[down.UploadUrls]:
        return [message for _, message in self.sent if isinstance(message, down.UploadUrls)]

    def step(self) -> None:
        """Everybody does what is due."""
        waiting = list(self._waiting)
        self._waiting.clear()
        for hand_over in waiting:
            hand_over()
        self.collector.take_arrived()
        self.collector.tick()
        for uploads in self.uploads.values():
            uploads.tick()

    def until(self, is_over: Callable[[], bool]) -> None:
        """Step until something holds; fails when nothing moves for long."""
        idle_s = 0.0
        while not is_over():
            before = self._progress()
            self.woken.clear()
            self.step()
            if self._waiting or self._progress() != before:
                idle_s = 0.0
                continue
            assert idle_s < NO_PROGRESS_S, f"nothing moves; agents: {self.said}; coordinator: {self.sent}"
            self.woken.wait(0.02)
            idle_s += 0.02
            self.now += 0.02

    def until_receipts(self, count: int = 1) -> None:
        """Step until so many receipts have come, all of them good ones."""
        self.until(lambda: len(self.receipts) >= count)
        self.step()  # it reaches the agent
        assert all(receipt.accepted for _, receipt in self.receipts), self.receipts

    def _progress(self) -> tuple[int, int, int, int]:
        return len(self.said), len(self.sent), self.collector.http_bytes, self.mqtt_bytes

    def _send(self, agent: str, message: object) -> None:
        self.sent.append((agent, message))
        uploads = self.uploads[agent]
        if isinstance(message, down.UploadUrls):
            changed = self.change(agent, message)
            self._waiting.append(lambda: uploads.upload_urls(changed))
        elif isinstance(message, down.Grant):
            self._waiting.append(lambda: uploads.grant(message))
        elif isinstance(message, down.Ack):
            self._waiting.append(lambda: uploads.ack(message))
        elif isinstance(message, down.Receipt):
            self.receipts.append((agent, message))
            self._waiting.append(lambda: uploads.receipt(message, lambda _: None))

    def _said(self, agent: str, message: object) -> None:
        self.said.append((agent, message))
        if isinstance(message, up.UpdateManifest):
            self._waiting.append(lambda: self.collector.manifest(agent, message))

    def _frame(self, agent: str, frame: bytes) -> None:
        self.mqtt_bytes += len(frame)
        self._waiting.append(lambda: self.collector.chunk(agent, decode_frame(frame)))


def endpoint_for(site: UploadSite, above_bytes: int = 1000, valid_s: float = 600.0, **options) -> BlobEndpoint:
    """A started endpoint that takes updates for a site."""
    signer = PathSigner(KEY, site.clock, valid_s)
    opened = BlobEndpoint(Address("127.0.0.1", 0), signer, above_bytes, inflow=Inflow(site.woken.set), **options)
    opened.start()
    return opened


def through(message: down.UploadUrls, port: int) -> down.UploadUrls:
    """The message with its URLs leading to another port of this machine."""
    (url,) = message.urls
    parts = urlsplit(url)
    return message.model_copy(update={"urls": (url.replace(f":{parts.port}/", f":{port}/"),)})
