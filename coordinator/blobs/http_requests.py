"""The little of HTTP/1.1 that the endpoint of blobs speaks: GET and HEAD without a body, PUT with one, ranges of bytes.

Everything else is refused and ends the connection, so that a request means the same to a proxy before the endpoint and
to the endpoint itself.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edge_agent.core.errors import MessageError

HEAD_BYTES = 8 * 1024
"""The most bytes of a request up to its empty line."""

END_OF_HEAD = b"\r\n\r\n"

_REQUEST_LINE = re.compile(rb"(GET|HEAD|PUT) (/[!-~]{0,4000}) HTTP/1\.1")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([ -~\x80-\xff\t]*)")
_RANGE = re.compile(r"bytes=([0-9]{1,12})-([0-9]{0,12})")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,12})-([0-9]{1,12})/([0-9]{1,12})")
_LENGTH = re.compile(r"[0-9]{1,12}")

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""The answer to a head that waits for it before its body."""


@dataclass(frozen=True)
class BlobRequest:
    """What a client asks of the endpoint: a path, and which bytes of the blob behind it.

    Attributes:
        is_head: Whether only the head of the answer is asked for.
        target: Path and query.
        range: The header ``Range``; empty: the whole blob.
        closes: Whether the connection ends after the answer.
        is_put: Whether bytes come with the request.
        content_bytes: How many come.
        content_range: The header ``Content-Range``, which says which ones; empty: the whole blob.
        expects_continue: Whether the client sends them only after `CONTINUE`.
    """

    is_head: bool
    target: str
    range: str = ""
    closes: bool = False
    is_put: bool = False
    content_bytes: int = 0
    content_range: str = ""
    expects_continue: bool = False


def read_head(sock: socket.socket, until: float, clock: Callable[[], float]) -> tuple[bytes, bytes]:
    """Return the next request up to its empty line, and the bytes that have come behind it.

    The head is empty where the other side ended between two requests.

    Args:
        sock: The connection.
        until: The moment of ``clock`` by which the head must be complete.
        clock: The time in seconds.

    Raises:
        MessageError: It is longer than `HEAD_BYTES`, or ends early.
        OSError: It is late, or the connection broke.
    """
    head = b""
    while END_OF_HEAD not in head:
        left_s = until - clock()
        if left_s <= 0:
            raise TimeoutError("no whole request in time")
        if len(head) >= HEAD_BYTES:
            raise MessageError(f"the head of the request is longer than {HEAD_BYTES} bytes")
        sock.settimeout(left_s)
        data = sock.recv(HEAD_BYTES - len(head))
        if not data:
            if head:
                raise MessageError("the request ended within its head")
            return b"", b""
        head += data
    end = head.index(END_OF_HEAD) + len(END_OF_HEAD)
    return head[:end], head[end:]


def parse_head(head: bytes, behind: bytes = b"") -> BlobRequest:
    """Return the request in a head.

    Args:
        head: The bytes up to the empty line.
        behind: What has come behind it, which only a request with a body may have.

    Raises:
        MessageError: It is not one that this endpoint answers.
    """
    line, *header_lines = head[: -len(END_OF_HEAD)].split(b"\r\n")
    request_line = _REQUEST_LINE.fullmatch(line)
    if request_line is None:
        raise MessageError("the first line is no GET, HEAD or PUT of HTTP/1.1")
    headers: dict[str, str] = {}
    for header_line in header_lines:
        header = _HEADER.fullmatch(header_line)
        if header is None:
            raise MessageError("a header is malformed")
        name = header[1].decode("ascii").lower()
        if name in headers:
            raise MessageError("a header occurs twice")
        headers[name] = header[2].decode("latin-1").strip()
    is_put = request_line[1] == b"PUT"
    content_bytes = _content_bytes(headers, is_put=is_put)
    # No client of ours sends a request before the answer to the last one.
    if len(behind) > content_bytes:
        raise MessageError("bytes follow the request; expected one request at a time")
    return BlobRequest(
        is_head=request_line[1] == b"HEAD",
        target=request_line[2].decode("ascii"),
        range=headers.get("range", ""),
        closes=headers.get("connection", "").lower() == "close",
        is_put=is_put,
        content_bytes=content_bytes,
        content_range=headers.get("content-range", ""),
        expects_continue=headers.get("expect", "").lower() == "100-continue",
    )


def _content_bytes(headers: Mapping[str, str], *, is_put: bool) -> int:
    """Return the bytes of a request's body, which a PUT alone may have, and has to state.

    Raises:
        MessageError: There is a body that this side would not read: it would be taken for the next request.
    """
    text = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not _LENGTH.fullmatch(text):
        raise MessageError("the request has a body without a length")
    if is_put != (int(text) > 0):
        raise MessageError("the request has a body, or has none, where it has to be otherwise")
    return int(text)


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


def bytes_of_content(request: BlobRequest, size_bytes: int, chunk_bytes: int) -> tuple[int, int] | None:
    """Return first and end byte (half-open) of what comes with a request, within a blob.

    Returns:
        None where that is malformed, not within the blob, not as long as the body, or not of whole chunks.
    """
    first = 0
    end = size_bytes
    if request.content_range:
        parts = _CONTENT_RANGE.fullmatch(request.content_range)
        if parts is None or int(parts[3]) != size_bytes:
            return None
        first = int(parts[1])
        end = int(parts[2]) + 1
    is_within = first < end <= size_bytes and end - first == request.content_bytes
    is_of_chunks = first % chunk_bytes == 0 and (end % chunk_bytes == 0 or end == size_bytes)
    return (first, end) if is_within and is_of_chunks else None


def head_of_blob(first: int, end: int, size_bytes: int, *, is_range: bool) -> bytes:
    """Return the head of an answer that holds the bytes ``first..end`` of a blob."""
    status = "200 OK"
    lines = [f"Content-Length: {end - first}", "Accept-Ranges: bytes"]
    if is_range:
        status = "206 Partial Content"
        lines.append(f"Content-Range: bytes {first}-{end - 1}/{size_bytes}")
    return _head(status, lines)


def head_without_content(status: str, *, closes: bool) -> bytes:
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
