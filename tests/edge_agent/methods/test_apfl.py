from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from edge_agent import methods
from edge_agent.methods.apfl import Share, mixture, mixture_loss, share
from edge_agent.training.loops import predict_probabilities
from edge_agent.training.parts import Parts

QUICK = {"lr": 0.1, "batch_size": 4}


def apfl(**params):
    return methods.create("apfl", {**QUICK, **params})


class Number(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.x = nn.Parameter(torch.tensor([value]))

    def forward(self, target):
        return (self.x - target).square().sum() / 2


def test_gradients_of_the_mixture_by_hand():
    # f(x) = (x - 3)^2 / 2, w = 1, v = 2, alpha = 1/2: mixture 1.5, slope -1.5; by v -0.75, by alpha -1.5 (v - w).
    model = Parts(encoder=Number(1.0), personal=Parts(encoder=Number(2.0)), mixing=Share(0.5))
    mixed = mixture(model)
    assert mixed["encoder.x"].item() == 1.5
    value = functional_call(model.part("personal").encoder, {"x": mixed["encoder.x"]}, (torch.tensor([3.0]),))
    torch.autograd.backward(value)
    assert model.part("personal").encoder.x.grad.item() == -0.75
    assert share(model).grad.item() == -1.5
    assert model.encoder.x.grad is None


def test_the_gradient_of_alpha_is_that_of_finite_differences(federation):
    fed = federation(apfl(alpha=0.3))
    client = fed.clients["b"]
    model = client.model.double().eval()
    with torch.no_grad():
        for weight in model.part("personal").parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype))
    inputs = client.train_inputs.double()
    torch.autograd.backward(mixture_loss(model, inputs, client.train_labels))
    found = share(model).grad.item()
    alpha = share(model)
    sides = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            alpha.add_(step)
            sides.append(mixture_loss(model, inputs, client.train_labels).item())
    assert found == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-5)


@pytest.mark.parametrize("alpha, twin", [(1.0, "local"), (0.0, "fedavg")])
def test_the_ends_of_alpha_are_local_training_and_fedavg(federation, alpha, twin):
    labels = {"a": [0, 1, 2, 0, 1, 2]}
    fed = federation(apfl(alpha=alpha, adaptive=False), labels=labels)
    other = federation(methods.create(twin, QUICK), labels=labels)
    start = fed.fresh_model(0)
    fed.clients["a"].model.load_state_dict(start.state_dict())
    own = {name: tensor for name, tensor in start.state_dict().items() if name.split(".")[0] in ("encoder", "head")}
    other.clients["a"].model.load_state_dict(own)
    for each in (fed, other):
        each.method.local_update(each.clients["a"], {})
    if alpha:  # the mixture is v, trained alone
        inputs = fed.clients["a"].train_inputs
        expected = predict_probabilities(other.clients["a"].model, inputs)
        torch.testing.assert_close(fed.method.predict(fed.clients["a"], inputs), expected)
    else:  # v gets no gradient, and the mixture is w
        for name, weight in mixture(fed.clients["a"].model).items():
            torch.testing.assert_close(weight.detach(), other.clients["a"].model.state_dict()[name])


def test_alpha_stays_within_0_and_1_and_with_its_client(federation):
    fed = federation(apfl(alpha=0.9, alpha_lr=50.0), rounds=2).run()
    alphas = {name: fed.clients[name].log["alpha"] for name in fed.clients}
    assert all(0.0 <= alpha <= 1.0 for alpha in alphas.values())
    assert any(alpha != 0.9 for alpha in alphas.values())
    assert "mixing.alpha" in fed.personal("a")
    assert fed.personal("a")["mixing.alpha"][0] == np.float32(alphas["a"])


def test_alpha_does_not_move_where_it_is_not_to(federation):
    fed = federation(apfl(alpha=0.7, adaptive=False), rounds=1).run()
    assert fed.clients["a"].log["alpha"] == pytest.approx(0.7)
