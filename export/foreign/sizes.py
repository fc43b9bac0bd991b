"""Sizes that a network computes from its input, written as constants and multiples of the batch.

Exporters write the arithmetic of sizes as nodes: where heights and widths have names, or a token is repeated for each
input, a graph is full of operators that no device has. A bundle's inputs have one size, and only the batch is free. So
the sizes are computed here for two batches, from the shapes alone: what is equal for both is a constant, and what grows
with the batch is a multiple of it. Nothing of the network itself is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from edge_agent.bundle.graph_check import OPERATORS

from .graph_file import inputs_of
from .input_form import PREFIX

_BATCHES = (2, 3)
_MOST_VALUES = 4096
"""The most values of a size that is looked at."""

_MOST_TURNS = 200
"""The most times that shapes are inferred again after sizes became known: a turn for each Reshape at the worst."""

_MOST_WORK = 400_000
"""The most nodes of which shapes are inferred in all turns together, which takes 6 s on one thread of x86.

Networks of torchvision take three turns: vit_b_16 with 2,100 nodes, swin_t with 6,300, which leaves 64 for those.
"""

_ARITHMETIC = frozenset(
    {
        "Add", "And", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Gather", "Greater", "Identity",
        "Less", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Range", "ReduceProd", "Reshape", "Slice",
        "Sqrt", "Squeeze", "Sub", "Unsqueeze", "Where",
    }
)  # fmt: skip
"""Operators by which sizes are computed."""

Values = dict[str, np.ndarray]
"""The values of a network that follow from shapes alone, by name."""


def fix_sizes(model: Any) -> Any:
    """Return a copy of a model whose sizes are constants and multiples of the batch, as far as they are known.

    Args:
        model: A network (`onnx.ModelProto`) with one input, of which every side but the batch is a number.
    """
    sizes = _sizes_of(model)
    writer = _Writer(inputs_of(model)[0].name)
    nodes: list[Any] = []
    for node in model.graph.node:
        if all(name in sizes for name in node.output):
            continue
        # What reads a size reads a constant instead, or what is made of the batch.
        for name in node.input:
            if name in sizes:
                writer.add(name, sizes[name])
        nodes.append(node)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (*writer.nodes, *nodes)]
    del result.graph.node[:]
    result.graph.node.extend(copies)
    result.graph.initializer.extend(writer.constants)
    return result


@dataclass(frozen=True)
class _Size:
    """A value that follows from shapes alone."""

    values: np.ndarray
    """The value for a batch of two."""

    factors: np.ndarray | None = None
    """How many times the batch each number is, 0 for those that are constants; None where all are."""


def _sizes_of(model: Any) -> dict[str, _Size]:
    """Return the sizes that can be written as constants and multiples of the batch, by name."""
    first, second = (_known_values(model, batch) for batch in _BATCHES)
    sizes: dict[str, _Size] = {}
    for name in first.keys() & second.keys():
        of_two = first[name]
        of_three = second[name]
        if of_two.shape != of_three.shape or of_two.dtype != of_three.dtype:
            continue
        if np.array_equal(of_two, of_three):
            sizes[name] = _Size(of_two)
        elif of_two.dtype == np.int64:
            growth = of_three - of_two
            is_multiple = (growth * _BATCHES[0] == of_two) | (growth == 0)
            if is_multiple.all() and (growth >= 0).all():
                sizes[name] = _Size(of_two, growth)
    return sizes


class _Writer:
    """Constants and nodes that stand for sizes."""

    def __init__(self, input_name: str) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._input_name = input_name
        self._written: set[str] = set()

    def add(self, name: str, size: _Size) -> None:
        """Write a size, unless it is there already."""
        if name in self._written:
            return
        self._written.add(name)
        if size.factors is None:
            self.constants.append(numpy_helper.from_array(np.asarray(size.values), name))
        else:
            self._add_multiples(name, size.values, size.factors)

    def _add_multiples(self, name: str, first: np.ndarray, factors: np.ndarray) -> None:
        """Write numbers of which those with a factor above 0 are that many times the batch."""
        label = f"{PREFIX}{name}"
        batch = self._batch()
        parts = []
        for position, factor in enumerate(factors.reshape(-1)):
            if not factor:
                parts.append(self._constant(first.reshape(-1)[position : position + 1], f"{name}.{position}"))
                continue
            part = f"{label}.{position}"
            times = self._constant(np.array([factor], np.int64), f"{name}.{position}.times")
            self.nodes.append(helper.make_node("Mul", [batch, times], [part]))
            parts.append(part)
        if first.ndim == 1:
            self.nodes.append(helper.make_node("Concat", parts, [name], axis=0))
            return
        shape = self._constant(np.array(first.shape, np.int64), f"{name}.shape")
        self.nodes.append(helper.make_node("Concat", parts, [f"{label}.flat"], axis=0))
        self.nodes.append(helper.make_node("Reshape", [f"{label}.flat", shape], [name]))

    def _batch(self) -> str:
        """Return the name of the size of the batch, one number in a list."""
        name = f"{PREFIX}batch"
        if name not in self._written:
            self._written.add(name)
            shape = f"{PREFIX}shape"
            self.nodes.append(helper.make_node("Shape", [self._input_name], [shape]))
            first = self._constant(np.array([0], np.int64), "first_axis")
            self.nodes.append(helper.make_node("Gather", [shape, first], [name], axis=0))
        return name

    def _constant(self, array: np.ndarray, label: str) -> str:
        """Add a constant and return its name."""
        name = f"{PREFIX}{label}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name


def _known_values(model: Any, batch: int) -> Values:
    """Return the values that follow from shapes alone, for a batch of this size."""
    light = _without_weights(model, batch)
    known = _small_constants(model)
    pending = [node for node in model.graph.node if node.op_type != "Constant"]
    turns = min(_MOST_TURNS, 1 + _MOST_WORK // max(1, len(model.graph.node)))
    for _ in range(turns):
        shapes = _shapes_of(light)
        still_pending = []
        for node in pending:
            value = _evaluate(node, known, shapes, light)
            if value is None:
                still_pending.append(node)
            else:
                known[node.output[0]] = value
        if len(still_pending) == len(pending):
            break
        pending = still_pending
        # Shapes behind a size that is known now are inferred in the next turn.
        _put_constants(light, known)
    computed = {name for node in model.graph.node if node.op_type != "Constant" for name in node.output}
    return {name: value for name, value in known.items() if name in computed}


def _without_weights(model: Any, batch: int) -> Any:
    """Return a copy of the model with its large constants as inputs, which have a shape and no values."""
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.graph.name = "sizes"
    light.graph.node.extend(model.graph.node)
    light.graph.output.extend(model.graph.output)
    own_input = inputs_of(model)[0]
    sides = [batch, *(side.dim_value for side in own_input.type.tensor_type.shape.dim[1:])]
    light.graph.input.append(helper.make_tensor_value_info(own_input.name, TensorProto.FLOAT, sides))
    for tensor in model.graph.initializer:
        if np.prod(tensor.dims) <= _MOST_VALUES:
            light.graph.initializer.append(tensor)
        else:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return light


def _small_constants(model: Any) -> Values:
    """Return the constants of a model that may be part of a size."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                tensors[node.output[0]] = attribute.t
    return {
        name: numpy_helper.to_array(tensor) for name, tensor in tensors.items() if np.prod(tensor.dims) <= _MOST_VALUES
    }


def _shapes_of(light: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes that can be inferred, of values whose sides are all known; none where ONNX infers nothing."""
    try:
        graph = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    except onnx.shape_inference.InferenceError:
        # Operators of which the file does not say the version, for one. What is left of the graph names them.
        return {}
    shapes = {}
    for value in (*graph.value_info, *graph.input):
        sides = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(side.HasField("dim_value") for side in sides):
            shapes[value.name] = tuple(side.dim_value for side in sides)
    return shapes


def _evaluate(node: Any, known: Values, shapes: Mapping[str, tuple[int, ...]], light: Any) -> np.ndarray | None:
    """Return the value of a node that computes a size from what is known; None where it does not."""
    if node.op_type == "Shape" and node.input[0] in shapes:
        bounds = {attribute.name: attribute.i for attribute in node.attribute}
        part = slice(bounds.get("start"), bounds.get("end"))
        return np.array(shapes[node.input[0]][part], np.int64)
    # 1. Arithmetic whose inputs are all known.
    if node.op_type not in _ARITHMETIC or len(node.output) != 1:
        return None
    names = [name for name in node.input if name]
    feeds = {name: known[name] for name in names if name in known}
    if not names or feeds.keys() != set(names):
        return None
    # 2. The result is small enough to be a size, which is found out before anything is computed.
    is_small = _is_small(shapes.get(node.output[0], ())) and _stays_small(node, known)
    return _run(node, feeds, light) if is_small else None


def _is_small(shape: tuple[int, ...]) -> bool:
    """Return whether a value of this shape is small enough to be a size."""
    return int(np.prod(shape)) <= _MOST_VALUES


def _stays_small(node: Any, known: Values) -> bool:
    """Return whether the result of a node whose inputs say how large it is, is small enough to be computed."""
    if node.op_type == "ConstantOfShape":
        return int(np.prod(known[node.input[0]])) <= _MOST_VALUES
    if node.op_type in {"Expand", "Reshape"}:
        return int(np.prod(np.abs(known[node.input[1]]))) <= _MOST_VALUES
    if node.op_type == "Range":
        start, limit, step = (float(known[name]) for name in node.input)
        return step != 0 and abs((limit - start) / step) <= _MOST_VALUES
    return True


def _run(node: Any, feeds: Values, light: Any) -> np.ndarray | None:
    """Return what one node computes, by ONNX's own reference in NumPy; None where it cannot."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    output = helper.make_empty_tensor_value_info(node.output[0])
    graph = helper.make_graph([node], "size", inputs, [output])
    model = helper.make_model(graph, opset_imports=light.opset_import, ir_version=light.ir_version)
    try:
        results: Any = ReferenceEvaluator(model).run(None, feeds)
    except Exception:  # noqa: BLE001 - the reference raises NumPy's and its own errors; then the size stays unknown
        return None
    result = np.asarray(results[0])
    return result if result.size <= _MOST_VALUES else None


def _put_constants(light: Any, known: Values) -> None:
    """Put what is known in the place of the nodes that compute it."""
    kept = [node for node in light.graph.node if node.op_type == "Constant" or node.output[0] not in known]
    replaced = [
        name for node in light.graph.node for name in node.output if node.op_type != "Constant" and name in known
    ]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
    del light.graph.node[:]
    light.graph.node.extend(copies)
    light.graph.initializer.extend(numpy_helper.from_array(np.asarray(known[name]), name) for name in replaced)
    outputs = [value for value in light.graph.output if value.name not in replaced]
    copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in outputs]
    del light.graph.output[:]
    light.graph.output.extend(copies)


def unknown_operators(model: Any) -> Iterator[str]:
    """Yield the operators of a model's nodes that not every device has, one for each node."""
    for node in model.graph.node:
        if node.domain not in {"", "ai.onnx"} or node.op_type not in OPERATORS:
            yield f"{node.domain or 'ai.onnx'}.{node.op_type}"
