"""ONNX Runtime as the exporter uses it: a graph from memory, one thread. Imported where the devices import it."""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_agent.encoder import onnxruntime


def run(model: bytes, inputs: np.ndarray, batch: int = 64) -> np.ndarray:
    """Features (n, d) float32 that ONNX Runtime computes on one thread, ``batch`` inputs at a time."""
    session = _session(model)
    name = session.get_inputs()[0].name
    pieces = [session.run(None, {name: inputs[i : i + batch]})[0] for i in range(0, len(inputs), batch)]
    return np.concatenate(pieces)


def _session(model: bytes) -> Any:
    module = onnxruntime()
    options = module.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return module.InferenceSession(model, options, providers=["CPUExecutionProvider"])
