"""The bundle that comes with the package: whole, what its network computes, and used where no other is named."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from PIL import Image, ImageDraw

import edge_agent
from edge_agent import Personalizer, models
from edge_agent.bundle.archive import open_bundle
from edge_agent.bundle.starter import bundle_path
from edge_agent.core.errors import MissingCapability, WeightsError
from edge_agent.core.task import EncoderTask, ImageInput
from edge_agent.personal.encoder import Encoder
from edge_agent.personal.personalizer import load_bundle
from edge_agent.training import bundle_weights
from edge_agent.training.parts import load_arrays
from edge_agent.training.weights import read_weights

SIDE = 64


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return load_bundle("starter", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def network(bundle):
    """The network in torch with the bundle's weights, in eval mode."""
    module = models.create(EncoderTask(input=bundle.manifest.task.input, encoder="starter_cnn"))
    weights, left_out = read_weights(module, bundle_path("starter"))
    assert left_out == ()
    load_arrays(module, weights)
    return module.eval()


@pytest.fixture
def photos(tmp_path):
    """Twelve pictures each of discs and of crosses, anywhere, of any size and colour, on any ground."""
    rng = np.random.default_rng(0)
    for number in range(24):
        kind = ("disc", "cross")[number % 2]
        image = Image.new("RGB", (120, 90), tuple(int(value) for value in rng.integers(0, 120, 3)))
        pen = ImageDraw.Draw(image)
        x, y = rng.integers(30, 60, 2)
        size = int(rng.integers(14, 26))
        colour = tuple(int(value) for value in rng.integers(150, 256, 3))
        if kind == "disc":
            pen.ellipse((x - size, y - size, x + size, y + size), fill=colour)
        else:
            pen.line((x - size, y - size, x + size, y + size), fill=colour, width=9)
            pen.line((x - size, y + size, x + size, y - size), fill=colour, width=9)
        folder = tmp_path / "photos" / kind
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number}.png")
    return tmp_path / "photos"


def test_it_takes_pictures_and_has_no_classes(bundle):
    task = bundle.manifest.task
    assert task.input_shape == (3, SIDE, SIDE)
    assert task.num_classes == 0
    assert set(bundle.manifest.variants) == {"fp32", "int8"}


def test_its_int8_graph_is_small_enough_for_a_weak_device(bundle):
    file = bundle.folder / bundle.manifest.variants["int8"].file
    assert file.stat().st_size <= 3_000_000


def test_its_file_is_a_whole_bundle():
    assert open_bundle(bundle_path("starter")).manifest.name == "starter-photos"


def test_other_names_are_paths(tmp_path):
    assert bundle_path(tmp_path / "starter") == tmp_path / "starter"
    assert bundle_path("./starter") != bundle_path("starter")


def test_the_network_with_its_weights_computes_the_same_features(bundle, network):
    inputs = np.random.default_rng(1).normal(size=(3, 3, SIDE, SIDE)).astype(np.float32)
    with torch.inference_mode():
        expected = network(torch.from_numpy(inputs)).numpy()
    features = Encoder.open(bundle, "fp32").features(inputs)
    assert features.shape == (3, network.feature_dim) == (3, 544)
    np.testing.assert_allclose(features, expected, atol=1e-4)


@pytest.mark.parametrize("side, expected", [(32, 96 + 192 + 16 * 4), (64, 544), (160, 96 + 192 + 16 * 25)])
def test_the_network_takes_other_sizes(side, expected):
    spec = ImageInput(channels=1, height=side, width=side, mean=(0.5,), std=(0.25,))
    module = models.create(EncoderTask(input=spec, encoder="starter_cnn")).eval()
    assert module.feature_dim == expected
    assert module(torch.zeros(2, 1, side, side)).shape == (2, expected)


def test_weights_of_another_network_are_refused(make_bundle):
    module = models.create(EncoderTask(input=ImageInput(channels=3, height=SIDE, width=SIDE), encoder="starter_cnn"))
    with pytest.raises(WeightsError, match="does not hold this encoder"):
        read_weights(module, make_bundle().path)


def test_a_damaged_bundle_of_weights_is_named(tmp_path, network):
    path = tmp_path / "b.hwb"
    path.write_bytes(bundle_path("starter").read_bytes()[:-5000])
    with pytest.raises(WeightsError, match=r"b\.hwb: its weights cannot be read"):
        read_weights(network, path)


def test_without_onnx_the_missing_package_is_named(monkeypatch, network):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(MissingCapability, match="onnx"):
        bundle_weights.read_bundle_weights(bundle_path("starter"))


class _Unchecked:
    """A bundle whose fp32 graph is other bytes than its manifest says, as no gate would pass it."""

    def __init__(self, bundle, graph: bytes) -> None:
        self.manifest = bundle.manifest
        self._graph = graph

    def blocks(self, _name):
        return [self._graph]


def _read_graph(monkeypatch, graph: bytes):
    """Return the weights that are read where the starter's graph is replaced."""
    unchecked = _Unchecked(open_bundle(bundle_path("starter")), graph)
    monkeypatch.setattr(bundle_weights, "open_bundle", lambda _path: unchecked)
    return bundle_weights.read_bundle_weights(bundle_path("starter"))


def test_a_graph_that_cannot_be_read_is_named(monkeypatch):
    with pytest.raises(WeightsError, match="its fp32 graph cannot be read"):
        _read_graph(monkeypatch, b"\xff" * 64)


def test_a_constant_of_the_wrong_size_is_named(monkeypatch):
    short = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[4], raw_data=bytes(4))
    graph = onnx.helper.make_graph([], "g", [], [], [short])
    with pytest.raises(WeightsError, match="its fp32 graph cannot be read"):
        _read_graph(monkeypatch, onnx.helper.make_model(graph).SerializeToString())


@pytest.mark.parametrize("inputs", [["x"], ["x", "bn.weight", "bn.bias", "computed", "bn.variance"]])
def test_batch_norm_without_constant_statistics_has_none(monkeypatch, inputs):
    node = onnx.helper.make_node("BatchNormalization", inputs, ["y"])
    weight = onnx.numpy_helper.from_array(np.ones(2, np.float32), "bn.weight")
    graph = onnx.helper.make_graph([node], "g", [], [], [weight])
    weights = _read_graph(monkeypatch, onnx.helper.make_model(graph).SerializeToString())
    assert list(weights) == ["bn.weight"]


def test_a_program_uses_it_by_name(photos, tmp_path):
    head = Personalizer.open("starter", cache=tmp_path / "cache").fit(f"images:{photos}", own_classes=True)
    files = sorted(photos.rglob("*.png"))
    assert (head.predict(files) == [file.parent.name for file in files]).all()


def test_commands_use_it_where_no_bundle_is_named(photos, tmp_path, monkeypatch, capsys):
    from edge_agent.cli import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--data", f"images:{photos}", "--out", "head"]) == 0
    text = capsys.readouterr().out
    next_command = text.splitlines()[-1]
    assert next_command == "next: edge-agent predict --head head FILE ..."
    assert "not stated" not in text  # how closely a head follows a method, where there is no method
    assert "if this device has trained the encoder" not in text
    words = next_command.removeprefix("next: edge-agent ").removesuffix(" FILE ...").split()
    assert main([*words, "--json", str(photos / "disc/0.png")]) == 0
    assert '"class": "disc"' in capsys.readouterr().out.splitlines()[-1]
    assert main(["import", "starter", "--state", "dev"]) == 0
    assert main(["add", "--state", "dev", "--data", f"images:{photos}"]) == 0
    capsys.readouterr()
    assert main(["predict", str(photos / "disc/0.png")]) == 2
    assert "'edge-agent fit --data images:FOLDER --out my-head'" in capsys.readouterr().err


def test_it_takes_no_recordings(tmp_path, monkeypatch, capsys):
    from edge_agent.cli import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    np.savez(tmp_path / "w.npz", inputs=np.zeros((8, 3, 50), np.float32), labels=np.arange(8) % 2)
    assert main(["fit", "--data", f"npz:{tmp_path}/w.npz?kind=window", "--out", str(tmp_path / "head")]) == 2
    assert "a bundle whose encoder takes windows" in capsys.readouterr().err


def test_the_package_carries_it():
    assert bundle_path("starter").parent.parent.name == edge_agent.__name__
