"""FedCOF: covariances from how the clients' class means scatter."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from edge_agent import methods
from edge_agent.methods.fedcof import COUNTS, MEANS, MeansOfClass, solve, within_class_scatter
from edge_agent.methods.values import Update
from edge_agent.privacy.noise import Mechanism


def by_class(means: np.ndarray, counts: np.ndarray) -> list[MeansOfClass]:
    """Return the class means (m, K, d) of m clients, with sample counts (m, K), class by class."""
    classes = []
    for label in range(means.shape[1]):
        of_class = MeansOfClass(means.shape[2])
        for client in np.flatnonzero(counts[:, label]):
            of_class.add(means[client, label], int(counts[client, label]))
        classes.append(of_class)
    return classes


def test_the_scatter_by_hand():
    """One class, clients of one and three samples at 0 and 4: the mean is 3, S = (1 * 9 + 3 * 1) / 1 = 12."""
    means = np.array([[[0.0]], [[4.0]]])
    scatter, samples = within_class_scatter(by_class(means, np.array([[1], [3]])))
    assert scatter.tolist() == [[36.0]]  # N - 1 = 3 times 12
    assert samples == 3.0


def test_the_estimate_is_the_covariance_of_the_samples():
    """400 clients of 5 samples each, drawn from one class: unbiased, and within the spread of so many."""
    rng = np.random.default_rng(0)
    covariance = np.array([[2.0, 0.8, 0.0], [0.8, 1.0, -0.3], [0.0, -0.3, 0.5]])
    samples = rng.multivariate_normal([1, 2, 3], covariance, size=(400, 5))
    scatter, count = within_class_scatter(by_class(samples.mean(axis=1)[:, None], np.full((400, 1), 5)))
    np.testing.assert_allclose(scatter / count, covariance, atol=0.35)
    many = [rng.multivariate_normal([1, 2, 3], covariance, size=(400, 5)).mean(axis=1)[:, None] for _ in range(50)]
    estimates = [within_class_scatter(by_class(means, np.full((400, 1), 5)))[0] / count for means in many]
    np.testing.assert_allclose(np.mean(estimates, axis=0), covariance, atol=0.05)


def test_a_direction_in_which_classes_scatter_gets_little_weight():
    """Two classes apart by 1 in both features; the second feature scatters ten times as much."""
    rng = np.random.default_rng(1)
    spread = np.array([0.3, 3.0])
    means = np.stack([center + spread * rng.standard_normal((60, 2)) / np.sqrt(8) for center in (0.5, -0.5)], axis=1)
    weight = solve(by_class(means, np.full((60, 2), 8)), 0.0, 0.0)
    assert abs(weight[0, 0]) > 20 * abs(weight[0, 1])
    np.testing.assert_allclose(np.linalg.norm(weight, axis=1), 1.0)


def test_it_is_better_than_the_nearest_mean_where_features_scatter_unevenly():
    rng = np.random.default_rng(2)
    spread = np.repeat([0.2, 4.0], 5)
    centres = rng.standard_normal((3, 10)) * 0.5
    made = methods.create("fedcof", {"min_class_count": 1, "shrinkage": 0.01})
    updates = []
    for number in range(40):
        labels = np.arange(24) % 3
        features = (centres[labels] + spread * rng.standard_normal((24, 10))).astype(np.float32)
        means = np.stack([features[labels == label].mean(axis=0) for label in range(3)])
        updates.append(Update(f"c{number:02d}", 24.0, {MEANS: means, COUNTS: np.full(3, 8)}))
    state = made.aggregate({}, updates)
    labels = np.arange(3000) % 3
    tested = centres[labels] + spread * rng.standard_normal((3000, 10))
    means = np.mean([update.tensors[MEANS] for update in updates], axis=0)
    nearest = (tested @ means.T - (means**2).sum(axis=1) / 2).argmax(axis=1)
    answers = (tested @ state["head.weight"].T).argmax(axis=1)
    assert (answers == labels).mean() > (nearest == labels).mean() + 0.1


def test_a_class_that_nobody_has_gets_no_weight_and_one_client_is_enough_to_go_on():
    means = np.zeros((1, 3, 2))
    means[0, 0] = [1, 0]
    means[0, 1] = [0, 1]
    weight = solve(by_class(means, np.array([[4, 4, 0]])), 0.1, 0.01)
    np.testing.assert_allclose(weight, [[1, 0], [0, 1], [0, 0]])


def test_a_class_that_a_client_lacks_takes_no_memory_for_it():
    """500 clients with one of 50 classes each: all arrays together would be 6.4 MB in float32, and 12.8 in float64."""

    def updates():
        for number in range(500):
            means = np.zeros((50, 64), np.float32)
            counts = np.zeros(50, np.int64)
            means[number % 50] = number + np.arange(64)
            counts[number % 50] = 3
            yield Update(f"c{number:03d}", 3.0, {MEANS: means, COUNTS: counts})

    made = methods.create("fedcof")
    tracemalloc.start()
    try:
        made.aggregate({}, updates())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2_000_000


def test_statistics_that_nobody_has_are_refused():
    made = methods.create("fedcof")
    honest = {MEANS: np.ones((2, 3), np.float32), COUNTS: np.array([2, 3])}
    assert made.objection(honest) == ""
    assert "class counts" in made.objection({**honest, COUNTS: np.array([-1, 3])})
    assert "class counts" in made.objection({**honest, COUNTS: np.array([2, 10**12])})
    assert "whose count is 0" in made.objection({**honest, COUNTS: np.array([0, 3])})
    assert "reaches" in made.objection({**honest, MEANS: np.full((2, 3), 1e9, np.float32)})


@pytest.mark.parametrize("noise", [0.01, 1.0])
def test_noise_leaves_statistics_of_the_same_form(noise):
    made = methods.create("fedcof")
    honest = {MEANS: np.ones((2, 3), np.float32), COUNTS: np.array([20, 30])}
    noisy = Mechanism(1.0, 1.0, noise).apply(made, honest, {}, np.random.default_rng(0))
    assert made.objection(noisy) == ""
    assert (noisy[MEANS].dtype, noisy[COUNTS].dtype) == (np.float32, np.int64)
