from __future__ import annotations

import numpy as np
import pytest

from edge_agent import heads
from edge_agent.core.errors import TrainingFailed
from edge_agent.heads import FitData
from edge_agent.heads.mlp import perceptron, propagate


def data(seed: int = 0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, 90)
    return FitData(
        (rng.normal(size=(3, 6)) * 2)[labels].astype(np.float32) + rng.normal(size=(90, 6)).astype(np.float32),
        labels,
        3,
    )


@pytest.mark.parametrize("hidden", [0, 5])
def test_gradients_by_hand_are_those_of_torch(hidden):
    import torch

    rng = np.random.default_rng(1)
    sizes = [6, *([hidden] if hidden else []), 3]
    layers = {}
    for number in range(len(sizes) - 1):
        layers[f"weight{number}"] = rng.normal(size=(sizes[number + 1], sizes[number]))
        layers[f"bias{number}"] = rng.normal(size=sizes[number + 1])
    inputs = rng.normal(size=(11, 6))
    labels = rng.integers(0, 3, 11)
    leaves = {name: torch.tensor(layer, requires_grad=True) for name, layer in layers.items()}
    outputs = torch.tensor(inputs)
    for number in range(len(sizes) - 1):
        outputs = outputs @ leaves[f"weight{number}"].T + leaves[f"bias{number}"]
        if number + 2 < len(sizes):
            outputs = outputs.relu()
    torch.nn.functional.cross_entropy(outputs, torch.tensor(labels)).backward()
    chain = perceptron(layers, 11)
    propagate(chain, inputs, labels)
    assert len(chain.pairs()) == len(layers)
    for (_, gradient), (name, leaf) in zip(chain.pairs(), leaves.items(), strict=True):
        assert np.allclose(gradient, leaf.grad.numpy(), atol=1e-12), name


@pytest.mark.parametrize("hidden", [0, 16])
def test_the_same_generator_gives_the_same_head(hidden):
    fitted = []
    for seed in (0, 0, 1):
        head = heads.create("mlp", {"hidden": hidden})
        head.fit(data(), np.random.default_rng(seed))
        fitted.append(head.arrays["weight0"])
    assert (fitted[0] == fitted[1]).all()
    assert (fitted[0] != fitted[2]).any()


def test_a_batch_that_is_larger_than_the_data_takes_no_more_memory_than_the_data():
    fitted = []
    for batch_size in (90, 10**15):
        head = heads.create("mlp", {"batch_size": batch_size, "hidden": 4})
        head.fit(data(), np.random.default_rng(0))
        fitted.append(head.arrays["weight0"])
    assert (fitted[0] == fitted[1]).all()


def test_one_linear_layer_is_the_default_and_learns():
    head = heads.create("mlp")
    head.fit(data(), np.random.default_rng(0))
    assert "weight1" not in head.arrays
    assert head.arrays["weight0"].shape == (3, 6)
    assert (head.predict_proba(data().features).argmax(axis=1) == data().labels).mean() > 0.9


def test_a_hidden_layer_separates_what_one_layer_cannot():
    rng = np.random.default_rng(0)
    features = rng.uniform(-1, 1, (400, 2)).astype(np.float32)
    labels = (features[:, 0] * features[:, 1] > 0).astype(np.int64)  # exclusive or
    scores = []
    for hidden in (0, 32):
        head = heads.create("mlp", {"hidden": hidden, "epochs": 100, "lr": 0.05})
        head.fit(FitData(features, labels, 2), np.random.default_rng(0))
        scores.append((head.predict_proba(features).argmax(axis=1) == labels).mean())
    assert scores[0] < 0.7
    assert scores[1] > 0.95


def test_a_learning_rate_that_diverges_is_reported():
    head = heads.create("mlp", {"lr": 1e200, "feature_norm": "none", "weight_decay": 1.0, "hidden": 4})
    with pytest.raises(TrainingFailed, match="lower it"):
        head.fit(data(), np.random.default_rng(0))
