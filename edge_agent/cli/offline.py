"""Commands that need no broker: fit, predict, evaluate, import and rollback, with bundles, local data and heads."""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BundleDamaged, BundleUntrusted, DataError, UnknownName, UsageError, cause
from ..storage import check_writable, folder_lock
from . import output
from .where import add_agent, state_of

if TYPE_CHECKING:
    import numpy as np

    from ..agent.local_state import ReleaseRecord, RolledBack
    from ..bundle import Bundle
    from ..config import DataConfig
    from ..data import Samples
    from ..encoder import Encoder
    from ..heads.numeric import NumericHead
    from ..heads.saved import SavedHead, SavedNumeric
    from ..local.choice import HeadChoice
    from ..local.confidence import Confidence
    from ..personalize import FitOptions, Result, Scores
    from ..trust import Envelope

_MOST_CLASSES = 20
"""A table of the classes is printed up to so many; JSON has all of them."""

_CURVE_FITS, _CURVE_BUDGET_S = 8, 20
"""Fits of all samples that a learning curve costs, and the seconds that it may take."""

_SOURCES = """data sources (kind:where?option=value&option=value):
  images:DIR                     one sub-folder of image files for each class; without any for 'predict'
  npz:FILE?inputs=x&labels=y     arrays in a NumPy archive
  idx:DIR?split=train            MNIST and the like; split=train, test or all
  windows:FILE?subject=1,2       sensor recordings, cut into windows by the bundle's task
  csv:FILE?label=c&columns=x,y   tables: recordings, windows or images; recording=c, time=c, target=c
  wav:DIR?rate=16000             sounds by class, as log-mel windows; form=image for encoders of images
  video:DIR?every_s=1            frames of films by class; camera:0?n=10&label=cat takes pictures now
  digits:rendered?n=500          digits without a download: optdigits, inverted, photo, rendered …
  cifar:DIR?labels=coarse        CIFAR-10 and CIFAR-100; cinic:DIR is CINIC-10
  pacs:DIR?domain=sketch         one or more domains; so are officehome, officecaltech, domainnet and digits5
  ucihar:DIR?subject=3           UCI HAR, windows of nine signals of a phone
  collected:DIR                  samples that were added on this device with 'edge-agent add'
  python:module:function         your own function that returns (inputs, labels)
Classes are matched by name: the data may lack some of the bundle's classes, and may hold no others, unless
--own-classes is given. A relative place counts from the working folder here, and from the file's own folder in a
configuration file. Files that cannot be used are left out and counted.
"""


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``edge-agent fit``."""
    _add_bundle(parser)
    _add_data(parser)
    parser.add_argument(
        "--head",
        default="auto",
        metavar="NAME",
        help="lr, svm, mlp, prototype …; auto: the best of them (default); ridge_regression for numbers, mahalanobis "
        "for anomalies",
    )
    parser.add_argument(
        "--param", action="append", default=[], metavar="NAME=VALUE", help="parameter of the head; may be repeated"
    )
    parser.add_argument(
        "--unknown",
        type=float,
        default=0.05,
        metavar="RATE",
        help="share of inputs like the training samples that may be called unknown, 0: none (default: 0.05)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the head")
    _add_no_local(parser).add_argument(
        "--allow-local", action="store_true", help="save the model of acc.local where it is better or surer"
    )


def fit(arguments: argparse.Namespace) -> int:
    """Fit a personal head on local data with a bundle's encoder, evaluate it on held-out samples, and save it.

    The head also learns which inputs are unlike all training samples (unknown), and its probabilities are calibrated by
    cross-validation; both need a number of samples, and where there are fewer that is said.

    Head 'auto' compares heads by cross-validation on the samples to fit, within 5 seconds. Of those that are not worse
    than the most accurate one beyond noise it takes the one with the smallest log loss.

    Needs no torch. acc.personal is the new head, acc.global the bundle's shared classifier, acc.local the best
    of a few models on the raw inputs: what this device would reach alone. Which one is found by cross-validation.

    Example:
      edge-agent fit --bundle b.hwb --data images:photos --head svm --param c=0.5 --out head
    """
    from .. import heads
    from ..bundle import variant_figures
    from ..heads import numeric
    from ..local.details import not_held_out
    from ..personalize import personalize

    params = _parameters(arguments.param)
    if arguments.head in numeric.names():
        return _fit_numeric(arguments, params)
    try:
        heads.check(arguments.head, params)  # mistakes are found before the features are computed
    except UnknownName as error:
        raise UnknownName("head", arguments.head, [*error.known, *numeric.names(), heads.AUTO]) from error
    check_writable(arguments.out)
    check_writable(_cache_of(arguments))
    bundle = _bundle(arguments)
    parts = _parts(arguments, bundle)
    encoder = _encoder(arguments, bundle, train=parts[0])
    result = personalize(
        bundle, parts, encoder, _options(arguments, head=arguments.head, params=params, unknown=arguments.unknown)
    )
    result.save(arguments.out)
    skipped, figures = _skipped(parts), variant_figures(bundle.manifest)
    made = {"fingerprint": result.fingerprint, "out": str(arguments.out), "skipped": len(skipped), "figures": figures}
    intervals = _intervals(result.scores, result.n_test)
    content: dict[str, Any] = {**result.metrics(), **made, "intervals": intervals, **result.details()}
    content["not_held_out"] = not_held_out(*parts)
    head = f"{result.head.name} ({result.exactness}), {result.precision} features"
    head += ": the bundle's shared classifier as it is" * (result.head.name == "shared_classifier")
    rows = [
        ("head", head if result.local is None else f"{result.title}, without the encoder: the model of acc.local"),
        ("batch norm", _norm_text(result)),
        ("samples", f"{result.n_train} to fit, {result.n_test} held out"),
        *_shown(result.scores, result.n_test),
        *_sitting(result.same_sitting),
        *_confidence_rows(result.confidence, arguments.unknown, result.n_train, result.false_alarms),
        (
            "time",
            f"{', '.join(f'{step} {s:.2f} s' for step, s in result.steps.items())}; {result.seconds:.2f} s in all",
        ),
        ("saved in", arguments.out),
    ]
    notes = [*output.skipped(skipped), *_notes(result.scores, parts)]
    if result.local is not None:
        notes.append(f"note: saved is the model of acc.local; acc.personal is that of head '{result.head.name}'")
    if not result.n_test:
        notes.append("note: nothing is held out, so there is no accuracy; add samples, or name a test set (--test)")
    notes += [f"note: no acc.global: {result.no_global}"] if result.no_global else []
    details = _details(result)
    if result.choice is not None:
        content["candidates"] = [trial.as_json() for trial in result.choice.trials]
        details += ["", *_trials(result.choice), *_whole(result.same_sitting, result.choice.same_sitting)]
    if notes:
        details += ["", *notes]
    return output.result(arguments, content, lambda: [*output.pairs(rows), *details])


def _whole(held_out: float | None, folds: float | None) -> list[str]:
    """How cross-validation divides recordings, where the held-out samples (shares 0..1) were divided in another way."""
    if folds is None or folds == (held_out or 0.0):
        return []
    if folds > (held_out or 0.0):
        share = f"same sitting in cross-validation: {output.percent(folds)} of what it tests is of recordings that it "
        return [share + "learns from; acc.personal says more about new ones"]
    of = "whole recordings" if not folds else f"whole recordings where it can ({output.percent(folds)} same sitting)"
    return [f"cross-validation holds out {of}: its accuracies say more about new recordings than acc.personal does"]


def _norm_text(result: Result) -> str:
    whose = "shipped" if result.norm is None else f"own, {result.norm.share:.0%} of it from {result.norm.inputs} inputs"
    return f"{whose} ({result.norm_metrics['norm_why']})"


def _trials(choice: HeadChoice) -> list[str]:
    """How the heads fared that 'auto' chose from: a table, then why one was taken and others were dropped."""
    taken = choice.trials[0]
    rows = [
        (
            trial.name,
            "taken" if trial.name == choice.name else "dropped" if trial.dropped else "",
            output.percent(trial.accuracy),
            "–" if trial.spread is None or len(trial.right) < 2 else f"±{100 * trial.spread:.1f} %",
            f"{trial.loss(len(trial.right)):.3f}" if trial.right else "–",
            len(trial.right),
            f"{trial.seconds:.2f} s",
        )
        for trial in choice.trials
    ]
    lines = output.table(("candidate", "", "accuracy", "spread", "log loss", "folds", "time"), rows)
    best = max((trial.accuracy or 0.0 for trial in choice.trials if len(trial.right) == len(taken.right)), default=0.0)
    if taken.right and best > (taken.accuracy or 0.0):
        lines.append("taken for its log loss: heads with a higher accuracy are not better beyond noise, and less sure")
    return [*lines, *(f"{trial.name}: {trial.dropped}" for trial in choice.trials if trial.dropped)]


def _confidence_rows(
    confidence: Confidence, rate: float, samples: int, false_alarms: float | None
) -> list[tuple[str, str]]:
    """What is known of a head's reliability, or why it is not, for a table."""
    from ..local.confidence import LEAST_FOR_CALIBRATION, least_for

    known, rule = confidence.calibration, confidence.unknown
    calibration = f"not calibrated: {samples} samples, {LEAST_FOR_CALIBRATION} are needed"
    if samples >= LEAST_FOR_CALIBRATION:
        calibration = "not calibrated: no temperature lowers the error in cross-validation"
    if known is not None:
        before, after = output.percent(known.error_before), output.percent(known.error_after)
        calibration = f"temperature {known.temperature:.2f}, expected calibration error {before} before, {after} after"
    unknown = "not asked for"
    if rule is not None:
        reached = f"{output.percent(false_alarms)} of the held-out samples; misses are not measured"
        unknown = f"distance above {rule.threshold:.3f}; false alarms {output.percent(rule.rate)} asked for, {reached}"
    elif rate:
        unknown = (
            f"not estimable: {samples} samples, {least_for(rate)} are needed for {output.percent(rate)} false alarms"
        )
    return [("calibration", calibration), ("unknown inputs", unknown)]


def _intervals(scores: Scores, count: int) -> dict[str, tuple[float, float] | None]:
    """95 % interval (Wilson) of each accuracy on ``count`` held-out samples."""
    from ..local.validation import interval

    shares = scores.accuracies().items()
    return {name: None if share is None else interval(round(share * count), count) for name, share in shares}


def _shown(scores: Scores, count: int) -> Iterator[tuple[str, str]]:
    """The accuracies with their intervals, and what ``acc.local`` is of."""
    intervals = _intervals(scores, count)
    for name, share in scores.accuracies().items():
        text = output.percent(share)
        if (ends := intervals[name]) is not None:
            text += f"  (95 %: {100 * ends[0]:.1f} to {100 * ends[1]:.1f} %)"
        yield name, f"{text}  {scores.local_model}" if name == "acc.local" and scores.local_model else text


def _details(result: Result) -> list[str]:
    """Tables of the classes, where there are not too many, and of the samples that were answered worst."""
    lines = []
    if 1 < len(result.classes) <= _MOST_CLASSES:
        columns = ("class", "to fit", "held out", "right")
        lines += [
            "",
            *output.table(columns, [(one.name, one.train, one.held_out, one.right) for one in result.classes]),
        ]
    if result.worst:
        rows = [(one.sample, one.label, one.answer, output.percent(one.probability)) for one in result.worst]
        lines += ["", *output.table(("worst samples", "class", "answer", "probability of its class"), rows)]
    return lines


def _notes(scores: Scores, parts: tuple[Samples, Samples]) -> list[str]:
    """What has to be known about the accuracies."""
    from ..local.details import not_held_out
    from ..personalize import of_one_class

    notes = [output.ONE_CLASS] * of_one_class(*parts) + [output.BETTER_ALONE] * scores.better_alone
    if not scores.better_alone and (scores.local or 0.0) > (scores.personal or 0.0):
        notes.append("note: acc.local is above acc.personal, by no more than noise")
    if missing := not_held_out(*parts):
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        notes.append(
            f"note: no held-out samples of {', '.join(missing[:10])}{more}: the accuracies say nothing about them; "
            "add more of them, or name a test set (--test)"
        )
    return notes


def _parameters(given: list[str]) -> dict[str, Any]:
    """Head parameters from ``name=value``; values are JSON where they can be, text otherwise."""
    if wrong := [text for text in given if "=" not in text]:
        raise UsageError(f"--param {', '.join(wrong)}: expected NAME=VALUE, for example --param c=0.5")
    result: dict[str, Any] = {}
    for name, _, value in (text.partition("=") for text in given):
        try:
            result[name] = json.loads(value)
        except ValueError:
            result[name] = value
    return result


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``edge-agent predict``."""
    _add_bundle(parser)
    parser.add_argument(
        "--head",
        type=Path,
        metavar="DIR",
        help="saved head, or a state folder; default: that of a device whose state folder is the bundle, else the "
        "bundle's shared classifier",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--data", metavar="SOURCE", help="data as for 'edge-agent fit'; they need no labels")
    where.add_argument(
        "--input", action="append", metavar="FILE", help="image, or recording (*.npy, *.csv); may be repeated"
    )
    _add_strict(parser)


def predict(arguments: argparse.Namespace) -> int:
    """Classify inputs with a bundle's encoder and a saved head, or with the bundle's shared classifier.

    Inputs that are unlike all samples that the head was fitted on are unknown: their class means nothing. More of them
    than chance explains are drift: the inputs have changed since the head was fitted.

    Example:
      edge-agent predict --bundle b.hwb --head head --input cat.png --input dog.png
    """
    from ..heads.saved import is_numeric
    from ..personalize import load_head, probabilities, saved_features

    arguments.head = _head_folder(arguments.head) or _own_head(arguments.bundle)
    bundle = _bundle(arguments)
    if arguments.head is not None and is_numeric(arguments.head):
        return _predict_numeric(arguments, bundle)
    head = load_head(arguments.head, bundle, arguments.precision) if arguments.head is not None else None
    task = bundle.manifest.task
    class_names = task.class_names if head is None else head.class_names
    samples, names = _inputs(arguments, bundle)
    encoder = _encoder(arguments, bundle, head)
    features = saved_features(head, encoder, samples, progress=output.progress("features"))
    shares, rule = probabilities(bundle, head, features), None if head is None else head.confidence.unknown
    strange = [None] * len(names) if rule is None else rule.is_unknown(features).tolist()
    rows = [
        {"input": name, "class": class_names[row.argmax()], "probability": round(float(row.max()), 6), "unknown": known}
        for name, row, known in zip(names, shares, strange, strict=True)
    ]
    answered = "the bundle's shared classifier, which marks no input as unknown"
    if head is not None:
        answered = f"{head.title} in {arguments.head}"
        answered += ", which has no rule for unknown inputs (too few samples, or --unknown 0)" * (rule is None)
    notes = [f"answers of {answered}", *output.skipped(samples.skipped)]
    content: dict[str, Any] = {
        "predictions": rows,
        "skipped": list(samples.skipped),
        "head": None if head is None else head.title,
        "head_folder": None if head is None else str(arguments.head),
        "unknown": None,
        "drift": None,
    }
    if rule is not None:
        count = sum(strange)
        drift = rule.has_drifted(count, len(names))
        content |= {"unknown": count, "drift": drift}
        notes += [output.drift(count, len(names), rule.rate)] if drift else []
    shown = [
        (row["input"], f"unknown ({row['class']}?)" if row["unknown"] else row["class"], output.percent(share))
        for row, share in zip(rows, shares.max(axis=1).tolist(), strict=True)
    ]
    return output.result(arguments, content, lambda: [*output.table(("input", "class", "probability"), shown), *notes])


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``edge-agent evaluate``."""
    _add_bundle(parser)
    _add_data(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--head", type=Path, metavar="DIR", help="saved head to evaluate")
    which.add_argument("--heads", metavar="A,B", help="heads to compare; default: those that 'fit' compares")
    _add_no_local(parser)


def evaluate(arguments: argparse.Namespace) -> int:
    """Score a saved head on local data, or, without --head, fit and compare heads.

    A saved head is scored on all samples of --data (or --test) that it was not fitted on. Heads that are compared are
    scored on the samples that 'fit' holds out with the same seed. Beside accuracies stands the interval in which the
    accuracy on many more samples lies with 95 %. Each head's costs on this device are shown, and how the accuracy of
    the first one grew with the number of samples: have you collected enough? Exactness says how close a head is to the
    personal part of the bundle's method: exact (equal), same form (same layers and loss), approximate (anything else).

    Example:
      edge-agent evaluate --bundle b.hwb --data images:photos
    """
    from ..heads.saved import is_numeric

    arguments.head = _head_folder(arguments.head)
    bundle = _bundle(arguments)
    if arguments.head is not None and is_numeric(arguments.head):
        return _evaluate_numeric(arguments, bundle)
    if arguments.head is not None:
        return _evaluate_saved(arguments, bundle)
    return _compare(arguments, bundle, _parts(arguments, bundle))


def _to_score(
    arguments: argparse.Namespace,
    bundle: Bundle,
    learned: np.ndarray | None,
    class_names: tuple[str, ...] | None,
    labelled: bool | None = True,
) -> tuple[Samples, Samples, int]:
    """The samples here that a saved head was fitted on; those to score it on; how many it knew of the latter.

    To score are all samples of --data, or of --test, but those with the digests ``learned`` and windows that overlap
    one of them.
    """
    import numpy as np

    from ..data import load
    from ..data.partition import own_samples
    from ..local.validation import new_rows

    config, spec, own = _local(arguments), bundle.manifest.task.input, class_names is not None
    if config.partition is None and config.test is None:
        read = functools.partial(load, folder=config.folder, strict=config.strict, labelled=labelled)
        train = every = read(config.source, spec, class_names, own_classes=own)
    else:
        train, every = own_samples(config, "", spec, class_names, own_classes=own, labelled=labelled)
    new = new_rows(every, learned)
    known = np.isin(train.row_digests(), [] if learned is None else learned)
    return train.take(np.flatnonzero(known)), every.take(new), len(every) - len(new)


def _all_here(fitted_on: Samples, learned: np.ndarray | None) -> bool:
    """Whether all samples that a head was fitted on are at hand, so that a device alone can learn from them."""
    import numpy as np

    return learned is not None and len(learned) > 0 and bool(np.isin(learned, fitted_on.row_digests()).all())


def _sitting(share: float | None, what: str = "held-out samples") -> list[tuple[str, str]]:
    """A row about samples whose recording is learned from, too; none where that is not so."""
    if not share:
        return []
    return [
        (
            "same sitting",
            f"{output.percent(share)} of the {what} are of recordings that it learns from; expect less of new ones",
        )
    ]


def _known_text(count: int, known: int, learned: np.ndarray | None) -> str:
    """How many samples are scored, and how many are not because the head was fitted on them."""
    if learned is None:
        return f"{count}; which ones the head was fitted on is not known: an earlier version saved it"
    return f"{count}, {f'{known} others left out: the head was fitted on them' if known else 'all new to the head'}"


def _of_known_classes(samples: Samples, class_names: tuple[str, ...], where: str) -> tuple[Samples, list[str]]:
    """Samples of the classes of a saved head, and the names of other classes, whose samples are left out.

    Raises:
        DataError: there are none of its classes.
    """
    import numpy as np

    count = len(class_names)
    if samples.class_names[:count] != class_names:
        raise DataError(
            f"{where}: has only classes {', '.join(samples.class_names[:10])}, the head knows "
            f"{', '.join(class_names[:10])}; give data of its classes, or fit another head"
        )
    rows, names = np.flatnonzero(samples.labels < count), samples.class_names
    others = [names[label] for label in np.unique(samples.labels) if label >= count]
    return replace(samples.take(rows), class_names=class_names), others


def _evaluate_saved(arguments: argparse.Namespace, bundle: Bundle) -> int:
    from ..data.base import same_sitting
    from ..local.confidence import LEAST_FOR_CALIBRATION, calibration_error
    from ..local.details import not_held_out
    from ..personalize import load_head, of_one_class, score_saved, why_no_global

    saved = load_head(arguments.head, bundle, arguments.precision)
    fitted_on, test, known = _to_score(arguments, bundle, saved.learned, saved.class_names)
    sitting = same_sitting(fitted_on, test)
    test, others = _of_known_classes(test, saved.class_names, arguments.test or arguments.data)
    if others and arguments.strict:
        raise DataError(f"the head does not know {', '.join(others)}; remove these samples, or fit another head")
    train = None
    if _all_here(fitted_on, saved.learned):
        train, renamed = _of_known_classes(fitted_on, saved.class_names, arguments.data)
        train = None if renamed else train  # a device alone would learn from what is left, the head learned from all
    scores, features = score_saved(bundle, saved, _encoder(arguments, bundle, saved), test, _options(arguments), train)
    parts = (test if train is None else train, test)
    count, one_class, no_global = len(test), of_one_class(*parts), why_no_global(bundle, saved.class_names)
    content: dict[str, Any] = {
        **scores.metrics(),
        "head": saved.title,
        "precision": saved.precision,
        "n_test": count,
        "n_fitted_on": known,
        "same_sitting": sitting,
        "intervals": _intervals(scores, count),
        "one_class": one_class,
        "no_global": no_global,
        "skipped": len(test.skipped),
        "unknown_classes": others,
        "not_held_out": not_held_out(*parts),
    }
    notes = [*output.skipped(test.skipped), *_notes(scores, parts)]
    if not count:
        notes.append("note: the head was fitted on all of these samples; name others to score it on (--data or --test)")
    if others:
        notes.append(f"note: samples of classes that the head does not know are left out: {', '.join(others)}")
    if arguments.local and train is None:
        notes.append(
            "note: no acc.local: a device alone would learn from the samples that the head was fitted on; give them as "
            "--data, and those to score as --test"
        )
    notes += [f"note: no acc.global: {no_global}"] if no_global else []
    error, alarms, drift = None, None, None
    if count >= LEAST_FOR_CALIBRATION:
        error = calibration_error(saved.predict_proba(features), test.labels)
    if (rule := saved.confidence.unknown) is not None and count:
        unknown = int(rule.is_unknown(features).sum())
        alarms, drift = unknown / count, rule.has_drifted(unknown, count)
        notes += [output.drift(unknown, count, rule.rate)] if drift else []
    content |= {"ece": error, "false_alarms": alarms, "drift": drift}
    of = f"{saved.precision} features" if saved.local is None else "without the encoder"
    few = f"–  ({count} samples, {LEAST_FOR_CALIBRATION} are needed)"
    rows = [("head", f"{saved.title}, {of}"), ("samples", _known_text(count, known, saved.learned))]
    rows += [
        *_shown(scores, count),
        *_sitting(sitting),
        ("calibration error", few if error is None else output.percent(error)),
    ]
    rows += [("called unknown", "–  (the head has no rule for that)" if rule is None else output.percent(alarms))]
    return output.result(arguments, content, lambda: [*output.pairs(rows), *notes])


def _compare(arguments: argparse.Namespace, bundle: Bundle, parts: tuple[Samples, Samples]) -> int:
    from .. import heads
    from ..data.base import same_sitting
    from ..local.details import not_held_out
    from ..personalize import curve, evaluate_heads, extract

    names = arguments.heads.split(",") if arguments.heads is not None else None
    for name in names or ():
        heads.get(name)  # an unknown name is a mistake of the command line, not a head that failed
    encoder = _encoder(arguments, bundle, train=parts[0])
    features = extract(bundle, parts, encoder, _options(arguments))
    results, failed = evaluate_heads(features, names)
    lines = output.table(
        ("head", "acc.personal", "95 %", "exactness", "fit", "memory", "saved", "answer"),
        [_costs(result) for result in results],
    )
    content: dict[str, Any] = {"heads": [_metrics(result) for result in results], "failed": failed, "curve": None}
    for result in results[:1]:
        shown = dict(_shown(result.scores, result.n_test))
        counts = f"{result.n_train} samples to fit, {result.n_test} held out"
        lines += ["", f"acc.global  {shown['acc.global']}", f"acc.local   {shown['acc.local']}", counts]
        lines += [f"{name}: {text}" for name, text in _sitting(result.same_sitting)]
        lines += [f"batch norm  {_norm_text(result)}"]
        lines += [f"{step} {seconds:.2f} s" for step, seconds in features.steps.items()]
        lines += _details(result)
        if _CURVE_FITS * result.seconds <= _CURVE_BUDGET_S:
            points = curve(features, result.head.name)
            content["curve"] = {**asdict(points), "advice": points.advice}
            rows = [(p.samples, output.percent(p.mean), output.percent(p.spread)) for p in points.points]
            header = (f"samples to fit {result.head.name}", "accuracy in cross-validation", "spread")
            lines += ["", *(output.table(header, rows) if rows else ()), points.advice]
            lines += _whole(result.same_sitting, points.same_sitting)
        else:
            lines += [f"no learning curve: head '{result.head.name}' would take more than {_CURVE_BUDGET_S} s for it"]
        lines += _notes(result.scores, parts)
        lines += [f"note: no acc.global: {result.no_global}"] if result.no_global else []
    skipped = _skipped(parts)
    lines += [*output.skipped(skipped), *(f"{name}: {reason}" for name, reason in failed.items())]
    content["same_sitting"] = same_sitting(*parts)
    content |= {"skipped": len(skipped), "not_held_out": not_held_out(*parts), "steps": dict(features.steps)}
    return output.result(arguments, content, lambda: lines)


def _metrics(result: Result) -> dict[str, Any]:
    budget = {} if result.budget is None else result.budget.metrics()
    return {**result.metrics(), **budget, "intervals": _intervals(result.scores, result.n_test), **result.details()}


def _costs(result: Result) -> tuple[str, ...]:
    """A head in the table of those that are compared."""
    costs = {} if result.budget is None else result.budget.metrics()
    ends = _intervals(result.scores, result.n_test)["acc.personal"]
    return (
        result.head.name,
        output.percent(result.scores.personal),
        "–" if ends is None else f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f} %",
        result.exactness,
        f"{result.seconds:.2f} s",
        f"{costs['fit_mb']:.1f} MB",
        f"{costs['saved_kb']:.0f} kB",
        f"{costs['answer_ms']:.3f} ms",
    )


def _fit_numeric(arguments: argparse.Namespace, params: dict[str, Any]) -> int:
    """``fit`` of a head that answers with numbers."""
    from ..encoder import features_of
    from ..heads import numeric
    from ..heads.saved import SavedNumeric, save_numeric
    from ..numeric import fit_numeric, is_normal, score_numeric

    begin = time.perf_counter()
    head = numeric.create(arguments.head, params)
    check_writable(arguments.out)
    check_writable(_cache_of(arguments))
    bundle = _bundle(arguments)
    parts = _numeric_parts(arguments, bundle, head)
    encoder, options = _encoder(arguments, bundle), _options(arguments)
    features, held_out = (features_of(part, encoder, options.cache, options.progress("features")) for part in parts)
    head = fit_numeric(arguments.head, params, parts[0], features, arguments.seed)
    scores = score_numeric(head, parts[1], held_out, parts[0])
    seconds = round(time.perf_counter() - begin, 3)
    learned = len(parts[0]) if head.predicts_targets else int(is_normal(parts[0], head).sum())
    known = {"n_train": learned, "n_test": len(parts[1]), "threshold": head.threshold, "seconds": seconds}
    result = SavedNumeric(
        head,
        encoder.fingerprint,
        encoder.precision,
        {**scores, "head": head.name, **known},
        encoder.norm,
        parts[0].row_digests(),
    )
    save_numeric(arguments.out, result)
    content = {"fingerprint": result.fingerprint, "out": str(arguments.out)}
    rows = [("time", f"{seconds:.2f} s"), ("saved in", str(arguments.out))]
    samples, skipped = f"{learned} to fit, {len(parts[1])} held out", _skipped(parts)
    return _numeric_scores(arguments, result, samples, skipped, scores, {**result.metrics, **content}, rows)


def _evaluate_numeric(arguments: argparse.Namespace, bundle: Bundle) -> int:
    from ..encoder import features_of
    from ..numeric import score_numeric
    from ..personalize import load_numeric_head

    saved = load_numeric_head(arguments.head, bundle, arguments.precision)
    labelled = False if saved.head.predicts_targets else None
    fitted_on, test, known = _to_score(arguments, bundle, saved.learned, None, labelled)
    train = fitted_on if _all_here(fitted_on, saved.learned) else None
    encoder, options = _encoder(arguments, bundle, saved), _options(arguments)
    features = features_of(test, encoder, options.cache, options.progress("features"))
    scores = score_numeric(saved.head, test, features, train)
    about = {"head": saved.head.name, "n_test": len(test), "n_fitted_on": known, "threshold": saved.head.threshold}
    samples = _known_text(len(test), known, saved.learned)
    return _numeric_scores(arguments, saved, samples, test.skipped, scores, {**about, **scores}, [])


def _numeric_scores(
    arguments: argparse.Namespace,
    saved: SavedNumeric,
    samples: str,
    skipped: tuple[str, ...],
    scores: dict[str, float | None],
    content: dict[str, Any],
    more: list[tuple[str, str]],
) -> int:
    """Print the scores of a numeric head, and what has to be known about them."""
    from ..local.confidence import least_for

    head = saved.head
    rows = [("head", f"{head.name}, {saved.precision} features"), ("samples", samples)]
    shares = () if head.predicts_targets else ("false_alarms", "detected")
    rows += [
        (name, output.percent(score) if name in shares else output.number(score)) for name, score in scores.items()
    ]
    notes = output.skipped(skipped)
    personal, mean = scores.get("rmse.personal"), scores.get("rmse.mean")
    if personal is not None and mean is not None and personal >= mean:
        notes.append("note: no better than always answering the mean of the training targets")
    if not head.predicts_targets and head.threshold is None:
        notes.append(
            f"note: no threshold: fewer than {least_for(head.params.false_alarms)} normal samples, which "
            f"{output.percent(head.params.false_alarms)} false alarms need"
        )
    return output.result(
        arguments, {**content, "skipped": len(skipped)}, lambda: [*output.pairs([*rows, *more]), *notes]
    )


def _predict_numeric(arguments: argparse.Namespace, bundle: Bundle) -> int:
    from ..personalize import load_numeric_head

    saved = load_numeric_head(arguments.head, bundle, arguments.precision)
    samples, names = _inputs(arguments, bundle)
    encoder = _encoder(arguments, bundle, saved)
    answers = saved.head.predict(encoder.features(samples.inputs, output.progress("features"))).tolist()
    threshold, key = saved.head.threshold, "value" if saved.head.predicts_targets else "score"
    rows: list[dict[str, Any]] = [{"input": name, key: answer} for name, answer in zip(names, answers, strict=True)]
    if not saved.head.predicts_targets:
        for row in rows:
            row["anomaly"] = None if threshold is None else row["score"] > threshold
    shown = [[output.number(cell) if isinstance(cell, float) else cell for cell in row.values()] for row in rows]
    header = ("input", key) if saved.head.predicts_targets else ("input", key, "anomaly")
    content = {"predictions": rows, "threshold": threshold, "skipped": list(samples.skipped)}
    notes = output.skipped(samples.skipped)
    return output.result(arguments, content, lambda: [*output.table(header, shown), *notes])


def _numeric_parts(arguments: argparse.Namespace, bundle: Bundle, head: NumericHead) -> tuple[Samples, Samples]:
    """Training and held-out samples: with numbers, or with the data's own classes where they have any."""
    from ..data.partition import own_samples

    labelled = False if head.predicts_targets else None
    return own_samples(_local(arguments), "", bundle.manifest.task.input, None, labelled=labelled)


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``edge-agent import``."""
    parser.add_argument("bundle", type=Path, metavar="FILE", help="bundle file (*.hwb)")
    add_agent(parser)
    parser.add_argument("--no-self-test", action="store_true", help="install without running the encoder")
    parser.add_argument(
        "--root",
        type=Path,
        metavar="FILE",
        help="from now on, trust the keys of this root.json alone; after several changes of keys: roots.json, or a "
        "folder of root files",
    )


def import_bundle(arguments: argparse.Namespace) -> int:
    """Install a bundle file into an agent's state folder: verified, tested on its golden inputs, then made current.

    Where the device trusts keys, the bundle has to be signed by them, not expired and not older than the newest one.

    For devices that get their bundles on a stick. The agent must not be running; it fits its head for the bundle when
    it starts. The bundle before stays for 'edge-agent rollback'. What the coordinator released before is declined from
    then on: the imported bundle stays until there is a release that is newer than the one it took the place of.

    Example:
      edge-agent import b.hwb --state /var/lib/headwater
    """
    from ..agent.local_state import ReleaseRecord
    from ..bundle import current_id, install, open_bundle, variant_figures
    from ..trust import Member, TrustStore, parse

    _check_exists(arguments.bundle, "a bundle file (*.hwb)")
    state = state_of(arguments)
    check_writable(state)
    with folder_lock(state, "edge-agent import"):
        notes: dict[str, str] = {}
        check = None if arguments.no_self_test else lambda unpacked: notes.update(_self_test(unpacked))
        record, root = ReleaseRecord(state), state / "bundles"
        record.check()
        _check_unpinned(record)
        before, trust = current_id(root), TrustStore(root)
        if arguments.root is not None:
            (*others, newest), raw = _roots(arguments.root), open_bundle(arguments.bundle).release
            carried = () if raw is None else parse(Member, raw, str(arguments.bundle)).roots
            trust.anchor(newest, (*carried, *others))
        try:
            bundle = install(arguments.bundle, root, check=check)
        except BundleUntrusted as error:
            raise BundleUntrusted(f"{arguments.bundle}: {error}") from error
        declined = record.put_by_hand(bundle.id, before)
    figures = variant_figures(bundle.manifest)
    content = {
        "name": bundle.manifest.name,
        "method": bundle.manifest.method,
        "bundle_id": bundle.id,
        "precisions": sorted(bundle.manifest.variants),
        "classes": bundle.manifest.task.num_classes,
        "folder": str(bundle.folder),
        "self_test": not arguments.no_self_test,
        "signed": trust.known() is not None,
        "int8_note": notes.get("int8"),
        "declines": None if declined is None else declined.source.bundle_id,
    }
    rows = {**content, "precisions": ", ".join(sorted(bundle.manifest.variants)), "bundle_id": bundle.id[:12]}
    rows |= _by_hand(declined)
    shown = [*rows.items(), *output.variants(figures)]
    return output.result(arguments, {**content, "figures": figures}, lambda: output.pairs(shown))


def _roots(path: Path) -> tuple[Envelope, ...]:
    from ..trust import roots_in

    try:
        return roots_in(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {cause(error)}; expected the root.json of a federation") from error


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``edge-agent verify``."""
    parser.add_argument("bundle", type=Path, metavar="FILE", help="bundle file (*.hwb)")
    parser.add_argument(
        "--root", type=Path, required=True, metavar="FILE", help="root.json or roots.json of the federation"
    )


def verify(arguments: argparse.Namespace) -> int:
    """Who has signed a bundle file: nothing but the file and a root of the federation is needed, and no network.

    Keys that were changed since that root are followed by the roots in the bundle. The exit code is 4 where the bundle
    is damaged or not signed by enough of those keys. A release that has expired is still genuine, and is not installed.

    Example:
      edge-agent verify b.hwb --root root.json
    """
    from ..bundle import open_bundle, origin
    from ..bundle import verify as verified
    from ..trust import Member, parse, seconds

    _check_exists(arguments.bundle, "a bundle file (*.hwb)")
    release, root = verified(arguments.bundle, _roots(arguments.root)[-1])
    opened = open_bundle(arguments.bundle)
    member = parse(Member, opened.release or b"", str(arguments.bundle))
    signers = sorted(member.release.signers(root.roles["targets"], root.keys))
    content: dict[str, Any] = {
        "bundle_id": release.bundle_id,
        "federation": release.federation,
        "version": release.version,
        "expires": release.expires,
        "expired": time.time() >= seconds(release.expires),
        "min_agent": release.min_agent,
        "root": root.version,
        "threshold": root.roles["targets"].threshold,
        "signers": [{"id": keyid, "name": root.names.get(keyid)} for keyid in signers],
        "lineage": origin(opened.manifest, release),
    }
    rows = [(name, value) for name, value in content.items() if name not in {"lineage", "signers"}]
    rows.append(("signed by", ", ".join(map(root.named, signers))))
    return output.result(arguments, content, lambda: output.pairs([*rows, *output.lineage(content["lineage"])]))


def add_rollback_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``edge-agent rollback``."""
    add_agent(parser)
    parser.add_argument("--head", action="store_true", help="the head alone: return to the one before the last fit")


def rollback(arguments: argparse.Namespace) -> int:
    """Go back to the bundle that this device used before: verified, tested on its golden inputs, then made current.

    With --head the bundle stays, and its head before the last fit is used again, until samples or classes change; once
    more returns to the later one. Removed samples do not come back.

    The agent must not be running; it fits its head for the bundle when it starts. The release that was rolled back from
    is declined from then on, as are older ones, until the coordinator makes a newer release.

    Example:
      edge-agent rollback --state /var/lib/headwater-agent
    """
    from .. import bundle as bundles
    from ..agent.local_state import ReleaseRecord

    state = state_of(arguments)
    _check_exists(state, "an agent's state folder")
    if arguments.head:
        return _restore_head(arguments, state)
    with folder_lock(state, "edge-agent rollback"):
        record, root = ReleaseRecord(state), state / "bundles"
        record.check()
        _check_unpinned(record)
        before = bundles.current(root)
        bundle = bundles.rollback(root, _self_test)
        declined = record.put_by_hand(bundle.id, "" if before is None else before.id)
    content = {
        "name": bundle.manifest.name,
        "method": bundle.manifest.method,
        "bundle_id": bundle.id,
        "declines": None if declined is None else declined.source.bundle_id,
    }
    rows = {**content, "bundle_id": bundle.id[:12]} | _by_hand(declined)
    return output.result(arguments, content, lambda: output.pairs(rows.items()))


def _by_hand(declined: RolledBack | None) -> dict[str, str]:
    """Rows about what follows from a bundle that was installed by hand."""
    rows = {"next": "'edge-agent run' fits its head for this bundle when it starts"}
    if declined is None:
        return rows
    what = f"bundle {declined.source.bundle_id[:12]} and older releases, until there is a newer one"
    return {"declines": what, **rows}


def _check_unpinned(record: ReleaseRecord) -> None:
    pin = record.pinned()
    if pin is not None and pin.holds(time.time()):
        raise UsageError(f"this device {pin}; 'edge-agent unpin' ends that")


def _restore_head(arguments: argparse.Namespace, state: Path) -> int:
    from .. import bundle as bundles
    from ..heads import saved

    with folder_lock(state, "edge-agent rollback"):
        bundle = bundles.current(state / "bundles")
        if bundle is None:
            raise UsageError(f"{state}: no bundle is in use, so there is no head; expected an agent's folder")
        head = saved.restore(state / "head", bundle.fingerprints)
    content = {"head": head.head.name, "classes": list(head.class_names), "metrics": dict(head.metrics)}
    rows = {"head": head.head.name, "classes": ", ".join(head.class_names), "fitted on": head.metrics.get("n_train")}
    return output.result(arguments, content, lambda: output.pairs(rows.items()))


def _self_test(bundle: Bundle) -> dict[str, str]:
    """Test every variant; returns why int8 cannot be used here, where it cannot: fp32 serves then.

    Raises:
        BundleDamaged: fp32 computes something else than the exporter did.
        MissingCapability: onnxruntime is not installed.
    """
    from ..encoder import Encoder

    Encoder.open(bundle, "fp32")
    if "int8" in bundle.manifest.variants:
        try:
            Encoder.open(bundle, "int8")
        except BundleDamaged as error:
            return {"int8": f"not used on this device: {error}"}
    return {}


def _add_bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bundle", type=Path, required=True, metavar="PATH", help="bundle file (*.hwb), or an agent's state folder"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="folder of unpacked bundles and features (default: headwater in XDG_CACHE_HOME or ~/.cache)",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of encoder and head, 0 = as many as cores (default: 1)"
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "fp32", "int8"),
        default="auto",
        help="auto: the saved head's, else fp32, unless int8 is faster here and a head on your data as accurate",
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, metavar="SOURCE", help="local data, see below")
    parser.add_argument("--test", metavar="SOURCE", help="held-out samples; all of --data is for training then")
    parser.add_argument(
        "--norm",
        choices=("auto", "own", "shipped"),
        default="auto",
        help="batch norm statistics: of your inputs (own), the bundle's, or own where heads lose nothing by it (auto)",
    )
    parser.add_argument(
        "--test-fraction", type=float, metavar="F", help="share of --data held out for evaluation (default: 0.25)"
    )
    parser.add_argument(
        "--partition", type=Path, metavar="FILE", help="partition file: use the rows of one --client of --data"
    )
    parser.add_argument("--client", metavar="NAME", help="client in --partition")
    _add_strict(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of split and fit (default: 0)")
    parser.add_argument(
        "--own-classes", action="store_true", help="the data may hold classes that the bundle does not know"
    )
    parser.epilog = f"{_SOURCES}\n{parser.epilog or ''}"


def _add_strict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strict", action="store_true", help="refuse data of which something cannot be used, instead of leaving it out"
    )


def _add_no_local(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--no-local", dest="local", action="store_false", help="do not look for what this device reaches alone"
    )
    return group


def _cache_of(arguments: argparse.Namespace) -> Path:
    from ..personalize import default_cache

    return default_cache() if arguments.cache is None else Path(arguments.cache)


def _bundle(arguments: argparse.Namespace) -> Bundle:
    """The bundle that ``--bundle`` names, verified; a bundle file is unpacked in the cache once.

    Raises:
        BundleDamaged: what is at that path cannot be used.
        UsageError: nothing is at that path, or impossible numbers among the arguments; all of them are listed.
    """
    from ..personalize import load_bundle

    rules: list[tuple[str, Callable[[float], bool], str]] = [
        ("threads", lambda value: 0 <= value <= 1024, "0..1024"),
        ("test_fraction", lambda value: 0 < value < 1, "above 0 and below 1"),
        ("seed", lambda value: value >= 0, "0 or more"),
        ("unknown", lambda value: 0 <= value < 1, "0 or more and below 1"),
    ]
    mistakes = [
        f"--{name.replace('_', '-')} {value}: expected {expected}"
        for name, is_possible, expected in rules
        if (value := getattr(arguments, name, None)) is not None and not is_possible(value)
    ]
    if mistakes:
        raise UsageError("; ".join(mistakes))
    return load_bundle(arguments.bundle, _cache_of(arguments))


def _head_folder(given: Path | None) -> Path | None:
    """The folder of the head that --head names: that folder, or the head of a device's state folder."""
    if given is None:
        return None
    _check_exists(given, "a head saved by 'edge-agent fit', or a device's state folder")
    return _own_head(given) or given


def _own_head(state: Path) -> Path | None:
    """The head of the device whose state folder this is; None where it is none, or has no head yet."""
    from ..heads.saved import CARD

    return state / "head" if (state / "head" / CARD).is_file() and (state / "bundles").is_dir() else None


def _check_exists(path: Path, expected: str) -> None:
    if not path.exists():
        raise UsageError(f"{path}: it is not there; expected {expected}, check the path")


def _parts(arguments: argparse.Namespace, bundle: Bundle) -> tuple[Samples, Samples]:
    """Samples to learn from and held-out ones, as an agent with this bundle would take them."""
    from ..data.partition import own_samples

    task = bundle.manifest.task
    return own_samples(_local(arguments), "", task.input, task.class_names, own_classes=arguments.own_classes)


def _local(arguments: argparse.Namespace) -> DataConfig:
    from ..personalize import local_data

    names = ("test", "test_fraction", "partition", "client", "strict")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return local_data(arguments.data, seed=arguments.seed, **given)


def _inputs(arguments: argparse.Namespace, bundle: Bundle) -> tuple[Samples, tuple[str, ...]]:
    """What is to be predicted, without labels, and a name for each input."""
    from ..data import from_files, load

    spec = bundle.manifest.task.input
    if arguments.data is not None:
        samples = load(arguments.data, spec, strict=arguments.strict, labelled=False)
    else:
        samples = from_files(arguments.input, spec, strict=arguments.strict, positions=True)
    return samples, samples.names or tuple(map(str, range(len(samples))))


def _skipped(parts: tuple[Samples, Samples]) -> tuple[str, ...]:
    """What was left out of training and held-out samples, each once."""
    return tuple(dict.fromkeys((*parts[0].skipped, *parts[1].skipped)))


def _encoder(
    arguments: argparse.Namespace,
    bundle: Bundle,
    head: SavedHead | SavedNumeric | None = None,
    train: Samples | None = None,
) -> Encoder:
    """The bundle's encoder after its self-test: that of a saved head, else as ``--precision`` and ``--norm`` say.

    Where these are ``auto``, the samples ``train`` decide; without samples it is fp32 with the bundle's batch norm.
    """
    from ..encoder import Encoder
    from ..precision import open_encoder

    threads = 1 if arguments.threads is None else arguments.threads
    if head is not None:
        return Encoder.open(bundle, head.precision, threads, norm=head.norm)
    return open_encoder(
        bundle,
        arguments.precision,
        train,
        threads,
        norm=getattr(arguments, "norm", "auto"),
        seed=getattr(arguments, "seed", 0),
        features=_cache_of(arguments) / "features",
        progress=output.progress("features"),
    )


def _options(arguments: argparse.Namespace, **more: Any) -> FitOptions:
    from ..personalize import FitOptions

    cache, allow_local = _cache_of(arguments) / "features", getattr(arguments, "allow_local", False)
    return FitOptions(
        seed=arguments.seed,
        cache=cache,
        progress=output.progress,
        local=arguments.local,
        allow_local=allow_local,
        **more,
    )
