"""The route ``/``, a page for people, and the routes that it uses: status, last answers, pictures and corrections."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from ...core.config import mistakes_of
from ...core.errors import DataError
from ...core.storage import read_regular_text
from ...core.task import Frozen, ImageInput, parse_json
from ...version import __version__
from ..corrections import Corrections
from ..history import History, draw_input
from ..predictor import Predictor
from .messages import Access, Request, Response, Route, error_response, json_response

_PAGE = Path(__file__).parent / "page.html"

StatusPart = Callable[[], Any]
"""Returns a part of the status, as JSON values."""


class Correction(Frozen):
    """The body of ``POST /correct``: the right class of an answered input."""

    number: int = Field(ge=1, description="of the answer")
    label: str = Field(min_length=1, max_length=200, description="the right class, which may be a new one")


class PageRoutes:
    """The page, and the routes that it uses."""

    def __init__(
        self,
        predictor: Predictor,
        history: History,
        corrections: Corrections,
        parts: Mapping[str, StatusPart],
    ) -> None:
        """Read the page from its file.

        Args:
            predictor: Answers inputs with the pair in use.
            history: The last answers.
            corrections: Adds corrected inputs to the samples.
            parts: Further parts of the status, by their names in its JSON.
        """
        self._predictor = predictor
        self._history = history
        self._corrections = corrections
        self._parts = parts
        html = read_regular_text(_PAGE)
        self._page = html.encode()
        self._policy = content_security_policy(html)

    def routes(self) -> Iterable[Route]:
        """Yield all routes of the page."""
        yield Route("GET", "/", Access.OPEN, self._send_page)
        yield Route("GET", "/status", Access.ASK, self._status)
        yield Route("GET", "/history", Access.ASK, self._list_answers)
        yield Route("GET", "/history/{number}/picture", Access.ASK, self._picture)
        yield Route("POST", "/correct", Access.CHANGE, self._correct)

    def _send_page(self, _request: Request) -> Response:
        """Return the page, with headers that let a browser run nothing else and show it in no other site."""
        headers = (
            ("Content-Security-Policy", self._policy),
            ("Referrer-Policy", "no-referrer"),
            ("X-Frame-Options", "DENY"),
        )
        return Response(200, self._page, "text/html; charset=utf-8", headers)

    def _status(self, _request: Request) -> Response:
        """Return the status: the pair in use, its classes, the last fit, and the further parts."""
        content: dict[str, Any] = {"version": __version__, "ready": self._predictor.is_ready, "pair": None}
        content |= {"classes": [], "why_not_correct": self._corrections.why_not}
        if self._predictor.is_ready:
            pair = self._predictor.pair
            content["pair"] = {
                **pair.id.as_json(),
                "bundle_name": pair.bundle.manifest.name,
                "precision": pair.encoder.precision,
                "unknown": pair.unknown_text,
                "takes": "images" if isinstance(pair.input, ImageInput) else "recordings",
                "knows": list(pair.class_names),
            }
            content["classes"] = self._corrections.labels(pair) if pair.class_names else []
        content["fit"] = self._corrections.status.as_json()
        content["waiting"] = self._predictor.waiting
        for name, part in self._parts.items():
            content[name] = part()
        return json_response(content)

    def _list_answers(self, request: Request) -> Response:
        """Return the kept answers with a larger number than ``after``, oldest first."""
        after = request.query.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) < 16):
            raise DataError(f"after={after[:20]}, expected the number of an answer")
        entries = self._history.entries(int(after))
        return json_response({"answers": [entry.as_json() for entry in entries]})

    def _picture(self, request: Request) -> Response:
        """Return the picture of an answered input. Nothing in it may be run: an SVG file can hold scripts."""
        number = request.names["number"]
        entry = None
        if number.isascii() and number.isdigit() and len(number) < 16:
            entry = self._history.find(int(number))
        if entry is None:
            return error_response(404, "NotFound", f"answer {number[:20]} is no longer kept")
        picture, content_type = draw_input(entry, self._predictor.pair)
        return Response(200, picture, content_type, (("Content-Security-Policy", "default-src 'none'"),))

    def _correct(self, request: Request) -> Response:
        """Add an answered input as a sample of its right class."""
        try:
            correction = Correction.model_validate(parse_json(request.body))
        except ValidationError as error:
            raise DataError("; ".join(mistakes_of(error, Correction))) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"the body is invalid JSON: {error}") from error
        added = self._corrections.correct(correction.number, correction.label.strip(), self._predictor.pair)
        return json_response({**added, "fit": self._corrections.status.as_json()})


def content_security_policy(html: str) -> str:
    """Return the value of ``Content-Security-Policy`` that allows the page's own script and style only.

    Args:
        html: The page, with exactly one ``<script>`` and one ``<style>``, which are allowed by their SHA-256.
    """
    sources = []
    for tag in ("script", "style"):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        sources.append(f"{tag}-src 'sha256-{digest}'")
    rules = ["default-src 'none'", *sources, "img-src blob:", "connect-src 'self'", "base-uri 'none'"]
    return "; ".join([*rules, "form-action 'none'", "frame-ancestors 'none'"])
