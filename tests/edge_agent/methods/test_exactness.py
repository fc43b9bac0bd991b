"""What a method says of its device heads: a head that is called exact equals the method's own personal part."""

from __future__ import annotations

import numpy as np
import pytest

from edge_agent import heads, methods
from edge_agent.heads.base import FitData
from edge_agent.methods.values import GRADES
from edge_agent.training.loops import features_of
from edge_agent.training.parts import to_arrays

CARDS = [
    (name, head, *methods.create(name).card(head)) for name in methods.names() for head in methods.create(name).heads
]
EXACT = [(name, head) for name, head, grade, _ in CARDS if grade == "exact"]
SAME_FORM = [(name, head) for name, head, grade, _ in CARDS if grade == "same form"]
OTHERS = {name: [head for one, head, grade, _ in CARDS if (one, grade) == (name, "approximate")] for name, *_ in CARDS}


def both_answers(name, head, fed, monkeypatch, seed=3):
    """Class probabilities of the train-tier client and of a device with the same frozen features, on new samples.

    Both draw from a generator with the same seed: start and order of SGD are random in either.
    """
    client = fed.clients["a"]
    received = fed.download("a")
    fresh = np.random.default_rng
    with monkeypatch.context() as patched:
        patched.setattr(np.random, "default_rng", lambda *_: fresh(seed))
        fed.method.personalize(client, received)
        inputs = client.train_inputs.roll(1, dims=0) * 0.9
        own = fed.method.predict(client, inputs).cpu().numpy()
    frozen = features_of(client.model, client.train_inputs).cpu().numpy()
    device = heads.create(head, fed.method.head_params(head))
    shared = fed.method.global_head(fed.state)
    params = fed.method.params.model_dump(mode="json")
    labels = client.train_labels.cpu().numpy()
    statistics = statistics_of(fed)
    device.fit(FitData(frozen, labels, fed.task.num_classes, shared, params, statistics), fresh(seed))
    return own, device.predict_proba(features_of(client.model, inputs).cpu().numpy())


def statistics_of(fed):
    """What a bundle brings of all clients' features, for a method that has such statistics."""
    statistics = fed.method.shared_statistics(fed.state)
    if statistics is None:
        return None
    return {**statistics, "mean": statistics["sums"].sum(axis=0) / statistics["shares"].sum()}


def chosen(make_method, name, head, **params):
    """The method with ``head`` as its personal part, where it lets one choose."""
    has_choice = "head" in methods.get(name).Params.model_fields
    return make_method(name, **({"head": head} if has_choice else {}), **params)


@pytest.mark.parametrize("name, head", EXACT)
def test_an_exact_head_answers_as_the_methods_own_personal_part(name, head, federation, make_method, monkeypatch):
    fed = federation(chosen(make_method, name, head)).run()
    own, device = both_answers(name, head, fed, monkeypatch)
    np.testing.assert_allclose(device, own, atol=1e-6)


def test_an_exact_head_takes_the_parameters_that_the_method_gives_its_own(federation, make_method, monkeypatch):
    params = {"head_params": {"epochs": 2, "lr": 0.2}, "feature_norm": "l2"}
    fed = federation(chosen(make_method, "repper", "mlp", **params)).run()
    own, device = both_answers("repper", "mlp", fed, monkeypatch)
    np.testing.assert_allclose(device, own, atol=1e-6)
    assert np.ptp(own, axis=1).min() > 0.01  # answers that differ: constant ones would agree whatever was fitted


def with_the_methods_weights(fed, name, head):
    """The method's answers for client 'c', which has all classes, and those of its device head with the same weights.

    Neighbours have no weights: the device gets the k, scale and lambda that the client has chosen.
    """
    client = fed.clients["c"]
    fed.method.personalize(client, fed.download("c"))
    inputs = client.train_inputs.roll(1, dims=0) * 0.9
    own = fed.method.predict(client, inputs).cpu().numpy()
    trained = to_arrays(client.model, client.model.state_dict())
    tuned = {key.removeprefix("tuned."): a for key, a in client.memory.items() if key.startswith("tuned.")}
    trained |= tuned  # a fine-tuned copy, which the client answers with
    shared = {part: trained[f"head.{part}"] for part in ("weight", "bias")}
    params = dict(fed.method.head_params(head))
    if head == "mlp":
        params["feature_norm"] = "none"
    elif head == "knn":
        neighbours, scale, mix = client.memory["memorized.chosen"].tolist()
        params |= {"neighbours": int(neighbours), "scale": scale, "mix": mix}
    device = heads.create(head, params)
    frozen = features_of(client.model, client.train_inputs).cpu().numpy()
    labels = client.train_labels.cpu().numpy()
    device.fit(FitData(frozen, labels, fed.task.num_classes, shared), np.random.default_rng(0))
    ours = {"weight0": "head.weight", "bias0": "head.bias", "weight": "head.weight", "bias": "head.bias"}
    ours |= {"shared.weight": "head.weight", "shared.bias": "head.bias"}
    arrays = {key: trained.get(ours.get(key, key), array) for key, array in device.arrays.items()}
    replaced = [key for key in arrays if ours.get(key, key) in trained]
    assert all(arrays[key].shape == device.arrays[key].shape for key in arrays)
    device.load(arrays, fed.task.num_classes, device.feature_dim)
    return own, device.predict_proba(features_of(client.model, inputs).cpu().numpy()), replaced


@pytest.mark.parametrize("name, head", SAME_FORM)
def test_a_head_of_the_same_form_answers_as_the_method_with_the_methods_weights(name, head, federation, make_method):
    fed = federation(make_method(name)).run()
    own, device, replaced = with_the_methods_weights(fed, name, head)
    assert replaced or head == "knn"
    np.testing.assert_allclose(device, own, atol=1e-5)


@pytest.mark.parametrize("name, head", [one for one in SAME_FORM if one[1] not in {"knn", "shared_classifier"}])
def test_a_head_of_the_same_form_answers_otherwise_with_its_own_weights(
    name, head, federation, make_method, monkeypatch
):
    fed = federation(make_method(name)).run()
    own, device = both_answers(name, head, fed, monkeypatch)
    assert np.abs(device - own).max() > 0.01


@pytest.mark.parametrize("name", [name for name, others in OTHERS.items() if others])
def test_an_approximate_head_answers_otherwise_than_the_method(name, federation, make_method, monkeypatch):
    fed = federation(make_method(name)).run()
    for head in OTHERS[name]:
        own, device = both_answers(name, head, fed, monkeypatch)
        assert np.abs(device - own).max() > 1e-4, head


def test_only_methods_that_fit_a_device_head_themselves_have_exact_ones():
    assert {name for name, _ in EXACT} == {"linear_probe", "repper"}
    assert sorted(head for name, head in EXACT if name == "repper") == ["lr", "mlp", "svm"]


@pytest.mark.parametrize("name, head, grade, why", CARDS)
def test_each_head_has_a_grade_and_a_reason(name, head, grade, why):
    assert grade in GRADES
    assert why
    pooled = "batch norm" in why and "pooled" in why
    assert pooled == (methods.create(name).norm != "global"), why


def test_pooled_batch_norm_makes_no_head_exact(make_method):
    grade, why = make_method("repper", norm="local_stats").card("lr")
    assert grade == "same form"
    assert "pooled" in why
