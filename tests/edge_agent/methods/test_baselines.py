"""FedAvg, FedPer and Local against numbers that do not come from them."""

from __future__ import annotations

import numpy as np
import torch

from edge_agent import methods
from edge_agent.core.task import Task, WindowInput

TINY = Task(
    input=WindowInput(channels=1, length=4),
    class_names=("a", "b", "c"),
    encoder="linear",
    encoder_params={"feature_dim": 2},
)
LABELS = {"a": [0, 1, 2, 1, 0], "b": [2, 2, 1, 0]}
PARAMS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 2, "local_epochs": 2}


def softmax(logits):
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


def numpy_local_training(weights, inputs, labels, rng, params=PARAMS):
    """The same two-layer linear network trained by hand-written gradients, batches of two, a last single one joined."""
    w1, b1, w2, b2 = (w.astype(np.float64).copy() for w in weights)
    speed = [np.zeros_like(w) for w in (w1, b1, w2, b2)]
    for _ in range(params["local_epochs"]):
        order = rng.permutation(len(labels))
        cuts = [2] if len(labels) == 5 else list(range(2, len(labels), 2))
        for rows in np.split(order, cuts):
            x = inputs[rows].reshape(len(rows), -1).astype(np.float64)
            y = labels[rows]
            features = x @ w1.T + b1
            error = (softmax(features @ w2.T + b2) - np.eye(3)[y]) / len(rows)
            back = error @ w2
            gradients = [back.T @ x, back.sum(0), error.T @ features, error.sum(0)]
            for weight, velocity, gradient in zip((w1, b1, w2, b2), speed, gradients, strict=True):
                velocity[...] = params["momentum"] * velocity + gradient + params["weight_decay"] * weight
                weight[...] -= params["lr"] * velocity
    return w1, b1, w2, b2


NAMES = ("encoder.layers.1.weight", "encoder.layers.1.bias", "head.weight", "head.bias")


def images_of(client):
    return client.train_inputs.numpy(), client.train_labels.numpy()


def join_noise(fed, name, labels):
    client = fed.join(name, [])
    client.train_inputs = torch.randn(
        len(labels), 1, 4, generator=torch.Generator().manual_seed(len(name) + ord(name[0]))
    )
    client.train_labels = torch.tensor(labels)
    return client


def tiny_federation(federation, name, **params):
    fed = federation(methods.create(name, {**PARAMS, **params}), TINY, rounds=2, labels={"x": []})
    fed.clients.clear()
    for client, labels in LABELS.items():
        join_noise(fed, client, labels)
    return fed


def test_a_round_of_fedavg_equals_its_numpy_twin(federation):
    fed = tiny_federation(federation, "fedavg")
    start = [fed.state[name] for name in NAMES]
    # Order of joining decides a client's generator: [seed, 1] for a, [seed, 2] for b.
    trained = {
        name: numpy_local_training(start, *images_of(client), np.random.default_rng([0, salt]))
        for salt, (name, client) in enumerate(fed.clients.items(), start=1)
    }
    fed.run_round()
    for place, name in enumerate(NAMES):
        by_hand = (5 * trained["a"][place] + 4 * trained["b"][place]) / 9
        np.testing.assert_allclose(fed.state[name], by_hand, rtol=1e-4, atol=1e-6, err_msg=name)


def test_fedper_trains_as_fedavg_does_but_keeps_the_head(federation):
    # In the first round, from equal heads, the encoders that are sent must be the same bits.
    average, personal = (tiny_federation(federation, name) for name in ("fedavg", "fedper"))
    for name in LABELS:
        personal.clients[name].model.load_state_dict(average.clients[name].model.state_dict())
        personal.clients[name].model.head.load_state_dict(
            {"weight": torch.from_numpy(average.state["head.weight"].copy()),
             "bias": torch.from_numpy(average.state["head.bias"].copy())}
        )  # fmt: skip
    ups = [fed.run_round() for fed in (average, personal)]
    for whole, body in zip(*ups, strict=True):
        assert set(body.tensors) == {name for name in whole.tensors if name.startswith("encoder.")}
        for name, array in body.tensors.items():
            np.testing.assert_array_equal(array, whole.tensors[name])
    heads = [personal.clients[name].model.head.weight.detach() for name in LABELS]
    assert not torch.equal(*heads)


def test_local_sends_nothing_and_never_meets_the_others(federation):
    together = tiny_federation(federation, "local").run()
    assert together.shared == ()
    assert together.state == {}
    alone = tiny_federation(federation, "local")
    del alone.clients["b"]
    alone.run()
    for key, array in alone.personal("a").items():
        np.testing.assert_array_equal(array, together.personal("a")[key])


def test_only_fedavg_has_a_shared_classifier(federation):
    for name, shared in (("fedavg", True), ("fedper", False), ("local", False)):
        fed = tiny_federation(federation, name).run()
        client = fed.clients["a"]
        assert (fed.method.predict_global(client, client.train_inputs) is not None) is shared
        assert (fed.method.global_head(fed.state) is not None) is shared


def test_fedavg_learns_the_stripes(federation, images):
    method = methods.create("fedavg", {"lr": 0.1, "batch_size": 8, "local_epochs": 2})
    labels = {"a": [0, 1, 2] * 10, "b": [0, 1, 2] * 10}
    fed = federation(method, rounds=6, labels=labels).run()
    fed.download("a")
    inputs, wanted = images([0, 1, 2] * 20, seed=99)
    found = fed.method.predict_global(fed.clients["a"], inputs).argmax(dim=1)
    assert (found == wanted).double().mean() > 0.9


def test_one_sample_under_plain_layers_still_trains(federation):
    fed = tiny_federation(federation, "fedavg")
    fed.clients.clear()
    join_noise(fed, "a", [1])
    before = fed.state["head.bias"].copy()
    fed.run_round()
    assert not np.array_equal(fed.state["head.bias"], before)
