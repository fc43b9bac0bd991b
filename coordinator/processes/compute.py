"""Functions called in a child process, one at a time, beside the coordinator."""

from __future__ import annotations

import importlib
import json
import logging
import queue
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_agent.errors import HeadwaterError, RunFailed, cause

from .pipe import Frame, Pipe
from .supervisor import MAX_CRASHES, NO_LIMITS, ChildProcess, Limits, worker_command
from .worker_main import listen

log = logging.getLogger(__name__)

COMMAND = worker_command(f"{__name__}:serve")

Request = Mapping[str, Any]
"""JSON; ``do`` names the function (``module:name``), which gets the request and returns JSON."""


class ComputeProcess:
    """A child process for requests. It is started with the first one, and again after it has crashed."""

    def __init__(self, log_file: Path, limits: Limits = NO_LIMITS) -> None:
        self._log_file, self._limits = log_file, limits
        self._child: ChildProcess | None = None
        self._starting = threading.Lock()
        self._is_closed = False
        self._running: Request | None = None
        self._cancelled = deque[Request](maxlen=16)

    @property
    def pid(self) -> int | None:
        """Of the process, where there is one."""
        return None if self._child is None else self._child.pid

    def submit(self, request: Request) -> dict[str, Any]:
        """The result; waits for it, so call it in its own thread, with one request at a time.

        Raises:
            RunFailed: the function failed, the process crashed repeatedly, or the request was cancelled.
        """
        self._running, reason = request, ""
        try:
            for _ in range(MAX_CRASHES):
                try:
                    with self._starting:
                        self._check_is_wanted(request)
                        if self._child is None:
                            self._child = ChildProcess(COMMAND, self._log_file, self._limits)
                        pipe = self._child.pipe
                    pipe.send("request", json.dumps(request).encode())
                    frame = pipe.receive()
                    result: dict[str, Any] = json.loads(frame.payload)
                except (EOFError, OSError, ValueError) as error:
                    reason = self._on_exit() or cause(error)
                    log.warning("compute_process_exited reason=%s", reason)
                    continue
                if frame.topic == "failed":
                    raise RunFailed(str(result["message"]))
                return result
            with self._starting:
                self._check_is_wanted(request)
            raise RunFailed(f"the compute process crashed {MAX_CRASHES} times, the last time with {reason}")
        finally:
            self._running = None

    def cancel(self, request: Request) -> None:
        """Cancel this request (the same object), also while it runs; `submit` then fails."""
        with self._starting:  # a process that is just being started is killed as soon as it is there
            self._cancelled.append(request)
            if self._running is request and self._child is not None:
                self._child.kill()

    def close(self) -> None:
        """End the process, whatever it does."""
        with self._starting:
            self._is_closed = True
            if self._child is not None:
                self._child.kill()
        if self._running is None:  # otherwise `submit` notices
            self._on_exit()

    def _check_is_wanted(self, request: Request) -> None:
        """Called under ``_starting``."""
        if self._is_closed or any(request is one for one in self._cancelled):
            raise RunFailed("request cancelled")

    def _on_exit(self) -> str:
        """Release the process; why it exited, empty where there was none."""
        child, self._child = self._child, None
        if child is None:
            return ""
        reason = child.exit_reason()
        child.close()
        return reason


def serve(pipe: Pipe) -> None:
    """The child: call the function of each request, and send what it returns or why it failed."""
    frames = queue.SimpleQueue[Frame]()
    listen(pipe, frames.put)
    while True:
        request = json.loads(frames.get().payload)
        try:
            module, _, name = request["do"].partition(":")
            topic, result = "result", getattr(importlib.import_module(module), name)(request)
        except Exception as error:
            if not isinstance(error, HeadwaterError):
                log.exception("compute_failed")
            message = str(error) if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {cause(error)}"
            topic, result = "failed", {"message": message}
        pipe.send(topic, json.dumps(result).encode())
