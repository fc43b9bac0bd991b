"""A file in the state folder by which `edge-agent status` finds the server that answers for a device.

The server also holds a lock there. The system releases it when the process ends, however it ends. The file counts only
while the lock is held, so a server that has ended is never shown as running.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pydantic import Field

from ..core.errors import HeadwaterError, cause
from ..core.locks import lock_holder, shared_folder_lock
from ..core.storage import read_json, write_json
from ..core.task import Frozen

log = logging.getLogger(__name__)


class SourceRecord(Frozen):
    """What is recorded of a source, such as a camera."""

    name: str = Field(max_length=4096, description="name of the source, without passwords")
    condition: str = Field(max_length=64, description="starting, ok, lost, frozen or ended")
    since: float = Field(ge=0, description="when the condition began, in seconds since 1970")
    reason: str = Field("", max_length=4096, description="the cause of the condition, for people")


class RunningServer(Frozen):
    """The record of a server."""

    url: str = Field(max_length=4096, description="URL of the server, without the token")
    since: float = Field(ge=0, description="when the server started, in seconds since 1970")
    sources: tuple[SourceRecord, ...] = Field((), max_length=1000, description="cameras and other sources")


class Announcement:
    """The record of a server while it runs."""

    def __init__(self, file: Path | None, server: RunningServer) -> None:
        """Write the record of ``server`` to ``file``; None: no record is kept."""
        self._file = file
        self._server = server
        self._lock = threading.Lock()
        self._write()

    def show_sources(self, sources: Iterable[SourceRecord]) -> None:
        """Write the states of the sources into the record."""
        with self._lock:
            self._server = self._server.model_copy(update={"sources": tuple(sources)})
            self._write()

    def _write(self) -> None:
        """Write the record; a full disk is no reason to stop answering."""
        if self._file is None:
            return
        try:
            write_json(self._file, self._server.model_dump(mode="json"))
        except OSError as error:
            log.warning("server_not_announced reason=%s", cause(error))


@contextlib.contextmanager
def announced(state: Path | None, url: str, now: Callable[[], float] = time.time) -> Iterator[Announcement]:
    """Keep the record of a server while the context lasts.

    Args:
        state: The state folder of the device; None: there is none, and no record is kept.
        url: The URL of the server, without the token.
        now: Returns seconds since 1970.

    Yields:
        The record, for the states of sources.
    """
    server = RunningServer(url=url, since=now())
    with contextlib.ExitStack() as stack:
        file = None
        if state is not None:
            try:
                folder = _folder(state)
                stack.enter_context(shared_folder_lock(folder, "edge-agent serve"))
                file = folder / _RECORD
            # Another server answers for this device, or its folder cannot be written. Both may answer.
            except HeadwaterError as error:
                log.info("server_not_announced reason=%s", error)
            except OSError as error:
                log.warning("server_not_announced reason=%s", cause(error))
        yield Announcement(file, server)


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
