"""The int8 variant of a bundle: made from the fp32 graph, checked, and compared with it on held-out domains.

`quantize` turns a graph and ranges into an int8 graph. This module decides which ranges it gets, and whether the result
is offered to devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from edge_agent.bundle.manifest import DomainAnswers
from edge_agent.core.task import Task

from .calibration import UNLABELLED, Calibration
from .domains import LEAST_SAMPLES, compare_answers, describe_loss
from .parity import Gate, graph_gates, mean_cosine, run
from .quantize import (
    LEAST_CLIENTS,
    MAX_WEIGHT,
    MIN_COSINE,
    Quantizer,
    Ranges,
    largest_weight,
    merge_ranges,
    ranges_of_clients,
)

_QUANTIZER_ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError)
"""The errors that ONNX Runtime's quantizer raises for graphs that it does not support."""


@dataclass(frozen=True)
class Int8Variant:
    """The int8 variant of a graph, or the reason why it is left out."""

    graph: bytes | None
    """The int8 graph; None where it is left out."""

    gates: tuple[Gate, ...] = ()
    """The checks that it went through."""

    cosine: float | None = None
    """The mean cosine of its features to those of fp32; None where it was not measured for the final ranges."""

    answers: Mapping[str, DomainAnswers] = field(default_factory=dict)
    """The answers of heads with int8 and with fp32 by held-out domain; empty where nothing was compared."""

    note: str = ""
    """The reason why it is left out; empty where it is not."""

    origin: str = ""
    """The inputs and clients from which its ranges come."""

    @property
    def not_measured(self) -> str:
        """The reason why no accuracies were compared; empty where they were."""
        if self.answers:
            return ""
        return (
            f"accuracies not measured: two domains or more are needed, each with {LEAST_SAMPLES} labelled samples of "
            "two classes or more; each device compares its own"
        )


@dataclass(frozen=True)
class _Candidate:
    """An int8 graph that has not been compared on held-out domains yet."""

    quantizer: Quantizer
    ranges: Mapping[str, Ranges]
    graph: bytes
    gate: Gate
    cosine: float | None
    origin: str


def make_int8_variant(
    model: bytes, encoder: nn.Module | None, task: Task, inputs: np.ndarray, calibration: Calibration
) -> Int8Variant:
    """Make the int8 variant of an fp32 graph, and leave it out where it costs accuracy.

    Args:
        model: The fp32 graph.
        encoder: The encoder in torch, whose steps tell which tensors the ranges of clients belong to; None: no client
            has given ranges.
        task: The learning task.
        inputs: The inputs (n, ...) float32 of ``calibration`` in one array.
        calibration: The inputs and clients from which ranges are taken, and the samples to compare on.

    Returns:
        The variant; its ``graph`` is None and its ``note`` has the reason where it is left out.
    """
    try:
        candidate = _quantize(model, encoder, task, inputs, calibration)
    except _QUANTIZER_ERRORS as error:
        return Int8Variant(None, note=f"left out: the quantizer failed: {error}")
    gate = candidate.gate
    if not gate.passed:
        note = f"left out: {gate.detail}"
        return Int8Variant(None, (gate,), candidate.cosine, note=note, origin=candidate.origin)
    # The cosine finds a broken variant; only heads that answer on domains without part in the ranges find a poor one.
    answers = compare_answers(candidate.quantizer, model, calibration.domains, candidate.ranges)
    if not answers:
        return Int8Variant(candidate.graph, (gate,), candidate.cosine, origin=candidate.origin)
    loss = describe_loss(answers)
    if loss:
        gates = (gate, Gate("int8 accuracy", passed=False, detail=loss))
        return Int8Variant(None, gates, candidate.cosine, answers, f"left out: {loss}", candidate.origin)
    total = sum(answer.support for answer in answers.values())
    accuracy = Gate("int8 accuracy", passed=True, detail=f"no loss beyond noise on {total} held-out answers")
    return Int8Variant(candidate.graph, (gate, accuracy), candidate.cosine, answers, origin=candidate.origin)


def _quantize(
    model: bytes, encoder: nn.Module | None, task: Task, inputs: np.ndarray, calibration: Calibration
) -> _Candidate:
    """Quantize the graph by the ranges of the inputs, and by those of clients where there are enough of them."""
    quantizer = Quantizer(model)
    ranges = {name: quantizer.ranges(array) for name, array in calibration.range_inputs.items()}
    graph = quantizer.int8(merge_ranges([*ranges.values()]))
    gate, cosine = _check_int8(graph, model, task, inputs)
    origin = calibration.describe_inputs()
    clients: Mapping[str, Ranges] = {}
    if encoder is not None:
        clients = ranges_of_clients(quantizer, encoder, inputs, calibration.client_ranges)
    if not clients:
        return _Candidate(quantizer, ranges, graph, gate, cosine, origin)
    if len(clients) < LEAST_CLIENTS:
        origin += f"; ranges of {len(clients)} client(s) left out: one in {LEAST_CLIENTS} can be outvoted"
        return _Candidate(quantizer, ranges, graph, gate, cosine, origin)
    # Random inputs lie elsewhere than clients' samples: they have tried the quantizer out, and set no range.
    ranges = {**clients, **{name: ends for name, ends in ranges.items() if name != UNLABELLED}}
    graph = quantizer.int8(merge_ranges([*ranges.values()]))
    origin_of_clients = f"activation ranges of {len(clients)} client(s)"
    if not calibration.domains:
        return _Candidate(quantizer, ranges, graph, gate, None, origin_of_clients)
    gate, cosine = _check_int8(graph, model, task, inputs)
    return _Candidate(quantizer, ranges, graph, gate, cosine, f"{origin} and {origin_of_clients}")


def _check_int8(quantized: bytes, model: bytes, task: Task, inputs: np.ndarray) -> tuple[Gate, float]:
    """Return whether the int8 variant can be used in place of ``model``, and the mean cosine of their features."""
    failed = [f"{gate.name}: {gate.detail}" for gate in graph_gates(quantized, task) if not gate.passed]
    largest = largest_weight(quantized)
    if largest > MAX_WEIGHT:
        failed.append(f"int8 weights up to {largest}, at most {MAX_WEIGHT} cannot saturate; shorten their range")
    # A graph that failed is not run.
    if failed:
        return Gate("int8", passed=False, detail="; ".join(failed)), 0.0
    cosine = mean_cosine(run(quantized, inputs), run(model, inputs))
    detail = f"mean cosine to fp32 {cosine:.4f}, at least {MIN_COSINE} is required"
    return Gate("int8", cosine >= MIN_COSINE, detail), min(cosine, 1.0)
