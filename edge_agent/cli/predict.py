"""The command ``edge-agent predict``: answers of a saved head, or of the bundle's shared classifier."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import formats
from ..core.errors import UsageError
from . import output
from .arguments import add_bundle, add_strict, bundle_of, bundle_option, encoder_of, head_folder, own_head

if TYPE_CHECKING:
    from ..bundle.unpacked import Bundle
    from ..data import Samples


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent predict``."""
    add_bundle(parser)
    parser.add_argument(
        "--head",
        type=Path,
        metavar="DIR",
        help="saved head, or a state folder; default: that of a device whose state folder is the bundle, else the "
        "bundle's shared classifier",
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="images, or recordings (*.npy, *.csv)")
    parser.add_argument("--data", metavar="SOURCE", help="data as for 'edge-agent fit'; they need no labels")
    parser.add_argument(
        "--input", action="append", default=[], metavar="FILE", help="one more FILE, as earlier versions named it"
    )
    add_strict(parser)


def predict(arguments: argparse.Namespace) -> int:
    """Classify inputs with a bundle's encoder and a saved head, or with the bundle's shared classifier.

    Inputs that are unlike all samples that the head was fitted on are unknown: their class means nothing. More of them
    than chance explains are drift: the inputs have changed since the head was fitted.

    Example:
      edge-agent predict --head my-head cat.png dog.png
      edge-agent predict --bundle b.hwb --head my-head --data images:new-photos
    """
    from ..heads.saved import is_numeric
    from ..personal.personalize import load_head, probabilities, saved_features

    _check_inputs(arguments)
    arguments.head = head_folder(arguments.head) or own_head(arguments.bundle)
    bundle = bundle_of(arguments)
    if arguments.head is not None and is_numeric(arguments.head):
        return _predict_numeric(arguments, bundle)
    if arguments.head is None and bundle.global_head() is None:
        source = "images:FOLDER" if bundle.manifest.task.input.kind == "image" else "SOURCE"
        raise UsageError(
            f"bundle '{bundle.manifest.name}' has no shared classifier, and no head was named; fit one first "
            f"('edge-agent fit{bundle_option(arguments)} --data {source} --out my-head'), and name its folder "
            "(--head my-head)"
        )
    head = load_head(arguments.head, bundle, arguments.precision) if arguments.head is not None else None
    task = bundle.manifest.task
    class_names = task.class_names if head is None else head.class_names
    samples, names = _inputs(arguments, bundle)
    encoder = encoder_of(arguments, bundle, head)
    features = saved_features(head, encoder, samples, progress=output.progress("features"))
    shares = probabilities(bundle, head, features)
    rule = None if head is None else head.confidence.unknown
    is_unknown = None if head is None else head.is_unknown(features)
    strange = [None] * len(names) if is_unknown is None else is_unknown.tolist()
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
        "skipped": [str(item) for item in samples.skipped],
        "head": None if head is None else head.title,
        "head_folder": None if head is None else str(arguments.head),
        "unknown": None,
        "drift": None,
    }
    if rule is not None:
        count = sum(strange)
        drift = rule.has_drifted(count, len(names))
        content |= {"unknown": count, "drift": drift}
        notes += output.about_unknown(rule, count, len(names), drift)
    shown = [
        (row["input"], f"unknown ({row['class']}?)" if row["unknown"] else row["class"], formats.percent(share))
        for row, share in zip(rows, shares.max(axis=1).tolist(), strict=True)
    ]
    return output.result(arguments, content, lambda: [*output.table(("input", "class", "probability"), shown), *notes])


def _predict_numeric(arguments: argparse.Namespace, bundle: Bundle) -> int:
    from ..personal.personalize import load_numeric_head

    saved = load_numeric_head(arguments.head, bundle, arguments.precision)
    samples, names = _inputs(arguments, bundle)
    encoder = encoder_of(arguments, bundle, saved)
    answers = saved.head.predict(encoder.features(samples.inputs, output.progress("features"))).tolist()
    threshold = saved.head.threshold
    key = "value" if saved.head.predicts_targets else "score"
    rows: list[dict[str, Any]] = [{"input": name, key: answer} for name, answer in zip(names, answers, strict=True)]
    if not saved.head.predicts_targets:
        for row in rows:
            row["anomaly"] = None if threshold is None else row["score"] > threshold
    shown = [[formats.number(cell) if isinstance(cell, float) else cell for cell in row.values()] for row in rows]
    header = ("input", key) if saved.head.predicts_targets else ("input", key, "anomaly")
    content = {"predictions": rows, "threshold": threshold, "skipped": [str(item) for item in samples.skipped]}
    notes = output.skipped(samples.skipped)
    return output.result(arguments, content, lambda: [*output.table(header, shown), *notes])


def _files(arguments: argparse.Namespace) -> list[str]:
    """Return the files that were named, by position first."""
    return [*arguments.files, *arguments.input]


def _check_inputs(arguments: argparse.Namespace) -> None:
    """Require either files or a data source, before a bundle is opened.

    Raises:
        UsageError: Both or none were given, or what was named as a file is a folder or a data source.
    """
    from ..data import registry

    files = _files(arguments)
    if (arguments.data is None) == (not files):
        raise UsageError("expected FILE ... or --data SOURCE: which inputs are to be classified?")
    for file in files:
        kind, colon, _ = file.partition(":")
        is_source = bool(colon) and kind in registry.names()
        if is_source and not Path(file).exists():
            raise UsageError(f"{file}: is a data source, expected a file; give it as --data {shlex.quote(file)}")
        if Path(file).is_dir():
            raise UsageError(
                f"{file}: is a folder; give a folder of images as --data images:{file}, and recordings by their files"
            )


def _inputs(arguments: argparse.Namespace, bundle: Bundle) -> tuple[Samples, tuple[str, ...]]:
    """Return what is to be predicted, without labels, and a name for each input."""
    from ..data import from_files, load

    spec = bundle.manifest.task.input
    files = _files(arguments)
    if arguments.data is not None:
        samples = load(arguments.data, spec, strict=arguments.strict, labelled=False)
    else:
        samples = from_files(files, spec, strict=arguments.strict, positions=True)
    return samples, samples.names or tuple(map(str, range(len(samples))))
