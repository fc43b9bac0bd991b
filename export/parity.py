"""Checks of an exported graph: interface, operators, and equal features in ONNX Runtime and torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_agent.bundle.graph_check import MOST_BYTES, OPERATORS, check
from edge_agent.bundle.manifest import Parity
from edge_agent.core.errors import BundleDamaged
from edge_agent.core.task import Task
from edge_agent.personal.encoder import batch_size, onnxruntime
from edge_agent.training.loops import evaluate


def session(model: bytes, *, optimized: bool = True) -> Any:
    """Return a session of ONNX Runtime for a graph, on one thread; not ``optimized``: its nodes run as they are."""
    module = onnxruntime()
    options = module.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if not optimized:
        options.graph_optimization_level = module.GraphOptimizationLevel.ORT_DISABLE_ALL
    return module.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(model: bytes, inputs: np.ndarray, batch: int = 64) -> np.ndarray:
    """Return features (n, d) float32 that ONNX Runtime computes on one thread, ``batch`` inputs at a time."""
    opened = session(model)
    name = opened.get_inputs()[0].name
    batches = [inputs[begin : begin + batch] for begin in range(0, len(inputs), batch)]
    return np.concatenate([opened.run(None, {name: part})[0] for part in batches])


BATCHES = (1, 2, 7)
"""The batch sizes that are compared with torch."""

TOLERANCE = 1e-4
"""The largest difference to torch, over the largest feature (at least 1); correct exports stay below 2e-5."""

MAX_IR_VERSION = 10
"""The newest version that ONNX Runtime 1.18 reads, the oldest that agents may have."""


@dataclass(frozen=True)
class Gate:
    """One check of an export: its name, whether it passed, and the measured values."""

    name: str
    passed: bool
    detail: str


def graph_gates(model: bytes, task: Task) -> list[Gate]:
    """Check the gates that need the graph alone: validity, interface, operators, nothing left that trains."""
    import onnx

    try:
        graph = onnx.load_from_string(model)
        onnx.checker.check_model(graph, full_check=True)
    except Exception as error:  # noqa: BLE001 - onnx raises protobuf's, its checker's and its inference's own errors
        return [Gate("valid", passed=False, detail=f"{type(error).__name__}: {error}")]
    checks = {
        "interface": _interface(graph.graph, task),
        "operators": _foreign_operators(graph.graph),
        "frozen": _training_remains(graph.graph),
        "self-contained": _outside_references(graph),
        "budget": _beyond_budget(model, task),
    }
    result = [Gate("valid", passed=True, detail=f"IR {graph.ir_version}, {len(graph.graph.node)} nodes")]
    for name, complaints in checks.items():
        mistakes = list(complaints)
        result.append(Gate(name, not mistakes, "; ".join(mistakes) or "as expected"))
    return result


def parity_gate(model: bytes, encoder: nn.Module, inputs: np.ndarray) -> tuple[Gate, Parity]:
    """Return the largest difference of ONNX Runtime from torch on batches of 1, 2 and 7 ``inputs`` (n, ...) float32."""
    worst = 0.0
    scale = 0.0
    for size in BATCHES:
        batch = np.resize(inputs, (size, *inputs.shape[1:])).astype(np.float32)
        ours = evaluate(encoder, encoder, torch.from_numpy(batch)).numpy()
        theirs = run(model, batch, batch=size)
        if ours.shape != theirs.shape or not np.isfinite(ours).all() or not np.isfinite(theirs).all():
            detail = f"batch {size}: torch gives {ours.shape}, ONNX {theirs.shape}; both must be equal and finite"
            return Gate("parity", passed=False, detail=detail), Parity(max_abs=0.0, scale=0.0, batches=BATCHES)
        worst = max(worst, float(np.abs(ours - theirs).max()))
        scale = max(scale, float(np.abs(ours).max()))
    allowed = TOLERANCE * max(1.0, scale)
    detail = f"largest difference {worst:.2g}, allowed {allowed:.2g} (features up to {scale:.3g})"
    return Gate("parity", worst <= allowed, detail), Parity(max_abs=worst, scale=scale, batches=BATCHES)


def mean_cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Return the mean cosine of the rows of two sets of features (n, d); a zero row agrees only with a zero row."""
    first_lengths = np.linalg.norm(first, axis=1)
    second_lengths = np.linalg.norm(second, axis=1)
    lengths = first_lengths * second_lengths
    both_zero = (first_lengths == 0) & (second_lengths == 0)
    products = np.einsum("nd,nd->n", first.astype(np.float64), second.astype(np.float64))
    cosines = products / np.where(lengths > 0, lengths, 1.0)
    return float(np.where(both_zero, 1.0, cosines).mean())


def _interface(graph: Any, task: Task) -> Iterator[str]:
    """Yield mistakes in inputs and outputs: expected are one float32 each, (n, ...) of the task and features (n, d)."""
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    if len(inputs) != 1 or len(graph.output) != 1:
        yield f"{len(inputs)} inputs and {len(graph.output)} outputs, expected one each"
        return
    yield from _form_of("input", inputs[0])
    sides = _sides_of(inputs[0])
    if tuple(sides[1:]) != task.input_shape:
        yield f"input '{inputs[0].name}' is {sides}, expected [None, {', '.join(map(str, task.input_shape))}]"
    yield from _form_of("output", graph.output[0])
    sides = _sides_of(graph.output[0])
    if len(sides) != 2:
        yield f"output '{graph.output[0].name}' has {len(sides)} axes, expected 2: (n, d)"


def _sides_of(value: Any) -> list[int | None]:
    """Return the sides of an input or output; None for one that has a name instead of a number."""
    return [side.dim_value if side.HasField("dim_value") else None for side in value.type.tensor_type.shape.dim]


def _form_of(role: str, value: Any) -> Iterator[str]:
    """Yield mistakes in the element type and the batch axis of an input or output."""
    element_type = value.type.tensor_type.elem_type
    if element_type != 1:
        yield f"{role} '{value.name}' has element type {element_type}, expected 1 (float32)"
    sides = _sides_of(value)
    if not sides or sides[0] is not None:
        yield f"{role} '{value.name}' is {sides}, expected any batch size"


def _foreign_operators(graph: Any) -> Iterator[str]:
    """Yield the operators that some device does not have."""
    for node in graph.node:
        if node.domain not in {"", "ai.onnx"} or node.op_type not in OPERATORS:
            yield f"operator '{node.domain or 'ai.onnx'}.{node.op_type}' is not one that every device has"


def _training_remains(graph: Any) -> Iterator[str]:
    """Yield the nodes that would still behave as in training."""
    for node in graph.node:
        modes = [attribute.i for attribute in node.attribute if attribute.name == "training_mode"]
        if node.op_type == "BatchNormalization" and any(modes):
            yield f"batch norm '{node.name}' is in training mode; call eval() on the encoder"
        if node.op_type == "Dropout":
            yield f"dropout '{node.name}' is left in the graph; call eval() on the encoder"


def _beyond_budget(model: bytes, task: Task) -> Iterator[str]:
    """Yield why a device would refuse the graph: forms that are not allowed, or too much memory or work."""
    try:
        check(model, [(batch_size(task.input_shape), *task.input_shape)], most_bytes=MOST_BYTES)
    except BundleDamaged as error:
        yield str(error)


def _outside_references(graph: Any) -> Iterator[str]:
    """Yield what a device cannot read: newer versions of the format, weights in other files, local functions."""
    if graph.ir_version > MAX_IR_VERSION:
        yield f"IR version {graph.ir_version}, devices read up to {MAX_IR_VERSION}"
    for tensor in graph.graph.initializer:
        if tensor.data_location == 1 or tensor.external_data:
            yield f"weights '{tensor.name}' are in another file; a bundle has one file for each variant"
    if graph.functions:
        yield f"{len(graph.functions)} local functions, expected none"
