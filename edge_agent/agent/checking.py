"""Whether local data and head fit a task, found in a process of its own: an idle agent does without what it loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from .. import errors
from ..config import AgentConfig
from ..errors import HeadwaterError, StateError, UsageError
from ..task import Task

LIMIT_S = 600.0
_BEGIN = (
    "import sys; sys.path[:1] = [place for place in sys.path[:1] if place]; sys.path.append(sys.argv.pop(1)); "
    "from edge_agent.agent.checking import answer; answer()"
)
_ROOT = str(Path(__file__).resolve().parents[2])
_KINDS = {kind.__name__: kind for kind in (errors.DataError, errors.MissingCapability, errors.StateError)}


def check(config: AgentConfig, task: Task | None = None) -> None:
    """Return quietly when the data are there, are of the task's form and classes, and the head is known.

    No image is decoded; labels and names of classes are read where there is a task.

    Raises:
        HeadwaterError: they are not; as `edge_agent.data.load` says it.
    """
    from .. import heads
    from ..data.partition import check_own

    heads.create(config.head.name, config.head.params)
    check_own(config.data, config.id, task)


def check_beside(config: AgentConfig, task: Task) -> None:
    """`check` in a child process.

    Raises:
        DataError: the data do not fit.
        MissingCapability: a package that they need is not here.
        UsageError: head or source cannot be as they are configured.
        StateError: the child did not end well.
    """
    asked = json.dumps({"config": config.model_dump(mode="json"), "task": task.model_dump(mode="json")})
    try:
        done = subprocess.run(
            [sys.executable, "-c", _BEGIN, _ROOT],
            input=asked,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise StateError(f"the look at local data did not end well: {errors.cause(error)}") from error
    if result:
        raise _KINDS.get(result["error"], UsageError)(result["message"])


def answer() -> None:
    """The child: configuration and task come as JSON on stdin, what is wrong goes to stdout."""
    asked = json.load(sys.stdin)
    try:
        check(AgentConfig.model_validate(asked["config"]), Task.model_validate(asked["task"]))
        result = {}
    except HeadwaterError as error:
        result = {"error": type(error).__name__, "message": str(error)[:4000]}
    sys.stdout.write(json.dumps(result) + "\n")
