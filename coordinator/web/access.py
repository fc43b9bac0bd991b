"""Who may act: a token in the state folder, sessions in cookies, and checks of where a request comes from.

Looking needs nothing. A session is signed with the token, so it outlasts a restart of this process. A token that was
replaced or removed ends all of them at once; the sessions that people have ended are in the file ``ended``.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from edge_agent.core.config import is_loopback
from edge_agent.core.errors import StateError, cause
from edge_agent.core.storage import read_regular_text, write_private

TOKEN_BYTES = 32
SESSION_S = 12 * 3600.0
WRONG_AT_ONCE, WRONG_EVERY_S = 5, 30.0
"""Wrong tokens of one address in that time, beyond which it is asked to wait; of all addresses ten times as many."""

MOST_ADDRESSES = 1000
MOST_ENDED = 1000
"""Sessions that were ended by people before their time; only who has the token can add to them."""


class Access:
    """The token of one state folder and what follows from it."""

    def __init__(self, token: str, now: Callable[[], float] = time.time, path: Path | None = None) -> None:
        """``path``: the token's file, which is read again when it has changed."""
        self._token = token
        self._now = now
        self._path = path
        self._stamp = _stamp(path)
        self._ended = _read_ended(path)

    @classmethod
    def of(cls, state: Path) -> tuple[Access | None, bool]:
        """Open the token of a state folder, creating it on first use.

        Returns:
            The access object, None where the folder cannot be written, so that nobody may act; and whether the token is
            new.

        Raises:
            StateError: the token cannot be read.
        """
        path = token_path(state)
        try:
            if not path.exists():
                write_private(path, secrets.token_urlsafe(TOKEN_BYTES).encode() + b"\n")
                return cls(read_regular_text(path, encoding="ascii").strip(), path=path), True
        except OSError:
            return None, False
        try:
            token = read_regular_text(path, encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise StateError(f"{path}: cannot be read ({cause(error)}); remove it to have a new one made") from error
        if len(token) < TOKEN_BYTES:
            raise StateError(f"{path}: {len(token)} characters are no token; remove it to have a new one made")
        return cls(token, path=path), False

    @property
    def token(self) -> str:
        """The secret itself; empty while its file is gone or damaged, and then nobody can act."""
        if (stamp := _stamp(self._path)) != self._stamp:
            self._stamp = stamp
            self._token = ""
            with contextlib.suppress(OSError, ValueError):
                token = read_regular_text(self._path or Path(), encoding="ascii").strip()
                self._token = token if len(token) >= TOKEN_BYTES else ""
        return self._token

    def is_token(self, given: str) -> bool:
        """Return whether this is the token."""
        token = self.token
        return bool(token) and hmac.compare_digest(given.encode(errors="replace"), token.encode())

    def session(self) -> str:
        """Return a new session, for a cookie."""
        content = f"{int(self._now() + SESSION_S)}.{secrets.token_urlsafe(16)}"
        return f"{content}.{self._sign('session', content)}"

    def is_session(self, cookie: str) -> bool:
        """Return whether a cookie is a session that has not ended."""
        content, _, signature = cookie[:200].rpartition(".")
        if not self.token or cookie in self._ended:
            return False
        if not hmac.compare_digest(signature.encode(errors="replace"), self._sign("session", content).encode()):
            return False
        return int(content.partition(".")[0]) > self._now()

    def end(self, cookie: str) -> None:
        """End a session: its cookie counts no more, also after a restart."""
        self._ended = [*self._ended[1 - MOST_ENDED :], cookie]
        if self._path is not None:
            with contextlib.suppress(OSError):  # on a full disk it has ended until a restart
                lines = "".join(f"{session}\n" for session in self._ended)
                write_private(self._path.with_name("ended"), lines.encode())

    def form_token(self, cookie: str) -> str:
        """Return what forms of this session carry, which no other site can know."""
        return self._sign("form", cookie)

    def is_form_token(self, given: str, cookie: str) -> bool:
        """Return whether a form is of this session."""
        return hmac.compare_digest(given.encode(errors="replace"), self.form_token(cookie).encode())

    def _sign(self, purpose: str, content: str) -> str:
        message = f"{purpose} {content}".encode(errors="replace")
        return hmac.new(self.token.encode(), message, hashlib.sha256).hexdigest()


def _stamp(path: Path | None) -> tuple[int, ...]:
    with contextlib.suppress(OSError):
        if path is not None:
            status = path.stat()
            return status.st_mtime_ns, status.st_ino, status.st_size
    return ()


def _read_ended(path: Path | None) -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        if path is not None:
            return read_regular_text(path.with_name("ended"), encoding="ascii").splitlines()[-MOST_ENDED:]
    return []


class WrongTokens:
    """Counts wrong tokens by the address that they came from."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: OrderedDict[str, list[float]] = OrderedDict()
        self._all: list[float] = []

    def are_too_many(self, address: str) -> bool:
        """Return whether this address is asked to wait before another try."""
        since = self._clock() - WRONG_EVERY_S
        self._all = [at for at in self._all if at > since]
        mine = [at for at in self._times.get(address, ()) if at > since]
        return len(mine) >= WRONG_AT_ONCE or len(self._all) >= 10 * WRONG_AT_ONCE

    def note(self, address: str) -> None:
        """Count one more wrong token from an address."""
        now = self._clock()
        mine = [at for at in self._times.pop(address, ()) if at > now - WRONG_EVERY_S]
        self._times[address] = [*mine, now]
        self._all.append(now)
        if len(self._times) > MOST_ADDRESSES:
            self._times.popitem(last=False)


def token_path(state: Path) -> Path:
    """Return where the token of a state folder is."""
    return state / "web" / "token"


def host_of(header: str) -> str:
    """Return the name or address in a ``Host`` header, without port and brackets; empty where it is none."""
    try:
        return (urlsplit(f"//{header}").hostname or "") if len(header) <= 300 else ""
    except ValueError:
        return ""


def is_known_host(header: str, names: frozenset[str]) -> bool:
    """Return whether a request names this server: else a page of another site reaches it under that site's own name."""
    host = host_of(header)
    return host in names or is_loopback(host)


def is_own_origin(origin: str, host_header: str) -> bool:
    """Return whether a form was sent by a page of this server. Behind a proxy with TLS the schemes differ."""
    try:
        address = urlsplit(origin)
    except ValueError:
        return False
    is_web = address.scheme in {"http", "https"}
    return is_web and bool(address.netloc) and address.netloc.lower() == host_header.lower()
