"""What tells how strange an input is: detectors, which score features by those of the training samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..core.errors import StateError
from ..core.graph import Graph, Value

NEIGHBOURS = 3
"""The distance that counts is that to this neighbour: one odd training sample does not make all of its kind known."""

MOST_DIRECTIONS = 64
"""Directions that `ClassMeans` keeps: those in which samples of one class differ most."""

MOST_FOR_MEANS = 512
"""Training samples that `ClassMeans` learns from; of more, a random part."""

_CELLS = 2_000_000
"""Distances that are computed at once, 16 MB as float64: memory does not grow with the samples."""

_FOLDS = 5
"""Folds in which `ClassMeans` scores training rows as new ones: one fit for each row would take too long."""


class Detector(ABC):
    """Scores how strange features of length 1 are, by those of training samples.

    A class variable ``name`` says what the score is, for people.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def fit(cls, rows: np.ndarray, labels: np.ndarray) -> Detector:
        """Return the detector for training ``rows`` (n, d) float32 of the classes ``labels`` (n,) int64."""

    @abstractmethod
    def score_as_new(self, rows: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Return the scores (n,) of training rows by detectors like this that did not learn from their ``groups`` (n,).

        ``rows`` (n, d) and ``labels`` (n,) are those that this detector was fitted on, or a part of them.
        """

    @abstractmethod
    def scores(self, rows: np.ndarray) -> np.ndarray:
        """Return how strange ``rows`` (n, d) of length 1 are, (n,) float64 of 0 or more."""

    @abstractmethod
    def write(self, graph: Graph, rows: Value) -> Value:
        """Write `scores` (n, 1) float64 of ``rows`` (n, d) float64 as operators."""

    @abstractmethod
    def check(self, size: int) -> None:
        """Check arrays that were read from a file, for features of ``size`` values.

        Raises:
            StateError: they do not belong together.
        """


@dataclass(frozen=True)
class NearestRows(Detector):
    """The distance, 0..2, to the third nearest training row (Sun et al., ICML 2022)."""

    rows: np.ndarray
    name: ClassVar[str] = "distance"

    @classmethod
    def fit(cls, rows: np.ndarray, labels: np.ndarray) -> NearestRows:  # noqa: ARG003 - classes do not matter
        """Keep the rows; see `Detector`."""
        return cls(rows)

    def score_as_new(self, rows: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> np.ndarray:  # noqa: ARG002 - as above
        """Return each row's distance to rows of other groups; see `Detector`."""
        return _distances(rows, rows, groups)

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """Return the distances; see `Detector`."""
        return _distances(rows, self.rows)

    def write(self, graph: Graph, rows: Value) -> Value:
        """Write the distances as operators; see `Detector`."""
        products = graph.add("MatMul", rows, np.ascontiguousarray(-2.0 * self.rows.T.astype(np.float64)))
        squares = graph.add("Max", graph.add("Add", products, np.array(2.0)), np.zeros(1))
        rank = min(NEIGHBOURS, len(self.rows))
        nearest, _ = graph.nearest(squares, rank)
        return graph.add("Sqrt", graph.columns(nearest, rank - 1, rank))

    def check(self, size: int) -> None:
        """Check nothing: the rows are those of the rule; see `Detector`."""


@dataclass(frozen=True)
class ClassMeans(Detector):
    """The Mahalanobis distance to the nearest class mean (Lee et al., NeurIPS 2018).

    The covariance C of samples about the mean of their class is shrunk (Ledoit and Wolf, J. Multivariate Analysis 88,
    2004). Beyond a few directions u it is b I, so the squared distance z' C^-1 z of z from a mean is (|z|^2 - the sum
    of ``weights`` (u' z)^2) / b.

    Attributes:
        means: The mean of each class, (K, d) float64.
        directions: Those in which samples of one class differ most, as columns (d, r) float64 of length 1.
        weights: For each direction with variance e the number 1 - b / e, (r,) float64 of 0..1.
        variance: The variance b in all other directions, above 0.
        shrinkage: How much of the covariance was replaced by a multiple of I, 0..1.
    """

    means: np.ndarray
    directions: np.ndarray
    weights: np.ndarray
    variance: float
    shrinkage: float
    name: ClassVar[str] = "distance from the class means"

    @classmethod
    def fit(cls, rows: np.ndarray, labels: np.ndarray) -> ClassMeans:
        """Take the means and the covariance of the rows; see `Detector`."""
        return cls._fit(rows, labels, None)

    @classmethod
    def _fit(cls, rows: np.ndarray, labels: np.ndarray, shrinkage: float | None) -> ClassMeans:
        """Return the detector with a given ``shrinkage``, 0..1; None: with that of these rows."""
        part = part_of(len(rows), MOST_FOR_MEANS)
        known, positions = np.unique(labels[part], return_inverse=True)
        exact = rows[part].astype(np.float64)
        means = np.stack([exact[positions == number].mean(axis=0) for number in range(len(known))])
        centred = exact - means[positions]
        directions, variances = _principal_directions(centred)
        mean_variance = max(float((centred**2).mean()), 1e-12)
        if shrinkage is None:
            shrinkage = _shrinkage(centred, variances, mean_variance)
        others = shrinkage * mean_variance
        # The strongest directions are enough; the others count as directions in which samples hardly vary.
        strongest = (1 - shrinkage) * variances[:MOST_DIRECTIONS] + others
        return cls(means, directions[:, :MOST_DIRECTIONS], 1 - others / strongest, others, shrinkage)

    def score_as_new(self, rows: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Score each of a few folds by what was fitted on the others; see `Detector`."""
        folds = _folds(labels, groups)
        result = np.empty(len(rows))
        for fold in distinct(folds):
            is_scored = folds == fold
            # With a shrinkage of its own, which falls with the samples, it would score on another scale than this one.
            others = self._fit(rows[~is_scored], labels[~is_scored], self.shrinkage)
            result[is_scored] = others.scores(rows[is_scored])
        return result

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """Return the distances; see `Detector`."""
        exact = rows.astype(np.float64)
        squares = np.stack([self._squares(exact - mean) for mean in self.means], axis=1)
        return np.asarray(np.sqrt(np.maximum(squares.min(axis=1), 0.0)))

    def _squares(self, rows: np.ndarray) -> np.ndarray:
        explained = (rows @ self.directions) ** 2 @ self.weights
        return np.asarray(((rows**2).sum(axis=1) - explained) / self.variance)

    def write(self, graph: Graph, rows: Value) -> Value:
        """Write the distances as operators; see `Detector`."""
        # With M the inverse of C, the square is z' M z - 2 m' M z + m' M m for each mean m.
        lengths = graph.squared_lengths(rows)
        along = graph.add("MatMul", rows, self.directions * np.sqrt(self.weights))
        own = graph.add("Sub", lengths, graph.squared_lengths(along))
        weighted = self.means - (self.means @ self.directions * self.weights) @ self.directions.T
        constants = (self.means * weighted).sum(axis=1)
        squares = graph.add("Add", graph.linear(rows, -2.0 * weighted, constants), own)
        least, _ = graph.nearest(squares, 1)
        scaled = graph.add("Div", graph.add("Max", least, np.zeros(1)), np.array(self.variance))
        return graph.add("Sqrt", scaled)

    def check(self, size: int) -> None:
        """Check the shapes and the numbers; see `Detector`."""
        count = len(self.weights)
        shapes = (self.means.ndim, self.means.shape[-1], self.directions.shape)
        if shapes != (2, size, (size, count)) or not len(self.means):
            raise StateError(
                f"confidence: class means {self.means.shape} with directions {self.directions.shape} and {count} "
                f"weights, expected (K, {size}), ({size}, r) and r"
            )
        numbers = (self.means, self.directions, self.weights, self.variance)
        if not all(np.isfinite(values).all() for values in numbers) or self.variance <= 0:
            raise StateError(f"confidence: class means with variance {self.variance}, expected finite numbers above 0")


DETECTORS: tuple[type[Detector], ...] = (NearestRows, ClassMeans)
"""The detectors among which a device chooses; of those that miss as many inputs, the first."""


def distinct(values: np.ndarray) -> list[int]:
    """Return the values of an array of integers, each once and ascending.

    `numpy.unique` does the same, and loads numpy's masked arrays for it, which take a megabyte.
    """
    return sorted(set(values.tolist()))


def part_of(count: int, most: int) -> np.ndarray:
    """Return the positions of ``most`` of ``count`` rows, drawn the same way each time; of all where they are fewer."""
    if count <= most:
        return np.arange(count)
    return np.random.default_rng(0).choice(count, most, replace=False)


def unit(features: np.ndarray) -> np.ndarray:
    """Return the rows of features (n, d), scaled to length 1, as float32; rows of zeros stay."""
    rows = np.asarray(features, np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1.0), np.float32)


def _folds(labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return a fold for each row, (n,), so that groups stay together and each class is spread over all folds."""
    names, first, positions = np.unique(groups, return_index=True, return_inverse=True)
    order = np.lexsort((np.random.default_rng(0).permutation(len(names)), labels[first]))
    folds = np.empty(len(names), np.int64)
    folds[order] = np.arange(len(names)) % _FOLDS
    return np.asarray(folds[positions])


def _principal_directions(centred: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the directions (d, r) in which rows (n, d) about zero vary, the strongest first, and the variances (r,).

    Eigenvectors of the smaller of both matrices of products give them.
    """
    count, size = centred.shape
    if size <= count:
        variances, directions = np.linalg.eigh(centred.T @ centred / count)
    else:
        variances, vectors = np.linalg.eigh(centred @ centred.T / count)
        directions = centred.T @ vectors / np.sqrt(np.maximum(variances * count, 1e-30))
    # Directions in which rows hardly vary are rounding errors.
    kept = np.flatnonzero(variances > 1e-9 * max(float(variances[-1]), 1e-30))[::-1]
    return np.ascontiguousarray(directions[:, kept]), np.ascontiguousarray(variances[kept])


def _shrinkage(centred: np.ndarray, variances: np.ndarray, mean_variance: float) -> float:
    """Return how much of the covariance S of rows (n, d) about zero is replaced by a multiple of I, above 0 up to 1.

    Ledoit and Wolf's estimate: the error of S, over the distance of S from that multiple. ``variances`` are the
    eigenvalues of S above zero.
    """
    count, size = centred.shape
    squares = float((variances**2).sum())
    distance = squares - size * mean_variance**2
    fourth = float(((centred**2).sum(axis=1) ** 2).mean())
    error = (fourth - squares) / count
    if distance <= error:
        return 1.0
    return max(float(error / distance), 1e-6)


def _distances(queries: np.ndarray, rows: np.ndarray, groups: np.ndarray | None = None) -> np.ndarray:
    """Return the distance (n,) to the `NEIGHBOURS`-th nearest row.

    With ``groups`` (n,), the group of each row, rows of the same group do not count.
    """
    result = np.empty(len(queries))
    step = max(1, _CELLS // len(rows))
    rank = min(NEIGHBOURS, len(rows)) - 1
    for start in range(0, len(queries), step):
        block = slice(start, start + step)
        # Rows have length 1, so the square of a distance is 2 - 2 times their product.
        squares = np.maximum(2.0 - 2.0 * queries[block].astype(np.float64) @ rows.T.astype(np.float64), 0.0)
        if groups is not None:
            squares[groups[block, None] == groups[None, :]] = 4.0
        result[block] = np.sqrt(np.partition(squares, rank, axis=1)[:, rank])
    return result
