"""Whether inputs have changed since a head was fitted: recent features against those that it learned from.

Two questions are asked of the last `WINDOW` answers. Are there more unknown inputs than the head's rule promised? And
do their features, on average, lie elsewhere than those of the training samples (a linear two-sample statistic)?

A camera that sees cats for an hour has not changed, although its mean feature has. So a feature is compared with the
training rows next to it: what counts is its residual, the feature minus the mean of its nearest rows, beside the
residuals of training rows of the class that the head answers. And a picture that stays the same for an hour says
no more than one picture: the statistic knows how much successive residuals are alike, and counts as many answers as are
independent.

Both thresholds follow from an expected run time: how many answers pass, on average, until inputs that have not changed
are called changed by chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from .detectors import part_of, unit
from .unknown import UnknownRule

WINDOW = 128
"""Recent answers that are looked at."""

EVERY = 32
"""Answers between two looks."""

RUN_TIME = 10_000
"""Answers until a false alarm, on average."""

LEAST_ROWS = 60
"""Training samples below which nothing is said: with fewer, shifts are found late, and answers of one class mislead."""

MOST_ROWS = 1024
"""Training rows that are compared with; of more, a random part: an answer waits for the comparison."""

NEIGHBOURS = 8
"""Rows whose mean a feature is compared with."""

_LEVEL = EVERY / RUN_TIME / 3
"""The chance of a false alarm of one look by one of the two questions.

Half of it would do if looks were independent and normal; a third leaves room for windows of few independent answers.
"""


@dataclass(frozen=True)
class Comparison:
    """What a look at recent answers has found.

    Attributes:
        answers: How many answers were looked at.
        independent: As how many independent ones they count.
        unknown: How many of them were unknown.
        shift: The statistic of the mean residual, in units of its threshold: above 1 they lie elsewhere.
        too_many_unknown: Whether more were unknown than chance explains.
    """

    answers: int
    independent: float
    unknown: int
    shift: float
    too_many_unknown: bool

    @property
    def have_changed(self) -> bool:
        """Whether one of both questions is answered with yes."""
        return self.too_many_unknown or self.shift > 1


class Reference:
    """What a head learned from, prepared for comparisons."""

    def __init__(self, rule: UnknownRule, labels: np.ndarray) -> None:
        """Prepare the training rows of a rule.

        Args:
            rule: The rule, with at least `LEAST_ROWS` rows.
            labels: The class of each row, (n,) int64.
        """
        # Without several recordings each sample is one by itself.
        groups = np.arange(len(rule.rows)) if rule.groups is None else rule.groups
        part = part_of(len(rule.rows), MOST_ROWS)
        rows = rule.rows[part]
        groups = groups[part]
        labels = labels[part]
        self._rows = rows.astype(np.float64)
        # 1. Training rows beside each other, each beside rows of other recordings.
        residuals = self._compare(rows, groups)
        is_far = rule.scorer.score_as_new(rows, labels, groups) > rule.threshold
        classes = int(labels.max()) + 1
        self._means = np.tile(residuals.mean(axis=0), (classes, 1))
        self._counts = np.zeros(classes)
        self._far = np.zeros(classes)
        centres = np.zeros((classes, rows.shape[1]))
        for label in np.unique(labels):
            is_of_class = labels == label
            self._means[label] = residuals[is_of_class].mean(axis=0)
            centres[label] = self._rows[is_of_class].mean(axis=0)
            # Windows of one recording are one sample of how recordings are.
            self._counts[label] = len(np.unique(groups[is_of_class]))
            self._far[label] = float(is_far[is_of_class].mean()) * self._counts[label]
        # 2. How they spread: residuals about the mean of their class, and rows about theirs. Each mean has cost a row.
        alike = np.bincount(labels, minlength=classes)[labels]
        grown = np.sqrt(alike / np.maximum(alike - 1, 1))[:, None]
        centred = (residuals - self._means[labels]) * grown
        spread = centred.std(axis=0)
        # Each direction counts by its own spread; one that hardly varies is not blown up.
        floor = 0.1 * float(np.sqrt(np.mean(spread**2))) or 1.0
        self._scale = 1 / np.maximum(spread, floor)
        self._moments = _Moments.of(centred * self._scale, (self._rows - centres[labels]) * grown * self._scale)

    def residuals(self, features: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Compare features with the training rows next to them.

        Args:
            features: The features of inputs, (n, d).
            labels: The class that the head answered for each, (n,), as a position.

        Returns:
            The residuals (n, d) float64, about zero and with spread 1 for inputs that have not changed.
        """
        residuals = self._compare(unit(features), None)
        return np.asarray((residuals - self._means[self._known(labels)]) * self._scale)

    def compare(self, residuals: np.ndarray, labels: np.ndarray, unknown: np.ndarray) -> Comparison:
        """Compare recent answers with the training samples.

        Args:
            residuals: What `residuals` gave for them, (n, d), in the order of the answers.
            labels: The classes that the head answered, (n,), as positions.
            unknown: Whether each of them was unknown, (n,) bool.
        """
        count = len(residuals)
        independent = count_independent(residuals)
        mean = residuals.mean(axis=0)
        shares = np.bincount(self._known(labels), minlength=len(self._counts)) / count
        trained = self._counts / self._counts.sum()
        # The mean of residuals varies with the answers and with the training samples. Where classes come in other
        # shares than in training, the errors of the means of classes do not cancel as they do in training.
        usual = 1 / independent + 1 / float(self._counts.sum())
        unusual = float(((shares - trained) ** 2 / np.maximum(self._counts, 1)).sum())
        shift = float(mean @ mean) / self._moments.quantile(usual, unusual, 1 - _LEVEL)
        effective = max(1, round(independent))
        strange = round(float(unknown.mean()) * effective)
        chance = self._chance_of_unknown(strange, effective, shares)
        return Comparison(count, independent, int(unknown.sum()), shift, chance < _LEVEL)

    def _known(self, labels: np.ndarray) -> np.ndarray:
        """Return classes (n,), with the first one in place of classes that no training row is of."""
        return np.where(labels < len(self._counts), labels, 0)

    def _compare(self, queries: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
        """Compare rows of length 1 with the training rows.

        Args:
            queries: The rows, (n, d).
            groups: Of the training rows themselves, the recording of each, (n,), whose rows are not compared with it.

        Returns:
            Each row less the mean of its nearest training rows, (n, d).
        """
        products = queries.astype(np.float64) @ self._rows.T
        if groups is not None:
            products[groups[:, None] == groups[None, :]] = -2.0
        count = min(NEIGHBOURS, len(self._rows) - 1)
        nearest = np.argpartition(-products, count - 1, axis=1)[:, :count]
        return np.asarray(queries - self._rows[nearest].mean(axis=1))

    def _chance_of_unknown(self, least: int, total: int, shares: np.ndarray) -> float:
        """Return the chance of ``least`` or more unknown ones among ``total`` inputs that have not changed.

        A class has its own rate, known by its training samples alone, of which few are unknown. So the rate of a mix of
        classes, by ``shares`` (K,), is uncertain, and the count beta-binomial: with few samples the rate may well be
        twice the one that is expected.
        """
        # One more unknown sample than there was, for the one that may come next.
        rates = (self._far + 1) / (self._counts + 2)
        rate = float(shares @ rates)
        samples = 1 / max(float((shares**2 / (self._counts + 2)).sum()), 1e-9)
        above = rate * samples
        below = (1 - rate) * samples
        terms = (_beta_binomial(number, total, above, below) for number in range(least))
        return max(0.0, 1.0 - math.fsum(terms))


@dataclass(frozen=True)
class _Moments:
    """Traces of products of two covariances: what the first three moments of a sum of squares depend on.

    Attributes:
        first: Of W and A.
        second: Of WW, WA and AA.
        third: Of WWW, WWA, WAA and AAA.
    """

    first: tuple[float, float]
    second: tuple[float, float, float]
    third: tuple[float, float, float, float]

    @classmethod
    def of(cls, usual: np.ndarray, unusual: np.ndarray) -> _Moments:
        """Return the moments of the covariances about zero of rows (n, d): W of ``usual`` and A of ``unusual``."""
        w = usual.T @ usual / len(usual)
        a = unusual.T @ unusual / len(unusual)
        ww = w @ w
        aa = a @ a
        return cls(
            (float(np.trace(w)), float(np.trace(a))),
            (float(np.vdot(w, w)), float(np.vdot(w, a)), float(np.vdot(a, a))),
            (float(np.vdot(ww, w)), float(np.vdot(ww, a)), float(np.vdot(aa, w)), float(np.vdot(aa, a))),
        )

    def quantile(self, x: float, y: float, share: float) -> float:
        """Return a quantile of |m|^2, where m is normal about zero with covariance x W + y A.

        That is a sum of squares of normals, weighted by the eigenvalues of the covariance: Pearson's approximation by a
        chi-square distribution with the same first three moments (Imhof, Biometrika 48, 1961, Section 2).
        """
        first = x * self.first[0] + y * self.first[1]
        second = x * x * self.second[0] + 2 * x * y * self.second[1] + y * y * self.second[2]
        third = (
            x**3 * self.third[0] + 3 * x * x * y * self.third[1] + 3 * x * y * y * self.third[2] + y**3 * self.third[3]
        )
        if third <= 0:
            return max(first, 1e-12)
        freedom = second**3 / third**2
        # Wilson and Hilferty: the cube root of a chi-square variable is nearly normal.
        normal = NormalDist().inv_cdf(share)
        chi_square = freedom * (1 - 2 / (9 * freedom) + normal * math.sqrt(2 / (9 * freedom))) ** 3
        return (chi_square - freedom) * math.sqrt(second / freedom) + first


def why_not_watched(rule: UnknownRule | None) -> str:
    """Return why inputs of a head cannot be compared with what it learned from; empty where they can."""
    if rule is None:
        return "the head keeps no training features, so changes of inputs are not noticed"
    if len(rule.rows) < LEAST_ROWS:
        return f"the head learned from {len(rule.rows)} samples; changes are noticed from {LEAST_ROWS} on"
    if rule.labels is None:
        return "an earlier version fitted the head; fit it again to have changes of inputs noticed"
    return ""


def reference_of(rule: UnknownRule | None) -> Reference | None:
    """Return the reference of a head's rule; None where `why_not_watched` says why there is none."""
    if rule is None or rule.labels is None or why_not_watched(rule):
        return None
    return Reference(rule, rule.labels)


def count_independent(residuals: np.ndarray) -> float:
    """Return as how many independent rows successive ``residuals`` (n, d) count, 1 to n.

    With autocorrelation r of successive rows, n (1 - r) / (1 + r). It is taken about the mean of the training samples
    and not about their own: rows that are all alike are one row.
    """
    count = len(residuals)
    if count < 2:
        return float(count)
    energy = float((residuals**2).sum()) / count
    if energy == 0:
        return 1.0
    together = float((residuals[1:] * residuals[:-1]).sum()) / (count - 1) / energy
    correlation = min(max(together, 0.0), 1.0)
    return max(1.0, count * (1 - correlation) / (1 + correlation))


def _beta_binomial(number: int, total: int, above: float, below: float) -> float:
    """Return the chance of ``number`` among ``total`` whose own chance is distributed as beta(``above``, ``below``)."""
    ways = math.lgamma(total + 1) - math.lgamma(number + 1) - math.lgamma(total - number + 1)
    joint = _log_beta(number + above, total - number + below) - _log_beta(above, below)
    return math.exp(ways + joint)


def _log_beta(first: float, second: float) -> float:
    return math.lgamma(first) + math.lgamma(second) - math.lgamma(first + second)
