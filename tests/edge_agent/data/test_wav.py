"""Sound files as log-mel energies, compared with scipy, the standard library and numbers worked out by hand."""

from __future__ import annotations

import struct
import wave

import numpy as np
import pytest

from edge_agent.data import load, split
from edge_agent.data.wav import WavOptions, log_mel, mel_bands, open_sound, resample
from edge_agent.errors import DataError
from edge_agent.task import ImageInput, WindowInput

RATE = 16000


def tone(hertz, seconds=1.0, rate=RATE, amplitude=0.5):
    return amplitude * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def riff(data, *, kind=1, channels=1, rate=RATE, bits=16, extra=b"", size=None):
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * block, block, bits) + extra
    chunks = b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def pcm16(signal):
    return np.round(signal * 32767).astype("<i2").tobytes()


def write(path, signal, rate=RATE):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(riff(pcm16(signal), rate=rate))


def test_the_mel_scale_has_its_known_values():
    """Mel(1000 Hz) is 1000; centers of 3 bands of 0..8000 Hz (2840.02 mel) lie at 710, 1420 and 2130 mel."""
    assert 2595 * np.log10(1 + 1000 / 700) == pytest.approx(1000, abs=0.02)
    bands = mel_bands(WavOptions(mels=3, low_hz=0, rate=RATE, frame_ms=1000))
    assert [int(band.argmax()) for band in bands] == [
        614,
        1768,
        3934,
    ]  # 614.4, 1768.0, 3933.6 by 700 (10^(mel/2595) - 1)
    assert bands.max() <= 1
    inside = slice(615, 3933)
    np.testing.assert_allclose(bands[:, inside].sum(axis=0), 1, rtol=1e-9)  # neighbours share what is between them


def test_energies_are_those_of_scipys_spectrogram(tmp_path):
    signal = pytest.importorskip("scipy.signal")
    sound = np.random.default_rng(0).normal(size=4000) * 0.1
    options = WavOptions()
    bands = mel_bands(options)
    power = signal.spectrogram(
        sound, RATE, window="hann", nperseg=400, noverlap=240, detrend=False, scaling="spectrum"
    )[2]
    # scipy's one-sided spectrum has mean square units: a sine of amplitude 1 is 1/2 there, and 1 here.
    expected = np.log(bands[:, 1:-1] @ power[1:-1] * 2)
    np.testing.assert_allclose(log_mel(sound, options, bands).T, expected, rtol=0.02, atol=0.02)


def test_a_sine_is_in_its_band():
    options = WavOptions()
    for hertz in (300, 1000, 4000):
        energies = log_mel(tone(hertz, amplitude=1.0), options, mel_bands(options))
        centers = 700 * (10 ** (np.linspace(*(2595 * np.log10(1 + np.array([20, 8000]) / 700)), 42)[1:-1] / 2595) - 1)
        assert abs(energies.mean(axis=0).argmax() - np.abs(centers - hertz).argmin()) <= 1
        assert -1 < energies.max() < 1
    assert (log_mel(np.zeros(1000), options, mel_bands(options)) == np.float32(np.log(1e-10))).all()


@pytest.mark.parametrize("rate", [44100, 48000, 22050, 32000])
def test_resampling_keeps_what_is_below_and_removes_what_is_above(rate):
    down = resample(tone(1000, rate=rate) + tone(5000, rate=rate), rate, RATE)
    expected = tone(1000) + tone(5000)
    middle = slice(200, -200)
    np.testing.assert_allclose(down[middle], expected[: len(down)][middle], atol=2e-3)
    assert abs(len(down) - RATE) <= 1
    if rate > 2 * 9500:
        assert np.abs(resample(tone(9500, rate=rate), rate, RATE)[middle]).max() < 1e-3


def test_samples_of_every_width_are_read(tmp_path):
    signal = tone(440, 0.01)
    with wave.open(str(tmp_path / "std.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(pcm16(signal))
    wide = np.round(signal * (2**31 - 1)).astype("<i4")
    files = {
        "std": (tmp_path / "std.wav").read_bytes(),
        "8": riff(np.round(signal * 127 + 128).astype(np.uint8).tobytes(), bits=8),
        "24": riff(wide.view(np.uint8).reshape(-1, 4)[:, 1:].tobytes(), bits=24),
        "32": riff(wide.tobytes(), bits=32),
        "float": riff(signal.astype("<f4").tobytes(), kind=3, bits=32),
        "double": riff(signal.astype("<f8").tobytes(), kind=3, bits=64),
        "extensible": riff(pcm16(signal), kind=0xFFFE, extra=struct.pack("<HHIH", 22, 16, 4, 1) + bytes(14)),
        "stereo": riff(np.stack([np.round(signal * 65534), np.zeros(160)], 1).astype("<i2").tobytes(), channels=2),
        "interrupted": riff(pcm16(signal), size=0xFFFFFFFF),
    }
    for name, content in files.items():
        (tmp_path / "x.wav").write_bytes(content)
        read = open_sound(tmp_path / "x.wav").samples(RATE)
        np.testing.assert_allclose(read, signal, atol=0.01 if name == "8" else 1e-4, err_msg=name)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "no WAV file"),
        (b"ID3\x03 not a wave file at all", "no WAV file"),
        (riff(b"")[:30], "without samples"),
        (riff(b""), "without samples"),
        (riff(pcm16(tone(100)), size=0), "without samples"),
        (riff(b"x" * 64, kind=0x55, bits=16), r"compressed or of a rare form \(85, 16 bits\)"),
        (riff(b"x" * 64, bits=12), "rare form"),
        (riff(b"x" * 64, channels=0), "impossible header"),
        (riff(b"x" * 64, rate=3), "impossible header"),
        (riff(pcm16(tone(100, rate=8000)), rate=8000), "recorded at 8000 Hz, below the 16000 Hz .* use rate=8000"),
        (riff(pcm16(tone(100, 0.02))), "has 320 samples at 16000 Hz, one frame needs 400"),
        (riff(pcm16(tone(100, 0.2))), "has 18 samples, one window needs 98"),
        (riff(np.full(99999, np.nan, "<f4").tobytes(), kind=3, bits=32), "NaN"),
    ],
)
def test_files_that_cannot_be_used_are_explained(tmp_path, content, words):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.wav").write_bytes(content)
    with pytest.raises(DataError, match=words):
        load(f"wav:{tmp_path}", WindowInput(channels=40, length=98))


def test_a_folder_of_sounds_becomes_windows_and_images(tmp_path):
    for number in range(4):
        write(tmp_path / "low" / f"{number}.wav", tone(300 + number, 1.5))
        write(tmp_path / "high" / f"{number}.wav", tone(3000 + number, 1.5, 44100), 44100)
    (tmp_path / "high" / "broken.wav").write_bytes(b"RIFF")
    spec = WindowInput(channels=40, length=50, stride=25)
    samples = load(f"wav:{tmp_path}", spec, strict=False)
    assert (samples.class_names, samples.inputs.shape[1:]) == (("high", "low"), (40, 50))
    assert samples.skipped == ("high/broken.wav: is no WAV file; expected RIFF and WAVE at its beginning",)
    loudest = samples.inputs.mean(axis=2).argmax(axis=1)
    assert loudest[samples.labels == 0].min() > loudest[samples.labels == 1].max()
    train, test = split(samples, 0.25, 0)
    assert not {*train.groups.tolist()} & {*test.groups.tolist()}
    assert {*test.labels.tolist()} == {0, 1}
    pictures = load(f"wav:{tmp_path}?form=image&seconds=0.5", strict=False)
    assert (pictures.input.shape, len(pictures)) == ((1, 40, 50), 24)  # three in each file
    shown = load(
        f"wav:{tmp_path / 'low' / '0.wav'}?form=image", ImageInput(channels=3, height=32, width=32), labelled=False
    )
    assert shown.inputs.shape == (1, 3, 32, 32)


def test_short_files_may_get_silence(tmp_path):
    write(tmp_path / "a" / "x.wav", tone(300, 0.3))
    with pytest.raises(DataError, match=r"is 0\.30 s long, an image needs 1 s; least_s=1 fills"):
        load(f"wav:{tmp_path}?form=image")
    assert len(load(f"wav:{tmp_path}?form=image&least_s=1")) == 1


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100])
def test_a_file_gives_one_image_for_each_full_second(tmp_path, rate):
    """The last frame of a second begins in it and ends behind it, where the file may have ended."""
    for seconds in (1, 2, 3.99):
        write(tmp_path / str(seconds) / "x.wav", tone(440, seconds, rate), rate)
    found = load(f"wav:{tmp_path}?form=image&rate={rate}")
    assert np.bincount(found.labels).tolist() == [1, 2, 3]
    assert found.inputs.shape[1:] == (1, 40, 100)
    assert found.names[3:] == tuple(f"3.99/x.wav {second} s" for second in range(3))
    windows = load(f"wav:{tmp_path}?rate={rate}", WindowInput(channels=40, length=50, stride=25))
    assert windows.names[:2] == ("1/x.wav 0 s", "1/x.wav 0.25 s")
    longer, first = found.inputs[found.labels == 1], found.inputs[found.labels == 0]
    np.testing.assert_allclose(longer[:1, :, :, :97], first[:, :, :, :97], atol=1e-5)  # silence reaches the last frames


@pytest.mark.parametrize(
    "options, words",
    [
        ("mels=400", "bands are narrower than the steps of 40 Hz"),
        ("high_hz=9000", r"from 20 to 9000 Hz, expected within 0\.\.8000"),
        ("low_hz=900&high_hz=800", "expected within"),
    ],
)
def test_impossible_bands_are_refused(tmp_path, options, words):
    write(tmp_path / "a" / "x.wav", tone(300))
    with pytest.raises(DataError, match=words):
        load(f"wav:{tmp_path}?{options}")
