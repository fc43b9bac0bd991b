"""What somebody asked for when they started a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_agent.errors import WeightsError, cause
from edge_agent.storage import sha256_file
from edge_agent.task import Frozen, Task

from ..config import WarmStartConfig
from ..text import listed

if TYPE_CHECKING:
    from edge_agent.models.base import Parts

log = logging.getLogger(__name__)


class Weights(Frozen):
    """A file that the encoder begins with, as it was when it was asked for."""

    path: Path
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Weights:
        """The file as it is now.

        Raises:
            WeightsError: it cannot be read.
        """
        try:
            if path.exists() and not path.is_file():
                raise WeightsError(f"{path}: is no file; give a safetensors file of weights")
            return cls(path=path.absolute(), sha256=sha256_file(path))
        except OSError as error:
            raise WeightsError(
                f"{path}: cannot be read ({cause(error)}); give a safetensors file of weights"
            ) from error

    def load_into(self, model: Parts) -> None:
        """Let the model's encoder begin with them.

        Raises:
            WeightsError: the file is gone or has changed, or does not hold this encoder.
        """
        from edge_agent.training.weights import put_weights, read_weights

        if Weights.of(self.path).sha256 != self.sha256:
            raise WeightsError(f"{self.path}: has changed since the run was asked for; bring it back, or ask anew")
        weights, left_out = read_weights(model.encoder, self.path)
        put_weights(model, weights)
        log.info("weights_loaded path=%s left_out=%s", self.path, listed(left_out, "-"))


@dataclass(frozen=True)
class Request:
    """What was asked for; the body of the journal's ``run_requested``."""

    method: str
    params: dict[str, Any]
    rounds: int
    seed: int
    task: Task
    keep_every: int = 0
    """The states after every so many rounds stay on disk when the run goes on; 0 = the newest only."""

    warm_start: WarmStartConfig | None = None
    """What the encoder learns at the coordinator before the first round."""

    weights: Weights | None = None
    """What the encoder begins with, before that; None: fresh from the seed."""

    def body(self) -> dict[str, Any]:
        """As JSON."""
        parts = {"task": self.task, "warm_start": self.warm_start, "weights": self.weights}
        return vars(self) | {
            name: None if part is None else part.model_dump(mode="json") for name, part in parts.items()
        }

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Request:
        """From JSON.

        Raises:
            KeyError: a field is missing.
            ValueError: the task is not one.
        """
        fields = {key: body[key] for key in ("method", "params", "rounds", "seed")}
        warm, weights = body.get("warm_start"), body.get("weights")
        return cls(
            **fields,
            task=Task.model_validate(body["task"]),
            keep_every=int(body.get("keep_every", 0)),
            warm_start=None if warm is None else WarmStartConfig.model_validate(warm),
            weights=None if weights is None else Weights.model_validate(weights),
        )
