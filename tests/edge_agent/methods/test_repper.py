from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from edge_agent import heads, methods
from edge_agent.core.errors import ConfigError, UnknownName
from edge_agent.heads import FitData
from edge_agent.methods import repper as repper_module
from edge_agent.training.loops import features_of
from edge_agent.wire.tensors import encode

QUICK = {"local_epochs": 1, "batch_size": 8}


def repper(**params):
    return methods.create("repper", {**QUICK, **params})


def test_only_the_encoder_is_built_and_travels(federation):
    fed = federation(repper(), rounds=1).run()
    assert {name.split(".")[0] for name in fed.state} == {"encoder"}
    assert {name.split(".")[0] for name in fed.clients["a"].model.state_dict()} == {"encoder"}
    assert any(name.endswith("running_mean") for name in fed.state)
    assert fed.method.global_head(fed.state) is None
    assert fed.method.predict_global(fed.clients["a"], fed.clients["a"].train_inputs) is None


def test_the_personal_head_is_the_device_head_fitted_on_eval_features(federation, images):
    fed = federation(repper(head="lr"), rounds=1).run()
    client = fed.clients["a"]
    fed.method.personalize(client, fed.download("a"))
    inputs, _ = images([0, 1, 2], seed=5)
    twin = heads.create("lr", {"feature_norm": "standard"})
    own = features_of(client.model, client.train_inputs).numpy()
    twin.fit(FitData(own, client.train_labels.numpy(), 3), np.random.default_rng(0))
    expected = twin.predict_proba(features_of(client.model, inputs).numpy())
    np.testing.assert_allclose(fed.method.predict(client, inputs).numpy(), expected, atol=1e-6)


def test_a_class_that_a_device_never_saw_gets_probability_zero(federation, images):
    fed = federation(repper(), rounds=1).run()
    client = fed.clients["a"]  # has labels 0 and 1
    fed.method.personalize(client, fed.download("a"))
    probabilities = fed.method.predict(client, images([2, 2], seed=5)[0])
    assert (probabilities[:, 2] == 0).all()


def test_personalizing_leaves_the_encoder_and_the_generators_alone(federation):
    fed = federation(repper(), rounds=1).run()
    client = fed.clients["a"]
    fed.download("a")
    weights = encode({k: v.numpy() for k, v in client.model.state_dict().items()})
    draws = client.rng.bit_generator.state
    noise = client.generator.get_state()
    fed.method.personalize(client, {})
    assert encode({k: v.numpy() for k, v in client.model.state_dict().items()}) == weights
    assert client.rng.bit_generator.state == draws
    assert torch.equal(client.generator.get_state(), noise)


def test_a_head_is_fitted_again_only_when_the_encoder_has_changed(federation, monkeypatch):
    fed = federation(repper(head="prototype"))
    client = fed.clients["a"]
    fits = []
    personalize = type(fed.method).personalize
    monkeypatch.setattr(
        type(fed.method), "personalize", lambda self, c, r: (fits.append(c.id), personalize(self, c, r))[1]
    )
    fed.run_round()
    fed.download("a")
    for _ in range(3):
        fed.method.predict(client, client.train_inputs)
    assert len(fits) == 1
    fed.run_round()
    fed.download("a")
    fed.method.predict(client, client.train_inputs)
    assert len(fits) == 2


def test_a_head_in_memory_is_used_after_a_restart(federation, images):
    fed = federation(repper(), rounds=1).run()
    client = fed.clients["a"]
    fed.method.personalize(client, fed.download("a"))
    inputs, _ = images([0, 1, 2], seed=5)
    before = fed.method.predict(client, inputs)
    client.train_inputs = torch.full_like(client.train_inputs, torch.nan)  # a new fit would fail
    assert torch.equal(methods.create("repper", QUICK).predict(client, inputs), before)


def test_memory_holds_one_head_and_its_encoder(federation):
    fed = federation(repper(head="mlp"), rounds=1).run()
    client = fed.clients["a"]
    fed.method.personalize(client, fed.download("a"))
    assert "personal.head.weight0" in client.memory
    other = repper(head="prototype")
    other.personalize(client, {})
    assert "personal.head.weight0" not in client.memory
    assert client.memory["personal.encoder"].shape == (32,)


def test_a_shared_classifier_does_not_disturb_the_encoder(federation):
    plain, extended = (federation(repper(global_head=wish), rounds=2).run() for wish in (False, True))
    encoder = {name: array for name, array in extended.state.items() if name.startswith("encoder.")}
    assert encode(encoder) == encode(plain.state)
    assert {"head.weight", "head.bias"} == extended.state.keys() - plain.state.keys()


def test_a_shared_classifier_learns_and_is_the_one_that_is_exported(federation, images):
    method = methods.create(
        "repper", {"local_epochs": 4, "batch_size": 16, "global_head": True, "global_head_lr": 0.05, "augment": False}
    )
    labels = {name: [0, 1, 2] * 8 for name in "ab"}
    fed = federation(method, rounds=6, labels=labels).run()
    client = fed.clients["a"]
    fed.download("a")
    inputs, wanted = images([0, 1, 2] * 20, seed=99)
    found = method.predict_global(client, inputs)
    assert (found.argmax(dim=1) == wanted).double().mean() > 0.8
    head = method.global_head(fed.state)
    logits = features_of(client.model, inputs).numpy() @ head["weight"].T + head["bias"]
    np.testing.assert_allclose(torch.softmax(torch.from_numpy(logits), dim=1).numpy(), found.numpy(), atol=1e-5)


def test_the_contrastive_stage_pulls_classes_apart(federation, images):
    fed = federation(repper(local_epochs=4, augment=False), rounds=8, labels={"a": [0, 1, 2] * 10, "b": [0, 1, 2] * 10})
    inputs, labels = images([0, 1, 2] * 10, seed=50)

    def separation() -> float:
        fed.download("a")
        unit = torch.nn.functional.normalize(features_of(fed.clients["a"].model, inputs), dim=1)
        cosine = unit @ unit.T
        alike = labels[:, None] == labels[None, :]
        return float(cosine[alike].mean() - cosine[~alike].mean())

    before = separation()
    fed.run()
    assert separation() > before + 0.2


def test_without_augmentation_no_random_number_is_drawn_for_views(federation):
    fed = federation(repper(augment=False))
    before = fed.clients["a"].generator.get_state()
    fed.run_round()
    assert torch.equal(fed.clients["a"].generator.get_state(), before)


def test_both_forms_of_the_loss_train_differently(federation):
    inner, outer = (federation(repper(sc_variant=form), rounds=1).run() for form in ("in", "out"))
    assert encode(inner.state) != encode(outer.state)


@pytest.mark.parametrize("round_number, expected", [(1, 0.1), (5, 0.1), (6, 0.01), (8, 0.01), (9, 0.001)])
def test_the_step_size_falls_after_the_given_shares_of_the_run(federation, monkeypatch, round_number, expected):
    # Ten rounds, shares 0.5 and 0.8: rounds 6 and 9 are the first with a smaller step.
    fed = federation(repper(lr=0.1, decay_at=(0.5, 0.8)), rounds=10)
    client = fed.clients["a"]
    client.round = round_number
    used = []
    monkeypatch.setattr(repper_module, "train", lambda *_, optimizer: used.append(optimizer))
    fed.method.local_update(client, {})
    assert used[0].param_groups[0]["lr"] == pytest.approx(expected)


def test_one_step_of_adam_moves_each_weight_by_the_step_size(federation):
    # Adam's first step is lr * g / (|g| + eps) = lr * sign(g), whatever the size of a gradient well above eps.
    fed = federation(repper(lr=0.01, weight_decay=0.0, batch_size=64, augment=False), labels={"a": [0, 1] * 4})
    name = "encoder.layers.5.weight"  # the linear layer
    before = fed.state[name].copy()
    (update,) = fed.run_round()
    moved = np.abs(update.tensors[name] - before)
    typical = moved[moved > 1e-4]
    assert len(typical) > 0
    np.testing.assert_allclose(np.median(typical), 0.01, rtol=0.05)


def test_head_parameters_reach_the_head():
    assert methods.create("repper", {"head": "lr", "head_params": {"c": 3.0}})._head().params.c == 3.0
    assert repper(feature_norm="l2").head_params("svm") == {"feature_norm": "l2"}
    with pytest.raises(UnknownName, match="did you mean 'prototype'"):
        repper(head="prototypes")._head()
    with pytest.raises(ConfigError, match="did you mean 'epochs'"):
        repper(head_params={"epoch": 1})._head()


def test_a_new_client_needs_only_the_encoder(federation):
    fed = federation(repper(local_epochs=3), rounds=5, labels={"a": [0, 1, 2] * 8, "b": [0, 1, 2] * 8}).run()
    new = fed.join("new", [0, 2] * 6)
    fed.download("new")
    fed.method.personalize(new, {})
    found = fed.method.predict(new, new.train_inputs).argmax(dim=1)
    assert (found == new.train_labels).double().mean() > 0.8


def test_the_logged_loss_is_that_of_the_last_epoch(federation):
    fed = federation(repper(augment=False, lr=1e-12, batch_size=64), labels={"a": [0, 0, 1, 1]})
    fed.run_round()
    loss = fed.clients["a"].log["loss"]
    assert 0 < loss < math.log(3) + 2 / 0.1  # at most log|A| + (largest - smallest cosine) / temperature
