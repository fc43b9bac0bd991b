"""The routes ``/live`` and ``/ready``: whether the process runs, and whether it can answer inputs."""

from __future__ import annotations

from collections.abc import Iterable

from ..predictor import Predictor
from .messages import Access, Request, Response, Route, error_response, json_response


class HealthRoutes:
    """Health checks for supervisors, which need no token."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def routes(self) -> Iterable[Route]:
        """Yield both routes."""
        yield Route("GET", "/live", Access.OPEN, self._live)
        yield Route("GET", "/ready", Access.OPEN, self._ready)

    def _live(self, _request: Request) -> Response:
        return json_response({"live": True})

    def _ready(self, _request: Request) -> Response:
        if self._predictor.is_ready:
            return json_response({"ready": True})
        return error_response(503, "NotReady", "no head and no bundle are in use here yet", (("Retry-After", "5"),))
