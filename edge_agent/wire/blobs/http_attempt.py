"""One attempt to move a blob by HTTP, in either direction: its thread, its connection, and why a URL was of no use.

A server is not trusted, and a failure costs the attempt alone: the blob then goes in chunks over MQTT.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from ...core.errors import ChunkError, HeadwaterError, cause
from ...core.formats import printable
from ..messages.fields import BlobRef

if TYPE_CHECKING:
    from http.client import HTTPConnection

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""The seconds that a connection may take: where a firewall drops it, chunks are used after that."""

ANSWER_S = 10.0
"""The seconds that a server may be silent within an answer."""

Missing = Sequence[tuple[int, int]]
"""The half-open ranges of chunks that are to be moved, in ascending order."""


class HttpAttempt:
    """One attempt to move what is missing of a blob, by one URL after another; `stop` ends it early."""

    def __init__(self, ref: BlobRef) -> None:
        self.ref = ref
        self.host = ""
        """The host that the last request went to; empty before the first."""

        self.problems: list[str] = []
        """Why URLs were of no use, for the log."""

        self.is_complete = False
        """Whether all that was missing has been moved."""

        self._is_stopped = threading.Event()
        self._has_ended = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be moved."""
        return self._has_ended.is_set()

    @property
    def is_stopped(self) -> bool:
        """Whether the owner wants nothing more to be moved."""
        return self._is_stopped.is_set()

    def stop(self) -> None:
        """Move no more; the thread ends with its next bytes, or when the server has been silent for too long."""
        self._is_stopped.set()

    def end(self) -> None:
        """Note that nothing will be moved any more."""
        self._has_ended.set()


Transfer = Callable[["HTTPConnection", str, int, int], Iterator[int]]
"""Moves the chunks ``start..stop`` by one request; called with an open connection, the request's target and the range.

It yields up to which chunk the range has been moved, as often as it knows. It may raise ChunkError, OSError, ValueError
or HTTPException.
"""


class HttpAttempts:
    """Runs attempts, each in a thread of its own."""

    def __init__(
        self,
        wake: Callable[[], None],
        tls_context: Callable[[], ssl.SSLContext],
        check: Callable[[str], SplitResult],
    ) -> None:
        """Begin nothing yet.

        Args:
            wake: Called from an attempt's thread when it has ended.
            tls_context: Returns the certificates to trust and to show; called for each attempt, as they get renewed.
            check: Returns the parts of a URL; raises ChunkError or ValueError for one that is not to be asked.
        """
        self._wake = wake
        self._tls_context = tls_context
        self._check = check

    def begin(self, attempt: HttpAttempt, urls: Sequence[str], missing: Missing, transfer: Transfer) -> None:
        """Start the thread of an attempt, which tries the URLs in their order until nothing is missing."""
        work = (attempt, tuple(urls), tuple(missing), transfer)
        thread = threading.Thread(target=self._run, args=work, name="blob-by-http", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            attempt.problems.append(cause(error))
            attempt.end()

    def _run(self, attempt: HttpAttempt, urls: Sequence[str], missing: Missing, transfer: Transfer) -> None:
        """Try the URLs one after another; whatever goes wrong ends the attempt alone."""
        try:
            for url in urls:
                missing = self._move_by(attempt, url, missing, transfer)
                if not missing or attempt.is_stopped:
                    break
            attempt.is_complete = not missing
        except Exception as error:  # a bug: the blob still goes in chunks
            log.exception("http_attempt_broke digest=%s", attempt.ref.digest[:12])
            attempt.problems.append(cause(error))
        finally:
            attempt.end()
            self._wake()

    def _move_by(self, attempt: HttpAttempt, url: str, missing: Missing, transfer: Transfer) -> Missing:
        """Move ranges by one URL, over one connection; return those that have not been moved."""
        from http.client import HTTPException  # brings the email package, which an idle agent does without

        remaining = list(missing)
        connection: HTTPConnection | None = None
        try:
            parts = self._check(url)
            attempt.host = parts.netloc
            connection = open_connection(parts, self._tls_context)
            target = _target_of(parts)
            while remaining:
                start, stop = remaining[0]
                for moved_until in transfer(connection, target, start, stop):
                    remaining[0] = (moved_until, stop)
                remaining.pop(0)
        except (OSError, ValueError, HTTPException, HeadwaterError) as error:
            # The address holds a proof that must not be in a log, so the host stands for it.
            attempt.problems.append(f"{attempt.host or 'URL'}: {printable(cause(error))[:200]}")
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


def _target_of(parts: SplitResult) -> str:
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
