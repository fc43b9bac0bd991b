"""``torchvision:MNIST?root=data``: a data set that torchvision reads, from files that are there. No download.

The name is that of a class in ``torchvision.datasets`` whose samples are images with one label, such as MNIST,
FashionMNIST, EMNIST, CIFAR10, SVHN, STL10, GTSRB or EuroSAT. Options: ``root`` (the folder that holds the set, as for
that class; default: data), ``split=train|test|all`` or the name of another part that the class has (default: train),
``variant`` (of EMNIST: letters, balanced …), ``n`` (a random part of that size), ``seed``.

Names of classes are those that the set states. Images are read when they are asked for. Needs torchvision, which the
extra ``train`` installs; a device without it reads MNIST by ``idx`` and CIFAR by ``cifar``.
"""

from __future__ import annotations

import importlib
import inspect as signatures
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from pydantic import Field

from ..core.errors import DataError, UnknownName, cause
from ..core.reading import each
from .base import DataSource, PartOptions, Raw, labels_by_name

_LABELS = ("targets", "labels", "_labels")
"""Attributes in which classes of torchvision keep all labels."""

_BASES = ("VisionDataset", "DatasetFolder", "ImageFolder", "FakeData")
"""Classes that are no data sets of their own; folders of images have the kind ``images``."""


class TorchvisionOptions(PartOptions):
    """The options of a set of torchvision: where it is, and which part of it."""

    root: str = Field("data", description="folder that holds the set, as for its class in torchvision")
    split: str = Field("train", description="train, test, all, or another part that the class has")
    variant: str | None = Field(None, description="value of split of a class that has train, too: letters of EMNIST")


def _datasets() -> ModuleType:
    """Return ``torchvision.datasets``.

    Raises:
        MissingCapability: torchvision is not installed, or does not work with the installed torch.
    """
    from ..models import import_torchvision

    import_torchvision()
    return importlib.import_module("torchvision.datasets")


def _class_of(name: str) -> Callable[..., Any]:
    """Return the class of a set.

    Raises:
        UnknownName: There is none of this name; the message suggests the nearest.
    """
    module = _datasets()
    known: dict[str, Callable[..., Any]] = {}
    for candidate in module.__all__:
        member = getattr(module, candidate)
        is_set = isinstance(member, type) and issubclass(member, module.VisionDataset)
        if is_set and candidate not in _BASES and "root" in signatures.signature(member).parameters:
            known[candidate] = member
    if name not in known:
        raise UnknownName("set of torchvision", name, known)
    return known[name]


def _open_part(name: str, options: TorchvisionOptions, split: str) -> Any:
    """Return a part of a set as an object of its class; nothing is downloaded.

    Raises:
        DataError: The files are not there or damaged, or the set has no such part.
    """
    made = _class_of(name)
    parameters = signatures.signature(made).parameters
    arguments: dict[str, Any] = {"root": str(Path(options.root).expanduser())}
    if "download" in parameters:
        arguments["download"] = False
    if "train" in parameters:
        if split not in {"train", "test"}:
            raise DataError(f"torchvision:{name}: no part '{split}', expected train, test or all")
        arguments["train"] = split == "train"
        if options.variant is not None and "split" in parameters:
            arguments["split"] = options.variant
    elif "split" in parameters:
        arguments["split"] = split
    elif split != "train":
        raise DataError(f"torchvision:{name}: has one part alone, and split={split} was given; leave it out")
    try:
        return made(**arguments)
    # Each class has its own ways of saying that its files are missing or damaged.
    except Exception as error:
        advice = f"import torchvision; torchvision.datasets.{name}({arguments['root']!r}, download=True)"
        raise DataError(
            f"torchvision:{name}: part {split} in '{arguments['root']}' cannot be read: {cause(error)}; nothing is "
            f"downloaded here: give root=FOLDER, or fetch it once by Python, for example: {advice}"
        ) from error


class _Images(Sequence[Any]):
    """The images of some rows of the parts of a set, each read when it is asked for."""

    def __init__(self, parts: Sequence[Any], rows: np.ndarray) -> None:
        self._parts = parts
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        """Return the image at ``index``; DataError where it cannot be read, or the sample has none."""
        if isinstance(index, slice):
            return _Images(self._parts, self._rows[index])
        return _sample(self._parts, int(self._rows[index]))[0]


def _sample(parts: Sequence[Any], row: int) -> tuple[Any, Any]:
    """Return the image and the label in a row of the parts, one after another.

    Raises:
        DataError: It cannot be read, or is no pair of an image and a label.
    """
    for part in parts:
        if row < len(part):
            break
        row -= len(part)
    try:
        sample = part[row]
    # Files may be missing or damaged, and each class says so in its own way.
    except Exception as error:
        raise DataError(f"cannot be read: {cause(error)}") from error
    if not isinstance(sample, tuple) or len(sample) != 2:
        raise DataError(f"is {type(sample).__name__}, expected an image with one label")
    return sample


def _labels_of(part: Any, where: str) -> np.ndarray:
    """Return the labels (n,) int64 of a part, from where the class keeps them, else from its samples.

    ``where`` begins messages.

    Raises:
        DataError: The labels are no whole numbers from 0 on, one for each image.
    """
    for attribute in _LABELS:
        labels = getattr(part, attribute, None)
        if labels is not None and len(labels) == len(part):
            break
    else:
        labels = [_sample([part], row)[1] for row in each(range(len(part)), "labels")]
    values = np.asarray(labels)
    if values.shape != (len(part),) or values.dtype.kind not in "iu":
        raise DataError(
            f"{where}: labels are {values.dtype}{list(values.shape)}, expected one whole number for each of "
            f"{len(part)} images; this set is for another task"
        )
    without = int((values < 0).sum())
    if without:
        raise DataError(
            f"{where}: {without} of {len(values)} images have no class (a label below 0), as in the unlabelled part of "
            "STL10; choose another part (split=)"
        )
    return values.astype(np.int64)


def _class_names(parts: Sequence[Any], labels: np.ndarray) -> tuple[str, ...]:
    """Return the names that the set states for its labels; empty where it states none that fit."""
    stated = getattr(parts[0], "classes", None)
    if not isinstance(stated, list | tuple) or not all(isinstance(name, str) for name in stated):
        return ()
    names = tuple(stated)
    is_fitting = labels.min() >= 0 and labels.max() < len(names) and len(set(names)) == len(names)
    return names if is_fitting else ()


def read(where: str, options: TorchvisionOptions) -> Raw:
    """Return the images of the chosen parts, which are read when they are asked for.

    Raises:
        UnknownName: torchvision has no such set.
        DataError: Its files are not there, or its samples are no images with a label.
    """
    splits = ("train", "test") if options.split == "all" else (options.split,)
    parts = [_open_part(where, options, split) for split in splits]
    total = sum(map(len, parts))
    if not total:
        raise DataError(f"torchvision:{where}: no samples in '{options.root}'; expected at least one")
    values = np.concatenate([_labels_of(part, f"torchvision:{where}") for part in parts])
    rows = np.arange(total)
    if options.n is not None and options.n < total:
        rows = np.sort(np.random.default_rng(options.seed).permutation(total)[: options.n])
    labels, names = labels_by_name(values, _class_names(parts, values), f"torchvision:{where}")
    return Raw("image", _Images(parts, rows), labels[rows], names, row_name=lambda row: f"sample {rows[row]}")


def inspect(where: str, options: TorchvisionOptions) -> None:
    """Check that the files of the set are there."""
    split = "train" if options.split == "all" else options.split
    _open_part(where, options, split)


def parts(where: str, options: TorchvisionOptions) -> tuple[str, str] | None:  # noqa: ARG001 - the class alone says it
    """Return the names of the training and test part; None for a set of one part."""
    parameters = signatures.signature(_class_of(where)).parameters
    has_parts = "train" in parameters or "split" in parameters
    return ("train", "test") if has_parts else None


torchvision = DataSource(TorchvisionOptions, read, inspect=inspect, parts=parts, path_options=("root",))
