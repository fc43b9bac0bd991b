"""The little of HTTP/1.1 that the endpoint of blobs speaks: GET and HEAD without a body, and one range of bytes.

Everything else is refused and ends the connection, so that a request means the same to a proxy before the endpoint and
to the endpoint itself.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from edge_agent.core.errors import MessageError

HEAD_BYTES = 8 * 1024
"""The most bytes of a request up to its empty line."""

END_OF_HEAD = b"\r\n\r\n"

_REQUEST_LINE = re.compile(rb"(GET|HEAD) (/[!-~]{0,4000}) HTTP/1\.1")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([ -~\x80-\xff\t]*)")
_RANGE = re.compile(r"bytes=([0-9]{1,12})-([0-9]{0,12})")


@dataclass(frozen=True)
class BlobRequest:
    """What a client asks the endpoint for: a path, and which bytes of the blob behind it.

    Attributes:
        is_head: Whether only the head of the answer is asked for.
        target: Path and query.
        range: The header ``Range``; empty: the whole blob.
        closes: Whether the connection ends after the answer.
    """

    is_head: bool
    target: str
    range: str = ""
    closes: bool = False


def read_head(sock: socket.socket, until: float, clock: Callable[[], float]) -> bytes:
    """Return the bytes of the next request up to its empty line; no bytes where the other side ended in between.

    Args:
        sock: The connection.
        until: The moment of ``clock`` by which the head must be complete.
        clock: The time in seconds.

    Raises:
        MessageError: It is longer than `HEAD_BYTES`, is followed by more bytes, or ends early.
        OSError: It is late, or the connection broke.
    """
    head = b""
    while not head.endswith(END_OF_HEAD):
        left_s = until - clock()
        if left_s <= 0:
            raise TimeoutError("no whole request in time")
        if len(head) >= HEAD_BYTES:
            raise MessageError(f"the head of the request is longer than {HEAD_BYTES} bytes")
        # No client of ours sends a request before the answer to the last one, and no request here has a body.
        if END_OF_HEAD in head:
            raise MessageError("bytes follow the head of the request; expected one request without a body at a time")
        sock.settimeout(left_s)
        data = sock.recv(HEAD_BYTES - len(head))
        if not data:
            if head:
                raise MessageError("the request ended within its head")
            return b""
        head += data
    return head


def parse_head(head: bytes) -> BlobRequest:
    """Return the request in a head.

    Raises:
        MessageError: It is not one that this endpoint answers.
    """
    line, *header_lines = head[: -len(END_OF_HEAD)].split(b"\r\n")
    request_line = _REQUEST_LINE.fullmatch(line)
    if request_line is None:
        raise MessageError("the first line is no GET or HEAD of HTTP/1.1")
    headers: dict[str, str] = {}
    for header_line in header_lines:
        header = _HEADER.fullmatch(header_line)
        if header is None:
            raise MessageError("a header is malformed")
        name = header[1].decode("ascii").lower()
        if name in headers:
            raise MessageError("a header occurs twice")
        headers[name] = header[2].decode("latin-1").strip()
    # A body that this side does not read would be taken for the next request.
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise MessageError("the request has a body")
    return BlobRequest(
        is_head=request_line[1] == b"HEAD",
        target=request_line[2].decode("ascii"),
        range=headers.get("range", ""),
        closes=headers.get("connection", "").lower() == "close",
    )


def bytes_of_range(text: str, size_bytes: int) -> tuple[int, int] | None:
    """Return first and end byte (half-open) of a ``Range`` header within a blob.

    Returns:
        The whole blob where there is no header; None for a range that is malformed or begins beyond the blob.
    """
    if not text:
        return 0, size_bytes
    parts = _RANGE.fullmatch(text)
    if parts is None:
        return None
    first = int(parts[1])
    end = size_bytes
    if parts[2]:
        end = min(int(parts[2]) + 1, size_bytes)
    if first >= end:
        return None
    return first, end


def head_of_blob(first: int, end: int, size_bytes: int, *, is_range: bool) -> bytes:
    """Return the head of an answer that holds the bytes ``first..end`` of a blob."""
    status = "200 OK"
    lines = [f"Content-Length: {end - first}", "Accept-Ranges: bytes"]
    if is_range:
        status = "206 Partial Content"
        lines.append(f"Content-Range: bytes {first}-{end - 1}/{size_bytes}")
    return _head(status, lines)


def head_of_refusal(status: str, *, closes: bool) -> bytes:
    """Return a whole answer without content; ``status`` is number and phrase."""
    lines = ["Content-Length: 0"]
    if closes:
        lines.append("Connection: close")
    return _head(status, lines)


def _head(status: str, lines: list[str]) -> bytes:
    everything = [
        f"HTTP/1.1 {status}",
        "Content-Type: application/octet-stream",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        *lines,
    ]
    return "\r\n".join(everything).encode("ascii") + END_OF_HEAD
