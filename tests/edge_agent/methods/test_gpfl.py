"""GPFL against a twin written by hand from its formulas, and what of it travels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_agent.methods.gpfl import Valve, class_shares, conditions_of, cosines
from edge_agent.training.parts import to_arrays

LABELS = {"a": [0, 1, 1, 0, 1], "b": [1, 2, 2, 2]}
PARAMS = {"lr": 0.1, "local_epochs": 1, "batch_size": 50, "magnitude_weight": 0.3, "valve_decay": 0.2}


def weights_of(client):
    """All weights of a client's model as leaves of their own, by name."""
    return {name: weight.detach().clone().requires_grad_() for name, weight in client.model.named_parameters()}


def branch_by_hand(weights, name, condition):
    """Linear, ReLU, then layer norm with the variance of the population."""
    hidden = (weights[f"valve.{name}.0.weight"] @ condition + weights[f"valve.{name}.0.bias"]).clamp(min=0)
    centred = hidden - hidden.mean()
    scaled = centred / (centred.square().mean() + 1e-5).sqrt()
    return scaled * weights[f"valve.{name}.2.weight"] + weights[f"valve.{name}.2.bias"]


def valve_by_hand(weights, features, condition):
    scale = branch_by_hand(weights, "scale", condition)
    shift = branch_by_hand(weights, "shift", condition)
    return (features * (scale + 1) + shift).clamp(min=0)


def entropy_by_hand(logits, labels):
    exponents = logits.exp()
    return -torch.stack([(row[label] / row.sum()).log() for row, label in zip(exponents, labels, strict=True)]).mean()


def loss_by_hand(weights, inputs, labels, conditions, frozen, magnitude):
    generic, personal = conditions
    features = inputs.flatten(1) @ weights["encoder.layers.1.weight"].T + weights["encoder.layers.1.bias"]
    own = valve_by_hand(weights, features, personal)
    value = entropy_by_hand(own @ weights["head.weight"].T + weights["head.bias"], labels)
    common = valve_by_hand(weights, features, generic)
    embeddings = weights["categories.weight"]
    lengths = common.square().sum(1).sqrt()[:, None] * embeddings.square().sum(1).sqrt()[None]
    value = value + entropy_by_hand((common @ embeddings.T) / lengths.clamp(min=1e-12), labels)
    return value + magnitude * (common - frozen[labels]).square().sum().sqrt()


def step_by_hand(client, conditions, frozen):
    """The weights after one step of plain SGD; valve and embeddings have a weight decay of their own."""
    weights = weights_of(client)
    loss_by_hand(weights, client.train_inputs, client.train_labels, conditions, frozen, 0.3).backward()
    moved = {}
    for name, weight in weights.items():
        decay = 0.2 if name.startswith(("valve.", "categories.")) else 0.0
        slope = torch.zeros_like(weight) if weight.grad is None else weight.grad
        moved[name] = (weight - 0.1 * (slope + decay * weight)).detach()
    return moved


@pytest.mark.parametrize("conditions", ["own", "received"])
def test_two_rounds_are_those_of_the_twin(tiny, conditions):
    fed = tiny("gpfl", LABELS, **PARAMS, conditions=conditions)
    kept = {name: (torch.zeros(3), torch.zeros(3)) for name in LABELS}
    for _ in range(2):
        fed.round += 1
        updates = []
        for name, labels in LABELS.items():
            client = fed.clients[name]
            received = fed.download(name)
            frozen = torch.from_numpy(received["categories.weight"].copy())
            shares = torch.tensor([np.mean(np.array(labels) == label) for label in range(3)]).float()
            if conditions == "received":
                kept[name] = (frozen.sum(0) / 3, (shares[:, None] * frozen).sum(0))
            expected = step_by_hand(client, kept[name], frozen)
            updates.append(fed.update(name))
            for tensor, weight in client.model.named_parameters():
                torch.testing.assert_close(weight.detach(), expected[tensor], rtol=1e-4, atol=1e-6)
            trained = expected["categories.weight"]
            if conditions == "own":
                kept[name] = (trained.sum(0) / 3, (shares[:, None] * trained).sum(0))
        fed.state = fed.method.aggregate(fed.state, updates)
        for tensor in updates[0].tensors:
            mean = (5 * updates[0].tensors[tensor] + 4 * updates[1].tensors[tensor]) / 9
            np.testing.assert_allclose(fed.state[tensor], mean, rtol=1e-5, atol=1e-6)


def test_the_head_stays_and_all_else_travels(tiny):
    fed = tiny("gpfl", LABELS, **PARAMS)
    update = fed.update("a")
    assert {name.split(".")[0] for name in update.tensors} == {"encoder", "valve", "categories"}
    assert set(fed.clients["a"].memory) == {"condition.generic", "condition.personal"}


def test_conditions_are_the_mean_and_the_mean_by_shares():
    embeddings = torch.tensor([[1.0, 0.0], [3.0, 4.0], [5.0, 8.0]])
    generic, personal = conditions_of(embeddings, torch.tensor([0.25, 0.75, 0.0]))
    assert generic.tolist() == [3.0, 4.0]
    assert personal.tolist() == [2.5, 3.0]


def test_shares_are_of_the_clients_own_samples(tiny):
    fed = tiny("gpfl", LABELS)
    torch.testing.assert_close(class_shares(fed.clients["a"]), torch.tensor([0.4, 0.6, 0.0]))


def test_a_valve_that_says_nothing_lets_features_through():
    """Branches whose layer norm has weight and bias zero: only the ReLU is left."""
    valve = Valve(2)
    with torch.no_grad():
        for branch in (valve.scale, valve.shift):
            branch[2].weight.zero_()
    features = torch.tensor([[1.5, -2.0], [0.25, 3.0]])
    assert valve(features, torch.ones(2)).tolist() == [[1.5, 0.0], [0.25, 3.0]]


def test_cosines_by_hand():
    found = cosines(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0], [5.0, 0.0], [-3.0, -4.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.8, 0.6, -1.0]]))


def test_both_models_answer_by_their_own_condition(tiny):
    fed = tiny("gpfl", LABELS, **PARAMS)
    fed.run_round()
    fed.download("a")
    client = fed.clients["a"]
    weights = {name: weight.detach() for name, weight in client.model.named_parameters()}
    features = client.model.features(client.train_inputs).detach()
    personal = torch.from_numpy(client.memory["condition.personal"])
    own = valve_by_hand(weights, features, personal) @ weights["head.weight"].T + weights["head.bias"]
    torch.testing.assert_close(
        fed.method.predict(client, client.train_inputs), torch.softmax(own, dim=1), rtol=1e-4, atol=1e-6
    )
    common = valve_by_hand(weights, features, weights["categories.weight"].mean(dim=0))
    answer = torch.softmax(cosines(common, weights["categories.weight"]), dim=1)
    torch.testing.assert_close(fed.method.predict_global(client, client.train_inputs), answer, rtol=1e-4, atol=1e-6)


def test_a_round_does_not_change_what_was_received(tiny):
    fed = tiny("gpfl", LABELS, **PARAMS)
    before = {name: array.copy() for name, array in fed.state.items()}
    received = fed.download("a")
    fed.method.local_update(fed.clients["a"], received)
    for name, array in before.items():
        np.testing.assert_array_equal(received[name], array)
    after = to_arrays(fed.clients["a"].model, before)
    assert not np.array_equal(after["categories.weight"], before["categories.weight"])
