"""DualFed's local update against the paper's written out, its stages, and training that cannot go well."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from paper_methods import dualfed, is_statistic, on_twelve_windows
from torch.nn import functional as F

from edge_agent.core.errors import TrainingFailed
from edge_agent.wire.tensors import encode


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(before, model):
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


def contrastive_by_hand(vectors, labels, temperature):
    """Eq. 7, anchor by anchor."""
    unit = [vector / vector.norm() for vector in vectors]
    total = torch.zeros(())
    for j, anchor in enumerate(unit):
        same = [p for p in range(len(unit)) if p != j and labels[p] == labels[j]]
        others = torch.stack([anchor @ unit[a] / temperature for a in range(len(unit)) if a != j])
        for p in same:
            total = total - (anchor @ unit[p] / temperature - others.exp().sum().log()) / len(same)
    return total / len(unit)


def twin(model, inputs, labels, rng, *, epochs, weight, together, moving, temperature=0.2):
    """The local update written out, one batch of four after another; returns the trained copy."""
    net = copy.deepcopy(model).train()

    def personal(x, y):
        u = net.part("projector")(net.encoder(x))
        value = F.cross_entropy(net.part("personal_head")(u), y)
        return value + weight * contrastive_by_hand(u, y.tolist(), temperature) if weight else value

    def shared(x, y):
        z = net.encoder(x)
        if not together:
            net.part("projector")(z)  # answers nothing here, but its batch norm sees the batch
        return F.cross_entropy(net.head(z), y)

    def descend(loss, parts):
        optimizer = torch.optim.SGD([w for part in parts for w in net.part(part).parameters()], lr=0.05, momentum=0.5)
        for _ in range(epochs):
            for rows in np.split(rng.permutation(len(labels)), range(4, len(labels), 4)):
                optimizer.zero_grad()
                loss(inputs[rows], labels[rows]).backward()
                optimizer.step()

    below = ("encoder", "projector", "personal_head")
    if together:
        descend(lambda x, y: personal(x, y) + shared(x, y), (*below, "head"))
    else:
        descend(personal, below)
        if not moving:
            net.eval()
        descend(shared, ("head",))
    return net


def tiny(federation, **params):
    method = dualfed(lr=0.05, local_epochs=2, **params)
    return method, on_twelve_windows(federation, method)


@pytest.mark.parametrize("weight", [0.0, 3.0])
@pytest.mark.parametrize(
    "params, together, moving",
    [
        ({"schedule": "stage_wise", "stage2_bn": "train"}, False, True),
        ({"schedule": "stage_wise", "stage2_bn": "eval"}, False, False),
        ({"schedule": "simultaneous"}, True, True),
    ],
)
def test_a_local_update_is_the_papers_written_out(federation, weight, params, together, moving):
    method, client = tiny(federation, contrastive_weight=weight, **params)
    expected = twin(
        client.model,
        client.train_inputs,
        client.train_labels,
        np.random.default_rng([0, 1]),  # the client's own, before its first draw
        epochs=2,
        weight=weight,
        together=together,
        moving=moving,
    )
    method.local_update(client, {})
    for name, tensor in client.model.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], atol=1e-9, rtol=1e-7, msg=name)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_stage_one_leaves_the_global_classifier_and_stage_two_all_else(federation, mode):
    fed = federation(dualfed(stage2_bn=mode), rounds=1)
    client = fed.clients["a"]
    method = fed.method
    fed.download("a")
    before = snapshot(client.model)
    method._train(client, ("encoder", "projector", "personal_head"), method.personal_loss(client))
    moved = changed(before, client.model)
    assert not [name for name in moved if name.startswith("head.")]
    assert {"encoder.layers.0.weight", "projector.0.weight", "personal_head.weight"} <= moved
    before = snapshot(client.model)
    method._train(client, ("head",), method.global_loss(client))
    moved = changed(before, client.model)
    assert {name for name in moved if not is_statistic(name)} == {"head.weight", "head.bias"}
    statistics = {name for name in before if is_statistic(name)}
    assert moved - {"head.weight", "head.bias"} == (statistics if mode == "train" else set())
    assert any(name.startswith("projector.") for name in statistics)


def test_momentum_is_fresh_in_each_stage_or_kept(federation):
    fresh, kept = (federation(dualfed(optimizer_state=mode, momentum=0.9)) for mode in ("reset", "persist"))
    for fed in (fresh, kept):
        fed.run_round()
    assert encode(fresh.state) == encode(kept.state)
    assert fresh.clients["a"].memory == {}
    names = {name.split(".")[2] for name in kept.clients["a"].memory}
    assert names == {"encoder", "projector", "personal_head", "head"}
    for fed in (fresh, kept):
        fed.run_round()
    assert encode(fresh.state) != encode(kept.state)


def test_without_augmentation_no_random_number_is_drawn(federation):
    plain = federation(dualfed())
    turned = federation(dualfed(augment=True))
    for fed, alike in ((plain, True), (turned, False)):
        before = fed.clients["a"].generator.get_state()
        fed.run_round()
        assert torch.equal(fed.clients["a"].generator.get_state(), before) is alike
    assert encode(plain.state) != encode(turned.state)


def test_the_logged_losses_are_those_of_both_stages(federation):
    fed = federation(dualfed(lr=1e-12, batch_size=64, contrastive_weight=0.0), labels={"a": [0, 1, 2] * 2})
    fed.run_round()
    log = fed.clients["a"].log
    assert set(log) == {"loss", "loss.global"}
    assert all(0.2 < value < 5 * math.log(3) for value in log.values())


@pytest.mark.parametrize("schedule", ["stage_wise", "simultaneous"])
def test_a_lambda_that_makes_training_diverge_is_named(federation, schedule):
    fed = federation(dualfed(contrastive_weight=1e38, temperature=1e-3, schedule=schedule))
    with pytest.raises(TrainingFailed, match=r"client 'a': loss became .* contrastive_weight \(lambda\) 1e\+38"):
        fed.run_round()


def test_one_sample_is_too_few_for_batch_norm(federation):
    fed = federation(dualfed(), labels={"only": [1]})
    with pytest.raises(TrainingFailed, match="batch norm needs at least 2"):
        fed.run_round()


def test_a_batch_without_positives_trains_on_cross_entropy_alone(federation):
    # Three samples of three classes: the contrastive loss is 0, so lambda makes no difference.
    pair = [federation(dualfed(contrastive_weight=w), rounds=1, labels={"a": [0, 1, 2]}).run() for w in (0.0, 7.0)]
    for name in pair[0].state:
        np.testing.assert_array_equal(pair[0].state[name], pair[1].state[name])
