"""Masks that pick features: noise, hard and soft ones, what is drawn and what is not."""

from __future__ import annotations

import math

import pytest
import torch

from edge_agent.training.networks import cut, feature_mask, gumbel, mask_noise

SCORES = torch.tensor([0.3, -0.2])
FIRST = torch.tensor([0.5, 0.9])
SECOND = torch.tensor([0.2, 0.4])


def test_gumbel_noise_by_hand():
    # -log(-log .5) = -log .693147 = .366513; -log(-log .2) = -.475885
    torch.testing.assert_close(gumbel(FIRST), torch.tensor([0.366513, 2.250367]), atol=1e-6, rtol=0)
    torch.testing.assert_close(gumbel(SECOND), torch.tensor([-0.475885, 0.087422]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("temperature, expected", [(1.0, [0.758120, 0.876851]), (0.5, [0.907610, 0.980657])])
def test_the_soft_mask_by_hand(temperature, expected):
    noise = gumbel(FIRST) - gumbel(SECOND)
    found = feature_mask(SCORES, noise, temperature=temperature, hard=False)
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)


def test_the_hard_mask_goes_forward_and_the_soft_ones_gradient_back():
    scores = SCORES.clone().requires_grad_()
    mask = feature_mask(scores, gumbel(FIRST) - gumbel(SECOND), temperature=1.0)
    assert mask.tolist() == [1.0, 1.0]
    mask.sum().backward()
    # m (1 - m) / T of .758120 and .876851
    torch.testing.assert_close(scores.grad, torch.tensor([0.183374, 0.107983]), atol=1e-6, rtol=0)


def test_the_hard_mask_is_exactly_zero_or_one_and_splits_features_without_loss():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200, 30, generator=generator) * 5
    z = torch.randn(200, 30, generator=generator)
    mask = feature_mask(scores, mask_noise(scores, generator), temperature=0.3)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(z * mask + z * (1 - mask), z)


def test_at_inference_the_mask_is_the_sign_of_the_logit_and_draws_nothing():
    tiny = torch.tensor([0.3, -0.2, 0.0, 1e-30, -1e-30])
    for temperature in (0.1, 1.0, 7.0):
        assert feature_mask(tiny, temperature=temperature).tolist() == [1, 0, 0, 1, 0]
    soft = feature_mask(SCORES, temperature=2.0, hard=False)
    torch.testing.assert_close(soft, torch.sigmoid(SCORES / 2))


@pytest.mark.parametrize("threshold, picks", [(0.5, [1, 0]), (0.6, [0, 0]), (0.4, [1, 1])])
def test_a_threshold_is_one_of_the_soft_mask(threshold, picks):
    # sigmoid(.3) = .574, sigmoid(-.2) = .450
    assert feature_mask(SCORES, temperature=1.0, threshold=threshold).tolist() == picks
    assert 1 / (1 + math.exp(-cut(2.0, threshold) / 2.0)) == pytest.approx(threshold)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_a_feature_is_picked_with_probability_sigmoid_at_any_temperature(temperature):
    generator = torch.Generator().manual_seed(3)
    scores = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0]).expand(40_000, 5)
    share = feature_mask(scores, mask_noise(scores, generator), temperature=temperature).mean(dim=0)
    torch.testing.assert_close(share, torch.sigmoid(scores[0]), atol=0.012, rtol=0)  # five standard errors


def test_noise_is_finite_even_where_the_uniform_numbers_end():
    assert torch.isfinite(gumbel(torch.tensor([0.0, 1.0, 1e-45, 1 - 1e-7]))).all()


def test_the_first_gumbel_is_added_and_the_second_taken_away():
    generator = torch.Generator().manual_seed(5)
    first, second = (torch.rand(2, 3, generator=generator) for _ in range(2))
    found = mask_noise(torch.zeros(2, 3), torch.Generator().manual_seed(5))
    torch.testing.assert_close(found, -torch.log(-torch.log(first)) + torch.log(-torch.log(second)))
