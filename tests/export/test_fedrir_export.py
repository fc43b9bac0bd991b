"""A bundle of FedRIR holds the shared encoder; nothing of the generator, which could redraw somebody's images."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch

from edge_agent import methods
from edge_agent.bundle.installed import install
from edge_agent.core.task import ImageInput, Task
from edge_agent.heads import FitData, create
from edge_agent.personal.encoder import Encoder
from edge_agent.training.parts import norm_names, to_arrays
from export import BundleOptions, Calibration, TrainedEncoder, build_bundle, model_from_state, synthetic_inputs

TASK = Task(
    input=ImageInput(channels=1, height=8, width=8),
    class_names=("a", "b", "c"),
    encoder="fedrir_cnn",
    encoder_params={"feature_dim": 64},
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    method = methods.create("fedrir")
    folder = tmp_path_factory.mktemp("bundles")
    torch.manual_seed(0)
    trained = method.build(TASK).train()
    trained(torch.from_numpy(synthetic_inputs(TASK, 16)))  # running statistics that are not those of the start
    shared = method.shared_names(trained)
    state = to_arrays(trained, (*shared, *norm_names(trained, shared)))  # as after pooling
    model = model_from_state(method, TASK, state)
    report = build_bundle(
        TrainedEncoder(model, method, TASK),
        Calibration.from_inputs(synthetic_inputs(TASK, 16)),
        folder / "run.hwb",
        BundleOptions("run", created="2026-01-02T03:04:05+00:00", exporter="legacy", int8=False),
    )
    return SimpleNamespace(trained=trained, state=state, report=report, bundle=install(report.path, folder / "device"))


def test_the_state_holds_the_encoder_and_nothing_else(exported):
    assert {name.split(".")[0] for name in exported.state} == {"encoder"}


def test_the_graph_is_no_larger_than_the_encoder(exported):
    graph = onnx.load(str(exported.bundle.folder / exported.bundle.variant("fp32").file)).graph
    found = sum(math.prod(tensor.dims) for tensor in graph.initializer)
    limit = sum(tensor.numel() for tensor in exported.trained.part("encoder").state_dict().values())
    assert 0 < found <= limit
    assert limit < found + sum(weight.numel() for weight in exported.trained.part("generator").parameters())
    assert not [node for node in graph.node if node.op_type == "ConvTranspose"]


def test_no_file_of_the_bundle_could_hold_the_generator(exported):
    assert set(exported.report.manifest.files) == {"encoder.onnx", "golden.safetensors", "norm_probe.onnx"}


def test_a_device_gets_the_same_features_and_an_approximate_head(exported):
    card = exported.report.manifest.heads["fedrir_global"]
    assert card.exactness == "approximate"
    assert card.params == {"lr": 2e-3, "batch_size": 32}
    inputs = synthetic_inputs(TASK, 12, seed=5)
    features = Encoder.open(exported.bundle).features(inputs)
    with torch.no_grad():
        expected = exported.trained.eval().features(torch.from_numpy(inputs)).numpy()
    np.testing.assert_allclose(features, expected, atol=1e-4)
    head = create("fedrir_global", {**card.params, "epochs": 2})
    head.fit(FitData(features, np.arange(12) % 3, 3), np.random.default_rng(0))
    assert head.predict_proba(features).shape == (12, 3)
