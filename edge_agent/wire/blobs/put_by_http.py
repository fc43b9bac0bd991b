"""Blobs sent by HTTP PUT, for agents whose coordinator has answered the announcement of an update with URLs.

The coordinator's own endpoint takes ranges, so that what has arrived of an update, by either way, is not sent again. A
store of others takes the whole update in one request, whose head states the SHA-256 that the URL was signed for. An
answer says that bytes have arrived, and no more: the update counts, and stays on the disk of its sender, until its
receipt. Each attempt has a thread of its own, which reads the update through a memory map and holds one slice of it.
"""

from __future__ import annotations

import base64
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import SplitResult

from ...core.errors import ChunkError
from ..messages.fields import BlobRef
from .chunks import Outgoing
from .http_attempt import HttpAttempt, HttpAttempts, Missing, check_url

if TYPE_CHECKING:
    from http.client import HTTPConnection

SLICE_BYTES = 16 * 1024
"""The bytes that are sent at once."""

SLICE_S = 30.0
"""The seconds that a slice, or an answer, may take."""

BUFFER_BYTES = 4 << 20
"""The bytes of a request that the system may hold when its last slice counts as sent; Linux holds that many at most."""

LEAST_RATE = 8_000.0
"""The bytes per second of the slowest link on which an answer is waited for."""

MOST_ANSWER_BYTES = 4096
"""The most bytes of an answer that are read; stores put pages into their errors."""

CHECKSUM = "x-amz-checksum-sha256"
"""The header that states the SHA-256 of what is put into a store, in base64; the store compares it with the content."""

TAKEN = frozenset({200, 201, 204})
"""The statuses of an answer by which bytes were taken."""


class Put(HttpAttempt):
    """One attempt to send what is missing of a blob. It is complete when answers said that all of it has arrived."""

    def __init__(self, ref: BlobRef, *, whole: bool) -> None:
        super().__init__(ref)
        self.whole = whole
        """Whether it goes in one request, to a store."""

        self.sent_bytes = 0
        """The bytes that were handed to the system; some of them may be lost."""


class BlobSender:
    """Begins uploads, each in a thread of its own."""

    def __init__(
        self,
        wake: Callable[[], None],
        tls_context: Callable[[], ssl.SSLContext],
        hosts: Sequence[str] = (),
        *,
        needs_tls: bool = False,
    ) -> None:
        """Send nothing yet.

        Args:
            wake: Called from an upload's thread when it has ended.
            tls_context: Returns the certificates to trust and to show; called for each upload, as they get renewed.
            hosts: The hosts that updates may go to; empty: all that the coordinator names.
            needs_tls: Whether URLs without TLS are of no use, because updates are encrypted on the other way, too.
        """
        self._attempts = HttpAttempts(wake, tls_context, self._check)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._needs_tls = needs_tls

    def begin(self, blob: Outgoing, urls: Sequence[str], missing: Missing, *, whole: bool) -> Put:
        """Return an upload that has just begun; the URLs are tried in their order.

        Args:
            blob: The blob.
            urls: Where to put it.
            missing: The half-open ranges of chunks to send; for a store that takes no ranges, everything is sent.
            whole: Whether it goes to such a store.
        """
        put = Put(blob.ref, whole=whole)
        ranges = ((0, blob.count),) if whole else tuple(missing)
        self._attempts.begin(put, urls, ranges, partial(_send_range, put, blob))
        return put

    def _check(self, url: str) -> SplitResult:
        """Return the parts of a URL that an update may go to.

        Raises:
            ChunkError: This device's configuration does not allow it.
            ValueError: It is malformed.
        """
        parts = check_url(url, self._hosts, "[uploads] hosts")
        if self._needs_tls and parts.scheme != "https":
            raise ChunkError("the URL is without TLS, which the broker has; expected https://")
        return parts


def _end_when_unacknowledged(sock: socket.socket) -> None:
    """Have the system end a connection whose bytes nobody acknowledges any more, where it can (Linux).

    Without that, bytes that wait in its buffer would be waited for as long as on the slowest link.
    """
    option: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        sock.setsockopt(socket.IPPROTO_TCP, option, int(SLICE_S * 1000))


def _send_range(
    put: Put, blob: Outgoing, connection: HTTPConnection, target: str, start: int, stop: int
) -> Iterator[int]:
    """Send the chunks ``start..stop`` in one request, wait for the answer, and yield ``stop``.

    Raises:
        ChunkError: The server refuses, or the upload was stopped.
        OSError, HTTPException: The connection broke or is too slow, or what came is not HTTP.
    """
    ref = blob.ref
    first_byte = start * ref.chunk_bytes
    end_byte = min(stop * ref.chunk_bytes, ref.size_bytes)
    # 1. The head. Beside these headers a presigned URL allows none.
    connection.putrequest("PUT", target, skip_accept_encoding=True)
    connection.putheader("Content-Length", str(end_byte - first_byte))
    if put.whole:
        connection.putheader(CHECKSUM, base64.b64encode(bytes.fromhex(ref.digest)).decode())
    else:
        connection.putheader("Content-Range", f"bytes {first_byte}-{end_byte - 1}/{ref.size_bytes}")
    connection.endheaders()
    # 2. The bytes.
    _end_when_unacknowledged(connection.sock)
    connection.sock.settimeout(SLICE_S)
    for position in range(first_byte, end_byte, SLICE_BYTES):
        if put.is_stopped:
            raise ChunkError("the upload was stopped")
        piece = blob.data[position : min(position + SLICE_BYTES, end_byte)]
        # Counted before it leaves: when the last byte has arrived, all are counted.
        put.sent_bytes += len(piece)
        connection.send(piece)
    # 3. The answer, which comes when the last byte has arrived: a slow link has most of them in its buffer still.
    connection.sock.settimeout(SLICE_S + min(end_byte - first_byte, BUFFER_BYTES) / LEAST_RATE)
    response = connection.getresponse()
    response.read(MOST_ANSWER_BYTES)
    if response.status not in TAKEN:
        raise ChunkError(f"the answer has status {response.status}, expected 200, 201 or 204")
    yield stop
