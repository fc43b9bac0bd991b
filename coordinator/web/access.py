"""Who may act: a token in the state folder, sessions in cookies, and checks of where a request comes from.

Looking needs nothing. A session is signed with the token and kept nowhere, so it outlasts a restart of this process; a
new token ends all of them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from edge_agent.config import is_loopback
from edge_agent.errors import StateError, cause
from edge_agent.storage import write_private

TOKEN_BYTES = 32
SESSION_S = 12 * 3600.0
WRONG_AT_ONCE, WRONG_EVERY_S = 5, 30.0
"""Wrong tokens of one address in that time; further ones are not looked at. Of all addresses ten times as many."""

MOST_ADDRESSES = 1000


class Access:
    """The token of one state folder and what follows from it."""

    def __init__(self, token: str, now: Callable[[], float] = time.time) -> None:
        self._token, self._now = token, now

    @classmethod
    def of(cls, state: Path) -> tuple[Access | None, bool]:
        """That of a state folder, whose token is made where there is none, and whether it was made now.

        None: the folder cannot be written, and nobody may act.

        Raises:
            StateError: the token cannot be read.
        """
        path = token_path(state)
        try:
            if not path.exists():
                write_private(path, secrets.token_urlsafe(TOKEN_BYTES).encode() + b"\n")
                return cls(path.read_text("ascii").strip()), True
        except OSError:
            return None, False
        try:
            token = path.read_text("ascii").strip()
        except (OSError, ValueError) as error:
            raise StateError(f"{path}: cannot be read ({cause(error)}); remove it to have a new one made") from error
        if len(token) < TOKEN_BYTES:
            raise StateError(f"{path}: {len(token)} characters are no token; remove it to have a new one made")
        return cls(token), False

    @property
    def token(self) -> str:
        """The secret itself."""
        return self._token

    def is_token(self, given: str) -> bool:
        """Whether this is the token."""
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())

    def session(self) -> str:
        """A new session, for a cookie."""
        content = f"{int(self._now() + SESSION_S)}.{secrets.token_urlsafe(16)}"
        return f"{content}.{self._sign('session', content)}"

    def is_session(self, cookie: str) -> bool:
        """Whether a cookie is a session that has not ended."""
        content, _, signature = cookie[:200].rpartition(".")
        if not hmac.compare_digest(signature.encode(errors="replace"), self._sign("session", content).encode()):
            return False
        return int(content.partition(".")[0]) > self._now()

    def form_token(self, cookie: str) -> str:
        """What forms of this session carry, which no other site can know."""
        return self._sign("form", cookie)

    def is_form_token(self, given: str, cookie: str) -> bool:
        """Whether a form is of this session."""
        return hmac.compare_digest(given.encode(errors="replace"), self.form_token(cookie).encode())

    def _sign(self, purpose: str, content: str) -> str:
        message = f"{purpose} {content}".encode(errors="replace")
        return hmac.new(self._token.encode(), message, hashlib.sha256).hexdigest()


class WrongTokens:
    """Counts wrong tokens by the address that they came from."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: OrderedDict[str, list[float]] = OrderedDict()
        self._all: list[float] = []

    def are_too_many(self, address: str) -> bool:
        """Whether no further token of this address is looked at for now."""
        since = self._clock() - WRONG_EVERY_S
        self._all = [at for at in self._all if at > since]
        mine = [at for at in self._times.get(address, ()) if at > since]
        return len(mine) >= WRONG_AT_ONCE or len(self._all) >= 10 * WRONG_AT_ONCE

    def note(self, address: str) -> None:
        """One more."""
        now = self._clock()
        mine = [at for at in self._times.pop(address, ()) if at > now - WRONG_EVERY_S]
        self._times[address] = [*mine, now]
        self._all.append(now)
        if len(self._times) > MOST_ADDRESSES:
            self._times.popitem(last=False)


def token_path(state: Path) -> Path:
    """Where the token of a state folder is."""
    return state / "web" / "token"


def host_of(header: str) -> str:
    """The name or address in a ``Host`` header, without port and brackets; empty where it is none."""
    try:
        return (urlsplit(f"//{header}").hostname or "") if len(header) <= 300 else ""
    except ValueError:
        return ""


def is_known_host(header: str, names: frozenset[str]) -> bool:
    """Whether a request names this server: else a page of another site reaches it under that site's own name."""
    host = host_of(header)
    return host in names or is_loopback(host)


def is_own_origin(origin: str, host_header: str) -> bool:
    """Whether a form was sent by a page of this server. Behind a proxy with TLS the schemes differ."""
    try:
        given = urlsplit(origin)
    except ValueError:
        return False
    return given.scheme in {"http", "https"} and bool(given.netloc) and given.netloc.lower() == host_header.lower()
