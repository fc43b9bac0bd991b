"""Encoders whose batch norm a device estimates again, without torch and without the package onnx there.

The graph keeps each batch norm as a node, with its own statistics as constants at known places of the file: a device
writes other statistics over them, and ONNX Runtime folds them into the convolutions when it loads the file. A *probe*
is appended to the file to estimate them: a serialised graph message, whose nodes protobuf adds to those of the encoder
when both are read as one. It computes the encoder a second time from the same weights, with the statistics of the
batch blended into those of the file, layer by layer in one pass, and returns the blended statistics.
"""

from __future__ import annotations

import copy
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
PREFIX = "estimate/"
_FLAT = f"{PREFIX}flat"
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


def adaptable(encoder: nn.Module, task: Task) -> Adaptable | None:
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
    layers = tuple(
        NormLayer(
            mean_at=_place(model, layer, "mean", size), variance_at=_place(model, layer, "var", size), channels=size
        )
        for layer, size in enumerate(channels)
    )
    probe = _probe(graph, task.input.kind)
    return Adaptable(replace(exported, model=model), probe, FreeNorm(probe=PROBE_FILE, layers=layers))


def _constant(layer: int, what: str) -> str:
    return f"norm.{layer}.{what}"


def _own_constants(model: Any) -> list[int]:
    """Give each batch norm of the graph its own constants for mean and variance; returns the channels of each.

    The exporter shares equal constants between layers by Identity nodes.
    """
    from onnx import numpy_helper

    graph = model.graph
    values = {constant.name: constant for constant in graph.initializer}
    shared = {
        node.output[0]: node.input[0] for node in graph.node if node.op_type == "Identity" and node.input[0] in values
    }
    nodes = [copy.deepcopy(node) for node in graph.node if node.output[0] not in shared]
    channels: list[int] = []
    for node in nodes:
        for position, name in enumerate(node.input):
            node.input[position] = shared.get(name, name)
        if node.op_type == "BatchNormalization":
            for position, what in ((3, "mean"), (4, "var")):
                array = numpy_helper.to_array(values[node.input[position]]).astype(np.float32)
                node.input[position] = _constant(len(channels), what)
                graph.initializer.append(numpy_helper.from_array(array.copy(), node.input[position]))
            channels.append(len(array))
    used = {name for node in nodes for name in node.input}
    constants = [constant for constant in graph.initializer if constant.name in used]
    for field, kept in ((graph.node, nodes), (graph.initializer, constants)):
        del field[:]
        field.extend(kept)
    return channels


def _place(model: bytes, layer: int, what: str, channels: int) -> int:
    """Return the byte of the serialised model at which a constant of `_own_constants` begins."""
    name = _constant(layer, what).encode()
    left = 4 * channels
    length = b""
    while left > 127:  # seven bits in each byte, the highest bit says that more follow
        length = length + bytes([left % 128 + 128])
        left = left // 128
    before = _NAME_TAG + bytes([len(name)]) + name + _DATA_TAG + length + bytes([left])
    return model.index(before) + len(before)


def _probe(model: Any, image: str) -> bytes:
    """Return the appended graph: its inputs are the encoder's and ``own_share`` (scalar float32, 0..1).

    Outputs: ``statistics`` (s,), mean and variance of each batch norm in order; ``own_features`` (n, d), the features
    of the batch with these statistics.
    """
    import onnx
    from onnx import helper, numpy_helper

    inferred = onnx.shape_inference.infer_shapes(model).graph
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in (*inferred.value_info, *inferred.input)}
    constants = {constant.name for constant in model.graph.initializer} | {image, ""}
    graph = onnx.GraphProto()
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), _FLAT))

    def own(name: str) -> str:
        return name if name in constants else f"{PREFIX}{name}"

    def add(operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        name = f"{PREFIX}{output}"
        graph.node.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    statistics: list[str] = []
    layers = 0
    for node in model.graph.node:
        if node.op_type != "BatchNormalization":
            twin = copy.deepcopy(node)
            twin.name = f"{PREFIX}{node.name}"
            twin.input[:] = map(own, node.input)
            twin.output[:] = map(own, node.output)
            graph.node.append(twin)
            continue
        rank = ranks[node.input[0]]
        inputs, weight, bias, *stored = map(own, node.input)
        at = f"norm.{layers}"
        axes = [0, *range(2, rank)]
        epsilon = next(attribute.f for attribute in node.attribute if attribute.name == "epsilon")
        to_rank = np.array([1, -1, *[1] * (rank - 2)], np.int64)
        graph.initializer.append(numpy_helper.from_array(to_rank, f"{PREFIX}{at}.shape"))
        graph.initializer.append(numpy_helper.from_array(np.array(epsilon, np.float32), f"{PREFIX}{at}.epsilon"))
        mean = add("ReduceMean", [inputs], f"{at}.batch_mean", axes=axes, keepdims=1)
        centred = add("Sub", [inputs, mean], f"{at}.centred")
        square = add("Mul", [centred, centred], f"{at}.square")
        variance = add("ReduceMean", [square], f"{at}.batch_variance", axes=axes, keepdims=1)
        blended = []
        for what, of_batch, of_file in (("mean", mean, stored[0]), ("var", variance, stored[1])):
            known = add("Reshape", [of_file, f"{PREFIX}{at}.shape"], f"{at}.{what}.known")
            change = add("Sub", [of_batch, known], f"{at}.{what}.change")
            part = add("Mul", [change, "own_share"], f"{at}.{what}.part")
            blended.append(add("Add", [known, part], f"{at}.{what}.blended"))
            statistics.append(add("Reshape", [blended[-1], _FLAT], f"{at}.{what}"))
        shifted = add("Sub", [inputs, blended[0]], f"{at}.shifted")
        positive = add("Add", [blended[1], f"{PREFIX}{at}.epsilon"], f"{at}.positive")
        scaled = add("Div", [shifted, add("Sqrt", [positive], f"{at}.deviation")], f"{at}.scaled")
        gain = add("Mul", [scaled, add("Reshape", [weight, f"{PREFIX}{at}.shape"], f"{at}.weight")], f"{at}.gain")
        shift = add("Reshape", [bias, f"{PREFIX}{at}.shape"], f"{at}.bias")
        graph.node.append(helper.make_node("Add", [gain, shift], [own(node.output[0])], name=f"{PREFIX}{at}.output"))
        layers += 1
    graph.node.append(helper.make_node("Concat", statistics, ["statistics"], name=f"{PREFIX}statistics", axis=0))
    graph.input.append(helper.make_tensor_value_info("own_share", onnx.TensorProto.FLOAT, []))
    graph.node.append(
        helper.make_node("Identity", [f"{PREFIX}features"], ["own_features"], name=f"{PREFIX}own_features")
    )
    for name, shape in (("statistics", ["statistics"]), ("own_features", ["batch", "features"])):
        graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    return bytes(onnx.ModelProto(graph=graph).SerializeToString(deterministic=True))
