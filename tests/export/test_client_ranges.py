"""Activation ranges that clients compute in torch, and what the exporter makes of them for its ONNX graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from edge_agent import methods
from edge_agent.bundle.archive import open_bundle
from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.data import Samples
from edge_agent.training.parts import encoder_and_head
from edge_agent.training.ranges import activation_ranges
from export import BundleOptions, Calibration, TrainedEncoder, build_bundle, synthetic_inputs
from export.encoder import to_onnx
from export.parity import mean_cosine, run
from export.quantize import Quantizer, merge_ranges, ranges_of_clients

ENCODERS = ["linear", "small_cnn", "fedpac_cnn", "fedrir_cnn", "cnn1d"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("resnet18", "mobilenet_v2", "mobilenet_v3_small")]


def made(name):
    spec = WindowInput(channels=3, length=32) if name == "cnn1d" else ImageInput(channels=3, height=32, width=32)
    task = Task(input=spec, class_names=("a", "b"), encoder=name)
    torch.manual_seed(0)
    model = encoder_and_head(task)
    with torch.no_grad():  # running statistics that are not those of the start
        model.train()(torch.from_numpy(synthetic_inputs(task, 16)))
    return task, model.eval()


@pytest.fixture(scope="module")
def small():
    return made("small_cnn")


def test_ranges_of_a_layer_worked_out_by_hand():
    """x = (1, -2), (3, 0) through y = 2 x0 - x1 + 1, then ReLU of -y: y is 5 and 7."""
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[2.0, -1.0]]))
        layer.bias.fill_(1.0)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, inputs):
            return torch.relu(-self.layer(inputs))

    found = activation_ranges(Encoder(), torch.tensor([[1.0, -2.0], [3.0, 0.0]]))
    assert found.dtype == np.float32
    assert found.tolist() == [[-2, 3], [5, 7], [-7, -5], [0, 0]]


@pytest.mark.parametrize("name", [*ENCODERS, *SLOW])
def test_ranges_in_torch_are_those_that_onnx_runtime_observes(name):
    """On the same inputs, for every tensor of the graph; the exporter has only seen others."""
    task, model = made(name)
    quantizer = Quantizer(to_onnx(model.encoder, task, "legacy").model)
    own = 2 * synthetic_inputs(task, 40, seed=7) + 1
    ranges = activation_ranges(model.encoder, torch.from_numpy(own))
    found = ranges_of_clients(quantizer, model.encoder, synthetic_inputs(task, 8), {"a": ranges})["a"]
    expected = quantizer.ranges(own)
    assert found.keys() == expected.keys()
    for tensor, ends in expected.items():
        if tensor not in quantizer.shares:
            assert found[tensor] == pytest.approx(ends, rel=1e-3, abs=1e-4)


def test_more_samples_than_are_looked_at_are_spread_evenly(small):
    _, model = small
    inputs = torch.zeros(1000, 3, 32, 32)
    inputs[0] = -5
    inputs[999] = 7
    assert activation_ranges(model.encoder, inputs)[0].tolist() == [-5, 7]


def test_the_model_is_left_as_it_was(small):
    _, model = small
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    activation_ranges(model.encoder, torch.randn(20, 3, 32, 32))
    assert model.encoder.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model.eval()


def test_ranges_of_another_encoder_are_not_used(small):
    task, model = small
    quantizer = Quantizer(to_onnx(model.encoder, task, "legacy").model)
    inputs = synthetic_inputs(task, 8)
    right = activation_ranges(model.encoder, torch.from_numpy(inputs))
    found = ranges_of_clients(quantizer, model.encoder, inputs, {"right": right, "short": right[:-1]})
    assert [*found] == ["right"]
    other = encoder_and_head(task).eval()
    assert ranges_of_clients(quantizer, other.encoder, inputs, {"right": right}) == {}


def test_a_liar_among_four_clients_costs_nothing(small):
    """One claims activations of a billion: its ranges alone ruin the features, among three others they do not count."""
    task, model = small
    quantizer = Quantizer(fp32 := to_onnx(model.encoder, task, "legacy").model)
    samples = synthetic_inputs(task, 160, seed=3)
    each = {str(number): activation_ranges(model.encoder, torch.from_numpy(samples[number::4])) for number in range(3)}
    liar = np.tile(np.array([-1e9, 1e9], np.float32), (len(each["0"]), 1))
    found = ranges_of_clients(quantizer, model.encoder, samples, {**each, "liar": liar})
    features = run(fp32, samples)
    assert mean_cosine(run(quantizer.int8(merge_ranges([*found.values()])), samples), features) > 0.99
    assert mean_cosine(run(quantizer.int8(found["liar"]), samples), features) < 0.9


def test_a_bundle_without_data_takes_the_ranges_of_clients(small, tmp_path):
    """Clients' inputs are ten times as large as the exporter's random ones, whose ranges would cut them off."""
    task, model = small
    samples = 10 * synthetic_inputs(task, 90, seed=5)
    each = {str(n): activation_ranges(model.encoder, torch.from_numpy(samples[n::3])) for n in range(3)}
    features = []
    for name, given in (("with", each), ("without", None)):
        report = build_bundle(
            TrainedEncoder(model, methods.create("fedavg"), task),
            Calibration.from_inputs(synthetic_inputs(task), given),
            tmp_path / f"{name}.hwb",
            BundleOptions(name, exporter="legacy"),
        )
        opened = open_bundle(report.path)
        features.append([run(opened.read(file), samples) for file in ("encoder.onnx", "encoder.int8.onnx")])
        origin = "activation ranges of 3 client(s)" if given else "128 inputs without labels"
        assert opened.manifest.quantization.ranges == origin
        assert "not measured" in opened.manifest.quantization.note
        assert (opened.manifest.parity.int8_cosine is None) == bool(given)  # random inputs say nothing of clients'
    (exact, with_clients), (_, without) = features
    errors = [np.linalg.norm(one - exact) / np.linalg.norm(exact) for one in (with_clients, without)]
    assert errors[0] < 0.05
    assert errors[1] > 0.5


def test_what_is_stated_of_int8_is_of_the_variant_in_the_bundle(small, tmp_path):
    """All clients are wrong and outvote the domain, whose inputs show that their ranges ruin the features."""
    task, model = small
    inputs = synthetic_inputs(task, 40, seed=3)
    labels = np.arange(40) % 2
    liar = np.tile(
        np.array([-1e9, 1e9], np.float32), (len(activation_ranges(model.encoder, torch.zeros(1, 3, 32, 32))), 1)
    )
    domains = {"hall": Samples(inputs, labels, task.class_names, task.input)}
    report = build_bundle(
        TrainedEncoder(model, methods.create("fedavg"), task),
        Calibration.from_domains(domains, dict.fromkeys("abc", liar)),
        tmp_path / "x.hwb",
        BundleOptions("x", exporter="legacy"),
    )
    assert "int8" not in report.manifest.variants
    assert report.int8_note.startswith("left out: mean cosine")


@pytest.mark.parametrize("count, with_domain", [(1, True), (2, True), (2, False)])
def test_ranges_of_fewer_than_three_clients_are_left_out(small, tmp_path, count, with_domain):
    """One of them may claim anything: the bundle is then the one that is made without clients, and says why."""
    task, model = small
    inputs = synthetic_inputs(task, 40, seed=3)
    liar = np.tile(
        np.array([-1e9, 1e9], np.float32), (len(activation_ranges(model.encoder, torch.zeros(1, 3, 32, 32))), 1)
    )
    given = {"liar": liar} | (
        {"other": activation_ranges(model.encoder, torch.from_numpy(inputs))} if count > 1 else {}
    )
    if with_domain:
        hall = Samples(inputs, np.arange(40) % 2, task.class_names, task.input)
        calibrations = [Calibration.from_domains({"hall": hall}, ranges) for ranges in (given, {})]
    else:
        calibrations = [Calibration.from_inputs(inputs, ranges) for ranges in (given, {})]
    trained = TrainedEncoder(model, methods.create("fedavg"), task)
    options = BundleOptions("x", exporter="legacy")
    made = [
        build_bundle(trained, calibration, tmp_path / f"{number}.hwb", options).manifest
        for number, calibration in enumerate(calibrations)
    ]
    assert made[0].variants["int8"] == made[1].variants["int8"]
    assert made[0].parity == made[1].parity
    reason = f"; ranges of {count} client(s) left out: one in 3 can be outvoted"
    assert made[0].quantization.ranges == made[1].quantization.ranges + reason
