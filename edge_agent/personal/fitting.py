"""Which head is fitted on a device, how it is fitted, and how reliable it is: from samples and their features.

`choose_model` decides between heads and blends, `fit` fits what was chosen, `answers_to_calibrate_by` has the answers
for its calibration. What a whole fit consists of, from samples to scores, is in `personalize`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import heads
from ..bundle.unpacked import Bundle
from ..core.errors import UsageError
from ..core.task import Tensors
from ..data import Samples
from ..heads import AUTO, FitData, Head
from .blend import BLEND, BOTH, LOCAL, add_blends
from .choice import BUDGET_S, FOLDS, MOST_ROWS, HeadChoice, Trial, candidates, choose, cross_validate, thin_out
from .confidence import LEAST_FOR_CALIBRATION, OutOfFold, out_of_fold
from .detectors import part_of
from .encoder import Progress
from .local.models import MAJORITY, MOST_SAMPLES, HeadInput, LocalFeatures, LocalModel, prepare_refits
from .local.models import candidates as local_candidates
from .local.validation import Fold, folds, sitting_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitOptions:
    """How a device fits and scores a personal head; one value for the library, the agent and the command line."""

    head: str = "lr"
    """The name of the head, or auto for the best in cross-validation on the training samples."""

    params: Mapping[str, Any] = field(default_factory=dict)
    """The head's parameters, which win over those that the bundle suggests for it; none with head auto."""

    seed: int = 0
    """The seed of the split (where samples do not come divided), of folds and of the fit."""

    cache: Path | None = None
    """The folder in which computed features are kept; None: they are not."""

    unknown: float = 0.05
    """The share of inputs like the training samples, 0..1, that may be called unknown; 0: none ever is."""

    progress: Callable[[str], Progress | None] = lambda _step: None
    """A function from the name of a step to how its progress is reported."""

    local: bool = True
    """Whether to find what the device reaches alone, which takes a second or two."""

    blend: bool = True
    """Whether head auto also tries to blend the best head with the model that the device could fit alone."""

    allow_local: bool = False
    """Whether the local model is used where it is better than the head beyond noise, or surer in cross-validation."""

    doubtful_labels: bool = False
    """Whether labels that may be wrong are looked for: that takes a fit for each of five folds and compares all pairs.
    """

    took_part: bool = False
    """Whether the device has contributed these samples to the run that the bundle comes from."""

    withholds_shared: bool = False
    """Whether heads learn without the shared classifier and statistics of the bundle; head auto decides this itself,
    see `has_learned_samples`."""

    clock: Callable[[], float] = time.perf_counter
    """A function that gives seconds."""

    def __post_init__(self) -> None:
        """Check the share of unknown inputs.

        Raises:
            UsageError: it is impossible.
        """
        if not 0 <= self.unknown < 1:
            raise UsageError(f"unknown={self.unknown}: expected a share of inputs, 0 or more and below 1")


@dataclass(frozen=True)
class Chosen:
    """What is to be fitted.

    Attributes:
        options: The options with the name of the head, which is not auto, and its parameters.
        choice: How the head was chosen; None where it was named.
        takes: What it takes.
        answers: What models like it answered in the cross-validation of the choice; None where the head was named, and
            where there was no time for two folds.
    """

    options: FitOptions
    choice: HeadChoice | None
    takes: HeadInput = field(default_factory=HeadInput)
    answers: OutOfFold | None = None


def choose_model(
    bundle: Bundle, samples: Samples, encoded: np.ndarray, options: FitOptions, local: LocalModel | None
) -> Chosen:
    """Return which head is fitted, and on what: with head auto the best head, or its blend with the local model.

    Args:
        bundle: The bundle of the encoder.
        samples: The training samples.
        encoded: Their features (n, e) float32 by the encoder.
        options: The options; head ``blend`` without parameters is the blend of the best head with the local model.
        local: The best model of the raw inputs; None: it is not known.

    Raises:
        UsageError: A blend is asked for, and there is no local model to blend with.
        HeadwaterError: No head can be fitted.
    """
    only_blend = options.head == BLEND and not options.params
    # 1. What a blend would be with: the most frequent class is no model of the inputs.
    has_local = local is not None and local.name != MAJORITY
    if only_blend and not has_local:
        raise UsageError(_why_no_blend(local))
    # 2. The best head.
    if only_blend:
        options = replace(options, head=AUTO)
    options, choice = best_head(bundle, samples, encoded, options)
    chosen = Chosen(options, choice)
    # 3. Whether it is better blended. A head that was named stays as it is.
    is_blend_tried = has_local and (only_blend or options.blend)
    if local is not None and choice is not None and is_blend_tried:
        chosen = _choose_blend(bundle, samples, encoded, chosen, local.features, only_blend=only_blend)
    return _with_answers(chosen, samples)


def _with_answers(chosen: Chosen, samples: Samples) -> Chosen:
    """Return the choice with the answers of its cross-validation in one piece, and none left in its trials."""
    choice = chosen.choice
    if choice is None:
        return chosen
    answers = None
    taken = choice.trials[0]
    # A blend that was asked for may be unmeasured: the first trial is that of its head then.
    if taken.name == choice.name and len(taken.answers) >= 2:
        divisions = divisions_of(samples, chosen.options)[: len(taken.answers)]
        answers = OutOfFold.of_folds([fold.test for fold in divisions], taken.answers)
    for trial in choice.trials:
        trial.answers.clear()
    return replace(chosen, answers=answers)


def _why_no_blend(local: LocalModel | None) -> str:
    """Return why there is no blend with this local model, and what to do."""
    if local is None:
        return (
            "head 'blend' needs a model of the raw inputs, and none was fitted; fit without --no-local (agents: "
            "head.local = true) and on all samples at once, or name another head"
        )
    return (
        f"head 'blend' needs a model of the raw inputs, and none is better here than the {MAJORITY}; give more "
        "samples, of two classes or more, or name another head"
    )


def best_head(
    bundle: Bundle, samples: Samples, features: np.ndarray, options: FitOptions
) -> tuple[FitOptions, HeadChoice | None]:
    """Return the options with the head that cross-validation chooses, where they say auto; None where a head is named.

    ``features`` (n, d) are those of ``samples``, which are the training samples alone.
    """
    if options.head != AUTO:
        return options, None

    def fit_rows(name: str, rows: np.ndarray) -> Head:
        return fit(bundle, features[rows], samples.labels[rows], replace(options, head=name), samples.class_names)

    options = replace(options, withholds_shared=has_learned_samples(bundle, len(samples), options))
    names = heads_to_compare(bundle, samples, options)
    divisions = divisions_of(samples, options)
    choice = choose(names, fit_rows, features, samples.labels, divisions)
    choice = replace(choice, same_sitting=sitting_of(samples, divisions))
    _log.info("head_chosen head=%s of=%d accuracy=%s", choice.name, len(names), choice.why)
    return replace(options, head=choice.name), choice


OF_STATISTICS = "ridge_prior"
"""The head that cannot be fitted without the bundle's shared statistics."""

MOST_LEVERAGE = 0.1
"""The mean leverage of a sample above which cross-validation on it overrates a classifier that has learned from it.

The leverage is the weight of a sample's own label in the answer to it. In a least squares fit of d features to n
samples it is d / n in the mean: the trace of the hat matrix, divided by n.
"""


def heads_to_compare(bundle: Bundle, samples: Samples, options: FitOptions) -> tuple[str, ...]:
    """Return the names of the heads that are compared on these samples.

    Heads that need the shared classifier or the shared statistics are left out where the bundle has none, and where
    they are withheld because they have learned these samples.
    """
    is_withheld = options.withholds_shared or has_learned_samples(bundle, len(samples), options)
    has_statistics = bool(bundle.manifest.shared_statistics) and not is_withheld
    offered = [name for name in bundle.manifest.heads if name != OF_STATISTICS or has_statistics]
    has_shared = shared_classifier(bundle, samples.class_names) is not None and not is_withheld
    return candidates(offered, has_shared=has_shared)


def has_learned_samples(bundle: Bundle, count: int, options: FitOptions) -> bool:
    """Return whether the shared classifier and statistics of a bundle were learned to a good part from these samples.

    They would then answer samples that they have learned from in every fold, and cross-validation would overrate them.
    """
    lineage = bundle.manifest.lineage
    clients = 0 if lineage is None else lineage.clients
    return options.took_part and has_high_leverage(count, clients, bundle.manifest.feature_dim)


def has_high_leverage(own: int, clients: int, feature_dim: int) -> bool:
    """Return whether the samples of one client have a high leverage on a classifier that all clients have fitted.

    Args:
        own: Number of samples of that client; the others are assumed to have as many.
        clients: Number of clients that took part; 0: not known, taken as 1.
        feature_dim: Number of features of a sample.
    """
    return feature_dim > MOST_LEVERAGE * own * max(clients, 1)


def divisions_of(samples: Samples, options: FitOptions) -> list[Fold]:
    """Return the folds on which heads are compared."""
    rng = np.random.default_rng(options.seed)
    return thin_out(samples.labels, folds(samples, FOLDS, rng), rng)


_BOTH_PARAMS = {"max_iterations": 200, "in_span": True}
"""Parameters of head lr on the features of encoder and local model: few iterations are enough for so many features."""


def _choose_blend(
    bundle: Bundle, samples: Samples, encoded: np.ndarray, head: Chosen, local: LocalFeatures, *, only_blend: bool
) -> Chosen:
    """Return the chosen head, or what blends it with features of the raw inputs; arguments as for `choose_model`."""
    if head.choice is None:
        return head
    samples = samples.ready()
    options = head.options
    labels = samples.labels
    names = samples.class_names
    takes = HeadInput(local, encoded.shape[1])
    # 1. The local model, and a head on the features of both, on the folds of the best head, in the time that is left.
    divisions = divisions_of(samples, options)[: len(head.choice.trials[0].answers)]
    left_s = BUDGET_S - sum(trial.seconds for trial in head.choice.trials)
    local_rows, refit_local = prepare_refits(local, samples.inputs, labels, len(names), options.seed)
    of_local = cross_validate(LOCAL, refit_local, local_rows, labels, divisions, budget_s=left_s)
    both_rows = np.concatenate([encoded, local_rows], axis=1)
    both = replace(options, head="lr", params=_BOTH_PARAMS)

    def fit_both(_name: str, rows: np.ndarray) -> Head:
        return fit(bundle, both_rows[rows], labels[rows], both, names)

    left_s -= of_local.seconds
    of_both = Trial(BOTH, dropped=f"more than {MOST_SAMPLES} samples: it has no memory for all features of each")
    if len(samples) <= MOST_SAMPLES:
        of_both = cross_validate(BOTH, fit_both, both_rows, labels, divisions, budget_s=left_s)
    # 2. The surest of the three.
    tested = [labels[fold.test] for fold in divisions]
    blending = add_blends(head.choice, of_local, of_both, tested, only_blend=only_blend)
    if blending.choice.name == BOTH:
        return Chosen(both, blending.choice, takes)
    if blending.choice.name != BLEND:
        return Chosen(options, blending.choice)
    kind = local_candidates(local.input)[local.name]
    params = {
        "first": options.head,
        "first_params": params_of(bundle, options),
        "second": kind.head,
        "second_params": dict(kind.params),
        "split": encoded.shape[1],
        "share": round(blending.share, 4),
        "second_samples": MOST_SAMPLES,
    }
    return Chosen(replace(options, head=BLEND, params=params), blending.choice, takes)


def fit(
    bundle: Bundle,
    features: np.ndarray,
    labels: np.ndarray,
    options: FitOptions,
    class_names: tuple[str, ...] | None = None,
) -> Head:
    """Return a head fitted on features (n, d) and labels (n,).

    Labels are positions in ``class_names``, by default the bundle's. With other classes than these the head learns
    without the shared classifier.

    Raises:
        UnknownName: no such head.
        ConfigError: impossible parameters of that head.
        MissingCapability: a package that it needs for fitting is not installed.
    """
    manifest = bundle.manifest
    fitted = heads.create(options.head, params_of(bundle, options))
    names = manifest.task.class_names if class_names is None else class_names
    classifier = None
    statistics = None
    if not options.withholds_shared:
        classifier = shared_classifier(bundle, names)
        statistics = shared_statistics(bundle, names)
    fit_data = FitData(features, labels, len(names), classifier, manifest.method_params, statistics)
    fitted.fit(fit_data, np.random.default_rng(options.seed))
    return fitted


def params_of(bundle: Bundle, options: FitOptions) -> dict[str, Any]:
    """Return the parameters of the head: those that the bundle suggests for it, and those that win over them."""
    card = bundle.manifest.heads.get(options.head)
    suggested = {} if card is None else card.params
    return {**suggested, **options.params}


FOLDS_OF_MANY = 2
"""The number of folds, of five, whose answers calibrate a head that was fitted on more than `MOST_ROWS` samples.

Measured on 2,000 sensor windows: temperatures of heads that learned from 800 of them raise the calibration error of the
head that learned from all from 0.2 % to 0.4 %.
"""


def answers_to_calibrate_by(
    bundle: Bundle, fitted: Head, samples: Samples, rows: np.ndarray, options: FitOptions, answers: OutOfFold | None
) -> OutOfFold | None:
    """Return the answers by which a fitted head is calibrated; None where there are too few samples for that.

    Args:
        bundle: The bundle of the encoder.
        fitted: The head.
        samples: The samples that it was fitted on.
        rows: What it takes of them, (n, d) float32.
        options: The options of the fit.
        answers: What such heads answered when the head was chosen. With None, or too few of them, heads like it are
            fitted here on parts of the samples.
    """
    if len(samples) < LEAST_FOR_CALIBRATION:
        return None
    # 1. Of very many samples only a part was used to compare heads. Heads that learned from a part are less sure than
    # the fitted one, and their temperature would make its probabilities too extreme. So heads are fitted again, on two
    # folds: these have enough answers for one number, and five would take longer than the choice.
    if len(samples) > MOST_ROWS:
        return answers_in_folds(bundle, fitted, samples, rows, options, most_folds=FOLDS_OF_MANY)
    # 2. Otherwise the answers of the choice serve as well, where there are enough of them.
    if answers is not None and len(answers.rows) >= LEAST_FOR_CALIBRATION:
        return answers
    return answers_in_folds(bundle, fitted, samples, rows, options)


def answers_in_folds(
    bundle: Bundle,
    fitted: Head,
    samples: Samples,
    features: np.ndarray,
    options: FitOptions,
    *,
    most_rows: int | None = None,
    most_folds: int = FOLDS,
) -> OutOfFold | None:
    """Return the answers to training samples of heads like ``fitted`` that were fitted on the other folds.

    Args:
        bundle: The bundle of the encoder.
        fitted: The head.
        samples: The samples that it was fitted on.
        features: What it takes of them, (n, d) float32.
        options: The options of the fit.
        most_rows: Each head learns from at most so many samples, drawn at random; None: from all.
        most_folds: Only the samples of so many of five folds are answered.

    Returns:
        The answers; None where the samples cannot be divided.
    """
    alike = replace(options, head=fitted.name, params=fitted.params.model_dump())

    def fit_rows(rows: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        if most_rows is not None:
            rows = rows[part_of(len(rows), most_rows)]
        return fit(bundle, features[rows], samples.labels[rows], alike, samples.class_names).predict_proba

    return out_of_fold(samples, features, fit_rows, options.seed, most_folds)


def shared_classifier(bundle: Bundle, class_names: tuple[str, ...]) -> Tensors | None:
    """Return the bundle's shared classifier; None where it has none, or one for other classes."""
    return bundle.global_head() if class_names == bundle.manifest.task.class_names else None


def shared_statistics(bundle: Bundle, class_names: tuple[str, ...]) -> Tensors | None:
    """Return the bundle's statistics for these classes, as `FitData.statistics`; None where it has none.

    Classes are matched by their names: those that the bundle does not know have zeros.
    """
    statistics = bundle.shared_statistics()
    if statistics is None:
        return None
    # 1. The bundle has means over all samples. Of classes with few samples a client sends nothing (`min_class_count` of
    #    method `afl`), so the shares of the classes sum to less than 1. Here they become means over the samples sent.
    counted = float(statistics["shares"].sum())
    statistics = {name: array / counted for name, array in statistics.items()}
    # 2. The mean feature is taken before classes that this device lacks are dropped: their samples are part of it, as
    #    they are of the products.
    mean = statistics["sums"].sum(axis=0, dtype=np.float64)
    row_of = {name: row for row, name in enumerate(bundle.manifest.task.class_names)}
    sums = np.zeros((len(class_names), len(mean)), np.float32)
    shares = np.zeros(len(class_names), np.float32)
    for row, name in enumerate(class_names):
        if name in row_of:
            sums[row] = statistics["sums"][row_of[name]]
            shares[row] = statistics["shares"][row_of[name]]
    return {"gram": statistics["gram"], "mean": mean, "sums": sums, "shares": shares}
