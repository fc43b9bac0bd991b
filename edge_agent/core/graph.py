"""A graph of ONNX operators in memory, before it becomes part of a file.

Heads write their computation into a `Graph`, and `personal.one_file` writes the graph into an ONNX file. Nothing here
needs the package ``onnx``. All operators belong to the domain ``ai.onnx`` and have the same signature in all opsets
from 13 on, so that they fit the opset of any encoder. Reductions use ReduceSum and TopK only: in opset 18 the axes of
the others became an input.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NewType

import numpy as np

Value = NewType("Value", str)
"""The name of a tensor in a graph."""

FLOAT = "float32"
DOUBLE = "float64"
LEAST_OPSET = 13
"""The first opset of ``ai.onnx`` in which the operators have the signatures that are used here."""


@dataclass(frozen=True)
class Node:
    """An operator, the names of its inputs and outputs, and its attributes: numbers, strings or lists of them."""

    operator: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: dict[str, Any]


@dataclass
class Graph:
    """Operators in the order in which they run, and the constants that they use.

    Attributes:
        prefix: The beginning of all tensor names, so that they differ from those of other parts of the same file.
        nodes: The operators.
        constants: The arrays of the constants, by name.
    """

    prefix: str = "head."
    nodes: list[Node] = field(default_factory=list)
    constants: dict[Value, np.ndarray] = field(default_factory=dict)

    def constant(self, array: np.ndarray) -> Value:
        """Add a constant, and return its name; integers become int64, as operators expect for axes and positions."""
        name = Value(f"{self.prefix}constant{len(self.constants)}")
        self.constants[name] = array.astype(np.int64) if array.dtype.kind == "i" else array
        return name

    def add(self, operator: str, *inputs: Value | np.ndarray, **attributes: Any) -> Value:
        """Add an operator with one output, and return the name of the output; arrays become constants."""
        (output,) = self.add_many(operator, *inputs, outputs=1, **attributes)
        return output

    def add_many(
        self, operator: str, *inputs: Value | np.ndarray, outputs: int, **attributes: Any
    ) -> tuple[Value, ...]:
        """Add an operator with several outputs, and return the names of the outputs; arrays become constants."""
        input_names = tuple(self.constant(value) if isinstance(value, np.ndarray) else value for value in inputs)
        node_name = f"{self.prefix}{operator.lower()}{len(self.nodes)}"
        output_names = tuple(Value(f"{node_name}.{number}") for number in range(outputs))
        self.nodes.append(Node(operator, input_names, output_names, attributes))
        return output_names

    # --- computations that several heads need ---

    def cast(self, value: Value, dtype: str) -> Value:
        """Return a tensor as `FLOAT` or `DOUBLE`."""
        return self.add("Cast", value, to=dtype)

    def linear(self, rows: Value, weight: np.ndarray, bias: np.ndarray) -> Value:
        """Return ``rows @ weight.T + bias`` (n, k) for ``rows`` (n, d), all of one dtype."""
        return self.add("Add", self.add("MatMul", rows, np.ascontiguousarray(weight.T)), bias)

    def softmax(self, logits: Value) -> Value:
        """Return the softmax of each row of ``logits`` (n, k)."""
        return self.add("Softmax", logits, axis=1)

    def sum_rows(self, rows: Value) -> Value:
        """Return the sum of each row of a matrix (n, k), as a column (n, 1)."""
        return self.add("ReduceSum", rows, np.array([1]), keepdims=1)

    def squared_lengths(self, rows: Value) -> Value:
        """Return the squared length of each row of a matrix (n, d), as a column (n, 1)."""
        return self.sum_rows(self.add("Mul", rows, rows))

    def unit(self, rows: Value, dtype: str) -> Value:
        """Return the rows of a matrix (n, d) of ``dtype``, scaled to length 1; rows of zeros stay zero."""
        lengths = self.add("Sqrt", self.squared_lengths(rows))
        is_zero = self.add("Not", self.add("Greater", lengths, np.array(0, dtype)))
        # A row of zeros has length 0, and is divided by 1 instead.
        return self.add("Div", rows, self.add("Add", lengths, self.cast(is_zero, dtype)))

    def nearest(self, values: Value, count: int) -> tuple[Value, Value]:
        """Return the ``count`` smallest values of each row, ascending, and their positions, (n, count) each."""
        smallest, positions = self.add_many("TopK", values, np.array([count]), outputs=2, axis=1, largest=0, sorted=1)
        return smallest, positions

    def columns(self, values: Value, first: int, after: int) -> Value:
        """Return the columns of a matrix from ``first`` to ``after``, exclusive."""
        return self.slice(values, 1, first, after)

    def slice(self, values: Value, axis: int, first: int, after: int, step: int = 1) -> Value:
        """Return every ``step``-th part of an axis from ``first`` to ``after``, exclusive."""
        return self.add("Slice", values, np.array([first]), np.array([after]), np.array([axis]), np.array([step]))

    def reshape(self, values: Value, *sizes: int) -> Value:
        """Return a tensor of these sizes, of which one may be -1: it is what is left."""
        return self.add("Reshape", values, np.array(sizes))

    def sum_over(self, values: Value, *axes: int, keepdims: bool = False) -> Value:
        """Return the sums over these axes; with ``keepdims`` they stay, with size 1."""
        return self.add("ReduceSum", values, np.array(axes), keepdims=int(keepdims))

    def spread(self, values: Value, positions: np.ndarray, count: int) -> Value:
        """Return a matrix (n, ``count``) float64 with the columns of ``values`` (n, k) at ``positions``, else zeros."""
        selection = np.zeros((len(positions), count))
        selection[np.arange(len(positions)), positions] = 1.0
        return self.add("MatMul", values, selection)

    def repeat(self, row: np.ndarray, rows: Value) -> Value:
        """Return the array ``row`` (k,) once for each row of the matrix ``rows``, as a matrix (n, k)."""
        count = self.add("Gather", self.add("Shape", rows), np.array([0]))
        shape = self.add("Concat", count, np.array([len(row)]), axis=0)
        return self.add("Expand", row[None], shape)
