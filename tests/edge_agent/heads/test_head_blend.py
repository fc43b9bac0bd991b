"""The blend of two heads: by hand, beside both of them, and with features that are divided among them."""

from __future__ import annotations

import numpy as np
import pytest

from edge_agent import heads
from edge_agent.core.errors import ConfigError, StateError, UnknownName, UsageError
from edge_agent.heads import FitData, saved
from edge_agent.heads.blend import pool

NAMES = ("cat", "dog", "owl")


def clouds(count=60, seed=0):
    """Three classes: the first two features tell cats from the others, the last three tell dogs from owls."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    features = rng.normal(size=(count, 5)).astype(np.float32)
    features[:, 0] += 6 * (labels == 0)
    features[:, 3] += 6 * (labels == 1)
    return features, labels


def fitted(features, labels, shared=None, **params):
    head = heads.create("blend", params)
    head.fit(FitData(features, labels, len(NAMES), shared), np.random.default_rng(1))
    return head


def test_the_product_by_hand():
    """p = (.8, .2), q = (.5, .5), two classes, a thousandth divided among them: p -> .7997 and .2003, q stays."""
    first = np.array([[0.8, 0.2]])
    second = np.array([[0.5, 0.5]])
    np.testing.assert_allclose(pool(first, second, 1.0), [[0.7997, 0.2003]], atol=1e-9)
    # The root of .7997 is .894259, that of .2003 is .447549; together 1.341808.
    np.testing.assert_allclose(pool(first, second, 0.5), [[0.666458, 0.333542]], atol=1e-5)
    np.testing.assert_allclose(pool(first, second, 0.0), second, atol=1e-9)


def test_one_head_alone_does_not_rule_out_a_class_and_both_together_do():
    first = np.array([[1.0, 0.0, 0.0]])
    second = np.array([[0.0, 1.0, 0.0]])
    answer = pool(first, second, 0.5)
    np.testing.assert_allclose(answer, [[0.5, 0.5, 0.0]], atol=1e-9)


def test_each_part_takes_its_features_and_the_blend_is_their_product():
    features, labels = clouds()
    head = fitted(features, labels, first="lr", second="prototype", split=2, share=0.3)
    first = heads.create("lr")
    first.fit(FitData(features[:, :2], labels, 3), np.random.default_rng(1))
    second = heads.create("prototype")
    second.fit(FitData(features[:, 2:], labels, 3), np.random.default_rng(1))
    others, _ = clouds(seed=5)
    parts = first.predict_proba(others[:, :2]), second.predict_proba(others[:, 2:])
    np.testing.assert_allclose(head.answers_of_parts(others), parts)
    np.testing.assert_allclose(head.predict_proba(others), pool(*parts, 0.3))


def test_two_heads_that_see_different_things_are_better_together():
    features, labels = clouds(300)
    others, right = clouds(300, seed=9)
    head = fitted(features, labels, first="lr", second="lr", split=2)
    of_parts = [(answers.argmax(axis=1) == right).mean() for answers in head.answers_of_parts(others)]
    assert (head.predict_proba(others).argmax(axis=1) == right).mean() > max(of_parts) + 0.2


def test_the_shared_classifier_belongs_to_the_features_of_the_encoder():
    features, labels = clouds()
    shared = {"weight": np.eye(3, 2, dtype=np.float32), "bias": np.zeros(3, np.float32)}
    head = fitted(features, labels, shared, first="tuned", second="lr", split=2)
    assert head.arrays["first.weight"].shape == (3, 2)
    assert head.arrays["second.weight"].shape == (3, 3)


def test_a_saved_blend_answers_as_before(tmp_path):
    features, labels = clouds()
    head = fitted(features, labels, first="svm", first_params={"c": 0.5}, second="knn", split=2, share=0.6)
    saved.save(tmp_path, saved.SavedHead(head, "ab" * 32, "fp32", NAMES, {}))
    again = saved.load(tmp_path).head
    np.testing.assert_array_equal(again.predict_proba(features), head.predict_proba(features))
    assert again.params.first_params == {"c": 0.5}


def test_a_new_fit_replaces_both_parts():
    features, labels = clouds()
    head = fitted(features, labels, first="lr", second="lr", split=2)
    before = head.predict_proba(features)
    head.fit(FitData(features, (labels + 1) % 3, 3), np.random.default_rng(1))
    assert np.abs(head.predict_proba(features) - before).max() > 0.5


@pytest.mark.parametrize(
    "params, message",
    [
        ({"first": "blend"}, "a blend is of two other heads"),
        ({"share": 1.5}, "share"),
        ({"split": -1}, "split"),
    ],
)
def test_impossible_parameters_are_refused(params, message):
    with pytest.raises(ConfigError, match=message):
        heads.create("blend", params)


def test_mistakes_in_the_parts_are_found_before_anything_is_fitted():
    with pytest.raises(UnknownName, match="nope"):
        heads.check("blend", {"first": "nope"})
    with pytest.raises(ConfigError, match="neighbour"):
        heads.check("blend", {"second": "knn", "second_params": {"neighbour": 3}})


@pytest.mark.parametrize("split", [5, 100])
def test_a_split_that_leaves_nothing_to_the_second_head_is_refused(split):
    features, labels = clouds()
    with pytest.raises(UsageError, match=f"split = {split}.*5 features"):
        fitted(features, labels, split=split)


def test_the_shared_classifier_of_all_features_is_not_used_for_a_part_of_them():
    features, labels = clouds()
    shared = {"weight": np.ones((3, 5), np.float32), "bias": np.zeros(3, np.float32)}
    with pytest.raises(UsageError, match="no shared classifier"):
        fitted(features, labels, shared, first="tuned", second="lr", split=2)
    assert fitted(features, labels, shared, first="tuned", second="lr").arrays["first.weight"].shape == (3, 5)


def test_the_statistics_of_all_features_are_not_used_for_a_part_of_them():
    features, labels = clouds()
    own = features.astype(np.float64)
    shared = {
        "gram": (own.T @ own / len(own))[np.triu_indices(5)],
        "mean": own.mean(axis=0),
        "sums": np.stack([own[labels == label].sum(axis=0) / len(own) for label in range(3)]),
        "shares": np.full(3, 1 / 3),
    }
    data = FitData(features, labels, 3, statistics=shared)
    whole = heads.create("blend", {"first": "ridge_prior", "second": "lr"})
    whole.fit(data, np.random.default_rng(0))
    assert whole.arrays["first.weight"].shape == (3, 5)
    part = heads.create("blend", {"first": "ridge_prior", "second": "lr", "split": 2})
    with pytest.raises(UsageError, match="no shared statistics"):
        part.fit(data, np.random.default_rng(0))


def test_the_second_head_learns_from_as_many_samples_as_it_may():
    """A neighbour keeps every sample that it has learned from, so they can be counted."""
    features, labels = clouds(300)
    bounded = fitted(features, labels, first="knn", second="knn", split=2, second_samples=50)
    rows = {name: len(array) for name, array in bounded.arrays.items() if array.ndim == 2 and len(array) in (50, 300)}
    assert {name.split(".")[0]: count for name, count in rows.items()} == {"first": 300, "second": 50}
    assert np.isfinite(bounded.predict_proba(features)).all()


def test_a_head_without_arrays_says_what_to_do():
    with pytest.raises(StateError, match="call fit or load"):
        heads.create("blend").answers_of_parts(np.zeros((1, 5), np.float32))
