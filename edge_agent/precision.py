"""Which variant of an encoder a device uses: fp32, unless int8 costs no accuracy here and is measurably faster.

int8 is taken only where a head fitted on local data answers as well with it, and where repeated timings in balanced
order show that it saves time. The result is saved beside the bundle, for this processor and runtime.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from . import heads
from .bundle import Bundle, EncoderPrecision
from .data import Samples, split
from .encoder import Encoder, Progress, arithmetic
from .errors import BundleDamaged
from .heads import FitData
from .personalize import features_of
from .storage import read_record, write_record

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
    providers = {name: list(encoder.providers) for name, encoder in encoders.items()}
    conditions = {**arithmetic(), "providers": providers, "threads": threads, "fingerprints": bundle.fingerprints}
    path = bundle.folder / "precision.json"
    known = read_record(path, conditions)
    if clock is None:  # CPU time of this thread where it does all the work; a GPU's work is no CPU time
        on_cpu = all(encoder.providers == ("CPUExecutionProvider",) for encoder in encoders.values())
        clock = time.thread_time if threads == 1 and on_cpu else time.perf_counter
    timing = Timing(**known["timing"]) if "timing" in known else timed(encoders, clock)
    measured = {"timing": asdict(timing), "accuracy": known.get("accuracy", {})}
    shown = f"a batch takes {timing.fp32_ms:.3f} ms in fp32 and {timing.int8_ms:.3f} ms in int8"
    if not timing.is_faster:
        write_record(path, conditions, measured)
        return PrecisionChoice("fp32", f"{shown}; int8 would have to save {LEAST_GAIN:.0%} and {LEAST_GAIN_MS} ms")
    digest = hashlib.sha256(samples.digest.encode() + samples.labels.tobytes()).hexdigest()
    answers = measured["accuracy"].get(digest) or compared(encoders, samples, seed, features, progress)
    write_record(path, conditions, {**measured, "accuracy": {digest: answers}})
    right = {name: answers[name] / max(answers["of"], 1) for name in encoders}
    if answers["of"] < LEAST_ANSWERS:
        why = f"accuracies could be compared on {answers['of']} answers only, {LEAST_ANSWERS} are needed"
        return PrecisionChoice("fp32", f"{shown}; {why}")
    result = f"{shown}; a head on local data is right on {right['fp32']:.1%} and {right['int8']:.1%}"
    is_as_good = answers["fp32"] - answers["int8"] <= MOST_LOSS * answers["of"]
    limit = "" if is_as_good else f": int8 may lose {MOST_LOSS:.1%}"
    return PrecisionChoice("int8" if is_as_good else "fp32", f"{result}{limit}")


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
            if not len(train) or not len(test):
                continue
            train_rows, test_rows = (part.inputs[:, 0].astype(np.int64) for part in (train, test))
            head = heads.create("lr")
            given = FitData(features[train_rows], train.labels, len(samples.class_names))
            head.fit(given, np.random.default_rng(seed))
            right[name] += int((head.predict_proba(features[test_rows]).argmax(axis=1) == test.labels).sum())
    return {**right, "of": sum(len(test) for train, test in divisions if len(train))}
