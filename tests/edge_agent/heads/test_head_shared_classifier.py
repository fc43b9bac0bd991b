from __future__ import annotations

import numpy as np
import pytest

from edge_agent import heads
from edge_agent.core.errors import UsageError
from edge_agent.heads import FitData


def test_it_answers_with_the_shared_classifier_among_the_classes_of_the_device():
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(5, 4)).astype(np.float32)
    bias = rng.normal(size=5).astype(np.float32)
    features = rng.normal(size=(6, 4)).astype(np.float32)
    head = heads.create("shared_classifier")
    head.fit(FitData(features, np.array([1, 3, 1, 4, 3, 1]), 5, {"weight": weight, "bias": bias}), rng)
    exponents = np.exp(features @ weight.T + bias)[:, [1, 3, 4]]
    expected = exponents / exponents.sum(axis=1, keepdims=True)
    answer = head.predict_proba(features)
    assert answer[:, [1, 3, 4]] == pytest.approx(expected, rel=1e-5)
    assert (answer[:, [0, 2]] == 0).all()


def test_a_bundle_without_a_shared_classifier_is_a_usage_error():
    head = heads.create("shared_classifier")
    with pytest.raises(UsageError, match="no shared classifier for these classes; choose another head"):
        head.fit(FitData(np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1]), 2), np.random.default_rng(0))
