"""The contract of data sources: options, raw items, and the samples that a device computes from them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, overload

import numpy as np
from pydantic import BeforeValidator, Field

from ..core.errors import DataError, nearest
from ..core.large_arrays import take_rows
from ..core.task import Frozen, ImageInput, InputSpec
from .preprocess import normalise_images


def _split(value: object) -> object:
    """Return the parts of a text with commas, without blanks and empty ones; anything else as it is."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


Integers = Annotated[tuple[int, ...], BeforeValidator(_split)]
"""Option written ``1,2,5``."""

Shape = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_split)]
"""Option written ``28,28``: the sides of an array."""

Strings = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""Option written ``walk,run``."""


_SHOWN = 20
"""Names that a message lists."""


class Options(Frozen):
    """Options of a data source; each kind adds its own."""


class PartOptions(Options):
    """Options of a source of which a random part may be taken."""

    n: int | None = Field(None, ge=1, description="a random part of that size")
    seed: int = Field(0, ge=0, description="which random part")


@dataclass(frozen=True)
class LeftOut:
    """Something of a data source that cannot be used: a file, an item or a recording."""

    name: str
    """The path of the file below the location of the source, or the name or number of the item."""

    reason: str
    """Why it cannot be used, as a clause whose subject is the name."""

    def __str__(self) -> str:
        """Return name and reason as a line for people."""
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class Users:
    """The users of a data set who made its samples: the clients of ``partition users``.

    Attributes:
        numbers: The position (n,) int64 in ``names`` of the user who made each sample.
        names: The users, as the data name them.
    """

    numbers: np.ndarray
    names: tuple[str, ...]

    def take(self, rows: np.ndarray) -> Users:
        """Return the users of the samples at ``rows`` (m,)."""
        return replace(self, numbers=self.numbers[rows])

    def rows(self) -> dict[str, np.ndarray]:
        """Return the rows of each user who has any, in their order."""
        order = np.argsort(self.numbers, kind="stable")
        present, begins = np.unique(self.numbers[order], return_index=True)
        pieces = np.split(order, begins[1:])
        return {self.names[number]: rows for number, rows in zip(present.tolist(), pieces, strict=True)}


@dataclass(frozen=True)
class Raw:
    """Raw samples of a source, before preprocessing."""

    kind: Literal["image", "recording", "window"]
    items: Sequence[Any]
    """The items, which may be read lazily; reading one may raise DataError.

    They are images (Pillow images, or arrays (H, W), (H, W, C) or (C, H, W), 0..255 or floats 0..1), recordings
    (time, channels) that are still to be cut, or windows (channels, length).
    """

    labels: np.ndarray
    """The positions (n,) of the items' classes in ``class_names``."""

    class_names: tuple[str, ...]
    groups: np.ndarray | None = None
    """Numbers (n,) that join items which were recorded together, in time order."""

    natural: InputSpec | None = None
    """The spec to use where the task does not bring one."""

    names: tuple[str, ...] = ()
    unlabelled: str = ""
    """The reason why these data have no labels, as an error says it where labels are needed; empty where they have.

    Where there is a reason, ``labels`` is not looked at.
    """

    are_whole: bool = False
    """Whether a group is held out as a whole, not its end."""

    targets: Sequence[Any] | None = None
    """Numbers to predict, one for an item, or (time,) for a recording."""

    name_at: Callable[[int, int], str] | None = None
    """A function from row and sample of a recording to the name of the window that begins there; None: the row's name.
    """

    skipped: tuple[LeftOut, ...] = ()
    """What is there beside the items and cannot be used."""

    short_advice: Callable[[int], str] | None = None
    """A function from the samples that a window needs to the advice about a shorter recording; None: record longer.

    The advice is the end of a message.
    """

    users: Users | None = None
    """Who made the items, where the data say so."""

    release: Callable[[], None] | None = None
    """A function that drops from memory what was read of mapped files; it is called now and then."""

    row_name: Callable[[int], str] | None = None
    """A function from an item's number to its name in messages, where there are no ``names``; None: the number."""

    def name_of(self, row: int) -> str:
        """Return the name of an item for people."""
        if self.names:
            return self.names[row]
        return str(row) if self.row_name is None else self.row_name(row)


class FileItems(Sequence[Any]):
    """A sequence that reads each path (and part) on access, so that a folder of photos need not fit into memory."""

    def __init__(self, paths: Sequence[Any], read: Callable[[Any], Any]) -> None:
        self.paths = paths
        self.read = read

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> FileItems: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return the item at ``index``; DataError where its file cannot be read."""
        if isinstance(index, slice):
            return FileItems(self.paths[index], self.read)
        return self.read(self.paths[index])


@dataclass(frozen=True)
class DataSource:
    """A kind of data source: the ``SOURCE`` of a module in this folder, or what an entry point names.

    All functions take the location, which is the text between ``:`` and ``?``, and validated options.
    """

    options: type[Options]
    read: Callable[[str, Any], Raw]
    """A function that returns the raw samples."""

    needs_path: bool = False
    """Whether the location is a file or folder: relative ones are resolved, and it is checked before reading."""

    inspect: Callable[[str, Any], object] | None = None
    """A function that checks, without reading samples, that the location holds such data, and raises DataError."""

    domains: Callable[[str, Any], Mapping[str, tuple[str, Mapping[str, Any]]]] | None = None
    """A function that returns, for each domain of a set of several, the location and options that select it alone."""

    subjects: Callable[[str, Any], Sequence[int]] | None = None
    """A function that returns the numbers of all people in a source with an option ``subject``."""

    parts: Callable[[str, Any], tuple[str, str] | None] | None = None
    """A function that returns which values of an option ``split`` select the training and the test part.

    It returns None where a location has one part alone. Without a function, a kind with such an option always has the
    parts ``train`` and ``test``.
    """

    path_options: tuple[str, ...] = ()
    """Options that are files or folders: relative ones are resolved as a location is."""

    takes_patterns: bool = False
    """Whether a location that is a path may have ``*`` or ``[``, and stands for the files that match then."""


@dataclass(frozen=True)
class Samples:
    """Inputs with labels, ready for an encoder."""

    inputs: np.ndarray
    """Preprocessed inputs (n, *input.shape) float32; or uint8, images that are not normalised yet, to save memory.

    `ready` normalises those, with the same bits. Large ones are on disk, see `core.large_arrays`.
    """

    labels: np.ndarray
    """Positions (n,) int64 in ``class_names``, or -1 where they are not known."""

    class_names: tuple[str, ...]
    input: InputSpec
    groups: np.ndarray | None = None
    """The number (n,) int64 of the recording of each window, windows of one in time order; None without recordings."""

    names: tuple[str, ...] = ()
    """The origins of the inputs; n of them, or none."""

    skipped: tuple[LeftOut, ...] = ()
    """What was left out because it cannot be used."""

    are_whole: bool = False
    """Whether `split` holds out whole groups."""

    targets: np.ndarray | None = None
    """Numbers to predict (n,) float64; None where there are none."""

    users: Users | None = None
    """Who made the samples, where the data say so."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the inputs: features that were computed once are found again by it."""
        digest = hashlib.sha256(repr(self.inputs.shape).encode())
        digest.update(np.ascontiguousarray(self.inputs).data)
        return digest.hexdigest()

    def row_digests(self) -> np.ndarray:
        """Return a number (n,) int64 for each input, by which a head knows again what it was fitted on."""
        rows = np.ascontiguousarray(self.ready().inputs)
        digests = b"".join(hashlib.blake2b(row.data, digest_size=8).digest() for row in rows)
        return np.frombuffer(digests, "<i8").astype(np.int64)

    def ready(self) -> Samples:
        """Return the samples with their inputs normalised, float32: the same ones where they are already."""
        if self.inputs.dtype != np.uint8 or not isinstance(self.input, ImageInput):
            return self
        return replace(self, inputs=normalise_images(self.inputs.astype(np.float32), self.input))

    def take(self, rows: np.ndarray) -> Samples:
        """Return the samples at ``rows`` (m,), in that order."""
        groups = None if self.groups is None else self.groups[rows]
        names = tuple(self.names[row] for row in rows) if self.names else ()
        targets = None if self.targets is None else self.targets[rows]
        inputs = take_rows(self.inputs, rows)
        labels = self.labels[rows]
        users = None if self.users is None else self.users.take(rows)
        return replace(self, inputs=inputs, labels=labels, groups=groups, names=names, targets=targets, users=users)


def near(name: str, known: Sequence[str]) -> str:
    """Return `` (did you mean 'x'?)`` where one of the known names looks like it, else nothing."""
    suggestion = nearest(name, known)
    return "" if suggestion is None else f" (did you mean '{suggestion}'?)"


def with_own_classes(known: Sequence[str], held: Sequence[str]) -> tuple[str, ...]:
    """Return the classes of a device whose data hold ``held``: the ``known`` ones, then the others in their order.

    Where the data hold none of the known classes these are left out.
    """
    new_classes = [name for name in held if name not in known]
    if len(new_classes) == len(held):
        return tuple(new_classes)
    return (*known, *new_classes)


def labels_by_name(values: np.ndarray, class_names: Sequence[str], where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels (n,) int64 and class names for integer or text ``values``; without ``names`` these are the values.

    Raises:
        DataError: Labels are neither integers nor text, or are not among the class names; or two of these are equal.
    """
    if values.ndim != 1 or values.dtype.kind not in "iuU":
        raise DataError(f"{where}: labels are {values.dtype}{list(values.shape)}, expected one row of integers or text")
    repeated = [name for name, count in Counter(class_names).items() if count > 1]
    if repeated:
        raise DataError(
            f"{where}: class names that occur twice: {', '.join(repeated[:_SHOWN])}; give each class its own"
        )
    if not class_names:
        names, labels = np.unique(values, return_inverse=True)
        return labels.astype(np.int64), tuple(str(name) for name in names)
    if values.dtype.kind == "U":
        return _positions_of(values, class_names, where), tuple(class_names)
    if len(values) and not (values.min() >= 0 and values.max() < len(class_names)):
        raise DataError(f"{where}: labels {values.min()}..{values.max()}, expected 0..{len(class_names) - 1}")
    return values.astype(np.int64), tuple(class_names)


def _positions_of(values: np.ndarray, class_names: Sequence[str], where: str) -> np.ndarray:
    """Return the positions (n,) int64 of labels that are text among the class names.

    Raises:
        DataError: A label is not among the class names.
    """
    names, inverse = np.unique(values, return_inverse=True)
    positions = {name: position for position, name in enumerate(class_names)}
    missing = [str(name) for name in names if str(name) not in positions]
    if missing:
        raise DataError(f"{where}: labels {', '.join(missing)} are not among the class names {', '.join(class_names)}")
    return np.array([positions[str(name)] for name in names], np.int64)[inverse]


_IMAGES = 128
"""The number of images whose moments are computed at once: numpy takes eight bytes for each pixel."""


def standardised(samples: Samples) -> InputSpec:
    """Return the samples' spec with mean and std replaced by those of these samples, channel by channel.

    Estimate them on training data of one place and fix them in the task: they are part of the encoder's fingerprint.
    """
    shift, spread = _moments(samples)
    mean, std = (np.broadcast_to(np.asarray(value), len(shift)) for value in (samples.input.mean, samples.input.std))
    new_std = np.where(spread > 0, std * spread, std)
    update = {"mean": _rounded(mean + std * shift), "std": _rounded(new_std)}
    return samples.input.model_copy(update=update)


def _moments(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation (channels,) of the inputs; 8-bit images are not converted to floats for it."""
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
    """Return six significant digits: enough, and the same on every machine that sums in another order."""
    return tuple(float(f"{value:.6g}") for value in values)
