from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_agent import methods
from edge_agent.methods.per_fedavg import halves, meta_gradient, slope_of
from edge_agent.wire.tensors import encode

QUICK = {"batch_size": 4}


def parabola(center):
    def slope(weights):
        (w,) = weights
        return (w - center).square().sum() / 2, [w - center]

    return slope


@pytest.mark.parametrize("difference, expected", [(0.0, 1.54), (1e-3, 1.486)])
def test_a_meta_step_on_a_parabola_by_hand(difference, expected):
    # f = (x - 4)^2 / 2 at x = 1, alpha .1: adapted 1.3, slope -2.7; beta .2: FO 1 + .54. HF: (1 - .1) * -2.7 = -2.43.
    f = parabola(4.0)
    x = torch.tensor([1.0], dtype=torch.float64)
    value, (gradient,) = meta_gradient(f, f, [x], 0.1, difference)
    assert float(x - 0.2 * gradient) == pytest.approx(expected, abs=1e-9)
    assert float(value) == pytest.approx(2.7**2 / 2)


def test_hessian_free_equals_the_exact_hessian_of_a_quadratic():
    """first: x'Ax/2 - b'x with H = A; last another one: gradient (I - alpha A)(C (x - alpha (A x - b)) - d)."""
    rng = np.random.default_rng(0)
    a, c = (m @ m.T for m in rng.standard_normal((2, 4, 4)))
    b, d, x = rng.standard_normal((3, 4))

    def quadratic(matrix, vector):
        matrix = torch.from_numpy(matrix)
        vector = torch.from_numpy(vector)
        return lambda ws: (ws[0] @ matrix @ ws[0] / 2 - vector @ ws[0], [matrix @ ws[0] - vector])

    _, (found,) = meta_gradient(quadratic(a, b), quadratic(c, d), [torch.from_numpy(x)], 0.05, 1e-3)
    expected = (np.eye(4) - 0.05 * a) @ (c @ (x - 0.05 * (a @ x - b)) - d)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-8)


def test_hessian_free_on_a_network_equals_the_gradient_through_the_step(federation):
    """Autograd through the adaptation step, in float64 and eval mode, knows the Hessian exactly."""
    client = federation("per_fedavg").clients["b"]
    model = client.model.double().eval()
    inputs = client.train_inputs.double()
    labels = client.train_labels
    slopes = [slope_of(model, inputs[part], labels[part]) for part in halves(len(labels))]
    _, found = meta_gradient(*slopes, list(model.parameters()), 0.05, 1e-4)
    names, weights = zip(*model.named_parameters(), strict=True)

    def loss(part, values):
        return torch.nn.functional.cross_entropy(
            torch.func.functional_call(model, dict(zip(names, values, strict=True)), (inputs[part],)), labels[part]
        )

    first, last = halves(len(labels))
    down = torch.autograd.grad(loss(first, weights), weights, create_graph=True)
    exact = torch.autograd.grad(loss(last, [w - 0.05 * g for w, g in zip(weights, down, strict=True)]), weights)
    scale = max(float(g.abs().max()) for g in exact)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * scale)


def test_a_gradient_leaves_the_weights_as_they_were(federation):
    client = federation("per_fedavg").clients["b"]
    before = [weight.detach().clone() for weight in client.model.parameters()]
    slope = slope_of(client.model.train(), client.train_inputs, client.train_labels)
    meta_gradient(slope, slope, list(client.model.parameters()), 0.5, 1e-2)
    assert all(torch.equal(a, b) for a, b in zip(before, client.model.parameters(), strict=True))


@pytest.mark.parametrize(
    "samples, first, last", [(2, [0, 1], [0, 1]), (3, [0, 1, 2], [0, 1, 2]), (5, [0, 1], [2, 3, 4])]
)
def test_batches_are_halved_as_long_as_both_halves_hold_two(samples, first, last):
    one, other = halves(samples)
    order = list(range(samples))
    assert (order[one], order[other]) == (first, last)


def test_the_adapted_copy_is_one_step_from_the_start_and_never_travels(federation):
    # All samples in one batch: the copy is w - alpha grad, on train-mode batch statistics.
    fed = federation(methods.create("per_fedavg", {"batch_size": 50, "adapt_lr": 0.5}), rounds=1)
    client = fed.clients["a"]
    fed.download("a")
    before = encode({k: v.numpy() for k, v in client.model.state_dict().items()})
    _, down = slope_of(fed.fresh_model(0).train(), client.train_inputs, client.train_labels)(
        [weight.detach() for weight in client.model.parameters()]
    )
    fed.method.personalize(client, {})
    assert encode({k: v.numpy() for k, v in client.model.state_dict().items()}) == before
    for (name, weight), slope in zip(client.model.named_parameters(), down, strict=True):
        expected = (weight.detach() - 0.5 * slope).numpy()
        np.testing.assert_allclose(client.memory[f"tuned.{name}"], expected, rtol=1e-4, atol=1e-6, err_msg=name)
    both = [predict(client, client.train_inputs) for predict in (fed.method.predict, fed.method.predict_global)]
    assert not torch.equal(*both)


def test_both_orders_train(federation):
    sent = {}
    for order in ("first", "hessian_free"):
        method = methods.create("per_fedavg", {**QUICK, "order": order, "adapt_lr": 0.1, "lr": 0.05})
        sent[order] = federation(method).run_round()[0].tensors
    assert not np.array_equal(sent["first"]["head.weight"], sent["hessian_free"]["head.weight"])
    np.testing.assert_allclose(sent["first"]["head.weight"], sent["hessian_free"]["head.weight"], atol=0.02)
