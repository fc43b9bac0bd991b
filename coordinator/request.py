"""What somebody asked for when they started a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edge_agent.task import Task

from .config import WarmStartConfig


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

    def body(self) -> dict[str, Any]:
        """As JSON."""
        warm = None if self.warm_start is None else self.warm_start.model_dump(mode="json")
        return {**vars(self), "task": self.task.model_dump(mode="json"), "warm_start": warm}

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Request:
        """From JSON.

        Raises:
            KeyError: a field is missing.
            ValueError: the task is not one.
        """
        fields = {key: body[key] for key in ("method", "params", "rounds", "seed")}
        warm = body.get("warm_start")
        return cls(
            **fields,
            task=Task.model_validate(body["task"]),
            keep_every=int(body.get("keep_every", 0)),
            warm_start=None if warm is None else WarmStartConfig.model_validate(warm),
        )
