"""Writes the features of raw inputs as ONNX operators, for a personal model in one file.

Each function here computes what its namesake in `features` does. Up to every decision between two outcomes, such as
which bin a value belongs to, both do the same arithmetic in the same precision, so that they decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...core.graph import DOUBLE, FLOAT, Graph, Value
from .features import (
    EQUAL,
    FLAT,
    LARGEST_IMAGE,
    ORIENTATIONS,
    RAW_DIMENSIONS,
    VALUE_BINS,
    cells_of,
    dilations,
    kernel_weights,
)

Shape = tuple[int, ...]
"""The shape of one input, without the axis of the batch."""


def write_flattened(graph: Graph, inputs: Value, shape: Shape) -> Value:
    """Write `features.flattened` for inputs (n, *shape) float32."""
    while int(np.prod(shape)) > RAW_DIMENSIONS and max(shape[1:], default=1) > 1:
        inputs, shape = _write_halved(graph, inputs, shape)
    return graph.reshape(inputs, -1, int(np.prod(shape)))


def _write_halved(graph: Graph, inputs: Value, shape: Shape) -> tuple[Value, Shape]:
    """Write the mean of neighbouring pairs along each axis but the first of ``shape``; returns the new shape, too."""
    sizes = list(shape)
    for axis in range(1, len(shape)):
        half = shape[axis] // 2
        if half:
            even = graph.slice(inputs, axis + 1, 0, 2 * half, 2)
            odd = graph.slice(inputs, axis + 1, 1, 2 * half, 2)
            inputs = graph.add("Div", graph.add("Add", even, odd), np.array(2, np.float32))
            sizes[axis] = half
    return inputs, tuple(sizes)


# --- images ----------------------------------------------------------------------------------------------------------


def write_image_features(graph: Graph, images: Value, shape: Shape) -> Value:
    """Write `features.image_features` for images (n, channels, height, width) float32, 0..1."""
    while shape[1] * shape[2] > LARGEST_IMAGE:
        images, shape = _write_halved(graph, images, shape)
    gradients = _write_oriented_gradients(graph, images, shape)
    return graph.add("Concat", gradients, _write_histograms(graph, images, shape), axis=1)


def _write_oriented_gradients(graph: Graph, images: Value, shape: Shape) -> Value:
    # The gradient of a pixel is that of the channel where it is the largest.
    _, height, width = shape
    down = _write_difference(graph, images, axis=2, size=height)
    across = _write_difference(graph, images, axis=3, size=width)
    rows, columns, tall, wide = cells_of(height, width)
    down, across = (graph.slice(graph.slice(each, 2, 0, rows * tall), 3, 0, columns * wide) for each in (down, across))
    squares = graph.add("Add", graph.add("Mul", down, down), graph.add("Mul", across, across))
    strength = graph.add("Sqrt", squares)
    strongest = graph.add("ArgMax", strength, axis=1, keepdims=1)
    strength, down, across = (graph.add("GatherElements", each, strongest, axis=1) for each in (strength, down, across))
    # The orientation, 0 to pi, in bins; where there is no gradient it does not matter, but must be a number.
    is_none = graph.add("Not", graph.add("Greater", strength, np.array(0, np.float32)))
    divisor = graph.add("Add", across, graph.cast(is_none, FLOAT))
    angle = graph.add("Atan", graph.add("Div", down, divisor))
    is_negative = graph.cast(graph.add("Less", angle, np.array(0, np.float32)), FLOAT)
    angle = graph.add("Add", angle, graph.add("Mul", is_negative, np.array(np.pi, np.float32)))
    bin_at = graph.add(
        "Sub", graph.add("Mul", angle, np.array(ORIENTATIONS / np.pi, np.float32)), np.array(0.5, np.float32)
    )
    # Each pixel counts for the two nearest orientations: the shares fall with the distance around the circle.
    bins = np.arange(ORIENTATIONS, dtype=np.float32).reshape(-1, 1, 1)
    distance = graph.add("Abs", graph.add("Sub", bin_at, bins))
    around = graph.add("Min", distance, graph.add("Sub", np.array(ORIENTATIONS, np.float32), distance))
    share = graph.add("Relu", graph.add("Sub", np.array(1, np.float32), around))
    weights = graph.cast(graph.add("Mul", strength, share), DOUBLE)
    divided = graph.reshape(weights, -1, ORIENTATIONS, rows, tall, columns, wide)
    cells = graph.add("Transpose", graph.sum_over(divided, 3, 5), perm=[0, 2, 3, 1])
    # Blocks overlap; a picture that is too small for two rows or columns is one block.
    if min(rows, columns) < 2:
        blocks = graph.reshape(cells, -1, 1, rows * columns * ORIENTATIONS)
    else:
        corners = [
            graph.slice(graph.slice(cells, 1, i, rows - 1 + i), 2, j, columns - 1 + j) for i in (0, 1) for j in (0, 1)
        ]
        joined = graph.add("Concat", *corners, axis=3)
        blocks = graph.reshape(joined, -1, (rows - 1) * (columns - 1), 4 * ORIENTATIONS)
    for limit in (0.2, 1.0):
        squared = graph.sum_over(graph.add("Mul", blocks, blocks), 2, keepdims=True)
        lengths = graph.add("Sqrt", graph.add("Add", squared, np.array(1e-10)))
        blocks = graph.add("Min", graph.add("Div", blocks, lengths), np.array(limit))
    count = max(1, (rows - 1) * (columns - 1)) * 4 * ORIENTATIONS
    if min(rows, columns) < 2:
        count = rows * columns * ORIENTATIONS
    return graph.cast(graph.reshape(blocks, -1, count), FLOAT)


def _write_difference(graph: Graph, images: Value, axis: int, size: int) -> Value:
    """Write central differences along an axis of that size; they are 0 at both ends."""
    later = graph.slice(images, axis, 2, size)
    earlier = graph.slice(images, axis, 0, size - 2)
    pads = np.zeros((2, 4), np.int64)
    pads[:, axis] = 1
    return graph.add("Pad", graph.add("Sub", later, earlier), pads.ravel())


def _write_histograms(graph: Graph, images: Value, shape: Shape) -> Value:
    channels, height, width = shape
    scaled = graph.add("Mul", images, np.array(VALUE_BINS, np.float32))
    bin_at = graph.add("Min", graph.add("Max", scaled, np.array(0, np.float32)), np.array(VALUE_BINS - 1, np.float32))
    number = graph.reshape(graph.add("Floor", bin_at), -1, channels, 1, height * width)
    is_in_bin = graph.add("Equal", number, np.arange(VALUE_BINS, dtype=np.float32).reshape(-1, 1))
    totals = graph.sum_over(graph.cast(is_in_bin, DOUBLE), 3)
    shares = graph.add("Div", totals, np.array(float(height * width)))
    return graph.cast(graph.reshape(shares, -1, channels * VALUE_BINS), FLOAT)


# --- windows ---------------------------------------------------------------------------------------------------------


def write_window_statistics(graph: Graph, windows: Value, shape: Shape) -> Value:
    """Write `features.window_statistics` for windows (n, channels, length) float32."""
    _, length = shape
    values = graph.cast(windows, DOUBLE)
    mean = _write_mean(graph, values, length)
    square_sum = graph.sum_over(graph.add("Mul", values, values), 2, keepdims=True)
    # A channel that does not vary has no steps, no crossings and no frequencies, whatever is left of rounding.
    centred = graph.add("Sub", values, mean)
    energy = graph.sum_over(graph.add("Mul", centred, centred), 2, keepdims=True)
    varies = graph.add("Greater", energy, graph.add("Mul", square_sum, np.array(FLAT)))
    centred = graph.add("Mul", centred, graph.cast(varies, DOUBLE))
    energy = graph.sum_over(graph.add("Mul", centred, centred), 2, keepdims=True)
    ordered, _ = graph.add_many("TopK", values, np.array([length]), outputs=2, axis=2, largest=0, sorted=1)
    later = graph.slice(values, 2, 1, length)
    steps = graph.add("Abs", graph.add("Sub", later, graph.slice(values, 2, 0, length - 1)))
    is_negative = graph.add("Less", centred, np.array(0.0))
    crossings = graph.add("Xor", graph.slice(is_negative, 2, 1, length), graph.slice(is_negative, 2, 0, length - 1))
    products = graph.add("Mul", graph.slice(centred, 2, 1, length), graph.slice(centred, 2, 0, length - 1))
    columns = [
        mean,
        graph.add("Sqrt", graph.add("Div", energy, np.array(float(length)))),
        graph.slice(ordered, 2, 0, 1),
        graph.slice(ordered, 2, length - 1, length),
        *(_write_quantile(graph, ordered, length, share) for share in (0.5, 0.25, 0.75)),
        graph.add("Sqrt", graph.add("Div", square_sum, np.array(float(length)))),
        _write_mean(graph, steps, length - 1),
        _write_mean(graph, graph.cast(crossings, DOUBLE), length - 1),
        graph.add("Div", graph.sum_over(products, 2, keepdims=True), graph.add("Max", energy, np.array(1e-12))),
        *_write_spectrum(graph, centred, length),
    ]
    rows = [graph.cast(graph.add("Squeeze", column, np.array([2])), FLOAT) for column in columns]
    return graph.add("Concat", *rows, axis=1)


def _write_mean(graph: Graph, values: Value, length: int) -> Value:
    """Write the mean (n, channels, 1) of values (n, channels, ``length``)."""
    return graph.add("Div", graph.sum_over(values, 2, keepdims=True), np.array(float(length)))


def _write_quantile(graph: Graph, ordered: Value, length: int, share: float) -> Value:
    """Write a quantile of ascending values (n, channels, ``length``), between two of them in proportion."""
    position = share * (length - 1)
    low = int(position)
    high = min(low + 1, length - 1)
    below = graph.slice(ordered, 2, low, low + 1)
    step = graph.add("Sub", graph.slice(ordered, 2, high, high + 1), below)
    return graph.add("Add", below, graph.add("Mul", step, np.array(position - low)))


def _write_spectrum(graph: Graph, centred: Value, length: int) -> list[Value]:
    """Write the strongest frequency, its share and the centre of the spectrum, (n, channels, 1) each."""
    numbers = np.arange(1, length // 2 + 1)
    angles = 2 * np.pi * np.outer(np.arange(length), numbers) / length
    parts = [graph.add("MatMul", centred, wave(angles)) for wave in (np.cos, np.sin)]
    power = graph.add("Add", *(graph.add("Mul", part, part) for part in parts))
    total = graph.add("Max", graph.sum_over(power, 2, keepdims=True), np.array(1e-12))
    frequencies = numbers / length
    greatest, _ = graph.add_many("TopK", power, np.array([1]), outputs=2, axis=2)
    is_less = graph.add("Less", power, graph.add("Mul", greatest, np.array(EQUAL)))
    is_greatest = graph.cast(graph.add("Not", is_less), FLOAT)
    strongest = graph.add("Gather", frequencies, graph.add("ArgMax", is_greatest, axis=2, keepdims=1))
    centre = graph.sum_over(graph.add("Mul", power, frequencies), 2, keepdims=True)
    return [strongest, graph.add("Div", greatest, total), graph.add("Div", centre, total)]


def write_convolution_features(graph: Graph, windows: Value, shape: Shape, learned: Mapping[str, np.ndarray]) -> Value:
    """Write `features.convolution_features` for windows (n, channels, length) float32."""
    _, length = shape
    values = graph.cast(windows, DOUBLE)
    steps = dilations(length)
    thresholds = learned["thresholds"].astype(np.float64)
    each = len(thresholds) // len(steps)
    columns = []
    for number, dilation in enumerate(steps):
        pads = np.array([0, 0, 4 * dilation, 0, 0, 4 * dilation])
        padded = graph.add("Pad", values, pads)
        shifted = [graph.slice(padded, 2, step * dilation, step * dilation + length) for step in range(9)]
        stacked = graph.add("Concat", *shifted, axis=1)
        part = slice(number * each, (number + 1) * each)
        outputs = graph.add("MatMul", kernel_weights(learned["channels"][part]), stacked)
        compared = graph.reshape(outputs, -1, each, 1, length)
        is_above = graph.add("Greater", compared, thresholds[part][:, :, None])
        shares = _write_mean_of_last(graph, graph.cast(is_above, DOUBLE), length)
        columns.append(graph.reshape(shares, -1, each * thresholds.shape[1]))
    return graph.cast(graph.add("Concat", *columns, axis=1), FLOAT)


def _write_mean_of_last(graph: Graph, values: Value, length: int) -> Value:
    """Write the mean (n, a, b) of values (n, a, b, ``length``)."""
    return graph.add("Div", graph.sum_over(values, 3), np.array(float(length)))
