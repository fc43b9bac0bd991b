from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent import heads
from edge_agent.core.errors import ConfigError, DataError, StateError, UnknownName
from edge_agent.heads import FitData
from edge_agent.heads._layers import minimise
from edge_agent.heads.lr import LogisticRegressionParams as Params
from edge_agent.heads.lr import fit_logistic


def clouds(classes: int, count: int, dim: int, seed: int = 0, distance: float = 0.6):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    labels[:classes] = np.arange(classes)
    means = rng.normal(size=(classes, dim)) * distance
    return (means[labels] + rng.normal(size=(count, dim))).astype(np.float32), labels


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("c", [0.1, 1.0, 10.0])
def test_probabilities_are_those_of_scikit_learn(classes, c):
    from sklearn.linear_model import LogisticRegression

    features, labels = clouds(classes, 300, 20)
    reference = LogisticRegression(C=c, tol=1e-8, max_iter=10_000).fit(features.astype(np.float64), labels)
    head = heads.create("lr", {"c": c, "feature_norm": "none", "tolerance": 1e-6})
    head.fit(FitData(features, labels, classes), np.random.default_rng(0))
    fresh, _ = clouds(classes, 200, 20, seed=1)
    assert np.abs(head.predict_proba(fresh) - reference.predict_proba(fresh.astype(np.float64))).max() < 1e-3


def test_standardised_features_are_those_of_scikit_learns_scaler():
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features, labels = clouds(4, 200, 12)
    features = features * np.linspace(0.1, 1.9, 12, dtype=np.float32) + 5
    reference = make_pipeline(StandardScaler(), LogisticRegression(tol=1e-8, max_iter=10_000))
    reference.fit(features.astype(np.float64), labels)
    head = heads.create("lr", {"tolerance": 1e-6})
    head.fit(FitData(features, labels, 4), np.random.default_rng(0))
    assert np.abs(head.predict_proba(features) - reference.predict_proba(features.astype(np.float64))).max() < 1e-3


def test_the_gradient_vanishes_at_the_solution():
    """At the optimum X'(P - Y) + W / C = 0 and the columns of P - Y sum to zero; worked out here a second time."""
    features, labels = clouds(3, 90, 5)
    inputs = features.astype(np.float64)
    targets = np.eye(3)[labels]
    weight, bias = fit_logistic(inputs, targets, Params(c=2.0, tolerance=1e-9))
    logits = inputs @ weight.T + bias
    found = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert np.abs((found - targets).T @ inputs + weight / 2.0).max() < 1e-6
    assert np.abs((found - targets).sum(axis=0)).max() < 1e-6


@given(st.integers(1, 8), st.integers(0, 1000))
def test_the_solver_finds_the_minimum_of_a_quadratic(size, seed):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(size, size))
    matrix = root @ root.T + np.eye(size)
    target = rng.normal(size=size)
    found = minimise(
        lambda x: (float(0.5 * x @ matrix @ x - target @ x), matrix @ x - target),
        np.zeros(size),
        max_iterations=500,
        tolerance=1e-10,
    )
    assert np.allclose(found, np.linalg.solve(matrix, target), atol=1e-6)


def test_the_solver_stops_where_nothing_gets_better():
    assert minimise(lambda x: (0.0, np.ones_like(x)), np.ones(2), max_iterations=5, tolerance=0).tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_the_solver_ends_where_rounding_hides_what_is_left(seed):
    """A tolerance that no float reaches: the fit ends at the last bit, on every CPU and with every BLAS kernel."""
    features, labels = clouds(3, 96, 3, seed)
    evaluations = [0]
    inputs = features.astype(np.float64)
    targets = np.eye(3)[labels]

    def objective(flat):
        evaluations[0] += 1
        error = inputs @ flat.reshape(3, 3).T - targets
        return float(np.vdot(error, error)) / 2, (error.T @ inputs).ravel()

    found = minimise(objective, np.zeros(9), max_iterations=100_000, tolerance=1e-300)
    assert evaluations[0] < 10_000, "50 to 1,000 by kernel; 100,000 where steps that change the last bit count"
    expected = np.linalg.lstsq(inputs, targets, rcond=None)[0].T.ravel()
    np.testing.assert_allclose(found, expected, atol=1e-7)


def test_classes_that_the_device_never_saw_have_probability_zero():
    features, labels = clouds(2, 50, 4)
    head = heads.create("lr")
    head.fit(FitData(features, np.array([3, 7])[labels], 9), np.random.default_rng(0))
    found = head.predict_proba(features)
    assert found.shape == (50, 9)
    assert np.flatnonzero(found.sum(axis=0)).tolist() == [3, 7]
    assert np.allclose(found.sum(axis=1), 1)


@pytest.mark.parametrize("name", ["lr", "mlp", "prototype", "svm"])
def test_every_head_answers_with_the_only_class_it_saw(name):
    head = heads.create(name)
    head.fit(FitData(np.ones((3, 2), np.float32), np.array([1, 1, 1]), 4), np.random.default_rng(0))
    assert head.predict_proba(np.zeros((2, 2), np.float32)).tolist() == [[0, 1, 0, 0]] * 2


@pytest.mark.parametrize("name", ["lr", "mlp", "prototype"])
@pytest.mark.parametrize("norm", ["none", "l2", "standard"])
def test_every_head_learns_apart_clouds_with_every_norm_and_survives_constant_features(name, norm):
    features, labels = clouds(3, 120, 8, distance=3.0)
    features[:, 2] = 0.0
    head = heads.create(name, {"feature_norm": norm})
    head.fit(FitData(features, labels, 3), np.random.default_rng(0))
    found = head.predict_proba(features)
    assert (found.argmax(axis=1) == labels).mean() > 0.95
    assert np.allclose(found.sum(axis=1), 1)
    assert head.predict_proba(features[:0]).shape == (0, 3)


def test_a_head_refuses_features_of_another_size_and_use_before_fitting():
    head = heads.create("lr")
    with pytest.raises(StateError, match="not been fitted"):
        head.predict_proba(np.zeros((1, 2), np.float32))
    features, labels = clouds(2, 20, 4)
    head.fit(FitData(features, labels, 2), np.random.default_rng(0))
    with pytest.raises(StateError, match=r"\(1, 5\)"):
        head.predict_proba(np.zeros((1, 5), np.float32))


def test_impossible_data_and_parameters_are_named():
    with pytest.raises(DataError, match="NaN"):
        FitData(np.full((1, 2), np.nan, np.float32), np.array([0]), 1)
    with pytest.raises(DataError, match="no samples"):
        FitData(np.zeros((0, 2), np.float32), np.zeros(0, np.int64), 1)
    with pytest.raises(ConfigError, match=r"feature_nrom.*feature_norm"):
        heads.create("lr", {"feature_nrom": "l2"})
    with pytest.raises(UnknownName, match="'lr'"):
        heads.create("lrr")


def test_the_files_of_this_folder_are_the_heads():
    assert {"lr", "mlp", "prototype", "svm"} <= set(heads.names())
    assert not {"base", "saved"} & set(heads.names())
