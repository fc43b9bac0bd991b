from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.core.task import Task, WindowInput
from edge_agent.methods.pfedme import follow
from edge_agent.methods.values import Update
from edge_agent.training.finetune import pairs

TINY = Task(
    input=WindowInput(channels=1, length=4),
    class_names=("a", "b", "c"),
    encoder="linear",
    encoder_params={"feature_dim": 2},
)


def pfedme(**params):
    return methods.create("pfedme", {"local_steps": 3, "batch_size": 4, **params})


def tiny(federation, labels, **params):
    fed = federation(pfedme(**params), TINY, labels={"a": []})
    client = fed.clients["a"]
    client.train_inputs = torch.randn(len(labels), 1, 4, generator=torch.Generator().manual_seed(1))
    client.train_labels = torch.tensor(labels)
    return fed


def test_the_shared_weights_follow_by_hand():
    # w = 1, theta = 2, eta .1, lambda 2: w - .1 * 2 * (1 - 2) = 1.2.
    w = [torch.tensor([1.0])]
    follow(w, [torch.tensor([2.0])], 0.1 * 2.0)
    assert w[0].item() == pytest.approx(1.2)


def test_steps_on_a_linear_network_equal_their_numpy_twin(federation):
    """One client, batches of all samples, so that order plays no part: logits = (x W' + b) U' + c by hand."""
    labels = [0, 1, 2, 1]
    fed = tiny(federation, labels, batch_size=4, local_steps=2, inner_steps=3, lr=0.01, personal_lr=0.05)
    client = fed.clients["a"]
    names = ["encoder.layers.1.weight", "encoder.layers.1.bias", "head.weight", "head.bias"]
    w = [fed.state[name].astype(np.float64) for name in names]
    theta = [array.copy() for array in w]
    x = client.train_inputs.numpy().reshape(4, 4).astype(np.float64)
    y = np.eye(3)[labels]
    for _ in range(2):
        for _ in range(3):
            features = x @ theta[0].T + theta[1]
            logits = features @ theta[2].T + theta[3]
            shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            error = (shares - y) / 4
            back = error @ theta[2]
            slopes = [back.T @ x, back.sum(0), error.T @ features, error.sum(0)]
            theta = [t - 0.05 * (s + 15 * (t - start)) for t, s, start in zip(theta, slopes, w, strict=True)]
        w = [start - 0.01 * 15 * (start - t) for start, t in zip(w, theta, strict=True)]
    sent = fed.update("a").tensors
    own = client.model.part("personal").state_dict()
    for name, shared, personal in zip(names, w, theta, strict=True):
        np.testing.assert_allclose(sent[name], shared, rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(own[name].numpy(), personal, rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_personal_network_begins_each_round_at_what_was_received(federation):
    fed = tiny(federation, [0, 1, 2, 1], personal_lr=1e-12, lr=1e-12)
    with torch.no_grad():
        for weight in fed.clients["a"].model.part("personal").parameters():
            weight.add_(1.0)
    fed.update("a")
    for theta, w in pairs(fed.clients["a"].model):
        torch.testing.assert_close(theta, w)


@pytest.mark.parametrize("rate, expected", [(1.0, 3.0), (0.5, 2.0), (2.0, 5.0)])
def test_the_server_goes_beta_of_the_way_to_the_even_mean(rate, expected):
    # State 1; updates 2 (of 9 samples) and 4 (of 1): even mean 3, statistics always take it.
    state = {"head.weight": np.float32([1.0]), "encoder.1.running_var": np.float32([1.0])}
    updates = [
        Update("a", 9.0, {"head.weight": np.float32([2.0]), "encoder.1.running_var": np.float32([2.0])}),
        Update("b", 1.0, {"head.weight": np.float32([4.0]), "encoder.1.running_var": np.float32([4.0])}),
    ]
    after = pfedme(server_rate=rate).aggregate(state, updates)
    assert after["head.weight"][0] == expected
    assert after["encoder.1.running_var"][0] == 3.0
    assert after["head.weight"].dtype == np.float32


def test_running_statistics_that_travel_are_those_of_the_network_that_saw_data(federation):
    fed = federation(pfedme(), rounds=1)
    sent = {update.client: update.tensors for update in fed.run_round()}
    own = fed.clients["a"].model.part("personal").state_dict()
    moved = [name for name in fed.shared if name.endswith("running_mean")]
    assert moved
    for name in moved:
        np.testing.assert_array_equal(sent["a"][name], own[name].numpy())
        assert own[name].any()


def test_rounds_are_counted_in_steps_or_in_epochs(federation):
    for params, steps in (({"local_steps": 5}, 5), ({"local_steps": 0, "local_epochs": 2}, 6)):
        fed = federation(pfedme(inner_steps=1, **params), labels={"a": [0, 1, 2] * 4})
        fed.update("a")
        counters = [t for n, t in fed.clients["a"].model.part("personal").state_dict().items() if n.endswith("tracked")]
        assert counters
        assert all(int(count) == steps for count in counters)
