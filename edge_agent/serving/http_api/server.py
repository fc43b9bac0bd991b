"""A small HTTP server: it parses requests and sends responses, with limits of size, time and number.

Each connection has a thread, and Python's `http.server` parses the headers. Limited are the number of connections, the
time in which a request has to arrive, the size of its header and its body, and the memory of all bodies together. So a
client that hangs up, never reads, or sends one byte a second does not affect others.
"""

from __future__ import annotations

import contextlib
import errno
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

from ...core.errors import HeadwaterError, UsageError, cause, remedy
from ...version import __version__
from .access import Guard
from .certificate import ServerCertificate
from .messages import Access, Request, Response, Route, error_response, response_to_error
from .slots import Slot, Slots

log = logging.getLogger(__name__)

_MOST_LINE_BYTES = 16 << 10
"""The longest first line of a request."""

_MOST_HEADER_BYTES = 32 << 10
"""The largest header of a request, with its first line. Every connection may use that much memory without a token."""

_DISCARD_S = 2.0
"""Seconds for which the rest of a refused request is read and discarded."""

_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00\r\n]*\r?\n")
"""A valid line of a header. Others are refused, because a proxy in front might parse them in another way."""


@dataclass(frozen=True)
class HttpLimits:
    """The resources that clients may use.

    Attributes:
        body_bytes: The largest body of a request.
        all_bodies_bytes: The memory for the bodies of all requests at the same time.
        connections: The most connections at the same time.
        request_s: Seconds within which a request has to arrive, and within which its response has to be read.
        idle_s: Seconds without a request after which a connection is closed.
    """

    body_bytes: int = 16 << 20
    all_bodies_bytes: int = 48 << 20
    connections: int = 64
    request_s: float = 30.0
    idle_s: float = 60.0


class BodyBudget:
    """The memory that is left for the bodies of all requests."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def take(self, size_bytes: int) -> Iterator[bool]:
        """Reserve memory for a body while the context lasts; yield whether there was enough."""
        with self._lock:
            is_enough = size_bytes <= self._left
            reserved = size_bytes if is_enough else 0
            self._left -= reserved
        try:
            yield is_enough
        finally:
            with self._lock:
                self._left += reserved


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
            address: Host and port (0: any free one), or the path of a Unix socket, which is created.
            routes: The routes to serve.
            guard: Decides which requests are allowed.
            limits: The resources that clients may use; None: the defaults.
            tls: The certificate and key of this server; None: without TLS.

        Raises:
            UsageError: The address is in use, does not exist on this machine, or needs other rights.
        """
        where = str(address) if isinstance(address, Path) else f"{address[0]}:{address[1]}"
        shared = _SharedSettings(tuple(routes), guard, HttpLimits() if limits is None else limits, tls)
        try:
            if isinstance(address, Path):
                _remove_old_socket(address)
            self._server = _ConnectionServer(str(address) if isinstance(address, Path) else address, shared)
        except OSError as error:
            raise UsageError(f"{where}: cannot be listened on: {cause(error)}; {_advice(address, error)}") from error
        self._socket_path = address if isinstance(address, Path) else None
        self._socket_inode = None if self._socket_path is None else self._socket_path.stat().st_ino
        self._thread = threading.Thread(target=self._server.serve_until_stopped, name="http", daemon=True)

    @property
    def port(self) -> int:
        """The TCP port; 0 for a Unix socket."""
        address: Any = self._server.server_address
        return int(address[1]) if isinstance(address, tuple) else 0

    def start(self) -> None:
        """Start to answer requests."""
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections, and release the address."""
        if self._thread.is_alive():
            self._server.stop()
            self._thread.join()
        self._server.server_close()
        if self._socket_path is not None:
            self._remove_own_socket(self._socket_path)

    def _remove_own_socket(self, path: Path) -> None:
        """Remove the socket that this server has created; a file that has replaced it since stays."""
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == self._socket_inode:
                path.unlink()


def _advice(address: tuple[str, int] | Path, error: OSError) -> str:
    """Return what to do about an address that cannot be listened on."""
    is_in_use = error.errno == errno.EADDRINUSE
    if isinstance(address, Path):
        if is_in_use:
            return "end the other program, or name another path (--unix)"
        if isinstance(error, FileNotFoundError):
            return f"create the folder {address.parent}, or name another path (--unix)"
        return remedy(error) or "name another path (--unix)"
    if is_in_use:
        return "end the other program, or choose another port (--port)"
    if isinstance(error, PermissionError):
        return "choose a port from 1024 on (--port)"
    # The name is unknown, or its address is of another machine.
    return "name an address of this machine (--host): 127.0.0.1 for programs here, 0.0.0.0 for other machines, too"


def _remove_old_socket(path: Path) -> None:
    """Remove the socket of a program that has ended. A socket that is in use and files of another kind stay.

    Raises:
        OSError: A program listens on the socket, or the file is not a socket.
    """
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise FileExistsError(errno.EEXIST, "there is a file, which is not a socket")
    except FileNotFoundError:
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, "another program listens there")


@dataclass(frozen=True)
class _SharedSettings:
    """The settings that the threads of all connections share."""

    routes: tuple[Route, ...]
    guard: Guard
    limits: HttpLimits
    tls: ServerCertificate | None

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]] | Response:
        """Return the route of a request and the parts of its path; or, if there is none, the response 404 or 405."""
        other_methods = []
        for route in self.routes:
            names = route.match(path)
            if names is None:
                continue
            if route.method == method or (method == "HEAD" and route.method == "GET"):
                return route, names
            other_methods.append(route.method)
        if not other_methods:
            return error_response(404, "NotFound", f"there is no {path}; open the page at '/'")
        allowed = ", ".join(other_methods)
        return error_response(405, "WrongMethod", f"{path} accepts {allowed}, not {method}", (("Allow", allowed),))


class _ConnectionServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Accepts connections, and serves each in a thread of its own, up to a limit of their number."""

    allow_reuse_address = True
    request_queue_size = 128

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int] | str, shared: _SharedSettings) -> None:
        """Listen at host and port, or at the path of a Unix socket.

        Raises:
            OSError: The address cannot be used.
        """
        self.shared = shared
        self.budget = BodyBudget(shared.limits.all_bodies_bytes)
        self.slots = Slots(shared.limits.connections)
        self._stop_reader, self._stop_writer = socket.socketpair()
        if isinstance(address, str):
            self.address_family = socket.AF_UNIX
        elif ":" in address[0]:
            self.address_family = socket.AF_INET6
        # The mode of a Unix socket decides who may connect: here its owner and its group.
        before = os.umask(0o117)
        try:
            super().__init__(address, _RequestHandler)  # type: ignore[arg-type]
        finally:
            os.umask(before)

    def serve_until_stopped(self) -> None:
        """Accept connections until `stop` is called.

        Unlike `serve_forever` of the base class it does not poll, so that an idle device stays idle.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            selector.register(self._stop_reader, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._stop_reader in ready:
                    return
                self._handle_request_noblock()  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Let `serve_until_stopped` return."""
        self._stop_writer.sendall(b"x")

    def server_close(self) -> None:
        """Release the address."""
        super().server_close()
        self._stop_reader.close()
        self._stop_writer.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own; if no slot can be had for it, send 503 and close it."""
        if not self.slots.take():
            with contextlib.suppress(OSError):
                request.settimeout(0.1)
                request.sendall(_TOO_MANY_CONNECTIONS)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started, so nothing else would leave the slot
            self.slots.leave()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.leave()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the TLS handshake if the server uses TLS, and serve the requests of the connection."""
        tls = self.shared.tls
        if tls is not None:
            request.settimeout(self.shared.limits.request_s)
            # The handshake comes later, so that the connection is among the idle ones by then.
            request = tls.context().wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        try:
            with self.slots.hold(request) as slot:
                if tls is not None:
                    request.do_handshake()
                _RequestHandler(request, client_address, self, slot)
        finally:
            if tls is not None:
                with contextlib.suppress(OSError):
                    request.close()

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        """Log the error of a connection at debug level: clients that hang up are normal."""
        log.debug("connection_broke reason=%s", sys.exc_info()[1])


_TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class _TimedReader(io.RawIOBase):
    """Reads from a connection until a deadline.

    A timeout of the socket would only limit each single read, so that a client could send a byte now and then for ever.
    """

    def __init__(self, connection: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self._clock = clock
        self._deadline = float("inf")

    def set_deadline(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now."""
        self._deadline = self._clock() + seconds

    def readable(self) -> bool:
        """Return True, which `io.BufferedReader` asks for."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the bytes that have arrived into ``buffer``, and return their number; wait if there are none yet.

        Raises:
            TimeoutError: The deadline has passed.
        """
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _RequestHandler(BaseHTTPRequestHandler):
    """Reads the requests of one connection, one after the other, and sends the responses."""

    protocol_version = "HTTP/1.1"
    server: _ConnectionServer

    def __init__(self, request: Any, client_address: Any, server: _ConnectionServer, slot: Slot) -> None:
        """Serve all requests of the connection in this slot."""
        self._slot = slot
        super().__init__(request, client_address, server)

    def setup(self) -> None:
        """Prepare the connection. Responses are sent by `_send`, each in one piece."""
        self.connection = self.request
        self._reader = _TimedReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)
        self.wfile = io.BytesIO()  # the base class expects one; nothing is written to it
        # A response is one piece, so waiting for more bytes to fill a packet would only delay it.
        if self.connection.family != getattr(socket, "AF_UNIX", None):
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def finish(self) -> None:
        """Release the buffer of the connection."""
        self.rfile.close()

    def handle_one_request(self) -> None:
        """Read one request and answer it. If that fails, or the client wants it, the connection ends afterwards."""
        limits = self.server.shared.limits
        self.close_connection = True
        try:
            self._reader.set_deadline(limits.idle_s)
            self.raw_requestline = self.rfile.readline(_MOST_LINE_BYTES + 1)
            self._reader.set_deadline(limits.request_s)
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
        """Return the lines of the header after the first one, up to the empty line; None if they were refused.

        The base class would read them without a limit of their size, and accept lines that are not fields.
        """
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
                self.send_error(HTTPStatus.BAD_REQUEST, f"the header has a line that is not a field: {line[:60]!r}")
                return None

    def _parse(self, fields: bytes) -> bool:
        """Let the base class parse the header, and return whether it was valid; if not, an error was sent."""
        # The base class reads from `rfile`, so that holds the lines that were read while it parses them.
        connection = self.rfile
        self.rfile = io.BytesIO(fields)  # type: ignore[assignment,unused-ignore]
        try:
            return self.parse_request()
        finally:
            self.rfile = connection

    def handle_expect_100(self) -> bool:
        """Send no 100 yet: `_answer` sends it after it has decided to read the body."""
        return True

    def _answer(self) -> None:
        """Answer the request whose header was read: route and access, then the rest."""
        shared = self.server.shared
        target = self._target()
        if target is None:
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        # 1. The route.
        match = shared.find(self.command, target.path)
        if isinstance(match, Response):
            self._refuse(match)
            return
        route, names = match
        # 2. Access.
        refusal = shared.guard.refuse(route.access, headers)
        if refusal is not None:
            self._refuse(refusal)
            return
        with contextlib.ExitStack() as stack:
            if route.access is not Access.OPEN:
                stack.enter_context(self.server.slots.asking(self._slot))
            self._answer_allowed(route, names, target, headers)

    def _answer_allowed(
        self, route: Route, names: dict[str, str], target: SplitResult, headers: dict[str, str]
    ) -> None:
        """Answer a request that is allowed: body, response."""
        # 3. The body. Its size is checked, and its memory reserved, before a byte of it is read.
        size = self._body_size(headers)
        if isinstance(size, Response):
            self._refuse(size)
            return
        with self.server.budget.take(size) as is_enough:
            if not is_enough:
                retry_after = (("Retry-After", "1"),)
                self._refuse(error_response(503, "Busy", "too many large requests at once; try again", retry_after))
                return
            # Clients such as curl wait for this before they send a large body.
            if size and headers.get("expect", "").lower() == "100-continue":
                self._send_bytes(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = self.rfile.read(size)
            if len(body) < size:  # the client has hung up
                self.close_connection = True
                return
            request = Request(self.command, target.path, dict(parse_qsl(target.query)), headers, body, names)
            response = _call_handler(route, request)
        self._send(response)

    def _target(self) -> SplitResult | None:
        """Return the parts of the requested URL; None if the URL or the host is invalid, and an error was sent."""
        if len(self.headers.get_all("Host", [])) > 1:
            self.send_error(HTTPStatus.BAD_REQUEST, "Host is given more than once")
            return None
        try:
            return urlsplit(self.path)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST, "the first line of the request has no valid URL")
            return None

    def _body_size(self, headers: dict[str, str]) -> int | Response:
        """Return the size of the body in bytes, or the response that refuses it."""
        if "transfer-encoding" in headers:
            return error_response(411, "NoLength", "the body comes in chunks; send it with Content-Length")
        if len(self.headers.get_all("Content-Length", [])) > 1:  # a proxy in front may have used the other value
            return error_response(400, "NoLength", "Content-Length is given more than once")
        text = headers.get("content-length", "0").strip()
        if not (text.isascii() and text.isdigit()):
            return error_response(400, "NoLength", "Content-Length is not a number")
        most = self.server.shared.limits.body_bytes
        if len(text) > 12 or int(text) > most:
            return error_response(413, "TooLarge", f"the body has {text[:20]} bytes, at most {most} are accepted")
        return int(text)

    def _refuse(self, response: Response) -> None:
        """Send a response without reading the body. If there is a body, the connection ends: it cannot be reused."""
        has_body = self.headers.get("Content-Length", "0").strip() != "0" or "Transfer-Encoding" in self.headers
        self.close_connection = self.close_connection or has_body
        self._send(response)
        if has_body:
            self._discard_rest()

    def _discard_rest(self) -> None:
        """Read and discard the rest of a request for a while.

        If the connection were closed while the client is sending, the client would lose the response.
        """
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self._reader.set_deadline(min(_DISCARD_S, self.server.shared.limits.request_s))
            while self.rfile.read1(65536):  # type: ignore[attr-defined,unused-ignore]
                pass

    def _send(self, response: Response) -> None:
        """Send a response in one piece. The client has to read it within the time limit of a request."""
        lines = [
            f"HTTP/1.1 {response.status} {_reason_phrase(response.status)}",
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
        """Send bytes within the time limit of a request.

        Raises:
            OSError: The client has gone, or has not read the bytes in time.
        """
        self.connection.settimeout(self.server.shared.limits.request_s)
        self.connection.sendall(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error that the base class has found in a request as JSON, and end the connection."""
        self.close_connection = True
        self.command = getattr(self, "command", None) or ""
        reason = explain or message or _reason_phrase(code)
        with contextlib.suppress(OSError):
            self._send(error_response(code, "BadRequest", reason))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing: the metrics count requests, and a path may contain anything."""


def _call_handler(route: Route, request: Request) -> Response:
    """Return the response of a route. Every error that it raises is turned into a response."""
    try:
        return route.handle(request)
    except HeadwaterError as error:
        return response_to_error(error)
    except OSError as error:
        log.warning("request_failed path=%s reason=%s", route.pattern, cause(error))
        return error_response(507, "Disk", f"the device cannot write: {cause(error)}")
    except Exception:  # a bug must not end the connection without a response
        log.exception("request_broke path=%s", route.pattern)
        return error_response(500, "Bug", "this is a bug; the log of the server has its traceback")


def _reason_phrase(status: int) -> str:
    """Return the reason phrase of a status code, such as ``Not Found``."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
