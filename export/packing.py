"""From a checked fp32 graph to a bundle file: int8 variant, golden tensors, manifest; wherever the graph comes from."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

import edge_agent
from edge_agent.bundle.archive import pack
from edge_agent.bundle.manifest import (
    NO_METHOD,
    SCHEMA,
    EncoderPrecision,
    HeadCard,
    Lineage,
    Manifest,
    Parity,
    Quantization,
)
from edge_agent.core.errors import ExportRejected
from edge_agent.core.task import Task, Tensors
from edge_agent.personal import self_test
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.variants import timed
from edge_agent.wire.tensors import encode

from .batch_norm import PROBE_FILE, Adaptable
from .calibration import Calibration
from .encoder import Exported, Exporter
from .int8 import Int8Variant, make_int8_variant
from .parity import Gate, run, session

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

    why_no_int8: str = "not asked for"
    """Why there is none, where ``int8`` is false."""

    own_norm: bool = True
    """Whether devices may estimate batch norm statistics on their own inputs, if the method allows it.

    Batch norm is then not folded.
    """


@dataclass(frozen=True)
class Origin:
    """What a manifest says of an encoder beside its graphs: its task, its training, and the heads that go with it."""

    task: Task
    feature_dim: int
    global_head: Tensors | None = None
    """The shared linear classifier: ``weight`` (K, d) and ``bias`` (K,); None where there is none."""

    method: str = NO_METHOD
    """The method that has trained the encoder; ``none`` where no run of this project has."""

    method_params: Mapping[str, Any] = field(default_factory=dict)
    norm: Literal["global", "local_stats", "local_all"] = "global"
    norm_note: str = ""
    """A sentence on how batch norm was settled for one common encoder."""

    heads: Mapping[str, HeadCard] = field(default_factory=dict)
    """The heads that the method offers, by name."""

    lineage: Lineage | None = None
    """The run that the encoder comes from; None where it comes from none, or that is not known."""

    statistics: Tensors | None = None
    """Means over the samples of all clients (`Method.shared_statistics`); None where there are none."""

    schema_version: int = SCHEMA
    """The form of the manifest; see `edge_agent.bundle.manifest`."""


@dataclass(frozen=True)
class Graphs:
    """The graphs of one bundle."""

    fp32: Exported

    free_norm: Adaptable | None
    """The parts by which a device estimates batch norm again; None where batch norm is folded or there is none."""

    int8: bytes | None = None
    """The int8 graph; None where there is none."""

    def by_precision(self) -> dict[EncoderPrecision, bytes]:
        """Return the graphs that devices choose from."""
        graphs: dict[EncoderPrecision, bytes] = {"fp32": self.fp32.model}
        if self.int8 is not None:
            graphs["int8"] = self.int8
        return graphs


@dataclass(frozen=True)
class Checked:
    """An fp32 graph that has passed its gates, and what it needs to become a bundle."""

    graphs: Graphs
    origin: Origin
    gates: Sequence[Gate]
    parity: Parity

    encoder: nn.Module | None = None
    """The encoder in torch, whose steps tell what ranges of clients belong to; None where there are none."""


def pack_checked(
    checked: Checked, calibration: Calibration, out: Path, options: BundleOptions, seconds: dict[str, float]
) -> Report:
    """Make the int8 variant of a checked encoder, write its bundle to ``out``, and report what was made.

    Args:
        checked: The encoder.
        calibration: The inputs that int8 takes its ranges from, and the samples on which it is compared with fp32.
        out: The file to write.
        options: The name of the bundle, and whether it has int8.
        seconds: The seconds of the steps before, to which those of the steps here are added.
    """
    graphs = checked.graphs
    origin = checked.origin
    parity = checked.parity
    gates = [*checked.gates]
    inputs = calibration.joined_inputs(origin.task)
    # 1. The int8 variant; without it a device uses fp32.
    quantization = None
    int8_note = options.why_no_int8
    if options.int8:
        with timed_step(seconds, "int8"):
            variant = make_int8_variant(graphs.fp32.model, checked.encoder, origin.task, inputs, calibration)
            gates = [*gates, *variant.gates]
            graphs = replace(graphs, int8=variant.graph)
            int8_note = variant.note
            parity = parity.model_copy(update={"int8_cosine": variant.cosine})
            quantization = _describe_int8(variant, graphs, inputs, origin.feature_dim)
    # 2. The bundle, with golden inputs and what these graphs compute from them, for the self-test of devices.
    with timed_step(seconds, "pack"):
        calibration_sha256 = None if graphs.int8 is None else _digest(inputs)
        measured = _Measured(parity, quantization, calibration_sha256)
        manifest = _pack(origin, graphs, measured, out, options)
    return Report(manifest, out, seconds, tuple(gates), int8_note)


@dataclass(frozen=True)
class _Measured:
    """The parts of a manifest that an export has measured."""

    parity: Parity
    quantization: Quantization | None
    calibration_sha256: str | None


def _describe_int8(variant: Int8Variant, graphs: Graphs, inputs: np.ndarray, size: int) -> Quantization:
    """Return the manifest's part about the int8 variant of an encoder with ``size`` features."""
    note = variant.note or variant.not_measured
    return Quantization(
        ranges=variant.origin,
        held_out=variant.answers,
        note=note[:_MOST_NOTE],
        latency_ms=_latencies(graphs.by_precision(), inputs, size),
    )


def _pack(origin: Origin, graphs: Graphs, measured: _Measured, out: Path, options: BundleOptions) -> Manifest:
    """Write the bundle's files and its manifest to ``out``; returns the manifest."""
    task = origin.task
    models = graphs.by_precision()
    files: dict[str, bytes | Path] = {_GRAPHS[precision]: model for precision, model in models.items()}
    # 1. The shared classifier, where there is one.
    head: Tensors | None = None
    if origin.global_head:
        head = {key: origin.global_head[key].astype(np.float32) for key in ("weight", "bias")}
        files[_HEAD] = encode(head)
    if origin.statistics:
        files[_STATISTICS] = encode({name: array.astype(np.float32) for name, array in origin.statistics.items()})
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
        "schema_version": origin.schema_version,
        "headwater_version": edge_agent.__version__,
        "name": options.name,
        "created": options.created or datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "method": origin.method,
        "method_params": origin.method_params,
        "norm": origin.norm,
        "norm_note": origin.norm_note,
        "task": task.model_dump(mode="json"),
        "feature_dim": origin.feature_dim,
        "variants": {precision: _GRAPHS[precision] for precision in models},
        "opset": graphs.fp32.opset,
        "exporter": graphs.fp32.exporter,
        "parity": measured.parity.model_dump(mode="json"),
        "calibration_sha256": measured.calibration_sha256,
        "quantization": measured.quantization,
        "golden": _GOLDEN,
        "global_head": None if head is None else _HEAD,
        "shared_statistics": _STATISTICS if origin.statistics else None,
        "heads": {kind: card.model_dump(mode="json") for kind, card in origin.heads.items()},
        "free_norm": free_norm,
        "requires": {"onnxruntime": "1.18"},
        "lineage": origin.lineage,
    }
    return pack(out, fields, files)


def head_gates(head: Tensors | None, task: Task, size: int) -> list[Gate]:
    """Check that a shared classifier takes ``size`` features and is finite; without one there is no gate."""
    if head is None:
        return []
    shapes = {name: array.shape for name, array in head.items()}
    expected = {"weight": (task.num_classes, size), "bias": (task.num_classes,)}
    is_finite = all(np.isfinite(array).all() for array in head.values())
    return [Gate("global head", shapes == expected and is_finite, f"shapes {shapes}, expected {expected}, all finite")]


def check_passed(gates: Sequence[Gate], name: str) -> None:
    """Raise `ExportRejected` with all failures unless every gate has passed."""
    failed = [f"  - {gate.name}: {gate.detail}" for gate in gates if not gate.passed]
    if failed:
        lines = "\n".join(failed)
        raise ExportRejected(f"encoder '{name}': {len(failed)} gate(s) failed; nothing was written\n{lines}")


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


def _digest(inputs: np.ndarray) -> str:
    """Return the SHA-256 of the shape and the values of an array."""
    return hashlib.sha256(repr(inputs.shape).encode() + inputs.tobytes()).hexdigest()


@contextmanager
def timed_step(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Note the seconds that the block takes, as ``step``."""
    begin = time.perf_counter()
    yield
    seconds[step] = round(time.perf_counter() - begin, 3)
