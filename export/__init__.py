"""From a trained encoder to a bundle for devices: ONNX, int8, parity gates, manifest."""

from __future__ import annotations

from .bundle import Report, export_bundle, model_from_state, synthetic_inputs
from .parity import Gate

__all__ = ["Gate", "Report", "export_bundle", "model_from_state", "synthetic_inputs"]
