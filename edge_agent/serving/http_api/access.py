"""Who may ask: a token, and checks of where a request comes from.

From this machine everybody may ask for answers; what changes the device's samples needs the token, also here, because
any page that a browser on this machine shows could otherwise send such a request. From other machines everything but
the page itself needs the token.
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
"""How many random bytes a token is made of."""

_OTHER_SITES = frozenset({"cross-site", "same-site"})
"""What a browser says in ``Sec-Fetch-Site`` of requests that pages of other origins cause."""

_SHORTEST = 16
"""How many letters a token has at least, also one that a person has chosen."""


def load_or_create_token(path: Path) -> str:
    """Return the token in a file, which is made where there is none, for its owner alone to read.

    Raises:
        StateError: The file cannot be read or written, or what is in it is too short.
    """
    try:
        if not path.exists():
            write_private(path, secrets.token_urlsafe(TOKEN_BYTES).encode() + b"\n")
        token = read_regular_text(path, encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: cannot be used ({cause(error)}); remove it to have a new token made") from error
    if len(token) < _SHORTEST:
        raise StateError(f"{path}: a token of {len(token)} letters is too short; expected {_SHORTEST} or more")
    return token


@dataclass(frozen=True)
class Guard:
    """Decides which requests are answered.

    Attributes:
        token: The secret.
        is_local: Whether only this machine reaches the server: a loopback address, or a Unix socket.
        hosts: Names besides addresses and ``localhost`` by which the server may be called.
    """

    token: str
    is_local: bool
    hosts: frozenset[str] = frozenset()

    def refuse(self, access: Access, headers: Mapping[str, str]) -> Response | None:
        """Return why a request with these header fields may not use a route; None: it may."""
        host = host_name(headers.get("host", ""))
        # A page of another site can make a browser call this server by a name of its own (DNS rebinding).
        if self.is_local and host and not (is_loopback(host) or host in self.hosts):
            message = f"this server is not called '{host}'; use localhost, or start it with --host-name {host}"
            return error_response(421, "WrongHost", message)
        if access is Access.OPEN:
            return None
        # Browsers say where a request comes from: by the origin where its answer could be read, else by this field.
        if headers.get("sec-fetch-site", "") in _OTHER_SITES:
            return error_response(403, "WrongOrigin", "pages of other sites may not ask this server")
        origin = headers.get("origin", "")
        if origin and _origin_host(origin) != headers.get("host", "").lower():
            return error_response(403, "WrongOrigin", f"pages of {origin} may not ask this server")
        if self.is_local and access is Access.ASK:
            return None
        return self._refuse_without_token(headers)

    def _refuse_without_token(self, headers: Mapping[str, str]) -> Response | None:
        """Return why the sender's token does not count; None: it is the right one."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        needs = (("WWW-Authenticate", 'Bearer realm="headwater"'),)
        if scheme.lower() != "bearer" or not given:
            message = "this needs the token that was printed at the start: 'Authorization: Bearer TOKEN'"
            return error_response(401, "NoToken", message, needs)
        if not hmac.compare_digest(given.strip().encode(errors="replace"), self.token.encode()):
            return error_response(401, "WrongToken", "this is not the token; it was printed at the start", needs)
        return None


def _origin_host(origin: str) -> str | None:
    """Return the name and port in an ``Origin`` header field, in lower case; None where it names none."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def host_name(header: str) -> str:
    """Return the name or address in a ``Host`` header field, in lower case, without port and brackets."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return "invalid"
