"""A pair: an encoder and the head that was fitted on its features, loaded and ready to answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from ..bundle.unpacked import Bundle
from ..core.errors import DataError
from ..core.storage import sha256_of
from ..core.task import InputSpec
from ..heads import saved
from ..heads.saved import SavedHead, SavedNumeric
from ..personal.encoder import Encoder
from ..personal.local.models import HeadInput
from ..personal.personalize import load_head, load_numeric_head, probabilities
from ..wire.tensors import encode
from .answer import Answer, ClassAnswer, NumberAnswer, PairId, Stages

SHARED = "shared"
"""The name that answers give the classifier in a bundle, which answers if the device has no head of its own."""

_ID_LETTERS = 12
"""How many characters of an id an answer shows."""

_LARGEST_FEATURE = 1e15
"""Features beyond this have squares that float32 cannot sum."""

AnyHead = SavedHead | SavedNumeric
"""A head of either kind."""


@dataclass(frozen=True)
class AnswerWithFeatures:
    """An answer, with the features that it was computed from.

    Attributes:
        answer: The answer.
        features: The features (n, d) float32 of the encoder that the head took, or of the raw inputs if it takes those
            alone: one row, or one for each window of a recording.
    """

    answer: Answer
    features: np.ndarray


@dataclass(frozen=True)
class Pair:
    """An encoder and its head. A pair is immutable: a new head or encoder makes a new pair.

    Attributes:
        bundle: Where the encoder comes from.
        encoder: The encoder, with the device's own batch norm statistics if the head was fitted on them.
        head: The head; None: the shared classifier of the bundle answers.
        id: How answers identify this pair.
    """

    bundle: Bundle
    encoder: Encoder
    head: AnyHead | None
    id: PairId

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        head_folder: Path | None,
        precision: Literal["auto", "fp32", "int8"] = "auto",
        threads: int = 1,
    ) -> Pair:
        """Load the pair of a bundle and a saved head, and warm it up.

        Args:
            bundle: A verified bundle.
            head_folder: The folder of a saved head; None: the bundle's shared classifier answers.
            precision: Precision of the encoder; auto: the one that the head was fitted on, or fp32 without a head.
            threads: Number of threads of ONNX Runtime; 0: it chooses.

        Raises:
            FingerprintMismatch: The head was fitted on another encoder.
            StateError: There is no head in the folder, or it is damaged.
            BundleDamaged: The encoder does not run here, or its results differ from those where it was exported.
            UsageError: There is neither a head nor a shared classifier.
        """
        head = None
        if head_folder is not None:
            is_numeric = saved.is_numeric(head_folder)
            load = load_numeric_head if is_numeric else load_head
            head = load(head_folder, bundle, precision)
        if head is None:
            bundle.require_global_head()
            encoder = Encoder.open(bundle, "fp32" if precision == "auto" else precision, threads)
        else:
            encoder = Encoder.open(bundle, head.precision, threads, norm=head.norm)
        return cls.assemble(bundle, encoder, head)

    @classmethod
    def assemble(cls, bundle: Bundle, encoder: Encoder, head: AnyHead | None) -> Pair:
        """Return the pair of loaded parts, after one answer as a warm-up, because the first one takes longest."""
        pair = cls(bundle, encoder, head, _identify(bundle, head))
        pair.answer(np.zeros((1, *pair.input.shape), np.float32))
        return pair

    @property
    def input(self) -> InputSpec:
        """The form of the inputs."""
        return self.bundle.manifest.task.input

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes among which the head chooses; none if it answers with numbers."""
        if self.head is None:
            return self.bundle.manifest.task.class_names
        return () if isinstance(self.head, SavedNumeric) else self.head.class_names

    @property
    def unknown_text(self) -> str:
        """How far its answer "unknown" can be trusted, for people; empty where it never gives that."""
        rule = self.head.confidence.unknown if isinstance(self.head, SavedHead) else None
        return "" if rule is None else rule.misses_text

    def features(self, inputs: np.ndarray) -> np.ndarray:
        """Return the features (n, d) float32 that the head takes, of prepared ``inputs`` (n, *shape) float32.

        They come from the encoder, from the raw inputs if the head belongs to a model that works without an encoder, or
        from both if the head is a blend.
        """
        takes = self.head.takes if isinstance(self.head, SavedHead) else HeadInput()
        return takes.rows(lambda: self.encoder.features(inputs), lambda: inputs)

    def answer(self, inputs: np.ndarray, clock: Callable[[], float] = time.perf_counter) -> AnswerWithFeatures:
        """Answer one input: an image, or a recording of one or more windows.

        Args:
            inputs: The prepared input (n, *shape) float32; n is 1 but for recordings.
            clock: Returns seconds of a monotonic clock; measures the stages of the answer.

        Raises:
            DataError: The shape of the inputs is not that of the task, or the answer is not finite because the values
                are too large.
            BundleDamaged: The encoder does not run.
        """
        started_at = clock()
        features = self.features(inputs)
        encoded_at = clock()
        if not (np.abs(features) <= _LARGEST_FEATURE).all():
            raise DataError("the features of this input are no numbers to compute with; its values are far too large")
        answer = self.answer_features(features)
        # JSON has no word for infinity: such an answer would break whatever shows it later, too.
        if not _is_finite(answer):
            raise DataError("the answer to this input is no finite number; its values are far too large")
        stages = Stages(encode=1000 * (encoded_at - started_at), head=1000 * (clock() - encoded_at))
        encoded = self.head.takes.encoded(features) if isinstance(self.head, SavedHead) else features
        return AnswerWithFeatures(answer.with_stages(stages), encoded)

    def answer_features(self, features: np.ndarray) -> Answer:
        """Return the answer to one input, given its features (n, d) float32."""
        if isinstance(self.head, SavedNumeric):
            return self._answer_with_number(self.head, features)
        class_probabilities = probabilities(self.bundle, self.head, features)
        unknown = None if self.head is None else self.head.is_unknown(features)
        return self._answer_with_class(class_probabilities, unknown)

    def _answer_with_class(self, class_probabilities: np.ndarray, unknown: np.ndarray | None) -> ClassAnswer:
        """Return the answer to an input, or to a recording of several windows.

        Args:
            class_probabilities: The probabilities (n, K) of the classes, one row for each window.
            unknown: Whether each window is unknown, (n,) bool; None: the head has no rule for that.
        """
        windows = []
        for row, window_probabilities in enumerate(class_probabilities):
            is_window_unknown = None if unknown is None else bool(unknown[row])
            windows.append(self._class_answer(window_probabilities, is_window_unknown))
        if len(windows) == 1:
            return windows[0]
        # A recording is answered by the mean of its windows, and is unknown if most of them are.
        is_unknown = None if unknown is None else bool(unknown.mean() > 0.5)
        answer = self._class_answer(class_probabilities.mean(axis=0), is_unknown)
        return replace(answer, windows=tuple(windows))

    def _class_answer(self, class_probabilities: np.ndarray, is_unknown: bool | None) -> ClassAnswer:
        """Return the answer with the probabilities (K,) of the classes."""
        best = int(class_probabilities.argmax())
        by_label = dict(zip(self.class_names, class_probabilities.tolist(), strict=True))
        return ClassAnswer(self.class_names[best], float(class_probabilities[best]), by_label, is_unknown, self.id)

    def _answer_with_number(self, saved_head: SavedNumeric, features: np.ndarray) -> NumberAnswer:
        """Return the prediction or the anomaly score for features (n, d), one row for each window."""
        values: Sequence[float] = saved_head.head.predict(features).tolist()
        is_score = not saved_head.head.predicts_targets
        # One anomalous window makes a recording anomalous, so the largest score counts; predictions are averaged.
        value = max(values) if is_score else sum(values) / len(values)
        threshold = saved_head.head.threshold
        is_anomaly = None
        if is_score and threshold is not None:
            is_anomaly = value > threshold
        windows = tuple(values) if len(values) > 1 else ()
        return NumberAnswer(value, is_score, is_anomaly, threshold, self.id, windows=windows)


def _is_finite(answer: Answer) -> bool:
    """Return whether all numbers of an answer are finite."""
    if isinstance(answer, ClassAnswer):
        return all(map(math.isfinite, answer.probabilities.values()))
    return all(map(math.isfinite, (answer.value, *answer.windows)))


def _identify(bundle: Bundle, head: AnyHead | None) -> PairId:
    """Return the id of a pair; heads with equal arrays have equal ids."""
    bundle_id = bundle.id[:_ID_LETTERS]
    if head is None:
        return PairId(bundle_id, SHARED, "")
    if isinstance(head, SavedNumeric):
        digest = sha256_of(encode(head.head.arrays))
        return PairId(bundle_id, head.head.name, digest[:_ID_LETTERS])
    arrays = {**head.head.arrays, **head.confidence.arrays()}
    local = head.takes.local
    if local is not None:
        arrays |= {f"local.{name}": array for name, array in local.learned.items()}
    digest = sha256_of(encode(arrays))
    return PairId(bundle_id, head.title, digest[:_ID_LETTERS])
