"""A quantized network as one in float32, so that it gets the same checks, and the same int8, as all others.

The int8 of others may saturate on some processors and gives other sums there (see `quantize`), so it is not used as it
is: weights become float32, what is rounded stays unrounded, and the bundle's own int8 is made from that. Both forms of
ONNX are understood: pairs of QuantizeLinear and DequantizeLinear (QDQ), and operators on integers with ranges that are
found while they run (DynamicQuantizeLinear). Where a range cuts values off, as it does in place of a Relu, they are cut
off in float32, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edge_agent.core.errors import ExportRejected

_ROUNDING = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"})
"""The operators on rounded values that are replaced."""

_OF_INTEGERS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}


def is_quantized(model: Any) -> bool:
    """Return whether a model computes with rounded values."""
    return any(node.op_type in _ROUNDING for node in model.graph.node)


def dequantize(model: Any) -> Any:
    """Return a copy of a quantized model that computes with float32 alone.

    Raises:
        ExportRejected: A rounding has a form that is not understood.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    writer = _Writer(result)
    for node in model.graph.node:
        writer.add(node)
    writer.finish()
    return result


class _Writer:
    """A model while its nodes on rounded values are replaced."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self._nodes: list[Any] = []
        self._names: dict[str, str] = {}
        """Name of a value that is gone -> name of the one that stands for it."""

    def add(self, node: Any) -> None:
        """Add a node, or what stands for it in float32."""
        node = onnx.NodeProto.FromString(node.SerializeToString())
        for position, name in enumerate(node.input):
            node.input[position] = self._names.get(name, name)
        if node.op_type == "Constant":
            # A constant in another form than a tensor is no weight; one without any form is refused by the checks.
            for attribute in node.attribute:
                if attribute.name == "value":
                    self._constants[node.output[0]] = numpy_helper.to_array(attribute.t)
        replace = {
            "QuantizeLinear": self._add_cut_off,
            "DequantizeLinear": self._add_dequantized,
            "DynamicQuantizeLinear": self._add_dynamic,
            "MatMulInteger": self._add_of_integers,
            "ConvInteger": self._add_of_integers,
        }.get(node.op_type)
        if replace is None:
            self._nodes.append(node)
            return
        try:
            replace(node)
        except (IndexError, ValueError) as error:
            # The shapes of scales and zeros do not fit the values that they belong to.
            raise ExportRejected(
                f"'{node.name}' ({node.op_type}) rounds in a form that is not understood ({error}); give the network "
                "in fp32"
            ) from error

    def finish(self) -> None:
        """Write nodes and constants into the model."""
        graph = self._model.graph
        read = {name for node in self._nodes for name in node.input}
        del graph.node[:]
        graph.node.extend(self._nodes)
        for output in graph.output:
            if output.name in self._names:
                graph.node.append(helper.make_node("Identity", [self._names[output.name]], [output.name]))
                read.add(self._names[output.name])
        known = {constant.name for constant in graph.initializer}
        fresh = [numpy_helper.from_array(array, name) for name, array in self._constants.items() if name not in known]
        kept = [onnx.TensorProto.FromString(constant.SerializeToString()) for constant in graph.initializer]
        produced = {name for node in self._nodes for name in node.output}
        del graph.initializer[:]
        graph.initializer.extend(constant for constant in (*kept, *fresh) if constant.name in read - produced)
        del graph.value_info[:]

    def _add_cut_off(self, node: Any) -> None:
        """Replace a rounding: values are cut off at the ends of its range, weights are rounded here and now.

        Networks that were trained with rounding have their weights in float32, and round them in each run.
        """
        # 1. Weights become integers, which the DequantizeLinear behind them turns into float32.
        scale = self._constant(node, 1)
        zero = self._constant(node, 2) if len(node.input) > 2 and node.input[2] else np.zeros((), np.uint8)
        weights = self._constants.get(node.input[0])
        if weights is not None and zero.dtype.kind in "iu":
            self._constants[node.output[0]] = _rounded(weights, scale, zero, _axis_of(node))
            return
        # 2. Other values keep their digits, within the range that their rounding would leave.
        if scale.size != 1 or zero.dtype.kind not in "iu":
            raise ExportRejected(
                f"'{node.name}' rounds activations in a form that is not understood; give the network in fp32"
            )
        bounds = np.iinfo(zero.dtype)
        ends = (np.array([bounds.min, bounds.max], np.float64) - int(zero.reshape(-1)[0])) * float(scale.reshape(-1)[0])
        names = []
        for label, value in zip(("low", "high"), ends, strict=True):
            name = f"{node.output[0]}.{label}"
            self._constants[name] = np.array(value, np.float32)
            names.append(name)
        self._nodes.append(helper.make_node("Clip", [node.input[0], *names], [node.output[0]], name=node.name))

    def _add_dequantized(self, node: Any) -> None:
        """Put float32 weights in the place of rounded ones; values that a node computes are float32 already."""
        source = node.input[0]
        if source not in self._constants:
            self._names[node.output[0]] = source
            return
        zero = self._constant(node, 2) if len(node.input) > 2 and node.input[2] else None
        scale = self._constant(node, 1)
        self._constants[node.output[0]] = _in_float(self._constants[source], scale, zero, _axis_of(node))

    def _add_dynamic(self, node: Any) -> None:
        """Let values stay as they are: their scale is 1, and their zero is 0."""
        self._names[node.output[0]] = node.input[0]
        self._constants[node.output[1]] = np.array(1, np.float32)
        self._constants[node.output[2]] = np.array(0, np.float32)

    def _add_of_integers(self, node: Any) -> None:
        """Put a product of float32 values in the place of one of integers."""
        weight = self._constant(node, 1).astype(np.float32)
        if len(node.input) > 3 and node.input[3]:
            zero = self._constant(node, 3).astype(np.float32)
            # Of a convolution there is a zero for each kernel, of a matrix one for each column.
            if node.op_type == "ConvInteger":
                zero = zero.reshape(-1, *[1] * (weight.ndim - 1))
            weight = weight - zero
        name = f"{node.output[0]}.weight"
        self._constants[name] = weight
        fresh = helper.make_node(_OF_INTEGERS[node.op_type], [node.input[0], name], [node.output[0]], name=node.name)
        fresh.attribute.extend(node.attribute)
        self._nodes.append(fresh)

    def _constant(self, node: Any, position: int) -> np.ndarray:
        """Return the input of a node that must be a constant."""
        array = self._constants.get(node.input[position])
        if array is None:
            raise ExportRejected(
                f"'{node.name}' ({node.op_type}): its input {position} is computed, expected a constant; give the "
                "network in fp32"
            )
        return array


def _axis_of(node: Any) -> int:
    """Return the axis along which a node's scales lie; ONNX takes 1 where a node states none."""
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), 1)


def _rounded(values: np.ndarray, scale: np.ndarray, zero: np.ndarray, axis: int) -> np.ndarray:
    """Return float32 values as integers of the type of ``zero``: value / scale + zero, halves to the even number."""
    bounds = np.iinfo(zero.dtype)
    steps = np.rint(values.astype(np.float64) / _along_axis(scale, values.ndim, axis))
    integers = np.clip(steps + _along_axis(zero, values.ndim, axis), bounds.min, bounds.max)
    return np.asarray(integers, zero.dtype)


def _in_float(values: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, axis: int) -> np.ndarray:
    """Return rounded values as float32: (value - zero) * scale, with one scale, or one for each position of an axis."""
    result = values.astype(np.float64)
    if zero is not None:
        result = result - _along_axis(zero, values.ndim, axis)
    result = result * _along_axis(scale, values.ndim, axis)
    if result.shape != values.shape:
        raise ValueError(f"scale {list(scale.shape)} for values {list(values.shape)}")
    return np.asarray(result, np.float32)


def _along_axis(numbers: np.ndarray, rank: int, axis: int) -> np.ndarray:
    """Return scales or zeros as float64 that are broadcast to values of ``rank`` axes: one for all, or along an axis.

    One number for all needs no axis, and gets none: for a node that states no axis it is 1, which a bias does not have.
    """
    if numbers.size == 1:
        return numbers.astype(np.float64).reshape(())
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of values of {rank} axes")
    sides = [1] * rank
    sides[axis] = -1
    return numbers.astype(np.float64).reshape(sides)


def unrounded(model: Any, tensor: str) -> str:
    """Return the tensor of a quantized model that has the values of ``tensor`` before they are rounded."""
    for node in model.graph.node:
        if tensor in node.output and node.op_type in {"QuantizeLinear", "DynamicQuantizeLinear"}:
            return str(node.input[0])
    return tensor
