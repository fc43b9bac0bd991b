"""A simulation as the target of an analysis: its clients' models are restored as of any saved round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

from ...simulation.setup import CLIENTS, PARTITION, Prepared, computing_as_begun, planned
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
        """The simulation in ``path``.

        Raises:
            UsageError: data were given, or no round has closed yet.
            DataError: its data are no longer available.
            StateError: files are damaged.
        """
        if data:
            raise UsageError(f"{path} is a simulation, which has its own data; leave --data out")
        plan = planned(path)
        folder = StateFolder(path)
        with folder.look():
            runs = folder.journal.runs()
            closed = replay(folder.journal, runs[0]).round if runs else 0
        if plan is None or not closed:
            raise UsageError(f"{path}: no round of this simulation has closed yet; there is nothing to analyze")
        with folder.look():
            prepared = computing_as_begun(folder, runs[0], Prepared.of(plan, path / PARTITION))
        return cls(path, prepared, folder, runs[0])

    def samples_of(self, client: str) -> ClientSamples:
        """One client's samples, copied out of the pools."""
        train, test = self._prepared.pools.arrays(self._prepared.division.clients[client])
        return ClientSamples(LabelledSamples(train.inputs, train.labels), LabelledSamples(test.inputs, test.labels))

    def feature_views(self, number: int, settings: Settings, probe: np.ndarray) -> Iterator[FeatureView]:
        """Yield a view of each client, in the state in which it would begin the next round."""
        state = self.state(number)
        method = self._method
        plan = self._prepared.plan
        shared = method.broadcast(state)
        for name in self.tested():
            mine = self.samples_of(name)
            received = {**shared, **method.downlink(state, name)}
            saved = self._client_state(name, number)
            session = Session(
                method,
                self._task,
                name,
                *(Arrays(part.inputs, part.labels) for part in (mine.train, mine.test)),
                seed=plan.seed,
                device=plan.device,
                model=self._prepared.model,
            )
            client = session.before_round(received, saved, round_number=number + 1, rounds=plan.rounds)
            some = mine.test.some(settings.samples, settings.seed)
            kinds, probed = (_features_by_kind(client, method, inputs) for inputs in (some.inputs, probe))
            probed.pop("mask", None)
            view = FeatureView(
                client=name,
                labels=some.labels,
                mask=kinds.pop("mask", None),
                kinds=kinds,
                probe=probed,
                answers={},
                truth=mine.test.labels,
                counts=np.bincount(mine.train.labels, minlength=len(self.class_names)),
            )
            has_details = number == self.rounds[-1] and view.is_finite()
            yield _with_details(view, client, method, mine) if has_details else view

    def groups(self) -> dict[str, str]:
        """Clients of FedPAC's partition by its rule, those of ``pathological`` by the classes that they train on."""
        rule = self._prepared.division.rule
        if rule == "fedpac":
            names = [", ".join(self.class_names[label] for label in group) for group in GROUPS]
            return {client: names[index % len(names)] for index, client in enumerate(self.clients)}
        if rule == "pathological":
            labels = self._prepared.pools.train.labels
            return {
                client: ", ".join(self.class_names[label] for label in np.unique(labels[np.asarray(share.train)]))
                for client, share in self._prepared.division.clients.items()
            }
        return {}

    def _client_state(self, client: str, number: int) -> ClientState:
        """The client's state after that round, personalized after the last one of a run that has ended."""
        files = ClientStateFiles(self._path / CLIENTS / client / "runs" / self.run)
        is_last = number == self.rounds[-1] and self._is_over
        try:
            return ClientState(*files.before((LAST_ROUND if is_last else number) + 1))
        except StateError as error:
            raise StateError(f"client '{client}' after round {number}: {error}") from error


def _with_details(view: FeatureView, client: Client, method: Any, mine: ClientSamples) -> FeatureView:
    tested = _tensor(client, mine.test.inputs)
    scopes = {"personal": method.predict(client, tested), "global": method.predict_global(client, tested)}
    answers = {s: result.argmax(dim=1).cpu().numpy() for s, result in scopes.items() if result is not None}
    trained = LabelledSamples(_features_by_kind(client, method, mine.train.inputs)["encoder"], mine.train.labels)
    return replace(view, answers=answers, trained=trained)


def _features_by_kind(client: Client, method: Any, inputs: np.ndarray) -> dict[str, np.ndarray]:
    result = method.views(client, _tensor(client, inputs))
    return {name: tensor.cpu().numpy() for name, tensor in result.items()}


def _tensor(client: Client, inputs: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(inputs, np.float32)).to(client.device)
