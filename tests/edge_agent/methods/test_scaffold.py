from __future__ import annotations

import numpy as np
import torch

from edge_agent import methods
from edge_agent.core.task import Task, WindowInput

QUICK = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}
TINY = Task(
    input=WindowInput(channels=1, length=4),
    class_names=("a", "b", "c"),
    encoder="linear",
    encoder_params={"feature_dim": 2},
)
NAMES = ("encoder.layers.1.weight", "encoder.layers.1.bias", "head.weight", "head.bias")


def scaffold(**params):
    return methods.create("scaffold", {**QUICK, **params})


def controls(tensors, prefix="extra.control."):
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}


def tiny(federation, method, labels):
    fed = federation(method, TINY, labels={name: [] for name in labels})
    for seed, (name, own) in enumerate(labels.items()):
        client = fed.clients[name]
        client.train_inputs = torch.randn(len(own), 1, 4, generator=torch.Generator().manual_seed(seed))
        client.train_labels = torch.tensor(own)
    return fed


def test_the_first_round_is_that_of_fedavg_with_even_weights(federation):
    plain, other = (
        federation(methods.create(name, {**QUICK, "momentum": 0.0}), rounds=1) for name in ("fedavg", "scaffold")
    )
    ups = [fed.run_round() for fed in (plain, other)]
    for name in plain.shared:
        for one, two in zip(*ups, strict=True):
            np.testing.assert_array_equal(two.tensors[name], one.tensors[name])
        mean = np.mean([update.tensors[name].astype(np.float64) for update in ups[0]], axis=0)
        np.testing.assert_allclose(other.state[name], mean, rtol=1e-6, atol=1e-8)


def test_the_servers_control_is_the_mean_of_the_clients(federation):
    """Also where some are asked later and more seldom: those never asked count as zero among those seen."""
    fed = tiny(federation, scaffold(), {"a": [0, 1, 2, 1, 0], "b": [2, 2, 1, 0], "c": [1, 1, 0]})
    for names in (["a", "b"], ["a", "c"], ["b"], ["a", "b", "c"]):
        fed.run_round(names)
        seen = [client.memory for client in fed.clients.values() if client.memory]
        for name, array in controls(fed.state).items():
            expected = sum(memory[f"control.{name}"] for memory in seen) / len(seen)
            np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-6, err_msg=f"{name} after {names}")
    assert np.abs(controls(fed.state)["head.weight"]).max() > 1e-3


def test_a_control_is_the_mean_gradient_of_the_way(federation):
    """One batch, one epoch: K = 1 and the control is the gradient at x itself, here by hand."""
    fed = tiny(federation, scaffold(local_epochs=1, batch_size=8), {"a": [0, 1, 2, 1]})
    client = fed.clients["a"]
    w, b, u, c = (fed.state[name].astype(np.float64) for name in NAMES)
    x = client.train_inputs.numpy().reshape(4, 4)
    y = np.eye(3)[[0, 1, 2, 1]]
    features = x @ w.T + b
    logits = features @ u.T + c
    error = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) - y) / 4
    back = error @ u
    fed.run_round()
    for name, slope in zip(NAMES, (back.T @ x, back.sum(0), error.T @ features, error.sum(0)), strict=True):
        np.testing.assert_allclose(client.memory[f"control.{name}"], slope, rtol=1e-3, atol=1e-5, err_msg=name)


def test_the_second_round_takes_out_what_is_a_clients_own(federation):
    """One batch a round: a's step from x is lr (grad_a - c_a + c); alone, c = c_a and the step is the plain one."""
    method = scaffold(local_epochs=1, batch_size=8, lr=0.05)
    fed = tiny(federation, method, {"a": [0, 1, 2, 1], "b": [2, 2, 0]})
    fed.run_round()
    start = {name: fed.state[name].copy() for name in NAMES}
    before = {name: array.copy() for name, array in fed.clients["a"].memory.items()}
    common = controls(fed.state)
    sent = fed.update("a").tensors
    plain = tiny(federation, methods.create("fedavg", {**QUICK, "local_epochs": 1, "batch_size": 8, "lr": 0.05,
                                                       "momentum": 0.0}), {"a": [0, 1, 2, 1]})  # fmt: skip
    plain.state = start
    free = plain.update("a").tensors
    for name in NAMES:
        expected = free[name] - 0.05 * (common[name] - before[f"control.{name}"])
        np.testing.assert_allclose(sent[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)


def test_no_steps_teach_no_control(federation):
    fed = tiny(federation, scaffold(local_epochs=0), {"a": [0, 1, 2]})
    fed.run_round()
    assert not any(array.any() for array in controls(fed.state).values())


def test_the_names_of_clients_stay_at_the_coordinator(federation):
    fed = tiny(federation, scaffold(), {"a": [0, 1]})
    fed.run_round()
    assert "server.clients" in fed.state
    assert "server.clients" not in fed.method.broadcast(fed.state)
