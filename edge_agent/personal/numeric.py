"""Numeric heads on a device: fitted on features, and scored beside what needs no model at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.errors import DataError
from ..data import Samples
from ..heads import numeric
from ..heads.numeric import NumericData, NumericHead
from .local.features import flattened
from .local.validation import folds

FOLDS = 5


def fit_numeric(
    name: str, params: Mapping[str, Any] | None, train: Samples, features: np.ndarray, seed: int = 0
) -> NumericHead:
    """Return a numeric head for training samples with ``features`` (n, d).

    A head for anomalies learns from the normal samples alone.

    Raises:
        UnknownName: no such head.
        ConfigError: impossible parameters of that head.
        DataError: the samples name no numbers, or none is normal.
    """
    head = numeric.create(name, params)
    if not head.predicts_targets:
        rows = np.flatnonzero(is_normal(train, head))
        train = replace(train.take(rows), targets=None)
        features = features[rows]
    elif train.targets is None:
        raise DataError(_no_targets(head))
    parts = folds(train, FOLDS, np.random.default_rng(seed)) if len(train) else []
    head.fit(NumericData(features, train.targets, [(part.train, part.test) for part in parts]))
    return head


def score_numeric(
    head: NumericHead, test: Samples, features: np.ndarray, train: Samples | None = None
) -> dict[str, float | None]:
    """Return scores on held-out samples with ``features`` (n, d), by name; None where there is nothing to score.

    Of predicted numbers: ``rmse.personal``, ``mae.personal`` (in the unit of the target) and ``r2.personal``; with
    ``train`` also ``rmse.local`` of the same head on raw inputs, and ``rmse.mean`` and ``mae.mean`` of always answering
    the mean of the training targets. Of anomalies: ``auroc`` (0..1), ``false_alarms`` and ``detected`` (shares of the
    normal and of the other samples above the threshold, 0..1).

    Raises:
        DataError: the samples name no numbers for a head that predicts them.
    """
    answers = np.empty(0)
    if len(test):
        answers = head.predict(features)
    if not head.predicts_targets:
        return _score_anomalies(head, answers, is_normal(test, head))
    if test.targets is None:
        raise DataError(_no_targets(head))
    scores = _score_numbers(answers, test.targets)
    if train is None:
        return scores
    # What the device could do without the encoder, and without any head, tells whether they are worth it.
    local = fit_numeric(head.name, head.params.model_dump(), train, flattened(train.inputs))
    errors_of_local = np.empty(0)
    if len(test):
        errors_of_local = local.predict(flattened(test.inputs)) - test.targets
    errors_of_mean = np.mean(np.asarray(train.targets)) - test.targets
    return {
        **scores,
        "rmse.local": _root_mean_square(errors_of_local),
        "rmse.mean": _root_mean_square(errors_of_mean),
        "mae.mean": _mean_absolute(errors_of_mean),
    }


def _score_anomalies(head: NumericHead, answers: np.ndarray, normal: np.ndarray) -> dict[str, float | None]:
    """Return how far the answers (n,) for ``normal`` (n,) samples and for others lie apart."""
    scores: dict[str, float | None] = {
        "auroc": auroc(answers[normal], answers[~normal]),
        "false_alarms": None,
        "detected": None,
    }
    if head.threshold is None:
        return scores
    is_alarm = answers > head.threshold
    if normal.any():
        scores["false_alarms"] = float(is_alarm[normal].mean())
    if not normal.all():
        scores["detected"] = float(is_alarm[~normal].mean())
    return scores


def _score_numbers(answers: np.ndarray, targets: np.ndarray) -> dict[str, float | None]:
    """Return the errors of predicted numbers (n,), and the share of the targets' variance that they explain."""
    errors = answers - targets
    variance = float(targets.var()) if len(targets) else 0.0
    explained = None
    if variance > 0:
        explained = 1 - float(np.mean(errors**2)) / variance
    return {
        "rmse.personal": _root_mean_square(errors),
        "mae.personal": _mean_absolute(errors),
        "r2.personal": explained,
    }


def is_normal(samples: Samples, head: NumericHead) -> np.ndarray:
    """Return which samples (n,) are normal; all where they have no labels.

    Raises:
        DataError: no class of that name.
    """
    if not len(samples) or samples.labels.max() < 0:
        return np.ones(len(samples), bool)
    normal = head.params.normal
    if normal not in samples.class_names:
        raise DataError(
            f"no class '{normal}' among {', '.join(samples.class_names[:20])}; name the normal one "
            "(--param normal=NAME)"
        )
    return np.asarray(samples.labels == samples.class_names.index(normal))


def auroc(low: np.ndarray, high: np.ndarray) -> float | None:
    """Return the chance, 0..1, that a score of ``high`` (m,) exceeds one of ``low`` (n,), ties counting half.

    It is None without either.

    The area under the ROC curve (Mann-Whitney's U).
    """
    if not len(low) or not len(high):
        return None
    ordered = np.sort(low)
    below = np.searchsorted(ordered, high, "left")
    up_to = np.searchsorted(ordered, high, "right")
    return float((below + up_to).mean() / (2 * len(low)))


def _root_mean_square(errors: np.ndarray) -> float | None:
    """Return the root of the mean square of errors (n,); None without any."""
    return float(np.sqrt(np.mean(errors**2))) if len(errors) else None


def _mean_absolute(errors: np.ndarray) -> float | None:
    """Return the mean size of errors (n,); None without any."""
    return float(np.abs(errors).mean()) if len(errors) else None


def _no_targets(head: NumericHead) -> str:
    """Return the message about data without numbers for a head that predicts them."""
    return (
        f"head '{head.name}' predicts numbers, and the data name none; give csv:FILE?target=COLUMN, or labels in an "
        "archive (npz) that are decimal numbers"
    )
