"""Bytes become inputs as files do, and what cannot be read says what was expected."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from serving_site import png, square

from edge_agent import data
from edge_agent.core.errors import ConfigError, DataError, HeadwaterError
from edge_agent.core.task import ImageInput, WindowInput
from edge_agent.serving.inputs import Decoder, sound_options

IMAGE = ImageInput(channels=3, height=8, width=8)
WINDOW = WindowInput(channels=2, length=10, stride=5, mean=(1.0,), std=(2.0,))


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def sound(seconds=0.5, rate=16000):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        times = np.arange(int(seconds * rate)) / rate
        file.writeframes((np.sin(times * 2764.6) * 20000).astype("<i2").tobytes())
    return buffer.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_an_image_becomes_what_its_file_becomes(tmp_path, form):
    raw = png(square("green", size=30), form)
    path = tmp_path / f"picture.{form.lower()}"
    path.write_bytes(raw)
    assert (Decoder(IMAGE).decode(raw) == data.from_files([str(path)], IMAGE).inputs).all()


def test_an_array_is_an_image():
    pixels = square("red", size=8)
    assert (Decoder(IMAGE).decode(npy(pixels)) == Decoder(IMAGE).decode(png(pixels))).all()


def test_a_recording_becomes_its_windows(tmp_path):
    recording = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
    windows = Decoder(WINDOW).decode(npy(recording))
    by_hand = np.stack([(recording[start : start + 10].T - 1) / 2 for start in (0, 5, 10, 15, 20)])
    assert np.allclose(windows, by_hand)
    path = tmp_path / "recording.csv"
    text = "x,y\n" + "\n".join(f"{float(x)!r},{float(y)!r}" for x, y in recording) + "\n"
    path.write_text(text)
    assert (Decoder(WINDOW).decode(text.encode()) == data.from_files([str(path)], WINDOW).inputs).all()


def test_a_sound_becomes_what_the_data_source_makes_of_it(tmp_path):
    path = tmp_path / "tone.wav"
    path.write_bytes(sound())
    spec = WindowInput(channels=20, length=30, stride=15)
    options = "rate=16000&mels=20"
    found = Decoder(spec, sound_options(options)).decode(path.read_bytes())
    expected = data.load(f"wav:{path}?{options}", spec, labelled=False).inputs
    assert (found == expected).all()


def test_a_sound_is_a_picture_where_the_encoder_takes_pictures():
    spec = ImageInput(channels=1, height=32, width=32)
    found = Decoder(spec, sound_options("form=image&mels=32&seconds=0.25")).decode(sound())
    assert found.shape == (2, 1, 32, 32)


def test_a_sound_is_rejected_without_options_of_sounds():
    with pytest.raises(DataError, match="restart it with --sound"):
        Decoder(WINDOW).decode(sound())


def test_impossible_sound_options_are_all_named():
    with pytest.raises(ConfigError) as error:
        sound_options("rate=5&melz=3")
    assert "rate" in str(error.value)
    assert "did you mean 'mels'" in str(error.value)


def header_of(shape):
    """A .npy file that promises more than it holds."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + b"\0" * 16


@pytest.mark.parametrize(
    "raw, spec, says",
    [
        (b"", IMAGE, "the body is empty; expected an image"),
        (b"nonsense", IMAGE, "its form is not known"),
        (png(square("red", size=30))[:200], IMAGE, "cannot be read as an image"),
        (npy(np.zeros((8, 8, 5), np.uint8)), IMAGE, "image of shape"),
        (npy(np.full((8, 8), 300)), IMAGE, "with values 300..300"),
        (header_of("(100000, 100000, 3)"), IMAGE, "its header promises 120000000000 bytes"),
        (npy(np.array([{}], object)), IMAGE, "no objects"),
        (b"\x00\x01\x02", WINDOW, "expected a recording as a .npy array (time, 2)"),
        (b"x,y\n1,two\n", WINDOW, "two"),
        (b"x,y,z\n" + b"1,2,3\n" * 20, WINDOW, "expected (time, 2)"),
        (npy(np.zeros((5, 2))), WINDOW, "has 5 samples, one window needs 10"),
        (npy(np.full((20, 2), np.nan)), WINDOW, "NaN"),
        (npy(np.zeros((20_000, 2))), WINDOW, "at most 1000 are answered at once"),
    ],
)
def test_what_cannot_be_read_says_why(raw, spec, says):
    with pytest.raises(DataError) as error:
        Decoder(spec).decode(raw)
    assert says in str(error.value)


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded():
    # A PNG whose header says 60,000 times 60,000, and that holds a single line.
    import zlib

    def chunk(kind, content):
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    raw = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )
    with pytest.raises(DataError, match="too large to be decoded"):
        Decoder(IMAGE).decode(raw)


@hypothesis_settings(max_examples=60)
@given(
    start=st.sampled_from([b"", b"\x93NUMPY\x01\x00", b"RIFF", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"x,y\n1,2\n"]),
    rest=st.binary(max_size=300),
    spec=st.sampled_from([IMAGE, WINDOW]),
)
def test_any_bytes_give_inputs_or_an_error_of_ours(start, rest, spec):
    try:
        inputs = Decoder(spec, sound_options("mels=2")).decode(start + rest)
    except HeadwaterError:
        return
    assert inputs.shape[1:] == spec.shape
    assert inputs.dtype == np.float32


def test_a_table_of_too_many_lines_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr("edge_agent.data.tables.read_recording", lambda _: pytest.fail("it was read"))
    with pytest.raises(DataError, match="has 40001 lines; at most 5010 samples are answered at once"):
        Decoder(WINDOW).decode(b"x,y\n" + b"a,b\n" * 40_000)


def test_a_message_about_a_table_names_no_path_of_this_machine():
    with pytest.raises(DataError, match=r"csv: 'the input': .*first 'a' in line 2") as refused:
        Decoder(WINDOW).decode(b"x,y\na,b\n")
    assert "/proc" not in str(refused.value)


@pytest.mark.parametrize(
    "raw, says",
    [
        (b"x,y,label\n" + b"1,2,walk\n" * 20, "column 'label': 20 cells are no number, first 'walk' in line 2"),
        (b"x,y,t\n" + b"1,2,3\n" * 20, r"has shape \(20, 3\), expected \(time, 2\)"),
        (b"x,y\n" + b"1,\n" * 20, "column 'y': 20 values are missing"),
    ],
    ids=["a class", "the time", "a gap"],
)
def test_a_message_about_a_table_says_what_a_client_can_do(raw, says):
    with pytest.raises(DataError, match=says) as refused:
        Decoder(WINDOW).decode(raw)
    assert "send only the 2 columns of values that the encoder takes, in its order" in str(refused.value)
    for option in ("--data", "columns=", "label=", "gaps="):
        assert option not in str(refused.value)
