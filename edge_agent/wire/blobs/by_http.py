"""Blobs by HTTP range requests, for agents whose coordinator has answered a `Want` with URLs.

The bytes go into the same partial file as chunks that come over MQTT (`chunks.Incoming`), so either way continues what
the other one has begun, also after a restart. A server is not trusted: it may refuse, stand still, end early or send
other bytes. Sizes are compared before anything is read, redirects are not followed, and only the blob's SHA-256 decides
whether the bytes count. Each fetch has a thread of its own, which never writes to the disk: it hands pieces to the loop
of the agent through a short queue and waits while that is full.
"""

from __future__ import annotations

import contextlib
import queue
import re
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...core.errors import ChunkError
from ..messages.fields import BlobRef
from .chunks import Frame, chunk_count, transfer_id
from .http_attempt import HttpAttempt, HttpAttempts, Missing, check_url

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

PIECE_BYTES = 256 * 1024
"""The most bytes that are read at once."""

MOST_PIECES = 4
"""The pieces that wait for the loop: with `PIECE_BYTES`, a fetch holds at most 1 MiB of memory."""

LOOK_S = 0.5
"""The seconds between two looks of a thread whose pieces nobody takes at whether it is to stop."""

PARTIAL = 206
"""The status of an answer that holds the range that was asked for."""

STOPPED = "the fetch was stopped"
"""The problem of a fetch whose owner wants no more."""

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


class Fetch(HttpAttempt):
    """One attempt to fetch what is missing of a blob. The owner calls `take_pieces` until `is_over`."""

    def __init__(self, ref: BlobRef) -> None:
        super().__init__(ref)
        self._pieces: queue.Queue[Piece] = queue.Queue(MOST_PIECES)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come: all pieces are taken, and the thread has ended."""
        # In this order: a piece may come between the two looks, but none after the end.
        return super().is_over and self._pieces.empty()

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
        while not self.is_stopped:
            with contextlib.suppress(queue.Full):
                self._pieces.put(piece, timeout=LOOK_S)
                return
        raise ChunkError(STOPPED)


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
        allowed = frozenset(host.lower() for host in hosts)
        check = partial(check_url, hosts=allowed, setting="[downloads] hosts")
        self._attempts = HttpAttempts(wake, tls_context, check)
        self._wake = wake

    def begin(self, ref: BlobRef, urls: Sequence[str], missing: Missing) -> Fetch:
        """Return a fetch of these chunks that has just begun; the URLs are tried in their order."""
        fetch = Fetch(ref)
        self._attempts.begin(fetch, urls, missing, partial(self._fetch_range, fetch))
        return fetch

    def _fetch_range(
        self, fetch: Fetch, connection: HTTPConnection, target: str, start: int, stop: int
    ) -> Iterator[int]:
        """Fetch the chunks ``start..stop`` by one request, and hand them to the owner as they arrive."""
        for piece in _pieces_of_range(fetch, connection, target, start, stop):
            fetch.put(piece)
            self._wake()
            yield piece.index + -(-len(piece.data) // fetch.ref.chunk_bytes)


def _pieces_of_range(fetch: Fetch, connection: HTTPConnection, target: str, start: int, stop: int) -> Iterator[Piece]:
    """Request the chunks ``start..stop`` and yield them as they arrive, each piece of whole chunks.

    Raises:
        ChunkError: The server refuses, or answers with another range, another size or fewer bytes, or the owner wants
            no more.
        OSError, HTTPException: The connection broke, or what came is not HTTP.
    """
    ref = fetch.ref
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
        if fetch.is_stopped:  # here, too: a server that sends single bytes would keep the thread for days
            raise ChunkError(STOPPED)
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
