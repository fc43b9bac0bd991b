"""Digits drawn with the font that Pillow carries: every one follows from a seed and a number."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...errors import MissingCapability
from ..preprocess import has_pillow

SIDE = 32
_CANVAS = 64
"""Drawn on a larger canvas, so that turning it leaves no empty corners in the middle."""


def draw(seed: int, number: int, classes: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """One digit (32, 32, 3) uint8 and its label, out of ``classes``.

    Raises:
        MissingCapability: Pillow is not installed, or was built without scalable fonts.
    """
    if not has_pillow():
        raise MissingCapability.package("PIL", "agent", "digits:rendered")
    from PIL import Image, ImageDraw, ImageFilter

    rng = np.random.default_rng([seed, number, 3])
    label = int(rng.choice(classes))
    paper, ink = _colours(rng)
    image = Image.new("RGB", (_CANVAS, _CANVAS), paper)
    pen, font = ImageDraw.Draw(image), _font(int(rng.integers(22, 30)))
    middle = _CANVAS / 2 + rng.uniform(-2.5, 2.5, 2)
    for side in (-1, 1):  # neighbours reach into the picture, as on house numbers
        if rng.random() < 0.5:
            aside = (middle[0] + side * rng.uniform(17, 21), middle[1])
            pen.text(aside, str(rng.integers(10)), fill=ink, font=font, anchor="mm")
    pen.text((middle[0], middle[1]), str(label), fill=ink, font=font, anchor="mm")
    image = image.rotate(float(rng.uniform(-20, 20)), Image.Resampling.BILINEAR, fillcolor=paper)
    edge = (_CANVAS - SIDE) // 2
    image = image.crop((edge, edge, edge + SIDE, edge + SIDE)).filter(
        ImageFilter.GaussianBlur(float(rng.uniform(0, 1)))
    )
    return np.asarray(image), label


def _colours(rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Paper and ink that differ by at least 80 grey levels on average."""
    while True:
        paper, ink = rng.integers(0, 256, (2, 3))
        if abs(float(paper.mean() - ink.mean())) >= 80:
            return tuple(paper.tolist()), tuple(ink.tolist())


@functools.lru_cache(maxsize=16)
def _font(size: int) -> Any:
    from PIL import ImageFont

    try:
        font = ImageFont.load_default(size=size)
    except TypeError as error:  # before Pillow 10.1 the built-in font had one size
        raise MissingCapability("digits:rendered needs Pillow 10.1 or newer; pip install -U pillow") from error
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise MissingCapability("digits:rendered needs a Pillow with FreeType; pip install -U pillow")
    return font
