"""A small HTTP server: bytes to requests and back, under limits of size, time and number.

Python's own server understands the header; a thread serves each connection. How many there may be, how long a request
may take to arrive, how large its header and body may be, and how much memory all bodies together may take is limited,
so that clients that hang up, never read, or send a byte a second cost nobody else anything.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import selectors
import socket
import socketserver
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from ...core.errors import HeadwaterError, UsageError, cause
from ...version import __version__
from .access import Guard
from .certificate import ServerCertificate
from .messages import Request, Response, Route, error_response, refused

log = logging.getLogger(__name__)

_MOST_LINE_BYTES = 16 << 10
"""The longest first line of a request."""

_MOST_HEADER_BYTES = 32 << 10
"""The largest header of a request, its first line included: every connection may hold so much before a token counts."""

_REST_S = 2.0
"""Seconds for which the rest of a request that was refused is taken."""

_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00\r\n]*\r?\n")
"""A line of a header. Others would be understood by a proxy in one way, and by this server in another one."""


@dataclass(frozen=True)
class HttpLimits:
    """What clients may take.

    Attributes:
        body_bytes: The largest body.
        all_bodies_bytes: The largest size of all bodies that are in memory at once.
        connections: The most connections at once.
        request_s: Seconds within which a request has to arrive, and its response has to be taken.
        idle_s: Seconds after which a connection without a request is closed.
    """

    body_bytes: int = 16 << 20
    all_bodies_bytes: int = 48 << 20
    connections: int = 64
    request_s: float = 30.0
    idle_s: float = 60.0


class BodyBudget:
    """How much memory the bodies of all requests may still take."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def take(self, size_bytes: int) -> Iterator[bool]:
        """Take memory for a body while the context lasts; yields whether there was enough."""
        with self._lock:
            is_enough = size_bytes <= self._left
            taken = size_bytes if is_enough else 0
            self._left -= taken
        try:
            yield is_enough
        finally:
            with self._lock:
                self._left += taken


class HttpServer:
    """Serves routes at an address until it is closed."""

    def __init__(
        self,
        address: tuple[str, int] | Path,
        routes: Iterable[Route],
        guard: Guard,
        limits: HttpLimits | None = None,
        tls: ServerCertificate | None = None,
    ) -> None:
        """Open the address; nothing is answered before `start`.

        Args:
            address: Host and port (0: any that is free), or the path of a Unix socket, which is made.
            routes: What is served.
            guard: Who may ask.
            limits: What clients may take.
            tls: The certificate and key of this server; None: without TLS.

        Raises:
            UsageError: The address is in use, does not exist here, or may not be used.
        """
        where = str(address) if isinstance(address, Path) else f"{address[0]}:{address[1]}"
        site = _Site(tuple(routes), guard, HttpLimits() if limits is None else limits, tls)
        try:
            if isinstance(address, Path):
                _remove_old_socket(address)
            self._server = _Connections(str(address) if isinstance(address, Path) else address, site)
        except OSError as error:
            raise UsageError(
                f"{where}: cannot be listened on: {cause(error)}; end the other program, or choose another address "
                "(--port, --host, --unix)"
            ) from error
        self._socket_path = address if isinstance(address, Path) else None
        self._socket_inode = None if self._socket_path is None else self._socket_path.stat().st_ino
        self._thread = threading.Thread(target=self._server.serve_until_ended, name="http", daemon=True)

    @property
    def port(self) -> int:
        """The TCP port; 0 for a Unix socket."""
        address: Any = self._server.server_address
        return int(address[1]) if isinstance(address, tuple) else 0

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Take no more requests, and release the address."""
        if self._thread.is_alive():
            self._server.end()
            self._thread.join()
        self._server.server_close()
        if self._socket_path is not None:
            self._remove_own_socket(self._socket_path)

    def _remove_own_socket(self, path: Path) -> None:
        """Remove the socket that was made here; what somebody has put in its place since stays."""
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == self._socket_inode:
                path.unlink()


def _remove_old_socket(path: Path) -> None:
    """Remove the socket of a program that has ended; one that answers, and other files, stay.

    Raises:
        OSError: A program listens there, or something else than a socket is there.
    """
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise FileExistsError(f"{path} is there already and no socket")
    except FileNotFoundError:
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(f"another program listens at {path}")


@dataclass(frozen=True)
class _Site:
    """What the threads of all connections share."""

    routes: tuple[Route, ...]
    guard: Guard
    limits: HttpLimits
    tls: ServerCertificate | None

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]] | Response:
        """Return the route of a path and what its braces stand for, or why there is none."""
        methods = []
        for route in self.routes:
            names = route.match(path)
            if names is None:
                continue
            if route.method == method or (method == "HEAD" and route.method == "GET"):
                return route, names
            methods.append(route.method)
        if not methods:
            return error_response(404, "NotFound", f"there is no {path}; '/' is the page, and lists what there is")
        allowed = ", ".join(methods)
        return error_response(405, "WrongMethod", f"{path} takes {allowed}, not {method}", (("Allow", allowed),))


class _Connections(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread for each connection, and a limit of their number."""

    allow_reuse_address = True
    request_queue_size = 128

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int] | str, site: _Site) -> None:
        """Listen at host and port, or at the path of a Unix socket.

        Raises:
            OSError: The address cannot be used.
        """
        self.site = site
        self.budget = BodyBudget(site.limits.all_bodies_bytes)
        self.places = threading.BoundedSemaphore(site.limits.connections)
        self._end_reader, self._end_writer = socket.socketpair()
        if isinstance(address, str):
            self.address_family = socket.AF_UNIX
        elif ":" in address[0]:
            self.address_family = socket.AF_INET6
        # Who may connect to a Unix socket is decided by its mode: its owner and group.
        before = os.umask(0o117)
        try:
            super().__init__(address, _Connection)  # type: ignore[arg-type]
        finally:
            os.umask(before)

    def serve_until_ended(self) -> None:
        """Serve until `end` is called; between two connections nothing wakes up, so that an idle device stays idle."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            selector.register(self._end_reader, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._end_reader in ready:
                    return
                self._handle_request_noblock()  # type: ignore[attr-defined]

    def end(self) -> None:
        """Make `serve_until_ended` return."""
        self._end_writer.sendall(b"x")

    def server_close(self) -> None:
        """Release the address."""
        super().server_close()
        self._end_reader.close()
        self._end_writer.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, or turn it away where there are too many."""
        if not self.places.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.settimeout(0.1)
                request.sendall(_TOO_MANY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started now; the place must not be lost for good
            self.places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Agree on a key where the connection is encrypted, and read its requests."""
        if self.site.tls is not None:
            request.settimeout(self.site.limits.request_s)
            request = self.site.tls.context().wrap_socket(request, server_side=True)
        try:
            _Connection(request, client_address, self)
        finally:
            if self.site.tls is not None:
                with contextlib.suppress(OSError):
                    request.close()

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        """Log a connection that has broken; one that its client has closed is no news."""
        log.debug("connection_broke reason=%s", sys.exc_info()[1])


_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class _TimedReader(io.RawIOBase):
    """A connection's incoming bytes, which have to arrive before a deadline as a whole."""

    def __init__(self, connection: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self._clock = clock
        self._deadline = float("inf")

    def allow(self, seconds: float) -> None:
        """Set the deadline to so many seconds from now."""
        self._deadline = self._clock() + seconds

    def readable(self) -> bool:
        """Return True: it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes.

        Raises:
            TimeoutError: The deadline has passed.
        """
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Connection(BaseHTTPRequestHandler):
    """Reads the requests of one connection, one after the other, and sends the responses."""

    protocol_version = "HTTP/1.1"
    server: _Connections

    def setup(self) -> None:
        """Prepare the connection; a response goes out in one piece."""
        self.connection = self.request
        self._timed = _TimedReader(self.connection)
        self.rfile = io.BufferedReader(self._timed)
        self.wfile = io.BytesIO()  # what the base class writes by itself, which is nothing
        if self.connection.family != getattr(socket, "AF_UNIX", None):
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def finish(self) -> None:
        """Release the buffer of the connection."""
        self.rfile.close()

    def handle_one_request(self) -> None:
        """Read one request and answer it; ends the connection where that fails."""
        limits = self.server.site.limits
        self.close_connection = True
        try:
            self._timed.allow(limits.idle_s)
            self.raw_requestline = self.rfile.readline(_MOST_LINE_BYTES + 1)
            self._timed.allow(limits.request_s)
            if not self.raw_requestline:
                return
            if len(self.raw_requestline) > _MOST_LINE_BYTES:
                self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)
                return
            fields = self._read_fields()
            if fields is not None and self._parse(fields):
                self._answer()
        except (TimeoutError, ConnectionError, ssl.SSLError):
            self.close_connection = True

    def _read_fields(self) -> bytes | None:
        """Return the lines of the header after the first, with the empty one that ends it; None: they were refused."""
        lines = []
        left_bytes = _MOST_HEADER_BYTES - len(self.raw_requestline)
        while True:
            line = self.rfile.readline(left_bytes + 1)
            left_bytes -= len(line)
            if left_bytes < 0:
                message = f"the header has more than {_MOST_HEADER_BYTES} bytes"
                self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)
                return None
            lines.append(line)
            if line in {b"", b"\n", b"\r\n"}:
                return b"".join(lines)
            if _FIELD.fullmatch(line) is None:
                self.send_error(HTTPStatus.BAD_REQUEST, f"the header has a line that is no field: {line[:60]!r}")
                return None

    def _parse(self, fields: bytes) -> bool:
        """Let the base class understand the header, and return whether it could; otherwise it has said why not."""
        connection = self.rfile
        self.rfile = io.BytesIO(fields)  # type: ignore[assignment,unused-ignore]
        try:
            return self.parse_request()
        finally:
            self.rfile = connection

    def handle_expect_100(self) -> bool:
        """Wait with the word to go on: whether the body is taken is decided first."""
        return True

    def _answer(self) -> None:
        """Find the route of the request, check who sends it, read its body, and send the response."""
        site = self.server.site
        target = self._target()
        if target is None:
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        match = site.find(self.command, target.path)
        if isinstance(match, Response):
            self._refuse(match)
            return
        route, names = match
        refusal = site.guard.refuse(route.access, headers)
        if refusal is not None:
            self._refuse(refusal)
            return
        # The size of a body is known before a byte of it is read.
        size = self._body_size(headers)
        if isinstance(size, Response):
            self._refuse(size)
            return
        with self.server.budget.take(size) as is_enough:
            if not is_enough:
                busy = (("Retry-After", "1"),)
                self._refuse(error_response(503, "Busy", "too many large requests at once; try again", busy))
                return
            # A client that asks before it sends much, as curl does, waits for this.
            if size and headers.get("expect", "").lower() == "100-continue":
                self._send_bytes(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = self.rfile.read(size)
            if len(body) < size:
                self.close_connection = True
                return
            request = Request(self.command, target.path, dict(parse_qsl(target.query)), headers, body, names)
            response = _handled(route, request)
        self._send(response)

    def _target(self) -> SplitResult | None:
        """Return the address that the request names; None: it names none or two, which it was told."""
        if len(self.headers.get_all("Host", [])) > 1:
            self.send_error(HTTPStatus.BAD_REQUEST, "Host is given more than once")
            return None
        try:
            return urlsplit(self.path)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST, "the first line of the request names no address")
            return None

    def _body_size(self, headers: dict[str, str]) -> int | Response:
        """Return how many bytes the body has, or why it is not read."""
        if "transfer-encoding" in headers:
            return error_response(411, "NoLength", "the body comes in chunks; send it with Content-Length")
        if len(self.headers.get_all("Content-Length", [])) > 1:  # a proxy may have gone by the other one
            return error_response(400, "NoLength", "Content-Length is given more than once")
        text = headers.get("content-length", "0").strip()
        if not (text.isascii() and text.isdigit()):
            return error_response(400, "NoLength", "Content-Length is no number")
        most = self.server.site.limits.body_bytes
        if len(text) > 12 or int(text) > most:
            return error_response(413, "TooLarge", f"the body has {text[:20]} bytes, at most {most} are taken")
        return int(text)

    def _refuse(self, response: Response) -> None:
        """Send a response to a request whose body is not read, which ends the connection where there is one."""
        has_body = self.headers.get("Content-Length", "0").strip() != "0" or "Transfer-Encoding" in self.headers
        self.close_connection = self.close_connection or has_body
        self._send(response)
        if has_body:
            self._take_rest()

    def _take_rest(self) -> None:
        """Take what a client goes on to send, and keep nothing: a close before would make it lose the response."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self._timed.allow(min(_REST_S, self.server.site.limits.request_s))
            while self.rfile.read1(65536):  # type: ignore[attr-defined,unused-ignore]
                pass

    def _send(self, response: Response) -> None:
        """Send a response in one piece, within the time that its reader has."""
        lines = [
            f"HTTP/1.1 {response.status} {_phrase(response.status)}",
            f"Server: headwater/{__version__}",
            f"Date: {self.date_time_string()}",
            f"Content-Type: {response.content_type}",
            f"Content-Length: {len(response.body)}",
            "X-Content-Type-Options: nosniff",
            "Cross-Origin-Resource-Policy: same-origin",
            "Cache-Control: no-store",
            *(f"{name}: {value}" for name, value in response.headers),
        ]
        if self.close_connection:
            lines.append("Connection: close")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        body = b"" if self.command == "HEAD" else response.body
        self._send_bytes(head + body)

    def _send_bytes(self, data: bytes) -> None:
        """Send bytes within the time that their reader has.

        Raises:
            OSError: The reader has gone, or has not taken them in time.
        """
        self.connection.settimeout(self.server.site.limits.request_s)
        self.connection.sendall(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send what the base class finds wrong with a request as JSON, and end the connection."""
        self.close_connection = True
        self.command = getattr(self, "command", None) or ""
        reason = explain or message or _phrase(code)
        with contextlib.suppress(OSError):
            self._send(error_response(code, "BadRequest", reason))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing: requests are counted by the metrics, and paths may hold anything."""


def _handled(route: Route, request: Request) -> Response:
    """Return the response of a route; whatever it raises becomes a response, too."""
    try:
        return route.handle(request)
    except HeadwaterError as error:
        return refused(error)
    except OSError as error:
        log.warning("request_failed path=%s reason=%s", route.pattern, cause(error))
        return error_response(507, "Disk", f"the device cannot write: {cause(error)}")
    except Exception:  # a bug must not end the connection of whoever met it without a word
        log.exception("request_broke path=%s", route.pattern)
        return error_response(500, "Bug", "this is a bug; the log of the server has its traceback")


def _phrase(status: int) -> str:
    """Return the words of a status code."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
