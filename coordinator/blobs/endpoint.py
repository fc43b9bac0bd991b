"""The coordinator's own HTTP endpoint: blobs on offer, and updates that are expected, by paths that `signing` has made.

Each connection has a thread, which reads memory-mapped blobs, or hands what comes to the coordinator's loop. The size
of an update is part of its path, so it is compared before a byte of it is read. A stranger gets a few seconds and
8 KiB, and no more than `STRANGERS_OF_ONE` connections of one address at a time; who shows a path that holds may stay.
With certificates the client's certificate must be of the agent that the path was made for, so a path that leaks is of
no use to others.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from edge_agent.core.accepting import Acceptor
from edge_agent.core.errors import ChunkError, MessageError, UsageError, cause
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.fields import BlobRef

from ..fleet.blob_urls import BlobSite
from ..fleet.rejections import Rejections
from ..fleet.upload_urls import ArrivedPart, ExpectedUpload, UploadAddress
from .http_requests import (
    CONTINUE,
    BlobRequest,
    bytes_of_content,
    bytes_of_range,
    head_of_blob,
    head_without_content,
    parse_head,
    read_head,
)
from .inflow import Inflow, fits, frame_of, part_bytes
from .signing import Grant, PathSigner, UploadGrant

log = logging.getLogger(__name__)

AT_ONCE = 256
"""Connections that are served at a time; more wait in the system's queue."""

STRANGERS_OF_ONE = 32
"""Connections of one address that may be open before they have shown a valid path; further ones are closed."""

HEAD_S = 10.0
"""The seconds that TLS and the first request of a connection may take."""

IDLE_S = 20.0
"""The seconds that a client may let pass between two requests."""

SLICE_BYTES = 64 * 1024
"""The bytes that are sent at once."""

SLICE_S = 30.0
"""The seconds that a slice may take: a link of less than 2 kB/s is served no longer."""


@dataclass(frozen=True)
class Address:
    """Where the endpoint listens, and how agents reach it.

    Attributes:
        host: The address to listen on.
        port: The TCP port; 0: any free one.
        url: The beginning of its URLs, such as ``https://host:8444``; empty: made from host and port.
    """

    host: str
    port: int
    url: str = ""


class EndpointUploads:
    """The updates that the endpoint takes from agents that were given URLs for them."""

    def __init__(self, above_bytes: int, signer: PathSigner, inflow: Inflow, url: Callable[[], str]) -> None:
        """Expect nothing yet.

        Args:
            above_bytes: Updates of more bytes have URLs.
            signer: Makes paths.
            inflow: What is expected, and what has come of it.
            url: Returns the beginning of the endpoint's URLs; empty while it does not listen.
        """
        self.above_bytes = above_bytes
        self._signer = signer
        self._inflow = inflow
        self._url = url

    def expect(self, upload: ExpectedUpload) -> UploadAddress | None:
        """Let an agent send this update from now on; None where the endpoint does not take it."""
        url = self._url()
        if not url or not fits(upload.ref):
            return None
        self._inflow.expect(upload)
        return UploadAddress((url + self._signer.upload_path(_grant_of(upload)),), whole=False)

    def collect(self, upload: ExpectedUpload) -> bool:  # noqa: ARG002 - part of the contract
        """Return that there is nothing to get: what is sent here has arrived."""
        return False

    def release(self, agent: str) -> None:
        """Take nothing of an agent any more, also not the rest of what it is sending."""
        self._inflow.release(agent)

    def keep_only(self, agents: Collection[str]) -> None:
        """Take nothing of others than these agents."""
        for agent in self._inflow.others_than(agents):
            self._inflow.release(agent)

    def take_arrived(self) -> Iterator[ArrivedPart]:
        """Yield what has arrived."""
        return self._inflow.take_arrived()

    def close(self) -> None:
        """Take nothing more."""
        self.keep_only(())


def _grant_of(upload: ExpectedUpload) -> UploadGrant:
    """Return what the path of an update allows."""
    return UploadGrant(upload.agent, upload.ref.digest, upload.run, upload.round, upload.ref.size_bytes)


class BlobEndpoint:
    """Serves blobs on offer to the agents that were given their URLs, and takes updates from them."""

    def __init__(
        self,
        address: Address,
        signer: PathSigner,
        above_bytes: int,
        tls: Callable[[], ssl.SSLContext] | None = None,
        *,
        names_clients: bool = False,
        inflow: Inflow | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen nowhere yet.

        Args:
            address: Where to listen.
            signer: Makes and checks paths.
            above_bytes: Blobs of more bytes have URLs.
            tls: Called for each connection; returns its settings of TLS. None: HTTP without TLS.
            names_clients: Whether the certificate of a client must name the agent of the path.
            inflow: Where updates go that agents send; None: they go over MQTT.
            clock: The time in seconds, which only goes forward.
        """
        self.above_bytes = above_bytes
        self._address = address
        self._signer = signer
        self._tls = tls
        self._names_clients = names_clients
        self._clock = clock
        self._url = address.url
        self._inflow = inflow
        self.uploads: EndpointUploads | None = None
        """Where agents send updates; None: over MQTT."""

        if inflow is not None:
            self.uploads = EndpointUploads(above_bytes, signer, inflow, self._url_if_listening)
        self._blobs: dict[str, Outgoing] = {}
        self._lock = threading.Lock()
        self._fetched = Counter[str]()
        self._strangers = Counter[str]()
        self._refusals = Rejections(clock)
        self._is_listening = False
        self._acceptor = Acceptor(AT_ONCE, self._begin, self._note_failure)

    # --- the contract -------------------------------------------------------------------------------------------------

    def offered(self, blob: Outgoing) -> None:
        """Serve a blob from now on."""
        with self._lock:
            self._blobs[blob.ref.digest] = blob

    def withdrawn(self, digest: str) -> None:
        """Serve a blob no longer, also not the rest of one that is being fetched."""
        with self._lock:
            self._blobs.pop(digest, None)

    def urls(self, agent: str, digest: str) -> tuple[str, ...]:
        """Return the URL by which an agent can fetch a blob for a short time; empty: the endpoint does not serve it."""
        if not self._is_listening or digest not in self._blobs:
            return ()
        return (self._url + self._signer.path(agent, digest),)

    def arrived(self, agent: str, ref: BlobRef) -> None:
        """Do nothing: what is sent is counted as it is sent."""

    def take_fetched(self) -> dict[str, int]:
        """Return the bytes that were sent to each agent since the last call."""
        with self._lock:
            fetched = dict(self._fetched)
            self._fetched.clear()
        return fetched

    def describe(self) -> BlobSite:
        """Return where this endpoint is, and how many requests it has refused."""
        return BlobSite(
            by="own endpoint",
            where=self._url,
            takes_updates=self._inflow is not None,
            refused_requests=self._refusals.total,
        )

    def _url_if_listening(self) -> str:
        return self._url if self._is_listening else ""

    # --- start and stop -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen for agents that fetch blobs, in a thread.

        Raises:
            UsageError: The port is taken, or the address is not one of this machine.
        """
        host = self._address.host
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, self._address.port), family=family, backlog=256)
        except OSError as error:
            raise UsageError(
                f"blobs cannot be served on {host}:{self._address.port} ({cause(error)}); choose another address with "
                "[blobs] serve"
            ) from error
        if not self._url:
            scheme = "http" if self._tls is None else "https"
            shown = f"[{host}]" if ":" in host else host
            self._url = f"{scheme}://{shown}:{listener.getsockname()[1]}"
        self._is_listening = True
        self._acceptor.start(listener, "blobs")
        log.info("blobs_served url=%s above_bytes=%d", self._url, self.above_bytes)

    def close(self) -> None:
        """Listen no more, end what is being fetched, and wait for the thread that listens."""
        with self._lock:
            self._blobs.clear()
        self._is_listening = False
        if self.uploads is not None:
            self.uploads.close()
        self._acceptor.close()

    # --- connections --------------------------------------------------------------------------------------------------

    def _note_failure(self, error: OSError) -> None:
        log.error("blobs_not_accepted reason=%s; tried again", cause(error))

    def _begin(self, peer: socket.socket, origin: str) -> None:
        """Serve a connection in a thread of its own, unless its address has too many of strangers already."""
        with self._lock:
            is_served = self._strangers[origin] < STRANGERS_OF_ONE
            self._strangers[origin] += 1
        connection = _Connection(peer, origin)
        if not is_served:
            self._end(connection)
            return
        try:
            threading.Thread(target=self._serve, args=(connection,), name="blob", daemon=True).start()
        except RuntimeError as error:  # the system gives no more threads
            log.error("blobs_not_served from=%s reason=%s", origin, cause(error))
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        connection.sock.close()
        self._note_known(connection)
        self._acceptor.free()

    def _note_known(self, connection: _Connection) -> None:
        """Count a connection no longer as one of a stranger."""
        if not connection.is_known:
            connection.is_known = True
            with self._lock:
                self._strangers -= Counter({connection.origin: 1})  # keeps no zeros

    def _serve(self, connection: _Connection) -> None:
        """Answer the requests of one connection, until it ends or is refused."""
        until = self._clock() + HEAD_S
        try:
            if self._tls is not None:
                connection.sock.settimeout(HEAD_S)
                connection.sock = self._tls().wrap_socket(connection.sock, server_side=True)
            while not self._acceptor.is_over:
                head, behind = read_head(connection.sock, until, self._clock)
                if not head or not self._answer(connection, parse_head(head, behind), behind):
                    return
                until = self._clock() + IDLE_S
        except MessageError as error:
            self._note_refusal(connection, str(error))
            with contextlib.suppress(OSError):
                connection.sock.sendall(head_without_content("400 Bad Request", closes=True))
        except UsageError as error:  # the certificate's file has gone meanwhile
            self._note_refusal(connection, str(error))
        except OSError as error:  # of TLS, too: strangers try everything, and links break
            log.debug("blob_connection_ended from=%s reason=%s", connection.origin, cause(error))
        except Exception:
            log.exception("blob_connection_broke from=%s", connection.origin)
        finally:
            self._end(connection)

    def _answer(self, connection: _Connection, request: BlobRequest, behind: bytes) -> bool:
        """Answer one request; return whether the connection may go on.

        Args:
            connection: The connection.
            request: The request.
            behind: The bytes of its body that have come with its head.

        Raises:
            OSError: The connection broke, or is too slow.
        """
        if request.is_put:
            return self._take(connection, request, behind)
        sock = connection.sock
        sock.settimeout(SLICE_S)
        # 1. A path that does not hold gets the same answer whatever is wrong with it.
        grant = self._signer.grant(request.target)
        if grant is None or not self._is_of_agent(sock, grant.agent):
            return self._refuse(connection)
        self._note_known(connection)
        # 2. Only blobs on offer are served, and only ranges within them.
        with self._lock:
            blob = self._blobs.get(grant.digest)
        if blob is None:
            sock.sendall(head_without_content("404 Not Found", closes=request.closes))
            return not request.closes
        span = bytes_of_range(request.range, blob.ref.size_bytes)
        if span is None:
            sock.sendall(head_without_content("416 Range Not Satisfiable", closes=request.closes))
            return not request.closes
        # 3. The bytes.
        first, end = span
        sock.sendall(head_of_blob(first, end, blob.ref.size_bytes, is_range=bool(request.range)))
        if not request.is_head:
            self._send(sock, grant, blob, span)
        return not request.closes

    def _send(self, sock: socket.socket, grant: Grant, blob: Outgoing, span: tuple[int, int]) -> None:
        """Send bytes of a blob, as long as it is on offer, and count them.

        Raises:
            OSError: The connection broke or is too slow, or the blob was withdrawn.
        """
        first, end = span
        for position in range(first, end, SLICE_BYTES):
            if grant.digest not in self._blobs:
                raise ConnectionAbortedError("the blob is on offer no longer")
            piece = blob.data[position : min(position + SLICE_BYTES, end)]
            # Counted before it leaves: who has the bytes finds them counted.
            with self._lock:
                self._fetched[grant.agent] += len(piece)
            sock.settimeout(SLICE_S)
            sock.sendall(piece)

    def _refuse(self, connection: _Connection) -> bool:
        """Answer a request whose path does not hold; return that the connection ends."""
        self._note_refusal(connection, "its path does not hold")
        connection.sock.sendall(head_without_content("403 Forbidden", closes=True))
        return False

    def _take(self, connection: _Connection, request: BlobRequest, behind: bytes) -> bool:
        """Take bytes of an update; return whether the connection may go on.

        A refusal ends the connection: its other side may be sending what nobody reads.

        Raises:
            OSError: The connection broke, or is too slow.
        """
        sock = connection.sock
        sock.settimeout(SLICE_S)
        # 1. A path that does not hold gets the same answer whatever is wrong with it, as one of an endpoint that takes
        # no updates.
        grant = self._signer.upload_grant(request.target)
        if self._inflow is None or grant is None or not self._is_of_agent(sock, grant.agent):
            return self._refuse(connection)
        self._note_known(connection)
        # 2. Only an update that is expected now is taken, and ranges of whole chunks within it.
        upload = self._inflow.expected_of(grant.agent)
        if upload is None or _grant_of(upload) != grant:
            sock.sendall(head_without_content("404 Not Found", closes=True))
            return False
        span = bytes_of_content(request, upload.ref.size_bytes, upload.ref.chunk_bytes)
        if span is None:
            sock.sendall(head_without_content("416 Range Not Satisfiable", closes=True))
            return False
        # 3. The bytes. What was handed over before the connection breaks is not sent again.
        if request.expects_continue and not behind:
            sock.sendall(CONTINUE)
        try:
            self._receive(sock, upload, span, behind)
        except ChunkError:
            sock.sendall(head_without_content("404 Not Found", closes=True))
            return False
        sock.sendall(head_without_content("200 OK", closes=request.closes))
        return not request.closes

    def _receive(self, sock: socket.socket, upload: ExpectedUpload, span: tuple[int, int], behind: bytes) -> None:
        """Read bytes of an update and hand them to the loop, one part after another.

        Raises:
            ChunkError: The update is not expected any more.
            OSError: The connection broke, ended early or is too slow.
        """
        if self._inflow is None:
            raise ChunkError("no updates are taken")
        first, end = span
        size = part_bytes(upload.ref)
        for position in range(first, end, size):
            wanted = min(size, end - position)
            part = bytearray(behind[:wanted])
            behind = behind[wanted:]
            until = self._clock() + SLICE_S * max(1.0, wanted / SLICE_BYTES)
            while len(part) < wanted:
                left_s = until - self._clock()
                if left_s <= 0:
                    raise TimeoutError("an update comes too slowly")
                sock.settimeout(left_s)
                data = sock.recv(wanted - len(part))
                if not data:
                    raise ConnectionAbortedError("the request ended within its body")
                part += data
            self._inflow.hand_over(ArrivedPart(upload, frame_of(upload.ref, position, bytes(part))))
        sock.settimeout(SLICE_S)

    def _is_of_agent(self, sock: socket.socket, agent: str) -> bool:
        """Return whether the client's certificate, where one is asked for, is of the agent of the path."""
        if not self._names_clients:
            return True
        if not isinstance(sock, ssl.SSLSocket):
            return False
        # The subject of a certificate that the authority has made has one part: its name.
        certificate = sock.getpeercert() or {}
        return certificate.get("subject") == ((("commonName", agent),),)

    def _note_refusal(self, connection: _Connection, reason: str) -> None:
        """Count a refused request, and log it now and then: anybody can send those."""
        with self._lock:
            count = self._refusals.note(connection.origin)
        if count is not None:
            log.warning("blob_refused from=%s times=%d reason=%s", connection.origin, count, reason)


class _Connection:
    """One connection: its socket, from where it comes, and whether it has shown a path that holds."""

    def __init__(self, sock: socket.socket, origin: str) -> None:
        self.sock = sock
        self.origin = origin
        self.is_known = False
