from __future__ import annotations

import logging
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnxruntime import quantization

from export.parity import mean_cosine, run
from export.quantize import MAX_WEIGHT, Quantizer, largest_weight


def to_int8(model: bytes, inputs: np.ndarray) -> bytes:
    quantizer = Quantizer(model)
    return quantizer.int8(quantizer.ranges(inputs))


@pytest.fixture(scope="module")
def int8(legacy, images) -> bytes:
    return to_int8(legacy.model, images)


def test_features_keep_their_direction(int8, legacy, images):
    fresh = np.random.default_rng(8).normal(size=(30, 1, 8, 8)).astype(np.float32)
    exact = run(legacy.model, fresh)
    rough = run(int8, fresh)
    cosines = (exact * rough).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(rough, axis=1)
    assert cosines.mean() > 0.99
    assert not np.array_equal(exact, rough)


def test_activations_are_unsigned_and_weights_are_signed(int8):
    graph = onnx.load_from_string(int8).graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    quantize = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    assert quantize
    assert {kinds[node.input[2]] for node in quantize} == {TensorProto.UINT8}
    weights = [node.input[0] for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in kinds]
    assert TensorProto.INT8 in {kinds[name] for name in weights}
    assert TensorProto.UINT8 not in {kinds[name] for name in weights}


def test_two_products_of_any_activation_and_any_weight_fit_into_16_bits(int8):
    """x86-64 without VNNI adds them there with saturation; 255 is the largest activation."""
    weights = [onnx.numpy_helper.to_array(t) for t in onnx.load_from_string(int8).graph.initializer if t.data_type == 3]
    largest = max(int(np.abs(one.astype(int)).max()) for one in weights)
    assert largest == largest_weight(int8) == MAX_WEIGHT
    assert 2 * 255 * largest <= np.iinfo(np.int16).max
    assert 2 * 255 * (largest + 1) > np.iinfo(np.int16).max


ON_ANOTHER_PROCESSOR = """
import sys, numpy as np
from export.parity import run
from pathlib import Path
folder = Path(sys.argv[1])
inputs = np.load(folder / "inputs.npy")
for name in ("seven", "eight"):
    np.save(folder / f"{name}.npy", run((folder / f"{name}.onnx").read_bytes(), inputs))
"""


@pytest.mark.slow
def test_a_processor_without_vnni_computes_the_same_bits(int8, legacy, images, tmp_path, monkeypatch):
    """Haswell, emulated: AVX2 and no VNNI. With 8-bit weights it saturates, which shows that the emulation does."""
    emulator = shutil.which("qemu-x86_64")
    if emulator is None or platform.machine() != "x86_64":
        pytest.skip("no qemu-x86_64 here (package qemu-user), or not an x86-64 machine")
    real = quantization.QDQQuantizer
    monkeypatch.setattr(
        quantization, "QDQQuantizer", lambda model, channels, _, *more: real(model, channels, False, *more)
    )
    fresh = np.random.default_rng(8).normal(size=(30, 1, 8, 8)).astype(np.float32)
    np.save(tmp_path / "inputs.npy", fresh)
    (tmp_path / "seven.onnx").write_bytes(int8)
    (tmp_path / "eight.onnx").write_bytes(to_int8(legacy.model, images))
    words = [emulator, "-cpu", "Haswell", sys.executable, "-c", ON_ANOTHER_PROCESSOR, str(tmp_path)]
    subprocess.run(words, check=True, capture_output=True, timeout=300, cwd=Path(__file__).parents[2])
    exact = run(legacy.model, fresh)
    there = {name: np.load(tmp_path / f"{name}.npy") for name in ("seven", "eight")}
    np.testing.assert_allclose(
        there["seven"], run(int8, fresh), rtol=1e-5, atol=1e-6
    )  # the sums are equal, floats follow
    assert mean_cosine(there["seven"], exact) > 0.998
    assert mean_cosine(there["eight"], exact) < 0.99


def test_each_output_channel_has_its_own_scale(int8):
    graph = onnx.load_from_string(int8).graph
    sizes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    scales = [
        sizes[node.input[1]]
        for node in graph.node
        if node.op_type == "DequantizeLinear" and kinds.get(node.input[0]) == TensorProto.INT8
    ]
    assert [4] in scales  # the convolution's four channels


def test_the_same_inputs_give_the_same_bytes(int8, legacy, images):
    assert to_int8(legacy.model, images) == int8


def test_no_unused_operator_sets_and_no_machine_paths_remain(int8):
    model = onnx.load_from_string(int8)
    used = {node.domain for node in model.graph.node} | {""}
    assert {entry.domain for entry in model.opset_import} <= used
    assert tempfile.gettempdir().encode() not in int8


def test_the_quantizer_is_quiet_and_logging_works_afterwards(legacy, images, caplog):
    with caplog.at_level(logging.INFO):
        to_int8(legacy.model, images[:4])
        logging.getLogger("after").info("still here")
    assert [record.message for record in caplog.records] == ["still here"]
