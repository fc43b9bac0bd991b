"""The weights of a bundle's encoder by the names of its network, read back from its fp32 graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..bundle.archive import open_bundle
from ..bundle.manifest import MANIFEST
from ..core.errors import BundleError, MissingCapability, WeightsError
from ..core.storage import read_regular
from ..core.task import Tensors

_STATISTICS = {3: "running_mean", 4: "running_var"}
"""Position of an input of a batch norm node -> the name that torch gives this tensor of the layer."""


def is_bundle(path: Path) -> bool:
    """Return whether a file begins as a bundle does, with its manifest; a file that cannot be read does not."""
    beginning = MANIFEST.encode()
    try:
        return read_regular(path, len(beginning)) == beginning
    except OSError:
        return False


def read_bundle_weights(path: Path) -> Tensors:
    """Return the constants of a bundle's fp32 graph by the names that its network in torch gives them.

    Statistics of batch norm have the name of their layer. Where a graph's batch norm is folded into its convolutions,
    as in bundles of networks that no run has trained, the tensors of these layers are missing.

    Raises:
        WeightsError: The file is no bundle that can be read.
        MissingCapability: The package onnx is not installed.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise MissingCapability.package("onnx", "export", "reading the weights of a bundle") from error
    # 1. The graph, whose bytes are checked by the bundle's manifest.
    try:
        bundle = open_bundle(path)
        content = b"".join(bundle.blocks(bundle.manifest.variants["fp32"].file))
    except BundleError as error:
        raise WeightsError(f"{path}: its weights cannot be read: {error}") from error
    try:
        graph = onnx.load_from_string(content).graph
        constants = {constant.name: numpy_helper.to_array(constant) for constant in graph.initializer}
    except Exception as error:  # the errors of protobuf and of onnx have no common base
        raise WeightsError(f"{path}: its fp32 graph cannot be read: {error}; export the bundle again") from error
    # 2. The statistics of batch norm, which the graph has under names of its own.
    weights = dict[str, np.ndarray]()
    renamed = set[str]()
    for node in graph.node:
        # Of a node without constant statistics none are read: they are reported as missing weights later.
        if node.op_type != "BatchNormalization" or len(node.input) <= max(_STATISTICS):
            continue
        if any(node.input[position] not in constants for position in _STATISTICS):
            continue
        layer, _, _ = node.input[1].rpartition(".")
        for position, statistic in _STATISTICS.items():
            weights[f"{layer}.{statistic}"] = constants[node.input[position]]
            renamed.add(node.input[position])
    # 3. All others have the names of the network.
    others = {name: array for name, array in constants.items() if name not in renamed}
    return {**others, **weights}
