"""Networks as other projects export them, small and with random weights: what ``headwater bundle`` is tested on.

They have the structure of the real ones (operators, names, numbers of inputs and outputs, versions), and none of their
weights: tests have no network to fetch these from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from export.encoder import quiet


def seeded(network: nn.Module, seed: int = 0) -> nn.Module:
    """Return the network with random weights and batch norm statistics that are not those of the start."""
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            module.running_mean.copy_(0.3 * torch.randn(module.num_features, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(module.num_features, generator=generator))
    for parameter in network.parameters():
        if parameter.ndim > 1:
            fan_in = parameter[0].numel()
            parameter.data = torch.randn(parameter.shape, generator=generator) * (2 / fan_in) ** 0.5
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv1d) and module.bias is not None:
            module.bias.data = 0.1 * torch.randn(module.bias.shape, generator=generator)
    return network.eval()


class SmallResNet(nn.Module):
    """A residual network in the form of torchvision's: stem, two blocks, pooling, ``fc``; 16 features, 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.block = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(images)))
        x = torch.relu(x + self.block(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def export(network: nn.Module, path: Path, example: torch.Tensor, **options: Any) -> Path:
    """Export a network by torch's older exporter, with a free batch axis unless ``dynamic_axes`` says otherwise."""
    names = {"input_names": ["input"], "output_names": ["logits"], **options}
    axes = {name: {0: "batch"} for name in (*names["input_names"], *names["output_names"])}
    names.setdefault("dynamic_axes", axes)
    opset = names.pop("opset", 17)
    with quiet("torch.onnx"), torch.no_grad():
        torch.onnx.export(network, (example,), str(path), dynamo=False, opset_version=opset, **names)
    return path


def torchvision_export(folder: Path) -> Path:
    """A residual network with one output, as torchvision's models are exported."""
    return export(seeded(SmallResNet()), folder / "resnet.onnx", torch.zeros(1, 3, 32, 32))


def edited(path: Path, change: Any) -> Path:
    """Return a copy of an ONNX file, beside it, after ``change`` was called with its model."""
    model = onnx.load(path)
    change(model)
    target = path.with_name(f"edited-{path.name}")
    onnx.save(model, target)
    return target


class SmallTransformer(nn.Module):
    """A vision transformer in the form of Hugging Face's, with three outputs: 24 features, 4 classes, 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 8, stride=8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 24))
        self.position = nn.Parameter(torch.randn(1, 17, 24))
        self.norm1 = nn.LayerNorm(24)
        self.query, self.key, self.value, self.output = (nn.Linear(24, 24) for _ in range(4))
        self.norm2 = nn.LayerNorm(24)
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.layernorm = nn.LayerNorm(24)
        self.pooler = nn.Linear(24, 24)
        self.classifier = nn.Linear(24, 4)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        patches = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], 1) + self.position
        y = self.norm1(x)
        queries, keys, values = (
            layer(y).unflatten(2, (2, 12)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attention = torch.softmax(queries @ keys.transpose(2, 3) / 12**0.5, -1)
        x = x + self.output((attention @ values).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        hidden = self.layernorm(x)
        return self.classifier(hidden[:, 0]), hidden, torch.tanh(self.pooler(hidden[:, 0]))


def hugging_face_export(folder: Path) -> Path:
    """A transformer with outputs ``logits``, ``last_hidden_state`` and ``pooler_output``, and its preprocessor file."""
    (folder / "preprocessor_config.json").write_text(
        """{"image_processor_type": "ViTImageProcessor", "do_normalize": true, "do_rescale": true, "do_resize": true,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 2,
        "rescale_factor": 0.00392156862745098, "size": {"height": 32, "width": 32}}"""
    )
    names = ["logits", "last_hidden_state", "pooler_output"]
    network = seeded(SmallTransformer())
    sides = {0: "batch", 2: "height", 3: "width"}
    axes = {"pixel_values": sides, **{name: {0: "batch"} for name in names}}
    example = torch.zeros(2, 3, 32, 32)
    options = {"input_names": ["pixel_values"], "output_names": names, "dynamic_axes": axes}
    return export(network, folder / "vit.onnx", example, **options)


class _PaddleGraph:
    """A graph written node by node, with the operators and names of paddle2onnx."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.last = "x"

    def add(self, operator: str, *constants: np.ndarray, **attributes: Any) -> str:
        """Add a node behind the last one."""
        number = len(self.nodes)
        names = [f"w_{number}_{position}" for position in range(len(constants))]
        self.constants += [numpy_helper.from_array(array, name) for array, name in zip(constants, names, strict=True)]
        name = f"{operator.lower()}_{number}.tmp_0"
        self.nodes.append(helper.make_node(operator, [self.last, *names], [name], **attributes))
        self.last = name
        return name

    def add_conv(self, inputs: int, outputs: int, stride: int, group: int = 1) -> None:
        """Add a convolution 3 x 3, batch norm and hard swish in four steps, as Paddle writes it."""
        weight = self.rng.standard_normal((outputs, inputs // group, 3, 3)) * (2 / (9 * inputs / group)) ** 0.5
        pads = [1, 1, 1, 1]
        self.add("Conv", weight.astype(np.float32), strides=[stride, stride], pads=pads, group=group, dilations=[1, 1])
        statistics = [1 + 0.1 * self.rng.random(outputs), 0.1 * self.rng.standard_normal(outputs)]
        statistics += [0.1 * self.rng.standard_normal(outputs), 0.5 + self.rng.random(outputs)]
        self.add("BatchNormalization", *(part.astype(np.float32) for part in statistics), epsilon=1e-5)
        convolved = self.last
        self.add("Add", np.array([3], np.float32))
        self.add("Clip", np.array(0, np.float32), np.array(6, np.float32))
        clipped = self.last
        self.nodes.append(helper.make_node("Mul", [convolved, clipped], [f"{clipped}.mul"]))
        self.last = f"{clipped}.mul"
        self.add("Div", np.array([6], np.float32))


def ocr_export(folder: Path) -> Path:
    """A classifier of the direction of text lines as Paddle exports it: opset 11, fixed sides, Softmax at the end."""
    graph = _PaddleGraph()
    graph.add_conv(3, 8, 2)
    graph.add_conv(8, 8, 1, group=8)
    graph.add_conv(8, 24, 2)
    graph.add("GlobalAveragePool")
    graph.add("Reshape", np.array([-1, 24], np.int64))
    graph.add("Dropout")
    graph.add("MatMul", graph.rng.standard_normal((24, 2)).astype(np.float32))
    graph.add("Add", np.array([0.1, -0.1], np.float32))
    last = graph.add("Softmax", axis=1)
    declared = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 48, 192]),
        helper.make_tensor_value_info(last, TensorProto.FLOAT, ["batch", 2]),
    ]
    made = helper.make_graph(graph.nodes, "Model from PaddlePaddle.", declared[:1], declared[1:], graph.constants)
    model = helper.make_model(
        made, opset_imports=[helper.make_opsetid("", 11)], producer_name="PaddlePaddle", ir_version=7
    )
    onnx.save(model, folder / "ocr.onnx")
    return folder / "ocr.onnx"


class SmallWave2Vec(nn.Module):
    """A network for raw sound in the form of wav2vec: strided convolutions over time, a projection, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 16, 10, stride=5), nn.GroupNorm(16, 16), nn.GELU(), nn.Conv1d(16, 16, 3, stride=2), nn.GELU()
        )
        self.norm = nn.LayerNorm(16)
        self.projection = nn.Linear(16, 20)
        self.projector = nn.Linear(20, 12)
        self.classifier = nn.Linear(12, 3)

    def forward(self, input_values: torch.Tensor) -> torch.Tensor:
        x = self.features(input_values[:, None]).transpose(1, 2)
        return self.classifier(self.projector(self.projection(self.norm(x))).mean(1))


def audio_export(folder: Path) -> Path:
    """A network for sounds that takes (batch, samples) of any length, and its preprocessor file."""
    (folder / "preprocessor_config.json").write_text(
        """{"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": true, "feature_size": 1,
        "padding_value": 0.0, "return_attention_mask": false, "sampling_rate": 16000}"""
    )
    axes = {"input_values": {0: "batch", 1: "samples"}, "logits": {0: "batch"}}
    options = {"input_names": ["input_values"], "dynamic_axes": axes}
    return export(seeded(SmallWave2Vec()), folder / "audio.onnx", torch.zeros(2, 800), **options)


class _Reader:
    """Random inputs for ONNX Runtime's quantizer, which asks for one batch after the other."""

    def __init__(self, count: int = 4) -> None:
        rng = np.random.default_rng(0)
        self._batches = [{"input": rng.standard_normal((4, 3, 32, 32)).astype(np.float32)} for _ in range(count)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next batch; None at the end."""
        return self._batches.pop() if self._batches else None


def quantized_export(folder: Path) -> Path:
    """The residual network after ONNX Runtime's static quantization: 8-bit weights of each channel, QDQ."""
    from onnxruntime import quantization

    source = torchvision_export(folder)
    target = folder / "resnet-int8.onnx"
    with quiet(None):
        quantization.quantize_static(str(source), str(target), _Reader(), per_channel=True)
    return target


def dynamically_quantized_export(folder: Path) -> Path:
    """The transformer after dynamic quantization: weights of 8 bits, ranges found while it runs."""
    from onnxruntime import quantization

    target = folder / "vit-int8.onnx"
    with quiet(None):
        quantization.quantize_dynamic(str(hugging_face_export(folder)), str(target))
    return target
