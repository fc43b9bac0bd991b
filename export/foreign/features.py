"""Where in a network its features are: at the tensor that is named, or in front of its last classifier."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import numpy_helper

from edge_agent.core.errors import ExportRejected, UsageError
from edge_agent.core.task import Tensors

_CLASSIFIERS = ("Gemm", "MatMul", "Conv")
_SHARES = ("Softmax", "LogSoftmax", "Sigmoid", "HardSigmoid")
"""Operators whose results are shares of classes."""

_BEHIND_CLASSIFIER = frozenset(
    {
        *_SHARES,
        "Add", "ArgMax", "AveragePool", "Cast", "Clip", "Div", "Dropout", "Flatten", "GlobalAveragePool", "Identity",
        "Mul", "ReduceMean", "Relu", "Reshape", "Squeeze", "Sub", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators that may follow a classifier; normalization does not, it follows a layer that makes features."""

_KEEPS_CLASSES = frozenset(
    {*_SHARES, "ArgMax", "Cast", "Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators behind a classifier that leave its logits as they are, or make shares of them in the same order."""

_SHAPING = frozenset({"Cast", "Clip", "Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that leave the values of shares as they are."""

_FEATURE_NAMES = (
    "image_embeds",
    "pooler_output",
    "embeddings",
    "embedding",
    "features",
    "feature",
    "last_hidden_state",
)
"""Names that exporters give to outputs that are features, the one to prefer first."""


@dataclass(frozen=True)
class FeaturePoint:
    """The tensor of a network that is taken for its features."""

    tensor: str
    """Its name."""

    reason: str
    """Why it was taken, for people."""

    classifier: Tensors | None = None
    """The linear layer behind it, ``weight`` (K, d) and ``bias`` (K,) float32; None where there is none to be had."""


def find_features(model: Any, name: str | None = None) -> FeaturePoint:
    """Return the tensor of a model that is its features.

    Args:
        model: The network, an `onnx.ModelProto`.
        name: The tensor to take; None: the input of the last classifier, else an output that is named like features.

    Raises:
        UsageError: There is no such tensor, or several outputs and nothing says which one to take.
        ExportRejected: The tensor is a share of classes, or does not depend on the input.
    """
    graph = _Network(model)
    point = _found_point(graph) if name is None else _named_point(graph, name)
    shares = graph.shares_before(point.tensor)
    if shares:
        raise ExportRejected(
            f"features '{point.tensor}' are behind {shares}: shares of classes, from which nothing new can be learned; "
            f"{_advice(graph, shares)}"
        )
    return point


class _Network:
    """The nodes of a model by their results, and which results depend on its input."""

    def __init__(self, model: Any) -> None:
        self.graph = model.graph
        self.constants = {tensor.name: tensor for tensor in self.graph.initializer}
        self.producers: dict[str, Any] = {}
        self.computed = {value.name for value in self.graph.input} - self.constants.keys()
        """Names of the results that depend on the input."""
        for node in self.graph.node:
            self.producers.update(dict.fromkeys(node.output, node))
            if self.computed.intersection(node.input):
                self.computed.update(node.output)
            if node.op_type == "Constant":
                values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
                self.constants.update(dict.fromkeys(node.output[:1], *values) if values else {})

    def computed_inputs(self, node: Any) -> list[str]:
        """Return the inputs of a node that depend on the network's input."""
        return [name for name in node.input if name in self.computed]

    def classifier_of(self, output: str) -> tuple[Any, list[Any]] | None:
        """Return the node of the classifier behind which an output lies, and the nodes behind it, last one first."""
        passed: list[Any] = []
        node = self.producers.get(output)
        while node is not None:
            sources = self.computed_inputs(node)
            if node.op_type in _CLASSIFIERS:
                return (node, passed) if self._is_classifier(node, sources) else None
            if node.op_type not in _BEHIND_CLASSIFIER or len(sources) != 1:
                return None
            passed.append(node)
            node = self.producers.get(sources[0])
        return None

    def _is_classifier(self, node: Any, sources: list[str]) -> bool:
        """Return whether a layer with weights may be a classifier: of convolutions only one that looks at one place."""
        if sources != [node.input[0]]:
            return False
        if node.op_type != "Conv":
            return True
        weight = self.constants.get(node.input[1])
        return weight is not None and all(side == 1 for side in weight.dims[2:])

    def shares_before(self, tensor: str) -> str:
        """Return the operator that makes shares of classes of which a tensor consists; empty where there is none."""
        node = self.producers.get(tensor)
        while node is not None:
            if node.op_type in _SHARES:
                return str(node.op_type)
            sources = self.computed_inputs(node)
            if node.op_type not in _SHAPING or len(sources) != 1:
                return ""
            node = self.producers.get(sources[0])
        return ""

    def tensors(self) -> Iterator[str]:
        """Yield the names of all results that depend on the input, in the order in which they are computed."""
        for node in self.graph.node:
            yield from (name for name in node.output if name in self.computed)


def _named_point(graph: _Network, name: str) -> FeaturePoint:
    """Return the point at a tensor, or at the result of a node, of this name."""
    names = [*graph.tensors()]
    tensor = name
    if name not in names:
        # People read the names of nodes as well.
        by_node = {node.name: node.output[0] for node in graph.graph.node if node.name}
        tensor = by_node.get(name, "")
    if tensor not in names:
        near = difflib.get_close_matches(name, names, 3, 0.4) or names[-3:]
        raise UsageError(
            f"--features {name}: no such tensor among {len(names)}; similar or near the end: {', '.join(near)}"
        )
    for output in graph.graph.output:
        behind = graph.classifier_of(output.name)
        if behind is not None and graph.computed_inputs(behind[0]) == [tensor]:
            return FeaturePoint(tensor, "as named", _linear_layer(graph, *behind))
    return FeaturePoint(tensor, "as named")


def _found_point(graph: _Network) -> FeaturePoint:
    """Return the point in front of the last classifier, or at an output that is named like features."""
    outputs = [value.name for value in graph.graph.output]
    named = [name for name in _FEATURE_NAMES if name in outputs]
    candidates = [name for name in outputs if name not in named]
    # 1. Outputs that are called logits come first, then the others in their order.
    candidates.sort(key=lambda name: "logit" not in name.lower())
    for output in candidates:
        behind = graph.classifier_of(output)
        if behind is None:
            continue
        node, passed = behind
        tensor = graph.computed_inputs(node)[0]
        label = node.name or node.output[0]
        return FeaturePoint(
            tensor, f"the input of the classifier '{label}' ({node.op_type})", _linear_layer(graph, node, passed)
        )
    # 2. An encoder without a classifier.
    if named:
        return FeaturePoint(named[0], f"the output '{named[0]}'")
    if len(outputs) == 1:
        return FeaturePoint(outputs[0], "the only output; it is behind no classifier")
    raise UsageError(
        f"{len(outputs)} outputs ({', '.join(outputs[:10])}), none of them behind a classifier; name one: "
        f"--features {outputs[0]}"
    )


def _linear_layer(graph: _Network, node: Any, passed: list[Any]) -> Tensors | None:
    """Return weight (K, d) and bias (K,) of a classifier; None where it is not a plain linear layer of constants.

    Args:
        graph: The network.
        node: The node of the classifier.
        passed: The nodes behind it, the last one first. Where they change the logits, as a temperature does, the layer
            alone would give other answers than the network, and None is returned.
    """
    # 1. The weight.
    matrix = _matrix_of(graph, node)
    if matrix is None:
        return None
    # 2. Nothing behind weight and bias changes the logits.
    bias_name, behind = _bias_and_rest(graph, node, passed)
    if any(later.op_type not in _KEEPS_CLASSES for later in behind):
        return None
    # 3. The bias.
    bias = _bias_of(graph, bias_name, len(matrix))
    if bias is None:
        return None
    return {"weight": np.ascontiguousarray(matrix), "bias": bias}


def _matrix_of(graph: _Network, node: Any) -> np.ndarray | None:
    """Return the weight (K, d) float32 of a node; None where it is not a plain product with a constant matrix."""
    weight = graph.constants.get(node.input[1])
    if weight is None or node.op_type == "Conv":
        return None
    matrix = numpy_helper.to_array(weight).astype(np.float32)
    if matrix.ndim != 2:
        return None
    # alpha and beta scale product and bias, transA transposes the features: then it is no plain linear layer.
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if any(attributes[name].f != 1.0 for name in ("alpha", "beta") if name in attributes):
        return None
    if _is_set(attributes, "transA"):
        return None
    return matrix if _is_set(attributes, "transB") else matrix.T


def _is_set(attributes: Mapping[str, Any], name: str) -> bool:
    """Return whether an attribute of a node is there and not 0."""
    return name in attributes and bool(attributes[name].i)


def _bias_and_rest(graph: _Network, node: Any, passed: list[Any]) -> tuple[str, list[Any]]:
    """Return the name of a classifier's bias, empty where it has none, and the nodes behind weight and bias.

    The bias is the third input of a Gemm, or what the next node adds.
    """
    bias_name = node.input[2] if node.op_type == "Gemm" and len(node.input) > 2 else ""
    behind = list(passed)
    if not bias_name and behind and behind[-1].op_type == "Add":
        addition = behind.pop()
        bias_name = next(source for source in addition.input if source not in graph.computed)
    return bias_name, behind


def _bias_of(graph: _Network, name: str, count: int) -> np.ndarray | None:
    """Return the bias (K,) with a name, zeros where there is none; None where it is not a constant of K numbers."""
    if not name:
        return np.zeros(count, np.float32)
    constant = graph.constants.get(name)
    if constant is None:
        return None
    bias = numpy_helper.to_array(constant).astype(np.float32).reshape(-1)
    return bias if len(bias) == count else None


def _advice(graph: _Network, shares: str) -> str:
    """Return what to name instead of shares of classes."""
    node = next(node for node in graph.graph.node if node.op_type == shares)
    behind = graph.classifier_of(node.output[0])
    if behind is None:
        return "name a tensor before it: --features NAME"
    return f"name the input of the classifier: --features {graph.computed_inputs(behind[0])[0]}"
