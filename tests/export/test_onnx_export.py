from __future__ import annotations

import copy
import importlib.util

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from edge_agent import models
from edge_agent.bundle import graph_check
from edge_agent.core.errors import ExportRejected, MissingCapability
from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.training.parts import encoder_and_head
from export import encoder as export_encoder
from export.encoder import strip_opsets, to_onnx
from export.parity import run

GREY = ImageInput(channels=1, height=28, width=28)
COLOUR = ImageInput()
WINDOW = WindowInput(channels=3, length=40)
TEXT = WindowInput(channels=1, length=80, stride=1)


def operators(model: bytes) -> list[str]:
    return [node.op_type for node in onnx.load_from_string(model).graph.node]


@pytest.mark.parametrize("exporter", ["legacy", "dynamo"])
def test_both_exporters_agree_with_torch_on_any_batch_size(exporter, request, encoder, images):
    exported = request.getfixturevalue(exporter)
    with torch.no_grad():
        expected = copy.deepcopy(encoder).eval()(torch.from_numpy(images)).numpy()
    for size in (1, 2, 7, 40):
        np.testing.assert_allclose(run(exported.model, images[:size]), expected[:size], atol=2e-5)
    assert exported.exporter == exporter
    assert exported.opset == {"legacy": 17, "dynamo": 18}[exporter]


def test_batch_norm_after_a_linear_layer_is_folded_or_left_in_inference_mode(legacy, dynamo):
    assert "BatchNormalization" not in operators(dynamo.model)
    (left,) = [n for n in onnx.load_from_string(legacy.model).graph.node if n.op_type == "BatchNormalization"]
    assert [a.i for a in left.attribute if a.name == "training_mode"] in ([], [0])


def test_dropout_is_not_exported(legacy, dynamo):
    assert "Dropout" not in operators(legacy.model) + operators(dynamo.model)


def test_the_graph_has_one_input_named_by_its_kind_and_one_output(legacy, dynamo):
    for exported in (legacy, dynamo):
        graph = onnx.load_from_string(exported.model).graph
        assert [value.name for value in graph.input] == ["image"]
        assert [value.name for value in graph.output] == ["features"]


@pytest.mark.parametrize(
    "name, spec",
    [
        ("small_cnn", GREY),
        ("fedpac_cnn", COLOUR),
        ("cnn1d", WINDOW),
        ("char_cnn", TEXT),
        ("char_lstm", TEXT),
        ("linear", WINDOW),
    ],
)
def test_our_encoders_export(name, spec):
    task = Task(input=spec, class_names=("a", "b"), encoder=name)
    torch.manual_seed(1)
    model = encoder_and_head(task)
    exported = to_onnx(model.encoder, task, "legacy")
    inputs = np.random.default_rng(0).normal(size=(5, *spec.shape)).astype(np.float32)
    with torch.no_grad():
        expected = model.eval().features(torch.from_numpy(inputs)).numpy()
    np.testing.assert_allclose(run(exported.model, inputs), expected, atol=1e-5)
    assert onnx.load_from_string(exported.model).graph.input[0].name == spec.kind


@pytest.mark.parametrize("name", ["char_cnn", "char_lstm"])
def test_encoders_of_texts_export_by_default_into_graphs_that_devices_run(name):
    """Their inputs are positions of characters, and others are those of the nearest one, as in torch."""
    task = Task(input=WindowInput(channels=1, length=12, stride=1), class_names=("a", "b"), encoder=name)
    torch.manual_seed(1)
    encoder = models.create(task).eval()
    exported = to_onnx(encoder, task)
    assert exported.exporter == "dynamo"
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 80, (33, 1, 12)).astype(np.float32)
    texts[0] = rng.normal(0, 60, (1, 12))
    for size in (1, 33):
        with torch.no_grad():
            expected = encoder(torch.from_numpy(texts[:size])).numpy()
        np.testing.assert_allclose(run(exported.model, texts[:size]), expected, atol=1e-5)
    cost = graph_check.check(exported.model, [(8, 1, 12)])
    assert cost.outputs == ((8, 256),)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "efficientnet_b0", "vit"])
def test_large_networks_export(name):
    params = {"patch": 8} if name == "vit" else {}
    task = Task(input=COLOUR, class_names=("a", "b"), encoder=name, encoder_params=params)
    torch.manual_seed(1)
    encoder = models.create(task)
    inputs = np.random.default_rng(0).normal(size=(4, *COLOUR.shape)).astype(np.float32)
    encoder.train()(torch.from_numpy(inputs))
    for exporter in ("legacy", "auto"):
        exported = to_onnx(encoder, task, exporter)
        with torch.no_grad():
            expected = copy.deepcopy(encoder).eval()(torch.from_numpy(inputs)).numpy()
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(run(exported.model, inputs), expected, atol=1e-4 * scale)


def test_exporting_leaves_the_module_as_it_was(task):
    torch.manual_seed(0)
    encoder = models.create(task).train()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    to_onnx(encoder, task, "legacy")
    assert encoder.training
    assert all(module.training for module in encoder.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())


def test_the_same_encoder_gives_the_same_bytes(encoder, task, legacy):
    assert to_onnx(encoder, task, "legacy").model == legacy.model


def test_the_graph_tells_nothing_about_the_machine_that_exported(legacy, dynamo):
    for exported in (legacy, dynamo):
        assert b".py" not in exported.model
        assert b"/edge_agent" not in exported.model


def test_imports_of_unused_operator_sets_are_stripped():
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["image"], ["features"])],
        "g",
        [onnx.helper.make_tensor_value_info("image", 1, ["n", 2])],
        [onnx.helper.make_tensor_value_info("features", 1, ["n", 2])],
    )
    imports = [onnx.helper.make_opsetid(*entry) for entry in (("", 17), ("ai.onnx.ml", 3), ("com.microsoft", 1))]
    stripped = onnx.load_from_string(
        strip_opsets(onnx.helper.make_model(graph, opset_imports=imports).SerializeToString())
    )
    assert [(entry.domain, entry.version) for entry in stripped.opset_import] == [("", 17)]


def test_an_encoder_that_onnx_cannot_express_is_rejected(task):
    class Untranslatable(nn.Module):
        def forward(self, inputs):
            return torch.linalg.eigvals(inputs[:, 0]).real

    with pytest.raises(ExportRejected, match=r"'small_cnn': the legacy exporter failed.*operators that ONNX has"):
        to_onnx(Untranslatable(), task, "legacy")


def test_without_onnxscript_the_legacy_exporter_is_taken(monkeypatch, encoder, task):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        export_encoder.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else real(name)
    )
    assert to_onnx(encoder, task).exporter == "legacy"
    with pytest.raises(MissingCapability, match=r"'onnxscript'.*\[export\]'"):
        to_onnx(encoder, task, "dynamo")


def test_without_onnx_the_extra_is_named(monkeypatch, encoder, task):
    monkeypatch.setattr(export_encoder.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingCapability, match=r"\[export\]'"):
        to_onnx(encoder, task)
