"""Writes a personal model as one ONNX file for any runtime.

The file contains the preparation of the input, the encoder, the head, its calibration and its rule for unknown inputs.
It uses standard operators (``ai.onnx``) only. Its input is what a program has at hand: the pixels of an image of the
task's size, or a window of a recording in the units of the sensor. Its metadata describe the input and the outputs.
They also have an example: a rule that makes an input, and its answer, by which a program in another language can be
checked.

Writing needs the package ``onnx``, but neither torch nor an exporter: the nodes of the encoder are copied from its
file.
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
from ..heads import Head
from ..heads.saved import SavedHead, SavedNumeric
from ..version import __version__
from .batch_norm import encoder_with_statistics
from .encoder import Encoder, onnxruntime
from .local.models import HeadInput

if TYPE_CHECKING:
    import onnx

TOLERANCE = 1e-5
"""The largest difference between answers of the file and of the head that is allowed.

It is absolute for probabilities, and for numbers up to 1; for larger numbers it is relative.
"""

METADATA = "headwater"
"""The key in the file's metadata whose value is a JSON object that describes the file."""

_CHECKED_INPUTS = 4
"""The number of random inputs for which answers are compared."""

_PRIME = 7919
"""The factor in the rule of the example; see `EXAMPLE_RULE`."""

_LARGEST_IR = 10
"""The newest version of the ONNX format that is written: runtimes from 2024 on can read it."""


@dataclass(frozen=True)
class OneFile:
    """A personal model as an ONNX file.

    Attributes:
        content: The bytes of the file.
        about: The JSON object in its metadata; see `_describe`.
        largest_difference: The largest difference between its answers and those of the head; see `TOLERANCE`.
    """

    content: bytes
    about: dict[str, Any]
    largest_difference: float


def write_one_file(bundle: Bundle, encoder: Encoder, head: SavedHead | SavedNumeric) -> OneFile:
    """Write a personal model as one ONNX file, and check it against the head.

    Args:
        bundle: The bundle of the encoder.
        encoder: The encoder in the precision of the head, with the device's own batch norm if the head was fitted on
            it.
        head: The head, which answers with classes or with numbers.

    Raises:
        MissingCapability: The package ``onnx`` is not installed.
        UsageError: The head cannot be written as ONNX operators.
        StateError: The answers of the file differ from those of the head.
    """
    _check_onnx()
    from onnx import checker, load_model_from_string

    spec = bundle.manifest.task.input
    head_graph = _write_head(head)
    # Step 1: assemble the graph, and check it by the rules of ONNX.
    model = load_model_from_string(_encoder_bytes(bundle, head))
    _assemble(model, spec, head_graph, input_dtype(spec))
    checker.check_model(model, full_check=True)
    # Step 2: compare its answers with those of the head, for random inputs.
    runner = _Runner(model.SerializeToString(), spec.kind)
    largest_difference = _compare(runner, spec, encoder, head)
    # Step 3: describe the file in its metadata, with the answers of the file itself to the example.
    answers = {name: array[0].tolist() for name, array in runner.run(example_input(spec)[None]).items()}
    about = _describe(bundle, head, head_graph)
    about["example"] = {"input": EXAMPLE_RULE[spec.kind], "answers": answers}
    entry = model.metadata_props.add()
    entry.key = METADATA
    entry.value = json.dumps(about)
    return OneFile(model.SerializeToString(), about, largest_difference)


def add_raw_input(model: onnx.ModelProto, spec: InputSpec, classes: int, *, head: Head | None, dtype: str) -> None:
    """Make a traced model one that takes pixels or values of a sensor, and answers with ``probabilities``, in place.

    Args:
        model: A graph from prepared inputs to features, or to probabilities where there is no ``head``.
        spec: The input of the task.
        classes: Number of the classes.
        head: A head on the features; None: the graph answers with probabilities itself.
        dtype: Of the file's input, ``uint8`` or ``float32``; pixels are 0 to 255 in both.

    Raises:
        UsageError: The opset of the graph is too old, or the head has no form as ONNX operators.
    """
    graph = Graph()
    answer = _FEATURES if head is None else graph.cast(head.write(graph, _FEATURES), FLOAT)
    _assemble(model, spec, _HeadGraph(graph, (_Output("probabilities", answer, FLOAT, classes),)), dtype)


def describe_input(spec: InputSpec, dtype: str) -> dict[str, Any]:
    """Return what the metadata of a file say of its input: name, dtype and shape, and what an image has to be."""
    about: dict[str, Any] = {"name": spec.kind, "dtype": dtype, "shape": ["n", *input_shape(spec)]}
    if isinstance(spec, ImageInput):
        about["channels"] = "RGB" if spec.channels == 3 else "grey, ITU-R 601"
        about["resize"] = f"{spec.resize}, {'with' if spec.antialias else 'without'} antialiasing"
    return about


# --- the parts of the graph ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Output:
    """An output of the file.

    Attributes:
        name: Its name in the file.
        value: The tensor of the graph that it is.
        dtype: The dtype of the tensor.
        columns: The size of the second axis; None: the output has the shape (n,).
    """

    name: str
    value: Value
    dtype: str
    columns: int | None = None


@dataclass(frozen=True)
class _HeadGraph:
    """The operators behind the encoder, and the outputs of the file.

    Attributes:
        graph: The operators.
        outputs: The outputs.
        uses_encoder: Whether any of them takes the encoder's features.
    """

    graph: Graph
    outputs: tuple[_Output, ...]
    uses_encoder: bool = True


_PREPARED = Value("input.prepared")
"""The prepared input, which encoder and features of raw inputs take."""

_FEATURES = Value("features")
"""The tensor between encoder and head."""


def _write_head(head: SavedHead | SavedNumeric) -> _HeadGraph:
    """Write the head, with everything that its answer consists of."""
    if isinstance(head, SavedNumeric):
        return _write_numeric_head(head)
    return _write_class_head(head)


def _write_numeric_head(head: SavedNumeric) -> _HeadGraph:
    """Write a head that predicts a number, or an anomaly score with its threshold."""
    graph = Graph()
    features = _Output("features", _FEATURES, FLOAT, head.head.feature_dim)
    number = head.head.write(graph, _FEATURES)
    value = graph.cast(_squeeze(graph, number), FLOAT)
    if head.head.predicts_targets:
        return _HeadGraph(graph, (_Output("value", value, FLOAT), features))
    outputs = [_Output("score", value, FLOAT), features]
    threshold = head.head.threshold
    if threshold is not None:
        # The score is compared in the precision of the head, before it is rounded to float32.
        is_anomaly = graph.add("Greater", _squeeze(graph, number), np.array(threshold))
        outputs.append(_Output("anomaly", is_anomaly, "bool"))
    return _HeadGraph(graph, tuple(outputs))


def _write_class_head(head: SavedHead) -> _HeadGraph:
    """Write a head that answers with probabilities, its calibration, and its rule for unknown inputs."""
    graph = Graph()
    probabilities = head.head.write(graph, _write_head_input(graph, head.takes))
    if head.confidence.calibration is not None:
        probabilities = head.confidence.calibration.write(graph, probabilities)
    outputs = [_Output("probabilities", graph.cast(probabilities, FLOAT), FLOAT, len(head.class_names))]
    if head.takes.local is not None and not head.takes.split:
        return _HeadGraph(graph, tuple(outputs), uses_encoder=False)
    outputs.append(_Output("features", _FEATURES, FLOAT, head.takes.split or head.head.feature_dim))
    rule = head.confidence.unknown
    if rule is not None:
        distances, is_unknown = rule.write(graph, _FEATURES)
        outputs.append(_Output("distance", graph.cast(_squeeze(graph, distances), FLOAT), FLOAT))
        outputs.append(_Output("unknown", _squeeze(graph, is_unknown), "bool"))
    return _HeadGraph(graph, tuple(outputs))


def _write_head_input(graph: Graph, takes: HeadInput) -> Value:
    """Write what a head takes: the encoder's features, those of the raw inputs, or both side by side."""
    local = takes.local
    if local is None:
        return _FEATURES
    rows = local.write(graph, _PREPARED)
    return graph.add("Concat", _FEATURES, rows, axis=1) if takes.split else rows


def _squeeze(graph: Graph, column: Value) -> Value:
    """Return a column (n, 1) as a vector (n,)."""
    return graph.add("Squeeze", column, np.array([1]))


def _write_input(spec: InputSpec, encoder_input: Value) -> Graph:
    """Write the preparation of the input: from the file's input to the encoder's; see `data.preprocess`.

    Images are transposed to (n, channels, height, width) and scaled to 0..1; images and windows are standardised.
    """
    graph = Graph(prefix="input.")
    shape = (-1, 1, 1) if isinstance(spec, ImageInput) else (-1, 1)
    mean = for_channels(spec.mean, spec.channels, shape)
    std = for_channels(spec.std, spec.channels, shape)
    file_input = Value(spec.kind)
    if isinstance(spec, ImageInput):
        pixels = graph.add("Transpose", graph.cast(file_input, FLOAT), perm=[0, 3, 1, 2])
        scaled = graph.add("Mul", pixels, np.asarray(1.0 / (255.0 * std), np.float32))
        result = graph.add("Sub", scaled, np.asarray(mean / std, np.float32))
    else:
        result = graph.add("Div", graph.add("Sub", file_input, mean), std)
    graph.nodes.append(Node("Identity", (result,), (encoder_input,), {}))
    return graph


# --- joining the parts -----------------------------------------------------------------------------------------------


def _encoder_bytes(bundle: Bundle, head: SavedHead | SavedNumeric) -> bytes:
    """Return the encoder's ONNX file, with the device's own batch norm statistics if the head was fitted on them."""
    if head.norm is not None:
        return encoder_with_statistics(bundle, head.norm.variant, head.norm.statistics)
    return read_regular(bundle.folder / bundle.variant(head.precision).file)


def _assemble(model: onnx.ModelProto, spec: InputSpec, head_graph: _HeadGraph, dtype: str) -> None:
    """Add the preparation of the input before the encoder, and the head behind it; ``model`` is changed in place.

    ``dtype`` is that of the file's input.

    Raises:
        UsageError: The opset of the encoder is too old.
    """
    graph = model.graph
    opset = next(entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"})
    if opset < LEAST_OPSET:
        raise UsageError(f"the encoder's file has opset {opset}, expected {LEAST_OPSET} or later; export it again")
    # Step 1: rename the encoder's input and output, so that the three parts are connected by name.
    names = {graph.input[0].name: _PREPARED, graph.output[0].name: _FEATURES}
    for node in graph.node:
        for tensors in (node.input, node.output):
            for position, name in enumerate(tensors):
                tensors[position] = names.get(name, name)
    # The optional notes on shapes of inner tensors may use another name for the batch axis than the file does now.
    del graph.value_info[:]
    # Step 2: put all nodes in the order in which they run.
    begin = _write_input(spec, _PREPARED)
    encoder_nodes = list(graph.node)
    del graph.node[:]
    if not head_graph.uses_encoder:
        encoder_nodes.clear()
        del graph.initializer[:]
    graph.node.extend([*_nodes_of(begin), *encoder_nodes, *_nodes_of(head_graph.graph)])
    graph.initializer.extend([*_constants_of(begin), *_constants_of(head_graph.graph)])
    # Step 3: declare the input and the outputs, under the names that the metadata describe.
    graph.name = "headwater"
    del graph.input[:]
    graph.input.append(_declare(spec.kind, dtype, ("n", *input_shape(spec))))
    del graph.output[:]
    for output in head_graph.outputs:
        if output.value != output.name:
            graph.node.append(_node(Node("Identity", (output.value,), (Value(output.name),), {})))
        columns = () if output.columns is None else (output.columns,)
        graph.output.append(_declare(output.name, output.dtype, ("n", *columns)))
    # Step 4: the version of the format, and the producer.
    model.ir_version = min(model.ir_version, _LARGEST_IR)
    model.producer_name = "headwater"
    model.producer_version = __version__


def _nodes_of(graph: Graph) -> list[onnx.NodeProto]:
    """Return the operators of a graph as ``onnx`` represents them."""
    return [_node(node) for node in graph.nodes]


def _node(node: Node) -> onnx.NodeProto:
    """Return an operator as ``onnx`` represents it; in attributes of ``onnx`` a dtype is a number."""
    from onnx import helper

    attributes = dict(node.attributes)
    if node.operator == "Cast":
        attributes["to"] = helper.np_dtype_to_tensor_dtype(np.dtype(attributes["to"]))
    result: onnx.NodeProto = helper.make_node(node.operator, list(node.inputs), list(node.outputs), **attributes)
    return result


def _constants_of(graph: Graph) -> list[onnx.TensorProto]:
    """Return the constants of a graph as ``onnx`` represents them."""
    from onnx import numpy_helper

    return [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in graph.constants.items()]


def _declare(name: str, dtype: str, shape: tuple[int | str, ...]) -> onnx.ValueInfoProto:
    """Return the declaration of an input or output; an axis of any size has a name instead of a number."""
    from onnx import helper

    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    result: onnx.ValueInfoProto = helper.make_tensor_value_info(name, kind, shape)
    return result


def _check_onnx() -> None:
    """Raise `MissingCapability` if the package ``onnx`` is not installed."""
    if importlib.util.find_spec("onnx") is None:
        raise MissingCapability.package("onnx", "onnx", "writing a model as one file")


# --- the input of the file -------------------------------------------------------------------------------------------

EXAMPLE_RULE = {
    "image": "value number i of the image, in the order height, width, channels, is (7919 * i) % 256",
    "window": "value number i of the window, in the order channels, time, is ((7919 * i) % 256 - 128) / 128",
}
"""How the input of the example is computed, by kind of input."""


def input_shape(spec: InputSpec) -> tuple[int, ...]:
    """Return the shape of one input: (height, width, channels) of an image, (channels, time) of a window."""
    if isinstance(spec, ImageInput):
        return (spec.height, spec.width, spec.channels)
    return (spec.channels, spec.length)


def input_dtype(spec: InputSpec) -> str:
    """Return the dtype of a file's input: uint8 for images, float32 for windows."""
    return "uint8" if isinstance(spec, ImageInput) else FLOAT


def example_input(spec: InputSpec) -> np.ndarray:
    """Return the input of the example, of `input_shape`: uint8 for images, float32 for windows; see `EXAMPLE_RULE`."""
    shape = input_shape(spec)
    positions = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    return _to_input(_PRIME * positions % 256, spec)


def _to_input(numbers: np.ndarray, spec: InputSpec) -> np.ndarray:
    """Return integers from 0 to 255 as pixels (uint8), or as values of a sensor from -1 to 1 (float32)."""
    if isinstance(spec, ImageInput):
        return numbers.astype(np.uint8)
    return ((numbers - 128) / 128).astype(np.float32)


def prepare(inputs: np.ndarray, spec: InputSpec) -> np.ndarray:
    """Return the encoder's input for inputs (n, ...) of the file, prepared by the same code as samples."""
    if isinstance(spec, ImageInput):
        return normalise_images(inputs.transpose(0, 3, 1, 2).astype(np.float32), spec)
    return normalise_windows(inputs.astype(np.float32), spec)


# --- checking and describing the file --------------------------------------------------------------------------------


class _Runner:
    """Runs the file with ONNX Runtime, as any program would."""

    def __init__(self, content: bytes, input_name: str) -> None:
        self._session = onnxruntime().InferenceSession(content, providers=["CPUExecutionProvider"])
        self._input_name = input_name

    def run(self, inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Return the outputs for inputs (n, ...), by name."""
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, {self._input_name: inputs}), strict=True))


def _compare(runner: _Runner, spec: InputSpec, encoder: Encoder, head: SavedHead | SavedNumeric) -> float:
    """Return the largest difference between the answers of the file and of the head.

    Raises:
        StateError: The difference is above `TOLERANCE`, or not a number.
    """
    rng = np.random.default_rng(0)
    inputs = _to_input(rng.integers(0, 256, (_CHECKED_INPUTS, *input_shape(spec))), spec)
    answers = runner.run(inputs)
    prepared = prepare(inputs, spec)
    if isinstance(head, SavedNumeric):
        numbers = head.head.predict(encoder.features(prepared))
        from_file = answers["value" if head.head.predicts_targets else "score"]
        largest_difference = float(np.max(np.abs(from_file - numbers) / np.maximum(1.0, np.abs(numbers))))
    else:
        rows = head.takes.rows(lambda: encoder.features(prepared), lambda: prepared)
        largest_difference = float(np.max(np.abs(answers["probabilities"] - head.predict_proba(rows))))
    # Written as "not below", so that NaN fails, too.
    if not largest_difference <= TOLERANCE:
        raise StateError(
            f"answers of the file differ from the head's by {largest_difference:.2g}, expected {TOLERANCE:g} at most; "
            "nothing was written: fit the head again, or choose another one"
        )
    return largest_difference


def _describe(bundle: Bundle, head: SavedHead | SavedNumeric, head_graph: _HeadGraph) -> dict[str, Any]:
    """Return the JSON object that describes the file in its metadata, without the example."""
    spec = bundle.manifest.task.input
    about: dict[str, Any] = {
        "format": 1,
        "input": describe_input(spec, input_dtype(spec)),
        "preparation": PREPARATION[spec.kind],
        "outputs": {output.name: OUTPUTS[output.name] for output in head_graph.outputs},
        "bundle_id": bundle.manifest.bundle_id,
        "head": head.title if isinstance(head, SavedHead) else head.head.name,
        "precision": head.precision,
        "own_batch_norm": head.norm is not None,
    }
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


PREPARATION = {
    "image": "resize the image to height and width; the input is its pixels, 0 to 255, which the file normalises",
    "window": "the input is the values in the units of the sensor, by channel, which the file normalises",
}
"""How to prepare an input, by kind of input."""

OUTPUTS = {
    "probabilities": "the probabilities of the labels, in their order; they add up to 1",
    "features": "the features that the encoder computes from the input",
    "distance": "how far the input is from the training samples; unknown_threshold belongs to it",
    "unknown": "true if the distance is above unknown_threshold: the label is meaningless then",
    "value": "the number that the head predicts, in the unit of its targets",
    "score": "how unlike the normal samples the input is, in standard deviations",
    "anomaly": "true if the score is above the threshold",
}
"""The meaning of each output, by its name."""
