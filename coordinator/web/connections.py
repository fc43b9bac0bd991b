"""Connections of the web view: how many there may be, how long a request may take to arrive, and who makes room.

Whoever reaches the port can open connections. None of them costs others their answers: what is unfinished is closed
when others come, and after a time by itself; probes and monitors are answered also where pages are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import h11
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import FOR_MONITORS, too_busy

MOST_CONNECTIONS = 256
"""Beyond so many, pages are refused; probes and monitors are answered all the same."""

SPARE_CONNECTIONS = 64
"""More that are taken for probes where no other connection makes room; any beyond these are closed."""

REQUEST_S = 10.0
"""How long a request may take to arrive, its head and its body; forms are the largest, with a few hundred bytes."""


class MakingRoom(H11Protocol):
    """HTTP where connections that wait for their peer make room for new ones, and a request has `REQUEST_S` to arrive.

    A peer is waited for while it has sent no request, or a part of one, head or body, and while it does not read its
    answer. Connections that wait for this program are never closed: there are as many as it has work.
    """

    waits_since = 0.0
    """When the peer began to be waited for, in the loop's time."""

    request_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.every_page = self.app
        self.app = self.answer

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; pages are refused while there is too much to do, probes are not."""
        is_page = scope["path"] not in FOR_MONITORS
        # Each connection has one request at a time; those of closed connections are ending and do not count.
        is_overloaded = len(self.connections) > MOST_CONNECTIONS
        if is_page and is_overloaded:
            await too_busy(scope, receive, send)
            return
        with contextlib.suppress(ClientDisconnect):  # also where this side has closed it: no news for the log
            await self.every_page(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection; of too many, those that wait for their peer for the longest time are closed."""
        super().connection_made(transport)
        self.waits_since = self.loop.time()
        self._limit_request()
        surplus = len(self.connections) - MOST_CONNECTIONS
        if surplus <= 0:
            return
        others = [peer for peer in self.connections if isinstance(peer, MakingRoom) and peer is not self]
        waiting = [peer for peer in others if peer.waits_for_peer()]
        waiting.sort(key=lambda peer: peer.waits_since)
        for peer in waiting[:surplus]:
            peer.close()
        if len(self.connections) > MOST_CONNECTIONS + SPARE_CONNECTIONS:
            self.close()

    def waits_for_peer(self) -> bool:
        """Return whether nothing happens here until the peer sends, or reads, something."""
        if getattr(self.cycle, "response_complete", True):  # None: no request yet
            return True
        return self.cycle.more_body or self.flow.write_paused

    def close(self) -> None:
        """Close the connection; it counts no more from now on."""
        self._lift_limit()
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request; its time ends with its last part."""
        super().data_received(data)
        if self.conn.their_state not in {h11.IDLE, h11.SEND_BODY}:  # all of the request is here
            self._lift_limit()
            self.waits_since = self.loop.time()
        elif self.request_timer is None:  # the first part of another request; later parts get no more time
            self._limit_request()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        # The head of the next request may have come with the one before, and its body may never come.
        if self.conn.their_state is h11.SEND_BODY and self.request_timer is None:
            self._limit_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget this connection, which has ended."""
        self._lift_limit()
        super().connection_lost(exc)

    def _limit_request(self) -> None:
        self.request_timer = self.loop.call_later(REQUEST_S, self.close)

    def _lift_limit(self) -> None:
        if self.request_timer is not None:
            self.request_timer.cancel()
            self.request_timer = None
