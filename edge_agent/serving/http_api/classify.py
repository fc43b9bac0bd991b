"""``POST /classify``: the raw bytes of one input in, one answer out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...data.wav import WavOptions
from ..inputs import Decoder
from ..pair import Pair
from ..predictor import Predictor
from .messages import Access, Request, Response, Route, json_response


class ClassifyRoutes:
    """Answers to single inputs, as `curl --data-binary @cat.jpg` sends them."""

    def __init__(self, predictor: Predictor, sound: WavOptions | None = None) -> None:
        """Serve a predictor; ``sound``: how sounds become inputs, None: they are refused."""
        self._predictor = predictor
        self._sound = sound

    def routes(self) -> Iterable[Route]:
        """Return the route."""
        yield Route("POST", "/classify", Access.ASK, self._classify)

    def _classify(self, request: Request) -> Response:
        """Answer the input in the body; of a page that looks, it goes into the history as ``http``."""

        def decode(pair: Pair) -> np.ndarray:
            return Decoder(pair.input, self._sound).decode(request.body)

        answer = self._predictor.answer(decode, "http", request.body, request.content_type)
        return json_response(answer.as_json())
