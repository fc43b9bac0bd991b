"""Detects that inputs have changed since a head was fitted: compares recent features with the training features.

Two tests are made on the last `WINDOW` answers. Are more inputs unknown than the head's rule allows? And does the mean
of their features differ from that of the training samples (a linear two-sample statistic)?

The plain mean would mislead: a camera that sees only cats for an hour has not changed, although its mean feature has.
So a feature is compared with the training rows nearest to it. Its residual is the feature minus the mean of these rows.
The residuals of answers of a class are compared with the residuals of the training rows of that class.

Answers that follow each other are alike: an hour of the same picture is no more evidence than one picture. So the
number of independent answers is estimated from the autocorrelation of successive residuals.

The thresholds of both tests follow from the average run length: after how many answers, on average, unchanged inputs
raise a false alarm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from .detectors import distinct, part_of, unit
from .unknown import UnknownRule

WINDOW = 128
"""The number of recent answers that are compared."""

EVERY = 32
"""The number of answers between two comparisons."""

RUN_TIME = 10_000
"""The average number of answers until a false alarm."""

LEAST_ROWS = 60
"""The least number of training samples. With fewer, changes are found late, and many answers of one class mislead."""

MOST_ROWS = 1024
"""The most training rows to compare with; of more, a random part. Each answer waits for the comparison."""

NEIGHBOURS = 8
"""The number of nearest training rows whose mean is subtracted from a feature."""

_LEVEL = EVERY / RUN_TIME / 3
"""The probability of a false alarm in one test of one comparison.

The two tests could have half of `EVERY` / `RUN_TIME` each if comparisons were independent and the statistic exact. A
third leaves room for windows with few independent answers.
"""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing recent answers with the training samples.

    Attributes:
        answers: How many answers were compared.
        independent: How many independent answers they are worth.
        unknown: How many of the answers were unknown.
        shift: The statistic of the mean residual, divided by its threshold: above 1 the features differ.
        too_many_unknown: Whether more inputs were unknown than chance explains.
    """

    answers: int
    independent: float
    unknown: int
    shift: float
    too_many_unknown: bool

    @property
    def have_changed(self) -> bool:
        """Whether one of the two tests has found a change."""
        return self.too_many_unknown or self.shift > 1


class Reference:
    """The training samples of a head, prepared for comparisons."""

    def __init__(self, rule: UnknownRule, labels: np.ndarray) -> None:
        """Prepare the training rows of the rule for unknown inputs.

        Args:
            rule: The rule, with at least `LEAST_ROWS` rows of length 1.
            labels: The class of each row, (n,) int64.
        """
        # 1. The rows to compare with. Samples that are not windows of recordings count as one recording each.
        recordings = np.arange(len(rule.rows)) if rule.groups is None else rule.groups
        part = part_of(len(rule.rows), MOST_ROWS)
        rows = rule.rows[part]
        recordings = recordings[part]
        labels = labels[part]
        self._rows = rows.astype(np.float64)
        # 2. How training rows compare with each other, and what is usual for each class.
        residuals = self._subtract_neighbours(rows, recordings)
        is_far = rule.detector.score_as_new(rows, labels, recordings) > rule.threshold
        self._learn_classes(residuals, is_far, labels, recordings)
        # 3. How far residuals vary about the mean of their class, and rows about theirs.
        self._learn_spread(residuals, labels)

    def _learn_classes(
        self, residuals: np.ndarray, is_far: np.ndarray, labels: np.ndarray, recordings: np.ndarray
    ) -> None:
        """Estimate for each class the mean residual, the number of recordings, and how many of them are unknown.

        Args:
            residuals: The residual of each training row, (n, d).
            is_far: Whether the rule would call the row unknown if it were new, (n,) bool.
            labels: The class of each row, (n,).
            recordings: The recording of each row, (n,).
        """
        classes = int(labels.max()) + 1
        # A class without rows has the mean of all residuals.
        self._means = np.tile(residuals.mean(axis=0), (classes, 1))
        self._counts = np.zeros(classes)
        self._far = np.zeros(classes)
        for label in distinct(labels):
            is_of_class = labels == label
            self._means[label] = residuals[is_of_class].mean(axis=0)
            # The windows of a recording are alike, so a recording counts as one independent sample.
            self._counts[label] = len(distinct(recordings[is_of_class]))
            self._far[label] = float(is_far[is_of_class].mean()) * self._counts[label]

    def _learn_spread(self, residuals: np.ndarray, labels: np.ndarray) -> None:
        """Estimate the standard deviation of residuals in each direction, and the covariances that `compare` needs."""
        # Estimating the mean of a class costs one degree of freedom, as in Bessel's correction.
        class_sizes = np.bincount(labels)[labels]
        correction = np.sqrt(class_sizes / np.maximum(class_sizes - 1, 1))[:, None]
        centred = (residuals - self._means[labels]) * correction
        deviation = centred.std(axis=0)
        # Residuals are divided by their deviation. It has a floor, so that a direction that hardly varies does not
        # dominate: a tenth of the mean deviation.
        floor = 0.1 * float(np.sqrt(np.mean(deviation**2))) or 1.0
        self._scale = 1 / np.maximum(deviation, floor)
        centres = np.zeros_like(self._means)
        for label in distinct(labels):
            centres[label] = self._rows[labels == label].mean(axis=0)
        centred_rows = (self._rows - centres[labels]) * correction
        self._moments = _Moments.from_rows(centred * self._scale, centred_rows * self._scale)

    def residuals(self, features: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the scaled residuals of features.

        Args:
            features: The features of inputs, (n, d).
            labels: The index of the class that the head has answered for each input, (n,).

        Returns:
            The residuals (n, d) float64. For unchanged inputs their mean is about 0 and their deviation about 1.
        """
        residuals = self._subtract_neighbours(unit(features), None)
        return np.asarray((residuals - self._means[self._known_classes(labels)]) * self._scale)

    def compare(self, residuals: np.ndarray, labels: np.ndarray, unknown: np.ndarray) -> Comparison:
        """Compare recent answers with the training samples.

        Args:
            residuals: The results of `residuals` for the answers, (n, d), in the order of the answers.
            labels: The indexes of the classes that the head has answered, (n,).
            unknown: Whether each input was unknown, (n,) bool.
        """
        # 1. The statistic: the squared length of the mean residual.
        count = len(residuals)
        independent = count_independent(residuals)
        mean = residuals.mean(axis=0)
        shares = np.bincount(self._known_classes(labels), minlength=len(self._counts)) / count
        training_shares = self._counts / self._counts.sum()
        # 2. Its threshold. The mean residual varies because the answers and the training samples are random. If classes
        # come in other shares than in training, the errors of the class means do not cancel as they do in training.
        sampling_weight = 1 / independent + 1 / float(self._counts.sum())
        class_weight = float(((shares - training_shares) ** 2 / np.maximum(self._counts, 1)).sum())
        shift = float(mean @ mean) / self._moments.quantile(sampling_weight, class_weight, 1 - _LEVEL)
        # 3. The number of unknown inputs, reduced to independent answers.
        effective = max(1, round(independent))
        effective_unknown = round(float(unknown.mean()) * effective)
        chance = self._chance_of_unknown(effective_unknown, effective, shares)
        return Comparison(count, independent, int(unknown.sum()), shift, chance < _LEVEL)

    def _known_classes(self, labels: np.ndarray) -> np.ndarray:
        """Return class indexes (n,), with 0 in place of classes beyond those of the training rows."""
        return np.where(labels < len(self._counts), labels, 0)

    def _subtract_neighbours(self, queries: np.ndarray, recordings: np.ndarray | None) -> np.ndarray:
        """Subtract the mean of the nearest training rows from each row.

        Args:
            queries: The rows, (n, d), of length 1.
            recordings: If the rows are the training rows themselves: the recording of each, (n,). Rows of the same
                recording do not count as neighbours. None: the rows are new.

        Returns:
            The residuals, (n, d) float64.
        """
        products = queries.astype(np.float64) @ self._rows.T
        if recordings is not None:
            # Less than any product of rows of length 1, so that these rows come last.
            products[recordings[:, None] == recordings[None, :]] = -2.0
        count = min(NEIGHBOURS, len(self._rows) - 1)
        nearest = np.argpartition(-products, count - 1, axis=1)[:, :count]
        return np.asarray(queries - self._rows[nearest].mean(axis=1))

    def _chance_of_unknown(self, least: int, total: int, shares: np.ndarray) -> float:
        """Return the probability that ``least`` or more of ``total`` unchanged inputs are unknown.

        Each class has a rate of unknown inputs of its own. It is estimated from the training samples of the class, few
        of which are unknown, so it may well be twice the estimate. The number of unknown inputs in a mix of classes
        with ``shares`` (K,) is therefore taken to be beta-binomial.
        """
        # Laplace's rule of succession: one unknown and one known sample are added to each class.
        rates = (self._far + 1) / (self._counts + 2)
        rate = float(shares @ rates)
        # The number of training samples that an estimate of this rate is worth.
        samples = 1 / max(float((shares**2 / (self._counts + 2)).sum()), 1e-9)
        above = rate * samples
        below = (1 - rate) * samples
        terms = (_beta_binomial(number, total, above, below) for number in range(least))
        return max(0.0, 1.0 - math.fsum(terms))


@dataclass(frozen=True)
class _Moments:
    """Traces of products of two covariance matrices W and A, which determine the moments of a sum of squares.

    Attributes:
        first: The traces of W and A.
        second: The traces of WW, WA and AA.
        third: The traces of WWW, WWA, WAA and AAA.
    """

    first: tuple[float, float]
    second: tuple[float, float, float]
    third: tuple[float, float, float, float]

    @classmethod
    def from_rows(cls, first_rows: np.ndarray, second_rows: np.ndarray) -> _Moments:
        """Return the traces; W and A are the covariances about zero of ``first_rows`` and ``second_rows``, (n, d)."""
        w = first_rows.T @ first_rows / len(first_rows)
        a = second_rows.T @ second_rows / len(second_rows)
        ww = w @ w
        aa = a @ a
        return cls(
            (float(np.trace(w)), float(np.trace(a))),
            (float(np.vdot(w, w)), float(np.vdot(w, a)), float(np.vdot(a, a))),
            (float(np.vdot(ww, w)), float(np.vdot(ww, a)), float(np.vdot(aa, w)), float(np.vdot(aa, a))),
        )

    def quantile(self, x: float, y: float, share: float) -> float:
        """Return the quantile at ``share`` (0..1) of |m|^2, where m is normal with mean zero and covariance x W + y A.

        |m|^2 is a sum of squares of normal variables, weighted by the eigenvalues of the covariance. It is approximated
        by a chi-square distribution with the same first three moments (Pearson's approximation: Imhof, Biometrika 48,
        1961, Section 2).
        """
        # Up to constant factors, the first three cumulants.
        first = x * self.first[0] + y * self.first[1]
        second = x * x * self.second[0] + 2 * x * y * self.second[1] + y * y * self.second[2]
        third = (
            x**3 * self.third[0] + 3 * x * x * y * self.third[1] + 3 * x * y * y * self.third[2] + y**3 * self.third[3]
        )
        if third <= 0:
            return max(first, 1e-12)
        freedom = second**3 / third**2
        # The cube root of a chi-square variable is nearly normal (Wilson and Hilferty, 1931).
        normal = NormalDist().inv_cdf(share)
        chi_square = freedom * (1 - 2 / (9 * freedom) + normal * math.sqrt(2 / (9 * freedom))) ** 3
        return (chi_square - freedom) * math.sqrt(second / freedom) + first


def why_not_watched(rule: UnknownRule | None) -> str:
    """Return why the inputs of a head cannot be compared with its training samples, for people; empty if they can."""
    if rule is None:
        return "the head keeps no training features, so changes of inputs are not noticed"
    if len(rule.rows) < LEAST_ROWS:
        return f"the head learned from {len(rule.rows)} samples; changes are noticed from {LEAST_ROWS} on"
    if rule.labels is None:
        return "an earlier version fitted the head; fit it again to have changes of inputs noticed"
    return ""


def reference_of(rule: UnknownRule | None) -> Reference | None:
    """Return the reference of a head's rule; None if `why_not_watched` gives a reason."""
    if rule is None or rule.labels is None or why_not_watched(rule):
        return None
    return Reference(rule, rule.labels)


def count_independent(residuals: np.ndarray) -> float:
    """Return how many independent rows successive ``residuals`` (n, d) are worth, 1 to n.

    The number is n (1 - r) / (1 + r), with the autocorrelation r of successive rows. The autocorrelation is taken about
    zero, the mean of the training samples, and not about the mean of the rows: n equal rows are then worth one row.
    """
    count = len(residuals)
    if count < 2:
        return float(count)
    energy = float((residuals**2).sum()) / count
    if energy == 0:
        return 1.0
    autocorrelation = float((residuals[1:] * residuals[:-1]).sum()) / (count - 1) / energy
    correlation = min(max(autocorrelation, 0.0), 1.0)
    return max(1.0, count * (1 - correlation) / (1 + correlation))


def _beta_binomial(number: int, total: int, above: float, below: float) -> float:
    """Return the probability of ``number`` successes in ``total`` trials of a beta-binomial distribution.

    The probability of a success is distributed as beta(``above``, ``below``).
    """
    log_ways = math.lgamma(total + 1) - math.lgamma(number + 1) - math.lgamma(total - number + 1)
    log_probability = _log_beta(number + above, total - number + below) - _log_beta(above, below)
    return math.exp(log_ways + log_probability)


def _log_beta(first: float, second: float) -> float:
    """Return the logarithm of the beta function."""
    return math.lgamma(first) + math.lgamma(second) - math.lgamma(first + second)
