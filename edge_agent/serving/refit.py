"""A head that is fitted again while the one before answers: in a process beside, because it takes memory and time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.children import Watch, answer_of_watched
from ..core.config import AgentConfig
from ..core.errors import ChildFailed, HeadwaterError, StateError
from ..core.limits import stand_back
from ..core.locks import folder_lock

SILENT_S = 1800.0
"""Without its end for so long a fit hangs; nothing is said meanwhile."""


@dataclass(frozen=True)
class Refit:
    """What came of a fit.

    Attributes:
        head: The name of the new head.
        held_out: How many held-out samples it was scored on.
        accuracy: Its accuracy on them, 0..1; None where there are none.
        compared: Held-out samples of the classes that the head before knew.
        right_before: How many of these the head before answers right.
        right_now: How many of these the new one answers right.
    """

    head: str
    held_out: int
    accuracy: float | None
    compared: int
    right_before: int
    right_now: int

    @property
    def is_worse(self) -> bool:
        """Whether the head before answers more of the same samples right."""
        return self.right_now < self.right_before


def refit_beside(config: AgentConfig) -> Refit:
    """Fit the head of a state folder again, in a child process, and put it in use.

    Raises:
        StateError: Another program holds the state folder; if it is the agent of the device, it fits the head itself.
        HeadwaterError: The samples do not suffice, or the process failed; the head in use stays.
        OSError: No process can be started.
    """
    question = {"config": config.model_dump(mode="json"), "path": sys.path, "parent": os.getpid()}
    watch = Watch(SILENT_S, SILENT_S)
    try:
        answer = answer_of_watched(__name__, child.__name__, question, lambda _line: None, watch)
    except ChildFailed as error:
        raise HeadwaterError(f"the head could not be fitted: {error}; the one before answers on") from error
    if answer["holder"]:
        raise StateError(answer["error"], holder=answer["holder"])
    if answer["error"]:
        raise HeadwaterError(answer["error"])
    return Refit(**answer["refit"])


def child() -> None:
    """Run as the child of `refit_beside`: its question comes as JSON on stdin, the answer goes to stdout."""
    question = json.load(sys.stdin)
    stand_back(question["parent"])
    sys.path[:] = question["path"]  # data may come from a function of the owner's
    config = AgentConfig.model_validate(question["config"])
    answer = _answer(lambda: _refit(config))
    sys.stdout.write(json.dumps({"answer": answer}) + "\n")


def _answer(fit: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what came of a fit, or the error of ours that ended it, as JSON."""
    try:
        return {"refit": fit(), "error": "", "holder": ""}
    except StateError as error:
        return {"refit": None, "error": str(error)[:2000], "holder": error.holder or ""}
    except HeadwaterError as error:
        return {"refit": None, "error": str(error)[:2000], "holder": ""}


def _refit(config: AgentConfig) -> dict[str, Any]:
    """Fit the head and return the fields of `Refit`."""
    from ..agent.head_tier import refit

    with folder_lock(config.state, "edge-agent serve"):
        refitted = refit(config, compare=True)
    result = refitted.result
    return {
        "head": result.title,
        "held_out": result.n_test,
        "accuracy": result.used_accuracy,
        "compared": len(refitted.classes),
        "right_before": int(refitted.right_before.sum()),
        "right_now": int(refitted.right_now.sum()),
    }
