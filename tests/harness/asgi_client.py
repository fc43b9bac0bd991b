"""Questions to an ASGI application without a server, a port or another package."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes


def get(app, path, host="testserver"):
    """The answer to ``GET path``."""
    return asyncio.run(_get(app, path, host))


async def _get(app, path, host):
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": [(b"host", host.encode())], "http_version": "1.1", "scheme": "http", "root_path": ""}
    await app(scope, receive, send)
    begin = sent[0]
    body = b"".join(one.get("body", b"") for one in sent[1:])
    return Answer(begin["status"], {key.decode(): value.decode() for key, value in begin["headers"]}, body)
