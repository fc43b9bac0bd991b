"""kNN-Per's head against hand-worked numbers, a brute-force twin and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent import heads
from edge_agent.core.errors import ConfigError
from edge_agent.heads import FitData, knn, saved


def fitted(features, labels, num_classes=2, shared=None, seed=0, **params):
    head = heads.create("knn", params)
    head.fit(
        FitData(np.asarray(features, np.float32), np.asarray(labels), num_classes, shared), np.random.default_rng(seed)
    )
    return head


def linear(classes=3, size=4, seed=1):
    rng = np.random.default_rng(seed)
    return {"weight": rng.normal(size=(classes, size)), "bias": rng.normal(size=classes)}


def cloud(count=60, classes=3, size=4, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    labels[:classes] = np.arange(classes)
    return (2 * rng.normal(size=(classes, size))[labels] + rng.normal(size=(count, size))).astype(np.float32), labels


def softmax(logits):
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def test_two_neighbours_by_hand():
    """Squared distances 0 and 2, d = 2: weights e^0 : e^-1 = .731059 : .268941."""
    head = fitted([[0, 0], [1, 1]], [0, 1])
    np.testing.assert_allclose(head.predict_proba(np.zeros((1, 2), np.float32)), [[0.731059, 0.268941]], atol=1e-6)


def test_scale_widens_the_weights():
    head = fitted([[0, 0], [1, 1]], [0, 1], scale=2.0)  # e^0 : e^-1/2
    expected = 1 / (1 + np.exp(-0.5))
    assert head.predict_proba(np.zeros((1, 2), np.float32))[0, 0] == pytest.approx(expected, abs=1e-9)


def test_mix_of_zero_is_the_shared_classifier_and_one_the_neighbours():
    features, labels = cloud()
    shared = linear()
    queries = cloud(seed=5)[0]
    model = softmax(queries.astype(np.float64) @ shared["weight"].T + shared["bias"])
    near = fitted(features, labels, 3).predict_proba(queries)
    for mix, expected in [(0.0, model), (1.0, near), (0.3, 0.3 * near + 0.7 * model)]:
        found = fitted(features, labels, 3, shared, mix=mix).predict_proba(queries)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_without_a_shared_classifier_the_neighbours_answer_alone():
    features, labels = cloud()
    assert fitted(features, labels, 3, mix=0.2).arrays["mix"] == 1.0


def test_scikit_learn_finds_the_same():
    from sklearn.neighbors import KNeighborsClassifier

    features, labels = cloud(200, size=7)
    queries = cloud(50, size=7, seed=9)[0]
    twin = KNeighborsClassifier(10, weights=lambda distances: np.exp(-(distances**2) / 7), algorithm="brute")
    twin.fit(features.astype(np.float64), labels)
    found = fitted(features, labels, 3).predict_proba(queries)
    np.testing.assert_allclose(found, twin.predict_proba(queries.astype(np.float64)), atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(2, 30),
    k=st.integers(1, 40),
    size=st.integers(1, 5),
    cells=st.integers(1, 50),
    seed=st.integers(0, 999),
)
def test_blocks_of_any_size_give_what_one_query_at_a_time_gives(count, k, size, cells, seed):
    rng = np.random.default_rng(seed)
    stored = rng.normal(size=(count, size)).astype(np.float32)
    members = rng.integers(0, 3, count)
    queries = rng.normal(size=(7, size))
    before = knn._CELLS
    knn._CELLS = cells
    try:
        found = knn.count_votes(queries, stored, members, 3, k, 0.7)
    finally:
        knn._CELLS = before
    for query, answer in zip(queries, found, strict=True):
        squares = ((stored - query) ** 2).sum(axis=1)
        nearest = np.argsort(squares)[:k]
        weights = np.exp(-squares[nearest] / (size * 0.7))
        expected = np.bincount(members[nearest], weights, 3)
        np.testing.assert_allclose(answer, expected / expected.sum(), atol=1e-6)


def test_a_block_of_distances_stays_small(monkeypatch):
    monkeypatch.setattr(knn, "_CELLS", 1000)
    seen = []
    nearest = knn._nearest
    monkeypatch.setattr(knn, "_nearest", lambda q, s, k: (seen.append(len(q) * len(s)), nearest(q, s, k))[1])
    features, labels = cloud(100)
    fitted(features, labels, 3).predict_proba(features)
    assert len(seen) == 10
    assert max(seen) <= 1000


def test_more_neighbours_than_samples_take_all():
    features, labels = cloud(5)
    queries = cloud(9, seed=3)[0]
    few, many = (fitted(features, labels, 3, neighbours=k).predict_proba(queries) for k in (5, 500))
    np.testing.assert_allclose(few, many)


def test_far_queries_do_not_underflow():
    head = fitted([[0, 0], [1, 1], [1, 1.5]], [0, 1, 1])
    found = head.predict_proba(np.array([[1e4, 1e4], [-1e4, -1e4]], np.float32))
    np.testing.assert_allclose(found, [[0, 1], [1, 0]], atol=1e-9)


def test_samples_at_one_place_share_evenly():
    head = fitted(np.zeros((4, 3)), [0, 0, 0, 1])
    np.testing.assert_allclose(head.predict_proba(np.ones((1, 3), np.float32)), [[0.75, 0.25]])


def test_lambda_is_picked_where_neighbours_or_the_shared_classifier_are_better():
    features, labels = cloud(300, seed=2)
    means = np.stack([features[labels == k].mean(axis=0) for k in range(3)]).astype(np.float64)
    good = {"weight": means, "bias": -0.5 * (means**2).sum(axis=1)}  # the nearest class mean
    bad = {"weight": -means, "bias": 0.5 * (means**2).sum(axis=1)}
    assert fitted(features, labels, 3, bad).arrays["mix"][0] > 0.5
    # A third of the labels is wrong: the nearest neighbour repeats such mistakes, the class means do not.
    wrong = np.where(np.random.default_rng(0).random(300) < 1 / 3, (labels + 1) % 3, labels)
    assert fitted(features, wrong, 3, good, neighbours=1).arrays["mix"][0] < 0.5


def test_of_equally_right_lambdas_the_more_certain_one_is_picked():
    near = np.array([[0.6, 0.4], [0.4, 0.6]])
    shared = np.array([[0.9, 0.1], [0.1, 0.9]])
    assert knn.best_mix(near, shared, np.array([0, 1])) == 0.0
    assert knn.best_mix(shared, near, np.array([0, 1])) == 1.0
    assert knn.best_mix(near, near, np.array([0, 1])) == 0.0


def test_classes_without_samples_get_probability_zero():
    features, labels = cloud(30, classes=3)
    head = fitted(features, np.where(labels == 2, 3, labels), 5, linear(5), mix=0.4)
    found = head.predict_proba(features)
    assert (found[:, [2, 4]] == 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1)


@pytest.mark.parametrize("labels", [[1], [1, 1], [0, 1], [0, 0, 1]])
def test_very_few_samples_fit(labels):
    head = fitted(np.arange(4.0 * len(labels)).reshape(-1, 4), labels, 3, linear())
    found = head.predict_proba(np.zeros((2, 4), np.float32))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.sum(axis=1), 1)


def test_normalised_distances_leave_the_shared_classifier_on_raw_features():
    features, labels = cloud()
    for norm in ("l2", "standard"):
        found = fitted(features, labels, 3, linear(), mix=0.0, feature_norm=norm).predict_proba(features)
        plain = softmax(features.astype(np.float64) @ linear()["weight"].T + linear()["bias"])
        np.testing.assert_allclose(found, plain, atol=1e-6)


def test_the_same_generator_picks_the_same_lambda():
    features, labels = cloud(40, seed=6)
    picked = [fitted(features, labels, 3, linear(), seed=s).arrays["mix"][0] for s in (3, 3)]
    assert picked[0] == picked[1]


def test_a_saved_head_answers_the_same(tmp_path):
    features, labels = cloud()
    head = fitted(features, labels, 3, linear())
    saved.save(tmp_path, saved.SavedHead(head, "0" * 64, "fp32", ("a", "b", "c"), {}))
    again = saved.load(tmp_path).head
    np.testing.assert_array_equal(again.predict_proba(features), head.predict_proba(features))


def test_impossible_parameters_are_refused():
    for params in ({"neighbours": 0}, {"mix": 1.5}, {"scale": 0.0}, {"held_back": 1.0}):
        with pytest.raises(ConfigError):
            heads.create("knn", params)
