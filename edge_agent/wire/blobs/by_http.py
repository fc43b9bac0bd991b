"""Blobs by HTTP range requests, for agents whose coordinator has answered a `Want` with URLs.

The bytes go into the same partial file as chunks that come over MQTT (`chunks.Incoming`), so either way continues what
the other one has begun, also after a restart. A server is not trusted: it may refuse, stand still, end early or send
other bytes. Sizes are compared before anything is read, redirects are not followed, and only the blob's SHA-256 decides
whether the bytes count. Each fetch has a thread of its own, which never writes to the disk: it hands pieces to the loop
of the agent through a short queue and waits while that is full.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import ssl
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from ...core.errors import ChunkError, HeadwaterError, cause
from ...core.formats import printable
from ..messages.fields import BlobRef
from .chunks import Frame, chunk_count, transfer_id

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""The seconds that a connection may take: where a firewall drops it, chunks are requested after that."""

ANSWER_S = 10.0
"""The seconds that a server may be silent within an answer."""

PIECE_BYTES = 256 * 1024
"""The most bytes that are read at once."""

MOST_PIECES = 4
"""The pieces that wait for the loop: with `PIECE_BYTES`, a fetch holds at most 1 MiB of memory."""

LOOK_S = 0.5
"""The seconds between two looks of a thread whose pieces nobody takes at whether it is to stop."""

PARTIAL = 206
"""The status of an answer that holds the range that was asked for."""

WHOLE = 200
"""The status of an answer that holds the whole blob."""

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,12})-([0-9]{1,12})/([0-9]{1,12})")


@dataclass(frozen=True)
class Piece:
    """Consecutive chunks of a blob that have arrived.

    Attributes:
        index: The number of the first chunk.
        data: The bytes of the chunks.
    """

    index: int
    data: bytes

    def as_frame(self, ref: BlobRef) -> Frame:
        """Return the piece in the form in which it would have come over MQTT."""
        return Frame(transfer_id(ref.digest), self.index, chunk_count(ref), self.index * ref.chunk_bytes, self.data)


class Fetch:
    """One attempt to fetch what is missing of a blob, from one URL after another.

    The owner calls `take_pieces` until `is_over`; `stop` ends it early.
    """

    def __init__(self, ref: BlobRef) -> None:
        self.ref = ref
        self.host = ""
        """The host that the last request went to; empty before the first."""

        self.problems: list[str] = []
        """Why URLs were of no use, for the log."""

        self._pieces: queue.Queue[Piece] = queue.Queue(MOST_PIECES)
        self._is_stopped = threading.Event()
        self._has_ended = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come: all pieces are taken, and the thread has ended."""
        # In this order: a piece may come between the two looks, but none after the end.
        return self._has_ended.is_set() and self._pieces.empty()

    @property
    def is_stopped(self) -> bool:
        """Whether the owner wants no more pieces."""
        return self._is_stopped.is_set()

    def stop(self) -> None:
        """Take no more pieces; the thread ends with its next piece, or when the server has been silent for too long."""
        self._is_stopped.set()

    def take_pieces(self) -> Iterator[Piece]:
        """Yield the pieces that have arrived, at most `MOST_PIECES` of them."""
        for _ in range(MOST_PIECES):
            try:
                yield self._pieces.get_nowait()
            except queue.Empty:
                return

    def put(self, piece: Piece) -> None:
        """Hand a piece to the owner, and wait while too many wait.

        Raises:
            ChunkError: The owner wants no more.
        """
        while not self._is_stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._pieces.put(piece, timeout=LOOK_S)
                return
        raise ChunkError("the fetch was stopped")

    def end(self) -> None:
        """Note that no piece will come any more."""
        self._has_ended.set()


Missing = Sequence[tuple[int, int]]
"""The half-open ranges of chunks that are to be fetched, in ascending order."""


class BlobFetcher:
    """Begins fetches, each in a thread of its own."""

    def __init__(
        self,
        wake: Callable[[], None],
        tls_context: Callable[[], ssl.SSLContext],
        hosts: Sequence[str] = (),
    ) -> None:
        """Fetch nothing yet.

        Args:
            wake: Called from a fetch's thread when a piece has arrived or the fetch has ended.
            tls_context: Returns the certificates to trust and to show; called for each fetch, as they get renewed.
            hosts: The hosts that may be asked; empty: all that the coordinator names.
        """
        self._wake = wake
        self._tls_context = tls_context
        self._hosts = frozenset(host.lower() for host in hosts)

    def begin(self, ref: BlobRef, urls: Sequence[str], missing: Missing) -> Fetch:
        """Return a fetch of these chunks that has just begun; the URLs are tried in their order."""
        fetch = Fetch(ref)
        work = (fetch, tuple(urls), tuple(missing))
        thread = threading.Thread(target=self._run, args=work, name="fetch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            fetch.problems.append(cause(error))
            fetch.end()
        return fetch

    def _run(self, fetch: Fetch, urls: tuple[str, ...], missing: Missing) -> None:
        """Try the URLs one after another until nothing is missing; whatever goes wrong ends the fetch alone."""
        try:
            for url in urls:
                missing = self._fetch_from(fetch, url, missing)
                if not missing or fetch.is_stopped:
                    return
        except Exception as error:  # a bug: the blob still comes in chunks
            log.exception("fetch_broke digest=%s", fetch.ref.digest[:12])
            fetch.problems.append(cause(error))
        finally:
            fetch.end()
            self._wake()

    def _fetch_from(self, fetch: Fetch, url: str, missing: Missing) -> Missing:
        """Fetch ranges from one URL, over one connection; return those that have not arrived."""
        from http.client import HTTPException  # brings the email package, which an idle agent does without

        remaining = list(missing)
        connection: HTTPConnection | None = None
        try:
            parts = check_url(url, self._hosts, "[downloads] hosts")
            fetch.host = parts.netloc
            connection = open_connection(parts, self._tls_context)
            target = target_of(parts)
            while remaining:
                start, stop = remaining[0]
                for piece in _pieces_of_range(connection, target, fetch.ref, start, stop):
                    fetch.put(piece)
                    self._wake()
                    arrived_until = piece.index + -(-len(piece.data) // fetch.ref.chunk_bytes)
                    remaining[0] = (arrived_until, stop)
                remaining.pop(0)
        except (OSError, ValueError, HTTPException, HeadwaterError) as error:
            # The address holds a proof that must not be in a log, so the host stands for it.
            fetch.problems.append(f"{fetch.host or 'URL'}: {printable(cause(error))[:200]}")
        finally:
            if connection is not None:
                connection.close()
        return remaining


def check_url(url: str, hosts: Collection[str], setting: str) -> SplitResult:
    """Return the parts of a URL that may be asked.

    Args:
        url: The URL.
        hosts: The hosts that may be asked, in lower case; empty: all.
        setting: The key of the device's configuration that names them, for the message.

    Raises:
        ChunkError: It is of another scheme, or of a host that this device's configuration does not allow.
        ValueError: It is malformed.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme not in {"http", "https"} or not host or parts.username is not None:
        raise ChunkError("not a URL of HTTP without a user; expected http://host/path or https://host/path")
    if hosts and host.lower() not in hosts:
        raise ChunkError(f"host '{host[:80]}' is none of {setting}; add it there if it is to be used")
    return parts


def target_of(parts: SplitResult) -> str:
    """Return path and query of a URL, as the first line of a request has them."""
    path = parts.path or "/"
    return f"{path}?{parts.query}" if parts.query else path


def open_connection(parts: SplitResult, tls_context: Callable[[], ssl.SSLContext]) -> HTTPConnection:
    """Return an open connection to the host of a URL, never through a proxy.

    Raises:
        OSError: The host does not answer, or cannot prove who it is.
    """
    from http.client import HTTPConnection, HTTPSConnection

    host = parts.hostname or ""
    if parts.scheme == "https":
        connection: HTTPConnection = HTTPSConnection(host, parts.port, timeout=CONNECT_S, context=tls_context())
    else:
        connection = HTTPConnection(host, parts.port, timeout=CONNECT_S)
    connection.connect()
    connection.timeout = ANSWER_S  # for a connection that is opened again, as the server closed this one
    connection.sock.settimeout(ANSWER_S)
    return connection


def _pieces_of_range(connection: HTTPConnection, target: str, ref: BlobRef, start: int, stop: int) -> Iterator[Piece]:
    """Request the chunks ``start..stop`` and yield them as they arrive, each piece of whole chunks.

    Raises:
        ChunkError: The server refuses, or answers with another range, another size or fewer bytes.
        OSError, HTTPException: The connection broke, or what came is not HTTP.
    """
    size = ref.chunk_bytes
    first_byte = start * size
    end_byte = min(stop * size, ref.size_bytes)
    headers = {"Range": f"bytes={first_byte}-{end_byte - 1}", "Accept-Encoding": "identity"}
    connection.request("GET", target, headers=headers)
    response = connection.getresponse()
    _check_answer(response, ref, first_byte, end_byte)
    # Bytes come as the link gives them; only whole chunks are handed on, and the last chunk may be shorter.
    held = b""
    position = first_byte
    while position + len(held) < end_byte:
        data = response.read1(min(PIECE_BYTES, end_byte - position - len(held)))
        if not data:
            raise ChunkError(f"the answer ended at byte {position + len(held)}, expected {end_byte}")
        held += data
        whole = len(held) // size * size
        if position + len(held) == end_byte:
            whole = len(held)
        if whole:
            yield Piece(position // size, held[:whole])
            position += whole
            held = held[whole:]
    response.read()  # nothing is left; the connection is free for the next range


def _check_answer(response: HTTPResponse, ref: BlobRef, first_byte: int, end_byte: int) -> None:
    """Require that an answer holds the bytes that were asked for, before any of them is read.

    Raises:
        ChunkError: It does not.
    """
    wants_whole = first_byte == 0 and end_byte == ref.size_bytes
    if response.status == WHOLE and wants_whole:
        # A server that knows no ranges sends the whole blob, which is what was asked for.
        if response.length != ref.size_bytes:
            raise ChunkError(f"the answer holds {response.length} bytes, expected {ref.size_bytes}")
    elif response.status == PARTIAL:
        _check_range(response, first_byte, end_byte, ref.size_bytes)
    else:
        raise ChunkError(f"the answer has status {response.status}, expected {PARTIAL}")


def _check_range(response: HTTPResponse, first_byte: int, end_byte: int, size_bytes: int) -> None:
    """Require that an answer is of this range of a blob of this size, as its header and its length say.

    Raises:
        ChunkError: It is not.
    """
    # The size of the blob may be '*' in an answer; a server of files says it.
    header = response.getheader("Content-Range", "")
    stated = _CONTENT_RANGE.fullmatch(header)
    range_and_size = None if stated is None else tuple(map(int, stated.groups()))
    is_as_asked = range_and_size == (first_byte, end_byte - 1, size_bytes)
    if not is_as_asked or response.length != end_byte - first_byte:
        wanted = f"{first_byte}-{end_byte - 1}/{size_bytes}"
        raise ChunkError(f"the answer is of another range or size, expected {wanted}")
