"""Local data of a device: a source string in, preprocessed samples out. They never leave the device.

A source is ``kind:where?option=value&option=value``: ``images:photos``, ``npz:day1.npz?inputs=x&labels=y``,
``idx:mnist?split=train``, ``windows:watch.npz?subject=3``, ``digits:rendered?n=500``, ``python:my_data:load``, and
public sets by their names: ``cifar:cifar-10-batches-bin``, ``pacs:PACS?domain=sketch``, ``ucihar:DIR?subject=3``. A
kind is a file in this folder with a `DataSource` called ``SOURCE``; other packages add kinds by the entry-point group
``headwater.data``, which names a `DataSource` or such a module.

This file finds and loads a source. Read in this order: `base` (the contract), `preprocess` (an input spec, executed),
`images` (a short source), `splitting` (which samples are held out), `partition` (which client gets which samples), then
the kind that you look for. Nothing here knows a model, a method or a message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
from numpy.typing import ArrayLike

from ..core.config import parse
from ..core.errors import ConfigError, DataError, UnknownName, UsageError
from ..core.large_arrays import new_array, release
from ..core.reading import Progress, each, shown_by
from ..core.registry import Registry, absolute, is_reference
from ..core.task import ImageInput, InputSpec, WindowInput
from . import preprocess
from ._in_memory import files_in, items_in
from ._sound_files import SUFFIXES as SOUND_SUFFIXES
from .base import (
    DataSource,
    FileItems,
    LeftOut,
    Options,
    Raw,
    Samples,
    labels_by_name,
    near,
    standardised,
    with_own_classes,
)
from .npz import from_arrays as npz_arrays
from .npz import load_array
from .splitting import split

__all__ = [
    "DataSource",
    "LeftOut",
    "Options",
    "Raw",
    "Samples",
    "check",
    "domains",
    "from_arrays",
    "from_files",
    "from_python",
    "is_file",
    "label_array",
    "load",
    "location",
    "natural_input",
    "parse_source",
    "part_names",
    "registry",
    "source_kind",
    "split",
    "standardised",
    "subjects",
    "with_options",
    "with_own_classes",
]

_log = logging.getLogger(__name__)
_SHOWN = 20

registry = Registry(
    "data source",
    __name__,
    f"{__name__}.sets",
    entry_points="headwater.data",
    besides=("columns", "expansion", "partition", "pictures", "preprocess", "sets", "splitting"),
    # Modules cannot be called as one of the standard library or a dependency is.
    families={"tables": ("csv",), "torchvision_sets": ("torchvision",)},
)


def load(
    source: str,
    input: InputSpec | None = None,  # noqa: A002 - the task's word
    class_names: Sequence[str] | None = None,
    *,
    folder: Path | None = None,
    compact: bool = False,
    strict: bool | None = None,
    labelled: bool | None = True,
    own_classes: bool = False,
    progress: Progress | None = None,
) -> Samples:
    """Return the samples of ``source``, preprocessed by ``input`` and labelled by ``class_names``.

    None: as data suggest.

    Classes are matched by name, so that a device may hold some of the task's classes, in any order. With
    ``own_classes`` it may hold others, too: they follow, or take the place of ``class_names`` where the data have none
    of these. A relative path is resolved from ``folder``, or from the working folder. ``compact``: 8-bit images are not
    normalised yet, which takes a quarter of the memory; `Samples.ready` normalises them. ``strict`` False: images and
    recordings that cannot be used are left out, named in ``skipped`` and in a warning; None: an error, but files beside
    them that are not read (of another form, or in another place) are left out; True: these are an error, too. Not
    ``labelled``: labels are not needed and not read; None: they are read where there are any. ``progress`` is called
    with the number of files, images or recordings that were read, and of all; None: see `edge_agent.core.reading`.

    Raises:
        UnknownName: No kind of source has this name.
        ConfigError: Options are unknown or out of range; all of them are listed.
        DataError: The data are missing, empty, unreadable or of another form; every mistake is listed.
        MissingCapability: A package that this kind needs is not installed.
    """
    show = None if progress is None else lambda _what: progress
    with shown_by(show):
        raw = _resolve(source, folder).read()
        spec = input if input is not None else _natural(raw, source)
        if not (labelled or (labelled is None and not raw.unlabelled)):
            return _unlabelled(raw, spec, class_names or (), source, compact=compact, strict=strict)
        return _samples(raw, spec, class_names, source, compact=compact, strict=strict, own_classes=own_classes)


def from_arrays(
    inputs: np.ndarray,
    labels: np.ndarray | None,
    spec: InputSpec,
    class_names: Sequence[str],
    *,
    own_classes: bool = False,
) -> Samples:
    """Return samples of arrays in memory, preprocessed by ``spec``.

    ``inputs``: images (n, h, w), (n, h, w, c) or (n, c, h, w), integers 0..255 or floats 0..1, or windows
    (n, channels, length). ``labels`` (n,): names of classes, as text or as integers, else positions in ``class_names``;
    None: not known. ``own_classes``: they are names, also of other classes; see `load`.

    Raises:
        DataError: The arrays differ in length or have another form, or a label is not a known class.
    """
    return _from_memory(inputs, labels, spec, class_names, own_classes=own_classes)


def is_file(source: str) -> bool:
    """Return whether this text is the path of a single file, and not the name of a source."""
    return files_in(source, registry.names()) is not None


def from_python(
    inputs: Any,
    labels: np.ndarray | None,
    spec: InputSpec,
    class_names: Sequence[str],
    *,
    own_classes: bool = False,
    strict: bool | None = None,
) -> Samples:
    """Return samples of a Python program's data: arrays as of `from_arrays`, one file, a list of files, Pillow images.

    One file and one Pillow image are a batch of one. ``strict``: as in `load`, for files and images.

    Raises:
        DataError: See `from_arrays`; or a file cannot be read, or the array looks like a single image.
    """
    paths = files_in(inputs, registry.names())
    if paths is None:
        items = items_in(inputs, spec, None if labels is None else len(labels))
        return _from_memory(items, labels, spec, class_names, own_classes=own_classes, strict=strict)
    if labels is None:
        return from_files(paths, spec, strict=strict is not False)
    if not isinstance(spec, ImageInput):
        raise DataError(f"X: {len(paths)} files of recordings with labels; give a data source, such as 'windows:FILE'")
    from .images import ImageFiles

    images = ImageFiles([Path(path).expanduser() for path in paths])
    names = tuple(paths)
    return _from_memory(images, labels, spec, class_names, own_classes=own_classes, strict=strict, names=names)


def _from_memory(
    items: np.ndarray | Sequence[Any],
    labels: np.ndarray | None,
    spec: InputSpec,
    class_names: Sequence[str],
    *,
    own_classes: bool = False,
    strict: bool | None = None,
    names: tuple[str, ...] = (),
) -> Samples:
    """Return samples of an array, or of images one by one, which have ``names`` where they are files."""
    # 1. The labels, with the names of their classes: names of classes are their own, positions are those of the task.
    values = np.full(len(items), -1)
    own_names: tuple[str, ...] = ()
    if labels is not None:
        is_named = labels.dtype.kind == "U" or {str(label) for label in np.unique(labels)} <= set(class_names)
        positions_in = () if own_classes or is_named else class_names
        values, own_names = labels_by_name(labels, positions_in, "y")
    # 2. The raw samples.
    if isinstance(items, np.ndarray):
        raw = npz_arrays(items, values, class_names=own_names, groups=None, kind=spec.kind, where="X")
    elif len(items) != len(values):
        raise DataError(f"X: {len(items)} inputs, {len(values)} labels; expected one label for each input")
    else:
        raw = Raw("image", items, values, own_names, names=names)
    if labels is None:
        return _unlabelled(raw, spec, class_names, "X", strict=strict)
    return _samples(raw, spec, class_names, "X", strict=strict, own_classes=own_classes)


def label_array(labels: ArrayLike) -> np.ndarray:
    """Return labels as an array of text or of integers where they are such, also those of an array of Python objects.

    Raises:
        DataError: Python objects of another type among them, None for example.
    """
    result = np.asarray(labels)
    if result.dtype.kind != "O":
        return result
    values: list[str | int] = []
    for row, label in enumerate(result.ravel().tolist()):
        if isinstance(label, bool) or not isinstance(label, (str, int, np.integer)):
            raise DataError(f"y: label {row} is {label!r}, expected text or an integer; leave its row out")
        value = label if isinstance(label, str) else int(label)  # NumPy makes floats of its own mixed integers
        values.append(value)
    return np.array(values).reshape(result.shape)


def _samples(
    raw: Raw,
    spec: InputSpec,
    class_names: Sequence[str] | None,
    source: str,
    *,
    compact: bool = False,
    strict: bool | None = None,
    own_classes: bool = False,
) -> Samples:
    """Return preprocessed samples with labels; the arguments are those of `load`.

    Raises:
        DataError: The data are of another kind than the task's, have no labels or other classes, or cannot be read.
    """
    _check_kind(raw, spec, source)  # data of another kind have other classes, too, which is not what is wrong with them
    labels, names = _match_names(raw, class_names, source, own_classes=own_classes)
    done = _execute(raw, spec, source, compact=compact, strict=strict)
    used = np.unique(labels[done.rows])
    lost = [names[label] for label in np.setdiff1d(np.unique(labels), used)]
    if lost:
        _log.warning("class_without_samples source=%s classes=%s: nothing of them can be used", source, _listed(lost))
    return done.samples(raw, labels[done.rows], names, spec)


def _unlabelled(
    raw: Raw,
    spec: InputSpec,
    class_names: Sequence[str],
    source: str,
    *,
    compact: bool = False,
    strict: bool | None = None,
) -> Samples:
    """Return preprocessed samples whose labels (n,) are -1; the arguments are those of `load`.

    Raises:
        DataError: The data are of another kind than the task's, or cannot be read.
    """
    _check_kind(raw, spec, source)
    done = _execute(raw, spec, source, compact=compact, strict=strict)
    labels = np.full(len(done.rows), -1, np.int64)
    return done.samples(raw, labels, tuple(class_names), spec)


def natural_input(source: str, *, folder: Path | None = None) -> InputSpec:
    """Return the input spec that the data at ``source`` suggest, which `load` uses where the task brings none.

    Raises:
        HeadwaterError: See `load`.
    """
    return _natural(_resolve(source, folder).read(), source)


def check(
    source: str,
    folder: Path | None = None,
    input: InputSpec | None = None,  # noqa: A002 - the task's word
    class_names: Sequence[str] | None = None,
) -> None:
    """Check that ``source`` is well formed and that its data exist; no sample is read.

    With ``class_names`` the labels are read and have to be among them; with ``input`` the kind of the samples has to
    fit.

    Raises:
        UnknownName: No kind of source has this name.
        ConfigError: Options are unknown or out of range.
        DataError: There is nothing at that location, or nothing that this kind can read.
        MissingCapability: A package that this kind needs is not installed.
    """
    resolved = _resolve(source, folder)
    kind = resolved.kind
    options = resolved.options
    is_pattern = kind.takes_patterns and has_magic(resolved.location)
    if kind.needs_path and not is_pattern and not Path(resolved.location).exists():
        raise DataError(f"{source}: there is no {Path(resolved.location).absolute()}; check the path")
    if kind.inspect is not None:
        inspected = kind.inspect(resolved.location, options)
        if isinstance(inspected, Raw):
            _check_labelled(inspected)
    if class_names is not None or input is not None:
        raw = resolved.read()
        if input is not None:
            _check_kind(raw, input, source)
        _match_names(raw, class_names, source)


PROBED = 20
"""The number of samples of which at least one has to be usable."""


def probe(source: str, folder: Path | None = None) -> None:
    """Read samples of a source that is a file or folder, spread over it, until one can be used.

    Raises:
        DataError: None of `PROBED` samples spread over the source can be used.
        HeadwaterError: See `check`.
    """
    resolved = _resolve(source, folder)
    if not resolved.kind.needs_path:  # a camera, or a function of the user's
        return
    raw = resolved.read()
    rows = np.unique(np.linspace(0, len(raw.items) - 1, PROBED).astype(int)).tolist()
    reasons = []
    for row in rows:
        try:
            raw.items[row]
        except DataError as error:
            reasons.append(f"{raw.name_of(row)}: {error}")
        else:
            return
    raise DataError(f"{source}: none of {len(rows)} tried, of {len(raw.items)}, can be used; first {reasons[0]}")


def _check_kind(raw: Raw, spec: InputSpec, source: str) -> None:
    """Check that images are given for a task of images, and recordings or windows for one of windows."""
    expected = "images" if isinstance(spec, ImageInput) else "windows"
    if (raw.kind == "image") != (expected == "images"):
        raise DataError(
            f"{source} holds {raw.kind}s, the task needs {expected} {spec.shape}; choose data that fit the task, or a "
            f"bundle whose encoder takes {raw.kind}s"
        )


def from_files(
    paths: Sequence[str], spec: InputSpec, *, strict: bool = True, compact: bool = False, positions: bool = False
) -> Samples:
    """Return inputs without labels from single files: images, or recordings for a task of windows.

    A recording is an array (time, channels) in a ``.npy`` file, or a table of numbers in a ``.csv`` file. Not
    ``strict``: files that cannot be used are left out and named in ``skipped``. ``compact``: as in `load`. The name of
    an input is its path, with ``positions`` also where in a recording the window begins.

    Raises:
        DataError: Files cannot be read; all of them are listed.
        MissingCapability: Pillow is not installed.
    """
    files = [Path(path) for path in paths]
    unknown = np.full(len(paths), -1)
    if isinstance(spec, ImageInput):
        from .images import ImageFiles

        raw = Raw("image", ImageFiles(files), unknown, (), names=tuple(paths))
    else:
        name_at = (lambda row, sample: f"{paths[row]} from sample {sample}") if positions else None
        raw = Raw("recording", FileItems(files, _recording), unknown, (), names=tuple(paths), name_at=name_at)
    return _unlabelled(raw, spec, (), "input", compact=compact, strict=strict)


def _recording(path: Path) -> np.ndarray:
    """Return the recording (time, channels) in a file."""
    if path.is_file() and path.stat().st_size == 0:
        raise DataError("the file is empty; take another copy of it")
    if path.suffix.lower() == ".npy":
        return load_array(path)
    if path.name.lower().endswith((".csv", ".csv.gz")):
        from .tables import read_recording

        return read_recording(path)
    if path.suffix.lower() in SOUND_SUFFIXES:
        raise DataError(
            "is a sound; give --data 'wav:FILE' with the options of the data that the encoder was trained on"
        )
    raise DataError("is no recording; expected a file ending in .npy with an array (time, channels), or in .csv")


def parse_source(source: str) -> tuple[str, str, dict[str, str]]:
    """Return the kind, location and options of a source string.

    Raises:
        ConfigError: ``source`` does not have the form kind:where?option=value.
    """
    file = source.partition("?")[0]
    if is_reference(file) and not file.startswith("python:"):
        source = f"python:{source}"
    # The options follow the last question mark, or, of a kind without a location, the first one.
    kind, _, where = source.partition(":")
    query = ""
    if "?" in where:
        where, _, query = where.rpartition("?")
    if "?" in kind:
        kind, _, query = kind.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"data source '{source}'", [f"options '{query}' are not name=value&name=value"]) from error
    options = dict(pairs)
    if len(options) != len(pairs):
        raise ConfigError(f"data source '{source}'", [f"an option occurs twice in '{query}'"])
    return kind, where, options


def with_options(kind: str, where: str, options: Mapping[str, Any]) -> str:
    """Return a source string, the inverse of `parse_source`."""
    return f"{kind}:{where}" + (f"?{urlencode(options)}" if options else "")


def source_kind(name: str) -> DataSource:
    """Return the definition of a kind of source.

    Raises:
        UnknownName: No kind of source has this name; the message suggests the nearest name.
        UsageError: The object registered under that name is not a `DataSource` and holds none.
    """
    member = registry.load(name)
    result = member if isinstance(member, DataSource) else getattr(member, "SOURCE", None)
    if not isinstance(result, DataSource):
        raise UsageError(f"data source '{name}' is {member!r}; expected a DataSource, or a module with one as SOURCE")
    return result


def location(source: str, folder: Path | None = None) -> tuple[str, str, dict[str, str]]:
    """Return the kind, location and options of a source; a location that is a path is absolute.

    Raises:
        UnknownName: No kind of source has this name.
        ConfigError: ``source`` does not have the form kind:where?option=value.
    """
    kind, where, options = parse_source(source)
    if source_kind(kind).needs_path:
        return kind, str(_path(where, folder).resolve()), options
    return kind, absolute(where, folder), options


def domains(source: str, *, seed: int = 0, folder: Path | None = None) -> dict[str, str]:
    """Return the source of each domain alone, for a set of several domains; empty where ``source`` is not one.

    ``seed`` is for kinds that have such an option and sources that do not give it.

    Raises:
        HeadwaterError: See `check`.
    """
    resolved = _resolve(source, folder)
    kind = resolved.kind
    if kind.domains is None:
        return {}
    texts = dict(resolved.given)
    if "seed" in kind.options.model_fields:
        texts = {"seed": str(seed), **texts}
    location = str(Path(resolved.location).absolute()) if kind.needs_path else resolved.location
    sources: dict[str, str] = {}
    for name, (where, changed) in kind.domains(location, resolved.options).items():
        sources[name] = with_options(resolved.name, where, {**texts, **changed})
    return sources


def part_names(source: str, folder: Path | None = None) -> tuple[str, str] | None:
    """Return which values of a source's option ``split`` select its training and its test part.

    None: the data have one part alone. Only kinds with such an option have parts.

    Raises:
        HeadwaterError: See `check`.
    """
    resolved = _resolve(source, folder)
    if resolved.kind.parts is None:
        return "train", "test"
    return resolved.kind.parts(resolved.location, resolved.options)


def subjects(source: str, *, folder: Path | None = None) -> dict[int, str]:
    """Return the source of each person's samples alone, by the person's number; empty if ``source`` has no persons.

    Raises:
        HeadwaterError: See `check`.
    """
    resolved = _resolve(source, folder)
    kind = resolved.kind
    texts = dict(resolved.given)
    if kind.subjects is None or "subject" in texts:
        return {}
    if "split" in kind.options.model_fields:
        texts = {"split": "all", **texts}
    people = kind.subjects(resolved.location, _options(kind.options, texts, source))
    return {number: with_options(resolved.name, resolved.where, {**texts, "subject": number}) for number in people}


@dataclass(frozen=True)
class _Resolved:
    """A source string with the definition of its kind."""

    source: str
    name: str
    kind: DataSource
    where: str
    location: str
    given: dict[str, str]

    @property
    def options(self) -> Options:
        return _options(self.kind.options, self.given, self.source)

    def read(self) -> Raw:
        raw = self.kind.read(self.location, self.options)
        if not len(raw.items):
            raise DataError(f"{self.source}: no samples; check the location and the options")
        return raw


def _resolve(source: str, folder: Path | None) -> _Resolved:
    """Return the source with its kind; an error names the likely kind where a path was given without one."""
    name, where, texts = parse_source(source)
    try:
        kind = source_kind(name)
    except UnknownName as error:
        path = _path(source.partition("?")[0], folder)
        if not path.exists():
            raise
        raise DataError(
            f"data source '{source}': names no kind; did you mean '{_likely_kind(path)}:{source}'? kinds: "
            f"{', '.join(error.known)}; images are given as a folder of them, or to 'edge-agent predict' as FILE"
        ) from error
    anchored = str(_path(where, folder)) if kind.needs_path else absolute(where, folder)
    texts |= {name: str(_path(texts[name], folder)) for name in kind.path_options if name in texts}
    return _Resolved(source, name, kind, where, anchored, texts)


def _likely_kind(path: Path) -> str:
    """Return the kind of source that a path suggests."""
    if path.is_dir():
        names = [entry.name for entry in path.iterdir()]
        kinds_of_files = [kind for mark, kind in _MARKS_OF_FOLDERS.items() if any(mark in name for name in names)]
        return kinds_of_files[0] if kinds_of_files else "images"
    kinds = {".npz": "npz", ".csv": "csv", ".gz": "csv", ".parquet": "parquet", **dict.fromkeys(SOUND_SUFFIXES, "wav")}
    return kinds.get(path.suffix.lower(), "images")


_MARKS_OF_FOLDERS = {"-ubyte": "idx", "dataset_dict.json": "arrow", ".arrow": "arrow", ".parquet": "parquet"}
"""A part of the names of files in a folder -> the kind of source that reads it."""


def _path(where: str, folder: Path | None) -> Path:
    """Return a location as a path; a relative one counts from ``folder``."""
    return (folder or Path()) / Path(where).expanduser()


def _options(model: type[Options], given: Mapping[str, str], source: str) -> Options:
    """Return validated options of a source from their texts.

    Raises:
        ConfigError: An option does not exist, or has an impossible value; all mistakes are listed.
    """
    return parse(model, given, where=f"data source '{source}'")


def _natural(raw: Raw, source: str) -> InputSpec:
    """Return the spec that fits raw samples for which the task brings none: their own, or that of the first item.

    Raises:
        DataError: None of the first `PROBED` items can be read.
    """
    if raw.natural is not None:
        return raw.natural
    first = _first_readable(raw, source)
    if raw.kind == "image":  # of the size of the first one, within 4..224
        pixels = np.asarray(first)
        height, width = (min(max(side, 4), 224) for side in pixels.shape[:2])
        channels = 1 if pixels.shape[2] == 1 else 3
        return ImageInput(channels=channels, height=height, width=width)
    shape = np.asarray(first).shape
    if raw.kind == "recording":
        return WindowInput(channels=shape[-1])
    return WindowInput(channels=shape[0], length=shape[1], stride=shape[1])


def _first_readable(raw: Raw, source: str) -> Any:
    """Return the first item that can be read, of an image its pixels (h, w, channels).

    Items that cannot be read are reported together, once all are.

    Raises:
        DataError: None of the first `PROBED` items can be read.
    """
    failure = ""
    for row in range(min(PROBED, len(raw.items))):
        try:
            item = raw.items[row]
            return preprocess.height_width_channels(item) if raw.kind == "image" else item
        except DataError as error:
            failure = failure or f"{raw.name_of(row)}: {error}"
    raise DataError(f"{source}: none of the first {min(PROBED, len(raw.items))} can be used; {failure}")


@dataclass(frozen=True)
class _Executed:
    """Inputs (m, *shape), the item that each is of (m,), their groups and targets (m,), and what was left out.

    ``starts`` (m,): the sample of its recording at which each window begins; None where inputs are whole items.
    """

    inputs: np.ndarray
    rows: np.ndarray
    groups: np.ndarray | None
    targets: np.ndarray | None
    skipped: tuple[LeftOut, ...]
    starts: np.ndarray | None = None

    def samples(self, raw: Raw, labels: np.ndarray, class_names: tuple[str, ...], spec: InputSpec) -> Samples:
        """Return the inputs with their labels and what else is known of their items."""
        if raw.name_at is not None and self.starts is not None:
            names = tuple(map(raw.name_at, self.rows.tolist(), self.starts.tolist()))
        else:
            names = tuple(raw.names[row] for row in self.rows) if raw.names else ()
        whole = raw.are_whole
        targets = self.targets
        users = None if raw.users is None else raw.users.take(self.rows)
        return Samples(self.inputs, labels, class_names, spec, self.groups, names, self.skipped, whole, targets, users)


def _execute(
    raw: Raw,
    spec: InputSpec,
    source: str,
    *,
    compact: bool = False,
    strict: bool | None = None,
) -> _Executed:
    """Return the inputs of raw samples, preprocessed; the arguments are those of `load`.

    Raises:
        DataError: See `_for_all`.
    """
    if isinstance(spec, WindowInput):
        return _execute_windows(raw, spec, source, strict=strict)
    # 1. Pixels of 8 bits in the form of the encoder's inputs are used where they are.
    ready_pixels = _pixels_as_they_are(raw, spec) if compact else None
    if ready_pixels is not None:
        rows = np.arange(len(ready_pixels))
        return _Executed(ready_pixels, rows, raw.groups, _targets_of(raw, rows), raw.skipped)
    # 2. All others are made one by one; those that cannot be used leave no gap.
    inputs = new_array((len(raw.items), *spec.shape), np.uint8 if compact else np.float32)
    used = 0

    def fill(row: int) -> None:
        nonlocal inputs, used
        pixels = preprocess.image_pixels(raw.items[row], spec)
        is_finer = inputs.dtype == np.uint8 and pixels.dtype != np.uint8
        if is_finer:
            finer = new_array(inputs.shape, np.float32)
            _copy(inputs[:used], finer)
            inputs = finer
        inputs[used] = pixels
        used += 1
        if used % _RELEASED_ROWS == 0:
            release(inputs)

    rows, skipped = _for_all(raw, fill, source, "images", strict=strict)
    inputs = inputs[:used]
    if inputs.dtype != np.uint8:
        for begin in range(0, used, _RELEASED_ROWS):
            preprocess.normalise_images(inputs[begin : begin + _RELEASED_ROWS], spec)
            release(inputs)
    groups = None if raw.groups is None else raw.groups[rows]
    return _Executed(inputs, rows, groups, _targets_of(raw, rows), skipped)


_RELEASED_ROWS = 256
"""Inputs after which pages of mapped arrays are dropped."""


def _targets_of(raw: Raw, rows: np.ndarray) -> np.ndarray | None:
    """Return the numbers to predict (m,) float64 of the items at ``rows``."""
    return None if raw.targets is None else np.asarray(raw.targets, np.float64)[rows]


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copy inputs into the first rows of another array, some at once, because both may be on disk."""
    for begin in range(0, len(source), _RELEASED_ROWS):
        target[begin : begin + _RELEASED_ROWS][: len(source) - begin] = source[begin : begin + _RELEASED_ROWS]
        release(source)
        release(target)


def _pixels_as_they_are(raw: Raw, spec: ImageInput) -> np.ndarray | None:
    """Return images (n, *shape) uint8 that need no preprocessing, as a view; None where they need some."""
    images: Any = raw.items
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or raw.skipped:
        return None
    if spec.channels == 1 and images.shape[1:] == spec.shape[1:]:
        return np.asarray(images[:, None])
    # An image whose last axis may be that of its channels is one of these, whatever its first axis is.
    has_channels_first = images.shape[1:] == spec.shape and images.shape[3] not in {1, 3, 4}
    return images if has_channels_first else None


def _execute_windows(raw: Raw, spec: WindowInput, source: str, *, strict: bool | None) -> _Executed:
    """Return recordings cut into windows, or windows as they are, normalised.

    Raises:
        DataError: See `_for_all`.
    """
    if raw.kind == "recording":
        return _execute_recordings(raw, spec, source, strict=strict)
    inputs = new_array((len(raw.items), *spec.shape), np.float32)
    used = 0

    def fill(row: int) -> None:
        nonlocal used
        item = np.asarray(raw.items[row])
        if item.shape != spec.shape:
            raise DataError(f"has shape {item.shape}, expected {spec.shape}")
        if not np.isfinite(item).all():
            raise DataError("holds NaN or infinity")
        inputs[used] = item
        used += 1
        if used % _RELEASED_ROWS == 0:
            release(inputs)

    rows, skipped = _for_all(raw, fill, source, "windows", strict=strict)
    for begin in range(0, used, _RELEASED_ROWS):
        preprocess.normalise_windows(inputs[begin : min(begin + _RELEASED_ROWS, used)], spec)
        release(inputs)
    groups = None if raw.groups is None else raw.groups[rows].astype(np.int64)
    targets = None if raw.targets is None else np.asarray(raw.targets)[rows]
    return _Executed(inputs[:used], rows, groups, targets, skipped)


def _execute_recordings(raw: Raw, spec: WindowInput, source: str, *, strict: bool | None) -> _Executed:
    """Return recordings cut into windows, normalised; the target of a window is the mean of those of its samples.

    Raises:
        DataError: See `_for_all`.
    """
    advice = {} if raw.short_advice is None else {"short_advice": raw.short_advice}
    target_spec = spec.model_copy(update={"channels": 1})
    windows_by_recording: list[np.ndarray] = []
    targets_by_recording: list[np.ndarray] = []

    def fill(row: int) -> None:
        windows = preprocess.cut(np.asarray(raw.items[row]), spec, **advice)
        if raw.targets is not None:
            target = np.asarray(raw.targets[row], np.float64)[:, None]
            targets_by_recording.append(preprocess.cut(target, target_spec).mean(axis=(1, 2)))
        windows_by_recording.append(windows)

    used, skipped = _for_all(raw, fill, source, "recordings", strict=strict)
    counts = [len(windows) for windows in windows_by_recording]
    rows = np.repeat(used, counts)
    inputs = preprocess.normalise_windows(np.concatenate(windows_by_recording), spec)
    # Each recording is a group of its own, unless the source says which belong together.
    groups = np.arange(len(raw.items)) if raw.groups is None else raw.groups
    targets = None if raw.targets is None else np.concatenate(targets_by_recording)
    starts = np.concatenate([np.arange(count) * spec.stride for count in counts])
    return _Executed(inputs, rows, groups[rows].astype(np.int64), targets, skipped, starts)


def _for_all(
    raw: Raw,
    fill: Callable[[int], None],
    source: str,
    plural: str,
    *,
    strict: bool | None,
) -> tuple[np.ndarray, tuple[LeftOut, ...]]:
    """Call ``fill`` for each row.

    Args:
        raw: The raw samples.
        fill: Reads and preprocesses the item of a row, or raises DataError.
        source: The source, for messages.
        plural: What the items are called in messages.
        strict: What may be left out, see `load`.

    Returns:
        The rows (n,) for which it worked; and each item or other file that cannot be used.

    Raises:
        DataError: Reading failed for all items, or for some where ``strict`` (see `load`) does not allow that; or other
            files lie beside them where that is not allowed. All are reported at once.
    """
    # 1. Every row is tried, so that all failures are reported at once.
    rows: list[int] = []
    failures: list[LeftOut] = []
    for row in each(range(len(raw.items)), plural):
        if raw.release is not None and row % _RELEASED_ROWS == 0:
            raw.release()
        try:
            fill(row)
            rows.append(row)
        except DataError as error:
            failures.append(LeftOut(raw.name_of(row), str(error)))
    # 2. Unless `strict` is stated, other files may lie beside the items, and none of these may fail.
    unusable = (*raw.skipped, *failures)
    is_refused = bool(failures)
    if strict is not None:
        is_refused = strict and bool(unusable)
    total = len(raw.items) + len(raw.skipped)
    if not rows or is_refused:
        beside = raw.skipped if strict or not rows else ()
        message = f"{source}: {len(beside) + len(failures)} of {total} {plural} cannot be used"
        message += _bullets([*map(str, beside), *_lines_by_reason(failures)])
        if rows:
            message += "\nWithout --strict (strict = false, strict=False in Python) these are left out."
        raise DataError(message)
    if unusable:
        _log.warning("skipped source=%s count=%d of=%d first=%s", source, len(unusable), total, unusable[0])
    return np.array(rows, np.int64), unusable


def _lines_by_reason(failures: Iterable[LeftOut]) -> list[str]:
    """Return one line for each reason, with the names of the items that failed for it."""
    names_by_reason = dict[str, list[str]]()
    for failure in failures:
        names_by_reason.setdefault(failure.reason, []).append(failure.name)
    return [f"{_listed(names)}: {reason}" for reason, names in names_by_reason.items()]


def _bullets(lines: Sequence[str]) -> str:
    """Return the first lines as a list below a message, and how many more there are."""
    text = "".join(f"\n  - {line}" for line in lines[:_SHOWN])
    if len(lines) > _SHOWN:
        text += f"\n  … and {len(lines) - _SHOWN} more"
    return text


def _check_labelled(raw: Raw) -> None:
    """Check that the data have labels.

    Raises:
        DataError: The data have no labels; the message says how to give them.
    """
    if raw.unlabelled:
        raise DataError(f"{raw.unlabelled}; without labels only 'edge-agent predict' and numeric heads use them")


def _match_names(
    raw: Raw, class_names: Sequence[str] | None, source: str, *, own_classes: bool = False
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels (n,) of raw samples as positions in the classes, and these; ``own_classes``: as of `load`.

    An encoder that no run has trained has no classes: the data's own count, as with ``own_classes``.
    """
    _check_labelled(raw)
    if class_names is None:
        return raw.labels.astype(np.int64), raw.class_names
    held = [raw.class_names[label] for label in np.unique(raw.labels)]
    if own_classes or not class_names:
        class_names = with_own_classes(class_names, held)
    _check_known(held, class_names, source)
    position_of = {name: position for position, name in enumerate(class_names)}
    new_labels = np.array([position_of.get(name, -1) for name in raw.class_names], np.int64)
    return new_labels[raw.labels], tuple(class_names)


def _check_known(held: Sequence[str], class_names: Sequence[str], source: str) -> None:
    """Check that the classes of the data are among those of the task or bundle.

    Raises:
        DataError: Some are not; each is named with the known class that it resembles.
    """
    unknown = [name for name in held if name not in class_names]
    if not unknown:
        return
    missing = [name for name in class_names if name not in held]
    suggestions = [f"'{name}'{near(name, missing)}" for name in unknown]
    raise DataError(
        f"{source}: has classes that the task or bundle does not know: {_listed(suggestions)}; "
        f"it knows {_listed(class_names)}, the data have no {_listed(missing)}. Classes are matched by name: "
        "rename or remove unknown classes; missing classes are fine. A head of a device may have its own classes: "
        "--own-classes, own_classes under [head] of an agent, or own_classes=True in Python. Those of a federation are "
        "class_names in [task] of its coordinator"
    )


def _listed(names: Iterable[str]) -> str:
    """Return the first names for a message, and how many more there are."""
    names = list(names)
    text = ", ".join(names[:_SHOWN]) or "none"
    if len(names) > _SHOWN:
        text += f" and {len(names) - _SHOWN} more"
    return text
