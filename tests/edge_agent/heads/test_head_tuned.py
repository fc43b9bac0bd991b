from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_agent import heads
from edge_agent.core.errors import UsageError
from edge_agent.heads import FitData


def problem(count=60, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.choice([0, 2, 3], count)
    features = (rng.normal(size=(4, 6))[labels] + rng.normal(size=(count, 6))).astype(np.float32)
    shared = {
        "weight": rng.normal(size=(4, 6)).astype(np.float32),
        "bias": rng.normal(size=4).astype(np.float32),
    }
    return FitData(features, labels, 4, shared)


def fitted(data, c):
    head = heads.create("tuned", {"c": c})
    head.fit(data, np.random.default_rng(0))
    return head


@pytest.mark.parametrize("c", [0.1, 3.0])
def test_it_is_the_minimum_of_the_log_losses_and_the_distance_to_the_shared_classifier(c):
    """Against torch's LBFGS in float64 on the objective as it is written down, on raw features."""
    data = problem()
    classes = [0, 2, 3]
    labels = np.searchsorted([0, 2, 3], data.labels)
    start = torch.tensor(data.global_head["weight"][classes], dtype=torch.float64)
    weight = start.clone().requires_grad_()
    bias = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    inputs = torch.tensor(data.features, dtype=torch.float64)
    wanted = torch.tensor(labels)
    solver = torch.optim.LBFGS([weight, bias], max_iter=2000, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def loss():
        solver.zero_grad()
        distance = ((weight - start) ** 2).sum() * (inputs**2).mean()
        value = torch.nn.functional.cross_entropy(inputs @ weight.T + bias, wanted, reduction="sum")
        value = value + distance / (2 * c)
        value.backward()
        return value

    solver.step(loss)
    expected = torch.softmax(inputs @ weight.T + bias, 1).detach().numpy()
    np.testing.assert_allclose(fitted(data, c).predict_proba(data.features)[:, classes], expected, atol=2e-3)


def test_a_strong_pull_leaves_the_shared_classifier_and_a_weak_one_finds_the_data():
    data = problem(300)
    kept = data.global_head["weight"][[0, 2, 3]]
    np.testing.assert_allclose(fitted(data, 1e-6).arrays["weight"], kept, atol=1e-4)
    right = [(fitted(data, c).predict_proba(data.features).argmax(1) == data.labels).mean() for c in (1e-6, 10)]
    assert right[1] > right[0] + 0.1


def test_features_in_other_units_give_the_same_answers():
    data = problem()
    shared = {"weight": data.global_head["weight"] / 100, "bias": data.global_head["bias"]}
    larger = FitData(data.features * 100, data.labels, 4, shared)
    np.testing.assert_allclose(
        fitted(larger, 1.0).predict_proba(larger.features), fitted(data, 1.0).predict_proba(data.features), atol=1e-3
    )


def test_a_bundle_without_a_shared_classifier_is_a_usage_error():
    data = problem()
    with pytest.raises(UsageError, match="no shared classifier"):
        fitted(FitData(data.features, data.labels, 4), 1.0)
