"""Clients whose samples the user gives (``name=SOURCE``), and one common encoder: what runs and bundles have in common.

No torch here: features come from a function of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edge_agent import data, heads
from edge_agent.config import NAME_PATTERN
from edge_agent.errors import HeadwaterError, UsageError
from edge_agent.heads import FitData
from edge_agent.personalize import global_probabilities
from edge_agent.task import Task, Tensors

from ..looks import Holding, LeftOut, Look, Part, Settings

Features = Callable[[np.ndarray], np.ndarray]
"""Inputs (n, ...) in, features (n, d) float32 out."""

_NAMED = re.compile(r"([^=:?/]+)=(.+)", re.DOTALL)


def holdings(sources: Sequence[str], task: Task, settings: Settings) -> dict[str, Holding]:
    """Client -> samples, split as a device would split them; sources without a name are called after their place.

    Raises:
        UsageError: a name that cannot be a client's, or one that occurs twice.
        DataError: samples that are missing, or of classes or a form that the task does not have.
    """
    found: dict[str, Holding] = {}
    for given in sources:
        name, source = named(given)
        if name in found:
            raise UsageError(f"--data {given}: client '{name}' occurs twice; name it differently: NAME=SOURCE")
        samples = data.load(source, task.input, task.class_names)
        train, test = data.split(samples, settings.test_fraction, settings.seed)
        found[name] = Holding(Part(train.inputs, train.labels), Part(test.inputs, test.labels))
    return dict(sorted(found.items()))


def named(given: str) -> tuple[str, str]:
    """Name and source of what was given by ``--data``.

    Raises:
        UsageError: the name cannot be a client's.
    """
    match = _NAMED.fullmatch(given)
    if match is not None and not re.fullmatch(NAME_PATTERN, match[1]):
        raise UsageError(f"--data {given}: '{match[1]}' cannot be a client's name, expected {NAME_PATTERN}")
    if match is not None:
        return match[1], match[2]
    last = given.partition("?")[0].rstrip("/").rpartition("/")[2].rpartition(":")[2].lower()
    return re.sub(r"[^a-z0-9_-]+", "-", last).strip("-_")[:50] or "data", given


@dataclass(frozen=True)
class Common:
    """One encoder for everybody, the shared classifier where there is one, and the device head to fit on top."""

    features: Features
    classifier: Tensors | None
    method_params: Mapping[str, Any]
    num_classes: int

    def look(self, client: str, mine: Holding, settings: Settings, left_out: LeftOut, *, closely: bool) -> Look:
        """What this encoder makes of one client's samples."""
        some = mine.test.some(settings.samples, settings.seed)
        found = Look(
            client=client,
            labels=some.labels,
            views={"encoder": self.features(some.inputs)},
            probe={},
            answers={},
            truth=mine.test.labels,
            counts=np.bincount(mine.train.labels, minlength=self.num_classes),
        )
        if not closely or not found.is_finite():
            return found
        trained = Part(self.features(mine.train.inputs), mine.train.labels)
        answers = dict(self._answers(client, self.features(mine.test.inputs), trained, settings, left_out))
        return replace(found, answers=answers, trained=trained)

    def _answers(
        self, client: str, tested: np.ndarray, trained: Part, settings: Settings, left_out: LeftOut
    ) -> Iterator[tuple[str, np.ndarray]]:
        if self.classifier is not None:
            yield "global", global_probabilities(self.classifier, tested).argmax(axis=1)
        try:
            head = heads.create(settings.head)
            head.fit(
                FitData(trained.inputs, trained.labels, self.num_classes, self.classifier, self.method_params),
                np.random.default_rng(settings.seed),
            )
        except UsageError:
            raise
        except HeadwaterError as error:
            left_out.note(f"accuracies of client {client} with head {settings.head}", str(error))
            return
        yield settings.head, head.predict_proba(tested).argmax(axis=1)
