"""``wav:DIR?rate=16000``: sound files as log-mel energies: recordings for encoders of windows, or images.

DIR has a sub-folder of ``.wav`` files for each class, or is a file; PCM of 8 to 32 bits or floats, channels are
averaged. A recording has one sample for each ``step_ms`` (10), of ``mels`` (40) values: logarithms of the energies in
triangular bands, evenly spaced on the mel scale between ``low_hz`` (20) and ``high_hz`` (half of ``rate``), of frames
of ``frame_ms`` (25) under a Hann window. ``form=image``: pieces of ``seconds`` (1) as images (mels, steps), 0..1 for
the range of 80 dB below the loudest of a piece; what is left at the end of a file is not used. Other options:
``least_s`` (shorter files get silence at the end), ``limit`` (at most that many files of each class).

Files of a higher rate are resampled to ``rate``; those of a lower one are refused, because the bands above half of
their rate would be empty. Each file is held out as a whole or not at all.
Source of the mel scale: O'Shaughnessy, "Speech Communication", 1987: mel = 2595 log10(1 + hertz / 700).
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from pydantic import Field

from ..errors import DataError, cause
from ..storage import open_regular
from ..task import ImageInput, WindowInput
from .base import DataSource, FileItems, Options, Raw
from .images import ClassFiles, files_by_class

_FLOOR = 1e-10
"""Energies below this count as silence; full scale is 1."""

_RANGE_DB = 80.0
_BLOCK = 2048
"""Frames that are transformed at once."""

_LONGEST = 1 << 28
"""Bytes of a file: 1.5 hours of 16 bits at 24 kHz."""

_NO_SAMPLES = "is a WAV file without samples; it was cut, or its recording was interrupted"
_TAPS = 32
"""Zero crossings of the resampling filter on either side."""


class WavOptions(Options):
    """How sound becomes log-mel energies."""

    rate: int = Field(16000, ge=1000, le=192_000, description="samples per second")
    mels: int = Field(40, ge=1, le=1024, description="bands")
    frame_ms: float = Field(25.0, ge=1, le=1000, description="length of a frame")
    step_ms: float = Field(10.0, ge=1, le=1000, description="time between two frames")
    low_hz: float = Field(20.0, ge=0, description="lower end of the lowest band")
    high_hz: float | None = Field(None, gt=0, description="upper end of the highest band; default: half of rate")
    form: Literal["recording", "image"] = Field("recording", description="for encoders of windows or of images")
    seconds: float = Field(1.0, gt=0, le=600, description="length of an image")
    least_s: float = Field(0.0, ge=0, le=600, description="shorter files get silence at the end")
    limit: int | None = Field(None, ge=1, description="at most that many files of each class, first by name")


@dataclass(frozen=True)
class Sound:
    """What the header of a file says, and where its samples are."""

    path: Path
    rate: int
    channels: int
    bits: int
    is_float: bool
    offset: int
    count: int

    def samples(self, rate: int) -> np.ndarray:
        """The mean of the channels (time,) float64, -1..1, at ``rate``.

        Raises:
            DataError: recorded at a lower rate, too long, or with values that are no numbers.
        """
        if self.rate < rate:
            raise DataError(
                f"was recorded at {self.rate} Hz, below the {rate} Hz of this data source, so nothing above "
                f"{self.rate // 2} Hz is in it; record at {rate} Hz or more, or use rate={self.rate} for everything"
            )
        size = self.count * self.channels * self.bits // 8
        if size > _LONGEST:
            raise DataError(f"holds {size} bytes of sound, at most {_LONGEST} are read; cut it into several files")
        with open_regular(self.path) as file:
            file.seek(self.offset)
            data = file.read(size)
        if self.is_float:
            values = np.frombuffer(data, f"<f{self.bits // 8}").astype(np.float64)
        elif self.bits == 8:
            values = (np.frombuffer(data, np.uint8) - 128.0) / 128
        else:  # the bytes of an integer at the upper end of 32 bits
            wide = np.zeros((len(data) // (self.bits // 8), 4), np.uint8)
            wide[:, 4 - self.bits // 8 :] = np.frombuffer(data, np.uint8).reshape(len(wide), -1)
            values = wide.view("<i4")[:, 0] / 2.0**31
        if not np.isfinite(values).all():
            raise DataError("holds NaN or infinity")
        return resample(values.reshape(-1, self.channels).mean(axis=1), self.rate, rate)


def open_sound(path: Path) -> Sound:
    """The header of a file.

    Raises:
        DataError: no WAV file, without samples, or compressed.
    """
    try:
        with open_regular(path) as file:
            return _header(path, file)
    except OSError as error:
        raise DataError(f"cannot be read: {cause(error)}") from error


def _header(path: Path, file: BinaryIO) -> Sound:
    start = file.read(12)
    if start[:4] != b"RIFF" or start[8:] != b"WAVE":
        raise DataError("is no WAV file; expected RIFF and WAVE at its beginning")
    form = b""
    while len(chunk := file.read(8)) == 8:
        name, size = chunk[:4], int.from_bytes(chunk[4:], "little")
        if name == b"data" and form:
            break
        if name == b"fmt ":
            form = file.read(min(size, 40)).ljust(40, b"\0")
            size -= min(size, 40)
        file.seek(size + size % 2, 1)
    else:
        raise DataError(_NO_SAMPLES)
    kind, channels, rate, _, block, bits = struct.unpack("<HHIIHH", form[:16])
    if kind == 0xFFFE:  # extensible: the kind is the beginning of a long identifier
        kind = int.from_bytes(form[24:26], "little")
    if kind not in {1, 3} or bits not in ({8, 16, 24, 32} if kind == 1 else {32, 64}):
        raise DataError(f"is compressed or of a rare form ({kind}, {bits} bits); expected PCM or floats, convert it")
    if not 1 <= channels <= 64 or not 1000 <= rate <= 1_000_000 or block != channels * bits // 8:
        raise DataError(f"has an impossible header: {channels} channels, {rate} Hz, {block} bytes in a sample")
    offset = file.tell()  # recorders that are interrupted leave a wrong size
    count = min(size, path.stat().st_size - offset) // block
    if not count:
        raise DataError(_NO_SAMPLES)
    return Sound(path, rate, channels, bits, kind == 3, offset, count)


def resample(signal: np.ndarray, rate: int, to: int) -> np.ndarray:
    """The signal (time,) at a lower rate, by a sinc filter under a Kaiser window; as it is where rates are equal."""
    if rate == to:
        return signal
    divisor = math.gcd(rate, to)
    up, down = to // divisor, rate // divisor
    cutoff = 0.95 * up / down
    reach = math.ceil(_TAPS / cutoff)
    padded = np.concatenate([np.zeros(reach), signal, np.zeros(reach + 1)])
    result = np.zeros(len(signal) * up // down)
    views = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    for phase in range(min(up, len(result))):
        begin, part = divmod(phase * down, up)
        distances = part / up - np.arange(-reach, reach + 1)
        window = np.i0(9.0 * np.sqrt(np.maximum(1 - (distances / (reach + 1)) ** 2, 0)))
        weights = np.sinc(cutoff * distances) * window
        result[phase::up] = views[begin::down][: len(result[phase::up])] @ (weights / weights.sum())
    return result


def mel_bands(options: WavOptions) -> np.ndarray:
    """Weights (mels, frequencies) of the bands: triangles between neighbours' centers, 1 at their own.

    Raises:
        DataError: bands beyond half of the rate, or without a frequency in them.
    """
    high, size = options.high_hz or options.rate / 2, _frame_length(options)
    ends = 2595 * np.log10(1 + np.array([options.low_hz, high]) / 700)
    edges = 700 * (10 ** (np.linspace(ends[0], ends[1], options.mels + 2) / 2595) - 1)
    below, center, above = (edges[start : start + options.mels, None] for start in range(3))
    frequencies = np.arange(size // 2 + 1) * options.rate / size
    with np.errstate(divide="ignore", invalid="ignore"):
        rising, falling = (frequencies - below) / (center - below), (above - frequencies) / (above - center)
    bands = np.maximum(np.minimum(rising, falling), 0)
    if high > options.rate / 2 or options.low_hz >= high:
        raise DataError(f"wav: bands from {options.low_hz:g} to {high:g} Hz, expected within 0..{options.rate / 2:g}")
    if empty := int((bands.sum(axis=1) == 0).sum()):
        raise DataError(
            f"wav: {empty} of {options.mels} bands are narrower than the steps of {options.rate / size:g} Hz of a "
            "frame; give fewer mels or a longer frame_ms"
        )
    return np.asarray(bands)


def log_mel(signal: np.ndarray, options: WavOptions, bands: np.ndarray) -> np.ndarray:
    """Logarithms of the energies of a signal (time,) in each band, (frames, mels) float32; a full sine has about 1.

    Raises:
        DataError: shorter than one frame.
    """
    length, step = _frame_length(options), _step(options)
    if missing := _silence(len(signal), options):
        signal = np.concatenate([signal, np.zeros(missing)])
    if len(signal) < length:
        raise DataError(f"has {len(signal)} samples at {options.rate} Hz, one frame needs {length}")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)
    frames = np.lib.stride_tricks.sliding_window_view(signal, length)[::step]
    energies = [
        np.abs(np.fft.rfft(frames[begin : begin + _BLOCK] * window)) ** 2 @ bands.T
        for begin in range(0, len(frames), _BLOCK)
    ]
    full_scale = (window.sum() / 2) ** 2
    return np.asarray(np.log(np.maximum(np.concatenate(energies) / full_scale, _FLOOR)), np.float32)


def _frame_length(options: WavOptions) -> int:
    return max(round(options.rate * options.frame_ms / 1000), 2)


def _step(options: WavOptions) -> int:
    return max(round(options.rate * options.step_ms / 1000), 1)


def _silence(count: int, options: WavOptions) -> int:
    """Samples of silence behind ``count`` of sound: of an image the last frame, too, begins within its seconds."""
    beyond = max(_frame_length(options) - _step(options), 0) if options.form == "image" else 0
    return max(round(options.least_s * options.rate) - count, 0) + beyond


def read(where: str, options: WavOptions) -> Raw:
    """One recording for each file, or the images that each gives.

    Raises:
        DataError: no such files, or impossible bands.
    """
    bands, root = mel_bands(options), Path(where).expanduser()
    files = ClassFiles([root], np.full(1, -1), (), (root.name,), f"wav: '{where}' is one file, which has no label")
    if not root.is_file():
        files = files_by_class(root, "wav", (".wav",), options.limit)
    steps = max(round(1000 * options.seconds / options.step_ms), 4)

    @functools.lru_cache(maxsize=1)
    def energies(path: Path) -> np.ndarray:
        return log_mel(open_sound(path).samples(options.rate), options, bands)

    if options.form == "recording":
        natural = WindowInput(channels=options.mels, length=steps, stride=max(steps // 2, 1))
        items, rows = FileItems(files.paths, energies), np.arange(len(files.paths))
        names, reason = files.names, files.unlabelled
        step_s = options.step_ms / 1000
        labels, classes = files.labels, files.class_names
        return Raw(
            "recording", items, labels, classes, rows, natural, names, reason, are_whole=True,
            name_at=lambda row, frame: f"{names[row]} {frame * step_s:g} s", skipped=files.skipped,
        )  # fmt: skip
    counts = [_pieces(path, options, steps) for path in files.paths]
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


def _pieces(path: Path, options: WavOptions, steps: int) -> int:
    """How many images a file gives; one that cannot be read counts as one, which fails when it is read."""
    try:
        sound = open_sound(path)
    except DataError:
        return 1
    samples = sound.count * options.rate // sound.rate
    samples += _silence(samples, options)
    return max((1 + (samples - _frame_length(options)) // _step(options)) // steps, 1)


def _picture(energies: np.ndarray, steps: int, options: WavOptions) -> np.ndarray:
    """An image (mels, steps) float32 0..1 of log energies (frames, mels)."""
    if len(energies) < steps:
        length = len(energies) * options.step_ms / 1000
        raise DataError(
            f"is {length:.2f} s long, an image needs {options.seconds:g} s; least_s={options.seconds:g} fills such "
            "files with silence"
        )
    decibels = energies.T * np.float32(10 / math.log(10))
    return np.asarray(np.clip((decibels - decibels.max()) / np.float32(_RANGE_DB) + 1, 0, 1))


def inspect(where: str, options: WavOptions) -> None:
    """Check that there are such files, and that the bands are possible."""
    mel_bands(options)
    if not Path(where).expanduser().is_file():
        files_by_class(Path(where).expanduser(), "wav", (".wav",), options.limit)


SOURCE = DataSource(WavOptions, read, needs_path=True, inspect=inspect)
