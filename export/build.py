"""A bundle from a trained model: its ONNX graphs and their gates; a file only if every gate passed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from edge_agent.bundle.manifest import NEWEST_SCHEMA, SCHEMA, HeadCard, Lineage, Parity
from edge_agent.core.errors import ExportRejected
from edge_agent.core.task import State, Task, Tensors
from edge_agent.methods.base import Method
from edge_agent.training import peft
from edge_agent.training.parts import Parts, feature_dim, load_arrays

from .batch_norm import Adaptable, free_batch_norm
from .calibration import Calibration
from .encoder import Exported, to_onnx
from .packing import (
    BundleOptions,
    Checked,
    Graphs,
    Origin,
    Report,
    check_passed,
    head_gates,
    pack_checked,
    timed_step,
)
from .parity import Gate, graph_gates, parity_gate

_log = logging.getLogger(__name__)


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

    @property
    def origin(self) -> Origin:
        """What the bundle's manifest says of the encoder."""
        method = self.method
        return Origin(
            self.task.with_peft(None),  # the encoder is an ordinary one, whatever of it has learned
            self.feature_dim,
            self.global_head,
            method=method.name,
            method_params=method.params.model_dump(mode="json"),
            norm=method.norm,
            norm_note=self.norm_note,
            heads={kind: _card(method, kind) for kind in method.heads},
            lineage=self.lineage,
            statistics=self.statistics,
            schema_version=NEWEST_SCHEMA if self.statistics else SCHEMA,
        )


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
    with timed_step(seconds, "onnx"):
        graphs = _export_fp32(trained, options)
    # 2. Its gates: a graph that fails one is neither quantized nor packed.
    with timed_step(seconds, "gates"):
        gates, parity = _check_fp32(graphs.fp32, trained, inputs)
    # 3. The int8 variant, and the file.
    checked = Checked(graphs, trained.origin, gates, parity, trained.encoder)
    return pack_checked(checked, calibration, out, options, seconds)


def _export_fp32(trained: TrainedEncoder, options: BundleOptions) -> Graphs:
    """Export the encoder in fp32; exporter ``auto`` is ``legacy`` where batch norm stays free."""
    may_estimate = options.own_norm and trained.method.own_norm and options.exporter != "dynamo"
    free_norm = None
    if may_estimate:
        free_norm = _free_norm(trained.encoder, trained.task)
    if free_norm is not None:
        return Graphs(free_norm.exported, free_norm)
    return Graphs(to_onnx(trained.encoder, trained.task, options.exporter), None)


def _check_fp32(exported: Exported, trained: TrainedEncoder, inputs: np.ndarray) -> tuple[list[Gate], Parity]:
    """Return the gates of the fp32 graph, which have all passed, and how far its features are from torch's.

    Raises:
        ExportRejected: A gate failed.
    """
    task = trained.task
    gates = [*head_gates(trained.global_head, task, trained.feature_dim), *graph_gates(exported.model, task)]
    # ONNX Runtime opens only a graph that has passed the checks that read it.
    check_passed(gates, task.encoder)
    gate, parity = parity_gate(exported.model, trained.encoder, inputs)
    gates.append(gate)
    check_passed(gates, task.encoder)
    return gates, parity


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
    state = peft.merge(state, task)
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


def _card(method: Method, head: str) -> HeadCard:
    """Return the card of a kind of head: how exact the head is on a device, and why."""
    exactness, reason = method.card(head)
    return HeadCard.model_validate({"exactness": exactness, "reason": reason, "params": method.head_params(head)})
