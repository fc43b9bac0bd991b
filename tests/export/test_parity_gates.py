from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from edge_agent.core.task import Task, WindowInput
from export.parity import OPERATORS, graph_gates, mean_cosine, parity_gate

TASK = Task(input=WindowInput(channels=2, length=4), class_names=("a", "b"), encoder="linear")
GOOD_INPUT = helper.make_tensor_value_info("window", TensorProto.FLOAT, ["n", 2, 4])
GOOD_OUTPUT = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", 8])


def graph_of(nodes=None, inputs=None, outputs=None, weights=(), *, ir=8, opset=17, domains=()) -> bytes:
    graph = helper.make_graph(
        nodes or [helper.make_node("Flatten", ["window"], ["features"])],
        "g",
        inputs or [GOOD_INPUT],
        outputs or [GOOD_OUTPUT],
        list(weights),
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    model = helper.make_model(graph, opset_imports=imports)
    model.ir_version = ir
    return model.SerializeToString()


def failed(model: bytes) -> dict[str, str]:
    return {gate.name: gate.detail for gate in graph_gates(model, TASK) if not gate.passed}


def test_a_plain_graph_passes_every_gate():
    gates = graph_gates(graph_of(), TASK)
    assert [gate.name for gate in gates] == ["valid", "interface", "operators", "frozen", "self-contained", "budget"]
    assert all(gate.passed for gate in gates)


@pytest.mark.parametrize("junk", [b"", b"\x00" * 50, b"not an onnx file at all"])
def test_bytes_that_are_no_graph_fail(junk):
    assert "valid" in failed(junk)


def test_a_graph_that_the_checker_refuses_fails():
    dangling = [helper.make_node("Relu", ["nowhere"], ["features"])]
    assert "nowhere" in failed(graph_of(dangling))["valid"]


@pytest.mark.parametrize(
    "changes, complaint",
    [
        (
            {"inputs": [GOOD_INPUT, helper.make_tensor_value_info("more", TensorProto.FLOAT, ["n", 1])]},
            "2 inputs and 1 outputs",
        ),
        (
            {
                "nodes": [
                    helper.make_node("Flatten", ["window"], ["features"]),
                    helper.make_node("Relu", ["features"], ["more"]),
                ],
                "outputs": [GOOD_OUTPUT, helper.make_tensor_value_info("more", TensorProto.FLOAT, ["n", 8])],
            },
            "1 inputs and 2 outputs",
        ),
        (
            {
                "inputs": [helper.make_tensor_value_info("window", TensorProto.DOUBLE, ["n", 2, 4])],
                "outputs": [helper.make_tensor_value_info("features", TensorProto.DOUBLE, ["n", 8])],
            },
            "element type 11, expected 1",
        ),
        (
            {
                "inputs": [helper.make_tensor_value_info("window", TensorProto.FLOAT, [1, 2, 4])],
                "outputs": [helper.make_tensor_value_info("features", TensorProto.FLOAT, [1, 8])],
            },
            "expected any batch size",
        ),
        (
            {
                "inputs": [helper.make_tensor_value_info("window", TensorProto.FLOAT, ["n", 2, 5])],
                "outputs": [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", 10])],
            },
            "expected [None, 2, 4]",
        ),
        (
            {
                "nodes": [helper.make_node("Relu", ["window"], ["features"])],
                "outputs": [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", 2, 4])],
            },
            "has 3 axes, expected 2",
        ),
    ],
)
def test_another_interface_fails(changes, complaint):
    found = failed(graph_of(**changes))
    assert complaint in found["interface"]


@pytest.mark.parametrize("operator", ["RandomNormalLike", "NonZero", "Bernoulli"])
def test_operators_beyond_the_list_fail(operator):
    nodes = [
        helper.make_node("Flatten", ["window"], ["flat"]),
        helper.make_node(operator, ["flat"], ["surprise"]),
        helper.make_node("Relu", ["flat"], ["features"]),
    ]
    assert operator in failed(graph_of(nodes))["operators"]
    assert operator not in OPERATORS


def test_operators_of_other_domains_fail_even_under_a_known_name():
    nodes = [
        helper.make_node("Relu", ["window"], ["foreign"], domain="com.example"),
        helper.make_node("Flatten", ["window"], ["features"]),
    ]
    assert "com.example.Relu" in failed(graph_of(nodes, domains=("com.example",)))["operators"]


def test_batch_norm_in_training_mode_fails(task):
    names = ("scale", "shift", "mean", "variance")
    weights = [numpy_helper.from_array(np.ones(2, np.float32), name) for name in names]
    nodes = [
        helper.make_node("BatchNormalization", ["window", *names], ["y", "m", "v"], training_mode=1),
        helper.make_node("Flatten", ["y"], ["features"]),
    ]
    assert "training mode" in failed(graph_of(nodes, weights=weights))["frozen"]


def test_dropout_left_in_the_graph_fails():
    nodes = [helper.make_node("Dropout", ["window"], ["y"]), helper.make_node("Flatten", ["y"], ["features"])]
    assert "dropout" in failed(graph_of(nodes))["frozen"]


def test_weights_in_another_file_fail(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.bin").write_bytes(bytes(32))
    outside = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[8], data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="secret.bin")
    nodes = [helper.make_node("Flatten", ["window"], ["y"]), helper.make_node("Add", ["y", "w"], ["features"])]
    assert failed(graph_of(nodes, weights=[outside])).keys() & {"valid", "self-contained"}


def test_a_graph_newer_than_devices_read_fails():
    assert "IR version 11" in failed(graph_of(ir=11))["self-contained"]


def test_local_functions_fail():
    model = onnx.load_from_string(graph_of(domains=("own",)))
    model.functions.append(
        helper.make_function("own", "Twice", ["x"], ["y"], [helper.make_node("Add", ["x", "x"], ["y"])],
                             [helper.make_opsetid("", 17)])
    )  # fmt: skip
    assert "1 local functions" in failed(model.SerializeToString())["self-contained"]


def test_parity_measures_the_difference_over_three_batch_sizes(encoder, legacy, images):
    gate, parity = parity_gate(legacy.model, encoder, images)
    assert gate.passed
    assert parity.batches == (1, 2, 7)
    assert parity.max_abs < 2e-5
    with torch.no_grad():
        largest = copy.deepcopy(encoder).eval()(torch.from_numpy(images[:7])).abs().max()
    assert parity.scale == pytest.approx(largest.item())
    assert encoder.training  # as it was


def test_parity_works_with_fewer_inputs_than_the_largest_batch(encoder, legacy, images):
    assert parity_gate(legacy.model, encoder, images[:3])[0].passed


def test_an_encoder_trained_on_after_the_export_fails_parity(encoder, legacy, images):
    changed = copy.deepcopy(encoder)
    with torch.no_grad():
        changed.last[2].weight[0, 0] += 0.01
    gate, parity = parity_gate(legacy.model, changed, images)
    assert not gate.passed
    assert parity.max_abs > 1e-4


def test_batch_norm_statistics_count_in_parity(encoder, legacy, images):
    changed = copy.deepcopy(encoder)
    changed.conv[1].running_mean += 0.1
    assert not parity_gate(legacy.model, changed, images)[0].passed


def test_another_feature_width_fails_parity(legacy, images):
    gate, _ = parity_gate(legacy.model, nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), images)
    assert not gate.passed
    assert "(1, 5)" in gate.detail


def test_features_that_are_not_numbers_fail_parity(encoder, legacy, images):
    broken = copy.deepcopy(encoder)
    with torch.no_grad():
        broken.last[2].bias[0] = torch.nan
    assert not parity_gate(legacy.model, broken, images)[0].passed


def test_mean_cosine_by_hand():
    one = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    other = np.array([[2.0, 0.0], [1.0, -1.0], [0.0, 0.0], [1.0, 0.0]])
    assert mean_cosine(one, other) == pytest.approx((1 + 0 + 1 + 0) / 4)
