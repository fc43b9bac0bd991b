"""``digits:DOMAIN``: handwritten and rendered digits in several styles, without a download.

Domains: ``optdigits`` (scikit-learn's 1,797 digits of 8 x 8, grey), ``inverted`` (the same, dark on a light colour),
``photo`` (MNIST-M style: the difference between a digit and a patch of a photo), ``slanted`` (leaning, coloured),
``striped`` (on coloured stripes), ``rendered`` (Pillow's built-in font:
random colour, rotation, blur, neighbours; needs no scikit-learn). Options: ``n``, ``seed``, ``classes=0,1,2``, and
``client=i&clients=k``, which gives k devices disjoint parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from ...errors import DataError, UnknownName
from ...task import ImageInput
from ..base import Integers, Raw
from ..base import Options as BaseOptions
from . import handwritten, rendered

_RENDERED_DEFAULT = 500
_HANDWRITTEN: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "optdigits": handwritten.plain,
    "inverted": handwritten.inverted,
    "photo": handwritten.on_photo,
    "slanted": handwritten.slanted,
    "striped": handwritten.striped,
}

DOMAINS = (*_HANDWRITTEN, "rendered")


class Options(BaseOptions):
    """Which digits, and how many."""

    n: int | None = Field(
        None, ge=1, le=100_000, description=f"samples; default: all there are, rendered {_RENDERED_DEFAULT}"
    )
    seed: int = Field(0, ge=0, description="another seed, another partition and other decoration")
    classes: Integers = Field(tuple(range(10)), min_length=1, description="digits that occur")
    client: int = Field(0, ge=0, description="which part, 0..clients-1")
    clients: int = Field(1, ge=1, le=10_000, description="number of disjoint parts")

    @model_validator(mode="after")
    def _possible(self) -> Options:
        if self.client >= self.clients:
            raise ValueError(f"client {self.client} of {self.clients}: expected 0..{self.clients - 1}")
        if not set(self.classes) <= set(range(10)):
            raise ValueError(f"classes {self.classes}: expected digits 0..9")
        return self


def read(where: str, options: Options) -> Raw:
    """The digits of one domain, optdigits where none is named."""
    domain = where or "optdigits"
    if domain == "rendered":
        images, labels = _rendered(options)
    elif domain in _HANDWRITTEN:
        images, labels = _handwritten(domain, options)
    else:
        raise UnknownName("digits domain", domain, DOMAINS)
    return Raw("image", images, labels, tuple("0123456789"), natural=ImageInput(channels=3, height=32, width=32))


def domains(where: str, options: Options) -> dict[str, tuple[str, dict[str, Any]]]:
    """For each style its name and the options that give it digits of its own; nothing where one style was named."""
    if where:
        return {}
    own = not options.model_fields_set & {"client", "clients"}
    parts = [{"client": number, "clients": len(DOMAINS)} if own else {} for number in range(len(DOMAINS))]
    return {name: (name, part) for name, part in zip(DOMAINS, parts, strict=True)}


def _rendered(options: Options) -> tuple[list[np.ndarray], np.ndarray]:
    numbers = options.client + options.clients * np.arange(options.n or _RENDERED_DEFAULT)
    drawn = [rendered.draw(options.seed, int(number), options.classes) for number in numbers]
    return [image for image, _ in drawn], np.array([label for _, label in drawn], np.int64)


def _handwritten(domain: str, options: Options) -> tuple[list[np.ndarray], np.ndarray]:
    digits, labels = handwritten.load()
    pool = np.random.default_rng(options.seed).permutation(len(labels))
    mine = pool[np.isin(labels[pool], options.classes)][options.client :: options.clients]
    if options.n is not None and options.n > len(mine):
        raise DataError(f"digits: n={options.n}, this part holds {len(mine)}; choose fewer, or fewer clients")
    mine = mine[: options.n]
    decorate = _HANDWRITTEN[domain]
    return [decorate(digits[row], options.seed, int(row)) for row in mine], labels[mine].astype(np.int64)
