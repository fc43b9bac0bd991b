"""Networks whose inputs have other axes than a device's, against torch on inputs that are arranged by hand."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from foreign_networks import SmallTransformer, edited, export, seeded
from torch import nn

from edge_agent.bundle.archive import open_bundle
from edge_agent.core.errors import UsageError
from export.foreign import ForeignSettings, bundle_network
from export.foreign.graph_file import read_graph
from export.foreign.sizes import fix_sizes, unknown_operators
from export.parity import run


class Lines(nn.Module):
    """Weights of its own for every position of an input, so that a wrong order gives other features."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.first = nn.Linear(int(np.prod(shape)), 10)
        self.last = nn.Linear(10, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(inputs.flatten(1))))


CASES = [
    ("NHWC", (6, 8, 3), {}, (3, 6, 8), lambda x: x.transpose(0, 2, 3, 1)),
    ("NCHW", (3, 6, 8), {"bgr": True}, (3, 6, 8), lambda x: x[:, ::-1]),
    ("NHWC", (6, 8, 3), {"bgr": True}, (3, 6, 8), lambda x: x[:, ::-1].transpose(0, 2, 3, 1)),
    ("NCL", (4, 20), {}, (4, 20), lambda x: x),
    ("NLC", (20, 4), {"layout": "NLC"}, (4, 20), lambda x: x.transpose(0, 2, 1)),
    ("NL", (20,), {}, (1, 20), lambda x: x[:, 0]),
    ("N1CL", (1, 4, 20), {"kind": "window"}, (4, 20), lambda x: x[:, None]),
    ("N1LC", (1, 20, 4), {"layout": "N1LC"}, (4, 20), lambda x: x.transpose(0, 2, 1)[:, None]),
]


@pytest.mark.parametrize("layout, sides, settings, shape, arrange", CASES)
def test_inputs_are_brought_into_the_order_of_the_network(tmp_path, layout, sides, settings, shape, arrange):
    network = seeded(Lines(*sides))
    path = export(network, tmp_path / "lines.onnx", torch.zeros(2, *sides))
    made = bundle_network(str(path), tmp_path / "lines.hwb", ForeignSettings(**settings))
    assert (made.form.layout, made.form.spec.shape) == (layout, shape)
    inputs = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    with torch.no_grad():
        given = torch.from_numpy(np.ascontiguousarray(arrange(inputs)))
        expected = torch.relu(network.first(given.flatten(1))).numpy()
    received = run(open_bundle(made.report.path).read("encoder.onnx"), inputs)
    assert np.allclose(received, expected, atol=1e-5)


def test_windows_of_several_channels_are_not_normalized_one_by_one(tmp_path):
    path = export(seeded(Lines(4, 20)), tmp_path / "lines.onnx", torch.zeros(2, 4, 20))
    with pytest.raises(UsageError, match="of 1 channel only"):
        bundle_network(str(path), tmp_path / "lines.hwb", ForeignSettings(normalize_each=True))


def test_names_of_the_network_that_a_bundle_needs_itself_are_changed(tmp_path):
    """Its input is called features, and a value inside image."""
    path = export(seeded(Lines(3, 6, 8)), tmp_path / "lines.onnx", torch.zeros(2, 3, 6, 8), input_names=["features"])

    def rename(model):
        inner = model.graph.node[0].output[0]
        for node in model.graph.node:
            node.input[:] = ["image" if name == inner else name for name in node.input]
            node.output[:] = ["image" if name == inner else name for name in node.output]

    plain = bundle_network(str(path), tmp_path / "plain.hwb", ForeignSettings())
    named = bundle_network(str(edited(path, rename)), tmp_path / "named.hwb", ForeignSettings())
    inputs = np.random.default_rng(0).standard_normal((2, 3, 6, 8)).astype(np.float32)
    graphs = [open_bundle(made.report.path).read("encoder.onnx") for made in (plain, named)]
    assert np.array_equal(run(graphs[0], inputs), run(graphs[1], inputs))


def test_sizes_become_constants_and_multiples_of_the_batch(tmp_path):
    """A token for each input is the only size of the transformer that grows with the batch."""
    axes = {"pixel_values": {0: "batch", 2: "height", 3: "width"}, "logits": {0: "batch"}}
    options = {"input_names": ["pixel_values"], "dynamic_axes": axes}
    path = export(seeded(SmallTransformer()), tmp_path / "vit.onnx", torch.zeros(2, 3, 32, 32), **options)
    model = read_graph(path)
    assert "ai.onnx.Equal" in set(unknown_operators(model))
    sides = ["batch", 3, 32, 32]
    model.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("pixel_values", 1, sides))
    fixed = fix_sizes(model)
    assert set(unknown_operators(fixed)) == set()
    images = np.random.default_rng(0).standard_normal((5, 3, 32, 32)).astype(np.float32)
    assert np.allclose(run(fixed.SerializeToString(), images), run(model.SerializeToString(), images), atol=1e-6)
