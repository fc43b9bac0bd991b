"""Ridge regression with the federation's statistics as prior: what the prior counts for, by hand and by brute force."""

from __future__ import annotations

import numpy as np
import pytest

from edge_agent import heads
from edge_agent.core.errors import UsageError
from edge_agent.heads import FitData
from edge_agent.heads.ridge_prior import COUNTS, _Prior, _Rows, fit_with
from edge_agent.methods.afl import GRAM, SHARES, SUMS, solve, statistics, unpack

SIZE = 8
CLASSES = 3


def cloud(samples: int, seed: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(samples) % CLASSES
    centres = 2 * np.random.default_rng(9).standard_normal((CLASSES, SIZE)) + shift
    return (centres[labels] + 2 * rng.standard_normal((samples, SIZE))).astype(np.float32), labels


def shared(samples: int = 900, shift: float = 0.0, classes: int = CLASSES):
    """The statistics of a federation, as a bundle has them."""
    features, labels = cloud(samples, 77, shift)
    is_known = labels < classes
    params = {"min_class_count": 1, "sent_as": "float64"}
    found = statistics(features[is_known], labels[is_known], CLASSES, params)
    return {"gram": found[GRAM], "sums": found[SUMS], "shares": found[SHARES], "mean": found[SUMS].sum(axis=0)}


def data(samples: int = 9, seed: int = 1, **known) -> FitData:
    features, labels = cloud(samples, seed)
    return FitData(features, labels, CLASSES, statistics=known or shared())


def fitted(given: FitData, **params):
    head = heads.create("ridge_prior", params)
    head.fit(given, np.random.default_rng(0))
    return head


def test_the_fit_is_that_of_own_samples_and_of_as_many_shared_ones():
    """30 samples of the federation, counted in full, and 9 own ones: the ridge regression of all 39."""
    features, labels = cloud(30, 5)
    params = {"min_class_count": 1, "sent_as": "float64"}
    found = statistics(features, labels, CLASSES, params)
    known = {"gram": found[GRAM], "sums": found[SUMS], "shares": found[SHARES], "mean": found[SUMS].sum(axis=0)}
    given = data(9, **known)
    classes = np.arange(CLASSES)
    fit = fit_with(_Rows.of(given, classes), _Prior.of(known, classes), 30.0, 1e-3)
    rows = np.concatenate([features, given.features])
    whole = statistics(rows, np.concatenate([labels, given.labels]), CLASSES, params)
    weight, bias = solve(unpack(whole[GRAM], SIZE), whole[SUMS], whole[SHARES], 1e-3, has_intercept=True)
    np.testing.assert_allclose(fit.weight[:, :-1], weight, atol=1e-7)
    np.testing.assert_allclose(fit.weight[:, -1], bias, atol=1e-7)


@pytest.mark.parametrize("count", [0.0, 10.0, 1000.0])
def test_answers_to_left_out_samples_are_those_of_fits_without_them(count):
    """Brute force: each sample is taken out, and the same penalty and prior are solved again."""
    given = data(12)
    classes = np.arange(CLASSES)
    prior = _Prior.of(given.statistics, classes)
    own = _Rows.of(given, classes)
    fit = fit_with(own, prior, count, 1e-2)
    gram = own.inputs.T @ own.inputs + count * prior.gram
    penalty = np.full(SIZE + 1, 1e-2 * np.trace(gram[:SIZE, :SIZE]) / SIZE)
    penalty[SIZE] = 1e-9 * gram[SIZE, SIZE]
    for row in range(len(given.labels)):
        rest = np.arange(len(given.labels)) != row
        inputs = own.inputs[rest]
        left = inputs.T @ inputs + count * prior.gram + np.diag(penalty)
        weight = np.linalg.solve(left, inputs.T @ own.targets[rest] + count * prior.cross)
        np.testing.assert_allclose(fit.left_out[row], own.inputs[row] @ weight, atol=1e-6)


def test_many_shared_samples_are_the_shared_classifier():
    given = data(9)
    head = fitted(given, samples=1e9)
    known = given.statistics
    weight, bias = solve(unpack(known["gram"], SIZE), known["sums"], known["shares"], 1e-4, has_intercept=True)
    features, _ = cloud(200, 3)
    answers = (features @ weight.T + bias).argmax(axis=1)
    assert (head.predict_proba(features).argmax(axis=1) == answers).mean() > 0.98


def test_few_own_samples_lean_on_the_federation():
    features, labels = cloud(2000, 3)
    right = {"alone": 0.0, "with the federation": 0.0}
    for seed in range(10):
        few = data(6, seed)
        for name, samples in (("alone", 0.0), ("with the federation", None)):
            answers = fitted(few, samples=samples).predict_proba(features).argmax(axis=1)
            right[name] += (answers == labels).mean() / 10
    assert right["with the federation"] > right["alone"] + 0.05


def test_a_federation_of_other_data_is_given_little_weight():
    """Its clouds lie elsewhere: errors of samples left out tell."""
    rng = np.random.default_rng(4)
    wrong = shared()
    wrong["sums"] = wrong["sums"][[1, 2, 0]]
    given = FitData(*cloud(60, 1), CLASSES, statistics=wrong)
    head = fitted(given)
    assert head.arrays["prior_samples"][0] <= 3
    features, labels = cloud(1000, int(rng.integers(99)))
    trusted = fitted(given, samples=1000.0)
    right = [(one.predict_proba(features).argmax(axis=1) == labels).mean() for one in (head, trusted)]
    assert right[0] > right[1] + 0.2


def test_a_class_that_the_federation_does_not_know_is_learned_from_own_samples():
    given = data(30, **shared(classes=2))
    features, labels = cloud(600, 3)
    answers = fitted(given).predict_proba(features).argmax(axis=1)
    assert (answers[labels == 2] == 2).mean() > 0.6


def test_a_bundle_without_statistics_is_refused():
    features, labels = cloud(9, 1)
    with pytest.raises(UsageError, match="the bundle has no shared statistics; take one of a run of method afl"):
        fitted(FitData(features, labels, CLASSES))


def test_the_numbers_that_are_tried_begin_with_none():
    assert COUNTS[0] == 0.0
    assert list(COUNTS) == sorted(COUNTS)
