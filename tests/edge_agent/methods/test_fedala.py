from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.methods import fedala as fedala_module
from edge_agent.methods.fedala import mix, stepped, upper
from edge_agent.wire.tensors import encode

QUICK = {"lr": 0.1, "batch_size": 4}
HEAD = ["head.weight", "head.bias"]


def fedala(**params):
    return methods.create("fedala", {**QUICK, **params})


def test_a_step_of_the_shares_by_hand():
    # Own 1, received 3, eta .1, slope .5: W = 1 - .1 * .5 * (3 - 1) = .9, mixture 1 + .9 * 2 = 2.8.
    own, received, shares, slopes = ({"w": torch.tensor([value])} for value in (1.0, 3.0, 1.0, 0.5))
    (moved,) = stepped(own, received, shares, slopes, 0.1)["w"].tolist()
    assert moved == pytest.approx(0.9)
    assert mix(np.array([1.0]), np.array([3.0]), np.array([moved]))[0] == pytest.approx(2.8)


@pytest.mark.parametrize("slope, expected", [(100.0, 0.0), (-100.0, 1.0)])
def test_shares_stay_within_0_and_1(slope, expected):
    own, received, shares, slopes = ({"w": torch.tensor([value])} for value in (1.0, 3.0, 0.5, slope))
    assert stepped(own, received, shares, slopes, 1.0)["w"].item() == expected


def test_shares_of_one_give_fedavg_bit_for_bit(federation):
    plain, other = (
        federation(method, rounds=2, seed=1).run() for method in (methods.create("fedavg", QUICK), fedala(ala_lr=0.0))
    )
    assert encode(other.state) == encode(plain.state)


def test_the_first_round_has_nothing_to_mix(federation):
    plain, other = (federation(method, seed=1) for method in (methods.create("fedavg", QUICK), fedala()))
    for one, two in zip(plain.run_round(), other.run_round(), strict=True):
        assert encode(one.tensors) == encode(two.tensors)


def test_from_the_second_round_on_the_classifier_is_mixed_and_the_encoder_copied(federation):
    fed = federation(fedala(ala_lr=20.0))
    fed.run_round()
    fed.download("a")
    client = fed.clients["a"]
    own = {name: client.memory[f"ala.own.{name}"] for name in HEAD}
    fed.method.personalize(client, {})
    for name in HEAD:
        shares = client.memory[f"ala.next.{name}"]
        mixed = client.memory[f"ala.mixed.{name}"]
        assert (shares >= 0).all()
        assert (shares <= 1).all()
        by_hand = own[name] + (fed.state[name] - own[name]) * shares
        np.testing.assert_allclose(mixed, by_hand, rtol=1e-4, atol=1e-6)
    assert (client.memory["ala.next.head.weight"] < 1).any()
    assert not any("encoder" in name for name in client.memory)


def test_mixing_lowers_the_loss_on_the_clients_own_data(federation):
    fed = federation(fedala(ala_lr=20.0, ala_samples=1.0), labels={"a": [0] * 8, "b": [1, 2] * 8})
    fed.run_round()
    fed.download("a")
    client = fed.clients["a"]
    losses = [
        -predict(client, client.train_inputs)[:, 0].log().mean()
        for predict in (fed.method.predict, fed.method.predict_global)
    ]
    assert losses[0] < losses[1]


def test_shares_are_kept_when_training_begins_and_not_before(federation):
    fed = federation(fedala(ala_lr=20.0))
    fed.run_round()
    fed.run_round()
    client = fed.clients["a"]
    before = client.memory["ala.shares.head.weight"].copy()
    fed.download("a")
    fed.method.predict(client, client.train_inputs)
    np.testing.assert_array_equal(client.memory["ala.shares.head.weight"], before)
    learned = client.memory["ala.next.head.weight"].copy()
    fed.update("a")
    np.testing.assert_array_equal(client.memory["ala.shares.head.weight"], learned)
    assert not np.array_equal(learned, before)


@pytest.fixture
def passes(monkeypatch):
    """The labels that each pass over local data has seen, in their order."""

    def noting(model, sides, data, params):
        seen.append(data[1].tolist())
        return one_pass(model, sides, data, params)

    seen = []
    one_pass = fedala_module.one_pass
    monkeypatch.setattr(fedala_module, "one_pass", noting)
    return seen


def test_shares_are_learned_until_losses_rest_the_first_time_and_in_one_pass_from_then_on(federation, passes):
    """Three clients: nothing to mix, then at least the eleven passes that ten losses at rest need, then one each."""
    fed = federation(fedala())
    counts = []
    for _ in range(4):
        passes.clear()
        fed.run_round()
        counts.append(len(passes))
    assert (counts[0], counts[2:]) == (0, [3, 3])
    assert 3 * 11 <= counts[1] < 3 * 50


def test_they_are_learned_from_all_classes_also_where_data_lie_class_by_class(federation, passes):
    """Of 40 samples the first 24 are of two classes; 24 random ones lack a class once in 10^8 times."""
    fed = federation(fedala(ala_samples=0.6), labels={"a": [0] * 14 + [1] * 13 + [2] * 13, "b": [1, 2] * 4})
    fed.run_round()
    fed.run_round(["a"])
    assert set(passes[0]) == {0, 1, 2}
    assert len(passes[0]) == 24


def test_upper_tensors_are_counted_from_the_top(federation):
    model = federation(fedala()).fresh_model(0)
    assert upper(model, 2) == HEAD
    assert upper(model, 1000) == [name for name, _ in model.named_parameters()]
