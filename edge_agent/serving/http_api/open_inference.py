"""``/v2``: the Open Inference Protocol (KServe V2), for clients of Triton, OpenVINO Model Server, KServe and others.

Two models are served. ``encoder`` takes prepared inputs, as ONNX Runtime would, and gives features. ``classifier``
takes pictures or recordings as sensors give them, prepares them as everywhere else, and gives what the personal head
says. Tensors are JSON, or bytes behind the JSON (the binary tensor data extension); responses come as the request asks.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...core.config import mistakes_of
from ...core.errors import DataError, HeadwaterError, UnknownName
from ...core.task import ImageInput, parse_json
from ...data import preprocess
from ...heads.saved import SavedNumeric
from ...version import __version__
from ..answer import ClassAnswer, NumberAnswer
from ..pair import AnswerWithFeatures, Pair
from ..predictor import Predictor
from .messages import Access, Handler, Request, Response, Route, json_response, refused

EXTENSIONS = ["binary_tensor_data"]
VERSION = "1"
"""The only version of a model: which pair answers is in the parameters of each response."""

_HEADER_LENGTH = "inference-header-content-length"
"""Where in a body its JSON ends and the bytes of its tensors begin; without it, all of it is JSON."""

_MOST_ROWS = 256
"""The most inputs of one request: they are answered in one turn, for which others wait."""

_KINDS: dict[str, str] = {
    "BOOL": "?",
    "UINT8": "<u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
"""Types of the protocol whose values have a fixed size, and NumPy's names for them."""


class _Lenient(BaseModel):
    """A part of a request; fields that this server does not know have no effect, as the protocol demands."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class InputTensor(_Lenient):
    """An input of a request."""

    name: str = Field(max_length=200)
    shape: tuple[Annotated[int, Field(lt=1 << 31)], ...] = Field(max_length=8)
    datatype: str = Field(max_length=20)
    parameters: dict[str, Any] = Field(default_factory=dict)
    data: Any = None


class RequestedOutput(_Lenient):
    """An output that a request asks for."""

    name: str = Field(max_length=200)
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferRequest(_Lenient):
    """The JSON of a request."""

    id: str = Field("", max_length=200)
    parameters: dict[str, Any] = Field(default_factory=dict)
    inputs: tuple[InputTensor, ...] = Field(min_length=1, max_length=16)
    outputs: tuple[RequestedOutput, ...] = Field((), max_length=16)


@dataclass(frozen=True)
class Tensor:
    """What a model takes or gives: its name, its type in the protocol, and its shape with -1 for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the tensor as metadata show it."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True)
class Model:
    """A model that is served.

    Attributes:
        name: Its name in paths.
        input_of: Returns its input.
        outputs_of: Returns its outputs.
        infer: Returns the pair that has computed, and the arrays (n, ...) of all outputs in their order, for an input
            array (n, ...).
    """

    name: str
    input_of: Callable[[Pair], Tensor]
    outputs_of: Callable[[Pair], Sequence[Tensor]]
    infer: Callable[[np.ndarray], tuple[Pair, Sequence[np.ndarray]]]


class OpenInferenceRoutes:
    """The routes of the protocol."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._parsing = threading.Lock()
        self._models = {
            "encoder": Model("encoder", _encoder_input, _encoder_outputs, self._encode),
            "classifier": Model("classifier", _classifier_input, _classifier_outputs, self._classify),
        }

    def routes(self) -> Iterable[Route]:
        """Return all routes; a model may be named with its version or without."""
        yield Route("GET", "/v2", Access.ASK, self._server_metadata)
        yield Route("GET", "/v2/health/live", Access.OPEN, lambda _request: json_response({"live": True}))
        yield Route("GET", "/v2/health/ready", Access.OPEN, self._server_ready)
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            yield Route("GET", path, Access.ASK, self._with_errors_as_text(self._model_metadata))
            yield Route("GET", f"{path}/ready", Access.ASK, self._with_errors_as_text(self._model_ready))
            yield Route("POST", f"{path}/infer", Access.ASK, self._with_errors_as_text(self._infer))

    # --- what there is -------------------------------------------------------------------------------------------

    def _server_metadata(self, _request: Request) -> Response:
        return json_response({"name": "headwater", "version": __version__, "extensions": EXTENSIONS})

    def _server_ready(self, _request: Request) -> Response:
        is_ready = self._predictor.is_ready
        return json_response({"ready": is_ready}, 200 if is_ready else 503)

    def _model_metadata(self, request: Request) -> Response:
        model = self._model_of(request)
        pair = self._predictor.pair
        content = {
            "name": model.name,
            "versions": [VERSION],
            "platform": "onnxruntime_onnx",
            "inputs": [model.input_of(pair).as_json()],
            "outputs": [tensor.as_json() for tensor in model.outputs_of(pair)],
            "parameters": {**pair.id.as_json(), "classes": list(pair.class_names)},
        }
        return json_response(content)

    def _model_ready(self, request: Request) -> Response:
        model = self._model_of(request)
        is_ready = self._predictor.is_ready
        return json_response({"name": model.name, "ready": is_ready}, 200 if is_ready else 503)

    def _model_of(self, request: Request) -> Model:
        """Return the model that a path names.

        Raises:
            UnknownName: There is no such model, or no such version of it.
        """
        name = request.names["model"]
        if name not in self._models:
            raise UnknownName("model", name, self._models)
        version = request.names.get("version", VERSION)
        if version != VERSION:
            raise UnknownName("version", version, [VERSION])
        return self._models[name]

    @staticmethod
    def _with_errors_as_text(handle: Handler) -> Handler:
        """Return the handler with errors in the protocol's form: ``{"error": "message"}``."""

        def answer(request: Request) -> Response:
            try:
                return handle(request)
            except HeadwaterError as error:
                status = 404 if isinstance(error, UnknownName) else refused(error).status
                return json_response({"error": str(error)}, status, refused(error).headers)

        return answer

    # --- what is computed ----------------------------------------------------------------------------------------

    def _infer(self, request: Request) -> Response:
        """Answer the inputs of a request."""
        model = self._model_of(request)
        # One at a time: the values of 16 MB of JSON take 400 MB as objects of Python.
        with self._parsing:
            parsed, tail = _parse(request)
            expected = model.input_of(self._predictor.pair)
            array = _array_of(parsed, expected, tail)
            parsed = _without_values(parsed)
        pair, arrays = model.infer(array)
        given = dict(zip(model.outputs_of(pair), arrays, strict=True))
        return _response(parsed, model.name, pair, given)

    def _encode(self, array: np.ndarray) -> tuple[Pair, Sequence[np.ndarray]]:
        """Return the features of prepared inputs."""
        with self._predictor.turn() as pair:
            if array.shape[1:] != pair.encoder.input_shape:
                raise DataError(f"inputs {list(array.shape)}, expected {list(_encoder_input(pair).shape)}")
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinity, which is refused
                inputs = array.astype(np.float32)
            if not np.isfinite(inputs).all():
                raise DataError("inputs hold NaN, infinity or values beyond float32")
            features = pair.encoder.features(inputs)
            if not np.isfinite(features).all():
                raise DataError("the features of these inputs are no finite numbers; their values are far too large")
            return pair, [features]

    def _classify(self, array: np.ndarray) -> tuple[Pair, Sequence[np.ndarray]]:
        """Return what the head says of pictures or windows."""
        pair, answers = self._predictor.answer_rows(lambda pair: _prepare(pair, array), "v2")
        return pair, _columns(pair, answers)


def _encoder_input(pair: Pair) -> Tensor:
    return Tensor(pair.encoder.input_name, "FP32", (-1, *pair.encoder.input_shape))


def _encoder_outputs(pair: Pair) -> Sequence[Tensor]:
    return [Tensor("features", "FP32", (-1, pair.encoder.feature_dim))]


def _classifier_input(pair: Pair) -> Tensor:
    if isinstance(pair.input, ImageInput):
        return Tensor("image", "UINT8", (-1, -1, -1, pair.input.channels))
    return Tensor("window", "FP32", (-1, *pair.input.shape))


def _classifier_outputs(pair: Pair) -> Sequence[Tensor]:
    if not isinstance(pair.head, SavedNumeric):
        shares = Tensor("probabilities", "FP32", (-1, len(pair.class_names)))
        return [shares, Tensor("class", "BYTES", (-1,)), Tensor("unknown", "BOOL", (-1,))]
    if pair.head.head.predicts_targets:
        return [Tensor("value", "FP64", (-1,))]
    return [Tensor("score", "FP64", (-1,)), Tensor("anomaly", "BOOL", (-1,))]


def _prepare(pair: Pair, array: np.ndarray) -> np.ndarray:
    """Return pictures (n, height, width, channels) of any size, or windows in sensor units, as prepared inputs.

    Raises:
        DataError: They have another number of channels or another length than the task, or values that cannot be.
    """
    spec = pair.input
    if isinstance(spec, ImageInput):
        if array.ndim != 4 or array.shape[3] != spec.channels:
            raise DataError(f"image {list(array.shape)}, expected [n, height, width, {spec.channels}]")
        pixels = np.stack([preprocess.image_pixels(picture, spec) for picture in array])
        return preprocess.normalise_images(pixels.astype(np.float32), spec)
    if array.shape[1:] != spec.shape:
        raise DataError(f"window {list(array.shape)}, expected [n, {spec.channels}, {spec.length}]")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinity, which is refused
        windows = array.astype(np.float32)
    if not np.isfinite(windows).all():
        raise DataError("window holds NaN, infinity or values beyond float32")
    return preprocess.normalise_windows(windows, spec)


def _columns(pair: Pair, answers: Sequence[AnswerWithFeatures]) -> list[np.ndarray]:
    """Return the outputs of the classifier, each (n, ...), in the order of `_classifier_outputs`.

    Where the head has no rule for unknown inputs, none is unknown; where it has no threshold, none is an anomaly.
    """
    said = [answered.answer for answered in answers]
    classes = [answer for answer in said if isinstance(answer, ClassAnswer)]
    numbers = [answer for answer in said if isinstance(answer, NumberAnswer)]
    if not isinstance(pair.head, SavedNumeric):
        shares = np.array([list(answer.probabilities.values()) for answer in classes], np.float32)
        labels = np.array([answer.label for answer in classes], np.object_)
        return [shares, labels, np.array([bool(answer.is_unknown) for answer in classes])]
    values = np.array([answer.value for answer in numbers], np.float64)
    if pair.head.head.predicts_targets:
        return [values]
    return [values, np.array([bool(answer.is_anomaly) for answer in numbers])]


# --- the protocol's form ---------------------------------------------------------------------------------------------


def _parse(request: Request) -> tuple[InferRequest, bytes]:
    """Return the JSON of a request, and the bytes of its tensors that follow it.

    Raises:
        DataError: The body is not what the protocol says; every mistake is named.
    """
    text = request.headers.get(_HEADER_LENGTH, "")
    end = len(request.body)
    if text:
        if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) <= end):
            raise DataError(f"Inference-Header-Content-Length is {text[:20]}, expected a number of at most {end}")
        end = int(text)
    try:
        parsed = InferRequest.model_validate(parse_json(request.body[:end]))
    except ValidationError as error:
        raise DataError(f"request: {'; '.join(mistakes_of(error, InferRequest)[:5])}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is invalid JSON: {error}") from error
    return parsed, request.body[end:]


def _array_of(request: InferRequest, expected: Tensor, tail: bytes) -> np.ndarray:
    """Return the input of a request as an array.

    Raises:
        DataError: It has another name, a type that is no number, another shape than its data, or too many rows.
    """
    if len(request.inputs) != 1 or request.inputs[0].name != expected.name:
        names = ", ".join(f"'{tensor.name}'" for tensor in request.inputs)
        raise DataError(f"inputs {names}; expected one, '{expected.name}' {expected.datatype} {list(expected.shape)}")
    [tensor] = request.inputs
    kind = _KINDS.get(tensor.datatype)
    if kind is None:
        raise DataError(f"'{tensor.name}' is {tensor.datatype}, expected {expected.datatype}, or another of numbers")
    # The size is known, and small, before an array of it is made.
    count = math.prod(tensor.shape)
    if len(tensor.shape) != len(expected.shape) or min(tensor.shape) < 1 or tensor.shape[0] > _MOST_ROWS:
        wanted = f"{list(expected.shape)} with 1 to {_MOST_ROWS} rows"
        raise DataError(f"'{tensor.name}' has shape {list(tensor.shape)}, expected {wanted}")
    if "binary_data_size" in tensor.parameters:
        size = count * np.dtype(kind).itemsize
        if tensor.parameters["binary_data_size"] != size or len(tail) != size:
            raise DataError(f"'{tensor.name}' has {len(tail)} bytes behind the JSON, its shape and type need {size}")
        return np.frombuffer(tail, kind).reshape(tensor.shape)
    values = _flat(tensor.data)
    if len(values) != count:
        raise DataError(f"'{tensor.name}' has {len(values)} values, its shape {list(tensor.shape)} needs {count}")
    try:
        with np.errstate(over="ignore"):  # infinity is refused where the values are looked at
            return np.array(values, np.float64).astype(kind).reshape(tensor.shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"'{tensor.name}' holds something else than numbers of type {tensor.datatype}") from error


def _without_values(request: InferRequest) -> InferRequest:
    """Return a request without the values of its inputs, which an array holds by now."""
    inputs = tuple(tensor.model_copy(update={"data": None}) for tensor in request.inputs)
    return request.model_copy(update={"inputs": inputs})


def _flat(data: Any) -> list[Any]:
    """Return the values of nested lists, in their order; the protocol allows both forms."""
    if not isinstance(data, list):
        return []
    if not data or not isinstance(data[0], list):
        return data
    values: list[Any] = []
    for item in data:
        values += _flat(item)
    return values


def _response(request: InferRequest, model: str, pair: Pair, given: Mapping[Tensor, np.ndarray]) -> Response:
    """Return the outputs that were asked for, all of them where none were named, each as JSON or as bytes.

    Raises:
        DataError: An output is unknown.
    """
    wanted = {output.name: output for output in request.outputs}
    names = [tensor.name for tensor in given]
    unknown_names = [name for name in wanted if name not in names]
    if unknown_names:
        raise DataError(f"model '{model}' has no output {', '.join(unknown_names)}; it has {', '.join(names)}")
    all_binary = bool(request.parameters.get("binary_data_output"))
    outputs = []
    tail = b""
    for tensor, array in given.items():
        if wanted and tensor.name not in wanted:
            continue
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(array.shape)}
        asked = wanted.get(tensor.name)
        is_binary = all_binary if asked is None else bool(asked.parameters.get("binary_data", all_binary))
        if is_binary:
            raw = _bytes_of(array, tensor.datatype)
            output["parameters"] = {"binary_data_size": len(raw)}
            tail += raw
        else:
            output["data"] = array.reshape(-1).tolist()
        outputs.append(output)
    content: dict[str, Any] = {"model_name": model, "model_version": VERSION}
    if request.id:
        content["id"] = request.id
    content |= {"parameters": pair.id.as_json(), "outputs": outputs}
    head = json.dumps(content, allow_nan=False).encode()
    if not tail:
        return Response(200, head)
    length = (("Inference-Header-Content-Length", str(len(head))),)
    return Response(200, head + tail, "application/octet-stream", length)


def _bytes_of(array: np.ndarray, datatype: str) -> bytes:
    """Return an array as the binary extension has it: row by row, little endian; of texts each with its length."""
    if datatype != "BYTES":
        return array.astype(_KINDS[datatype]).tobytes()
    parts = []
    for text in array.reshape(-1).tolist():
        encoded = str(text).encode()
        parts.append(len(encoded).to_bytes(4, "little") + encoded)
    return b"".join(parts)
