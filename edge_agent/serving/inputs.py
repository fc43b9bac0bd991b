"""Decodes the bytes of a client into the input of an encoder: an image, an array, a table or a sound.

The bytes are untrusted. Their format is recognised by the first bytes, whatever the client calls it. Sizes are checked
before memory is allocated. What cannot be read raises an error that says what was expected.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.errors import ConfigError, DataError
from ..core.task import ImageInput, InputSpec, WindowInput
from ..data import npz, parse_source, preprocess, tables, wav
from ..data.images import decode_image
from ..data.wav import WavOptions

_NPY = b"\x93NUMPY"
"""How a .npy file begins."""

_SOUNDS = (b"RIFF", b"RF64", b"fLaC", b"OggS")
"""How sounds begin: WAV, WAV beyond 4 GB, FLAC and Ogg. WebP images begin with ``RIFF``, too."""

_TEXT_BYTES = 512
"""The first bytes that have to be text for an input to count as a table."""


@dataclass(frozen=True)
class Decoder:
    """Turns bytes into the prepared input of one task.

    Attributes:
        spec: The form of the task's inputs.
        sound: How sounds are converted to inputs; None: sounds are rejected, because a bundle does not say how.
        most_windows: The most windows that one recording may have.
    """

    spec: InputSpec
    sound: WavOptions | None = None
    most_windows: int = 1000

    def decode(self, raw: bytes) -> np.ndarray:
        """Return the prepared input (n, *shape) float32; n is 1 but for recordings of several windows.

        Raises:
            DataError: The bytes are empty, damaged, of an unknown format, or too large.
            MissingCapability: Reading them needs a package that is not installed.
        """
        if not raw:
            raise DataError(f"the body is empty; expected {self.expected}")
        if isinstance(self.spec, ImageInput):
            return self._image(raw, self.spec)
        return self._windows(raw, self.spec)

    @property
    def expected(self) -> str:
        """The formats that are accepted, for messages."""
        sound = ", or a sound (WAV, FLAC, Ogg)" if self.sound is not None else ""
        if isinstance(self.spec, ImageInput):
            return f"an image (JPEG, PNG, WebP …), or a .npy array (height, width, channels){sound}"
        shape = f"(time, {self.spec.channels})"
        return f"a recording as a .npy array {shape}, or a CSV table with names of columns in its first line{sound}"

    def _image(self, raw: bytes, spec: ImageInput) -> np.ndarray:
        """Return an image as the prepared input (n, channels, height, width) float32; n is 1 but for sounds."""
        return preprocess.normalise_images(self.pixels(raw).astype(np.float32), spec)

    def pixels(self, raw: bytes) -> np.ndarray:
        """Return an image as pixels (n, channels, height, width) of the task's size, 0..255, not yet normalised.

        n is 1; a sound may become several images. The dtype is uint8, or float32 if the array held fractions.

        Raises:
            DataError: As in `decode`; or the inputs of the task are not images.
        """
        spec = self.spec
        if not isinstance(spec, ImageInput):
            raise DataError("the encoder takes recordings, not images")
        if raw.startswith(_NPY):
            with _as_file(raw) as path:
                items = [npz.load_array(path)]
        elif raw.startswith(_SOUNDS[:2]) and raw[8:12] != b"WAVE":
            items = [decode_image(io.BytesIO(raw))]  # a WebP image begins like a WAV file
        elif raw.startswith(_SOUNDS):
            items = self._sound_items(raw)
        else:
            items = [decode_image(io.BytesIO(raw))]
        return np.stack([preprocess.image_pixels(item, spec) for item in items])

    def _windows(self, raw: bytes, spec: WindowInput) -> np.ndarray:
        """Return a recording as prepared windows (n, channels, length) float32, in time order."""
        if raw.startswith(_NPY):
            with _as_file(raw) as path:
                recording = npz.load_array(path)
        elif raw.startswith(_SOUNDS):
            [recording] = self._sound_items(raw)
        elif _is_text(raw):
            self._check_lines(raw, spec)
            recording = _table_recording(raw, spec)
        else:
            raise DataError(f"{len(raw)} bytes of an unknown format; expected {self.expected}")
        if recording.ndim != 2 or recording.shape[1] != spec.channels:
            raise DataError(f"has shape {recording.shape}, expected (time, {spec.channels}): {_columns_advice(spec)}")
        count = (len(recording) - spec.length) // spec.stride + 1
        if count > self.most_windows:
            raise DataError(
                f"has {len(recording)} samples, {count} windows; at most {self.most_windows} are answered at once: "
                "send it in parts"
            )
        return preprocess.normalise_windows(preprocess.cut(recording, spec), spec)

    def _check_lines(self, raw: bytes, spec: WindowInput) -> None:
        """Return quietly where a table has about as few lines as may be answered at once.

        Reading millions of them only to refuse them would hold up everybody else for seconds. Lines may be empty or
        broken within a cell, so that four of them count as one sample.

        Raises:
            DataError: There are more.
        """
        lines = max(raw.count(b"\n"), raw.count(b"\r"))
        most = spec.length + spec.stride * self.most_windows
        if lines > 4 * most:
            raise DataError(f"has {lines} lines; at most {most} samples are answered at once: send it in parts")

    def _sound_items(self, raw: bytes) -> list[np.ndarray]:
        """Return a sound as images, or as one recording (time, channels), depending on the options of sounds.

        Raises:
            DataError: The server has no options of sounds, or this one cannot be read.
        """
        if self.sound is None:
            raise DataError(
                "is a sound, and this server was started without --sound; restart it with --sound and the options of "
                "the data that the encoder was trained on, such as --sound 'rate=16000&form=image'"
            )
        with _as_file(raw) as path:
            source = wav.read(str(path), self.sound)
            return [np.asarray(item) for item in source.items]


def sound_options(text: str) -> WavOptions:
    """Parse the options of sounds, such as ``rate=16000&form=image``; see `edge_agent.data.wav`.

    Raises:
        ConfigError: An option is unknown or out of range; all of them are listed.
    """
    from ..core.config import parse

    _, _, options = parse_source(f"wav:sound?{text}") if text else ("", "", {})
    try:
        return parse(WavOptions, options, where="--sound")
    except ConfigError as error:
        raise ConfigError("--sound", error.mistakes) from error


def _table_recording(raw: bytes, spec: WindowInput) -> np.ndarray:
    """Return the recording (time, channels) in a table.

    Raises:
        DataError: The table has mistakes.
    """
    with _as_file(raw) as path:
        try:
            return tables.read_recording(path, has_options=False)
        except DataError as error:
            raise DataError(f"{error}; {_columns_advice(spec)}") from error


def _columns_advice(spec: WindowInput) -> str:
    """Return which columns a client has to send."""
    count = "column" if spec.channels == 1 else f"{spec.channels} columns"
    return f"send only the {count} of values that the encoder takes, in its order, without times and classes"


def _is_text(raw: bytes) -> bool:
    """Return whether the first bytes are text, as those of a table: without control characters."""
    start = raw[:_TEXT_BYTES]
    control_characters = start.translate(None, bytes(range(32, 256)) + b"\t\r\n")
    return not control_characters


@contextlib.contextmanager
def _as_file(raw: bytes) -> Iterator[Path]:
    """Yield the path of a temporary file with these bytes, for readers that take a path.

    On Linux the file is in memory only (memfd), so that inputs are never written to the disk.

    Raises:
        DataError: The reader has failed; the message names the input instead of the path, which the client does not
            know.
    """
    with contextlib.ExitStack() as stack:
        if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
            descriptor = os.memfd_create("input", os.MFD_CLOEXEC)
            stack.callback(os.close, descriptor)
            with open(descriptor, "wb", closefd=False) as in_memory:
                in_memory.write(raw)
            path = Path(f"/proc/self/fd/{descriptor}")
        else:
            file = stack.enter_context(tempfile.NamedTemporaryFile())
            file.write(raw)
            file.flush()
            path = Path(file.name)
        try:
            yield path
        except DataError as error:
            raise DataError(str(error).replace(str(path), "the input")) from error
