"""Pictures at an address, as IP cameras and other programs offer them: ``http(s)://host/snapshot.jpg``."""

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
_TIMEOUT_S = 10.0
"""Seconds within which a picture has to be there as a whole."""

_CHUNK_BYTES = 65536


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An address that leads elsewhere is no camera: the password would go there, too."""

    def redirect_request(self, *_arguments: object, **_options: object) -> None:
        """Follow no redirect."""


class SnapshotSource:
    """An address that gives another picture each time."""

    are_all_wanted = False

    def __init__(self, address: str, timeout_s: float = _TIMEOUT_S) -> None:
        """Name the address; a user and a password in it are sent by the basic scheme.

        Raises:
            UsageError: It is no address of HTTP.
        """
        parts = urlsplit(address)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError(f"'{parts.scheme}://{parts.hostname or ''}' is not http://host/path or https://host/path")
        host = parts.hostname if parts.port is None else f"{parts.hostname}:{parts.port}"
        self._address = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
        self.name = urlunsplit((parts.scheme, host, parts.path, "", ""))
        self._headers = {"User-Agent": "headwater"}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(login).decode()}"
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(_NoRedirect)

    def open(self) -> None:
        """Do nothing: each picture has its own request."""

    def read(self, wait_s: float) -> Frame | None:  # noqa: ARG002 - the address answers at once
        """Fetch a picture.

        Raises:
            SourceLost: The address does not answer in time, with an error, or with too much.
        """
        deadline = time.monotonic() + self._timeout_s
        request = urllib.request.Request(self._address, headers=self._headers)  # noqa: S310 - http and https alone
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                return Frame(_body_of(response, deadline))
        except urllib.error.HTTPError as error:
            error.close()
            raise SourceLost(f"it answers with status {error.code}") from error
        except (OSError, http.client.HTTPException) as error:
            raise SourceLost(f"it cannot be fetched: {getattr(error, 'reason', None) or error}") from error

    def close(self) -> None:
        """Do nothing: nothing is open between two pictures."""
        with contextlib.suppress(AttributeError):
            self._opener.close()


def _body_of(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """Return the body of a response, which has to be there by ``deadline`` and to end before the limit.

    Raises:
        SourceLost: It has not.
    """
    body = bytearray()
    # What has arrived is taken at once: waiting for a whole chunk, a byte now and then would hold this up for hours.
    while part := response.read1(_CHUNK_BYTES):
        body += part
        if len(body) > _MOST_BYTES:
            raise SourceLost(f"it sends more than {_MOST_BYTES >> 20} MB; this is no picture")
        if time.monotonic() > deadline:
            raise SourceLost("it sends too slowly")
    return bytes(body)
