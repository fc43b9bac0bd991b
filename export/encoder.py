"""A trained encoder as an ONNX graph: one float input, one output ``features``, any batch size."""

from __future__ import annotations

import copy
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from edge_agent.core.errors import ExportRejected, MissingCapability
from edge_agent.core.task import Task

Exporter = Literal["dynamo", "legacy"]
"""Torch's exporters: ``dynamo`` traces with torch.export, ``legacy`` with TorchScript."""

_OPSET: dict[Exporter, int] = {"dynamo": 18, "legacy": 17}
"""The version of ONNX's operators that each exporter writes."""


@dataclass(frozen=True)
class Exported:
    """An ONNX graph as bytes, and how it was made."""

    model: bytes
    exporter: Exporter | Literal["file"]
    opset: int


def to_onnx(
    encoder: nn.Module,
    task: Task,
    exporter: Exporter | Literal["auto"] = "auto",
    *,
    keep_norm: bool = False,
    outputs: Sequence[str] = ("features",),
    shape: tuple[int, ...] | None = None,
) -> Exported:
    """Return the encoder in eval mode as ONNX; the given module is left as it is.

    ``auto`` takes torch's dynamo exporter where onnxscript is installed: it also folds batch norm after linear layers.
    With ``keep_norm`` the legacy one leaves batch norm as nodes of their own instead of folding it into convolutions.
    ``outputs`` names what the encoder gives. ``shape`` is that of two inputs; by default the task says it.

    Raises:
        MissingCapability: The package onnx is not installed, or onnxscript is not and ``dynamo`` is requested.
        ExportRejected: The exporter cannot translate this encoder.
    """
    chosen = _choose_exporter(exporter)
    frozen = copy.deepcopy(encoder).cpu().eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    try:
        with quiet("torch.onnx"), torch.no_grad():
            interface = _Interface(_example(task) if shape is None else torch.zeros(shape), task.input.kind, outputs)
            raw = _run_exporter(chosen, frozen, interface, keep_norm=keep_norm)
    except (RuntimeError, ValueError, TypeError) as error:
        advice = "try exporter 'legacy'" if exporter == "auto" else "write it with operators that ONNX has"
        raise ExportRejected(f"encoder '{task.encoder}': the {chosen} exporter failed: {error}; {advice}") from error
    return Exported(strip_opsets(raw), chosen, _OPSET[chosen])


def _choose_exporter(exporter: Exporter | Literal["auto"]) -> Exporter:
    """Return the exporter that is used; ``auto`` is dynamo where its package is installed.

    Raises:
        MissingCapability: A package of the requested exporter is not installed.
    """
    needed = ["onnx"]
    if exporter == "dynamo":
        needed.append("onnxscript")
    for package in needed:
        if importlib.util.find_spec(package) is None:
            raise MissingCapability.package(package, "export", "exporting an encoder")
    if exporter != "auto":
        return exporter
    has_dynamo = importlib.util.find_spec("onnxscript") is not None
    return "dynamo" if has_dynamo else "legacy"


@dataclass(frozen=True)
class _Interface:
    """What goes into a graph and comes out: two inputs to trace it with, and the names of input and outputs."""

    example: torch.Tensor
    input_name: str
    outputs: Sequence[str]


def _run_exporter(exporter: Exporter, encoder: nn.Module, interface: _Interface, *, keep_norm: bool) -> bytes:
    """Return the graph that an exporter of torch makes of an encoder."""
    if exporter == "dynamo":
        return _run_dynamo(encoder, interface)
    return _run_legacy(encoder, interface, keep_norm=keep_norm)


def _example(task: Task) -> torch.Tensor:
    """Return inputs to trace an encoder with; the dynamo exporter would take a batch of one for a constant."""
    return torch.zeros(2, *task.input_shape)


def _run_dynamo(encoder: nn.Module, interface: _Interface) -> bytes:
    """Return the graph that torch's dynamo exporter makes of an encoder."""
    program: Any = torch.onnx.export(
        encoder,
        (interface.example,),
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        external_data=False,
        verbose=False,
        input_names=[interface.input_name],
        output_names=[*interface.outputs],
        opset_version=_OPSET["dynamo"],
    )
    return bytes(program.model_proto.SerializeToString())


def _run_legacy(encoder: nn.Module, interface: _Interface, *, keep_norm: bool) -> bytes:
    """Return the graph that torch's older exporter makes of an encoder, with batch norm as nodes if they are kept."""
    settings: dict[str, Any] = {}
    if keep_norm:
        settings["training"] = torch.onnx.TrainingMode.PRESERVE
    buffer = io.BytesIO()
    torch.onnx.export(
        encoder,
        (interface.example,),
        buffer,  # type: ignore[arg-type]  # the annotation of the file knows paths only; both work
        dynamo=False,
        dynamic_axes={name: {0: "batch"} for name in (interface.input_name, *interface.outputs)},
        input_names=[interface.input_name],
        output_names=[*interface.outputs],
        opset_version=_OPSET["legacy"],
        **settings,
    )
    return buffer.getvalue()


def strip_opsets(model: bytes) -> bytes:
    """Return the graph without imports of operator sets that no node uses, which strict consumers refuse."""
    import onnx

    graph = onnx.load_from_string(model)
    # The domain "" and "ai.onnx" both mean ONNX's own operators.
    domains = {node.domain for node in graph.graph.node} | {"", "ai.onnx"}
    imports = [entry for entry in graph.opset_import if entry.domain in domains]
    del graph.opset_import[:]
    graph.opset_import.extend(imports)
    # Traces hold source paths of the machine that exported: they tell devices nothing and differ between machines.
    for node in graph.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    for value in (*graph.graph.value_info, *graph.graph.input, *graph.graph.output):
        del value.metadata_props[:]
    return bytes(graph.SerializeToString(deterministic=True))


@contextmanager
def quiet(logger_name: str | None) -> Iterator[None]:
    """Silence what exporters log and warn about their own internals; the checks afterwards decide."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
