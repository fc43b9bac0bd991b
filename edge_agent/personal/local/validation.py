"""Honest figures from few samples: folds, intervals, comparisons of two models, and learning curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.task import WindowInput
from ...data import Samples
from ...data.preprocess import windows_apart
from ...data.splitting import same_sitting

_Z = 1.959963984540054
"""Standard normal quantile of a two-sided interval of 95 %."""


@dataclass(frozen=True)
class Fold:
    """Row numbers of one division of samples: those to learn from and those to test on."""

    train: np.ndarray
    test: np.ndarray


def interval(correct: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval (Wilson 1927) of a share, 0..1, for ``correct`` of ``total`` >= 1 answers."""
    share = correct / total
    square = _Z**2
    center = share + square / (2 * total)
    reach = _Z * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    low, high = ((center + sign * reach) / (1 + square / total) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Return the two-sided exact p-value of McNemar's test, 0..1.

    It answers whether two models that are right on these rows could be equally good.

    ``first`` and ``second`` (n,) bool: whether each model is right on the same held-out samples.
    """
    only_first = int((first & ~second).sum())
    only_second = int((second & ~first).sum())
    total = only_first + only_second
    fewer = min(only_first, only_second)
    tail = sum(math.comb(total, count) for count in range(fewer + 1)) / 2**total
    return float(min(1.0, 2 * tail))


def is_better(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether the first model is right more often than the second one, beyond noise (p < 0.05).

    Both: whether it is right, (n,) bool, on the same samples.
    """
    return int(first.sum()) > int(second.sum()) and p_value(first, second) < 0.05


def folds(samples: Samples, count: int, rng: np.random.Generator) -> list[Fold]:
    """Return at most ``count`` divisions that test each sample once; fewer where no class has as many parts, or none.

    Without recordings the samples of each class are dealt to the folds. With recordings (``samples.groups``) whole
    recordings are dealt, so that no two windows of one recording stand on both sides. The only recording of a class is
    cut into blocks of time instead, for each of its classes, and windows that overlap the tested blocks are left out:
    otherwise some fold would have nothing of that class to learn from.
    """
    # A unit is what is dealt as a whole: a recording, or a sample where there are no recordings.
    labels = samples.labels
    units = np.arange(len(labels)) if samples.groups is None else np.unique(samples.groups, return_inverse=True)[1]
    units_of = {int(label): np.unique(units[labels == label]) for label in np.unique(labels)}
    most = max(map(len, units_of.values()), default=0)
    if most >= 2:
        count = min(count, most)
    elif samples.groups is None:
        return []
    # The only recording of a class cannot be dealt as a whole.
    cut: set[int] = set()
    if samples.groups is not None:
        cut = {int(class_units[0]) for class_units in units_of.values() if len(class_units) == 1}
    part_of_unit = np.full(int(units.max(initial=-1)) + 1, -1)
    dealt = 0
    for class_units in units_of.values():
        whole = rng.permutation(class_units[~np.isin(class_units, list(cut))])
        part_of_unit[whole] = (dealt + np.arange(len(whole))) % count
        dealt += len(whole)  # rare classes do not all land in the first fold
    # It is cut into blocks of time, for each class that it holds.
    part = part_of_unit[units]
    for unit in cut:
        for label in np.unique(labels[units == unit]):
            rows = np.flatnonzero((units == unit) & (labels == label))
            for number, block in enumerate(np.array_split(rows, count)):
                part[block] = number
    # Windows that overlap a tested block are on neither side, and a fold with an empty side is none.
    result = []
    for number in range(count):
        tested = part == number
        learns = ~tested & ~_near(tested, units, cut, samples)
        result.append(Fold(np.flatnonzero(learns), np.flatnonzero(tested)))
    result = [fold for fold in result if len(fold.train) and len(fold.test)]
    return result if len(result) >= 2 else []


def sitting_of(samples: Samples, divisions: Sequence[Fold]) -> float | None:
    """Return the mean of `same_sitting`, 0..1, over the folds; None where there are none, or no recordings."""
    shares = [same_sitting(samples.take(fold.train), samples.take(fold.test)) for fold in divisions]
    known_shares = [share for share in shares if share is not None]
    return float(np.mean(known_shares)) if known_shares else None


def new_rows(samples: Samples, learned: np.ndarray | None) -> np.ndarray:
    """Return the rows (m,) of samples without a digest in ``learned`` (k,) that overlap none that has one."""
    if learned is None:
        return np.arange(len(samples))
    is_known = np.isin(samples.row_digests(), learned)
    if samples.groups is not None:
        is_known |= _near(is_known, samples.groups, {*samples.groups.tolist()}, samples)
    return np.flatnonzero(~is_known)


def _near(tested: np.ndarray, units: np.ndarray, cut: set[int], samples: Samples) -> np.ndarray:
    """Return which rows (n,) bool overlap tested ones of a recording that is cut."""
    gap = windows_apart(samples.input) if isinstance(samples.input, WindowInput) else 0
    result = np.zeros(len(units), bool)
    for unit in cut if gap else ():
        rows = np.flatnonzero(units == unit)
        for position in np.flatnonzero(tested[rows]):
            result[rows[max(0, position - gap) : position + gap + 1]] = True
    return result


@dataclass(frozen=True)
class CurvePoint:
    """Accuracy 0..1 with ``samples`` to learn from: mean over the folds, and their standard deviation."""

    samples: int
    mean: float
    spread: float


@dataclass(frozen=True)
class Forecast:
    """Accuracy with ``samples`` to learn from, 0..1: ``expected``, and the 90 % range ``low`` to ``high``.

    ``gain``: its 90 % range above the last point of the curve, from which the answers that test both are left out.
    """

    samples: int
    expected: float
    low: float
    high: float
    gain: tuple[float, float]


@dataclass(frozen=True)
class LearningCurve:
    """Accuracy by number of samples, and what twice as many as there are would bring.

    ``forecast`` is None below 3 points. ``same_sitting``: share, 0..1, of the tested windows whose recording is learned
    from, too; None without recordings.
    """

    points: tuple[CurvePoint, ...]
    forecast: Forecast | None
    same_sitting: float | None = None

    @property
    def advice(self) -> str:
        """Return an answer to "have I collected enough?", in one sentence."""
        forecast = self.forecast
        if forecast is None:
            return (
                "too few samples for a learning curve: collect at least 3 of each class to fit, beside those held out"
            )
        expected, low, high = (100 * share for share in (forecast.expected, forecast.low, forecast.high))
        about = (
            f"with {forecast.samples} samples to fit, twice as many as here, about {expected:.1f} % "
            f"({low:.1f} to {high:.1f} %)"
        )
        least, most = forecast.gain
        if least >= _WORTH:
            return f"{about}: collecting more samples is worth it"
        if most < 2 * _WORTH:
            return f"{about}: more samples of the same kind hardly help"
        return f"{about}: it is not clear whether more samples of the same kind help"


_WORTH = 0.01
"""A gain in accuracy below which more samples are not worth the trouble."""


def learning_curve(
    score: Callable[[np.ndarray, np.ndarray], int],
    samples: Samples,
    rng: np.random.Generator,
    *,
    sizes: Sequence[float] = (0.1, 0.2, 0.4, 0.7, 1.0),
    repeats: int = 3,
) -> LearningCurve:
    """Return the accuracy by number of samples, cross-validated.

    ``score`` takes rows (m,) int64 to learn from and rows to test on, and returns how many of these are answered right.
    ``sizes`` are shares of what a fold has to learn from.
    """
    divisions = folds(samples, repeats, rng)
    smallest = min((len(fold.train) for fold in divisions), default=0)
    sizes = list({max(2, round(size * smallest)): size for size in sizes}.values())  # those that differ in numbers
    accuracies: dict[float, list[tuple[int, float]]] = {}  # size -> number of samples and accuracy of each fold
    for fold in divisions:
        order = _stratified_order(samples.labels[fold.train], rng)
        for size in sizes:
            number = max(2, round(size * len(order)))
            rows = fold.train[order[:number]]
            if number <= len(order) and len(np.unique(samples.labels[rows])) > 1:
                accuracies.setdefault(size, []).append((number, score(rows, fold.test) / len(fold.test)))
    points = tuple(
        CurvePoint(round(float(np.mean(numbers))), float(np.mean(values)), float(np.std(values)))
        for _, pairs in sorted(accuracies.items())
        if len(pairs) == len(divisions)
        for numbers, values in [zip(*pairs, strict=True)]
    )
    tested = len(samples) if samples.groups is None else len(np.unique(samples.groups))
    forecast = extrapolate(points, 2 * len(samples), tested, repeats)
    return LearningCurve(points, forecast, sitting_of(samples, divisions))


def extrapolate(points: Sequence[CurvePoint], samples: int, tested: int, repeats: int) -> Forecast | None:
    """Return the forecast for ``samples`` to learn from, of all curves that go with the points.

    It is None below three of them.

    The error falls as r + (1 - r) n^-b times what it is at the last point: a share r remains, 0..1, and b is 0..1.5.
    Every r and b counts as its curve fits the points within their noise, so that few or scattered points leave a wide
    range, and a curve that does not rise promises nothing. The noise of a point is that of its ``repeats`` folds, and
    at least binomial; that of ``tested`` independent answers, recordings where there are some, widens the range. Points
    that no curve fits within noise (accuracy that jumps) are taken to be as noisy as the best curve misses them.
    """
    if len(points) < 3:
        return None
    sizes, errors = (np.array(column) for column in zip(*((p.samples, 1 - p.mean) for p in points), strict=True))
    rough = (errors * tested + 1) / (tested + 2)  # none wrong of a few does not mean none wrong at all
    binomial = rough * (1 - rough) / tested
    between = np.mean([point.spread**2 for point in points]) / max(1, repeats - 1)
    noise = np.maximum(binomial, between)
    last = np.linspace(-3, 3, 31) * math.sqrt(noise[-1]) + errors[-1]
    remains, power, last = np.meshgrid(np.linspace(0, 1, 11), np.linspace(0, 1.5, 31), last, indexing="ij")
    falls = [remains + (1 - remains) * (size / sizes[-1]) ** -power for size in sizes]
    points_of_fit = zip(falls, errors, noise, strict=True)
    misfit = sum((last * fall - error) ** 2 / variance for fall, error, variance in points_of_fit)
    misfit = np.where(last >= 0, misfit, np.inf)
    best = float(misfit.min())  # taken off every misfit: above 1,490 the weight of the best curve would be 0, too
    weights = np.exp((best - misfit) / (2 * max(1.0, best / len(points))))
    gains = np.maximum(last, 0) * (1 - remains) * (1 - (samples / sizes[-1]) ** -power)
    gains = np.minimum(gains, max(errors[-1], math.sqrt(binomial[-1])))  # what is wrong can become right, no more
    steps = np.linspace(-3, 3, 25)
    reached = points[-1].mean + gains.reshape(-1, 1) + steps * math.sqrt(noise[-1])
    low, high = _quantiles(reached, weights.reshape(-1, 1) * np.exp(-(steps**2) / 2))
    expected = points[-1].mean + float(np.average(gains, weights=weights))
    return Forecast(samples, min(1.0, expected), min(1.0, max(0.0, low)), min(1.0, high), _quantiles(gains, weights))


def _quantiles(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the 5 % and the 95 % quantile of weighted values."""
    order = np.argsort(values, axis=None)
    shares = np.cumsum(weights.reshape(-1)[order])
    low, high = (values.reshape(-1)[order[np.searchsorted(shares, share * shares[-1])]] for share in (0.05, 0.95))
    return float(low), float(high)


def _stratified_order(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return row numbers in an order in which every beginning has the classes in about their shares."""
    position = np.empty(len(labels))
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        position[rows] = (np.arange(len(rows)) + rng.random()) / len(rows)
    return np.argsort(position, kind="stable")
