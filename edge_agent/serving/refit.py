"""Fits the head again in a child process, because a fit takes memory and time. The previous head answers meanwhile.

The parent sends the configuration as JSON on stdin. The child fits, saves the head, and sends the outcome as JSON.
"""

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

SILENCE_LIMIT_S = 1800.0
"""Seconds after which a fit counts as hanging, and is killed. The child sends nothing before its end."""


@dataclass(frozen=True)
class Refit:
    """The outcome of a fit.

    Attributes:
        head: The name of the new head.
        held_out: How many held-out samples it was evaluated on.
        accuracy: Its accuracy on them, 0..1; None if there are none.
        compared: How many held-out samples both heads answered: those of classes that the previous head has.
        right_before: How many of these the previous head answers correctly.
        right_now: How many of these the new head answers correctly.
    """

    head: str
    held_out: int
    accuracy: float | None
    compared: int
    right_before: int
    right_now: int

    @property
    def is_worse(self) -> bool:
        """Whether the new head answers fewer of the same samples correctly than the previous one."""
        return self.right_now < self.right_before


def refit_in_child(config: AgentConfig) -> Refit:
    """Fit the head of a state folder again, in a child process, and save it as the one in use.

    Raises:
        StateError: Another program holds the state folder; if it is the device's agent, the agent fits the head itself.
        HeadwaterError: The samples do not suffice, or the child failed; the previous head stays in use.
        OSError: No process can be started.
    """
    request = {"config": config.model_dump(mode="json"), "path": sys.path, "parent": os.getpid()}
    watch = Watch(SILENCE_LIMIT_S, SILENCE_LIMIT_S)
    try:
        answer = answer_of_watched(__name__, child.__name__, request, lambda _line: None, watch)
    except ChildFailed as error:
        raise HeadwaterError(f"the head could not be fitted: {error}; the previous head stays in use") from error
    if answer["holder"]:
        raise StateError(answer["error"], holder=answer["holder"])
    if answer["error"]:
        raise HeadwaterError(answer["error"])
    return Refit(**answer["refit"])


def child() -> None:
    """Run as the child of `refit_in_child`: the request comes as JSON on stdin, the answer goes to stdout."""
    request = json.load(sys.stdin)
    stand_back(request["parent"])
    sys.path[:] = request["path"]  # a data source may be a function in a file of the device's owner
    config = AgentConfig.model_validate(request["config"])
    answer = _run_fit(lambda: _refit(config))
    sys.stdout.write(json.dumps({"answer": answer}) + "\n")


def _run_fit(fit: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Fit, and return the outcome or the error as a JSON object with ``refit``, ``error`` and ``holder``."""
    try:
        return {"refit": fit(), "error": "", "holder": ""}
    except StateError as error:
        return {"refit": None, "error": str(error)[:2000], "holder": error.holder or ""}
    except HeadwaterError as error:
        return {"refit": None, "error": str(error)[:2000], "holder": ""}


def _refit(config: AgentConfig) -> dict[str, Any]:
    """Fit the head, and return the fields of `Refit`."""
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
