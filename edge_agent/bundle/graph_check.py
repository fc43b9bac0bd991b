"""The cost of an ONNX graph for a device, found by reading it: operators, shapes, memory and work. Nothing is run.

ONNX Runtime allocates and computes already when it loads a graph: a file of 129 bytes can ask for a gibibyte. So the
file is read here first, as protobuf, without the package onnx. Every operator is one of `OPERATORS`, whose results have
sizes that follow from the sizes of their inputs; control flow, files beside the graph, and whatever a reader of ONNX
could understand otherwise are refused.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ..core.errors import BundleDamaged
from ..core.limits import limit_bytes

MOST_BYTES = 512 << 20
"""The most bytes for constants and intermediate results of one batch; on a small device at most half of its memory.

ResNet18 takes 6 MB for an image of 224 pixels, and 45 MB of weights, which count as constants.
"""

REST_BYTES = 96 << 20
"""The bytes that a process takes beside the graph that it runs: ONNX Runtime, and eight inputs while preprocessed."""

MOST_WORK = 100_000_000_000
"""The most multiplications for one input; ResNet18 takes 1.8e9 for an image of 224 pixels, ViT-B 1.7e10."""

MOST_NODES = 10_000
"""The most nodes of all graphs of a file together."""

MOST_GRAPHS = 8
"""The most graphs of one file, which are read as one: an encoder, and the probe of its batch norm."""

_MOST = {"fields": 100_000, "bytes of integers": 1 << 18, "bytes of texts": 1 << 20, "numbers in sizes": 1 << 19}
"""The most of each kind that is read of a graph, which together takes 0.5 s and 50 MB.

MobileNetV3 in int8 takes 7,600, 20,000, 64,000 and 1,000 of these; DenseNet121 has 9,500 fields.
"""

_MOST_BESIDE = 4 << 20
"""The most bytes of a file beside the values of its constants, all read by ONNX Runtime; DenseNet121 has 200,000."""

_MOST_RANK = 8
"""The most axes of a value."""

_MOST_SIDE = (1 << 31) - 1
"""The bound of every side of a shape; as the end of a Slice, ONNX Runtime takes this number for the end of the axis."""

_MOST_KNOWN = 4096
"""The most values of an integer constant that are looked at; shapes and axes are shorter."""

_UNARY = """
    Abs BatchNormalization Clip DequantizeLinear Elu Erf Exp Gelu GroupNormalization HardSigmoid HardSwish Identity
    InstanceNormalization LeakyRelu Log LpNormalization Neg QuantizeLinear Relu Sigmoid Softmax Softplus Sqrt
    Tanh"""
_BROADCAST = "Add Div Max Min Mul PRelu Pow Sub Where"
_REDUCTIONS = "ReduceL2 ReduceMax ReduceMean ReduceSum"

Shape: TypeAlias = tuple[int, ...]
_Value: TypeAlias = "int | float | bytes | list[int] | _Tensor | None"


@dataclass(frozen=True)
class Cost:
    """The cost of one batch: bytes of constants and intermediate results, multiplications, and the outputs' shapes."""

    memory_bytes: int
    work: int
    outputs: tuple[Shape, ...]


@dataclass(frozen=True)
class _Tensor:
    """A constant: its shape, its size in bytes, and its numbers where sizes of results may be made of them."""

    shape: Shape
    bytes: int
    values: np.ndarray | None = None


@dataclass
class _Node:
    """A node of a graph."""

    operator: str = ""
    inputs: list[str] = field(default_factory=list)
    """Names of the values that it reads; empty: an optional input is left out."""

    outputs: list[str] = field(default_factory=list)
    """Names of its results; empty: an optional result is left out."""

    attributes: dict[str, _Value] = field(default_factory=dict)

    def input_at(self, position: int) -> str:
        """Return the name of the input at this position; empty where the node has none there."""
        if position >= len(self.inputs):
            return ""
        return self.inputs[position]

    def ints(self, name: str, default: Sequence[int] = ()) -> list[int]:
        """Return the integers of an attribute, or ``default`` where the node does not have it."""
        value = self.attributes.get(name)
        if value is None:
            return list(default)
        if not isinstance(value, list):
            raise BundleDamaged(f"attribute '{name}' of {self.operator} is not a list of integers")
        return value

    def int(self, name: str, default: int) -> int:
        """Return the integer of an attribute, or ``default`` where the node does not have it."""
        value = self.attributes.get(name, default)
        if not isinstance(value, int):
            raise BundleDamaged(f"attribute '{name}' of {self.operator} is not an integer")
        return value


@dataclass
class _Graph:
    """The graphs of a file, read as one; a side of an input is None where the file gives it a name."""

    nodes: list[_Node] = field(default_factory=list)
    constants: dict[str, _Tensor] = field(default_factory=dict)
    inputs: dict[str, list[int | None]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)


def check(content: bytes | memoryview, inputs: Sequence[Shape], *, where: str = "encoder", most_bytes: int = 0) -> Cost:
    """Return the cost of a serialised graph, and refuse one that costs too much or has forms that are not allowed.

    Args:
        content: The ONNX file.
        inputs: Shapes of its inputs, in order; the first axis of the first one is the batch.
        where: The name of the file in messages.
        most_bytes: The bound on memory; 0: that of `budget_bytes`.

    Raises:
        BundleDamaged: The file is not a graph, uses an operator or form that is not allowed, or exceeds a limit of
            memory or work.
    """
    # 1. Read the file and follow its shapes. Whatever a hostile file makes of the reader's arithmetic is a damaged one.
    try:
        budget = _Budget()
        graph = _Reader(budget).model(memoryview(content))
        cost = _cost(graph, inputs, budget)
    except BundleDamaged as error:
        raise _refusal(where, str(error)[:400], "export it again") from error
    except (ArithmeticError, IndexError, ValueError) as error:
        raise _refusal(where, f"malformed ({str(error)[:200]})", "export it again") from error
    # 2. What it costs has to be within the limits of this device, and of any.
    limit_of_memory = most_bytes or budget_bytes()
    if cost.memory_bytes > limit_of_memory:
        reason = (
            f"takes {cost.memory_bytes >> 20} MiB of memory for a batch, at most {limit_of_memory >> 20} MiB are "
            "allowed here"
        )
        raise _refusal(where, reason, "export a smaller encoder")
    batch_size = max(inputs[0][0], 1)
    if cost.work > MOST_WORK * batch_size:
        reason = f"takes {cost.work / batch_size:.2g} multiplications for an input, at most {MOST_WORK:.2g} are allowed"
        raise _refusal(where, reason, "export a smaller encoder")
    return cost


def _refusal(where: str, reason: str, advice: str) -> BundleDamaged:
    """Return the error of a file that is not run, which its sender may know."""
    return BundleDamaged(f"{where}: {reason}; refused before it is run; {advice}", is_public=True)


def budget_bytes(most: int = MOST_BYTES) -> int:
    """Return the bytes that a graph may take: at most ``most``, half of the memory, and this process's own limit."""
    limit = limit_bytes()
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no such system call, as on Windows
        most = min(most, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return most if limit is None else min(most, max(0, limit - REST_BYTES))


# --- protobuf --------------------------------------------------------------------------------------------------------

_VARINT = 0
_LENGTH = 2
_SIZES = {1: 8, _LENGTH: 0, 5: 4}
"""Bytes of the content of each wire type that has a content; those of `_LENGTH` are stated before it."""

_Raw: TypeAlias = "int | memoryview"

# Field numbers of onnx.proto -> name; ``*``: repeated. Names and notes for people are skipped.
_MODEL = {7: "graph*"}
_MODEL_SKIPPED = {1, 2, 3, 4, 5, 6, 8, 14}
_GRAPH = {1: "node*", 5: "initializer*", 11: "input*", 12: "output*"}
_GRAPH_SKIPPED = {2, 10, 13, 14, 16}
_NODE = {1: "input*", 2: "output*", 4: "op_type", 5: "attribute*", 7: "domain"}
_NODE_SKIPPED = {3, 6, 9}
_ATTRIBUTE = {1: "name", 2: "f", 3: "i", 4: "s", 5: "t", 7: "floats*", 8: "ints*", 20: "type"}
_TENSOR = {
    1: "dims*", 2: "data_type", 4: "float_data*", 5: "int32_data*", 7: "int64_data*", 8: "name", 9: "raw_data",
    10: "double_data*", 14: "data_location",
}  # fmt: skip
_FIXED = {"f", "floats*", "float_data*", "double_data*"}
_KINDS = {"f": 1, "i": 2, "s": 3, "t": 4, "floats": 6, "ints": 7}
"""The type that an attribute states where its value is in each field."""

_FIELDS = {number: name for name, number in _KINDS.items()}
"""The field that has the value of an attribute of each type."""

_ITEM_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8}
"""Bytes of an element of each ONNX type: float32, int8..int64, bool, float16, float64, and the unsigned ones."""

_INT64 = 7
"""The only element type whose numbers are computed here: smaller ones overflow earlier, and sizes are not of them."""

_TYPED = {"float_data": {1}, "int32_data": {2, 3, 4, 5, 6, 9, 10}, "int64_data": {_INT64}, "double_data": {11}}
"""The element types whose values ONNX puts into each field of a tensor."""


class _Budget:
    """The amount of each kind in `_MOST` that reading a graph may still take."""

    def __init__(self) -> None:
        self._left = dict(_MOST)

    def spend(self, what: str, count: int) -> None:
        """Take ``count`` of the kind ``what``.

        Raises:
            BundleDamaged: The rest of the budget is smaller than ``count``.
        """
        self._left[what] -= count
        if self._left[what] < 0:
            raise BundleDamaged(f"more than {_MOST[what]} {what}")


class _Reader:
    """A reader of ONNX models that refuses repeated single fields, so that no other reader can see another model."""

    def __init__(self, budget: _Budget) -> None:
        self._budget = budget

    def model(self, data: memoryview) -> _Graph:
        """Return the graphs of a model; several are read as one: an encoder, and the probe of its batch norm."""
        graph = _Graph()
        parts = self._content(data, _MODEL, _MODEL_SKIPPED, "model")["graph"]
        if len(parts) > MOST_GRAPHS:
            raise BundleDamaged(f"{len(parts)} graphs, at most {MOST_GRAPHS} are allowed")
        for part in parts:
            self._add_graph(graph, _bytes(part))
        # ONNX Runtime takes memory for everything in the file: the values of constants have their own bound.
        beside = len(data)
        for constant in graph.constants.values():
            beside -= constant.bytes
        for node in graph.nodes:
            value = node.attributes.get("value")
            if node.operator == "Constant" and isinstance(value, _Tensor):
                beside -= value.bytes
        if beside > _MOST_BESIDE:
            raise BundleDamaged(
                f"{beside} of its {len(data)} bytes are not values of constants, at most {_MOST_BESIDE} are allowed"
            )
        return graph

    def _add_graph(self, graph: _Graph, data: memoryview) -> None:
        """Read one graph of a file and add its nodes, constants, inputs and outputs to those of the others."""
        content = self._content(data, _GRAPH, _GRAPH_SKIPPED, "graph")
        count = len(graph.nodes) + len(content["node"])
        if count > MOST_NODES:
            raise BundleDamaged(f"{count} nodes, at most {MOST_NODES} are allowed")
        graph.nodes += [self._node(_bytes(raw)) for raw in content["node"]]
        for raw in content["initializer"]:
            name, tensor = self._tensor(_bytes(raw))
            if name in graph.constants:
                raise BundleDamaged(f"constant '{name[:60]}' occurs twice")
            graph.constants[name] = tensor
        for raw in content["input"]:
            name, sides = self._value_info(_bytes(raw))
            if name in graph.inputs:
                raise BundleDamaged(f"input '{name[:60]}' occurs twice")
            graph.inputs[name] = sides
        graph.outputs += [self._value_info(_bytes(raw))[0] for raw in content["output"]]

    def _fields(self, data: memoryview) -> Iterator[tuple[int, int, _Raw]]:
        """Yield the number, wire type and content of each field of a protobuf message."""
        at = 0
        end = len(data)
        while at < end:
            self._budget.spend("fields", 1)
            tag, at = _varint(data, at)
            number = tag >> 3
            kind = tag & 7
            if kind == _VARINT:
                value, at = _varint(data, at)
                yield number, kind, value
                continue
            if kind not in _SIZES:
                raise BundleDamaged("not an ONNX model")
            size = _SIZES[kind]
            if kind == _LENGTH:
                size, at = _varint(data, at)
            if at + size > end:
                raise BundleDamaged("not an ONNX model, or truncated")
            yield number, kind, data[at : at + size]
            at += size

    def _content(
        self, data: memoryview, names: Mapping[int, str], skipped: set[int], what: str
    ) -> dict[str, list[_Raw]]:
        """Return the values of the fields of a message by name.

        Args:
            data: The message.
            names: Names of the allowed fields by number; a name that ends in ``*`` may occur several times.
            skipped: Numbers of fields that are ignored.
            what: What the message is, for error messages.

        Raises:
            BundleDamaged: A field is not allowed, is of another wire type, or occurs twice.
        """
        content: dict[str, list[_Raw]] = {name.rstrip("*"): [] for name in names.values()}
        for number, kind, value in self._fields(data):
            if number in skipped:
                continue
            if number not in names:
                raise BundleDamaged(f"field {number} of a {what} is not allowed in a bundle")
            name = names[number]
            if kind not in {_VARINT, _LENGTH} and name not in _FIXED:
                raise BundleDamaged(f"field '{name}' of a {what} is of another kind than in ONNX")
            values = content[name.rstrip("*")]
            if values and not name.endswith("*"):
                raise BundleDamaged(f"field '{name}' of a {what} occurs twice")
            values.append(value)
        return content

    def _node(self, data: memoryview) -> _Node:
        """Return a node, whose operator must be one of `OPERATORS`."""
        content = self._content(data, _NODE, _NODE_SKIPPED, "node")
        node = _Node(self._text(content["op_type"]), [self._text([raw]) for raw in content["input"]])
        node.outputs = [self._text([raw]) for raw in content["output"]]
        domain = self._text(content["domain"])
        if domain not in {"", "ai.onnx"} or node.operator not in OPERATORS:
            name = f"{domain or 'ai.onnx'}.{node.operator}"
            raise BundleDamaged(f"operator '{name[:80]}' is not one of those that a bundle may have")
        for raw in content["attribute"]:
            attribute = self._content(_bytes(raw), _ATTRIBUTE, {13}, "attribute")
            name = self._text(attribute["name"])
            if name in node.attributes:
                raise BundleDamaged(f"attribute '{name[:60]}' occurs twice")
            node.attributes[name] = self._attribute(attribute)
        return node

    def _attribute(self, content: Mapping[str, list[_Raw]]) -> _Value:
        """Return the value of an attribute, which must be in the field that its type states; 0.0 for all floats."""
        kind = _field_of(content)
        if kind == "t":
            return self._tensor(_bytes(content["t"][0]))[1]
        if kind == "ints":
            return self._integers(content["ints"])
        if kind == "i":
            return _signed(_number(content["i"][0]))
        if kind == "s":
            return self._copied(content["s"][0])
        return 0.0

    def _tensor(self, data: memoryview) -> tuple[str, _Tensor]:
        """Return a constant with its name; only its integers may be needed later, for sizes."""
        content = self._content(data, _TENSOR, {12, 16}, "tensor")
        kind = _number_or_zero(content["data_type"])
        if _number_or_zero(content["data_location"]):
            raise BundleDamaged("weights are in another file")
        if kind not in _ITEM_BYTES:
            raise BundleDamaged(f"element type {kind} of a constant is not allowed")
        shape = _shape(self._integers(content["dims"]))
        count, values = self._tensor_values(content, kind)
        if count != math.prod(shape):
            raise BundleDamaged(f"a constant of shape {list(shape)} has {count} values")
        if values is not None:
            values = values.reshape(shape)
        return self._text(content["name"]), _Tensor(shape, count * _ITEM_BYTES[kind], values)

    def _tensor_values(self, content: Mapping[str, list[_Raw]], kind: int) -> tuple[int, np.ndarray | None]:
        """Return how many values a constant of element type ``kind`` has, and these where they are few integers.

        ONNX has them as raw bytes, or in the one field for their type. A part of a value gives a count of -1.
        """
        # 1. The field that has them: no other reader may find other values in another one.
        filled = [name for name in _TYPED if content[name]]
        raw = content["raw_data"]
        if len(filled) + len(raw) > 1:
            raise BundleDamaged("a constant has its values twice")
        # 2. Raw bytes, or no values at all.
        if raw:
            return _raw_values(_bytes(raw[0]), kind)
        if not filled:
            return 0, _empty_values(kind)
        # 3. The field for their type; floats are counted by their bytes, and never looked at.
        name = filled[0]
        if kind not in _TYPED[name]:
            raise BundleDamaged(f"a constant of element type {kind} has its values as '{name}'")
        if name in {"int32_data", "int64_data"}:
            return self._integer_values(content[name], kind)
        item_bytes = 4 if name == "float_data" else 8
        size = sum(len(_bytes(value)) for value in content[name])
        return size // item_bytes, None

    def _integer_values(self, values: Sequence[_Raw], kind: int) -> tuple[int, np.ndarray | None]:
        """Return what `_tensor_values` does, of a constant whose values are integers in a field of their own."""
        numbers = self._integers(values)
        is_needed = kind == _INT64 and len(numbers) <= _MOST_KNOWN
        if not is_needed:
            return len(numbers), None
        return len(numbers), np.array(numbers, np.int64)

    def _text(self, values: Sequence[_Raw]) -> str:
        """Return the text of a field that occurs at most once; empty where it does not."""
        return self._copied(values[0]).decode() if values else ""

    def _copied(self, value: _Raw) -> bytes:
        """Return a copy of a field's bytes, which the budget bounds."""
        content = _bytes(value)
        self._budget.spend("bytes of texts", len(content))
        return bytes(content)

    def _integers(self, values: Sequence[_Raw]) -> list[int]:
        """Return the integers of a repeated field, packed or not."""
        result: list[int] = []
        for value in values:
            if isinstance(value, int):
                result.append(_signed(value))
                continue
            self._budget.spend("bytes of integers", len(value))
            at = 0
            while at < len(value):
                number, at = _varint(value, at)
                result.append(_signed(number))
        return result

    def _value_info(self, data: memoryview) -> tuple[str, list[int | None]]:
        """Return the name of an input or output, and its sides; None for one that has a name instead of a number."""
        content = self._content(data, {1: "name", 2: "type"}, {3, 4}, "value")
        sides: list[int | None] = []
        for value_type in content["type"]:  # at most one
            sides = self._sides_of_type(_bytes(value_type))
        return self._text(content["name"]), sides

    def _sides_of_type(self, data: memoryview) -> list[int | None]:
        """Return the sides that the type of an input or output states, see `_sides`; empty where it states none."""
        # Each level occurs at most once.
        for tensor in self._content(data, {1: "tensor"}, {6}, "type")["tensor"]:
            for shape in self._content(_bytes(tensor), {1: "element", 2: "shape"}, set(), "tensor type")["shape"]:
                return self._sides(_bytes(shape))
        return []

    def _sides(self, data: memoryview) -> list[int | None]:
        """Return the sides of a shape; None for one that has a name instead of a number."""
        sides: list[int | None] = []
        for side in self._content(data, {1: "side*"}, set(), "shape")["side"]:
            value = self._content(_bytes(side), {1: "value", 2: "symbol"}, {3}, "side")["value"]
            if value:
                sides.append(_signed(_number(value[0])))
            else:
                sides.append(None)
        return sides


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the variable-length integer that begins at byte ``at``, and the byte behind it."""
    value = 0
    shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise BundleDamaged("not an ONNX model, or truncated")
        # Each byte has seven bits of the number, the lowest first; its highest bit says that another byte follows.
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        shift += 7
        if byte < 128:
            return value & (1 << 64) - 1, at


def _signed(value: int) -> int:
    """Return a 64-bit integer as a signed one."""
    return value - (1 << 64) if value >> 63 else value


def _number(value: _Raw) -> int:
    """Return the number of a field that ONNX has as a variable-length integer."""
    if not isinstance(value, int):
        raise BundleDamaged("a number of another kind than ONNX has there")
    return value


def _number_or_zero(values: Sequence[_Raw]) -> int:
    """Return the number of a field that occurs at most once; 0, the default of protobuf, where it does not."""
    if not values:
        return 0
    return _number(values[0])


def _bytes(value: _Raw) -> memoryview:
    """Return the bytes of a field that ONNX has with a length or of a fixed size."""
    if isinstance(value, int):
        raise BundleDamaged("a number where ONNX has something else")
    return value


def _field_of(content: Mapping[str, list[_Raw]]) -> str:
    """Return the name of the field that the stated type of an attribute belongs to.

    Raises:
        BundleDamaged: The type is not allowed, or the value is not in this field, and in no other one.
    """
    stated_type = _number_or_zero(content["type"])
    filled = [name for name in _KINDS if content[name]]
    name = _FIELDS.get(stated_type, "")
    # An empty list has no field at all; everything else has exactly that of its type.
    is_empty_list = not filled and name in {"ints", "floats"}
    if is_empty_list or filled == [name]:
        return name
    raise BundleDamaged(f"an attribute of type {stated_type} has {' and '.join(filled) or 'no value'}")


def _empty_values(kind: int) -> np.ndarray | None:
    """Return the values of a constant without any, where they are integers that sizes may be made of."""
    return np.empty(0, np.int64) if kind == _INT64 else None


def _raw_values(raw: memoryview, kind: int) -> tuple[int, np.ndarray | None]:
    """Return what `_tensor_values` does, of a constant whose values are raw bytes."""
    count, bytes_over = divmod(len(raw), _ITEM_BYTES[kind])
    if bytes_over:
        return -1, None
    is_needed = kind == _INT64 and count <= _MOST_KNOWN
    if not is_needed:
        return count, None
    return count, np.frombuffer(raw, "<i8")


def _shape(sides: Sequence[int]) -> Shape:
    """Return the shape with these sides, which must be few and in range."""
    are_in_range = all(0 <= side < _MOST_SIDE for side in sides)
    if len(sides) > _MOST_RANK or not are_in_range:
        raise BundleDamaged(f"shape {list(sides[: _MOST_RANK + 1])} is not possible")
    return tuple(map(int, sides))


# --- shapes ----------------------------------------------------------------------------------------------------------


@dataclass
class _State:
    """The values so far: their shapes, the numbers of small integer ones, and the names that depend on no input."""

    shapes: dict[str, Shape]
    numbers: dict[str, np.ndarray]
    fixed: set[str]
    budget: _Budget

    def shape(self, node: _Node, position: int) -> Shape:
        """Return the shape of the input of a node at this position.

        Raises:
            BundleDamaged: The node has no such input.
        """
        name = node.input_at(position)
        if not name:
            raise BundleDamaged(f"{node.operator} has no input {position}")
        return self.shapes[name]

    def shapes_of(self, node: _Node) -> list[Shape]:
        """Return the shapes of all inputs of a node, in order.

        Raises:
            BundleDamaged: An input is left out.
        """
        return [self.shape(node, position) for position in range(len(node.inputs))]

    def numbers_of(self, node: _Node, position: int) -> list[int] | None:
        """Return the numbers of the input of a node at this position; None where it has no such input.

        Raises:
            BundleDamaged: The numbers depend on the data.
        """
        name = node.input_at(position)
        if not name:
            return None
        numbers = self.numbers.get(name)
        if numbers is None:
            raise BundleDamaged(f"the size of a result of {node.operator} depends on the data")
        self.budget.spend("numbers in sizes", numbers.size)
        return [int(number) for number in numbers.reshape(-1)]


def _cost(graph: _Graph, inputs: Sequence[Shape], budget: _Budget) -> Cost:
    """Return the cost of a graph: its nodes run in order, and a value is freed after the last node that reads it."""
    state = _begin(graph, inputs, budget)
    last_use = _last_uses(graph)
    constant_bytes = sum(constant.bytes for constant in graph.constants.values())
    live_bytes = sum(_size(shape) for shape in inputs)
    peak_bytes = live_bytes
    work = 0
    for at, node in enumerate(graph.nodes):
        # 1. The node's results. One of constants alone is computed when the graph is loaded, and kept.
        shapes = _infer(node, state)
        size = sum(map(_size, shapes))
        depends_on_input = not state.fixed.issuperset(filter(None, node.inputs))
        if depends_on_input:
            live_bytes += size
        else:
            state.fixed.update(node.outputs)
            constant_bytes += size
        # 2. What the node takes while it runs: all values that are live, and what it needs for itself.
        peak_bytes = max(peak_bytes, live_bytes + _scratch(node, state))
        work += _work(node, state, shapes)
        # 3. Values that no later node reads are freed; those that are fixed count among the constants.
        for name in {*node.inputs, *node.outputs} - state.fixed:
            if name and last_use.get(name, at) <= at:
                live_bytes -= _size(state.shapes[name])
    missing = [name for name in graph.outputs if name not in state.shapes]
    if missing:
        raise BundleDamaged(f"output '{missing[0][:60]}' is computed by no node")
    return Cost(constant_bytes + peak_bytes, work, tuple(state.shapes[name] for name in graph.outputs))


def _last_uses(graph: _Graph) -> dict[str, int]:
    """Return the number of the last node that reads each value; outputs of the graph are read behind all nodes."""
    last_use: dict[str, int] = {}
    for at, node in enumerate(graph.nodes):
        last_use.update(dict.fromkeys(node.inputs, at))
    last_use.update(dict.fromkeys(graph.outputs, len(graph.nodes)))
    return last_use


def _begin(graph: _Graph, inputs: Sequence[Shape], budget: _Budget) -> _State:
    """Return the state before the first node: the constants, and the inputs, which must fit the graph's own shapes."""
    outer = [name for name in graph.inputs if name not in graph.constants]
    if len(outer) != len(inputs):
        raise BundleDamaged(f"{len(outer)} inputs, expected {len(inputs)}")
    shapes = {name: constant.shape for name, constant in graph.constants.items()}
    for name, shape in zip(outer, inputs, strict=True):
        if not _accepts(graph.inputs[name], shape):
            raise BundleDamaged(
                f"input '{name[:60]}' is {graph.inputs[name]}, expected {list(shape)} or names of sides"
            )
        shapes[name] = shape
    numbers = {name: constant.values for name, constant in graph.constants.items() if constant.values is not None}
    return _State(shapes, numbers, set(graph.constants), budget)


def _accepts(sides: Sequence[int | None], shape: Shape) -> bool:
    """Return whether an input with these sides, None for one that is only named, takes arrays of this shape."""
    if len(sides) != len(shape):
        return False
    return all(side is None or side == actual for side, actual in zip(sides, shape, strict=True))


def _size(shape: Shape) -> int:
    """Return the bytes of a value: 8 for each element, the most of any type, so that types need not be followed."""
    return 8 * math.prod(shape)


def _scratch(node: _Node, state: _State) -> int:
    """Return the bytes that a node takes beside its inputs and results."""
    # 1. A transposed convolution has the columns of one input, an LSTM its four gates at all steps and its states.
    if node.operator == "ConvTranspose":
        return _size((*state.shape(node, 0)[2:], *state.shape(node, 1)[1:]))
    if node.operator == "LSTM":
        steps, batch, _ = state.shape(node, 0)
        return _size((steps + 2, batch, state.shape(node, 1)[1]))
    # 2. All others have nothing.
    return 0


def _infer(node: _Node, state: _State) -> list[Shape]:
    """Return the shapes of a node's results, and add these, and their numbers where they are few, to ``state``."""
    # 1. The inputs have to be there: a graph has its nodes in the order in which they run.
    for name in filter(None, node.inputs):
        if name not in state.shapes:
            raise BundleDamaged(f"input '{name[:60]}' of {node.operator} is not there yet")
    # 2. As many results as the node has; its operator may have fewer, and a node without any is of no use.
    count = len(node.outputs)
    shapes = _RULES[node.operator](node, state)[:count]
    if not shapes or len(shapes) < count:
        raise BundleDamaged(f"{node.operator} has {count} results, which is not allowed")
    # 3. Numbers before shapes: arithmetic that is too large for the budget is refused before its shapes count.
    _note_numbers(node, state, shapes[0])
    for name, shape in zip(node.outputs, shapes, strict=True):
        if name in state.shapes:
            raise BundleDamaged(f"value '{name[:60]}' occurs twice")
        if name:
            state.shapes[name] = _shape(shape)
    return shapes


def _note_numbers(node: _Node, state: _State, shape: Shape) -> None:
    """Add the numbers of a node's first result, which has this shape, to ``state`` where they are few and known."""
    if math.prod(shape) > _MOST_KNOWN:
        return
    numbers = _numbers(node, state, shape)
    if numbers is not None:
        state.budget.spend("numbers in sizes", numbers.size)
        state.numbers[node.outputs[0]] = numbers


def _numbers(node: _Node, state: _State, shape: Shape) -> np.ndarray | None:
    """Return the int64 numbers (``shape``) of a result that sizes may be made of; None where they are not known.

    Raises:
        BundleDamaged: The numbers do not have the shape that the operator's rule says.
    """
    if node.operator == "Shape":
        return np.array(_part(state.shape(node, 0), node), np.int64)
    if node.operator == "Constant":
        return _constant(node).values
    if node.operator == "Cast" and node.int("to", 0) != _INT64:
        return None
    compute = _ARITHMETIC.get(node.operator)
    if compute is None:
        return None
    values = _known_inputs(node, state)
    if values is None:
        return None
    with np.errstate(over="ignore", divide="raise"):
        result = np.asarray(compute(node, state, values), np.int64)
    if result.shape != shape:
        raise BundleDamaged(f"{node.operator} of integers has shape {result.shape}, expected {shape}")
    return result


def _known_inputs(node: _Node, state: _State) -> list[np.ndarray] | None:
    """Return the numbers of all inputs of a node; None where it has no input, or those of one are not known."""
    names = [name for name in node.inputs if name]
    values = [state.numbers[name] for name in names if name in state.numbers]
    if not values or len(values) != len(names):
        return None
    return values


def _part(shape: Shape, node: _Node) -> Shape:
    """Return the sides of a shape that a Shape node gives, from ``start`` to ``end``."""
    return shape[node.int("start", 0) : node.int("end", len(shape))]


def _constant(node: _Node) -> _Tensor:
    """Return the value of a Constant node, which has one attribute."""
    if len(node.attributes) != 1:
        raise BundleDamaged(f"a Constant has {len(node.attributes)} attributes, expected one")
    value = node.attributes.get("value", node.attributes.get("value_int", node.attributes.get("value_ints")))
    if isinstance(value, _Tensor):
        return value
    if isinstance(value, int | list):
        values = np.array(value, np.int64)
        return _Tensor(tuple(values.shape), values.nbytes, values)
    if isinstance(node.attributes.get("value_float"), float):
        return _Tensor((), 4)
    raise BundleDamaged("a Constant has no value of an allowed kind")


def _axis(axis: int, rank: int) -> int:
    """Return an axis of a value with ``rank`` axes counted from the front; ONNX counts negative ones from the end."""
    if not -rank <= axis < rank:
        raise BundleDamaged(f"axis {axis} of {rank} axes")
    return axis % rank


def _first(node: _Node, state: _State) -> list[Shape]:
    """Return the shape of the first input: the rule of operators that work element by element."""
    shape = state.shape(node, 0)
    if node.int("training_mode", 0):
        raise BundleDamaged("batch norm in training mode")
    return [shape]


def _cast(node: _Node, state: _State) -> list[Shape]:
    """Return the shape of the input, whose elements get another type."""
    kind = node.int("to", 0)
    if kind not in _ITEM_BYTES:
        raise BundleDamaged(f"Cast to element type {kind}")
    return [state.shape(node, 0)]


def _layer_norm(node: _Node, state: _State) -> list[Shape]:
    """Return the shape of the input for the result, its means and its deviations, which are no larger."""
    return [state.shape(node, 0)] * 3


def _broadcast(node: _Node, state: _State) -> list[Shape]:
    """Return the shape that the inputs are broadcast to."""
    return [_common(state.shapes_of(node))]


def _common(shapes: Sequence[Shape]) -> Shape:
    """Return the shape that arrays of these shapes are broadcast to."""
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    common_sides = []
    for sides in zip(*padded, strict=True):
        # A side of 1 is repeated, so that all others have to be equal.
        long_sides = {side for side in sides if side != 1}
        if len(long_sides) > 1:
            raise BundleDamaged(f"shapes {', '.join(map(str, shapes))} do not fit each other")
        side = long_sides.pop() if long_sides else 1
        common_sides.append(side)
    return tuple(common_sides)


@dataclass(frozen=True)
class _Sliding:
    """How the windows of a convolution or pooling slide: a number for each of the ``count`` sides, two for pads."""

    count: int
    strides: list[int]
    dilations: list[int]
    pads: list[int]
    """Values added before each side, then behind each side."""

    @classmethod
    def of(cls, node: _Node, count: int) -> _Sliding:
        """Return what a node states, or ONNX's defaults."""
        strides = node.ints("strides", [1] * count)
        dilations = node.ints("dilations", [1] * count)
        pads = node.ints("pads", [0] * 2 * count)
        return cls(count, strides, dilations, pads)

    @property
    def has_all_sides(self) -> bool:
        """Whether there is a side, and each list has its numbers for every side."""
        lengths = {len(self.strides), len(self.dilations), len(self.pads) // 2}
        return self.count >= 1 and lengths == {self.count}

    def width(self, at: int, kernel: int) -> int:
        """Return how many values of side ``at`` a window of ``kernel`` values spans."""
        return self.dilations[at] * (kernel - 1) + 1


def _windows(node: _Node, shape: Shape, kernel: Sequence[int]) -> Shape:
    """Return how many windows of ``kernel`` a convolution or pooling has on each side of an input (n, c, ...).

    Raises:
        BundleDamaged: The node has other numbers than its input has sides, or impossible ones.
    """
    # 1. Every number is there and possible.
    sliding = _Sliding.of(node, len(shape) - 2)
    has_all_sides = sliding.has_all_sides and len(kernel) == sliding.count
    if not has_all_sides or min(*sliding.strides, *sliding.dilations, *kernel) < 1 or min(sliding.pads) < 0:
        raise BundleDamaged(f"{node.operator} with impossible kernel, strides, dilations or pads")
    # 2. Padded "same", an input has a window at each stride, whatever the kernel is. Only NOTSET takes the stated pads.
    auto_pad = node.attributes.get("auto_pad", b"NOTSET")
    if auto_pad in {b"SAME_UPPER", b"SAME_LOWER"}:
        return tuple(-(-side // stride) for side, stride in zip(shape[2:], sliding.strides, strict=True))
    pads = sliding.pads if auto_pad == b"NOTSET" else [0] * 2 * sliding.count
    # 3. Otherwise windows are counted that lie within the padded side.
    counts = []
    for at, side in enumerate(shape[2:]):
        width = sliding.width(at, kernel[at])
        stride = sliding.strides[at]
        begin_of_pad = side + pads[at]
        room = begin_of_pad + pads[at + sliding.count] - width
        if room < 0:
            raise BundleDamaged(f"{node.operator} with a window of {width} over {side}")
        count = room // stride + 1
        # With ceil_mode a last window may reach beyond the end, if it begins before the pad behind the side.
        is_rounded_up = node.int("ceil_mode", 0) != 0
        if is_rounded_up and room % stride > 0 and count * stride < begin_of_pad:
            count += 1
        counts.append(count)
    return tuple(counts)


def _conv(node: _Node, state: _State) -> list[Shape]:
    """Return the shape of a convolution: a channel for each kernel, over the windows of the input."""
    shape = state.shape(node, 0)
    weight = state.shape(node, 1)
    group = node.int("group", 1)
    is_possible = len(shape) == len(weight) >= 3 and group >= 1
    if not is_possible or shape[1] != weight[1] * group or weight[0] % group:
        raise BundleDamaged(f"Conv of {shape} with weights {weight} in {group} groups")
    return [(shape[0], weight[0], *_windows(node, shape, weight[2:]))]


def _conv_transpose(node: _Node, state: _State) -> list[Shape]:
    """Return the shape of a transposed convolution, with pads and strides that the node states."""
    shape = state.shape(node, 0)
    weight = state.shape(node, 1)
    group = node.int("group", 1)
    sliding = _Sliding.of(node, len(shape) - 2)
    output_padding = node.ints("output_padding", [0] * sliding.count)
    message = f"ConvTranspose of {shape} with weights {weight}, or of a form that is not allowed"
    # 1. The form: pads are stated, and every number is there.
    if "output_shape" in node.attributes or node.attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise BundleDamaged(message)
    has_all_sides = sliding.has_all_sides and len(weight) - 2 == len(output_padding) == sliding.count
    if not has_all_sides:
        raise BundleDamaged(message)
    # 2. The numbers: channels fit the weights, windows move and span values, and nothing negative is added.
    fits_channels = group >= 1 and shape[1] == weight[0] and shape[1] % group == 0
    has_steps = min(*sliding.strides, *sliding.dilations) >= 1
    has_pads = min(*sliding.pads, *output_padding) >= 0
    if not fits_channels or not has_steps or not has_pads:
        raise BundleDamaged(message)
    # 3. Each value of the input adds a window to the result, at each stride.
    sides = []
    for at, side in enumerate(shape[2:]):
        width = sliding.width(at, weight[at + 2])
        cut = sliding.pads[at] + sliding.pads[at + sliding.count]
        sides.append(sliding.strides[at] * (side - 1) + output_padding[at] + width - cut)
    return [(shape[0], weight[1] * group, *sides)]


def _pool(node: _Node, state: _State) -> list[Shape]:
    """Return the shape of a pooling over the windows of the input; the second result are indices of maxima."""
    shape = state.shape(node, 0)
    return [(*shape[:2], *_windows(node, shape, node.ints("kernel_shape")))] * 2


def _global_pool(node: _Node, state: _State) -> list[Shape]:
    """Return the shape of a pooling over all of each channel."""
    shape = state.shape(node, 0)
    return [(*shape[:2], *[1] * len(shape[2:]))]


def _gemm(node: _Node, state: _State) -> list[Shape]:
    """Return the shape of a matrix product, either side of which may be transposed."""
    left_shape = state.shape(node, 0)
    right_shape = state.shape(node, 1)
    if len(left_shape) != 2 or len(right_shape) != 2:
        raise BundleDamaged(f"Gemm of {left_shape} and {right_shape}")
    if node.int("transA", 0):
        left_shape = left_shape[::-1]
    if node.int("transB", 0):
        right_shape = right_shape[::-1]
    if left_shape[1] != right_shape[0]:
        raise BundleDamaged(f"Gemm of {left_shape} and {right_shape}")
    return [(left_shape[0], right_shape[1])]


def _matmul(node: _Node, state: _State) -> list[Shape]:
    """Return the shape of a product as NumPy's ``matmul`` has it."""
    left_shape = state.shape(node, 0)
    right_shape = state.shape(node, 1)
    if not left_shape or not right_shape:
        raise BundleDamaged("MatMul of a scalar")
    # A vector counts as a row on the left and as a column on the right; its side is not in the result.
    rows = left_shape if len(left_shape) > 1 else (1, *left_shape)
    columns = right_shape if len(right_shape) > 1 else (*right_shape, 1)
    if rows[-1] != columns[-2]:
        raise BundleDamaged(f"MatMul of {left_shape} and {right_shape}")
    sides = _common([rows[:-2], columns[:-2]])
    if len(left_shape) > 1:
        sides = (*sides, rows[-2])
    if len(right_shape) > 1:
        sides = (*sides, columns[-1])
    return [sides]


_GATES = 4
"""The gates of an LSTM's memory cell, whose weights lie one behind the other: input, output, forget and cell."""

_LSTM_ATTRIBUTES = frozenset({"hidden_size", "direction", "input_forget", "layout"})


def _lstm(node: _Node, state: _State) -> list[Shape]:
    """Return the shapes of an LSTM's outputs at all steps (steps, 1, n, h), and of its last output and state (1, n, h).

    It reads its input (steps, n, channels) forwards with the usual activations, and has no peepholes.
    """
    _check_lstm_form(node)
    shape = state.shape(node, 0)
    hidden = node.int("hidden_size", 0)
    if len(shape) != 3 or hidden < 1:
        raise BundleDamaged(f"LSTM of {shape} with {hidden} cells")
    steps, batch, _ = shape
    _check_lstm_inputs(node, state, shape, hidden)
    return [(steps, 1, batch, hidden), (1, batch, hidden), (1, batch, hidden)]


def _check_lstm_form(node: _Node) -> None:
    """Require that an LSTM is the plain one: forwards, all sequences of one length, usual activations, no peepholes.

    Raises:
        BundleDamaged: It is another one.
    """
    has_others = bool(node.attributes.keys() - _LSTM_ATTRIBUTES)
    is_forward = node.attributes.get("direction", b"forward") == b"forward"
    is_usual = is_forward and not node.int("layout", 0) and not node.int("input_forget", 0)
    if has_others or not is_usual:
        raise BundleDamaged("LSTM with a direction, layout, clip or activations that are not allowed")
    if node.input_at(4) or node.input_at(7):
        raise BundleDamaged("LSTM with lengths of its own or peepholes, which are not allowed")


def _check_lstm_inputs(node: _Node, state: _State, shape: Shape, hidden: int) -> None:
    """Require that weights, biases and first states of an LSTM fit its input, whose shape is (steps, n, channels).

    Raises:
        BundleDamaged: One has another shape.
    """
    _, batch, channels = shape
    gates = _GATES * hidden
    first_state = (1, batch, hidden)
    required = {1: (1, gates, channels), 2: (1, gates, hidden)}
    optional = {3: (1, 2 * gates), 5: first_state, 6: first_state}
    present = {position: needed for position, needed in optional.items() if node.input_at(position)}
    for position, needed in {**required, **present}.items():
        found_shape = state.shape(node, position)
        if found_shape != needed:
            raise BundleDamaged(f"LSTM of {shape} with {found_shape} as input {position}, not {needed}")


def _flatten(node: _Node, state: _State) -> list[Shape]:
    """Return the shape of a matrix whose rows are the axes before the given one, and whose columns are the others."""
    shape = state.shape(node, 0)
    axis = node.int("axis", 1)
    if axis < 0:
        axis += len(shape)
    return [(math.prod(shape[:axis]), math.prod(shape[axis:]))]


def _concat(node: _Node, state: _State) -> list[Shape]:
    """Return the shape of the inputs one behind the other along an axis."""
    shapes = state.shapes_of(node)
    axis = _axis(node.int("axis", 0), len(shapes[0]))
    # All sides but that along the axis have to be the same.
    ranks = {len(shape) for shape in shapes}
    other_sides = {_replace_side(shape, axis) for shape in shapes}
    if len(ranks) != 1 or len(other_sides) != 1:
        raise BundleDamaged(f"Concat of {', '.join(map(str, shapes))[:200]}")
    length = sum(shape[axis] for shape in shapes)
    return [_replace_side(shapes[0], axis, length)]


def _replace_side(shape: Shape, axis: int, *sides: int) -> Shape:
    """Return a shape with the side of an axis replaced by other sides, or left out."""
    return (*shape[:axis], *sides, *shape[axis + 1 :])


def _split(node: _Node, state: _State) -> list[Shape]:
    """Return the shapes of the parts: as stated, or as equal as can be."""
    shape = state.shape(node, 0)
    axis = _axis(node.int("axis", 0), len(shape))
    count = len(node.outputs)
    length = shape[axis]
    parts = state.numbers_of(node, 1) or node.ints("split")
    if not parts:
        # All parts are equally large but the last ones, which get what is left.
        part_size = -(-length // count)
        parts = [max(0, min(part_size, length - part_size * at)) for at in range(count)]
    if len(parts) != count or sum(parts) != length or min(parts) < 0:
        raise BundleDamaged(f"Split of {shape} into {parts[:20]}")
    return [_replace_side(shape, axis, part) for part in parts]


def _slices(node: _Node, state: _State) -> tuple[slice, ...]:
    """Return the slice that a Slice node takes of each axis; all of an axis that it does not name."""
    # 1. The numbers of the node: axes and steps have defaults.
    shape = state.shape(node, 0)
    starts = state.numbers_of(node, 1)
    ends = state.numbers_of(node, 2)
    if starts is None or ends is None:
        raise BundleDamaged("Slice without starts and ends")
    axes = state.numbers_of(node, 3) or list(range(len(starts)))
    steps = state.numbers_of(node, 4) or [1] * len(starts)
    are_as_many = len(starts) == len(ends) == len(axes) == len(steps)
    if not are_as_many or 0 in steps:
        raise BundleDamaged("Slice with starts, ends, axes and steps that do not fit")
    # 2. The slices. Forwards, ONNX and Python read them alike.
    slices = [slice(None)] * len(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        at = _axis(axis, len(shape))
        if step > 0:
            slices[at] = slice(start, end, step)
        else:
            slices[at] = _slice_backwards(start, end, step, shape[at])
    return tuple(slices)


def _slice_backwards(start: int, end: int, step: int, side: int) -> slice:
    """Return a slice with a negative step over ``side`` values, unless ONNX and Python would read it differently."""
    if start < -side or end >= side:
        raise BundleDamaged(f"Slice backwards from {start} to {end} of {side}")
    # An end before the first value means that this is taken, too; Python would count such an end from behind.
    stop = None if end < -side else end
    return slice(start, stop, step)


def _slice(node: _Node, state: _State) -> list[Shape]:
    """Return the shape of the slices of all axes."""
    shape = state.shape(node, 0)
    sides = []
    for part, side in zip(_slices(node, state), shape, strict=True):
        indices = range(*part.indices(side))
        sides.append(len(indices))
    return [tuple(sides)]


def _axes(node: _Node, state: _State) -> list[int]:
    """Return the axes of a node: an input in newer operator sets, an attribute in older ones."""
    return state.numbers_of(node, 1) or node.ints("axes")


def _squeeze(node: _Node, state: _State) -> list[Shape]:
    """Return the shape without the given axes of one value, or without all of these."""
    shape = state.shape(node, 0)
    axes = {_axis(axis, len(shape)) for axis in _axes(node, state)}
    if not axes:
        axes = {at for at, side in enumerate(shape) if side == 1}
    if any(shape[axis] != 1 for axis in axes):
        raise BundleDamaged(f"Squeeze of axes {sorted(axes)} of {shape}")
    return [tuple(side for at, side in enumerate(shape) if at not in axes)]


def _unsqueeze(node: _Node, state: _State) -> list[Shape]:
    """Return the shape with axes of one value at the given places of the result."""
    shape = state.shape(node, 0)
    axes = _axes(node, state)
    rank = len(shape) + len(axes)
    places = {_axis(axis, rank) for axis in axes}
    sides = iter(shape)
    if len(places) != len(axes):
        raise BundleDamaged(f"Unsqueeze with axes {axes}")
    return [tuple(1 if at in places else next(sides) for at in range(rank))]


def _transpose(node: _Node, state: _State) -> list[Shape]:
    """Return the shape with its axes in the given order; without one they are reversed."""
    shape = state.shape(node, 0)
    order = node.ints("perm", range(len(shape))[::-1])
    if sorted(order) != list(range(len(shape))):
        raise BundleDamaged(f"Transpose of {shape} with order {order}")
    return [tuple(shape[axis] for axis in order)]


def _reshape(node: _Node, state: _State) -> list[Shape]:
    """Return the shape that the node asks for, with its 0 and -1 replaced by numbers."""
    shape = state.shape(node, 0)
    stated = state.numbers_of(node, 1)
    if stated is None or min(stated, default=0) < -1 or stated.count(-1) > 1:
        raise BundleDamaged(f"Reshape of {shape} to {stated}")
    sides = list(stated)
    # 1. A side of 0 stands for that of the input, unless the node says otherwise.
    if not node.int("allowzero", 0):
        for at, side in enumerate(stated):
            if side == 0:
                sides[at] = shape[at]
    # 2. A side of -1 stands for what the others leave.
    count = math.prod(shape)
    if -1 in sides:
        unknown = sides.index(-1)
        others = (*sides[:unknown], *sides[unknown + 1 :])
        sides[unknown] = count // math.prod(others)
    if math.prod(sides) != count:
        raise BundleDamaged(f"Reshape of {shape} to {stated}")
    return [tuple(sides)]


def _expand(node: _Node, state: _State) -> list[Shape]:
    """Return the shape that the input is broadcast to together with the stated one."""
    return [_common([state.shape(node, 0), _shape(state.numbers_of(node, 1) or [])])]


def _pad(node: _Node, state: _State) -> list[Shape]:
    """Return the shape with the pads of each axis, before and behind."""
    shape = state.shape(node, 0)
    pads = state.numbers_of(node, 1) or node.ints("pads")
    axes = state.numbers_of(node, 3) or list(range(len(shape)))
    if len(pads) != 2 * len(axes):
        raise BundleDamaged(f"Pad of {shape} by {pads[:20]}")
    sides = list(shape)
    for at, axis in enumerate(axes):
        sides[_axis(axis, len(shape))] += pads[at] + pads[at + len(axes)]
    return [tuple(sides)]


def _gather(node: _Node, state: _State) -> list[Shape]:
    """Return the shape with the axis replaced by that of the indices."""
    shape = state.shape(node, 0)
    indices = state.shape(node, 1)
    axis = _axis(node.int("axis", 0), len(shape))
    return [_replace_side(shape, axis, *indices)]


def _reduce(node: _Node, state: _State) -> list[Shape]:
    """Return the shape without the axes that are reduced, or with one value in each."""
    shape = state.shape(node, 0)
    axes = {_axis(axis, len(shape)) for axis in _axes(node, state)}
    if not axes and not node.int("noop_with_empty_axes", 0):
        axes = set(range(len(shape)))
    if node.int("keepdims", 1):
        return [tuple(1 if at in axes else side for at, side in enumerate(shape))]
    return [tuple(side for at, side in enumerate(shape) if at not in axes)]


# The rule of an operator returns the shapes of all results that it may have.
_RULES: dict[str, Callable[[_Node, _State], list[Shape]]] = {
    **dict.fromkeys(_UNARY.split(), _first),
    **dict.fromkeys(_BROADCAST.split(), _broadcast),
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    "AveragePool": _pool,
    "Cast": _cast,
    "Concat": _concat,
    "Constant": lambda node, _: [_constant(node).shape],
    "ConstantOfShape": lambda node, state: [_shape(state.numbers_of(node, 0) or [])],
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool,
    "GlobalMaxPool": _global_pool,
    "LSTM": _lstm,
    "LayerNormalization": _layer_norm,
    "MatMul": _matmul,
    "MaxPool": _pool,
    "Pad": _pad,
    "Reshape": _reshape,
    "Shape": lambda node, state: [(len(_part(state.shape(node, 0), node)),)],
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}


def _quotient(values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the quotient of two sizes, which are positive."""
    if (values[1] <= 0).any() or (values[0] < 0).any():  # others are rounded otherwise in ONNX
        raise BundleDamaged("a size is divided by, or from, a negative number")
    return np.asarray(values[0] // values[1])


def _part_of(values: np.ndarray, parts: tuple[slice, ...]) -> np.ndarray:
    """Return a part of sizes, read forwards."""
    if any((part.step or 1) < 0 for part in parts):
        raise BundleDamaged("sizes are read backwards")
    return np.asarray(values[parts])


_ARITHMETIC: dict[str, Callable[[_Node, _State, Sequence[np.ndarray]], Any]] = {
    "Add": lambda _, __, values: values[0] + values[1],
    "Cast": lambda _, __, values: values[0],  # of int64 to int64
    "Concat": lambda node, _, values: np.concatenate(values, axis=node.int("axis", 0)),
    "Div": lambda _, __, values: _quotient(values),
    "Gather": lambda node, _, values: np.take(values[0], values[1], axis=node.int("axis", 0)),
    "Identity": lambda _, __, values: values[0],
    "Mul": lambda _, __, values: values[0] * values[1],
    "Reshape": lambda node, state, values: values[0].reshape(_reshape(node, state)[0]),
    "Slice": lambda node, state, values: _part_of(values[0], _slices(node, state)),
    "Squeeze": lambda node, state, values: values[0].reshape(_squeeze(node, state)[0]),
    "Sub": lambda _, __, values: values[0] - values[1],
    "Unsqueeze": lambda node, state, values: values[0].reshape(_unsqueeze(node, state)[0]),
}
OPERATORS = frozenset(_RULES)
"""The operators that a bundle's graph may have: without control flow, randomness or files, and on every processor."""


def _work(node: _Node, state: _State, shapes: Sequence[Shape]) -> int:
    """Return the multiplications of a node with results of these shapes; where it has none, the values it handles."""
    # 1. A transposed convolution multiplies each value of the input by each weight of a channel.
    if node.operator == "ConvTranspose":
        return math.prod(state.shape(node, 0)) * math.prod(state.shape(node, 1)[1:])
    # 2. Other products count for each value of the result.
    count = math.prod(shapes[0])
    each = _multiplications_of_value(node, state)
    if each is not None:
        return count * each
    # 3. All others look at each value once.
    input_count = math.prod(state.shape(node, 0)) if node.input_at(0) else 0
    return max(count, input_count)


def _multiplications_of_value(node: _Node, state: _State) -> int | None:
    """Return the multiplications for a value of a node's result; None where the node looks at each value once."""
    # 1. Convolutions multiply by each weight of a channel.
    if node.operator == "Conv":
        return math.prod(state.shape(node, 1)[1:])
    # 2. Products multiply along the inner axis.
    if node.operator == "MatMul":
        return state.shape(node, 0)[-1]
    if node.operator == "Gemm":
        inner_axis = 0 if node.int("transA", 0) else 1
        return state.shape(node, 0)[inner_axis]
    # 3. Each gate of an LSTM's cell has a weight for each value of the input and of the state.
    if node.operator == "LSTM":
        return _GATES * (state.shape(node, 1)[2] + state.shape(node, 2)[2])
    # 4. Pooling looks at each value of a window.
    if node.operator in {"MaxPool", "AveragePool"}:
        return math.prod(node.ints("kernel_shape"))
    return None
