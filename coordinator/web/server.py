"""The web view as a server: by 'headwater web', or as a child process of 'headwater serve', which restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edge_agent.core.errors import UsageError, cause
from edge_agent.core.storage import IDENTITY, read_regular_text

from ..config import CoordinatorConfig, WebConfig
from ..processes.pipe import Pipe
from ..processes.supervisor import ChildProcess, Supervisor, worker_command
from ..state.log_file import logging_to
from .access import Access, token_path

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15
END_S = 2
"""How long open requests may take at the end; streams end at once."""

VANISHED_S = 30
"""A client that acknowledges nothing for so long is gone, such as a laptop that was closed."""

NICENESS = 10
"""Beside a coordinator: pages may be late, rounds not."""

READY = "ready"


@dataclass(frozen=True)
class Settings:
    """What a server needs; as JSON it passes to a child process."""

    state: Path
    web: WebConfig
    config: Path | None = None
    """The coordinator's configuration, with whose [identity] agents are revoked and enrolled."""

    names: tuple[str, ...] = ()
    cert: Path | None = None
    """Certificate and key for TLS; None: without."""

    key: Path | None = None

    @classmethod
    def of(cls, config: CoordinatorConfig, web: WebConfig, file: Path | None) -> Settings:
        """Return those of a coordinator: on a network with its certificate, which 'headwater init' has made."""
        cert = web.cert
        names = [*web.hosts]
        if config.identity is not None:
            names.append(config.identity.host)
            if cert is None and not web.is_local and not web.insecure:
                cert = config.state / IDENTITY / "broker.pem"
        return cls(config.state, web, file if config.identity is not None else None, tuple(names), cert, web.key)

    def text(self) -> str:
        """Return the settings as JSON."""
        paths = {name: str(path) if (path := getattr(self, name)) else None for name in ("config", "cert", "key")}
        content = {"state": str(self.state), "web": self.web.model_dump(mode="json"), "names": self.names, **paths}
        return json.dumps(content)

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Return what `text` has made."""
        content = json.loads(text)
        paths = {name: Path(content[name]) if content[name] else None for name in ("config", "cert", "key")}
        web = WebConfig.model_validate(content["web"])
        return cls(Path(content["state"]), web, names=tuple(content["names"]), **paths)


def listening(web: WebConfig) -> socket.socket:
    """Return a socket at the address.

    Raises:
        UsageError: it is taken, or none of this machine.
    """
    host, port = web.address
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted sockets inherit it; without it, a quarter of an hour
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * VANISHED_S)
    except OSError as error:
        reason = cause(error).partition(" (while attempting")[0]  # Python adds the address once more
        raise UsageError(
            f"the web view cannot listen on {web.listen} ({reason}); choose another address with [web] listen, "
            "or --listen"
        ) from error
    return listener


def serve(settings: Settings, at: socket.socket, ready: Callable[[str], None], stop: threading.Event) -> None:
    """Serve until ``stop`` is set; ``ready`` gets the address when pages can be loaded."""
    import uvicorn

    from . import health, metrics
    from .app import ROUTES, make_app
    from .connections import MakingRoom
    from .events import Watch
    from .folder_view import FolderView
    from .served import Site

    host, port = at.getsockname()[:2]
    url = address(settings, port)
    view = FolderView(settings.state)
    site = Site(
        view,
        Watch(view),
        Access.of(settings.state)[0],
        names=frozenset(name.lower() for name in (*settings.names, settings.web.address[0], host)),
        is_secure=settings.cert is not None,
        enrolment=_enrolment(settings),
        cookie=f"headwater_{port}",  # ports of one host share their cookies
    )

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready(url)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await site.watch.end()
            await super().shutdown(sockets)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they belong to the command

    config = uvicorn.Config(
        make_app(site, [*ROUTES, *health.routes(settings.state), *metrics.routes(settings.state)]),
        log_config=None,
        log_level=logging.ERROR,  # it warns of each bad request, and anybody can send those
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        ws="none",
        loop="asyncio",
        http=MakingRoom,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=END_S,
        h11_max_incomplete_event_size=32768,
        ssl_certfile=settings.cert,
        ssl_keyfile=settings.key,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"the certificate {settings.cert} cannot be used ({cause(error)}); see [web] cert") from error
    server = Server(config)

    def end() -> None:
        stop.wait()
        server.should_exit = True

    threading.Thread(target=end, name="web-stop", daemon=True).start()
    asyncio.run(server.serve(sockets=[at]))


def address(settings: Settings, port: int) -> str:
    """Return the address of the first page, as a browser on this machine reaches it."""
    host = settings.web.address[0]
    host = (settings.names[0] if settings.names else "localhost") if host in {"0.0.0.0", "::"} else host  # noqa: S104 - compared, not bound
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if settings.cert is None else 'https'}://{shown}:{port}/"


def login_text(state: Path, url: str, *, is_new: bool) -> str:
    """Return how to sign in: once with an address that holds the token, later by the file that holds it."""
    if not token_path(state).exists():
        return "nobody can act: the state folder cannot be written"
    if is_new:
        token = read_regular_text(token_path(state), encoding="ascii").strip()
        return f"to act, sign in once by {url}login#{token}"
    return f"to act, sign in with the token in {token_path(state)}"


def _enrolment(settings: Settings) -> Callable[[], Any] | None:
    """Return what opens the federation's enrolment, with the configuration of that moment; None where there is none."""
    if settings.config is None:
        return None

    def opened() -> Any:
        from ..config import load_config
        from ..identity.enrolment import Enrolment

        config = load_config(settings.config, settings.state)
        if config.identity is None:
            raise UsageError(f"{settings.config} has no section [identity] any more")
        hosted = frozenset(client.id for client in config.hosted)
        return Enrolment(config.state, config.federation, config.identity, taken=hosted)

    return opened


# --- beside a coordinator --------------------------------------------------------------------------------------------


class WebProcess:
    """The web view as a child process, which is restarted when it exits and ends with its owner."""

    def __init__(self, settings: Settings, ready: Callable[[str], None]) -> None:
        """``ready`` gets the address when it serves, for the first time; in another thread."""
        self.url = ""
        self._settings = settings
        self._ready = ready
        self._reason = ""
        self._supervisor = Supervisor("web", self._spawn, self._serve, self._on_exit)

    @property
    def pid(self) -> int | None:
        """Its process id; None while there is none."""
        child = self._supervisor.child
        return None if child is None else child.pid

    def start(self) -> None:
        """Start it; it is not waited for, and started again until its address is free."""
        self._supervisor.start()

    def stop(self) -> None:
        """End the child process, and start it no more."""
        self._supervisor.stop()

    def _spawn(self) -> ChildProcess:
        path = self._settings.state / "web" / "web.log"
        return ChildProcess(worker_command(f"{__name__}:run_child", self._settings.text()), path)

    def _serve(self, child: ChildProcess) -> None:
        """Follow the child until its pipe ends; note the address at which it serves, which stays at a restart."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                frame = child.pipe.receive()
                if frame.topic == READY:
                    is_first = not self.url
                    self.url = frame.payload.decode()
                    if (port := urlsplit(self.url).port) is not None:  # one that was free stays, for open pages
                        host = self._settings.web.listen.rpartition(":")[0]
                        web = self._settings.web.model_copy(update={"listen": f"{host}:{port}"})
                        self._settings = replace(self._settings, web=web)
                    log.info("web_ready url=%s", self.url)
                    if is_first:
                        self._ready(self.url)

    def _on_exit(self, reason: str, pause_s: float) -> None:
        if reason != self._reason:
            log.warning("web_exited restart_s=%.1f reason=%s", pause_s, reason)
        self._reason = reason


def run_child(pipe: Pipe, settings: str) -> None:
    """Serve in the child process until the owner closes the pipe."""
    from ..processes.worker_main import listen

    parsed = Settings.parse(settings)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICENESS)
    try:
        at = listening(parsed.web)
    except UsageError as error:
        sys.exit(str(error))  # the owner logs it, and tries again
    listen(pipe, lambda _: None)
    logging.getLogger().handlers.clear()  # the file that has its output is bounded by nothing
    with logging_to(parsed.state / "web", ""):
        serve(parsed, at, lambda url: pipe.send(READY, url.encode()), threading.Event())
