from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.core.errors import TrainingFailed
from edge_agent.training.finetune import pairs
from edge_agent.training.losses import proximal_gradient

QUICK = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}


def ditto(**params):
    return methods.create("ditto", {**QUICK, **params})


def one_update(federation, method):
    fed = federation(method, labels={"a": [0, 1, 2, 0, 1, 2, 0]})
    fed.clients["a"].model.load_state_dict(fed.fresh_model(7).state_dict())
    return fed, fed.update("a")


def test_without_a_pull_the_personal_network_is_local_and_the_shared_one_is_fedavg(federation):
    fed, sent = one_update(federation, ditto(proximal_weight=0.0))
    start = {n: t.numpy().copy() for n, t in fed.fresh_model(7).state_dict().items() if n.startswith("personal.")}
    for name, begin in (("local", start), ("fedavg", {f"personal.{n}": a for n, a in fed.state.items()})):
        twin = federation(methods.create(name, QUICK), labels={"a": [0, 1, 2, 0, 1, 2, 0]})
        client = twin.clients["a"]
        state = {n.removeprefix("personal."): torch.from_numpy(np.array(a)) for n, a in begin.items()}
        client.model.load_state_dict(state, strict=False)
        twin.method.local_update(client, {})
        found = fed.clients["a"].model.state_dict()
        for key, tensor in client.model.state_dict().items():
            if key.endswith("num_batches_tracked"):
                continue
            ours = found[f"personal.{key}"] if name == "local" else torch.from_numpy(sent.tensors[key].copy())
            assert torch.equal(ours, tensor), (name, key)


def test_the_pull_rests_between_the_local_optimum_and_the_shared_model():
    # f = (v - 4)^2 / 2 with lambda 2 and w = 1: v - 4 + 2 (v - 1) = 0 at v = 2.
    v = torch.nn.Parameter(torch.tensor([0.0]))
    w = torch.tensor([1.0])
    optimizer = torch.optim.SGD([v], lr=0.1)
    pull = proximal_gradient([v], [w], 2.0)
    for _ in range(100):
        optimizer.zero_grad()
        torch.autograd.backward((v - 4).square().sum() / 2)
        pull()
        optimizer.step()
    assert v.item() == pytest.approx(2.0, abs=1e-6)


def test_a_strong_pull_keeps_the_personal_network_at_what_was_received(federation):
    """With lr * lambda = 1 and no momentum each step ends lr |gradient| from the received weights, not further."""
    gaps = {}
    for strength in (0.0, 10.0):
        fed = federation(ditto(proximal_weight=strength, momentum=0.0, local_epochs=3), labels={"a": [0, 1] * 4})
        fed.clients["a"].model.load_state_dict(fed.fresh_model(0).state_dict())
        received = fed.state
        fed.update("a")
        own = {n: w.detach().numpy() for n, w in fed.clients["a"].model.part("personal").named_parameters()}
        gaps[strength] = sum(float(np.square(own[n] - received[n]).sum()) for n in own)
    assert gaps[10.0] < 0.5 * gaps[0.0]


def test_both_networks_start_alike_and_only_one_travels(federation):
    fed = federation(ditto())
    assert all(torch.equal(own, shared) for own, shared in pairs(fed.fresh_model(3)))
    assert {name.split(".")[0] for name in fed.shared} == {"encoder", "head"}
    fed.run_round()
    client = fed.clients["a"]
    fed.download("a")
    assert not torch.equal(
        fed.method.predict(client, client.train_inputs), fed.method.predict_global(client, client.train_inputs)
    )


def test_a_diverging_pull_is_named(federation):
    fed = federation(ditto(proximal_weight=1e30, local_epochs=5))
    with pytest.raises(TrainingFailed, match=r"proximal_weight \(lambda\) 1e\+30"):
        fed.run_round()
