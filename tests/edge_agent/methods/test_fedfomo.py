from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from edge_agent import methods
from edge_agent.methods.families import names_in
from edge_agent.methods.fedfomo import distance, held_back, helpfulness, moved, validation_loss
from edge_agent.methods.values import Update
from edge_agent.training.parts import to_arrays
from edge_agent.wire.tensors import decode, encode

QUICK = {"lr": 0.05, "local_epochs": 1, "batch_size": 4}


def fedfomo(**params):
    return methods.create("fedfomo", {**QUICK, **params})


def update(client, value, helped=(0.0, 0.0)):
    return Update(client, 1.0, {"head.weight": np.float32([value]), "extra.helped": np.array(helped)})


def test_weights_by_hand():
    # Losses fall by .4 at distance 2, by .1 at 1, rise by .3 at 1: .2, .1, 0, in shares 2/3, 1/3, 0.
    found = helpfulness(np.array([0.4, 0.1, -0.3]), np.array([2.0, 1.0, 1.0]))
    np.testing.assert_allclose(found, [0.2, 0.1, 0.0])
    np.testing.assert_allclose(found / found.sum(), [2 / 3, 1 / 3, 0.0])
    # From 0 with candidates 3, 6 and 100: 2 + 2.
    old = {"w": np.float32([0.0])}
    candidates = [{"w": np.float32([value])} for value in (3.0, 6.0, 100.0)]
    np.testing.assert_allclose(moved(old, candidates, found / found.sum())["w"], [4.0], rtol=1e-6)


def test_the_same_model_and_a_broken_one_help_nobody():
    found = helpfulness(np.array([0.0, np.nan, -np.inf, 0.5]), np.array([0.0, 1.0, 1.0, 0.0]))
    np.testing.assert_array_equal(found, [0.0, 0.0, 0.0, 0.0])


def test_distances_are_those_of_learned_weights():
    one = {"w": np.float32([3.0]), "v": np.float32([4.0]), "encoder.1.running_var": np.float32([100.0])}
    assert distance(one, {name: np.zeros_like(array) for name, array in one.items()}) == 5.0


def test_a_client_moves_to_a_mixture_of_its_own_and_a_received_model(federation):
    """Two clients: what `_federate` loads is old + sum w (candidate - old), each piece computed here by itself."""
    labels = [0, 1, 2] * 8
    fed = federation(fedfomo(explore=0.0, local_epochs=6), labels={"a": labels, "b": labels})
    fed.run_round()
    client = fed.clients["a"]
    names = fed.shared
    received = decode(encode(fed.method.downlink(fed.state, "a")))
    old = {name: client.memory[f"began.{name}"].copy() for name in names}
    own = to_arrays(client.model.part("personal"), names)
    peer = {name: received[f"extra.model.{name}"][0] for name in names}
    np.testing.assert_array_equal(
        peer["head.weight"], to_arrays(fed.clients["b"].model, ["head.weight"])["head.weight"]
    )
    losses = [validation_loss(client, model) for model in (old, own, peer)]
    raw = [max(0.0, losses[0] - losses[j]) / distance(model, old) for j, model in ((1, own), (2, peer))]
    assert sum(raw) > 0
    helped = fed.method._federate(client, received)
    np.testing.assert_allclose(helped, raw[1:], rtol=1e-5)
    mixed = to_arrays(client.model, names)
    for name in names:
        by_hand = old[name] + sum(w / sum(raw) * (m[name] - old[name]) for w, m in zip(raw, (own, peer), strict=True))
        np.testing.assert_allclose(mixed[name], by_hand, rtol=1e-4, atol=1e-5, err_msg=name)


def test_where_nothing_helps_the_own_model_stays(federation):
    fed = federation(fedfomo(), labels={"a": [0, 1] * 4, "b": [2] * 8})
    fed.run_round()
    client = fed.clients["a"]
    names = fed.shared
    own = to_arrays(client.model.part("personal"), fed.shared)
    client.memory |= {f"began.{name}": own[name].copy() for name in names}  # the old one is as good as one's own
    received = {f"extra.model.{name}": own[name][None] for name in names}
    assert not fed.method._federate(client, received).any()
    for name, array in to_arrays(client.model, names).items():
        np.testing.assert_array_equal(array, own[name])


def test_offers_are_bounded_and_follow_affinity():
    method = fedfomo(peers=2, explore=0.0)
    state = method.aggregate({"head.weight": np.float32([0.0])}, [update(name, 1.0) for name in "abcd"])
    assert len(method.offered(state, "a")) == 2
    first = method.offered(state, "a")
    state = method.aggregate(state, [update("a", 2.0, (0.1, 0.7))])
    table = state["clients.affinity"]
    names = names_in(state, "clients.names")
    assert table[0, names.index(first[1])] == 0.7
    assert method.offered(state, "a") == [first[1], first[0]]
    assert "a" not in method.offered(state, "a")
    assert len(method.offered(state, "newcomer")) == 2
    down = method.downlink(state, "b")
    assert {name: array.shape for name, array in down.items()} == {"extra.model.head.weight": (2, 1)}


def test_exploring_draws_peers_at_random_and_fades():
    method = fedfomo(peers=1, explore=1.0, explore_decay=0.5)
    state = method.aggregate({"head.weight": np.float32([0.0])}, [update(name, 1.0, [0.0]) for name in "abcdefgh"])
    table = np.zeros((8, 8))
    table[:, 0] = 1.0  # everybody likes a
    chosen = {}
    for number in (1, 3):  # chance 1, then 0
        liked = {**state, "clients.affinity": table, "clients.round": np.array([number])}
        chosen[number] = [method.offered(liked, name)[0] for name in "bcdefgh"]
    assert set(chosen[3]) == {"a"}
    assert len(set(chosen[1])) > 1


def test_each_peer_is_explored_on_its_own():
    """Of two offered the favourite and then not the second: half of half the times, 6 of 7 of those others."""
    method = fedfomo(peers=2, explore=0.5, explore_decay=0.0)
    state = method.aggregate({"head.weight": np.float32([0.0])}, [update(name, 1.0, [0.0] * 2) for name in "abcdefghi"])
    liked = {**state, "clients.affinity": np.tile(np.arange(9.0, 0.0, -1.0), (9, 1))}
    offers = [method.offered({**liked, "clients.round": np.array([number])}, "i") for number in range(400)]
    mixed = [first == "a" and second != "b" for first, second in offers]
    assert 0.18 < np.mean(mixed) < 0.30
    assert all(len(set(offer)) == 2 for offer in offers)


def test_a_client_that_is_away_keeps_its_place_and_its_model():
    method = fedfomo(peers=2)
    state = method.aggregate({"head.weight": np.float32([0.0])}, [update("b", 1.0), update("c", 2.0)])
    state = method.aggregate(state, [update("a", 3.0), update("c", 4.0)])
    assert names_in(state, "clients.names") == ("a", "b", "c")
    np.testing.assert_array_equal(state["clients.model.head.weight"].ravel(), [3.0, 1.0, 4.0])
    assert state["head.weight"] == 3.5  # the mean of the round
    assert method.broadcast(state) == {}


def test_a_fifth_is_held_back_and_never_trained_on(federation):
    fed = federation(fedfomo(), labels={"a": [0, 1] * 10})
    client = fed.clients["a"]
    train, validation = held_back(client)
    assert (len(train), len(validation)) == (16, 4)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(20))
    assert torch.equal(held_back(client)[1], validation)
    first = fed.update("a").tensors
    again = federation(fedfomo(), labels={"a": [0, 1] * 10})
    again.clients["a"].train_inputs[validation] = 1e6
    assert encode(again.update("a").tensors) == encode(first)
    expected = F.cross_entropy(client.model.eval()(client.train_inputs[validation]), client.train_labels[validation])
    loss = validation_loss(client, to_arrays(client.model, fed.shared))
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)


def test_negative_help_is_objected_to():
    assert fedfomo().objection({"extra.helped": np.zeros(5)}) == ""
    assert "-1" in fedfomo().objection({"extra.helped": np.array([0.0, -1.0])})
