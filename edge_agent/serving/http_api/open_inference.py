"""The routes ``/v2``: the Open Inference Protocol (KServe V2), for clients of Triton, OpenVINO Model Server and others.

Two models are served. ``encoder`` takes prepared inputs, as ONNX Runtime would, and returns features. ``classifier``
takes images or windows in sensor units, prepares them in the same way as ``/classify``, and returns the answers of the
personal head. Tensors are sent as JSON, or as bytes behind the JSON (the binary tensor data extension). The request
chooses the form of each output.
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
from .messages import Access, Handler, Request, Response, Route, json_response, response_to_error

EXTENSIONS = ["binary_tensor_data"]
"""The extensions of the protocol that are supported."""

VERSION = "1"
"""The only version of each model. Which pair has answered is in the parameters of each response."""

_HEADER_LENGTH = "inference-header-content-length"
"""The header field with the size of the JSON in a body; the bytes of tensors follow it. Without it, all is JSON."""

_MOST_ROWS = 256
"""The most inputs in one request. They are answered in one turn, and other requests wait meanwhile."""

_NUMPY_TYPES: dict[str, str] = {
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
"""The protocol's types of fixed size, and their names in NumPy, little endian."""


class _RequestPart(BaseModel):
    """A part of a request. Unknown fields are ignored, as the protocol demands."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class InputTensor(_RequestPart):
    """An input tensor in a request."""

    name: str = Field(max_length=200)
    shape: tuple[Annotated[int, Field(lt=1 << 31)], ...] = Field(max_length=8)
    datatype: str = Field(max_length=20)
    parameters: dict[str, Any] = Field(default_factory=dict)
    data: Any = None


class RequestedOutput(_RequestPart):
    """An output that a request asks for, and its form."""

    name: str = Field(max_length=200)
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferRequest(_RequestPart):
    """The JSON of a request."""

    id: str = Field("", max_length=200)
    parameters: dict[str, Any] = Field(default_factory=dict)
    inputs: tuple[InputTensor, ...] = Field(min_length=1, max_length=16)
    outputs: tuple[RequestedOutput, ...] = Field((), max_length=16)


@dataclass(frozen=True)
class Tensor:
    """An input or output of a model: its name, its type in the protocol, and its shape, with -1 for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the tensor as it is shown in the metadata of a model."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True)
class Model:
    """A model that is served.

    Attributes:
        name: The name of the model in paths.
        input_of: Returns the input of the model for a pair.
        outputs_of: Returns the outputs of the model for a pair.
        infer: Takes an input array (n, ...). Returns the pair that has answered, and the arrays (n, ...) of all outputs
            in the order of ``outputs_of``.
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
        """Yield all routes; a model may be named with or without its version."""
        yield Route("GET", "/v2", Access.ASK, self._server_metadata)
        yield Route("GET", "/v2/health/live", Access.OPEN, lambda _request: json_response({"live": True}))
        yield Route("GET", "/v2/health/ready", Access.OPEN, self._server_ready)
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            yield Route("GET", path, Access.ASK, self._with_protocol_errors(self._model_metadata))
            yield Route("GET", f"{path}/ready", Access.ASK, self._with_protocol_errors(self._model_ready))
            yield Route("POST", f"{path}/infer", Access.ASK, self._with_protocol_errors(self._infer))

    # --- metadata and health -------------------------------------------------------------------------------------

    def _server_metadata(self, _request: Request) -> Response:
        return json_response({"name": "headwater", "version": __version__, "extensions": EXTENSIONS})

    def _server_ready(self, _request: Request) -> Response:
        is_ready = self._predictor.is_ready
        return json_response({"ready": is_ready}, 200 if is_ready else 503)

    def _model_metadata(self, request: Request) -> Response:
        model = self._find_model(request)
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
        model = self._find_model(request)
        is_ready = self._predictor.is_ready
        return json_response({"name": model.name, "ready": is_ready}, 200 if is_ready else 503)

    def _find_model(self, request: Request) -> Model:
        """Return the model that the path of a request names.

        Raises:
            UnknownName: There is no such model, or no such version.
        """
        name = request.names["model"]
        if name not in self._models:
            raise UnknownName("model", name, self._models)
        version = request.names.get("version", VERSION)
        if version != VERSION:
            raise UnknownName("version", version, [VERSION])
        return self._models[name]

    @staticmethod
    def _with_protocol_errors(handle: Handler) -> Handler:
        """Wrap a handler so that errors have the protocol's form: ``{"error": "message"}``."""

        def answer(request: Request) -> Response:
            try:
                return handle(request)
            except HeadwaterError as error:
                response = response_to_error(error)
                status = 404 if isinstance(error, UnknownName) else response.status
                return json_response({"error": str(error)}, status, response.headers)

        return answer

    # --- inference -----------------------------------------------------------------------------------------------

    def _infer(self, request: Request) -> Response:
        """Answer the inputs of a request."""
        model = self._find_model(request)
        # One request is parsed at a time, because the values of 16 MB of JSON take 400 MB as Python objects.
        with self._parsing:
            parsed, binary_data = _parse(request)
            expected = model.input_of(self._predictor.pair)
            array = _read_input(parsed, expected, binary_data)
            parsed = _without_values(parsed)
        # The pair may have changed since: the outputs are those of the pair that has answered.
        pair, arrays = model.infer(array)
        outputs = dict(zip(model.outputs_of(pair), arrays, strict=True))
        return _build_response(parsed, model.name, pair, outputs)

    def _encode(self, array: np.ndarray) -> tuple[Pair, Sequence[np.ndarray]]:
        """Return the pair in use, and the features (n, d) of prepared inputs (n, ...).

        Raises:
            DataError: The inputs have another shape than the encoder's, or hold NaN or infinity.
        """
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
        """Return the pair in use, and the outputs for images (n, height, width, channels) or windows (n, ...)."""
        pair, results = self._predictor.answer_rows(lambda pair: _prepare(pair, array), "v2")
        return pair, _output_arrays(pair, results)


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
        probabilities = Tensor("probabilities", "FP32", (-1, len(pair.class_names)))
        return [probabilities, Tensor("class", "BYTES", (-1,)), Tensor("unknown", "BOOL", (-1,))]
    if pair.head.head.predicts_targets:
        return [Tensor("value", "FP64", (-1,))]
    return [Tensor("score", "FP64", (-1,)), Tensor("anomaly", "BOOL", (-1,))]


def _prepare(pair: Pair, array: np.ndarray) -> np.ndarray:
    """Return images (n, height, width, channels) of any size, or windows in sensor units, as prepared inputs.

    Raises:
        DataError: The number of channels or the length is not that of the task, or a value is out of range.
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


def _output_arrays(pair: Pair, results: Sequence[AnswerWithFeatures]) -> list[np.ndarray]:
    """Return the outputs of the classifier, each (n, ...), in the order of `_classifier_outputs`.

    If the head has no rule for unknown inputs, no input is unknown. If it has no threshold, none is an anomaly.
    """
    answers = [result.answer for result in results]
    if not isinstance(pair.head, SavedNumeric):
        classes = [answer for answer in answers if isinstance(answer, ClassAnswer)]
        probabilities = np.array([list(answer.probabilities.values()) for answer in classes], np.float32)
        labels = np.array([answer.label for answer in classes], np.object_)
        return [probabilities, labels, np.array([bool(answer.is_unknown) for answer in classes])]
    numbers = [answer for answer in answers if isinstance(answer, NumberAnswer)]
    values = np.array([answer.value for answer in numbers], np.float64)
    if pair.head.head.predicts_targets:
        return [values]
    return [values, np.array([bool(answer.is_anomaly) for answer in numbers])]


# --- the protocol's format -------------------------------------------------------------------------------------------


def _parse(request: Request) -> tuple[InferRequest, bytes]:
    """Return the JSON of a request, and the bytes of tensors that follow it.

    Raises:
        DataError: The body does not follow the protocol; up to five mistakes are named.
    """
    json_size = _json_size(request)
    try:
        parsed = InferRequest.model_validate(parse_json(request.body[:json_size]))
    except ValidationError as error:
        raise DataError(f"request: {'; '.join(mistakes_of(error, InferRequest)[:5])}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is invalid JSON: {error}") from error
    return parsed, request.body[json_size:]


def _json_size(request: Request) -> int:
    """Return how many bytes of a body are JSON.

    Raises:
        DataError: The header field with the size is not a number, or exceeds the body.
    """
    text = request.headers.get(_HEADER_LENGTH, "")
    body_size = len(request.body)
    if not text:
        return body_size
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) <= body_size):
        raise DataError(f"Inference-Header-Content-Length is {text[:20]}, expected a number of at most {body_size}")
    return int(text)


def _read_input(request: InferRequest, expected: Tensor, binary_data: bytes) -> np.ndarray:
    """Return the input of a request as an array.

    Args:
        request: The JSON of the request.
        expected: The input of the model.
        binary_data: The bytes that follow the JSON.

    Raises:
        DataError: The name, the type, the shape or the number of rows is wrong, or the data do not fit the shape.
    """
    tensor, dtype = _find_input(request, expected)
    # The shape bounds the size of the array before memory is allocated.
    if len(tensor.shape) != len(expected.shape) or min(tensor.shape) < 1 or tensor.shape[0] > _MOST_ROWS:
        allowed = f"{list(expected.shape)} with 1 to {_MOST_ROWS} rows"
        raise DataError(f"'{tensor.name}' has shape {list(tensor.shape)}, expected {allowed}")
    # The values are behind the JSON, or in it.
    if "binary_data_size" in tensor.parameters:
        return _read_binary(tensor, dtype, binary_data)
    return _read_numbers(tensor, dtype)


def _find_input(request: InferRequest, expected: Tensor) -> tuple[InputTensor, str]:
    """Return the only input of a request, and the NumPy type of its values.

    Raises:
        DataError: There is another number of inputs, or the name or the type is wrong.
    """
    if len(request.inputs) != 1 or request.inputs[0].name != expected.name:
        names = ", ".join(f"'{tensor.name}'" for tensor in request.inputs)
        raise DataError(f"inputs {names}; expected one, '{expected.name}' {expected.datatype} {list(expected.shape)}")
    [tensor] = request.inputs
    dtype = _NUMPY_TYPES.get(tensor.datatype)
    if dtype is None:
        raise DataError(f"'{tensor.name}' is {tensor.datatype}, expected {expected.datatype} or another numeric type")
    return tensor, dtype


def _read_binary(tensor: InputTensor, dtype: str, binary_data: bytes) -> np.ndarray:
    """Return the values of an input that follow the JSON as bytes.

    Raises:
        DataError: Their number does not fit the shape.
    """
    size = math.prod(tensor.shape) * np.dtype(dtype).itemsize
    if tensor.parameters["binary_data_size"] != size or len(binary_data) != size:
        raise DataError(f"'{tensor.name}' has {len(binary_data)} bytes behind the JSON, its shape and type need {size}")
    return np.frombuffer(binary_data, dtype).reshape(tensor.shape)


def _read_numbers(tensor: InputTensor, dtype: str) -> np.ndarray:
    """Return the values of an input that are in the JSON, as flat or nested lists.

    Raises:
        DataError: They are no numbers of that type, or do not fit the shape.
    """
    count = math.prod(tensor.shape)
    values = _flatten(tensor.data)
    if len(values) != count:
        raise DataError(f"'{tensor.name}' has {len(values)} values, its shape {list(tensor.shape)} needs {count}")
    try:
        with np.errstate(over="ignore"):  # the models reject the infinity that results
            return np.array(values, np.float64).astype(dtype).reshape(tensor.shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"'{tensor.name}' holds something else than numbers of type {tensor.datatype}") from error


def _without_values(request: InferRequest) -> InferRequest:
    """Return a request without the values of its inputs, to release their memory."""
    inputs = tuple(tensor.model_copy(update={"data": None}) for tensor in request.inputs)
    return request.model_copy(update={"inputs": inputs})


def _flatten(data: Any) -> list[Any]:
    """Return the values of flat or nested lists, which the protocol both allows, in order; none for other data."""
    if not isinstance(data, list):
        return []
    if not data or not isinstance(data[0], list):
        return data
    values: list[Any] = []
    for item in data:
        values += _flatten(item)
    return values


def _build_response(request: InferRequest, model: str, pair: Pair, arrays: Mapping[Tensor, np.ndarray]) -> Response:
    """Return the response with the requested outputs, each as JSON or as bytes.

    Args:
        request: The JSON of the request; if it names no outputs, all are returned.
        model: The name of the model.
        pair: The pair that has answered.
        arrays: All outputs of the model, (n, ...) each.

    Raises:
        DataError: The request names an unknown output.
    """
    # 1. Which outputs are requested.
    requested = {output.name: output for output in request.outputs}
    names = [tensor.name for tensor in arrays]
    unknown_names = [name for name in requested if name not in names]
    if unknown_names:
        raise DataError(f"model '{model}' has no output {', '.join(unknown_names)}; it has {', '.join(names)}")
    # 2. The outputs, as JSON or as bytes.
    outputs = []
    binary_data = b""
    for tensor, array in arrays.items():
        if requested and tensor.name not in requested:
            continue
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(array.shape)}
        if _is_binary(request, requested.get(tensor.name)):
            raw = _to_bytes(array, tensor.datatype)
            output["parameters"] = {"binary_data_size": len(raw)}
            binary_data += raw
        else:
            output["data"] = array.reshape(-1).tolist()
        outputs.append(output)
    # 3. The JSON, and behind it the bytes of the binary outputs.
    content: dict[str, Any] = {"model_name": model, "model_version": VERSION}
    if request.id:
        content["id"] = request.id
    content |= {"parameters": pair.id.as_json(), "outputs": outputs}
    header = json.dumps(content, allow_nan=False).encode()
    if not binary_data:
        return Response(200, header)
    header_length = (("Inference-Header-Content-Length", str(len(header))),)
    return Response(200, header + binary_data, "application/octet-stream", header_length)


def _is_binary(request: InferRequest, output: RequestedOutput | None) -> bool:
    """Return whether an output is sent as bytes: by its own parameter, or else by that of the request."""
    by_default = bool(request.parameters.get("binary_data_output"))
    return by_default if output is None else bool(output.parameters.get("binary_data", by_default))


def _to_bytes(array: np.ndarray, datatype: str) -> bytes:
    """Return an array in the form of the binary extension: row by row, little endian; before each text its length."""
    if datatype != "BYTES":
        return array.astype(_NUMPY_TYPES[datatype]).tobytes()
    parts = []
    for text in array.reshape(-1).tolist():
        encoded = str(text).encode()
        parts.append(len(encoded).to_bytes(4, "little") + encoded)
    return b"".join(parts)
