"""The command ``edge-agent fit``: a personal head from local data, without a broker."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import formats
from ..core.errors import UnknownName, UsageError
from ..core.next_steps import FitEvidence, NextStep, steps_after_fit
from ..core.storage import check_writable
from . import output
from .arguments import (
    add_bundle,
    add_data,
    add_no_local,
    bundle_of,
    bundle_option,
    cache_of,
    data_config,
    encoder_of,
    fit_options,
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
from .where import check_no_state

if TYPE_CHECKING:
    from ..bundle.unpacked import Bundle
    from ..data import Samples
    from ..heads.numeric import NumericHead
    from ..personal.choice import HeadChoice
    from ..personal.confidence import Confidence
    from ..personal.personalize import Result


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent fit``."""
    add_bundle(parser)
    add_data(parser)
    parser.add_argument(
        "--head",
        default="auto",
        metavar="NAME",
        help="lr, svm, mlp, prototype …; auto: the best of them, or its blend with a model of the raw inputs "
        "(default); blend: that blend in any case; ridge_regression for numbers, mahalanobis for anomalies",
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
    parser.add_argument(
        "--no-blend",
        dest="blend",
        action="store_false",
        help="head auto takes the encoder's features alone, and no model of the raw inputs beside them",
    )
    add_no_local(parser).add_argument(
        "--allow-local", action="store_true", help="save the model of acc.local where it is better or surer"
    )


def fit(arguments: argparse.Namespace) -> int:
    """Fit a personal head on local data with a bundle's encoder, evaluate it on held-out samples, and save it.

    The head also learns which inputs are unlike all training samples (unknown), and its probabilities are calibrated by
    cross-validation; both need a number of samples, and where there are fewer that is said.

    Head 'auto' compares heads by cross-validation on the samples to fit, within 5 seconds. Of those that are not worse
    than the most accurate one beyond noise it takes the one with the smallest log loss. By the same rule it takes the
    blend of that head with the model of acc.local: the product of their probabilities, each to a power that the samples
    decide. The two err on other inputs, so the blend is often better than either.

    Needs no torch. acc.personal is the new head, acc.global the bundle's shared classifier, acc.local the best
    of a few models on the raw inputs: what this device would reach alone. Which one is found by cross-validation.

    Example:
      edge-agent fit --data images:photos --out my-head
      edge-agent fit --bundle b.hwb --data images:photos --head svm --param c=0.5 --out my-head
    """
    from .. import heads
    from ..bundle.manifest import variant_figures
    from ..heads import numeric
    from ..personal.local.details import not_held_out
    from ..personal.personalize import personalize

    params = _parameters(arguments.param)
    if arguments.head in numeric.names():
        return _fit_numeric(arguments, params)
    try:
        heads.check(arguments.head, params)  # mistakes are found before the features are computed
    except UnknownName as error:
        if error.name != arguments.head:  # a part of a blend
            raise
        raise UnknownName("head", arguments.head, [*error.known, *numeric.names(), heads.AUTO]) from error
    check_no_state(arguments.out)
    check_writable(arguments.out)
    check_writable(cache_of(arguments))
    bundle = bundle_of(arguments)
    begin = time.perf_counter()
    parts = samples_of(arguments, bundle)
    read_s = time.perf_counter() - begin
    encoder = encoder_of(arguments, bundle, train=parts[0])
    # The self-test, and on a device that has not done so yet, the comparison of precisions and batch norms.
    encoder_s = time.perf_counter() - begin - read_s
    result = personalize(
        bundle,
        parts,
        encoder,
        fit_options(arguments, head=arguments.head, params=params, unknown=arguments.unknown, doubtful_labels=True),
    ).with_earlier_steps({"read": read_s, "encoder": encoder_s})
    result.save(arguments.out)
    skipped = skipped_of(parts)
    figures = variant_figures(bundle.manifest)
    made = {"fingerprint": result.fingerprint, "out": str(arguments.out), "skipped": len(skipped), "figures": figures}
    intervals = intervals_of(result.scores, result.n_test)
    content: dict[str, Any] = {**result.metrics(), **made, "intervals": intervals, **result.details()}
    content["not_held_out"] = not_held_out(*parts)
    head = _describe_head(result)
    steps = ", ".join(f"{step} {seconds:.2f} s" for step, seconds in result.steps.items())
    rows = [
        ("head", head),
        ("batch norm", norm_text(result)),
        ("samples", f"{result.n_train} to fit, {result.n_test} held out"),
        *accuracy_rows(result.scores, result.n_test, one_class=result.one_class),
        *encoder_part_rows(result.encoder_part, result.head),
        *same_sitting_rows(result.same_sitting),
        *_confidence_rows(result.confidence, arguments.unknown, result.n_train, result.false_alarms),
        ("time", f"{steps}; {result.seconds:.2f} s in all, without the start of the program"),
        ("saved in", arguments.out),
    ]
    notes = [*output.skipped(skipped), *notes_on(result.scores, parts)]
    next_steps = _next_steps(result, arguments)
    content["next_steps"] = [next_step.to_json() for next_step in next_steps]
    notes += [f"to try next: {next_step.message}" for next_step in next_steps]
    if result.local is not None:
        notes.append(f"note: saved is the model of acc.local; acc.personal is that of head '{result.head.name}'")
    if not result.n_test:
        notes.append("note: nothing is held out, so there is no accuracy; add samples, or name a test set (--test)")
    notes += [f"note: no acc.global: {result.no_global}"] if result.no_global else []
    details = detail_tables(result)
    if result.choice is not None:
        content["candidates"] = [trial.as_json() for trial in result.choice.trials]
        details += ["", *_trials(result.choice), *folds_note(result.same_sitting, result.choice.same_sitting)]
        details += _warn_of_overrated_encoder(result.choice, bundle)
    notes.append(f"next: {_predict_command(arguments, bundle)}")
    details += ["", *notes]
    return output.result(arguments, content, lambda: [*formats.pairs(rows), *details])


def _next_steps(result: Result, arguments: argparse.Namespace) -> list[NextStep]:
    """Return what can be tried next where the device is better off alone; nothing elsewhere."""
    from ..heads import AUTO
    from ..personal.blend import BLEND

    if not result.scores.better_alone:
        return []
    is_blend_compared = arguments.head == AUTO and arguments.blend
    return steps_after_fit(
        FitEvidence(
            samples=result.n_train,
            compares_blend=is_blend_compared or arguments.head == BLEND,
            is_local_saved=result.local is not None,
        )
    )


def _predict_command(arguments: argparse.Namespace, bundle: Bundle) -> str:
    """Return the command that classifies inputs by the saved head."""
    head = shlex.quote(str(arguments.out))
    inputs = "FILE ..." if bundle.manifest.task.input.kind == "image" else "--data SOURCE"
    return f"edge-agent predict{bundle_option(arguments)} --head {head} {inputs}"


def _describe_head(result: Result) -> str:
    """Return which head was fitted, and on what, for people."""
    from ..personal.personalize import NOT_STATED

    if result.local is not None:
        return f"{result.title}, without the encoder: the model of acc.local"
    share = result.encoder_share
    if share is not None:
        parts = f"{formats.percent(share)} {result.head.params.first}, {formats.percent(1 - share)} the local model"
        return f"{result.title} ({parts}), {result.precision} features"
    # How closely the head follows the method's own is known only of bundles whose method has such a head.
    grade = "" if result.exactness == NOT_STATED else f" ({result.exactness})"
    text = f"{result.title}{grade}, {result.precision} features"
    if result.head.name == "shared_classifier":
        text += ": the bundle's shared classifier as it is"
    return text


def _trials(choice: HeadChoice) -> list[str]:
    """Return how the heads fared that 'auto' chose from: a table, why one was taken, and why others were dropped."""
    from ..personal.blend import BLEND, BOTH

    taken = choice.trials[0]
    rows = [
        (
            trial.name,
            "taken" if trial.name == choice.name else "dropped" if trial.dropped else "",
            formats.percent(trial.accuracy),
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
    if any(trial.name == BLEND for trial in choice.trials):
        lines.append(
            "local: the model of acc.local; blend: the product of its probabilities and those of the best head; "
            f"{BOTH}: one logistic regression on the features of both"
        )
    return [*lines, *(f"{trial.name}: {trial.dropped}" for trial in choice.trials if trial.dropped)]


def _warn_of_overrated_encoder(choice: HeadChoice, bundle: Bundle) -> list[str]:
    """Return a warning where this device may have trained the encoder on the samples by which the head was chosen.

    There is none for the starter encoder and for encoders that ``headwater bundle`` makes of other networks: no device
    of a federation has trained them.
    """
    from ..personal.blend import BLEND, BOTH

    is_blend_compared = any(trial.name == BLEND for trial in choice.trials)
    is_blend_taken = choice.name in (BLEND, BOTH)
    if not is_blend_compared or is_blend_taken or not bundle.manifest.is_trained_by_devices:
        return []
    warning = (
        "if this device has trained the encoder on these samples, the encoder looks better here than it is on new "
        "ones: '--head blend' takes the blend in any case"
    )
    return [warning]


def _confidence_rows(
    confidence: Confidence, rate: float, samples: int, false_alarms: float | None
) -> list[tuple[str, str]]:
    """Return what is known of a head's reliability, or why it is not, for a table."""
    from ..personal.confidence import LEAST_FOR_CALIBRATION
    from ..personal.unknown import least_for

    known = confidence.calibration
    rule = confidence.unknown
    calibration = f"not calibrated: {samples} samples, {LEAST_FOR_CALIBRATION} are needed"
    if samples >= LEAST_FOR_CALIBRATION:
        calibration = "not calibrated: no temperature lowers the error in cross-validation"
    if known is not None:
        before = formats.percent(known.error_before)
        after = formats.percent(known.error_after)
        calibration = f"temperature {known.temperature:.2f}, expected calibration error {before} before, {after} after"
    unknown = "not asked for"
    if rule is not None:
        reached = f"{formats.percent(false_alarms)} of the held-out samples"
        unknown = (
            f"{rule.detector.name} above {rule.threshold:.3f}; false alarms {formats.percent(rule.rate)} asked for, "
            f"{reached}; {rule.misses_text}"
        )
    elif rate:
        unknown = (
            f"not estimable: {samples} samples, {least_for(rate)} are needed for {formats.percent(rate)} false alarms"
        )
    return [("calibration", calibration), ("unknown inputs", unknown)]


def _parameters(given: list[str]) -> dict[str, Any]:
    """Return head parameters from ``name=value``; values are JSON where they can be, text otherwise."""
    if wrong := [text for text in given if "=" not in text]:
        raise UsageError(f"--param {', '.join(wrong)}: expected NAME=VALUE, for example --param c=0.5")
    result: dict[str, Any] = {}
    for name, _, value in (text.partition("=") for text in given):
        try:
            result[name] = json.loads(value)
        except ValueError:
            result[name] = value
    return result


def _fit_numeric(arguments: argparse.Namespace, params: dict[str, Any]) -> int:
    """Fit a head that answers with numbers, as ``fit`` does with the others."""
    from ..heads import numeric
    from ..heads.saved import SavedNumeric, save_numeric
    from ..personal.encoder import features_of
    from ..personal.numeric import fit_numeric, is_normal, score_numeric

    begin = time.perf_counter()
    head = numeric.create(arguments.head, params)
    check_no_state(arguments.out)
    check_writable(arguments.out)
    check_writable(cache_of(arguments))
    bundle = bundle_of(arguments)
    parts = _numeric_parts(arguments, bundle, head)
    encoder = encoder_of(arguments, bundle)
    options = fit_options(arguments)
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
    samples = f"{learned} to fit, {len(parts[1])} held out"
    skipped = skipped_of(parts)
    return numeric_result(arguments, result, samples, skipped, scores, {**result.metrics, **content}, rows)


def _numeric_parts(arguments: argparse.Namespace, bundle: Bundle, head: NumericHead) -> tuple[Samples, Samples]:
    """Return training and held-out samples: with numbers, or with the data's own classes where they have any."""
    from ..data.partition import own_samples

    labelled = False if head.predicts_targets else None
    spec = bundle.manifest.task.input
    return own_samples(data_config(arguments), "", spec, None, labelled=labelled)
