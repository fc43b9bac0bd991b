"""Export as one step: graph, gates, int8 variant, golden tensors, head cards; a file only if every gate passed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import edge_agent
from edge_agent import self_test
from edge_agent.bundle import EncoderPrecision, HeadCard, Manifest, Parity, pack
from edge_agent.errors import ExportRejected
from edge_agent.methods.base import Method
from edge_agent.models.base import Parts
from edge_agent.task import State, Task, Tensors
from edge_agent.training.parts import feature_dim, load_arrays
from edge_agent.wire.tensors import encode

from .encoder import Exported, Exporter, to_onnx
from .parity import Gate, graph_gates, mean_cosine, parity_gate, run
from .quantize import MAX_WEIGHT, MIN_COSINE, largest_weight, to_int8

_FP32, _INT8, _GOLDEN, _HEAD = "encoder.onnx", "encoder.int8.onnx", "golden.safetensors", "global_head.safetensors"


@dataclass(frozen=True)
class Report:
    """What an export made: manifest, place, seconds of each step, all gates, and why int8 is missing where it is."""

    manifest: Manifest
    path: Path
    seconds: dict[str, float]
    gates: tuple[Gate, ...]
    int8_note: str = ""


@dataclass
class _Work:
    """What one export has gathered so far."""

    exported: Exported
    gates: list[Gate]
    parity: Parity
    int8: bytes | None = None
    int8_note: str = "not asked for"
    seconds: dict[str, float] = field(default_factory=dict)


def export_bundle(
    model: Parts,
    method: Method,
    task: Task,
    calibration: np.ndarray,
    out: Path,
    *,
    name: str,
    created: str,
    global_head: Tensors | None = None,
    exporter: Exporter | Literal["auto"] = "auto",
    int8: bool = True,
    norm_note: str = "",
) -> Report:
    """The bundle of ``model``'s encoder, written to ``out``; ``calibration`` (n, ...) float32: preprocessed inputs.

    An int8 variant whose features differ too much is left out; the report has the reason. ``created`` is ISO 8601 UTC.
    The encoder runs in eval mode: its running statistics are those that devices get.

    Raises:
        ExportRejected: a gate failed; all of them are listed and a bundle already at ``out`` stays as it is.
        MissingCapability: onnx or onnxruntime is not installed.
    """
    inputs = _checked(calibration, task)
    encoder = model.part("encoder")
    seconds: dict[str, float] = {}
    with _timed(seconds, "onnx"):
        exported = to_onnx(encoder, task, exporter)
    with _timed(seconds, "gates"):
        before = _head_gates(global_head, task, feature_dim(encoder))
        work = _Work(exported, *_gates(exported, encoder, task, inputs, before), seconds=seconds)
    if int8:
        with _timed(seconds, "int8"):
            _quantize(work, task, inputs)
    with _timed(seconds, "pack"):
        files = _files(work, task, global_head)
        fields = _manifest(work, method, task, inputs, files)
        fields |= {"name": name, "created": created, "norm_note": norm_note, "feature_dim": feature_dim(encoder)}
        manifest = pack(out, fields, files)
    return Report(manifest, out, seconds, tuple(work.gates), work.int8_note)


def model_from_state(method: Method, task: Task, state: State) -> Parts:
    """The method's model with the shared tensors of ``state``.

    Raises:
        ExportRejected: the method shares no encoder, or tensors of the encoder are not in the state (batch norm that
            stays on devices); pooled ones must then be added first, see `training.parts.pooled_norm`.
        TensorsError: the state is of another model.
    """
    if "encoder" not in method.shared:
        raise ExportRejected(f"method '{method.name}' shares no encoder; there is nothing to export")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = method.build(task)
    known = model.state_dict().keys()
    load_arrays(model, {name: array for name, array in state.items() if name in known})
    needed = {name for name in known if name.startswith("encoder.") and not name.endswith("num_batches_tracked")}
    if missing := sorted(needed - state.keys()):
        raise ExportRejected(
            f"{len(missing)} tensors of the encoder are not in the state, '{missing[0]}' for one (method "
            f"'{method.name}', norm {method.norm}); they stay on devices and were not pooled: see export.pool_norm"
        )
    return model


def synthetic_inputs(task: Task, count: int = 128, seed: int = 0) -> np.ndarray:
    """Inputs (count, ...) float32 drawn from N(0, 1) in preprocessed space, for a coordinator that has no data."""
    return np.random.default_rng(seed).standard_normal((count, *task.input_shape), dtype=np.float32)


def _checked(calibration: np.ndarray, task: Task) -> np.ndarray:
    inputs = np.ascontiguousarray(calibration, dtype=np.float32)
    if inputs.shape[1:] != task.input_shape or not len(inputs) or not np.isfinite(inputs).all():
        expected = f"finite [n, {', '.join(map(str, task.input_shape))}] with n >= 1"
        raise ExportRejected(
            f"calibration inputs are {list(inputs.shape)}, expected {expected}; give preprocessed inputs of this task"
        )
    return inputs


def _gates(
    exported: Exported, encoder: torch.nn.Module, task: Task, inputs: np.ndarray, before: list[Gate]
) -> tuple[list[Gate], Parity]:
    gates = [*before, *graph_gates(exported.model, task)]
    _refuse_failed(gates, task)  # before ONNX Runtime opens the graph
    gate, parity = parity_gate(exported.model, encoder, inputs)
    gates.append(gate)
    _refuse_failed(gates, task)
    return gates, parity


def _head_gates(head: Tensors | None, task: Task, size: int) -> list[Gate]:
    if head is None:
        return []
    shapes = {name: array.shape for name, array in head.items()}
    expected = {"weight": (task.num_classes, size), "bias": (task.num_classes,)}
    passed = shapes == expected and all(np.isfinite(array).all() for array in head.values())
    return [Gate("global head", passed, f"shapes {shapes}, expected {expected}, all finite")]


def _refuse_failed(gates: list[Gate], task: Task) -> None:
    if failed := [f"  - {gate.name}: {gate.detail}" for gate in gates if not gate.passed]:
        lines = "\n".join(failed)
        raise ExportRejected(f"encoder '{task.encoder}': {len(failed)} gate(s) failed; nothing was written\n{lines}")


def _quantize(work: _Work, task: Task, inputs: np.ndarray) -> None:
    """Add the int8 variant, or the reason why there is none; a device can always use fp32."""
    try:
        int8 = to_int8(work.exported.model, inputs)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError) as error:
        work.int8_note = f"left out: the quantizer failed: {error}"
        return
    failed = [f"{gate.name}: {gate.detail}" for gate in graph_gates(int8, task) if not gate.passed]
    if (largest := largest_weight(int8)) > MAX_WEIGHT:
        failed.append(f"int8 weights up to {largest}, at most {MAX_WEIGHT} cannot saturate; shorten their range")
    cosine = mean_cosine(run(int8, inputs), run(work.exported.model, inputs)) if not failed else 0.0
    passed = not failed and cosine >= MIN_COSINE
    detail = "; ".join(failed) or f"mean cosine to fp32 {cosine:.4f}, at least {MIN_COSINE} is asked for"
    work.gates.append(Gate("int8", passed, detail))
    work.int8_note = "" if passed else f"left out: {detail}"
    if passed:
        work.int8, work.parity = int8, work.parity.model_copy(update={"int8_cosine": min(cosine, 1.0)})


def _files(work: _Work, task: Task, global_head: Tensors | None) -> dict[str, bytes | Path]:
    head = {name: global_head[name].astype(np.float32) for name in ("weight", "bias")} if global_head else None
    files: dict[str, bytes | Path] = {_FP32: work.exported.model, _GOLDEN: encode(_golden(work, task, head))}
    if work.int8 is not None:
        files[_INT8] = work.int8
    if head is not None:
        files[_HEAD] = encode(head)
    return files


def _golden(work: _Work, task: Task, head: Tensors | None) -> Tensors:
    """Raw inputs and what comes of them, which a device compares with what it computes."""
    inputs = self_test.prepared(self_test.raw_inputs(task.input), task.input)
    features: dict[EncoderPrecision, np.ndarray] = {"fp32": run(work.exported.model, inputs)}
    if work.int8 is not None:
        features["int8"] = run(work.int8, inputs)
    return self_test.golden(task.input, task.class_names, features, head)


def _manifest(
    work: _Work, method: Method, task: Task, inputs: np.ndarray, files: dict[str, bytes | Path]
) -> dict[str, Any]:
    return {
        "headwater_version": edge_agent.__version__,
        "method": method.name,
        "method_params": method.params.model_dump(mode="json"),
        "norm": method.norm,
        "task": task.model_dump(mode="json"),
        "variants": {"fp32": _FP32} | ({"int8": _INT8} if _INT8 in files else {}),
        "opset": work.exported.opset,
        "exporter": work.exported.exporter,
        "parity": work.parity.model_dump(mode="json"),
        "calibration_sha256": _digest(inputs) if work.int8 is not None else None,
        "golden": _GOLDEN,
        "global_head": _HEAD if _HEAD in files else None,
        "heads": {head: _card(method, head).model_dump(mode="json") for head in method.heads},
        "requires": {"onnxruntime": "1.18"},
    }


def _card(method: Method, head: str) -> HeadCard:
    exactness, reason = method.card(head)
    return HeadCard.model_validate({"exactness": exactness, "reason": reason, "params": method.head_params(head)})


def _digest(inputs: np.ndarray) -> str:
    return hashlib.sha256(repr(inputs.shape).encode() + inputs.tobytes()).hexdigest()


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[step] = round(time.perf_counter() - begin, 3)
