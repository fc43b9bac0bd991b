"""A simulation as the target of an analysis: its clients' models are restored as of any saved round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_agent.client import Arrays, ClientState, Session
from edge_agent.core.errors import StateError, UsageError
from edge_agent.data.partition import GROUPS
from edge_agent.methods.values import Client
from edge_agent.run_folder.client_state import LAST_ROUND, ClientStateFiles

from ...simulation.setup import CLIENTS, PARTITION, Prepared, computing_as_begun, read_plan
from ...state.store import StateFolder
from ...views.runs import replay
from .settings import Settings
from .targets import ClientSamples, FeatureView, LabelledSamples, StoredRun


class SimulationTarget(StoredRun):
    """A simulation with at least one closed round."""

    kind = "simulation"

    def __init__(self, path: Path, prepared: Prepared, folder: StateFolder, run: str) -> None:
        with folder.look():
            self._is_over = replay(folder.journal, run).is_over
        super().__init__(str(path), folder, run, prepared.method, prepared.task, prepared.division.clients)
        self._path = path
        self._prepared = prepared
        if len(self.rounds) == 1:
            self.left_out.note("earlier rounds", "the run kept its last state only; --keep-every keeps more")

    @classmethod
    def at(cls, path: Path, data: Sequence[str]) -> SimulationTarget:
        """Open the simulation in ``path``.

        Raises:
            UsageError: Data were given, or no round has closed yet.
            DataError: The simulation's data are no longer available.
            StateError: Files are damaged.
        """
        if data:
            raise UsageError(f"{path} is a simulation, which has its own data; leave --data out")
        plan = read_plan(path)
        folder = StateFolder(path)
        with folder.look():
            runs = folder.journal.runs()
            closed = 0
            if runs:
                closed = replay(folder.journal, runs[0]).round
        if plan is None or not closed:
            raise UsageError(f"{path}: no round of this simulation has closed yet; there is nothing to analyze")
        with folder.look():
            prepared = computing_as_begun(folder, runs[0], Prepared.of(plan, path / PARTITION))
        return cls(path, prepared, folder, runs[0])

    def samples_of(self, client: str) -> ClientSamples:
        """Return one client's samples, copied out of the pools."""
        train, test = self._prepared.pools.arrays(self._prepared.division.clients[client])
        return ClientSamples(LabelledSamples(train.inputs, train.labels), LabelledSamples(test.inputs, test.labels))

    def feature_views(self, number: int, settings: Settings, probe: np.ndarray) -> Iterator[FeatureView]:
        """Yield a view of each client, in the state in which it would begin the next round."""
        state = self.state(number)
        method = self._method
        plan = self._prepared.plan
        shared = method.broadcast(state)
        for name in self.clients_with_test_samples():
            # 1. The client's model as it is at the beginning of the next round.
            own_samples = self.samples_of(name)
            received = {**shared, **method.downlink(state, name)}
            saved = self._client_state(name, number)
            session = Session(
                method,
                self._task,
                name,
                Arrays(own_samples.train.inputs, own_samples.train.labels),
                Arrays(own_samples.test.inputs, own_samples.test.labels),
                seed=plan.seed,
                device=plan.device,
                model=self._prepared.model,
            )
            client = session.before_round(received, saved, round_number=number + 1, rounds=plan.rounds)
            # 2. Its features of some of its test samples, and of the inputs that all clients are compared on.
            some = own_samples.test.some(settings.samples, settings.seed)
            kinds = _features_by_kind(client, method, some.inputs)
            probed = _features_by_kind(client, method, probe)
            probed.pop("mask", None)
            view = FeatureView(
                client=name,
                labels=some.labels,
                mask=kinds.pop("mask", None),
                kinds=kinds,
                probe=probed,
                answers={},
                truth=own_samples.test.labels,
                counts=np.bincount(own_samples.train.labels, minlength=len(self.class_names)),
            )
            # 3. Details take as long as all rounds before, so that only the last round has them.
            if number == self.rounds[-1] and view.is_finite():
                view = _with_details(view, client, method, own_samples)
            yield view

    def groups(self) -> dict[str, str]:
        """Return the group of each client: by FedPAC's rule, or by the classes that ``pathological`` gave it."""
        division = self._prepared.division
        groups = {}
        if division.rule == "fedpac":
            names = [self._joined_names(group) for group in GROUPS]
            for index, client in enumerate(self.clients):
                groups[client] = names[index % len(names)]
        elif division.rule in {"pathological", "fedrir_pathological"}:
            labels = self._prepared.pools.train.labels
            for client, share in division.clients.items():
                groups[client] = self._joined_names(np.unique(labels[np.asarray(share.train)]))
        return groups

    def _joined_names(self, labels: Iterable[int]) -> str:
        """Return the names of some classes as text."""
        return ", ".join(self.class_names[label] for label in labels)

    def _client_state(self, client: str, number: int) -> ClientState:
        """Return the client's state after that round, personalized after the last one of a run that has ended."""
        files = ClientStateFiles(self._path / CLIENTS / client / "runs" / self.run)
        newest = number
        if number == self.rounds[-1] and self._is_over:
            newest = LAST_ROUND
        try:
            return ClientState(*files.before(newest + 1))
        except StateError as error:
            raise StateError(f"client '{client}' after round {number}: {error}") from error


def _with_details(view: FeatureView, client: Client, method: Any, own_samples: ClientSamples) -> FeatureView:
    """Add the answers of the client's models to all its test samples, and the features of its training samples."""
    inputs = _tensor(client, own_samples.test.inputs)
    probabilities = {"personal": method.predict(client, inputs), "global": method.predict_global(client, inputs)}
    answers = {}
    for scope, result in probabilities.items():
        if result is not None:
            answers[scope] = result.argmax(dim=1).cpu().numpy()
    features = _features_by_kind(client, method, own_samples.train.inputs)["encoder"]
    return replace(view, answers=answers, trained=LabelledSamples(features, own_samples.train.labels))


def _features_by_kind(client: Client, method: Any, inputs: np.ndarray) -> dict[str, np.ndarray]:
    """Return kind -> features (n, d) of inputs (n, ...), and the mask (n, d) of a method that has one."""
    views = method.views(client, _tensor(client, inputs))
    return {name: tensor.cpu().numpy() for name, tensor in views.items()}


def _tensor(client: Client, inputs: np.ndarray) -> torch.Tensor:
    """Return inputs as a tensor of float32 on the client's device."""
    return torch.from_numpy(np.ascontiguousarray(inputs, np.float32)).to(client.device)
