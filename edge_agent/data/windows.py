"""``windows:FILE?subject=1,2``: sensor recordings in a NumPy archive, cut into windows by the task's input spec.

Arrays: ``samples`` (N, channels) float32, all recordings one after another; ``lengths`` (recordings,); ``label``
(recordings,) integers; optional ``subject``, ``side`` (recordings,), ``label_names``, ``channel_names``,
``sampling_hz``. Options: ``subject``, ``exclude_subject``, ``side`` (lists of numbers) and ``shortest``, the number of
samples below which a recording is left out. ``edge-agent predict`` needs no ``label``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pydantic import Field

from ..core.errors import DataError
from ..core.task import WindowInput
from .base import DataSource, Integers, Options, Raw, labels_by_name
from .npz import load_arrays


class WindowsOptions(Options):
    """The options of windows in an archive: which recordings to take."""

    subject: Integers = Field((), description="only these people")
    exclude_subject: Integers = Field((), description="all but these people")
    side: Integers = Field((), description="only this body side, as numbered in the file")
    shortest: int = Field(0, ge=0, description="leave out recordings with fewer samples than this")


def read(where: str, options: WindowsOptions) -> Raw:
    """Return the recordings that the options choose."""
    arrays = _arrays(where)
    reason = ""
    labels = np.full(arrays["lengths"].shape, -1)
    class_names: tuple[str, ...] = ()
    if "label" in arrays:
        names = [str(name) for name in arrays.get("label_names", np.array([], "U1"))]
        labels, class_names = labels_by_name(arrays["label"], names, f"windows: {where}")
    else:
        reason = f"windows: '{where}' has no array label; it has {', '.join(sorted(arrays))}"
    lengths = arrays["lengths"].astype(np.int64)
    rows = _choose_rows(arrays, options, where)
    ends = np.cumsum(lengths)
    items = [arrays["samples"][ends[row] - lengths[row] : ends[row]] for row in rows]
    # Windows of two seconds, half overlapping, where the file states its rate.
    rate = int(arrays["sampling_hz"]) if "sampling_hz" in arrays else 50
    length = min(max(2 * rate, 4), 65536)
    natural = WindowInput(channels=arrays["samples"].shape[1], length=length, stride=length // 2)
    origins = tuple(f"recording {row}" for row in rows)

    def name_at(row: int, sample: int) -> str:
        return f"{origins[row]} from sample {sample}"

    return Raw("recording", items, labels[rows], class_names, rows, natural, origins, reason, name_at=name_at)


def _choose_rows(arrays: Mapping[str, np.ndarray], options: WindowsOptions, where: str) -> np.ndarray:
    """Return the numbers (n,) of the recordings that the options choose, by length, person and side.

    Raises:
        DataError: An array that the options choose by is missing, or no recording is left.
    """
    is_chosen = arrays["lengths"].astype(np.int64) >= options.shortest
    rules = (
        ("subject", options.subject, True),
        ("subject", options.exclude_subject, False),
        ("side", options.side, True),
    )
    for name, values, is_taken in rules:
        if not values:
            continue
        if name not in arrays:
            raise DataError(f"windows: '{where}' has no array '{name}', so it cannot be chosen by {name}")
        is_chosen &= np.isin(arrays[name], values) == is_taken
    rows = np.flatnonzero(is_chosen)
    if not len(rows):
        people = ", ".join(map(str, np.unique(arrays["subject"]))) if "subject" in arrays else "not stated"
        raise DataError(f"windows: no recording in '{where}' is left by the options; subjects: {people}")
    return rows


def subjects(where: str, options: WindowsOptions) -> tuple[int, ...]:
    """Return numbers of the people in a file, sorted, without those that the options exclude.

    Raises:
        DataError: The file cannot be read, or has no array of subjects.
    """
    arrays = _arrays(where)
    if "subject" not in arrays:
        raise DataError(f"windows: '{where}' has no array 'subject'; it is needed to tell people apart")
    return tuple(int(subject) for subject in np.setdiff1d(arrays["subject"], np.array(options.exclude_subject, int)))


def _arrays(where: str) -> dict[str, np.ndarray]:
    """Return the arrays of an archive of recordings.

    Raises:
        DataError: An array is missing, or has another form than the others; all mistakes are listed.
    """
    arrays = load_arrays(Path(where).expanduser())
    missing = [name for name in ("samples", "lengths") if name not in arrays]
    if missing:
        raise DataError(f"windows: '{where}' has no array {', '.join(missing)}; it has {', '.join(sorted(arrays))}")
    samples = arrays["samples"]
    lengths = arrays["lengths"]
    mistakes = []
    if samples.ndim != 2 or samples.dtype.kind != "f":
        mistakes.append(f"samples are {samples.dtype}{list(samples.shape)}, expected floats (time, channels)")
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        mistakes.append(f"lengths are {lengths.dtype}{list(lengths.shape)}, expected one row of natural numbers")
    elif int(lengths.sum(dtype=np.int64)) != len(samples):
        mistakes.append(f"lengths add up to {lengths.sum(dtype=np.int64)}, there are {len(samples)} samples")
    shapes = {name: arrays[name].shape for name in ("label", "subject", "side") if name in arrays}
    mistakes += [
        f"{name} has shape {shape}, expected {lengths.shape}"
        for name, shape in shapes.items()
        if shape != lengths.shape
    ]
    if mistakes:
        raise DataError(f"windows: '{where}': {'; '.join(mistakes)}")
    return arrays


SOURCE = DataSource(WindowsOptions, read, needs_path=True, subjects=subjects)
