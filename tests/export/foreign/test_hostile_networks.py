"""ONNX files that are damaged or made to mislead: each is refused in words, or becomes what the network itself says."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_agent.bundle.archive import open_bundle
from edge_agent.core.errors import ExportRejected, UsageError
from edge_agent.wire.tensors import decode
from export.foreign import ForeignSettings, bundle_network, sizes
from export.parity import run

CLASSES = "ant,bee,cat,dog"


def node(operator, inputs, outputs, **attributes):
    return helper.make_node(operator, inputs.split(), outputs.split(), **attributes)


def graph_of(nodes, constants, output="logits"):
    """Return a model with one input of images (batch, 3, 8, 8)."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def network(behind=(), constants=None, output="logits"):
    """Return a network with six features, ``pooled``, four ``logits``, and further nodes behind these."""
    rng = np.random.default_rng(0)
    nodes = [
        node("Conv", "images kernel", "maps"),
        node("Relu", "maps", "positive"),
        node("GlobalAveragePool", "positive", "means"),
        node("Flatten", "means", "pooled"),
        node("Gemm", "pooled weight bias", "logits", transB=1),
        *behind,
    ]
    weights = {
        "kernel": rng.normal(size=(6, 3, 3, 3)).astype(np.float32),
        "weight": rng.normal(size=(4, 6)).astype(np.float32),
        "bias": rng.normal(size=4).astype(np.float32),
    }
    return graph_of(nodes, {**weights, **(constants or {})}, output)


def bundle(model, tmp_path, **settings):
    path = tmp_path / "network.onnx"
    path.write_bytes(model.SerializeToString())
    return bundle_network(str(path), tmp_path / "made.hwb", ForeignSettings(**settings))


def features_of(made, images) -> np.ndarray:
    """Return the features (n, d) of the bundle's encoder for images as a device prepares them."""
    return run(open_bundle(made.report.path).read("encoder.onnx"), images)


def classifier_of(made):
    """Return the shared classifier of a bundle; None where it has none."""
    if made.report.manifest.global_head is None:
        return None
    return decode(open_bundle(made.report.path).read("global_head.safetensors"))


def refusal(model, tmp_path, **settings) -> str:
    with pytest.raises(ExportRejected) as raised:
        bundle(model, tmp_path, **settings)
    assert not (tmp_path / "made.hwb").exists()
    return str(raised.value)


@pytest.mark.parametrize("last", ["Identity", "Softmax"])
def test_a_circle_of_nodes_comes_to_an_end(tmp_path, last):
    nodes = [
        node("Identity", "images", "here"),
        node("Identity", "here", "there"),
        node("Identity", "there", "here"),
        node(last, "there", "logits"),
    ]
    assert "1 results of nodes have a name that is taken (here)" in refusal(graph_of(nodes, {}), tmp_path)


def test_names_of_nothing_and_nodes_in_another_order(tmp_path):
    model = network()
    model.graph.node[0].input[1] = "nowhere"
    assert "computed by no node before them (nowhere)" in refusal(model, tmp_path)


@pytest.mark.parametrize(
    "behind",
    [
        node("MatMulInteger", "pooled", "classes"),
        node("DynamicQuantizeLinear", "pooled", "classes"),
        node("QuantizeLinear", "pooled", "classes"),
        node("Gemm", "pooled", "classes"),
        node("Gemm", "", "classes"),
    ],
)
def test_nodes_with_too_few_inputs_or_results(tmp_path, behind):
    message = refusal(network([behind], output="classes"), tmp_path)
    assert f"have too few or too many inputs or results (classes {behind.op_type})" in message


def test_a_constant_without_a_value(tmp_path):
    """In a network that was quantized it ended in a traceback."""
    rounded = {"rounded": np.ones((6, 3, 1, 1), np.int8), "step": np.array(0.1, np.float32)}
    nodes = [
        node("DequantizeLinear", "rounded step", "kernel"),
        node("Conv", "images kernel", "maps"),
        node("GlobalAveragePool", "maps", "means"),
        node("Flatten", "means", "logits"),
    ]
    nothing = node("Constant", "", "nothing")
    nodes[1].input[1] = "nothing"
    assert "a Constant has 0 attributes, expected one" in refusal(graph_of([nothing, *nodes], rounded), tmp_path)
    nodes[1].input[1] = "kernel"
    made = bundle(graph_of([nothing, *nodes], rounded), tmp_path, features="logits")
    assert made.report.manifest.feature_dim == 6, "nothing reads the constant"


def test_weights_whose_bytes_are_not_those_of_their_shape(tmp_path):
    for change in ({"raw_data": b"123"}, {"dims": [1 << 40, 3, 3, 3]}, {"data_type": 999}):
        model = network()
        tensor = model.graph.initializer[0]
        for name, value in change.items():
            if name == "dims":
                del tensor.dims[:]
                tensor.dims.extend(value)
            else:
                setattr(tensor, name, value)
        assert "1 weights have other bytes than their shape and type say (kernel)" in refusal(model, tmp_path)


def test_weights_that_a_node_holds_are_read_as_others_are(tmp_path):
    spoiled = np.full((6, 3, 3, 3), np.nan, np.float32)
    for is_outside, words in ((False, "hold NaN or infinity (kernel)"), (True, "are in another file (kernel)")):
        model = network()
        del model.graph.initializer[0]
        constant = node("Constant", "", "kernel", value=numpy_helper.from_array(spoiled))
        if is_outside:
            constant.attribute[0].t.data_location = TensorProto.EXTERNAL
            constant.attribute[0].t.external_data.add(key="location", value="/etc/passwd")
        model.graph.node.insert(0, constant)
        assert f"1 weights {words}" in refusal(model, tmp_path)


def test_numbers_and_names_that_nobody_writes(tmp_path):
    model = network()
    model.opset_import[0].version = 1 << 40
    model.graph.input[0].type.tensor_type.elem_type = 67
    message = refusal(model, tmp_path)
    assert "operators of version 1099511627776, devices have up to 21" in message
    assert "input 'images' is of type 67, expected float32" in message


def test_more_nodes_than_are_read(tmp_path):
    nodes = [node("Relu", "images", f"r{number}") for number in range(50_001)]
    assert "50001 nodes, at most 50000 are read" in refusal(graph_of(nodes, {}, "r0"), tmp_path)


def test_a_long_chain_of_sizes_is_given_up(tmp_path, monkeypatch):
    """Each Reshape here needs a turn: of shapes behind it nothing is known before its size is."""
    nodes = [node("Relu", "images", "t0")]
    for link in range(30):
        nodes += [
            node("Shape", f"t{link}", f"s{link}"),
            node("Mod", f"s{link} large", f"m{link}"),
            node("Reshape", f"t{link} m{link}", f"t{link + 1}"),
        ]
    nodes.append(node("Flatten", "t30", "logits"))
    model = graph_of(nodes, {"large": np.array([1000] * 4)})
    assert bundle(model, tmp_path).report.manifest.feature_dim == 192
    (tmp_path / "made.hwb").unlink()
    monkeypatch.setattr(sizes, "_MOST_WORK", 5 * len(nodes))
    assert "operators that not every device has: ai.onnx.Mod" in refusal(model, tmp_path)


def test_names_that_are_no_text(tmp_path):
    path = tmp_path / "network.onnx"
    path.write_bytes(network().SerializeToString().replace(b"kernel", b"\xff\xfernel"))
    with pytest.raises(ExportRejected, match="names that are no UTF-8 text"):
        bundle_network(str(path), tmp_path / "made.hwb", ForeignSettings())


def test_a_network_without_an_output(tmp_path):
    model = network()
    del model.graph.output[:]
    assert "no output, expected features or classes" in refusal(model, tmp_path)


def test_an_operator_of_a_domain_without_a_version(tmp_path):
    model = network([node("Magic", "pooled", "classes", domain="com.example")], output="classes")
    assert "com.example.Magic (1)" in refusal(model, tmp_path)


def test_features_without_a_value(tmp_path):
    bounds = {name: np.array([number]) for name, number in (("start", 0), ("end", 0), ("axis", 1))}
    model = network([node("Slice", "pooled start end axis", "classes")], bounds, "classes")
    assert "[2, 0] for 2 inputs, which holds no value" in refusal(model, tmp_path)


def test_what_the_runtime_alone_finds_out(tmp_path):
    model = network([node("Gather", "pooled place", "classes", axis=1)], {"place": np.array([100])}, "classes")
    assert "ONNX Runtime cannot run it" in refusal(model, tmp_path)


def test_names_like_ours_inside_a_network(tmp_path):
    nodes = [
        node("Relu", "images", "image", name="headwater/flatten"),
        node("Relu", "image", "inner/image", name="headwater/flatten"),
        node("GlobalAveragePool", "inner/image", "headwater/pool"),
        node("Relu", "headwater/pool", "features"),
    ]
    made = bundle(graph_of(nodes, {}, "features"), tmp_path)
    assert made.report.manifest.feature_dim == 3


@pytest.mark.parametrize("axis", [None, 0, -4])
def test_rounded_weights_with_one_scale_and_a_bias_without_an_axis(tmp_path, axis):
    rng = np.random.default_rng(0)
    rows = {} if axis is None else {"axis": axis}
    count = () if axis is None else 6
    nodes = [
        node("QuantizeLinear", "images step zero", "rounded"),
        node("DequantizeLinear", "rounded step zero", "near"),
        node("DequantizeLinear", "kernel8 kernel_step", "kernel", **rows),
        node("DequantizeLinear", "bias32 bias_step", "kernel_bias"),
        node("Conv", "near kernel kernel_bias", "maps"),
        node("Flatten", "maps", "logits"),
    ]
    constants = {
        "step": np.float32(0.05),
        "zero": np.uint8(128),
        "kernel8": rng.integers(-127, 128, (6, 3, 3, 3)).astype(np.int8),
        "kernel_step": np.full(count, 0.01, np.float32),
        "bias32": np.arange(6, dtype=np.int32),
        "bias_step": np.float32(0.01),
    }
    model = graph_of(nodes, constants)
    made = bundle(model, tmp_path, mean="0", std="1")
    images = rng.random((5, 3, 8, 8)).astype(np.float32)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"images": images})[0]
    received = features_of(made, images)
    # An input is rounded to steps of 0.05 in the network alone: at most 0.025 of each of 27 products of at most 1.27.
    assert np.abs(received - expected).max() < 0.025 * 27 * 1.27


@pytest.mark.parametrize("axis", [None, 0])
def test_weights_in_float32_that_are_rounded_each_time(tmp_path, axis):
    """Networks that were trained with rounding: their weights are rounded, and cut off, as the network does it."""
    rng = np.random.default_rng(0)
    rows = {} if axis is None else {"axis": axis}
    steps = np.float32(0.02) if axis is None else np.linspace(0.01, 0.03, 6).astype(np.float32)
    nodes = [
        node("QuantizeLinear", "kernel step zero", "kernel8", **rows),
        node("DequantizeLinear", "kernel8 step zero", "kernel_near", **rows),
        node("Conv", "images kernel_near", "maps"),
        node("Flatten", "maps", "logits"),
    ]
    constants = {
        "kernel": (2 * rng.normal(size=(6, 3, 3, 3))).astype(np.float32),
        "step": steps,
        "zero": np.zeros(steps.shape, np.int8),
    }
    model = graph_of(nodes, constants)
    made = bundle(model, tmp_path, mean="0", std="1")
    images = rng.random((5, 3, 8, 8)).astype(np.float32)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"images": images})[0]
    np.testing.assert_allclose(features_of(made, images), expected, atol=1e-4)


def test_scales_that_fit_nothing(tmp_path):
    nodes = [
        node("DequantizeLinear", "kernel8 kernel_step", "kernel", axis=1),
        node("Conv", "images kernel", "maps"),
        node("Flatten", "maps", "logits"),
    ]
    weights = np.ones((6, 3, 3, 3), np.int8)
    for steps in (6, 0):
        constants = {"kernel8": weights, "kernel_step": np.ones(steps, np.float32)}
        assert "rounds in a form that is not understood" in refusal(graph_of(nodes, constants), tmp_path)


@pytest.mark.parametrize(
    "behind, constants, is_shared",
    [
        ([node("Softmax", "logits", "classes")], {}, True),
        ([node("Div", "logits five", "classes")], {"five": np.float32(5)}, False),
        ([node("Sub", "zero logits", "classes")], {"zero": np.float32(0)}, False),
        ([node("Mul", "logits each", "classes")], {"each": np.array([1, -2, 3, -4], np.float32)}, False),
        ([node("Add", "logits again", "classes")], {"again": np.array([9, 0, 0, 0], np.float32)}, False),
        ([node("Add", "logits logits", "classes")], {}, False),
    ],
)
def test_a_shared_classifier_answers_as_the_network_or_there_is_none(tmp_path, behind, constants, is_shared):
    model = network(behind, constants, "classes")
    made = bundle(model, tmp_path, classes=CLASSES, features="pooled", mean="0", std="1")
    shared = classifier_of(made)
    assert (shared is not None) == is_shared
    if shared is None:
        assert any("no shared classifier" in note for note in made.notes)
        return
    images = np.random.default_rng(1).normal(size=(50, 3, 8, 8)).astype(np.float32)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"images": images})[0]
    features = features_of(made, images)
    logits = features @ shared["weight"].T + shared["bias"]
    shares = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(shares / shares.sum(1, keepdims=True), expected, atol=1e-5)


def test_an_added_bias_of_a_product_is_that_of_the_classifier(tmp_path):
    nodes = [
        node("GlobalAveragePool", "images", "means"),
        node("Flatten", "means", "pooled"),
        node("MatMul", "pooled weight", "product"),
        node("Add", "bias product", "logits"),
    ]
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    bias = np.array([1, 2, 3, 4], np.float32)
    made = bundle(graph_of(nodes, {"weight": weight, "bias": bias}), tmp_path, classes=CLASSES)
    shared = classifier_of(made)
    np.testing.assert_array_equal(shared["weight"], weight.T)
    np.testing.assert_array_equal(shared["bias"], bias)


@pytest.mark.parametrize(
    "name, words",
    [
        ("folder.onnx", "is not a file"),
        ("folder", "is not a file"),
        ("net.py", "net.py:NAME"),
        ("weights.pth", "weights without a network"),
        ("made.hwb", "it is a bundle already"),
        ("n" * 5000, "neither an ONNX file"),
    ],
)
def test_sources_that_are_something_else(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    if name.startswith("folder"):
        (tmp_path / name).mkdir()
    elif len(name) < 100:
        (tmp_path / name).write_bytes(b"something")
    with pytest.raises(UsageError, match=words):
        bundle_network(name, tmp_path / "out.hwb", ForeignSettings())


@pytest.mark.parametrize(
    "settings", [{"length": 100}, {"stride": 5}, {"normalize_each": True}, {"std": ()}, {"classes": "a\0"}]
)
def test_options_that_mean_nothing_for_images(tmp_path, settings):
    with pytest.raises(UsageError):
        bundle(network(), tmp_path, **settings)
    assert onnx.load(tmp_path / "network.onnx").graph.node
