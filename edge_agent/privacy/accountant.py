"""The privacy that the Gaussian mechanism has spent: exact (epsilon, delta) of any number of releases.

A release adds Gaussian noise to a vector that one participant can move by at most ``clip``; its noise multiplier z is
the standard deviation over ``clip``. Releases compose exactly: those of z_1, z_2, … together are one of
1 / z^2 = sum 1 / z_i^2 (Dong, Roth, Su, "Gaussian Differential Privacy", JRSS B 2022, Corollary 3.3), and its
delta(epsilon) is known in closed form (Balle, Wang, "Improving the Gaussian Mechanism", ICML 2018, Theorem 8). So
neither Rényi orders nor numeric convolution are needed, nor a package for them. Sampling of participants is not taken
into account, which makes the result an upper bound.
"""

from __future__ import annotations

import math

_SERIES_BELOW = -30.0
"""The argument below which a series replaces erfc, which is close to its underflow there."""

LARGEST_EPSILON = 1e9
"""The largest epsilon that is computed; a larger one is as good as no guarantee."""


def cost(noise: float) -> float:
    """Return the cost 1 / z^2 of one release with the noise multiplier z; the costs of all releases add up."""
    return math.inf if noise == 0 else noise**-2


def delta_of(spent: float, epsilon: float) -> float:
    """Return the smallest delta >= 0 for this epsilon >= 0 after releases of total `cost` ``spent`` >= 0."""
    if spent == 0:
        return 0.0
    if math.isinf(spent):
        return 1.0
    mu = math.sqrt(spent)
    low = _log_cdf(mu / 2 - epsilon / mu)
    high = epsilon + _log_cdf(-mu / 2 - epsilon / mu)
    return max(0.0, math.exp(low) * -math.expm1(min(0.0, high - low)))


def epsilon_of(spent: float, delta: float) -> float:
    """Return the smallest epsilon for ``delta`` (0..1, exclusive), rounded up, after releases of total cost ``spent``.

    It is infinity where it is above `LARGEST_EPSILON`.
    """
    if spent == 0:
        return 0.0
    high = 1.0
    while delta_of(spent, high) > delta:
        high *= 2
        if high > LARGEST_EPSILON:
            return math.inf
    low = 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if delta_of(spent, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def _log_cdf(x: float) -> float:
    """Return the logarithm of the standard normal distribution function."""
    if x > _SERIES_BELOW:
        return math.log(math.erfc(-x / math.sqrt(2)) / 2)
    ratio = x**-2
    series = 1 - ratio + 3 * ratio**2 - 15 * ratio**3 + 105 * ratio**4
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log(series)
