"""Measures of features against hand-computed numbers and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.research.analyze import measures, results
from coordinator.research.analyze import measures as embedding

# --- class separation ------------------------------------------------------------------------------------------------


def separation_by_pairs(features, labels):
    """Kornblith et al. 2021, Eq. 11 as it is printed: sums over all pairs, classes one by one."""

    def distance(a, b):
        return 1 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b))

    def between(one, other):
        rows = features[labels == one]
        columns = features[labels == other]
        return sum(distance(a, b) for a in rows for b in columns) / (len(rows) * len(columns))

    classes = sorted(set(labels.tolist()))
    within = sum(between(k, k) for k in classes) / len(classes)
    return 1 - within / (sum(between(j, k) for j in classes for k in classes) / len(classes) ** 2)


def test_separation_is_one_where_classes_are_points_and_less_where_they_are_not():
    labels = np.array([0, 0, 1, 1])
    points = np.array([[2.0, 0], [1, 0], [0, 3], [0, 1]])
    assert measures.class_separation(points, labels) == pytest.approx(1.0)
    # Within: class 0 mean of (0, 1, 1, 0) = 1/2, class 1 zero. Overall: (1/2 + 0 + 2 * 3/2) / 4 = 7/8.
    points = np.array([[1.0, 0], [0, 1], [-1, 0], [-5, 0]])
    assert measures.class_separation(points, labels) == pytest.approx(1 - 0.25 / 0.875)


@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(2, 6))
@settings(max_examples=30)
def test_separation_is_that_of_all_pairs_one_by_one(seed, classes, size):
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, 7)])
    features = rng.normal(size=(len(labels), size))
    expected = separation_by_pairs(features, labels)
    assert measures.class_separation(features, labels) == pytest.approx(expected, abs=1e-10)
    turn = np.linalg.qr(rng.normal(size=(size, size)))[0]
    assert measures.class_separation(7 * features @ turn, labels) == pytest.approx(expected, abs=1e-10)


def test_separation_counts_classes_alike_however_many_samples_they_have():
    features = np.array([[1.0, 0], [0, 1], [-1, 0]])
    labels = np.array([0, 0, 1])
    more = measures.class_separation(np.repeat(features, [1, 1, 9], axis=0), np.repeat(labels, [1, 1, 9]))
    assert more == pytest.approx(measures.class_separation(features, labels))


@pytest.mark.parametrize(
    "features, labels",
    [
        (np.ones((3, 2)), np.zeros(3, int)),
        (np.ones((4, 2)), np.array([0, 0, 1, 1])),
        (np.ones((0, 2)), np.zeros(0, int)),
    ],
)
def test_separation_is_not_defined_for_one_class_or_one_direction(features, labels):
    assert measures.class_separation(features, labels) is None


def test_samples_without_features_are_at_distance_one_from_everything():
    features = np.array([[0.0, 0], [0, 0], [1, 0], [1, 0]])
    # Within: class 0 has distance 1 (also to itself), class 1 zero: 1/2. Overall: (1 + 0 + 1 + 1) / 4.
    assert measures.class_separation(features, np.array([0, 0, 1, 1])) == pytest.approx(1 - 0.5 / 0.75)


# --- CKA -------------------------------------------------------------------------------------------------------------


def cka_by_hsic(first, second):
    """With kernels and centring matrices, as Gretton's HSIC is written: tr(K H L H) / (n - 1)^2."""
    count = len(first)
    centre = np.eye(count) - np.ones((count, count)) / count

    def hsic(a, b):
        return np.trace((a @ a.T) @ centre @ (b @ b.T) @ centre) / (count - 1) ** 2

    return hsic(first, second) / math.sqrt(hsic(first, first) * hsic(second, second))


@given(st.integers(0, 10_000), st.integers(3, 12), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=40)
def test_cka_is_that_of_hsic_and_of_the_features_themselves(seed, count, one, other):
    rng = np.random.default_rng(seed)
    first = rng.normal(size=(count, one)) + 5
    second = rng.normal(size=(count, other))
    found = measures.linear_cka(first, second)
    assert found == pytest.approx(cka_by_hsic(first, second), abs=1e-5)
    x = first - first.mean(axis=0)
    y = second - second.mean(axis=0)
    by_features = np.square(y.T @ x).sum() / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y)
    assert found == pytest.approx(by_features, abs=1e-5)


def test_cka_of_single_features_is_their_squared_correlation():
    """Centred: (-1, 0, 1) and (-5/3, -2/3, 7/3); 4^2 / (2 * 78/9) = 0.923077."""
    found = measures.linear_cka(np.array([[0.0], [1], [2]]), np.array([[0.0], [1], [4]]))
    assert found == pytest.approx(0.923077, abs=1e-5)


@given(st.integers(0, 10_000), st.floats(1e-3, 1e3))
@settings(max_examples=20)
def test_cka_knows_neither_rotation_nor_scale_nor_shift(seed, scale):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(15, 4))
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    assert measures.linear_cka(features, scale * features @ turn + 3) == pytest.approx(1.0, abs=1e-5)
    stretched = features * np.array([9.0, 1, 1, 0.1])
    assert measures.linear_cka(features, stretched) < 0.999


def test_a_matrix_of_cka_has_no_numbers_where_features_do_not_vary():
    rng = np.random.default_rng(0)
    kinds = [rng.normal(size=(9, 3)), np.full((9, 2), 0.1), rng.normal(size=(9, 5))]
    found = measures.cka_matrix(kinds)
    assert np.isnan(found[1]).all()
    assert np.isnan(found[:, 1]).all()
    assert found[0, 2] == found[2, 0] == pytest.approx(measures.linear_cka(kinds[0], kinds[2]), abs=1e-6)
    assert measures.mean_of_pairs(found) == pytest.approx(found[0, 2])
    assert measures.linear_cka(kinds[0], kinds[1]) is None
    assert measures.mean_of_pairs(np.array([[1.0]])) is None


# --- FedPick's -------------------------------------------------------------------------------------------------------


def test_sparsity_counts_components_of_normalised_features():
    """(3, 4, 0, 0) / 5 = (.6, .8, 0, 0)."""
    features = np.array([[3.0, -4, 0, 0]])
    assert measures.sparsity_ratio(features, 0.7) == 0.75
    assert measures.sparsity_ratio(features, 0.01) == 0.5
    assert measures.sparsity_ratio(1000 * features, 0.7) == 0.75
    assert measures.sparsity_ratio(np.array([[3.0, 4], [0, 0]]), 0.01) == 0.5


def test_mean_fisher_leaves_out_and_counts_what_is_infinite():
    """First feature: means 1 and 5, overall 3: 2*4 + 2*4 = 16 between, 2*1 + 2*1 = 4 within. Second: within is 0."""
    features = np.array([[0.0, 1, 7], [2, 1, 7], [4, 2, 7], [6, 2, 7]])
    labels = np.array([0, 0, 1, 1])
    assert measures.mean_fisher(features[:, :1], labels) == (pytest.approx(4.0), 0)
    assert measures.mean_fisher(features, labels) == (pytest.approx(2.0), 1)
    assert measures.mean_fisher(features[:, 1:2], labels) is None
    assert measures.mean_fisher(features, np.zeros(4, int)) is None


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_overlap_is_set_arithmetic(pairs):
    first, second = (np.array([pair[side] for pair in pairs]) for side in (0, 1))
    a, b = ({place for place, chosen in enumerate(one) if chosen} for one in (first, second))
    expected = len(a & b) / len(a | b) if a | b else 1.0
    assert measures.overlap(first, second) == expected
    matrix = measures.overlap_matrix([first, second])
    assert matrix.tolist() == [[1.0, expected], [expected, 1.0]]


def test_what_never_scores_is_never_important():
    assert measures.important(np.array([0.0, 3, 2, 0, 0, 0]), 0.5).nonzero()[0].tolist() == [1, 2]
    assert measures.important(np.array([1.0, 3, 2, np.inf]), 0.5).nonzero()[0].tolist() == [1, 3]
    assert not measures.important(np.zeros(4), 0.5).any()


# --- classes, groups, shares -----------------------------------------------------------------------------------------


def test_accuracies_of_classes_are_shares_of_each_class():
    found = measures.class_accuracies(np.array([0, 1, 1, 2, 0]), np.array([0, 0, 1, 1, 3]))
    assert found == {0: 0.5, 1: 0.5, 3: 0.0}


@pytest.mark.parametrize(
    "counts, head, tail",
    [
        ([172, 12, 172, 12, 172], (0, 2, 4), (1, 3)),
        ([5, 0, 5], (0, 2), ()),
        ([1, 9, 3, 0], (1,), (2, 0)),
        ([0, 0], (), ()),
    ],
)
def test_head_classes_have_as_many_samples_as_the_mean_class_or_more(counts, head, tail):
    assert measures.head_and_tail(np.array(counts)) == (head, tail)


def test_the_share_of_a_row_that_falls_on_its_group():
    weights = np.array([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.0, 0.0, 1.0]])
    found = measures.group_mass(weights, ["x", "x", "y"])
    assert found["same_group"] == pytest.approx((0.8 + 0.9 + 1.0) / 3)
    assert found["own"] == pytest.approx((0.5 + 0.8 + 1.0) / 3)
    assert found["if_even"] == pytest.approx((2 / 3 + 2 / 3 + 1 / 3) / 3)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(1, 100))
def test_samples_are_taken_as_evenly_as_can_be(counts, limit):
    held = {f"c{place}": count for place, count in enumerate(counts)}
    taken = measures.spread_evenly(held, limit)
    assert sum(taken.values()) == min(limit, sum(counts))
    assert all(0 <= taken[name] <= held[name] for name in held)
    most = max(taken.values())
    assert all(taken[name] >= most - 1 for name in held if taken[name] < held[name])


# --- t-SNE -----------------------------------------------------------------------------------------------------------


def test_points_have_a_row_for_each_sample_and_are_those_of_the_seed():
    features = np.random.default_rng(0).normal(size=(14, 6)).astype(np.float32)
    found = embedding.tsne(features, 30.0, 1)
    assert found.shape == (14, 2)
    assert np.isfinite(found).all()
    assert np.abs(found.mean(axis=0)).max() < 1e-3 * np.abs(found).max()
    assert (found == embedding.tsne(features, 30.0, 1)).all()


def test_few_samples_and_features_that_do_not_vary():
    assert embedding.tsne(np.ones((4, 3), np.float32), 30.0, 0) is None
    assert embedding.tsne(np.zeros((6, 3), np.float32), 30.0, 0).shape == (6, 2)
    assert embedding.tsne(np.arange(6.0, dtype=np.float32)[:, None], 30.0, 0).shape == (6, 2)


@pytest.mark.parametrize(
    "wish, samples, expected", [(30, 300, 30), (30, 31, 10), (30, 5, 4 / 3), (2, 300, 2), (30, 2, 1)]
)
def test_perplexity_is_bounded_by_a_third_of_the_neighbours(wish, samples, expected):
    assert embedding.bounded_perplexity(wish, samples) == pytest.approx(expected)


# --- communication ---------------------------------------------------------------------------------------------------


def line(number, personal, shared):
    acc = {"personal": personal, "global": shared}
    return {"kind": "round", "round": number, "agents": sorted(personal), "bytes_up": 100, "bytes_down": 50, "acc": acc}


METRICS = [
    line(1, {"a": 0.2, "b": 0.4}, {"a": 0.1}),
    line(2, {"a": 0.5, "b": 0.7}, {"a": 0.3}),
    line(3, {"a": 0.7, "b": 0.7}, {}),
    {"kind": "agent", "id": "a", "acc": {"personal": 0.9, "global": 0.4, "local": 0.99}},
    {"kind": "agent", "id": "b", "acc": {"personal": 0.8}},
]


@pytest.mark.parametrize("target, rounds, acc", [(0.3, 0, 0.3), (0.6, 1, 0.6), (0.61, 2, 0.7), (0.85, 3, 0.85)])
def test_a_target_costs_the_rounds_that_the_model_had_behind_it(target, rounds, acc):
    """What agents tell in round r is of the model that r - 1 rounds have made."""
    found = results.communication("run-0001", METRICS, [target])
    one = next(one for one in found["targets"] if one["scope"] == "personal")
    assert (one["rounds_done"], one["acc"]) == (rounds, pytest.approx(acc))
    assert (one["bytes_up"], one["bytes_down"], one["bytes_per_agent"]) == (100 * rounds, 50 * rounds, 75 * rounds)


def test_a_target_that_was_not_reached_tells_the_best():
    found = results.communication("run-0001", METRICS, [0.9])
    assert [(one["scope"], one["reached"], one["best"]) for one in found["targets"]] == [
        ("global", False, pytest.approx(0.4)),
        ("personal", False, pytest.approx(0.85)),
    ]
    assert (found["bytes_up"], found["bytes_down"], found["rounds"], found["agents"]) == (300, 150, 3, 2)


def test_without_rounds_there_is_nothing_to_tell():
    assert results.communication("run-0001", [], [0.5]) is None
