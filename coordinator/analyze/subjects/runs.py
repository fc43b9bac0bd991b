"""A coordinator's run: the shared states that it kept, its figures, and clients' samples where the user gives some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent import methods
from edge_agent.errors import ExportRejected, UsageError
from edge_agent.task import State
from edge_agent.wire.tensors import decode

from ...keeping import states_of
from ...pooling import pooled_before
from ...request import Request
from ...store import StateFolder
from ..looks import Holding, Look, Mixing, Settings, Subject
from . import Place
from .given import Common, Features, holdings

BATCH = 512


class Recorded(Subject):
    """The coordinator's side of a run; personal parts are on the devices and stay there."""

    kind = "run"

    def __init__(self, folder: StateFolder, run: str, request: Request, held: dict[str, Holding]) -> None:
        super().__init__(str(folder.path), run, request.method, request.task.class_names)
        self._folder, self._request, self._held = folder, request, held
        self._method = methods.create(request.method, request.params)
        with folder.look():
            self._states = states_of(folder, run)
        self.left_out.note("personal parts (projector, mask, classifiers)", "they never leave their devices")
        if held:
            self.left_out.note("client-wise CKA", "all clients receive this one encoder, so it would be 1")
        else:
            self.left_out.note("features and accuracies of classes", "no samples: give --data NAME=SOURCE")

    @classmethod
    def at(cls, state: Path, run: str | None, place: Place, settings: Settings) -> Recorded:
        """The run of that name in a state folder; without a name the latest that has closed a round.

        Raises:
            UnknownName: no such run.
            UsageError: no run there with a closed round.
            StateError: no journal there, or a damaged one.
        """
        folder = StateFolder(state)
        with folder.look():
            record = folder.journal.replay(run or _latest(folder))
        if not record.round:
            raise UsageError(f"{record.run} has no closed round yet; there is nothing to analyze before the first one")
        request = Request.from_body(record.request)
        return cls(folder, record.run, request, holdings(place.data, request.task, settings))

    @property
    def clients(self) -> tuple[str, ...]:
        """Those of ``--data``."""
        return tuple(self._held)

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds whose states were kept."""
        return tuple(self._states)

    def holding(self, client: str) -> Holding:
        """One client's samples."""
        return self._held[client]

    def looks(self, number: int, settings: Settings, probe: np.ndarray) -> Iterator[Look]:  # noqa: ARG002 - one encoder
        """One look for each client, as far as the encoder of that round is whole."""
        state = self._state(number)
        try:
            features = _features(self._method, self._request, {**state, **self._pooled(number)})
        except ExportRejected as error:
            self.left_out.note(f"features after round {number}", str(error))
            return
        classifier, classes = self._method.global_head(state), self._request.task.num_classes
        common = Common(features, classifier, self._method.params.model_dump(mode="json"), classes)
        for client in self.tested():
            closely = number == self.rounds[-1]
            yield common.look(client, self._held[client], settings, self.left_out, closely=closely)

    def mixing(self, number: int) -> Mixing | None:
        """The weights of a method that combines classifiers."""
        return mixing_of(self._method, self._state(number)) if hasattr(self._method, "combination") else None

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the run's ``metrics.jsonl``."""
        return self._folder.run(self.run).metrics()

    def _state(self, number: int) -> State:
        return decode(self._folder.blobs.read(self._states[number]))

    def _pooled(self, number: int) -> State:
        with self._folder.look():
            return pooled_before(self._folder, self.run, number)


def mixing_of(method: Any, state: State) -> Mixing | None:
    """The weights in a state of a method with ``combination``; None before the first round."""
    names, weights = method.combination(state)
    return Mixing(tuple(names), np.asarray(weights, np.float64)) if names else None


def _features(method: methods.Method, request: Request, state: State) -> Features:
    import torch

    from edge_agent.training.loops import features_of
    from export.bundle import model_from_state

    model = model_from_state(method, request.task, state)

    def features(inputs: np.ndarray) -> np.ndarray:
        found: np.ndarray = features_of(model, torch.from_numpy(np.ascontiguousarray(inputs)), BATCH).numpy()
        return found

    return features


def _latest(folder: StateFolder) -> str:
    names: Sequence[str] = folder.journal.runs()
    for run in reversed(names):
        if folder.journal.replay(run).round:
            return run
    raise UsageError(f"{folder.path}: no run has closed a round yet; 'headwater run' starts one")
