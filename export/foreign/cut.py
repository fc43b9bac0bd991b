"""An encoder cut out of a network: from a device's input to rows of features, with nothing that leads elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edge_agent.bundle.graph_check import MOST_BYTES, check
from edge_agent.core.errors import BundleDamaged, ExportRejected

from ..encoder import strip_opsets
from .dequantize import unrounded
from .features import FeaturePoint
from .graph_file import inputs_of, sides_of
from .input_form import PREFIX, InputForm, Steps, constant_name
from .settings import Pool
from .sizes import fix_sizes, unknown_operators

_FEATURES = "features"
"""The name of the output of every bundle's encoder."""

_BATCHES = (2, 3)
"""Two sizes of a batch by which is seen whether the first axis of the features is that of the batch."""

_CHANNELS_FIRST = frozenset({"Conv", "BatchNormalization", "MaxPool", "AveragePool"})
"""Operators whose results have the channels behind the batch, and places or times behind these."""

_KEEPS_AXES = frozenset(
    {"Add", "Clip", "Elu", "Gelu", "HardSwish", "Identity", "LeakyRelu", "Mul", "Relu", "Sigmoid", "Tanh"}
)
"""Operators whose results have the axes of their inputs."""


@dataclass(frozen=True)
class Cut:
    """An encoder that was cut out of a network."""

    model: bytes
    """The graph: one input (n, ...) as devices prepare it, one output ``features`` (n, d)."""

    reference: bytes
    """The network itself up to the tensor of the features, with its own input: what the encoder is compared with."""

    pooling: Pooling

    feature_dim: int


@dataclass(frozen=True)
class Pooling:
    """How the tensor of the features, whose shape without the batch is ``shape``, becomes one row for each input."""

    shape: tuple[int, ...]
    how: Pool
    axis: int | None = None
    """The axis of the features; the others are averaged. None where nothing is averaged."""

    @property
    def text(self) -> str:
        """What is done, for people; empty where nothing is."""
        sides = "x".join(map(str, self.shape))
        if len(self.shape) == 1:
            return ""
        if self.how == "first":
            return f"the first of {self.shape[0]} rows of {self.shape[1]}"
        if self.axis is None:
            return f"{sides} flattened"
        return f"mean over {sides}, but for {self.shape[self.axis - 1]} features"

    def apply(self, tensor: np.ndarray) -> np.ndarray:
        """Return rows (n, d) of a tensor (n, *shape), by NumPy what `steps` does in the graph."""
        if self.how == "first":
            return tensor[:, 0]
        if self.axis is not None:
            others = tuple(axis for axis in range(1, tensor.ndim) if axis != self.axis)
            return np.asarray(tensor.mean(axis=others))
        return tensor.reshape(len(tensor), -1)

    def steps(self, source: str) -> Steps:
        """Return the nodes that make rows of the tensor with the name ``source``."""
        steps = Steps(result=source)
        if self.how == "first":
            steps = steps.with_constant(np.array(0, np.int64), "first")
            return steps.then("Gather", [source, constant_name("first")], "first", axis=1)
        if self.axis is not None:
            if self.axis != 1:
                order = [0, self.axis, *(axis for axis in range(1, len(self.shape) + 1) if axis != self.axis)]
                steps = steps.then("Transpose", [source], "channels_first", perm=order)
            steps = steps.then("GlobalAveragePool", [steps.result], "pool")
        return steps.then("Flatten", [steps.result], "flatten", axis=1)


def cut_encoder(
    model: Any, point: FeaturePoint, form: InputForm, pool: Pool, *, any_batch: bool = False, rounded: Any = None
) -> Cut:
    """Return the encoder from the input of a model to the tensor of its features.

    Args:
        model: The network, an `onnx.ModelProto`.
        point: The tensor of the features.
        form: How the network takes its input.
        pool: How rows are made of features with more axes than two.
        any_batch: Whether a batch axis of a fixed size is made free.
        rounded: The network as it was quantized, with which the encoder is compared; None: it was not.

    Raises:
        ExportRejected: The batch axis has a fixed size, an operator is none that devices have, or the features are not
            one row for each input.
    """
    _check_batch(model, any_batch=any_batch)
    # 1. The network up to its features, which is also what the encoder is compared with.
    network = _with_interface(_prune(model, point.tensor), form, point.tensor)
    reference = network
    if rounded is not None:
        tensor = unrounded(rounded, point.tensor)
        reference = _with_interface(_prune(rounded, tensor), form, tensor)
    # 2. Only operators that devices have: those that compute sizes become constants.
    if any(unknown_operators(network)):
        network = _prune(fix_sizes(network), point.tensor)
        _check_operators(network)
    # 3. One row of features for each input, from what a device prepares.
    shape = _feature_shape(network, point.tensor, form)
    pooling = _choose_pooling(network, point.tensor, shape, pool)
    encoder = _with_steps(network, form, pooling, point.tensor)
    content = strip_opsets(encoder.SerializeToString())
    feature_dim = _features_of(content, form)
    return Cut(content, reference.SerializeToString(), pooling, feature_dim)


def _check_batch(model: Any, *, any_batch: bool) -> None:
    """Require a batch axis without a fixed size, or that it is to be made free."""
    value = inputs_of(model)[0]
    batch = sides_of(value)[0]
    if batch is None or any_batch:
        return
    raise ExportRejected(
        f"input '{value.name}' takes batches of {batch} alone, expected any size; export it with a dynamic batch axis "
        f"(dynamic_axes={{'{value.name}': {{0: 'batch'}}}}), or try --any-batch, which checks the result"
    )


def _prune(model: Any, tensor: str) -> Any:
    """Return a copy of the model with the nodes and constants that a tensor depends on, and no others."""
    producers = {name: node for node in model.graph.node for name in node.output}
    needed: set[str] = set()
    open_names = [tensor]
    while open_names:
        name = open_names.pop()
        if not name or name in needed:
            continue
        needed.add(name)
        if name in producers:
            open_names += producers[name].input
            needed.update(producers[name].output)
    pruned = onnx.ModelProto()
    pruned.CopyFrom(model)
    graph = pruned.graph
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    nodes = [node for node in nodes if needed.intersection(node.output)]
    _drop_repeated_names(nodes)
    constants = [constant for constant in model.graph.initializer if constant.name in needed]
    for repeated, messages in ((graph.node, nodes), (graph.initializer, constants), (graph.value_info, [])):
        del repeated[:]
        repeated.extend(messages)
    del pruned.metadata_props[:]
    return _without_dropout(pruned, tensor)


def _drop_repeated_names(nodes: Sequence[Any]) -> None:
    """Take the names off nodes that have another's, which runtimes refuse, or one like those of nodes that are added.

    The names of nodes, unlike those of values, mean nothing.
    """
    taken: set[str] = set()
    for node in nodes:
        if node.name in taken or node.name.startswith(PREFIX):
            node.ClearField("name")
        taken.add(node.name)


def _without_dropout(model: Any, tensor: str) -> Any:
    """Return the model without Dropout nodes, which do nothing when nothing is trained; it is changed in place.

    ``tensor``, its result, keeps its name where it was that of a Dropout.
    """
    source_of: dict[str, str] = {}
    kept = []
    for node in model.graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = source_of.get(name, name)
        if node.op_type == "Dropout":
            source_of[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
    if tensor in source_of:
        copies.append(helper.make_node("Identity", [source_of[tensor]], [tensor]))
    del model.graph.node[:]
    model.graph.node.extend(copies)
    return model


def _check_operators(model: Any) -> None:
    """Require operators that every device has.

    Raises:
        ExportRejected: Some are others; all of them are named.
    """
    unknown = Counter(unknown_operators(model))
    if not unknown:
        return
    listed = ", ".join(f"{name} ({count})" for name, count in sorted(unknown.items()))
    advice = "name features before them (--features NAME), or export the network with others"
    if any("QLinear" in name for name in unknown):
        advice = "export the quantized network with QuantizeLinear and DequantizeLinear (QDQ), or give it in fp32"
    raise ExportRejected(
        f"operators that not every device has: {listed}; expected those in OPERATORS of "
        f"edge_agent/bundle/graph_check.py; {advice}"
    )


def _with_interface(model: Any, form: InputForm, tensor: str) -> Any:
    """Return a copy of the model with its own input of any batch size, and the tensor as its only output."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    name = inputs_of(model)[0].name
    _declare(result.graph.input, name, ["batch", *form.given_shape(1)[1:]])
    _declare(result.graph.output, tensor, None)
    return result


def _declare(values: Any, name: str, shape: Sequence[str | int | None] | None) -> None:
    """Let a list of inputs or outputs hold one float32 value of this name and shape."""
    del values[:]
    values.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))


def _takes_one_input(content: bytes, form: InputForm) -> bool:
    """Return whether the graph in ``content``, which takes no several inputs at once, takes one."""
    try:
        check(content, [form.given_shape(1)], where="network", most_bytes=MOST_BYTES)
    except BundleDamaged:
        return False
    return True


def _feature_shape(model: Any, tensor: str, form: InputForm) -> tuple[int, ...]:
    """Return the shape of the features without the batch.

    Raises:
        ExportRejected: Their first axis is not that of the batch, or the graph is none that devices run.
    """
    content = model.SerializeToString()
    inside = "the network has a fixed batch size inside; export it with a dynamic batch axis, or name other --features"
    shapes: list[tuple[int, ...]] = []
    for batch in _BATCHES:
        try:
            cost = check(content, [form.given_shape(batch)], where="network", most_bytes=len(_BATCHES) * MOST_BYTES)
        except BundleDamaged as error:
            is_for_one_input = not shapes and _takes_one_input(content, form)
            reason = f"{inside} ({error})" if shapes or is_for_one_input else str(error)
            raise ExportRejected(f"the network up to '{tensor}' cannot run on devices: {reason}") from error
        shapes.append(cost.outputs[0])
    firsts = tuple(shape[0] if shape else 0 for shape in shapes)
    if firsts != _BATCHES or shapes[0][1:] != shapes[1][1:]:
        raise ExportRejected(
            f"features '{tensor}' are {list(shapes[0])} for 2 inputs and {list(shapes[1])} for 3, expected one row "
            f"for each: {inside}"
        )
    if 0 in shapes[0]:
        raise ExportRejected(
            f"features '{tensor}' are {list(shapes[0])} for 2 inputs, which holds no value; name other --features"
        )
    return shapes[0][1:]


def _choose_pooling(model: Any, tensor: str, shape: tuple[int, ...], pool: Pool) -> Pooling:
    """Return how rows are made of features of a shape without the batch."""
    if pool == "first" and len(shape) != 2:
        raise ExportRejected(f"--pool first: the features are {list(shape)}, expected [tokens, features]; leave it out")
    is_single = sum(side > 1 for side in shape) <= 1
    if pool in {"first", "flatten"} or len(shape) == 1 or (is_single and pool == "auto"):
        return Pooling(shape, "first" if pool == "first" else "flatten")
    if len(shape) == 2:
        return Pooling(shape, "mean", 1 if _is_channels_first(model, tensor) else 2)
    return Pooling(shape, "mean", 1)


def _is_channels_first(model: Any, tensor: str) -> bool:
    """Return whether the tensor comes from a convolution, whose results have the features before the times."""
    producers = {name: node for node in model.graph.node for name in node.output}
    node = producers.get(tensor)
    while node is not None and node.op_type in _KEEPS_AXES:
        node = next((producers[name] for name in node.input if name in producers), None)
    return node is not None and node.op_type in _CHANNELS_FIRST


def _with_steps(model: Any, form: InputForm, pooling: Pooling, tensor: str) -> Any:
    """Return the model with nodes in front and behind: from a device's input to rows of features."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    own_input = inputs_of(model)[0].name
    name = form.spec.kind
    # 1. Names of the interface and of what is added must be free: a value inside that has one is renamed.
    inner_names = _inner_names(graph, {name, _FEATURES})
    if not form.steps(name).nodes:
        inner_names.pop(own_input, None)
    _rename(graph, inner_names)
    tensor = inner_names.get(tensor, tensor)
    own_input = inner_names.get(own_input, own_input)
    # 2. What comes in front, whose last result is the network's own input.
    front = form.steps(name)
    _rename(graph, {own_input: front.result})
    # 3. What comes behind, whose last result are the features.
    behind = pooling.steps(tensor if tensor != own_input else front.result)
    for node in behind.nodes[-1:]:
        node.output[0] = _FEATURES
    nodes = [*front.nodes, *graph.node, *behind.nodes]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    graph.initializer.extend([*front.constants, *behind.constants])
    _declare(graph.input, name, ["batch", *form.spec.shape])
    _declare(graph.output, _FEATURES, ["batch", None])
    return result


def _inner_names(graph: Any, interface: set[str]) -> dict[str, str]:
    """Return new names for the values of a graph whose names are those of the interface, or begin as ours do."""
    names = {value.name for value in (*graph.input, *graph.initializer)}
    names.update(name for node in graph.node for name in (*node.input, *node.output))
    inner_names: dict[str, str] = {}
    for name in sorted(names):
        if name not in interface and not name.startswith(PREFIX):
            continue
        inner_name = f"inner/{name}"
        while inner_name in names:
            inner_name = f"inner/{inner_name}"
        inner_names[name] = inner_name
        names.add(inner_name)
    return inner_names


def _rename(graph: Any, names: dict[str, str]) -> None:
    """Rename values of a graph wherever they are read or written."""
    for node in graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = names.get(name, name)
        for position, name in enumerate(node.output):
            node.output[position] = names.get(name, name)
    for constant in graph.initializer:
        constant.name = names.get(constant.name, constant.name)


def _features_of(content: bytes, form: InputForm) -> int:
    """Return how many features the encoder gives for an input."""
    try:
        cost = check(content, [(2, *form.spec.shape)], most_bytes=2 * MOST_BYTES)
    except BundleDamaged as error:
        raise ExportRejected(f"the encoder cannot run on devices: {error}") from error
    return cost.outputs[0][1]
