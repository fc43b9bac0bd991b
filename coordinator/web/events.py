"""One stream of server-sent events a page: it says only that there is news, and the page fetches itself again.

So nothing is queued for a slow client: it misses numbers, never news. A client that takes nothing is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from .folder_view import FolderView

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Pause between two looks at the state folder while somebody watches."""

PING_EVERY_S = 15.0
"""Proxies end streams that are silent for long."""

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
        self._news = asyncio.Condition()
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled; without streams it looks only when a page asks for it."""
        self._wanted.set()  # what is there now is read before the first page comes
        while True:
            has_more = True
            while has_more:
                has_more = await asyncio.to_thread(self._refresh)
            async with self._news:
                self._news.notify_all()
            if not self.streams:
                self._wanted.clear()
                await self._wanted.wait()
            else:
                await asyncio.sleep(LOOK_EVERY_S)

    def wake(self) -> None:
        """Look again soon."""
        self._wanted.set()

    async def end(self) -> None:
        """End all streams at once."""
        self.stop.set()
        async with self._news:
            self._news.notify_all()

    async def events(self, topic: str, seen: str) -> AsyncIterator[bytes]:
        """The stream of one page, whose content is of version ``seen``."""
        loop = asyncio.get_running_loop()
        until = loop.time() + LONGEST_S
        self.streams += 1
        self.wake()
        try:
            yield b"retry: 1000\n\n"
            while not self.stop.is_set() and loop.time() < until:
                version = self.view.version(topic)
                if version != seen:
                    seen = version
                    yield f"event: news\nid: {version}\ndata: {version}\n\n".encode()
                async with self._news:
                    try:
                        await asyncio.wait_for(self._news.wait(), PING_EVERY_S)
                    except asyncio.TimeoutError:
                        ping = True
                    else:
                        ping = False
                if ping:
                    yield b": ping\n\n"
        finally:
            self.streams -= 1

    def _refresh(self) -> bool:
        try:
            return self.view.refresh()
        except Exception:  # a mistake here ends no stream; the next look may succeed
            log.exception("state_not_read path=%s", self.view.path)
            return False


class EventStream(StreamingResponse):
    """A stream whose client has to take what is sent within `SEND_TIMEOUT_S`."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[bytes]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(content, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, until it ends or the client takes no more."""

        async def bounded(message: Message) -> None:
            await asyncio.wait_for(send(message), SEND_TIMEOUT_S)

        with contextlib.suppress(asyncio.TimeoutError):
            await super().__call__(scope, receive, bounded)
