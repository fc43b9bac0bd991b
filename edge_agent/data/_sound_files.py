"""Sound files as one channel of floats: WAV, FLAC and Ogg, read by libsndfile and resampled by libsoxr.

Both come with the extra ``audio`` (the packages soundfile and soxr). Without it, Python's own ``wave`` module reads WAV
files of integers (PCM of 8 to 32 bits) that have the wanted rate already, with the same values.

Files are strangers' work: how many samples a header promises is checked before anything is allocated, and a file is
decoded in blocks, so that memory is that of the result, whatever the file says.
"""

from __future__ import annotations

import contextlib
import os
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..core.errors import DataError, MissingCapability, cause
from ..core.storage import open_regular

if TYPE_CHECKING:
    from types import ModuleType

SUFFIXES = (".flac", ".ogg", ".wav")

MOST_FRAMES = 1 << 26
"""The most samples of each channel in a file: 70 minutes at 16 kHz, 25 at 44.1 kHz; a channel then has 256 MiB."""

_MOST_VALUES = 1 << 28
"""The most samples of all channels of a file, which take the time of decoding: four channels of `MOST_FRAMES`."""

_MOST_CHANNELS = 64
_BLOCK_FRAMES = 1 << 15
"""The number of samples of each channel that are decoded at once: 8 MiB with 64 channels."""

_WAV_HEADER_BYTES = 44
"""The shortest header of a WAV file."""

_PCM = 1
"""The code of integers in the header of a WAV file."""

_UNKNOWN_FRAMES = (1 << 63) - 1
"""The length (SF_COUNT_MAX) that libsndfile returns for a FLAC file whose header states none."""

_CONTAINERS = {b"RIFF": "WAV", b"RF64": "RF64", b"fLaC": "FLAC", b"OggS": "Ogg"}
"""First four bytes of a file -> its container. libsndfile knows thirty more, which nobody here has tested."""


@dataclass(frozen=True)
class SoundHeader:
    """The properties that the header of a sound file states.

    Attributes:
        rate: Samples of each channel in a second.
        channels: Number of channels.
        frames: Samples of each channel.
    """

    rate: int
    channels: int
    frames: int

    def frames_at(self, rate: int) -> int:
        """Return how many samples a channel has at ``rate``."""
        return self.frames * rate // self.rate


class _Reader(Protocol):
    """An open sound file."""

    header: SoundHeader

    def read(self, frames: int) -> np.ndarray:
        """Return the next samples (up to ``frames``, channels) float32; none at the end."""

    def close(self) -> None:
        """Close the file."""


class _LibsndfileReader:
    """A file of any form that libsndfile knows."""

    def __init__(self, path: Path, soundfile: ModuleType) -> None:
        # As bytes, because soundfile encodes text strictly, and names may hold bytes that are no UTF-8.
        self._file = soundfile.SoundFile(os.fsencode(path) if os.name == "posix" else str(path))
        self.header = SoundHeader(self._file.samplerate, self._file.channels, self._file.frames)

    def read(self, frames: int) -> np.ndarray:
        return np.asarray(self._file.read(frames, dtype="float32", always_2d=True))

    def close(self) -> None:
        self._file.close()


class _WaveReader:
    """A WAV file of integers, by the standard library."""

    def __init__(self, path: Path) -> None:
        self._file = wave.open(str(path), "rb")  # noqa: SIM115 - `close` closes it
        self._width = self._file.getsampwidth()
        if self._width > 4:
            self._file.close()
            raise DataError(f"has {8 * self._width} bits in a sample; expected 8, 16, 24 or 32")
        channels = self._file.getnchannels()
        frames = self._file.getnframes()
        # A recorder that was interrupted leaves a wrong size in the header: what counts is what is there.
        if frames * channels * self._width + _WAV_HEADER_BYTES > path.stat().st_size:
            frames = self._count_frames()
        self.header = SoundHeader(self._file.getframerate(), channels, frames)

    def _count_frames(self) -> int:
        """Return how many samples of each channel the file has, and go back to the first."""
        frames = 0
        frame_bytes = self._width * self._file.getnchannels()
        while data := self._file.readframes(_BLOCK_FRAMES):
            frames += len(data) // frame_bytes
        self._file.rewind()
        return frames

    def read(self, frames: int) -> np.ndarray:
        data = self._file.readframes(frames)
        data = data[: len(data) - len(data) % (self._width * self.header.channels)]
        if self._width == 1:  # the only one without a sign
            values = (np.frombuffer(data, np.uint8) - np.float32(128)) / np.float32(128)
        else:  # the bytes of an integer at the upper end of 32 bits
            wide = np.zeros((len(data) // self._width, 4), np.uint8)
            wide[:, 4 - self._width :] = np.frombuffer(data, np.uint8).reshape(len(wide), -1)
            values = wide.view("<i4")[:, 0] / np.float32(2.0**31)
        return np.asarray(values.reshape(-1, self.header.channels), np.float32)

    def close(self) -> None:
        self._file.close()


def read_header(path: Path) -> SoundHeader:
    """Return what the header of a file states.

    Raises:
        DataError: No sound of a known form, a damaged one, or one with an impossible or too long content.
        MissingCapability: Its form needs the extra ``audio``.
    """
    with _open_sound(path) as sound:
        return sound.header


def read_signal(path: Path, rate: int, *, least_frames: int = 0, silent_frames: int = 0) -> np.ndarray:
    """Read a file as the mean of its channels.

    Args:
        path: The file.
        rate: Samples per second of the result; files of a lower rate are refused.
        least_frames: Length up to which silence follows a shorter sound.
        silent_frames: Silence that follows in any case.

    Returns:
        The signal (time,) float32, -1..1 where the file holds integers.

    Raises:
        DataError: As `read_header`; or it was recorded at a lower rate, ends too early, or has values that are no
            numbers.
        MissingCapability: The file's form, or its rate, needs the extra ``audio``.
    """
    with _open_sound(path) as sound:
        if sound.header.rate < rate:
            raise DataError(
                f"was recorded at {sound.header.rate} Hz, below the {rate} Hz of this data source, so nothing above "
                f"{sound.header.rate // 2} Hz is in it; record at {rate} Hz or more, or use rate={sound.header.rate} "
                "for everything"
            )
        length = sound.header.frames_at(rate)
        signal = np.zeros(max(length, least_frames) + silent_frames, np.float32)
        filled = 0
        for block in _resample(_mean_of_channels(sound), sound.header.rate, rate):
            # The resampler may give one sample more or less than the two rates say.
            used = block[: length - filled]
            signal[filled : filled + len(used)] = used
            filled += len(used)
    return signal


@contextlib.contextmanager
def _open_sound(path: Path) -> Iterator[_Reader]:
    """Open a file, with what is wrong in it or in what is read from it told as an error about data."""
    try:
        with contextlib.closing(_reader_of(path)) as sound:
            _check_header(sound.header)
            yield sound
    except OSError as error:
        raise DataError(f"cannot be read: {cause(error)}") from error
    except (wave.Error, EOFError) as error:
        raise DataError(f"is damaged or cut ({error}); copy or record it again") from error
    except RuntimeError as error:  # soundfile's; its text begins with the path, which the reader of the error knows
        reason = str(getattr(error, "error_string", error)).removeprefix("Error : ").rstrip(".")
        raise DataError(f"is damaged, cut or of a rare form ({reason}); copy, record or convert it again") from error


def _reader_of(path: Path) -> _Reader:
    """Return the reader for a file, open."""
    if not path.is_file():  # a pipe, for example, which may never end
        raise DataError("is no file")
    with open_regular(path) as file:
        start = file.read(22)
    container = _CONTAINERS.get(start[:4])
    if container is None:
        raise DataError("is no sound that is read: expected WAV, FLAC or Ogg, which its first bytes do not say")
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the package is there, and libsndfile is not
        # The chunk with the form comes first in files of common recorders, at byte 12; its first number is the code.
        is_other_form = (
            container == "WAV" and start[12:16] == b"fmt " and int.from_bytes(start[20:22], "little") != _PCM
        )
        if is_other_form or container != "WAV":
            purpose = "reading WAV files that hold no integers" if is_other_form else f"reading {container} files"
            raise MissingCapability.package("soundfile", "audio", purpose) from error
        return _WaveReader(path)
    return _LibsndfileReader(path, soundfile)


def _check_header(header: SoundHeader) -> None:
    """Check what a header states before anything is allocated by it."""
    if not 1 <= header.channels <= _MOST_CHANNELS or not 1000 <= header.rate <= 1_000_000:
        raise DataError(f"has an impossible header: {header.channels} channels, {header.rate} Hz")
    if header.frames <= 0:
        raise DataError("is a sound file without samples; it was cut, or its recording was interrupted")
    if header.frames == _UNKNOWN_FRAMES:
        raise DataError("states no length in its header, as streamed recordings do; save it again as a whole file")
    most = min(MOST_FRAMES, _MOST_VALUES // header.channels)
    if header.frames > most:
        raise DataError(
            f"holds {header.frames / header.rate:.0f} s of {header.channels} channels at {header.rate} Hz, at most "
            f"{most // header.rate} s of them are read; cut it into several files"
        )


def _mean_of_channels(sound: _Reader) -> Iterator[np.ndarray]:
    """Yield the mean of the channels, block by block, each (time,) float32."""
    frames = 0
    while frames < sound.header.frames:
        block = sound.read(min(_BLOCK_FRAMES, sound.header.frames - frames))
        if not len(block):
            stated = sound.header.frames / sound.header.rate
            raise DataError(
                f"ends after {frames / sound.header.rate:.2f} s, its header states {stated:.2f} s; copy it again"
            )
        if not np.isfinite(block).all():
            raise DataError("holds NaN or infinity")
        frames += len(block)
        yield block.mean(axis=1)


def _resample(blocks: Iterator[np.ndarray], rate: int, to: int) -> Iterator[np.ndarray]:
    """Yield the signal of ``blocks`` at another rate; the blocks as they are where the rates are equal."""
    if rate == to:
        yield from blocks
        return
    try:
        import soxr
    except ImportError as error:
        purpose = f"resampling sounds from {rate} to {to} Hz"
        raise MissingCapability.package("soxr", "audio", purpose) from error
    stream: Any = soxr.ResampleStream(rate, to, 1, dtype="float32")
    for block in blocks:
        yield stream.resample_chunk(block)
    yield stream.resample_chunk(np.zeros(0, np.float32), last=True)
