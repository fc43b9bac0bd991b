"""Two heads that answer together: the product of their probabilities, each to the power of its share.

`edge_agent.personal.blend` makes it of a head on the encoder's features and a model of the raw inputs, which
err on other samples. Without ``split`` it blends two heads on the same features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field, field_validator, model_validator

from ..core.errors import UsageError
from ..core.graph import DOUBLE, Graph, Value
from ..core.task import Tensors
from . import check, create
from .base import FitData, Head, HeadParams, softmax

FLOOR = 1e-3
"""The probability, divided among the classes, that a head cannot take from them: none rules out a class by itself."""

_FIRST = "first."
_SECOND = "second."


class BlendParams(HeadParams):
    """The two heads, their parameters, which features each of them takes, and how much each of them counts."""

    first: str = Field("lr", description="the first head")
    first_params: dict[str, Any] = Field(default_factory=dict, description="its parameters")
    second: str = Field("knn", description="the second head")
    second_params: dict[str, Any] = Field(default_factory=dict, description="its parameters")
    split: int = Field(
        0, ge=0, description="the features before this position are the first head's, the others the second's; 0: both "
        "take all of them",
    )  # fmt: skip
    share: float = Field(
        0.5, ge=0, le=1, description="the power of the first head's probabilities; the others get the rest to 1"
    )
    second_samples: int = Field(
        0, ge=0, description="the second head learns from at most so many samples, drawn at random; 0: from all"
    )

    @field_validator("first", "second")
    @classmethod
    def _is_no_blend(cls, name: str) -> str:
        if name == "blend":
            raise ValueError("a blend is of two other heads; name one of those, such as lr")
        return name

    @model_validator(mode="after")
    def _has_two_heads(self) -> BlendParams:
        """Find mistakes in both heads before anything is computed; they are errors as of the heads themselves."""
        check(self.first, self.first_params)
        check(self.second, self.second_params)
        return self


class BlendHead(Head):
    """The logarithmic opinion pool of two heads (Genest and Zidek, Statistical Science 1986, Section 3)."""

    Params = BlendParams
    uses_shared = True
    source = "ours: a logarithmic opinion pool of a head on the encoder's features and a model of the raw inputs"

    def __init__(self, params: HeadParams | None = None) -> None:
        super().__init__(params)
        self._parts: tuple[Head, Head] | None = None
        self._parts_of: Tensors | None = None

    def answers_of_parts(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what the two heads answer for ``features`` (n, d) float32: probabilities (n, K) float64 each.

        Raises:
            StateError: The head has not been fitted.
        """
        self._check_fitted("answers_of_parts")
        if "only_class" in self.arrays:
            certain = self.predict_proba(features)
            return certain, certain
        first, second = self._fitted_parts()
        first_columns, second_columns = self._columns(features)
        return first.predict_proba(first_columns), second.predict_proba(second_columns)

    def _fit(self, data: FitData, classes: np.ndarray, rng: np.random.Generator) -> Tensors:
        first, second = self._new_parts()
        split = self.params.split
        if split >= self.feature_dim:
            raise UsageError(
                f"head 'blend' with split = {split} needs more features than that, and there are {self.feature_dim} "
                "features; give a lower split, or 0"
            )
        first_columns, second_columns = self._columns(data.features)
        # The shared classifier, the statistics and the method belong to the encoder's features, and to all of them.
        first_data = replace(data, features=first_columns)
        count = first_columns.shape[1]
        if data.global_head is not None and data.global_head["weight"].shape[1] != count:
            first_data = replace(first_data, global_head=None)
        if data.statistics is not None and len(data.statistics["mean"]) != count:
            first_data = replace(first_data, statistics=None)
        first.fit(first_data, rng)
        second_data = replace(data, features=second_columns)
        if split:
            second_data = FitData(second_columns, data.labels, data.num_classes)
        most = self.params.second_samples
        if most and len(data.labels) > most:
            rows = np.sort(rng.permutation(len(data.labels))[:most])
            second_data = replace(second_data, features=second_columns[rows], labels=data.labels[rows])
        second.fit(second_data, rng)
        return {
            **{f"{_FIRST}{name}": array for name, array in first.arrays.items()},
            **{f"{_SECOND}{name}": array for name, array in second.arrays.items()},
        }

    def _predict(self, features: np.ndarray) -> np.ndarray:
        first, second = self.answers_of_parts(features)
        classes = self.arrays["classes"]
        return pool(first[:, classes], second[:, classes], self.params.share)

    def _write(self, graph: Graph, features: Value) -> Value:
        classes = self.arrays["classes"]
        split = self.params.split
        first_columns = second_columns = features
        if split:
            first_columns = graph.columns(features, 0, split)
            second_columns = graph.columns(features, split, self.feature_dim)
        first, second = self._fitted_parts()
        first_answers = graph.add("Gather", first.write(graph, first_columns), classes, axis=1)
        second_answers = graph.add("Gather", second.write(graph, second_columns), classes, axis=1)
        return write_pool(graph, (first_answers, second_answers), self.params.share, len(classes))

    def _columns(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the features (n, d) of the first head, and those of the second."""
        split = self.params.split
        return (features[:, :split], features[:, split:]) if split else (features, features)

    def _new_parts(self) -> tuple[Head, Head]:
        params = self.params
        return create(params.first, params.first_params), create(params.second, params.second_params)

    def _fitted_parts(self) -> tuple[Head, Head]:
        """Return the two heads with their arrays; they are made once for the arrays that this head has now."""
        if self._parts is None or self._parts_of is not self.arrays:
            split = self.params.split
            dims = (split, self.feature_dim - split if self.feature_dim else 0)
            if not split:
                dims = (self.feature_dim, self.feature_dim)
            parts = self._new_parts()
            for part, prefix, dim in zip(parts, (_FIRST, _SECOND), dims, strict=True):
                arrays = {name: array for name, array in self.arrays.items() if name.startswith(prefix)}
                part.load({name.removeprefix(prefix): array for name, array in arrays.items()}, self.num_classes, dim)
            self._parts = parts
            self._parts_of = self.arrays
        return self._parts


def pool(first: np.ndarray, second: np.ndarray, share: float) -> np.ndarray:
    """Return the product of two heads' probabilities (n, k), to the powers ``share`` and 1 - ``share``; rows sum to 1.

    A class that both give probability 0, such as one that neither of them knows, keeps it; one alone does not rule out
    a class, see `FLOOR`.
    """
    logits = np.zeros(first.shape)
    for probabilities, power in ((first, share), (second, 1.0 - share)):
        logits += power * floored_logarithms(probabilities)
    result = softmax(logits) * (first + second > 0)
    return np.asarray(result / result.sum(axis=1, keepdims=True))


def floored_logarithms(probabilities: np.ndarray) -> np.ndarray:
    """Return the logarithms (n, k) of probabilities (n, k) of which `FLOOR` is divided among the classes."""
    return np.asarray(np.log((1.0 - FLOOR) * probabilities + FLOOR / probabilities.shape[1]))


def write_pool(graph: Graph, answers: tuple[Value, Value], share: float, classes: int) -> Value:
    """Write what `pool` computes for the ``answers`` of two heads, matrices (n, ``classes``) float64."""
    terms = []
    for probabilities, power in zip(answers, (share, 1.0 - share), strict=True):
        floored = graph.add("Mul", probabilities, np.array(1.0 - FLOOR))
        floored = graph.add("Add", floored, np.array(FLOOR / classes))
        terms.append(graph.add("Mul", graph.add("Log", floored), np.array(power)))
    product = graph.softmax(graph.add("Add", *terms))
    is_possible = graph.add("Greater", graph.add("Add", *answers), np.array(0.0))
    kept = graph.add("Mul", product, graph.cast(is_possible, DOUBLE))
    return graph.add("Div", kept, graph.sum_rows(kept))
