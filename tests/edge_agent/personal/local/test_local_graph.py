"""Features of raw inputs as ONNX operators: by ONNX Runtime the same numbers as by numpy."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_agent.core.graph import Graph, Value
from edge_agent.core.task import ImageInput, WindowInput
from edge_agent.personal.local.models import LocalFeatures, candidates

IMAGES = [(1, 8, 8), (3, 32, 32), (3, 33, 47), (1, 4, 40), (3, 70, 90), (3, 5, 7), (3, 130, 128)]
WINDOWS = [(1, 16), (6, 100), (3, 9), (2, 50), (1, 200)]


def run(features: LocalFeatures, inputs: np.ndarray) -> np.ndarray:
    graph = Graph()
    output = features.write(graph, Value("inputs"))
    nodes = []
    for node in graph.nodes:
        attributes = dict(node.attributes)
        if node.operator == "Cast":
            attributes["to"] = helper.np_dtype_to_tensor_dtype(np.dtype(attributes["to"]))
        nodes.append(helper.make_node(node.operator, list(node.inputs), list(node.outputs), **attributes))
    shape = ["n", *inputs.shape[1:]]
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "features",
            [helper.make_tensor_value_info("inputs", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["n", "d"])],
            [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in graph.constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", 13)],
        ir_version=8,
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"inputs": inputs})[0]


def prepared_images(shape, count=5):
    """Images as the encoder takes them: noise, a gradient, one colour, stripes, and black and white squares."""
    rng = np.random.default_rng(1)
    channels, height, width = shape
    images = rng.integers(0, 256, (count, *shape)).astype(np.float32)
    images[1] = np.linspace(0, 255, width).astype(int)
    images[2] = 128
    images[3] = 255 * (np.arange(height)[:, None] // 3 % 2)
    images[4] = 255 * ((np.arange(height)[:, None] // 4 + np.arange(width) // 4) % 2)
    spec = ImageInput(channels=channels, height=height, width=width, mean=(0.4,) * channels, std=(0.25,) * channels)
    return spec, ((images / 255 - np.float32(0.4)) / np.float32(0.25)).astype(np.float32)


def prepared_windows(shape, count=6):
    """Windows: noise, two waves, a ramp, a constant that is no binary fraction, zeros, and a spike."""
    rng = np.random.default_rng(2)
    channels, length = shape
    windows = rng.normal(size=(count, *shape)).astype(np.float32)
    time = np.arange(length)
    windows[1] = np.sin(0.7 * time) + 0.3 * np.cos(2.1 * time)
    windows[2] = time / 7
    windows[3] = 0.1
    windows[4] = 0
    windows[5] = (time == length // 2) * 3.0
    return WindowInput(channels=channels, length=length, stride=length), windows


CASES = [
    *((name, shape, prepared_images) for shape in IMAGES for name in candidates(prepared_images(shape)[0])),
    *((name, shape, prepared_windows) for shape in WINDOWS for name in candidates(prepared_windows(shape)[0])),
]


@pytest.mark.parametrize("name, shape, make", CASES)
def test_operators_compute_what_numpy_does(name, shape, make):
    spec, inputs = make(shape)
    learned = candidates(spec)[name].learn(inputs, np.random.default_rng(0))
    features = LocalFeatures(name, spec, learned)
    expected = features(inputs)
    found = run(features, inputs)
    assert found.shape == expected.shape
    # A share of outputs above a threshold moves by 1 / length where one decision differs; nothing may differ.
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5)
    assert len(run(features, inputs[:1])) == 1


def test_the_most_frequent_class_takes_nothing_out_of_inputs():
    spec, inputs = prepared_windows((2, 50))
    features = LocalFeatures("most frequent class", spec)
    assert run(features, inputs).tolist() == features(inputs).tolist() == [[0.0]] * len(inputs)
