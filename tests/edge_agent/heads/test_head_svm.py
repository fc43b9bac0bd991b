from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from edge_agent import heads
from edge_agent.core.errors import MissingCapability, TrainingFailed
from edge_agent.heads import FitData, _features
from edge_agent.heads.base import softmax

RBF = {"kernel": "rbf"}


def data(classes: int):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, 120)
    features = (rng.normal(size=(classes, 6)) * 1.5)[labels] + rng.normal(size=(120, 6))
    return FitData(features.astype(np.float32), labels, classes)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_linear_decisions_are_those_of_linear_svc_for_inputs_of_length_1(classes, unit):
    """LinearSVC penalises its bias; one that is worth 1,000 of it is next to free."""
    from sklearn.svm import LinearSVC

    found = data(classes)
    scaled = FitData(found.features * np.float32(unit), found.labels, classes)
    head = heads.create("svm", {"feature_norm": "none", "c": 2.0, "tolerance": 1e-9})
    head.fit(scaled, np.random.default_rng(5))
    inputs = found.features.astype(np.float64)
    inputs /= np.sqrt(np.mean(np.sum(inputs**2, axis=1)))
    reference = LinearSVC(C=2.0, dual=False, tol=1e-10, max_iter=100_000, intercept_scaling=1000.0)
    values = reference.fit(inputs, found.labels).decision_function(inputs)
    expected = np.stack([-values, values], axis=1) if classes == 2 else values
    assert np.allclose(head.predict_proba(scaled.features), softmax(expected), atol=1e-4)


def test_linear_machine_of_two_points_is_the_one_worked_out_by_hand():
    """Inputs 1 and -1, C = 1: minimise w^2 / 2 + 2 (1 - w)^2, so w = 4/5 and the bias is 0."""
    head = heads.create("svm", {"feature_norm": "none", "c": 1.0, "tolerance": 1e-12})
    head.fit(FitData(np.array([[1.0], [-1.0]], np.float32), np.array([1, 0]), 2), np.random.default_rng(0))
    assert np.allclose(head.arrays["weight"], [[-0.8], [0.8]])
    assert np.allclose(head.arrays["bias"], 0)


def test_rbf_decisions_are_those_of_one_svc_for_each_class():
    from sklearn.svm import SVC

    found = data(3)
    head = heads.create("svm", {"kernel": "rbf", "feature_norm": "none", "c": 1.0})
    head.fit(found, np.random.default_rng(0))
    wide = found.features.astype(np.float64)
    values = [SVC(gamma="scale").fit(wide, found.labels == label).decision_function(wide) for label in range(3)]
    assert np.allclose(head.predict_proba(found.features), softmax(np.stack(values, axis=1)), atol=1e-6)


def test_linear_machine_needs_no_scikit_learn():
    code = (
        "import sys, numpy as np\n"
        "from edge_agent import heads\n"
        "from edge_agent.heads import FitData\n"
        "sys.modules['sklearn'] = None\n"
        "h = heads.create('svm')\n"
        "h.fit(FitData(np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1]), 2), np.random.default_rng(0))\n"
        "assert h.predict_proba(np.eye(4, dtype=np.float32)).argmax(1).tolist() == [0, 1, 0, 1]\n"
        "assert not {'scipy', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "sklearn" else real(name, *rest)
    )
    with pytest.raises(MissingCapability, match=r"pip install .*\.\[heads\]'"):
        heads.create("svm", RBF).fit(data(2), np.random.default_rng(0))


def test_fitting_a_kernel_leaves_scikit_learn_out_of_this_process():
    code = (
        "import sys, numpy as np\n"
        "from edge_agent import heads\n"
        "from edge_agent.heads import FitData\n"
        "h = heads.create('svm', {'kernel': 'rbf'})\n"
        "h.fit(FitData(np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1]), 2), np.random.default_rng(0))\n"
        "assert h.predict_proba(np.eye(4, dtype=np.float32)).argmax(1).tolist() == [0, 1, 0, 1]\n"
        "assert not {'sklearn', 'scipy', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_fit_that_takes_too_long_is_given_up():
    with pytest.raises(TrainingFailed, match=r"0\.001 s"):
        heads.create("svm", {**RBF, "timeout_s": 0.001}).fit(data(2), np.random.default_rng(0))


def test_what_scikit_learn_says_reaches_the_reader(monkeypatch):
    # Inputs of another length than the labels: only scikit-learn notices.
    monkeypatch.setattr(_features, "normalise", lambda *_: np.zeros((3, 2)))
    with pytest.raises(TrainingFailed, match="inconsistent numbers of samples"):
        heads.create("svm", RBF).fit(data(2), np.random.default_rng(0))
