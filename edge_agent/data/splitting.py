"""Samples divided into those that train and those that test, so that no recording, and no raw sample, is on both sides.

`split` is what a device and a simulated client do with their data. Where recordings are few, some are cut: then the
windows that overlap both parts are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.task import WindowInput
from .base import Samples
from .preprocess import windows_apart

_log = logging.getLogger(__name__)

_LEAST_RECORDINGS = 4
"""Recordings of a class from which on some are held out whole: of two, one may be of the other arm."""


def split(samples: Samples, test_fraction: float, seed: int) -> tuple[Samples, Samples]:
    """Return training and test samples, rows in their original order.

    Without groups: that share of each class, at least one sample of a class on either side where it has two. With
    groups (recordings): that share of the recordings of each class, at least one, and one is kept to train. Recordings
    of a class with fewer than four are cut: the last share of each tests, the first part trains, and the windows
    between them that would overlap both are left out; a recording that is too short, or whose classes would not all be
    left to train, is not cut so. Where groups are whole, some are held out from two of a class on. Of a class that has
    nothing held out then, the end of its part of one recording is, where that leaves some to train.
    """
    if samples.groups is None:
        return _split_by_class(samples, test_fraction, seed)
    # 1. Whole recordings, of the classes that have enough of them.
    is_test = np.isin(samples.groups, sorted(_test_groups(samples, test_fraction, seed)))
    sides = _Sides.of(samples, is_test, test_fraction)
    # 2. The ends of the other recordings.
    if not samples.are_whole:
        tested = np.unique(samples.labels[is_test])
        for rows in sides.recordings:
            if not is_test[rows[0]] and not np.isin(samples.labels[rows], tested).any():
                sides.cut_recording(rows)
    # 3. Of a class that has nothing held out yet, the end of its part of one recording: that with most of it first, and
    #    others only where classes are left without.
    sides.hold_out_ends(most_recordings=1)
    sides.hold_out_ends(most_recordings=len(sides.recordings))
    if not is_test.any():
        count = len(sides.recordings)
        _log.warning("no_test_samples recordings=%d: none can be held out, whole or in part; record more", count)
    return samples.take(np.flatnonzero(sides.is_train)), samples.take(np.flatnonzero(is_test))


def _split_by_class(samples: Samples, test_fraction: float, seed: int) -> tuple[Samples, Samples]:
    """Return training and test samples without recordings: a random share of each class tests."""
    rng = np.random.default_rng(seed)
    is_test = np.zeros(len(samples), bool)
    for label in np.unique(samples.labels):
        rows = rng.permutation(np.flatnonzero(samples.labels == label))
        is_test[rows[: _test_count(len(rows), test_fraction)]] = True
    return samples.take(np.flatnonzero(~is_test)), samples.take(np.flatnonzero(is_test))


@dataclass(frozen=True)
class _Sides:
    """Which samples of recordings train and which test, while some are moved from one side to the other.

    Attributes:
        labels: The labels (n,) of all samples.
        recordings: The rows of each recording, in time order.
        is_train: Which samples (n,) train; it is changed in place.
        is_test: Which samples (n,) test; it is changed in place.
        gap: The windows between both sides that are left out, because they would overlap them.
        fraction: The share that tests.
    """

    labels: np.ndarray
    recordings: Sequence[np.ndarray]
    is_train: np.ndarray
    is_test: np.ndarray
    gap: int
    fraction: float

    @classmethod
    def of(cls, samples: Samples, is_test: np.ndarray, fraction: float) -> _Sides:
        """Return the sides where all samples train that do not test; ``is_test`` (n,) is changed in place."""
        gap = 0
        if isinstance(samples.input, WindowInput):
            gap = windows_apart(samples.input)
        recordings = [np.flatnonzero(samples.groups == group) for group in np.unique(np.asarray(samples.groups))]
        return cls(samples.labels, recordings, ~is_test, is_test, gap, fraction)

    def cut_recording(self, rows: np.ndarray) -> None:
        """Hold out the last share of a recording, if it is long enough and all of its classes are left to train.

        Args:
            rows: The rows (m,) of the recording, in time order.
        """
        if len(rows) < self.gap + 2:
            return
        begin = min(len(rows) - _test_count(len(rows), self.fraction), len(rows) - 1)
        begin = max(begin, self.gap + 1)
        labels_that_train = self.labels[rows[: begin - self.gap]]
        if np.isin(self.labels[rows], labels_that_train).all():
            self.is_train[rows[begin - self.gap :]] = False
            self.is_test[rows[begin:]] = True

    def hold_out_ends(self, most_recordings: int) -> None:
        """Hold out something of each class that has nothing held out yet, where that is possible; the rarest first.

        Args:
            most_recordings: The number of recordings, those with most windows of the class, in which it is tried.
        """
        missing = np.setdiff1d(self.labels, self.labels[self.is_test]).tolist()
        while missing:
            for label in sorted(missing, key=self.labels.tolist().count):
                self._hold_out_end(label, most_recordings)
            still_missing = np.setdiff1d(missing, self.labels[self.is_test]).tolist()
            # The windows that one class has lost may be what another, tried before it, had to keep: it is tried again.
            if len(still_missing) == len(missing):
                return
            missing = still_missing

    def _hold_out_end(self, label: int, most_recordings: int) -> None:
        """Hold out the last windows of a class in the recording with most of them, or in another one."""
        counts = [int((self.is_train[rows] & (self.labels[rows] == label)).sum()) for rows in self.recordings]
        for number in np.argsort(-np.array(counts), kind="stable")[:most_recordings].tolist():
            if self._hold_out_end_in(self.recordings[number], label):
                return

    def _hold_out_end_in(self, rows: np.ndarray, label: int) -> bool:
        """Hold out the last windows of a class in a recording, if some are left to train there, and of every class.

        Args:
            rows: The rows (m,) of the recording, in time order.
            label: The class.

        Returns:
            Whether there are such windows.
        """
        positions = np.flatnonzero(self.is_train[rows] & (self.labels[rows] == label))
        count = len(positions)
        # As many as the share says, or half of that, and so on, until something is left to train.
        size = _test_count(count, self.fraction)
        while size:
            for end in (count, count - self.gap):  # behind the end the only windows of another class may begin
                held = positions[max(0, end - size) : max(0, end)]
                trains = self._trains_without(rows, held)
                keeps = rows[trains[rows]]
                keeps_class_here = bool((self.labels[keeps] == label).any())
                keeps_all_classes = bool(np.isin(self.labels[self.is_train], self.labels[trains]).all())
                if len(held) and keeps_class_here and keeps_all_classes:
                    self.is_train[:] = trains
                    self.is_test[rows[held]] = True
                    return True
            size //= 2
        return False

    def _trains_without(self, rows: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Return which samples (n,) train where the windows at positions ``held`` of a recording test."""
        trains: np.ndarray = self.is_train.copy()
        for position in held:
            trains[rows[max(0, position - self.gap) : position + self.gap + 1]] = False
        return trains


def _test_groups(samples: Samples, test_fraction: float, seed: int) -> set[int]:
    """Return groups to hold out, so many of each class that has several; the rarest class chooses first."""
    rng = np.random.default_rng(seed)
    all_groups = np.asarray(samples.groups)
    groups_by_class = [np.unique(all_groups[samples.labels == label]) for label in np.unique(samples.labels)]
    held_out: set[int] = set()
    for groups in sorted(groups_by_class, key=len):
        if not samples.are_whole and len(groups) < _LEAST_RECORDINGS:
            continue
        # Some of these groups may be held out already, for a class that they hold, too.
        missing = _test_count(len(groups), test_fraction) - len(held_out.intersection(groups.tolist()))
        for group in rng.permutation(groups).tolist():
            if missing <= 0:
                break
            if group not in held_out and _leaves_all_to_train(groups_by_class, held_out | {group}):
                held_out.add(group)
                missing -= 1
    return held_out


def _leaves_all_to_train(groups_by_class: Sequence[np.ndarray], held_out: set[int]) -> bool:
    """Return whether each class has a group that is not held out."""
    return all(set(groups.tolist()) - held_out for groups in groups_by_class)


def _test_count(count: int, fraction: float) -> int:
    """Return how many of ``count`` test: at least one, and one is left to train; none of a single one."""
    if count <= 1:
        return 0
    return min(max(round(count * fraction), 1), count - 1)


def numbered_apart(train: Samples, test: Samples) -> Samples:
    """Return ``test`` with numbers of recordings that ``train`` does not have, because all of them are other ones."""
    if train.groups is None or test.groups is None:
        return test
    return replace(test, groups=test.groups - test.groups.min(initial=0) + train.groups.max(initial=-1) + 1)


def same_sitting(train: Samples, test: Samples) -> float | None:
    """Return the share (0..1) of test samples whose recording is trained on, too.

    None without recordings or samples.
    """
    if train.groups is None or test.groups is None or not len(test):
        return None
    return float(np.isin(test.groups, train.groups).mean())
