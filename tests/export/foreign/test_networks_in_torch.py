"""Classes in a Python file and networks of torchvision, with weights from files that may hold anything."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_networks import SmallResNet, seeded
from torch import nn

from edge_agent.bundle.archive import open_bundle
from edge_agent.core.errors import ExportRejected, UsageError, WeightsError
from edge_agent.core.storage import write_tensors
from edge_agent.models.torchvision_networks import networks
from export.foreign import ForeignSettings, bundle_network
from export.foreign import weights as weights_module
from export.foreign.weights import put_weights, read_weights
from export.parity import run

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return {"features": x, "logits": self.fc(x)}

def broken():
    raise KeyError("weights")

number = 7

def ends():
    raise SystemExit("usage: train.py --data FOLDER")

class Silent(Net):
    def forward(self, x):
        return ()

class Waves(Net):
    def forward(self, x):
        return torch.fft.fft2(x)

class Damaged(Net):
    def __init__(self):
        super().__init__()
        self.fc.weight.data[0, 0] = float("nan")

class Talking(Net):
    def forward(self, x):
        print("on the way")
        return super().forward(x)
"""


def save(path: Path, weights) -> Path:
    """Write tensors by name as safetensors."""
    write_tensors(path, {name: tensor.numpy().copy() for name, tensor in weights.items()})
    return path


@pytest.fixture
def python_file(tmp_path):
    path = tmp_path / "network.py"
    path.write_text(SOURCE)
    return path


def test_a_class_with_weights(python_file, tmp_path):
    class Twin(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 3)
            self.norm = nn.BatchNorm2d(6)
            self.fc = nn.Linear(6, 4)

    twin = seeded(Twin(), 3)
    weights = save(tmp_path / "net.safetensors", twin.state_dict())
    made = bundle_network(
        f"{python_file}:Net", tmp_path / "net.hwb", ForeignSettings(size="16", channels=3, weights=weights)
    )
    images = np.random.default_rng(0).standard_normal((2, 3, 16, 16)).astype(np.float32)
    with torch.no_grad():
        expected = torch.relu(twin.norm(twin.conv(torch.from_numpy(images)))).mean((2, 3)).numpy()
    received = run(open_bundle(made.report.path).read("encoder.onnx"), images)
    assert np.allclose(received, expected, atol=1e-5)
    assert "torch" in {gate.name for gate in made.report.gates}


@pytest.mark.parametrize(
    "name, words",
    [("broken", "KeyError"), ("ends", "SystemExit"), ("number", "'int' object is not callable"), ("Absent", "Absent")],
)
def test_names_that_give_no_network(python_file, tmp_path, name, words):
    with pytest.raises(UsageError, match=words):
        bundle_network(f"{python_file}:{name}", tmp_path / "net.hwb", ForeignSettings(size="16", channels=3))


def test_a_script_that_ends_the_process_when_it_is_imported(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import sys\nsys.exit('usage: train.py --data FOLDER')\n")
    with pytest.raises(UsageError, match=r"importing .*train.py failed: SystemExit: usage"):
        bundle_network(f"{path}:Net", tmp_path / "net.hwb", ForeignSettings(size="16", channels=3))


@pytest.mark.parametrize(
    "name, words",
    [("Silent", "gives no tensor"), ("Waves", "gives complex numbers"), ("Damaged", "gives NaN for random inputs")],
)
def test_networks_that_give_nothing_to_compare(python_file, tmp_path, name, words):
    with pytest.raises(ExportRejected, match=words):
        bundle_network(f"{python_file}:{name}", tmp_path / "net.hwb", ForeignSettings(size="16", channels=3))


def test_what_a_network_prints_is_not_among_the_results(python_file, tmp_path, capsys):
    bundle_network(f"{python_file}:Talking", tmp_path / "net.hwb", ForeignSettings(size="16", channels=3))
    printed = capsys.readouterr()
    assert (printed.out, "on the way" in printed.err) == ("", True)


def test_a_size_that_the_network_does_not_take(python_file, tmp_path):
    with pytest.raises(ExportRejected, match=r"does not take inputs \[2, 1, 16, 16\]"):
        bundle_network(f"{python_file}:Net", tmp_path / "net.hwb", ForeignSettings(size="16", channels=1))
    assert not (tmp_path / "net.hwb").exists()


def test_weights_of_another_network_are_listed_with_the_nearest_names(tmp_path):
    expected = seeded(SmallResNet()).state_dict()
    weights = {name.replace("conv1", "conv_1"): tensor for name, tensor in expected.items()}
    weights["bn1.weight"] = torch.zeros(3)
    weights["fc.bias"] = torch.full((5,), torch.nan)
    path = save(tmp_path / "other.safetensors", weights)
    with pytest.raises(WeightsError) as raised:
        put_weights(SmallResNet(), read_weights(path), path)
    message = str(raised.value)
    assert "1 missing: conv1.weight (the nearest: conv_1.weight)" in message
    assert "1 not expected: conv_1.weight (the nearest: conv1.weight)" in message
    assert "'bn1.weight' is [3], expected [16]" in message
    assert "'fc.bias' holds NaN" in message


def test_weights_of_a_very_different_network_are_told_in_a_few_lines(tmp_path):
    """Those of one network of torchvision in the place of another made a message of 17,000 characters."""
    other = {f"blocks.{number}.weight": torch.zeros(1) for number in range(300)}
    path = save(tmp_path / "other.safetensors", other)
    with pytest.raises(WeightsError) as raised:
        put_weights(SmallResNet(), read_weights(path), path)
    message = str(raised.value)
    assert "300 not expected: blocks.0.weight" in message
    assert "and 290 more" in message
    assert len(message) < 2500


def test_a_small_file_that_unpacks_to_a_large_one(tmp_path, monkeypatch):
    torch.save({"fc.weight": torch.zeros(1 << 20)}, tmp_path / "plain.pth")
    packed = tmp_path / "packed.pth"
    with zipfile.ZipFile(tmp_path / "plain.pth") as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as small:
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    assert read_weights(packed)["fc.weight"].shape == (1 << 20,)
    monkeypatch.setattr(weights_module, "MOST_BYTES", 1 << 20)
    assert packed.stat().st_size < 1 << 20
    with pytest.raises(WeightsError, match=r"unpacks to 4[0-9]{6} bytes, expected at most 1048576"):
        read_weights(packed)


def test_a_tensor_that_is_larger_than_its_file(tmp_path):
    torch.save({"fc.weight": torch.zeros(1).expand(1 << 40)}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match="holds tensors of 4398046511104 bytes"):
        read_weights(tmp_path / "w.pth")


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.zeros(3, device="meta"), torch.zeros(3, dtype=torch.complex64)]
)
def test_tensors_that_no_network_has(tmp_path, tensor):
    torch.save({"fc.weight": tensor}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"1 tensors are sparse, .*\(fc.weight\)"):
        read_weights(tmp_path / "w.pth")


def test_a_dictionary_that_holds_itself(tmp_path):
    content = {}
    content["model"] = content
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match="holds no tensors by name"):
        read_weights(tmp_path / "w.pth")


def test_numbers_that_the_network_cannot_hold(tmp_path):
    weights = {**nn.Linear(2, 2).state_dict(), "bias": torch.full((2,), 1e300, dtype=torch.float64)}
    with pytest.raises(WeightsError, match="'bias' holds NaN or infinity, or numbers beyond float32"):
        put_weights(nn.Linear(2, 2), weights, tmp_path / "w.pth")


@pytest.mark.parametrize("bias", [torch.tensor(1.0), torch.zeros(1).expand(1 << 28)])
def test_a_classifier_whose_parts_disagree_is_not_built(tmp_path, bias):
    """A bias alone must not decide how many classes a network is built for: the weights of so many take all memory."""
    weights = networks().get_model("squeezenet1_1", weights=None).state_dict()
    weights["classifier.1.bias"] = bias
    torch.save(weights, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"'classifier.1.bias' is \[.*\], expected \[1000\]"):
        bundle_network("squeezenet1_1", tmp_path / "net.hwb", ForeignSettings(size="64", weights=tmp_path / "w.pth"))


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"epoch": 3, "state_dict": state}])
def test_what_torch_save_wrote(tmp_path, wrap):
    state = {f"module.{name}": tensor for name, tensor in seeded(SmallResNet(), 4).state_dict().items()}
    torch.save(wrap(state), tmp_path / "net.pth")
    network = SmallResNet()
    put_weights(network, read_weights(tmp_path / "net.pth"), tmp_path / "net.pth")
    assert torch.equal(network.fc.weight, state["module.fc.weight"])


class Command:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_file_that_would_run_something_is_refused_and_runs_nothing(tmp_path):
    torch.save({"weight": Command(tmp_path / "made")}, tmp_path / "net.pth")
    with pytest.raises(WeightsError, match=r"an object of posix\.mkdir, not only weights; nothing in it was run"):
        read_weights(tmp_path / "net.pth")
    assert not (tmp_path / "made").exists()


def test_torn_files(tmp_path):
    (tmp_path / "torn.pth").write_bytes(b"PK\x03\x04torn")
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    for name in ("torn.pth", "torn.safetensors", "gone.pth"):
        with pytest.raises(WeightsError):
            read_weights(tmp_path / name)


def test_a_network_of_torchvision_with_weights_for_other_classes(tmp_path):
    network = seeded(networks().squeezenet1_1(weights=None, num_classes=3))
    path = tmp_path / "squeezenet.pth"
    torch.save(network.state_dict(), path)
    made = bundle_network("squeezenet1_1", tmp_path / "made.hwb", ForeignSettings(weights=path, size="64"))
    images = np.random.default_rng(0).standard_normal((2, 3, 64, 64)).astype(np.float32)
    with torch.no_grad():
        expected = network.features(torch.from_numpy(images)).mean((2, 3)).numpy()
    assert np.allclose(run(open_bundle(made.report.path).read("encoder.onnx"), images), expected, atol=1e-4)
    assert made.report.manifest.feature_dim == 512


def test_names_that_torchvision_lacks(tmp_path):
    with pytest.raises(UsageError, match="did you mean resnet18"):
        bundle_network("resnet81", tmp_path / "made.hwb", ForeignSettings())
    with pytest.raises(UsageError, match="--weights is missing"):
        bundle_network("resnet18", tmp_path / "made.hwb", ForeignSettings())


HARD = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 8, stride=8)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.layer(self.first(x).flatten(2).transpose(1, 2)).mean(1))

class Uneven(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 5)
        self.pool = nn.AdaptiveAvgPool2d(5)
        self.last = nn.Linear(100, 4)

    def forward(self, x):
        return self.last(self.pool(self.first(x)).flatten(1))
"""


def test_attention_is_exported_step_by_step(tmp_path):
    (tmp_path / "hard.py").write_text(HARD)
    fast = torch.backends.mha.get_fastpath_enabled()
    made = bundle_network(
        f"{tmp_path / 'hard.py'}:Attention", tmp_path / "made.hwb", ForeignSettings(size="32", channels=3)
    )
    assert made.report.manifest.feature_dim == 16
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_an_exporter_that_fails_writes_nothing_to_stdout(tmp_path, capfd):
    """Pooling of 28 pixels to 5: the older exporter refuses it and prints the graph."""
    (tmp_path / "hard.py").write_text(HARD)
    with pytest.raises(ExportRejected):
        bundle_network(f"{tmp_path / 'hard.py'}:Uneven", tmp_path / "made.hwb", ForeignSettings(size="32", channels=3))
    assert capfd.readouterr().out == ""
    assert not (tmp_path / "made.hwb").exists()
