"""The exact accountant against values from the literature, by hand, and against two accountants of others."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy import integrate, stats

from edge_agent.privacy.accountant import cost, delta_of, epsilon_of

CASES = [(0.5, 1), (1.0, 1), (1.0, 30), (2.0, 10), (4.0, 100), (10.0, 5), pytest.param(0.3, 20, marks=pytest.mark.slow)]


def test_delta_at_epsilon_zero_is_the_total_variation_of_two_unit_gaussians_by_hand():
    # TV(N(0, 1), N(1, 1)) = 2 Phi(1/2) - 1 = 0.382925
    assert delta_of(cost(1.0), 0.0) == pytest.approx(0.3829249225480262, rel=1e-12)


@pytest.mark.parametrize("noise, epsilon", [(1.0, 1.0), (2.0, 0.1), (0.7, 3.0), (5.0, 0.5)])
def test_delta_is_the_integral_of_its_definition(noise, epsilon):
    """delta = integral of max(0, p - e^eps q) over the two densities, done numerically."""
    p = stats.norm(1.0, noise)
    q = stats.norm(0.0, noise)
    excess = lambda x: max(0.0, p.pdf(x) - math.exp(epsilon) * q.pdf(x))
    where = noise**2 * epsilon + 0.5  # beyond which p is above e^eps q
    expected, _ = integrate.quad(excess, where, where + 40 * noise, epsabs=1e-14)
    assert delta_of(cost(noise), epsilon) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("noise, releases", CASES)
@pytest.mark.parametrize("delta", [1e-5, 1e-8])
def test_epsilon_is_that_of_googles_loss_distributions(noise, releases, delta):
    theirs = PLDAccountant()
    theirs.compose(dp_accounting.GaussianDpEvent(noise), releases)
    ours = epsilon_of(releases * cost(noise), delta)
    assert ours == pytest.approx(theirs.get_epsilon(delta), rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("noise, releases", CASES)
def test_two_renyi_accountants_bound_it_from_above_and_closely(noise, releases):
    orders = [1 + x / 50 for x in range(1, 500)] + list(range(11, 512))
    google = RdpAccountant(orders)
    google.compose(dp_accounting.GaussianDpEvent(noise), releases)
    ours = epsilon_of(releases * cost(noise), 1e-5)
    steps = opacus_rdp.compute_rdp(q=1.0, noise_multiplier=noise, steps=releases, orders=orders)
    opacus, _ = opacus_rdp.get_privacy_spent(orders=orders, rdp=steps, delta=1e-5)
    for bound in (google.get_epsilon(1e-5), float(opacus)):
        assert ours <= bound <= 1.25 * ours


def test_releases_of_different_noise_add_up_as_others_have_it():
    theirs = PLDAccountant()
    total = 0.0
    for noise, releases in ((1.5, 3), (4.0, 7), (9.0, 20)):
        theirs.compose(dp_accounting.GaussianDpEvent(noise), releases)
        total += releases * cost(noise)
    assert epsilon_of(total, 1e-6) == pytest.approx(theirs.get_epsilon(1e-6), rel=2e-3)


def test_extremes_are_numbers_or_infinity_and_never_errors():
    assert epsilon_of(0.0, 1e-5) == 0.0
    assert epsilon_of(cost(0.0), 1e-5) == math.inf
    assert delta_of(math.inf, 5.0) == 1.0
    assert 0 < epsilon_of(cost(1e4), 1e-5) < 1e-2
    huge = epsilon_of(cost(1e-3), 1e-5)  # mu = 1000: about mu^2 / 2 + 4.26 mu
    assert huge == pytest.approx(5e5 + 1000 * -stats.norm.ppf(1e-5), rel=1e-3)
    assert epsilon_of(1e300, 1e-5) == math.inf


def test_more_noise_and_fewer_releases_never_spend_more():
    grid = [epsilon_of(total, 1e-5) for total in np.geomspace(1e-8, 1e6, 200)]
    assert grid == sorted(grid)
