"""From a bundle and local data to a personal head, without torch: the same path for the agent and the command line."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from . import heads
from .bundle import Bundle, EncoderPrecision
from .data import Samples, split
from .encoder import Encoder, Progress
from .errors import HeadwaterError, StateError
from .heads import FitData, Head, saved
from .heads.base import softmax
from .storage import read_tensors, write_tensors

_log = logging.getLogger(__name__)
Given: TypeAlias = "Samples | tuple[Samples, Samples]"
"""All samples of a device, or training and held-out samples."""

_RAW_DIMENSIONS = 4096
"""Raw inputs above this size are averaged down before the local baseline sees them."""


@dataclass(frozen=True)
class Scores:
    """Accuracies, 0..1, on the held-out samples; None where there is nothing to score.

    ``personal``: the personal head on the bundle's features. ``overall``: the shared classifier of the bundle
    (``acc.global``). ``local``: logistic regression on the raw inputs of the same training samples, the bar to beat.
    """

    personal: float | None
    overall: float | None
    local: float | None

    def metrics(self) -> dict[str, float | None]:
        """The scores by the names that are reported everywhere."""
        return {"acc.personal": self.personal, "acc.global": self.overall, "acc.local": self.local}


@dataclass(frozen=True)
class Result:
    """A fitted personal head, its scores, and the encoder it belongs to. ``seconds`` covers features, fit and scores.

    ``fingerprint`` is that of the encoder's variant whose features the head was fitted on.

    ``one_class``: the data have a single class, so the scores are meaningless.
    """

    head: Head
    fingerprint: str
    precision: EncoderPrecision
    class_names: tuple[str, ...]
    scores: Scores
    n_train: int
    n_test: int
    seconds: float
    exactness: str
    one_class: bool = False

    def metrics(self) -> dict[str, float | int | str | None]:
        """Everything that is reported about the fit, by name."""
        return {
            **self.scores.metrics(),
            "head": self.head.name,
            "exactness": self.exactness,
            "precision": self.precision,
            "n_train": self.n_train,
            "n_test": self.n_test,
            "one_class": self.one_class,
            "classes": len(self.head.arrays.get("classes", [0])),
            "seconds": round(self.seconds, 3),
        }

    def save(self, folder: Path) -> Path:
        """Write the head into ``folder``; returns the path of its JSON file."""
        return saved.save(
            folder,
            self.head,
            fingerprint=self.fingerprint,
            precision=self.precision,
            class_names=self.class_names,
            metrics=self.metrics(),
        )


@dataclass(frozen=True)
class Features:
    """Training and test samples with their features, which every head of one bundle is fitted and scored on."""

    train: Samples
    test: Samples
    train_features: np.ndarray
    test_features: np.ndarray
    precision: EncoderPrecision
    fingerprint: str

    @property
    def is_one_class(self) -> bool:
        """Whether training and test samples are all of one single class."""
        labels = np.concatenate([self.train.labels, self.test.labels])
        return len(np.unique(labels)) == 1


def personalize(
    bundle: Bundle,
    samples: Given,
    head: str = "lr",
    params: Mapping[str, Any] | None = None,
    *,
    encoder: Encoder,
    test_fraction: float = 0.25,
    seed: int = 0,
    cache: Path | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
    """A personal head for the bundle's encoder, fitted on one part of ``samples`` and scored on the rest.

    Raises:
        UnknownName: no such head.
        ConfigError: impossible parameters of that head.
        MissingCapability: a package that it needs for fitting is not installed.
        DataError: samples that do not fit the task.
    """
    begin = clock()
    result = extract(samples, encoder, test_fraction=test_fraction, seed=seed, cache=cache, progress=progress)
    fitted = fit(bundle, result, head, params, seed)
    overall, local = score_global(bundle, result), score_local(result, bundle.manifest.task.num_classes, seed)
    scores = Scores(accuracy(fitted.predict_proba, result.test_features, result.test.labels), overall, local)
    return _result(bundle, result, fitted, scores, clock() - begin)


def evaluate_heads(
    bundle: Bundle,
    samples: Given,
    names: Iterable[str] | None = None,
    *,
    encoder: Encoder,
    test_fraction: float = 0.25,
    seed: int = 0,
    cache: Path | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Result], dict[str, str]]:
    """One result for each head that can be fitted here, best first, and the errors of the others.

    ``names`` None = those that the bundle offers, or all that are installed where it names none.
    """
    answer = extract(samples, encoder, test_fraction=test_fraction, seed=seed, cache=cache, progress=progress)
    overall, local = score_global(bundle, answer), score_local(answer, bundle.manifest.task.num_classes, seed)
    results: list[Result] = []
    failed: dict[str, str] = {}
    for name in names if names is not None else (bundle.manifest.heads or heads.names()):
        begin = clock()
        outcome = _try_fit(bundle, answer, name, seed)
        if isinstance(outcome, str):
            failed[name] = outcome
            continue
        scores = Scores(accuracy(outcome.predict_proba, answer.test_features, answer.test.labels), overall, local)
        results.append(_result(bundle, answer, outcome, scores, clock() - begin))
    results.sort(key=lambda result: -(result.scores.personal or 0.0))
    return results, failed


def extract(
    samples: Given,
    encoder: Encoder,
    *,
    test_fraction: float,
    seed: int,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Features:
    """The samples split, with their features, which come from ``cache`` where they were computed before."""
    train, test = samples if isinstance(samples, tuple) else split(samples, test_fraction, seed)
    return Features(
        train,
        test,
        features_of(train, encoder, cache, progress),
        features_of(test, encoder, cache, progress),
        encoder.precision,
        encoder.fingerprint,
    )


def features_of(
    samples: Samples, encoder: Encoder, cache: Path | None = None, progress: Progress | None = None
) -> np.ndarray:
    """Features (n, d) float32 of ``samples``; with ``cache`` (a folder) they are computed once.

    They are found again by the fingerprint of the encoder's variant and the inputs themselves, so a changed picture is
    always noticed.
    """
    if cache is None or not len(samples):
        return encoder.features(samples.inputs, progress)
    place = cache / f"{_cache_key(encoder, samples)}.safetensors"
    known = _cached(place, (len(samples), encoder.feature_dim))
    if known is not None:
        return known
    result = encoder.features(samples.inputs, progress)
    write_tensors(place, {"features": result})
    return result


def fit(bundle: Bundle, features: Features, head: str, params: Mapping[str, Any] | None = None, seed: int = 0) -> Head:
    """A head fitted on the training features; ``params`` win over those that the bundle suggests.

    Raises:
        UnknownName: no such head.
        ConfigError: impossible parameters of that head.
        MissingCapability: a package that it needs for fitting is not installed.
    """
    manifest = bundle.manifest
    suggested = manifest.heads[head].params if head in manifest.heads else {}
    fitted = heads.create(head, {**suggested, **(params or {})})
    data = FitData(
        features.train_features,
        features.train.labels,
        manifest.task.num_classes,
        bundle.global_head(),
        manifest.method_params,
    )
    fitted.fit(data, np.random.default_rng(seed))
    return fitted


def accuracy(predict: Callable[[np.ndarray], np.ndarray], features: np.ndarray, labels: np.ndarray) -> float | None:
    """Share of rows whose most probable class is the label; None without rows."""
    if not len(labels):
        return None
    return float(np.mean(predict(features).argmax(axis=1) == labels))


def score_global(bundle: Bundle, features: Features) -> float | None:
    """Accuracy of the bundle's shared classifier on the test features; None where the bundle has none."""
    shared = bundle.global_head()
    if shared is None:
        return None
    return accuracy(lambda rows: global_probabilities(shared, rows), features.test_features, features.test.labels)


def global_probabilities(shared: Mapping[str, np.ndarray], features: np.ndarray) -> np.ndarray:
    """Class probabilities (n, K) of a shared linear classifier."""
    return softmax(features.astype(np.float64) @ shared["weight"].T + shared["bias"])


def score_local(features: Features, num_classes: int, seed: int = 0) -> float | None:
    """acc.local: logistic regression on the raw inputs of the same training samples."""
    return raw_accuracy(features.train, features.test, num_classes, seed)


def raw_accuracy(train: Samples, test: Samples, num_classes: int, seed: int = 0) -> float | None:
    """acc.local: logistic regression on raw inputs, fitted on ``train`` and scored on ``test``; None without test."""
    if not len(test):
        return None
    alone = heads.create("lr", {"max_iterations": 200})
    alone.fit(FitData(flattened(train.inputs), train.labels, num_classes), np.random.default_rng(seed))
    return accuracy(alone.predict_proba, flattened(test.inputs), test.labels)


def of_one_class(train: Samples, test: Samples) -> bool:
    """Whether training and held-out samples together are of a single class; accuracies are meaningless then."""
    return len({*train.labels.tolist(), *test.labels.tolist()}) == 1


def flattened(inputs: np.ndarray) -> np.ndarray:
    """Inputs (n, channels, ...) as rows of at most 4096 values, averaged over neighbours where they hold more."""
    while int(np.prod(inputs.shape[1:])) > _RAW_DIMENSIONS and max(inputs.shape[2:], default=1) > 1:
        for axis in range(2, inputs.ndim):
            inputs = _halved(inputs, axis)
    return np.ascontiguousarray(inputs.reshape(len(inputs), -1), np.float32)


def load_head(folder: Path, bundle: Bundle, precision: Literal["auto", "fp32", "int8"] = "auto") -> saved.SavedHead:
    """The saved head in ``folder``, if it was fitted on a variant of this bundle's encoder; ``precision``: on that one.

    Raises:
        FingerprintMismatch: it was fitted on another encoder or another variant of it.
        StateError: no head there, damaged, or for other classes than the bundle's.
    """
    known = bundle.fingerprints
    result = saved.load(folder, known if precision == "auto" else {precision: bundle.variant(precision).fingerprint})
    if result.class_names != bundle.manifest.task.class_names:
        raise StateError(
            f"{folder}: head for classes {', '.join(result.class_names[:10])}; the bundle has "
            f"{', '.join(bundle.manifest.task.class_names[:10])}; fit the head again"
        )
    return result


def _try_fit(bundle: Bundle, found: Features, name: str, seed: int) -> Head | str:
    try:
        return fit(bundle, found, name, None, seed)
    except HeadwaterError as error:
        _log.warning("head_not_fitted head=%s reason=%s", name, error)
        return str(error)


def _result(bundle: Bundle, found: Features, fitted: Head, scores: Scores, seconds: float) -> Result:
    card = bundle.manifest.heads.get(fitted.name)
    return Result(
        head=fitted,
        fingerprint=found.fingerprint,
        precision=found.precision,
        class_names=bundle.manifest.task.class_names,
        scores=scores,
        n_train=len(found.train),
        n_test=len(found.test),
        seconds=seconds,
        exactness=card.exactness if card is not None else "not stated",
        one_class=found.is_one_class,
    )


def _halved(inputs: np.ndarray, axis: int) -> np.ndarray:
    """Means of neighbouring pairs along ``axis``; an odd last one is left out."""
    size = inputs.shape[axis] // 2
    if not size:
        return inputs
    even, odd = (inputs.take(range(start, 2 * size, 2), axis=axis) for start in (0, 1))
    return np.asarray((even + odd) / 2)


def _cache_key(encoder: Encoder, samples: Samples) -> str:
    providers = hashlib.sha256(",".join(encoder.providers).encode()).hexdigest()[:4]
    return f"features-{encoder.fingerprint[:32]}-{providers}-{samples.digest[:32]}"


def _cached(place: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """Features from the cache, or None where they are missing or damaged: a cache may always be computed again."""
    try:
        result = read_tensors(place).get("features")
    except HeadwaterError:
        return None
    if result is None or result.shape != shape or result.dtype != np.float32 or not np.isfinite(result).all():
        return None
    return result
