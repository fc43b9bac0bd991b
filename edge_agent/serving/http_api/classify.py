"""The route ``POST /classify``: the body is one input as raw bytes, the response is its answer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...core.errors import DataError
from ...data.wav import WavOptions
from ..inputs import Decoder
from ..pair import Pair
from ..predictor import Predictor
from .messages import Access, Request, Response, Route, json_response


class ClassifyRoutes:
    """Answers single inputs, as ``curl --data-binary @cat.jpg`` sends them."""

    def __init__(self, predictor: Predictor, sound: WavOptions | None = None) -> None:
        """Create the route of a predictor; ``sound``: how sounds are converted to inputs; None: they are rejected."""
        self._predictor = predictor
        self._sound = sound

    def routes(self) -> Iterable[Route]:
        """Yield the route."""
        yield Route("POST", "/classify", Access.ASK, self._classify)

    def _classify(self, request: Request) -> Response:
        """Answer the input in the body; observers see it with the source ``http``.

        Raises:
            DataError: The body is a form, or no input.
            HeadwaterError: The same as in `Predictor.answer`.
        """
        if request.content_type == "multipart/form-data" and request.body.startswith(b"--"):
            raise DataError(
                "the body is a form, which is not read here; send the bytes of the file alone, as "
                "'curl --data-binary @FILE' does"
            )

        def decode(pair: Pair) -> np.ndarray:
            return Decoder(pair.input, self._sound).decode(request.body)

        answer = self._predictor.answer(decode, "http", request.body, request.content_type)
        return json_response(answer.as_json())
