"""Personal heads on a device, without torch: a head fitted on the features of a bundle's encoder, and its scores.

The agent and the command line call `personalize` and `evaluate_heads`; `Personalizer` is the interface for Python.
"""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ..bundle.manifest import EncoderPrecision
from ..bundle.unpacked import Bundle
from ..core.errors import HeadwaterError, StateError
from ..data import LeftOut, Samples, split
from ..data.splitting import same_sitting
from ..heads import Head, saved
from ..heads.base import softmax
from ..heads.blend import BlendHead
from ..heads.saved import SavedHead, SavedNumeric, title_of
from .batch_norm import OwnNorm, grade, remains
from .blend import BLEND
from .choice import MOST_ROWS, HeadChoice, cross_validate
from .confidence import Confidence, OutOfFold, calibrate, estimate_confidence
from .encoder import Encoder, Progress, features_of
from .fitting import (
    FitOptions,
    answers_in_folds,
    answers_to_calibrate_by,
    choose_model,
    divisions_of,
    fit,
    heads_to_compare,
    shared_classifier,
)
from .local.details import ClassCount, LabelConflict, WorstSample, class_counts, label_conflicts, worst_samples
from .local.models import MAJORITY, HeadInput, LocalModel, fit_local, prepare_refits
from .local.validation import LearningCurve, is_better, learning_curve

_log = logging.getLogger(__name__)

NOT_STATED = "not stated"
"""The exactness of a head that the bundle's method says nothing about, or whose bundle has no method."""

Given: TypeAlias = "Samples | tuple[Samples, Samples]"
"""All samples of a device, or training and held-out samples."""


@dataclass(frozen=True)
class Scores:
    """Accuracies, 0..1, on the held-out samples; None where there is nothing to score."""

    personal: float | None
    """The accuracy of the personal head on the bundle's features."""

    overall: float | None
    """The accuracy of the bundle's shared classifier (``acc.global``)."""

    local: float | None
    """The accuracy of the best model without the bundle, fitted on the same raw inputs: the bar to beat."""

    local_model: str = ""
    """The name of the best model without the bundle."""

    better_alone: bool = False
    """Whether that model beats the personal head beyond noise (McNemar)."""

    @classmethod
    def of(cls, right: np.ndarray | None, overall: float | None, local: Alone | None) -> Scores:
        """Return the scores for the ``right`` (n,) answers of the personal model.

        ``right`` is None where there are no held-out samples.
        """
        if right is None:
            return cls(None, None, None)
        if local is None:
            return cls(float(right.mean()), overall, None)
        return cls(
            float(right.mean()), overall, float(local.right.mean()), local.model.name, is_better(local.right, right)
        )

    def reported(self) -> dict[str, Any]:
        """Return the fields of a `Report`."""
        return {
            "acc_personal": self.personal,
            "acc_global": self.overall,
            "acc_local": self.local,
            "local_model": self.local_model,
            "better_alone": self.better_alone,
        }

    def accuracies(self) -> dict[str, float | None]:
        """Return the accuracies by the names that are reported everywhere."""
        return {"acc.personal": self.personal, "acc.global": self.overall, "acc.local": self.local}

    def metrics(self) -> dict[str, float | str | None]:
        """Return everything by the names that are reported everywhere."""
        return {**self.accuracies(), "local_model": self.local_model, "better_alone": self.better_alone}


@dataclass(frozen=True)
class Alone:
    """What a device reaches without the federation: the model, and which held-out samples (n,) it answers right."""

    model: LocalModel
    right: np.ndarray

    @classmethod
    def of(cls, model: LocalModel, test: Samples) -> Alone:
        """Return the answers of a model to held-out samples; there may be none."""
        if not len(test):
            return cls(model, np.zeros(0, bool))
        return cls(model, model.predict_proba(test.ready().inputs).argmax(axis=1) == test.labels)


@dataclass(frozen=True)
class Result:
    """A fitted personal head, its scores, and the encoder it belongs to."""

    head: Head
    fingerprint: str
    """The fingerprint of the encoder whose features the head was fitted on."""

    precision: EncoderPrecision
    class_names: tuple[str, ...]
    scores: Scores
    n_train: int
    n_test: int
    exactness: str
    norm: OwnNorm | None
    """The batch norm of the encoder; None where it is the bundle's."""

    norm_metrics: Mapping[str, float | int | str | None]
    one_class: bool = False
    """Whether the data have a single class, so that the scores are meaningless."""

    seconds: float = 0.0
    """The seconds of features, fit and scores, and of the steps before that `with_earlier_steps` added."""

    no_global: str | None = None
    """The reason why there is no ``acc.global``; None where there is one."""

    confidence: Confidence = field(default_factory=Confidence)
    false_alarms: float | None = None
    """The share of the held-out samples, 0..1, that ``confidence`` calls unknown; None where it has no rule for that.
    """

    n_collected: int = 0
    """The number of samples that were added one by one."""

    skipped: tuple[LeftOut, ...] = ()
    """What was left out of all samples because it cannot be used."""

    takes: HeadInput = field(default_factory=HeadInput)
    """What the head takes: the encoder's features, or these and features of the raw inputs."""

    encoder_part: float | None = None
    """The accuracy, 0..1, on the held-out samples of a blend's head on the encoder's features; None: no blend."""

    local: LocalModel | None = None
    """The model that is used instead of encoder and head; None where these are used."""

    steps: Mapping[str, float] = field(default_factory=dict)
    """The seconds of each step."""

    classes: tuple[ClassCount, ...] = ()
    """The counts of the held-out samples by class."""

    worst: tuple[WorstSample, ...] = ()
    """The samples with the worst answers: held-out ones, or of all samples if doubtful labels were asked for."""

    conflicts: tuple[LabelConflict, ...] = ()
    """Near-duplicates with different labels; none unless doubtful labels were asked for."""

    budget: Budget | None = None
    """What the head costs, as `evaluate_heads` measures it."""

    choice: HeadChoice | None = None
    """How the head was chosen; None where it was named."""

    answers: OutOfFold | None = None
    """What heads like it answered in cross-validation on the training samples; None: there was none."""

    learned: np.ndarray | None = None
    """Digests of the training samples, as in `SavedHead`."""

    same_sitting: float | None = None
    """The share of the held-out samples, 0..1, whose recording is learned from as well; None without recordings.

    The larger it is, the less the scores say about a new recording.
    """

    @property
    def title(self) -> str:
        """What answers, for people: the head's name, or that of the local model."""
        return title_of(self.head, self.takes) if self.local is None else self.local.name

    @property
    def encoder_share(self) -> float | None:
        """The share, 0..1, of the head on the encoder's features in a blend; None: it is none."""
        if self.takes.local is None or not isinstance(self.head, BlendHead):
            return None
        return float(self.head.params.share)

    @property
    def used_accuracy(self) -> float | None:
        """Accuracy, 0..1, of what answers: the head, or the local model."""
        return self.scores.personal if self.local is None else self.scores.local

    def details(self) -> dict[str, Any]:
        """Return counts of the classes, the worst samples and the doubtful labels, as JSON has them."""
        return {
            "per_class": [asdict(row) for row in self.classes],
            "worst": [asdict(row) for row in self.worst],
            "conflicts": [asdict(row) for row in self.conflicts],
        }

    def metrics(self) -> dict[str, float | int | str | None]:
        """Return everything that is reported about the fit, by name."""
        return {
            **self.scores.metrics(),
            "head": self.title,
            "acc.encoder_part": self.encoder_part,
            "exactness": self.exactness,
            "precision": self.precision,
            **self.norm_metrics,
            "n_train": self.n_train,
            "n_test": self.n_test,
            "n_collected": self.n_collected,
            "n_skipped": len(self.skipped),
            "skipped_first": str(self.skipped[0])[:300] if self.skipped else None,
            "same_sitting": self.same_sitting,
            "one_class": self.one_class,
            "classes": len(self.head.arrays.get("classes", [0])),
            "no_global": self.no_global,
            **self.confidence.metrics(),
            "false_alarms": self.false_alarms,
            "seconds": round(self.seconds, 3),
            **{f"{step}_seconds": round(seconds, 3) for step, seconds in self.steps.items()},
            **(self.choice.metrics() if self.choice is not None else {}),
        }

    def with_earlier_steps(self, steps: Mapping[str, float]) -> Result:
        """Return this result with the seconds of steps before its own, such as reading the samples."""
        return replace(self, steps={**steps, **self.steps}, seconds=self.seconds + sum(steps.values()))

    def save(self, folder: Path) -> Path:
        """Write the head into ``folder``; returns the path of its JSON file."""
        head = self.head
        takes = self.takes
        confidence = self.confidence
        if self.local is not None:
            head = self.local.head
            takes = HeadInput(self.local.features)
            confidence = Confidence()
        bound = self.fingerprint, self.precision, self.class_names
        return saved.save(folder, SavedHead(head, *bound, self.metrics(), confidence, self.norm, takes, self.learned))


@dataclass(frozen=True)
class Budget:
    """What a head costs a device beside the encoder: peak memory of its fit, saved size and seconds for one answer.

    Sizes are in bytes. What a blend takes out of the raw inputs is part of all three.
    """

    fit_bytes: int
    saved_bytes: int
    answer_s: float

    def metrics(self) -> dict[str, float]:
        """Return the budget by the names of JSON, in MB (10^6 bytes), kB and milliseconds."""
        return {
            "fit_mb": round(self.fit_bytes / 1e6, 2),
            "saved_kb": round(self.saved_bytes / 1e3, 1),
            "answer_ms": round(1e3 * self.answer_s, 4),
        }


class Rows(NamedTuple):
    """What a head takes of training and of held-out samples, (n, d) float32 each."""

    train: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Features:
    """Training and held-out samples with their features, which every head of one bundle is fitted and scored on.

    ``overall`` and ``local`` are the scores that do not depend on the head; see `Scores`. ``steps``: seconds of each
    step that came before.
    """

    bundle: Bundle
    encoder: Encoder
    options: FitOptions
    train: Samples
    test: Samples
    train_features: np.ndarray
    test_features: np.ndarray
    overall: float | None
    local: Alone | None
    steps: Mapping[str, float] = field(default_factory=dict)

    def rows(self, takes: HeadInput) -> Rows:
        """Return what a head takes of all samples. With features of the raw inputs that can take seconds."""
        train = takes.rows(lambda: self.train_features, lambda: self.train.ready().inputs)
        test = takes.rows(lambda: self.test_features, lambda: self.test.ready().inputs)
        return Rows(train, test)

    def scores(self, probabilities: np.ndarray) -> Scores:
        """Return the scores for a head's ``probabilities`` (n, K) of the held-out samples."""
        right = probabilities.argmax(axis=1) == self.test.labels
        return Scores.of(right if len(right) else None, self.overall, self.local)


def personalize(bundle: Bundle, samples: Given, encoder: Encoder, options: FitOptions | None = None) -> Result:
    """Return a personal head for the bundle's encoder, fitted on one part of ``samples`` and scored on the rest.

    Raises:
        UnknownName: no such head.
        ConfigError: impossible parameters of that head.
        MissingCapability: a package that it needs for fitting is not installed.
        DataError: samples that do not fit the task.
    """
    options = options or FitOptions()
    started_at = options.clock()
    features = extract(bundle, samples, encoder, options)
    fit_begin = options.clock()
    result, rows = _fit_and_score(features, options)
    fitted = options.clock()
    answers = answers_to_calibrate_by(bundle, result.head, features.train, rows.train, options, result.answers)
    confidence = estimate_confidence(features.train, features.train_features, answers, options.unknown)
    result = replace(result, answers=answers)
    if options.doubtful_labels:
        result = _with_doubtful_labels(features, result, rows)
    unknown = confidence.is_unknown(features.test_features)
    false_alarms = None if unknown is None or not len(unknown) else round(float(unknown.mean()), 4)
    steps = {**features.steps, "head": fitted - fit_begin, "confidence": options.clock() - fitted}
    if options.allow_local and features.local is not None and _is_used_alone(features, features.local, result):
        result = replace(result, local=features.local.model)
    learned = features.train.row_digests()
    return replace(
        result,
        confidence=confidence,
        false_alarms=false_alarms,
        steps=steps,
        learned=learned,
        seconds=options.clock() - started_at,
    )


def _is_used_alone(features: Features, local: Alone, result: Result) -> bool:
    """Return whether the local model takes the head's place.

    It has to be better beyond noise, or surer in the head's cross-validation.
    """
    if result.scores.better_alone or local.model.name == MAJORITY:
        return result.scores.better_alone
    train = features.train.ready()
    options = features.options
    names = features.train.class_names
    divisions = divisions_of(train, options)

    head_rows, _ = features.rows(result.takes)

    def fit_rows(name: str, rows: np.ndarray) -> Head:
        alike = replace(options, head=name, params=result.head.params.model_dump())
        return fit(features.bundle, head_rows[rows], train.labels[rows], alike, names)

    head = cross_validate(result.head.name, fit_rows, head_rows, train.labels, divisions)
    rows, refit = prepare_refits(local.model.features, train.inputs, train.labels, len(names), options.seed)
    return cross_validate(local.model.name, refit, rows, train.labels, divisions).is_surer_than(head)


def evaluate_heads(features: Features, names: Iterable[str] | None = None) -> tuple[list[Result], dict[str, str]]:
    """Return one result for each head that can be fitted here, best first, and the errors of the others.

    ``names`` None = those that head "auto" compares, with the blend where there is a local model to blend with.
    """
    results: list[Result] = []
    failed: dict[str, str] = {}
    if names is None:
        names = heads_to_compare(features.bundle, features.train, features.options)
        if features.local is not None and features.local.model.name != MAJORITY:
            names = (*names, BLEND)
    for name in names:
        options = replace(features.options, head=name, params={})
        try:
            results.append(_measured(features, options))
        except HeadwaterError as error:
            _log.warning("head_not_fitted head=%s reason=%s", name, error)
            failed[name] = str(error)
    results.sort(key=lambda result: -(result.scores.personal or 0.0))
    return results, failed


def _measured(features: Features, options: FitOptions) -> Result:
    """Return the result of a head with what it costs; memory is what numpy takes, which is nearly all."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        started_at = options.clock()
        result, rows = _fit_and_score(features, options)
        seconds = options.clock() - started_at
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # An answer takes features of the raw inputs, where the head has any; those of the encoder cost all heads the same.
    some_rows = rows.train[:256]
    some_inputs = features.train.take(np.arange(len(some_rows))).ready().inputs
    started_at = options.clock()
    if result.takes.local is not None:
        result.takes.local(some_inputs)
    result.head.predict_proba(some_rows)
    answer_s = (options.clock() - started_at) / len(some_rows)
    budget = Budget(peak - before, bytes_saved(result.head, result.takes), answer_s)
    return replace(result, seconds=seconds, budget=budget)


def bytes_saved(head: Head, takes: HeadInput) -> int:
    """Return the bytes of the arrays that are saved of a head, with those that its features of raw inputs need."""
    arrays = list(head.arrays.values())
    if takes.local is not None:
        arrays += takes.local.learned.values()
    return sum(array.nbytes for array in arrays)


def with_doubtful_labels(features: Features, result: Result) -> Result:
    """Return the result of a head with the worst of all samples, and near-duplicates that have different labels."""
    return _with_doubtful_labels(features, result, features.rows(result.takes))


def _with_doubtful_labels(features: Features, result: Result, rows: Rows) -> Result:
    """Return the result as `with_doubtful_labels` does; ``rows``: the features that the head takes."""
    train = features.train
    test = features.test
    answers = result.answers
    # 1. The answers to training samples. Those by which the head was chosen or calibrated serve here, too, if they are
    # to all samples. Otherwise heads learn from as many samples as heads are compared on, so that the time does not
    # grow with the samples that were collected.
    if answers is None or len(answers.rows) < len(train):
        try:
            answers = answers_in_folds(
                features.bundle, result.head, train, rows.train, features.options, most_rows=MOST_ROWS
            )
        except HeadwaterError as error:  # a head that needs more samples than a fold has
            _log.warning("labels_not_looked_at head=%s reason=%s", result.head.name, error)
            answers = None
    probabilities = result.head.predict_proba(rows.test)
    # 2. Probabilities are compared as the device gives them: calibrated, where there are answers enough for that.
    # Otherwise a head with small ones, such as prototype, would have right answers among the worst samples.
    if answers is not None:
        calibration = calibrate(answers.probabilities, train.labels[answers.rows], answers.folds)
        if calibration is not None:
            probabilities = calibration(probabilities)
            answers = replace(answers, probabilities=calibration(answers.probabilities))
    return replace(
        result,
        worst=tuple(worst_samples(train, answers, test, probabilities)),
        conflicts=tuple(label_conflicts(train, features.train_features, test, features.test_features)),
    )


def curve(features: Features, result: Result) -> LearningCurve:
    """Return the accuracy of a head like that of ``result`` by number of samples, in cross-validation."""
    options = replace(features.options, head=result.head.name, params=result.head.params.model_dump())
    labels = features.train.labels
    train_rows, _ = features.rows(result.takes)

    def score(rows: np.ndarray, tested: np.ndarray) -> int:
        names = features.train.class_names
        fitted = fit(features.bundle, train_rows[rows], labels[rows], options, names)
        answers = fitted.predict_proba(train_rows[tested]).argmax(axis=1)
        return int((answers == labels[tested]).sum())

    return learning_curve(score, features.train, np.random.default_rng(options.seed))


def _fit_and_score(features: Features, options: FitOptions) -> tuple[Result, Rows]:
    """Fit a head on the training samples and score it on the held-out ones; return what it takes of them, too.

    Raises:
        HeadwaterError: as `fit`.
    """
    # 1. The head, or its blend with the local model.
    names = features.train.class_names
    train = features.train
    encoder = features.encoder
    local = None if features.local is None else features.local.model
    chosen = choose_model(features.bundle, train, features.train_features, options, local)
    rows = features.rows(chosen.takes)
    fitted = fit(features.bundle, rows.train, train.labels, chosen.options, names)
    # 2. How closely it follows the head of the method.
    exactness = NOT_STATED
    card = features.bundle.manifest.heads.get(fitted.name)
    if card is not None:
        exactness = card.exactness
    lacks_shared = chosen.options.withholds_shared or shared_classifier(features.bundle, names) is None
    if fitted.uses_shared and lacks_shared:
        exactness = "approximate"
    # 3. Its answers to the held-out samples.
    answers = fitted.predict_proba(rows.test)
    test = features.test
    result = Result(
        head=fitted,
        fingerprint=encoder.fingerprint,
        precision=encoder.precision,
        class_names=names,
        scores=features.scores(answers),
        n_train=len(features.train),
        n_test=len(features.test),
        skipped=tuple(dict.fromkeys((*train.skipped, *features.test.skipped))),
        exactness=grade(exactness, encoder.norm),
        norm=encoder.norm,
        norm_metrics=norm_metrics(features.bundle, encoder),
        one_class=of_one_class(train, features.test),
        no_global=why_no_global(features.bundle, names),
        classes=tuple(class_counts(train, test, answers.argmax(axis=1))),
        worst=tuple(worst_samples(train, None, test, answers)),
        choice=chosen.choice,
        answers=chosen.answers,
        takes=chosen.takes,
        encoder_part=score_encoder_part(fitted, chosen.takes, rows.test, test.labels),
        same_sitting=same_sitting(train, features.test),
    )
    return result, rows


def norm_metrics(bundle: Bundle, encoder: Encoder) -> dict[str, float | int | str | None]:
    """Return what is reported about an encoder's batch norm: whose it is, why, and how it differs from the method's."""
    return {
        "norm": "shipped" if encoder.norm is None else "own",
        "norm_inputs": 0 if encoder.norm is None else encoder.norm.inputs,
        "norm_why": encoder.why_norm,
        "norm_remains": remains(bundle.manifest, encoder.norm),
    }


def extract(bundle: Bundle, samples: Given, encoder: Encoder, options: FitOptions | None = None) -> Features:
    """Return training and held-out samples, with features that come from the cache where they were computed before."""
    options = options or FitOptions()
    train, test = samples if isinstance(samples, tuple) else split(samples, 0.25, options.seed)
    started_at = options.clock()
    train_features, test_features = (
        features_of(part, encoder, options.cache, options.progress("features")) for part in (train, test)
    )
    computed = options.clock()
    local = None
    if options.local:
        rng = np.random.default_rng(options.seed)
        local = Alone.of(fit_local(train, len(train.class_names), rng, options.progress("local model")), test)
    return Features(
        bundle,
        encoder,
        options,
        train,
        test,
        train_features,
        test_features,
        overall=score_global(bundle, test_features, test),
        local=local,
        steps={"features": computed - started_at, "local": options.clock() - computed},
    )


def accuracy(predict: Callable[[np.ndarray], np.ndarray], features: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the share of rows whose most probable class is the label; None without rows."""
    if not len(labels):
        return None
    return float(np.mean(predict(features).argmax(axis=1) == labels))


def why_no_global(bundle: Bundle, class_names: tuple[str, ...]) -> str | None:
    """Return why samples of these classes have no ``acc.global``; None where they have."""
    bundle_classes = bundle.manifest.task.class_names
    if bundle.manifest.global_head is None:
        return "the bundle has no shared classifier"
    if class_names == bundle_classes:
        return None
    unknown_classes = [name for name in class_names if name not in bundle_classes]
    more = f" and {len(unknown_classes) - 10} more" if len(unknown_classes) > 10 else ""
    if not unknown_classes:
        return "the bundle's shared classifier has its classes in another order"
    return f"the bundle's shared classifier does not know {', '.join(unknown_classes[:10])}{more}"


def score_global(bundle: Bundle, features: np.ndarray, samples: Samples) -> float | None:
    """Return the accuracy of the bundle's shared classifier; None where the bundle has none that knows the classes."""
    shared = shared_classifier(bundle, samples.class_names)
    if shared is None:
        return None
    return accuracy(lambda rows: global_probabilities(shared, rows), features, samples.labels)


def global_probabilities(shared: Mapping[str, np.ndarray], features: np.ndarray) -> np.ndarray:
    """Return class probabilities (n, K) of a shared linear classifier."""
    return softmax(features.astype(np.float64) @ shared["weight"].T + shared["bias"])


def saved_features(
    head: SavedHead | None,
    encoder: Encoder,
    samples: Samples,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> np.ndarray:
    """Return what a saved head takes of samples, (n, d) float32: as `HeadInput` says, by default encoder's features."""
    takes = HeadInput() if head is None else head.takes
    return takes.rows(lambda: features_of(samples, encoder, cache, progress), lambda: samples.ready().inputs)


def score_saved(
    bundle: Bundle,
    head: SavedHead,
    encoder: Encoder,
    test: Samples,
    options: FitOptions,
    train: Samples | None = None,
) -> tuple[Scores, np.ndarray]:
    """Return the scores of a saved head on samples that it was not fitted on, and the features (n, d) that it took.

    ``train``: the samples that it was fitted on, from which a device alone would learn; None: they are not at hand, and
    there is no ``acc.local``.
    """
    rows = encoded = features_of(test, encoder, options.cache, options.progress("features"))
    if head.takes.local is not None:
        rows = head.takes.rows(lambda: encoded, lambda: test.ready().inputs)
    right = head.head.predict_proba(rows).argmax(axis=1) == test.labels
    local = None
    if options.local and train is not None:
        local = alone(train, test, len(test.class_names), options.seed, options.progress("local model"))
    return Scores.of(right if len(right) else None, score_global(bundle, encoded, test), local), rows


def score_encoder_part(head: Head, takes: HeadInput, rows: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the accuracy, 0..1, of a blend's head on the encoder's features; None: it is no blend, or no rows."""
    if takes.local is None or not isinstance(head, BlendHead) or not len(labels):
        return None
    of_encoder, _ = head.answers_of_parts(rows)
    return float((of_encoder.argmax(axis=1) == labels).mean())


def probabilities(bundle: Bundle, head: SavedHead | None, features: np.ndarray) -> np.ndarray:
    """Return class probabilities (n, K) of a head, or of the bundle's shared classifier where there is no head.

    Raises:
        UsageError: there is neither.
    """
    if head is not None:
        return head.predict_proba(features)
    return global_probabilities(bundle.require_global_head(), features)


def alone(
    train: Samples, test: Samples, num_classes: int, seed: int = 0, progress: Progress | None = None
) -> Alone | None:
    """Return the best local model for ``train``, scored on ``test``; None without samples to score it on.

    Raises:
        DataError: inputs with NaN or infinity.
    """
    if not len(test):
        return None
    model = fit_local(train, num_classes, np.random.default_rng(seed), progress)
    return Alone.of(model, test)


def log_if_better_alone(scores: Scores) -> None:
    """Warn where the local model beats the personal one beyond noise."""
    if scores.better_alone:
        text = "better_alone acc.local=%.3f model='%s' acc.personal=%.3f: this device is better off alone"
        _log.warning(text, scores.local or 0.0, scores.local_model, scores.personal or 0.0)


def of_one_class(train: Samples, test: Samples) -> bool:
    """Return whether training and held-out samples together are of a single class; accuracies are meaningless then."""
    return len({*train.labels.tolist(), *test.labels.tolist()}) == 1


def load_numeric_head(
    folder: Path, bundle: Bundle, precision: Literal["auto", "fp32", "int8"] = "auto"
) -> SavedNumeric:
    """Return the saved numeric head in ``folder``; otherwise as `load_head`."""
    fingerprints = bundle.fingerprints
    return saved.load_numeric(
        folder, fingerprints if precision == "auto" else {precision: bundle.variant(precision).fingerprint}
    )


def load_head(folder: Path, bundle: Bundle, precision: Literal["auto", "fp32", "int8"] = "auto") -> SavedHead:
    """Return the saved head in ``folder``, if it was fitted on a variant of this bundle's encoder.

    With a ``precision`` it has to be the variant of that precision.

    Its classes are its own: they need not be the bundle's.

    Raises:
        FingerprintMismatch: it was fitted on another encoder or another variant of it.
        StateError: no head there, a damaged one, or one that takes raw inputs of another form than the bundle's.
    """
    fingerprints = bundle.fingerprints
    head = saved.load(
        folder, fingerprints if precision == "auto" else {precision: bundle.variant(precision).fingerprint}
    )
    local = head.takes.local
    if local is not None and local.input != bundle.manifest.task.input:
        raise StateError(f"{folder}: head '{head.title}' takes inputs of another form than the bundle's; fit it again")
    return head
