"""Small bundles made with onnx.helper: a linear encoder whose features numpy can work out for itself."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edge_agent.bundle import archive
from edge_agent.bundle import manifest as manifest_module
from edge_agent.core.task import ImageInput, Task, WindowInput
from edge_agent.wire.tensors import encode

TASK = Task(
    input=ImageInput(channels=3, height=8, width=8),
    class_names=tuple("0123456789"),
    encoder="linear",
    encoder_params={},
)


@dataclass(frozen=True)
class Made:
    """A bundle file and the matrix of its encoder: features = relu(flatten(x) @ weight.T)."""

    path: Path
    weight: np.ndarray
    manifest: manifest_module.Manifest

    def features(self, inputs: np.ndarray) -> np.ndarray:
        return np.maximum(inputs.reshape(len(inputs), -1) @ self.weight.T, 0)


def linear_onnx(weight: np.ndarray, shape: tuple[int, ...]) -> bytes:
    """Flatten, Gemm, Relu as an ONNX file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx import TensorProto, helper, numpy_helper
    nodes = [
        helper.make_node("Flatten", ["image"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weight"], ["product"], transB=1),
        helper.make_node("Relu", ["product"], ["features"]),
    ]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", *shape])],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", len(weight)])],
        [numpy_helper.from_array(weight.astype(np.float32), "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString(deterministic=True)


def golden_inputs(task: Task, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Raw golden inputs, and what the encoder gets of them, worked out here; resizing is Pillow's."""
    spec = task.input
    names = np.frombuffer(hashlib.sha256(json.dumps(list(task.class_names)).encode()).digest(), np.uint8)
    if isinstance(spec, WindowInput):
        raw = rng.normal(size=(spec.length + 7 * spec.stride, spec.channels)).astype(np.float32)
        windows = np.stack([raw[start : start + spec.length].T for start in range(0, 8 * spec.stride, spec.stride)])
        return {"raw": raw, "class_names": names}, (windows - of_channels(spec.mean, 1)) / of_channels(spec.std, 1)
    raw = rng.integers(0, 256, (8, spec.height, spec.width, spec.channels), dtype=np.uint8)
    photo = rng.integers(0, 256, (spec.height * 3 // 2, spec.width * 4 // 3, spec.channels), dtype=np.uint8)
    image = Image.fromarray(photo if spec.channels == 3 else photo[:, :, 0])
    resized = np.asarray(image.resize((spec.width, spec.height), Image.Resampling.BILINEAR))
    resized = resized.reshape(spec.height, spec.width, spec.channels).transpose(2, 0, 1)
    inputs = ((raw.transpose(0, 3, 1, 2) / 255 - of_channels(spec.mean, 2)) / of_channels(spec.std, 2)).astype(
        np.float32
    )
    return {"raw": raw, "photo": photo, "resized": np.ascontiguousarray(resized), "class_names": names}, inputs


def of_channels(values: tuple[float, ...], axes: int) -> np.ndarray:
    """One value, or one for each channel, in front of so many further axes."""
    return np.reshape(np.asarray(values, np.float32), (-1, *[1] * axes))


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[..., Made]:
    """A function that packs a bundle with a random linear encoder."""

    def make(
        name: str = "b.hwb",
        *,
        task: Task = TASK,
        dim: int = 24,
        seed: int = 0,
        int8: bool = False,
        global_head: bool = False,
        statistics: bool = False,
        extra: Mapping[str, Any] | None = None,
        spoilt: Mapping[str, np.ndarray] | None = None,
        golden_error: float = 0.0,
        int8_golden_error: float = 0.0,
        int8_steps: int = 64,
    ) -> Made:
        rng = np.random.default_rng(seed)
        size = int(np.prod(task.input_shape))
        weight = (rng.normal(size=(dim, size)) / np.sqrt(size)).astype(np.float32)
        golden, inputs = golden_inputs(task, rng)
        features = np.maximum(inputs.reshape(8, -1) @ weight.T, 0) + np.float32(golden_error)
        golden["features_fp32"] = features.astype(np.float32)
        files: dict[str, bytes] = {"encoder.onnx": linear_onnx(weight, task.input_shape)}
        variants = {"fp32": "encoder.onnx"}
        if int8:
            coarse = np.round(weight * int8_steps) / int8_steps
            files["encoder.int8.onnx"] = linear_onnx(coarse, task.input_shape)
            rough = np.maximum(inputs.reshape(8, -1) @ coarse.T, 0) + np.float32(int8_golden_error)
            golden["features_int8"] = rough.astype(np.float32)
            variants["int8"] = "encoder.int8.onnx"
        if global_head:
            drawn = {"weight": rng.normal(size=(task.num_classes, dim)), "bias": rng.normal(size=task.num_classes)}
            shared = {key: array.astype(np.float32) for key, array in drawn.items()}
            golden["logits"] = golden["features_fp32"] @ shared["weight"].astype(np.float64).T + shared["bias"]
            files["global_head.safetensors"] = encode(shared)
        if statistics:
            classes = task.num_classes
            known = {
                "gram": np.eye(dim, dtype=np.float32)[np.triu_indices(dim)],
                "sums": np.full((classes, dim), 0.1 / classes, np.float32),
                "shares": np.full(classes, 1 / classes, np.float32),
            }
            files["shared_statistics.safetensors"] = encode(known)
        files["golden.safetensors"] = encode({**golden, **(spoilt or {})})
        fields: dict[str, Any] = {
            "name": "test",
            "created": "2026-01-01T00:00:00Z",
            "headwater_version": "0.1.0",
            "method": "fedavg",
            "task": task,
            "feature_dim": dim,
            "variants": variants,
            "opset": 17,
            "exporter": "legacy",
            "parity": {"max_abs": 0.0, "scale": 1.0, "batches": (1, 2)},
            "heads": {
                "lr": {"exactness": "exact", "reason": "the method's own head", "params": {"c": 0.5}},
                "prototype": {"exactness": "approximate", "reason": "for comparison"},
            },
        }
        if global_head:
            fields["global_head"] = "global_head.safetensors"
        if statistics:
            fields["shared_statistics"] = "shared_statistics.safetensors"
        manifest = archive.pack(tmp_path / name, {**fields, **(extra or {})}, files)
        return Made(tmp_path / name, weight, manifest)

    return make
