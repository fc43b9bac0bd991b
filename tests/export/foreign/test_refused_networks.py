"""Networks that no device can run, and options that contradict them: what is said, and that nothing is written."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from foreign_networks import SmallResNet, edited, export, hugging_face_export, seeded, torchvision_export
from onnx import TensorProto, helper, numpy_helper

from edge_agent.core.errors import ExportRejected, UsageError
from export.foreign import ForeignSettings, bundle_network


@pytest.fixture
def network(tmp_path):
    return torchvision_export(tmp_path)


def refusal(source, tmp_path, error=ExportRejected, **settings) -> str:
    """Return the message by which a network is refused; a bundle that was there before stays as it is."""
    out = tmp_path / "out" / "made.hwb"
    out.parent.mkdir(exist_ok=True)
    out.write_bytes(b"the bundle before")
    with pytest.raises(error) as raised:
        bundle_network(str(source), out, ForeignSettings(**settings))
    assert [path.name for path in out.parent.iterdir()] == ["made.hwb"]
    assert out.read_bytes() == b"the bundle before"
    return str(raised.value)


def test_weights_in_another_file(network, tmp_path):
    onnx.save(onnx.load(network), tmp_path / "split.onnx", save_as_external_data=True, size_threshold=0)
    message = refusal(tmp_path / "split.onnx", tmp_path)
    assert "weights are in another file (" in message
    program = message.partition('python -c "')[2].partition('"')[0]
    exec(program)
    bundle_network(str(tmp_path / "split-joined.onnx"), tmp_path / "joined.hwb", ForeignSettings())


def test_control_flow(network, tmp_path):
    def add_branch(model):
        branches = {}
        for name in ("then_branch", "else_branch"):
            value = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
            branches[name] = helper.make_graph([helper.make_node("Identity", ["logits"], ["out"])], name, [], [value])
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "always"))
        model.graph.node.append(helper.make_node("If", ["always"], ["branched"], **branches))

    assert "control flow (If)" in refusal(edited(network, add_branch), tmp_path)


def test_a_fixed_batch(tmp_path):
    path = export(seeded(SmallResNet()), tmp_path / "fixed.onnx", torch.zeros(1, 3, 32, 32), dynamic_axes={})
    message = refusal(path, tmp_path)
    assert "takes batches of 1 alone" in message
    assert "dynamic_axes={'input': {0: 'batch'}}" in message


def test_a_fixed_batch_is_made_free_where_the_network_allows_it(tmp_path):
    path = export(seeded(SmallResNet()), tmp_path / "fixed.onnx", torch.zeros(1, 3, 32, 32), dynamic_axes={})
    made = bundle_network(str(path), tmp_path / "free.hwb", ForeignSettings(any_batch=True))
    free = bundle_network(str(torchvision_export(tmp_path)), tmp_path / "other.hwb", ForeignSettings())
    assert made.report.manifest.feature_dim == free.report.manifest.feature_dim == 16


def test_a_batch_that_is_fixed_inside(tmp_path):
    class Inside(SmallResNet):
        def forward(self, images):
            return self.fc(self.avgpool(torch.relu(self.conv1(images))).reshape(2, 16))

    path = export(seeded(Inside()), tmp_path / "inside.onnx", torch.zeros(2, 3, 32, 32))
    assert "fixed batch size inside" in refusal(path, tmp_path)


def test_a_batch_of_one_that_is_fixed_inside(tmp_path):
    """As torch.onnx.export writes flatten(1) of one input: 'Reshape of (2, 16, 1, 1) to [1, 16]' named no remedy."""

    class Inside(SmallResNet):
        def forward(self, images):
            return self.fc(self.avgpool(torch.relu(self.conv1(images))).reshape(1, 16))

    path = export(seeded(Inside()), tmp_path / "inside.onnx", torch.zeros(1, 3, 32, 32), dynamic_axes={})
    message = refusal(path, tmp_path, any_batch=True)
    assert "fixed batch size inside; export it with a dynamic batch axis" in message
    assert "Reshape of (2, 16, 1, 1) to [1, 16]" in message


def test_rows_that_depend_on_their_neighbours(tmp_path):
    class Mixed(SmallResNet):
        def forward(self, images):
            x = torch.flatten(self.avgpool(torch.relu(self.conv1(images))), 1)
            return self.fc(x - x.mean(0, keepdim=True) + 1)

    message = refusal(export(seeded(Mixed()), tmp_path / "mixed.onnx", torch.zeros(2, 3, 32, 32)), tmp_path)
    assert "parity: largest difference to the network" in message


def test_two_inputs(network, tmp_path):
    def add_mask(model):
        model.graph.input.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", 16]))

    assert "2 inputs (input [batch, 3, 32, 32], attention_mask [batch, 16])" in refusal(
        edited(network, add_mask), tmp_path
    )


def test_operators_that_devices_lack_are_all_named(network, tmp_path):
    def change(model):
        relus = [node for node in model.graph.node if node.op_type == "Relu"]
        relus[0].op_type = "Celu"
        relus[1].op_type = "Fancy"
        relus[1].domain = "com.example"
        model.opset_import.append(helper.make_opsetid("com.example", 1))

    message = refusal(edited(network, change), tmp_path)
    assert "ai.onnx.Celu (1), com.example.Fancy (1)" in message
    assert "--features" in message


def test_features_behind_a_softmax(network, tmp_path):
    def add_softmax(model):
        model.graph.node.append(helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1))
        model.graph.output[0].name = "probabilities"

    path = edited(network, add_softmax)
    message = refusal(path, tmp_path, features="probabilities")
    assert "'probabilities' are behind Softmax" in message
    assert "--features /Flatten_output_0" in message
    assert bundle_network(str(path), tmp_path / "made.hwb", ForeignSettings()).point.tensor == "/Flatten_output_0"


def test_weights_with_nan_beside_other_reasons(network, tmp_path):
    def spoil(model):
        weights = next(tensor for tensor in model.graph.initializer if tensor.name == "fc.weight")
        array = numpy_helper.to_array(weights).copy()
        array[0, 0] = np.nan
        weights.CopyFrom(numpy_helper.from_array(array, "fc.weight"))
        model.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8

    message = refusal(edited(network, spoil), tmp_path)
    assert "1 weights hold NaN or infinity (fc.weight)" in message
    assert "input 'input' is uint8, expected float32" in message


def test_a_file_of_three_gigabytes_is_not_read(tmp_path):
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(3_000_000_000)
    assert "3.0 GB, at most 1.1 GB are read" in refusal(path, tmp_path)


def test_what_is_no_onnx(tmp_path):
    (tmp_path / "text.onnx").write_text("hello")
    assert "not an ONNX file" in refusal(tmp_path / "text.onnx", tmp_path)
    assert "no such file" in refusal(tmp_path / "gone.onnx", tmp_path, UsageError)


def test_newer_operators_than_devices_have(network, tmp_path):
    def raise_version(model):
        model.opset_import[0].version = 23

    assert "operators of version 23, devices have up to 21" in refusal(edited(network, raise_version), tmp_path)


def test_a_name_that_is_not_there_gets_near_ones(network, tmp_path):
    message = refusal(network, tmp_path, UsageError, features="Flatten_output")
    assert "/Flatten_output_0" in message


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"size": "64"}, ["height is 64 in the preprocessing, 32 in the network's input", "width is 64"]),
        ({"channels": 1}, ["channels is 1 in the preprocessing, 3 in the network's input"]),
        ({"mean": "0.5,0.5"}, ["mean has 2 values, the network's input has 3 channel(s)"]),
        ({"std": "0"}, ["std holds 0"]),
        ({"kind": "window"}, ["as N1CL has 3 where 1 is expected"]),
        ({"layout": "NCL"}, ["has 3 axes, the network's input has 4 [?, 3, 32, 32]"]),
        ({"pool": "first"}, ["expected [tokens, features]"]),
        ({"classes": "a,b,a"}, ["given twice: a"]),
    ],
)
def test_options_that_contradict_the_network(network, tmp_path, settings, words):
    message = refusal(network, tmp_path, (UsageError, ExportRejected), **settings)
    for word in words:
        assert word in message


def test_sizes_that_nobody_gives(tmp_path):
    message = refusal(hugging_face_export(tmp_path), tmp_path, UsageError)
    assert "height is given by neither the network nor the preprocessing; give --size" in message


def test_a_network_that_always_says_the_same(network, tmp_path):
    def silence(model):
        for tensor in model.graph.initializer:
            if "conv1" in tensor.name or tensor.name.startswith("onnx::Conv"):
                tensor.CopyFrom(numpy_helper.from_array(0 * numpy_helper.to_array(tensor), tensor.name))

    assert "varied: features vary by up to 0" in refusal(edited(network, silence), tmp_path)
