"""The answer of a personal model to one input: a class with its probability, or a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

_DIGITS = 6
"""Decimals to which probabilities and other numbers are rounded in JSON."""


@dataclass(frozen=True)
class PairId:
    """The encoder and the head that gave an answer.

    Attributes:
        bundle: The first twelve characters of the bundle's id.
        head: The name of the head; ``shared`` for the classifier that came with the bundle.
        head_id: The first twelve characters of the SHA-256 of all arrays of the head; empty for ``shared``.
    """

    bundle: str
    head: str
    head_id: str

    def __str__(self) -> str:
        """Return the pair as one word, for logs: bundle and head, separated by a slash."""
        return f"{self.bundle}/{self.head_id or self.head}"

    def as_json(self) -> dict[str, str]:
        """Return the fields that identify the pair in the JSON of an answer."""
        return {"bundle": self.bundle, "head": self.head, "head_id": self.head_id}


@dataclass(frozen=True)
class Stages:
    """How long each step of an answer took, in milliseconds."""

    decode: float = 0.0
    encode: float = 0.0
    head: float = 0.0

    def as_json(self) -> dict[str, float]:
        """Return the stages by name, in milliseconds."""
        return {name: round(value, 3) for name, value in vars(self).items()}


@dataclass(frozen=True)
class ClassAnswer:
    """The most probable class of an input, with the probabilities of all classes.

    Attributes:
        label: The most probable class.
        probability: Its probability, 0..1.
        probabilities: The probability of each class, 0..1, in the head's order.
        is_unknown: Whether the input is unlike all training samples; None where the head has no rule for that.
        pair: The encoder and the head that computed the answer.
        stages: How long each step took.
        windows: The answers to the windows of a recording, in time order; none for a single input.
    """

    label: str
    probability: float
    probabilities: Mapping[str, float]
    is_unknown: bool | None
    pair: PairId
    stages: Stages = field(default_factory=Stages)
    windows: tuple[ClassAnswer, ...] = ()

    @property
    def state(self) -> str:
        """The answer in one word, for people: the class, or ``unknown``."""
        return "unknown" if self.is_unknown else self.label

    def with_stages(self, stages: Stages) -> ClassAnswer:
        """Return the same answer with other measured times."""
        return replace(self, stages=stages)

    def as_json(self) -> dict[str, Any]:
        """Return the answer as a JSON object."""
        content: dict[str, Any] = {
            "class": self.label,
            "probability": round(self.probability, _DIGITS),
            "unknown": self.is_unknown,
            "probabilities": {label: round(value, _DIGITS) for label, value in self.probabilities.items()},
        }
        content |= {**self.pair.as_json(), "ms": self.stages.as_json()}
        if self.windows:
            content["windows"] = [
                {"class": window.label, "probability": round(window.probability, _DIGITS), "unknown": window.is_unknown}
                for window in self.windows
            ]
        return content


@dataclass(frozen=True)
class NumberAnswer:
    """A number: the value that a regression head predicts, or the anomaly score of an input.

    Attributes:
        value: The number. For a recording it is the mean over its windows if it is a prediction, and the maximum if it
            is an anomaly score.
        is_score: Whether the number is an anomaly score; otherwise it is a prediction.
        is_anomaly: Whether the score is above the threshold; None for predictions, and if there is no threshold.
        threshold: The score above which an input is an anomaly; None if there is none.
        pair: The encoder and the head that computed the answer.
        stages: How long each step took.
        windows: The numbers of the windows of a recording, in time order; none for a single input.
    """

    value: float
    is_score: bool
    is_anomaly: bool | None
    threshold: float | None
    pair: PairId
    stages: Stages = field(default_factory=Stages)
    windows: tuple[float, ...] = ()

    @property
    def state(self) -> str:
        """The answer in one word, for people: ``normal`` or ``anomaly`` if there is a threshold, else the number."""
        if self.is_anomaly is None:
            return f"{self.value:.4g}"
        return "anomaly" if self.is_anomaly else "normal"

    def with_stages(self, stages: Stages) -> NumberAnswer:
        """Return the same answer with other measured times."""
        return replace(self, stages=stages)

    def as_json(self) -> dict[str, Any]:
        """Return the answer as a JSON object."""
        content: dict[str, Any] = {"value": round(self.value, _DIGITS)}
        if self.is_score:
            threshold = None if self.threshold is None else round(self.threshold, _DIGITS)
            content = {"score": round(self.value, _DIGITS), "anomaly": self.is_anomaly, "threshold": threshold}
        content |= {**self.pair.as_json(), "ms": self.stages.as_json()}
        if self.windows:
            content["windows"] = [round(value, _DIGITS) for value in self.windows]
        return content


Answer: TypeAlias = "ClassAnswer | NumberAnswer"
"""The answer of a pair to one input."""
