"""The command ``edge-agent evaluate``: scores of a saved head, or a comparison of heads on local data."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import formats
from ..core.errors import DataError
from . import output
from .arguments import (
    add_bundle,
    add_data,
    add_no_local,
    bundle_of,
    data_config,
    encoder_of,
    fit_options,
    head_folder,
    samples_of,
    skipped_of,
)
from .scores import (
    accuracy_rows,
    detail_tables,
    encoder_part_rows,
    folds_note,
    intervals_of,
    norm_text,
    notes_on,
    numeric_result,
    same_sitting_rows,
)

if TYPE_CHECKING:
    import numpy as np

    from ..bundle.unpacked import Bundle
    from ..data import Samples
    from ..personal.local.validation import LearningCurve
    from ..personal.personalize import Result

_CURVE_FITS = 8
"""How many fits of all samples a learning curve costs."""

_CURVE_BUDGET_S = 20
"""How many seconds a learning curve may take."""


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent evaluate``."""
    add_bundle(parser)
    add_data(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--head", type=Path, metavar="DIR", help="saved head to evaluate")
    which.add_argument("--heads", metavar="A,B", help="heads to compare; default: those that 'fit' compares")
    add_no_local(parser)


def evaluate(arguments: argparse.Namespace) -> int:
    """Score a saved head on local data, or, without --head, fit and compare heads.

    A saved head is scored on all samples of --data (or --test) that it was not fitted on. Heads that are compared are
    scored on the samples that 'fit' holds out with the same seed. Beside accuracies stands the interval in which the
    accuracy on many more samples lies with 95 %. Each head's costs on this device are shown, and how the accuracy of
    the first one grew with the number of samples: have you collected enough? Exactness says how close a head is to the
    personal part of the bundle's method: exact (equal), same form (same layers and loss), approximate (anything else).

    Example:
      edge-agent evaluate --data images:photos
      edge-agent evaluate --bundle b.hwb --head my-head --data images:new-photos
    """
    from ..heads.saved import is_numeric

    arguments.head = head_folder(arguments.head)
    bundle = bundle_of(arguments)
    if arguments.head is not None and is_numeric(arguments.head):
        return _evaluate_numeric(arguments, bundle)
    if arguments.head is not None:
        return _evaluate_saved(arguments, bundle)
    return _compare(arguments, bundle, samples_of(arguments, bundle))


def _evaluate_saved(arguments: argparse.Namespace, bundle: Bundle) -> int:
    from ..data.splitting import same_sitting
    from ..personal.confidence import LEAST_FOR_CALIBRATION, calibration_error
    from ..personal.local.details import not_held_out
    from ..personal.personalize import load_head, of_one_class, score_encoder_part, score_saved, why_no_global

    saved = load_head(arguments.head, bundle, arguments.precision)
    # Step 1: samples that are new to the head, of classes that it knows.
    fitted_on, test, known = _to_score(arguments, bundle, saved.learned, saved.class_names)
    sitting = same_sitting(fitted_on, test)
    test, others = _of_known_classes(test, saved.class_names, arguments.test or arguments.data)
    if others and arguments.strict:
        raise DataError(f"the head does not know {', '.join(others)}; remove these samples, or fit another head")
    # Step 2: those that a device alone would learn from, as the head did. Without all of them that would be unfair.
    train = None
    if _all_here(fitted_on, saved.learned):
        train, renamed = _of_known_classes(fitted_on, saved.class_names, arguments.data)
        if renamed:
            train = None
    scores, features = score_saved(
        bundle, saved, encoder_of(arguments, bundle, saved), test, fit_options(arguments), train
    )
    encoder_part = score_encoder_part(saved.head, saved.takes, features, test.labels)
    parts = (test if train is None else train, test)
    one_class = of_one_class(*parts)
    count = len(test)
    no_global = why_no_global(bundle, saved.class_names)
    content: dict[str, Any] = {
        **scores.metrics(),
        "head": saved.title,
        "acc.encoder_part": encoder_part,
        "precision": saved.precision,
        "n_test": count,
        "n_fitted_on": known,
        "same_sitting": sitting,
        "intervals": intervals_of(scores, count),
        "one_class": one_class,
        "no_global": no_global,
        "skipped": len(test.skipped),
        "unknown_classes": others,
        "not_held_out": not_held_out(*parts),
    }
    notes = [*output.skipped(test.skipped), *notes_on(scores, parts)]
    if not count:
        notes.append("note: the head was fitted on all of these samples; name others to score it on (--data or --test)")
    if others:
        notes.append(f"note: samples of classes that the head does not know are left out: {', '.join(others)}")
    if arguments.local and train is None:
        notes.append(
            "note: no acc.local: a device alone would learn from the samples that the head was fitted on; give them as "
            "--data, and those to score as --test"
        )
    if no_global:
        notes.append(f"note: no acc.global: {no_global}")
    # Step 3: whether its probabilities and its answer "unknown" are what they should be.
    error = calibration_error(saved.predict_proba(features), test.labels) if count >= LEAST_FOR_CALIBRATION else None
    alarms = None
    drift = None
    rule = saved.confidence.unknown
    if rule is not None and count:
        unknown = int(rule.is_unknown(saved.takes.encoded(features)).sum())
        alarms = unknown / count
        drift = rule.has_drifted(unknown, count)
        notes += output.about_unknown(rule, unknown, count, drift)
    content |= {"ece": error, "false_alarms": alarms, "drift": drift}
    learns_from = f"{saved.precision} features"
    if saved.takes.local is not None and not saved.takes.split:
        learns_from = "without the encoder"
    rows = [
        ("head", f"{saved.title}, {learns_from}"),
        ("samples", _known_text(count, known, saved.learned)),
        *accuracy_rows(scores, count, one_class=one_class),
        *encoder_part_rows(encoder_part, saved.head),
        *same_sitting_rows(sitting),
        ("calibration error", _error_text(error, count)),
        ("called unknown", "–  (the head has no rule for that)" if rule is None else formats.percent(alarms)),
    ]
    return output.result(arguments, content, lambda: [*formats.pairs(rows), *notes])


def _error_text(error: float | None, count: int) -> str:
    """Return the calibration error of a head on ``count`` samples; the number that is needed where they are too few."""
    from ..personal.confidence import LEAST_FOR_CALIBRATION

    if error is None:
        return f"–  ({count} samples, {LEAST_FOR_CALIBRATION} are needed)"
    return formats.percent(error)


def _compare(arguments: argparse.Namespace, bundle: Bundle, parts: tuple[Samples, Samples]) -> int:
    from .. import heads
    from ..data.splitting import same_sitting
    from ..personal.choice import FOLDS
    from ..personal.local.details import not_held_out
    from ..personal.personalize import curve, evaluate_heads, extract, with_doubtful_labels

    names = arguments.heads.split(",") if arguments.heads is not None else None
    for name in names or ():
        heads.get(name)  # an unknown name is a mistake of the command line, not a head that failed
    encoder = encoder_of(arguments, bundle, train=parts[0])
    features = extract(bundle, parts, encoder, fit_options(arguments))
    results, failed = evaluate_heads(features, names)
    if results and FOLDS * results[0].seconds <= _CURVE_BUDGET_S:
        results[0] = with_doubtful_labels(features, results[0])
    lines = output.table(
        ("head", "acc.personal", "95 %", "exactness", "fit", "memory", "saved", "answer"),
        [_costs(result) for result in results],
    )
    content: dict[str, Any] = {"heads": [_metrics(result) for result in results], "failed": failed, "curve": None}
    if results:
        best = results[0]
        if best.one_class:
            lines = [f"note: {output.ONE_CLASS}", *lines]
        lines += ["", *_describe_best(best, features.steps)]
        if _CURVE_FITS * best.seconds <= _CURVE_BUDGET_S:
            points = curve(features, best)
            content["curve"] = {**asdict(points), "advice": points.advice}
            lines += _describe_curve(best, points)
        else:
            lines.append(f"no learning curve: head '{best.head.name}' would take more than {_CURVE_BUDGET_S} s for it")
        lines += notes_on(best.scores, parts)
        if best.no_global:
            lines.append(f"note: no acc.global: {best.no_global}")
    skipped = skipped_of(parts)
    lines += [*output.skipped(skipped), *(f"{name}: {reason}" for name, reason in failed.items())]
    content["same_sitting"] = same_sitting(*parts)
    content |= {"skipped": len(skipped), "not_held_out": not_held_out(*parts), "steps": dict(features.steps)}
    return output.result(arguments, content, lambda: lines)


def _describe_best(best: Result, steps: Mapping[str, float]) -> Iterator[str]:
    """Yield what else is known of the head that answered best.

    Args:
        best: The head and its figures.
        steps: Step before the fits, such as the features -> seconds that it took.
    """
    shown = dict(accuracy_rows(best.scores, best.n_test, one_class=best.one_class))
    yield f"acc.global  {shown['acc.global']}"
    yield f"acc.local   {shown['acc.local']}"
    yield f"{best.n_train} samples to fit, {best.n_test} held out"
    for name, text in same_sitting_rows(best.same_sitting):
        yield f"{name}: {text}"
    yield f"batch norm  {norm_text(best)}"
    for step, seconds in steps.items():
        yield f"{step} {seconds:.2f} s"
    yield from detail_tables(best)


def _describe_curve(best: Result, points: LearningCurve) -> Iterator[str]:
    """Yield the accuracy by number of samples as a table, and whether more samples would help."""
    rows = [(point.samples, formats.percent(point.mean), formats.percent(point.spread)) for point in points.points]
    yield ""
    if rows:
        yield from output.table((f"samples to fit {best.head.name}", "accuracy in cross-validation", "spread"), rows)
    yield points.advice
    yield from folds_note(best.same_sitting, points.same_sitting)


def _evaluate_numeric(arguments: argparse.Namespace, bundle: Bundle) -> int:
    from ..personal.encoder import features_of
    from ..personal.numeric import score_numeric
    from ..personal.personalize import load_numeric_head

    saved = load_numeric_head(arguments.head, bundle, arguments.precision)
    labelled = False if saved.head.predicts_targets else None
    fitted_on, test, known = _to_score(arguments, bundle, saved.learned, None, labelled)
    train = fitted_on if _all_here(fitted_on, saved.learned) else None
    encoder = encoder_of(arguments, bundle, saved)
    options = fit_options(arguments)
    features = features_of(test, encoder, options.cache, options.progress("features"))
    scores = score_numeric(saved.head, test, features, train)
    about = {"head": saved.head.name, "n_test": len(test), "n_fitted_on": known, "threshold": saved.head.threshold}
    samples = _known_text(len(test), known, saved.learned)
    return numeric_result(arguments, saved, samples, test.skipped, scores, {**about, **scores}, [])


def _to_score(
    arguments: argparse.Namespace,
    bundle: Bundle,
    learned: np.ndarray | None,
    class_names: tuple[str, ...] | None,
    labelled: bool | None = True,
) -> tuple[Samples, Samples, int]:
    """Return the samples that a saved head was fitted on, those to score it on, and how many of the latter it knew.

    To score are all samples of --data, or of --test, but those with the digests ``learned`` and windows that overlap
    one of them.
    """
    import numpy as np

    from ..data import load
    from ..data.partition import own_samples
    from ..personal.local.validation import new_rows

    config = data_config(arguments)
    spec = bundle.manifest.task.input
    own = class_names is not None
    options: dict[str, Any] = {"own_classes": own, "labelled": labelled}
    if config.partition is None and config.test is None:
        train = load(config.source, spec, class_names, folder=config.folder, strict=config.strict, **options)
        every = train
    else:
        train, every = own_samples(config, "", spec, class_names, **options)
    new = new_rows(every, learned)
    known = np.isin(train.row_digests(), [] if learned is None else learned)
    return train.take(np.flatnonzero(known)), every.take(new), len(every) - len(new)


def _all_here(fitted_on: Samples, learned: np.ndarray | None) -> bool:
    """Return whether all samples that a head was fitted on are at hand, so that a device alone can learn from them."""
    import numpy as np

    return learned is not None and len(learned) > 0 and bool(np.isin(learned, fitted_on.row_digests()).all())


def _known_text(count: int, known: int, learned: np.ndarray | None) -> str:
    """Return how many samples are scored, and how many are not because the head was fitted on them."""
    if learned is None:
        return f"{count}; which ones the head was fitted on is not known: an earlier version saved it"
    return f"{count}, {f'{known} others left out: the head was fitted on them' if known else 'all new to the head'}"


def _of_known_classes(samples: Samples, class_names: tuple[str, ...], where: str) -> tuple[Samples, list[str]]:
    """Return samples of the classes of a saved head, and the names of other classes, whose samples are left out.

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
    rows = np.flatnonzero(samples.labels < count)
    names = samples.class_names
    others = [names[label] for label in np.unique(samples.labels) if label >= count]
    return replace(samples.take(rows), class_names=class_names), others


def _metrics(result: Result) -> dict[str, Any]:
    budget = {} if result.budget is None else result.budget.metrics()
    return {**result.metrics(), **budget, "intervals": intervals_of(result.scores, result.n_test), **result.details()}


def _costs(result: Result) -> tuple[str, ...]:
    """Return a head's row in the table of those that are compared."""
    from ..personal.personalize import NOT_STATED

    costs = {} if result.budget is None else result.budget.metrics()
    ends = intervals_of(result.scores, result.n_test)["acc.personal"]
    grade = "–" if result.exactness == NOT_STATED else result.exactness
    return (
        result.head.name,
        formats.percent(result.scores.personal),
        "–" if ends is None else f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f} %",
        grade,
        f"{result.seconds:.2f} s",
        f"{costs['fit_mb']:.1f} MB",
        f"{costs['saved_kb']:.0f} kB",
        f"{costs['answer_ms']:.3f} ms",
    )
