"""A personal model as one ONNX file for any runtime: preparation of the input, encoder, head, calibration, unknowns.

The file holds operators of ``ai.onnx`` alone, and takes what a program has at hand: pixels of an image of the task's
size, or a window of a recording in the units of its sensor. Its metadata say what it is and how to feed it, with an
input that is easily made and its answer, so that a program in another language can check itself.

Writing needs the package ``onnx``, and neither torch nor an exporter: the encoder's file is taken as it came.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bundle.unpacked import Bundle
from ..core.errors import MissingCapability, StateError, UsageError
from ..core.graph import FLOAT, LEAST_OPSET, Graph, Node, Value
from ..core.storage import read_regular
from ..core.task import ImageInput, InputSpec
from ..data.preprocess import for_channels, normalise_images, normalise_windows
from ..heads.saved import SavedHead, SavedNumeric
from ..version import __version__
from .batch_norm import encoder_with_statistics
from .encoder import Encoder, onnxruntime

if TYPE_CHECKING:
    import onnx

TOLERANCE = 1e-5
"""How much an answer of the file may differ from that of `SavedHead.predict_proba`, or relatively from a number."""

METADATA = "headwater"
"""The key of the file's metadata whose value is a JSON object about it."""

_CHECKED_INPUTS = 4
_PRIME = 7919
_LARGEST_IR = 10
"""Version of the file's form that runtimes from 2024 on read; nothing newer is used."""


@dataclass(frozen=True)
class OneFile:
    """A written model.

    Attributes:
        content: The ONNX file.
        about: What its metadata say; see `_describe`.
        worst: The largest difference of its answers from those of the head on inputs that were tried, as `TOLERANCE`.
    """

    content: bytes
    about: dict[str, Any]
    worst: float


def write_one_file(bundle: Bundle, encoder: Encoder, head: SavedHead | SavedNumeric) -> OneFile:
    """Write a personal model as one ONNX file, and check it against the head.

    Args:
        bundle: The bundle that the encoder came from.
        encoder: The encoder of the head's precision, with the device's own batch norm where the head has one.
        head: The head, of classes or of numbers.

    Raises:
        MissingCapability: The package ``onnx`` is not installed.
        UsageError: The head has no form as ONNX operators, or does not take the encoder's features.
        StateError: What the file answers differs from what the head answers.
    """
    if isinstance(head, SavedHead) and head.local is not None:
        raise UsageError(
            f"this head works without the encoder ('{head.local.name}'), and such a model cannot become one file; fit "
            "one that takes the encoder's features, such as 'edge-agent fit --head lr'"
        )
    _check_onnx()
    from onnx import checker, load_model_from_string

    spec = bundle.manifest.task.input
    tail = _write_tail(head)
    # Step 1: the graph, checked by the rules of ONNX.
    model = load_model_from_string(_encoder_bytes(bundle, head))
    _join(model, spec, tail)
    checker.check_model(model, full_check=True)
    # Step 2: the same answers as the head's, to inputs that no weight was chosen by.
    runner = _Runner(model.SerializeToString(), spec.kind)
    worst = _compare(runner, spec, encoder, head)
    # Step 3: what the file says about itself, with an answer that it gave.
    answers = {name: array[0].tolist() for name, array in runner.run(example_input(spec)[None]).items()}
    about = _describe(bundle, head, tail)
    about["example"] = {"input": EXAMPLE_RULE[spec.kind], "answers": answers}
    entry = model.metadata_props.add()
    entry.key = METADATA
    entry.value = json.dumps(about)
    return OneFile(model.SerializeToString(), about, worst)


# --- the parts of the graph ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Output:
    """A result of the file: its name for people, the tensor that it is, its dtype, and its columns; None: no axis."""

    name: str
    value: Value
    dtype: str
    columns: int | None = None


@dataclass(frozen=True)
class _Tail:
    """What follows the encoder, and what the file gives."""

    graph: Graph
    outputs: tuple[_Output, ...]


_FEATURES = Value("features")
"""The tensor between encoder and head."""


def _write_tail(head: SavedHead | SavedNumeric) -> _Tail:
    """Write the head with all that belongs to its answer."""
    graph = Graph()
    size = head.head.feature_dim
    features = _Output("features", _FEATURES, FLOAT, size)
    if isinstance(head, SavedNumeric):
        number = head.head.write(graph, _FEATURES)
        value = graph.cast(_flat(graph, number), FLOAT)
        if head.head.predicts_targets:
            return _Tail(graph, (_Output("value", value, FLOAT), features))
        outputs = [_Output("score", value, FLOAT), features]
        threshold = head.head.threshold
        if threshold is not None:
            is_anomaly = graph.add("Greater", _flat(graph, number), np.array(threshold))
            outputs.append(_Output("anomaly", is_anomaly, "bool"))
        return _Tail(graph, tuple(outputs))
    probabilities = head.head.write(graph, _FEATURES)
    if head.confidence.calibration is not None:
        probabilities = head.confidence.calibration.write(graph, probabilities)
    outputs = [
        _Output("probabilities", graph.cast(probabilities, FLOAT), FLOAT, len(head.class_names)),
        features,
    ]
    rule = head.confidence.unknown
    if rule is not None:
        distances, is_unknown = rule.write(graph, _FEATURES)
        outputs.append(_Output("distance", graph.cast(_flat(graph, distances), FLOAT), FLOAT))
        outputs.append(_Output("unknown", _flat(graph, is_unknown), "bool"))
    return _Tail(graph, tuple(outputs))


def _flat(graph: Graph, column: Value) -> Value:
    """Return a column (n, 1) as a vector (n,)."""
    return graph.add("Squeeze", column, np.array([1]))


def _write_input(spec: InputSpec, encoder_input: Value) -> Graph:
    """Write what makes the encoder's input of the file's; see `data.preprocess`."""
    graph = Graph(prefix="input.")
    shape = (-1, 1, 1) if isinstance(spec, ImageInput) else (-1, 1)
    mean = for_channels(spec.mean, spec.channels, shape)
    std = for_channels(spec.std, spec.channels, shape)
    given = Value(spec.kind)
    if isinstance(spec, ImageInput):
        pixels = graph.add("Transpose", graph.cast(given, FLOAT), perm=[0, 3, 1, 2])
        scaled = graph.add("Mul", pixels, np.asarray(1.0 / (255.0 * std), np.float32))
        result = graph.add("Sub", scaled, np.asarray(mean / std, np.float32))
    else:
        result = graph.add("Div", graph.add("Sub", given, mean), std)
    graph.nodes.append(Node("Identity", (result,), (encoder_input,), {}))
    return graph


# --- joining the parts -----------------------------------------------------------------------------------------------


def _encoder_bytes(bundle: Bundle, head: SavedHead | SavedNumeric) -> bytes:
    """Return the encoder's ONNX file, with the device's own batch norm where the head was fitted on that."""
    if head.norm is not None:
        return encoder_with_statistics(bundle, head.norm.variant, head.norm.statistics)
    return read_regular(bundle.folder / bundle.variant(head.precision).file)


def _join(model: onnx.ModelProto, spec: InputSpec, tail: _Tail) -> None:
    """Put the preparation of the input before an encoder, and a head behind it, in place."""
    graph = model.graph
    opset = next(entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"})
    if opset < LEAST_OPSET:
        raise UsageError(f"the encoder's file has opset {opset}, expected {LEAST_OPSET} or later; export it again")
    # Step 1: the encoder's input and output get names that no tensor of the other parts has.
    prepared = Value("input.prepared")
    names = {graph.input[0].name: prepared, graph.output[0].name: _FEATURES}
    for node in graph.node:
        for tensors in (node.input, node.output):
            for position, name in enumerate(tensors):
                tensors[position] = names.get(name, name)
    # What was noted about tensors in between may name the batch differently than the file does now.
    del graph.value_info[:]
    # Step 2: all nodes in the order in which they run.
    begin = _write_input(spec, prepared)
    encoder_nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*_nodes_of(begin), *encoder_nodes, *_nodes_of(tail.graph)])
    graph.initializer.extend([*_constants_of(begin), *_constants_of(tail.graph)])
    # Step 3: what goes in and comes out, under the names that the file promises.
    graph.name = "headwater"
    del graph.input[:]
    graph.input.append(_declare(spec.kind, _input_dtype(spec), ("n", *input_shape(spec))))
    del graph.output[:]
    for output in tail.outputs:
        if output.value != output.name:
            graph.node.append(_node(Node("Identity", (output.value,), (Value(output.name),), {})))
        columns = () if output.columns is None else (output.columns,)
        graph.output.append(_declare(output.name, output.dtype, ("n", *columns)))
    model.ir_version = min(model.ir_version, _LARGEST_IR)
    model.producer_name = "headwater"
    model.producer_version = __version__


def _nodes_of(graph: Graph) -> list[onnx.NodeProto]:
    return [_node(node) for node in graph.nodes]


def _node(node: Node) -> onnx.NodeProto:
    """Return an operator in the form of the package ``onnx``, in which a dtype is a number."""
    from onnx import helper

    attributes = dict(node.attributes)
    if node.operator == "Cast":
        attributes["to"] = helper.np_dtype_to_tensor_dtype(np.dtype(attributes["to"]))
    result: onnx.NodeProto = helper.make_node(node.operator, list(node.inputs), list(node.outputs), **attributes)
    return result


def _constants_of(graph: Graph) -> list[onnx.TensorProto]:
    from onnx import numpy_helper

    return [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in graph.constants.items()]


def _declare(name: str, dtype: str, shape: tuple[int | str, ...]) -> onnx.ValueInfoProto:
    from onnx import helper

    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    result: onnx.ValueInfoProto = helper.make_tensor_value_info(name, kind, shape)
    return result


def _check_onnx() -> None:
    """Raises MissingCapability where the package ``onnx`` is not installed."""
    if importlib.util.find_spec("onnx") is None:
        raise MissingCapability.package("onnx", "onnx", "writing a model as one file")


# --- what goes in ----------------------------------------------------------------------------------------------------

EXAMPLE_RULE = {
    "image": "value number i of the image, in the order height, width, channels, is (7919 * i) % 256",
    "window": "value number i of the window, in the order channels, time, is ((7919 * i) % 256 - 128) / 128",
}
"""How the example's input is made, by kind of input."""


def input_shape(spec: InputSpec) -> tuple[int, ...]:
    """Return the shape of one input of the file: height, width, channels of an image; channels, time of a window."""
    if isinstance(spec, ImageInput):
        return (spec.height, spec.width, spec.channels)
    return (spec.channels, spec.length)


def _input_dtype(spec: InputSpec) -> str:
    return "uint8" if isinstance(spec, ImageInput) else FLOAT


def example_input(spec: InputSpec) -> np.ndarray:
    """Return the example's input, of `input_shape`: uint8 for images, float32 for windows; see `EXAMPLE_RULE`."""
    shape = input_shape(spec)
    return _inputs_of(_PRIME * np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape) % 256, spec)


def _inputs_of(numbers: np.ndarray, spec: InputSpec) -> np.ndarray:
    """Return integers 0 to 255 as pixels, or as values of a sensor from -1 to 1."""
    if isinstance(spec, ImageInput):
        return numbers.astype(np.uint8)
    return ((numbers - 128) / 128).astype(np.float32)


def prepare(inputs: np.ndarray, spec: InputSpec) -> np.ndarray:
    """Return what the encoder takes of inputs (n, ...) of the file, computed by the code that prepares samples."""
    if isinstance(spec, ImageInput):
        return normalise_images(inputs.transpose(0, 3, 1, 2).astype(np.float32), spec)
    return normalise_windows(inputs.astype(np.float32), spec)


# --- what comes out --------------------------------------------------------------------------------------------------


class _Runner:
    """The file in ONNX Runtime, as any program would run it."""

    def __init__(self, content: bytes, input_name: str) -> None:
        self._session = onnxruntime().InferenceSession(content, providers=["CPUExecutionProvider"])
        self._input_name = input_name

    def run(self, inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Return the outputs by name."""
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, {self._input_name: inputs}), strict=True))


def _compare(runner: _Runner, spec: InputSpec, encoder: Encoder, head: SavedHead | SavedNumeric) -> float:
    """Return the largest difference between the answers of the file and of the head.

    Raises:
        StateError: It is above `TOLERANCE`.
    """
    rng = np.random.default_rng(0)
    inputs = _inputs_of(rng.integers(0, 256, (_CHECKED_INPUTS, *input_shape(spec))), spec)
    answers = runner.run(inputs)
    features = encoder.features(prepare(inputs, spec))
    if isinstance(head, SavedNumeric):
        numbers = head.head.predict(features)
        written = answers["value" if head.head.predicts_targets else "score"]
        worst = float(np.max(np.abs(written - numbers) / np.maximum(1.0, np.abs(numbers))))
    else:
        worst = float(np.max(np.abs(answers["probabilities"] - head.predict_proba(features))))
    if not worst <= TOLERANCE:
        raise StateError(
            f"answers of the file differ from the head's by {worst:.2g}, expected {TOLERANCE:g} at most; nothing was "
            "written: fit the head again, or choose another one"
        )
    return worst


def _describe(bundle: Bundle, head: SavedHead | SavedNumeric, tail: _Tail) -> dict[str, Any]:
    """Return what the file says about itself."""
    spec = bundle.manifest.task.input
    about: dict[str, Any] = {
        "format": 1,
        "input": {"name": spec.kind, "dtype": _input_dtype(spec), "shape": ["n", *input_shape(spec)]},
        "preparation": _PREPARATION[spec.kind],
        "outputs": {output.name: _OUTPUTS[output.name] for output in tail.outputs},
        "bundle_id": bundle.manifest.bundle_id,
        "head": head.head.name,
        "precision": head.precision,
        "own_batch_norm": head.norm is not None,
    }
    if isinstance(spec, ImageInput):
        about["input"]["channels"] = "RGB" if spec.channels == 3 else "grey, ITU-R 601"
        about["input"]["resize"] = f"{spec.resize}, {'with' if spec.antialias else 'without'} antialiasing"
    if isinstance(head, SavedNumeric):
        if not head.head.predicts_targets:
            about["threshold"] = head.head.threshold
        return about
    about["labels"] = list(head.class_names)
    about["temperature"] = None if head.confidence.calibration is None else head.confidence.calibration.temperature
    rule = head.confidence.unknown
    about["unknown_threshold"] = None if rule is None else rule.threshold
    about["unknown_rate"] = None if rule is None else rule.rate
    return about


_PREPARATION = {
    "image": "resize the image to height and width, and give its pixels, 0 to 255; the file normalises them",
    "window": "give the values in the units of the sensor, by channel; the file normalises them",
}

_OUTPUTS = {
    "probabilities": "of the labels, in their order; they add up to 1",
    "features": "what the encoder makes of the input",
    "distance": "how far the input is from the training samples; unknown_threshold belongs to it",
    "unknown": "true where the distance is above unknown_threshold: the label means nothing then",
    "value": "the number that the head predicts, in the unit of its targets",
    "score": "how unlike the normal samples the input is, in standard deviations",
    "anomaly": "true where the score is above the threshold",
}
"""What an output means, by its name."""
