"""Which variant of an encoder a device uses: fp32, unless int8 costs no accuracy here and is measurably faster.

int8 is taken only where a head fitted on local data answers as well with it, and where repeated timings in balanced
order show that it saves time. The result is saved beside the bundle, for this processor and runtime.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from . import heads
from .bundle import Bundle, EncoderPrecision
from .data import Samples, split
from .encoder import Encoder, Progress, arithmetic
from .errors import BundleDamaged, StateError
from .heads import FitData
from .personalize import features_of
from .storage import read_json, write_json

_log = logging.getLogger(__name__)

Wanted: TypeAlias = Literal["auto", "fp32", "int8"]

LEAST_GAIN, LEAST_GAIN_MS = 0.1, 0.5
"""int8 is chosen where it saves at least this share of the time and these milliseconds for each batch."""

MOST_LOSS = 0.005
"""Accuracy that a head on int8 features may lose."""

LEAST_ANSWERS = 200
"""Least number of answers to compare; with fewer, half a point is less than one answer."""

_BLOCKS, _BUDGET_S = (8, 40), 2.0
"""Least and most blocks of timings, and the seconds after which no further one is begun."""

_RECORD = "precision.json"


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision, and why."""

    precision: EncoderPrecision
    why: str


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one batch (medians), and whether int8 is faster beyond the noise of these timings."""

    fp32_ms: float
    int8_ms: float
    is_faster: bool


def open_encoder(
    bundle: Bundle,
    wanted: Wanted,
    samples: Samples | None,
    threads: int = 1,
    *,
    seed: int = 0,
    features: Path | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] | None = None,
) -> Encoder:
    """The bundle's encoder in the requested precision, or in the one that `choose` finds for ``auto``.

    ``samples`` are labelled local samples to learn from, none of those held out; without them ``auto`` is fp32.
    ``features`` is the folder of cached features.

    Raises:
        BundleDamaged: the self-test of fp32 fails, or that of int8 where it was requested by name.
        StateError: the bundle has no variant of that precision.
    """
    if wanted != "auto":
        return Encoder.open(bundle, wanted, threads)
    choice = choose(bundle, samples, threads, seed=seed, features=features, progress=progress, clock=clock)
    _log.info("precision_chosen precision=%s why=%s", choice.precision, choice.why)
    return Encoder.open(bundle, choice.precision, threads)


def choose(
    bundle: Bundle,
    samples: Samples | None,
    threads: int = 1,
    *,
    seed: int = 0,
    features: Path | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] | None = None,
) -> PrecisionChoice:
    """int8 where it is faster and as accurate here, else fp32; the cheapest checks come first.

    ``clock`` gives seconds; by default CPU time where one thread computes, so that other load does not count.

    Raises:
        BundleDamaged: the self-test of fp32 fails.
    """
    if "int8" not in bundle.manifest.variants:
        return PrecisionChoice("fp32", "the bundle has no int8 variant")
    if samples is None:
        return PrecisionChoice("fp32", "no labelled samples to compare the accuracies on")
    encoders = {"fp32": Encoder.open(bundle, "fp32", threads)}
    try:
        encoders["int8"] = Encoder.open(bundle, "int8", threads)
    except BundleDamaged as error:
        return PrecisionChoice("fp32", f"int8 does not run here as it was exported: {error}")
    conditions = _conditions(bundle, encoders, threads)
    known = _known(bundle, conditions)
    timing = Timing(**known["timing"]) if "timing" in known else timed(encoders, clock or _clock(encoders, threads))
    shown = f"a batch takes {timing.fp32_ms:.3f} ms in fp32 and {timing.int8_ms:.3f} ms in int8"
    if not timing.is_faster:
        _keep(bundle, conditions, timing, known.get("accuracy", {}))
        return PrecisionChoice("fp32", f"{shown}; int8 would have to save {LEAST_GAIN:.0%} and {LEAST_GAIN_MS} ms")
    digest = _digest(samples)
    answers = known.get("accuracy", {}).get(digest) or compared(encoders, samples, seed, features, progress)
    _keep(bundle, conditions, timing, {digest: answers})
    right = {name: answers[name] / max(answers["of"], 1) for name in encoders}
    if answers["of"] < LEAST_ANSWERS:
        why = f"accuracies could be compared on {answers['of']} answers only, {LEAST_ANSWERS} are needed"
        return PrecisionChoice("fp32", f"{shown}; {why}")
    result = f"{shown}; a head on local data is right on {right['fp32']:.1%} and {right['int8']:.1%}"
    is_as_good = answers["fp32"] - answers["int8"] <= MOST_LOSS * answers["of"]
    return (
        PrecisionChoice("int8", result)
        if is_as_good
        else PrecisionChoice("fp32", f"{result}: int8 may lose {MOST_LOSS:.1%}")
    )


def timed(encoders: Mapping[str, Encoder], clock: Callable[[], float]) -> Timing:
    """Both encoders timed in blocks fp32, int8, int8, fp32, so that a drift of the machine's speed counts for neither.

    int8 is faster where it saves `LEAST_GAIN` in three of four blocks, and `LEAST_GAIN_MS` in the median.
    """
    batches = {name: np.zeros((one.batch_size, *one.input_shape), np.float32) for name, one in encoders.items()}
    for name, encoder in encoders.items():
        encoder.features(batches[name])  # the first run allocates
    blocks: list[tuple[float, float]] = []
    spent = 0.0
    while len(blocks) < _BLOCKS[0] or (len(blocks) < _BLOCKS[1] and spent < _BUDGET_S):
        block = {"fp32": 0.0, "int8": 0.0}
        for name in ("fp32", "int8", "int8", "fp32"):
            begin = clock()
            encoders[name].features(batches[name])
            block[name] += clock() - begin
        blocks.append((block["fp32"] / 2, block["int8"] / 2))
        spent += 2 * sum(blocks[-1])
    fp32, int8 = (round(1000 * statistics.median(times), 3) for times in zip(*blocks, strict=True))
    saves = sum(of_int8 <= (1 - LEAST_GAIN) * of_fp32 for of_fp32, of_int8 in blocks)
    return Timing(fp32, int8, is_faster=4 * saves >= 3 * len(blocks) and fp32 - int8 >= LEAST_GAIN_MS)


def compared(
    encoders: Mapping[str, Encoder],
    samples: Samples,
    seed: int = 0,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Right answers of logistic regression refitted on each encoder's features, and their number (``of``).

    The samples are divided four times, a quarter held out each time; recordings into an earlier and a later half, each
    of which answers once.
    """
    rows = Samples(
        np.arange(len(samples), dtype=np.float32)[:, None],
        samples.labels,
        samples.class_names,
        samples.input,
        samples.groups,
    )
    if samples.groups is None:
        divisions = [split(rows, 0.25, seed + turn) for turn in range(4)]
    else:
        earlier, later = split(rows, 0.5, seed)
        divisions = [(earlier, later), (later, earlier)]
    right = dict.fromkeys(encoders, 0)
    for name, encoder in encoders.items():
        features = features_of(samples, encoder, cache, progress)
        for train, test in divisions:
            right[name] += _right_answers(features, train, test, len(samples.class_names), seed)
    return {**right, "of": sum(len(test) for train, test in divisions if len(train))}


def _right_answers(features: np.ndarray, train: Samples, test: Samples, num_classes: int, seed: int) -> int:
    if not len(train) or not len(test):
        return 0
    head = heads.create("lr")
    data = FitData(features[train.inputs[:, 0].astype(np.int64)], train.labels, num_classes)
    head.fit(data, np.random.default_rng(seed))
    answers = head.predict_proba(features[test.inputs[:, 0].astype(np.int64)]).argmax(axis=1)
    return int((answers == test.labels).sum())


def _clock(encoders: Mapping[str, Encoder], threads: int) -> Callable[[], float]:
    """CPU time of this thread where it does all the work; a GPU's work is no CPU time."""
    on_cpu = all(encoder.providers == ("CPUExecutionProvider",) for encoder in encoders.values())
    return time.thread_time if threads == 1 and on_cpu else time.perf_counter


def _digest(samples: Samples) -> str:
    return hashlib.sha256(samples.digest.encode() + samples.labels.tobytes()).hexdigest()


def _conditions(bundle: Bundle, encoders: Mapping[str, Encoder], threads: int) -> dict[str, Any]:
    """The conditions under which a measurement is valid."""
    providers = {name: list(encoder.providers) for name, encoder in encoders.items()}
    return {**arithmetic(), "providers": providers, "threads": threads, "fingerprints": bundle.fingerprints}


def _known(bundle: Bundle, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """The saved result for the same conditions; empty without one, or where the file is damaged."""
    try:
        record = read_json(bundle.folder / _RECORD) or {}
    except StateError:
        return {}
    return record if record.get("on") == conditions else {}


def _keep(
    bundle: Bundle, conditions: Mapping[str, Any], timing: Timing, accuracy: Mapping[str, Mapping[str, int]]
) -> None:
    content = {
        "on": conditions,
        "timing": {"fp32_ms": timing.fp32_ms, "int8_ms": timing.int8_ms, "is_faster": timing.is_faster},
        "accuracy": {digest: dict(answers) for digest, answers in accuracy.items()},
    }
    with contextlib.suppress(OSError):  # a read-only folder only means measuring again
        write_json(bundle.folder / _RECORD, content, durable=False)
