"""The ASGI application: its routes, and what holds for every request.

`ROUTES` is the list to which other small routes are added, such as those for monitoring.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_agent.core.errors import HeadwaterError

from . import actions, pages
from .access import is_known_host
from .asset_files import assets
from .events import EventStream, Watch
from .render import warm
from .served import Site

log = logging.getLogger(__name__)

MOST_TARGET_BYTES = 8192
"""Longest path and query of a request."""

FOR_MONITORS = frozenset({"/live", "/ready", "/metrics"})
"""Answered by whatever name: they set nothing, and probes and Prometheus ask by the address of a pod."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    # With no-referrer browsers send forms with "Origin: null"; no other site learns anything by this one either.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)


class Guard:
    """Refuses requests for other hosts and over-long ones, and adds headers to every answer."""

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, unless it is for another host or over-long."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in HEADERS if pair[0] not in present)]
            await send(message)

        host = headers.get(b"host", b"").decode("latin-1")
        target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if scope["path"] not in FOR_MONITORS and not is_known_host(host, self._names):
            text = (
                "This server is not reached by that name. Use the address that it printed, or add the name to "
                "[web] hosts in the coordinator's configuration.\n"
            )
            await Response(text, 421, media_type="text/plain")(scope, receive, with_headers)
        elif target > MOST_TARGET_BYTES:
            text = f"This address has {target} bytes, at most {MOST_TARGET_BYTES} are read.\n"
            await Response(text, 414, media_type="text/plain")(scope, receive, with_headers)
        else:
            await self._app(scope, receive, with_headers)


async def too_busy(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a page for now."""
    response = Response("Too many requests are open; load this page again in a few seconds.\n", 503)
    response.headers["retry-after"] = "5"
    await response(scope, receive, send)


async def events(request: Request) -> Response:
    """Return the stream of a page."""
    watch: Watch = request.app.state.site.watch
    topic = request.query_params.get("topic", "fleet")[:400]
    seen = request.headers.get("last-event-id") or request.query_params.get("seen", "")
    return EventStream(watch.events(topic, seen))


async def asset(request: Request) -> Response:
    """Return a script, a style sheet or the icon; compressed, and kept by browsers as long as its hash is the same."""
    file = assets().get(request.path_params["name"])
    if file is None:
        raise HTTPException(404)
    is_current = request.query_params.get("v") == file.version
    headers = {"cache-control": "public, max-age=31536000, immutable" if is_current else "no-cache"}
    headers["vary"] = "accept-encoding"
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(file.content, media_type=file.media_type, headers=headers)
    return Response(file.packed, media_type=file.media_type, headers={**headers, "content-encoding": "gzip"})


ROUTES: list[Route] = [
    Route("/", pages.fleet),
    Route("/agent", pages.agent),
    Route("/runs", pages.runs),
    Route("/run", pages.run),
    Route("/report", pages.report),
    Route("/analysis/{run}/{name}", pages.analysis),
    Route("/compare", pages.compare),
    Route("/releases", pages.releases),
    Route("/bundles", pages.bundles),
    Route("/methods", pages.methods),
    Route("/login", actions.login, methods=["GET", "POST"]),
    Route("/logout", actions.logout, methods=["POST"]),
    Route("/act", actions.act, methods=["GET", "POST"]),
    Route("/events", events),
    Route("/assets/{name}", asset),
]


def make_app(site: Site, routes: list[Route] | None = None) -> Starlette:
    """Return the application for one state folder; it looks at the folder from its start on."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        looking = asyncio.create_task(site.watch.run())
        await asyncio.to_thread(warm)
        try:
            yield
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
            site.view.close()

    handlers: dict[Any, Callable[[Request, Exception], Response | Awaitable[Response]]] = {
        HTTPException: pages.failed,
        HeadwaterError: pages.failed,
        Exception: pages.failed,
    }
    app = Starlette(
        routes=ROUTES if routes is None else routes,
        middleware=[Middleware(Guard, names=site.names)],
        exception_handlers=handlers,
        lifespan=lifespan,
    )
    app.state.site = site
    return app
