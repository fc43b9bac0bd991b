"""``digits:DOMAIN``: handwritten and rendered digits in several styles, without a download.

Domains: ``optdigits`` (scikit-learn's 1,797 digits of 8 x 8, grey), ``inverted`` (the same, dark on a light colour),
``photo`` (MNIST-M style: the difference between a digit and a patch of a photo), ``slanted`` (leaning, coloured),
``striped`` (on coloured stripes), ``rendered`` (Pillow's built-in font:
random colour, rotation, blur, neighbours; needs no scikit-learn). Options: ``n``, ``seed``, ``classes=0,1,2``, and
``client=i&clients=k``, which gives k devices disjoint parts.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from ..core.errors import DataError, MissingCapability, UnknownName, cause
from ..core.reading import each
from ..core.task import ImageInput
from .base import DataSource, Integers, Options, Raw
from .preprocess import has_pillow, resize

SIDE = 32


@functools.lru_cache(maxsize=1)
def load() -> tuple[np.ndarray, np.ndarray]:
    """Return all digits (1797, 8, 8) uint8 0..255, light on dark, and their labels (1797,) int64.

    Raises:
        MissingCapability: The package scikit-learn is not installed.
        DataError: The file is not at its usual place in the installed scikit-learn.
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
    """Return the digit as it is, (8, 8)."""
    return digit


def inverted(digit: np.ndarray, seed: int, number: int) -> np.ndarray:
    """Return the digit in a dark colour on a light one, (32, 32, 3)."""
    rng = np.random.default_rng([seed, number, 1])
    ink = rng.uniform(0, 90, 3)
    paper = rng.uniform(165, 255, 3)
    share = _large(digit)[:, :, None] / 255.0
    return np.asarray(np.round(share * ink + (1 - share) * paper), np.uint8)


def on_photo(digit: np.ndarray, seed: int, number: int) -> np.ndarray:
    """|patch - digit| for a random patch that lies wholly inside a photo, (32, 32, 3)."""
    rng = np.random.default_rng([seed, number, 2])
    photo = _photos()[int(rng.integers(2))]
    first_row, first_column = (int(rng.integers(side - SIDE + 1)) for side in photo.shape[:2])
    patch = photo[first_row : first_row + SIDE, first_column : first_column + SIDE].astype(np.int16)
    return np.asarray(np.abs(patch - _large(digit)[:, :, None].astype(np.int16)), np.uint8)


def slanted(digit: np.ndarray, seed: int, number: int) -> np.ndarray:
    """Return the digit (32, 32, 3) leaning by up to 45 degrees, in a bright colour on a dark one."""
    rng = np.random.default_rng([seed, number, 3])
    lean = rng.uniform(0.4, 1.0)
    ink = rng.uniform(150, 255, 3)
    paper = rng.uniform(0, 70, 3)
    large = _large(digit).astype(np.float64)
    shifts = np.round((np.arange(SIDE) - SIDE / 2) * -lean / 1.6).astype(int)
    rows = [np.roll(row, shift) for row, shift in zip(large, shifts, strict=True)]
    share = np.stack(rows)[:, :, None] / 255.0
    return np.asarray(np.round(share * ink + (1 - share) * paper), np.uint8)


def striped(digit: np.ndarray, seed: int, number: int) -> np.ndarray:
    """Return the digit (32, 32, 3) on coloured stripes with noise, darker or lighter than these."""
    rng = np.random.default_rng([seed, number, 4])
    ink = rng.uniform(0, 255, 3)
    colour = rng.uniform(60, 200, 3)
    other = rng.uniform(60, 200, 3)
    ink = np.where(np.abs(ink - (colour + other) / 2) < 60, 255 - ink, ink)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    wave = 0.5 + 0.5 * np.sin((rows * rng.uniform(-1, 1) + columns * rng.uniform(-1, 1)) * 1.2 + rng.uniform(0, 6))
    paper = wave[:, :, None] * colour + (1 - wave[:, :, None]) * other + rng.normal(0, 12, (SIDE, SIDE, 3))
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
        purpose = "data source 'digits' ('digits:rendered' does without)"
        raise MissingCapability.package("sklearn", "heads", purpose)
    return Path(spec.submodule_search_locations[0]) / "datasets"


_CANVAS = 64
"""Drawn on a larger canvas, so that turning it leaves no empty corners in the middle."""


def draw(seed: int, number: int, classes: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """Return one digit (32, 32, 3) uint8 and its label, out of ``classes``.

    Raises:
        MissingCapability: Pillow is not installed, or was built without scalable fonts.
    """
    if not has_pillow():
        raise MissingCapability.package("PIL", "agent", "digits:rendered")
    from PIL import Image, ImageDraw, ImageFilter

    rng = np.random.default_rng([seed, number, 3])
    label = int(rng.choice(classes))
    paper, ink = rng.integers(0, 256, (2, 3))
    while abs(float(paper.mean() - ink.mean())) < 80:  # grey levels on average
        paper, ink = rng.integers(0, 256, (2, 3))
    paper = tuple(paper.tolist())
    ink = tuple(ink.tolist())
    image = Image.new("RGB", (_CANVAS, _CANVAS), paper)
    pen = ImageDraw.Draw(image)
    font = _font(int(rng.integers(22, 30)))
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


_RENDERED_DEFAULT = 500
_HANDWRITTEN: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "optdigits": plain,
    "inverted": inverted,
    "photo": on_photo,
    "slanted": slanted,
    "striped": striped,
}

DOMAINS = (*_HANDWRITTEN, "rendered")


class DigitsOptions(Options):
    """The options of the digits: which styles and classes, and how many."""

    n: int | None = Field(
        None, ge=1, le=100_000, description=f"samples; default: all there are, rendered {_RENDERED_DEFAULT}"
    )
    seed: int = Field(0, ge=0, description="another seed, another partition and other decoration")
    classes: Integers = Field(tuple(range(10)), min_length=1, description="digits that occur")
    client: int = Field(0, ge=0, description="which part, 0..clients-1")
    clients: int = Field(1, ge=1, le=10_000, description="number of disjoint parts")

    @model_validator(mode="after")
    def _possible(self) -> DigitsOptions:
        if self.client >= self.clients:
            raise ValueError(f"client {self.client} of {self.clients}: expected 0..{self.clients - 1}")
        if not set(self.classes) <= set(range(10)):
            raise ValueError(f"classes {self.classes}: expected digits 0..9")
        return self


def read(where: str, options: DigitsOptions) -> Raw:
    """Return the digits of one domain, optdigits where none is named."""
    domain = where or "optdigits"
    if domain not in DOMAINS:
        raise UnknownName("digits domain", domain, DOMAINS)
    if domain == "rendered":
        numbers = options.client + options.clients * np.arange(options.n or _RENDERED_DEFAULT)
        drawn = [draw(options.seed, number, options.classes) for number in each(numbers.tolist(), "digits")]
        images = [image for image, _ in drawn]
        labels = np.array([label for _, label in drawn], np.int64)
    else:
        digits, all_labels = load()
        pool = np.random.default_rng(options.seed).permutation(len(all_labels))
        mine = pool[np.isin(all_labels[pool], options.classes)][options.client :: options.clients]
        if options.n is not None and options.n > len(mine):
            raise DataError(f"digits: n={options.n}, this part holds {len(mine)}; choose fewer, or fewer clients")
        mine = mine[: options.n]
        decorate = _HANDWRITTEN[domain]
        images = [decorate(digits[row], options.seed, int(row)) for row in mine]
        labels = all_labels[mine].astype(np.int64)
    return Raw("image", images, labels, tuple("0123456789"), natural=ImageInput(channels=3, height=32, width=32))


def domains(where: str, options: DigitsOptions) -> dict[str, tuple[str, dict[str, Any]]]:
    """Yield the name of each style and the options that give it its own digits; nothing where one style was named."""
    if where:
        return {}
    is_default = not options.model_fields_set & {"client", "clients"}
    parts = [{"client": number, "clients": len(DOMAINS)} if is_default else {} for number in range(len(DOMAINS))]
    return {name: (name, part) for name, part in zip(DOMAINS, parts, strict=True)}


SOURCE = DataSource(DigitsOptions, read, domains=domains)
