"""Classify inputs with a bundle's encoder and a saved head, or with the bundle's shared classifier.

Example:
  edge-agent predict --bundle b.hwb --head head --input cat.png --input dog.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import inputs as opening
from . import output

if TYPE_CHECKING:
    import numpy as np

    from ..bundle import Bundle
    from ..heads.saved import SavedHead


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this command."""
    opening.add_bundle(parser)
    parser.add_argument("--head", type=Path, metavar="DIR", help="saved head; default: the bundle's shared classifier")
    opening.add_precision(parser)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--data", metavar="SOURCE", help="labelled data, as for 'edge-agent fit'")
    where.add_argument("--input", action="append", metavar="FILE", help="image file; may be repeated")


def run(arguments: argparse.Namespace) -> int:
    """Predict and print one line for each input."""
    from ..personalize import load_head

    if arguments.head is not None:
        opening.existing(arguments.head, opening.SAVED_HEAD)
    bundle = opening.bundle(arguments)
    head = load_head(arguments.head, bundle, arguments.precision) if arguments.head is not None else None
    inputs, names = _inputs(arguments, bundle)
    encoder = opening.encoder(arguments, bundle, head.precision if head is not None else None)
    result = _probabilities(bundle, head, encoder.features(inputs, output.progress("features")))
    rows = [_row(name, row, bundle.manifest.task.class_names) for name, row in zip(names, result, strict=True)]
    return output.result(arguments, {"predictions": rows}, lambda: _lines(rows))


def _inputs(arguments: argparse.Namespace, bundle: Bundle) -> tuple[np.ndarray, list[str]]:
    from ..data import images_from_files
    from ..errors import UsageError
    from ..task import ImageInput

    if arguments.data is not None:
        samples = opening.samples(arguments, bundle)
        return samples.inputs, list(samples.names) or [str(number) for number in range(len(samples))]
    spec = bundle.manifest.task.input
    if not isinstance(spec, ImageInput):
        raise UsageError("--input takes image files, this bundle's task has sensor windows; use --data windows:FILE")
    return images_from_files(arguments.input, spec), list(arguments.input)


def _probabilities(bundle: Bundle, head: SavedHead | None, features: np.ndarray) -> np.ndarray:
    from ..errors import UsageError
    from ..personalize import global_probabilities

    if head is not None:
        return head.head.predict_proba(features)
    shared = bundle.global_head()
    if shared is None:
        raise UsageError(f"bundle '{bundle.manifest.name}' has no shared classifier; fit a head and pass it by --head")
    return global_probabilities(shared, features)


def _row(name: str, probabilities: np.ndarray, class_names: tuple[str, ...]) -> dict[str, Any]:
    best = int(probabilities.argmax())
    return {"input": name, "class": class_names[best], "probability": round(float(probabilities[best]), 6)}


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    return output.table(
        ("input", "class", "probability"),
        [(row["input"], row["class"], output.percent(row["probability"])) for row in rows],
    )
