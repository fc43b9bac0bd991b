"""One stream of server-sent events a page: it says only that there is news, and the page fetches itself again.

So nothing is queued for a slow client: it misses numbers, never news. A client that takes nothing is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .folder_view import FolderView

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Pause between two looks at the state folder while somebody watches."""

PING_EVERY_S = 15.0
"""Longest silence of a stream: proxies end silent ones, and a client that has vanished is noticed by what is sent."""

SEND_TIMEOUT_S = 20.0
LONGEST_S = 3600.0
"""A stream ends after an hour, and the browser begins another one."""

MOST_STREAMS = 64


class Watch:
    """Looks at the state folder while streams are open, and wakes them up."""

    def __init__(self, view: FolderView) -> None:
        self.view = view
        self.streams = 0
        self.stop = asyncio.Event()
        self._topics = Counter[str]()
        self._versions: dict[str, str] = {}
        """Topic -> version at the last look: the loop that serves all requests never waits for the view's lock."""

        self._news = asyncio.Condition()
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled; without streams it looks only when a page asks for it."""
        self._wanted.set()  # what is there now is read before the first page comes
        while True:
            has_more = True
            while has_more:
                has_more = await asyncio.to_thread(self._refresh)
            versions = await asyncio.to_thread(self._current, [*self._topics])
            if versions != self._versions:
                self._versions = versions
                async with self._news:
                    self._news.notify_all()
            if not self.streams:
                self._wanted.clear()
                await self._wanted.wait()
            else:
                await asyncio.sleep(LOOK_EVERY_S)

    def wake(self) -> None:
        """Look at the state folder soon, also where nobody watches."""
        self._wanted.set()

    async def end(self) -> None:
        """End all streams at once."""
        self.stop.set()
        async with self._news:
            self._news.notify_all()

    async def events(self, topic: str, seen: str) -> AsyncGenerator[bytes]:
        """Yield the stream of one page, whose content is of version ``seen``; empty where there are too many."""
        loop = asyncio.get_running_loop()
        until = loop.time() + LONGEST_S
        if self.streams >= MOST_STREAMS:
            return
        self.streams += 1
        self._topics[topic] += 1
        self.wake()
        try:
            yield b"retry: 1000\n\n"
            self._versions[topic] = await asyncio.to_thread(self.view.version, topic)
            ping_at = loop.time() + PING_EVERY_S
            while not self.stop.is_set() and loop.time() < until:
                piece = b": ping\n\n" if loop.time() >= ping_at else b""
                if (version := self._versions.get(topic, seen)) != seen:
                    seen = version
                    piece = f"event: news\nid: {version}\ndata: {version}\n\n".encode()
                if piece:
                    ping_at = loop.time() + PING_EVERY_S
                    yield piece
                    continue  # what has happened meanwhile woke nobody
                async with self._news:
                    if self.stop.is_set() or self._versions.get(topic, seen) != seen:
                        continue
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._news.wait(), ping_at - loop.time())
        finally:
            self.streams -= 1
            self._topics[topic] -= 1
            self._topics += Counter()  # without those that are at zero

    def _current(self, topics: list[str]) -> dict[str, str]:
        return {topic: self.view.version(topic) for topic in topics}

    def _refresh(self) -> bool:
        try:
            return self.view.refresh()
        except Exception:  # a mistake here ends no stream; the next look may succeed
            log.exception("state_not_read path=%s", self.view.path)
            return False


class EventStream(Response):
    """A stream that ends when its client leaves, or does not take what is sent within `SEND_TIMEOUT_S`."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it to its end."""
        tasks = set[asyncio.Task[None]]()
        try:
            # Up to its first piece nothing is waited for, so of many that come at once each one is counted.
            first = await anext(self._content, None)
            if first is None:
                full = Response(f"{MOST_STREAMS} pages are open; close one.\n", 503, {"retry-after": "30"})
                await full(scope, receive, send)
                return
            tasks = {asyncio.create_task(self._sent(first, send)), asyncio.create_task(_left(receive))}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._content.aclose()

    async def _sent(self, first: bytes, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _send_piece(first, send)
        async for piece in self._content:
            await _send_piece(piece, send)
        await send({"type": "http.response.body", "body": b""})


async def _send_piece(piece: bytes, send: Send) -> None:
    """Send a part of a stream; TimeoutError where the client does not take it."""
    message = {"type": "http.response.body", "body": piece, "more_body": True}
    await asyncio.wait_for(send(message), SEND_TIMEOUT_S)


async def _left(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
