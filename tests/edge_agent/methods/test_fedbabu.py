from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from edge_agent import methods
from edge_agent.training.loops import TrainingOptions, local_optimizer, train

LABELS = {"a": [0, 1, 1, 0, 1], "b": [1, 2, 2, 2]}


def test_the_head_is_the_same_bits_at_everybody_and_in_every_round(tiny):
    fed = tiny("fedbabu", LABELS)
    start = dict(fed.state)
    for _ in range(3):
        for update in fed.run_round():
            np.testing.assert_array_equal(update.tensors["head.weight"], start["head.weight"])
            np.testing.assert_array_equal(update.tensors["head.bias"], start["head.bias"])
    for name, array in start.items():
        assert np.array_equal(fed.state[name], array) == name.startswith("head."), name


def test_the_body_is_trained_by_plain_sgd_under_the_frozen_head(tiny):
    fed = tiny("fedbabu", LABELS)
    twin = tiny("fedbabu", LABELS)
    sent = fed.run_round()[0].tensors
    twin.download("a")
    client = twin.clients["a"]
    loss = lambda inputs, labels: F.cross_entropy(client.model(inputs), labels)
    optimizer = local_optimizer(client.model.encoder.parameters(), twin.method.params)
    train(client, loss, fed.method.params, optimizer=optimizer, options=TrainingOptions(epochs=1, batch_size=4))
    for name, array in sent.items():
        np.testing.assert_array_equal(array, client.model.state_dict()[name], err_msg=name)


@pytest.mark.parametrize("tune, moved", [("all", ("encoder", "head")), ("head", ("head",))])
def test_tuning_thaws_the_head_of_the_copy(tiny, tune, moved):
    fed = tiny("fedbabu", LABELS, rounds=1, tune=tune).run()
    client = fed.clients["a"]
    fed.download("a")
    fed.method.personalize(client, {})
    kept = {name.removeprefix("tuned."): array for name, array in client.memory.items() if name.startswith("tuned.")}
    assert {name.split(".")[0] for name in kept} == set(moved)
    assert all(not np.array_equal(array, fed.state[name]) for name, array in kept.items())
    assert all(np.array_equal(t, fed.state[name]) for name, t in client.model.state_dict().items())


def test_a_tuned_copy_answers_better_at_home_than_the_frozen_head(federation):
    method = methods.create("fedbabu", {"lr": 0.05, "batch_size": 8})
    fed = federation(method, rounds=3, labels={"a": [0, 1] * 9, "b": [1, 2] * 9}).run()
    client = fed.clients["a"]
    fed.download("a")
    own, shared = (
        (ask(client, client.train_inputs).argmax(dim=1) == client.train_labels).double().mean()
        for ask in (method.predict, method.predict_global)
    )
    assert own > 0.9
    assert own >= shared


def test_the_global_answer_is_of_the_frozen_head(tiny):
    fed = tiny("fedbabu", LABELS, rounds=1).run()
    client = fed.clients["a"]
    fed.download("a")
    expected = torch.softmax(client.model(client.train_inputs), dim=1)
    torch.testing.assert_close(fed.method.predict_global(client, client.train_inputs), expected)
    np.testing.assert_array_equal(fed.method.global_head(fed.state)["weight"], fed.state["head.weight"])
