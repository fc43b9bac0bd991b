"""A bundle from a model: ONNX graphs, gates, golden tensors, head cards; a file only if every gate passed."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

import edge_agent
from edge_agent.bundle.archive import pack
from edge_agent.bundle.manifest import DomainAnswers, EncoderPrecision, HeadCard, Lineage, Manifest, Quantization
from edge_agent.core.errors import ExportRejected
from edge_agent.core.task import State, Task, Tensors
from edge_agent.data import Samples
from edge_agent.methods.base import Method
from edge_agent.personal import self_test
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.variants import timed
from edge_agent.training.parts import Parts, feature_dim, load_arrays
from edge_agent.wire.tensors import encode

from .batch_norm import PROBE_FILE, Adaptable, adaptable
from .domains import chosen, compared, objection, range_inputs
from .encoder import Exporter, to_onnx
from .parity import Gate, graph_gates, mean_cosine, parity_gate, run, session
from .quantize import LEAST_CLIENTS, MAX_WEIGHT, MIN_COSINE, Quantizer, common, largest_weight, ranges_of_clients

_log = logging.getLogger(__name__)

_GRAPHS: dict[EncoderPrecision, str] = {"fp32": "encoder.onnx", "int8": "encoder.int8.onnx"}
_GOLDEN = "golden.safetensors"
_HEAD = "global_head.safetensors"


@dataclass(frozen=True)
class Report:
    """The result of an export: manifest, path, seconds of each step, all gates, and why int8 is missing, if it is."""

    manifest: Manifest
    path: Path
    seconds: dict[str, float]
    gates: tuple[Gate, ...]
    int8_note: str = ""


def bundle(
    model: Parts,
    method: Method,
    task: Task,
    calibration: np.ndarray | Mapping[str, Samples],
    out: Path,
    *,
    name: str,
    created: str = "",
    global_head: Tensors | None = None,
    exporter: Exporter | Literal["auto"] = "auto",
    int8: bool = True,
    norm_note: str = "",
    own_norm: bool = True,
    client_ranges: Mapping[str, np.ndarray] | None = None,
    lineage: Lineage | None = None,
) -> Report:
    """Export the encoder of a model, write its bundle to ``out``, and report what was made.

    The encoder runs in eval mode: its running statistics are those that devices get. An int8 variant whose features
    differ too much, or whose heads lose more than half a point beyond noise, is left out; the report has the reason.

    Args:
        model: The model.
        method: The method that has trained it.
        task: The learning task.
        calibration: Labelled samples by domain, from which the int8 ranges are taken in equal parts, and on which heads
            compare int8 with fp32, each domain by ranges of the others. Or preprocessed inputs (n, ...) float32 without
            labels, by which nothing is compared.
        out: The file to write.
        name: The name of the bundle for people.
        created: The time of the export as ISO 8601 UTC; default: now.
        global_head: The shared linear classifier: ``weight`` (K, d) and ``bias`` (K,).
        exporter: The exporter of torch.
        int8: Whether to make an int8 variant.
        norm_note: How batch norm was settled for one common encoder.
        own_norm: Let devices estimate batch norm statistics on their own inputs, if the method allows it; then batch
            norm is not folded and exporter ``auto`` is ``legacy``.
        client_ranges: The (steps, 2) of `training.ranges` for this encoder by client, whose samples are not here. They
            count as domains do, and more than inputs without labels; those of fewer than three clients are left out,
            and ``quantization.ranges`` says so.
        lineage: Where the model comes from.

    Raises:
        ExportRejected: A gate failed; all failures are listed and a bundle already at ``out`` stays as it is.
        MissingCapability: The package onnx or onnxruntime is not installed.
    """
    domains = {} if isinstance(calibration, np.ndarray) else chosen(calibration)
    observed = {"": calibration} if isinstance(calibration, np.ndarray) else range_inputs(domains)
    inputs = _checked(observed, task)
    encoder = model.part("encoder")
    seconds = dict[str, float]()
    # 1. The fp32 graph, with batch norm left free where devices may estimate it again.
    with _timed(seconds, "onnx"):
        free = None
        if own_norm and method.own_norm and exporter != "dynamo":
            free = _free_norm(encoder, task)
        exported = to_onnx(encoder, task, exporter) if free is None else free.exported
    # 2. Its gates.
    with _timed(seconds, "gates"):
        gates = [*_head_gates(global_head, task, feature_dim(encoder)), *graph_gates(exported.model, task)]
        _check_passed(gates, task)  # before ONNX Runtime opens the graph
        gate, parity = parity_gate(exported.model, encoder, inputs)
        gates.append(gate)
        _check_passed(gates, task)
    graphs: dict[EncoderPrecision, bytes] = {"fp32": exported.model}
    quantization = None
    int8_note = "not asked for"
    # 3. The int8 variant; without it a device uses fp32.
    if int8:
        with _timed(seconds, "int8"):
            variant = _Int8.of(exported.model, encoder, task, inputs, observed, domains, client_ranges or {})
            gates += variant.gates
            if variant.graph is not None:
                graphs["int8"] = variant.graph
            int8_note = variant.note
            parity = parity.model_copy(update={"int8_cosine": variant.cosine})
            quantization = Quantization(
                ranges=variant.origin,
                held_out=variant.answers,
                note=(int8_note or variant.not_measured)[:2000],
                latency_ms=_latencies(graphs, inputs, feature_dim(encoder)),
            )
    # 4. The bundle, with golden inputs and what these graphs compute from them, for the self-test of devices.
    with _timed(seconds, "pack"):
        files: dict[str, bytes | Path] = {_GRAPHS[precision]: graph for precision, graph in graphs.items()}
        head: Tensors | None = None
        if global_head:
            head = {key: global_head[key].astype(np.float32) for key in ("weight", "bias")}
            files[_HEAD] = encode(head)
        if free is not None:
            files[PROBE_FILE] = free.probe
        raw = self_test.prepared(self_test.raw_inputs(task.input), task.input)
        features = {precision: run(graph, raw) for precision, graph in graphs.items()}
        files[_GOLDEN] = encode(self_test.golden(task.input, task.class_names, features, head))
        fields = {
            "headwater_version": edge_agent.__version__,
            "name": name,
            "created": created or datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "method": method.name,
            "method_params": method.params.model_dump(mode="json"),
            "norm": method.norm,
            "norm_note": norm_note,
            "task": task.model_dump(mode="json"),
            "feature_dim": feature_dim(encoder),
            "variants": {precision: _GRAPHS[precision] for precision in graphs},
            "opset": exported.opset,
            "exporter": exported.exporter,
            "parity": parity.model_dump(mode="json"),
            "calibration_sha256": _digest(inputs) if "int8" in graphs else None,
            "quantization": quantization,
            "golden": _GOLDEN,
            "global_head": None if head is None else _HEAD,
            "heads": {kind: _card(method, kind) for kind in method.heads},
            "free_norm": None if free is None else free.free_norm.model_dump(mode="json"),
            "requires": {"onnxruntime": "1.18"},
            "lineage": lineage,
        }
        manifest = pack(out, fields, files)
    return Report(manifest, out, seconds, tuple(gates), int8_note)


def _free_norm(encoder: nn.Module, task: Task) -> Adaptable | None:
    """Return the encoder with batch norm that devices may estimate again; None if it has none of the usual kind."""
    try:
        return adaptable(encoder, task)
    except ExportRejected as error:
        _log.warning("batch_norm_folded reason=%s", error)
        return None


def model_from_state(method: Method, task: Task, state: State) -> Parts:
    """Return the method's model with the shared tensors of ``state``.

    Raises:
        ExportRejected: The method shares no encoder, or the state lacks tensors of the encoder, such as batch norm that
            stays on devices. Pooled ones must then be added first; see `methods.base.pooled_norm`.
        TensorsError: The state is that of another model.
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
    """Draw inputs (count, ...) float32 from N(0, 1) in preprocessed space, for a coordinator that has no data."""
    return np.random.default_rng(seed).standard_normal((count, *task.input_shape), dtype=np.float32)


def _head_gates(head: Tensors | None, task: Task, size: int) -> list[Gate]:
    if head is None:
        return []
    shapes = {name: array.shape for name, array in head.items()}
    expected = {"weight": (task.num_classes, size), "bias": (task.num_classes,)}
    passed = shapes == expected and all(np.isfinite(array).all() for array in head.values())
    return [Gate("global head", passed, f"shapes {shapes}, expected {expected}, all finite")]


def _check_passed(gates: Sequence[Gate], task: Task) -> None:
    if failed := [f"  - {gate.name}: {gate.detail}" for gate in gates if not gate.passed]:
        lines = "\n".join(failed)
        raise ExportRejected(f"encoder '{task.encoder}': {len(failed)} gate(s) failed; nothing was written\n{lines}")


def _checked(observed: Mapping[str, np.ndarray], task: Task) -> np.ndarray:
    """Return the calibration inputs of all domains, in one array.

    Raises:
        ExportRejected: The calibration inputs are not inputs of this task.
    """
    for name, array in observed.items():
        if array.shape[1:] != task.input_shape or not len(array) or not np.isfinite(array).all():
            expected = f"finite [n, {', '.join(map(str, task.input_shape))}] with n >= 1"
            raise ExportRejected(
                f"calibration inputs{f' of {name}' if name else ''} are {list(array.shape)}, expected {expected}; "
                "give preprocessed inputs of this task"
            )
    if not observed:
        raise ExportRejected("calibration has no domain; give samples of one at least, or inputs without labels")
    return np.ascontiguousarray(np.concatenate([*observed.values()]), dtype=np.float32)


@dataclass(frozen=True)
class _Int8:
    """The int8 variant, with the gates it went through; ``graph`` is None, and ``note`` says why, where one failed."""

    graph: bytes | None
    gates: tuple[Gate, ...]
    cosine: float | None
    answers: Mapping[str, DomainAnswers]
    note: str
    origin: str = ""

    @classmethod
    def of(
        cls,
        model: bytes,
        encoder: nn.Module,
        task: Task,
        inputs: np.ndarray,
        observed: Mapping[str, np.ndarray],
        domains: Mapping[str, Samples],
        client_ranges: Mapping[str, np.ndarray],
    ) -> _Int8:
        """Make the int8 variant of the fp32 graph ``model`` by ranges of each domain's inputs and of clients."""
        count = sum(map(len, observed.values()))
        origin = f"{count} inputs {'without labels' if '' in observed else f'of {len(observed)} domain(s)'}"
        try:
            quantizer = Quantizer(model)
            ranges = {name: quantizer.ranges(array) for name, array in observed.items()}
            graph = quantizer.int8(common([*ranges.values()]))
            gate, cosine = _int8_gate(graph, model, task, inputs)
            stated: float | None = cosine
            clients = ranges_of_clients(quantizer, encoder, inputs, client_ranges)
            if 0 < len(clients) < LEAST_CLIENTS:
                origin += f"; ranges of {len(clients)} client(s) left out: one in {LEAST_CLIENTS} can be outvoted"
            elif clients:
                # Random inputs lie elsewhere than clients' samples: they try the quantizer out, and set no range.
                ranges = {**clients, **{name: own for name, own in ranges.items() if name}}
                graph = quantizer.int8(common([*ranges.values()]))
                stated = None
                if domains:
                    gate, stated = _int8_gate(graph, model, task, inputs)
                own = f"{origin} and " if domains else ""
                origin = f"{own}activation ranges of {len(clients)} client(s)"
        except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError) as error:
            return cls(None, (), None, {}, f"left out: the quantizer failed: {error}")
        if not gate.passed:
            return cls(None, (gate,), stated, {}, f"left out: {gate.detail}", origin)
        answers = compared(quantizer, model, domains, ranges)
        if not answers:
            return cls(graph, (gate,), stated, {}, "", origin)
        loses = objection(answers)
        total = sum(one.support for one in answers.values())
        accuracy = Gate("int8 accuracy", not loses, loses or f"no loss beyond noise on {total} held-out answers")
        note = f"left out: {loses}" if loses else ""
        return cls(None if loses else graph, (gate, accuracy), stated, answers, note, origin)

    @property
    def not_measured(self) -> str:
        """Why no accuracies were compared; empty where they were."""
        if self.answers:
            return ""
        return (
            "accuracies not measured: labelled samples of two domains or more are needed; each device compares its own"
        )


def _int8_gate(quantized: bytes, model: bytes, task: Task, inputs: np.ndarray) -> tuple[Gate, float]:
    """Return whether the int8 variant can be used in place of ``model``, and the mean cosine of their features."""
    failed = [f"{gate.name}: {gate.detail}" for gate in graph_gates(quantized, task) if not gate.passed]
    if (largest := largest_weight(quantized)) > MAX_WEIGHT:
        failed.append(f"int8 weights up to {largest}, at most {MAX_WEIGHT} cannot saturate; shorten their range")
    cosine = mean_cosine(run(quantized, inputs), run(model, inputs)) if not failed else 0.0
    detail = "; ".join(failed) or f"mean cosine to fp32 {cosine:.4f}, at least {MIN_COSINE} is required"
    return Gate("int8", not failed and cosine >= MIN_COSINE, detail), min(cosine, 1.0)


def _latencies(
    graphs: Mapping[EncoderPrecision, bytes], inputs: np.ndarray, size: int
) -> dict[EncoderPrecision, float]:
    """Return milliseconds of one input in each precision, on one thread of this machine, in batches as on devices."""
    encoders: dict[str, Encoder] = {}
    for precision, graph in graphs.items():
        opened = session(graph)
        encoders[precision] = Encoder(
            opened,
            opened.get_inputs()[0].name,
            inputs.shape[1:],
            size,
            precision,
            "",
            ("CPUExecutionProvider",),
            "onnx",
        )
    if "int8" not in encoders:
        return {}
    timing = timed(encoders, time.thread_time)
    batch = encoders["fp32"].batch_size
    return {"fp32": round(timing.fp32_ms / batch, 4), "int8": round(timing.int8_ms / batch, 4)}


def _card(method: Method, head: str) -> dict[str, object]:
    exactness, reason = method.card(head)
    card = HeadCard.model_validate({"exactness": exactness, "reason": reason, "params": method.head_params(head)})
    return card.model_dump(mode="json")


def _digest(inputs: np.ndarray) -> str:
    return hashlib.sha256(repr(inputs.shape).encode() + inputs.tobytes()).hexdigest()


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[step] = round(time.perf_counter() - begin, 3)
