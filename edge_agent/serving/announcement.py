"""A file in the state folder by which `edge-agent status` finds the server that answers for a device.

The server also holds a lock there. The system releases it when the process ends, however it ends. The file counts only
while the lock is held, so a server that has ended is never shown as running.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import Field

from ..core.errors import HeadwaterError, cause
from ..core.locks import lock_holder, shared_folder_lock
from ..core.storage import read_json, write_atomic
from ..core.task import Frozen

log = logging.getLogger(__name__)


class RunningServer(Frozen):
    """The address of a running server, and when it started."""

    url: str = Field(max_length=4096, description="address of the server, without the token")
    since: float = Field(ge=0, description="seconds since 1970 at which it started")


@contextlib.contextmanager
def announced(state: Path | None, url: str, now: Callable[[], float] = time.time) -> Iterator[None]:
    """Announce that a server answers at ``url``, while the context lasts.

    Args:
        state: The state folder of the device; None: there is none, and nothing is announced.
        url: The address of the server, without the token.
        now: Returns seconds since 1970.
    """
    if state is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            folder = _folder(state)
            stack.enter_context(shared_folder_lock(folder, "edge-agent serve"))
            content = RunningServer(url=url, since=now()).model_dump(mode="json")
            write_atomic(folder / _RECORD, json.dumps(content).encode())
        # Another server answers for this device, or the disk is full. This one still serves, without an announcement.
        except HeadwaterError as error:
            log.info("server_not_announced reason=%s", error)
        except OSError as error:
            log.warning("server_not_announced reason=%s", cause(error))
        yield


def find_server(state: Path) -> RunningServer | None:
    """Return the server that answers for a device now; None if none does, or its record cannot be read."""
    folder = _folder(state)
    try:
        if lock_holder(folder) is None:
            return None
        content = read_json(folder / _RECORD)
        return None if content is None else RunningServer.model_validate(content)
    except (HeadwaterError, OSError, ValueError):
        return None


_RECORD = "server.json"
"""Name of the file with a `RunningServer`."""


def _folder(state: Path) -> Path:
    """Return the folder of the record and its lock."""
    return state / "serve"
