"""Encoders whose batch norm a device estimates again, without torch and without the package onnx there.

The graph keeps each batch norm as a node, with its own statistics as constants at known places of the file: a device
writes other statistics over them, and ONNX Runtime folds them into the convolutions when it loads the file. A *probe*
is appended to the file to estimate them: a serialised graph message, whose nodes protobuf adds to those of the encoder
when both are read as one. It computes the encoder a second time from the same weights, with the statistics of the
batch blended into those of the file, layer by layer in one pass, and returns the blended statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as Norm

from edge_agent.bundle.manifest import FreeNorm, NormLayer
from edge_agent.core.errors import ExportRejected
from edge_agent.core.task import Task

from .encoder import Exported, to_onnx

PROBE_FILE = "norm_probe.onnx"
"""The name of the probe's file in a bundle."""

PREFIX = "estimate/"
"""The beginning of the names that a probe adds to the graph, which no name of the encoder has."""

_FLAT = f"{PREFIX}flat"
"""The constant that is the form of a flat tensor: [-1]."""

_NAME_TAG = b"\x42"
"""The byte before the name of a tensor in an ONNX file."""

_DATA_TAG = b"\x4a"
"""The byte before the raw data of a tensor in an ONNX file, which follow its name."""


@dataclass(frozen=True)
class Adaptable:
    """An encoder with free batch norm: its graph, the probe that is appended to it, and the manifest's part."""

    exported: Exported
    probe: bytes
    free_norm: FreeNorm


def free_batch_norm(encoder: nn.Module, task: Task) -> Adaptable | None:
    """Return the encoder in eval mode with free batch norm; None where it has none. The given module is left as it is.

    Raises:
        ExportRejected: The exporter cannot translate this encoder, or one of its batch norm layers is used twice.
        MissingCapability: The package onnx is not installed.
    """
    count = sum(isinstance(module, Norm) for module in encoder.modules())
    if not count:
        return None
    exported = to_onnx(encoder, task, "legacy", keep_norm=True)
    import onnx

    graph = onnx.load_from_string(exported.model)
    channels = _own_constants(graph)
    if len(channels) != count:
        raise ExportRejected(
            f"encoder '{task.encoder}': {count} batch norm layers, {len(channels)} of them in the graph; one that is "
            "used twice cannot be estimated again"
        )
    model = graph.SerializeToString(deterministic=True)
    layers: list[NormLayer] = []
    for layer, size in enumerate(channels):
        mean_at = _place(model, layer, "mean", size)
        variance_at = _place(model, layer, "var", size)
        layers.append(NormLayer(mean_at=mean_at, variance_at=variance_at, channels=size))
    probe = _probe(graph, task.input.kind)
    return Adaptable(replace(exported, model=model), probe, FreeNorm(probe=PROBE_FILE, layers=tuple(layers)))


def _constant(layer: int, statistic: str) -> str:
    """Return the name of the constant that holds a layer's ``mean`` or ``var``."""
    return f"norm.{layer}.{statistic}"


_MEAN_INPUT = 3
_VARIANCE_INPUT = 4
"""The positions of the stored statistics among the inputs of a batch norm node."""


def _own_constants(model: Any) -> list[int]:
    """Give each batch norm of the graph its own constants for mean and variance; returns the channels of each.

    The exporter shares equal constants between layers by Identity nodes; a device could not change those of one layer.
    """
    from onnx import numpy_helper

    graph = model.graph
    constants = {constant.name: constant for constant in graph.initializer}
    # 1. Identity nodes of constants go, and whoever reads one reads the constant itself.
    nodes = _without_identities(graph, constants)
    # 2. Each batch norm gets copies of its statistics, under names that say which layer they belong to.
    channels: list[int] = []
    for node in nodes:
        if node.op_type != "BatchNormalization":
            continue
        layer = len(channels)
        for position, statistic in ((_MEAN_INPUT, "mean"), (_VARIANCE_INPUT, "var")):
            array = numpy_helper.to_array(constants[node.input[position]]).astype(np.float32)
            node.input[position] = _constant(layer, statistic)
            graph.initializer.append(numpy_helper.from_array(array.copy(), node.input[position]))
        channels.append(len(array))
    # 3. Constants that nobody reads any more go, too.
    names_read = {name for node in nodes for name in node.input}
    used_constants = [constant for constant in graph.initializer if constant.name in names_read]
    _replace_all(graph.node, nodes)
    _replace_all(graph.initializer, used_constants)
    return channels


def _without_identities(graph: Any, constants: Collection[str]) -> list[Any]:
    """Return copies of the nodes without Identity nodes of constants; their readers read the constants themselves."""
    source_of: dict[str, str] = {}
    for node in graph.node:
        if node.op_type == "Identity" and node.input[0] in constants:
            source_of[node.output[0]] = node.input[0]
    nodes = [copy.deepcopy(node) for node in graph.node if node.output[0] not in source_of]
    for node in nodes:
        for position, name in enumerate(node.input):
            node.input[position] = source_of.get(name, name)
    return nodes


def _replace_all(repeated: Any, messages: list[Any]) -> None:
    """Replace the messages of a repeated protobuf field."""
    del repeated[:]
    repeated.extend(messages)


def _place(model: bytes, layer: int, statistic: str, channels: int) -> int:
    """Return the byte of the serialised model at which a constant of `_own_constants` begins."""
    name = _constant(layer, statistic).encode()
    # The length is a variable-length integer: seven bits in each byte, the highest bit says that more follow.
    remaining = 4 * channels
    length = b""
    while remaining > 127:
        length = length + bytes([remaining % 128 + 128])
        remaining = remaining // 128
    before = _NAME_TAG + bytes([len(name)]) + name + _DATA_TAG + length + bytes([remaining])
    return model.index(before) + len(before)


def _probe(model: Any, image: str) -> bytes:
    """Return the appended graph: its inputs are the encoder's and ``own_share`` (scalar float32, 0..1).

    Outputs: ``statistics`` (s,), mean and variance of each batch norm in order; ``own_features`` (n, d), the features
    of the batch with these statistics.
    """
    import onnx

    inferred = onnx.shape_inference.infer_shapes(model).graph
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in (*inferred.value_info, *inferred.input)}
    # Both graphs read the same constants and the same inputs; an empty name stands for an input that is left out.
    common_names = {constant.name for constant in model.graph.initializer} | {image, ""}
    probe = _Probe(common_names)
    # 1. Every node of the encoder once more, batch norm by steps that show its statistics.
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            probe.add_batch_norm(node, ranks[node.input[0]])
        else:
            probe.add_copy(node)
    # 2. The outputs.
    probe.add_outputs()
    return bytes(onnx.ModelProto(graph=probe.graph).SerializeToString(deterministic=True))


class _Probe:
    """The graph of a probe while it is written, in the order in which its nodes run."""

    def __init__(self, common_names: set[str]) -> None:
        from onnx import GraphProto

        self.graph: Any = GraphProto()
        self._common_names = common_names
        self._statistics: list[str] = []
        """The names of the flat statistics of the layers so far."""

        self._layers = 0
        self._add_constant(np.array([-1], np.int64), _FLAT)

    def add_copy(self, node: Any) -> None:
        """Add a node of the encoder that reads and writes the probe's own values."""
        twin = copy.deepcopy(node)
        twin.name = f"{PREFIX}{node.name}"
        twin.input[:] = map(self._name_of, node.input)
        twin.output[:] = map(self._name_of, node.output)
        self.graph.node.append(twin)

    def add_batch_norm(self, node: Any, rank: int) -> None:
        """Add the steps of a batch norm over an input with ``rank`` axes, with blended statistics."""
        inputs, weight, bias, stored_mean, stored_variance = map(self._name_of, node.input)
        layer = f"norm.{self._layers}"
        self._layers += 1
        to_rank = f"{PREFIX}{layer}.shape"
        epsilon = f"{PREFIX}{layer}.epsilon"
        epsilon_value = next(attribute.f for attribute in node.attribute if attribute.name == "epsilon")
        self._add_constant(np.array([1, -1, *[1] * (rank - 2)], np.int64), to_rank)
        self._add_constant(np.array(epsilon_value, np.float32), epsilon)
        # 1. Mean and variance of the batch, over all axes but that of the channels.
        axes = [0, *range(2, rank)]
        batch_mean = self._add("ReduceMean", [inputs], f"{layer}.batch_mean", axes=axes, keepdims=1)
        centred = self._add("Sub", [inputs, batch_mean], f"{layer}.centred")
        square = self._add("Mul", [centred, centred], f"{layer}.square")
        batch_variance = self._add("ReduceMean", [square], f"{layer}.batch_variance", axes=axes, keepdims=1)
        # 2. Blended with those of the file.
        mean = self._add_blended(batch_mean, stored_mean, to_rank, f"{layer}.mean")
        variance = self._add_blended(batch_variance, stored_variance, to_rank, f"{layer}.var")
        # 3. Batch norm with the blended ones: (x - mean) / sqrt(variance + epsilon) * weight + bias.
        shifted = self._add("Sub", [inputs, mean], f"{layer}.shifted")
        positive = self._add("Add", [variance, epsilon], f"{layer}.positive")
        deviation = self._add("Sqrt", [positive], f"{layer}.deviation")
        scaled = self._add("Div", [shifted, deviation], f"{layer}.scaled")
        weight_of_rank = self._add("Reshape", [weight, to_rank], f"{layer}.weight")
        gain = self._add("Mul", [scaled, weight_of_rank], f"{layer}.gain")
        shift = self._add("Reshape", [bias, to_rank], f"{layer}.bias")
        self._add_node("Add", [gain, shift], self._name_of(node.output[0]), f"{PREFIX}{layer}.output")

    def add_outputs(self) -> None:
        """Add the nodes and declarations of the outputs, and that of the share of the batch's statistics."""
        from onnx import TensorProto, helper

        self._add_node("Concat", self._statistics, "statistics", f"{PREFIX}statistics", axis=0)
        self._add_node("Identity", [f"{PREFIX}features"], "own_features", f"{PREFIX}own_features")
        self.graph.input.append(helper.make_tensor_value_info("own_share", TensorProto.FLOAT, []))
        for name, shape in (("statistics", ["statistics"]), ("own_features", ["batch", "features"])):
            self.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def _add_blended(self, of_batch: str, of_file: str, to_rank: str, output: str) -> str:
        """Add file + own_share * (batch - file), note its flat form as a statistic, and return its name."""
        stored = self._add("Reshape", [of_file, to_rank], f"{output}.known")
        change = self._add("Sub", [of_batch, stored], f"{output}.change")
        part = self._add("Mul", [change, "own_share"], f"{output}.part")
        blended = self._add("Add", [stored, part], f"{output}.blended")
        self._statistics.append(self._add("Reshape", [blended, _FLAT], output))
        return blended

    def _name_of(self, name: str) -> str:
        """Return the probe's name for a value of the encoder."""
        return name if name in self._common_names else f"{PREFIX}{name}"

    def _add(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a node with one result, named like it, and return that name."""
        name = f"{PREFIX}{output}"
        self._add_node(operator, inputs, name, name, **attributes)
        return name

    def _add_node(self, operator: str, inputs: list[str], output: str, name: str, **attributes: Any) -> None:
        """Add a node with one result."""
        from onnx import helper

        self.graph.node.append(helper.make_node(operator, inputs, [output], name=name, **attributes))

    def _add_constant(self, array: np.ndarray, name: str) -> None:
        """Add a constant."""
        from onnx import numpy_helper

        self.graph.initializer.append(numpy_helper.from_array(array, name))
