from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from edge_agent.core.task import ImageInput, WindowInput
from edge_agent.data import Samples, split, standardised
from edge_agent.data.splitting import numbered_apart, same_sitting


def plain(labels):
    inputs = np.arange(len(labels), dtype=np.float32).reshape(-1, 1, 1, 1) * np.ones((1, 3, 4, 4), np.float32)
    return Samples(inputs, np.array(labels, np.int64), ("a", "b", "c"), ImageInput(height=4, width=4))


def rows(samples):
    return samples.inputs[:, 0, 0, 0].astype(int).tolist()


def test_each_class_gives_its_share():
    train, test = split(plain([0] * 8 + [1] * 4 + [2]), 0.25, seed=1)
    assert np.bincount(test.labels, minlength=3).tolist() == [2, 1, 0]
    assert np.bincount(train.labels, minlength=3).tolist() == [6, 3, 1]
    assert sorted(rows(train) + rows(test)) == list(range(13))


def test_the_seed_decides_and_nothing_else():
    samples = plain([0] * 20)
    assert rows(split(samples, 0.3, 1)[1]) == rows(split(samples, 0.3, 1)[1])
    assert rows(split(samples, 0.3, 1)[1]) != rows(split(samples, 0.3, 2)[1])


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.floats(0.01, 0.99), st.integers(0, 9))
def test_a_class_with_two_samples_is_on_both_sides(labels, fraction, seed):
    train, test = split(plain(labels), fraction, seed)
    assert sorted(rows(train) + rows(test)) == list(range(len(labels)))
    for label in set(labels):
        assert label in train.labels
        assert (label in test.labels) == (labels.count(label) >= 2)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=9),
    st.integers(4, 40),
    st.integers(1, 40),
    st.floats(0.05, 0.9),
)
def test_no_recording_is_on_both_sides_but_of_a_class_of_few_and_no_sample_ever(recordings, length, stride, fraction):
    """Every window is followed to the raw samples that it covers."""
    counts, classes = zip(*recordings, strict=True)
    spec = WindowInput(channels=1, length=length, stride=stride)
    groups = np.repeat(np.arange(len(counts)), counts)
    labels = np.repeat(classes, counts)
    starts = np.concatenate([np.arange(count) * stride for count in counts])
    inputs = np.broadcast_to(starts[:, None, None], (len(starts), 1, length)).astype(np.float32)
    train, test = split(Samples(inputs, labels, ("a", "b", "c"), spec, groups), fraction, 0)
    assert set(train.labels) == set(labels), "each class has something to learn from"
    for group, label in enumerate(classes):
        learned, held = (part.inputs[part.groups == group, 0, 0] for part in (train, test))
        if classes.count(label) > 3:
            assert not (len(learned) and len(held))
            assert label in test.labels
        elif len(held):
            assert len(learned) >= 1
            assert learned.max() + length <= held.min()


def test_sessions_of_all_classes_are_held_out_whole_and_a_single_one_is_cut():
    labels = np.tile([0, 1, 2], 16)
    spec = WindowInput(channels=1, length=10, stride=10)
    four = Samples(np.zeros((48, 1, 10), np.float32), labels, ("a", "b", "c"), spec, np.repeat([4, 5, 7, 9], 12))
    train, test = split(four, 0.25, 0)
    assert {*train.groups.tolist()} ^ {*test.groups.tolist()} == {4, 5, 7, 9}
    assert len(test) == 12
    train, test = split(four.take(np.arange(12)), 0.25, 0)
    assert (len(train), len(test)) == (9, 3)


def test_a_recording_of_ten_windows_by_hand():
    """Length 100, stride 50: one window lies between. A quarter of 10 is 2 (banker's rounding of 2.5): 7 + 1 + 2."""
    spec = WindowInput(channels=1, length=100, stride=50)
    inputs = np.arange(10, dtype=np.float32)[:, None, None] * np.ones((1, 1, 100), np.float32)
    samples = Samples(inputs, np.zeros(10, np.int64), ("a",), spec, np.zeros(10, np.int64))
    train, test = split(samples, 0.25, 0)
    assert train.inputs[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert test.inputs[:, 0, 0].tolist() == [8, 9]


def session(counts, groups=None):
    """Windows of one recording, or of those in ``groups``: so many of each class, one class after the other."""
    labels = np.repeat(np.arange(len(counts)), counts)
    spec = WindowInput(channels=1, length=100, stride=50)
    inputs = np.arange(len(labels), dtype=np.float32)[:, None, None] * np.ones((1, 1, 100), np.float32)
    return Samples(inputs, labels, ("a", "b", "c"), spec, np.zeros(len(labels), np.int64) if groups is None else groups)


def test_each_class_of_a_single_recording_is_held_out_by_hand():
    """The end of the recording is of class 1 alone: 9, 10, 11, so class 0 gives its own end, 4 and 5, and 3, 6 and 8
    lie between what trains and what tests."""
    train, test = split(session([6, 6]), 0.25, 0)
    assert train.inputs[:, 0, 0].tolist() == [0, 1, 2, 7]
    assert test.inputs[:, 0, 0].tolist() == [4, 5, 9, 10, 11]


def test_a_recording_with_numbers_to_predict_is_cut_in_time():
    samples = replace(session([10]), labels=np.full(10, -1))
    assert [len(part) for part in split(samples, 0.25, 0)] == [7, 2]


def test_a_class_at_the_end_of_a_recording_has_something_to_learn_from():
    """Of 12 windows the last 3 were held out, all of class 1. Now the rarer class gives 11, and 10 lies between; the
    other one gives 6 and 7, because 7 and 8 would leave out 9, too, the only one of class 1 to learn from."""
    train, test = split(session([9, 3]), 0.25, 0)
    assert train.inputs[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 9]
    assert test.inputs[:, 0, 0].tolist() == [6, 7, 11]


def test_a_class_in_one_session_beside_a_class_of_many_is_held_out_too():
    """Class 0 is in five sessions, of which one is held out whole; class 1 is only in session 4."""
    samples = session([20, 8], np.repeat([0, 1, 2, 3, 4], [4, 4, 4, 4, 12]))
    train, test = split(samples, 0.25, 0)
    assert 4 not in test.groups[test.labels == 0]
    assert test.inputs[test.labels == 1, 0, 0].tolist() == [26, 27]
    assert train.inputs[train.labels == 1, 0, 0].tolist() == [20, 21, 22, 23, 24]
    train, test = split(replace(samples, are_whole=True), 0.25, 0)
    assert test.inputs[test.labels == 1, 0, 0].tolist() == [26, 27], "the only recording of a class is cut"
    assert {*train.groups.tolist()} & {*test.groups.tolist()} == {4}
    assert same_sitting(train, test) == 2 / 6


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=25), min_size=1, max_size=6),
    st.integers(4, 30),
    st.integers(1, 30),
    st.floats(0.05, 0.9),
)
@example([[0, 1, 1, 2, 2, 1], [2, 0, 0, 0, 2, 0, 1, 1, 0]], 4, 1, 0.25)
@example([[1, 2, 1, 1, 1, 0, 0], [1, 0, 0, 1, 0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 0, 1, 1], [2, 1, 1, 0, 1, 2]], 30, 19, 0.73)
@example([[0, 0], [2, 1, 2, 1], [0, 1, 2, 1, 0, 0]], 30, 28, 0.75)
def test_of_recordings_of_several_classes_every_class_is_held_out_where_that_is_possible(
    found, length, stride, fraction
):
    """Every window is followed to the raw samples that it covers; a twin tries whether one more could be held out."""
    spec = WindowInput(channels=1, length=length, stride=stride)
    groups = np.repeat(np.arange(len(found)), [len(one) for one in found])
    labels = np.concatenate(found)
    starts = np.concatenate([np.arange(len(one)) * stride for one in found])
    samples = Samples(np.zeros((len(labels), 1, length), np.float32), labels, ("a", "b", "c"), spec, groups)
    samples.inputs[:, 0, 0] = np.arange(len(labels))
    train, test = (part.inputs[:, 0, 0].astype(int) for part in split(samples, fraction, 0))
    assert not {*train} & {*test}

    def overlap(one, other):
        return groups[one] == groups[other] and abs(starts[one] - starts[other]) < length

    assert not any(overlap(one, other) for one in train for other in test)
    assert set(labels[train]) == set(labels), "each class has something to learn from"
    for label in {*labels} - {*labels[test]}:
        own = train[labels[train] == label]
        for group in {*groups[own]}:
            last = own[groups[own] == group][-1]
            left = [row for row in train if not overlap(row, last)]
            here = [row for row in left if groups[row] == group and labels[row] == label]
            assert not here or set(labels[left]) != set(labels), "its last window could have been held out"


def test_a_class_is_tried_again_once_others_have_given_their_ends():
    """Three windows on either side overlap one. Class 2 is the rarest: 4, its last in the first recording, would leave
    it nothing there. Class 0 gives 14, and 11 to 13 lie between; class 1 gives 5, without 2 to 4. Now all that is left
    of class 2 is 6 and 10, of which it gives 10.
    """
    labels = np.array([0, 1, 1, 2, 2, 1, 2, 0, 0, 0, 2, 0, 1, 1, 0])
    spec = WindowInput(channels=1, length=4, stride=1)
    inputs = np.arange(15, dtype=np.float32)[:, None, None] * np.ones((1, 1, 4), np.float32)
    samples = Samples(inputs, labels, ("a", "b", "c"), spec, np.repeat([0, 1], [6, 9]))
    train, test = split(samples, 0.25, 0)
    assert train.inputs[:, 0, 0].tolist() == [0, 1, 6]
    assert test.inputs[:, 0, 0].tolist() == [5, 10, 14]


def test_recordings_too_short_to_hold_back_train_only(caplog):
    spec = WindowInput(channels=1, length=100, stride=50)
    samples = Samples(np.zeros((2, 1, 100), np.float32), np.zeros(2, np.int64), ("a",), spec, np.zeros(2, np.int64))
    train, test = split(samples, 0.25, 0)
    assert (len(train), len(test)) == (2, 0)
    assert "no_test_samples" in caplog.text


def test_the_estimated_spec_makes_mean_zero_and_spread_one():
    rng = np.random.default_rng(0)
    raw = rng.normal([[1], [-2]], [[3], [0.5]], (200, 2, 16))
    old = WindowInput(channels=2, length=16, mean=(0.5,), std=(2.0,))
    samples = Samples(((raw - 0.5) / 2).astype(np.float32), np.zeros(200, np.int64), ("a",), old)
    new = standardised(samples)
    assert np.allclose(new.mean, raw.mean(axis=(0, 2)), atol=1e-4)
    assert np.allclose(new.std, raw.std(axis=(0, 2)), atol=1e-4)


def test_a_constant_channel_keeps_its_spread():
    samples = Samples(np.ones((3, 3, 4, 4), np.float32), np.zeros(3, np.int64), ("a",), ImageInput(height=4, width=4))
    assert standardised(samples).std == (0.5, 0.5, 0.5)


def test_the_digest_follows_the_inputs():
    one = plain([0, 1])
    two = plain([0, 1])
    assert one.digest == two.digest
    two.inputs[0, 0, 0, 0] += 1
    assert one.digest != two.digest
    assert one.digest != one.take(np.array([0])).digest


def test_recordings_of_another_source_are_of_another_sitting():
    train = session([10])
    test = session([6])
    assert same_sitting(train, test) == 1.0
    assert same_sitting(train, numbered_apart(train, test)) == 0.0
    assert same_sitting(train, test.take(np.arange(0))) is None
    assert same_sitting(replace(train, groups=None), test) is None
