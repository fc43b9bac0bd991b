"""Fine-tuned copies: what they are, that they are made when due, and that they never travel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from edge_agent import methods
from edge_agent.core.errors import TrainingFailed
from edge_agent.training import finetune
from edge_agent.training.loops import TrainingOptions, local_optimizer, train
from edge_agent.wire.tensors import encode


def bits(model) -> bytes:
    return encode({name: tensor.numpy() for name, tensor in model.state_dict().items()})


@pytest.fixture
def received(federation):
    """``received(tune=..., ...)``: a federation with batch norm after a round, and its client a with the new state."""

    def build(**params):
        fed = federation(methods.create("fedavg_ft", {"batch_size": 4, **params}), rounds=1).run()
        fed.download("a")
        return fed, fed.clients["a"]

    return build


def test_the_tuned_copy_never_travels(tiny):
    labels = {"a": [0, 1, 2, 1, 0], "b": [2, 2, 1, 0]}
    plain, tuned = (tiny(name, labels) for name in ("fedavg", "fedavg_ft"))
    for _ in range(3):
        plain.run_round()
        for client in tuned.clients.values():
            tuned.method.personalize(client, tuned.download(client.id))
            tuned.method.predict(client, client.train_inputs)
        tuned.run_round()
    assert encode(plain.state) == encode(tuned.state)


def test_tuning_the_head_equals_training_through_the_frozen_encoder(received):
    fed, client = received(tune_epochs=3, tune_lr=0.1)
    fed.method.personalize(client, {})
    # The same steps the long way: each batch through the encoder in eval mode.
    model = client.model
    params = fed.method.params
    seed = int.from_bytes(finetune.fingerprint(model)[:7].tobytes(), "little")
    client.rng = np.random.default_rng(seed)
    loss = lambda inputs, labels: F.cross_entropy(model(inputs), labels)
    optimizer = local_optimizer(model.head.parameters(), params, lr=0.1)
    before = model.head.weight.detach().clone()
    train(
        client,
        loss,
        fed.method.params,
        optimizer=optimizer,
        options=TrainingOptions(epochs=3, batch_size=4, frozen=("encoder",)),
    )
    assert not torch.equal(model.head.weight, before)
    np.testing.assert_allclose(client.memory["tuned.head.weight"], model.head.weight.detach(), atol=1e-5)
    np.testing.assert_allclose(client.memory["tuned.head.bias"], model.head.bias.detach(), atol=1e-5)
    assert not [name for name in client.memory if name.startswith("tuned.encoder")]


@pytest.mark.parametrize("tune", ["head", "all"])
def test_tuning_leaves_model_and_generators_alone(received, tune):
    fed, client = received(tune=tune)
    weights = bits(client.model)
    draws = client.rng.bit_generator.state
    noise = client.generator.get_state()
    everywhere = torch.get_rng_state()
    fed.method.personalize(client, {})
    fed.method.predict(client, client.train_inputs)
    assert bits(client.model) == weights
    assert client.rng.bit_generator.state == draws
    assert torch.equal(client.generator.get_state(), noise)
    assert torch.equal(torch.get_rng_state(), everywhere)
    assert all(weight.requires_grad for weight in client.model.parameters())


def test_tuning_all_moves_the_encoder_and_its_statistics(received):
    fed, client = received(tune="all")
    fed.method.personalize(client, {})
    for name, tensor in client.model.state_dict().items():
        assert not np.array_equal(client.memory[f"tuned.{name}"], tensor), name


def test_the_copy_fits_the_clients_own_labels_better(received):
    fed, client = received(tune_epochs=20, tune_lr=0.1)  # labels 0 and 1 only
    rows = torch.arange(client.samples)
    own, shared = (
        ask(client, client.train_inputs)[rows, client.train_labels].log().mean()
        for ask in (fed.method.predict, fed.method.predict_global)
    )
    assert own > shared + 0.2


def test_without_epochs_the_copy_is_the_shared_model(received):
    fed, client = received(tune_epochs=0)
    inputs = client.train_inputs
    assert torch.equal(fed.method.predict(client, inputs), fed.method.predict_global(client, inputs))


def test_a_copy_is_made_once_for_each_shared_model(received, monkeypatch):
    fed, client = received()
    tuned = []
    kind = type(fed.method)
    tune = type(fed.method).tune
    monkeypatch.setattr(kind, "tune", lambda self, c: (tuned.append(c.id), tune(self, c))[1])
    for _ in range(3):
        fed.method.predict(client, client.train_inputs)
    assert tuned == ["a"]
    fed.run_round()
    fed.download("a")
    fed.method.predict(client, client.train_inputs)
    assert tuned == ["a", "a"]


def test_a_copy_in_memory_is_used_after_a_restart(received):
    fed, client = received(tune="all")
    inputs = client.train_inputs
    before = fed.method.predict(client, inputs)
    client.train_inputs = torch.full_like(inputs, torch.nan)  # tuning anew would fail
    assert torch.equal(methods.create("fedavg_ft", {"tune": "all"}).predict(client, inputs), before)


def test_tuning_that_fails_leaves_model_and_memory(received):
    fed, client = received()
    fed.method.personalize(client, {})
    weights = bits(client.model)
    memory = encode(client.memory)
    broken = methods.create("fedavg_ft", {"tune": "all", "tune_lr": 1e30, "batch_size": 4})
    with pytest.raises(TrainingFailed, match="lower lr"):
        broken.personalize(client, {})
    assert bits(client.model) == weights
    assert encode(client.memory) == memory


def test_the_same_model_is_known_by_its_tensors_and_not_by_its_counters(received):
    _, client = received()
    before = finetune.fingerprint(client.model)
    client.model.state_dict()["encoder.layers.1.num_batches_tracked"].add_(1)
    np.testing.assert_array_equal(finetune.fingerprint(client.model), before)
    client.model.state_dict()["encoder.layers.1.running_mean"].add_(1)
    assert not np.array_equal(finetune.fingerprint(client.model), before)
