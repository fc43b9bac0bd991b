"""What an ONNX graph would take of a device, found by reading it: operators, shapes, memory and work. Nothing runs.

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
"""Of memory for constants and intermediate results of one batch; on a small device half of its memory, if that is less.

ResNet18 takes 6 MB for an image of 224 pixels, and 45 MB of weights, which count as constants.
"""

REST_BYTES = 96 << 20
"""What a process takes that runs a graph, beside it: ONNX Runtime, and eight inputs with their preprocessing."""

MOST_WORK = 100_000_000_000
"""Multiplications for one input; ResNet18 takes 1.8e9 for an image of 224 pixels, ViT-B 1.7e10."""

MOST_NODES = 10_000
MOST_GRAPHS = 8
"""Graphs of one file, which are read as one: an encoder, and the probe of its batch norm."""

_MOST = {"fields": 100_000, "bytes of integers": 1 << 18, "bytes of texts": 1 << 20, "numbers in sizes": 1 << 19}
"""What is read of a graph, before memory is taken for it: 0.5 s and 50 MB together.

MobileNetV3 in int8 takes 7,600, 20,000, 64,000 and 1,000 of these; DenseNet121 has 9,500 fields.
"""

_MOST_BESIDE = 4 << 20
"""Bytes of a file beside the values of its constants: ONNX Runtime reads them as well. DenseNet121 has 200,000."""

_MOST_RANK = 8
_MOST_SIDE = (1 << 31) - 1
"""ONNX Runtime takes this number, as the end of a Slice, for the end of the axis."""

_MOST_KNOWN = 4096
"""Values of an integer constant that are looked at; shapes and axes are shorter."""

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
    """What one batch takes: bytes of constants and intermediate results, multiplications, and the output's shapes."""

    memory_bytes: int
    work: int
    outputs: tuple[Shape, ...]


@dataclass(frozen=True)
class _Tensor:
    shape: Shape
    bytes: int
    values: np.ndarray | None = None


@dataclass
class _Node:
    operator: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, _Value] = field(default_factory=dict)

    def ints(self, name: str, default: Sequence[int] = ()) -> list[int]:
        """Return an attribute of integers."""
        value = self.attributes.get(name)
        if value is not None and not isinstance(value, list):
            raise BundleDamaged(f"attribute '{name}' of {self.operator} is no list of integers")
        return list(default) if value is None else value

    def int(self, name: str, default: int) -> int:
        """Return an attribute of one integer."""
        value = self.attributes.get(name, default)
        if not isinstance(value, int):
            raise BundleDamaged(f"attribute '{name}' of {self.operator} is no integer")
        return value


@dataclass
class _Graph:
    nodes: list[_Node] = field(default_factory=list)
    constants: dict[str, _Tensor] = field(default_factory=dict)
    inputs: dict[str, list[int | None]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)


def check(content: bytes | memoryview, inputs: Sequence[Shape], *, where: str = "encoder", most_bytes: int = 0) -> Cost:
    """What a serialised graph takes for inputs of these shapes, in order; the first axis of the first one is the batch.

    ``most_bytes``: the bound on memory; 0: `MOST_BYTES`, or half of this machine's memory where that is less.

    Raises:
        BundleDamaged: The file is not a graph, uses an operator or form that is not allowed, or exceeds a limit of
            memory or work.
    """
    try:
        budget = _Budget()
        cost = _cost(_Reader(budget).model(memoryview(content)), inputs, budget)
    except (BundleDamaged, ArithmeticError, IndexError, ValueError) as error:
        why = str(error)[:400] if isinstance(error, BundleDamaged) else f"malformed ({str(error)[:200]})"
        raise BundleDamaged(f"{where}: {why}; refused before it is run; export it again", is_public=True) from error
    limit = most_bytes or budget_bytes()
    if cost.memory_bytes > limit:
        raise BundleDamaged(
            f"{where}: takes {cost.memory_bytes >> 20} MiB of memory for a batch, at most {limit >> 20} MiB are "
            "allowed here; refused before it is run; export a smaller encoder",
            is_public=True,
        )
    if cost.work > MOST_WORK * max(inputs[0][0], 1):
        raise BundleDamaged(
            f"{where}: takes {cost.work / max(inputs[0][0], 1):.2g} multiplications for an input, at most "
            f"{MOST_WORK:.2g} are allowed; refused before it is run; export a smaller encoder",
            is_public=True,
        )
    return cost


def budget_bytes(most: int = MOST_BYTES) -> int:
    """Memory for a graph, up to ``most``: half of the machine's, and what this process may take but `REST_BYTES`."""
    limit = limit_bytes()
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no such system call, as on Windows
        most = min(most, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return most if limit is None else min(most, max(0, limit - REST_BYTES))


# --- protobuf --------------------------------------------------------------------------------------------------------

_VARINT = 0
_LENGTH = 2
_SIZES = {1: 8, _LENGTH: 0, 5: 4}
"""Wire type -> bytes of its content, where they are fixed."""

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
"""Field of an attribute -> the type that says that it is this one."""

_ITEM_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8}
"""Element type of ONNX -> bytes: float32, (u)int8, (u)int16, int32, int64, bool, float16, float64, uint32, uint64."""

_INT64 = 7
"""The one element type whose numbers are worked out: smaller ones wrap otherwise, and no size is made of them."""

_TYPED = {"float_data": {1}, "int32_data": {2, 3, 4, 5, 6, 9, 10}, "int64_data": {_INT64}, "double_data": {11}}
"""Field of a tensor -> the element types whose values ONNX has there."""


class _Budget:
    """What reading a graph may still take of each kind in `_MOST`."""

    def __init__(self) -> None:
        self._left = dict(_MOST)

    def spend(self, what: str, count: int) -> None:
        """Take so much of a kind.

        Raises:
            BundleDamaged: The rest of the budget is smaller than ``count``.
        """
        self._left[what] -= count
        if self._left[what] < 0:
            raise BundleDamaged(f"more than {_MOST[what]} {what}")


class _Reader:
    """Reads a model; each field that may occur once occurs once, so that no reader can understand another one."""

    def __init__(self, budget: _Budget) -> None:
        self._budget = budget

    def model(self, data: memoryview) -> _Graph:
        graph = _Graph()
        known = self._known(data, _MODEL, _MODEL_SKIPPED, "model")
        beside = len(data)
        if (count := len(known["graph"])) > MOST_GRAPHS:
            raise BundleDamaged(f"{count} graphs, at most {MOST_GRAPHS} are allowed")
        for part in known["graph"]:  # several are read as one: an encoder, and the probe of its batch norm
            content = self._known(_bytes(part), _GRAPH, _GRAPH_SKIPPED, "graph")
            if (count := len(graph.nodes) + len(content["node"])) > MOST_NODES:
                raise BundleDamaged(f"{count} nodes, at most {MOST_NODES} are allowed")
            graph.nodes += [self._node(_bytes(node)) for node in content["node"]]
            for raw in content["initializer"]:
                name, tensor = self._tensor(_bytes(raw))
                if name in graph.constants:
                    raise BundleDamaged(f"constant '{name[:60]}' occurs twice")
                graph.constants[name] = tensor
                beside -= tensor.bytes
            for raw in content["input"]:
                name, sides = self._value_info(_bytes(raw))
                if name in graph.inputs:
                    raise BundleDamaged(f"input '{name[:60]}' occurs twice")
                graph.inputs[name] = sides
            graph.outputs += [self._value_info(_bytes(raw))[0] for raw in content["output"]]
        values = (node.attributes.get("value") for node in graph.nodes if node.operator == "Constant")
        beside -= sum(one.bytes for one in values if isinstance(one, _Tensor))
        if beside > _MOST_BESIDE:
            raise BundleDamaged(
                f"{beside} of its {len(data)} bytes are no values of constants, at most {_MOST_BESIDE} are allowed"
            )
        return graph

    def _fields(self, data: memoryview) -> Iterator[tuple[int, int, _Raw]]:
        """Number, wire type and content of each field."""
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
                raise BundleDamaged("no ONNX model")
            size = _SIZES[kind]
            if kind == _LENGTH:
                size, at = _varint(data, at)
            if at + size > end:
                raise BundleDamaged("no ONNX model, or cut short")
            yield number, kind, data[at : at + size]
            at += size

    def _known(self, data: memoryview, names: Mapping[int, str], skipped: set[int], what: str) -> dict[str, list[_Raw]]:
        known: dict[str, list[_Raw]] = {name.rstrip("*"): [] for name in names.values()}
        for number, kind, value in self._fields(data):
            if number in skipped:
                continue
            if number not in names:
                raise BundleDamaged(f"field {number} of a {what} is not allowed in a bundle")
            name = names[number]
            if kind not in {_VARINT, _LENGTH} and name not in _FIXED:
                raise BundleDamaged(f"field '{name}' of a {what} is of another kind than in ONNX")
            if known[name.rstrip("*")] and not name.endswith("*"):
                raise BundleDamaged(f"field '{name}' of a {what} occurs twice")
            known[name.rstrip("*")].append(value)
        return known

    def _node(self, data: memoryview) -> _Node:
        known = self._known(data, _NODE, _NODE_SKIPPED, "node")
        node = _Node(self._text(known["op_type"]), [self._text([one]) for one in known["input"]])
        node.outputs = [self._text([one]) for one in known["output"]]
        domain = self._text(known["domain"])
        if domain not in {"", "ai.onnx"} or node.operator not in OPERATORS:
            name = f"{domain or 'ai.onnx'}.{node.operator}"
            raise BundleDamaged(f"operator '{name[:80]}' is not one of those that a bundle may have")
        for raw in known["attribute"]:
            content = self._known(_bytes(raw), _ATTRIBUTE, {13}, "attribute")
            name = self._text(content["name"])
            if name in node.attributes:
                raise BundleDamaged(f"attribute '{name[:60]}' occurs twice")
            node.attributes[name] = self._attribute(content)
        return node

    def _attribute(self, content: Mapping[str, list[_Raw]]) -> _Value:
        given = [name for name in _KINDS if content[name]]
        stated = _number(content["type"][0]) if content["type"] else 0
        kind = next((name for name, number in _KINDS.items() if number == stated), "")
        if given not in ([kind], []) or not kind or (not given and kind not in {"ints", "floats"}):
            raise BundleDamaged(f"an attribute of type {stated} has {' and '.join(given) or 'no value'}")
        if kind == "t":
            return self._tensor(_bytes(content["t"][0]))[1]
        if kind == "ints":
            return self._integers(content["ints"])
        if kind == "i":
            return _signed(_number(content["i"][0]))
        return 0.0 if kind in {"f", "floats"} else self._copied(content["s"][0])

    def _tensor(self, data: memoryview) -> tuple[str, _Tensor]:
        known = self._known(data, _TENSOR, {12, 16}, "tensor")
        kind = _number(known["data_type"][0]) if known["data_type"] else 0
        if known["data_location"] and _number(known["data_location"][0]):
            raise BundleDamaged("weights are in another file")
        if kind not in _ITEM_BYTES:
            raise BundleDamaged(f"element type {kind} of a constant is not allowed")
        shape = _shape(self._integers(known["dims"]))
        count = math.prod(shape)
        size = _ITEM_BYTES[kind]
        values: np.ndarray | None = None
        typed = [name for name in _TYPED if known[name]]
        if len(typed) + bool(known["raw_data"]) > 1:
            raise BundleDamaged("a constant has its values twice")
        if typed and kind not in _TYPED[typed[0]]:
            raise BundleDamaged(f"a constant of element type {kind} has its values as '{typed[0]}'")
        if typed and typed[0] in {"int32_data", "int64_data"}:
            numbers = self._integers(known[typed[0]])
            held = len(numbers)
            if kind == _INT64 and held <= _MOST_KNOWN:
                values = np.array(numbers, np.int64)
        elif typed:
            held = sum(_fixed(value) for value in known[typed[0]]) // (4 if typed[0] == "float_data" else 8)
        else:
            raw = _bytes(known["raw_data"][0]) if known["raw_data"] else memoryview(b"")
            held = len(raw) // size if len(raw) % size == 0 else -1
            if kind == _INT64 and 0 <= held <= _MOST_KNOWN:
                values = np.frombuffer(raw, "<i8")
        if held != count:
            raise BundleDamaged(f"a constant of shape {list(shape)} has {held} values")
        values = None if values is None else values.reshape(shape)
        return self._text(known["name"]), _Tensor(shape, count * size, values)

    def _text(self, values: Sequence[_Raw]) -> str:
        return self._copied(values[0]).decode() if values else ""

    def _copied(self, value: _Raw) -> bytes:
        content = _bytes(value)
        self._budget.spend("bytes of texts", len(content))
        return bytes(content)

    def _integers(self, values: Sequence[_Raw]) -> list[int]:
        """Of a repeated field, packed or not."""
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
        known = self._known(data, {1: "name", 2: "type"}, {3, 4}, "value")
        sides: list[int | None] = []
        for kind in known["type"]:
            for tensor in self._known(_bytes(kind), {1: "tensor"}, {6}, "type")["tensor"]:
                for shape in self._known(_bytes(tensor), {1: "element", 2: "shape"}, set(), "tensor type")["shape"]:
                    for side in self._known(_bytes(shape), {1: "side*"}, set(), "shape")["side"]:
                        value = self._known(_bytes(side), {1: "value", 2: "symbol"}, {3}, "side")["value"]
                        sides.append(_signed(_number(value[0])) if value else None)
        return self._text(known["name"]), sides


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise BundleDamaged("no ONNX model, or cut short")
        byte = data[at]
        value = value | (byte & 127) << shift
        at = at + 1
        shift = shift + 7
        if byte < 128:
            return value & (1 << 64) - 1, at


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _number(value: _Raw) -> int:
    if not isinstance(value, int):
        raise BundleDamaged("a number of another kind than ONNX has there")
    return value


def _bytes(value: _Raw) -> memoryview:
    if isinstance(value, int):
        raise BundleDamaged("a number where ONNX has something else")
    return value


def _fixed(value: _Raw) -> int:
    return len(_bytes(value))


def _shape(sides: Sequence[int]) -> Shape:
    if len(sides) > _MOST_RANK or any(not 0 <= side < _MOST_SIDE for side in sides):
        raise BundleDamaged(f"shape {list(sides[: _MOST_RANK + 1])} is not possible")
    return tuple(map(int, sides))


# --- shapes ----------------------------------------------------------------------------------------------------------


@dataclass
class _State:
    """Shapes of all values so far, the numbers of small integer ones, and which do not depend on the inputs."""

    shapes: dict[str, Shape]
    numbers: dict[str, np.ndarray]
    fixed: set[str]
    budget: _Budget

    def shape(self, node: _Node, position: int) -> Shape:
        """Return the shape of an input."""
        if position >= len(node.inputs) or not node.inputs[position]:
            raise BundleDamaged(f"{node.operator} has no input {position}")
        return self.shapes[node.inputs[position]]

    def given(self, node: _Node, position: int) -> list[int] | None:
        """Return the numbers of an input; None where it is not there."""
        if position >= len(node.inputs) or not node.inputs[position]:
            return None
        known = self.numbers.get(node.inputs[position])
        if known is None:
            raise BundleDamaged(f"the size of a result of {node.operator} depends on the data")
        self.budget.spend("numbers in sizes", known.size)
        return [int(number) for number in known.reshape(-1)]


def _cost(graph: _Graph, inputs: Sequence[Shape], budget: _Budget) -> Cost:
    state = _begin(graph, inputs, budget)
    last = {name: at for at, node in enumerate(graph.nodes) for name in node.inputs}
    last |= dict.fromkeys(graph.outputs, len(graph.nodes))
    constant = sum(one.bytes for one in graph.constants.values())
    live = peak = sum(_size(shape) for shape in inputs)
    work = 0
    for at, node in enumerate(graph.nodes):
        made = _infer(node, state)
        size = sum(map(_size, made))
        if state.fixed.issuperset(filter(None, node.inputs)):  # computed when the graph is loaded, and kept
            state.fixed.update(node.outputs)
            constant += size
        else:
            live += size
        peak = max(peak, live + _scratch(node, state))
        work += _work(node, state, made)
        over = {name for name in (*node.inputs, *node.outputs) if name and last.get(name, at) <= at}
        live -= sum(_size(state.shapes[name]) for name in over - state.fixed)
    if unknown := [name for name in graph.outputs if name not in state.shapes]:
        raise BundleDamaged(f"output '{unknown[0][:60]}' is computed by no node")
    return Cost(constant + peak, work, tuple(state.shapes[name] for name in graph.outputs))


def _begin(graph: _Graph, inputs: Sequence[Shape], budget: _Budget) -> _State:
    """Return what is known before the first node."""
    outer = [name for name in graph.inputs if name not in graph.constants]
    if len(outer) != len(inputs):
        raise BundleDamaged(f"{len(outer)} inputs, expected {len(inputs)}")
    shapes = {name: one.shape for name, one in graph.constants.items()}
    for name, shape in zip(outer, inputs, strict=True):
        sides = graph.inputs[name]
        if len(sides) != len(shape) or any(side not in {None, given} for side, given in zip(sides, shape, strict=True)):
            raise BundleDamaged(f"input '{name[:60]}' is {sides}, expected {list(shape)} or names of sides")
        shapes[name] = shape
    numbers = {name: one.values for name, one in graph.constants.items() if one.values is not None}
    return _State(shapes, numbers, set(graph.constants), budget)


def _size(shape: Shape) -> int:
    """Return bytes of a value: of 8 for each element, the largest there is, so that no type has to be followed."""
    return 8 * math.prod(shape)


def _scratch(node: _Node, state: _State) -> int:
    """Bytes that a node takes while it runs beside its inputs and results: ConvTranspose's columns of one input."""
    if node.operator != "ConvTranspose":
        return 0
    return _size((*state.shape(node, 0)[2:], *state.shape(node, 1)[1:]))


def _infer(node: _Node, state: _State) -> list[Shape]:
    """Return shapes of a node's results, which become part of ``state``; small integers are worked out."""
    if missing := [name for name in node.inputs if name and name not in state.shapes]:
        raise BundleDamaged(f"input '{missing[0][:60]}' of {node.operator} is not there yet")
    made = _RULES[node.operator](node, state)[: len(node.outputs)]
    if not made or len(node.outputs) > len(made):
        raise BundleDamaged(f"{node.operator} has {len(node.outputs)} results, others are allowed")
    numbers = _numbers(node, state, made[0]) if math.prod(made[0]) <= _MOST_KNOWN else None
    if numbers is not None:
        state.budget.spend("numbers in sizes", numbers.size)
        state.numbers[node.outputs[0]] = numbers
    for name, shape in zip(node.outputs, made, strict=True):
        if name in state.shapes:
            raise BundleDamaged(f"value '{name[:60]}' occurs twice")
        if name:
            state.shapes[name] = _shape(shape)
    return made


def _numbers(node: _Node, state: _State, shape: Shape) -> np.ndarray | None:
    """Return the int64 numbers (``shape``) of a result that sizes may be made of; None where they are not known."""
    if node.operator == "Shape":
        return np.array(_part(state.shape(node, 0), node), np.int64)
    if node.operator == "Constant":
        return _constant(node).values
    known = [state.numbers.get(name) for name in node.inputs if name]
    values = [one for one in known if one is not None]
    compute = _ARITHMETIC.get(node.operator)
    if node.operator == "Cast" and node.int("to", 0) != _INT64:
        return None
    if compute is None or not values or len(values) != len(known):
        return None
    with np.errstate(over="ignore", divide="raise"):
        result = np.asarray(compute(node, state, values), np.int64)
    if result.shape != shape:
        raise BundleDamaged(f"{node.operator} of integers has shape {result.shape}, expected {shape}")
    return result


def _part(shape: Shape, node: _Node) -> Shape:
    return shape[node.int("start", 0) : node.int("end", len(shape))]


def _constant(node: _Node) -> _Tensor:
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
    if not -rank <= axis < rank:
        raise BundleDamaged(f"axis {axis} of {rank} axes")
    return axis % rank


def _first(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    if node.int("training_mode", 0):
        raise BundleDamaged("batch norm in training mode")
    return [shape]


def _cast(node: _Node, state: _State) -> list[Shape]:
    if (kind := node.int("to", 0)) not in _ITEM_BYTES:
        raise BundleDamaged(f"Cast to element type {kind}")
    return [state.shape(node, 0)]


def _layer_norm(node: _Node, state: _State) -> list[Shape]:
    return [state.shape(node, 0)] * 3


def _broadcast(node: _Node, state: _State) -> list[Shape]:
    return [_common([state.shape(node, position) for position in range(len(node.inputs))])]


def _common(shapes: Sequence[Shape]) -> Shape:
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    sides = []
    for column in zip(*padded, strict=True):
        others = {side for side in column if side != 1}
        if len(others) > 1:
            raise BundleDamaged(f"shapes {', '.join(map(str, shapes))} do not fit each other")
        sides.append(others.pop() if others else 1)
    return tuple(sides)


def _windows(node: _Node, shape: Shape, kernel: Sequence[int]) -> Shape:
    """Sides of what slides over an input (n, c, ...)."""
    count = len(shape) - 2
    strides = node.ints("strides", [1] * count)
    dilations = node.ints("dilations", [1] * count)
    pads = node.ints("pads", [0] * 2 * count)
    auto = node.attributes.get("auto_pad", b"NOTSET")
    if (
        count < 1
        or not len(kernel) == len(strides) == len(dilations) == len(pads) // 2 == count
        or min(*strides, *dilations, *kernel) < 1
        or min(pads) < 0
    ):
        raise BundleDamaged(f"{node.operator} with impossible kernel, strides, dilations or pads")
    sides = []
    for at, side in enumerate(shape[2:]):
        width = dilations[at] * (kernel[at] - 1) + 1
        if auto in {b"SAME_UPPER", b"SAME_LOWER"}:
            sides.append(-(-side // strides[at]))
            continue
        before, after = (pads[at], pads[at + count]) if auto == b"NOTSET" else (0, 0)
        room = side + before + after - width
        if room < 0:
            raise BundleDamaged(f"{node.operator} with a window of {width} over {side}")
        result = room // strides[at] + 1
        if node.int("ceil_mode", 0) and room % strides[at] and result * strides[at] < side + before:
            result += 1
        sides.append(result)
    return tuple(sides)


def _conv(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    weight = state.shape(node, 1)
    group = node.int("group", 1)
    is_possible = len(shape) == len(weight) >= 3 and group >= 1
    if not is_possible or shape[1] != weight[1] * group or weight[0] % group:
        raise BundleDamaged(f"Conv of {shape} with weights {weight} in {group} groups")
    return [(shape[0], weight[0], *_windows(node, shape, weight[2:]))]


def _conv_transpose(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    weight = state.shape(node, 1)
    group = node.int("group", 1)
    count = len(shape) - 2
    strides = node.ints("strides", [1] * count)
    dilations = node.ints("dilations", [1] * count)
    pads = node.ints("pads", [0] * 2 * count)
    extra = node.ints("output_padding", [0] * count)
    if (
        count < 1
        or not len(weight) - 2 == len(strides) == len(dilations) == len(pads) // 2 == len(extra) == count
        or group < 1
        or shape[1] != weight[0]
        or shape[1] % group
        or min(*strides, *dilations) < 1
        or min(*pads, *extra) < 0
        or "output_shape" in node.attributes
        or node.attributes.get("auto_pad", b"NOTSET") != b"NOTSET"
    ):
        raise BundleDamaged(f"ConvTranspose of {shape} with weights {weight}, or of a form that is not allowed")
    sides = [
        strides[at] * (side - 1) + extra[at] + dilations[at] * (weight[at + 2] - 1) + 1 - pads[at] - pads[at + count]
        for at, side in enumerate(shape[2:])
    ]
    return [(shape[0], weight[1] * group, *sides)]


def _pool(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    return [(*shape[:2], *_windows(node, shape, node.ints("kernel_shape")))] * 2


def _global_pool(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    return [(*shape[:2], *(1 for _ in shape[2:]))]


def _gemm(node: _Node, state: _State) -> list[Shape]:
    one = state.shape(node, 0)
    other = state.shape(node, 1)
    if len(one) != 2 or len(other) != 2:
        raise BundleDamaged(f"Gemm of {one} and {other}")
    one = one[::-1] if node.int("transA", 0) else one
    other = other[::-1] if node.int("transB", 0) else other
    if one[1] != other[0]:
        raise BundleDamaged(f"Gemm of {one} and {other}")
    return [(one[0], other[1])]


def _matmul(node: _Node, state: _State) -> list[Shape]:
    one = state.shape(node, 0)
    other = state.shape(node, 1)
    if not one or not other:
        raise BundleDamaged("MatMul of a scalar")
    left = one if len(one) > 1 else (1, *one)
    right = other if len(other) > 1 else (*other, 1)
    if left[-1] != right[-2]:
        raise BundleDamaged(f"MatMul of {one} and {other}")
    sides = (*_common([left[:-2], right[:-2]]), left[-2], right[-1])
    sides = sides if len(one) > 1 else (*sides[:-2], sides[-1])
    return [sides if len(other) > 1 else sides[:-1]]


def _flatten(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    axis = node.int("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return [(math.prod(shape[:axis]), math.prod(shape[axis:]))]


def _concat(node: _Node, state: _State) -> list[Shape]:
    shapes = [state.shape(node, position) for position in range(len(node.inputs))]
    axis = _axis(node.int("axis", 0), len(shapes[0]))
    if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) != 1 or len(set(map(len, shapes))) != 1:
        raise BundleDamaged(f"Concat of {', '.join(map(str, shapes))[:200]}")
    return [(*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])]


def _split(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    axis = _axis(node.int("axis", 0), len(shape))
    count = len(node.outputs)
    parts = state.given(node, 1) or node.ints("split")
    if not parts:
        each = -(-shape[axis] // count)
        parts = [max(0, min(each, shape[axis] - each * at)) for at in range(count)]
    if len(parts) != count or sum(parts) != shape[axis] or min(parts) < 0:
        raise BundleDamaged(f"Split of {shape} into {parts[:20]}")
    return [(*shape[:axis], part, *shape[axis + 1 :]) for part in parts]


def _slices(node: _Node, state: _State) -> tuple[slice, ...]:
    shape = state.shape(node, 0)
    starts = state.given(node, 1)
    ends = state.given(node, 2)
    if starts is None or ends is None:
        raise BundleDamaged("Slice without starts and ends")
    axes = state.given(node, 3) or list(range(len(starts)))
    steps = state.given(node, 4) or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise BundleDamaged("Slice with starts, ends, axes and steps that do not fit")
    result = [slice(None)] * len(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        at = _axis(axis, len(shape))
        if step < 0 and not (-shape[at] <= start and end < shape[at]):  # ONNX and Python read these differently
            raise BundleDamaged(f"Slice backwards from {start} to {end} of {shape[at]}")
        result[at] = slice(start, None if step < 0 and end < -shape[at] else end, step)
    return tuple(result)


def _slice(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    return [tuple(len(range(*one.indices(side))) for one, side in zip(_slices(node, state), shape, strict=True))]


def _axes(node: _Node, state: _State) -> list[int]:
    return state.given(node, 1) or node.ints("axes")


def _squeeze(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    axes = {_axis(axis, len(shape)) for axis in _axes(node, state)} or {
        at for at, side in enumerate(shape) if side == 1
    }
    if any(shape[axis] != 1 for axis in axes):
        raise BundleDamaged(f"Squeeze of axes {sorted(axes)} of {shape}")
    return [tuple(side for at, side in enumerate(shape) if at not in axes)]


def _unsqueeze(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    axes = _axes(node, state)
    rank = len(shape) + len(axes)
    places = {_axis(axis, rank) for axis in axes}
    sides = iter(shape)
    if len(places) != len(axes):
        raise BundleDamaged(f"Unsqueeze with axes {axes}")
    return [tuple(1 if at in places else next(sides) for at in range(rank))]


def _transpose(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    order = node.ints("perm", range(len(shape))[::-1])
    if sorted(order) != list(range(len(shape))):
        raise BundleDamaged(f"Transpose of {shape} with order {order}")
    return [tuple(shape[axis] for axis in order)]


def _reshape(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    wanted = state.given(node, 1)
    if wanted is None or min(wanted, default=0) < -1 or wanted.count(-1) > 1:
        raise BundleDamaged(f"Reshape of {shape} to {wanted}")
    if not node.int("allowzero", 0):
        wanted = [shape[at] if side == 0 else side for at, side in enumerate(wanted)]
    known = math.prod(side for side in wanted if side != -1)
    count = math.prod(shape)
    sides = [count // known if side == -1 else side for side in wanted]
    if math.prod(sides) != count:
        raise BundleDamaged(f"Reshape of {shape} to {wanted}")
    return [tuple(sides)]


def _expand(node: _Node, state: _State) -> list[Shape]:
    return [_common([state.shape(node, 0), _shape(state.given(node, 1) or [])])]


def _pad(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    pads = state.given(node, 1) or node.ints("pads")
    axes = state.given(node, 3) or list(range(len(shape)))
    if len(pads) != 2 * len(axes):
        raise BundleDamaged(f"Pad of {shape} by {pads[:20]}")
    sides = list(shape)
    for at, axis in enumerate(axes):
        sides[_axis(axis, len(shape))] += pads[at] + pads[at + len(axes)]
    return [tuple(sides)]


def _gather(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    indices = state.shape(node, 1)
    axis = _axis(node.int("axis", 0), len(shape))
    return [(*shape[:axis], *indices, *shape[axis + 1 :])]


def _reduce(node: _Node, state: _State) -> list[Shape]:
    shape = state.shape(node, 0)
    axes = {_axis(axis, len(shape)) for axis in _axes(node, state)}
    if not axes and not node.int("noop_with_empty_axes", 0):
        axes = set(range(len(shape)))
    if node.int("keepdims", 1):
        return [tuple(1 if at in axes else side for at, side in enumerate(shape))]
    return [tuple(side for at, side in enumerate(shape) if at not in axes)]


_RULES: dict[str, Callable[[_Node, _State], list[Shape]]] = {
    **dict.fromkeys(_UNARY.split(), _first),
    **dict.fromkeys(_BROADCAST.split(), _broadcast),
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    "AveragePool": _pool,
    "Cast": _cast,
    "Concat": _concat,
    "Constant": lambda node, _: [_constant(node).shape],
    "ConstantOfShape": lambda node, state: [_shape(state.given(node, 0) or [])],
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool,
    "GlobalMaxPool": _global_pool,
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
    if (values[1] <= 0).any() or (values[0] < 0).any():  # others are rounded otherwise in ONNX
        raise BundleDamaged("a size is divided by, or from, a negative number")
    return np.asarray(values[0] // values[1])


def _part_of(values: np.ndarray, parts: tuple[slice, ...]) -> np.ndarray:
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
"""Operators that a bundle's graph may have: without control flow, randomness or files, and on every processor."""


def _work(node: _Node, state: _State, made: Sequence[Shape]) -> int:
    """Multiplications of a node; values of the result where it has none."""
    count = math.prod(made[0])
    if node.operator == "Conv":
        return count * math.prod(state.shape(node, 1)[1:])
    if node.operator == "ConvTranspose":
        return math.prod(state.shape(node, 0)) * math.prod(state.shape(node, 1)[1:])
    if node.operator == "MatMul":
        return count * state.shape(node, 0)[-1]
    if node.operator == "Gemm":
        return count * state.shape(node, 0)[0 if node.int("transA", 0) else 1]
    if node.operator in {"MaxPool", "AveragePool"}:
        return count * math.prod(node.ints("kernel_shape"))
    return max(count, math.prod(state.shape(node, 0)) if node.inputs and node.inputs[0] else 0)
