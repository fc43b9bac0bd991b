"""A simulation's folder: it knows who has which samples, and keeps what each client keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_agent.agent.duties import LAST_ROUND
from edge_agent.agent.kept import KeptFiles
from edge_agent.data.partition.rules import GROUPS
from edge_agent.errors import StateError, UsageError
from edge_agent.training.session import Arrays, Kept, Session
from edge_agent.wire.tensors import decode

from ...keeping import states_of
from ...simulate import CLIENTS, PARTITION, Prepared, planned
from ...simulate.folder import computing_as_begun
from ...store import StateFolder
from ..looks import Holding, Look, Mixing, Part, Settings, Subject, masked
from .runs import mixing_of

if TYPE_CHECKING:
    import torch

    from edge_agent.methods.base import Client


class Simulated(Subject):
    """A simulation that was run here, whole or so far."""

    kind = "simulation"

    def __init__(self, path: Path, prepared: Prepared, folder: StateFolder, run: str) -> None:
        super().__init__(str(path), run, prepared.method.name, prepared.task.class_names)
        self._path, self._prepared, self._folder = path, prepared, folder
        with folder.look():
            self._states = states_of(folder, run)
            self._is_over = folder.journal.replay(run).is_over
        if len(self._states) == 1:
            self.left_out.note("earlier rounds", "the run kept its last state only; --keep-every keeps more")

    @classmethod
    def at(cls, path: Path, data: Sequence[str]) -> Simulated:
        """The simulation in ``path``.

        Raises:
            UsageError: data were given, or no round has closed yet.
            DataError: its data are not there any more.
            StateError: files are damaged.
        """
        if data:
            raise UsageError(f"{path} is a simulation and knows its data: leave --data out")
        plan, folder = planned(path), StateFolder(path)
        with folder.look():
            runs = folder.journal.runs()
            closed = folder.journal.replay(runs[0]).round if runs else 0
        if plan is None or not closed:
            raise UsageError(f"{path}: no round of this simulation has closed yet; there is nothing to analyze")
        with folder.look():
            prepared = computing_as_begun(folder, runs[0], Prepared.of(plan, path / PARTITION))
        return cls(path, prepared, folder, runs[0])

    @property
    def clients(self) -> tuple[str, ...]:
        """All of the partition."""
        return tuple(self._prepared.division.clients)

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds whose states were kept."""
        return tuple(self._states)

    def holding(self, client: str) -> Holding:
        """One client's samples, copied out of the pools."""
        train, test = self._prepared.pools.arrays(self._prepared.division.clients[client])
        return Holding(Part(train.inputs, train.labels), Part(test.inputs, test.labels))

    def looks(self, number: int, settings: Settings, probe: np.ndarray) -> Iterator[Look]:
        """One look for each client, at what it would begin the next round with."""
        state, method = decode(self._folder.blobs.read(self._states[number])), self._prepared.method
        shared = method.broadcast(state)
        for name in self.tested():
            mine = self.holding(name)
            received = {**shared, **method.downlink(state, name)}
            session = self._session(name, mine)
            rounds = self._prepared.plan.rounds
            client = session.before_round(received, self._kept(name, number), round_number=number + 1, rounds=rounds)
            look = masked(self._look(client, mine, settings, probe))
            yield self._closer(look, client, mine) if number == self.rounds[-1] and look.is_finite() else look

    def mixing(self, number: int) -> Mixing | None:
        """The weights of a method that combines classifiers."""
        if not hasattr(self._prepared.method, "combination"):
            return None
        return mixing_of(self._prepared.method, decode(self._folder.blobs.read(self._states[number])))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the run's ``metrics.jsonl``."""
        return self._folder.run(self.run).metrics()

    def groups(self) -> dict[str, str]:
        """Clients of FedPAC's partition by its rule, those of ``pathological`` by the classes that they train on."""
        rule = self._prepared.division.rule
        if rule == "fedpac":
            names = [", ".join(self.class_names[label] for label in group) for group in GROUPS]
            return {client: names[place % len(names)] for place, client in enumerate(self.clients)}
        if rule == "pathological":
            return {client: self._classes(client) for client in self.clients}
        return {}

    def _classes(self, client: str) -> str:
        labels = self._prepared.pools.train.labels[np.asarray(self._prepared.division.clients[client].train)]
        return ", ".join(self.class_names[label] for label in np.unique(labels))

    def _session(self, name: str, mine: Holding) -> Session:
        plan = self._prepared.plan
        parts = (Arrays(part.inputs, part.labels) for part in (mine.train, mine.test))
        return Session(
            self._prepared.method,
            self._prepared.task,
            name,
            *parts,
            seed=plan.seed,
            device=plan.device,
            model=self._prepared.model,
        )

    def _kept(self, client: str, number: int) -> Kept:
        """What stood with the client after that round, personalized after the last one where the run has ended."""
        files = KeptFiles(self._path / CLIENTS / client / "runs" / self.run)
        is_last = number == self.rounds[-1] and self._is_over
        try:
            return Kept(*files.before((LAST_ROUND if is_last else number) + 1))
        except StateError as error:
            raise StateError(f"client '{client}' after round {number}: {error}") from error

    def _look(self, client: Client, mine: Holding, settings: Settings, probe: np.ndarray) -> Look:
        some, method = mine.test.some(settings.samples, settings.seed), self._prepared.method
        return Look(
            client=client.id,
            labels=some.labels,
            views=_views(client, method, some.inputs),
            probe=_views(client, method, probe),
            answers={},
            truth=mine.test.labels,
            counts=np.bincount(mine.train.labels, minlength=len(self.class_names)),
        )

    def _closer(self, look: Look, client: Client, mine: Holding) -> Look:
        method, tested = self._prepared.method, _tensor(client, mine.test.inputs)
        scopes = {"personal": method.predict(client, tested), "global": method.predict_global(client, tested)}
        answers = {s: found.argmax(dim=1).cpu().numpy() for s, found in scopes.items() if found is not None}
        trained = Part(_views(client, method, mine.train.inputs)["encoder"], mine.train.labels)
        return replace(look, answers=answers, trained=trained)


def _views(client: Client, method: Any, inputs: np.ndarray) -> dict[str, np.ndarray]:
    found = method.views(client, _tensor(client, inputs))
    return {name: tensor.cpu().numpy() for name, tensor in found.items()}


def _tensor(client: Client, inputs: np.ndarray) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(inputs, np.float32)).to(client.device)
