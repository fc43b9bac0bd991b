from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.training.losses import balanced_softmax, negative_entropy, supervised_contrastive, symmetric_divergence

FOUR = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
THREE_AND_ONE = torch.tensor([0, 0, 0, 1])


def brute_force(features: np.ndarray, labels: np.ndarray, temperature: float, variant: str) -> list[float]:
    """The definition, anchor by anchor, with plain sums of exponentials."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    found = []
    for anchor in range(len(labels)):
        others = [a for a in range(len(labels)) if a != anchor]
        positives = [a for a in others if labels[a] == labels[anchor]]
        similarity = {a: unit[anchor] @ unit[a] / temperature for a in others}
        if not positives:
            found.append(0.0)
            continue
        total = sum(math.exp(s) for s in similarity.values())
        shares = [math.exp(similarity[p]) / total for p in positives]
        if variant == "in":
            found.append(-math.log(sum(shares) / len(positives)))
        else:
            found.append(-sum(math.log(share) for share in shares) / len(positives))
    return found


@pytest.mark.parametrize("variant", ["in", "out"])
def test_two_pairs_of_equal_vectors(variant):
    # Each anchor: one positive with cosine 1, two negatives with cosine 0: log(1 + 2 / e^(1/tau)).
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1])
    warm = supervised_contrastive(vectors, labels, 1.0, variant, "none")
    torch.testing.assert_close(warm, torch.full((4,), math.log(1 + 2 / math.e), dtype=torch.float64))
    assert warm[0].item() == pytest.approx(0.551445, abs=1e-6)
    cold = supervised_contrastive(vectors, labels, 0.1, variant, "none")
    torch.testing.assert_close(cold, torch.full((4,), math.log1p(2 * math.exp(-10)), dtype=torch.float64))
    assert cold[0].item() == pytest.approx(9.0796e-5, rel=1e-4)


@pytest.mark.parametrize(
    "variant, expected",
    [("in", [0.723993, 0.728906, 0.848424, 0.0]), ("out", [0.894129, 0.748774, 1.139178, 0.0])],
)
def test_three_positives_and_a_singleton(variant, expected):
    found = supervised_contrastive(FOUR, THREE_AND_ONE, 0.5, variant, "none")
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(found.numpy(), brute_force(FOUR.numpy(), THREE_AND_ONE.numpy(), 0.5, variant))


@given(
    st.integers(1, 8),
    st.sampled_from(["in", "out"]),
    st.floats(0.05, 2.0),
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
)
def test_any_batch_agrees_with_the_definition(n, variant, temperature, seed, classes):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, 3))
    labels = rng.integers(0, classes, n)
    found = supervised_contrastive(torch.from_numpy(features), torch.from_numpy(labels), temperature, variant, "none")
    np.testing.assert_allclose(found.numpy(), brute_force(features, labels, temperature, variant), atol=1e-8)


@given(st.integers(2, 10), st.integers(0, 2**32 - 1))
def test_the_inner_form_is_never_above_the_outer(n, seed):
    rng = np.random.default_rng(seed)
    features = torch.from_numpy(rng.normal(size=(n, 4)))
    labels = torch.from_numpy(rng.integers(0, 3, n))
    inner, outer = (supervised_contrastive(features, labels, 0.3, v, "none") for v in ("in", "out"))
    assert (inner <= outer + 1e-9).all()


def test_gradient_towards_the_unit_vector_as_published():
    # dL(0)/dz_0 = (1/tau) { sum_positives z_p (P_jp - X_jp) + sum_negatives z_n P_jn } = (-.088763, -.051413);
    # brought back to r with |r| = 1 it loses its part along z_0 = (1, 0).
    vectors = FOUR.clone().requires_grad_()
    supervised_contrastive(vectors, THREE_AND_ONE, 0.5, "in", "none")[0].backward()
    np.testing.assert_allclose(vectors.grad[0].numpy(), [0.0, -0.051413], atol=1e-6)


@pytest.mark.parametrize("variant", ["in", "out"])
def test_gradients_agree_with_finite_differences(variant):
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(6, 4, dtype=torch.float64, generator=draw).requires_grad_()
    labels = torch.tensor([0, 0, 1, 1, 1, 2])
    assert torch.autograd.gradcheck(lambda f: supervised_contrastive(f, labels, 0.2, variant), (features,), atol=1e-6)


@pytest.mark.parametrize("variant", ["in", "out"])
def test_equal_vectors_of_one_class_cost_log_of_the_others(variant):
    vectors = torch.ones(5, 3, dtype=torch.float64)
    found = supervised_contrastive(vectors, torch.zeros(5, dtype=torch.long), 0.1, variant)
    assert found.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("variant", ["in", "out"])
@pytest.mark.parametrize("n", [1, 4])
def test_singletons_cost_nothing_and_give_no_gradient(variant, n):
    features = torch.randn(n, 3).requires_grad_()
    loss = supervised_contrastive(features, torch.arange(n), 0.05, variant)
    assert loss.item() == 0.0
    (gradient,) = torch.autograd.grad(loss, features)
    assert torch.equal(gradient, torch.zeros(n, 3))


@pytest.mark.parametrize("variant", ["in", "out"])
def test_a_zero_vector_gives_no_nan(variant):
    features = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).requires_grad_()
    loss = supervised_contrastive(features, torch.tensor([0, 0, 1]), 0.1, variant)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(features.grad).all()


def test_rotation_and_length_do_not_matter():
    turn = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    scale = torch.tensor([[0.1], [3.0], [7.0], [1.0]], dtype=torch.float64)
    plain = supervised_contrastive(FOUR, THREE_AND_ONE, 0.5)
    torch.testing.assert_close(supervised_contrastive(FOUR @ turn * scale, THREE_AND_ONE, 0.5), plain)


def test_singletons_count_in_the_mean():
    each = supervised_contrastive(FOUR, THREE_AND_ONE, 0.5, "out", "none")
    assert supervised_contrastive(FOUR, THREE_AND_ONE, 0.5, "out").item() == pytest.approx(each.sum().item() / 4)


def test_low_temperature_does_not_overflow_in_float32():
    features = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(supervised_contrastive(features, torch.arange(16) % 2, 1e-3))


def test_balanced_softmax_by_hand():
    # Equal logits, 90 against 10 samples: the rarer class has probability 0.1.
    loss = balanced_softmax(torch.zeros(1, 2), torch.tensor([1]), torch.tensor([90, 10]))
    assert loss.item() == pytest.approx(math.log(10), abs=1e-6)


def test_balanced_softmax_with_equal_counts_is_cross_entropy():
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 0, 1])
    torch.testing.assert_close(
        balanced_softmax(logits, labels, torch.tensor([7, 7, 7])), torch.nn.functional.cross_entropy(logits, labels)
    )


def test_balanced_softmax_leaves_absent_classes_out():
    logits = torch.tensor([[1.0, 2.0, 9.0]]).requires_grad_()
    loss = balanced_softmax(logits, torch.tensor([0]), torch.tensor([5, 5, 0]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(1 + math.e), rel=1e-6)
    assert logits.grad[0, 2].item() == 0.0
    assert torch.isfinite(logits.grad).all()


def test_entropy_by_hand():
    # .7 ln .7 + .3 ln .3 = -.610864; uniform over five: -ln 5, the least there is.
    assert float(negative_entropy(torch.log(torch.tensor([[0.7, 0.3]])))) == pytest.approx(-0.610864, abs=1e-6)
    assert float(negative_entropy(torch.zeros(3, 5))) == pytest.approx(-math.log(5), abs=1e-6)
    logits = torch.randn(50, 5, generator=torch.Generator().manual_seed(0)) * 3
    assert -math.log(5) < float(negative_entropy(logits)) < 0
    assert float(negative_entropy(torch.tensor([[500.0, 0, 0]]))) == 0


def test_symmetric_divergence_by_hand():
    # .7 ln(.7/.5) + .3 ln(.3/.5) + .5 ln(.5/.7) + .5 ln(.5/.3) = .169460
    p = torch.log(torch.tensor([[0.7, 0.3]]))
    q = torch.zeros(1, 2)
    assert float(symmetric_divergence(p, q)) == pytest.approx(0.169460, abs=1e-6)
    assert float(symmetric_divergence(q, p)) == pytest.approx(0.169460, abs=1e-6)
    assert float(symmetric_divergence(p, p + 3.0)) == pytest.approx(0, abs=1e-7)


def test_detached_targets_leave_each_side_one_gradient():
    p = torch.tensor([[0.4, -1.0, 0.2]], requires_grad=True)
    q = torch.tensor([[0.0, 0.3, 1.0]], requires_grad=True)
    symmetric_divergence(p, q, detach_first=True).backward()
    # KL(p || q) by the logits of q is softmax(q) - softmax(p), and the other way round.
    apart = (torch.softmax(q, dim=1) - torch.softmax(p, dim=1)).detach()
    torch.testing.assert_close(q.grad, apart)
    torch.testing.assert_close(p.grad, -apart)
    whole = [t.detach().clone().requires_grad_() for t in (p, q)]
    symmetric_divergence(*whole).backward()
    assert not torch.allclose(whole[0].grad, p.grad)
