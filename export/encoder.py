"""A trained encoder as an ONNX graph: one float input, one output ``features``, any batch size."""

from __future__ import annotations

import copy
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from edge_agent.core.errors import ExportRejected, MissingCapability
from edge_agent.core.task import Task

Exporter = Literal["dynamo", "legacy"]
_OPSET: dict[Exporter, int] = {"dynamo": 18, "legacy": 17}


@dataclass(frozen=True)
class Exported:
    """An ONNX graph as bytes, and how it was made."""

    model: bytes
    exporter: Exporter
    opset: int


def to_onnx(
    encoder: nn.Module, task: Task, exporter: Exporter | Literal["auto"] = "auto", *, keep_norm: bool = False
) -> Exported:
    """Return the encoder in eval mode as ONNX; the given module is left as it is.

    ``auto`` takes torch's dynamo exporter where onnxscript is installed: it also folds batch norm after linear layers.
    With ``keep_norm`` the legacy one leaves batch norm as nodes of their own instead of folding it into convolutions.

    Raises:
        MissingCapability: The package onnx is not installed, or onnxscript is not and ``dynamo`` is requested.
        ExportRejected: The exporter cannot translate this encoder.
    """
    for package in ("onnx", *(("onnxscript",) if exporter == "dynamo" else ())):
        if importlib.util.find_spec(package) is None:
            raise MissingCapability.package(package, "export", "exporting an encoder")
    has_dynamo = importlib.util.find_spec("onnxscript") is not None
    chosen: Exporter = exporter if exporter != "auto" else ("dynamo" if has_dynamo else "legacy")
    frozen = copy.deepcopy(encoder).cpu().eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    # Not 1: the dynamo exporter would take a batch of one for a constant.
    example = torch.zeros(2, *task.input_shape)
    settings: dict[str, Any] = {
        "input_names": [task.input.kind],
        "output_names": ["features"],
        "opset_version": _OPSET[chosen],
    }
    try:
        with quiet("torch.onnx"), torch.no_grad():
            if chosen == "dynamo":
                shapes = ({0: torch.export.Dim("batch")},)
                program: Any = torch.onnx.export(
                    frozen,
                    (example,),
                    dynamo=True,
                    dynamic_shapes=shapes,
                    external_data=False,
                    verbose=False,
                    **settings,
                )
                raw = program.model_proto.SerializeToString()
            else:
                buffer = io.BytesIO()
                axes = {name: {0: "batch"} for name in (task.input.kind, "features")}
                if keep_norm:
                    settings["training"] = torch.onnx.TrainingMode.PRESERVE
                # The annotation of the file knows paths only; both work.
                torch.onnx.export(frozen, (example,), buffer, dynamo=False, dynamic_axes=axes, **settings)  # type: ignore[arg-type]
                raw = buffer.getvalue()
    except (RuntimeError, ValueError, TypeError) as error:
        advice = "write it with operators that ONNX has" if exporter != "auto" else "try exporter 'legacy'"
        raise ExportRejected(f"encoder '{task.encoder}': the {chosen} exporter failed: {error}; {advice}") from error
    return Exported(strip_opsets(raw), chosen, _OPSET[chosen])


def strip_opsets(model: bytes) -> bytes:
    """Return the graph without imports of operator sets that no node uses, which strict consumers refuse."""
    import onnx

    graph = onnx.load_from_string(model)
    used = {node.domain for node in graph.graph.node} | {""}
    kept = [entry for entry in graph.opset_import if entry.domain in used or entry.domain == "ai.onnx"]
    del graph.opset_import[:]
    graph.opset_import.extend(kept)
    # Traces hold source paths of the machine that exported: they tell devices nothing and differ between machines.
    for node in graph.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    for value in (*graph.graph.value_info, *graph.graph.input, *graph.graph.output):
        del value.metadata_props[:]
    return bytes(graph.SerializeToString(deterministic=True))


@contextmanager
def quiet(logger_name: str | None) -> Iterator[None]:
    """Without what exporters log and warn about their own internals; the checks afterwards decide."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
