"""The int8 variant of an exported encoder: static, QDQ, per channel, unsigned activations, signed weights (U8S8).

Weights use 7 of their 8 bits, -64..64. x86-64 without VNNI adds two products of an activation and a weight in 16 bits
with saturation: 2 * 255 * 127 = 64,770 is above the 32,767 that fit, 2 * 255 * 64 = 32,640 is not. So no processor can
saturate, and x86-64 with and without VNNI and ARM compute the same sums. Signed activations gave other bits on ARM;
dynamic quantization is several times slower than fp32 on convolutions. Neither is offered.

Features stay float32: what follows the last convolution or linear layer is computed from its unrounded sums. One step
of 8 bits for all features would be coarser than many of them vary, which a head notices and a mean cosine does not.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from edge_agent.personal.encoder import onnxruntime
from edge_agent.training.ranges import steps

from .encoder import quiet, strip_opsets
from .parity import TOLERANCE, session

MIN_COSINE = 0.99
"""Lowest mean cosine between int8 and fp32 features; it finds a broken variant, accuracies find a poor one."""

MAX_WEIGHT = 64
"""The largest absolute int8 weight, so that two products with unsigned 8-bit activations fit into 16 bits."""

Ranges: TypeAlias = Mapping[str, tuple[float, float]]
"""Smallest and largest value of each tensor between two operators, by its name in the graph."""

_POOLING = {"Flatten", "GlobalAveragePool", "ReduceMean", "Reshape", "Squeeze"}
_SHARES = {"HardSigmoid", "Sigmoid", "Softmax"}
_LINEAR = {"Gemm", "MatMul"}
_WITH_WEIGHTS = {"Conv", *_LINEAR}
_FLOAT = 1
"""ONNX's number of the element type float32."""

_INT8 = 3
"""ONNX's number of the element type int8."""

_BATCH_VALUES = 1 << 16
"""Input values of one calibration batch, at most: all tensors of the graph are in memory at once."""


class Quantizer:
    """One fp32 graph: observes the ranges of its activations, and gives its int8 variant for given ranges."""

    def __init__(self, model: bytes) -> None:
        """Prepare a serialised fp32 graph, and open a copy of it that returns every float tensor."""
        onnxruntime()  # first, so that telemetry is off before the package below is imported
        import onnx
        from onnxruntime.quantization.shape_inference import quant_pre_process

        # 1. ONNX Runtime's own preparation, which works on files: shapes of all tensors, constants folded.
        with tempfile.TemporaryDirectory() as folder, quiet(None):
            source = Path(folder) / "fp32.onnx"
            prepared = Path(folder) / "prepared.onnx"
            source.write_bytes(model)
            quant_pre_process(str(source), str(prepared))
            self._graph = onnx.load(str(prepared))
        # 2. A copy of the graph whose outputs are all float tensors that a node computes.
        graph = self._graph.graph
        computed_names: set[str] = set()
        share_names: set[str] = set()
        for node in graph.node:
            computed_names.update(node.output)
            if node.op_type in _SHARES:
                share_names.update(node.output)
        tensors = [value for value in (*graph.value_info, *graph.output) if value.name in computed_names]
        observed = copy.deepcopy(self._graph)
        del observed.graph.output[:]
        observed.graph.output.extend(value for value in tensors if value.type.tensor_type.elem_type == _FLOAT)
        self._session = session(observed.SerializeToString())
        self._input = graph.input[0].name
        self.shares = frozenset(share_names)
        """Tensors whose values lie between 0 and 1, whatever the inputs are."""
        self._names = [value.name for value in self._session.get_outputs()]

    def values(self, inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Return all float tensors of the graph, inputs included, by name for a batch ``inputs`` (n, ...) float32."""
        outputs = self._session.run(None, {self._input: inputs})
        return {self._input: inputs, **dict(zip(self._names, outputs, strict=True))}

    def ranges(self, inputs: np.ndarray) -> Ranges:
        """Return the ranges of the activations for ``inputs`` (n, ...) float32."""
        result: dict[str, tuple[float, float]] = {}
        step = max(1, _BATCH_VALUES // int(np.prod(inputs.shape[1:])))
        for begin in range(0, len(inputs), step):
            for name, array in self.values(inputs[begin : begin + step]).items():
                low, high = result.get(name, (np.inf, -np.inf))
                result[name] = min(low, float(array.min())), max(high, float(array.max()))
        return result

    def int8(self, ranges: Ranges) -> bytes:
        """Return the quantized graph, whose activations saturate outside ``ranges``.

        Raises:
            RuntimeError, ValueError, TypeError, NotImplementedError, IndexError: ONNX Runtime's quantizer failed.
        """
        from onnxruntime import quantization
        from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
        from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

        bounds = {
            name: TensorData(lowest=np.float32(low), highest=np.float32(high)) for name, (low, high) in ranges.items()
        }
        tail, is_linear = self._float_tail()
        unrounded_operators = sorted(_LINEAR) if is_linear else []
        with quiet(None):
            quantizer = quantization.QDQQuantizer(
                copy.deepcopy(self._graph),
                True,  # per channel
                True,  # weights of 7 bits
                quantization.QuantType.QInt8,
                quantization.QuantType.QUInt8,
                TensorsData(CalibrationMethod.MinMax, bounds),
                [],
                tail,
                sorted({*QLinearOpsRegistry, *QDQRegistry}),
                {"OpTypesToExcludeOutputQuantization": unrounded_operators},
            )
            quantizer.quantize_model()
            quantizer.model.topological_sort()
        return strip_opsets(quantizer.model.model.SerializeToString())

    def _float_tail(self) -> tuple[list[str], bool]:
        """Return the nodes behind the last layer with weights, which are computed in float, and whether it is linear.

        An activation right behind a convolution is part of it and stays int8; pooling behind it averages in float.
        """
        nodes_behind, last_layer = self._walk_back()
        if last_layer in _LINEAR:
            return [node.name for node in nodes_behind], True
        return [node.name for node in nodes_behind if node.op_type in _POOLING], False

    def _walk_back(self) -> tuple[list[Any], str]:
        """Follow the graph from its output backwards, as long as there is one way.

        Returns:
            The nodes on the way, the last one first, and the operator at which it ends: that of a layer with weights,
            or of a node that has several computed inputs or none; empty where it ends at the input.
        """
        producers = {name: node for node in self._graph.graph.node for name in node.output}
        passed = []
        node = producers.get(self._graph.graph.output[0].name)
        while node is not None and node.op_type not in _WITH_WEIGHTS:
            computed_inputs = [name for name in node.input if name in producers]
            if len(computed_inputs) != 1:
                break
            passed.append(node)
            node = producers[computed_inputs[0]]
        return passed, "" if node is None else node.op_type


LEAST_CLIENTS = 3
"""Clients without which a wrong one cannot be outvoted by `merge_ranges`: the ranges of fewer are not used."""


def ranges_of_clients(
    quantizer: Quantizer, encoder: nn.Module, inputs: np.ndarray, each: Mapping[str, np.ndarray]
) -> dict[str, Ranges]:
    """Return the ranges of each client for the tensors of the graph, from those of the steps of the encoder in torch.

    Tensors and steps are matched by their values for a few inputs.

    Args:
        quantizer: The graph.
        encoder: The same encoder in torch.
        inputs: Preprocessed inputs (n, ...) float32, of which four are used.
        each: The ranges (steps, 2) of each client, see `training.ranges`.

    Returns:
        The ranges by client, without clients that do not have one for every step; empty where a tensor of the graph is
        none of the steps.
    """
    few = inputs[:4]
    # 1. The values of each step in torch, for a few inputs.
    values_of_steps: list[np.ndarray] = []

    def note(tensor: torch.Tensor) -> None:
        values_of_steps.append(tensor.detach().cpu().numpy().ravel().copy())

    steps(encoder, torch.from_numpy(few), note)
    # 2. The step that computes each tensor of the graph.
    step_of_tensor: dict[str, int] = {}
    for name, array in quantizer.values(few).items():
        if name in quantizer.shares:
            continue
        step = _find_step(values_of_steps, array.ravel())
        if step is None:
            return {}
        step_of_tensor[name] = step
    # 3. The ranges of each client that has one for every step.
    ranges: dict[str, Ranges] = {}
    for client, ends in each.items():  # lowest and highest value of each step
        if ends.shape != (len(values_of_steps), 2):
            continue
        of_client = dict.fromkeys(quantizer.shares, (0.0, 1.0))
        for name, step in step_of_tensor.items():
            of_client[name] = (float(ends[step, 0]), float(ends[step, 1]))
        ranges[client] = of_client
    return ranges


def _find_step(values_of_steps: Sequence[np.ndarray], values: np.ndarray) -> int | None:
    """Return the number of the first step with these values (m,); None where there is none."""
    for number, step_values in enumerate(values_of_steps):
        if step_values.shape == values.shape and _is_equal(step_values, values):
            return number
    return None


def _is_equal(expected: np.ndarray, values: np.ndarray) -> bool:
    """Return whether two tensors are the same up to rounding."""
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    return float(np.abs(expected - values).max(initial=0)) <= TOLERANCE * scale


def merge_ranges(each: Sequence[Ranges]) -> Ranges:
    """Return one range for each tensor from those of several clients or domains, of which a few may be wrong.

    The widest quarter of them, of three or more at least one, is left out at either end: the largest of the others is
    the limit. So one client in four cannot widen a range, and what little lies outside of it saturates.
    """
    left_out = 0
    if len(each) > 2:
        left_out = max(1, len(each) // 4)
    result = {}
    for name in each[0]:
        lows = np.sort([ranges[name][0] for ranges in each])
        highs = np.sort([ranges[name][1] for ranges in each])
        result[name] = float(lows[left_out]), float(highs[len(each) - 1 - left_out])
    return result


def largest_weight(model: bytes) -> int:
    """Return the largest absolute value among the int8 weights of a quantized graph; 0 where it has none."""
    import onnx

    weights = [tensor for tensor in onnx.load_from_string(model).graph.initializer if tensor.data_type == _INT8]
    arrays = [onnx.numpy_helper.to_array(tensor).astype(np.int64) for tensor in weights]
    return max((int(np.abs(array).max(initial=0)) for array in arrays), default=0)
