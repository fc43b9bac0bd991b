"""Fit a personal head on local data with a bundle's encoder, evaluate it on held-out samples, and save it.

Needs no torch. acc.personal is the new head, acc.global the bundle's shared classifier, acc.local logistic regression
on the raw inputs: what this device would reach alone.

Example:
  edge-agent fit --bundle b.hwb --data images:photos --head svm --param c=0.5 --out head
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import inputs, output

if TYPE_CHECKING:
    from ..personalize import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this command."""
    inputs.add_bundle(parser)
    inputs.add_data(parser)
    inputs.add_precision(parser)
    parser.add_argument("--head", default="lr", metavar="NAME", help="lr, svm, mlp, prototype … (default: lr)")
    parser.add_argument(
        "--param", action="append", default=[], metavar="NAME=VALUE", help="parameter of the head; may be repeated"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the head")


def run(arguments: argparse.Namespace) -> int:
    """Fit, score, save, print."""
    from .. import heads
    from ..personalize import personalize
    from ..storage import check_writable

    params = parameters(arguments.param)
    heads.create(arguments.head, params)  # neither a typo nor a folder should wait for the features
    check_writable(arguments.out)
    check_writable(inputs.cache_of(arguments))
    bundle = inputs.bundle(arguments)
    parts = inputs.parts(arguments, bundle)
    result = personalize(
        bundle,
        parts,
        arguments.head,
        params,
        encoder=inputs.best_encoder(arguments, bundle, parts[0]),
        seed=arguments.seed,
        cache=inputs.cache_of(arguments) / "features",
        progress=output.progress("features"),
    )
    result.save(arguments.out)
    content = {**result.metrics(), "fingerprint": result.fingerprint, "out": str(arguments.out)}
    return output.result(arguments, content, lambda: _lines(result, arguments.out))


def parameters(given: list[str]) -> dict[str, Any]:
    """Head parameters from ``name=value`` words; values are JSON where they can be, text otherwise.

    Raises:
        UsageError: words without '='; all of them are listed.
    """
    from ..errors import UsageError

    if wrong := [word for word in given if "=" not in word]:
        raise UsageError(f"--param {', '.join(wrong)}: expected NAME=VALUE, for example --param c=0.5")
    return {name: _value(text) for name, _, text in (word.partition("=") for word in given)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _lines(result: Result, out: Path) -> list[str]:
    scores = result.scores
    lines = output.pairs(
        [
            ("head", f"{result.head.name} ({result.exactness}), {result.precision} features"),
            ("samples", f"{result.n_train} to fit, {result.n_test} held out"),
            ("acc.personal", output.percent(scores.personal)),
            ("acc.global", output.percent(scores.overall)),
            ("acc.local", output.percent(scores.local)),
            ("time", f"{result.seconds:.2f} s"),
            ("saved in", out),
        ]
    )
    return [*lines, output.ONE_CLASS] if result.one_class else lines
