"""The bar that a federation has to clear: the best small model that a device can fit alone on its raw inputs.

Which one is the best is decided by cross-validation on the training samples; the held-out samples are only used to
score it. So the figure is what the device would really have got, and not the largest of several. Nothing depends on
the clock: the same samples and seed give the same model on any machine. 600 images of 32 x 32 in colour, or 600 windows
of 6 x 100, take one to two seconds of a desktop core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ... import heads
from ...core.graph import Graph, Value
from ...core.task import ImageInput, InputSpec, Tensors
from ...data import Samples
from ...heads import FitData, Head
from .features import convolution_features, flattened, image_features, learn_convolutions, window_statistics
from .graph import write_convolution_features, write_flattened, write_image_features, write_window_statistics
from .validation import Fold, folds, is_better

MOST_SAMPLES = 5000
"""Samples that a local model learns from, at random where there are more: a small device has no memory for more."""

_FOLDS = 5
"""How many folds of the training samples the choice is made on."""

_MOST_TO_LEARN = 1000
"""How many samples a candidate learns from in one fold at most."""

_MOST_TO_TEST = 400
"""How many samples a candidate answers in one fold at most."""

_AT_ONCE = 128
"""Inputs whose features are computed at once."""

MAJORITY = "most frequent class"
"""Name of the model that always answers with the most frequent class."""


Refits: TypeAlias = tuple[np.ndarray, Callable[[str, np.ndarray], Head]]
"""Features (n, d), and a function: any name, and the rows to learn from -> the fitted head."""


@dataclass(frozen=True)
class Candidate:
    """One kind of model: the head that learns, on ``features`` of inputs with what ``learn`` found in training inputs.

    ``features``: inputs (n, ...), normalised, their spec, and what was learned -> (n, d) float32. ``write`` writes the
    same as ONNX operators: a graph, the inputs as a tensor of it, their spec, and what was learned -> a tensor.
    """

    head: str
    features: Callable[[np.ndarray, InputSpec, Tensors], np.ndarray]
    write: Callable[[Graph, Value, InputSpec, Tensors], Value]
    learn: Callable[[np.ndarray, np.random.Generator], Tensors] = lambda _inputs, _rng: {}
    params: Mapping[str, str | int] = field(default_factory=dict)


def _image_features(images: np.ndarray, spec: InputSpec, _learned: Tensors) -> np.ndarray:
    mean, std = _mean_and_std(spec)
    return image_features(images * std + mean)


def _write_image_features(graph: Graph, images: Value, spec: InputSpec, _learned: Tensors) -> Value:
    mean, std = _mean_and_std(spec)
    return write_image_features(graph, graph.add("Add", graph.add("Mul", images, std), mean), spec.shape)


def _mean_and_std(spec: InputSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation by which images were normalised, (1, channels, 1, 1) float32."""
    mean, std = (np.asarray(values, np.float32).reshape(1, -1, 1, 1) for values in (spec.mean, spec.std))
    return mean, std


def _flattened(inputs: np.ndarray, _spec: InputSpec, _learned: Tensors) -> np.ndarray:
    return flattened(inputs)


def _write_flattened(graph: Graph, inputs: Value, spec: InputSpec, _learned: Tensors) -> Value:
    return write_flattened(graph, inputs, spec.shape)


def _window_statistics(windows: np.ndarray, _spec: InputSpec, _learned: Tensors) -> np.ndarray:
    return window_statistics(windows)


def _write_window_statistics(graph: Graph, windows: Value, spec: InputSpec, _learned: Tensors) -> Value:
    return write_window_statistics(graph, windows, spec.shape)


def _convolution_features(windows: np.ndarray, _spec: InputSpec, learned: Tensors) -> np.ndarray:
    return convolution_features(windows, learned)


def _write_convolution_features(graph: Graph, windows: Value, spec: InputSpec, learned: Tensors) -> Value:
    return write_convolution_features(graph, windows, spec.shape, learned)


_LR = {"max_iterations": 200, "in_span": True}
_RAW = {
    "raw inputs + knn": Candidate(
        "knn", _flattened, _write_flattened, params={"feature_norm": "standard", "neighbours": 5}
    ),
    "raw inputs + lr": Candidate("lr", _flattened, _write_flattened, params=_LR),
}
_OF_IMAGES = {
    "gradients and colours + lr": Candidate("lr", _image_features, _write_image_features, params=_LR),
    **_RAW,
}
_OF_WINDOWS = {
    "window statistics + lr": Candidate("lr", _window_statistics, _write_window_statistics, params=_LR),
    "random convolutions + ridge": Candidate(
        "ridge", _convolution_features, _write_convolution_features, learn_convolutions
    ),
    **_RAW,
}
"""What is tried for windows: what usually wins comes first, and wins ties."""


def candidates(spec: InputSpec) -> Mapping[str, Candidate]:
    """Name -> what is tried for such inputs, besides the most frequent class."""
    return _OF_IMAGES if isinstance(spec, ImageInput) else _OF_WINDOWS


@dataclass(frozen=True)
class LocalFeatures:
    """What one kind of `candidates` takes out of raw inputs.

    Attributes:
        name: The name of the kind, or `MAJORITY`, which takes nothing out of them.
        input: The form of the inputs.
        learned: What the kind has learned from training inputs, by name.
    """

    name: str
    input: InputSpec
    learned: Tensors = field(default_factory=dict)

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """Return features (n, d) float32 of preprocessed inputs (n, ...) float32.

        Raises:
            DataError: Inputs with NaN or infinity.
        """
        if self.name == MAJORITY:
            return np.zeros((len(inputs), 1), np.float32)
        return _features(candidates(self.input)[self.name], inputs, self.input, self.learned)

    def write(self, graph: Graph, inputs: Value) -> Value:
        """Write what a call computes as operators: ``inputs`` is a tensor (n, ...) float32, the result (n, d)."""
        if self.name == MAJORITY:
            return graph.repeat(np.zeros(1, np.float32), inputs)
        return candidates(self.input)[self.name].write(graph, inputs, self.input, self.learned)


@dataclass(frozen=True)
class LocalModel:
    """A fitted model of `candidates`, or the most frequent class.

    Attributes:
        features: What it takes out of raw inputs.
        head: The head that was fitted on these features.
        cross_validated: The accuracy, 0..1, of each kind in cross-validation, over the folds until it was dropped for a
            better one; empty where there are too few samples for it.
    """

    features: LocalFeatures
    head: Head
    cross_validated: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its kind."""
        return self.features.name

    def predict_proba(self, inputs: np.ndarray) -> np.ndarray:
        """Return probabilities (n, K) float64 of the classes for preprocessed inputs (n, ...) float32."""
        return self.head.predict_proba(self.features(inputs))


def prepare_refits(taken: LocalFeatures, inputs: np.ndarray, labels: np.ndarray, num_classes: int, seed: int) -> Refits:
    """Return features (n, d) of preprocessed ``inputs`` (n, ...), and what fits a head of their kind on rows of them.

    Raises:
        DataError: Inputs with NaN or infinity.
    """
    features = taken(inputs)
    kind = candidates(taken.input)[taken.name]

    def fit(_name: str, rows: np.ndarray) -> Head:
        return fitted(kind, features[rows], labels[rows], num_classes, np.random.default_rng(seed))

    return features, fit


@dataclass(frozen=True)
class HeadInput:
    """What a personal head takes: features of the encoder, features of the raw inputs, or both side by side.

    Attributes:
        local: The features of the raw inputs; None: the head takes those of the encoder alone.
        split: How many features of the encoder stand before the local ones; 0: the head takes the local ones alone.
    """

    local: LocalFeatures | None = None
    split: int = 0

    def rows(self, encode: Callable[[], np.ndarray], inputs: Callable[[], np.ndarray]) -> np.ndarray:
        """Return what the head takes, (n, d) float32.

        Args:
            encode: Returns the encoder's features (n, e) float32; it is called only if they are needed.
            inputs: Returns the preprocessed inputs (n, ...) float32; it is called only if they are needed.
        """
        if self.local is None:
            return encode()
        local = self.local(inputs())
        if not self.split:
            return local
        return np.concatenate([encode(), local], axis=1)

    def encoded(self, rows: np.ndarray) -> np.ndarray:
        """Return the encoder's features in ``rows`` (n, d); all of them where the head takes one kind alone."""
        return rows[:, : self.split] if self.split else rows


def fit_local(
    samples: Samples, num_classes: int, rng: np.random.Generator, progress: Callable[[int, int], None] | None = None
) -> LocalModel:
    """Return the best model for ``samples`` (at least one), chosen by cross-validation and fitted on all of them.

    Args:
        samples: The device's training samples.
        num_classes: How many classes there are.
        rng: Where draws of samples and folds come from.
        progress: Is called with the number of folds that are done, and that of all folds.

    Raises:
        DataError: inputs with NaN or infinity.
    """
    samples = samples.ready()
    if len(samples) > MOST_SAMPLES:
        samples = samples.take(_some(np.arange(len(samples)), MOST_SAMPLES, rng))
    # Each fold is bounded on both sides, so that the choice takes seconds on a small device.
    divisions = [
        Fold(_some(fold.train, _MOST_TO_LEARN, rng), _some(fold.test, _MOST_TO_TEST, rng))
        for fold in folds(samples, _FOLDS, rng)
    ]
    labels = samples.labels
    kinds = candidates(samples.input)
    nothing = LocalFeatures(MAJORITY, samples.input)
    if len(np.unique(labels)) < 2 or not divisions:
        return LocalModel(nothing, _majority(labels, num_classes))
    # What the kinds take out of inputs does not depend on the fold, so it is computed once.
    learned = {name: kind.learn(samples.inputs, rng) for name, kind in kinds.items()}
    features = {name: _features(kind, samples.inputs, samples.input, learned[name]) for name, kind in kinds.items()}
    right: dict[str, np.ndarray] = {name: np.zeros(0, bool) for name in (MAJORITY, *kinds)}
    # After each fold those leave that are worse than the best one beyond noise.
    running = list(right)
    for number, fold in enumerate(divisions):
        labels_to_learn = labels[fold.train]
        for name in running:
            if name == MAJORITY:
                head = _majority(labels_to_learn, num_classes)
                answers = head.predict_proba(np.zeros((len(fold.test), 1), np.float32))
            else:
                head = fitted(kinds[name], features[name][fold.train], labels_to_learn, num_classes, rng)
                answers = head.predict_proba(features[name][fold.test])
            right[name] = np.concatenate([right[name], answers.argmax(axis=1) == labels[fold.test]])
        leader = max(running, key=lambda name: int(right[name].sum()))
        running = [name for name in running if name == leader or not is_better(right[leader], right[name])]
        if progress is not None:
            progress(number + 1, len(divisions))
    # The winner learns from all samples.
    best = max(running, key=lambda name: int(right[name].sum()))
    scores = {name: float(answers.mean()) for name, answers in right.items()}
    if best == MAJORITY:
        return LocalModel(nothing, _majority(labels, num_classes), scores)
    head = fitted(kinds[best], features[best], labels, num_classes, rng)
    return LocalModel(LocalFeatures(best, samples.input, learned[best]), head, scores)


def _some(rows: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Return at most ``most`` of the rows (n,), drawn at random, in ascending order."""
    return rows if len(rows) <= most else np.sort(rng.permutation(rows)[:most])


def _features(kind: Candidate, inputs: np.ndarray, spec: InputSpec, learned: Tensors) -> np.ndarray:
    """Return what a kind of model takes out of inputs (n, ...), block by block, so that memory is bounded."""
    starts = range(0, max(1, len(inputs)), _AT_ONCE)
    return np.concatenate([kind.features(inputs[start : start + _AT_ONCE], spec, learned) for start in starts])


def _majority(labels: np.ndarray, num_classes: int) -> Head:
    """Return a head that always answers the most frequent of these labels; it takes features (n, 1) of zeros."""
    head = heads.create("lr")
    most_frequent = np.array([np.bincount(labels).argmax()])
    head.fit(FitData(np.zeros((1, 1), np.float32), most_frequent, num_classes), np.random.default_rng(0))
    return head


def fitted(
    kind: Candidate, features: np.ndarray, labels: np.ndarray, num_classes: int, rng: np.random.Generator
) -> Head:
    """Return the head of that kind, fitted on features (n, d) and labels (n,)."""
    head = heads.create(kind.head, kind.params)
    head.fit(FitData(features, labels, num_classes), rng)
    return head
