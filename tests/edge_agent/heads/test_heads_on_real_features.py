"""Logistic regression and the support vector machine on features of a trained encoder, beside scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.research.bench import device as bench
from coordinator.research.bench import workloads
from edge_agent import data, heads
from edge_agent.heads import FitData, _layers
from edge_agent.heads import lr as lr_module
from edge_agent.heads import svm as svm_module

SPLITS = 3


@pytest.fixture(scope="module")
def found():
    """512 features of 1,198 slanted digits, by an encoder that has seen the other 599, upright and inverted."""
    task = workloads.w1_task()
    sources = (
        "digits:inverted?client=0&clients=3",
        "digits:slanted?client=1&clients=3",
        "digits:slanted?client=2&clients=3",
    )
    train, *others = (data.load(source, task.input, task.class_names) for source in sources)
    made = [bench.make(train, other, len(other))[0] for other in others]
    return np.concatenate([one.features for one in made]), np.concatenate([one.labels for one in made])


def splits(found):
    features, labels = found
    for seed in range(SPLITS):
        order = np.random.default_rng(seed).permutation(len(labels))
        fit = order[:600]
        test = order[600:]
        yield FitData(features[fit], labels[fit], 10), features[test], labels[test]


def accuracy(head, features, labels):
    return np.mean(head.predict_proba(features).argmax(axis=1) == labels)


@pytest.fixture
def evaluations(monkeypatch):
    """How often a solver has asked for a loss and its gradient."""
    counts = [0]

    def minimise(objective, *rest, **options):
        def counted(point):
            counts[0] += 1
            return objective(point)

        return _layers.minimise(counted, *rest, **options)

    monkeypatch.setattr(lr_module, "minimise", minimise)
    monkeypatch.setattr(svm_module, "minimise", minimise)
    return counts


def test_logistic_regression_stops_where_scikit_learn_does_and_is_as_accurate(found, evaluations):
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    ours = []
    theirs = []
    for fit, features, labels in splits(found):
        evaluations[0] = 0
        head = heads.create("lr")
        head.fit(fit, np.random.default_rng(0))
        scaler = StandardScaler().fit(fit.features)
        reference = LogisticRegression(max_iter=1000).fit(scaler.transform(fit.features), fit.labels)
        assert evaluations[0] <= 2 * reference.n_iter_[0]
        ours.append(accuracy(head, features, labels))
        theirs.append(reference.score(scaler.transform(features), labels))
    assert np.mean(theirs) > 0.5, "features that tell something"
    assert np.mean(ours) >= np.mean(theirs) - 0.005


def test_default_machine_is_as_accurate_as_scikit_learns_with_few_steps(found, evaluations):
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC, LinearSVC

    ours = []
    linear = []
    kernel = []
    for fit, features, labels in splits(found):
        evaluations[0] = 0
        head = heads.create("svm")
        head.fit(fit, np.random.default_rng(0))
        assert evaluations[0] < 400
        scaler = StandardScaler().fit(fit.features)
        inputs = scaler.transform(fit.features)
        tests = scaler.transform(features)
        reference = LinearSVC(C=1.0, dual=True, max_iter=500, random_state=0)
        with pytest.warns(Warning, match="converge"):
            reference.fit(inputs, fit.labels)
        linear.append(reference.score(tests, labels))
        kernel.append(SVC().fit(inputs, fit.labels).score(tests, labels))
        ours.append(accuracy(head, features, labels))
    assert np.mean(ours) >= max(np.mean(linear), np.mean(kernel)) - 0.005
