"""Networks in the form of other projects: where their features are, and that a bundle computes them.

The expected features are those of the networks in torch, and the inputs are arranged by hand.
"""

from __future__ import annotations

from pathlib import Path

import foreign_networks
import numpy as np
import onnx
import pytest
import torch
from foreign_networks import SmallResNet, SmallTransformer, SmallWave2Vec, seeded
from onnx import numpy_helper
from PIL import Image
from torch.nn import functional

from edge_agent.bundle.archive import open_bundle
from edge_agent.core.errors import ConfigError
from edge_agent.wire.tensors import decode
from export.foreign import ForeignSettings, bundle_network
from export.parity import mean_cosine, run


def make(kind: str, folder: Path, **settings):
    """Return the report of a bundle of one of the networks, and the path of its file."""
    path = getattr(foreign_networks, f"{kind}_export")(folder)
    beside = folder / "preprocessor_config.json"
    if beside.exists():
        settings.setdefault("preprocessing", str(beside))
    return bundle_network(str(path), folder / "made.hwb", ForeignSettings(**settings)), path


def features_of(made, inputs: np.ndarray) -> np.ndarray:
    """Return the features that the bundle's fp32 graph computes."""
    return run(open_bundle(made.report.path).read("encoder.onnx"), inputs.astype(np.float32))


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((3, 3, 32, 32)).astype(np.float32)


def test_a_network_of_torchvision(tmp_path, images):
    made, _ = make("torchvision", tmp_path, mean=(0.4,), std=(0.2,))
    network = seeded(SmallResNet())
    network.fc = torch.nn.Identity()
    with torch.no_grad():
        expected = network(torch.from_numpy(images)).numpy()
    assert np.allclose(features_of(made, images), expected, atol=1e-5)
    assert made.notes == ()


def transformer_states(images: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits, last hidden state and pooled output of the transformer in torch."""
    with torch.no_grad():
        return tuple(output.numpy() for output in seeded(SmallTransformer())(torch.from_numpy(images)))


def test_a_transformer_with_three_outputs_gives_what_goes_into_its_classifier(tmp_path, images):
    """The file has no sizes of its own and computes them: 32 x 32 is from the preprocessor file beside it."""
    made, path = make("hugging_face", tmp_path)
    assert [value.name for value in onnx.load(path).graph.output] == ["logits", "last_hidden_state", "pooler_output"]
    assert {"Equal", "Mod"} & {node.op_type for node in onnx.load(path).graph.node}, (
        "the sizes are computed in the file"
    )
    expected = transformer_states(images)[1][:, 0]
    assert np.allclose(features_of(made, images), expected, atol=1e-5)
    assert made.form.spec.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    "pool, expected",
    [
        ("auto", lambda hidden: hidden.mean(1)),
        ("mean", lambda hidden: hidden.mean(1)),
        ("first", lambda hidden: hidden[:, 0]),
    ],
)
def test_rows_of_tokens_become_one_row(tmp_path, images, pool, expected):
    made, _ = make("hugging_face", tmp_path, features="last_hidden_state", pool=pool)
    assert np.allclose(features_of(made, images), expected(transformer_states(images)[1]), atol=1e-5)
    assert made.pooling == {"first": "the first of 17 rows of 24"}.get(pool, "mean over 17x24, but for 24 features")


def test_an_output_that_is_named_is_taken(tmp_path, images):
    made, _ = make("hugging_face", tmp_path, features="pooler_output")
    assert np.allclose(features_of(made, images), transformer_states(images)[2], atol=1e-5)


def test_a_classifier_of_text_lines_as_paddle_writes_it(tmp_path):
    made, path = make("ocr", tmp_path, mean=(0.5,), std=(0.5,))
    model = onnx.load(path)
    assert (model.opset_import[0].version, model.graph.node[-1].op_type) == (11, "Softmax")
    lines = np.random.default_rng(1).standard_normal((2, 3, 48, 192)).astype(np.float32)
    weights = {
        tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in model.graph.initializer
    }
    x = torch.from_numpy(lines)
    for at, stride, group in ((0, 2, 1), (6, 1, 8), (12, 2, 1)):
        x = functional.conv2d(x, weights[f"w_{at}_0"], stride=stride, padding=1, groups=group)
        scale, shift, mean, variance = (weights[f"w_{at + 1}_{part}"] for part in range(4))
        x = functional.hardswish(functional.batch_norm(x, mean, variance, scale, shift))
    assert np.allclose(features_of(made, lines), x.mean((2, 3)).numpy(), atol=1e-5)
    assert (made.form.spec.height, made.form.spec.width) == (48, 192)


def test_a_network_for_raw_sound_gets_windows_of_one_channel_each_normalized_by_itself(tmp_path):
    made, _ = make("audio", tmp_path, length=800)
    sound = np.random.default_rng(2).standard_normal((2, 1, 800)) * 0.1 + 0.3
    rows = sound[:, 0]
    normalized = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + 1e-7)
    network = seeded(SmallWave2Vec())
    network.classifier = torch.nn.Identity()
    with torch.no_grad():
        expected = network(torch.from_numpy(normalized.astype(np.float32))).numpy()
    assert np.allclose(features_of(made, sound), expected, atol=1e-4)
    assert made.form.spec.shape == (1, 800)
    assert "16000 samples per second" in made.notes[0]


@pytest.mark.parametrize("kind, network", [("quantized", SmallResNet), ("dynamically_quantized", SmallTransformer)])
def test_a_quantized_network_is_close_to_the_one_before_it_was_rounded(tmp_path, images, kind, network):
    made, path = make(kind, tmp_path)
    operators = {node.op_type for node in onnx.load(path).graph.node}
    assert operators & {"QuantizeLinear", "DynamicQuantizeLinear"}
    if network is SmallResNet:
        module = seeded(network())
        module.fc = torch.nn.Identity()
        with torch.no_grad():
            expected = module(torch.from_numpy(images)).numpy()
    else:
        expected = transformer_states(images)[1][:, 0]
    assert mean_cosine(features_of(made, images), expected) > 0.995
    assert any("was quantized" in note for note in made.notes)
    graph = onnx.load_from_string(open_bundle(made.report.path).read("encoder.onnx")).graph
    assert not {"QuantizeLinear", "DequantizeLinear", "MatMulInteger"} & {node.op_type for node in graph.node}


def test_int8_is_made_from_calibration_data_alone(tmp_path):
    """Labelled digits of two domains: int8 is compared with fp32 on each, with ranges of the other."""
    made, _ = make("torchvision", tmp_path, calibration=("digits:optdigits?n=60", "digits:rendered?n=60"))
    manifest = made.report.manifest
    assert {*manifest.variants} <= {"fp32", "int8"}
    assert manifest.quantization is not None
    assert sum(answers.support for answers in manifest.quantization.held_out.values()) > 50
    without, _ = make("torchvision", tmp_path)
    assert "int8" not in without.report.manifest.variants
    assert "--calibration" in without.report.int8_note


def test_pictures_without_labels_are_enough_for_ranges(tmp_path):
    (tmp_path / "photos").mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(tmp_path / "photos" / f"{number}.png")
    made, _ = make("torchvision", tmp_path, calibration=(f"images:{tmp_path / 'photos'}",))
    quantization = made.report.manifest.quantization
    assert "int8" in made.report.manifest.variants
    assert (quantization.ranges, quantization.held_out) == ("12 inputs of 1 domain(s)", {})


def test_the_own_classifier_is_shared_where_its_classes_are_named(tmp_path, images):
    names = ("a", "b", "c", "d", "e")
    made, _ = make("torchvision", tmp_path, classes=",".join(names))
    manifest = made.report.manifest
    assert (manifest.task.class_names, manifest.global_head) == (names, "global_head.safetensors")
    network = seeded(SmallResNet())
    head = decode(open_bundle(made.report.path).read("global_head.safetensors"))
    with torch.no_grad():
        expected = network(torch.from_numpy(images)).numpy()
    assert np.allclose(features_of(made, images) @ head["weight"].T + head["bias"], expected, atol=1e-5)


def test_classes_of_another_number_have_no_shared_classifier(tmp_path):
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    made, _ = make("torchvision", tmp_path, classes=str(tmp_path / "names.txt"))
    assert made.report.manifest.task.class_names == ("cat", "dog")
    assert made.report.manifest.global_head is None
    assert "knows 5 classes" in made.notes[-1]


def test_it_is_said_when_nothing_says_how_inputs_are_prepared(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text("{}")
    path = foreign_networks.torchvision_export(tmp_path)
    made = bundle_network(str(path), tmp_path / "made.hwb", ForeignSettings())
    assert "pixels are 0..1" in made.notes[0]
    assert f"{tmp_path / 'preprocessor_config.json'} lies beside the network and was not read" in made.notes[0]


def test_class_names_that_no_table_can_show(tmp_path):
    path = foreign_networks.torchvision_export(tmp_path)
    with pytest.raises(ConfigError, match="control character"):
        bundle_network(str(path), tmp_path / "made.hwb", ForeignSettings(classes="a,b\x07"))
