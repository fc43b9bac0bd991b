"""From somebody else's ONNX file to a bundle, and what a device does with it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from foreign_networks import SmallResNet, seeded, torchvision_export

from edge_agent import Personalizer
from edge_agent.bundle.archive import open_bundle
from edge_agent.core.task import ImageInput
from edge_agent.heads.saved import load as load_head
from export.foreign import ForeignSettings, bundle_network

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    settings = ForeignSettings(mean=MEAN, std=STD)
    return bundle_network(str(torchvision_export(folder)), folder / "resnet.hwb", settings)


@pytest.fixture(scope="module")
def photos():
    """Pictures of two kinds, bright above or bright below, as pixels."""
    rng = np.random.default_rng(1)
    pictures = rng.integers(0, 100, (40, 40, 48, 3), dtype=np.uint8)
    pictures[:20, :20] += 100
    pictures[20:, 20:] += 100
    return pictures, np.array(["above"] * 20 + ["below"] * 20)


def test_the_features_are_what_goes_into_the_last_layer(made):
    assert made.point.reason.startswith("the input of the classifier")
    manifest = open_bundle(made.report.path).manifest
    assert (manifest.feature_dim, manifest.method, manifest.exporter, manifest.schema_version) == (
        16,
        "none",
        "file",
        4,
    )
    assert manifest.task.class_names == ()
    assert manifest.task.input == ImageInput(height=32, width=32, mean=MEAN, std=STD)


def test_a_device_computes_the_features_that_torch_does(made, photos):
    """Pixels are prepared by hand here, and the features are those of the network in torch without its last layer."""
    personalizer = Personalizer.open(made.report.path)
    network = seeded(SmallResNet())
    network.fc = torch.nn.Identity()
    pictures = photos[0][:3, :32, :32]
    prepared = (pictures / 255 - np.array(MEAN)) / np.array(STD)
    with torch.no_grad():
        expected = network(torch.from_numpy(prepared.transpose(0, 3, 1, 2).astype(np.float32))).numpy()
    features = personalizer.encoder.features(prepared.transpose(0, 3, 1, 2).astype(np.float32))
    assert np.allclose(features, expected, atol=1e-5)
    assert np.abs(expected).max() > 0.1


def test_heads_have_the_classes_of_the_devices_data(made, photos, tmp_path):
    pictures, names = photos
    personalizer = Personalizer.open(made.report.path).fit(pictures[::2], names[::2])
    assert personalizer.classes == ("above", "below")
    assert (personalizer.predict(pictures[1::2]) == names[1::2]).all()
    personalizer.save(tmp_path / "head")
    assert load_head(tmp_path / "head").class_names == ("above", "below")


def test_the_same_file_gives_the_same_bundle(made, tmp_path):
    again = bundle_network(
        str(torchvision_export(tmp_path)), tmp_path / "again.hwb", ForeignSettings(mean=MEAN, std=STD)
    )
    assert again.report.manifest.bundle_id == made.report.manifest.bundle_id


def test_the_graph_has_neither_the_classifier_nor_notes_of_the_exporter(made, tmp_path):
    (tmp_path / "encoder.onnx").write_bytes(open_bundle(made.report.path).read("encoder.onnx"))
    graph = onnx.load(tmp_path / "encoder.onnx").graph
    assert "Gemm" not in {node.op_type for node in graph.node}
    assert not any("fc." in constant.name for constant in graph.initializer)
    assert [value.name for value in (*graph.input, *graph.output)] == ["image", "features"]
