"""What every head must do, whichever it is: a new file in edge_agent/heads is tested here by being there."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from edge_agent import heads
from edge_agent.core.errors import ConfigError, DataError, StateError
from edge_agent.heads import FitData, saved

NAMES = ("cat", "dog", "owl", "elk")
K = len(NAMES)
D = 6

pytestmark = pytest.mark.parametrize("name", heads.names())


def blobs(counts, seed=0, spread=0.4):
    """Clouds far apart, one for each class: ``counts`` samples of class 0, 1, ... in random order."""
    rng = np.random.default_rng(seed)
    centres = 4 * np.eye(K, D)
    labels = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    return (centres[labels] + spread * rng.normal(size=(len(labels), D))).astype(np.float32), labels


def global_head():
    """A shared classifier that knows the four clouds."""
    return {"weight": np.eye(K, D, dtype=np.float32), "bias": np.zeros(K, np.float32)}


def statistics(size=D):
    """What a federation that knows the four clouds has of them: means over its samples."""
    centres = 4 * np.eye(K, size)
    gram = centres.T @ centres / K + 0.16 * np.eye(size)
    return {
        "gram": gram[np.triu_indices(size)],
        "mean": centres.mean(axis=0),
        "sums": centres / K,
        "shares": np.full(K, 1 / K),
    }


def fitted(name, features, labels, seed=1):
    head = heads.create(name)
    head.fit(FitData(features, labels, K, global_head(), statistics=statistics()), np.random.default_rng(seed))
    return head


def test_it_learns_what_is_easy(name):
    head = fitted(name, *blobs([20, 20, 20, 20]))
    features, labels = blobs([10, 10, 10, 10], seed=5)
    assert (head.predict_proba(features).argmax(axis=1) == labels).mean() > 0.95


def test_probabilities_are_probabilities_of_all_classes(name):
    head = fitted(name, *blobs([12, 12, 12, 12]))
    for features in (blobs([3, 3, 3, 3], seed=2)[0], np.full((2, D), 1e4, np.float32), np.zeros((0, D), np.float32)):
        answer = head.predict_proba(features)
        assert answer.shape == (len(features), K)
        assert answer.dtype == np.float64
        assert np.isfinite(answer).all()
        assert (answer >= 0).all()
        np.testing.assert_allclose(answer.sum(axis=1), 1.0, atol=1e-9)


def test_a_class_that_was_never_seen_is_never_answered(name):
    head = fitted(name, *blobs([15, 0, 15, 15]))
    answer = head.predict_proba(blobs([0, 20], seed=3)[0])
    assert (answer[:, 1] == 0).all()
    np.testing.assert_allclose(answer.sum(axis=1), 1.0, atol=1e-9)


def test_the_same_samples_and_seed_give_the_same_bits(name):
    features, labels = blobs([9, 11, 7, 13])
    first, again = (fitted(name, features, labels, seed=4) for _ in range(2))
    assert set(first.arrays) == set(again.arrays)
    assert all((first.arrays[key] == again.arrays[key]).all() for key in first.arrays)
    assert (first.predict_proba(features) == again.predict_proba(features)).all()


def test_it_leaves_what_it_was_given_alone(name):
    features, labels = blobs([8, 8, 8, 8])
    shared = global_head()
    given = [features.copy(), labels.copy(), shared["weight"].copy()]
    head = heads.create(name)
    head.fit(FitData(features, labels, K, shared, statistics=statistics()), np.random.default_rng(0))
    head.predict_proba(features)
    for now, before in zip((features, labels, shared["weight"]), given, strict=True):
        assert (now == before).all()


@pytest.mark.parametrize("counts", [[1], [0, 0, 7], [1, 1], [2, 1, 1, 1], [60, 1]])
def test_few_samples_and_lonely_classes_are_enough(name, counts):
    features, labels = blobs(counts)
    answer = fitted(name, features, labels).predict_proba(features)
    assert np.isfinite(answer).all()
    held = np.flatnonzero(counts)
    assert set(answer.argmax(axis=1)) <= set(held)
    if len(held) == 1:
        assert (answer[:, held[0]] == 1).all()


def test_features_that_never_change_do_no_harm(name):
    """Dead units of an encoder: a column of zeros, one of a huge constant, and two that are equal."""
    features, labels = blobs([10, 10, 10, 10])
    features = np.concatenate([features, np.zeros((40, 1)), np.full((40, 1), 1e6), features[:, :1]], 1).astype("f")
    head = heads.create(name)
    weight = np.concatenate([np.eye(K, D), np.zeros((K, 3))], axis=1).astype(np.float32)
    head.fit(
        FitData(features, labels, K, {**global_head(), "weight": weight}, statistics=statistics(D + 3)),
        np.random.default_rng(0),
    )
    assert np.isfinite(head.predict_proba(features)).all()


def test_saved_and_read_again_it_answers_the_same(name, tmp_path):
    features, labels = blobs([10, 10, 0, 10])
    head = fitted(name, features, labels)
    saved.save(tmp_path, saved.SavedHead(head, "ab" * 32, "fp32", NAMES, {}))
    found = saved.load(tmp_path).head
    assert (found.predict_proba(features) == head.predict_proba(features)).all()


def test_another_width_is_refused_and_so_is_a_head_without_a_fit(name):
    head = fitted(name, *blobs([5, 5, 5, 5]))
    with pytest.raises(StateError, match=rf"\(3, {D + 1}\).*\(n, {D}\)"):
        head.predict_proba(np.zeros((3, D + 1), np.float32))
    with pytest.raises(StateError, match="has not been fitted"):
        heads.create(name).predict_proba(np.zeros((1, D), np.float32))


@pytest.mark.parametrize(
    "features, labels, words",
    [
        (np.zeros((0, D), "f"), np.zeros(0, int), "no samples"), (np.full((1, D), np.nan, "f"), [0], "NaN or infinity"),
        (np.zeros((1, D), "f"), [K], f"expected 0..{K - 1}"),
        (np.zeros((2, D), "f"), [0], r"expected \(n, d\) and \(n,\)"),
    ],
)  # fmt: skip
def test_samples_that_cannot_be_are_refused(name, features, labels, words):
    head = heads.create(name)
    with pytest.raises(DataError, match=words):
        head.fit(FitData(features, np.asarray(labels), K), np.random.default_rng(0))


def test_a_parameter_that_it_does_not_know_is_refused(name):
    with pytest.raises(ConfigError, match="no_such_thing"):
        heads.create(name, {"no_such_thing": 1})


FIT_EACH = """
import sys
import numpy as np
from edge_agent import heads

x = np.random.default_rng(0).normal(size=(12, 4)).astype("f")
y = np.arange(12) % 2
shared = {"weight": np.eye(2, 4, dtype="f"), "bias": np.zeros(2, "f")}
gram = np.eye(4)[np.triu_indices(4)]
known = {"gram": gram, "mean": np.zeros(4), "sums": np.zeros((2, 4)), "shares": np.full(2, 0.5)}
before = 0
for name in sys.argv[1].split(","):
    head = heads.create(name)
    head.fit(heads.FitData(x, y, 2, shared, statistics=known), np.random.default_rng(0))
    head.predict_proba(x)
    loaded = sum(module.partition(".")[0] in {"torch", "torchvision"} for module in sys.modules)
    print(name, loaded - before)
    before = loaded
"""


@pytest.fixture(scope="module")
def modules_of_torch():
    """Head -> how many modules of torch it was the first to load, all in one new interpreter."""
    command = [sys.executable, "-c", FIT_EACH, ",".join(heads.names())]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {name: int(count) for name, count in map(str.split, done.stdout.splitlines())}


def test_neither_fitting_nor_predicting_brings_torch_along(name, modules_of_torch):
    assert modules_of_torch[name] == 0, "torch was loaded"
