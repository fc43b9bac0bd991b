"""Hand-made features of raw inputs, for models that a device can fit without any encoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, combinations

import numpy as np

from ...core.task import Tensors

RAW_DIMENSIONS = 4096
"""Raw inputs above this size are averaged down."""

LARGEST_IMAGE = 64 * 64
"""Images with more pixels are averaged down before their gradients are taken."""

ORIENTATIONS = 9
"""The bins of a histogram of oriented gradients."""

VALUE_BINS = 16
"""The bins of a histogram of values."""

EQUAL = 1.0 - 1e-6
"""A power of at least this share of the largest one is as large but for rounding.

ONNX Runtime takes a factor that is nearer to 1 for 1, and leaves the multiplication out.
"""

FLAT = 1e-24
"""A channel whose variance is below this share of its mean square does not vary: the rest is rounding."""

_KERNELS = tuple(combinations(range(9), 3))
"""Places of the three weights that are 2; the other six are -1."""

STATISTICS = (
    "mean",
    "standard deviation",
    "least",
    "greatest",
    "median",
    "first quartile",
    "third quartile",
    "root mean square",
    "mean absolute step",
    "share of mean crossings",
    "correlation with the next value",
    "strongest frequency",
    "share of the strongest frequency",
    "centre of the spectrum",
)
"""Of each channel of a window, in this order."""


def flattened(inputs: np.ndarray) -> np.ndarray:
    """Return inputs (n, channels, ...) as rows of at most 4096 values, averaged over neighbours where they hold more.

    Neighbouring pairs are averaged along each axis in turn; an odd last one is left out.
    """
    while int(np.prod(inputs.shape[1:])) > RAW_DIMENSIONS and max(inputs.shape[2:], default=1) > 1:
        inputs = _halved(inputs)
    return np.ascontiguousarray(inputs.reshape(len(inputs), int(np.prod(inputs.shape[1:]))), np.float32)


def _halved(inputs: np.ndarray) -> np.ndarray:
    for axis in range(2, inputs.ndim):
        size = inputs.shape[axis] // 2
        if size:
            even, odd = (inputs.take(range(start, 2 * size, 2), axis=axis) for start in (0, 1))
            inputs = np.asarray((even + odd) / 2)
    return inputs


def window_statistics(windows: np.ndarray) -> np.ndarray:
    """Return `STATISTICS` of each channel, (n, channels * 14) float32, for ``windows`` (n, channels, length)."""
    values = windows.astype(np.float64)
    mean = values.mean(axis=2, keepdims=True)
    centred = values - mean
    varies = (centred**2).sum(axis=2) > FLAT * (values**2).sum(axis=2)
    centred *= varies[:, :, None]
    energy = (centred**2).sum(axis=2)
    power = np.abs(np.fft.rfft(centred, axis=2)[:, :, 1:]) ** 2
    total = np.maximum(power.sum(axis=2), 1e-12)
    frequencies = np.arange(1, power.shape[2] + 1) / values.shape[2]
    columns = [
        mean[:, :, 0],
        np.sqrt((centred**2).mean(axis=2)),
        values.min(axis=2),
        values.max(axis=2),
        *np.percentile(values, [50, 25, 75], axis=2),
        np.sqrt((values**2).mean(axis=2)),
        np.abs(np.diff(values, axis=2)).mean(axis=2),
        (np.diff(np.signbit(centred), axis=2) != 0).mean(axis=2),
        (centred[:, :, 1:] * centred[:, :, :-1]).sum(axis=2) / np.maximum(energy, 1e-12),
        # Of frequencies that are equally strong but for rounding it is the lowest, as of a single spike.
        frequencies[(power >= EQUAL * power.max(axis=2, keepdims=True)).argmax(axis=2)],
        power.max(axis=2) / total,
        (power * frequencies).sum(axis=2) / total,
    ]
    return np.concatenate(columns, axis=1).astype(np.float32)


def learn_convolutions(windows: np.ndarray, rng: np.random.Generator, features: int = 2520) -> Tensors:
    """Learn from windows (n, channels, length) what `convolution_features` needs for about that many ``features``.

    ``channels`` (m, channels) uint8: the random subset that each of the m kernels looks at; ``thresholds`` (m, t)
    float32: quantiles of its outputs on 32 random windows.
    """
    channels, length = windows.shape[1:]
    kernels = len(_KERNELS) * len(dilations(length))
    chosen = np.zeros((kernels, channels), np.uint8)
    for row in chosen:
        row[rng.choice(channels, int(rng.integers(1, min(channels, 9) + 1)), replace=False)] = 1
    each = max(1, features // kernels)
    quantiles = (np.arange(each) + 0.5) / each
    some = windows[rng.permutation(len(windows))[:32]]
    thresholds = [np.quantile(outputs, quantiles) for of_dilation in _outputs(some, chosen) for outputs in of_dilation]
    return {"channels": chosen, "thresholds": np.array(thresholds, np.float32)}


def convolution_features(windows: np.ndarray, learned: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return shares of outputs above thresholds, (n, m * t) float32, as MiniRocket does (Dempster et al., KDD 2021).

    All 84 kernels of nine weights of which three are 2 and six are -1, dilated by powers of two while they fit. Windows
    (n, channels, length) shorter than nine values are padded with zeros.
    """
    kernels = chain.from_iterable(_outputs(windows, learned["channels"]))
    # Counted by a product with ones, which takes half the time of a mean. Whole numbers are exact in any order.
    ones = np.ones(windows.shape[2], np.float32)
    counts = []
    for outputs, thresholds in zip(kernels, learned["thresholds"], strict=True):
        counts += [(outputs > threshold).astype(np.float32) @ ones for threshold in thresholds]
    return np.asarray(np.stack(counts, axis=1) / np.float32(windows.shape[2]))


def dilations(length: int) -> list[int]:
    """Return the steps between two weights of a kernel, for windows of that length: 1, 2, 4, ... while they fit."""
    most = max(1, (length - 1) // 8)
    return [2**power for power in range(most.bit_length())]


def kernel_weights(channels: np.ndarray) -> np.ndarray:
    """Return the weights of the 84 kernels, (84, 9 * channels) float64, by place and then by channel.

    ``channels`` (84, channels): 1 for each channel that a kernel looks at, else 0.
    """
    weights = np.full((len(_KERNELS), 9), -1.0)
    for row, kernel in zip(weights, _KERNELS, strict=True):
        row[list(kernel)] = 2.0
    return np.asarray((weights[:, :, None] * channels[:, None, :]).reshape(len(_KERNELS), -1))


def _outputs(windows: np.ndarray, channels: np.ndarray) -> Iterator[np.ndarray]:
    """Return the outputs (84, n, length) float64 of all kernels, for one dilation after the other.

    ``channels`` (m, channels): the channels that each kernel of each dilation looks at. The outputs are float64, so
    that what is above a threshold does not depend on the order in which an implementation adds.
    """
    length = windows.shape[2]
    wide = windows.astype(np.float64)
    for number, dilation in enumerate(dilations(length)):
        padded = np.pad(wide, ((0, 0), (0, 0), (4 * dilation, 4 * dilation)))
        shifted = [padded[:, :, step * dilation : step * dilation + length] for step in range(9)]
        rows = channels[number * len(_KERNELS) : (number + 1) * len(_KERNELS)]
        yield (kernel_weights(rows) @ np.concatenate(shifted, axis=1)).transpose(1, 0, 2)


def image_features(images: np.ndarray) -> np.ndarray:
    """Return histograms of oriented gradients, and of the values of each channel, (n, m) float32.

    ``images`` (n, channels, height, width) float32, 0..1, averaged down to 64 x 64 pixels where they are larger.
    Gradients by central differences, of the channel with the largest one; 9 unsigned orientations, shared between the
    two nearest; about 7 x 7 cells of at least 4 pixels, in overlapping blocks of 2 x 2 with L2-Hys normalisation (Dalal
    and Triggs, CVPR 2005). Values in 16 bins each.
    """
    while images.shape[2] * images.shape[3] > LARGEST_IMAGE:
        images = _halved(images)
    return np.concatenate([_oriented_gradients(images), _histograms(images)], axis=1)


def _oriented_gradients(images: np.ndarray) -> np.ndarray:
    """Return histograms of oriented gradients (n, m) float32 of images (n, channels, height, width).

    They are nine orientations in about seven by seven cells, and each block of two by two cells is scaled to one length
    (Dalal and Triggs, CVPR 2005).
    """
    # The gradient of a pixel is that of the channel where it is the largest.
    count, _, height, width = images.shape
    down = np.zeros_like(images)
    across = np.zeros_like(images)
    down[:, :, 1:-1] = images[:, :, 2:] - images[:, :, :-2]
    across[:, :, :, 1:-1] = images[:, :, :, 2:] - images[:, :, :, :-2]
    rows, columns, tall, wide = cells_of(height, width)
    down, across = (each[:, :, : rows * tall, : columns * wide] for each in (down, across))
    strength = np.sqrt(down * down + across * across)
    strongest = strength.argmax(axis=1)[:, None]
    size, down, across = (np.take_along_axis(each, strongest, axis=1)[:, 0] for each in (strength, down, across))
    # Each pixel counts for the two nearest orientations, and for the cell that it is in.
    bin_at = (np.arctan2(down, across) % np.pi) * np.float32(ORIENTATIONS / np.pi) - np.float32(0.5)
    lower = np.floor(bin_at).astype(np.int64)
    share = bin_at - lower
    where = np.arange(count)[:, None, None] * (rows * columns)
    where = where + (np.arange(rows * tall) // tall * columns)[:, None] + np.arange(columns * wide) // wide
    parts = ((lower % ORIENTATIONS, size * (1 - share)), ((lower + 1) % ORIENTATIONS, size * share))
    total = count * rows * columns * ORIENTATIONS
    sums = sum(np.bincount((where * ORIENTATIONS + number).ravel(), weight.ravel(), total) for number, weight in parts)
    cells = np.asarray(sums, np.float32).reshape(count, rows, columns, ORIENTATIONS)
    # Blocks overlap; a picture that is too small for two rows or columns is one block.
    if min(rows, columns) < 2:
        blocks = cells.reshape(count, 1, -1)
    else:
        corners = [cells[:, i : rows - 1 + i, j : columns - 1 + j] for i in (0, 1) for j in (0, 1)]
        blocks = np.concatenate(corners, axis=3).reshape(count, (rows - 1) * (columns - 1), 4 * ORIENTATIONS)
    for limit in (0.2, 1.0):
        blocks = np.minimum(blocks / np.sqrt((blocks**2).sum(axis=2, keepdims=True) + 1e-10), limit)
    return blocks.reshape(count, -1).astype(np.float32)


def cells_of(height: int, width: int) -> tuple[int, int, int, int]:
    """Return the rows and columns of cells of an image, and the height and width of a cell in pixels.

    What is left over at the far edges is not used.
    """
    cell = max(4, min(height, width) // 7)
    rows = max(1, height // cell)
    columns = max(1, width // cell)
    return rows, columns, height // rows, width // columns


def _histograms(images: np.ndarray, bins: int = VALUE_BINS) -> np.ndarray:
    count, channels = images.shape[:2]
    bin_at = np.clip((images * bins).astype(np.int64), 0, bins - 1).reshape(count * channels, -1)
    offset = np.arange(count * channels)[:, None] * bins
    totals = np.bincount((bin_at + offset).ravel(), minlength=count * channels * bins)
    return (totals.reshape(count, -1) / bin_at.shape[1]).astype(np.float32)
