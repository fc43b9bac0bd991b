from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.core.errors import TrainingFailed
from edge_agent.methods.fedproto import Prototypes
from edge_agent.methods.values import Update
from edge_agent.training.loops import features_of
from edge_agent.wire.tensors import encode

LABELS = {"a": [0, 1, 1, 0, 1], "b": [1, 2, 2, 2]}
MEANS = "prototypes.means"
COUNTS = "prototypes.counts"


def told(client, means, counts, weight=10.0):
    return Update(client, weight, {MEANS: np.float32(means), COUNTS: np.array(counts)})


@pytest.fixture
def set_up(tiny):
    """``set_up(means, counts, ...)``: client a, which has received these prototypes."""

    def build(means, counts, **params):
        fed = tiny("fedproto", LABELS, min_class_count=1, **params)
        fed.state = {MEANS: np.float32(means), COUNTS: np.array(counts)}
        fed.download("a")
        return fed.method, fed.clients["a"]

    return build


@pytest.mark.parametrize("weighting, expected", [("uniform", (3, 2)), ("samples", (2, 1))])
def test_prototypes_of_two_clients_by_hand(weighting, expected):
    method = methods.create("fedproto", {"prototype_weighting": weighting})
    state = {MEANS: np.float32([[9, 9], [7, 7]]), COUNTS: np.array([1, 4])}
    updates = [told("a", [[1, 0], [0, 0]], [3, 0]), told("b", [[5, 4], [0, 0]], [1, 0])]
    after = method.aggregate(state, updates)
    np.testing.assert_array_equal(after[MEANS], np.float32([expected, (7, 7)]))  # nobody told of the second class
    np.testing.assert_array_equal(after[COUNTS], [3, 4])
    assert (after[MEANS].dtype, after[COUNTS].dtype) == (np.float32, np.int64)


def test_by_samples_a_client_counts_for_no_more_than_its_update_was_trained_on():
    """b declares 4 samples and counts of 4e8: its prototype counts as 4, beside 4 of a."""
    method = methods.create("fedproto", {"prototype_weighting": "samples"})
    updates = [told("a", [[1, 0]], [4], 4.0), told("b", [[3, 8]], [400_000_000], 4.0)]
    after = method.aggregate({MEANS: np.float32([[0, 0]]), COUNTS: np.array([0])}, updates)
    np.testing.assert_allclose(after[MEANS], [[2, 4]])


def test_no_weights_travel(tiny):
    fed = tiny("fedproto", LABELS).run()
    assert set(fed.state) == {MEANS, COUNTS} == set(fed.shared)
    assert fed.method.global_head(fed.state) is None
    assert fed.method.predict_global(fed.clients["a"], fed.clients["a"].train_inputs) is None


def test_the_loss_by_hand(set_up):
    # Class 2 has no prototype: its samples count in the mean with distance 0.
    method, client = set_up([[1, 0, 0], [0, 2, 0], [5, 5, 5]], [2, 1, 0], alignment_weight=0.7)
    inputs = client.train_inputs
    labels = torch.tensor([0, 1, 2, 0, 2])
    z = client.model.features(inputs).detach()
    plain = torch.nn.functional.cross_entropy(client.model.head(z), labels)
    distances = [((z[row] - client.model.prototypes.means[k]) ** 2).sum() for row, k in ((0, 0), (1, 1), (3, 0))]
    by_hand = plain + 0.7 * sum(distances) / (5 * 3)
    value = method.aligned_loss(client.model, [])(inputs, labels)
    assert value.item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_a_class_without_a_prototype_is_not_pulled(set_up):
    method, client = set_up([[1, 0, 0], [0, 2, 0], [5, 5, 5]], [2, 1, 0], alignment_weight=1e6)
    held = client.model.encoder.layers[1].weight
    labels = torch.full((5,), 2)
    gradients = []
    for weight in (1e6, 0.0):
        method.params = method.params.model_copy(update={"alignment_weight": weight})
        client.model.zero_grad(set_to_none=True)
        method.aligned_loss(client.model, [])(client.train_inputs, labels).backward()
        gradients.append(held.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_the_first_round_is_local_training(tiny):
    alone, fed = (tiny(name, LABELS, local_epochs=2) for name in ("local", "fedproto"))
    for name in LABELS:  # a model's prototypes take no random number
        assert torch.equal(fed.clients[name].model.head.weight, alone.clients[name].model.head.weight)
    for one in (alone, fed):
        one.run_round()
    for name in LABELS:
        state = fed.clients[name].model.state_dict()
        assert all(torch.equal(t, state[key]) for key, t in alone.clients[name].model.state_dict().items())
    fed.run_round()
    alone.run_round()
    assert not torch.equal(alone.clients["a"].model.head.weight, fed.clients["a"].model.head.weight)


@pytest.mark.parametrize("when", ["last_epoch", "after"])
def test_prototypes_are_means_of_features_before_the_only_step_or_after_it(tiny, when):
    fed = tiny("fedproto", LABELS, batch_size=8, lr=0.5, prototypes=when, min_class_count=1)
    client = fed.clients["a"]
    labels = client.train_labels
    before = features_of(client.model, client.train_inputs)
    fed.download("a")
    sent = fed.method.local_update(client, {})
    features = before if when == "last_epoch" else features_of(client.model, client.train_inputs)
    for k in (0, 1):
        np.testing.assert_allclose(sent[MEANS][k], features[labels == k].mean(dim=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(sent[COUNTS], [2, 3, 0])
    assert not sent[MEANS][2].any()


def test_of_several_epochs_only_the_last_counts(tiny):
    two = tiny("fedproto", LABELS, batch_size=8, local_epochs=2)
    one = tiny("fedproto", LABELS, batch_size=8)
    for fed in (two, one):
        fed.run_round()
    # In its second epoch client a saw the model that one epoch leaves behind. Class 0 is client a's alone.
    features = features_of(one.clients["a"].model, one.clients["a"].train_inputs)
    np.testing.assert_allclose(two.state[MEANS][0], features[one.clients["a"].train_labels == 0].mean(dim=0), rtol=1e-5)


def test_a_class_of_one_sample_is_withheld(tiny):
    (a, b) = tiny("fedproto", LABELS).run_round()
    assert a.tensors[COUNTS].tolist() == [2, 3, 0]
    assert b.tensors[COUNTS].tolist() == [0, 0, 3]
    assert not b.tensors[MEANS][1].any()


def test_squared_distances_by_hand():
    part = Prototypes(3, 2)
    part.means.copy_(torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 1.0]]))
    part.counts.copy_(torch.tensor([1, 5, 0]))
    found = part(torch.tensor([[0.0, 0.0], [3.0, 3.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.0, -25.0, -torch.inf], [-18.0, -1.0, -torch.inf]]))


def test_the_nearest_prototype_answers(set_up):
    method, client = set_up([[0, 0, 0], [50, 50, 50], [0, 0, 0]], [1, 1, 0])
    found = method.predict(client, client.train_inputs)
    assert (found.argmax(dim=1) == 0).all()
    assert (found[:, 2] == 0).all()


@pytest.mark.parametrize("counts, params", [([1, 1, 0], {"inference": "head"}), ([0, 0, 0], {})])
def test_the_own_head_answers_where_it_is_asked_or_alone(set_up, counts, params):
    method, client = set_up([[0, 0, 0], [50, 50, 50], [0, 0, 0]], counts, **params)
    expected = torch.softmax(client.model(client.train_inputs), dim=1)
    torch.testing.assert_close(method.predict(client, client.train_inputs), expected)


def test_features_without_end_are_not_told(set_up):
    method, client = set_up(np.zeros((3, 3)), [0, 0, 0], local_epochs=0)
    client.train_inputs = torch.full_like(client.train_inputs, torch.inf)
    with pytest.raises(TrainingFailed, match="'a': prototypes hold NaN or infinity"):
        method.local_update(client, {})


@pytest.mark.parametrize(
    "means, counts, why",
    [
        ([[1, 0], [0, 0]], [-1, 0], "class counts from -1 to 0"),
        ([[1, 0], [2, 0]], [1, 0], "has values for a class whose count is 0"),
        ([[1e7, 0], [0, 0]], [1, 0], "reaches 1e\\+07"),
        ([[1, 0], [0, 0]], [1, 0], "^$"),
    ],
)
def test_what_cannot_be_honest(means, counts, why):
    assert re.search(why, methods.create("fedproto").objection(told("a", means, counts).tensors))


def test_prototypes_draw_the_clients_features_together(federation):
    def spread(weight):
        method = methods.create(
            "fedproto", {"alignment_weight": weight, "lr": 0.05, "batch_size": 8, "local_epochs": 2}
        )
        fed = federation(method, rounds=4, labels={"a": [0, 1, 2] * 6, "b": [0, 1, 2] * 6}).run()
        inputs = fed.clients["a"].train_inputs
        one, other = (features_of(client.model, inputs) for client in fed.clients.values())
        return ((one - other) ** 2).mean().item()

    assert spread(5.0) < 0.7 * spread(0.0)


def test_the_state_has_the_bytes_of_prototypes_alone(tiny):
    fed = tiny("fedproto", LABELS, rounds=1).run()
    assert fed.state[MEANS].nbytes + fed.state[COUNTS].nbytes == 3 * 3 * 4 + 3 * 8
    assert len(encode(fed.state)) < 1000
