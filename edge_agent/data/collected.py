"""``collected:DIR``: samples that a person labelled on this device, one by one (``edge-agent add``, a watch folder).

``index.json`` names the samples with their classes, oldest first; each sample is one file beside it, written before the
index and removed after it, so a crash or a full disk leaves the old collection or the new one. Of each class every
fourth sample is held out for evaluation; of recordings the last quarter. Renamed, merged and removed classes change the
index alone, and hold for the device's other samples, too.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from ..core.config import mistakes_of
from ..core.errors import DataError, StateError, UsageError
from ..core.locks import waited_lock
from ..core.storage import read_json, read_tensors, write_json, write_tensors
from ..core.task import Frozen, ImageInput, InputSpec, Label, WindowInput
from .base import DataSource, Options, Raw, Samples, near
from .preprocess import normalise_images, normalise_windows
from .splitting import split

INDEX = "index.json"
BUDGET = 2000
"""The number of samples that are kept by default."""

_EVERY = 4
"""One of so many samples of a class is held out."""


_SAMPLE_FILE = re.compile(r"[0-9a-f]{32}\.safetensors")
"""Names of the files of samples: no other file in the folder is ours to remove."""


class Entry(Frozen):
    """One sample."""

    id: str = Field(pattern=r"^[0-9a-f]{32}$", description="of its file, from its content")
    label: Label
    held_out: bool
    recording: str = Field("", description="windows of one recording have one name")


class Index(Frozen):
    """The content of ``index.json``. ``version`` counts changes; ``fitted`` is the version of the head's samples."""

    schema_version: Literal[1] = 1
    version: int = Field(0, ge=0)
    fitted: int = Field(0, ge=0)
    classes: tuple[Label, ...] = Field((), description="in the order in which they were added")
    renamed: dict[Label, Label | None] = Field(default_factory=dict, description="old name -> new one, None: removed")
    samples: tuple[Entry, ...] = Field((), description="oldest first")

    def name_of(self, label: str) -> str | None:
        """Return what a class is called now; None: it was removed."""
        return self.renamed.get(label, label)


@dataclass(frozen=True)
class Added:
    """The result of adding samples: how many were new, known already, or dropped.

    ``moved``: known ones that were of another class till now. ``renamed``: classes that they were added as -> what they
    are called now.
    """

    added: int
    known: int
    dropped: int
    moved: int = 0
    renamed: Mapping[str, str] = field(default_factory=dict)


class Collection:
    """The samples in a folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def index(self) -> Index:
        """Return the index; an empty one where there is none.

        Raises:
            StateError: The index is damaged.
        """
        raw = read_json(self.folder / INDEX)
        try:
            return Index() if raw is None else Index.model_validate(raw)
        except ValidationError as error:
            mistakes = "; ".join(mistakes_of(error, Index)[:5])
            raise StateError(f"{self.folder / INDEX}: {mistakes}; put it back from a backup, or remove it") from error

    def add(self, samples: Samples, budget: int = BUDGET, wait_s: float = math.inf) -> Added:
        """Keep samples; beyond ``budget`` the oldest ones of the class with most samples are dropped.

        A sample that is there already gets its new class. Labels that were renamed get their new names, and a class
        that was removed is there again.

        Raises:
            StateError: The collection is damaged.
            TimeoutError: Another program has been changing the collection for more than ``wait_s`` seconds.
            OSError: The disk is full; the collection is unchanged.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with waited_lock(self.folder, wait_s):
            index = self.index()
            entries = {entry.id: entry for entry in index.samples}
            count_before = len(entries)
            # 1. Inputs are written first: a file that no entry names is removed, an entry without its file is damage.
            new = self._entries(samples, index)
            moved = 0
            for row, entry in new:
                earlier = entries.get(entry.id)
                if earlier is None:
                    write_tensors(self.folder / _file(entry), {"input": _raw(samples.inputs[row], samples.input)})
                    entries[entry.id] = entry if entry.recording else _deal(entry, entries.values())
                    continue
                if earlier.label != entry.label:
                    moved += 1
                entries[entry.id] = earlier.model_copy(update={"label": entry.label})
            # 2. What is beyond the budget goes.
            added = len(entries) - count_before
            dropped = _surplus(list(entries.values()), budget)
            for entry in dropped:
                del entries[entry.id]
            # 3. A class that was removed and is added again is no longer a removed one.
            labels = dict.fromkeys(entry.label for _, entry in new)
            renamed = {label: name for label, name in index.renamed.items() if name is not None or label not in labels}
            change = {
                "samples": tuple(entries.values()),
                "classes": tuple(dict.fromkeys([*index.classes, *labels])),
                "renamed": renamed,
            }
            self._write(index, change)
        return Added(added, len(new) - added, len(dropped), moved, _present_names(index, samples))

    def rename(self, old: str, new: str, known: Sequence[str] = ()) -> None:
        """Call class ``old`` ``new`` from now on. ``known``: classes beside those of the collection.

        Raises:
            UsageError: The class does not exist, or another one is called ``new`` already.
            DataError: ``new`` is not a name for a class.
        """
        names = self.names(known)
        if new in names and old in names:
            raise UsageError(
                f"there is a class '{new}' already; 'edge-agent classes merge {old} {new} {new}' joins them"
            )
        self._relabel({old: class_name(new)}, known)

    def merge(self, labels: Sequence[str], into: str, known: Sequence[str] = ()) -> None:
        """Make several classes one, which is called ``into``: one of them, or a new name.

        Raises:
            UsageError: The collection has no such class.
            DataError: ``into`` is not a name for a class.
        """
        class_name(into)
        self._relabel({label: into for label in labels if label != into}, known)

    def remove(self, labels: Sequence[str], known: Sequence[str] = ()) -> int:
        """Remove classes and their samples, all of them or none; returns how many samples went.

        Raises:
            UsageError: The collection has no such class.
        """
        before = len(self.index().samples)
        self._relabel(dict.fromkeys(labels), known)
        return before - len(self.index().samples)

    def fitted(self, version: int) -> None:
        """Note that the head in use was fitted on this version; 0, that of an empty folder, is not written."""
        if not version:
            return
        with waited_lock(self.folder):
            index = self.index()
            write_json(self.folder / INDEX, index.model_copy(update={"fitted": version}).model_dump(mode="json"))

    def names(self, known: Sequence[str] = ()) -> list[str]:
        """Return the present names of the ``known`` classes and of the collection's own."""
        index = self.index()
        names = (index.name_of(label) for label in [*known, *index.classes])
        return list(dict.fromkeys(name for name in names if name is not None))

    def combined(
        self, own: tuple[Samples, Samples] | None, spec: InputSpec, bundle: Sequence[str], before: Sequence[str] = ()
    ) -> tuple[Samples, Samples]:
        """Return training and held-out samples: those of the device's other source (``own``) and of the collection.

        The order of the classes: those of the head ``before`` that the bundle, ``own`` or the collection still know,
        then those of ``own``, then new ones. Where there is neither, those of the ``bundle``, if the collection holds
        any of them. Exactly the bundle's classes have its order, so that its shared classifier is of use.

        Raises:
            StateError: The collection holds inputs of another form than ``spec``, or is damaged.
            DataError: There are no samples.
        """
        # 1. The collection's samples, divided as each was when it was added.
        index = self.index()
        collected = self._samples(index, spec)
        if own is not None and (own[0].groups is not None or collected.groups is not None):
            own, collected = _numbered(own, collected)
        is_held_out = np.array([entry.held_out for entry in index.samples], bool)
        collected_train = collected.take(np.flatnonzero(~is_held_out))
        collected_test = collected.take(np.flatnonzero(is_held_out))
        # 2. The classes, by their present names.
        source_classes: Sequence[str] = ()
        if own is not None:
            source_classes = own[0].class_names
        elif {*index.classes} & {*bundle}:
            source_classes = bundle
        order = _order_of_classes(index, source_classes, bundle, before)
        # 3. Both together.
        own_train, own_test = own if own is not None else (None, None)
        train = _joined(index, order, own_train, collected_train)
        test = _joined(index, order, own_test, collected_test)
        if not len(train):
            raise DataError(f"{self.folder}: no samples to learn from; add some with 'edge-agent add'")
        return train, test

    # --- inside ----------------------------------------------------------------------------------------------------

    def _relabel(self, changes: dict[str, str | None], known: Sequence[str]) -> None:
        """Give classes new names, or remove them with their samples where the new name is None.

        Raises:
            UsageError: A class does not exist, or a new name is that of a class which was renamed.
        """
        names = self.names(known)
        missing = [f"'{label}'{near(label, names)}" for label in changes if label not in names]
        if missing:
            raise UsageError(f"no class {', '.join(missing)}; there are {', '.join(names) or 'none'}")
        self.folder.mkdir(parents=True, exist_ok=True)
        with waited_lock(self.folder):
            index = self.index()
            renamed = _renamed_by(changes, index)
            samples = []
            for entry in index.samples:
                new_label = changes.get(entry.label, entry.label)
                if new_label is not None:
                    samples.append(entry.model_copy(update={"label": new_label}))
            present_classes = [changes.get(label, label) for label in index.classes]
            classes = dict.fromkeys([*present_classes, *changes.values()])
            change = {
                "renamed": renamed,
                "samples": tuple(samples),
                "classes": tuple(label for label in classes if label is not None),
            }
            self._write(index, change)

    def _write(self, index: Index, change: Mapping[str, object]) -> None:
        """Write the changed index, then remove the files that it does not name; nothing where nothing changes."""
        if index.model_copy(update=change) == index:
            return
        new = index.model_copy(update={**change, "version": index.version + 1})
        write_json(self.folder / INDEX, new.model_dump(mode="json"))
        names = {_file(entry) for entry in new.samples}
        for path in self.folder.glob("*.safetensors"):
            is_of_a_sample = _SAMPLE_FILE.fullmatch(path.name) is not None
            if is_of_a_sample and path.name not in names:
                path.unlink(missing_ok=True)

    def _entries(self, samples: Samples, index: Index) -> list[tuple[int, Entry]]:
        """Return the row and entry of each sample that is to be kept: of overlapping windows at the division none."""
        # 1. Which rows are held out; single samples are dealt later, when all others are known.
        is_held_out = dict.fromkeys(range(len(samples)), False)
        recordings = [""] * len(samples)
        if samples.groups is not None:
            numbered = replace(samples, inputs=np.arange(len(samples))[:, None], names=())
            train, test = split(numbered, 1 / _EVERY, 0)
            is_held_out = dict.fromkeys(train.inputs[:, 0].tolist(), False)
            is_held_out |= dict.fromkeys(test.inputs[:, 0].tolist(), True)
            # A recording is known again by its first window.
            name_of_recording = {}
            for group in np.unique(samples.groups):
                first_window = samples.inputs[samples.groups == group][0]
                name_of_recording[group] = _digest(first_window)
            recordings = [name_of_recording[group] for group in samples.groups]
        # 2. An entry for each; of equal inputs the last one counts.
        result = {}
        for row in range(len(samples)):
            if row not in is_held_out:
                continue
            label = samples.class_names[samples.labels[row]]
            entry = Entry(
                id=_digest(samples.inputs[row]),
                label=index.name_of(label) or label,
                held_out=is_held_out[row],
                recording=recordings[row],
            )
            result[entry.id] = (row, entry)
        return list(result.values())

    def _samples(self, index: Index, spec: InputSpec) -> Samples:
        """Return the samples of all entries, in their order, preprocessed for a task.

        Raises:
            StateError: The inputs are of another form than the task's, or a file is damaged.
        """
        inputs = [self._input(entry) for entry in index.samples]
        other_shapes = [array.shape for array in inputs if array.shape != spec.shape]
        if other_shapes:
            raise StateError(
                f"{self.folder}: {len(other_shapes)} samples of form {other_shapes[0]}, the task has {spec.shape}; the "
                "bundle is of another task: move the folder away and add the samples again"
            )
        position = {label: number for number, label in enumerate(index.classes)}
        labels = np.array([position[entry.label] for entry in index.samples], np.int64)
        array = np.stack(inputs) if inputs else np.empty((0, *spec.shape), np.float32)
        if isinstance(spec, WindowInput):
            array = normalise_windows(array.astype(np.float32), spec)
        elif array.dtype != np.uint8:
            array = normalise_images(array, spec)
        return Samples(array, labels, index.classes, spec, _groups(index)).ready()

    def _input(self, entry: Entry) -> np.ndarray:
        """Return the input of an entry as it was added, before normalisation."""
        result = read_tensors(self.folder / _file(entry)).get("input")
        if result is None:
            raise StateError(f"{self.folder / _file(entry)}: holds no input; remove the sample's file and its entry")
        return result


def labelled(samples: Samples, label: str) -> Samples:
    """Return samples without labels, all of class ``label``.

    Raises:
        DataError: ``label`` is not a name for a class.
    """
    return replace(samples, labels=np.zeros(len(samples), np.int64), class_names=(class_name(label),))


def class_name(label: str) -> str:
    """Return the name of a class.

    Raises:
        DataError: The name is empty or too long, or holds control characters.
    """
    if not label.strip():
        raise DataError(f"label {label!r}: expected the name of a class")
    try:
        return TypeAdapter[str](Label).validate_python(label)
    except ValidationError as error:
        raise DataError(f"label {label!r}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


def _groups(index: Index) -> np.ndarray | None:
    if not any(entry.recording for entry in index.samples):
        return None
    names = [entry.recording or entry.id for entry in index.samples]
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _order_of_classes(
    index: Index, source_classes: Sequence[str], bundle: Sequence[str], before: Sequence[str]
) -> tuple[str, ...]:
    """Return the present names of the classes: those of the head ``before`` first, then the source's, then new ones.

    Classes of ``before`` that neither the bundle, the source nor the collection has any more are left out.
    """
    present = {index.name_of(label) for label in [*bundle, *source_classes, *index.classes]}
    names = [index.name_of(label) for label in [*before, *source_classes, *index.classes]]
    order = tuple(dict.fromkeys(name for name in names if name is not None and name in present))
    # Exactly the bundle's classes have its order, so that its shared classifier fits.
    return tuple(bundle) if {*order} == {*bundle} else order


def _joined(index: Index, order: tuple[str, ...], own: Samples | None, collected: Samples) -> Samples:
    """Return samples of the device's other source and collected ones, labelled by the present names of classes."""
    second = _relabelled(index, order, collected)
    if own is None:
        return second
    first = _relabelled(index, order, own)
    groups = None
    if first.groups is not None and second.groups is not None:
        groups = np.concatenate([first.groups, second.groups])
    inputs = np.concatenate([first.inputs, second.inputs])
    labels = np.concatenate([first.labels, second.labels])
    return replace(first, inputs=inputs, labels=labels, groups=groups)


def _relabelled(index: Index, order: tuple[str, ...], samples: Samples) -> Samples:
    """Return samples with the classes ``order`` as labels, without those whose class was removed."""
    position = {name: number for number, name in enumerate(order)}
    names = [index.name_of(label) for label in samples.class_names]
    table = np.array([-1 if name is None else position[name] for name in names], np.int64)
    labels = table[samples.labels] if len(samples) else samples.labels
    kept = np.flatnonzero(labels >= 0)
    return replace(samples.take(kept), labels=labels[kept], class_names=order, names=())


def _numbered(own: tuple[Samples, Samples], mine: Samples) -> tuple[tuple[Samples, Samples], Samples]:
    """Return both parts with different numbers of their recordings; a sample of no recording gets its own number."""
    train = own[0].groups
    test = own[1].groups
    if train is None or test is None:
        train, test = np.split(np.arange(len(own[0]) + len(own[1])), [len(own[0])])
    begin = 1 + max(train.max(initial=-1), test.max(initial=-1))
    groups = np.arange(len(mine)) if mine.groups is None else mine.groups
    return (replace(own[0], groups=train), replace(own[1], groups=test)), replace(mine, groups=begin + groups)


def _raw(inputs: np.ndarray, spec: InputSpec) -> np.ndarray:
    """Return one input as it was before it was normalised: pixels 0..255, or values in sensor units."""
    if inputs.dtype == np.uint8:
        return inputs
    axes = (-1, *[1] * (inputs.ndim - 1))
    values = inputs * np.reshape(spec.std, axes) + np.reshape(spec.mean, axes)
    return np.asarray(values * (255 if isinstance(spec, ImageInput) else 1), np.float32)


def _digest(inputs: np.ndarray) -> str:
    return hashlib.sha256(repr((inputs.shape, inputs.dtype.str)).encode() + inputs.tobytes()).hexdigest()[:32]


def _file(entry: Entry) -> str:
    return f"{entry.id}.safetensors"


def _present_names(index: Index, samples: Samples) -> dict[str, str]:
    """Return the names of the samples' classes that were renamed here, by the names that the samples have for them."""
    names: dict[str, str] = {}
    for number in np.unique(samples.labels):
        label = samples.class_names[number]
        name = index.name_of(label)
        if name is not None and name != label:
            names[label] = name
    return names


def _renamed_by(changes: Mapping[str, str | None], index: Index) -> dict[str, str | None]:
    """Return the names of all classes that were ever renamed, after these changes; None for a removed class.

    Raises:
        UsageError: A new name is that of a class which was renamed.
    """
    # Names that were changed earlier lead to the newest ones; a removed class stays removed.
    renamed: dict[str, str | None] = {}
    for label, name in index.renamed.items():
        renamed[label] = None if name is None else changes.get(name, name)
    new_names = {name for name in changes.values() if name is not None}
    for name in new_names:
        present = renamed.get(name, name)
        if present not in {name, None}:
            raise UsageError(f"'{name}' is called '{present}' now; choose another name")
    # A class that gets such a name leads nowhere else.
    return {label: name for label, name in {**renamed, **changes}.items() if label not in new_names}


def _deal(entry: Entry, present: Iterable[Entry]) -> Entry:
    """Return the entry, held out where it is the third of four of its class; ``present``: those before it."""
    number = sum(earlier.label == entry.label for earlier in present)
    return entry.model_copy(update={"held_out": number % _EVERY == _EVERY - 2})


def _surplus(entries: list[Entry], budget: int) -> list[Entry]:
    """Return the samples to drop: again and again the oldest one of the class that has most."""
    counts = Counter(entry.label for entry in entries)
    dropped = []
    for _ in range(len(entries) - budget):
        label = counts.most_common(1)[0][0]
        oldest = next(entry for entry in entries if entry.label == label)
        entries.remove(oldest)
        counts[label] -= 1
        dropped.append(oldest)
    return dropped


def _channels_last(pixels: np.ndarray) -> np.ndarray:
    """Return an image as (height, width, channels), uint8 or 0..1: no side of a small image is taken for channels."""
    pixels = pixels.transpose(1, 2, 0)
    return pixels if pixels.dtype == np.uint8 else pixels / np.float32(255)


class CollectedOptions(Options):
    """The options of a collection: none."""


def read(where: str, options: CollectedOptions) -> Raw:  # noqa: ARG001 - none
    """Return all collected samples, held-out ones included."""
    collection = Collection(Path(where).expanduser())
    index = collection.index()
    items = [collection._input(entry) for entry in index.samples]  # noqa: SLF001 - the same file
    kind: Literal["image", "window"] = "image"
    if items and items[0].ndim == 2:
        kind = "window"
    else:
        items = [_channels_last(pixels) for pixels in items]
    position = {label: number for number, label in enumerate(index.classes)}
    labels = np.array([position[entry.label] for entry in index.samples], np.int64)
    return Raw(kind, items, labels, index.classes, _groups(index))


SOURCE = DataSource(CollectedOptions, read, needs_path=True)
