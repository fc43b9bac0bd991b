"""Single pictures fetched by HTTP, as IP cameras and other programs offer them: ``http(s)://host/snapshot.jpg``."""

from __future__ import annotations

import base64
import contextlib
import http.client
import time
import urllib.error
import urllib.request
from urllib.parse import unquote, urlsplit, urlunsplit

from ...core.errors import SourceLost, UsageError
from .source import Frame

_MOST_BYTES = 16 << 20
"""The largest picture that is accepted."""

_TIMEOUT_S = 10.0
"""Seconds within which the whole picture has to arrive."""

_CHUNK_BYTES = 65536


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: the password would be sent to the other address, too."""

    def redirect_request(self, *_arguments: object, **_options: object) -> None:
        """Return None, which makes the request fail with the status of the redirect."""


class SnapshotSource:
    """An address that returns a new picture at each request."""

    needs_every_frame = False

    def __init__(self, address: str, timeout_s: float = _TIMEOUT_S) -> None:
        """Create a source.

        Args:
            address: The URL. A user and a password in it are sent with HTTP basic authentication.
            timeout_s: Seconds within which the whole picture has to arrive.

        Raises:
            UsageError: The address is not an HTTP URL with a host.
        """
        parts = urlsplit(address)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError(f"'{parts.scheme}://{parts.hostname or ''}' is not http://host/path or https://host/path")
        host = parts.hostname if parts.port is None else f"{parts.hostname}:{parts.port}"
        self._address = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
        # The name is shown: it has no user, no password, and no query, which may hold a token.
        self.name = urlunsplit((parts.scheme, host, parts.path, "", ""))
        self._headers = {"User-Agent": "headwater"}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(login).decode()}"
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(_NoRedirect)

    def open(self) -> None:
        """Do nothing: each picture is a request of its own."""

    def read(self, wait_s: float) -> Frame | None:  # noqa: ARG002 - a request has its own time limit
        """Fetch a picture.

        Raises:
            SourceLost: The answer is late, too large or an error.
        """
        deadline = time.monotonic() + self._timeout_s
        request = urllib.request.Request(self._address, headers=self._headers)  # noqa: S310 - only http and https
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                return Frame(_read_body(response, deadline))
        except urllib.error.HTTPError as error:
            error.close()
            raise SourceLost(f"it answers with status {error.code}") from error
        except (OSError, http.client.HTTPException) as error:
            raise SourceLost(f"it cannot be fetched: {getattr(error, 'reason', None) or error}") from error

    def close(self) -> None:
        """Release the opener; no connection is open between two pictures."""
        with contextlib.suppress(AttributeError):
            self._opener.close()


def _read_body(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """Return the body of a response.

    Args:
        response: The response.
        deadline: When the body has to be complete, in seconds of `time.monotonic`.

    Raises:
        SourceLost: The body is too large, or not complete by the deadline.
    """
    body = bytearray()
    # `read1` returns what has arrived. `read` would wait for a whole chunk, so that a server that sends a byte now and
    # then could hold this loop up for hours without the deadline being checked.
    while True:
        part = response.read1(_CHUNK_BYTES)
        if not part:
            return bytes(body)
        body += part
        if len(body) > _MOST_BYTES:
            raise SourceLost(f"it sends more than {_MOST_BYTES >> 20} MB; this is not a picture")
        if time.monotonic() > deadline:
            raise SourceLost("it sends too slowly")
