"""A server of single routes, without a model behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from serving_site import TOKEN

from edge_agent.serving.http_api.access import Guard
from edge_agent.serving.http_api.messages import Route
from edge_agent.serving.http_api.server import HttpLimits, HttpServer


@pytest.fixture
def serve_routes() -> Iterator[Callable[..., HttpServer]]:
    """A function that starts a server of some routes; all of them are closed at the end."""
    running: list[HttpServer] = []

    def start(
        routes: Sequence[Route], limits: HttpLimits | None = None, *, is_local: bool = True, address=("127.0.0.1", 0)
    ) -> HttpServer:
        server = HttpServer(address, routes, Guard(TOKEN, is_local), limits)
        running.append(server)
        server.start()
        return server

    yield start
    for server in running:
        server.close()
