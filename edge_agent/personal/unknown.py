"""Inputs that are unlike all training samples: the rule that decides, and how often it misses them.

Which of the `detectors` a device uses is found by leaving out each of its classes in turn: the one that misses fewer
inputs of the class that it was not shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..core import formats
from ..core.errors import StateError
from ..core.graph import DOUBLE, FLOAT, Graph, Value
from ..core.task import Tensors
from .detectors import DETECTORS, NEIGHBOURS, ClassMeans, Detector, NearestRows, distinct, part_of, unit

MOST_ROWS = 4096
"""Training samples that an unknown rule holds, or what its rate needs; of more, a random part."""

MOST_CLASSES = 10_000
"""No head knows more classes."""

MOST_LEFT_OUT = 6
"""Classes that are left out in turn to estimate misses; of more, a random part."""

MOST_FOR_MISSES = 256
"""Training samples by which misses are estimated; of more, a random part."""


@dataclass(frozen=True)
class Misses:
    """How often inputs of a class that a head does not know would be taken for one that it knows.

    Attributes:
        shares: The share that was missed of each class that was left out in turn, 0..1; one or more.
    """

    shares: tuple[float, ...]

    def check(self) -> None:
        """Check what was read from a file.

        Raises:
            StateError: There are no shares, or one is none.
        """
        if not self.shares or not all(0 <= share <= 1 for share in self.shares):
            raise StateError(f"confidence: misses {self.shares}, expected one or more shares of 0 to 1")

    @property
    def share(self) -> float:
        """The mean share, 0..1."""
        return sum(self.shares) / len(self.shares)

    @property
    def text(self) -> str:
        """The mean and the extremes, for people."""
        mean, least, most = (formats.percent(share) for share in (self.share, min(self.shares), max(self.shares)))
        extremes = "as" if least == most else f"{least} to {most}"
        classes = f"{len(self.shares)} class{'es' * (len(self.shares) > 1)}"
        return f"misses about {mean} of inputs of an unknown class ({extremes} of {classes} left out in turn)"


@dataclass(frozen=True)
class UnknownRule:
    """Inputs are unknown when they are stranger than nearly all training samples would be if they were new.

    Attributes:
        rows: Features of the training samples, of length 1, (n, d) float32.
        threshold: The score of the detector above which an input is unknown.
        rate: The false-alarm rate that was asked for, 0..1; above 0.
        detector: What scores inputs.
        groups: The recording of each row, (n,) int64; None: each sample is one by itself.
        labels: The class of each row, (n,) int64; None: an earlier version saved the rule.
        misses: How many inputs of a further class it would miss; None: too few classes or samples to say.
    """

    rows: np.ndarray
    threshold: float
    rate: float
    detector: Detector
    groups: np.ndarray | None = None
    labels: np.ndarray | None = None
    misses: Misses | None = None

    @classmethod
    def fit(
        cls,
        features: np.ndarray,
        rate: float,
        groups: np.ndarray | None = None,
        labels: np.ndarray | None = None,
        detectors: Sequence[type[Detector]] = DETECTORS,
    ) -> UnknownRule | None:
        """Return the rule for ``features`` (n, d), or None where ``rate`` cannot be estimated from so few.

        Each sample is scored as if it were new: without its ``groups`` (n,), recordings, where there are several. The
        threshold is the smallest one with at most ``rate`` expected false alarms on further samples of the same kind
        (split-conformal quantile), so at least 1 / rate - 1 samples are needed. With ``labels`` (n,), classes, the
        detector is the one of ``detectors`` that misses fewer inputs of classes left out.
        """
        if len(features) < least_for(rate):
            return None
        # Without several recordings each sample is a group of its own.
        row_groups = groups
        if row_groups is None or len(distinct(row_groups)) < 2:
            row_groups = np.arange(len(features))
        # Less their mean, AUROC rises by 0.02, but samples of one class no longer tell what is far from all of them.
        rows = unit(features)
        part = part_of(len(rows), max(MOST_ROWS, least_for(rate)))
        rows = rows[part]
        row_groups = row_groups[part].astype(np.int64)
        row_labels = np.zeros(len(rows), np.int64) if labels is None else labels[part].astype(np.int64)
        kind, misses = _choose(detectors, rows, row_labels, row_groups, rate)
        detector = kind.fit(rows, row_labels)
        threshold = _threshold(detector.score_as_new(rows, row_labels, row_groups), rate)
        has_recordings = len(distinct(row_groups)) < len(rows)
        return cls(
            rows,
            threshold,
            rate,
            detector,
            row_groups if has_recordings else None,
            None if labels is None else row_labels,
            misses,
        )

    def check(self, feature_dim: int) -> None:
        """Check what was read from a file, for features of ``feature_dim`` values.

        Raises:
            StateError: The arrays do not belong together, or have values out of range.
        """
        if self.rows.ndim != 2 or self.rows.shape[1] != feature_dim or not len(self.rows):
            raise StateError(f"confidence: rows {self.rows.shape}, expected (n, {feature_dim}) with one row or more")
        if not (math.isfinite(self.threshold) and 0 < self.rate < 1):
            raise StateError(
                f"confidence: threshold {self.threshold} and rate {self.rate} of unknown inputs, expected a number and "
                "one above 0 and below 1"
            )
        count = len(self.rows)
        if self.groups is not None:
            _check_integers("groups", self.groups, count)
        if self.labels is not None:
            _check_integers("labels", self.labels, count)
            if not 0 <= self.labels.min() <= self.labels.max() < MOST_CLASSES:
                raise StateError(f"confidence: labels up to {self.labels.max()}, expected 0 to {MOST_CLASSES - 1}")
        if self.misses is not None:
            self.misses.check()
        self.detector.check(feature_dim)

    @property
    def tells_apart(self) -> bool:
        """Whether inputs of a further class would be marked clearly more often than known ones, as far as is known."""
        return self.misses is None or 1 - self.misses.share > 2 * self.rate

    @property
    def misses_text(self) -> str:
        """What is known of its misses, for people."""
        if self.misses is None:
            return "misses cannot be estimated: there is one class, or too few samples of others"
        if not self.tells_apart:
            marked = formats.percent(1 - self.misses.share)
            return (
                f"unknown inputs cannot be told apart here: of classes left out in turn {marked} were marked, of known "
                f"inputs {formats.percent(self.rate)}"
            )
        return self.misses.text

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Return how strange rows of ``features`` (n, d) are, (n,) float64 of 0 or more."""
        return self.detector.scores(unit(features))

    def is_unknown(self, features: np.ndarray) -> np.ndarray:
        """Return which rows of ``features`` (n, d) are unlike the training samples, (n,) bool."""
        return np.asarray(self.scores(features) > self.threshold)

    def write(self, graph: Graph, features: Value) -> tuple[Value, Value]:
        """Write `scores` (n, 1) float64 and `is_unknown` (n, 1) bool of ``features`` (n, d) float32 as operators."""
        scores = self.detector.write(graph, graph.cast(graph.unit(features, FLOAT), DOUBLE))
        return scores, graph.add("Greater", scores, np.array(self.threshold))

    def has_drifted(self, unknown: int, total: int) -> bool:
        """Return whether ``unknown`` of ``total`` inputs exceed what false alarms explain (binomial, p < 0.001)."""
        return unknown > 0 and _binomial_tail(unknown, total, self.rate) < 0.001

    def arrays(self) -> Tensors:
        """Return everything as named arrays, for `rule_of`."""
        result: Tensors = {"unknown_rows": self.rows}
        numbers = np.array([self.threshold, self.rate])
        if isinstance(self.detector, ClassMeans):
            # A version without this detector finds no rule under its own name, and goes without one.
            result["unknown_by_means"] = numbers
            result["unknown_means"] = self.detector.means
            result["unknown_directions"] = self.detector.directions
            result["unknown_weights"] = np.append(
                self.detector.weights, (self.detector.variance, self.detector.shrinkage)
            )
        else:
            result["unknown"] = numbers
        if self.groups is not None:
            result["unknown_groups"] = self.groups
        if self.labels is not None:
            result["unknown_labels"] = self.labels
        if self.misses is not None:
            result["unknown_misses"] = np.array(self.misses.shares)
        return result


def rule_of(arrays: Mapping[str, np.ndarray]) -> UnknownRule | None:
    """Return the rule that `UnknownRule.arrays` gave; None where there is none.

    Raises:
        KeyError: an array is missing.
        ValueError: an array has other values than it should.
    """
    numbers = arrays.get("unknown_by_means", arrays.get("unknown"))
    if numbers is None:
        return None
    threshold, rate = numbers.tolist()
    rows = arrays["unknown_rows"]
    detector: Detector = NearestRows(rows)
    if "unknown_by_means" in arrays:
        *weights, variance, shrinkage = arrays["unknown_weights"].tolist()
        means = arrays["unknown_means"]
        detector = ClassMeans(means, arrays["unknown_directions"], np.array(weights), variance, shrinkage)
    misses = None
    if "unknown_misses" in arrays:
        misses = Misses(tuple(arrays["unknown_misses"].tolist()))
    groups = arrays.get("unknown_groups")
    labels = arrays.get("unknown_labels")
    return UnknownRule(rows, threshold, rate, detector, groups, labels, misses)


def _check_integers(name: str, values: np.ndarray, count: int) -> None:
    """Require ``count`` integers.

    Raises:
        StateError: They are something else.
    """
    if values.shape != (count,) or values.dtype.kind != "i":
        raise StateError(f"confidence: {name} {values.dtype} {values.shape}, expected {count} integers")


def least_for(rate: float) -> int:
    """Return samples below which a false-alarm rate (above 0, below 1) cannot be estimated: 19 for 5 %."""
    return max(math.ceil(1 / rate - 1 - 1e-9), NEIGHBOURS + 1)


def estimate_misses(
    kind: type[Detector], rows: np.ndarray, labels: np.ndarray, groups: np.ndarray, rate: float
) -> Misses | None:
    """Return how many inputs of a further class a detector would miss, by leaving out each class in turn.

    None where no class can be left out: there is one alone, or too few samples of the others for ``rate``.
    """
    part = part_of(len(rows), MOST_FOR_MISSES)
    rows = rows[part]
    labels = labels[part]
    groups = groups[part]
    known = np.unique(labels)
    missed = []
    for label in known[part_of(len(known), MOST_LEFT_OUT)]:
        is_left_out = labels == label
        others = ~is_left_out
        if int(others.sum()) < least_for(rate):
            continue
        detector = kind.fit(rows[others], labels[others])
        usual = detector.score_as_new(rows[others], labels[others], groups[others])
        strange = detector.scores(rows[is_left_out])
        missed.append(float((strange <= _threshold(usual, rate)).mean()))
    return Misses(tuple(missed)) if missed else None


def _choose(
    detectors: Sequence[type[Detector]], rows: np.ndarray, labels: np.ndarray, groups: np.ndarray, rate: float
) -> tuple[type[Detector], Misses | None]:
    """Return the detector that misses the fewest inputs of classes left out, and how many."""
    best = detectors[0]
    least: Misses | None = None
    for kind in detectors:
        misses = estimate_misses(kind, rows, labels, groups, rate)
        if misses is not None and (least is None or misses.share < least.share):
            best = kind
            least = misses
    return best, least


def _threshold(scores: np.ndarray, rate: float) -> float:
    """Return the smallest score with at most ``rate`` expected false alarms above it, from scores of new samples."""
    return float(np.sort(scores)[math.ceil((len(scores) + 1) * (1 - rate)) - 1])


def _binomial_tail(least: int, total: int, rate: float) -> float:
    """Return probability of ``least`` or more among ``total``, each with probability ``rate``."""
    constant = math.lgamma(total + 1)

    def term(count: int) -> float:
        ways = constant - math.lgamma(count + 1) - math.lgamma(total - count + 1)
        return math.exp(ways + count * math.log(rate) + (total - count) * math.log1p(-rate))

    return 1.0 - math.fsum(map(term, range(least)))
