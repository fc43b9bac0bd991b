from __future__ import annotations

import logging

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from export.quantize import to_int8
from export.runtime import run


@pytest.fixture(scope="module")
def int8(legacy, images) -> bytes:
    return to_int8(legacy.model, images)


def test_features_keep_their_direction(int8, legacy, images):
    fresh = np.random.default_rng(8).normal(size=(30, 1, 8, 8)).astype(np.float32)
    exact, rough = run(legacy.model, fresh), run(int8, fresh)
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
    assert b"/tmp" not in int8


def test_the_quantizer_is_quiet_and_logging_works_afterwards(legacy, images, caplog):
    with caplog.at_level(logging.INFO):
        to_int8(legacy.model, images[:4])
        logging.getLogger("after").info("still here")
    assert [record.message for record in caplog.records] == ["still here"]
