"""Requests, responses, and the contract of routes."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from ...core.errors import Busy, DataError, HeadwaterError, MissingCapability, NotReady, UsageError


class Access(enum.Enum):
    """Who may use a route."""

    OPEN = "open"
    """Everybody: it tells nothing of the device."""

    ASK = "ask"
    """Whoever reaches a loopback address or the Unix socket; from other machines, who has the token."""

    CHANGE = "change"
    """Who has the token, from wherever: it changes what the device has learned."""


@dataclass(frozen=True)
class Request:
    """A request whose body has been read, and whose sender may use the route.

    Attributes:
        method: ``GET`` or ``POST``.
        path: The path without its query.
        query: The parameters of the query; of several with one name the last.
        headers: The header fields by their names in lower case; of several with one name the last.
        body: The body, not longer than the server allows.
        names: What the braces of the route's pattern stand for in this path.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def content_type(self) -> str:
        """The media type of the body without its parameters, in lower case; empty where none is given."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


@dataclass(frozen=True)
class Response:
    """What is sent back.

    Attributes:
        status: The status code.
        body: The body.
        content_type: Its media type.
        headers: Other header fields.
    """

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


Handler: TypeAlias = "Callable[[Request], Response]"
"""Answers a request; what it raises of our own errors becomes a response by `refused`."""


@dataclass(frozen=True)
class Route:
    """A method and a pattern of paths, such as ``/v2/models/{name}/infer``, and what answers them."""

    method: str
    pattern: str
    access: Access
    handle: Handler

    def match(self, path: str) -> dict[str, str] | None:
        """Return what the braces of the pattern stand for in a path; None where the path is another one."""
        match = re.fullmatch(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.pattern), path)
        return None if match is None else match.groupdict()


class Routes(Protocol):
    """A group of routes that belong together."""

    def routes(self) -> Iterable[Route]:
        """Return the routes of the group."""


def json_response(content: Mapping[str, Any], status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """Return a JSON object as a response."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return Response(status, body, headers=headers)


def error_response(status: int, kind: str, message: str, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """Return an error as a response: ``{"error": {"kind": ..., "message": ...}}``."""
    return json_response({"error": {"kind": kind, "message": message}}, status, headers)


def refused(error: HeadwaterError) -> Response:
    """Return the response to a request that an error has ended."""
    kind = type(error).__name__
    if isinstance(error, Busy):
        return error_response(503, kind, str(error), (("Retry-After", str(error.retry_s)),))
    if isinstance(error, NotReady):
        return error_response(503, kind, str(error), (("Retry-After", "5"),))
    if isinstance(error, MissingCapability):
        return error_response(501, kind, str(error))
    if isinstance(error, DataError | UsageError):
        return error_response(400, kind, str(error))
    return error_response(500, kind, str(error))
