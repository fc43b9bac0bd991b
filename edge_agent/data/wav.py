"""``wav:DIR?rate=16000``: sound files as log-mel energies: recordings for encoders of windows, or images; or raw.

DIR has a sub-folder of ``.wav``, ``.flac`` or ``.ogg`` files for each class, or is a file; channels are averaged. A
recording has one sample for each ``step_ms`` (10), of ``mels`` (40) values: logarithms of the energies in triangular
bands, evenly spaced on the mel scale between ``low_hz`` (20) and ``high_hz`` (half of ``rate``), of frames of
``frame_ms`` (25) under a Hann window. ``form=image``: pieces of ``seconds`` (1) as images (mels, steps), 0..1 for the
range of 80 dB below the loudest of a piece; what is left at the end of a file is not used. Other options: ``least_s``
(shorter files get silence at the end, default 0), ``limit`` (at most that many files of each class). ``form=signal``:
the sound itself, -1..1, as a recording of one channel with ``rate`` samples per second, for networks that take it raw.

Files of a higher rate are resampled to ``rate``; those of a lower one are refused, because the bands above half of
their rate would be empty. Each file is held out as a whole or not at all. WAV files of integers that have the ``rate``
already need no other package; FLAC, Ogg, WAV files of floats and resampling need the extra ``audio``.
Source of the mel scale: O'Shaughnessy, "Speech Communication", 1987: mel = 2595 log10(1 + hertz / 700).
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from ..core.errors import DataError
from ..core.reading import each
from ..core.task import ImageInput, WindowInput
from ._sound_files import SUFFIXES, read_header, read_signal
from .base import DataSource, FileItems, Options, Raw
from .images import ClassFiles, files_by_class

_FLOOR = 1e-10
"""Energies below this count as silence; full scale is 1."""

_RANGE_DB = 80.0
_LONGEST_WINDOW = 65536
"""The most samples of a window; see `edge_agent.core.task.WindowInput`."""

_BLOCK = 2048
"""Frames that are transformed at once."""


class WavOptions(Options):
    """The options of sound files: how they become log-mel energies."""

    rate: int = Field(16000, ge=1000, le=192_000, description="samples per second")
    mels: int = Field(40, ge=1, le=1024, description="bands")
    frame_ms: float = Field(25.0, ge=1, le=1000, description="length of a frame")
    step_ms: float = Field(10.0, ge=1, le=1000, description="time between two frames")
    low_hz: float = Field(20.0, ge=0, description="lower end of the lowest band")
    high_hz: float | None = Field(None, gt=0, description="upper end of the highest band; default: half of rate")
    form: Literal["recording", "image", "signal"] = Field(
        "recording", description="for encoders of windows or of images; signal: for encoders of raw sound"
    )
    seconds: float = Field(1.0, gt=0, le=600, description="length of an image")
    least_s: float = Field(0.0, ge=0, le=600, description="shorter files get silence at the end")
    limit: int | None = Field(None, ge=1, description="at most that many files of each class, first by name")


def mel_bands(options: WavOptions) -> np.ndarray:
    """Return weights (mels, frequencies) of the bands: triangles between neighbours' centers, 1 at their own.

    Raises:
        DataError: A band lies above half of the sampling rate, or contains no frequency.
    """
    high = options.high_hz or options.rate / 2
    size = _frame_length(options)
    ends = 2595 * np.log10(1 + np.array([options.low_hz, high]) / 700)
    edges = 700 * (10 ** (np.linspace(ends[0], ends[1], options.mels + 2) / 2595) - 1)
    below, center, above = (edges[start : start + options.mels, None] for start in range(3))
    frequencies = np.arange(size // 2 + 1) * options.rate / size
    with np.errstate(divide="ignore", invalid="ignore"):
        rising = (frequencies - below) / (center - below)
        falling = (above - frequencies) / (above - center)
    bands = np.maximum(np.minimum(rising, falling), 0)
    if high > options.rate / 2 or options.low_hz >= high:
        raise DataError(f"wav: bands from {options.low_hz:g} to {high:g} Hz, expected within 0..{options.rate / 2:g}")
    empty = int((bands.sum(axis=1) == 0).sum())
    if empty:
        raise DataError(
            f"wav: {empty} of {options.mels} bands are narrower than the steps of {options.rate / size:g} Hz of a "
            "frame; give fewer mels or a longer frame_ms"
        )
    return np.asarray(bands)


def log_mel(signal: np.ndarray, options: WavOptions, bands: np.ndarray) -> np.ndarray:
    """Return the logarithms of a signal's energies in each band.

    Args:
        signal: The sound (time,), 1 being full scale.
        options: Length and distance of the frames.
        bands: Weights (mels, frequencies) of the bands.

    Returns:
        (frames, mels) float32; a sine of full scale has about 1.

    Raises:
        DataError: The signal is shorter than one frame.
    """
    length = _frame_length(options)
    if len(signal) < length:
        raise DataError(
            f"has {len(signal)} samples at {options.rate} Hz, one frame needs {length}; {_least_s_advice(1, options)}"
        )
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)
    full_scale = (window.sum() / 2) ** 2
    frames = np.lib.stride_tricks.sliding_window_view(signal, length)[:: _step(options)]
    result = np.empty((len(frames), len(bands)), np.float32)
    for begin in range(0, len(frames), _BLOCK):
        spectrum = np.fft.rfft(frames[begin : begin + _BLOCK] * window)
        energies = np.abs(spectrum) ** 2 @ bands.T
        result[begin : begin + _BLOCK] = np.log(np.maximum(energies / full_scale, _FLOOR))
    return result


def _read_energies(path: Path, options: WavOptions, bands: np.ndarray) -> np.ndarray:
    """Return the log energies (frames, mels) float32 of a file, and of the silence that is to follow its sound."""
    least_frames = _least_frames(options)
    silent_frames = _silent_frames(options)
    signal = read_signal(path, options.rate, least_frames=least_frames, silent_frames=silent_frames)
    return log_mel(signal, options, bands)


def _frame_length(options: WavOptions) -> int:
    return max(round(options.rate * options.frame_ms / 1000), 2)


def _step(options: WavOptions) -> int:
    return max(round(options.rate * options.step_ms / 1000), 1)


def _least_frames(options: WavOptions) -> int:
    """Return the samples up to which silence follows a shorter sound."""
    return round(options.least_s * options.rate)


def _silent_frames(options: WavOptions) -> int:
    """Return the samples of silence behind each file: of an image the last frame, too, begins within its seconds."""
    if options.form != "image":
        return 0
    return max(_frame_length(options) - _step(options), 0)


def _least_s_advice(steps: int, options: WavOptions) -> str:
    """Return what to do about a file that is too short for so many steps: the end of a message."""
    samples = _frame_length(options) + (steps - 1) * _step(options) - _silent_frames(options)
    needed = math.ceil(100 * samples / options.rate) / 100
    return (
        f"record longer, or raise least_s, up to which short files get silence, from {options.least_s:g} to "
        f"{needed:g} s: wav:…?least_s={needed:g}"
    )


def read(where: str, options: WavOptions) -> Raw:
    """Return one recording for each file, or the images that each gives.

    Raises:
        DataError: The files do not exist, or the bands are impossible.
    """
    if options.form == "signal":
        return _read_signals(where, options)
    bands = mel_bands(options)
    files = _files_in(where, options)
    steps = max(round(1000 * options.seconds / options.step_ms), 4)

    @functools.lru_cache(maxsize=1)
    def energies(path: Path) -> np.ndarray:
        return _read_energies(path, options, bands)

    if options.form == "recording":
        natural = WindowInput(channels=options.mels, length=steps, stride=max(steps // 2, 1))
        items = FileItems(files.paths, energies)
        rows = np.arange(len(files.paths))
        names = files.names
        reason = files.unlabelled
        step_s = options.step_ms / 1000
        labels = files.labels
        classes = files.class_names
        return Raw(
            "recording", items, labels, classes, rows, natural, names, reason, are_whole=True,
            name_at=lambda row, frame: f"{names[row]} {frame * step_s:g} s", skipped=files.skipped,
            short_advice=lambda needed: _least_s_advice(needed, options),
        )  # fmt: skip
    counts = [_pieces(path, options, steps) for path in each(files.paths, "headers of sounds")]
    rows = np.repeat(np.arange(len(counts)), counts)
    keys = [(path, piece) for path, count in zip(files.paths, counts, strict=True) for piece in range(count)]
    items = FileItems(
        keys, lambda key: _picture(energies(key[0])[key[1] * steps : (key[1] + 1) * steps], steps, options)
    )
    shape = ImageInput(channels=1, height=max(options.mels, 4), width=steps)
    names = tuple(
        f"{files.names[row]} {piece * options.seconds:g} s" for row, (_, piece) in zip(rows, keys, strict=True)
    )
    return Raw(
        "image", items, files.labels[rows], files.class_names, rows, shape, names, files.unlabelled, are_whole=True,
        skipped=files.skipped,
    )  # fmt: skip


def _files_in(where: str, options: WavOptions) -> ClassFiles:
    """Return the sound files of a folder of class folders, or the one file that ``where`` is."""
    root = Path(where).expanduser()
    if root.is_file():
        return ClassFiles([root], np.full(1, -1), (), (root.name,), f"wav: '{where}' is one file, which has no label")
    return files_by_class(root, "wav", SUFFIXES, options.limit)


def _read_signals(where: str, options: WavOptions) -> Raw:
    """Return one recording of one channel for each file: the sound itself."""
    files = _files_in(where, options)
    least_frames = _least_frames(options)
    names = files.names

    def read_file(path: Path) -> np.ndarray:
        return read_signal(path, options.rate, least_frames=least_frames)[:, None]

    def advise(needed: int) -> str:
        least_s = math.ceil(100 * needed / options.rate) / 100
        return (
            f"record longer, or raise least_s, up to which short files get silence, from {options.least_s:g} to "
            f"{least_s:g} s: wav:…?least_s={least_s:g}"
        )

    length = min(max(round(options.rate * options.seconds), 4), _LONGEST_WINDOW)
    natural = WindowInput(channels=1, length=length, stride=max(length // 2, 1))
    return Raw(
        "recording", FileItems(files.paths, read_file), files.labels, files.class_names, np.arange(len(files.paths)),
        natural, names, files.unlabelled, are_whole=True,
        name_at=lambda row, sample: f"{names[row]} {sample / options.rate:g} s", skipped=files.skipped,
        short_advice=advise,
    )  # fmt: skip


def _pieces(path: Path, options: WavOptions, steps: int) -> int:
    """Return how many images a file gives; one that cannot be read counts as one, which fails when it is read."""
    try:
        header = read_header(path)
    except DataError:
        return 1
    samples = max(header.frames_at(options.rate), _least_frames(options)) + _silent_frames(options)
    return max((1 + (samples - _frame_length(options)) // _step(options)) // steps, 1)


def _picture(energies: np.ndarray, steps: int, options: WavOptions) -> np.ndarray:
    """Return an image (mels, steps) float32 0..1 of log energies (frames, mels)."""
    if len(energies) < steps:
        length = len(energies) * options.step_ms / 1000
        raise DataError(
            f"is {length:.2f} s long, an image needs {options.seconds:g} s; {_least_s_advice(steps, options)}"
        )
    decibels = energies.T * np.float32(10 / math.log(10))
    return np.asarray(np.clip((decibels - decibels.max()) / np.float32(_RANGE_DB) + 1, 0, 1))


def inspect(where: str, options: WavOptions) -> None:
    """Check that there are such files, and that the bands are possible."""
    mel_bands(options)
    if not Path(where).expanduser().is_file():
        files_by_class(Path(where).expanduser(), "wav", SUFFIXES, options.limit)


SOURCE = DataSource(WavOptions, read, needs_path=True, inspect=inspect)
