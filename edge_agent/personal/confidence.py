"""How far the answers of a head can be trusted: calibrated probabilities, and the rule for unknown inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
"""The least number of cross-validated answers from which probabilities are calibrated."""

_SMALLEST = 1e-30
"""Replaces a probability of 0 before its logarithm is taken."""

_BINS = 10
"""Bins of the expected calibration error."""

_FOLDS = 5
"""Folds of the cross-validation that calibrates a head."""


@dataclass(frozen=True)
class Calibration:
    """A temperature by which all probabilities of a head are calibrated (Guo et al., ICML 2017).

    Attributes:
        temperature: The temperature, above 0; above 1 it makes probabilities less extreme.
        error_before: The expected calibration error without it, 0..1.
        error_after: The expected calibration error with it, 0..1, on samples that it was not chosen by.
    """

    temperature: float
    error_before: float
    error_after: float

    def __call__(self, probabilities: np.ndarray) -> np.ndarray:
        """Return calibrated probabilities (n, K); the most probable class stays the same, and 0 stays 0."""
        return apply_temperature(probabilities, self.temperature)

    def write(self, graph: Graph, probabilities: Value) -> Value:
        """Write the calibration of ``probabilities`` (n, K) float64 as operators."""
        logs = graph.add("Log", graph.add("Max", probabilities, np.array([_SMALLEST])))
        calibrated = graph.softmax(graph.add("Div", logs, np.array(self.temperature)))
        return graph.add("Where", graph.add("Greater", probabilities, np.array(0.0)), calibrated, np.array(0.0))


def calibrate(probabilities: np.ndarray, labels: np.ndarray, folds: np.ndarray) -> Calibration | None:
    """Return the temperature with the smallest log loss, from the answers of cross-validation.

    Args:
        probabilities: The answers to samples that their head has not learned from, (n, K).
        labels: The class of each sample, (n,) integers below K.
        folds: The fold that each sample was tested in, (n,).

    Returns:
        The calibration; None with fewer than `LEAST_FOR_CALIBRATION` answers, and if it does not lower the expected
        calibration error.
    """
    if len(labels) < LEAST_FOR_CALIBRATION:
        return None
    # 1. The error on new samples: each fold is calibrated by the temperature of the other folds.
    after = np.empty_like(probabilities)
    for fold in np.unique(folds):
        is_tested = folds == fold
        is_fitted = ~is_tested
        if not is_fitted.any():  # there is only one fold
            is_fitted = is_tested
        temperature = best_temperature(probabilities[is_fitted], labels[is_fitted])
        after[is_tested] = apply_temperature(probabilities[is_tested], temperature)
    error_before = calibration_error(probabilities, labels)
    error_after = calibration_error(after, labels)
    if error_after >= error_before:
        return None
    # 2. The temperature itself comes from all answers.
    return Calibration(best_temperature(probabilities, labels), error_before, error_after)


def calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return the expected calibration error, 0..1.

    It is the mean difference between confidence and accuracy in ten bins with equal numbers of samples.

    Args:
        probabilities: The probabilities of the classes, (n, K); n is at least 1.
        labels: The right classes, (n,) integers below K.
    """
    confidence = probabilities.max(axis=1)
    is_correct = probabilities.argmax(axis=1) == labels
    # Samples are sorted by confidence and divided into bins; each bin counts by its number of samples.
    bins = np.array_split(np.argsort(confidence, kind="stable"), _BINS)
    weighted = [abs(confidence[rows].mean() - is_correct[rows].mean()) * len(rows) for rows in bins if len(rows)]
    return float(sum(weighted) / len(labels))


def apply_temperature(probabilities: np.ndarray, temperature: float) -> np.ndarray:
    """Return the softmax of log probabilities (n, K) over the temperature; 0 stays 0."""
    result = softmax(np.log(np.maximum(probabilities, _SMALLEST)) / temperature)
    return np.where(probabilities > 0, result, 0.0)


def log_losses(probabilities: np.ndarray, labels: np.ndarray, temperature: float) -> np.ndarray:
    """Return the log loss (n,), 0 or more, of probabilities (n, K) after calibration; each counts as at least 1e-12."""
    calibrated = softmax(np.log(np.maximum(probabilities, 1e-12)) / temperature)
    of_right_class = calibrated[np.arange(len(labels)), labels]
    return np.asarray(-np.log(np.maximum(of_right_class, 1e-12)))


def best_temperature(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature from 0.1 to 10 with the smallest mean log loss.

    Args:
        probabilities: The probabilities of the classes, (n, K).
        labels: The right classes, (n,) integers below K.
    """

    def mean_loss(exponent: float) -> float:
        return float(log_losses(probabilities, labels, 10.0**exponent).mean())

    # Golden-section search over the logarithm of the temperature. 30 steps narrow the interval to 0.000001 of a decade.
    low = -1.0
    high = 1.0
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(30):
        lower = high - ratio * (high - low)
        upper = low + ratio * (high - low)
        if mean_loss(lower) <= mean_loss(upper):
            high = upper
        else:
            low = lower
    return float(10.0 ** ((low + high) / 2))


@dataclass(frozen=True)
class Confidence:
    """How reliable a head is.

    Attributes:
        calibration: How its probabilities are calibrated; None: they are not.
        unknown: The rule for unknown inputs; None: there is none, and no input is unknown.
    """

    calibration: Calibration | None = None
    unknown: UnknownRule | None = None

    def arrays(self) -> Tensors:
        """Return everything as named arrays, for `from_arrays`."""
        result: Tensors = {}
        calibration = self.calibration
        if calibration is not None:
            errors = (calibration.error_before, calibration.error_after)
            result["calibration"] = np.array([calibration.temperature, *errors])
        if self.unknown is not None:
            result.update(self.unknown.arrays())
        return result

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], feature_dim: int) -> Confidence:
        """Return the confidence whose `arrays` these are; ``feature_dim``: the number of features of the encoder.

        Raises:
            StateError: The arrays are incomplete, out of range, or belong to another number of features.
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
            unknown.check(feature_dim)
        return cls(calibration, unknown)

    def metrics(self) -> dict[str, float | int | str | None]:
        """Return the metrics that are reported.

        They are the temperature, the expected calibration error ``ece_before`` and ``ece_after`` (0..1), the
        false-alarm rate ``unknown_rate`` (0..1) of the rule for unknown inputs, and the share ``unknown_misses`` (0..1)
        of unknown inputs that it would miss.
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
        """Return probabilities (n, K), calibrated if the head is calibrated."""
        return probabilities if self.calibration is None else self.calibration(probabilities)

    def is_unknown(self, features: np.ndarray) -> np.ndarray | None:
        """Return which rows of ``features`` (n, d) are unlike the training samples, (n,) bool; None without a rule."""
        return None if self.unknown is None else self.unknown.is_unknown(features)


@dataclass(frozen=True)
class OutOfFold:
    """The answers of cross-validation: each sample is answered by a head that was fitted on the other folds.

    Attributes:
        rows: The positions of the samples, (m,), each at most once.
        probabilities: The answers, (m, K).
        folds: The number of the fold that each sample was tested in, (m,).
    """

    rows: np.ndarray
    probabilities: np.ndarray
    folds: np.ndarray

    @classmethod
    def of_folds(cls, tested: Sequence[np.ndarray], answers: Sequence[np.ndarray]) -> OutOfFold:
        """Return the answers of all folds in one piece.

        Args:
            tested: The positions (m,) of the samples that each fold was tested on; at least one fold.
            answers: The probabilities (m, K) there.
        """
        sizes = [len(rows) for rows in tested]
        return cls(np.concatenate(tested), np.concatenate(answers), np.repeat(np.arange(len(tested)), sizes))


def out_of_fold(
    samples: Samples,
    features: np.ndarray,
    fit: Callable[[np.ndarray], Callable[[np.ndarray], np.ndarray]],
    seed: int = 0,
    most_folds: int = _FOLDS,
) -> OutOfFold | None:
    """Return the answers of cross-validation to training samples; None if they cannot be divided into folds.

    Args:
        samples: The training samples.
        features: Their features, (n, d).
        fit: Takes the positions of the samples to learn from. Returns a function from features (m, d) to
            probabilities (m, K). It is called once for each fold.
        seed: The seed by which samples are divided into five folds.
        most_folds: Only the samples of so many of the folds are answered.
    """
    parts = folds(samples, _FOLDS, np.random.default_rng(seed))[:most_folds]
    if not parts:
        return None
    answers = [fit(fold.train)(features[fold.test]) for fold in parts]
    return OutOfFold.of_folds([fold.test for fold in parts], answers)


def estimate_confidence(samples: Samples, features: np.ndarray, answers: OutOfFold | None, rate: float) -> Confidence:
    """Return the confidence of a head.

    Args:
        samples: The training samples of the head.
        features: Their features, (n, d).
        answers: The answers of cross-validation, by which the head is calibrated; None: there are none.
        rate: The false-alarm rate of the rule for unknown inputs, 0..1; 0: no rule.
    """
    calibration = None
    if answers is not None:
        calibration = calibrate(answers.probabilities, samples.labels[answers.rows], answers.folds)
    unknown = None
    if rate:
        unknown = UnknownRule.fit(features, rate, samples.groups, samples.labels)
    return Confidence(calibration, unknown)
