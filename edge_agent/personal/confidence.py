"""How far an answer can be trusted: inputs that are unlike anything seen, calibrated probabilities, and drift."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..core.errors import StateError
from ..core.graph import DOUBLE, FLOAT, Graph, Value
from ..core.task import Tensors
from ..data import Samples
from ..heads.base import softmax
from .local.validation import folds

LEAST_FOR_CALIBRATION = 50
"""Answers from cross-validation below which probabilities are left as they are."""

NEIGHBOURS = 3
"""The distance that counts is that to this neighbour: one odd training sample does not make all of its kind known."""

MOST_ROWS = 4096
"""Training samples that an unknown rule holds, or what its rate needs; of more, a random part."""

MOST_CLASSES = 10_000
"""No head knows more classes."""

_SMALLEST = 1e-30
"""What a probability of 0 counts as where its logarithm is taken."""

_CELLS = 2_000_000
_BINS = 10
_FOLDS = 5


@dataclass(frozen=True)
class UnknownRule:
    """Inputs are unknown when their features are farther from all that were learned than these are from each other.

    ``rows`` (n, d) float32: features of the training samples, of length 1. ``threshold``: distance above which an input
    is unknown (Sun et al., ICML 2022). ``rate``: the false-alarm rate that was asked for, 0..1. ``groups`` (n,) int64:
    the recording of each row; None: each sample is one by itself. ``labels`` (n,) int64: the class of each row; None:
    an earlier version saved the rule.
    """

    rows: np.ndarray
    threshold: float
    rate: float
    groups: np.ndarray | None = None
    labels: np.ndarray | None = None

    @classmethod
    def fit(
        cls,
        features: np.ndarray,
        rate: float,
        groups: np.ndarray | None = None,
        labels: np.ndarray | None = None,
    ) -> UnknownRule | None:
        """Return the rule for ``features`` (n, d), or None where ``rate`` cannot be estimated from so few.

        The distance of each sample is that to the others, or to those of other ``groups`` (n,), recordings, where there
        are several. The threshold is the smallest one with at most ``rate`` expected false alarms on further samples
        of the same kind (split-conformal quantile), so at least 1 / rate - 1 samples are needed.
        """
        if len(features) < least_for(rate):
            return None
        # Without several recordings each sample is a group of its own.
        row_groups = groups
        if row_groups is None or len(np.unique(row_groups)) < 2:
            row_groups = np.arange(len(features))
        # Less their mean, AUROC rises by 0.02, but samples of one class no longer tell what is far from all of them.
        rows = _unit(features)
        most = max(MOST_ROWS, least_for(rate))
        part = part_of(len(rows), most)
        rows = rows[part]
        row_groups = row_groups[part]
        if labels is not None:
            labels = labels[part].astype(np.int64)
        distances = np.sort(_distances(rows, rows, row_groups))
        threshold = float(distances[math.ceil((len(rows) + 1) * (1 - rate)) - 1])
        has_recordings = len(np.unique(row_groups)) < len(rows)
        return cls(rows, threshold, rate, row_groups.astype(np.int64) if has_recordings else None, labels)

    def distances(self, features: np.ndarray) -> np.ndarray:
        """Return the distances (n,), 0..2, of rows of ``features`` (n, d) to their third nearest training sample."""
        return _distances(_unit(features), self.rows)

    def is_unknown(self, features: np.ndarray) -> np.ndarray:
        """Return which rows of ``features`` (n, d) are unlike the training samples, (n,) bool."""
        return np.asarray(self.distances(features) > self.threshold)

    def write(self, graph: Graph, features: Value) -> tuple[Value, Value]:
        """Write `distances` (n, 1) float64 and `is_unknown` (n, 1) bool of ``features`` (n, d) float32 as operators."""
        queries = graph.cast(graph.unit(features, FLOAT), DOUBLE)
        products = graph.add("MatMul", queries, np.ascontiguousarray(-2.0 * self.rows.T.astype(np.float64)))
        squares = graph.add("Max", graph.add("Add", products, np.array(2.0)), np.zeros(1))
        rank = min(NEIGHBOURS, len(self.rows))
        nearest, _ = graph.nearest(squares, rank)
        distances = graph.add("Sqrt", graph.columns(nearest, rank - 1, rank))
        return distances, graph.add("Greater", distances, np.array(self.threshold))

    def has_drifted(self, unknown: int, total: int) -> bool:
        """Return whether ``unknown`` of ``total`` inputs exceed what false alarms explain (binomial, p < 0.001)."""
        return unknown > 0 and _binomial_tail(unknown, total, self.rate) < 0.001


def part_of(count: int, most: int) -> np.ndarray:
    """Return the positions of ``most`` of ``count`` rows, drawn the same way each time; of all where they are fewer."""
    if count <= most:
        return np.arange(count)
    return np.random.default_rng(0).choice(count, most, replace=False)


def least_for(rate: float) -> int:
    """Return samples below which a false-alarm rate (above 0, below 1) cannot be estimated: 19 for 5 %."""
    return max(math.ceil(1 / rate - 1 - 1e-9), NEIGHBOURS + 1)


def _binomial_tail(least: int, total: int, rate: float) -> float:
    """Return probability of ``least`` or more among ``total``, each with probability ``rate``."""
    constant = math.lgamma(total + 1)

    def term(count: int) -> float:
        ways = constant - math.lgamma(count + 1) - math.lgamma(total - count + 1)
        return math.exp(ways + count * math.log(rate) + (total - count) * math.log1p(-rate))

    return 1.0 - math.fsum(map(term, range(least)))


@dataclass(frozen=True)
class Calibration:
    """One temperature for all probabilities, and the expected calibration error before and after, 0..1."""

    temperature: float
    error_before: float
    error_after: float

    def __call__(self, probabilities: np.ndarray) -> np.ndarray:
        """Calibrated probabilities (n, K); the most probable class stays the same, and 0 stays 0."""
        return apply_temperature(probabilities, self.temperature)

    def write(self, graph: Graph, probabilities: Value) -> Value:
        """Write what a call computes as operators; ``probabilities`` (n, K) float64."""
        logs = graph.add("Log", graph.add("Max", probabilities, np.array([_SMALLEST])))
        shares = graph.softmax(graph.add("Div", logs, np.array(self.temperature)))
        return graph.add("Where", graph.add("Greater", probabilities, np.array(0.0)), shares, np.array(0.0))


def calibrate(probabilities: np.ndarray, labels: np.ndarray, folds: np.ndarray) -> Calibration | None:
    """Return the temperature that suits out-of-fold ``probabilities`` (n, K) best.

    None below `LEAST_FOR_CALIBRATION`, and where it would not lower the expected calibration error. ``folds`` (n,): the
    fold of each row. The error after it is that of each fold with the temperature of the others. Guo et al., ICML 2017.
    """
    if len(labels) < LEAST_FOR_CALIBRATION:
        return None
    # The temperature of a fold comes from the other folds, so that the error after it is that on new samples.
    after = np.empty_like(probabilities)
    for fold in np.unique(folds):
        is_tested = folds == fold
        learns = ~is_tested
        if not learns.any():
            learns = is_tested
        temperature = best_temperature(probabilities[learns], labels[learns])
        after[is_tested] = apply_temperature(probabilities[is_tested], temperature)
    error_before = calibration_error(probabilities, labels)
    error_after = calibration_error(after, labels)
    if error_after >= error_before:
        return None
    return Calibration(best_temperature(probabilities, labels), error_before, error_after)


def calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return expected calibration error, 0..1: mean difference of confidence and accuracy in ten bins of equal counts.

    ``probabilities`` (n, K), ``labels`` (n,) integers below K; n is at least 1.
    """
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    bins = np.array_split(np.argsort(confidence, kind="stable"), _BINS)
    weighted = [abs(confidence[rows].mean() - right[rows].mean()) * len(rows) for rows in bins if len(rows)]
    return float(sum(weighted) / len(labels))


def apply_temperature(probabilities: np.ndarray, temperature: float) -> np.ndarray:
    """Return the softmax of log probabilities (n, K) over the temperature; 0 stays 0."""
    result = softmax(np.log(np.maximum(probabilities, _SMALLEST)) / temperature)
    return np.where(probabilities > 0, result, 0.0)


def log_losses(probabilities: np.ndarray, labels: np.ndarray, temperature: float) -> np.ndarray:
    """Log loss (n,) >= 0 of ``probabilities`` (n, K) over the temperature; none of them counts as less than 1e-12."""
    shares = softmax(np.log(np.maximum(probabilities, 1e-12)) / temperature)[np.arange(len(labels)), labels]
    return np.asarray(-np.log(np.maximum(shares, 1e-12)))


def best_temperature(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return temperature of 0.1 ... 10 with the smallest mean log loss, by golden-section search over its logarithm.

    ``probabilities`` (n, K), ``labels`` (n,) integers below K.
    """
    low = -1.0
    high = 1.0
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(30):
        first = high - ratio * (high - low)
        second = low + ratio * (high - low)
        losses = [float(log_losses(probabilities, labels, 10.0**exponent).mean()) for exponent in (first, second)]
        low, high = (low, second) if losses[0] <= losses[1] else (first, high)
    return float(10.0 ** ((low + high) / 2))


@dataclass(frozen=True)
class Confidence:
    """What is known of a head's reliability; None for what could not be estimated from its samples."""

    calibration: Calibration | None = None
    unknown: UnknownRule | None = None

    def arrays(self) -> Tensors:
        """Return everything as named arrays, for `of`."""
        result: Tensors = {}
        calibration = self.calibration
        if calibration is not None:
            errors = (calibration.error_before, calibration.error_after)
            result["calibration"] = np.array([calibration.temperature, *errors])
        rule = self.unknown
        if rule is not None:
            result["unknown_rows"] = rule.rows
            result["unknown"] = np.array([rule.threshold, rule.rate])
            if rule.groups is not None:
                result["unknown_groups"] = rule.groups
            if rule.labels is not None:
                result["unknown_labels"] = rule.labels
        return result

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], feature_dim: int) -> Confidence:
        """Return the confidence that `arrays` gave.

        Raises:
            StateError: they are not such arrays, or for other features than those of ``feature_dim`` values.
        """
        calibration = None
        unknown = None
        try:
            if "calibration" in arrays:
                calibration = Calibration(*arrays["calibration"].tolist())
            if "unknown" in arrays:
                threshold, rate = arrays["unknown"].tolist()
                groups = arrays.get("unknown_groups")
                labels = arrays.get("unknown_labels")
                unknown = UnknownRule(arrays["unknown_rows"], threshold, rate, groups, labels)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"confidence: arrays {', '.join(sorted(arrays))} do not belong together") from error
        if calibration is not None and not 0 < calibration.temperature < math.inf:
            raise StateError(f"confidence: temperature {calibration.temperature}, expected a number above 0")
        if unknown is not None and (unknown.rows.ndim != 2 or unknown.rows.shape[1] != feature_dim):
            raise StateError(f"confidence: rows {unknown.rows.shape}, expected (n, {feature_dim})")
        if unknown is not None:
            _check_positions(unknown)
        return cls(calibration, unknown)

    def metrics(self) -> dict[str, float | int | str | None]:
        """Return the figures of the confidence that are reported.

        They are the temperature, ``ece_before`` and ``ece_after`` (0..1), and ``unknown_rate`` (0..1).
        """
        calibration = self.calibration
        rule = self.unknown
        return {
            "temperature": None if calibration is None else round(calibration.temperature, 4),
            "ece_before": None if calibration is None else round(calibration.error_before, 4),
            "ece_after": None if calibration is None else round(calibration.error_after, 4),
            "unknown_rate": None if rule is None else rule.rate,
        }

    def __call__(self, probabilities: np.ndarray) -> np.ndarray:
        """Calibrated probabilities (n, K), where the head is calibrated."""
        return probabilities if self.calibration is None else self.calibration(probabilities)

    def is_unknown(self, features: np.ndarray) -> np.ndarray | None:
        """Return which rows of ``features`` (n, d) are unlike the training samples, (n,) bool; None without a rule."""
        return None if self.unknown is None else self.unknown.is_unknown(features)


def _check_positions(rule: UnknownRule) -> None:
    """Raises StateError where the recordings or classes of a rule's rows are not one small number for each row."""
    for name, positions in (("groups", rule.groups), ("labels", rule.labels)):
        if positions is None:
            continue
        count = len(rule.rows)
        if positions.shape != (count,) or positions.dtype.kind != "i":
            raise StateError(f"confidence: {name} {positions.dtype} {positions.shape}, expected {count} integers")
    if rule.labels is not None and not 0 <= rule.labels.min() <= rule.labels.max() < MOST_CLASSES:
        raise StateError(f"confidence: labels up to {rule.labels.max()}, expected 0 to {MOST_CLASSES - 1}")


@dataclass(frozen=True)
class OutOfFold:
    """Answers to training samples by heads that were fitted on the other folds.

    ``rows`` (m,): positions of the samples, each at most once. ``probabilities`` (m, K). ``folds`` (m,): number of the
    fold that each was tested in.
    """

    rows: np.ndarray
    probabilities: np.ndarray
    folds: np.ndarray


def out_of_fold(
    samples: Samples,
    features: np.ndarray,
    fit: Callable[[np.ndarray], Callable[[np.ndarray], np.ndarray]],
    seed: int = 0,
) -> OutOfFold | None:
    """Return the answers of cross-validation to training samples; None where they cannot be divided.

    Args:
        samples: The training samples.
        features: Their features, (n, d).
        fit: Takes the rows to learn from, and gives a function from features to probabilities (m, K). It is called
            once for each of five folds.
        seed: That of the folds.
    """
    parts = folds(samples, _FOLDS, np.random.default_rng(seed))
    if not parts:
        return None
    answers = [fit(fold.train)(features[fold.test]) for fold in parts]
    sizes = [len(fold.test) for fold in parts]
    return OutOfFold(
        np.concatenate([fold.test for fold in parts]),
        np.concatenate(answers),
        np.repeat(np.arange(len(parts)), sizes),
    )


def estimate_confidence(samples: Samples, features: np.ndarray, answers: OutOfFold | None, rate: float) -> Confidence:
    """Return the confidence of a head that learns from ``samples`` with their ``features`` (n, d).

    ``answers``: those of cross-validation of that head, None where there are none; from `LEAST_FOR_CALIBRATION` on they
    calibrate it. ``rate``: false alarms of the unknown rule, 0..1; 0: no rule.
    """
    calibration = None
    if answers is not None:
        calibration = calibrate(answers.probabilities, samples.labels[answers.rows], answers.folds)
    unknown = None
    if rate:
        unknown = UnknownRule.fit(features, rate, samples.groups, samples.labels)
    return Confidence(calibration, unknown)


def _unit(features: np.ndarray) -> np.ndarray:
    """Return the rows of features (n, d), scaled to length 1; rows of zeros stay."""
    rows = np.asarray(features, np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1.0), np.float32)


def _distances(queries: np.ndarray, rows: np.ndarray, groups: np.ndarray | None = None) -> np.ndarray:
    """Return the distance (n,) to the `NEIGHBOURS`-th nearest row.

    With ``groups`` (n,), the group of each row, rows of the same group do not count.
    """
    result = np.empty(len(queries))
    step = max(1, _CELLS // len(rows))
    rank = min(NEIGHBOURS, len(rows)) - 1
    for start in range(0, len(queries), step):
        block = slice(start, start + step)
        # Rows have length 1, so the square of a distance is 2 - 2 times their product.
        squares = np.maximum(2.0 - 2.0 * queries[block].astype(np.float64) @ rows.T.astype(np.float64), 0.0)
        if groups is not None:
            squares[groups[block, None] == groups[None, :]] = 4.0
        result[block] = np.sqrt(np.partition(squares, rank, axis=1)[:, rank])
    return result
