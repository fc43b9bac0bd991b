"""FedProx against FedAvg, of which it is a hand-worked distance away. FedProx-FT against both."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_agent.core.errors import TrainingFailed
from edge_agent.training.losses import proximal_gradient
from edge_agent.wire.tensors import encode

LABELS = {"a": [0, 1, 2, 1, 0], "b": [2, 2, 1, 0]}
PLAIN = {"lr": 0.1, "momentum": 0.0, "batch_size": 8}


def test_the_pull_by_hand():
    # f = (v - 4)^2 / 2 at v = 2: gradient -2; proximal term of 0.5 to 1: + 0.5 (2 - 1) = -1.5.
    weight = torch.tensor([1.0], requires_grad=True)
    pull = proximal_gradient([weight], [weight.detach().clone()], 0.5)
    with torch.no_grad():
        weight.fill_(2.0)
    (0.5 * (weight - 4) ** 2).sum().backward()
    pull()
    assert weight.grad.item() == pytest.approx(-1.5)


def test_a_weight_without_a_gradient_is_left_alone():
    weight = torch.tensor([1.0], requires_grad=True)
    proximal_gradient([weight], [weight.detach().clone()], 0.5)()
    assert weight.grad is None


@pytest.mark.parametrize("prox, average", [("fedprox", "fedavg"), ("fedprox_ft", "fedavg_ft")])
def test_mu_zero_is_fedavg_bit_for_bit(tiny, prox, average):
    one, other = (tiny(name, LABELS, local_epochs=2, **mu).run() for name, mu in ((prox, {"mu": 0}), (average, {})))
    assert encode(one.state) == encode(other.state)


def test_the_second_of_two_full_steps_lacks_what_the_spring_takes(tiny):
    # w1 = w0 - lr g(w0) for both; then w2 = w1 - lr (g(w1) + mu (w1 - w0)).
    first, second, held = (
        tiny(name, {"a": LABELS["a"]}, rounds=1, **PLAIN, **params)
        for name, params in (
            ("fedavg", {"local_epochs": 1}),
            ("fedavg", {"local_epochs": 2}),
            ("fedprox", {"local_epochs": 2, "mu": 3.0}),
        )
    )
    start = first.state
    for fed in (first, second, held):
        fed.run()
    for name, array in held.state.items():
        by_hand = second.state[name] - 0.1 * 3.0 * (first.state[name] - start[name])
        np.testing.assert_allclose(array, by_hand, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_spring_hangs_on_what_was_received_this_round(tiny):
    # One full step a round never feels the spring, in later rounds either.
    one, other = (
        tiny(name, {"a": LABELS["a"]}, **PLAIN, **mu).run() for name, mu in (("fedprox", {"mu": 50.0}), ("fedavg", {}))
    )
    assert encode(one.state) == encode(other.state)


def test_a_loss_that_is_not_finite_names_mu(tiny):
    fed = tiny("fedprox", LABELS, mu=1e30, local_epochs=4)
    with pytest.raises(TrainingFailed, match=r"at lr 0\.01, mu 1e\+30"):
        fed.run_round()


def test_fedprox_ft_shares_what_fedprox_shares_and_answers_with_a_tuned_copy(tiny):
    plain, tuned = (tiny(name, LABELS, local_epochs=2, mu=1.0).run() for name in ("fedprox", "fedprox_ft"))
    assert encode(plain.state) == encode(tuned.state)
    inputs = tuned.clients["a"].train_inputs
    for fed in (plain, tuned):
        fed.download("a")
    shared = plain.method.predict(plain.clients["a"], inputs)
    assert torch.equal(tuned.method.predict_global(tuned.clients["a"], inputs), shared)
    assert not torch.equal(tuned.method.predict(tuned.clients["a"], inputs), shared)
