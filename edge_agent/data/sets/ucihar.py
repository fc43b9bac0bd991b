"""``ucihar:DIR?subject=3``: UCI HAR, six activities of 30 people with a phone at the waist, 10,299 windows of 2.56 s.

DIR is the archive's ``UCI HAR Dataset`` or the folder that holds it: ``train/Inertial Signals/body_acc_x_train.txt``
and eight more signals, ``train/y_train.txt``, ``train/subject_train.txt``, the same under ``test``, and
``activity_labels.txt``. A window has nine channels (body acceleration, angular velocity, total acceleration, each x, y,
z) of 128 samples at 50 Hz, and shares half of them with the next. Options: ``split=train|test|all`` (default: all; the
parts are of different people), ``subject`` and ``exclude_subject`` (lists of numbers).

Windows that one person made one after another in one activity are a group: a recording.
Source: Anguita et al., "A Public Domain Dataset for Human Activity Recognition Using Smartphones", ESANN 2013. Licence:
CC BY 4.0 by its page; the archive's own README forbids commercial use.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import numpy as np

from ...core.errors import DataError
from ...core.reading import each
from ...core.task import WindowInput
from ..base import DataSource, Integers, Options, Raw
from ._layouts import Origin, integers_of, lines_of

SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
LENGTH = 128
INPUT = WindowInput(channels=len(SIGNALS), length=LENGTH, stride=LENGTH // 2)
ORIGIN = Origin(
    "ucihar",
    "UCI HAR data set",
    "activity_labels.txt, and in train and test: 'Inertial Signals/<signal>_<part>.txt' for nine signals, y_<part>.txt "
    "and subject_<part>.txt",
    "https://archive.ics.uci.edu/dataset/240",
    "CC BY 4.0; the archive's README forbids commercial use",
)


class UciHarOptions(Options):
    """The options of UCI HAR: which windows to take."""

    split: Literal["train", "test", "all"] = "all"
    subject: Integers = ()
    exclude_subject: Integers = ()


def read(where: str, options: UciHarOptions) -> Raw:
    """Return the windows of the chosen people, those of the training part first."""
    root = _root(where)
    names = _activities(root)
    parts = []
    for part in _parts(options):
        activities, people = _labels(root, part)
        rows = np.flatnonzero(_chosen(people, options))
        signals = [_signal(path, rows, len(people)) for path in each(_signals(root, part), "files")]
        parts.append((np.stack(signals, axis=1), activities[rows], people[rows]))
    windows, activities, people = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if not len(windows):
        held = ", ".join(map(str, subjects(where, UciHarOptions(split=options.split))))
        raise DataError(f"ucihar: no window in '{where}' is left by the options; subjects of {options.split}: {held}")
    if activities.max() >= len(names):
        raise ORIGIN.damaged(root / "activity_labels.txt", f"names {len(names)} activities", f"{activities.max() + 1}")
    changes = (np.diff(activities) != 0) | (np.diff(people) != 0)
    groups = np.concatenate([[0], np.cumsum(changes)])
    places = tuple(f"subject {person}" for person in people)
    return Raw("window", windows, activities, names, groups, INPUT, places)  # type: ignore[arg-type]


def inspect(where: str, options: UciHarOptions) -> None:
    """Check that the labels and all nine signals of the selected parts exist; no signal is read."""
    root = _root(where)
    _activities(root)
    for part in _parts(options):
        _labels(root, part)
        missing = [path.name for path in _signals(root, part) if not path.is_file()]
        if missing:
            raise ORIGIN.missing(root, f"'{part}/Inertial Signals' lacks {', '.join(missing)}")


def subjects(where: str, options: UciHarOptions) -> tuple[int, ...]:
    """Return numbers of the people in the chosen parts, sorted, without those that the options exclude.

    Raises:
        DataError: The files of subjects are missing or damaged.
    """
    people = np.concatenate([_labels(_root(where), part)[1] for part in _parts(options)])
    return tuple(int(person) for person in np.unique(people[_chosen(people, options)]))


def _root(where: str) -> Path:
    root = Path(where).expanduser()
    for path in (root, root / "UCI HAR Dataset"):
        if (path / "activity_labels.txt").is_file():
            return path
    raise ORIGIN.missing(where, "there is no activity_labels.txt")


def _parts(options: UciHarOptions) -> tuple[str, ...]:
    return ("train", "test") if options.split == "all" else (options.split,)


def _activities(root: Path) -> tuple[str, ...]:
    """Return names of the labels 1, 2 … in lower case."""
    path = root / "activity_labels.txt"
    rows = [line.split() for line in lines_of(path, ORIGIN)]
    if not rows or any(len(row) != 2 or row[0] != str(number) for number, row in enumerate(rows, 1)):
        raise ORIGIN.damaged(path, f"has {len(rows)} lines that do not count from 1", "'1 WALKING', '2 …' and so on")
    return tuple(row[1].lower() for row in rows)


def _labels(root: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Activities (n,) from 0 on, and people (n,), of all windows of a part."""
    paths = [root / part / f"{kind}_{part}.txt" for kind in ("y", "subject")]
    activities, people = (integers_of(path, ORIGIN) for path in paths)
    if len(activities) != len(people):
        raise ORIGIN.damaged(paths[1], f"has {len(people)} lines", f"{len(activities)}, as {paths[0].name}")
    if len(activities) and activities.min() < 1:
        raise ORIGIN.damaged(paths[0], "has the label 0", "labels from 1 on")
    return activities - 1, people


def _chosen(people: np.ndarray, options: UciHarOptions) -> np.ndarray:
    is_chosen = np.isin(people, options.subject) if options.subject else np.ones(len(people), bool)
    return is_chosen & ~np.isin(people, options.exclude_subject)


def _signals(root: Path, part: str) -> list[Path]:
    return [root / part / "Inertial Signals" / f"{signal}_{part}.txt" for signal in SIGNALS]


def _signal(path: Path, rows: np.ndarray, expected: int) -> np.ndarray:
    """Return the lines at ``rows`` (m,) as numbers (m, 128)."""
    lines = lines_of(path, ORIGIN)
    if len(lines) != expected:
        raise ORIGIN.damaged(path, f"has {len(lines)} lines", f"{expected}, one for each label")
    if not len(rows):
        return np.empty((0, LENGTH), np.float32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            values = np.loadtxt([lines[row] for row in rows], np.float32, comments=None, ndmin=2)
    except (ValueError, UserWarning) as error:
        raise ORIGIN.damaged(path, f"cannot be read ({error})", f"{LENGTH} numbers in each line") from error
    if values.shape[1] != LENGTH:
        raise ORIGIN.damaged(path, f"has {values.shape[1]} numbers in each line", f"{LENGTH}")
    return values


SOURCE = DataSource(UciHarOptions, read, needs_path=True, inspect=inspect, subjects=subjects)
