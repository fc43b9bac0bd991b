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
    """Who is allowed to use a route."""

    OPEN = "open"
    """Everybody: the response reveals nothing about the device."""

    ASK = "ask"
    """Every client on this machine or of the Unix socket; clients on other machines need the token."""

    CHANGE = "change"
    """Clients with the token only, also on this machine: the route changes the samples of the device."""


@dataclass(frozen=True)
class Request:
    """A request whose body was read, and whose client is allowed to use the route.

    Attributes:
        method: ``GET`` or ``POST``.
        path: The path without its query.
        query: The parameters of the query, by name; of several with the same name, the last one.
        headers: The header fields by their names in lower case; of several with the same name, the last one.
        body: The body, at most as large as the server allows.
        names: The parts of the path that match the braces of the route's pattern, by their names in the braces.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def content_type(self) -> str:
        """The media type of the body without its parameters, in lower case; empty if the client sends none."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


@dataclass(frozen=True)
class Response:
    """A response.

    Attributes:
        status: The status code.
        body: The body.
        content_type: The media type of the body.
        headers: Further header fields, as pairs of name and value.
    """

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


Handler: TypeAlias = "Callable[[Request], Response]"
"""Returns the response to a request. A `HeadwaterError` that it raises is turned into one by `response_to_error`."""


@dataclass(frozen=True)
class Route:
    """A method, a pattern of paths such as ``/v2/models/{name}/infer``, and the function that handles such requests."""

    method: str
    pattern: str
    access: Access
    handle: Handler

    def match(self, path: str) -> dict[str, str] | None:
        """Return the parts of a path that match the braces of the pattern; None if the path does not match."""
        match = re.fullmatch(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.pattern), path)
        return None if match is None else match.groupdict()


class Routes(Protocol):
    """A group of routes that belong together."""

    def routes(self) -> Iterable[Route]:
        """Return the routes of the group."""


def json_response(content: Mapping[str, Any], status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """Return a JSON object as a response, in UTF-8, so that a person can read names in any language."""
    text = json.dumps(content, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    # Names of files may hold bytes that are no text, as surrogates. UTF-8 has none; JSON can write them as escapes.
    body = text.encode(errors="backslashreplace")
    return Response(status, body, headers=headers)


def error_response(status: int, kind: str, message: str, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """Return an error as a response: ``{"error": {"kind": ..., "message": ...}}``."""
    return json_response({"error": {"kind": kind, "message": message}}, status, headers)


def response_to_error(error: HeadwaterError) -> Response:
    """Return the response to a request whose handling raised an error; the class of the error decides the status."""
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
