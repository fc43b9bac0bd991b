from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from edge_agent import methods
from edge_agent.core.errors import ConfigError
from edge_agent.methods.fedetf import tune_only
from edge_agent.training.finetune import on_features
from edge_agent.training.loops import features_of

LABELS = {"a": [0, 0, 0, 0, 1], "b": [1, 2, 2, 2]}


def test_the_classifier_is_a_simplex_and_no_round_moves_a_bit(tiny):
    fed = tiny("fedetf", LABELS, projection_dim=7)
    etf = fed.state["head.etf"]
    assert etf.shape == (3, 7)
    np.testing.assert_allclose(etf @ etf.T, [[1, -0.5, -0.5], [-0.5, 1, -0.5], [-0.5, -0.5, 1]], atol=1e-6)
    np.testing.assert_allclose(etf.sum(axis=0), 0, atol=1e-6)
    start = dict(fed.state)
    fed.run()
    for name, array in start.items():
        assert np.array_equal(fed.state[name], array) == (name == "head.etf"), name


def test_logits_and_loss_by_hand(tiny):
    fed = tiny("fedetf", LABELS, scale=6.0)
    client = fed.clients["a"]
    head = fed.clients["a"].model.head
    z = features_of(client.model, client.train_inputs)
    with torch.no_grad():
        u = z @ head.projection.weight.T + head.projection.bias
        logits = 6.0 * (u / u.norm(dim=1, keepdim=True)) @ head.etf.T
        torch.testing.assert_close(client.model(client.train_inputs), logits)
        balanced = F.cross_entropy(logits + torch.tensor([4.0, 1.0, 0.0]).log(), client.train_labels)
    value = fed.method.loss(client, {})(client.train_inputs, client.train_labels)
    assert value.item() == pytest.approx(balanced.item(), rel=1e-5)


def test_each_half_of_tuning_moves_its_own_weights_alone(tiny):
    fed = tiny("fedetf", LABELS)
    client = fed.clients["a"]
    head = client.model.head
    for weights, expected in (
        ([head.etf], {"head.etf"}),
        (list(head.projection.parameters()), {"head.projection.weight", "head.projection.bias"}),
    ):
        before = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
        learns = [weight.requires_grad for weight in client.model.parameters()]
        tune_only(on_features(client), weights, fed.method.params, 0.1)
        moved = {name for name, tensor in client.model.state_dict().items() if not torch.equal(tensor, before[name])}
        assert moved == expected
        assert [weight.requires_grad for weight in client.model.parameters()] == learns


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_classifier_is_tuned_by_bare_steps_whatever_trains_the_model(tiny, optimizer):
    """Three steps on all samples by hand, neither momentum nor decay, while the projection stands."""
    alone = {"local_epochs": 0, "batch_size": 100, "tune_rounds": 1, "tune_epochs": 3, "tune_projection_lr": 1e-12}
    fed = tiny("fedetf", LABELS, rounds=1, optimizer=optimizer, **alone)
    client = fed.clients["a"]
    fed.download("a")
    expected = client.model.head.etf.detach().clone()
    with torch.no_grad():
        features = F.normalize(client.model.head.projection(client.model.encoder(client.train_inputs)), dim=1)
    for _ in range(3):
        expected.requires_grad_(True)
        loss = F.cross_entropy(client.model.head.scale.detach() * features @ expected.T, client.train_labels)
        (slope,) = torch.autograd.grad(loss, expected)
        expected = (expected - 0.1 * slope).detach()
    fed.method.personalize(client, {})
    np.testing.assert_allclose(client.memory["tuned.head.etf"], expected, rtol=1e-4, atol=1e-6)


def test_the_tuned_copy_has_a_classifier_of_its_own_and_the_model_keeps_the_fixed_one(tiny):
    fed = tiny("fedetf", LABELS, rounds=1).run()
    client = fed.clients["a"]
    fed.download("a")
    fed.method.personalize(client, {})
    assert not np.array_equal(client.memory["tuned.head.etf"], fed.state["head.etf"])
    np.testing.assert_array_equal(client.model.head.etf.detach(), fed.state["head.etf"])
    assert not client.model.head.etf.requires_grad


def test_without_rounds_of_alternation_tuning_is_the_balanced_training(tiny):
    fed = tiny("fedetf", LABELS, rounds=1, tune_rounds=0).run()
    client = fed.clients["a"]
    fed.download("a")
    fed.method.personalize(client, {})
    np.testing.assert_array_equal(client.memory["tuned.head.etf"], fed.state["head.etf"])
    assert not np.array_equal(client.memory["tuned.head.scale"], fed.state["head.scale"])


def test_tuning_fits_the_clients_own_labels(tiny):
    fed = tiny("fedetf", LABELS, rounds=1, tune_rounds=10, tune_epochs=3).run()
    client = fed.clients["a"]
    fed.download("a")
    rows = torch.arange(5)
    own, shared = (
        ask(client, client.train_inputs)[rows, client.train_labels].log().mean()
        for ask in (fed.method.predict, fed.method.predict_global)
    )
    assert own > shared + 0.2


def test_the_exported_classifier_names_the_same_classes(tiny):
    fed = tiny("fedetf", LABELS).run()
    fed.download("b")
    client = fed.clients["b"]
    inputs = 10 * torch.randn(50, 1, 4, generator=torch.Generator().manual_seed(3))
    head = fed.method.global_head(fed.state)
    logits = features_of(client.model, inputs).numpy() @ head["weight"].T + head["bias"]
    found = fed.method.predict_global(client, inputs).argmax(dim=1).numpy()
    np.testing.assert_array_equal(logits.argmax(axis=1), found)
    assert len(set(found)) > 1


def test_a_projection_narrower_than_the_classes_is_refused(task):
    with pytest.raises(ConfigError, match="projection_dim = 2 for 3 classes"):
        methods.create("fedetf", {"projection_dim": 2}).build(task)
