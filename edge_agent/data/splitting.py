"""Which samples train and which test, and what mean and spread the inputs have."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from ..task import InputSpec, WindowInput
from .base import Samples
from .preprocess import windows_apart

_log = logging.getLogger(__name__)
_IMAGES = 128
"""Images that are counted at once: numpy makes eight bytes of each pixel for that."""


def split(samples: Samples, test_fraction: float, seed: int) -> tuple[Samples, Samples]:
    """Training and test samples, rows in their original order.

    Without groups: that share of each class, at least one sample of a class on either side where it has two. With
    groups (recordings): the last share of each recording tests, the first part trains, and the windows between them
    that would overlap both are left out; too short a recording trains only.
    """
    if samples.groups is None:
        is_test = _stratified(samples.labels, test_fraction, np.random.default_rng(seed))
        return samples.take(np.flatnonzero(~is_test)), samples.take(np.flatnonzero(is_test))
    gap = windows_apart(samples.input) if isinstance(samples.input, WindowInput) else 0
    parts = [_by_time(rows, test_fraction, gap) for rows in _rows_by_group(samples.groups)]
    train, test = (np.sort(np.concatenate([part[side] for part in parts])) for side in (0, 1))
    if not len(test):
        _log.warning("no_test_samples recordings=%d: none is long enough to hold a part back", len(parts))
    return samples.take(train), samples.take(test)


def standardised(samples: Samples) -> InputSpec:
    """The samples' spec with mean and std replaced by those of these samples, channel by channel.

    Estimate them on training data of one place and fix them in the task: they are part of the encoder's fingerprint.
    """
    shift, spread = _moments(samples)
    mean, std = (np.broadcast_to(np.asarray(value), len(shift)) for value in (samples.input.mean, samples.input.std))
    new_std = np.where(spread > 0, std * spread, std)
    update = {"mean": _rounded(mean + std * shift), "std": _rounded(new_std)}
    return samples.input.model_copy(update=update)


def _moments(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (channels,) of the inputs; of images of 8 bits without making floats of them."""
    inputs = samples.inputs
    if inputs.dtype != np.uint8:
        axes = (0, *range(2, inputs.ndim))
        return inputs.mean(axis=axes, dtype=np.float64), inputs.std(axis=axes, dtype=np.float64)
    greys = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None, None, None], (256, inputs.shape[1], 1, 1))
    values = replace(samples, inputs=greys).ready().inputs[:, :, 0, 0].T.astype(np.float64)
    counts = np.zeros(values.shape, np.int64)
    for begin in range(0, len(inputs), _IMAGES):
        for channel, grey in enumerate(np.moveaxis(inputs[begin : begin + _IMAGES], 1, 0)):
            counts[channel] += np.bincount(grey.reshape(-1), minlength=256)
    shares = counts / counts.sum(axis=1, keepdims=True)
    mean = (shares * values).sum(axis=1)
    return mean, np.sqrt((shares * (values - mean[:, None]) ** 2).sum(axis=1))


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    """Six significant digits: enough, and the same on every machine that sums in another order."""
    return tuple(float(f"{value:.6g}") for value in values)


def _stratified(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    is_test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        is_test[rows[: _test_count(len(rows), fraction)]] = True
    return is_test


def _test_count(count: int, fraction: float) -> int:
    return min(max(round(count * fraction), 1), count - 1) if count > 1 else 0


def _rows_by_group(groups: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(groups == group) for group in np.unique(groups)]


def _by_time(rows: np.ndarray, fraction: float, gap: int) -> tuple[np.ndarray, np.ndarray]:
    if len(rows) < gap + 2:
        return rows, rows[:0]
    begin = min(len(rows) - _test_count(len(rows), fraction), len(rows) - 1)
    begin = max(begin, gap + 1)
    return rows[: begin - gap], rows[begin:]
