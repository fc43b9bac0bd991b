"""Access control: a token, and checks of where a request comes from.

Clients on this machine may ask for answers without the token. Requests that change the device's samples need it on this
machine, too: otherwise any web page in a browser here could send such a request. Clients on other machines need the
token for everything but the page itself and the health checks.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ...core.config import is_loopback
from ...core.errors import StateError, cause
from ...core.storage import read_regular_text, write_private
from .messages import Access, Response, error_response

TOKEN_BYTES = 24
"""The number of random bytes in a new token."""

_OTHER_SITES = frozenset({"cross-site", "same-site"})
"""The values of ``Sec-Fetch-Site`` that browsers send with requests caused by pages of other origins."""

_SHORTEST = 16
"""The least number of characters in a token. It matters for tokens that a person has chosen."""


def load_or_create_token(path: Path) -> str:
    """Return the token in a file. If the file is missing, create it with a new token, readable by its owner only.

    Raises:
        StateError: The file cannot be read or written, or its token is too short.
    """
    try:
        if not path.exists():
            write_private(path, secrets.token_urlsafe(TOKEN_BYTES).encode() + b"\n")
        token = read_regular_text(path, encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: cannot be used ({cause(error)}); remove it, and a new token is created") from error
    if len(token) < _SHORTEST:
        raise StateError(f"{path}: a token of {len(token)} characters is too short; expected {_SHORTEST} or more")
    return token


@dataclass(frozen=True)
class Guard:
    """Decides which requests are allowed.

    Attributes:
        token: The secret that clients send.
        is_local: Whether only this machine can reach the server: by a loopback address, or a Unix socket.
        hosts: Names by which clients may address the server, besides loopback addresses and ``localhost``.
    """

    token: str
    is_local: bool
    hosts: frozenset[str] = frozenset()

    def refuse(self, access: Access, headers: Mapping[str, str]) -> Response | None:
        """Return the response that refuses a request; None if the request is allowed.

        Args:
            access: Who is allowed to use the route.
            headers: The header fields of the request, by their names in lower case.
        """
        host = host_name(headers.get("host", ""))
        # 1. The host name. A hostile page can let its own name point to this machine (DNS rebinding), so that the
        # browser sends its requests here as if they were to the page's own server.
        if self.is_local and host and not (is_loopback(host) or host in self.hosts):
            message = f"this server is not called '{host}'; use localhost, or start it with --host-name {host}"
            return error_response(421, "WrongHost", message)
        if access is Access.OPEN:
            return None
        # 2. The page that has caused the request, which browsers name in one of these two header fields.
        if headers.get("sec-fetch-site", "") in _OTHER_SITES:
            return error_response(403, "WrongOrigin", "pages of other sites may not ask this server")
        origin = headers.get("origin", "")
        if origin and _origin_host(origin) != headers.get("host", "").lower():
            return error_response(403, "WrongOrigin", f"pages of {origin} may not ask this server")
        # 3. The token.
        if self.is_local and access is Access.ASK:
            return None
        return self._refuse_without_token(headers)

    def _refuse_without_token(self, headers: Mapping[str, str]) -> Response | None:
        """Return the response that refuses a request without the right token; None if it has that token."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        challenge = (("WWW-Authenticate", 'Bearer realm="headwater"'),)
        if scheme.lower() != "bearer" or not token:
            message = "this needs the token that was printed at the start: 'Authorization: Bearer TOKEN'"
            return error_response(401, "NoToken", message, challenge)
        if not hmac.compare_digest(token.strip().encode(errors="replace"), self.token.encode()):
            return error_response(401, "WrongToken", "this is not the token; it was printed at the start", challenge)
        return None


def _origin_host(origin: str) -> str | None:
    """Return the name and port in an ``Origin`` header field, in lower case; None where it names none."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def host_name(header: str) -> str:
    """Return the name or address in a ``Host`` header field, in lower case, without port and brackets.

    A malformed field gives ``invalid``, which is not the name of any server.
    """
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return "invalid"
