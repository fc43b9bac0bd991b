"""scikit-learn's digits and photos, read from its files: importing scikit-learn would cost a device 80 MB.

Digits: UCI Optical Recognition of Handwritten Digits (Alpaydin, Kaynak), photos: China by Danielle Sucher and flower by
dany13, both CC BY; they come with scikit-learn (BSD-3).
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
from pathlib import Path

import numpy as np

from ...errors import DataError, MissingCapability, cause
from ..preprocess import has_pillow, resize

SIDE = 32


@functools.lru_cache(maxsize=1)
def load() -> tuple[np.ndarray, np.ndarray]:
    """All digits (1797, 8, 8) uint8 0..255, light on dark, and their labels (1797,) int64.

    Raises:
        MissingCapability: scikit-learn is not installed.
        DataError: its file is not where it has been in all releases so far.
    """
    try:
        with gzip.open(_folder() / "data" / "digits.csv.gz", "rt", encoding="ascii") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    except (OSError, ValueError) as error:
        raise DataError(
            f"digits: scikit-learn's digits cannot be read: {cause(error)}; 'digits:rendered' needs none"
        ) from error
    return np.round(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8), table[:, 64].astype(np.int64)


def plain(digit: np.ndarray, seed: int, number: int) -> np.ndarray:  # noqa: ARG001 - one form for all domains
    """The digit as it is, (8, 8)."""
    return digit


def inverted(digit: np.ndarray, seed: int, number: int) -> np.ndarray:
    """The digit in a dark colour on a light one, (32, 32, 3)."""
    rng = np.random.default_rng([seed, number, 1])
    ink, paper = rng.uniform(0, 90, 3), rng.uniform(165, 255, 3)
    share = _large(digit)[:, :, None] / 255.0
    return np.asarray(np.round(share * ink + (1 - share) * paper), np.uint8)


def on_photo(digit: np.ndarray, seed: int, number: int) -> np.ndarray:
    """|patch - digit| for a random patch that lies wholly inside a photo, (32, 32, 3)."""
    rng = np.random.default_rng([seed, number, 2])
    photo = _photos()[int(rng.integers(2))]
    top, left = (int(rng.integers(side - SIDE + 1)) for side in photo.shape[:2])
    patch = photo[top : top + SIDE, left : left + SIDE].astype(np.int16)
    return np.asarray(np.abs(patch - _large(digit)[:, :, None].astype(np.int16)), np.uint8)


def slanted(digit: np.ndarray, seed: int, number: int) -> np.ndarray:
    """The digit leaning by up to 45 degrees in a bright colour on a dark one, (32, 32, 3): another person's hand."""
    rng = np.random.default_rng([seed, number, 3])
    lean, ink, paper = rng.uniform(0.4, 1.0), rng.uniform(150, 255, 3), rng.uniform(0, 70, 3)
    large = _large(digit).astype(np.float64)
    shifts = np.round((np.arange(SIDE) - SIDE / 2) * -lean / 1.6).astype(int)
    rows = [np.roll(row, shift) for row, shift in zip(large, shifts, strict=True)]
    share = np.stack(rows)[:, :, None] / 255.0
    return np.asarray(np.round(share * ink + (1 - share) * paper), np.uint8)


def striped(digit: np.ndarray, seed: int, number: int) -> np.ndarray:
    """The digit on coloured stripes with noise, sometimes darker and sometimes lighter than they are, (32, 32, 3)."""
    rng = np.random.default_rng([seed, number, 4])
    ink, one, other = rng.uniform(0, 255, 3), rng.uniform(60, 200, 3), rng.uniform(60, 200, 3)
    ink = np.where(np.abs(ink - (one + other) / 2) < 60, 255 - ink, ink)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    wave = 0.5 + 0.5 * np.sin((rows * rng.uniform(-1, 1) + columns * rng.uniform(-1, 1)) * 1.2 + rng.uniform(0, 6))
    paper = wave[:, :, None] * one + (1 - wave[:, :, None]) * other + rng.normal(0, 12, (SIDE, SIDE, 3))
    share = _large(digit)[:, :, None] / 255.0
    return np.asarray(np.clip(share * ink + (1 - share) * paper, 0, 255), np.uint8)


def _large(digit: np.ndarray) -> np.ndarray:
    return np.asarray(resize(digit[:, :, None], SIDE, SIDE, antialias=True)[:, :, 0])


@functools.lru_cache(maxsize=1)
def _photos() -> tuple[np.ndarray, ...]:
    if not has_pillow():
        raise MissingCapability.package("PIL", "agent", "digits:photo")
    from PIL import Image

    try:
        names = [_folder() / "images" / name for name in ("china.jpg", "flower.jpg")]
        return tuple(np.asarray(Image.open(name).convert("RGB")) for name in names)
    except OSError as error:
        raise DataError(
            f"digits: scikit-learn's photos cannot be read: {cause(error)}; 'digits:rendered' needs none"
        ) from error


def _folder() -> Path:
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise MissingCapability(
            "these digits come with scikit-learn, which is not installed; pip install 'headwater[heads]', "
            "or use 'digits:rendered', which needs none"
        )
    return Path(spec.submodule_search_locations[0]) / "datasets"
