"""A pass over a part of a round's updates, as files in the shared folder: the request, and the answer beside it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent.core.errors import StateError, TensorsError, cause
from edge_agent.core.storage import mapped, private_folder, read_regular, sweep, write_atomic
from edge_agent.core.task import Frozen, State
from edge_agent.methods import Update
from edge_agent.wire.tensors import decode, pieces

from ..rounds.bounds import Measure, SumBounded
from ..rounds.compute_requests import MethodValues, OfMethod
from ..rounds.directions import MultiplyChanges, SumOfChanges
from ..rounds.partitioned import UpdatesOfRound
from ..rounds.passes import Answer, Origin, Packet, Pass, PassValues
from ..state.store import BlobStore
from .open_round import method_of

PASSES: dict[str, type[Pass[Any]]] = {kind.name: kind for kind in (Measure, SumOfChanges, MultiplyChanges, SumBounded)}
"""The passes that aggregators make, by their names in requests."""

_FILE = re.compile(r"pass-([0-9a-f]{32})\.(request|answer)")


class PassRequest(Frozen):
    """Which pass is made over which updates."""

    name: str
    about: OfMethod
    values: MethodValues
    state: str
    start: str | None
    accepted: dict[str, tuple[str, float]]
    """Agent -> digest of its update, and its sample count."""


class _Requested(PassValues):
    """The values of a request beside those of the pass."""

    request: PassRequest


@dataclass(frozen=True)
class PassFiles:
    """The files of the passes, in the folder that coordinator and aggregators share."""

    folder: Path

    def write_request(self, request: str, one_pass: Pass[Any], updates: UpdatesOfRound, agents: Sequence[str]) -> None:
        """Write a request for a pass over the updates of these agents."""
        content = PassRequest(
            name=one_pass.name,
            about=OfMethod(method=updates.about.method, params=updates.about.params),
            values=updates.values,
            state=updates.state,
            start=updates.start,
            accepted={agent: updates.accepted[agent] for agent in agents},
        )
        packet = one_pass.to_packet(agents).with_values(_Requested(request=content))
        private_folder(self.folder)
        write_atomic(self._path(request, "request"), *pieces(packet.to_tensors()))

    def read_answer(self, request: str, one_pass: Pass[Answer], agents: Sequence[str]) -> Answer:
        """Return the answer to a request for a pass over the updates of these agents.

        Raises:
            StateError: It cannot be read.
            TensorsError: It is damaged, or about other updates.
        """
        # Mapped: answers are several times as large as a model, and nobody else removes them.
        answer = one_pass.unpack(self._read(request, "answer", mapped))
        if not one_pass.covers(answer, agents):
            path = self._path(request, "answer")
            raise TensorsError(f"{path}: the answer is not about the {len(agents)} updates that were asked for")
        return answer

    def remove(self, request: str) -> None:
        """Remove a request and its answer."""
        for kind in ("request", "answer"):
            self._path(request, kind).unlink(missing_ok=True)

    def remove_others(self, requests: Collection[str] = ()) -> None:
        """Remove all but these requests and their answers: what an earlier process has left, and what came too late."""
        for path in self.folder.glob("pass-*"):
            match = _FILE.fullmatch(path.name)
            if match is not None and match[1] not in requests:
                path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what was left of files whose writers have ended; nobody may be writing here now."""
        sweep(self.folder)

    def make(self, request: str, blobs: BlobStore) -> None:
        """Make the pass that a request asks for, and write the answer.

        Raises:
            StateError: The request or an update cannot be read, or is of another version.
            TensorsError: One of them is damaged.
            TrainingFailed: The method objects.
        """
        packet = self._read(request, "request", read_regular)
        try:
            content = packet.values_as(_Requested).request
            one_pass = PASSES[content.name].from_packet(packet)
        except (KeyError, TensorsError) as error:
            raise StateError(
                f"{self._path(request, 'request')}: of another version; run aggregators and coordinator of the same "
                f"version ({cause(error)[:200]})"
            ) from error
        origin = _origin_of(content, blobs)
        answer = one_pass.over(origin, _updates_of(content, blobs))
        write_atomic(self._path(request, "answer"), *pieces(one_pass.pack(answer).to_tensors()))

    def _read(self, request: str, kind: str, read: Callable[[Path], bytes | memoryview]) -> Packet:
        path = self._path(request, kind)
        try:
            return Packet.from_tensors(decode(read(path)))
        except OSError as error:
            raise StateError(
                f"{path}: cannot be read: {cause(error)}; coordinator and aggregators need one state folder"
            ) from error

    def _path(self, request: str, kind: str) -> Path:
        return self.folder / f"pass-{request}.{kind}"


def _updates_of(content: PassRequest, blobs: BlobStore) -> Iterator[Update]:
    """Yield the updates in the order of agent ids, each mapped when its turn comes."""
    for agent, (digest, samples) in sorted(content.accepted.items()):
        yield Update(agent, samples, decode(_mapped(blobs, digest)))


def _mapped(blobs: BlobStore, digest: str) -> memoryview:
    path = blobs.path(digest)
    try:
        return mapped(path)
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {cause(error)}; aggregators need the coordinator's blobs") from error


def _origin_of(content: PassRequest, blobs: BlobStore) -> Origin:
    """Return what the updates of a request are changes of; the last one stays in memory, for the next pass."""
    return _origin(content.model_copy(update={"accepted": {}, "name": ""}).model_dump_json(), blobs.folder)


@functools.lru_cache(maxsize=1)
def _origin(about: str, folder: Path) -> Origin:
    content = PassRequest.model_validate_json(about)
    blobs = BlobStore(folder)
    method = method_of(content.about, content.values, "fold", "broadcast")
    state: State = decode(_mapped(blobs, content.state))
    start = None if content.start is None else decode(_mapped(blobs, content.start))
    return Origin(method, method.broadcast(state), start)
