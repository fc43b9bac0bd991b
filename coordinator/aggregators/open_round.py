"""What is collected now, as a file in the shared folder: with thousands of agents it is too large for a message."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from edge_agent import methods
from edge_agent.core.errors import StateError, cause
from edge_agent.core.storage import private_folder, read_regular, write_atomic
from edge_agent.core.task import Frozen
from edge_agent.methods import Method

from ..fleet.collection import Collection
from ..rounds.compute_requests import Forms, MethodValues, OfMethod
from ..rounds.server_side import Described, forms_of, specs_from_forms
from ..views.runs import Accepted, Rejection

_FILE = re.compile(r"round-[0-9a-f]{64}\.json")


class OpenRound(Frozen):
    """A collection, without what has arrived since it was opened."""

    run: str
    """The run's id in messages."""

    round: int
    purpose: Literal["train"] = "train"
    cohort: tuple[str, ...]
    joining: tuple[str, ...]
    update: Forms
    extras: Forms
    accepted: dict[str, tuple[str, float]]
    """Agent -> digest of its update, and its sample count, of those that have arrived before."""

    rejected: dict[str, str]
    """Agent -> reason."""

    about: OfMethod
    values: MethodValues

    @classmethod
    def from_collection(cls, collection: Collection, run: str, about: OfMethod, values: MethodValues) -> OpenRound:
        """Return the description of what a collection takes.

        Args:
            collection: The collection.
            run: The run's id in messages.
            about: What makes the run's method; its folder of blobs is that of each process, and stays behind.
            values: What the coordinator knows of the method.
        """
        return cls(
            run=run,
            round=collection.round,
            cohort=collection.cohort,
            joining=collection.joining,
            update=forms_of(collection.expected),
            extras=forms_of(collection.extras),
            accepted={agent: (update.digest, update.samples) for agent, update in collection.accepted.items()},
            rejected={agent: rejection.reason for agent, rejection in collection.rejected.items()},
            about=OfMethod(method=about.method, params=about.params),
            values=values,
        )

    def collection(self) -> Collection:
        """Return a collection that takes the same updates."""
        return Collection(
            self.run,
            self.round,
            self.cohort,
            specs_from_forms(self.update),
            {agent: Accepted(digest, samples, {}) for agent, (digest, samples) in self.accepted.items()},
            {agent: Rejection(reason) for agent, reason in self.rejected.items()},
            objection=method_of(self.about, self.values, "objection").objection,
            joining=self.joining,
            extras=specs_from_forms(self.extras),
        )


def method_of(about: OfMethod, values: MethodValues, *functions: str) -> Method:
    """Return a run's method: its class where it has one of these functions of its own, else its values alone.

    The values are enough for most methods, and load no torch.
    """
    if set(functions) & set(values.own):
        return methods.create(about.method, about.params)
    return Described(values)


def write_round(folder: Path, content: OpenRound) -> str:
    """Write what is collected now, remove what was before, and return the digest that names the file."""
    data = content.model_dump_json().encode()
    digest = hashlib.sha256(data).hexdigest()
    private_folder(folder)
    write_atomic(_path(folder, digest), data)
    for path in folder.glob("round-*.json"):
        if path != _path(folder, digest) and _FILE.fullmatch(path.name):
            path.unlink(missing_ok=True)
    return digest


def read_round(folder: Path, digest: str) -> OpenRound:
    """Return what is collected, from the file of this digest.

    Raises:
        StateError: The file is missing or damaged, or this process sees another folder than the coordinator.
    """
    path = _path(folder, digest)
    try:
        data = read_regular(path)
    except OSError as error:
        raise StateError(
            f"{path}: cannot be read: {cause(error)}; an aggregator needs the state folder of its coordinator, on "
            "the same machine or as a shared folder"
        ) from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise StateError(f"{path}: damaged, its SHA-256 is not the one that names it; restart the coordinator")
    try:
        return OpenRound.model_validate_json(data)
    except ValidationError as error:
        raise StateError(
            f"{path}: of another version; run aggregators and coordinator of the same version ({cause(error)[:200]})"
        ) from error


def partial_folder(folder: Path, aggregator: str) -> Path:
    """Return the folder of the updates that are on their way to one aggregator.

    Two processes must never write one file, and while a partition changes hands both take its updates. So each has a
    folder of its own, and what was under way begins again.
    """
    return folder / "partial" / aggregator


def _path(folder: Path, digest: str) -> Path:
    return folder / f"round-{digest}.json"
