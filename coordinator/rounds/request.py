"""The request of a run: method, parameters, rounds, seed, task, and the weights that it starts with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from edge_agent.core.errors import WeightsError, cause
from edge_agent.core.registry import PinnedFile
from edge_agent.core.storage import sha256_file
from edge_agent.core.task import Frozen, Task

from ..config import WarmStartConfig
from ..journal.entries import RunRequested
from ..text import listed

if TYPE_CHECKING:
    from edge_agent.training.parts import Parts

log = logging.getLogger(__name__)


class Weights(Frozen):
    """A file of initial encoder weights, and its hash when the run was requested."""

    path: Path
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Weights:
        """Return the file with its current hash.

        Raises:
            WeightsError: The file cannot be read.
        """
        try:
            if path.exists() and not path.is_file():
                raise WeightsError(f"{path}: is not a file; give a safetensors file of weights, or a bundle")
            return cls(path=path.absolute(), sha256=sha256_file(path))
        except OSError as error:
            raise WeightsError(
                f"{path}: cannot be read ({cause(error)}); give a safetensors file of weights, or a bundle"
            ) from error

    def load_into(self, model: Parts) -> None:
        """Load the weights into the model's encoder.

        Raises:
            WeightsError: The file is missing or has changed, or does not contain this encoder.
        """
        from edge_agent.training.weights import put_weights, read_weights

        if Weights.of(self.path).sha256 != self.sha256:
            raise WeightsError(
                f"{self.path}: has changed since the run was requested; restore it, or request a new run"
            )
        weights, left_out = read_weights(model.encoder, self.path)
        put_weights(model, weights)
        log.info("weights_loaded path=%s left_out=%s", self.path, listed(left_out, "-"))


@dataclass(frozen=True)
class Request:
    """What a run was requested with: what follows from a `coordinator.journal.entries.RunRequested`."""

    method: str
    params: dict[str, Any]
    rounds: int
    seed: int
    task: Task
    keep_every: int = 0
    """Retain the checkpoints after every so many rounds; 0: the newest only."""

    keep_updates: bool = False
    """Retain the updates and checkpoints of all rounds."""

    warm_start: WarmStartConfig | None = None
    """Training of the encoder at the coordinator before the first round."""

    weights: Weights | None = None
    """Initial weights of the encoder, before a warm start; None: initialised from the seed."""

    method_file: str = ""
    """The method's own file as text (`edge_agent.core.registry.PinnedFile`); empty where the method is installed."""

    @property
    def method_reference(self) -> str:
        """What `edge_agent.methods.create` takes for the method, in every process on this machine."""
        return self.method_file or self.method

    @property
    def method_sha256(self) -> str:
        """Hash of the method's file, which agents compare with that of theirs; empty: it is installed."""
        pinned = PinnedFile.parse(self.method_file)
        return "" if pinned is None else pinned.sha256

    def body(self) -> dict[str, Any]:
        """Return the request as JSON."""
        body: dict[str, Any] = _REQUEST.dump_python(self, mode="json")
        return body

    def to_fact(self) -> RunRequested:
        """Return the request for an entry of the journal."""
        return RunRequested(**self.body())

    @classmethod
    def from_fact(cls, fact: RunRequested) -> Request:
        """Return the request in an entry of the journal.

        Raises:
            ValueError: A field is missing or invalid.
        """
        return _REQUEST.validate_python(fact.to_body())


_REQUEST = TypeAdapter(Request)
