"""A bundle from a model: ONNX graphs, gates, golden tensors, head cards; a file only if every gate passed."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

import edge_agent
from edge_agent.bundle.archive import pack
from edge_agent.bundle.manifest import EncoderPrecision, HeadCard, Lineage, Manifest, Parity, Quantization
from edge_agent.core.errors import ExportRejected
from edge_agent.core.task import State, Task, Tensors
from edge_agent.methods.base import Method
from edge_agent.personal import self_test
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.variants import timed
from edge_agent.training.parts import Parts, feature_dim, load_arrays
from edge_agent.wire.tensors import encode

from .batch_norm import PROBE_FILE, Adaptable, free_batch_norm
from .calibration import Calibration
from .encoder import Exported, Exporter, to_onnx
from .int8 import Int8Variant, make_int8_variant
from .parity import Gate, graph_gates, parity_gate, run, session

_log = logging.getLogger(__name__)

_GRAPHS: dict[EncoderPrecision, str] = {"fp32": "encoder.onnx", "int8": "encoder.int8.onnx"}
_GOLDEN = "golden.safetensors"
_HEAD = "global_head.safetensors"
_STATISTICS = "shared_statistics.safetensors"
_MOST_NOTE = 2000
"""The most characters of the manifest's note about int8."""


@dataclass(frozen=True)
class Report:
    """The result of an export: manifest, path, seconds of each step, all gates, and why int8 is missing, if it is."""

    manifest: Manifest
    path: Path
    seconds: dict[str, float]
    gates: tuple[Gate, ...]
    int8_note: str = ""


@dataclass(frozen=True)
class TrainedEncoder:
    """The result of a training as a bundle needs it: the model, how it was trained, and for which task."""

    model: Parts
    method: Method
    task: Task

    global_head: Tensors | None = None
    """The shared linear classifier: ``weight`` (K, d) and ``bias`` (K,); None where the method has none."""

    statistics: Tensors | None = None
    """Means over the samples of all clients (`Method.shared_statistics`); None where the method has none."""

    norm_note: str = ""
    """A sentence on how batch norm was settled for one common encoder."""

    lineage: Lineage | None = None
    """The run that the model comes from; None where that is not known."""

    @property
    def encoder(self) -> nn.Module:
        """The part of the model that is exported."""
        return self.model.part("encoder")

    @property
    def feature_dim(self) -> int:
        """The number of features of an input."""
        return feature_dim(self.encoder)


@dataclass(frozen=True)
class BundleOptions:
    """The choices for a bundle that do not depend on the model."""

    name: str
    """The name of the bundle for people."""

    created: str = ""
    """The time of the export as ISO 8601 UTC; empty: now."""

    exporter: Exporter | Literal["auto"] = "auto"
    """The exporter of torch; ``auto`` is ``legacy`` where batch norm is not folded, see ``own_norm``."""

    int8: bool = True
    """Whether to make an int8 variant."""

    own_norm: bool = True
    """Whether devices may estimate batch norm statistics on their own inputs, if the method allows it.

    Batch norm is then not folded.
    """


def build_bundle(trained: TrainedEncoder, calibration: Calibration, out: Path, options: BundleOptions) -> Report:
    """Export an encoder, write its bundle to ``out``, and report what was made.

    The encoder runs in eval mode: its running statistics are those that devices get. An int8 variant whose features
    differ too much, or whose heads lose more than half a point beyond noise, is left out; the report has the reason.

    Args:
        trained: The model, the method that has trained it, and its task.
        calibration: The inputs that int8 takes its ranges from, and the samples on which it is compared with fp32.
        out: The file to write.
        options: The name of the bundle, and which graphs it has.

    Raises:
        ExportRejected: A gate failed; all failures are listed and a bundle already at ``out`` stays as it is.
        MissingCapability: The package onnx or onnxruntime is not installed.
    """
    inputs = calibration.joined_inputs(trained.task)
    seconds = dict[str, float]()
    # 1. The fp32 graph, with batch norm left free where devices may estimate it again.
    with _timed(seconds, "onnx"):
        graphs = _Graphs.from_encoder(trained, options)
    # 2. Its gates: a graph that fails one is neither quantized nor packed.
    with _timed(seconds, "gates"):
        gates, parity = _check_fp32(graphs.fp32, trained, inputs)
    # 3. The int8 variant; without it a device uses fp32.
    if options.int8:
        with _timed(seconds, "int8"):
            variant = make_int8_variant(graphs.fp32.model, trained.encoder, trained.task, inputs, calibration)
            gates = [*gates, *variant.gates]
            graphs = replace(graphs, int8=variant.graph)
            int8_note = variant.note
            parity = parity.model_copy(update={"int8_cosine": variant.cosine})
            quantization = _describe_int8(variant, graphs, inputs, trained.feature_dim)
    else:
        int8_note = "not asked for"
        quantization = None
    # 4. The bundle, with golden inputs and what these graphs compute from them, for the self-test of devices.
    with _timed(seconds, "pack"):
        calibration_sha256 = None if graphs.int8 is None else _digest(inputs)
        measured = _Measured(parity, quantization, calibration_sha256)
        manifest = _pack(trained, graphs, measured, out, options)
    return Report(manifest, out, seconds, tuple(gates), int8_note)


@dataclass(frozen=True)
class _Graphs:
    """The graphs of one bundle."""

    fp32: Exported

    free_norm: Adaptable | None
    """The parts by which a device estimates batch norm again; None where batch norm is folded or there is none."""

    int8: bytes | None = None
    """The int8 graph; None where there is none."""

    @classmethod
    def from_encoder(cls, trained: TrainedEncoder, options: BundleOptions) -> _Graphs:
        """Export the encoder in fp32; exporter ``auto`` is ``legacy`` where batch norm stays free."""
        may_estimate = options.own_norm and trained.method.own_norm and options.exporter != "dynamo"
        free_norm = None
        if may_estimate:
            free_norm = _free_norm(trained.encoder, trained.task)
        if free_norm is not None:
            return cls(free_norm.exported, free_norm)
        return cls(to_onnx(trained.encoder, trained.task, options.exporter), None)

    def by_precision(self) -> dict[EncoderPrecision, bytes]:
        """Return the graphs that devices choose from."""
        graphs: dict[EncoderPrecision, bytes] = {"fp32": self.fp32.model}
        if self.int8 is not None:
            graphs["int8"] = self.int8
        return graphs


@dataclass(frozen=True)
class _Measured:
    """The parts of a manifest that an export has measured."""

    parity: Parity
    quantization: Quantization | None
    calibration_sha256: str | None


def _check_fp32(exported: Exported, trained: TrainedEncoder, inputs: np.ndarray) -> tuple[list[Gate], Parity]:
    """Return the gates of the fp32 graph, which have all passed, and how far its features are from torch's.

    Raises:
        ExportRejected: A gate failed.
    """
    task = trained.task
    gates = [*_head_gates(trained.global_head, task, trained.feature_dim), *graph_gates(exported.model, task)]
    # ONNX Runtime opens only a graph that has passed the checks that read it.
    _check_passed(gates, task)
    gate, parity = parity_gate(exported.model, trained.encoder, inputs)
    gates.append(gate)
    _check_passed(gates, task)
    return gates, parity


def _describe_int8(variant: Int8Variant, graphs: _Graphs, inputs: np.ndarray, size: int) -> Quantization:
    """Return the manifest's part about the int8 variant of an encoder with ``size`` features."""
    note = variant.note or variant.not_measured
    return Quantization(
        ranges=variant.origin,
        held_out=variant.answers,
        note=note[:_MOST_NOTE],
        latency_ms=_latencies(graphs.by_precision(), inputs, size),
    )


def _pack(trained: TrainedEncoder, graphs: _Graphs, measured: _Measured, out: Path, options: BundleOptions) -> Manifest:
    """Write the bundle's files and its manifest to ``out``; returns the manifest."""
    task = trained.task
    method = trained.method
    models = graphs.by_precision()
    files: dict[str, bytes | Path] = {_GRAPHS[precision]: model for precision, model in models.items()}
    # 1. The shared classifier, where the method has one.
    head: Tensors | None = None
    if trained.global_head:
        head = {key: trained.global_head[key].astype(np.float32) for key in ("weight", "bias")}
        files[_HEAD] = encode(head)
    if trained.statistics:
        files[_STATISTICS] = encode({name: array.astype(np.float32) for name, array in trained.statistics.items()})
    # 2. The graph by which a device estimates batch norm again.
    free_norm = None
    if graphs.free_norm is not None:
        files[PROBE_FILE] = graphs.free_norm.probe
        free_norm = graphs.free_norm.free_norm.model_dump(mode="json")
    # 3. The golden tensors, which come last: they are what the graphs above compute.
    raw = self_test.prepared(self_test.raw_inputs(task.input), task.input)
    features = {precision: run(model, raw) for precision, model in models.items()}
    files[_GOLDEN] = encode(self_test.golden(task.input, task.class_names, features, head))
    # 4. The manifest, whose digests of the files `pack` adds.
    fields = {
        "headwater_version": edge_agent.__version__,
        "name": options.name,
        "created": options.created or datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "method": method.name,
        "method_params": method.params.model_dump(mode="json"),
        "norm": method.norm,
        "norm_note": trained.norm_note,
        "task": task.model_dump(mode="json"),
        "feature_dim": trained.feature_dim,
        "variants": {precision: _GRAPHS[precision] for precision in models},
        "opset": graphs.fp32.opset,
        "exporter": graphs.fp32.exporter,
        "parity": measured.parity.model_dump(mode="json"),
        "calibration_sha256": measured.calibration_sha256,
        "quantization": measured.quantization,
        "golden": _GOLDEN,
        "global_head": None if head is None else _HEAD,
        "shared_statistics": _STATISTICS if trained.statistics else None,
        "heads": {kind: _card(method, kind) for kind in method.heads},
        "free_norm": free_norm,
        "requires": {"onnxruntime": "1.18"},
        "lineage": trained.lineage,
    }
    return pack(out, fields, files)


def _free_norm(encoder: nn.Module, task: Task) -> Adaptable | None:
    """Return the encoder with batch norm that devices may estimate again; None if it has none that allows it."""
    try:
        return free_batch_norm(encoder, task)
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
    names = model.state_dict().keys()
    load_arrays(model, {name: array for name, array in state.items() if name in names})
    # Counters of batches have no influence on the encoder in eval mode.
    encoder_names = {name for name in names if name.startswith("encoder.")}
    needed = {name for name in encoder_names if not name.endswith("num_batches_tracked")}
    missing = sorted(needed - state.keys())
    if missing:
        raise ExportRejected(
            f"{len(missing)} tensors of the encoder are not in the state, '{missing[0]}' for one (method "
            f"'{method.name}', norm {method.norm}); they stay on devices and were not pooled: see export.pool_norm"
        )
    return model


def synthetic_inputs(task: Task, count: int = 128, seed: int = 0) -> np.ndarray:
    """Draw inputs (count, ...) float32 from N(0, 1) in preprocessed space, for a coordinator that has no data."""
    return np.random.default_rng(seed).standard_normal((count, *task.input_shape), dtype=np.float32)


def _head_gates(head: Tensors | None, task: Task, size: int) -> list[Gate]:
    """Check that a shared classifier takes ``size`` features and is finite; without one there is no gate."""
    if head is None:
        return []
    shapes = {name: array.shape for name, array in head.items()}
    expected = {"weight": (task.num_classes, size), "bias": (task.num_classes,)}
    is_finite = all(np.isfinite(array).all() for array in head.values())
    return [Gate("global head", shapes == expected and is_finite, f"shapes {shapes}, expected {expected}, all finite")]


def _check_passed(gates: Sequence[Gate], task: Task) -> None:
    """Raise `ExportRejected` with all failures unless every gate has passed."""
    failed = [f"  - {gate.name}: {gate.detail}" for gate in gates if not gate.passed]
    if failed:
        lines = "\n".join(failed)
        raise ExportRejected(f"encoder '{task.encoder}': {len(failed)} gate(s) failed; nothing was written\n{lines}")


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
    """Return the card of a kind of head, as the manifest has it: how exact the head is on a device, and why."""
    exactness, reason = method.card(head)
    card = HeadCard.model_validate({"exactness": exactness, "reason": reason, "params": method.head_params(head)})
    return card.model_dump(mode="json")


def _digest(inputs: np.ndarray) -> str:
    """Return the SHA-256 of the shape and the values of an array."""
    return hashlib.sha256(repr(inputs.shape).encode() + inputs.tobytes()).hexdigest()


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Note the seconds that the block takes, as ``step``."""
    begin = time.perf_counter()
    yield
    seconds[step] = round(time.perf_counter() - begin, 3)
