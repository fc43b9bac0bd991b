"""Functions called in a child process, one at a time, beside the coordinator.

The coordinator itself never loads torch: whatever needs it is such a function, and the child ends when nothing has been
asked of it for a while.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from edge_agent.core import errors
from edge_agent.core.errors import HeadwaterError, RunFailed, cause

from .pipe import Frame, Pipe
from .supervisor import MAX_CRASHES, NO_LIMITS, ChildProcess, Limits, worker_command
from .worker_main import listen

log = logging.getLogger(__name__)

COMMAND = worker_command(f"{__name__}:serve")

IDLE_S = 60.0
"""How long a child without a request stays: rounds of a run follow each other faster, runs do not."""

Request = Mapping[str, Any]
"""JSON, as the pipe to the child process carries it; ``do`` names the function (``module:name``), which returns JSON.

Which fields a request has is a matter of the function: `coordinator.rounds.compute_requests` has their classes.
"""


class Compute(Protocol):
    """Calls the functions of requests."""

    is_here: bool
    """Whether that happens in this process, which then knows methods' classes itself."""

    def submit(self, request: Request, limit_s: float | None = None) -> dict[str, Any]:
        """Wait for the result of a request, and return it.

        Args:
            request: The request; requests of several threads wait for each other.
            limit_s: Seconds that a child may take, from the end of the requests before it; None: any.

        Raises:
            HeadwaterError, OSError: The error of the function.
            RunFailed: It raised another error, it took too long, its process crashed repeatedly, or it was cancelled.
        """

    def cancel(self, request: Request) -> None:
        """Cancel this request (the same object), also while it runs; `submit` then fails."""

    def end_if_idle(self) -> None:
        """End a child process of which nothing has been asked for a while."""

    def close(self) -> None:
        """End the child process, whatever it does."""


class InlineCompute:
    """Calls the functions at once, in this process, which loads torch: for simulation and tests."""

    is_here = True

    def submit(self, request: Request, limit_s: float | None = None) -> dict[str, Any]:  # noqa: ARG002 - as the contract
        """Return the result; any error is raised as it is."""
        return _call(request)

    def cancel(self, request: Request) -> None:
        """Nothing runs meanwhile."""

    def end_if_idle(self) -> None:
        """There is no child."""

    def close(self) -> None:
        """There is no child."""


class ComputeProcess:
    """`Compute` by a child process: started with a request, ended when idle, and started again after a crash."""

    is_here = False

    def __init__(
        self,
        log_file: Path,
        limits: Limits = NO_LIMITS,
        setup: tuple[str, ...] = (),
        *,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the process, which the first request starts.

        Args:
            log_file: The file for its output.
            limits: The limits of its memory, time and threads.
            setup: Functions (``module:name``) that it calls first.
            idle_s: Seconds without a request after which it is ended.
            clock: Seconds of a clock that never goes back.
        """
        self._log_file = log_file
        self._limits = limits
        self._setup = setup
        self._idle_s = idle_s
        self._clock = clock
        self._used_at = clock()
        self._child: ChildProcess | None = None
        self._asking = threading.Lock()
        self._starting = threading.Lock()
        self._is_closed = False
        self._running: Request | None = None
        self._cancelled = deque[Request](maxlen=16)

    @property
    def pid(self) -> int | None:
        """The id of the process; None while there is none."""
        return None if self._child is None else self._child.pid

    def submit(self, request: Request, limit_s: float | None = None) -> dict[str, Any]:
        """Run the function of a request in the child process; see `Compute.submit`."""
        with self._asking:
            self._running = request
            try:
                return self._submit(request, limit_s)
            finally:
                self._running = None
                self._used_at = self._clock()

    def _submit(self, request: Request, limit_s: float | None) -> dict[str, Any]:
        """Send a request, and once more after each crash, until it is answered.

        Raises:
            RunFailed: It took too long, the process crashed too often, or the request was cancelled.
        """
        reason = ""
        for _ in range(MAX_CRASHES):
            try:
                with self._starting:
                    self._check_is_wanted(request)
                    child = self._child
                    if child is None:
                        child = ChildProcess((*COMMAND, *self._setup), self._log_file, self._limits)
                        self._child = child
                child.pipe.send("request", json.dumps(request).encode())
                if not child.pipe.wait(limit_s):
                    child.kill()
                    self._on_exit()
                    raise RunFailed(f"{request['do']}: no result within {limit_s:g} s; the compute process was killed")
                frame = child.pipe.receive()
                result: dict[str, Any] = json.loads(frame.payload)
            except (EOFError, OSError, ValueError) as error:
                reason = self._on_exit() or cause(error)
                log.warning("compute_process_exited reason=%s", reason)
                continue
            if frame.topic == "failed":
                raise error_from(result)
            return result
        with self._starting:
            self._check_is_wanted(request)
        raise RunFailed(f"the compute process crashed {MAX_CRASHES} times, the last time with {reason}")

    def cancel(self, request: Request) -> None:
        """Cancel a request, and kill the process if it works on that one; see `Compute.cancel`."""
        with self._starting:  # a process that is just being started is killed as soon as it is there
            self._cancelled.append(request)
            if self._running is request and self._child is not None:
                self._child.kill()

    def end_if_idle(self) -> None:
        """End the process if nothing was asked of it for a while; it is not waited for."""
        if self._child is None or not self._asking.acquire(blocking=False):
            return
        try:
            if self._clock() - self._used_at >= self._idle_s:
                self._drop()
        finally:
            self._asking.release()

    def close(self) -> None:
        """End the process, whatever it does; later requests are cancelled."""
        with self._starting:
            self._is_closed = True
            if self._child is not None:
                self._child.kill()
        if self._running is None:  # otherwise `submit` notices
            self._drop()

    def _check_is_wanted(self, request: Request) -> None:
        """Require that a request was not cancelled; the caller holds ``_starting``.

        Raises:
            RunFailed: It was, or this object is closed.
        """
        if self._is_closed or any(request is cancelled for cancelled in self._cancelled):
            raise RunFailed("request cancelled")

    def _on_exit(self) -> str:
        """Release the process, and return why it exited; empty where there was none."""
        reason = "" if self._child is None else self._child.exit_reason()
        self._drop()
        return reason

    def _drop(self) -> None:
        """Kill the process if it still runs, and release it."""
        child = self._child
        self._child = None
        if child is not None:
            child.close()


def serve(pipe: Pipe, *setup: str) -> None:
    """Run as the child: call the function of each request, and send what it returns or why it failed."""
    frames = queue.SimpleQueue[Frame]()
    listen(pipe, frames.put)
    for name in setup:
        _named(name)()
    while True:
        try:
            topic = "result"
            result = _call(json.loads(frames.get().payload))
        except Exception as error:
            if not isinstance(error, HeadwaterError | OSError):
                log.exception("compute_failed")
            topic = "failed"
            result = described_error(error)
        pipe.send(topic, json.dumps(result).encode())


def _named(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    result: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return result


def _call(request: Request) -> dict[str, Any]:
    result: dict[str, Any] = _named(request["do"])(request)
    return result


def described_error(error: Exception) -> dict[str, Any]:
    """Return an error as JSON, for `error_from` in another process."""
    if isinstance(error, OSError) and error.errno is not None:
        filename = None if error.filename is None else str(error.filename)
        return {"errno": error.errno, "message": error.strerror or "", "filename": filename}
    if isinstance(error, HeadwaterError):
        return {
            "kind": type(error).__name__,
            "message": str(error),
            "is_public": error.is_public,
            "public_message": error.public_message,
        }
    return {"kind": "", "message": f"{type(error).__name__}: {cause(error)}"}


def error_from(fields: Mapping[str, Any]) -> HeadwaterError | OSError:
    """Return the error of another process; for a class that needs more than a message, one of its nearest base."""
    if "errno" in fields:
        return OSError(fields["errno"], fields["message"], fields["filename"])
    kind: type[HeadwaterError] = getattr(errors, fields["kind"] or "RunFailed", RunFailed)
    base = next(base for base in kind.__mro__ if issubclass(base, HeadwaterError) and _takes_message_alone(base))
    error = base(fields["message"])
    # What the coordinator may read of it is what it might have read there.
    error.is_public = fields.get("is_public", False)
    error.public_message = fields.get("public_message")
    return error


def _takes_message_alone(kind: type[HeadwaterError]) -> bool:
    """Return whether an error of this class can be made from its message."""
    try:
        inspect.signature(kind).bind("message")
    except TypeError:
        return False
    return True
