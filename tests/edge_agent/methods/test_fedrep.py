from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from edge_agent import methods
from edge_agent.training.loops import TrainingOptions, local_optimizer, train

LABELS = {"a": [0, 1, 2, 1, 0, 2], "b": [2, 2, 1, 0]}


def tensors_of(model, part):
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith(part)}


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_heads_stage_leaves_the_encoder_untouched(federation, mode):
    fed = federation(methods.create("fedrep", {"batch_size": 4, "head_epochs": 2, "frozen_norm": mode}))
    client = fed.clients["a"]
    before = tensors_of(client.model, "")
    fed.method.train_head(client)
    moved = {name for name, tensor in client.model.state_dict().items() if not torch.equal(tensor, before[name])}
    # With "train" batch norm goes on counting and averaging, but no weight of it moves.
    statistics = {name for name in before if "running" in name or "num_batches" in name}
    assert moved == {"head.weight", "head.bias"} | (statistics if mode == "train" else set())


def test_the_encoders_stage_leaves_the_head_untouched(tiny):
    fed = tiny("fedrep", LABELS, head_epochs=0)
    before = {name: tensors_of(client.model, "head") for name, client in fed.clients.items()}
    start = dict(fed.state)
    fed.run_round()
    for name, client in fed.clients.items():
        assert all(torch.equal(tensor, before[name][key]) for key, tensor in tensors_of(client.model, "head").items())
    assert all(not np.array_equal(fed.state[name], start[name]) for name in start)


def test_without_head_epochs_it_is_fedper_on_a_frozen_head(tiny):
    fed = tiny("fedrep", LABELS, head_epochs=0)
    twin = tiny("fedper", LABELS)
    (sent, _) = fed.run_round()
    twin.download("a")
    client = twin.clients["a"]
    loss = lambda inputs, labels: F.cross_entropy(client.model(inputs), labels)
    optimizer = local_optimizer(client.model.encoder.parameters(), twin.method.params)
    train(
        client,
        loss,
        fed.method.params,
        optimizer=optimizer,
        options=TrainingOptions(epochs=1, batch_size=4, frozen=("head",)),
    )
    for name, array in sent.tensors.items():
        np.testing.assert_array_equal(array, client.model.state_dict()[name], err_msg=name)


def test_features_computed_once_give_the_same_head(tiny):
    once, each = (tiny("fedrep", LABELS, head_epochs=4, head_lr=0.2, frozen_norm=mode) for mode in ("eval", "train"))
    for fed in (once, each):
        fed.method.train_head(fed.clients["a"])
    heads = [fed.clients["a"].model.head.weight for fed in (once, each)]
    assert not torch.equal(heads[0], once.fresh_model(1).head.weight)
    torch.testing.assert_close(*heads, rtol=1e-5, atol=1e-6)


def test_the_head_learns_first_and_with_its_own_step_size(tiny):
    # With a vanishing step of the encoder, all that is left of a round is the head's.
    fed = tiny("fedrep", {"a": LABELS["a"]}, lr=1e-12, head_lr=0.5, head_epochs=20)
    client = fed.clients["a"]
    head = client.model.head.weight.detach().clone()
    fed.download("a")
    encoder = tensors_of(client.model, "encoder")
    fed.method.local_update(client, {})
    torch.testing.assert_close(tensors_of(client.model, "encoder"), encoder, atol=1e-8, rtol=0)
    assert (client.model.head.weight - head).abs().max() > 0.05
    assert client.log["loss.head"] == pytest.approx(client.log["loss"], abs=0.1)


def test_only_the_encoder_travels(tiny):
    fed = tiny("fedrep", LABELS)
    assert all(name.startswith("encoder.") for update in fed.run_round() for name in update.tensors)
    assert fed.method.predict_global(fed.clients["a"], fed.clients["a"].train_inputs) is None
