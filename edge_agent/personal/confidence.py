"""How far an answer can be trusted: calibrated probabilities, beside the rule for unknown inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..core.errors import StateError
from ..core.graph import Graph, Value
from ..core.task import Tensors
from ..data import Samples
from ..heads.base import softmax
from .local.validation import folds
from .unknown import UnknownRule, rule_of

LEAST_FOR_CALIBRATION = 50
"""Answers from cross-validation below which probabilities are left as they are."""

MOST_CLASSES = 10_000
"""No head knows more classes."""

_SMALLEST = 1e-30
"""What a probability of 0 counts as where its logarithm is taken."""

_BINS = 10
_FOLDS = 5


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
        if self.unknown is not None:
            result.update(self.unknown.arrays())
        return result

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], feature_dim: int) -> Confidence:
        """Return the confidence that `arrays` gave.

        Raises:
            StateError: they are not such arrays, or for other features than those of ``feature_dim`` values.
        """
        calibration = None
        try:
            if "calibration" in arrays:
                calibration = Calibration(*arrays["calibration"].tolist())
            unknown = rule_of(arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"confidence: arrays {', '.join(sorted(arrays))} do not belong together") from error
        if calibration is not None and not 0 < calibration.temperature < math.inf:
            raise StateError(f"confidence: temperature {calibration.temperature}, expected a number above 0")
        if unknown is not None:
            _check_rule(unknown, feature_dim)
        return cls(calibration, unknown)

    def metrics(self) -> dict[str, float | int | str | None]:
        """Return the figures of the confidence that are reported.

        They are the temperature, ``ece_before`` and ``ece_after`` (0..1), and of the unknown rule its false-alarm rate
        ``unknown_rate`` and the share of unknown inputs that it would miss, ``unknown_misses`` (0..1).
        """
        calibration = self.calibration
        rule = self.unknown
        misses = None if rule is None else rule.misses
        return {
            "temperature": None if calibration is None else round(calibration.temperature, 4),
            "ece_before": None if calibration is None else round(calibration.error_before, 4),
            "ece_after": None if calibration is None else round(calibration.error_after, 4),
            "unknown_rate": None if rule is None else rule.rate,
            "unknown_misses": None if misses is None else round(misses.share, 4),
        }

    def __call__(self, probabilities: np.ndarray) -> np.ndarray:
        """Calibrated probabilities (n, K), where the head is calibrated."""
        return probabilities if self.calibration is None else self.calibration(probabilities)

    def is_unknown(self, features: np.ndarray) -> np.ndarray | None:
        """Return which rows of ``features`` (n, d) are unlike the training samples, (n,) bool; None without a rule."""
        return None if self.unknown is None else self.unknown.is_unknown(features)


def _check_rule(rule: UnknownRule, feature_dim: int) -> None:
    """Check that the arrays of a rule have the sizes and values that belong together.

    Raises:
        StateError: they have not, or they are for other features than those of ``feature_dim`` values.
    """
    count = len(rule.rows)
    if rule.rows.ndim != 2 or rule.rows.shape[1] != feature_dim:
        raise StateError(f"confidence: rows {rule.rows.shape}, expected (n, {feature_dim})")
    for name, positions in (("groups", rule.groups), ("labels", rule.labels)):
        if positions is not None and (positions.shape != (count,) or positions.dtype.kind != "i"):
            raise StateError(f"confidence: {name} {positions.dtype} {positions.shape}, expected {count} integers")
    if rule.labels is not None and not 0 <= rule.labels.min() <= rule.labels.max() < MOST_CLASSES:
        raise StateError(f"confidence: labels up to {rule.labels.max()}, expected 0 to {MOST_CLASSES - 1}")
    if rule.misses is not None and not (
        rule.misses.shares and 0 <= min(rule.misses.shares) <= max(rule.misses.shares) <= 1
    ):
        raise StateError(f"confidence: misses {rule.misses.shares}, expected one or more shares of 0 to 1")
    if rule.detector is not None:
        rule.detector.check(feature_dim)


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
