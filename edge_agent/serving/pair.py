"""A pair: an encoder and the head that was fitted on its features, loaded and ready to answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ..bundle.unpacked import Bundle
from ..core.errors import DataError, UsageError
from ..core.storage import sha256_of
from ..core.task import InputSpec
from ..heads import saved
from ..heads.saved import SavedHead, SavedNumeric
from ..personal.encoder import Encoder
from ..personal.personalize import load_head, load_numeric_head, probabilities
from ..wire.tensors import encode
from .answer import Answer, ClassAnswer, NumberAnswer, PairId, Stages

SHARED = "shared"
"""The name of the classifier that came with a bundle, where the device has no head of its own."""

_ID_LETTERS = 12
"""How many characters of an id an answer shows."""

_LARGEST_FEATURE = 1e15
"""Features beyond this have squares that float32 cannot sum."""

AnyHead = SavedHead | SavedNumeric
"""A head of either kind."""


@dataclass(frozen=True)
class Answered:
    """An answer, with the features that it was given for.

    Attributes:
        answer: What is said.
        features: The features (n, d) float32 that the head took: one row, or one for each window of a recording.
    """

    answer: Answer
    features: np.ndarray


@dataclass(frozen=True)
class Pair:
    """An encoder and its head. It does not change: another head or another encoder is another pair.

    Attributes:
        bundle: Where the encoder comes from.
        encoder: The encoder, with the device's own batch norm where the head was fitted on that.
        head: The head; None: the classifier that came with the bundle answers.
        id: How answers name this pair.
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
        """Load the pair of a bundle and of the head in a folder, and let it answer once, which takes longer.

        Args:
            bundle: A verified bundle.
            head_folder: The folder of a saved head; None: the bundle's shared classifier answers.
            precision: That of the encoder; auto: the one that the head was fitted on, else fp32.
            threads: Of ONNX Runtime; 0: as many as it wants.

        Raises:
            FingerprintMismatch: The head was fitted on another encoder.
            StateError: There is no head in the folder, or it is damaged.
            BundleDamaged: The encoder does not run here, or computes something else than where it was exported.
            UsageError: There is neither a head nor a shared classifier.
        """
        head = None
        if head_folder is not None:
            is_numeric = saved.is_numeric(head_folder)
            load = load_numeric_head if is_numeric else load_head
            head = load(head_folder, bundle, precision)
        elif bundle.global_head() is None:
            raise UsageError(
                f"bundle '{bundle.manifest.name}' has no shared classifier, and no head was named; fit one first "
                "('edge-agent fit'), and name its folder (--head)"
            )
        if head is None:
            encoder = Encoder.open(bundle, "fp32" if precision == "auto" else precision, threads)
        else:
            encoder = Encoder.open(bundle, head.precision, threads, norm=head.norm)
        return cls.assemble(bundle, encoder, head)

    @classmethod
    def assemble(cls, bundle: Bundle, encoder: Encoder, head: AnyHead | None) -> Pair:
        """Return the pair of parts that are loaded, after one answer, which takes longer than all others."""
        pair = cls(bundle, encoder, head, _id_of(bundle, head))
        pair.answer(np.zeros((1, *pair.input.shape), np.float32))
        return pair

    @property
    def input(self) -> InputSpec:
        """The form of the inputs."""
        return self.bundle.manifest.task.input

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes that may be answered; none where the head answers with numbers."""
        if self.head is None:
            return self.bundle.manifest.task.class_names
        return () if isinstance(self.head, SavedNumeric) else self.head.class_names

    @property
    def unknown_text(self) -> str:
        """How far its answer "unknown" can be trusted, for people; empty where it never gives that."""
        rule = self.head.confidence.unknown if isinstance(self.head, SavedHead) else None
        return "" if rule is None else rule.misses_text

    def features(self, inputs: np.ndarray) -> np.ndarray:
        """Return what the head takes, (n, d) float32, for prepared ``inputs`` (n, *shape) float32.

        They are the encoder's features, or those of the model without an encoder whose head it is.
        """
        if isinstance(self.head, SavedHead) and self.head.local is not None:
            return self.head.local.features(inputs)
        return self.encoder.features(inputs)

    def answer(self, inputs: np.ndarray, clock: Callable[[], float] = time.perf_counter) -> Answered:
        """Answer one input: an image, or a recording of one or more windows.

        Args:
            inputs: The prepared input (n, *shape) float32; n is 1 but for recordings.
            clock: Seconds, for the times in the answer.

        Raises:
            DataError: The inputs have another shape than the task's, or values so large that the answer is no number.
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
        return Answered(answer.with_stages(stages), features)

    def answer_features(self, features: np.ndarray) -> Answer:
        """Return the answer to one input whose features (n, d) float32 are known."""
        if isinstance(self.head, SavedNumeric):
            return self._number(self.head, features)
        shares = probabilities(self.bundle, self.head, features)
        unknown = None if self.head is None else self.head.confidence.is_unknown(features)
        return self._class(shares, unknown)

    def _class(self, shares: np.ndarray, unknown: np.ndarray | None) -> ClassAnswer:
        """Return the answer with the probabilities (n, K) of an input, or of the windows of a recording."""
        if len(shares) == 1:
            return self._one_class(shares[0], None if unknown is None else bool(unknown[0]))
        windows = []
        for row, row_shares in enumerate(shares):
            windows.append(self._one_class(row_shares, None if unknown is None else bool(unknown[row])))
        # Of a recording the mean counts, and it is unknown where most of its windows are.
        is_unknown = None if unknown is None else bool(unknown.mean() > 0.5)
        whole = self._one_class(shares.mean(axis=0), is_unknown)
        return ClassAnswer(
            whole.label, whole.probability, whole.probabilities, is_unknown, self.id, windows=tuple(windows)
        )

    def _one_class(self, shares: np.ndarray, is_unknown: bool | None) -> ClassAnswer:
        best = int(shares.argmax())
        by_label = dict(zip(self.class_names, shares.tolist(), strict=True))
        return ClassAnswer(self.class_names[best], float(shares[best]), by_label, is_unknown, self.id)

    def _number(self, saved_head: SavedNumeric, features: np.ndarray) -> NumberAnswer:
        values: Sequence[float] = saved_head.head.predict(features).tolist()
        is_score = not saved_head.head.predicts_targets
        # One unusual window makes a recording unusual; a prediction is that of the whole recording.
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


def _id_of(bundle: Bundle, head: AnyHead | None) -> PairId:
    """Return how answers name a pair; heads that have learned the same have the same id."""
    bundle_id = bundle.id[:_ID_LETTERS]
    if head is None:
        return PairId(bundle_id, SHARED, "")
    if isinstance(head, SavedNumeric):
        digest = sha256_of(encode(head.head.arrays))
        return PairId(bundle_id, head.head.name, digest[:_ID_LETTERS])
    local = {} if head.local is None else {f"local.{name}": array for name, array in head.local.learned.items()}
    digest = sha256_of(encode({**head.head.arrays, **head.confidence.arrays(), **local}))
    return PairId(bundle_id, head.title, digest[:_ID_LETTERS])
