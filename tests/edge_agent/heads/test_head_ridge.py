from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import RidgeClassifierCV, RidgeCV

from edge_agent import heads
from edge_agent.heads import FitData
from edge_agent.heads.ridge import PENALTIES, fit_ridge


@pytest.mark.parametrize("count, size", [(40, 100), (200, 30), (5, 3)])
def test_weights_and_penalty_are_those_of_scikit_learn(count, size):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(count, size))
    targets = rng.normal(size=(count, 3)) + inputs[:, :3]
    weight, bias, _ = fit_ridge(inputs, targets)
    expected = RidgeCV(alphas=PENALTIES).fit(inputs, targets)
    assert weight == pytest.approx(expected.coef_, abs=1e-9)
    assert bias == pytest.approx(expected.intercept_, abs=1e-9)


def test_leave_one_out_predictions_are_those_of_fits_without_the_sample():
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(12, 4))
    targets = rng.normal(size=(12, 1)) + inputs[:, :1]
    _, _, left_out = fit_ridge(inputs, targets)
    penalty = RidgeCV(alphas=PENALTIES).fit(inputs, targets).alpha_
    for row in range(12):
        rest = np.arange(12) != row
        center = inputs[rest].mean(axis=0)
        middle = targets[rest].mean()
        x = inputs[rest] - center
        y = targets[rest, 0] - middle
        weight = np.linalg.solve(x.T @ x + penalty * np.eye(4), x.T @ y)
        assert left_out[row, 0] == pytest.approx(middle + (inputs[row] - center) @ weight, abs=1e-9)


def test_a_head_answers_as_scikit_learns_ridge_classifier_does():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(4, 20)) * 1.5
    labels = np.repeat(np.arange(4), 30)
    features = (centers[labels] + rng.normal(size=(120, 20))).astype(np.float32)
    head = heads.create("ridge", {"feature_norm": "none"})
    head.fit(FitData(features, labels, 5), rng)
    expected = RidgeClassifierCV(alphas=PENALTIES).fit(features.astype(np.float64), labels)
    test = (centers[labels] + rng.normal(size=(120, 20))).astype(np.float32)
    probabilities = head.predict_proba(test)
    assert (probabilities.argmax(axis=1) == expected.predict(test)).mean() > 0.99
    assert probabilities.sum(axis=1) == pytest.approx(np.ones(120))
    assert (probabilities[:, 4] == 0).all()
