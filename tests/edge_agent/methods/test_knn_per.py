from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.core.errors import ConfigError
from edge_agent.training.finetune import fingerprint
from edge_agent.training.loops import features_of
from edge_agent.wire.tensors import encode

LABELS = {"a": [0, 1, 1, 0, 1, 0, 0, 1, 1, 0], "b": [1, 2, 2, 2]}


@pytest.fixture
def received(tiny):
    """``received(...)``: the federation after a round, and its client a with the new state."""

    def build(**params):
        fed = tiny("knn_per", LABELS, rounds=1, **params).run()
        fed.download("a")
        return fed, fed.clients["a"]

    return build


def remember(client, features, labels, chosen):
    client.memory = {
        "memorized.from": fingerprint(client.model),
        "memorized.features": np.float32(features),
        "memorized.labels": np.array(labels),
        "memorized.chosen": np.array(chosen, dtype=np.float64),
    }


def see_itself(client):
    """An encoder that passes the first three of four values on."""
    with torch.no_grad():
        client.model.encoder.layers[1].weight.copy_(torch.eye(3, 4))
        client.model.encoder.layers[1].bias.zero_()


def test_shares_of_three_points_by_hand(received):
    # The question sits on the first point (class 2), at squared distances 0, 3 and 99: of k = 2 the last one is out.
    # Weights exp(0) and exp(-3 / (d scale)) with d = 3, scale 1: 1 / (1 + e^-1) = .731059 and .268941.
    fed, client = received()
    see_itself(client)
    remember(client, [[0, 0, 0], [1, 1, 1], [9, 3, 3]], [2, 0, 1], (2, 1.0, 1.0))
    question = torch.zeros(1, 1, 4)
    near = fed.method.predict(client, question)
    torch.testing.assert_close(near, torch.tensor([[0.268941, 0.0, 0.731059]]), atol=1e-6, rtol=0)
    # A third of it mixed into the model's answer.
    remember(client, [[0, 0, 0], [1, 1, 1], [9, 3, 3]], [2, 0, 1], (2, 1.0, 1 / 3))
    mixed = near / 3 + 2 / 3 * fed.method.predict_global(client, question)
    torch.testing.assert_close(fed.method.predict(client, question), mixed, atol=1e-6, rtol=0)


def test_more_neighbours_than_samples_are_all_samples(received):
    fed, client = received()
    see_itself(client)
    remember(client, [[0, 0, 0], [3, 0, 0]], [0, 1], (50, 2.0, 1.0))
    found = fed.method.predict(client, torch.zeros(1, 1, 4))
    weight = math.exp(-9 / (3 * 2.0))
    torch.testing.assert_close(found, torch.tensor([[1.0, weight, 0.0]]) / (1 + weight))


def test_lambda_zero_is_the_model(received):
    fed, client = received(mix=0.0)
    inputs = client.train_inputs
    torch.testing.assert_close(fed.method.predict(client, inputs), fed.method.predict_global(client, inputs))


def test_the_choice_equals_that_of_a_plain_search(received):
    offered = {"neighbours": (1, 3), "scales": (0.2, 1.0, 5.0)}
    fed, client = received(**offered, held_back=0.4)
    fed.method.personalize(client, {})
    stamp = fingerprint(client.model)
    order = np.random.default_rng(int.from_bytes(stamp[:8].tobytes(), "little")).permutation(10)
    z = features_of(client.model, client.train_inputs).double().numpy()
    y = client.train_labels.numpy()
    model = fed.method.predict_global(client, client.train_inputs).double().numpy()

    def answer(row, k, scale, share):
        distances = [(float(((z[row] - z[other]) ** 2).sum()), y[other]) for other in order[4:]]
        found = np.zeros(3)
        for square, label in sorted(distances)[:k]:
            found[label] += math.exp(-square / (3 * scale))
        return share * found / found.sum() + (1 - share) * model[row]

    def score(one):
        answers = [(answer(row, *one), y[row]) for row in order[:4]]
        right = sum(int(found.argmax() == label) for found, label in answers)
        return right, round(float(np.mean([math.log(max(found[label], 1e-12)) for found, label in answers])), 6)

    grid = list(itertools.product(offered["neighbours"], offered["scales"], np.linspace(0, 1, 11)))
    k, scale, share = client.memory["memorized.chosen"]
    assert score((int(k), scale, share)) == max(map(score, grid))


def test_one_sample_leaves_nothing_to_choose_on(tiny):
    fed = tiny("knn_per", {"a": [1]}, rounds=1).run()
    client = fed.clients["a"]
    fed.method.personalize(client, fed.download("a"))
    assert client.memory["memorized.chosen"].tolist() == [10.0, 0.1, 0.5]


def test_what_is_stored_are_features_of_all_training_samples(received):
    fed, client = received()
    fed.method.personalize(client, {})
    np.testing.assert_array_equal(
        client.memory["memorized.features"], features_of(client.model, client.train_inputs).numpy()
    )
    np.testing.assert_array_equal(client.memory["memorized.labels"], client.train_labels)


def test_training_is_fedavgs_and_the_datastore_never_travels(tiny):
    average, fed = (tiny(name, LABELS) for name in ("fedavg", "knn_per"))
    average.run()
    for _ in range(3):
        for client in fed.clients.values():
            fed.method.personalize(client, fed.download(client.id))
        fed.run_round()
    assert encode(fed.state) == encode(average.state)


def test_a_datastore_is_made_anew_when_the_model_has_changed(received):
    fed, client = received()
    fed.method.predict(client, client.train_inputs)
    before = client.memory["memorized.features"]
    client.train_inputs = client.train_inputs + 1.0
    fed.method.predict(client, client.train_inputs)
    assert client.memory["memorized.features"] is before
    fed.run_round()
    fed.download("a")
    fed.method.predict(client, client.train_inputs)
    assert not np.array_equal(client.memory["memorized.features"], before)


def test_the_device_head_gets_the_same_numbers():
    method = methods.create("knn_per", {"neighbours": [5, 7], "scales": [3.0], "mix": 0.4})
    assert method.head_params("knn") == {"neighbours": 5, "scale": 3.0, "mix": 0.4, "held_back": 0.2}
    assert methods.create("knn_per").head_params("knn")["scale"] == 1.0
    assert method.head_params("lr") == {}


def test_impossible_numbers_are_refused():
    with pytest.raises(ConfigError, match="neighbours"):
        methods.create("knn_per", {"neighbours": [0]})
    with pytest.raises(ConfigError, match="scales"):
        methods.create("knn_per", {"scales": []})
