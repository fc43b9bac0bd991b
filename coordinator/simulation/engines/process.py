"""One worker process as its owner sees it: started, given work, listened to, and ended."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...hosted.ending import cause_of_death
from ...processes.launch import command
from .areas import Area
from .line import Line

PATIENCE_S = 3.0
"""How long a worker may take to vanish after it has been told to."""

COMMAND = command("coordinator.simulation.engines.worker")


class WorkerProcess:
    """A process that computes. Its standard input is its lifeline: when that ends, so does the worker, at once."""

    def __init__(self, number: int, folder: Path, environment: Mapping[str, str]) -> None:
        self.number = number
        self._log = folder / f"worker-{number}.log"
        ours, theirs = socket.socketpair()
        self.line = Line(ours)
        with theirs, self._log.open("wb") as words:
            self._process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=words,
                stderr=words,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment},
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, words: Mapping[str, Any], areas: Sequence[Area] = ()) -> None:
        """Say something; a worker that is gone does not hear it, and shows that when it is listened to."""
        with contextlib.suppress(OSError):
            self.line.send(words, areas)

    def end(self) -> None:
        """Make it vanish, whatever it does."""
        self._process.kill()
        self._process.wait()
        self.line.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def died_of(self) -> str:
        """How a worker that is gone has ended, in words."""
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:  # it hung up and lives on: nobody will ever hear of it again
            self._process.kill()
            code = self._process.wait()
        return cause_of_death(code, self._log)
