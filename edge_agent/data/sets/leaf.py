"""``leaf:DIR?users=100``: data sets of LEAF with the users who made their samples: FEMNIST, Shakespeare and others.

DIR holds the folders ``train`` and ``test`` of JSON files that LEAF's scripts write, or a folder ``data`` with them, or
such files that are not divided yet (``all_data``); it may also be one such file. ``partition users`` makes each user a
client, which is tested on its own test part. Options: ``split=train|test|all`` (default: train), ``user`` (only these),
``users`` (so many of them, drawn by ``seed``; the same ones in both parts), ``seed``, ``shape`` (of one input; default:
``28,28`` for 784 numbers), ``class_names``.

Inputs of numbers are grey images of two axes, or windows where ``shape`` says ``channels,length`` with ``kind=window``.
FEMNIST's 62 labels are its digits and letters. Texts, as in Shakespeare, are windows of one channel: the position of
each character among LEAF's 80, for the encoders ``char_cnn`` and ``char_lstm``; the label is the next character. Sets
whose inputs are lists of words (Sent140, Reddit) or names of pictures (CelebA) are not read.
Source: Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018. Licence of its code: BSD 2-clause; FEMNIST is
from NIST's Special Database 19, Shakespeare from Project Gutenberg.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from ...core.errors import DataError, cause
from ...core.reading import each
from ...core.storage import read_regular
from ...core.task import WindowInput, parse_json
from ..base import DataSource, Options, Raw, Shape, Strings, Users, labels_by_name, near
from ..expansion import MEMORY_SHARE, json_memory_bytes, memory_budget_bytes
from ._layouts import Origin

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The characters of LEAF's texts, in the order of its own numbers."""

_NAMES_OF_BLANKS = {"\n": "newline", " ": "space"}
CHARACTER_NAMES = tuple(_NAMES_OF_BLANKS.get(character, character) for character in CHARACTERS)

WRITTEN = (*"0123456789", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"abcdefghijklmnopqrstuvwxyz")
"""The classes of FEMNIST in the order of their numbers."""

_PIXELS = 784
"""Numbers in an input of FEMNIST: 28 x 28."""

_MOST_CLASSES = 1 << 16
"""More than any of the sets has: all classes up to the largest label get a name."""

_MOST_MISTAKES = 20
"""Mistakes that are listed; the others are like them."""

ORIGIN = Origin(
    "leaf",
    "LEAF data set",
    "the folders train and test of .json files with 'users', 'num_samples' and 'user_data', as LEAF's preprocess.sh "
    "writes them",
    "https://leaf.cmu.edu",
    "BSD 2-clause for its code; see the sets",
)


class LeafOptions(Options):
    """The options of LEAF's sets: which users, and the form of their inputs."""

    split: Literal["train", "test", "all"] = "train"
    user: Strings = Field((), description="only these users")
    users: int | None = Field(None, ge=1, description="so many users, drawn by seed")
    seed: int = Field(0, ge=0, description="which users")
    shape: Shape = Field((), description="of one input; default: 28,28 for 784 numbers")
    kind: Literal["image", "window"] | None = Field(None, description="what numbers are; default: image")
    class_names: Strings = Field((), description="names of the labels 0, 1, 2 …")


@dataclass(frozen=True)
class _Samples:
    """Some samples of a user.

    Attributes:
        inputs: Inputs (n, numbers): uint8 pixels or positions of characters, or float32.
        labels: Labels (n,) int64.
        is_text: Whether the inputs are positions of characters.
    """

    inputs: np.ndarray
    labels: np.ndarray
    is_text: bool = False

    @property
    def form(self) -> tuple[bool, int]:
        """What samples of one set have in common: whether they are texts, and how long."""
        return self.is_text, self.inputs.shape[1]


@dataclass
class _Chosen:
    """The samples of the users that were chosen so far, and what is wrong in the files."""

    options: LeafOptions
    samples: dict[str, list[_Samples]] = field(default_factory=dict)
    """User -> samples, one entry for each file that has the user."""

    names: set[str] = field(default_factory=set)
    """All users in the files."""

    mistakes: list[str] = field(default_factory=list)

    def add_file(self, path: Path, content: Mapping[str, Any]) -> None:
        """Keep the samples of a file's users; of more than are asked for, those that the seed prefers."""
        for user, lists in _users_in(path, content, self.mistakes):
            self.names.add(user)
            if not lists["x"] or (self.options.user and user not in self.options.user):
                continue
            samples = _samples_of(f"{path.name}, user '{user}'", lists, self.options, self.mistakes)
            if samples is not None:
                self.samples.setdefault(user, []).append(samples)
                self._drop_surplus()

    def _drop_surplus(self) -> None:
        """Forget the users beyond the number that is asked for, so that only that many are in memory."""
        most = self.options.users
        if most is None or len(self.samples) <= most:
            return
        # The order is drawn from names alone, so that the training and the test part have the same users.
        last = max(self.samples, key=lambda user: _draw(user, self.options.seed))
        del self.samples[last]


@functools.lru_cache(maxsize=1 << 16)
def _draw(user: str, seed: int) -> bytes:
    """Return the place of a user in the random order of a seed."""
    return hashlib.sha256(f"{seed} {user}".encode()).digest()


# --- files -----------------------------------------------------------------------------------------------------------


def _folders_of(where: str) -> dict[str, Path]:
    """Return the folder of each part: train and test, or ``all`` for files that are not divided.

    Raises:
        DataError: There is neither.
    """
    root = Path(where).expanduser()
    for folder in (root, root / "data"):
        parts = {part: folder / part for part in ("train", "test") if (folder / part).is_dir()}
        if len(parts) == 2:
            return parts
        if parts:
            raise ORIGIN.missing(folder, f"there is a folder {next(iter(parts))} alone")
    for folder in (root, root / "all_data", root / "data" / "all_data"):
        if folder.is_dir() and _json_files(folder):
            return {"all": folder}
    raise ORIGIN.missing(where, "there are no folders train and test, and no .json files")


def _json_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".json" and not path.name.startswith("."))


def _files_of(where: str, split: str) -> list[Path]:
    """Return the files of a part.

    Raises:
        DataError: There are none.
    """
    # One file holds all users, as a folder of files that are not divided does.
    file = Path(where).expanduser()
    if file.is_file():
        if split == "test":
            raise ORIGIN.missing(where, "one file is not divided into train and test")
        return [file]
    folders = _folders_of(where)
    if split != "all" and "all" in folders:
        if split == "test":
            raise ORIGIN.missing(where, "its files are not divided into train and test")
        split = "all"
    chosen = [folder for part, folder in folders.items() if split in {"all", part}]
    files = [path for folder in chosen for path in _json_files(folder)]
    if not files:
        raise ORIGIN.missing(where, f"there are no .json files in {', '.join(map(str, chosen))}")
    return files


def _read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a file.

    Raises:
        DataError: The file would take too much memory, or holds something else.
    """
    try:
        most_bytes = memory_budget_bytes() * MEMORY_SHARE
        # A file that does not fit is not read: only the size of others is worth a look at their content.
        needed_bytes = path.stat().st_size
        if needed_bytes <= most_bytes:
            raw = read_regular(path)
            needed_bytes = json_memory_bytes(raw)
        if needed_bytes > most_bytes:
            raise DataError(
                f"leaf: '{path}' takes about {needed_bytes / 1e6:.0f} MB of memory to parse, and "
                f"{most_bytes / 1e6:.0f} MB are free here; write files of fewer users (max_users of LEAF's scripts)"
            )
        content = parse_json(raw)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise ORIGIN.damaged(path, f"cannot be read ({cause(error)})", "JSON") from error
    if not isinstance(content, dict):
        raise ORIGIN.damaged(path, f"holds {type(content).__name__}", "an object with users and user_data")
    return content


def _users_in(path: Path, content: Mapping[str, Any], mistakes: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each user that a file lists, with the user's samples; mistakes are noted.

    Entries of ``user_data`` that are not listed do not count: LEAF's own script leaves those of users with one sample.
    """
    users = content.get("users")
    data = content.get("user_data")
    counts = content.get("num_samples")
    # 1. The lists as a whole.
    if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
        mistakes.append(f"{path.name}: 'users' is {_kind(users)}, expected a list of names")
        return
    if not isinstance(data, dict):
        mistakes.append(f"{path.name}: 'user_data' is {_kind(data)}, expected an object with an entry for each user")
        return
    if not isinstance(counts, list) or len(counts) != len(users):
        mistakes.append(f"{path.name}: 'num_samples' is {_kind(counts)}, expected a list of {len(users)} numbers")
        return
    if len(set(users)) < len(users):
        mistakes.append(f"{path.name}: 'users' has a name twice")
        return
    # 2. The users.
    for user, count in zip(users, counts, strict=True):
        samples = data.get(user)
        if not isinstance(samples, dict) or not all(isinstance(samples.get(key), list) for key in ("x", "y")):
            mistakes.append(f"{path.name}, user '{user}': no lists x and y in user_data")
            continue
        lengths = (len(samples["x"]), len(samples["y"]))
        if lengths != (count, count):
            mistakes.append(
                f"{path.name}, user '{user}': num_samples is {count}, and there are {lengths[0]} inputs (x) and "
                f"{lengths[1]} labels (y)"
            )
            continue
        yield user, samples


def _kind(value: object) -> str:
    """Return what a JSON value is, for a message."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "missing" if value is None else type(value).__name__


# --- samples ---------------------------------------------------------------------------------------------------------


def _samples_of(where: str, lists: Mapping[str, Any], options: LeafOptions, mistakes: list[str]) -> _Samples | None:
    """Return the samples of a user; None, with a line in ``mistakes``, where they have another form.

    Numbers that are pixels of 8 bits divided by 255, as those of FEMNIST, are kept as these pixels. Texts become the
    positions of their characters, and their labels those of the next characters.
    """
    inputs = lists["x"]
    labels = lists["y"]
    if isinstance(inputs[0], str):
        return _samples_of_texts(where, inputs, labels, mistakes)
    try:
        with np.errstate(over="ignore"):  # beyond 32 bits they become infinite, which is refused below
            numbers = np.array(inputs, np.float32)
        values = np.array(labels)
    except (ValueError, TypeError, OverflowError):
        mistakes.append(f"{where}: inputs are no lists of numbers of one length; the first is {str(inputs[0])[:40]}")
        return None
    if numbers.ndim != 2 or not numbers.size or not np.isfinite(numbers).all():
        mistakes.append(f"{where}: inputs of shape {numbers.shape}, expected finite numbers (n, numbers of an input)")
        return None
    if values.shape != (len(numbers),) or values.dtype.kind not in "iu" or values.min() < 0:
        mistakes.append(f"{where}: labels are {values.dtype}{list(values.shape)}, expected whole numbers from 0 on")
        return None
    if values.max() >= _MOST_CLASSES:
        mistakes.append(f"{where}: has the label {values.max()}, expected classes 0..{_MOST_CLASSES - 1}")
        return None
    if options.kind != "window":
        numbers = _as_bytes(numbers)
    return _Samples(numbers, values.astype(np.int64))


def _as_bytes(numbers: np.ndarray) -> np.ndarray:
    """Return numbers that are multiples of 1/255 in 0..1 as pixels uint8, which take a quarter; others as they are."""
    if numbers.min() < 0 or numbers.max() > 1:
        return numbers
    scaled = numbers * np.float32(255)
    pixels = np.rint(scaled)
    return pixels.astype(np.uint8) if np.abs(scaled - pixels).max() < 1e-3 else numbers


_POSITIONS = {character: position for position, character in enumerate(CHARACTERS)}


def _samples_of_texts(
    where: str, texts: Sequence[Any], following: Sequence[Any], mistakes: list[str]
) -> _Samples | None:
    """Return texts and the characters that follow them, as positions; None as `_samples_of`."""
    lengths = {len(text) for text in texts if isinstance(text, str)}
    are_texts = all(isinstance(text, str) for text in (*texts, *following))
    if not are_texts or len(lengths) != 1 or any(len(text) != 1 for text in following):
        mistakes.append(f"{where}: expected texts of one length, each with the one character that follows it")
        return None
    unknown = sorted(set("".join((*texts, *following))) - _POSITIONS.keys())
    if unknown:
        shown = ", ".join(map(repr, unknown[:_MOST_MISTAKES]))
        mistakes.append(f"{where}: characters that are not among LEAF's {len(CHARACTERS)}: {shown}")
        return None
    positions = [[_POSITIONS[character] for character in text] for text in texts]
    labels = [_POSITIONS[character] for character in following]
    return _Samples(np.array(positions, np.uint8), np.array(labels, np.int64), is_text=True)


def _shape_of(count: int, options: LeafOptions, where: str) -> tuple[int, ...]:
    """Return the shape of an input of so many numbers.

    Raises:
        DataError: The options do not say it, or another one.
    """
    shape = options.shape
    if not shape and count == _PIXELS and options.kind != "window":
        shape = (28, 28)
    most_axes = 2 if options.kind == "window" else 3
    if 2 <= len(shape) <= most_axes and math.prod(shape) == count:
        return shape
    stated = f"shape={','.join(map(str, shape))}" if shape else "no shape"
    raise DataError(
        f"leaf: '{where}' has inputs of {count} numbers, and {stated} was given; say shape=HEIGHT,WIDTH for "
        f"images, or kind=window&shape=1,{count}"
    )


def _names_of_numbers(labels: np.ndarray, count: int) -> tuple[str, ...]:
    """Return names for labels (n,) of inputs of so many numbers; some users may lack classes that others have."""
    if count == _PIXELS and labels.max() < len(WRITTEN):
        return WRITTEN
    return tuple(map(str, range(int(labels.max()) + 1)))


def read(where: str, options: LeafOptions) -> Raw:
    """Return the samples of the chosen users, user after user by name.

    Raises:
        DataError: Files are missing or damaged, or users are unknown; all mistakes are listed.
    """
    # 1. File after file, because a parsed file takes many times the memory of its samples.
    chosen = _Chosen(options)
    for path in each(_files_of(where, options.split), "files"):
        chosen.add_file(path, _read_json(path))
    _check(chosen, where)
    # 2. One array of all samples.
    names = tuple(sorted(chosen.samples))
    parts = [part for name in names for part in chosen.samples[name]]
    counts = [sum(len(part.labels) for part in chosen.samples[name]) for name in names]
    chosen.samples.clear()
    is_text, count = parts[0].form
    inputs = _joined([part.inputs for part in parts])
    values = np.concatenate([part.labels for part in parts])
    numbers = np.repeat(np.arange(len(names)), counts)
    users = Users(numbers, names)
    firsts = np.concatenate([[0], np.cumsum(counts)])

    def row_name(row: int) -> str:
        return f"user {names[numbers[row]]}, sample {row - firsts[numbers[row]]}"

    # 3. Texts follow one another with a character between two, as windows of a recording do.
    if is_text:
        if options.shape or options.kind == "image":
            raise DataError(f"leaf: '{where}' holds texts of {count} characters; leave shape and kind out")
        labels, classes = labels_by_name(values, options.class_names or CHARACTER_NAMES, f"leaf: {where}")
        spec = WindowInput(channels=1, length=count, stride=1)
        windows = inputs[:, None, :]
        return Raw("window", windows, labels, classes, numbers, spec, users=users, row_name=row_name)  # type: ignore[arg-type]
    shape = _shape_of(count, options, where)
    class_names = options.class_names or _names_of_numbers(values, count)
    labels, classes = labels_by_name(values, class_names, f"leaf: {where}")
    shaped: Any = inputs.reshape(len(inputs), *shape)
    return Raw(options.kind or "image", shaped, labels, classes, users=users, row_name=row_name)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays one after another; pixels become shares of 1 where other users have numbers that are none."""
    kinds = {part.dtype.kind for part in parts}
    if len(kinds) == 1:
        return np.concatenate(parts)
    return np.concatenate([part / np.float32(255) if part.dtype.kind == "u" else part for part in parts])


def _check(chosen: _Chosen, where: str) -> None:
    """Check what was read of all files.

    Raises:
        DataError: Something is wrong; all mistakes are listed.
    """
    mistakes = chosen.mistakes + _mistakes_in_choice(chosen)
    # What is missing follows from the mistakes in files and options, where there are any.
    if not mistakes:
        mistakes = _mistakes_in_number(chosen)
    if not mistakes:
        return
    lines = [f"\n  - {mistake}" for mistake in mistakes[:_MOST_MISTAKES]]
    if len(mistakes) > _MOST_MISTAKES:
        lines.append(f"\n  … and {len(mistakes) - _MOST_MISTAKES} more")
    raise DataError(f"leaf: '{where}' cannot be used as it is:{''.join(lines)}")


def _mistakes_in_choice(chosen: _Chosen) -> list[str]:
    """Return a line for each user who is asked for and not there, and one where inputs have several forms."""
    names = sorted(chosen.names)
    mistakes = [f"no user '{user}'{near(user, names)}" for user in chosen.options.user if user not in chosen.names]
    forms = {part.form for parts in chosen.samples.values() for part in parts}
    if len(forms) > 1:
        lengths = [length for _, length in forms]
        mistakes.append(f"inputs of {min(lengths)} to {max(lengths)} numbers or characters; expected one form")
    return mistakes


def _mistakes_in_number(chosen: _Chosen) -> list[str]:
    """Return a line where fewer users have samples than are asked for, or none has."""
    most = chosen.options.users
    if most is not None and most > len(chosen.samples):
        return [f"users={most}, and {len(chosen.samples)} have samples; ask for fewer"]
    if not chosen.samples:
        return [f"none of {len(chosen.names)} users has samples; write the set again, or name others"]
    return []


def inspect(where: str, options: LeafOptions) -> None:
    """Check that there are such files; they are not read."""
    _files_of(where, options.split)


def parts(where: str, options: LeafOptions) -> tuple[str, str] | None:  # noqa: ARG001 - the folder alone says it
    """Return the names of both parts; None where the files are not divided."""
    if Path(where).expanduser().is_file() or "all" in _folders_of(where):
        return None
    return "train", "test"


SOURCE = DataSource(LeafOptions, read, needs_path=True, inspect=inspect, parts=parts)
