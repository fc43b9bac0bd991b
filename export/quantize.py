"""An int8 variant of an ONNX encoder: static, QDQ, per channel, unsigned activations and signed weights (U8S8).

Weights use 7 of their 8 bits, -64..64. x86-64 without VNNI adds two products of an activation and a weight in 16 bits
with saturation: 2 * 255 * 127 = 64,770 is above the 32,767 that fit, 2 * 255 * 64 = 32,640 is not. So no processor can
saturate, and x86-64 with and without VNNI and ARM compute the same sums. Signed activations gave other bits on ARM;
dynamic quantization is several times slower than fp32 on convolutions. Neither is offered.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.encoder import onnxruntime

from .encoder import strip_opsets

MIN_COSINE = 0.99
"""Lowest mean cosine between int8 and fp32 features; the encoders that were measured have 0.994 and more."""

MAX_WEIGHT = 64
"""Largest absolute int8 weight: two products with unsigned 8-bit activations fit into 16 bits."""


def to_int8(model: bytes, inputs: np.ndarray, batch: int = 16) -> bytes:
    """The quantized graph, with ranges observed on calibration ``inputs`` (n, ...) float32; 128 of them suffice."""
    onnxruntime()  # first, so that telemetry is off before the package below is imported
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder, _quiet():
        source, prepared, result = (Path(folder) / name for name in ("fp32.onnx", "prepared.onnx", "int8.onnx"))
        source.write_bytes(model)
        quant_pre_process(str(source), str(prepared))
        quantize_static(
            str(prepared),
            str(result),
            _reader(model, inputs, batch),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return strip_opsets(result.read_bytes())


def largest_weight(model: bytes) -> int:
    """Largest absolute value among the int8 weights of a quantized graph; 0 where it has none."""
    import onnx

    weights = [tensor for tensor in onnx.load_from_string(model).graph.initializer if tensor.data_type == 3]
    return max(
        (int(np.abs(onnx.numpy_helper.to_array(one).astype(np.int64)).max(initial=0)) for one in weights), default=0
    )


def _reader(model: bytes, inputs: np.ndarray, batch: int) -> Any:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader

    name = onnx.load_from_string(model).graph.input[0].name

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # untyped base
        """Calibration inputs, a batch at a time."""

        def __init__(self) -> None:
            self.pieces = iter([{name: inputs[i : i + batch]} for i in range(0, len(inputs), batch)])

        def get_next(self) -> dict[str, np.ndarray] | None:
            """The next batch, or None at the end."""
            return next(self.pieces, None)

    return Reader()


@contextmanager
def _quiet() -> Iterator[None]:
    """The quantizer logs advice to the root logger; we follow it already."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
