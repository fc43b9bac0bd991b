"""Windows of signals that formulas make, and an encoder that learns to tell their formulas apart.

A *programme* is one signal with all its parameters: a kind of `KINDS`, often with a second one mixed in. Two *views* of
a programme differ in what a device's recordings of one class differ in: when it begins, how fast it goes, noise, drift,
gaps, and a little in level and scale. The encoder learns which two of many views are of the same programme (contrastive
learning, InfoNCE), among programmes of three kinds at a time, so that it has to look at their parameters. No recording
of any sensor is among them.

Every signal is made alone, and the encoder takes the channels of a window one by one, so that one set of weights serves
windows of any number of channels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

Signals = NDArray[np.float64]
"""Two views of each of n programmes, (n, 2, length)."""

BATCH = 256
"""Programmes in one step."""

LENGTHS = (64, 96, 128, 128, 192)
"""The lengths of windows that steps draw from."""

STEP_SIZE = 2e-3
WARM_UP = 100
TEMPERATURE = 0.1
_SHARE_OF_KINDS = 0.1
_DECAY = 0.998
_KINDS_AT_ONCE = 3
_LEVELS = 8
_PLACES = 4
_WIDTHS = (32, 64, 128)
_PLACE_CHANNELS = 8


def _log_uniform(rng: np.random.Generator, least: float, most: float, size: int | tuple[int, ...]) -> Signals:
    """Return numbers between ``least`` and ``most`` whose logarithms are uniform."""
    return np.exp(rng.uniform(np.log(least), np.log(most), size))


def _times(rng: np.random.Generator, count: int, length: int, shift: float = 0.05) -> Signals:
    """Return the times of the samples of each view, about 0 to 1: each begins, runs and is warped in its own way."""
    even = np.linspace(0, 1, length)[None, None]
    speed = np.exp(rng.normal(0, 0.08, (count, 2, 1)))
    depth = rng.normal(0, 0.02, (count, 2, 1))
    warp = depth * np.sin(2 * np.pi * (even + rng.random((count, 2, 1))))
    return 0.5 + (even - 0.5) * speed + rng.normal(0, shift, (count, 2, 1)) + warp


def _coloured_noise(
    rng: np.random.Generator, length: int, slope: np.ndarray, least: np.ndarray, most: np.ndarray
) -> Signals:
    """Return noise of unit variance, other in each view.

    Its amplitude falls as a power ``slope`` (n,) of the frequency, between ``least`` and ``most`` (n,) cycles a window.
    """
    cycles = np.maximum(np.fft.rfftfreq(2 * length, 1 / (2 * length)) / 2, 0.25)[None]
    low_cut = 1 + (least[:, None] / cycles) ** 4
    high_cut = 1 + (cycles / most[:, None]) ** 4
    amplitudes = cycles ** (-slope[:, None]) / low_cut / high_cut
    shape = (len(slope), 2, cycles.shape[1])
    real = rng.normal(size=shape)
    imaginary = rng.normal(size=shape)
    noise = np.fft.irfft(amplitudes[:, None] * (real + 1j * imaginary), 2 * length, axis=2)[:, :, :length]
    return noise / (noise.std(axis=2, keepdims=True) + 1e-9)


def _spline(knots: np.ndarray, at: Signals) -> Signals:
    """Return the values at times ``at``, 0..1, of cubic splines through ``knots`` (n, k); ends are held."""
    count, number = knots.shape
    place = np.clip(at, 0, 1) * (number - 1)
    left = np.minimum(place.astype(int), number - 2)
    part = place - left
    rows = np.arange(count)[:, None, None]
    before = knots[rows, np.maximum(left - 1, 0)]
    begin = knots[rows, left]
    end = knots[rows, left + 1]
    after = knots[rows, np.minimum(left + 2, number - 1)]
    third = 3 * (begin - end) + after - before
    second = 2 * before - 5 * begin + 4 * end - after
    return begin + 0.5 * part * (end - before + part * (second + part * third))


def _harmonics(rng: np.random.Generator, count: int, length: int) -> Signals:
    """Return sums of up to eight harmonics."""
    times = _times(rng, count, length, shift=1.0)
    lowest = _log_uniform(rng, 1, 24, (count, 1, 1))
    numbers = np.arange(1, 9)
    amplitudes = rng.normal(size=(count, 8)) * numbers[None] ** (-rng.uniform(0, 2, (count, 1)))
    amplitudes *= rng.random((count, 8)) < 0.7
    amplitudes[:, 0] += 0.1
    phases = rng.uniform(0, 2 * np.pi, (count, 8))
    signals = np.zeros((count, 2, length))
    for row, number in enumerate(numbers):
        is_heard = number * lowest < length / 2.5
        wave = np.sin(2 * np.pi * number * lowest * times + phases[:, row, None, None])
        signals += is_heard * amplitudes[:, row, None, None] * wave
    return signals


def _chirp(rng: np.random.Generator, count: int, length: int) -> Signals:
    """Return tones that go from one frequency to another, some louder at their ends."""
    times = _times(rng, count, length)
    first = _log_uniform(rng, 1, 30, (count, 1, 1))
    last = _log_uniform(rng, 1, 30, (count, 1, 1))
    phases = rng.uniform(0, 2 * np.pi, (count, 2, 1))
    tone = np.sin(2 * np.pi * (first * times + (last - first) * times * times / 2) + phases)
    quietest = rng.random((count, 1, 1))
    return tone * (0.3 + np.abs(times - quietest)) ** rng.integers(0, 2, (count, 1, 1))


def _noise(rng: np.random.Generator, count: int, length: int) -> Signals:
    """Return noise in bands."""
    least = _log_uniform(rng, 0.3, 20, count)
    most = np.minimum(least * _log_uniform(rng, 1.2, 30, count), length)
    return _coloured_noise(rng, length, rng.uniform(-0.5, 2.0, count), least, most)


def _impacts(rng: np.random.Generator, count: int, length: int) -> Signals:
    """Return trains of impacts that ring and decay."""
    rate = _log_uniform(rng, 1, 16, count)
    decay = _log_uniform(rng, 0.01, 0.3, count)
    ring = _log_uniform(rng, 2, 40, count)
    jitter = rng.uniform(0, 0.5, count)
    phase = rng.uniform(0, 2 * np.pi, count) * rng.integers(0, 2, count)
    alternates = rng.integers(0, 2, count)
    after = np.linspace(0, 1, length)[None]
    answer = np.exp(-after / decay[:, None]) * np.cos(2 * np.pi * ring[:, None] * after + phase[:, None])
    # Impacts begin one window early, so that the kept window has those that began before it.
    number = np.arange(40)
    begin = rng.random((count, 2, 1))
    wobble = rng.normal(size=(count, 2, 40)) * jitter[:, None, None]
    speed = np.exp(rng.normal(0, 0.1, (count, 2, 1)))
    places = (number[None, None] + begin + wobble) * (length / rate)[:, None, None] * speed
    signs = np.where(alternates[:, None, None] & (number % 2)[None, None], -1, 1)
    heights = np.exp(rng.normal(0, 0.3, (count, 2, 40))) * signs
    is_inside = (places >= 0) & (places < 2 * length - 1)
    row, view, _ = np.nonzero(is_inside)
    impacts = np.zeros((count, 2, 2 * length))
    np.add.at(impacts, (row, view, places[is_inside].astype(int)), heights[is_inside])
    spectrum = np.fft.rfft(impacts, 4 * length) * np.fft.rfft(answer, 4 * length)[:, None]
    return np.fft.irfft(spectrum, 4 * length)[:, :, length : 2 * length]


def _gesture(rng: np.random.Generator, count: int, length: int) -> Signals:
    """Return sums of splines of coarse to fine knots; half of them rest before and after."""
    times = _times(rng, count, length, shift=0.04)
    signals = np.zeros((count, 2, length))
    for knots in (4, 7, 12, 20):
        heights = rng.normal(size=(count, knots))
        signals += _spline(heights * rng.random((count, 1)) ** 2, times)
    rests = rng.random((count, 1)) < 0.5
    middle = rng.uniform(0.3, 0.7, (count, 1, 1))
    width = rng.uniform(0.15, 0.5, (count, 1, 1))
    return np.where(rests[:, :, None], signals * np.exp(-(((times - middle) / width) ** 4)), signals)


def _chaos(rng: np.random.Generator, count: int, length: int) -> Signals:
    """Return orbits of the logistic, the tent, the Hénon and the circle map, each value held for some samples."""
    kind = rng.integers(0, 4, count)[:, None]
    growth = rng.uniform(3.5, 4.0, count)[:, None]
    slope = rng.uniform(1.2, 1.999, count)[:, None]
    bend = rng.uniform(1.2, 1.4, count)[:, None]
    hold = rng.integers(1, 7, count)
    value = rng.uniform(0.1, 0.9, (count, 2))
    henon = rng.uniform(0, 0.3, (count, 2))
    memory = np.zeros((count, 2))
    orbits = np.zeros((count, 2, length))
    settled = 30
    for step in range(length + settled):
        following = 1 - bend * henon**2 + memory
        memory = 0.3 * henon
        # Some orbits of the Hénon map escape; they begin again.
        henon = np.where(np.abs(following) > 2, 0.1, following)
        logistic = growth * value * (1 - value)
        tent = slope * np.minimum(value, 1 - value)
        circle = (value + 0.3 + (growth - 3.5) * np.sin(2 * np.pi * value)) % 1
        value = np.clip(np.choose(kind, [logistic, tent, value, circle]), 0, 1)
        if step >= settled:
            orbits[:, :, step - settled] = np.where(kind == 2, henon, value)
    held = np.arange(length)[None] // hold[:, None]
    return np.take_along_axis(orbits, np.repeat(held[:, None], 2, 1), 2)


def _steps(rng: np.random.Generator, count: int, length: int) -> Signals:
    """Return levels that jump at random and settle after each jump."""
    rate = _log_uniform(rng, 1, 20, (count, 1, 1))
    levels = rng.integers(2, 6, (count, 1, 1))
    number = np.cumsum(rng.random((count, 2, length)) < rate / length, 2)
    drawn = rng.integers(0, 1000, (count, 2, length + 1))
    heights = (np.take_along_axis(drawn, number, 2) % levels).astype(float)
    settling = np.exp(-np.arange(32)[None] / _log_uniform(rng, 0.5, 8, (count,))[:, None])
    settling /= settling.sum(1, keepdims=True)
    size = 2 * length + 64
    spectrum = np.fft.rfft(heights - heights.mean(2, keepdims=True), size) * np.fft.rfft(settling, size)[:, None]
    return np.fft.irfft(spectrum, size)[:, :, :length]


def _bursts(rng: np.random.Generator, count: int, length: int) -> Signals:
    """Return noise or a tone that swells up to three times."""
    times = _times(rng, count, length)
    noise = _noise(rng, count, length)
    loudness = np.zeros_like(noise)
    for _ in range(3):
        middle = rng.random((count, 1, 1))
        width = _log_uniform(rng, 0.03, 0.3, (count, 1, 1))
        loudness += rng.random((count, 1, 1)) ** 2 * np.exp(-(((times - middle) / width) ** 2))
    frequency = _log_uniform(rng, 3, 30, (count, 1, 1))
    tone = np.sin(2 * np.pi * (frequency * times) + rng.uniform(0, 2 * np.pi, (count, 2, 1)))
    return np.where(rng.random((count, 1, 1)) < 0.5, noise, tone) * loudness


def _modulated(rng: np.random.Generator, count: int, length: int) -> Signals:
    """Return tones whose loudness, and half of them whose frequency, swings."""
    times = _times(rng, count, length, shift=1.0)
    carrier = _log_uniform(rng, 4, 32, (count, 1, 1))
    swing = _log_uniform(rng, 0.5, 6, (count, 1, 1))
    depth = rng.uniform(0, 1, (count, 1, 1))
    bend = rng.uniform(0, 3, (count, 1, 1)) * rng.integers(0, 2, (count, 1, 1))
    loudness = 1 + depth * np.sin(2 * np.pi * swing * times)
    return loudness * np.sin(2 * np.pi * carrier * times + bend * np.sin(2 * np.pi * swing * times))


def _pieces(rng: np.random.Generator, count: int, length: int) -> Signals:
    """Return harmonics that turn into noise at another level, or noise into them."""
    times = _times(rng, count, length)
    noise = _noise(rng, count, length)
    tones = _harmonics(rng, count, length)
    tones = tones / (tones.std(2, keepdims=True) + 1e-9)
    turn = rng.uniform(0.2, 0.8, (count, 1, 1))
    speed = _log_uniform(rng, 10, 100, (count, 1, 1)) * rng.choice([-1, 1], (count, 1, 1))
    share = 1 / (1 + np.exp(-(times - turn) * speed))
    loudness = rng.uniform(0.1, 1, (count, 1, 1))
    level = rng.normal(0, 1, (count, 1, 1))
    return noise * share * loudness + tones * (1 - share) + level * share


def _walk(rng: np.random.Generator, count: int, length: int) -> Signals:
    """Return random walks, rough to smooth."""
    slope = rng.uniform(1, 3, count)
    return _coloured_noise(rng, length, slope, np.full(count, 0.2), _log_uniform(rng, 2, 60, count))


def _pulse(rng: np.random.Generator, count: int, length: int) -> Signals:
    """Return one period, a spline, repeated: signals like those of a heart or of steps."""
    times = _times(rng, count, length, shift=1.0)
    frequency = _log_uniform(rng, 1, 14, (count, 1, 1))
    heights = rng.normal(size=(count, 10))
    heights = heights * (rng.random((count, 10)) < 0.5)
    return _spline(np.concatenate([heights, heights[:, :1]], 1), (frequency * times) % 1.0)


KINDS: tuple[Callable[[np.random.Generator, int, int], Signals], ...] = (
    _harmonics,
    _chirp,
    _noise,
    _impacts,
    _gesture,
    _chaos,
    _steps,
    _bursts,
    _modulated,
    _pieces,
    _walk,
    _pulse,
)
"""The makers of signals; each gets a generator, the number of programmes, and the length of a window."""


def _unit(signals: Signals) -> Signals:
    """Return signals of mean 0 and variance 1."""
    centred = signals - signals.mean(2, keepdims=True)
    return centred / (np.sqrt((centred**2).mean(2, keepdims=True)) + 1e-6)


def draw_views(rng: np.random.Generator, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two views of ``count`` new programmes, (count, 2, length) float32, and their kinds (count,)."""
    # 1. A programme is of one kind; three fifths of them have some of another one as well.
    at_once = rng.choice(len(KINDS), _KINDS_AT_ONCE, replace=False)
    kinds = at_once[rng.integers(0, _KINDS_AT_ONCE, count)]
    second_kinds = rng.integers(0, len(KINDS), count)
    is_mixed = rng.random(count) < 0.6
    shares = np.where(is_mixed, rng.uniform(0.1, 0.7, count), 0)
    signals = np.zeros((count, 2, length))
    for number, make in enumerate(KINDS):
        rows = np.flatnonzero(kinds == number)
        if len(rows):
            signals[rows] += _unit(make(rng, len(rows), length))
        rows = np.flatnonzero((second_kinds == number) & (shares > 0))
        if len(rows):
            signals[rows] += shares[rows, None, None] * _unit(make(rng, len(rows), length))
    # 2. A third of them are bent.
    bend = rng.random((count, 1, 1))
    signals = np.where(bend < 0.12, np.abs(signals), signals)
    signals = np.where((bend > 0.12) & (bend < 0.24), np.tanh(2 * signals), signals)
    signals = np.where((bend > 0.24) & (bend < 0.32), np.sign(signals) * signals**2, signals)
    # 3. Each view has noise, a drift, and sometimes a gap in which the last value is held, or a limit.
    signals = signals + rng.normal(size=signals.shape) * _log_uniform(rng, 0.01, 0.3, (count, 2, 1))
    signals = signals + np.linspace(-1, 1, length) * rng.normal(0, 0.2, (count, 2, 1))
    has_gap = rng.random((count, 2)) < 0.1
    for row, view in zip(*np.nonzero(has_gap), strict=True):
        begin = rng.integers(0, length - length // 8)
        signals[row, view, begin : begin + length // 8] = signals[row, view, begin]
    is_limited = rng.random((count, 2, 1)) < 0.1
    signals = np.where(is_limited, np.clip(signals, -1.2, 1.2), signals)
    # 4. Level and scale belong to the programme; views differ in them a little. Many programmes have the same ones, or
    # else these would be enough to tell them apart.
    group = rng.integers(0, _LEVELS, count)
    scale = rng.normal(-0.3, 0.8, (_LEVELS, 1, 1))[group] + rng.normal(0, 0.12, (count, 2, 1))
    level = rng.normal(0, 1, (_LEVELS, 1, 1))[group] + rng.normal(0, 0.1, (count, 2, 1))
    return (signals * np.exp(scale) + level).astype(np.float32), kinds


class _Residual(nn.Module):
    """Two convolutions with batch norm, whose input is added to their output."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, channels, 5, padding=2, bias=False)
        self.norm1 = nn.BatchNorm1d(channels)
        self.conv2 = nn.Conv1d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm1d(channels)

    def forward(self, maps: Tensor) -> Tensor:
        inner = torch.relu(self.norm1(self.conv1(maps)))
        return torch.relu(maps + self.norm2(self.conv2(inner)))


def _layer(channels: int, wider: int, kernel: int, stride: int) -> nn.Sequential:
    """Return a convolution with batch norm and ReLU."""
    conv = nn.Conv1d(channels, wider, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm1d(wider), nn.ReLU())


class WindowEncoder(nn.Module):
    """An encoder of windows (n, channels, length): features (n, channels * 226), channel by channel.

    Of each channel it sees the signal with mean 0 and variance 1, and beside it with its level and scale, limited.
    """

    def __init__(self) -> None:
        super().__init__()
        first, second, third = _WIDTHS
        self.stem = _layer(2, first, 9, 1)
        self.stage1 = nn.Sequential(_layer(first, first, 3, 2), _Residual(first))
        self.stage2 = nn.Sequential(_layer(first, second, 3, 2), _Residual(second))
        self.stage3 = nn.Sequential(_layer(second, third, 3, 2), _Residual(third))
        self.places = nn.Sequential(
            nn.Conv1d(third, _PLACE_CHANNELS, 1, bias=False), nn.BatchNorm1d(_PLACE_CHANNELS), nn.ReLU()
        )
        self.width = second + third + _PLACES * _PLACE_CHANNELS

    def forward(self, windows: Tensor) -> Tensor:
        """Return the features: those that were learned, the mean, and the logarithm of the standard deviation."""
        count, channels, length = windows.shape
        signals = windows.reshape(count * channels, 1, length)
        mean = signals.mean(2)
        deviation = self.deviation(signals)
        features = torch.cat([self.learned(signals), mean, torch.log(deviation[:, :, 0] + 1e-3)], 1)
        return features.reshape(count, channels * (self.width + 2))

    def learned(self, signals: Tensor) -> Tensor:
        """Return the learned features (n, 224) of signals (n, 1, length)."""
        normal = (signals - signals.mean(2, keepdim=True)) / self.deviation(signals)
        limited = 2 * torch.tanh(signals / 2)
        parts = self.stage2(self.stage1(self.stem(torch.cat([normal, limited], 1))))
        whole = self.stage3(parts)
        places = self.places(whole)
        step = places.shape[2] // _PLACES
        placed = functional.avg_pool1d(places, step, stride=step)[:, :, :_PLACES].flatten(1)
        return torch.cat([parts.mean(2), whole.mean(2), placed], 1)

    @staticmethod
    def deviation(signals: Tensor) -> Tensor:
        """Return the standard deviation of each signal, (n, 1, 1), above 0."""
        centred = signals - signals.mean(2, keepdim=True)
        return ((centred * centred).mean(2, keepdim=True) + 1e-8).sqrt()


def train(minutes: float, seed: int) -> WindowEncoder:
    """Return an encoder after so many minutes of the processor; its weights are means over the last steps.

    0 minutes leave the weights random, as they are drawn at first.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    encoder = WindowEncoder()
    projection = nn.Sequential(
        nn.BatchNorm1d(encoder.width),
        nn.Linear(encoder.width, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Linear(256, 128),
    )
    kind_of = nn.Linear(encoder.width, len(KINDS))
    parameters = [*encoder.parameters(), *projection.parameters(), *kind_of.parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [values for values in parameters if values.ndim > 1], "weight_decay": 0.02},
            {"params": [values for values in parameters if values.ndim < 2], "weight_decay": 0.0},
        ],
        lr=STEP_SIZE,
    )
    means = {name: values.clone() for name, values in encoder.state_dict().items()}
    begin = time.process_time()
    step = 0
    done = 0.0 if minutes > 0 else 1.0
    while done < 1:
        warm = min(1.0, (step + 1) / WARM_UP)
        for group in optimizer.param_groups:
            group["lr"] = STEP_SIZE * warm * (0.5 * (1 + math.cos(math.pi * done)) + 0.005)
        views, kinds = draw_views(rng, BATCH, int(rng.choice(LENGTHS)))
        loss = _loss(encoder, projection, kind_of, torch.from_numpy(views), torch.from_numpy(kinds))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()
        decay = min(_DECAY, 1 - 1 / (step + 2))
        for name, values in encoder.state_dict().items():
            if values.is_floating_point():
                means[name].lerp_(values, 1 - decay)
        step += 1
        done = (time.process_time() - begin) / (60 * minutes)
        if step % 200 == 0:
            print(f"step {step}, loss {loss.item():.2f}, {100 * done:.0f} % done", flush=True)
    encoder.load_state_dict(means)
    return encoder.eval()


def _loss(encoder: WindowEncoder, projection: nn.Module, kind_of: nn.Module, views: Tensor, kinds: Tensor) -> Tensor:
    """Return the cross-entropy of which view belongs to which, and a tenth of that of the kinds."""
    count, _, length = views.shape
    with torch.autocast("cpu", torch.bfloat16):
        features = encoder.learned(views.reshape(2 * count, 1, length))
        projected = projection(features)
        answers = kind_of(features)
    points = functional.normalize(projected.float(), dim=1).reshape(count, 2, -1)
    likeness = points[:, 0] @ points[:, 1].T / TEMPERATURE
    same = torch.arange(count)
    of_pairs = (functional.cross_entropy(likeness, same) + functional.cross_entropy(likeness.T, same)) / 2
    return of_pairs + _SHARE_OF_KINDS * functional.cross_entropy(answers.float(), kinds.repeat_interleave(2))
