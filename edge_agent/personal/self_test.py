"""The self-test of an unpacked bundle: this device computes what the exporter computed, from raw input to class.

The golden file has synthetic raw inputs, the features of each variant for them, an image to resize, the outputs
of the shared classifier and a digest of the class names in order. Preprocessing, encoder, shared classifier and label
map are compared, each with a tolerance above what conforming devices differ by (see below) and far below what a damaged
weight, another mean or a swapped label changes. A passed test is recorded beside the bundle, for this processor and
this version of ONNX Runtime, so that it runs once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..bundle.manifest import EncoderPrecision
from ..bundle.unpacked import Bundle
from ..core.errors import BundleDamaged
from ..core.storage import read_record, write_record
from ..core.task import ImageInput, InputSpec, Tensors
from ..data import preprocess
from .batch_norm import OwnNorm

FP32_TOLERANCE = 1e-4
"""Largest difference from the golden features, as a share of the largest of them; measured: below 1e-5."""

INT8_TOLERANCE = 0.01
"""Median over the golden inputs of the relative distance between int8 features and the golden ones (of their L2 norms).

Six encoders measured: 0 on x86-64 with VNNI, without it, and on arm64. There, sums of ResNet18's branches are rounded
otherwise once in a while, which changed three inputs of eight by up to 0.048: hence the median. 100 inverted weights
move it to 0.028 (in the largest encoders) to 0.19, 500 to 0.051 to 0.38.
"""

RESIZE_TOLERANCE = 1
"""Grey levels between resizing with Pillow and without it."""

_COUNT = 8
"""Golden inputs."""


def raw_inputs(spec: InputSpec, seed: int = 0) -> np.ndarray:
    """Return synthetic inputs in the form of a device's sensor; real ones would be private.

    Images: (8, height, width, channels) uint8, half of them noise, half of them patches of one colour. Windows: one
    recording (time, channels) float32 that gives 8 windows.
    """
    rng = np.random.default_rng(seed)
    if isinstance(spec, ImageInput):
        images = rng.integers(0, 256, (_COUNT, spec.height, spec.width, spec.channels), dtype=np.uint8)
        rows, columns = (np.arange(side) // 4 for side in (spec.height, spec.width))
        images[: _COUNT // 2] = images[: _COUNT // 2, rows[:, None], columns]
        return images
    time = spec.length + (_COUNT - 1) * spec.stride
    noise = rng.standard_normal((time, spec.channels))
    return (np.asarray(spec.mean) + np.asarray(spec.std) * noise).astype(np.float32)


def prepared(raw: np.ndarray, spec: InputSpec) -> np.ndarray:
    """Return encoder inputs (8, ...) float32 of ``raw``, by the preprocessing of this device.

    Raises:
        DataError: raw inputs of another form than the spec's.
    """
    if isinstance(spec, ImageInput):
        pixels = np.stack([preprocess.image_pixels(image, spec) for image in raw])
        return preprocess.normalise_images(pixels.astype(np.float32), spec)
    return preprocess.normalise_windows(preprocess.cut(raw, spec), spec)


def golden(
    spec: InputSpec, class_names: Sequence[str], features: Mapping[EncoderPrecision, np.ndarray], head: Tensors | None
) -> Tensors:
    """Return the tensors of the golden file, for ``features`` (8, d) of the prepared `raw_inputs`."""
    result = {"raw": raw_inputs(spec), "class_names": _digest(class_names)}
    result |= {f"features_{precision}": rows for precision, rows in features.items()}
    if isinstance(spec, ImageInput):
        result["photo"] = np.random.default_rng(1).integers(0, 256, _photo_shape(spec), dtype=np.uint8)
        result["resized"] = preprocess.image_pixels(result["photo"], spec)
    if head is not None:
        result["logits"] = _logits(head, features["fp32"])
    return result


def run(
    bundle: Bundle,
    precision: EncoderPrecision,
    features: Callable[[np.ndarray], np.ndarray],
    device: Mapping[str, Any],
    *,
    record: bool = True,
    norm: OwnNorm | None = None,
) -> None:
    """Check that this device computes what the exporter did, unless it has passed before.

    ``features`` runs the variant of that precision, with the batch norm statistics ``norm`` where they are given: they
    have their own golden features. ``device``: processor and runtime, for which a result is valid. With ``record``, a
    passed test is recorded beside the bundle.

    Raises:
        BundleDamaged: a result differs by more than its tolerance.
    """
    path = bundle.made / "self_test.json"
    conditions = {"bundle_id": bundle.id, **device}
    name = precision if norm is None else norm.fingerprint
    passed = read_record(path, conditions).get("passed", []) if record else []
    if name in passed:
        return
    check(bundle, precision, features, norm)
    if record:  # of own batch norm the newest alone: there is one for each fit
        kept_variants = {variant for variant in passed if norm is None or variant in bundle.manifest.variants}
        write_record(path, conditions, {"passed": sorted({*kept_variants, name})})


def check(
    bundle: Bundle,
    precision: EncoderPrecision,
    features: Callable[[np.ndarray], np.ndarray],
    norm: OwnNorm | None = None,
) -> float:
    """Return the difference of the features, in the measure that the tolerance of this precision is stated in.

    Raises:
        BundleDamaged: as `run`.
    """
    result = bundle.golden()
    spec = bundle.manifest.task.input
    class_names = bundle.manifest.task.class_names
    _check_form(bundle, precision, result)
    if not np.array_equal(result["class_names"], _digest(class_names)):
        raise BundleDamaged(
            f"self-test: the class names {', '.join(class_names[:10])} are not those, or not in the order, that the "
            "bundle was exported with; export it again"
        )
    if isinstance(spec, ImageInput):
        _check_resizing(spec, result)
    head = bundle.global_head()
    if head is not None:
        _check_logits(head, result)
    expected = result[f"features_{precision}"] if norm is None else norm.golden
    if expected.shape != (_COUNT, bundle.manifest.feature_dim):
        raise BundleDamaged(
            f"self-test: golden features of the own batch norm are {expected.shape}; fit the head again"
        )
    return _check_features(features(prepared(result["raw"], spec)), expected, precision)


def _check_resizing(spec: ImageInput, received: Tensors) -> None:
    """Check that this device resizes the golden photo as the exporter did."""
    resized = preprocess.image_pixels(received["photo"], spec).astype(np.int16)
    levels = int(np.abs(resized - received["resized"].astype(np.int16)).max(initial=0))
    if levels > RESIZE_TOLERANCE:
        raise BundleDamaged(
            f"self-test: resized pixels differ by up to {levels} grey levels, {RESIZE_TOLERANCE} is accepted; "
            f"this device resizes differently from the bundle's exporter; {_ADVICE}",
            is_public=True,
        )


def _check_logits(head: Tensors, received: Tensors) -> None:
    """Check that the shared classifier answers to the golden fp32 features as it did at the exporter."""
    difference, scale = _difference(_logits(head, received["features_fp32"]), received["logits"])
    if not difference <= FP32_TOLERANCE:  # also where it is NaN
        raise BundleDamaged(
            f"self-test: answers of the shared classifier differ by {difference:.3g} of their scale {scale:.3g}, "
            f"at most {FP32_TOLERANCE:g} is accepted; {_ADVICE}",
            is_public=True,
        )


def _check_form(bundle: Bundle, precision: EncoderPrecision, received: Tensors) -> None:
    """Check that all golden tensors exist, in the form that the exporter writes."""
    task = bundle.manifest.task
    size = bundle.manifest.feature_dim
    expected: dict[str, tuple[tuple[int, ...], type]] = {
        "class_names": ((32,), np.uint8),
        f"features_{precision}": ((_COUNT, size), np.float32),
    }
    spec = task.input
    if isinstance(spec, ImageInput):
        expected["raw"] = (_COUNT, spec.height, spec.width, spec.channels), np.uint8
        expected["photo"] = _photo_shape(spec), np.uint8
        expected["resized"] = spec.shape, np.uint8
    else:
        expected["raw"] = (spec.length + (_COUNT - 1) * spec.stride, spec.channels), np.float32
    if bundle.manifest.global_head is not None:
        expected |= {"features_fp32": ((_COUNT, size), np.float32), "logits": ((_COUNT, task.num_classes), np.float64)}
    forms = {name: (array.shape, array.dtype.type) for name, array in received.items()}
    wrong = [name for name, form in expected.items() if forms.get(name) != form]
    if wrong:
        raise BundleDamaged(
            f"golden tensors: {', '.join(wrong)} missing, or not of the form of this task; export the bundle again"
        )


def _photo_shape(spec: ImageInput) -> tuple[int, int, int]:
    return spec.height * 3 // 2, spec.width * 4 // 3, spec.channels


def _check_features(received: np.ndarray, expected: np.ndarray, precision: EncoderPrecision) -> float:
    """Compare features (n, d) with the golden ones and return how far they differ.

    fp32 is judged by the largest difference as a share of the largest value, int8 by the median of the relative
    distances of the rows.

    Raises:
        BundleDamaged: they differ by more than the tolerance of this precision.
    """
    if precision == "fp32":
        tolerance = FP32_TOLERANCE
        (difference, scale) = _difference(received, expected)
        shown = f"by {difference:.3g} of their scale {scale:.3g}"
    else:
        lengths = np.linalg.norm(expected.astype(np.float64), axis=1)
        distances = np.linalg.norm(received.astype(np.float64) - expected, axis=1)
        # A row of almost nothing counts by the length of the others.
        relative = distances / np.maximum(lengths, 1e-3 * lengths.max(initial=0) or 1.0)
        tolerance = INT8_TOLERANCE
        difference = float(np.median(relative) if np.isfinite(received).all() else np.nan)
        shown = f"by a relative distance of {difference:.3g} in the median"
    if not difference <= tolerance:  # also where it is NaN
        raise BundleDamaged(
            f"self-test: {precision} features differ from the golden ones {shown}, at most {tolerance:g} is accepted; "
            f"{_ADVICE}",
            is_public=True,
        )
    return difference


_ADVICE = "this device does not compute what the bundle's exporter did: fetch the bundle, or export it, again"


def _difference(received: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return the largest absolute difference as a share of the largest expected value, and that value."""
    scale = float(np.abs(expected).max(initial=0)) or 1.0
    return float(np.abs(received.astype(np.float64) - expected).max(initial=0)) / scale, scale


def _logits(head: Tensors, features: np.ndarray) -> np.ndarray:
    weight, bias = (head[name].astype(np.float64) for name in ("weight", "bias"))
    return np.asarray(features.astype(np.float64) @ weight.T + bias)


def _digest(class_names: Sequence[str]) -> np.ndarray:
    """Return SHA-256 of the class names in their order, as 32 bytes."""
    return np.frombuffer(hashlib.sha256(json.dumps(list(class_names)).encode()).digest(), np.uint8)
