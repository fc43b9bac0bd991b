"""Two variants of one encoder, fp32 and int8, compared: which is faster, and what heads lose with the faster one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .. import heads
from ..data import Samples
from ..heads import FitData
from .encoder import Encoder
from .local.validation import folds

LEAST_GAIN = 0.1
"""The share of the time of a batch that int8 has to save in order to be chosen."""

LEAST_GAIN_MS = 0.5
"""The milliseconds of a batch that int8 has to save as well: a share of next to nothing is not worth it."""

MOST_LOSS = 0.005
"""Accuracy that a head on int8 features may lose."""

_PARTS = 4
"""Parts of the samples, each of which answers once by a head fitted on the others."""

_LEAST_BLOCKS = 8
"""How many blocks of timings are made at least."""

_MOST_BLOCKS = 40
"""How many blocks of timings are made at most."""

_BUDGET_S = 2.0
"""Seconds after which no further block of timings is begun, once there are `_LEAST_BLOCKS`."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one batch (medians), and whether int8 is faster beyond the noise of these timings."""

    fp32_ms: float
    int8_ms: float
    is_faster: bool


def timed(encoders: Mapping[str, Encoder], clock: Callable[[], float]) -> Timing:
    """Time both encoders in blocks fp32, int8, int8, fp32, so that a drift of the machine's speed counts for neither.

    int8 is faster where it saves `LEAST_GAIN` in three of four blocks, and `LEAST_GAIN_MS` in the median.
    """
    batches = {
        name: np.zeros((encoder.batch_size, *encoder.input_shape), np.float32) for name, encoder in encoders.items()
    }
    for name, encoder in encoders.items():
        encoder.features(batches[name])  # the first run allocates
    blocks: list[tuple[float, float]] = []
    spent = 0.0
    while len(blocks) < _LEAST_BLOCKS or (len(blocks) < _MOST_BLOCKS and spent < _BUDGET_S):
        block = {"fp32": 0.0, "int8": 0.0}
        for name in ("fp32", "int8", "int8", "fp32"):
            started_at = clock()
            encoders[name].features(batches[name])
            block[name] += clock() - started_at
        blocks.append((block["fp32"] / 2, block["int8"] / 2))
        spent += 2 * sum(blocks[-1])
    fp32, int8 = (round(1000 * statistics.median(times), 3) for times in zip(*blocks, strict=True))
    saves = sum(of_int8 <= (1 - LEAST_GAIN) * of_fp32 for of_fp32, of_int8 in blocks)
    return Timing(fp32, int8, is_faster=4 * saves >= 3 * len(blocks) and fp32 - int8 >= LEAST_GAIN_MS)


def refitted_answers(features: Mapping[str, np.ndarray], samples: Samples, seed: int = 0) -> dict[str, np.ndarray]:
    """Return whether logistic regression refitted on each encoder's features (n, d) is right.

    The answers (m,) bool are of the same rows for all encoders.

    Cross-validated: each sample answers once, by a head that has learned from others, and from other recordings.
    """
    right: dict[str, list[np.ndarray]] = {name: [np.zeros(0, bool)] for name in features}
    for fold in folds(samples, _PARTS, np.random.default_rng(seed)):
        for name, rows in features.items():
            head = heads.create("lr")
            fit_data = FitData(rows[fold.train], samples.labels[fold.train], len(samples.class_names))
            head.fit(fit_data, np.random.default_rng(seed))
            right[name].append(head.predict_proba(rows[fold.test]).argmax(axis=1) == samples.labels[fold.test])
    return {name: np.concatenate(answers) for name, answers in right.items()}
