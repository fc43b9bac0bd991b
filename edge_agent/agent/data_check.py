"""Whether local data and head fit a task, found out in a child process: its imports would stay in an idle agent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pydantic import ValidationError

from ..core import errors
from ..core.children import answer_of_child
from ..core.config import AgentConfig, own_methods
from ..core.errors import HeadwaterError, StateError, UsageError
from ..core.storage import read_json, write_json
from ..core.task import Task
from ..privacy.policy import check_policy

LIMIT_S = 600.0
"""The child may take so long."""

LAST_TASK = "last-task.json"
"""File in the state folder: the task that a coordinator named last. It may be removed at any time."""

_KINDS = {kind.__name__: kind for kind in (errors.DataError, errors.MissingCapability, errors.StateError)}


def check(config: AgentConfig, task: Task | None = None) -> None:
    """Return quietly when the data are there, are of the task's form and classes, and the head is known.

    No image is decoded; labels and names of classes are read where there is a task.

    Raises:
        HeadwaterError: they are not; as `edge_agent.data.load` says it.
    """
    from .. import heads
    from ..data.partition import check_own

    check_policy(config.privacy, own_methods(config.training))
    heads.check(config.head.name, config.head.params)
    check_own(config.data, config.id, task, own_classes=config.head.own_classes)


def note_task(state: Path, task: Task) -> None:
    """Write down which task a coordinator has named, so that 'edge-agent doctor' can compare the local data with it.

    Raises:
        OSError: the state folder cannot be written.
    """
    write_json(state / LAST_TASK, task.model_dump(mode="json"), durable=False)


def last_task(state: Path) -> Task | None:
    """Return the task that a coordinator named last, else that of the bundle in use; None where neither is there.

    Raises:
        StateError: the file cannot be read.
        BundleError: the manifest of the bundle in use cannot be read.
    """
    from ..bundle.installed import current_manifest

    if not state.is_dir():
        return None
    noted = read_json(state / LAST_TASK)
    if noted is not None:
        try:
            return Task.model_validate(noted)
        except ValidationError as error:
            raise StateError(f"{state / LAST_TASK}: holds no task; remove it, it is sent again") from error
    if not (state / "bundles").is_dir():
        return None
    manifest = current_manifest(state / "bundles")
    return None if manifest is None else manifest.task


def check_beside(config: AgentConfig, task: Task) -> None:
    """Run `check` in a child process.

    Raises:
        DataError: the data do not fit.
        MissingCapability: a package that they need is not here.
        UsageError: head or source cannot be as they are configured.
        StateError: the child has failed.
    """
    question = {"config": config.model_dump(mode="json"), "task": task.model_dump(mode="json")}
    try:
        result = answer_of_child(__name__, main.__name__, question, LIMIT_S)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise StateError(f"the check of local data has failed: {errors.cause(error)}") from error
    if result:
        raise _KINDS.get(result["error"], UsageError)(result["message"])


def main() -> None:
    """Run as the child: configuration and task come as JSON on stdin, what is wrong goes to stdout."""
    question = json.load(sys.stdin)
    try:
        check(AgentConfig.model_validate(question["config"]), Task.model_validate(question["task"]))
        result = {}
    except HeadwaterError as error:
        result = {"error": type(error).__name__, "message": str(error)[:4000]}
    sys.stdout.write(json.dumps(result) + "\n")
