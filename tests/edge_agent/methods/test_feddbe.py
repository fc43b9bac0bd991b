from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from edge_agent import methods
from edge_agent.methods.values import Update
from edge_agent.training.loops import features_of

LABELS = {"a": [0, 1, 1, 0, 1], "b": [1, 2, 2, 2]}
MEAN = "extra.mean"
KNOWN = "extra.is_known"


def state(mean, known):
    return {"head.weight": np.zeros((2, 2), np.float32), MEAN: np.float32(mean), KNOWN: np.float32([known])}


def sent(client, mean, weight):
    return Update(client, weight, {"head.weight": np.ones((2, 2), np.float32), MEAN: np.float32(mean)})


def test_the_consensus_is_the_mean_by_samples_of_the_first_round_alone():
    method = methods.create("feddbe")
    updates = [sent("a", [1, 0], 3.0), sent("b", [5, 4], 1.0)]
    after = method.aggregate(state([0, 0], 0), updates)
    np.testing.assert_allclose(after[MEAN], [2, 1])  # (3 * 1 + 5) / 4 and 4 / 4
    assert after[KNOWN].tolist() == [1]
    np.testing.assert_allclose(method.aggregate(after, [sent("a", [9, 9], 1.0)])[MEAN], [2, 1])
    anew = methods.create("feddbe", {"consensus": "every_round"})
    np.testing.assert_allclose(anew.aggregate(after, [sent("a", [9, 9], 1.0)])[MEAN], [9, 9])


def test_the_first_round_is_fedavg_and_leaves_the_bias_as_it_is(tiny):
    fed = tiny("feddbe", LABELS, lr=0.1)
    plain = tiny("fedavg", LABELS, lr=0.1)
    for name in LABELS:
        update = fed.update(name)
        expected = plain.update(name)
        for tensor, array in expected.tensors.items():
            np.testing.assert_allclose(update.tensors[tensor], array, atol=1e-6)
        assert not fed.clients[name].model.part("bias").value.any()


def test_the_loss_by_hand(tiny):
    """kappa = 8, mu = 0.25: 8 / 2 of the mean square of a quarter of the batch's mean minus the consensus."""
    fed = tiny("feddbe", LABELS, mean_weight=8.0, momentum_of_mean=0.25)
    client = fed.clients["a"]
    model = client.model
    with torch.no_grad():
        model.part("bias").value.copy_(torch.tensor([1.0, -2.0, 0.5]))
    received = {MEAN: np.float32([0.5, 0.0, -1.0]), KNOWN: np.ones(1, np.float32)}
    loss = fed.method.loss(client, received)
    inputs, labels = client.train_inputs, client.train_labels
    features = model.features(inputs)
    entropy = F.cross_entropy(model.head(features + model.part("bias").value), labels)
    first = 0.25 * features.mean(dim=0)
    by_hand = entropy + 4.0 * (first - torch.tensor([0.5, 0.0, -1.0])).square().mean()
    torch.testing.assert_close(loss(inputs, labels), by_hand)
    # The next batch continues the running mean, whose past has no gradient.
    second = 0.75 * first.detach() + 0.25 * features.mean(dim=0)
    by_hand = entropy + 4.0 * (second - torch.tensor([0.5, 0.0, -1.0])).square().mean()
    torch.testing.assert_close(loss(inputs, labels), by_hand)


def test_later_rounds_learn_the_bias_at_home_and_send_the_mean_feature(tiny):
    fed = tiny("feddbe", LABELS, lr=0.1)
    fed.run_round()
    update = fed.update("a")
    client = fed.clients["a"]
    assert client.model.part("bias").value.abs().max() > 0
    assert not any(name.startswith("bias") for name in update.tensors)
    expected = features_of(client.model, client.train_inputs).mean(dim=0)
    np.testing.assert_allclose(update.tensors[MEAN], expected, atol=1e-6)


def test_a_heavier_pull_keeps_the_mean_nearer_to_the_consensus(tiny):
    distances = []
    for weight in (0.0, 20.0):
        fed = tiny("feddbe", LABELS, mean_weight=weight, lr=0.05, local_epochs=10)
        fed.run_round()
        distances.append(float(np.linalg.norm(fed.update("a").tensors[MEAN] - fed.state[MEAN])))
    assert distances[1] < 0.7 * distances[0]


def test_the_personal_model_answers_with_its_bias(tiny):
    fed = tiny("feddbe", LABELS)
    client = fed.clients["a"]
    with torch.no_grad():
        client.model.part("bias").value.copy_(torch.tensor([3.0, -1.0, 2.0]))
    features = features_of(client.model, client.train_inputs)
    expected = torch.softmax(client.model.head(features + torch.tensor([3.0, -1.0, 2.0])), dim=1)
    torch.testing.assert_close(fed.method.predict(client, client.train_inputs), expected.detach())
    shared = torch.softmax(client.model.head(features), dim=1)
    torch.testing.assert_close(fed.method.predict_global(client, client.train_inputs), shared.detach())


@pytest.mark.parametrize("mean, objects", [([0.0, 5.0], False), ([0.0, -2e6], True)])
def test_a_mean_of_absurd_size_is_refused(mean, objects):
    assert bool(methods.create("feddbe").objection({MEAN: np.float32(mean)})) is objects
