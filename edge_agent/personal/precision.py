"""Which variant of an encoder a device uses, and whose batch norm statistics.

Statistics of the device's own inputs are taken where a head fitted on local data answers no worse with them, beyond
noise, than with those of the bundle. int8, which has the bundle's, is taken only where such a head answers as well with
it as with the better fp32, and where repeated timings in balanced order show that it saves time. Accuracies are those
of cross-validation on training samples; held-out samples decide nothing here. Timings are saved beside the bundle, for
this processor and runtime.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from ..bundle.manifest import EncoderPrecision
from ..bundle.unpacked import Bundle
from ..core.errors import BundleDamaged, UsageError
from ..core.storage import read_record, write_record
from ..data import Samples
from . import self_test
from .batch_norm import OwnNorm, encoder_with_statistics, own_share, sample, why_not
from .encoder import Encoder, Progress, arithmetic, features_of, probe_of, run_probe, try_probe
from .variants import LEAST_GAIN, LEAST_GAIN_MS, MOST_LOSS, Timing, refitted_answers, timed

_log = logging.getLogger(__name__)

Wanted: TypeAlias = Literal["auto", "fp32", "int8"]
WantedNorm: TypeAlias = Literal["auto", "own", "shipped"]

LEAST_ANSWERS = 200
"""Least number of answers to compare; with fewer, half a point is less than one answer."""

_PROBE_TOLERANCE = 1e-3
"""Largest difference between features by the probe and by the changed encoder, as a share of the largest feature."""


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision, and why."""

    precision: EncoderPrecision
    why: str


@dataclass(frozen=True)
class Refit:
    """How heads are refitted to compare encoders: ``cache`` is the folder of cached features, None for no cache."""

    seed: int = 0
    cache: Path | None = None
    progress: Progress | None = None


def open_encoder(
    bundle: Bundle,
    wanted_precision: Wanted,
    samples: Samples | None,
    threads: int = 1,
    *,
    norm: WantedNorm = "auto",
    refit: Refit = Refit(),
    clock: Callable[[], float] | None = None,
) -> Encoder:
    """Open the bundle's encoder in the requested precision and with the requested batch norm; ``auto`` chooses.

    Args:
        bundle: The bundle.
        wanted_precision: ``fp32``, ``int8`` or ``auto``.
        samples: Labelled local samples to learn from, none of those held out. Without them ``auto`` is fp32 with the
            bundle's batch norm.
        threads: Threads of ONNX Runtime; 0: its own choice.
        norm: Whose batch norm statistics: ``shipped``, ``own`` or ``auto``.
        refit: How heads are refitted for the comparison.
        clock: As in `choose`.

    Raises:
        BundleDamaged: the self-test of fp32 fails, or that of int8 where it was requested by name.
        StateError: the bundle has no variant of that precision.
        UsageError: own batch norm in int8, which there is not.
    """
    if wanted_precision == "int8":
        if norm == "own":
            raise UsageError(
                "own batch norm is computed in fp32: int8 has the shipped one; choose precision fp32 or auto"
            )
        return replace(Encoder.open(bundle, "int8", threads), why_norm="int8 has the shipped statistics")
    encoder = with_norm(bundle, norm, samples, threads, refit)
    if wanted_precision == "fp32" or (norm == "own" and encoder.norm is not None):
        return encoder
    choice = choose(bundle, samples, threads, refit, fp32=encoder, clock=clock)
    _log.info("precision_chosen precision=%s why=%s", choice.precision, choice.why)
    if choice.precision == "fp32":
        return encoder
    why_norm = f"int8 has the shipped statistics and was chosen: {choice.why}"
    return replace(Encoder.open(bundle, "int8", threads), why_norm=why_norm)


def with_norm(
    bundle: Bundle,
    wanted_norm: WantedNorm,
    samples: Samples | None,
    threads: int = 1,
    refit: Refit = Refit(),
) -> Encoder:
    """Return the fp32 encoder with batch norm statistics of the bundle or of the inputs of ``samples``.

    `open_encoder` says when which ones are asked for.

    With ``auto``, heads answer the same samples with both, and the noise of the difference is the root of the number of
    answers that differ. Where the method leaves batch norm to its clients, own statistics may be worse by the noise;
    where it shares batch norm, they have to be better by more than that. Measured on digits of six domains, 3 seeds,
    one domain for new clients: DualFed, FedPick and FedRIR gain 0.8 points, their new clients 1.9; FedAvg's clients
    lose 0.9 when they always take their own, and 0.1 so.
    The bundle's stay where the others cannot be estimated, or fail their self-test.

    Raises:
        BundleDamaged: the self-test of the encoder as it was shipped fails.
    """
    # 1. The bundle's statistics stay where nobody asks for others, or others cannot be estimated or compared.
    shipped = Encoder.open(bundle, "fp32", threads)
    if wanted_norm == "shipped":
        return replace(shipped, why_norm="as configured")
    if samples is None:
        return replace(shipped, why_norm="no local samples to estimate others on")
    obstacle = why_not(bundle.manifest, len(samples))
    if not obstacle and wanted_norm == "auto" and not _has_several_classes(samples):
        obstacle = "no two classes in the local samples, so there are no accuracies to compare"
    if obstacle:
        return replace(shipped, why_norm=obstacle)
    # 2. Estimated statistics have to pass a self-test of their own.
    try:
        own_statistics = estimate_norm(bundle, sample(samples.inputs, np.random.default_rng(refit.seed)))
        own_encoder = Encoder.open(bundle, "fp32", threads, norm=own_statistics)
    except BundleDamaged as error:
        _log.warning("own_norm_not_used bundle=%s reason=%s", bundle.id[:12], error)
        return replace(shipped, why_norm=f"own statistics do not run here: {error}")
    if wanted_norm == "own":
        return replace(own_encoder, why_norm="as configured")
    # 3. Heads on both encoders answer the same samples.
    answers = right_answers({"shipped": shipped, "own": own_encoder}, samples, refit)
    use_own = _is_own_norm_better(answers, stays_local=bundle.manifest.norm != "global")
    right_own = _as_percentage(answers["own"])
    right_shipped = _as_percentage(answers["shipped"])
    reason = f"a head on local data is right on {right_own} with own statistics, {right_shipped} with those shipped"
    _log.info("norm_chosen norm=%s inputs=%d why=%s", "own" if use_own else "shipped", own_statistics.inputs, reason)
    return replace(own_encoder if use_own else shipped, why_norm=reason)


def _has_several_classes(samples: Samples) -> bool:
    """Return whether the samples are labelled with two classes or more, not with numbers."""
    return samples.targets is None and len(np.unique(samples.labels)) != 1


def _is_own_norm_better(answers: Mapping[str, np.ndarray], *, stays_local: bool) -> bool:
    """Return whether an encoder takes the device's own batch norm statistics.

    Args:
        answers: Which answers (m,) bool are right with ``own`` and with ``shipped`` statistics, of the same samples.
        stays_local: Whether the method leaves batch norm to its clients.
    """
    if not answers["own"].size:
        return False
    lost: int = (answers["shipped"] & ~answers["own"]).sum().item()
    gained: int = (answers["own"] & ~answers["shipped"]).sum().item()
    noise = math.sqrt(lost + gained)
    # Methods that leave batch norm to their clients trained with local statistics: take them unless they are clearly
    # worse. Others trained with shared ones: take local statistics only where they are clearly better.
    if stays_local:
        return lost - gained <= noise
    return gained - lost > noise


def _as_percentage(is_right: np.ndarray) -> str:
    """Return the share of right answers (m,) bool for people."""
    return f"{100 * is_right.mean():.1f} %" if is_right.size else "none"


def estimate_norm(bundle: Bundle, inputs: np.ndarray) -> OwnNorm:
    """Return batch norm statistics of ``inputs`` (n, *input_shape) float32, blended with those of the bundle.

    Raises:
        BundleDamaged: the probe does not run, gives impossible statistics, or others than the changed encoder uses.
    """
    free = bundle.manifest.free_norm
    variant = bundle.variant("fp32")
    if free is None:
        raise BundleDamaged(why_not(bundle.manifest, len(inputs)))
    kind = bundle.manifest.task.input.kind
    # 1. The probe runs in a child process first: it comes from a file, and may take more memory than there is.
    try_probe(bundle, len(inputs))
    statistics, expected = run_probe(probe_of(bundle), kind, inputs, own_share(len(inputs)))
    form = (2 * sum(layer.channels for layer in free.layers),)
    feature_form = (len(inputs), bundle.manifest.feature_dim)
    if statistics.shape != form or expected.shape != feature_form:
        raise BundleDamaged(f"the probe gives {statistics.shape} and {expected.shape}, expected {form}, {feature_form}")
    if not np.isfinite(statistics).all():
        raise BundleDamaged("batch norm statistics of the local inputs are not finite")
    # 2. An encoder with these statistics has to compute what the probe has computed with them.
    golden = self_test.prepared(bundle.golden()["raw"], bundle.manifest.task.input)
    few = inputs[: len(golden)]
    content = encoder_with_statistics(bundle, variant.fingerprint, statistics)
    features = run_probe(probe_of(bundle, content), kind, np.concatenate([golden, few]), 0.0)[1]
    difference = float(np.abs(features[len(golden) :] - expected[: len(few)]).max(initial=0))
    if not difference <= _PROBE_TOLERANCE * max(1.0, float(np.abs(expected).max(initial=0))):
        raise BundleDamaged(f"the encoder with its own batch norm differs from its probe by {difference:.3g}")
    return OwnNorm(variant.fingerprint, statistics, len(inputs), features[: len(golden)])


def choose(
    bundle: Bundle,
    samples: Samples | None,
    threads: int = 1,
    refit: Refit = Refit(),
    *,
    fp32: Encoder | None = None,
    clock: Callable[[], float] | None = None,
) -> PrecisionChoice:
    """Choose int8 where it is faster and as accurate here, else fp32; the cheapest checks come first.

    ``fp32`` is the encoder to compare with, by default the bundle's with the shipped batch norm. ``clock`` gives
    seconds; by default CPU time where one thread computes, so that other load does not count.

    Raises:
        BundleDamaged: the self-test of fp32 fails.
    """
    # 1. Without the variant, or samples to compare on, there is nothing to choose.
    if "int8" not in bundle.manifest.variants:
        return PrecisionChoice("fp32", "the bundle has no int8 variant")
    if samples is None:
        return PrecisionChoice("fp32", "no labelled samples to compare the accuracies on")
    # 2. int8 has to pass its self-test here.
    encoders = {"fp32": fp32 or Encoder.open(bundle, "fp32", threads)}
    try:
        encoders["int8"] = Encoder.open(bundle, "int8", threads)
    except BundleDamaged as error:
        return PrecisionChoice("fp32", f"int8 does not run here as it was exported: {error}")
    # 3. It has to be faster. Times are noted for this processor, runtime and these encoders.
    conditions = _conditions(encoders, threads)
    path = bundle.made / "precision.json"
    earlier = read_record(path, conditions)
    if "timing" in earlier:
        timing = Timing(**earlier["timing"])
    else:
        timing = timed(encoders, clock or _clock_for(encoders, threads))
    measured = {"timing": asdict(timing), "accuracy": earlier.get("accuracy", {})}
    times = f"a batch takes {timing.fp32_ms:.3f} ms in fp32 and {timing.int8_ms:.3f} ms in int8"
    if not timing.is_faster:
        write_record(path, conditions, measured)
        return PrecisionChoice("fp32", f"{times}; int8 would have to save {LEAST_GAIN:.0%} and {LEAST_GAIN_MS} ms")
    # 4. Heads on both have to answer alike. That takes the longest, and is noted for these samples.
    digest = hashlib.sha256(samples.digest.encode() + samples.labels.tobytes()).hexdigest()
    answers = measured["accuracy"].get(digest) or count_right(encoders, samples, refit)
    write_record(path, conditions, {**measured, "accuracy": {digest: answers}})
    return _choose_by_answers(answers, times)


def _choose_by_answers(answers: Mapping[str, int], times: str) -> PrecisionChoice:
    """Return the choice between variants of which int8 is faster, by how many answers are right with each.

    Args:
        answers: The numbers of right answers with ``fp32`` and ``int8``, and of all answers (``of``).
        times: The text about the times of a batch, with which the reason begins.
    """
    if answers["of"] < LEAST_ANSWERS:
        reason = f"accuracies could be compared on {answers['of']} answers only, {LEAST_ANSWERS} are needed"
        return PrecisionChoice("fp32", f"{times}; {reason}")
    fp32_percent = 100 * (answers["fp32"] / answers["of"])
    int8_percent = 100 * (answers["int8"] / answers["of"])
    result = f"{times}; a head on local data is right on {fp32_percent:.1f} % and {int8_percent:.1f} %"
    if answers["fp32"] - answers["int8"] <= MOST_LOSS * answers["of"]:
        return PrecisionChoice("int8", result)
    return PrecisionChoice("fp32", f"{result}: int8 may lose {100 * MOST_LOSS:.1f} %")


def _conditions(encoders: Mapping[str, Encoder], threads: int) -> dict[str, Any]:
    """Return what timings depend on, as the JSON record of them has it."""
    providers = {name: list(encoder.providers) for name, encoder in encoders.items()}
    fingerprints = {name: encoder.fingerprint for name, encoder in encoders.items()}
    return {**arithmetic(), "providers": providers, "threads": threads, "fingerprints": fingerprints}


def _clock_for(encoders: Mapping[str, Encoder], threads: int) -> Callable[[], float]:
    """Return CPU time where one thread of this process does all the work, else the time of day."""
    runs_on_cpu = all(encoder.providers == ("CPUExecutionProvider",) for encoder in encoders.values())
    return time.thread_time if threads == 1 and runs_on_cpu else time.perf_counter


def count_right(encoders: Mapping[str, Encoder], samples: Samples, refit: Refit = Refit()) -> dict[str, int]:
    """Return numbers of `right_answers`, and of all answers (``of``)."""
    answers = right_answers(encoders, samples, refit)
    return {**{name: int(rows.sum()) for name, rows in answers.items()}, "of": len(next(iter(answers.values())))}


def right_answers(encoders: Mapping[str, Encoder], samples: Samples, refit: Refit = Refit()) -> dict[str, np.ndarray]:
    """Return which answers, (m,) bool, of heads refitted on each encoder are right; see `refitted_answers`."""
    features = {name: features_of(samples, encoder, refit.cache, refit.progress) for name, encoder in encoders.items()}
    return refitted_answers(features, samples, refit.seed)
