"""``digits5:DIR?domain=svhn&split=train``: Digits-Five: MNIST, MNIST-M, SVHN, synthetic digits and USPS.

DIR holds the files of the collection that Peng et al. offer with DomainNet: ``mnist_data.mat``,
``mnistm_with_label.mat``, ``svhn_train_32x32.mat`` and ``svhn_test_32x32.mat`` (or ``train_32x32.mat`` and
``test_32x32.mat`` as on SVHN's page), ``syn_number.mat`` and ``usps_28x28.mat``. Reading them takes scipy, which comes
with scikit-learn. A machine without it reads ``mnist.npz`` and so on with arrays ``train``, ``label_train``, ``test``
and ``label_test``. FedBN's own files are pickles, which are not read here.

Options: ``domain`` (some of mnist, mnistm, svhn, syn, usps; default: all), ``split=train|test|all`` (default: train),
``n`` (at most that many training images of each domain, a random part; the test part stays whole), ``seed``.
Sources: LeCun (MNIST), Ganin (MNIST-M, synthetic digits), Netzer (SVHN), Hull (USPS); FedBN (Li et al., ICLR 2021) and
FedPick take 743 and 500 training images of each. SVHN is for non-commercial use only; of the others most state nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from ...core.errors import DataError, MissingCapability, UnknownName, cause
from ...core.reading import each
from ...core.task import ImageInput
from ..base import DataSource, Options, Raw, Strings
from ..npz import load_arrays
from ._layouts import Origin, random_part

MAX_BYTES = 1 << 30
"""Files and arrays above this are none of these sets; MNIST-M, the largest array, has 129 MB."""

ORIGIN = Origin(
    "digits5",
    "Digits-Five",
    "mnist_data.mat, mnistm_with_label.mat, svhn_train_32x32.mat, svhn_test_32x32.mat, syn_number.mat and "
    "usps_28x28.mat, or <domain>.npz with train, label_train, test and label_test; pickles are not read",
    "https://ai.bu.edu/M3SDA/ (Digit-Five)",
    "SVHN: non-commercial use only; the others: mostly none stated",
)

Part = tuple[np.ndarray, np.ndarray]

DOMAINS = ("mnist", "mnistm", "svhn", "syn", "usps")
_FILES: Mapping[str, tuple[str, ...]] = {
    "mnist": ("mnist_data.mat",),
    "mnistm": ("mnistm_with_label.mat",),
    "svhn": ("svhn_{part}_32x32.mat", "{part}_32x32.mat"),
    "syn": ("syn_number.mat",),
    "usps": ("usps_28x28.mat",),
}
_ARRAYS = {
    "mnist": ("{part}_28", "label_{part}"),
    "mnistm": ("{part}", "label_{part}"),
    "svhn": ("X", "y"),
    "syn": ("{part}_data", "{part}_label"),
    "npz": ("{part}", "label_{part}"),
}
"""Names of images and labels in a file."""


class Digits5Options(Options):
    """The options of Digits-Five: which digits to take."""

    domain: Strings = Field((), description="only these sets; default: all")
    split: Literal["train", "test", "all"] = "train"
    n: int | None = Field(
        None, ge=1, description="at most that many images of each set, a random part; the test part stays whole"
    )
    seed: int = Field(0, ge=0, description="which random part")


def read(where: str, options: Digits5Options) -> Raw:
    """Return the digits of the chosen sets; 28 or 32 pixels, grey or colour, as each set has them."""
    images: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for domain in each(_domains(options), "domains"):
        result = [_part(Path(where).expanduser(), domain, part) for part in _parts(options)]
        pixels = [image for inputs, _ in result for image in inputs]
        values = np.concatenate([digits for _, digits in result])
        limit = None if options.split == "test" else options.n
        rows = random_part(len(values), limit, (options.seed, DOMAINS.index(domain)))
        images += [pixels[row] for row in rows]
        labels.append(values[rows])
    names = tuple("0123456789")
    return Raw("image", images, np.concatenate(labels), names, natural=ImageInput(channels=3, height=28, width=28))


def inspect(where: str, options: Digits5Options) -> None:
    """Check that there is a file for each selected set; none is read."""
    for domain in _domains(options):
        for part in _parts(options):
            _file(Path(where).expanduser(), domain, part)


def domains(where: str, options: Digits5Options) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the place and the option that select each set alone."""
    return {domain: (where, {"domain": domain}) for domain in _domains(options)}


def _parts(options: Digits5Options) -> tuple[str, ...]:
    return ("train", "test") if options.split == "all" else (options.split,)


def _domains(options: Digits5Options) -> tuple[str, ...]:
    """Return the chosen sets, or all of them.

    Raises:
        UnknownName: There is no such set.
    """
    for name in options.domain:
        if name not in DOMAINS:
            raise UnknownName("Digits-Five domain", name, DOMAINS)
    return options.domain or DOMAINS


def _file(folder: Path, domain: str, part: str) -> Path:
    """Return the file of a part of a set, under one of the names that copies of it have.

    Raises:
        DataError: There is none, or it is too large.
    """
    names = [f"{domain}.npz", *(name.format(part=part) for name in _FILES[domain])]
    result = next((folder / name for name in names if (folder / name).is_file()), None)
    if result is None:
        raise ORIGIN.missing(folder, f"there is no {' or '.join(names)}")
    size = result.stat().st_size
    if size > MAX_BYTES:
        raise ORIGIN.damaged(result, f"has {size} bytes", f"at most {MAX_BYTES}")
    return result


def _part(folder: Path, domain: str, part: str) -> Part:
    """Return images (n, h, w[, c]) or (n, 1, h, w) and labels (n,) 0..9 of one set."""
    path = _file(folder, domain, part)
    if path.suffix == ".npz":
        images, labels = _named(load_arrays(path), "npz", part, path)
    elif domain == "usps":
        images, labels = _usps_cells(path, part)
    else:
        images, labels = _named(_matlab(path, _wanted(domain, part)), domain, part, path)
        # SVHN's official files have the images as the last axis.
        if domain == "svhn" and images.ndim == 4:
            images = np.moveaxis(images, -1, 0)
    digits = _digits(labels, path)
    if images.ndim not in {3, 4} or len(images) != len(digits):
        raise ORIGIN.damaged(path, f"has images {images.shape} for {len(digits)} labels", "one label for each image")
    return _bytes_or_unit(images, path), digits


def _usps_cells(path: Path, part: str) -> Part:
    """Return the images and labels of a part of USPS, whose file has a row of two cells for each part."""
    cells = _matlab(path, ["dataset"]).get("dataset", np.empty(0))
    if cells.shape != (2, 2) or not all(isinstance(cell, np.ndarray) for cell in cells.flat):
        raise ORIGIN.damaged(path, f"has cells {cells.shape} named 'dataset'", "(2, 2)")
    images, labels = cells[0 if part == "train" else 1]
    return images, labels


def _wanted(form: str, part: str) -> list[str]:
    """Return the names of the arrays of images and labels in a file of this form."""
    return [name.format(part=part) for name in _ARRAYS[form]]


def _named(arrays: Mapping[str, np.ndarray], form: str, part: str, path: Path) -> Part:
    """Return the arrays of images and labels by the names that they have in a file of this form."""
    names = _wanted(form, part)
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ORIGIN.damaged(path, f"lacks the array {', '.join(missing)}", f"arrays {' and '.join(names)}")
    images_name, labels_name = names
    return arrays[images_name], arrays[labels_name]


def _matlab(path: Path, wanted: list[str]) -> dict[str, np.ndarray]:
    """Return the wanted arrays of a MATLAB file; their sizes are looked at before they are read."""
    try:
        from scipy import io
    except ImportError as error:
        raise MissingCapability.package("scipy", "heads", "reading Digits-Five") from error
    try:
        sizes = {name: int(np.prod(shape, dtype=object)) for name, shape, _ in io.whosmat(str(path))}
        large = [name for name in wanted if sizes.get(name, 0) > MAX_BYTES]
        if large:
            raise ORIGIN.damaged(path, f"declares {sizes[large[0]]} numbers for '{large[0]}'", f"at most {MAX_BYTES}")
        result = io.loadmat(str(path), variable_names=wanted)
    except DataError:
        raise
    # scipy, zlib and numpy each have their own ways of saying that a file is damaged.
    except Exception as error:
        raise ORIGIN.damaged(path, f"cannot be read ({cause(error)})", "a MATLAB file of version 5 to 7.2") from error
    return {name: result[name] for name in wanted if isinstance(result.get(name), np.ndarray)}


def _digits(labels: np.ndarray, path: Path) -> np.ndarray:
    """Return labels (n,) int64 of one-hot rows (n, 10), or of one number each, of which 10 means 0."""
    if labels.dtype.kind not in "iufb":
        raise ORIGIN.damaged(path, f"has labels of type {labels.dtype}", "numbers")
    if labels.ndim == 2 and labels.shape[1] == 10:
        if not (np.count_nonzero(labels, axis=1) == 1).all():
            raise ORIGIN.damaged(path, "has label rows without a single 1 in them", "one-hot rows")
        return np.asarray(labels.argmax(axis=1), np.int64)
    if not (labels == np.rint(labels)).all():
        raise ORIGIN.damaged(path, "has labels that are not whole numbers", "0..9, or 10 for 0")
    values = labels.reshape(-1).astype(np.int64)
    if len(values) and not (values.min() >= 0 and values.max() <= 10):
        raise ORIGIN.damaged(path, f"has labels {values.min()}..{values.max()}", "0..9, or 10 for 0")
    return values % 10


def _bytes_or_unit(images: np.ndarray, path: Path) -> np.ndarray:
    """Return images as bytes, or as floats where all are 0..1."""
    if images.dtype.kind not in "iufb" or not np.isfinite(images).all():
        raise ORIGIN.damaged(path, f"has images of type {images.dtype}, or not finite", "numbers")
    low, high = (float(images.min()), float(images.max())) if images.size else (0.0, 0.0)
    if low < 0 or high > 255:
        raise ORIGIN.damaged(path, f"has pixels {low:g}..{high:g}", "0..255, or 0..1")
    unit = images.dtype.kind == "f" and high <= 1
    return images.astype(np.float32) if unit else np.rint(images).astype(np.uint8)


SOURCE = DataSource(Digits5Options, read, needs_path=True, inspect=inspect, domains=domains)
