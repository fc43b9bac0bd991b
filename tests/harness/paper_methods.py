"""The methods of the papers with parameters that suit a dozen tiny samples, and what is looked at in their models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.core.task import Task, WindowInput
from edge_agent.methods.base import Method
from edge_agent.methods.values import Client, Update

WINDOWS = Task(
    input=WindowInput(channels=1, length=4),
    class_names=("a", "b", "c"),
    encoder="linear",
    encoder_params={"feature_dim": 6},
)


def fedpac(**params) -> Method:
    return methods.create("fedpac", {"local_epochs": 2, "batch_size": 4, **params})


def dualfed(**params) -> Method:
    quick = {"local_epochs": 1, "batch_size": 4, "projector_width": 8, "contrastive_weight": 1.0}
    return methods.create("dualfed", {**quick, **params})


def fedpick(**params) -> Method:
    return methods.create("fedpick", {"local_epochs": 1, "batch_size": 4, **params})


def fedrir(**params) -> Method:
    return methods.create("fedrir", {"local_epochs": 1, "batch_size": 4, "specific_dim": 6, **params})


FEDRIR_MODES = pytest.mark.parametrize("mode", ["official", "vclub"])
FEDRIR_PARTS = {"encoder", "head", "specific", "generator", "distiller"}


def on_twelve_windows(federation, method: Method) -> Client:
    """The only client of a federation, in 64 bits."""
    client = federation(method, WINDOWS, labels={"x": []}).clients["x"]
    client.train_inputs = torch.randn(12, 1, 4, generator=torch.Generator().manual_seed(7)).double()
    client.train_labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1, 1, 2, 0])
    client.model.double()  # batches of four behind two batch norms blow float32's rounding up to 1e-3
    return client


def fedpac_update(
    client, weight=10.0, *, encoder=1.0, v=1.0, h=None, head=None, centroids=None, counts=(5, 5)
) -> Update:
    """An update of two classes and two features."""
    square = lambda array, default: np.float32(default if array is None else array)
    tensors = {
        "extra.variance": np.array([float(v)]),
        "extra.weighted_means": square(h, [[1, 0], [0, 1]]),
        "extra.head.weight": square(head, np.eye(2)),
        "extra.head.bias": np.float32([0, 0]),
        "extra.centroids": square(centroids, [[1, 0], [0, 1]]),
        "extra.counts": np.array(counts, np.int64),
    }
    if encoder is not None:
        tensors["encoder.w"] = np.float32([encoder])
    return Update(client, weight, tensors)


def is_statistic(name: str) -> bool:
    """Whether it is one of batch norm, which no optimizer moves."""
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def tensors_of(model, *parts: str) -> dict[str, np.ndarray]:
    state = model.state_dict()
    return {name: tensor.numpy().copy() for name, tensor in state.items() if not parts or name.split(".")[0] in parts}


def parts_of(model) -> set[str]:
    return {name for name, _ in model.named_children()}


def softmax(logits):
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)
