from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.methods.fedcp import BANDWIDTHS, Gate, context, discrepancy, gated_logits

QUICK = {"batch_size": 4}


def fedcp(**params):
    return methods.create("fedcp", {**QUICK, **params})


def test_the_head_that_is_sent_is_half_the_received_and_half_the_personal_one(federation):
    fed = federation(fedcp(lr=0.1))
    fed.run_round()
    received = {name: fed.state[name].copy() for name in ("head.weight", "head.bias")}
    sent = fed.update("a").tensors
    own = fed.clients["a"].model.part("personal_head").state_dict()
    for name, array in received.items():
        by_hand = 0.5 * own[name.removeprefix("head.")].numpy() + 0.5 * array
        np.testing.assert_allclose(sent[name], by_hand, rtol=1e-6, atol=1e-7)
        assert not np.array_equal(sent[name], array)
        np.testing.assert_array_equal(fed.clients["a"].model.state_dict()[name].numpy(), array)  # frozen at home


def test_shares_of_the_gate_sum_to_one_and_are_even_for_a_gate_that_knows_nothing():
    gate = Gate(4)
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    personal, shared = gate(inputs, 1.0, torch.Generator().manual_seed(1))
    torch.testing.assert_close(personal + shared, torch.ones(3, 4))
    with torch.no_grad():
        gate.layers[1].weight.zero_()
    assert torch.equal(gate(inputs, 1.0, None)[0], torch.full((3, 4), 0.5))


def test_noise_of_the_gate_by_hand():
    # Even logits: the personal share is sigmoid((g_p - g_s) / tau) with g = -log(-log U).
    gate = Gate(1)
    with torch.no_grad():
        gate.layers[1].weight.zero_()
    u = torch.rand(1, 2, 1, generator=torch.Generator().manual_seed(5)).flatten().tolist()
    noise = [-math.log(-math.log(value)) for value in u]
    expected = 1 / (1 + math.exp(-(noise[0] - noise[1]) / 0.5))
    personal, _ = gate(torch.zeros(1, 1), 0.5, torch.Generator().manual_seed(5))
    assert personal.item() == pytest.approx(expected, rel=1e-5)


def test_the_context_is_the_direction_of_the_summed_rows(federation):
    model = federation(fedcp()).fresh_model(1)
    with torch.no_grad():
        model.part("personal_head").weight.zero_()
        model.part("personal_head").weight[:, :2] = torch.tensor([[1.0, 2.0], [1.0, 1.0], [1.0, 1.0]])
    # Sums (3, 4, 0, ...): length 5.
    torch.testing.assert_close(context(model)[:3], torch.tensor([0.6, 0.8, 0.0]))
    assert not context(model).requires_grad


def test_even_gates_give_half_of_both_heads(federation):
    model = federation(fedcp()).fresh_model(1).eval()
    with torch.no_grad():
        model.part("gate").layers[1].weight.zero_()
        model.part("personal_head").weight.mul_(3.0)
    features = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    by_hand = model.part("personal_head")(features / 2) + model.head(features / 2)
    torch.testing.assert_close(gated_logits(model, features, context(model), 1.0, None), by_hand)


def test_the_discrepancy_by_hand_and_zero_for_equal_sets():
    # One vector each, at squared distance 9: k(0) + k(0) - 2 k(9) for each kernel exp(-d / 2a).
    one = torch.tensor([[0.0, 0.0]])
    other = torch.tensor([[3.0, 0.0]])
    by_hand = sum(2 - 2 * math.exp(-4.5 / width) for width in BANDWIDTHS)
    assert discrepancy(one, other).item() == pytest.approx(by_hand, rel=1e-5)
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    assert discrepancy(rows, rows.flip(0)).item() == pytest.approx(0.0, abs=1e-5)


def test_the_alignment_measures_from_the_encoder_as_it_was_received(federation):
    """Loss at lambda 5 minus loss at 0, same noise: 5 times the discrepancy of features now and before a change."""
    fed = federation(fedcp())
    client = fed.clients["b"]
    inputs = client.train_inputs
    labels = client.train_labels
    model = client.model.train()
    before = model.features(inputs).detach()
    values = {}
    losses = {weight: fedcp(alignment_weight=weight).loss(client, {}) for weight in (0.0, 5.0)}
    assert float(losses[5.0](inputs, labels).detach()) > 0
    with torch.no_grad():
        for weight in model.encoder.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    for weight, loss in losses.items():
        client.generator.manual_seed(4)
        values[weight] = float(loss(inputs, labels).detach())
    apart = discrepancy(model.features(inputs).detach(), before).item()
    assert apart > 1e-3
    assert values[5.0] - values[0.0] == pytest.approx(5 * apart, rel=1e-4)


def test_noise_at_the_test_is_off_unless_asked_for(federation):
    fed = federation(fedcp(), rounds=1).run()
    client = fed.clients["a"]
    steady = fed.method.predict(client, client.train_inputs)
    noisy = fedcp(test_noise=True)
    assert torch.equal(noisy.predict(client, client.train_inputs), noisy.predict(client, client.train_inputs))
    assert not torch.equal(noisy.predict(client, client.train_inputs), steady)


def test_the_mask_of_the_views_is_the_personal_heads_share(federation):
    fed = federation(fedcp(), rounds=1).run()
    client = fed.clients["a"]
    mask = fed.method.views(client, client.train_inputs)["mask"]
    assert mask.shape == (10, 12)
    assert 0 < float(mask.min()) <= float(mask.max()) < 1
