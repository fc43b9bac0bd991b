"""Sound files as log-mel energies, compared with scipy, the standard library and numbers worked out by hand."""

from __future__ import annotations

import os
import struct
import sys
import tracemalloc
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile

from edge_agent.core.errors import DataError, MissingCapability
from edge_agent.core.task import ImageInput, WindowInput
from edge_agent.data import _sound_files, load, split
from edge_agent.data._sound_files import read_header, read_signal
from edge_agent.data.wav import WavOptions, log_mel, mel_bands

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


@pytest.fixture
def without_extra(monkeypatch):
    """As where the extra 'audio' is not installed."""
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setitem(sys.modules, "soxr", None)


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
def test_resampling_keeps_what_is_below_and_removes_what_is_above(tmp_path, rate):
    path = tmp_path / "a" / "x.wav"
    write(path, (tone(1000, rate=rate) + tone(5000, rate=rate)) / 2, rate)
    down = read_signal(path, RATE)
    expected = (tone(1000) + tone(5000)) / 2
    middle = slice(200, -200)
    np.testing.assert_allclose(down[middle], expected[middle], atol=1e-3)
    assert len(down) == RATE
    if rate > 2 * 9500:
        write(path, tone(9500, rate=rate), rate)
        assert np.abs(read_signal(path, RATE)[middle]).max() < 1e-3


def test_resampling_a_sound_calls_the_resampler_once_for_each_block(tmp_path, monkeypatch):
    """A sound of 0.7 s took 320 calls of three NumPy functions; it is one block, and the end."""
    import soxr

    calls = []

    class Counted(soxr.ResampleStream):
        def resample_chunk(self, block, last=False):
            calls.append(len(block))
            return super().resample_chunk(block, last=last)

    monkeypatch.setattr(soxr, "ResampleStream", Counted)
    write(tmp_path / "x.wav", tone(440, 0.7, 44100), 44100)
    assert len(read_signal(tmp_path / "x.wav", RATE)) == 11_200
    assert calls == [30870, 0]


def widths(tmp_path, signal):
    """The same signal as files of every form, name -> bytes; those without a float in their name hold integers."""
    with wave.open(str(tmp_path / "std.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(pcm16(signal))
    wide = np.round(signal * (2**31 - 1)).astype("<i4")
    return {
        "std": (tmp_path / "std.wav").read_bytes(),
        "8": riff(np.round(signal * 127 + 128).astype(np.uint8).tobytes(), bits=8),
        "24": riff(wide.view(np.uint8).reshape(-1, 4)[:, 1:].tobytes(), bits=24),
        "32": riff(wide.tobytes(), bits=32),
        "float": riff(signal.astype("<f4").tobytes(), kind=3, bits=32),
        "double float": riff(signal.astype("<f8").tobytes(), kind=3, bits=64),
        "extensible, as a float": riff(
            pcm16(signal), kind=0xFFFE, extra=struct.pack("<HHIH", 22, 16, 4, 1) + SUBFORMAT
        ),
        "stereo": riff(np.stack([np.round(signal * 65534), np.zeros(160)], 1).astype("<i2").tobytes(), channels=2),
        "interrupted": riff(pcm16(signal), size=0xFFFFFFFF),
        "cut": riff(pcm16(signal), size=2 * 160 + 20),
    }


SUBFORMAT = bytes.fromhex("000000001000800000aa00389b71")
"""What follows the code of a form in an extensible header: the rest of Microsoft's identifier."""


def test_samples_of_every_width_are_read(tmp_path):
    signal = tone(440, 0.01)
    for name, content in widths(tmp_path, signal).items():
        (tmp_path / "x.wav").write_bytes(content)
        read = read_signal(tmp_path / "x.wav", RATE)
        np.testing.assert_allclose(read, signal, atol=0.01 if name == "8" else 1e-4, err_msg=name)


def test_wav_files_of_integers_are_read_without_the_extra_and_have_the_same_values(tmp_path, monkeypatch):
    signal = tone(440, 0.01)
    for name, content in widths(tmp_path, signal).items():
        path = tmp_path / "x.wav"
        path.write_bytes(content if "LIST" in name else content.replace(b"LIST" + struct.pack("<I", 3) + b"abc\0", b""))
        expected = read_signal(path, RATE)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "soundfile", None)
            if "float" in name:
                with pytest.raises(MissingCapability, match=r"hold no integers needs 'soundfile'.*\[audio\]'"):
                    read_signal(path, RATE)
                continue
            found = read_signal(path, RATE)
        assert found.tobytes() == expected.tobytes(), name


def test_what_needs_the_extra_says_so(tmp_path, without_extra):
    for suffix in ("flac", "ogg"):
        path = tmp_path / f"x.{suffix}"
        path.write_bytes({"flac": b"fLaC", "ogg": b"OggS"}[suffix] + bytes(40))
        with pytest.raises(MissingCapability, match=r"'soundfile', which is not installed.*\[audio\]'"):
            read_header(path)
    write(tmp_path / "a" / "x.wav", tone(440, rate=44100), 44100)
    with pytest.raises(MissingCapability, match=r"from 44100 to 16000 Hz needs 'soxr'.*\[audio\]'") as failed:
        load(f"wav:{tmp_path}", WindowInput(channels=40, length=50), strict=False)
    assert failed.value.exit_code == 5


def test_flac_and_ogg_are_read_beside_wav(tmp_path):
    (tmp_path / "tone").mkdir()
    for name in ("a.flac", "b.ogg", "c.wav"):
        soundfile.write(tmp_path / "tone" / name, tone(1000, 2, 44100), 44100)
    samples = load(f"wav:{tmp_path}?form=image")
    assert samples.names == tuple(
        f"tone/{name} {second} s" for name in ("a.flac", "b.ogg", "c.wav") for second in (0, 1)
    )
    flac, ogg, wav = samples.inputs[::2]
    np.testing.assert_allclose(flac, wav, atol=1e-3)  # both hold 16 bits
    loudest = wav[0].mean(axis=1).argmax()
    assert ogg[0].mean(axis=1).argmax() == loudest


def flac_of(seconds, stated_frames=None):
    """A FLAC file; ``stated_frames`` replaces the last 36 of the 64 bits at byte 18, the length in its header."""
    import io

    file = io.BytesIO()
    soundfile.write(file, tone(440, seconds), RATE, format="FLAC")
    content = bytearray(file.getvalue())
    if stated_frames is not None:
        packed = int.from_bytes(content[18:26], "big")
        content[18:26] = (packed >> 36 << 36 | stated_frames).to_bytes(8, "big")
    return bytes(content)


def ogg_of(seconds):
    import io

    file = io.BytesIO()
    soundfile.write(file, tone(440, seconds), RATE, format="OGG")
    return file.getvalue()


@pytest.mark.parametrize(
    "suffix, make, words",
    [
        (
            "flac",
            lambda: flac_of(1, (1 << 36) - 1),
            r"holds 4294967 s of 1 channels at 16000 Hz, at most 4194 s .* cut it",
        ),
        ("flac", lambda: flac_of(1, 0), "states no length in its header"),
        ("flac", lambda: flac_of(3)[:9000], "is damaged, cut or of a rare form"),
        ("flac", lambda: flac_of(3)[:60], "is damaged, cut or of a rare form"),
        ("ogg", lambda: ogg_of(3)[:3000], "is damaged, cut or of a rare form"),
        ("ogg", lambda: b"OggS" + bytes(range(256)) * 9, "is damaged, cut or of a rare form"),
        ("wav", lambda: riff(b"x" * 64, channels=1000), "impossible header: 1000 channels|rare form"),
    ],
)
def test_hostile_sounds_are_refused_before_they_take_memory(tmp_path, suffix, make, words):
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(make())
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=words):
            read_signal(path, RATE)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_a_small_file_of_hours_of_silence_is_not_decoded(tmp_path, monkeypatch):
    """Nothing of 4.5 hours of silence is read, also not to count the images that they would give."""
    path = tmp_path / "silence" / "bomb.flac"  # which is written ten times as fast as Vorbis
    path.parent.mkdir()
    with soundfile.SoundFile(path, "w", 8000, 1, format="FLAC") as file:
        minute = np.zeros(8000 * 60, np.float32)
        for _ in range(270):
            file.write(minute)
    decoded = []
    read = _sound_files._LibsndfileReader.read
    monkeypatch.setattr(
        _sound_files._LibsndfileReader, "read", lambda self, frames: decoded.append(frames) or read(self, frames)
    )
    with pytest.raises(DataError, match=r"holds 16200 s of 1 channels at 8000 Hz, at most 8388 s"):
        load(f"wav:{tmp_path}?form=image&rate=8000")
    assert decoded == []


def test_a_sound_longer_than_a_block_is_that_of_one_piece(tmp_path, monkeypatch):
    write(tmp_path / "x.wav", tone(440, 3, 44100), 44100)
    whole = read_signal(tmp_path / "x.wav", RATE)
    monkeypatch.setattr(_sound_files, "_BLOCK_FRAMES", 1000)
    np.testing.assert_allclose(read_signal(tmp_path / "x.wav", RATE), whole, atol=1e-6)


def test_a_pipe_is_no_sound(tmp_path):
    import os

    os.mkfifo(tmp_path / "x.wav")
    with pytest.raises(DataError, match="is no file"):
        read_header(tmp_path / "x.wav")


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "expected WAV, FLAC or Ogg"),
        (b"ID3\x03 not a wave file at all", "expected WAV, FLAC or Ogg"),
        (riff(b"")[:30], "rare form"),
        (riff(b""), "without samples"),
        (riff(pcm16(tone(100)), size=0), "without samples"),
        (riff(b"x" * 64, kind=0x56, bits=16), "rare form"),
        (riff(b"x" * 64, channels=0), r"rare form \(Channel count is zero\)"),
        (riff(b"x" * 64, rate=3), "impossible header"),
        (riff(pcm16(tone(100, rate=8000)), rate=8000), "recorded at 8000 Hz, below the 16000 Hz .* use rate=8000"),
        (
            riff(pcm16(tone(100, 0.02))),
            r"has 320 samples at 16000 Hz, one frame needs 400; .* least_s, .* from 0 to 0\.03 s: wav:…\?least_s=0\.03",
        ),
        (
            riff(pcm16(tone(100, 0.2))),
            r"has 18 samples, one window needs 98; .* least_s, .* from 0 to 1 s: wav:…\?least_s=1",
        ),
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
    assert [item.name for item in samples.skipped] == ["high/broken.wav"]
    assert samples.skipped[0].reason.startswith("is damaged, cut or of a rare form (")
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
    with pytest.raises(DataError, match=r"is 0\.30 s long, an image needs 1 s; .* from 0 to 1 s: wav:…\?least_s=1"):
        load(f"wav:{tmp_path}?form=image")
    with pytest.raises(DataError, match=r"from 0\.5 to 1 s"):
        load(f"wav:{tmp_path}?form=image&least_s=0.5")
    assert len(load(f"wav:{tmp_path}?form=image&least_s=1")) == 1
    windows = WindowInput(channels=40, length=98, stride=98)
    with pytest.raises(DataError, match=r"has 28 samples, one window needs 98; .* from 0 to 1 s: wav:…\?least_s=1"):
        load(f"wav:{tmp_path}", windows)
    assert len(load(f"wav:{tmp_path}?least_s=1", windows)) == 1


def test_reading_reports_how_many_files_are_done(tmp_path):
    for number in range(3):
        write(tmp_path / "a" / f"{number}.wav", tone(300))
    (tmp_path / "a" / "broken.wav").write_bytes(b"RIFF")
    reports = []
    load(
        f"wav:{tmp_path}",
        WindowInput(channels=40, length=50),
        strict=False,
        progress=lambda done, total: reports.append((done, total)),
    )
    assert reports == [(1, 4), (2, 4), (3, 4), (4, 4)]


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
    longer = found.inputs[found.labels == 1]
    first = found.inputs[found.labels == 0]
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


def test_file_whose_name_is_no_utf_8_is_read(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.wav"))
    soundfile.write(tmp_path / "good.wav", np.zeros(1600), 16000)
    (tmp_path / "good.wav").rename(path)
    assert len(read_signal(path, 16000)) == 1600


def test_a_signal_is_the_sound_itself_cut_into_windows(tmp_path):
    """0.25 s at 16 kHz are 4,000 samples: windows of 1,600 with a step of 800 begin at 0, 800, 1,600 and 2,400."""
    signals = {"low": tone(100, 0.25), "high": tone(3000, 0.25)}
    for name, signal in signals.items():
        write(tmp_path / name / "a.wav", signal)
    spec = WindowInput(channels=1, length=1600, stride=800)
    samples = load(f"wav:{tmp_path}?form=signal", spec)
    assert samples.inputs.shape == (8, 1, 1600)
    assert samples.class_names == ("high", "low")
    low = samples.inputs[samples.labels == 1]
    expected = [signals["low"][begin : begin + 1600] for begin in (0, 800, 1600, 2400)]
    assert np.allclose(low[:, 0], expected, atol=1e-4)


def test_a_signal_that_is_too_short_says_how_much_silence_helps(tmp_path):
    write(tmp_path / "low" / "a.wav", tone(100, 0.05))
    spec = WindowInput(channels=1, length=1600, stride=800)
    with pytest.raises(DataError, match=r"wav:…\?least_s=0\.1"):
        load(f"wav:{tmp_path}?form=signal", spec, strict=True)
    assert load(f"wav:{tmp_path}?form=signal&least_s=0.1", spec).inputs.shape == (1, 1, 1600)
