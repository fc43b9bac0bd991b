"""Score a saved head on local data, or, without --head, fit and compare the heads that the bundle offers.

Scores are accuracies on held-out samples, the same samples that 'fit' holds out with the same seed.

Example:
  edge-agent evaluate --bundle b.hwb --data images:photos
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import inputs, output

if TYPE_CHECKING:
    from ..bundle import Bundle
    from ..data import Samples
    from ..personalize import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this command."""
    inputs.add_bundle(parser)
    inputs.add_data(parser)
    inputs.add_precision(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--head", type=Path, metavar="DIR", help="saved head to evaluate")
    which.add_argument("--heads", metavar="A,B", help="heads to compare; default: those that the bundle offers")


def run(arguments: argparse.Namespace) -> int:
    """Score or compare, and print."""
    if arguments.head is not None:
        inputs.existing(arguments.head, inputs.SAVED_HEAD)
    bundle = inputs.bundle(arguments)
    parts = inputs.parts(arguments, bundle)
    if arguments.head is not None:
        return _score(arguments, bundle, parts)
    return _compare(arguments, bundle, parts)


def _score(arguments: argparse.Namespace, bundle: Bundle, parts: tuple[Samples, Samples]) -> int:
    from ..personalize import Scores, accuracy, extract, load_head, score_global, score_local

    saved = load_head(arguments.head, bundle, arguments.precision)
    encoder = inputs.encoder(arguments, bundle, saved.precision)
    result = extract(parts, encoder, **_options(arguments))
    scores = Scores(
        accuracy(saved.head.predict_proba, result.test_features, result.test.labels),
        score_global(bundle, result),
        score_local(result, bundle.manifest.task.num_classes, arguments.seed),
    )
    content = {**scores.metrics(), "head": saved.head.name, "precision": saved.precision, "n_test": len(result.test)}
    content["one_class"] = result.is_one_class
    rows = [("head", f"{saved.head.name}, {saved.precision} features"), ("samples", f"{len(result.test)} held out")]
    rows += [(name, output.percent(share)) for name, share in scores.metrics().items()]
    notes = [output.ONE_CLASS] if result.is_one_class else []
    return output.result(arguments, content, lambda: [*output.pairs(rows), *notes])


def _compare(arguments: argparse.Namespace, bundle: Bundle, parts: tuple[Samples, Samples]) -> int:
    from .. import heads
    from ..personalize import evaluate_heads

    names = arguments.heads.split(",") if arguments.heads is not None else None
    for name in names or ():
        heads.get(name)  # a name that nobody has is a mistake of the command line, not of a head
    encoder = inputs.best_encoder(arguments, bundle, parts[0])
    results, failed = evaluate_heads(bundle, parts, names, encoder=encoder, **_options(arguments))
    content = {"heads": [result.metrics() for result in results], "failed": failed}

    return output.result(arguments, content, lambda: _comparison(results, failed))


def _comparison(results: list[Result], failed: dict[str, str]) -> list[str]:
    rows = [
        (result.head.name, output.percent(result.scores.personal), result.exactness, f"{result.seconds:.2f} s")
        for result in results
    ]
    lines = output.table(("head", "acc.personal", "exactness", "fit"), rows)
    if results:
        overall, local = (output.percent(share) for share in (results[0].scores.overall, results[0].scores.local))
        counts = f"{results[0].n_train} samples to fit, {results[0].n_test} held out"
        lines += ["", f"acc.global {overall}, acc.local {local}; {counts}"]
        lines += [output.ONE_CLASS] if results[0].one_class else []
    return lines + [f"{name}: {reason}" for name, reason in failed.items()]


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "test_fraction": arguments.test_fraction,
        "seed": arguments.seed,
        "cache": inputs.cache_of(arguments) / "features",
        "progress": output.progress("features"),
    }
