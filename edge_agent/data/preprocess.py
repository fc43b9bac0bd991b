"""An input spec, executed: the same arithmetic on a device as in training, with Pillow and without it.

Pillow resizes where it is installed; the numpy twin gives the same bits for 8-bit images.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.errors import DataError
from ..core.task import ImageInput, WindowInput

_ROWS = 256
"""Image rows that are resized at once without Pillow: bounds the memory for large photos."""

_LONGEST_SIDE = 1 << 15
"""The most pixels of a side: resizing needs a weight for each of them and each pixel of the result."""

_KEPT_WEIGHTS = 1 << 20
"""Weights that are kept for the next image have at most so many values; those of 16 sizes are kept."""

_PILLOW_UNIT = 2.0**22
"""Pillow's weights are multiples of 1 / this."""


def image_pixels(item: Any, spec: ImageInput) -> np.ndarray:
    """Return pixels (channels, height, width) of one image, uint8, or float32 0..255 where the image held floats 0..1.

    Raises:
        DataError: The array has a shape or a number of channels that no image has, or a side is too long.
    """
    pixels = height_width_channels(item)[:, :, :3]
    if max(pixels.shape[:2]) > _LONGEST_SIDE:
        raise DataError(f"image of shape {pixels.shape}, expected sides of at most {_LONGEST_SIDE} pixels")
    if pixels.shape[2] != spec.channels and spec.channels == 3:
        pixels = np.repeat(pixels, 3, axis=2)
    elif pixels.shape[2] != spec.channels:  # to grey by ITU-R 601, as Pillow does
        pixels = _to_grey(pixels)
    return np.ascontiguousarray(resize(pixels, spec.height, spec.width, antialias=spec.antialias).transpose(2, 0, 1))


def _to_grey(pixels: np.ndarray) -> np.ndarray:
    """Return pixels (height, width, 1) of coloured ones (height, width, 3), some rows at once: float64 takes memory."""
    shares = np.array([0.299, 0.587, 0.114])
    rows = []
    for begin in range(0, len(pixels), _ROWS):
        grey = pixels[begin : begin + _ROWS].astype(np.float64) @ shares
        rows.append(_round(grey, pixels.dtype == np.uint8))
    return np.concatenate(rows)[:, :, None]


def normalise_images(pixels: np.ndarray, spec: ImageInput) -> np.ndarray:
    """Normalise ``pixels`` (n, channels, height, width) float32 0..255 in place: (pixels / 255 - mean) / std."""
    mean, std = (for_channels(values, spec.channels, (1, -1, 1, 1)) for values in (spec.mean, spec.std))
    pixels *= 1.0 / (255.0 * std)
    pixels -= mean / std
    return pixels


def restore_pixels(image: np.ndarray, spec: ImageInput) -> np.ndarray:
    """Return a normalised image (channels, height, width) as pixels (height, width, channels) uint8."""
    channels = (-1, 1, 1)
    shares = image * np.reshape(spec.std, channels) + np.reshape(spec.mean, channels)
    return np.asarray(np.clip(np.round(shares * 255), 0, 255).astype(np.uint8).transpose(1, 2, 0))


def cut(
    recording: np.ndarray, spec: WindowInput, short_advice: Callable[[int], str] = lambda _length: "record longer"
) -> np.ndarray:
    """Return windows (m, channels, length) float32, not yet normalised, of a recording (time, channels), in time order.

    ``short_advice``: samples that a window needs -> what to do about a recording that has fewer.

    Raises:
        DataError: The recording has another number of channels, holds NaN or infinity, or is shorter than one window.
    """
    if recording.ndim != 2 or recording.shape[1] != spec.channels:
        raise DataError(
            f"has shape {recording.shape}, expected (time, {spec.channels}); of a table choose {spec.channels} columns "
            "of values (columns=NAME,NAME) and name that of the time (time=NAME)"
        )
    if not np.isfinite(recording).all():
        raise DataError("holds NaN or infinity")
    if len(recording) < spec.length:
        advice = short_advice(spec.length)
        raise DataError(f"has {len(recording)} samples, one window needs {spec.length}; {advice}")
    starts = range(0, len(recording) - spec.length + 1, spec.stride)
    return np.stack([recording[start : start + spec.length].T for start in starts]).astype(np.float32)


def normalise_windows(windows: np.ndarray, spec: WindowInput) -> np.ndarray:
    """Normalise ``windows`` (n, channels, length) float32 in place: (windows - mean) / std."""
    mean, std = (for_channels(values, spec.channels, (1, -1, 1)) for values in (spec.mean, spec.std))
    windows -= mean
    windows /= std
    return windows


def resize(pixels: np.ndarray, height: int, width: int, *, antialias: bool) -> np.ndarray:
    """Resize ``pixels`` (h, w, c) bilinearly to (height, width, c); uint8 stays uint8, floats stay float32."""
    if pixels.shape[:2] == (height, width):
        return pixels
    if antialias and pixels.dtype == np.uint8 and has_pillow():
        from PIL import Image

        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        across = image.resize((width, image.height), Image.Resampling.BILINEAR)  # one call would let the release of
        resized = np.asarray(across.resize((width, height), Image.Resampling.BILINEAR))  # Pillow choose the order
        return resized.reshape(height, width, pixels.shape[2])
    return resize_numpy(pixels, height, width, antialias=antialias)


def resize_numpy(pixels: np.ndarray, height: int, width: int, *, antialias: bool) -> np.ndarray:
    """Resize as `resize` does, without Pillow: horizontal pass first; between the passes, 8-bit images have 8 bits.

    Antialiased 8-bit images get Pillow's bits: its weights have 22 bits, and their sums are exact in float64.
    """
    across, down = (_weights(*sides, antialias) for sides in ((pixels.shape[1], width), (pixels.shape[0], height)))
    rounded = pixels.dtype == np.uint8
    kind: type[np.floating[Any]] = np.float32
    if rounded and antialias:
        kind = np.float64
        across, down = (np.floor(weights * _PILLOW_UNIT + 0.5) / _PILLOW_UNIT for weights in (across, down))
    across = across.astype(kind)
    down = down.astype(kind)
    blocks = [
        _round(np.einsum("ow,hwc->hoc", across, pixels[begin : begin + _ROWS].astype(kind), optimize=True), rounded)
        for begin in range(0, len(pixels), _ROWS)
    ]
    between = np.concatenate(blocks)
    return _round(np.einsum("oh,hwc->owc", down, between.astype(kind), optimize=True), rounded)


@functools.cache
def has_pillow() -> bool:
    """Return whether Pillow is installed; nothing is imported."""
    return importlib.util.find_spec("PIL") is not None


def _weights(size: int, target: int, antialias: bool) -> np.ndarray:
    """Return `_new_weights`, those of usual sizes from the last time."""
    is_usual = size * target <= _KEPT_WEIGHTS
    return _usual_weights(size, target, antialias) if is_usual else _new_weights(size, target, antialias)


@functools.lru_cache(maxsize=16)
def _usual_weights(size: int, target: int, antialias: bool) -> np.ndarray:
    return _new_weights(size, target, antialias)


def _new_weights(size: int, target: int, antialias: bool) -> np.ndarray:
    """Return the weights (target, size) float64 of old pixels in new ones: a triangle, widened when shrinking."""
    scale = size / target
    reach = max(scale, 1.0) if antialias else 1.0
    centers = (np.arange(target)[:, None] + 0.5) * scale
    distances = np.abs(np.arange(size)[None, :] + 0.5 - centers) / reach
    weights = np.maximum(1.0 - distances, 0.0)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _round(values: np.ndarray, to_bytes: bool) -> np.ndarray:
    return np.clip(np.floor(values + 0.5), 0, 255).astype(np.uint8) if to_bytes else np.asarray(values, np.float32)


def height_width_channels(item: Any) -> np.ndarray:
    """Return pixels (height, width, 1, 3 or 4) of a Pillow image or array: uint8, or float32 0..255 from floats 0..1.

    Raises:
        DataError: The array has a shape or values that no image has.
    """
    array = item if isinstance(item, np.ndarray) else _from_pillow(item)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim == 3 and array.shape[2] not in {1, 3, 4} and array.shape[0] in {1, 3}:
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in {1, 3, 4} or not array.size:
        raise DataError(f"image of shape {array.shape}, expected (h, w), (h, w, 1 or 3) or (1 or 3, h, w)")
    return _as_bytes_or_floats(array)


def _as_bytes_or_floats(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return np.asarray(np.where(array, 255, 0), np.uint8)
    if array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise DataError(
            f"image of {array.dtype} with NaN, infinity or no numbers at all; expected 0..255, or floats 0..1"
        )
    low = float(array.min())
    high = float(array.max())
    top = 1 if array.dtype.kind == "f" else 255
    if low < 0 or high > top:
        raise DataError(
            f"image of {array.dtype} with values {low:g}..{high:g}, expected integers 0..255 or floats 0..1"
        )
    return np.asarray(array, np.float32) * np.float32(255) if top == 1 else np.asarray(array, np.uint8)


def _from_pillow(image: Any) -> np.ndarray:
    """Return pixels of a Pillow image, upright as the camera meant it; transparency is dropped."""
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        return _bytes_of_wide(np.asarray(image))
    mode = "L" if image.mode in {"1", "L", "LA"} else "RGB"
    # Converting to the mode that it has already would be one more copy.
    return np.asarray(image if image.mode == mode else image.convert(mode))


def _bytes_of_wide(grey: np.ndarray) -> np.ndarray:
    """Return grey pixels (height, width) of more than 8 bits as uint8, some rows at once: float64 takes memory."""
    # Pillow clips 16-bit grey to white when it converts; keep the upper 8 bits instead.
    scale = 257.0 if grey.max() > 255 else 1.0
    rows = []
    for begin in range(0, len(grey), _ROWS):
        block = grey[begin : begin + _ROWS].astype(np.float64)
        rows.append(np.clip(block / scale + 0.5, 0, 255).astype(np.uint8))
    return np.concatenate(rows)


def for_channels(values: tuple[float, ...], channels: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the mean or the std of a task, one value or one for each channel, as float32 of a shape with -1 for these.

    Raises:
        DataError: There are other numbers of values.
    """
    if len(values) not in {1, channels}:
        raise DataError(f"mean or std of {len(values)} values, expected 1 or {channels}, one for each channel")
    return np.broadcast_to(np.asarray(values, np.float32), channels).reshape(shape)


def windows_apart(spec: WindowInput) -> int:
    """Return the number of windows to leave out between two that must not overlap."""
    return math.ceil(spec.length / spec.stride) - 1
