"""``windows:FILE?subject=1,2``: sensor recordings in a NumPy archive, cut into windows by the task's input spec.

Arrays: ``samples`` (N, channels) float32, all recordings one after another; ``lengths`` (recordings,); ``label``
(recordings,) integers; optional ``subject``, ``side`` (recordings,), ``label_names``, ``channel_names``,
``sampling_hz``. Options: ``subject``, ``exclude_subject``, ``side`` (lists of numbers) and ``shortest``, the number of
samples below which a recording is left out. ``edge-agent predict`` needs no ``label``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from ..core.errors import DataError
from ..core.task import WindowInput
from .base import DataSource, Integers, Options, Raw, labels_by_name
from .npz import load_arrays

_DEFAULT_RATE_HZ = 50
"""The rate of recordings whose file does not state it."""


class WindowsOptions(Options):
    """The options of windows in an archive: which recordings to take."""

    subject: Integers = Field((), description="only these people")
    exclude_subject: Integers = Field((), description="all but these people")
    side: Integers = Field((), description="only this body side, as numbered in the file")
    shortest: int = Field(0, ge=0, description="leave out recordings with fewer samples than this")


def read(where: str, options: WindowsOptions) -> Raw:
    """Return the recordings that the options choose.

    Raises:
        DataError: The file cannot be read, an array is missing or of another form, or no recording is left.
    """
    # 1. The classes of all recordings; without an array of labels they have none.
    arrays = _arrays(where)
    reason = ""
    labels = np.full(arrays["lengths"].shape, -1)
    class_names: tuple[str, ...] = ()
    if "label" in arrays:
        names = [str(name) for name in arrays.get("label_names", np.array([], "U1"))]
        labels, class_names = labels_by_name(arrays["label"], names, f"windows: {where}")
    else:
        reason = f"windows: '{where}' has no array label; it has {', '.join(sorted(arrays))}"
    # 2. The chosen recordings, each a stretch of the array of all samples.
    rows = _choose_rows(arrays, options, where)
    samples = arrays["samples"]
    lengths = arrays["lengths"].astype(np.int64)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    recordings = [samples[begins[row] : ends[row]] for row in rows]
    origins = tuple(f"recording {row}" for row in rows)

    def name_at(row: int, sample: int) -> str:
        return f"{origins[row]} from sample {sample}"

    natural = _natural_windows(arrays)
    return Raw("recording", recordings, labels[rows], class_names, rows, natural, origins, reason, name_at=name_at)


def _natural_windows(arrays: Mapping[str, np.ndarray]) -> WindowInput:
    """Return windows of two seconds (4 to 65,536 samples) that overlap by half; a file without a rate has 50 Hz."""
    rate_hz = _DEFAULT_RATE_HZ
    if "sampling_hz" in arrays:
        rate_hz = int(arrays["sampling_hz"])
    length = min(max(2 * rate_hz, 4), 65536)
    return WindowInput(channels=arrays["samples"].shape[1], length=length, stride=length // 2)


def _choose_rows(arrays: Mapping[str, np.ndarray], options: WindowsOptions, where: str) -> np.ndarray:
    """Return the numbers (n,) of the recordings that the options choose, by length, person and side.

    Raises:
        DataError: An array that the options choose by is missing, or no recording is left.
    """
    is_chosen = arrays["lengths"].astype(np.int64) >= options.shortest
    if options.subject:
        is_chosen &= _is_one_of(arrays, "subject", options.subject, where)
    if options.exclude_subject:
        is_chosen &= ~_is_one_of(arrays, "subject", options.exclude_subject, where)
    if options.side:
        is_chosen &= _is_one_of(arrays, "side", options.side, where)
    rows = np.flatnonzero(is_chosen)
    if len(rows):
        return rows
    people = "not stated"
    if "subject" in arrays:
        people = ", ".join(map(str, np.unique(arrays["subject"])))
    raise DataError(f"windows: no recording in '{where}' is left by the options; subjects: {people}")


def _is_one_of(arrays: Mapping[str, np.ndarray], name: str, values: Sequence[int], where: str) -> np.ndarray:
    """Return whether the number that an array has for each recording is one of ``values``, (recordings,) bool.

    Raises:
        DataError: There is no such array.
    """
    if name not in arrays:
        raise DataError(f"windows: '{where}' has no array '{name}', so it cannot be chosen by {name}")
    return np.isin(arrays[name], values)


def subjects(where: str, options: WindowsOptions) -> tuple[int, ...]:
    """Return the numbers of the people in a file, sorted, without those that the options exclude.

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
    mistakes = list(_mistakes_in(arrays))
    if mistakes:
        raise DataError(f"windows: '{where}': {'; '.join(mistakes)}")
    return arrays


def _mistakes_in(arrays: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield what is wrong with the forms of the arrays of an archive that has samples and lengths."""
    # 1. The samples of all recordings, one after another.
    samples = arrays["samples"]
    are_recordings = samples.ndim == 2 and samples.dtype.kind == "f"
    if not are_recordings:
        yield f"samples are {samples.dtype}{list(samples.shape)}, expected floats (time, channels)"
    # 2. Their lengths. Only natural numbers can be added up to a number of samples.
    lengths = arrays["lengths"]
    are_natural = lengths.ndim == 1 and lengths.dtype.kind in "iu" and not (lengths < 0).any()
    total = int(lengths.sum(dtype=np.int64)) if are_natural else 0
    if not are_natural:
        yield f"lengths are {lengths.dtype}{list(lengths.shape)}, expected one row of natural numbers"
    elif total != len(samples):
        yield f"lengths add up to {total}, there are {len(samples)} samples"
    # 3. What else is known of each recording.
    for name in ("label", "subject", "side"):
        if name in arrays and arrays[name].shape != lengths.shape:
            yield f"{name} has shape {arrays[name].shape}, expected {lengths.shape}"


SOURCE = DataSource(WindowsOptions, read, needs_path=True, subjects=subjects)
