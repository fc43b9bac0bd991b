"""What clients say about their classes: exchanged, too long or too many, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from paper_methods import fedpac_update

from coordinator.config import NO_BOUNDS, AggregationConfig
from coordinator.rounds.aggregation import aggregate, notes
from coordinator.rounds.class_statistics import EXCHANGED, find_statistic_bounds
from edge_agent import methods
from edge_agent.methods import Update
from edge_agent.methods.values import ClassStatistics

DECLARED = ClassStatistics(means=("extra.means",), counts="extra.counts")
CLASSES = np.eye(3, 4) + 0.5
"""Three classes whose features share a direction."""


def sent(client, means, counts=(10, 10, 10)):
    arrays = {"extra.means": np.array(means, np.float32), "extra.counts": np.array(counts)}
    return Update(client, 30.0, arrays)


def others(shift=0.0):
    """Two honest clients, one of whose encoders has moved all features alike."""
    return [sent("a", CLASSES), sent("b", CLASSES + shift)]


def bounds_of(*updates, **config):
    return find_statistic_bounds(DECLARED, lambda: updates, AggregationConfig(**config))


def test_honest_class_means_stay_as_they_are_however_an_encoder_has_moved_them_all():
    assert bounds_of(*others(shift=[0, 0, 0, 0.3]), sent("c", CLASSES)).corrections == {}


@pytest.mark.parametrize("length", [1, 4.9])
def test_who_exchanges_its_classes_is_left_out_and_suspect_at_any_length(length):
    """Each row is that of another class: cosine 1 to that one, -0.5 to its own, a margin of -1.5."""
    bounds = bounds_of(*others(), sent("c", CLASSES), sent("d", length * np.roll(CLASSES, 1, axis=0)))
    assert bounds.corrections.keys() == {"d"}
    assert bounds.suspects["d"].endswith(": -1.50")
    assert EXCHANGED > -1.5
    applied = bounds.apply(sent("d", CLASSES)).tensors
    assert not applied["extra.means"].any()
    assert not applied["extra.counts"].any()


def test_of_four_the_one_that_lies_does_not_make_an_honest_one_look_like_a_liar():
    """Class 3 is held by c and the liar alone: by itself c's would be nearer to class 0 of the others."""
    four = np.eye(4) + 0.5
    c = np.where(np.array([1, 0, 0, 1])[:, None] > 0, four, 0)
    updates = [
        sent("a", four * [[1], [1], [1], [0]], (10, 10, 10, 0)),
        sent("b", four * [[1], [1], [1], [0]], (10, 10, 10, 0)),
        sent("c", c, (10, 0, 0, 10)),
        sent("d", np.roll(four, 1, axis=0), (10, 10, 10, 10)),
    ]
    bounds = bounds_of(*updates)
    assert [agent for agent, correction in bounds.corrections.items() if correction.is_left_out] == ["d"]


def test_a_class_that_is_nearer_to_another_one_is_left_out_alone():
    wide = np.eye(6) + 0.5
    wrong = wide.copy()
    wrong[0] = wide[1]
    even = (10,) * 6
    bounds = bounds_of(*(sent(name, wide, even) for name in "abc"), sent("d", wrong, even))
    assert bounds.corrections["d"].classes_left_out == (0,)
    assert not bounds.suspects
    assert bounds.apply(sent("d", wrong, even)).tensors["extra.counts"].tolist() == [0, 10, 10, 10, 10, 10]


def test_a_class_that_is_a_little_nearer_to_another_one_stays():
    """Few samples do so to honest clients: moved by 0.55 of the way, it has a margin of about -0.1 / 0.7."""
    wide = np.eye(6) + 0.5
    moved = wide.copy()
    moved[0] = 0.45 * wide[0] + 0.55 * wide[1]
    even = (10,) * 6
    bounds = bounds_of(*(sent(name, wide, even) for name in "abc"), sent("d", moved, even))
    assert bounds.corrections == {}


def test_where_half_of_the_clients_exchange_their_classes_nothing_is_left_out():
    rolled = np.roll(CLASSES, 1, axis=0)
    bounds = bounds_of(sent("a", CLASSES), sent("b", CLASSES), sent("c", rolled), sent("d", rolled))
    assert bounds.corrections == {}
    assert not bounds.suspects


def test_a_class_mean_of_more_than_twice_the_median_length_has_that_length():
    longer = CLASSES * [[3], [1], [1]]
    bounds = bounds_of(*others(), sent("c", longer))
    np.testing.assert_allclose(bounds.apply(sent("c", longer)).tensors["extra.means"], CLASSES, rtol=1e-6)
    assert not bounds.suspects


def test_counts_of_one_client_are_at_most_a_third_of_all():
    """Four clients of 30 samples: the fifth declares 300, of which 60 count, half of the others' 120."""
    honest = [sent(name, CLASSES) for name in "abcd"]
    bounds = bounds_of(*honest, sent("e", CLASSES, (100, 100, 100)))
    assert bounds.apply(sent("e", CLASSES, (100, 100, 100))).tensors["extra.counts"].tolist() == [20, 20, 20]


def test_of_a_client_with_a_single_class_only_that_class_is_left_out():
    single = np.zeros((3, 4))
    single[0] = CLASSES[1]
    bounds = bounds_of(*others(), sent("c", CLASSES), sent("d", single, (10, 0, 0)))
    assert bounds.corrections["d"].classes_left_out == (0,)
    assert not bounds.suspects


def test_a_journal_of_an_earlier_version_has_no_such_bounds():
    exchanged = sent("d", np.roll(CLASSES, 1, axis=0))
    assert not bounds_of(*others(), sent("c", CLASSES), exchanged, **NO_BOUNDS).corrections


def test_a_client_of_fedpac_that_exchanges_its_classes_changes_no_centroid_and_is_named():
    """One of four, 4.9 times as long, for five times the counts: the centroids were its own before."""
    square = np.float32([[1, 0], [0, 1]])
    updates = [
        fedpac_update(name, h=0.5 * square + 1, centroids=square + 1, counts=(5, 5), head=square) for name in "abc"
    ]
    lie = 4.9 * np.roll(square + 1, 1, axis=0)
    updates.append(
        fedpac_update("d", h=0.5 * np.roll(square, 1, axis=0) + 1, centroids=lie, counts=(25, 25), head=square)
    )
    method = methods.create("fedpac", {})
    state = {"encoder.w": np.float32([0.5])}
    after, decisions = aggregate(method, state, lambda: updates, AggregationConfig(), state)
    np.testing.assert_allclose(after["extra.centroids"], square + 1, rtol=1e-6)
    named = notes(decisions.to_fact())
    assert named.keys() == {"d"}
    assert "class statistics not used, suspect: its classes are nearer to other classes of the others" in named["d"]


def test_spherefed_calibrates_without_the_one_that_exchanges_its_classes():
    method = methods.create("spherefed", {})
    rows = np.float64([[1, 0, 0], [0, 1, 0]])
    gram = (10 * rows.T @ rows)[np.triu_indices(3)]
    honest = {"encoder.w": np.float32([1]), "head.weight": np.float32(rows), "extra.gram": gram}
    updates = [Update(name, 20.0, {**honest, "extra.cross": 10 * rows.T}) for name in "abc"]
    updates.append(Update("d", 20.0, {**honest, "extra.cross": 10 * rows[::-1].T}))
    state = {name: honest[name] for name in ("encoder.w", "head.weight")}
    after, decisions = aggregate(method, state, lambda: updates, AggregationConfig(), state)
    # 30 samples of each class, and a ridge of 1: W = 30 / 31 on each class's own axis.
    np.testing.assert_allclose(after["head.weight"], rows * 30 / 31, rtol=1e-6)
    assert decisions.suspects.keys() == {"d"}


def test_prototypes_of_fedproto_are_bounded_as_class_means_and_not_as_a_change_of_the_model():
    method = methods.create("fedproto", {})
    counts = np.array([10, 10, 10])
    state = {"prototypes.means": np.float32(9 * CLASSES), "prototypes.counts": counts}
    honest = {"prototypes.means": np.float32(CLASSES), "prototypes.counts": counts}
    updates = [Update(name, 30.0, honest) for name in "abc"]
    lie = {**honest, "prototypes.means": np.float32(4.9 * np.roll(CLASSES, 1, axis=0))}
    updates.append(Update("d", 30.0, lie))
    after, decisions = aggregate(method, state, lambda: updates, AggregationConfig(), state)
    np.testing.assert_allclose(after["prototypes.means"], CLASSES, rtol=1e-6)
    assert decisions.suspects.keys() == {"d"}
    assert not decisions.clipped
